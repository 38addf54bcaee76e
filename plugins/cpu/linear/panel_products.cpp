// Products of rounded rows (rounding.h) with the panels of a packed weight (panels.h), by dot products of bytes. Each
// lane has a column of its own, so no lanes are added up.
//
//   for each panel of 16 columns, for each tile of rows
//     for each group g, for each block b of it
//       dots[row] = sum over the block of (u - center) x v        exact sums of high and of low bytes
//       y[row]   += (high dots[row] + low dots[row] / 256) x (scale[g] x step[row, b]) + offset[g] x sum[row, b]
//
// The scales of K types are integers, which a super-scale of 256 inputs multiplies. They are summed as integers are:
//
//   for each 256 inputs
//     products[row] = as y above, with u for u - center, the integer scales for the scales and no offsets
//     least[row]    = sum over the groups of the integer minimum (if there are none: of the integer scale) x sum[row,
//     b] y[row]       += products[row] x super-scale + least[row] x (super-scale of minima, or -center x super-scale)
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
// Loops over rows, bytes and slices have a pragma, so that the compiler unrolls them before it decides which arrays
// stay in registers. Vectors of four lanes have four slices: with the pragma, compiling takes five times as long.
#if KV_WIDTH >= 8
#define KV_UNROLL _Pragma("GCC unroll 16")
#else
#define KV_UNROLL
#endif

// Returns the integers of one slice of a line. Whole lines are never copied: GCC copies an array of vectors by halves
// of vectors, and a processor waits long for a vector whose halves were just written.
static KV_INLINE vi slice_of(const uint8_t* line, int slice) {
  return load_i(reinterpret_cast<const int32_t*>(line) + W * slice);
}

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

// Whether integers have minima, if their scales are multiplied by super-scales.
constexpr bool has_minimum(Read read) { return read == Read::kTwo || read == Read::kFour || read == Read::kFive; }

template <Read kRead>
using DotsOf = Dots<bits_of(kRead)>;
template <bool kSuper>
using ScaleOf = std::conditional_t<kSuper, Whole, vf>;
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

// Adds the products of kQuads times four inputs with the bytes at x of the first row, of which `row` bytes are between
// rows and `apart` bytes between high and low bytes.
template <Read kRead, int kQuads, int kRows, int kBytes, class Scale>
static KV_INLINE void add_quads(const vi (&w)[kQuads][kSlices], const int8_t* x, int row, int64_t apart,
                                const Scale (&scale)[kSlices], DotsOf<kRead> (&dots)[kRows][kBytes][kSlices]) {
  KV_UNROLL
  for (int i = 0; i < kRows; ++i) {
    KV_UNROLL
    for (int p = 0; p < kBytes; ++p) {
      vi four[kQuads];
      KV_UNROLL
      for (int q = 0; q < kQuads; ++q) four[q] = spread_bytes(x + p * apart + i * row + 4 * q);
      KV_UNROLL
      for (int s = 0; s < kSlices; ++s) {
        KV_UNROLL
        for (int q = 0; q < kQuads; ++q) dots[i][p][s].add(w[q][s], four[q]);
        if (DotsOf<kRead>::kMost == kQuads) dots[i][p][s].close(scale[s]);
      }
    }
  }
}

// Adds the dot products of one block of 16 inputs, of 2 or 3 bits. odd: whether the block is the second of the 32
// inputs whose upper bits are together, at `integers`.
template <Read kRead, int kRows, int kBytes, class Scale>
static KV_INLINE void narrow_dots(const uint8_t* integers, bool odd, const int8_t* values, int64_t apart,
                                  const uint8_t* ahead, const Scale (&scale)[kSlices],
                                  DotsOf<kRead> (&dots)[kRows][kBytes][kSlices]) {
  constexpr bool kThree = kRead == Read::kThree;
  __builtin_prefetch(ahead, 0, kSecondCache);
  if (kThree) __builtin_prefetch(ahead + kPanelLine, 0, kSecondCache);
  vi all[kSlices], upper[kSlices];
  KV_UNROLL
  for (int s = 0; s < kSlices; ++s) {
    all[s] = slice_of(integers + (kThree ? (1 + odd) * kPanelLine : 0), s);
    if (kThree) upper[s] = slice_of(integers, s) >> (odd ? 4 : 0);
  }
  KV_UNROLL
  for (int q = 0; q < 4; ++q) {
    vi w[1][kSlices];
    KV_UNROLL
    for (int s = 0; s < kSlices; ++s) {
      w[0][s] = (all[s] >> 2 * q) & 0x03030303;
      if (kThree) w[0][s] |= (q < 2 ? upper[s] << (2 - q) : upper[s] >> (q - 2)) & 0x04040404;
    }
    add_quads<kRead>(w, values + 4 * q, 16, apart, scale, dots);
  }
}

// Adds the dot products of one block of kRows rows with W x kSlices columns to dots. integers: the panel's integers of
// this block. kBlock: the inputs of the block if it is known at compile time to be kMostBlock, otherwise 0 and `size`
// is read. ahead: the address from which bytes are prefetched meanwhile.
template <Read kRead, int kRows, int kBlock, int kBytes, class Scale>
static KV_INLINE void dots_of_block(const uint8_t* integers, const int8_t* values, int64_t apart, int size,
                                    const uint8_t* ahead, const NumbersOf& table, const Scale (&scale)[kSlices],
                                    DotsOf<kRead> (&dots)[kRows][kBytes][kSlices]) {
  constexpr int kUnit = unit_of(kRead);
  constexpr int kHigh = high_bits_of(kRead);
  const int block = kBlock ? kBlock : size;
  vi upper[kSlices];
  if (kHigh) {
    KV_UNROLL
    for (int s = 0; s < kSlices; ++s) upper[s] = slice_of(integers, s);
    integers += kPanelLine;
    __builtin_prefetch(ahead + block / kUnit * kPanelLine, 0, kSecondCache);
  }
#pragma GCC unroll 4
  for (int k = 0; k < block; k += kUnit, integers += kPanelLine) {
    __builtin_prefetch(ahead + k / kUnit * kPanelLine, 0, kSecondCache);
    vi w[kUnit / 4][kSlices];
    KV_UNROLL
    for (int s = 0; s < kSlices; ++s) {
      const vi all = slice_of(integers, s);
      if constexpr (kRead == Read::kEight) {
        w[0][s] = DotsOf<kRead>::kCentered ? all ^ static_cast<int32_t>(0x80808080) : all;
      } else {
        vi low = all & 0x0f0f0f0f, high = (all >> 4) & 0x0f0f0f0f;
        if (kHigh) low |= fifth_bits<kHigh>(upper[s], k / 4), high |= fifth_bits<kHigh>(upper[s], k / 4 + 1);
        if (kRead == Read::kTable) low = table.of(low), high = table.of(high);
        w[0][s] = low, w[1][s] = high;
      }
    }
    add_quads<kRead>(w, values + k, block, apart, scale, dots);
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

// Adds the products of a block with kCount of the tile's kRows rows, from row kFrom on, to y. kSuper: whether scales
// are integers, which super-scales multiply; then numbers are u instead of u - center.
template <Read kRead, int kRows, int kBlock, Pass kPass, bool kSuper, int kFrom = 0, int kCount = kRows>
static KV_INLINE void add_block(const PanelBlock& b, const ScaleOf<kSuper> (&scale)[kSlices],
                                const vf (&offset)[kSlices], vf (&y)[kRows][kSlices]) {
  constexpr bool kStarts = !kSuper && !DotsOf<kRead>::kCentered;
  constexpr int kBytes = kPass == Pass::kBoth ? 2 : 1, kFirst = kPass == Pass::kLow;
  const int8_t* const values = b.values + kFirst * b.apart + kFrom * b.size;
  const int32_t* const starts = b.start + kFirst * kRows + kFrom;
  const auto add_slice = [&](int s, const auto& total_of) {
    KV_UNROLL
    for (int i = 0; i < kCount; ++i) {
      vf number = __builtin_convertvector(total_of(i, 0), vf);
      if (kPass == Pass::kBoth) number += __builtin_convertvector(total_of(i, kBytes - 1), vf) * (1.0f / 256.0f);
      if (kPass == Pass::kLow) number *= 1.0f / 256.0f;
      y[kFrom + i][s] += number * times(scale[s], b.step[kFrom + i]);
      if (!kSuper && kPass != Pass::kLow && b.offsets) y[kFrom + i][s] += offset[s] * b.sum[kFrom + i];
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
          sums[i][p] = kStarts ? vdupq_n_s32(start_of<kRead>(starts[p * kRows + i])) : vdupq_n_s32(0);
      rows.multiply(Integers{b.integers + 4 * W * s, b.table, b.odd}, sums, Rows::kSteps);
      add_slice(s, [&](int i, int p) { return (vi)sums[i][p]; });
    }
    return;
  }
#endif
  typedef DotsOf<kRead> Columns[kBytes][kSlices];
  Columns dots[kCount];
  KV_UNROLL
  for (int i = 0; i < kCount; ++i) {
    KV_UNROLL
    for (int p = 0; p < kBytes; ++p) {
      KV_UNROLL
      for (int s = 0; s < kSlices; ++s)
        dots[i][p][s] = DotsOf<kRead>(kStarts ? splat_i(start_of<kRead>(starts[p * kRows + i])) : vi{});
    }
  }
  if constexpr (is_narrow(kRead))
    narrow_dots<kRead>(b.integers, b.odd, values, b.apart, b.ahead, scale, dots);
  else
    dots_of_block<kRead, kCount, kBlock>(b.integers, values, b.apart, b.size, b.ahead, b.table, scale, dots);
  KV_UNROLL
  for (int s = 0; s < kSlices; ++s)
    add_slice(s, [&](int i, int p) {
      if (DotsOf<kRead>::kMost == 8) dots[i][p][s].close(scale[s]);
      return dots[i][p][s].total();
    });
}

// Returns the block for the rare pass over low bytes. With 16 registers that pass reads integers again: no registers
// can keep them meanwhile.
static KV_INLINE PanelBlock read_again(PanelBlock b) {
  if (W == 8) __asm__("" : "+r"(b.integers));
  return b;
}

// Adds the products with the low bytes of those groups of kGroupRows rows that have any. fine: a bit for each group.
template <Read kRead, int kRows, int kBlock, bool kSuper, int kGroup = 0>
static KV_INLINE void add_low_bytes(int fine, const PanelBlock& b, const ScaleOf<kSuper> (&scale)[kSlices],
                                    const vf (&offset)[kSlices], vf (&y)[kRows][kSlices]) {
  constexpr int kFrom = kGroup * kGroupRows;
  if constexpr (kFrom < kRows) {
    constexpr int kCount = kRows - kFrom < kGroupRows ? kRows - kFrom : kGroupRows;
    if (fine & 1 << kGroup) add_block<kRead, kRows, kBlock, Pass::kLow, kSuper, kFrom, kCount>(b, scale, offset, y);
    add_low_bytes<kRead, kRows, kBlock, kSuper, kGroup + 1>(fine, b, scale, offset, y);
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
  PanelBlock b{panel,
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
  for (int64_t g = 0, end = l.groups; g < l.inputs / l.group; end += l.groups) {
    b.integers += l.integers;
    for (; g < end; ++g) {
      vf scale[kSlices], offset[kSlices];
      for (int s = 0; s < kSlices; ++s) {
        scale[s] = groups.scales(g, s);
        if (b.offsets) offset[s] = groups.offsets(g, s, scale[s]);
      }
      __builtin_prefetch(b.ahead, 0, kSecondCache), b.ahead += numbers;
      for (int64_t i = 0; i < blocks; ++i) {
        add_block<kRead, kRows, kBlock, kTall ? Pass::kHigh : Pass::kBoth, false>(b, scale, offset, y);
        if (kTall && __builtin_expect(*fine++, 0))
          add_low_bytes<kRead, kRows, kBlock, false>(fine[-1], read_again(b), scale, offset, y);
        b.integers += bytes, b.ahead += bytes, b.values += block * kRows;
        b.step += kRows, b.sum += kRows, b.start += kParts * kRows;
      }
    }
  }
  KV_UNROLL
  for (int i = 0; i < kRows; ++i) {
    KV_UNROLL
    for (int s = 0; s < kSlices; ++s) store(out + i * stride + s * W, y[i][s]);
  }
}

// As panel_tile, for the K types of GGUF, whose scales are integers under super-scales.
template <Read kRead, int kRows, bool kTall>
static void super_tile(const KvWeight&, const PanelLayout& l, const uint8_t* panel, const RoundedTile& x, float* out,
                       int64_t stride) {
  constexpr int kBlock = kRead == Read::kFour ? kMostBlock : block_of(kRead), kFour = 4;
  constexpr int kType = kRead == Read::kTwo ? KV_SUB_SCALES_4 : kRead == Read::kThree ? KV_SUB_SCALES_6 : KV_SUB_SCALES;
  const int64_t kFactors = kPanelColumns * kFour * kv_scale_bits(kType) / 8;  // bytes of the factors of kFour groups
  constexpr int64_t kBytes = kBlock * kPanelColumns * (32 / unit_of(kRead) + high_bits_of(kRead)) / 8;
  const uint8_t* fine = x.fine;
  PanelBlock b{panel, panel, kBlock, 0, false, x.values, x.apart, x.step, x.sum, x.start, {}};
  vf y[kRows][kSlices] = {};
  for (const uint8_t* section = panel; section < panel + l.panel; section += l.bytes) {
    const uint8_t *scale = section, *minimum = has_minimum(kRead) ? section + l.offsets : section;
    b.integers = section + l.integers, b.ahead = section + kPanelAhead;
    for (int64_t at = 0; at < l.integers; at += kPanelLine, b.ahead += kPanelLine)
      __builtin_prefetch(b.ahead, 0, kSecondCache);
    vf products[kRows][kSlices] = {}, least[kRows][kSlices] = {};
    const vf none[kSlices] = {};
    for (int four = 0; four < KV_SUPER / kBlock / kFour; ++four, scale += kFactors, minimum += kFactors) {
      Whole factor[kFour][kSlices];
      KV_UNROLL
      for (int i = 0; i < kFour; ++i) {
        KV_UNROLL
        for (int s = 0; s < kSlices; ++s) {
          factor[i][s] = whole(PanelGroups::factor<kType>(scale + s * W, i));
          const vf other = __builtin_convertvector(PanelGroups::factor<kType>(minimum + s * W, i), vf);
          KV_UNROLL
          for (int r = 0; r < kRows; ++r) least[r][s] += other * b.sum[i * kRows + r];
        }
      }
      for (int i = 0; i < kFour; ++i) {
        b.odd = i & 1;
        add_block<kRead, kRows, kBlock, kTall ? Pass::kHigh : Pass::kBoth, true>(b, factor[i], none, products);
        if (kTall && __builtin_expect(*fine++, 0))
          add_low_bytes<kRead, kRows, kBlock, true>(fine[-1], read_again(b), factor[i], none, products);
        b.integers += kRead == Read::kThree ? (i & 1) * 2 * kBytes : kBytes;  // two blocks of 3 bits share upper bits
        b.ahead += kBytes, b.values += kBlock * kRows, b.step += kRows, b.sum += kRows;
      }
    }
    KV_UNROLL
    for (int s = 0; s < kSlices; ++s) {
      const half* const supers = reinterpret_cast<const half*>(section + l.supers) + s * W;
      const vf of_products = load(supers);
      const vf of_least =
          has_minimum(kRead) ? load(supers + kPanelColumns) : static_cast<float>(-center_of(kRead)) * of_products;
      KV_UNROLL
      for (int r = 0; r < kRows; ++r) y[r][s] += products[r][s] * of_products + least[r][s] * of_least;
    }
  }
  KV_UNROLL
  for (int r = 0; r < kRows; ++r) {
    KV_UNROLL
    for (int s = 0; s < kSlices; ++s) store(out + r * stride + s * W, y[r][s]);
  }
}

// Returns whether super_tile multiplies a weight.
static inline bool is_super(const KvWeight& weight, const PanelLayout& l) {
  return weight.bits < 4 || (weight.scale_type == KV_SUB_SCALES && !weight.table && l.group == l.block &&
                             (weight.bits == 6 ? weight.is_signed : !weight.is_signed && weight.minimum));
}

using PanelTile = void (*)(const KvWeight&, const PanelLayout&, const uint8_t*, const RoundedTile&, float*, int64_t);

// kSuper: whether super_tile multiplies the weight.
template <Read kRead, int kBlock, bool kSuper, bool kTall, int kRows = kTall ? kTallRows : kFewRows>
static inline PanelTile tile_of_rows(int rows) {
  if constexpr (kRows > 1)
    if (rows < kRows) return tile_of_rows<kRead, kBlock, kSuper, kTall, kRows - 1>(rows);
  if constexpr (kSuper)
    return super_tile<kRead, kRows, kTall>;
  else
    return panel_tile<kRead, kRows, kBlock, kTall>;
}

template <Read kRead, int kBlock, bool kSuper = false>
static inline PanelTile tile_of(bool tall, int rows) {
  return tall ? tile_of_rows<kRead, kBlock, kSuper, true>(rows) : tile_of_rows<kRead, kBlock, kSuper, false>(rows);
}

template <Read kRead>
static inline PanelTile tile_for(bool super, int block, bool tall, int rows) {
  constexpr int kOne = block_of(kRead), kBlock = kOne ? kOne : kMostBlock;
  if constexpr (kOne || kRead == Read::kFour)
    if (super) return tile_of<kRead, kBlock, true>(tall, rows);
  if constexpr (is_narrow(kRead))
    return nullptr;  // always super
  else
    return block == kBlock ? tile_of<kRead, kBlock>(tall, rows) : tile_of<kRead, kOne>(tall, rows);
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
    const PanelTile products = tile_for_weight(is_super(weight, l), x.block, x.tall, tile.rows);
    products(weight, l, at, tile, out + i * stride, stride);
  }
}

}  // namespace KV_ISA
}  // namespace kv
