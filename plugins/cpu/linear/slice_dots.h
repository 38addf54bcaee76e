// Dot products of a block of 32 or 16 rounded inputs with one slice of a panel, by Arm's instructions: a slice has 4 of
// the 16 columns. The bytes of the rows are read once for all slices and stay in registers, and the sums of a slice
// leave room for them. 32 registers hold
//
//   dotprod   4 tall rows: 16 sums of floats, 8 with the rows' bytes, 4 sums of integers
//             2 few rows:   8                 8                       4
//   i8mm      the same; a sum of integers has two columns of two rows
#pragma once

#include "dot.h"
#include "panels.h"

#if defined(__ARM_FEATURE_DOTPROD)

namespace kv {
namespace KV_ISA {

// How the integers of a slice are read: as the kLow bits of bytes, or as the halves of bytes with kHigh upper bits,
// which are indices of a table or numbers.
template <int kLow, bool kIsTable, int kHigh, class Numbers>
struct SliceIntegers {
  const uint8_t* integers;  // of the slice, in the first line of the block
  const Numbers& table;
  bool odd;  // PanelBlock::odd

  // Returns inputs 4 q to 4 q + 3 of the four columns.
  template <size_t q>
  int8x16_t quad() const {
    constexpr size_t kQuads = 8 / kLow;
    const int64_t line = static_cast<int64_t>(q / kQuads) + (kHigh > 0) + (kLow == 2 && odd);
    const uint8x16_t all = vld1q_u8(integers + line * kPanelLine);
    if constexpr (kLow == 8) return vreinterpretq_s8_u8(veorq_u8(all, vdupq_n_u8(128)));
    if constexpr (kLow == 2) {
      const uint8x16_t low = vandq_u8(q ? vshrq_n_u8(all, q ? 2 * q : 1) : all, vdupq_n_u8(3));
      if constexpr (!kHigh) return vreinterpretq_s8_u8(low);
      const auto places = static_cast<int8_t>(2 - static_cast<int>(q) - (odd ? 4 : 0));  // to the left
      const uint8x16_t upper = vshlq_u8(vld1q_u8(integers), vdupq_n_s8(places));
      return vreinterpretq_s8_u8(vorrq_u8(low, vandq_u8(upper, vdupq_n_u8(4))));
    }
    uint8x16_t half = q % 2 ? vshrq_n_u8(all, 4) : vandq_u8(all, vdupq_n_u8(15));
    if constexpr (kHigh > 0) {
      constexpr int at = q * kHigh;
      const uint8x16_t upper = vld1q_u8(integers);
      const uint8x16_t moved = at < 4 ? vshlq_n_u8(upper, at < 4 ? 4 - at : 0) : vshrq_n_u8(upper, at > 4 ? at - 4 : 1);
      half = vorrq_u8(half, vandq_u8(at == 4 ? upper : moved, vdupq_n_u8(kHigh == 1 ? 0x10 : 0x30)));
    }
    if constexpr (kIsTable) return (int8x16_t)table.of((vi)half);
    return vreinterpretq_s8_u8(half);
  }
};

#if defined(__ARM_FEATURE_MATMUL_INT8)

// The bytes of kRows rows of a block, in pairs of rows: eight inputs of both. If the number of rows is odd, the last
// row is there twice.
template <int kRows, int kBytes, int kBlock>
struct BlockOfPairs {
  static constexpr int kQuads = kBlock / 4;  // groups of four inputs of a block
  static constexpr int kPairs = (kRows + 1) / 2;
  int8x16_t x[kPairs][kBytes][kQuads / 2];

  BlockOfPairs(const int8_t* values, int64_t apart) {
    for (int i = 0; i < kPairs; ++i)
      for (int p = 0; p < kBytes; ++p)
        for (int k = 0; k < kQuads / 2; ++k) {
          const int8_t* const first = values + p * apart + 2 * i * kBlock + 8 * k;
          x[i][p][k] = vcombine_s8(vld1_s8(first), vld1_s8(2 * i + 1 < kRows ? first + kBlock : first));
        }
  }

  // Adds the dot products with a slice to sums.
  template <class Integers, size_t... k>
  void multiply(const Integers& w, int32x4_t (&sums)[kRows][kBytes], std::index_sequence<k...>) const {
    int32x4_t both[kPairs][kBytes][2] = {};  // (column, row), (column, row + 1), (column + 1, row), ...
    (add<k>(w, both), ...);
    for (int i = 0; i < kRows; ++i)
      for (int p = 0; p < kBytes; ++p) {
        const int32x4_t* const of = both[i / 2][p];
        sums[i][p] = vaddq_s32(sums[i][p], i % 2 ? vuzp2q_s32(of[0], of[1]) : vuzp1q_s32(of[0], of[1]));
      }
  }
  template <size_t k, class Integers>
  void add(const Integers& w, int32x4_t (&both)[kPairs][kBytes][2]) const {
    const int32x4_t first = vreinterpretq_s32_s8(w.template quad<2 * k>());
    const int32x4_t second = vreinterpretq_s32_s8(w.template quad<2 * k + 1>());
    const int8x16_t columns[2] = {vreinterpretq_s8_s32(vzip1q_s32(first, second)),
                                  vreinterpretq_s8_s32(vzip2q_s32(first, second))};
    for (int i = 0; i < kPairs; ++i)
      for (int p = 0; p < kBytes; ++p)
        for (int j = 0; j < 2; ++j) both[i][p][j] = vmmlaq_s32(both[i][p][j], columns[j], x[i][p][k]);
  }
  static constexpr auto kSteps = std::make_index_sequence<kQuads / 2>();
};

#endif

// The bytes of kRows rows of a block.
template <int kRows, int kBytes, int kBlock>
struct BlockOfRows {
  static constexpr int kQuads = kBlock / 4;  // groups of four inputs of a block
  int8x16_t x[kRows][kBytes][kQuads / 4];

  BlockOfRows(const int8_t* values, int64_t apart) {
    for (int i = 0; i < kRows; ++i)
      for (int p = 0; p < kBytes; ++p)
        for (int k = 0; k < kQuads / 4; ++k) x[i][p][k] = vld1q_s8(values + p * apart + i * kBlock + 16 * k);
  }

  // Adds the dot products with a slice to sums.
  template <class Integers, size_t... q>
  void multiply(const Integers& w, int32x4_t (&sums)[kRows][kBytes], std::index_sequence<q...>) const {
    (add<q>(w.template quad<q>(), sums), ...);
  }
  template <size_t q>
  void add(int8x16_t w, int32x4_t (&sums)[kRows][kBytes]) const {
    for (int i = 0; i < kRows; ++i)
      for (int p = 0; p < kBytes; ++p) sums[i][p] = vdotq_laneq_s32(sums[i][p], w, x[i][p][q / 4], q % 4);
  }
  static constexpr auto kSteps = std::make_index_sequence<kQuads>();
};

#if defined(__ARM_FEATURE_MATMUL_INT8)
template <int kRows, int kBytes, int kBlock>
using RowsOf = std::conditional_t<(kRows > 1), BlockOfPairs<kRows, kBytes, kBlock>, BlockOfRows<kRows, kBytes, kBlock>>;
#else
template <int kRows, int kBytes, int kBlock>
using RowsOf = BlockOfRows<kRows, kBytes, kBlock>;
#endif

}  // namespace KV_ISA
}  // namespace kv

#endif
