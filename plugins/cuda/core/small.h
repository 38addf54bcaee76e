// Rows of a small cache (docs/contract.md, "A small cache"): how they are read, and how they are stored with the bits
// that every backend stores them with (kvexport/ops/small_cache.py).
//
// Numbers of 8 or 4 bits come as bytes to which 128 is added, four to a word: as the low byte of 1024 + x in 16 bits,
// or of 2^23 + x in 32, they are floats after one subtraction, exactly. A row that is turned or stored lies in the
// registers of a warp, four neighbouring columns a lane and then the next 128, so that the Hadamard matrix's
// butterflies are shuffles.
#pragma once

#include <type_traits>

#include "types.h"

namespace kv {
namespace cuda {

// The type of a cache in int8, int4 or k8v4, over which kernels compute in float32.
struct Small {};

// The type that kernels compute with.
template <class T>
struct WideOf {
  using Type = T;
};
template <>
struct WideOf<Small> {
  using Type = float;
};
template <class T>
using Wide = typename WideOf<T>::Type;
template <class T>
constexpr bool kSmall = std::is_same<T, Small>::value;

KV_HD bool is_small(int type) { return type == KV_INT8 || type == KV_INT4 || type == KV_K8V4; }
// Bits of an element, of any type of cache.
KV_HD int element_bits(int type) { return type == KV_FLOAT32 ? 32 : 16; }
KV_HD int key_bits(int type) { return !is_small(type) ? element_bits(type) : type == KV_INT4 ? 4 : 8; }
KV_HD int value_bits(int type) { return !is_small(type) ? element_bits(type) : type == KV_INT8 ? 8 : 4; }

// ---- numbers ----

constexpr uint32_t four_of(int code) {
  constexpr int kNumbers[16] = {KV_INT4_NUMBERS};
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(kNumbers[code + i] + 128) << 8 * i;
  return word;
}
constexpr uint32_t kCodes0 = four_of(0), kCodes4 = four_of(4), kCodes8 = four_of(8), kCodes12 = four_of(12);
constexpr uint32_t kSigns = 0x80808080;  // turns int8 numbers into such with 128 added, and back

// Byte i of the result is that of the eight of low and high which the i-th four bits of `which` name.
KV_DEVICE uint32_t bytes_of(uint32_t low, uint32_t high, uint32_t which) {
#ifdef __CUDACC__
  uint32_t found;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(low), "r"(high), "r"(which));
  return found;
#else
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) found |= static_cast<uint32_t>(bytes >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return found;
#endif
}

// Eight codes of four bits, the first in the lowest, as numbers.
KV_DEVICE void numbers_of(uint32_t codes, uint32_t (&numbers)[2]) {
  const uint32_t place = codes & 0x77777777, half = (codes >> 1 & 0x44444444) | 0x32103210;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    numbers[i] = bytes_of(bytes_of(kCodes0, kCodes4, place >> 16 * i), bytes_of(kCodes8, kCodes12, place >> 16 * i),
                          half >> 16 * i);
}

// Two of four numbers, those that `which` names, as 16-bit floats in a register.
constexpr uint32_t kFirstTwo = 0x4140, kLastTwo = 0x4342, kEven = 0x4240, kOdd = 0x4341;
KV_DEVICE uint32_t halves_of(uint32_t numbers, uint32_t which) {
  const uint32_t raised = bytes_of(numbers, 0x64646464, which);  // 1024 + x
#ifdef __CUDACC__
  uint32_t found;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(found) : "r"(raised), "r"(0x64806480));
  return found;
#else
  uint32_t found = 0;
  for (int i = 0; i < 2; ++i) {
    Half half{static_cast<uint16_t>(raised >> 16 * i)};
    assign(half, to_float(half) - 1152.0f);
    found |= static_cast<uint32_t>(half.bits) << 16 * i;
  }
  return found;
#endif
}

KV_DEVICE float float_of(uint32_t numbers, int i) {
  return bits_as<float>(0x4b000000u | (numbers >> 8 * i & 255)) - 8388736.0f;
}

// Four neighbouring numbers of a row, from a column that is a multiple of four.
KV_DEVICE uint32_t four_numbers(const char* row, int bits, int column) {
  if (bits == 8) return *reinterpret_cast<const uint32_t*>(row + column) ^ kSigns;
  uint32_t numbers[2];
  numbers_of(*reinterpret_cast<const uint16_t*>(row + column / 2), numbers);
  return numbers[0];
}
// ... as the floats that they stand for.
KV_DEVICE Vector widened(const char* row, int bits, int column, float scale) {
  const uint32_t numbers = four_numbers(row, bits, column);
  Vector out;
#pragma unroll
  for (int i = 0; i < 4; ++i) out.word[i] = bits_as<uint32_t>(float_of(numbers, i) * scale);
  return out;
}

// ---- numbers of the model's type, which is known when the kernel runs ----

KV_DEVICE float load_number(const void* from, int type, size_t i) {
  if (type == KV_FLOAT32) return static_cast<const float*>(from)[i];
  return type == KV_FLOAT16 ? to_float(static_cast<const Half*>(from)[i])
                            : to_float(static_cast<const BFloat*>(from)[i]);
}
KV_DEVICE void store_number(void* to, int type, size_t i, float x) {
  if (type == KV_FLOAT32)
    static_cast<float*>(to)[i] = x;
  else if (type == KV_FLOAT16)
    assign(static_cast<Half*>(to)[i], x);
  else
    assign(static_cast<BFloat*>(to)[i], x);
}

// ---- a row in the registers of a warp ----

// A lane's part of a row of up to 256 elements, those beyond its size 0. After quantize_rows the elements are numbers.
struct Row {
  float element[8], largest, spoilt, scale;
};
KV_DEVICE int column_of(int lane, int i) { return (i / 4 * kWarp + lane) * 4 + i % 4; }

// Butterflies between columns of one lane.
template <int kApart, int kCount, class Registers, class F>
KV_DEVICE void add_pairs(Registers& r, F element) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i & kApart) continue;
    const float a = element(r, i), b = element(r, i + kApart);
    element(r, i) = b + a, element(r, i + kApart) = a - b;
  }
}

// Every warp's row times the Hadamard matrix of `size`, a multiple of four: element(registers, i) is a lane's i-th of
// kCount.
template <int kCount, class Program, class F>
KV_DEVICE void rotate_rows(Block<Program>& block, int size, F element) {
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

// Every warp's row(registers) as it is stored: numbers in place of elements, and their scale.
template <class Program, class F>
KV_DEVICE void quantize_rows(Block<Program>& block, F row) {
  block.each_alone([&](int, auto& r) {
    Row& x = row(r);
    x.largest = x.spoilt = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float size = fabsf(x.element[i]);
      if (size != size) x.spoilt = 1.0f;
      x.largest = size > x.largest ? size : x.largest;
    }
  });
  block.warp_max([&](auto& r) -> float& { return row(r).largest; });
  block.warp_max([&](auto& r) -> float& { return row(r).spoilt; });
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
    x.scale = x.spoilt > 0.0f ? bits_as<float>(0x7fc00000u) : scale;
  });
}

// The code of the nearest of int4's numbers, of two as near of the one nearer to 0.
KV_DEVICE uint32_t code_of(int number) {
  constexpr int kNumbers[16] = {KV_INT4_NUMBERS};
  int place = 0;
#pragma unroll
  for (int i = 1; i < 16; ++i) {
    // In ascending order they are codes 9 to 15 and then 0 to 8.
    const int low = kNumbers[(i + 8) % 16], high = kNumbers[(i + 9) % 16];
    place += 2 * number > low + high - (low < 0);
  }
  return (place + 9) & 15;
}

// A lane's part of a row's numbers into the cache.
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
