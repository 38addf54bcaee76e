// Rows of a quantized cache (docs/reference/contract.md, "A quantized cache"): reading them, and storing them with the
// same bits as every backend (kvexport/ops/quantized_cache.py).
//
// Numbers of 8 or 4 bits are handled as bytes x + 128, four in a word. As the low byte of a 16-bit float 1024 + x, or
// of a 32-bit float 2^23 + x, one exact subtraction makes them floats. A row that is rotated or stored is in the
// registers of a warp: each lane has four neighbouring columns, then four of the next 128 columns, so that the
// butterflies of the Hadamard matrix are shuffles.
#pragma once

#include <type_traits>

#include "types.h"

namespace kv {
namespace cuda {

// The type of a cache in int8, int4 or k8v4, over which kernels compute in float32.
struct Quantized {};

// The type that kernels compute with.
template <class T>
struct WideOf {
  using Type = T;
};
template <>
struct WideOf<Quantized> {
  using Type = float;
};
template <class T>
using Wide = typename WideOf<T>::Type;
template <class T>
constexpr bool kQuantized = std::is_same<T, Quantized>::value;

KV_HD bool is_quantized(int type) { return type == KV_INT8 || type == KV_INT4 || type == KV_K8V4; }
// Bits of an element of a full-size type, and of keys and values of any cache type.
KV_HD int element_bits(int type) { return type == KV_FLOAT32 ? 32 : 16; }
KV_HD int key_bits(int type) { return !is_quantized(type) ? element_bits(type) : type == KV_INT4 ? 4 : 8; }
KV_HD int value_bits(int type) { return !is_quantized(type) ? element_bits(type) : type == KV_INT8 ? 8 : 4; }

// ---- numbers ----

constexpr uint32_t four_of(int code) {
  constexpr int kNumbers[16] = {KV_INT4_NUMBERS};
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(kNumbers[code + i] + 128) << 8 * i;
  return word;
}
constexpr uint32_t kCodes0 = four_of(0), kCodes4 = four_of(4), kCodes8 = four_of(8), kCodes12 = four_of(12);
constexpr uint32_t kSigns = 0x80808080;  // xor with it adds 128 to four int8 numbers, or subtracts it

// Selects four of the eight bytes of low and high: the i-th four bits of `which` are the number of byte i of the
// result.
KV_DEVICE uint32_t bytes_of(uint32_t low, uint32_t high, uint32_t which) {
#ifdef __CUDACC__
  uint32_t selected;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(selected) : "r"(low), "r"(high), "r"(which));
  return selected;
#else
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t selected = 0;
  for (int i = 0; i < 4; ++i) selected |= static_cast<uint32_t>(bytes >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return selected;
#endif
}

// Converts eight 4-bit codes, the first in the lowest bits, to numbers.
KV_DEVICE void numbers_of(uint32_t codes, uint32_t (&numbers)[2]) {
  const uint32_t place = codes & 0x77777777, half = (codes >> 1 & 0x44444444) | 0x32103210;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    numbers[i] = bytes_of(bytes_of(kCodes0, kCodes4, place >> 16 * i), bytes_of(kCodes8, kCodes12, place >> 16 * i),
                          half >> 16 * i);
}

// Returns two of four numbers, which `which` names, as 16-bit floats in a register.
constexpr uint32_t kFirstTwo = 0x4140, kLastTwo = 0x4342, kEven = 0x4240, kOdd = 0x4341;
KV_DEVICE uint32_t halves_of(uint32_t numbers, uint32_t which) {
  const uint32_t raised = bytes_of(numbers, 0x64646464, which);  // 1024 + x
#ifdef __CUDACC__
  uint32_t halves;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(raised), "r"(0x64806480));
  return halves;
#else
  uint32_t halves = 0;
  for (int i = 0; i < 2; ++i) {
    Half half{static_cast<uint16_t>(raised >> 16 * i)};
    assign(half, to_float(half) - 1152.0f);
    halves |= static_cast<uint32_t>(half.bits) << 16 * i;
  }
  return halves;
#endif
}

KV_DEVICE float float_of(uint32_t numbers, int i) {
  return bits_as<float>(0x4b000000u | (numbers >> 8 * i & 255)) - 8388736.0f;
}

// Returns four neighbouring numbers of a row; `column` is a multiple of four.
KV_DEVICE uint32_t four_numbers(const char* row, int bits, int column) {
  if (bits == 8) return *reinterpret_cast<const uint32_t*>(row + column) ^ kSigns;
  uint32_t numbers[2];
  numbers_of(*reinterpret_cast<const uint16_t*>(row + column / 2), numbers);
  return numbers[0];
}
// Returns the same four numbers times the row's scale, as floats.
KV_DEVICE Vector widened(const char* row, int bits, int column, float scale) {
  const uint32_t numbers = four_numbers(row, bits, column);
  Vector out;
#pragma unroll
  for (int i = 0; i < 4; ++i) out.word[i] = bits_as<uint32_t>(float_of(numbers, i) * scale);
  return out;
}

// ---- elements of the model's type, an argument of the kernel ----

KV_DEVICE float load_number(const void* from, int type, size_t i) {
  return type == KV_FLOAT32 ? static_cast<const float*>(from)[i] : to_float(static_cast<const Half*>(from)[i]);
}
KV_DEVICE void store_number(void* to, int type, size_t i, float x) {
  if (type == KV_FLOAT32)
    static_cast<float*>(to)[i] = x;
  else
    assign(static_cast<Half*>(to)[i], x);
}

// ---- a row in the registers of a warp ----

// A lane's elements of a row of up to 256; elements beyond the row's size are 0. After quantize_rows they are numbers.
// has_nan: 1 if the row contains NaN.
struct Row {
  float element[8], largest, has_nan, scale;
};
KV_DEVICE int column_of(int lane, int i) { return (i / 4 * kWarp + lane) * 4 + i % 4; }

// The butterflies of the Hadamard matrix between columns of one lane.
template <int kApart, int kCount, class Registers, class F>
KV_DEVICE void add_pairs(Registers& r, F element) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i & kApart) continue;
    const float a = element(r, i), b = element(r, i + kApart);
    element(r, i) = b + a, element(r, i + kApart) = a - b;
  }
}

// Multiplies every warp's row by the Hadamard matrix of `size`, a multiple of four. element(registers, i) is the i-th
// of a lane's kCount elements.
template <int kCount, class Kernel, class F>
KV_DEVICE void rotate_rows(Block<Kernel>& block, int size, F element) {
  const int span = size & -size;
  block.each_alone([&](int, auto& r) {
    add_pairs<1, kCount>(r, element);
    add_pairs<2, kCount>(r, element);
  });
#pragma unroll 1
  for (int lanes = 1; lanes < kWarp && 4 * lanes < span; lanes *= 2)
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      block.warp_pairs(
          lanes, [&](auto& r) -> float& { return element(r, i); },
          [](float x, float other, bool upper) { return upper ? other - x : other + x; });
  float factor = 1.0f;
  int rest = span;
  for (; rest >= 4; rest /= 4) factor *= 0.5f;
  if (rest == 2) factor *= 0.70710678118654752f;
  block.each_alone([&](int, auto& r) {
    if constexpr (kCount > 4)
      if (span > 4 * kWarp) add_pairs<4, kCount>(r, element);
#pragma unroll
    for (int i = 0; i < kCount; ++i) element(r, i) *= factor;
  });
}

// Quantizes every warp's row(registers): numbers replace the elements, and the scale is set.
template <class Kernel, class F>
KV_DEVICE void quantize_rows(Block<Kernel>& block, F row) {
  block.each_alone([&](int, auto& r) {
    Row& x = row(r);
    x.largest = x.has_nan = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float size = fabsf(x.element[i]);
      if (size != size) x.has_nan = 1.0f;
      x.largest = size > x.largest ? size : x.largest;
    }
  });
  block.warp_max([&](auto& r) -> float& { return row(r).largest; });
  block.warp_max([&](auto& r) -> float& { return row(r).has_nan; });
  block.each_alone([&](int, auto& r) {
    Row& x = row(r);
    const uint32_t bits = bits_as<uint32_t>(x.largest / 127.0f);
    float scale = bits_as<float>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);  // to bfloat16, ties to even
    if (scale < 1e-30f) scale = 0.0f;
    const float divisor = scale > 0.0f ? scale : 1.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float number = x.element[i] / divisor;
      number = number < 127.0f ? number : 127.0f;
      number = number > -127.0f ? number : -127.0f;
      x.element[i] = number + 12582912.0f - 12582912.0f;  // rounds ties to even
    }
    x.scale = x.has_nan > 0.0f ? bits_as<float>(0x7fc00000u) : scale;
  });
}

// Returns the code of the nearest int4 number; a tie goes to the one nearer to 0.
KV_DEVICE uint32_t code_of(int number) {
  constexpr int kNumbers[16] = {KV_INT4_NUMBERS};
  int place = 0;
#pragma unroll
  for (int i = 1; i < 16; ++i) {
    // In ascending order, the numbers have codes 9 to 15 and then 0 to 8.
    const int low = kNumbers[(i + 8) % 16], high = kNumbers[(i + 9) % 16];
    place += 2 * number > low + high - (low < 0);
  }
  return (place + 9) & 15;
}

// Stores a lane's numbers of a quantized row in the cache.
KV_DEVICE void store_row(const Row& x, char* row, int bits, int size, int lane) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const int column = column_of(lane, i);
    if (column >= size) continue;
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int number = static_cast<int>(x.element[i + j]);
      word |= bits == 8 ? static_cast<uint32_t>(number & 255) << 8 * j : code_of(number) << 4 * j;
    }
    if (bits == 8)
      *reinterpret_cast<uint32_t*>(row + column) = word;
    else
      *reinterpret_cast<uint16_t*>(row + column / 2) = static_cast<uint16_t>(word);
  }
}

}  // namespace cuda
}  // namespace kv
