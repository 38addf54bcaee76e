// Products of rounded rows (rounding.h) with the panels of a packed weight (panels.h), by dot products of bytes. Lanes
// are columns, so no sum ends across lanes.
//
//   for each panel of 16 columns, for each tile of rows
//     for each group g, for each block b of it
//       dots[row] = sum over the block of (u - center) x v        integers, exactly: 256 x those of high + those of low
//       y[row]   += dots[row] x (scale[g] x step[row, b]) + offset[g] x sum[row, b]
#pragma once

#include "dot.h"
#include "rounding.h"

namespace kv {
namespace KV_ISA {

constexpr int kSlices = kPanelColumns / W;  // vectors of a panel's columns
// Bytes that are fetched before they are read. A panel is so short a stream that the machine's own prefetching has
// hardly begun when it ends.
constexpr int64_t kPanelAhead = 6144;

// The scale and the offset of W columns of one group: a value is (u - center) scale + offset.
struct PanelGroups {
  const uint8_t *scale, *offset;
  int scale_type, center;  // center: what a minimum lacks, times the scale; 0 of signed weights
  enum Kind { kNone, kZero, kHalfMinimum, kFloatMinimum } kind;

  PanelGroups(const KvWeight& weight, const PanelLayout& l, const uint8_t* panel)
      : scale(panel), offset(panel + l.offsets), scale_type(weight.scale_type) {
    kind = has_zeros(weight)                   ? kZero
           : !weight.minimum                   ? kNone
           : weight.minimum_type == KV_FLOAT32 ? kFloatMinimum
                                               : kHalfMinimum;
    center = weight.is_signed ? 0 : center_of(weight);
  }

  static vf numbers(const uint8_t* at, bool floats, int64_t i) {
    return floats ? load(reinterpret_cast<const float*>(at) + i) : load(reinterpret_cast<const half*>(at) + i);
  }
  vf scales(int64_t group, int slice) const {
    return numbers(scale, scale_type == KV_FLOAT32, group * kPanelColumns + slice * W);
  }
  vf offsets(int64_t group, int slice, vf scale_of_group) const {
    const int64_t i = group * kPanelColumns + slice * W;
    if (kind == kZero) return load(reinterpret_cast<const int8_t*>(offset) + i) * -scale_of_group;
    return numbers(offset, kind == kFloatMinimum, i) + static_cast<float>(center) * scale_of_group;
  }
};

// The dot products of one block of kRows rows with W x kSlices columns; `integers` are the block's. kBlock: 0 where the
// block is shorter than kMostBlock. ahead: what is fetched meanwhile.
template <int kBits, int kRows, int kBlock>
static inline void dots_of_block(const uint8_t* integers, const int8_t* values, int size, const uint8_t* ahead,
                                 Dots<kBits> (&dots)[kRows][kParts][kSlices]) {
  constexpr int kUnit = kBits == 4 ? 8 : 4;
  const int block = kBlock ? kBlock : size;
  for (int k = 0; k < block; k += kUnit, integers += kPanelLine) {
    __builtin_prefetch(ahead + k / kUnit * kPanelLine, 0, 3);
    for (int s = 0; s < kSlices; ++s) {
      vi all;
      memcpy(&all, integers + 4 * W * s, sizeof all);
      const vi low = all & 0x0f0f0f0f, high = (all >> 4) & 0x0f0f0f0f;
      if (kBits == 8 && Dots<kBits>::kCentered) all ^= static_cast<int32_t>(0x80808080);
      for (int i = 0; i < kRows; ++i)
        for (int p = 0; p < kParts; ++p) {
          const int8_t* const x = values + (i * kParts + p) * block + k;
          if (kBits == 4)
            dots[i][p][s].add(low, x), dots[i][p][s].add(high, x + 4);
          else
            dots[i][p][s].add(all, x);
        }
    }
  }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)

// As dots_of_block, by products of matrices of two columns and two rows, eight inputs each. Where the number of rows is
// odd, the last one is multiplied twice.
template <int kBits, int kRows, int kBlock>
static inline void matrix_dots_of_block(const uint8_t* integers, const int8_t* values, int size,
                                        Dots<kBits> (&dots)[kRows][kParts][kSlices]) {
  constexpr int kPairs = (kRows + 1) / 2;
  const int block = kBlock ? kBlock : size;
  int32x4_t sums[kPairs][kParts][kSlices][2] = {};
  for (int k = 0; k < block; k += 8) {
    int8x16_t rows[kPairs][kParts];
    for (int i = 0; i < kPairs; ++i)
      for (int p = 0; p < kParts; ++p) {
        const int second = min_of(2 * i + 1, kRows - 1);
        rows[i][p] = vcombine_s8(vld1_s8(values + (2 * i * kParts + p) * block + k),
                                 vld1_s8(values + (second * kParts + p) * block + k));
      }
    for (int s = 0; s < kSlices; ++s) {
      const uint8x16_t all = vld1q_u8(integers + 4 * W * s);
      int32x4_t first, second;  // inputs k to k + 3 and k + 4 to k + 7 of four columns
      if constexpr (kBits == 4) {
        first = vreinterpretq_s32_u8(vandq_u8(all, vdupq_n_u8(15)));
        second = vreinterpretq_s32_u8(vshrq_n_u8(all, 4));
      } else {
        const uint8x16_t turned = vdupq_n_u8(128);
        first = vreinterpretq_s32_u8(veorq_u8(all, turned));
        second = vreinterpretq_s32_u8(veorq_u8(vld1q_u8(integers + kPanelLine + 4 * W * s), turned));
      }
      const int8x16_t columns[2] = {vreinterpretq_s8_s32(vzip1q_s32(first, second)),
                                    vreinterpretq_s8_s32(vzip2q_s32(first, second))};
      for (int i = 0; i < kPairs; ++i)
        for (int p = 0; p < kParts; ++p)
          for (int j = 0; j < 2; ++j) sums[i][p][s][j] = vmmlaq_s32(sums[i][p][s][j], columns[j], rows[i][p]);
    }
    integers += kBits == 4 ? kPanelLine : 2 * kPanelLine;
  }
  for (int i = 0; i < kRows; ++i)  // a sum holds (column, row), (column, row + 1), (column + 1, row), ...
    for (int p = 0; p < kParts; ++p)
      for (int s = 0; s < kSlices; ++s) {
        const int32x4_t* const of = sums[i / 2][p][s];
        dots[i][p][s].sum += (vi)(i % 2 ? vuzp2q_s32(of[0], of[1]) : vuzp1q_s32(of[0], of[1]));
      }
}

#endif

// out[i * stride + c] for the kRows rows of a tile and the 16 columns of a panel.
template <int kBits, int kRows, int kBlock>
static void panel_tile(const KvWeight& weight, const PanelLayout& l, const uint8_t* panel, const RoundedTile& x,
                       float* out, int64_t stride) {
  const PanelGroups groups(weight, l, panel);
  const int block = kBlock ? kBlock : l.block;
  const int64_t blocks = l.group / block, bytes = block / l.unit * kPanelLine;
  const uint8_t *integers = panel + l.integers, *ahead = panel + kPanelAhead;
  const int64_t numbers = l.integers / l.groups;  // bytes of the scales and offsets of a group
  const int8_t* values = x.values;
  const float *step = x.step, *sum = x.sum;
  const int32_t* start = x.start4;
  vf y[kRows][kSlices] = {};
  for (int64_t g = 0; g < l.groups; ++g) {
    vf scale[kSlices], offset[kSlices];
    for (int s = 0; s < kSlices; ++s) {
      scale[s] = groups.scales(g, s);
      if (groups.kind != PanelGroups::kNone) offset[s] = groups.offsets(g, s, scale[s]);
    }
    __builtin_prefetch(ahead, 0, 3), ahead += numbers;
    for (int64_t b = 0; b < blocks; ++b) {
      typedef Dots<kBits> Columns[kParts][kSlices];
      Columns dots[kRows];
      for (int i = 0; i < kRows; ++i)
        for (int s = 0; s < kSlices; ++s) {
          dots[i][0][s] = Dots<kBits>(vi{});
          dots[i][1][s] = Dots<kBits>(Dots<kBits>::kCentered ? vi{} : splat_i(start[i]) << (kBits - 4));
        }
#if defined(__ARM_FEATURE_MATMUL_INT8)
      if constexpr (kRows > 1)
        matrix_dots_of_block<kBits, kRows, kBlock>(integers, values, block, dots);
      else
#endif
        dots_of_block<kBits, kRows, kBlock>(integers, values, block, ahead, dots);
      for (int i = 0; i < kRows; ++i)
        for (int s = 0; s < kSlices; ++s) {
          const vi total = (dots[i][0][s].total() << 8) + dots[i][1][s].total();
          y[i][s] += __builtin_convertvector(total, vf) * (scale[s] * step[i]);
          if (groups.kind != PanelGroups::kNone) y[i][s] += offset[s] * sum[i];
        }
      integers += bytes, ahead += bytes, values += block * kParts * kRows;
      step += kRows, sum += kRows, start += kRows;
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int s = 0; s < kSlices; ++s) store(out + i * stride + s * W, y[i][s]);
}

using PanelTile = void (*)(const KvWeight&, const PanelLayout&, const uint8_t*, const RoundedTile&, float*, int64_t);

template <int kBits, int kBlock, int kRows = kRowsOfTile>
static inline PanelTile tile_of_rows(int rows) {
  if constexpr (kRows > 1)
    if (rows < kRows) return tile_of_rows<kBits, kBlock, kRows - 1>(rows);
  return panel_tile<kBits, kRows, kBlock>;
}

template <int kBits>
static inline PanelTile tile_for(int block, int rows) {
  return block == kMostBlock ? tile_of_rows<kBits, kMostBlock>(rows) : tile_of_rows<kBits, 0>(rows);
}

// out[i * stride + c] = row first + i times column c of a panel, for `count` rows; `first` begins a tile.
static inline void panel_products(const KvWeight& weight, const PanelLayout& l, int64_t panel, const RoundedRows& x,
                                  int64_t first, int64_t count, float* out, int64_t stride) {
  const uint8_t* const at = static_cast<const uint8_t*>(weight.data) + panel * l.panel;
  for (int64_t i = 0; i < count; i += kRowsOfTile) {
    const RoundedTile tile = x.tile(first + i);
    const PanelTile products = weight.bits == 4 ? tile_for<4>(x.block, tile.rows) : tile_for<8>(x.block, tile.rows);
    products(weight, l, at, tile, out + i * stride, stride);
  }
}

}  // namespace KV_ISA
}  // namespace kv
