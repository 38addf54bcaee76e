// Sums of products of bytes on every instruction set, for the weights of a panel times a row. A lane of 32 bits adds
// the products of four bytes.
//
//   Dots<kBits> dots(start)     kBits: 4, 6 (also for 5) or 8; start: the initial sums
//   dots.add(w, x)              adds the products of four inputs of W columns with four bytes of a row, in every lane
//   dots.close(scale)           after every kMost calls of add, and at the end of a block
//   dots.total()                the sums
//
//   Table(numbers).of(q)        the numbers at the indices q, four to a lane, in the form of w of Dots<8>
//
// kCentered: whether w is u - center (panels.h), as signed bytes; otherwise w is u.
//
// Integer scales (Whole) multiply sums where an instruction does so anyway: with AVX2 as integers of 16 bits, twice in
// each lane, in `close`. On other instruction sets they are floats, like all scales, and multiply the totals.
#pragma once

#include "../core/simd.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__AVXVNNI__)
#include <immintrin.h>
#endif

namespace kv {
namespace KV_ISA {

// The scale by which a total is still to be multiplied, times a step of a row.
static inline vf times(vf scale, float step) { return scale * step; }

// Returns the four bytes at x in every lane.
static inline vi spread_bytes(const int8_t* x) {
  int32_t four;
  memcpy(&four, x, sizeof four);
  return splat_i(four);
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

// Returns sum plus the products of the unsigned bytes u with the signed bytes x, four to a lane.
static inline vi plus_products(vi sum, vi u, vi x) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, (__m512i)x);
#else
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)u, (__m256i)x);
#endif
}

template <int kBits>
struct Dots {
  static constexpr bool kCentered = false;
  static constexpr int kMost = 8;
  vi sum{};
  Dots() = default;
  explicit Dots(vi start) : sum(start) {}
  void add(vi u, vi x) { sum = plus_products(sum, u, x); }
  void close(vf) {}
  vi total() const { return sum; }
};
using Whole = vf;
static inline Whole whole(vi integers) { return __builtin_convertvector(integers, vf); }

#elif defined(__AVX2__)

#if defined(__AVX512BW__)
static inline vi pairs_of(vi u, vi x) { return (vi)_mm512_maddubs_epi16((__m512i)u, (__m512i)x); }
static inline vi sums_of_pairs(vi a, vi b) { return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
static inline vi sums_of_words(vi a, vi b) { return (vi)_mm512_add_epi16((__m512i)a, (__m512i)b); }
static inline vi magnitude(vi w) { return (vi)_mm512_abs_epi8((__m512i)w); }
static inline vi twice(vi v) { return (vi)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)v, (__m512i)(v << 16)); }
static inline vi with_sign(vi x, vi w) {
  return (vi)_mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask((__m512i)w), _mm512_setzero_si512(), (__m512i)x);
}
#else
static inline vi pairs_of(vi u, vi x) { return (vi)_mm256_maddubs_epi16((__m256i)u, (__m256i)x); }
static inline vi sums_of_pairs(vi a, vi b) { return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
static inline vi sums_of_words(vi a, vi b) { return (vi)_mm256_add_epi16((__m256i)a, (__m256i)b); }
static inline vi magnitude(vi w) { return (vi)_mm256_abs_epi8((__m256i)w); }
static inline vi twice(vi v) {
  const vi half = {0x01000100, 0x05040504, 0x09080908, 0x0d0c0d0c, 0x01000100, 0x05040504, 0x09080908, 0x0d0c0d0c};
  return (vi)_mm256_shuffle_epi8((__m256i)v, (__m256i)half);
}
static inline vi with_sign(vi x, vi w) { return (vi)_mm256_sign_epi8((__m256i)x, (__m256i)w); }
#endif

struct Whole {
  vi pairs;  // an integer twice in each lane
};
static inline Whole whole(vi integers) { return {twice(integers)}; }
static inline vf times(Whole, float step) { return splat(step); }
static inline vi sums_of_pairs(vi pairs, Whole scale) { return sums_of_pairs(pairs, scale.pairs); }
static inline vi sums_of_pairs(vi pairs, vf) { return sums_of_pairs(pairs, splat_i(0x00010001)); }

// Keeps the compiler from adding products in another order: it would compute all products of a block before the first
// sum, and there are no registers for them.
static inline vi in_order(vi sum) {
  __asm__("" : "+v"(sum));
  return sum;
}

// Products are added in 16 bits as long as they fit: a sum of two products is at most 2 x 127 times the largest number.
template <int kBits>
struct Dots {
  static constexpr bool kCentered = false;
  static constexpr int kMost = kBits == 4 ? 8 : 2;
  vi sum{}, words{};
  Dots() = default;
  explicit Dots(vi start) : sum(start) {}
  void add(vi u, vi x) { words = in_order(sums_of_words(words, pairs_of(u, x))); }
  template <class Scale>
  void close(Scale scale) {
    sum = in_order(sum + sums_of_pairs(words, scale)), words = vi{};
  }
  vi total() const { return sum; }
};

// The sum of two products of unsigned bytes would not fit into 16 bits. Two products of |u - center|, at most 128, do.
template <>
struct Dots<8> {
  static constexpr bool kCentered = true;
  static constexpr int kMost = 8;
  vi sum{};
  Dots() = default;
  explicit Dots(vi start) : sum(start) {}
  void add(vi w, vi x) { sum = in_order(sum + sums_of_pairs(pairs_of(magnitude(w), with_sign(x, w)), vf{})); }
  void close(vf) {}
  vi total() const { return sum; }
};

#elif defined(__ARM_FEATURE_DOTPROD)

template <int kBits>
struct Dots {
  static constexpr bool kCentered = kBits == 8;  // integers of fewer bits are the same number, signed or not
  static constexpr int kMost = 8;
  vi sum{};
  Dots() = default;
  explicit Dots(vi start) : sum(start) {}
  void add(vi w, vi x) {
    sum = (vi)vdotq_s32((int32x4_t)sum, vreinterpretq_s8_s32((int32x4_t)w), vreinterpretq_s8_s32((int32x4_t)x));
  }
  void close(vf) {}
  vi total() const { return sum; }
};
using Whole = vf;
static inline Whole whole(vi integers) { return __builtin_convertvector(integers, vf); }

#else

template <int kBits>
struct Dots {
  static constexpr bool kCentered = false;
  static constexpr int kMost = 8;
  vi sum{};
  Dots() = default;
  explicit Dots(vi start) : sum(start) {}
  void add(vi u, vi x) {
    typedef uint32_t vu __attribute__((vector_size(W * 4)));
    vu all;
    memcpy(&all, &u, sizeof all);
    for (int i = 0; i < 4; ++i) sum += (vi)(all >> 8 * i & 255) * (x << (24 - 8 * i) >> 24);
  }
  void close(vf) {}
  vi total() const { return sum; }
};
using Whole = vf;
static inline Whole whole(vi integers) { return __builtin_convertvector(integers, vf); }

#endif

// A table of sixteen numbers of a byte: signed ones, or with `kTurned` numbers larger by 128.
template <bool kTurned>
struct Table {
#if defined(__AVX512BW__) || defined(__AVX2__) || defined(__aarch64__)
  vi numbers{};
#else
  uint8_t numbers[16] = {};
#endif
  Table() = default;
  explicit Table(const int8_t* table) {
    uint8_t turned[16];
    for (int i = 0; i < 16; ++i) turned[i] = static_cast<uint8_t>(table[i] ^ (kTurned ? 0x80 : 0));
    for (size_t at = 0; at < sizeof numbers; at += sizeof turned)
      memcpy(reinterpret_cast<uint8_t*>(&numbers) + at, turned, sizeof turned);
  }
  vi of(vi q) const {
#if defined(__AVX512BW__)
    return (vi)_mm512_shuffle_epi8((__m512i)numbers, (__m512i)q);
#elif defined(__AVX2__)
    return (vi)_mm256_shuffle_epi8((__m256i)numbers, (__m256i)q);
#elif defined(__aarch64__)
    return (vi)vqtbl1q_u8((uint8x16_t)numbers, (uint8x16_t)q);
#else
    uint8_t bytes[sizeof(vi)];
    memcpy(bytes, &q, sizeof q);
    for (uint8_t& byte : bytes) byte = numbers[byte];
    memcpy(&q, bytes, sizeof q);
    return q;
#endif
  }
};

}  // namespace KV_ISA
}  // namespace kv
