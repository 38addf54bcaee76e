// Rows of a quantized cache (docs/reference/contract.md, "A quantized cache"). kvexport/ops/quantized_cache.py defines
// them; these functions give the same bits:
//
//   hadamard: for half = 1, 2, 4 .. below the largest power of two that divides the size: (a, b) = (b + a, a - b);
//             then times 1 / sqrt of that power
//   quantize: scale = bfloat16(max |x| / 127), 0 below 1e-30; number = round(x / scale); int4 stores the code of the
//             nearest of its sixteen numbers
#pragma once

#include <cmath>
#include <type_traits>

#include "simd.h"

namespace kv {
namespace KV_ISA {

template <class T>
constexpr bool kQuantized = std::is_same<T, int8_t>::value || std::is_same<T, int4>::value;
// The type in which kernels read a row of a cache of type T: float32 for a quantized cache.
template <class T>
using Wide = typename std::conditional<kQuantized<T>, float, T>::type;

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

// A table from every int8 number (plus 128) to the code of the nearest int4 number; a tie goes to the one nearer to 0.
struct Codes {
  uint8_t of[256] = {};
  constexpr Codes() {
    for (int number = -128; number < 128; ++number)
      for (int code = 1; code < 16; ++code) {
        uint8_t& best = of[number + 128];
        const int off = distance(kInt4[code], number), least = distance(kInt4[best], number);
        if (off < least || (off == least && distance(kInt4[code], 0) < distance(kInt4[best], 0)))
          best = static_cast<uint8_t>(code);
      }
  }
  static constexpr int distance(int a, int b) { return a < b ? b - a : a - b; }
};
constexpr Codes kCodes;

// Calls put(i, number) for every number of the quantized row, in order. Returns the scale, NaN if the row contains NaN.
template <class Put>
static inline float quantize_into(const float* row, int size, Put put) {
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
    put(i, static_cast<int>(x + 12582912.0f - 12582912.0f));  // rounds ties to even
  }
  return is_nan ? NAN : scale;
}

static inline float quantize(const float* row, int size, int8_t* to) {
  return quantize_into(row, size, [to](int i, int number) { to[i] = static_cast<int8_t>(number); });
}
static inline float quantize(const float* row, int size, int4* to) {
  return quantize_into(row, size, [to](int i, int number) {
    const int code = kCodes.of[number + 128], low = to[i / 2].two & 15;
    to[i / 2].two = static_cast<uint8_t>(i % 2 ? code << 4 | low : code);
  });
}

template <class T>
static inline void dequantize(const T* from, float scale, int size, float* to) {
  int i = 0;
  for (; i + W <= size; i += W) store(to + i, load(at(from, i)) * scale);
  for (; i < size; ++i) to[i] = element(from, i) * scale;
}

}  // namespace KV_ISA
}  // namespace kv
