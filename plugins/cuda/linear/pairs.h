// Turns integers of packed weights into pairs of 16-bit elements, exactly and without a conversion: an integer u in the
// lowest bits of the significand of 1024 (128 in bfloat16) is 1024 + u, from which 1024 + zero is subtracted. In
// float16, 4 bits above the 4 lowest ones of 64's significand are 64 + u likewise, so two integers need no shift.
#pragma once

#include "../core/mma.h"
#include "call.h"

namespace kv {
namespace cuda {

// Returns the sums of two pairs; the sums of this file are exact.
template <class T>
KV_DEVICE uint32_t add_pairs(uint32_t x, uint32_t y) {
#ifdef __CUDACC__
  uint32_t sum;
  if constexpr (T::kBrain)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(0x3f803f80u), "r"(y));
  else
    asm("add.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(y));
  return sum;
#else
  const auto sum = [&](int shift) {
    return to_float(T{static_cast<uint16_t>(x >> shift)}) + to_float(T{static_cast<uint16_t>(y >> shift)});
  };
  return packed<T>(sum(0), sum(16));
#endif
}

// Returns the bits of a word under a mask, with some bits flipped, in one instruction.
KV_DEVICE uint32_t masked_bits(uint32_t word, uint32_t mask, uint32_t flip) {
#ifdef __CUDACC__
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(bits) : "r"(word), "r"(mask), "r"(flip));  // (a & b) ^ c
  return bits;
#else
  return (word & mask) ^ flip;
#endif
}

// Returns bytes 2 pair and 2 pair + 1 of a word as 16-bit elements whose high byte is 0x64.
KV_DEVICE uint32_t spread_bytes(uint32_t word, int pair) {
#ifdef __CUDACC__
  return __byte_perm(word, 0x64646464u, pair ? 0x4342 : 0x4140);
#else
  const uint32_t bytes = word >> 16 * pair;
  return (bytes & 255) | (bytes & 0xff00) << 8 | 0x64006400u;
#endif
}

// Returns the lower halves (half 0) or upper halves (half 1) of two words, as one word.
KV_DEVICE uint32_t joined_halves(uint32_t first, uint32_t second, int half) {
#ifdef __CUDACC__
  return __byte_perm(first, second, half ? 0x7632 : 0x5410);
#else
  return (first >> 16 * half & 0xffff) | second >> 16 * half << 16;
#endif
}

// 8 inputs of a row or of the norm as they are stored: in T, or in float32, which may become bfloat16.
template <class T>
struct Eight {
  Vector part[T::kBrain ? 2 : 1];
};
template <class T>
KV_DEVICE Eight<T> load_eight(const KvLinear& a, const void* from, size_t i) {
  Eight<T> x;
  if (T::kBrain && a.type == KV_FLOAT32) {
    x.part[0] = load_vector(static_cast<const float*>(from) + i);
    x.part[T::kBrain] = load_vector(static_cast<const float*>(from) + i + 4);
  } else {
    x.part[0] = load_vector(static_cast<const T*>(from) + i);
  }
  return x;
}
template <class T>
KV_DEVICE void widen_eight(const KvLinear& a, const Eight<T>& from, float (&x)[8]) {
  if (!T::kBrain || a.type != KV_FLOAT32) return widen<T>(from.part[0], x);
#pragma unroll
  for (int j = 0; j < 8; ++j) x[j] = bits_as<float>(from.part[j / 4 * T::kBrain].word[j % 4]);
}

// A unit is the bytes of a row that make whole products of `mma`; a lane has one word of every 16 bytes.
//
//   bits  inputs  steps  a lane's inputs, c = lane % 4, in the order of elements 0, 1, 4, 5 of a
//   4     32      2      8 c + (0, 4, 1, 5), 8 c + (2, 6, 3, 7)
//   8     16      1      4 c + (0, 1, 2, 3)
//   16    16      1      2 c, 2 c + 1, 2 c + 8, 2 c + 9
template <class T, int kBits>
struct Unit {
  static constexpr int kBytes = kBits ? 16 : 32, kInputs = kBits == 4 ? 32 : 16, kSteps = kBits == 4 ? 2 : 1;
  static constexpr int kWords = kBytes / 16;                  // words of a lane
  static constexpr bool kByFloats = T::kBrain && kBits == 8;  // 128 + 8 bits do not fit into a bfloat16: go by float32
  static constexpr bool kUpper = !T::kBrain && kBits == 4;    // whether half 1 of a pair is read from the upper 4 bits

  // Returns the addend of `pair` for this integer `zero`: minus the number that `zero` becomes.
  static KV_DEVICE uint32_t less(int zero) {
    if (kByFloats) return bits_as<uint32_t>(-(8388608.0f + static_cast<float>(zero)));
    return (T::kBrain ? 0xc300c300u : 0xe400e400u) | static_cast<uint32_t>(zero) * 0x00010001u;
  }
  // Returns the addend for half 1, from that for half 0.
  static KV_DEVICE uint32_t upper_less(uint32_t less) {
    return kUpper ? add_pairs<T>(less, 0x63806380u) : less;
  }  // 960
  // Returns the mask of `pair` for xor: it flips the highest bit of signed integers, and sets the bits of 1024 or 128.
  static KV_DEVICE uint32_t flip(bool is_signed) {
    if (kBits == 8) return is_signed ? 0x80808080u : 0u;
    return (T::kBrain ? 0x43004300u : 0x64006400u) ^ (is_signed ? 0x00080008u : 0u);
  }
  // Returns the mask for half 1, from that for half 0: it sets the bits of 64.
  static KV_DEVICE uint32_t upper_flip(uint32_t flip) {
    return kUpper ? (flip & 0x00080008u) << 4 | 0x54005400u : flip;
  }
  // Returns elements 0 and 1 (half 0) or 4 and 5 (half 1) of a row of a, in a step. flip, less: those for this half.
  static KV_DEVICE uint32_t pair(const uint32_t* word, int step, int half, uint32_t flip, uint32_t less) {
    if (kBits == 0) return word[half];
    if (kUpper) return add_pairs<T>(masked_bits(word[0] >> 8 * step, half ? 0x00f000f0u : 0x000f000fu, flip), less);
    if (kBits == 4) return add_pairs<T>(masked_bits(word[0] >> (8 * step + 4 * half), 0x000f000fu, flip), less);
    const uint32_t bytes = word[0] ^ flip;
    if (!kByFloats) return add_pairs<T>(spread_bytes(bytes, half), less);
    const auto number = [&](int i) {
      return bits_as<float>((bytes >> 8 * i & 255) | 0x4b000000u) + bits_as<float>(less);
    };
    return packed<T>(number(2 * half), number(2 * half + 1));
  }

  // Stores 8 inputs of a row, the v-th 8 of a chunk, so that a lane's inputs are contiguous in the order above.
  static KV_DEVICE void store_inputs(char* row, int v, const float (&x)[8]) {
    Vector all;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      all.word[i] = kBits == 4 ? packed<T>(x[i], x[i + 4]) : packed<T>(x[2 * i], x[2 * i + 1]);
    store_ordered(row, v, all);
  }
  // The same for inputs that are elements already: no conversion.
  static KV_DEVICE void store_inputs(char* row, int v, const Vector& x) {
    if (kBits != 4) return store_ordered(row, v, x);
    const uint32_t* const w = x.word;
    store_ordered(row, v,
                  {joined_halves(w[0], w[2], 0), joined_halves(w[0], w[2], 1), joined_halves(w[1], w[3], 0),
                   joined_halves(w[1], w[3], 1)});
  }
  static KV_DEVICE void store_ordered(char* row, int v, const Vector& all) {
    if (kBits) return store_vector(row + v * 16, all);
#pragma unroll
    for (int i = 0; i < 4; ++i) *reinterpret_cast<uint32_t*>(row + v / 2 * 32 + i * 8 + v % 2 * 4) = all.word[i];
  }
  struct alignas(8) Both {
    uint32_t word[2];
  };
  static constexpr int kOfLane = kBits == 4 ? 16 : 8;  // bytes from lane to lane in a row
  // Loads the operand b of all steps of unit u. lane: 0 if `row` is the lane's own part of the row.
  static KV_DEVICE void load_inputs(const char* row, int u, int lane, uint32_t* b) {
    if (kBits == 4) {
      const Vector all = load_vector(row + u * 64 + lane % 4 * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = all.word[i];
    } else {
      const auto both = *reinterpret_cast<const Both*>(row + u * 32 + lane % 4 * 8);
      b[0] = both.word[0], b[1] = both.word[1];
    }
  }
};

}  // namespace cuda
}  // namespace kv
