// Rows of an int8 cache (docs/contract.md, "A small cache"); their meaning is kvexport/ops/small_cache.py, whose bits
// these are:
//
//   hadamard: for half = 1, 2, 4 .. of the largest power of two that divides the size: (a, b) = (b + a, a - b);
//             then times 1 / sqrt of that power
//   quantize: scale = bfloat16(max |x| / 127), 0 below 1e-30; number = round(x / scale)
#pragma once

#include <cmath>
#include <type_traits>

#include "simd.h"

namespace kv {
namespace KV_ISA {

template <class T>
constexpr bool kSmall = std::is_same<T, int8_t>::value;
// What a row of a cache of type T is computed with: a small cache's are float32 by then.
template <class T>
using Wide = typename std::conditional<kSmall<T>, float, T>::type;

static inline void hadamard(float* row, int size) {
  const int block = size & -size;
  if (block == 1) return;
  for (int half = 1; half < block; half *= 2)
    for (int i = 0; i < size; i += 2 * half)
      for (int j = i; j < i + half; ++j) {
        const float a = row[j], b = row[j + half];
        row[j] = b + a;
        row[j + half] = a - b;
      }
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  for (int i = 0; i < size; ++i) row[i] *= factor;
}

// Returns the scale; NaN where a number of the row is.
static inline float quantize(const float* row, int size, int8_t* to) {
  float largest = 0.0f;
  bool is_nan = false;
  for (int i = 0; i < size; ++i) {
    const float x = std::fabs(row[i]);
    is_nan |= x != x;
    largest = x > largest ? x : largest;
  }
  float scale = largest / 127.0f;
  uint32_t bits;
  memcpy(&bits, &scale, sizeof bits);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;  // to bfloat16, ties to even
  memcpy(&scale, &bits, sizeof bits);
  if (scale < 1e-30f) scale = 0.0f;
  const float divisor = scale > 0.0f ? scale : 1.0f;
  for (int i = 0; i < size; ++i) {
    float x = row[i] / divisor;
    x = x < 127.0f ? x : 127.0f;
    x = x > -127.0f ? x : -127.0f;
    to[i] = static_cast<int8_t>(static_cast<int>(x + 12582912.0f - 12582912.0f));  // rounds ties to even
  }
  return is_nan ? NAN : scale;
}

static inline void dequantize(const int8_t* from, float scale, int size, float* to) {
  int i = 0;
  for (; i + W <= size; i += W) store(to + i, load(from + i) * scale);
  for (; i < size; ++i) to[i] = static_cast<float>(from[i]) * scale;
}

}  // namespace KV_ISA
}  // namespace kv
