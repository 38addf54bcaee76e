// Sums of products of bytes on every instruction set, for the weights of a panel times a row. A lane of 32 bits adds
// the products of four bytes.
//
//   Dots<kBits> dots(start)     kBits: 4, 6 (also for 5) or 8; start: the initial sums
//   dots.add(w, x)              adds the products of four inputs of W columns with the four bytes at x, in every lane
//   dots.total()                the sums
//
//   Table(numbers).of(q)        the numbers at the indices q, four to a lane, in the form of w of Dots<8>
//
// kCentered: whether w is u - center (panels.h), as signed bytes; otherwise w is u.
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
  vi sum{};
  Dots() = default;
  explicit Dots(vi start) : sum(start) {}
  void add(vi u, const int8_t* x) { sum = plus_products(sum, u, spread_bytes(x)); }
  vi total() const { return sum; }
};

#elif defined(__AVX2__)

#if defined(__AVX512BW__)
static inline vi pairs_of(vi u, vi x) { return (vi)_mm512_maddubs_epi16((__m512i)u, (__m512i)x); }
static inline vi sums_of_pairs(vi pairs) { return (vi)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1)); }
static inline vi sums_of_words(vi a, vi b) { return (vi)_mm512_add_epi16((__m512i)a, (__m512i)b); }
static inline vi magnitude(vi w) { return (vi)_mm512_abs_epi8((__m512i)w); }
static inline vi with_sign(vi x, vi w) {
  return (vi)_mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask((__m512i)w), _mm512_setzero_si512(), (__m512i)x);
}
#else
static inline vi pairs_of(vi u, vi x) { return (vi)_mm256_maddubs_epi16((__m256i)u, (__m256i)x); }
static inline vi sums_of_pairs(vi pairs) { return (vi)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1)); }
static inline vi sums_of_words(vi a, vi b) { return (vi)_mm256_add_epi16((__m256i)a, (__m256i)b); }
static inline vi magnitude(vi w) { return (vi)_mm256_abs_epi8((__m256i)w); }
static inline vi with_sign(vi x, vi w) { return (vi)_mm256_sign_epi8((__m256i)x, (__m256i)w); }
#endif

template <int kBits>
struct Dots;

// Sums of 16 bits hold the products of a block: 32 / 2 x 15 x 127 is less than 2^15.
template <>
struct Dots<4> {
  static constexpr bool kCentered = false;
  vi start{}, sum{};
  Dots() = default;
  explicit Dots(vi start) : start(start) {}
  void add(vi u, const int8_t* x) { sum = sums_of_words(sum, pairs_of(u, spread_bytes(x))); }
  vi total() const { return start + sums_of_pairs(sum); }
};

// Two products of unsigned 6-bit numbers fit into 16 bits, and four do not.
template <>
struct Dots<6> {
  static constexpr bool kCentered = false;
  vi sum{};
  Dots() = default;
  explicit Dots(vi start) : sum(start) {}
  void add(vi u, const int8_t* x) { sum += sums_of_pairs(pairs_of(u, spread_bytes(x))); }
  vi total() const { return sum; }
};

// The sum of two products of unsigned bytes would not fit into 16 bits. Two products of |u - center|, at most 128, do.
template <>
struct Dots<8> {
  static constexpr bool kCentered = true;
  vi sum{};
  Dots() = default;
  explicit Dots(vi start) : sum(start) {}
  void add(vi w, const int8_t* x) { sum += sums_of_pairs(pairs_of(magnitude(w), with_sign(spread_bytes(x), w))); }
  vi total() const { return sum; }
};

#elif defined(__ARM_FEATURE_DOTPROD)

template <int kBits>
struct Dots {
  static constexpr bool kCentered = kBits == 8;  // integers of fewer bits are the same number, signed or not
  vi sum{};
  Dots() = default;
  explicit Dots(vi start) : sum(start) {}
  void add(vi w, const int8_t* x) {
    sum = (vi)vdotq_s32((int32x4_t)sum, vreinterpretq_s8_s32((int32x4_t)w),
                        vreinterpretq_s8_s32((int32x4_t)spread_bytes(x)));
  }
  vi total() const { return sum; }
};

#else

template <int kBits>
struct Dots {
  static constexpr bool kCentered = false;
  vi sum{};
  Dots() = default;
  explicit Dots(vi start) : sum(start) {}
  void add(vi u, const int8_t* x) {
    typedef uint32_t vu __attribute__((vector_size(W * 4)));
    vu all;
    memcpy(&all, &u, sizeof all);
    for (int i = 0; i < 4; ++i) sum += (vi)(all >> 8 * i & 255) * static_cast<int32_t>(x[i]);
  }
  vi total() const { return sum; }
};

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
