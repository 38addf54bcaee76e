// Rows that are rounded to whole numbers of 16 bits for products with panels, one step for each block of 8, 16 or 32
// inputs:
//
//   step  = max |x| of the block / 32512
//   v     = round(x / step) = 256 high + low, in two bytes; low is at least -127, so that its sign can change
//   start = -center x the sum of high, and of low: what unsigned integers u of a weight have too much beside u - center
//   sum   = step x the sum of v
//
// A block with a number that is not finite has the step NaN; one without a number above kLeastRounded is zeros.
//
// Few rows always have both bytes: their products are bound by the weights' bytes, so the low bytes cost nothing. In a
// prompt (`tall`, of kTallFrom rows or more) a block has low = 0 where max |x| is at most kCoarse times the root mean
// square of its row, and v = 256 round(x / (256 step)). What remains of the error of 8 bits is in blocks of small
// numbers. Which blocks those are depends on the row alone, so a row's products do not depend on the rows beside it.
//
// Rows lie in tiles: [tile][high, low][block][row][inputs of the block], so that what a tile of products reads
// together lies together, and low bytes that nothing reads are in no cache. The last tile has fewer rows.
#pragma once

#include "../core/scratch.h"
#include "../core/simd.h"
#include "panels.h"

namespace kv {
namespace KV_ISA {

// Rows of a tile: few rows have sums of both bytes in registers, tall tiles those of one byte. Of a group of rows of a
// tall tile, all low bytes are multiplied or none.
#if KV_WIDTH == 16
constexpr int kFewRows = 8, kTallRows = 12, kGroupRows = 4;
#elif defined(__aarch64__)
constexpr int kFewRows = 4, kTallRows = 4, kGroupRows = 2;
#else
constexpr int kFewRows = 2, kTallRows = 4, kGroupRows = 1;  // 16 registers
#endif
constexpr int kParts = 2;                 // of a rounded number: high and low
constexpr float kMostRounded = 32512.0f;  // 127 x 256
constexpr float kCoarse = 5.0f;
constexpr int kTallFrom = 48;            // rows
constexpr float kLeastRounded = 1e-33f;  // over which 32512 is a finite number

// One tile of rows.
struct RoundedTile {
  const int8_t* values;
  int64_t apart;                   // bytes from the high bytes of a block to its low ones
  const float *step, *sum;         // [blocks, rows]
  const int32_t *start4, *start8;  // [blocks, kParts, rows], for weights of 4 and of 8 bits
  const uint8_t* fine;             // [blocks], of a tall tile: a bit for each group with a low byte that is not 0
  int rows;
};

struct RoundedRows {
  int block = 0, tile_rows = 1;
  bool tall = false;
  int64_t rows = 0, blocks = 0;
  int8_t* values = nullptr;
  float *step = nullptr, *sum = nullptr;
  int32_t *start4 = nullptr, *start8 = nullptr;
  uint8_t* fine = nullptr;  // [tiles, blocks]

  // Bytes of memory; a multiple of 4 for every row, so that rounded rows may lie behind others.
  static size_t bytes(int block, int64_t rows, int64_t inputs) {
    const int64_t blocks = (inputs + block - 1) / block;
    return static_cast<size_t>(rows * blocks * (block * kParts + 28));
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
    start4 = reinterpret_cast<int32_t*>(sum + count);
    start8 = start4 + count * kParts;
    values = reinterpret_cast<int8_t*>(start8 + count * kParts);
    fine = reinterpret_cast<uint8_t*>(values + count * block * kParts);
  }

  int64_t tiles() const { return (rows + tile_rows - 1) / tile_rows; }
  // The tile that begins with row `first`, a multiple of tile_rows.
  RoundedTile tile(int64_t first) const {
    const int64_t at = first * blocks;
    const int count = static_cast<int>(rows - first < tile_rows ? rows - first : tile_rows);
    return {values + at * block * kParts,
            count * blocks * block,
            step + at,
            sum + at,
            start4 + at * kParts,
            start8 + at * kParts,
            fine + first / tile_rows * blocks,
            count};
  }

  // Rounds the rows of a tile; row_of(i): row i [inputs].
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
        if (round_block(from, coarse, first, b, i, count))
          fine[tile * blocks + b] |= static_cast<uint8_t>(1 << i / kGroupRows);
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

  // The sum of the lanes, each of which is below 2^16 in magnitude.
  static int sum_of(vi v) { return static_cast<int>(kv::KV_ISA::sum(__builtin_convertvector(v, vf))); }

  // Rounds block b of row i of the tile of `count` rows that begins with row `first`. Returns whether the block has low
  // bytes. coarse: the largest number of a block that has none.
  bool round_block(const float* x, float coarse, int64_t first, int64_t b, int i, int count) const {
    typedef int8_t vs __attribute__((vector_size(W)));
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
      const vs upper = __builtin_convertvector(high, vs), lower = __builtin_convertvector(low, vs);
      memcpy(upper_bytes + k, &upper, static_cast<size_t>(inputs));
      memcpy(lower_bytes + k, &lower, static_cast<size_t>(inputs));
    }
    const float size = most < kLeastRounded ? 0.0f : most < infinite ? most / kMostRounded : __builtin_nanf("");
    const int high = sum_of(highs), low = sum_of(lows);
    step[at + i] = size, sum[at + i] = size * static_cast<float>(256 * high + low);
    start4[kParts * at + i] = -8 * high, start4[kParts * at + count + i] = -8 * low;
    start8[kParts * at + i] = -128 * high, start8[kParts * at + count + i] = -128 * low;
    return both;
  }
};

}  // namespace KV_ISA
}  // namespace kv
