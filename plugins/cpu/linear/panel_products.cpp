// Products of rounded rows (rounding.h) with the panels of a packed weight (panels.h), by dot products of bytes. Each
// lane has a column of its own, so no lanes are added up.
//
//   for each panel of 16 columns, for each tile of rows
//     for each group g, for each block b of it
//       dots[row] = sum over the block of (u - center) x v        exact: 256 x that of high + that of low bytes
//       y[row]   += dots[row] x (scale[g] x step[row, b]) + offset[g] x sum[row, b]
//
// A tile of few rows keeps the sums of high and of low bytes in registers at once. A tall tile multiplies the high
// bytes of a block first, and then the low bytes of those groups of rows that have any. It needs registers for one sum
// only, so 12 rows instead of 8 share one read of a panel.
//
// Letters: l the layout of a panel, b a block, g a group, i a row of the tile, s a vector of columns, p a byte of a
// rounded number (0 high, 1 low), k an input.
#include "panel_products.h"

#include "dot.h"
#include "panel_groups.h"
#include "slice_dots.h"

namespace kv {
namespace KV_ISA {

// Functions that take sums by reference are always inlined: otherwise the sums would not stay in registers.
#define KV_INLINE __attribute__((always_inline)) inline

// How many bytes ahead of their use integers are prefetched. Hardware prefetching hardly begins before a stream as
// short as a panel ends. The prefetches go to the L2 cache (kSecondCache), since a core can wait for more lines of the
// L2 cache than of the L1 cache at once: with the L1 cache, a row takes a fifth longer with 4-bit weights.
constexpr int64_t kPanelAhead = 6144;
constexpr int kSecondCache = 2;

// How the integers of a panel are read: as numbers of 2 to 6 or of 8 bits, or as indices of a table of numbers.
enum class Read { kTwo, kThree, kFour, kFive, kSix, kEight, kTable };
constexpr bool is_narrow(Read read) { return read == Read::kTwo || read == Read::kThree; }
constexpr int high_bits_of(Read read) {
  return read == Read::kThree || read == Read::kFive ? 1 : read == Read::kSix ? 2 : 0;
}
// The bits of the numbers that are multiplied.
constexpr int bits_of(Read read) { return is_narrow(read) || read == Read::kFour ? 4 : high_bits_of(read) ? 6 : 8; }
constexpr int center_of(Read read) {
  return is_narrow(read) ? 4 * high_bits_of(read) : bits_of(read) == 8 ? 128 : 8 << high_bits_of(read);
}
constexpr int unit_of(Read read) { return is_narrow(read) ? 16 : read == Read::kEight ? 4 : 8; }
// The inputs of a block if all weights of the kind have blocks of one size, otherwise 0.
constexpr int block_of(Read read) { return is_narrow(read) ? 16 : high_bits_of(read) ? 32 / high_bits_of(read) : 0; }

template <Read kRead>
using DotsOf = Dots<bits_of(kRead)>;
using NumbersOf = Table<!Dots<8>::kCentered>;

// Returns center / 8 times `start`, which is a multiple of 8.
template <Read kRead>
static KV_INLINE int start_of(int start) {
  return center_of(kRead) == 4 ? start >> 1 : center_of(kRead) / 8 * start;
}

// Returns, from the fifth bit of every byte on, the kHigh upper bits of the inputs 4 quad to 4 quad + 3.
template <int kHigh>
static KV_INLINE vi fifth_bits(vi upper, int quad) {
  const int at = quad * kHigh;
  return (at < 4 ? upper << (4 - at) : upper >> (at - 4)) & (kHigh == 1 ? 0x10101010 : 0x30303030);
}

// Adds the dot products of one block of 16 inputs, of 2 or 3 bits. odd: whether the block is the second of the 32
// inputs whose upper bits are together, at `integers`.
template <Read kRead, int kRows, int kBytes>
static KV_INLINE void narrow_dots(const uint8_t* integers, bool odd, const int8_t* values, int64_t apart,
                                  const uint8_t* ahead, DotsOf<kRead> (&dots)[kRows][kBytes][kSlices]) {
  constexpr bool kThree = kRead == Read::kThree;
  __builtin_prefetch(ahead, 0, kSecondCache);
  if (kThree) __builtin_prefetch(ahead + kPanelLine, 0, kSecondCache);
  const uint8_t* const line = integers + (kThree ? (1 + odd) * kPanelLine : 0);
  for (int s = 0; s < kSlices; ++s) {
    vi all, upper{};
    memcpy(&all, line + 4 * W * s, sizeof all);
    if (kThree) memcpy(&upper, integers + 4 * W * s, sizeof upper), upper >>= odd ? 4 : 0;
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      vi four = (all >> 2 * q) & 0x03030303;
      if (kThree) four |= (q < 2 ? upper << (2 - q) : upper >> (q - 2)) & 0x04040404;
      for (int i = 0; i < kRows; ++i)
        for (int p = 0; p < kBytes; ++p) dots[i][p][s].add(four, values + p * apart + i * 16 + 4 * q);
    }
  }
}

// Adds the dot products of one block of kRows rows with W x kSlices columns to dots. integers: the panel's integers of
// this block. kBlock: the inputs of the block if it is known at compile time to be kMostBlock, otherwise 0 and `size`
// is read. ahead: the address from which bytes are prefetched meanwhile.
template <Read kRead, int kRows, int kBlock, int kBytes>
static KV_INLINE void dots_of_block(const uint8_t* integers, const int8_t* values, int64_t apart, int size,
                                    const uint8_t* ahead, const NumbersOf& table,
                                    DotsOf<kRead> (&dots)[kRows][kBytes][kSlices]) {
  constexpr int kUnit = unit_of(kRead);
  constexpr int kHigh = high_bits_of(kRead);
  const int block = kBlock ? kBlock : size;
  vi upper[kSlices];
  if (kHigh) {
    memcpy(upper, integers, sizeof upper), integers += kPanelLine;
    __builtin_prefetch(ahead + block / kUnit * kPanelLine, 0, kSecondCache);
  }
#pragma GCC unroll 4
  for (int k = 0; k < block; k += kUnit, integers += kPanelLine) {
    __builtin_prefetch(ahead + k / kUnit * kPanelLine, 0, kSecondCache);
    for (int s = 0; s < kSlices; ++s) {
      vi all;
      memcpy(&all, integers + 4 * W * s, sizeof all);
      vi low = all & 0x0f0f0f0f, high = (all >> 4) & 0x0f0f0f0f;
      if (kHigh) low |= fifth_bits<kHigh>(upper[s], k / 4), high |= fifth_bits<kHigh>(upper[s], k / 4 + 1);
      if (kRead == Read::kTable) low = table.of(low), high = table.of(high);
      if (kRead == Read::kEight && DotsOf<kRead>::kCentered) all ^= static_cast<int32_t>(0x80808080);
      for (int i = 0; i < kRows; ++i)
        for (int p = 0; p < kBytes; ++p) {
          const int8_t* const x = values + p * apart + i * block + k;
          if (kUnit == 8)
            dots[i][p][s].add(low, x), dots[i][p][s].add(high, x + 4);
          else
            dots[i][p][s].add(all, x);
        }
    }
  }
}

// The bytes of the rows that a pass over a block multiplies.
enum class Pass { kBoth, kHigh, kLow };

// One block of a panel and of a tile of rows.
struct PanelBlock {
  const uint8_t *integers, *ahead;
  int size, offsets;  // size: inputs; offsets: whether the weight has offsets
  bool odd;           // of 3 bits: whether the block is the second of two whose upper bits are together
  const int8_t* values;
  int64_t apart;  // bytes from the high bytes to the low bytes
  const float *step, *sum;
  const int32_t* start;
  NumbersOf table;
};

// Adds the products of a block with kCount of the tile's kRows rows, from row kFrom on, to y.
template <Read kRead, int kRows, int kBlock, Pass kPass, int kFrom = 0, int kCount = kRows>
static KV_INLINE void add_block(const PanelBlock& b, const vf (&scale)[kSlices], const vf (&offset)[kSlices],
                                vf (&y)[kRows][kSlices]) {
  constexpr int kBytes = kPass == Pass::kBoth ? 2 : 1, kFirst = kPass == Pass::kLow;
  const int8_t* const values = b.values + kFirst * b.apart + kFrom * b.size;
  const int32_t* const starts = b.start + kFirst * kRows + kFrom;
  const auto add_slice = [&](int s, const auto& total_of) {
    const vf unit = kPass == Pass::kHigh ? scale[s] * 256.0f : scale[s];
    for (int i = 0; i < kCount; ++i) {
      vi total = total_of(i, kBytes - 1);
      if (kBytes == 2) total += total_of(i, 0) << 8;
      y[kFrom + i][s] += __builtin_convertvector(total, vf) * (unit * b.step[kFrom + i]);
      if (kPass != Pass::kLow && b.offsets) y[kFrom + i][s] += offset[s] * b.sum[kFrom + i];
    }
  };
#if defined(__ARM_FEATURE_DOTPROD)
  if constexpr (kBlock > 0) {
    using Rows = RowsOf<kCount, kBytes, kBlock>;
    using Integers = SliceIntegers<32 / unit_of(kRead), kRead == Read::kTable, high_bits_of(kRead), NumbersOf>;
    const Rows rows(values, b.apart);
    constexpr int kLines = kBlock / unit_of(kRead) + (high_bits_of(kRead) > 0);
    for (int64_t at = 0; at < kLines * kPanelLine; at += kPanelLine) __builtin_prefetch(b.ahead + at, 0, kSecondCache);
    for (int s = 0; s < kSlices; ++s) {
      int32x4_t sums[kCount][kBytes];
      for (int i = 0; i < kCount; ++i)
        for (int p = 0; p < kBytes; ++p)
          sums[i][p] = DotsOf<kRead>::kCentered ? vdupq_n_s32(0) : vdupq_n_s32(start_of<kRead>(starts[p * kRows + i]));
      rows.multiply(Integers{b.integers + 4 * W * s, b.table, b.odd}, sums, Rows::kSteps);
      add_slice(s, [&](int i, int p) { return (vi)sums[i][p]; });
    }
    return;
  }
#endif
  typedef DotsOf<kRead> Columns[kBytes][kSlices];
  Columns dots[kCount];
  for (int i = 0; i < kCount; ++i)
    for (int p = 0; p < kBytes; ++p)
      for (int s = 0; s < kSlices; ++s) {
        const vi start = splat_i(start_of<kRead>(starts[p * kRows + i]));
        dots[i][p][s] = DotsOf<kRead>(DotsOf<kRead>::kCentered ? vi{} : start);
      }
  if constexpr (is_narrow(kRead))
    narrow_dots<kRead, kCount, kBytes>(b.integers, b.odd, values, b.apart, b.ahead, dots);
  else
    dots_of_block<kRead, kCount, kBlock, kBytes>(b.integers, values, b.apart, b.size, b.ahead, b.table, dots);
  for (int s = 0; s < kSlices; ++s) add_slice(s, [&](int i, int p) { return dots[i][p][s].total(); });
}

// Adds the products with the low bytes of those groups of kGroupRows rows that have any. fine: a bit for each group.
template <Read kRead, int kRows, int kBlock, int kGroup = 0>
static KV_INLINE void add_low_bytes(int fine, const PanelBlock& b, const vf (&scale)[kSlices],
                                    const vf (&offset)[kSlices], vf (&y)[kRows][kSlices]) {
  constexpr int kFrom = kGroup * kGroupRows;
  if constexpr (kFrom < kRows) {
    constexpr int kCount = kRows - kFrom < kGroupRows ? kRows - kFrom : kGroupRows;
    if (fine & 1 << kGroup) add_block<kRead, kRows, kBlock, Pass::kLow, kFrom, kCount>(b, scale, offset, y);
    add_low_bytes<kRead, kRows, kBlock, kGroup + 1>(fine, b, scale, offset, y);
  }
}

// Computes out[i * stride + c] = row i of a tile of kRows rows times column c of a panel.
template <Read kRead, int kRows, int kBlock, bool kTall>
static void panel_tile(const KvWeight& weight, const PanelLayout& l, const uint8_t* panel, const RoundedTile& x,
                       float* out, int64_t stride) {
  const PanelGroups groups(weight, l, panel);
  const int block = kBlock ? kBlock : l.block;
  const int64_t blocks = l.group / block, bytes = block * kPanelColumns * weight.bits / 8;
  const uint8_t* fine = x.fine;
  const int64_t numbers = l.integers / l.groups;  // bytes of the scales and offsets of a group
  PanelBlock b{panel + l.integers,
               panel + kPanelAhead,
               block,
               groups.kind != PanelGroups::kNone,
               false,
               x.values,
               x.apart,
               x.step,
               x.sum,
               x.start,
               kRead == Read::kTable ? NumbersOf(weight.table) : NumbersOf()};
  vf y[kRows][kSlices] = {};
  for (int64_t g = 0; g < l.groups; ++g) {
    vf scale[kSlices], offset[kSlices];
    for (int s = 0; s < kSlices; ++s) {
      scale[s] = groups.scales(g, s);
      if (b.offsets) offset[s] = groups.offsets(g, s, scale[s]);
    }
    __builtin_prefetch(b.ahead, 0, kSecondCache), b.ahead += numbers;
    for (int64_t i = 0; i < blocks; ++i) {
      add_block<kRead, kRows, kBlock, kTall ? Pass::kHigh : Pass::kBoth>(b, scale, offset, y);
      if (kTall && __builtin_expect(*fine++, 0)) {
        PanelBlock low = b;
        if (W == 8)
          __asm__("" : "+r"(low.integers));  // this rare pass reads integers again, since no register can keep them
        add_low_bytes<kRead, kRows, kBlock>(fine[-1], low, scale, offset, y);
      }
      b.integers += bytes, b.ahead += bytes, b.values += block * kRows;
      b.step += kRows, b.sum += kRows, b.start += kParts * kRows;
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int s = 0; s < kSlices; ++s) store(out + i * stride + s * W, y[i][s]);
}

// As panel_tile, for numbers of 2 and 3 bits, whose groups have 16 inputs. Products with sub-scales are summed, and the
// sums of 256 inputs are multiplied by their super-scales: less work for groups as small as these.
template <Read kRead, int kRows, bool kTall>
static void narrow_tile(const KvWeight& weight, const PanelLayout& l, const uint8_t* panel, const RoundedTile& x,
                        float* out, int64_t stride) {
  constexpr int kBlock = block_of(kRead), kFour = 4;  // kFour: groups whose sub-scales are read together
  constexpr bool kThree = kRead == Read::kThree;
  constexpr int kType = kThree ? KV_SUB_SCALES_6 : KV_SUB_SCALES_4;
  constexpr int64_t kPair = (kThree ? 3 : 2) * kPanelLine;  // bytes of the integers of two groups
  const PanelGroups groups(weight, l, panel);
  const half* super = groups.super;
  const uint8_t *scale = panel, *minimum = panel + l.offsets, *fine = x.fine;
  const int64_t numbers = l.integers / l.groups;  // bytes of the scales and minima of a group
  PanelBlock b{
      panel + l.integers, panel + kPanelAhead, kBlock, 0, false, x.values, x.apart, x.step, x.sum, x.start, {}};
  vf y[kRows][kSlices] = {};
  for (int64_t k = 0; k < l.inputs; k += KV_SUPER, super += groups.super_step) {
    vf products[kRows][kSlices] = {}, least[kRows][kSlices] = {};
    for (int four = 0; four < KV_SUPER / kBlock / kFour; ++four) {
      vf factor[kFour][kSlices], offset[kFour][kSlices];
#pragma GCC unroll 4
      for (int i = 0; i < kFour; ++i)
        for (int s = 0; s < kSlices; ++s) {
          factor[i][s] = PanelGroups::factor<kType>(scale + s * W, i);
          if (!kThree) offset[i][s] = PanelGroups::factor<kType>(minimum + s * W, i);
        }
      scale += kPanelColumns * kFour * kv_scale_bits(kType) / 8, minimum += kPanelColumns * kFour / 2;
      for (int i = 0; i < kFour; ++i) {
        b.odd = i & 1;
        add_block<kRead, kRows, kBlock, kTall ? Pass::kHigh : Pass::kBoth>(b, factor[i], offset[i], products);
        if (kTall && __builtin_expect(*fine++, 0))
          add_low_bytes<kRead, kRows, kBlock>(fine[-1], b, factor[i], offset[i], products);
        for (int r = 0; r < kRows && !kThree; ++r)
          for (int s = 0; s < kSlices; ++s) least[r][s] += offset[i][s] * b.sum[r];
        b.integers += kThree ? (i & 1) * kPair : kPair / 2, b.ahead += kPair / 2 + numbers, b.values += kBlock * kRows;
        b.step += kRows, b.sum += kRows, b.start += kParts * kRows;
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int s = 0; s < kSlices; ++s) {
        y[r][s] += products[r][s] * load(super + s * W);
        if (!kThree) y[r][s] += least[r][s] * load(super + kPanelColumns + s * W);
      }
  }
  for (int r = 0; r < kRows; ++r)
    for (int s = 0; s < kSlices; ++s) store(out + r * stride + s * W, y[r][s]);
}

using PanelTile = void (*)(const KvWeight&, const PanelLayout&, const uint8_t*, const RoundedTile&, float*, int64_t);

template <Read kRead, int kBlock, bool kTall, int kRows = kTall ? kTallRows : kFewRows>
static inline PanelTile tile_of_rows(int rows) {
  if constexpr (kRows > 1)
    if (rows < kRows) return tile_of_rows<kRead, kBlock, kTall, kRows - 1>(rows);
  if constexpr (is_narrow(kRead))
    return narrow_tile<kRead, kRows, kTall>;
  else
    return panel_tile<kRead, kRows, kBlock, kTall>;
}

template <Read kRead>
static inline PanelTile tile_for(int block, bool tall, int rows) {
  constexpr int kOne = block_of(kRead), kBlock = kOne ? kOne : kMostBlock;
  if (kOne || block == kBlock)
    return tall ? tile_of_rows<kRead, kBlock, true>(rows) : tile_of_rows<kRead, kBlock, false>(rows);
  return tall ? tile_of_rows<kRead, kOne, true>(rows) : tile_of_rows<kRead, kOne, false>(rows);
}

void panel_products(const KvWeight& weight, const PanelLayout& l, int64_t panel, const RoundedRows& x, int64_t first,
                    int64_t count, float* out, int64_t stride) {
  const uint8_t* const at = static_cast<const uint8_t*>(weight.data) + panel * l.panel;
  for (int64_t i = 0; i < count; i += x.tile_rows) {
    const RoundedTile tile = x.tile(first + i);
    const auto tile_for_weight = weight.table       ? tile_for<Read::kTable>
                                 : weight.bits == 2 ? tile_for<Read::kTwo>
                                 : weight.bits == 3 ? tile_for<Read::kThree>
                                 : weight.bits == 4 ? tile_for<Read::kFour>
                                 : weight.bits == 5 ? tile_for<Read::kFive>
                                 : weight.bits == 6 ? tile_for<Read::kSix>
                                                    : tile_for<Read::kEight>;
    const PanelTile products = tile_for_weight(x.block, x.tall, tile.rows);
    products(weight, l, at, tile, out + i * stride, stride);
  }
}

}  // namespace KV_ISA
}  // namespace kv
