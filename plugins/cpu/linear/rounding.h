// Rows that are rounded to whole numbers of 16 bits for products with panels, one step for each block of 8, 16 or 32
// inputs:
//
//   step  = max |x| of the block / 32512
//   v     = round(x / step) = 256 high + low, in two bytes; low is at least -127, so that its sign can change
//   start = -center x the sum of v: what unsigned integers u of a weight have too much beside u - center
//   sum   = step x the sum of v
//
// A block with a number that is not finite has the step NaN; one without a number above kLeastRounded is zeros.
//
// Rows lie in tiles of kRowsOfTile, the last of fewer: [tile][block][row][high, low][inputs of the block], so that what
// a tile of products reads together lies together.
//
// One byte would do with a step for each 4 or 8 inputs; with a step for each 32, KL of a prompt is five times as large
// as with a step for each 8, and smaller blocks take as long as the second byte.
#pragma once

#include "../core/scratch.h"
#include "../core/simd.h"
#include "panels.h"

namespace kv {
namespace KV_ISA {

#if KV_WIDTH == 16
constexpr int kRowsOfTile = 8;
#elif defined(__aarch64__)
constexpr int kRowsOfTile = 4;
#else
constexpr int kRowsOfTile = 2;  // 16 registers
#endif
constexpr int kParts = 2;                 // of a rounded number: high and low
constexpr float kMostRounded = 32512.0f;  // 127 x 256
constexpr float kLeastRounded = 1e-33f;   // over which 32512 is a finite number

// One tile of rows.
struct RoundedTile {
  const int8_t* values;
  const float *step, *sum;  // [blocks, rows]
  const int32_t* start4;    // [blocks, rows], for weights of 4 bits
  int rows;
};

struct RoundedRows {
  int block = 0;
  int64_t rows = 0, blocks = 0;
  int8_t* values = nullptr;
  float *step = nullptr, *sum = nullptr;
  int32_t* start4 = nullptr;

  static size_t bytes(int block, int64_t rows, int64_t inputs) {
    const int64_t blocks = (inputs + block - 1) / block;
    return static_cast<size_t>(rows * blocks * (block * kParts + 12));
  }
  RoundedRows() = default;
  RoundedRows(int block, int64_t rows, int64_t inputs, uint8_t* memory)
      : block(block), rows(rows), blocks((inputs + block - 1) / block) {
    const int64_t count = rows * blocks;
    step = reinterpret_cast<float*>(memory), sum = step + count;
    start4 = reinterpret_cast<int32_t*>(sum + count), values = reinterpret_cast<int8_t*>(start4 + count);
  }

  int rows_of_tile(int64_t first) const {
    return static_cast<int>(rows - first < kRowsOfTile ? rows - first : kRowsOfTile);
  }
  // The tile that begins with row `first`, a multiple of kRowsOfTile.
  RoundedTile tile(int64_t first) const {
    const int64_t at = first * blocks;
    return {values + at * block * kParts, step + at, sum + at, start4 + at, rows_of_tile(first)};
  }

  // Rounds the row x [inputs].
  void round(const float* x, int64_t inputs, int64_t row) const {
    const int64_t first = row / kRowsOfTile * kRowsOfTile, i = row - first;
    const int count = rows_of_tile(first);
    for (int64_t b = 0; b < blocks; ++b) {
      float padded[kMostBlock] = {};
      const float* from = x + b * block;
      if (inputs - b * block < block)
        from = static_cast<const float*>(memcpy(padded, from, static_cast<size_t>(inputs - b * block) * sizeof(float)));
      round_block(from, first * blocks + b * count + i);
    }
  }

 private:
  static vf lanes_of(const float* x, int i, int block) {
    if (block - i >= W) return load(x + i);
    float padded[W] = {};
    memcpy(padded, x + i, static_cast<size_t>(block - i) * sizeof(float));
    return load(padded);
  }

  void round_block(const float* x, int64_t at) const {
    typedef int8_t vs __attribute__((vector_size(W)));
    const float infinite = __builtin_inff();
    vf highest{};
    for (int i = 0; i < block; i += W) {
      const vf v = lanes_of(x, i, block);
      highest = vmax(select(v - v == 0.0f, select(v < 0.0f, -v, v), splat(infinite)), highest);
    }
    const float most = max(highest);
    const bool usable = most >= kLeastRounded && most < infinite;
    const vf factor = splat(usable ? kMostRounded / most : 0.0f);
    vf total{};
    for (int i = 0; i < block; i += W) {
      const int size = block - i < W ? block - i : W;
      const vf v = usable ? lanes_of(x, i, block) * factor : vf{};
      const vf whole = v + 12582912.0f;  // the integer is in the low bits
      total += whole - 12582912.0f;
      vi number;
      memcpy(&number, &whole, sizeof number);
      number = (number << 9) >> 9;
      const vi high = (number + 128) >> 8, rest = number - (high << 8), low = rest < -127 ? splat_i(-127) : rest;
      const vs first = __builtin_convertvector(high, vs), second = __builtin_convertvector(low, vs);
      memcpy(values + at * kParts * block + i, &first, static_cast<size_t>(size));
      memcpy(values + (at * kParts + 1) * block + i, &second, static_cast<size_t>(size));
    }
    const float size = most < kLeastRounded ? 0.0f : most < infinite ? most / kMostRounded : __builtin_nanf("");
    const float numbers = kv::KV_ISA::sum(total);
    step[at] = size, sum[at] = size * numbers, start4[at] = -8 * static_cast<int32_t>(numbers);
  }
};

}  // namespace KV_ISA
}  // namespace kv
