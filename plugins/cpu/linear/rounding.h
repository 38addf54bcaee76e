// Rows x that are rounded to integers v of 16 bits, for products with panels. Each block of 8, 16 or 32 inputs of a row
// has a step of its own:
//
//   step  = max |x| of the block / 127
//   v     = round(256 x / step) = 256 high + low, in two bytes; low is at least -127, so that its sign can change
//   start = -8 x the sum of high, and likewise of low. Products with the unsigned integers u of a weight start with
//           center / 8 times this number, so that they become products with u - center
//   sum   = step / 256 x the sum of v
//
// The step of a block with a number that is not finite is NaN. A block without a number of kLeastRounded or more is
// rounded to zeros.
//
// Few rows always have both bytes. Their products wait for the weights' bytes, so the low bytes take no more time. With
// kTallFrom rows or more (`tall`: a prompt) a block whose max |x| is at most kCoarse times the root mean square of its
// row has only high bytes: low = 0 and v = 256 round(x / step). So only blocks of small numbers have the error of
// 8 bits. A row's own numbers alone decide which of its blocks have low bytes, so the products of a row do not depend
// on the other rows of the call.
//
// Rounded rows are stored in tiles, [tile][high, low][block][row][inputs of the block]: a tile of products then reads
// contiguous bytes, and low bytes that no product reads do not take room in a cache. The last tile may have fewer rows.
#pragma once

#include "../core/scratch.h"
#include "../core/simd.h"
#include "panels.h"

namespace kv {
namespace KV_ISA {

// Rows of a tile, as many as there are registers for: a tile of kFewRows has sums of both bytes at once, a tile of
// kTallRows the sums of one byte. The low bytes of kGroupRows rows of a tall tile are multiplied together, or none are.
#if KV_WIDTH == 16
constexpr int kFewRows = 8, kTallRows = 12, kGroupRows = 4;
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kFewRows = 2, kTallRows = 4, kGroupRows = 2;  // slice_dots.h
#elif defined(__aarch64__)
constexpr int kFewRows = 4, kTallRows = 4, kGroupRows = 2;
#else
constexpr int kFewRows = 2, kTallRows = 4, kGroupRows = 1;  // 16 registers
#endif
constexpr int kParts = 2;                 // the bytes of a rounded number: high and low
constexpr float kMostRounded = 32512.0f;  // 127 x 256
constexpr float kCoarse = 5.0f;
constexpr int kTallFrom = 48;            // the fewest rows of a prompt
constexpr float kLeastRounded = 1e-33f;  // 32512 / kLeastRounded is a finite float32 number

// One tile of rounded rows.
struct RoundedTile {
  const int8_t* values;
  int64_t apart;            // bytes from the high bytes of a block to its low ones
  const float *step, *sum;  // [blocks, rows]
  const int32_t* start;     // [blocks, kParts, rows]
  const uint8_t* fine;      // [blocks], in a tall tile: a bit for each group of rows that has low bytes
  int rows;
};

struct RoundedRows {
  int block = 0, tile_rows = 1;
  bool tall = false;
  int64_t rows = 0, blocks = 0;
  int8_t* values = nullptr;
  float *step = nullptr, *sum = nullptr;
  int32_t* start = nullptr;
  uint8_t* fine = nullptr;  // [tiles, blocks]

  // Returns the bytes of memory that the rows need: a multiple of 4 for every row, so that other rounded rows may
  // follow in the same memory.
  static size_t bytes(int block, int64_t rows, int64_t inputs) {
    const int64_t blocks = (inputs + block - 1) / block;
    return static_cast<size_t>(rows * blocks * (block * kParts + 20));
  }
  RoundedRows() = default;
  RoundedRows(int block, int64_t rows, int64_t inputs, uint8_t* memory)
      : block(block),
        tile_rows(rows < kTallFrom ? kFewRows : kTallRows),
        tall(rows >= kTallFrom),
        rows(rows),
        blocks((inputs + block - 1) / block) {
    const int64_t count = rows * blocks;
    step = reinterpret_cast<float*>(memory), sum = step + count;
    start = reinterpret_cast<int32_t*>(sum + count);
    values = reinterpret_cast<int8_t*>(start + count * kParts);
    fine = reinterpret_cast<uint8_t*>(values + count * block * kParts);
  }

  int64_t tiles() const { return (rows + tile_rows - 1) / tile_rows; }
  // Returns the tile that begins with row `first`, a multiple of tile_rows.
  RoundedTile tile(int64_t first) const {
    const int64_t at = first * blocks;
    const int count = static_cast<int>(rows - first < tile_rows ? rows - first : tile_rows);
    return {values + at * block * kParts,
            count * blocks * block,
            step + at,
            sum + at,
            start + at * kParts,
            fine + first / tile_rows * blocks,
            count};
  }

  // Rounds the rows of a tile. row_of(i) returns the address of row i [inputs].
  template <class RowOf>
  void round(int64_t inputs, int64_t tile, const RowOf& row_of) const {
    const int64_t first = tile * tile_rows;
    const int count = static_cast<int>(rows - first < tile_rows ? rows - first : tile_rows);
    memset(fine + tile * blocks, 0, static_cast<size_t>(blocks));
    for (int i = 0; i < count; ++i) {
      const float* const row = row_of(first + i);
      const float squares = tall ? dot(row, row, static_cast<int>(inputs)) : 0.0f;
      const float coarse = kCoarse * __builtin_sqrtf(squares / static_cast<float>(inputs));
      for (int64_t b = 0; b < blocks; ++b) {
        float padded[kMostBlock] = {};
        const float* from = row + b * block;
        if (inputs - b * block < block)
          from =
              static_cast<const float*>(memcpy(padded, from, static_cast<size_t>(inputs - b * block) * sizeof(float)));
        const bool both = block == kMostBlock ? round_block(kMostBlock, from, coarse, first, b, i, count)
                                              : round_block(block, from, coarse, first, b, i, count);
        if (both) fine[tile * blocks + b] |= static_cast<uint8_t>(1 << i / kGroupRows);
      }
    }
  }

 private:
  static vf lanes_of(const float* x, int i, int block) {
    if (block - i >= W) return load(x + i);
    float padded[W] = {};
    memcpy(padded, x + i, static_cast<size_t>(block - i) * sizeof(float));
    return load(padded);
  }

  // Returns the sum of the lanes, whose magnitudes are below 2^16: float32 adds them exactly.
  static int sum_of(vi v) { return static_cast<int>(kv::KV_ISA::sum(__builtin_convertvector(v, vf))); }

  // Rounds block b of row i of the tile of `count` rows that begins with row `first`. Returns whether the block has low
  // bytes. coarse: the largest number of a block that has none. Always inlined, so that the loops know a `block` that
  // is a constant.
  __attribute__((always_inline)) bool round_block(int block, const float* x, float coarse, int64_t first, int64_t b,
                                                  int i, int count) const {
    const float infinite = __builtin_inff();
    vf highest{};
    for (int k = 0; k < block; k += W) {
      const vf v = lanes_of(x, k, block);
      highest = vmax(select(v - v == 0.0f, select(v < 0.0f, -v, v), splat(infinite)), highest);
    }
    const float most = max(highest);
    const bool usable = most >= kLeastRounded && most < infinite, both = !tall || !(most <= coarse);
    const vf factor = splat(usable ? (both ? kMostRounded : kMostRounded / 256.0f) / most : 0.0f);
    const int64_t at = first * blocks + b * count;
    int8_t* const upper_bytes = values + first * blocks * block * kParts + (b * count + i) * block;
    int8_t* const lower_bytes = upper_bytes + count * blocks * block;
    vi highs{}, lows{};
    for (int k = 0; k < block; k += W) {
      const int inputs = block - k < W ? block - k : W;
      const vf v = usable ? lanes_of(x, k, block) * factor : vf{};
      const vf whole = v + 12582912.0f;  // the integer is in the low bits
      vi number;
      memcpy(&number, &whole, sizeof number);
      number -= 0x4B400000;  // 12582912 itself
      vi high = number, low{};
      if (both) {
        high = (number + 128) >> 8;
        const vi rest = number - (high << 8);
        low = rest < -127 ? splat_i(-127) : rest;
      }
      highs += high, lows += low;
      const vb upper = low_bytes(high), lower = low_bytes(low);
      if (inputs == W) {  // a size that the compiler knows takes no call
        memcpy(upper_bytes + k, &upper, W), memcpy(lower_bytes + k, &lower, W);
      } else {
        memcpy(upper_bytes + k, &upper, static_cast<size_t>(inputs));
        memcpy(lower_bytes + k, &lower, static_cast<size_t>(inputs));
      }
    }
    const float size = most < kLeastRounded ? 0.0f
                       : most < infinite    ? most / (kMostRounded / 256.0f)
                                            : __builtin_nanf("");
    const int high = sum_of(highs), low = sum_of(lows);
    step[at + i] = size, sum[at + i] = size / 256.0f * static_cast<float>(256 * high + low);
    start[kParts * at + i] = -8 * high, start[kParts * at + count + i] = -8 * low;
    return both;
  }
};

}  // namespace KV_ISA
}  // namespace kv
