// Rows that are rounded to whole numbers for products with panels: v = round(x / step), one step for each block of 8,
// 16 or 32 inputs.
//
//   one part:   step = max |x| / 127,   v is a byte
//   two parts:  step = max |x| / 32512, v = 256 high + low in two bytes; low is at least -127, so that its sign can
//   change of each block also: step; sum = step x the sum of v; start = -center x the sum of v, what unsigned integers
//   u of a weight have too much beside u - center
//
// A block with a number that is not finite has the step NaN; one without a number above kLeastRounded is zeros.
//
// Rows lie in tiles of kRowsOfTile, the last of fewer: [tile][block][row][part][inputs of the block], so that what a
// tile of products reads together lies together.
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
constexpr float kLeastRounded = 1e-33f;  // over which 32512 is a finite number

// One tile of rows.
struct RoundedTile {
  const int8_t* values;
  const float *step, *sum;  // [blocks, rows]
  const int32_t* start4;    // [blocks, rows], for weights of 4 bits
  int rows;
};

struct RoundedRows {
  int block = 0, parts = 1;
  int64_t rows = 0, blocks = 0;
  int8_t* values = nullptr;
  float *step = nullptr, *sum = nullptr;
  int32_t* start4 = nullptr;

  static size_t bytes(int block, int parts, int64_t rows, int64_t inputs) {
    const int64_t blocks = (inputs + block - 1) / block;
    return static_cast<size_t>(rows * blocks * (block * parts + 12));
  }
  RoundedRows() = default;
  RoundedRows(int block, int parts, int64_t rows, int64_t inputs, uint8_t* memory)
      : block(block), parts(parts), rows(rows), blocks((inputs + block - 1) / block) {
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
    return {values + at * block * parts, step + at, sum + at, start4 + at, rows_of_tile(first)};
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
      const int64_t at = first * blocks + b * count + i;
      parts == 1 ? round_block<1>(from, at) : round_block<2>(from, at);
    }
  }

 private:
  static vf lanes_of(const float* x, int i, int block) {
    if (block - i >= W) return load(x + i);
    float padded[W] = {};
    memcpy(padded, x + i, static_cast<size_t>(block - i) * sizeof(float));
    return load(padded);
  }

  template <int kParts>
  void round_block(const float* x, int64_t at) const {
    typedef int8_t vs __attribute__((vector_size(W)));
    constexpr float kMost = kParts == 1 ? 127.0f : 32512.0f;
    const float infinite = __builtin_inff();
    vf highest{};
    for (int i = 0; i < block; i += W) {
      const vf v = lanes_of(x, i, block);
      highest = vmax(select(v - v == 0.0f, select(v < 0.0f, -v, v), splat(infinite)), highest);
    }
    const float most = max(highest);
    const bool usable = most >= kLeastRounded && most < infinite;
    const vf factor = splat(usable ? kMost / most : 0.0f);
    vf total{};
    for (int i = 0; i < block; i += W) {
      const int size = block - i < W ? block - i : W;
      const vf v = usable ? lanes_of(x, i, block) * factor : vf{};
      const vf whole = v + 12582912.0f;  // the integer is in the low bits
      total += whole - 12582912.0f;
      vi number;
      memcpy(&number, &whole, sizeof number);
      number = (number << 9) >> 9;
      vi high = number;
      if constexpr (kParts == 2) {
        high = (number + 128) >> 8;
        const vi rest = number - (high << 8), low = rest < -127 ? splat_i(-127) : rest;
        const vs narrow = __builtin_convertvector(low, vs);
        memcpy(values + (at * 2 + 1) * block + i, &narrow, static_cast<size_t>(size));
      }
      const vs narrow = __builtin_convertvector(high, vs);
      memcpy(values + at * kParts * block + i, &narrow, static_cast<size_t>(size));
    }
    const float size = most < kLeastRounded ? 0.0f : most < infinite ? most / kMost : __builtin_nanf("");
    const float numbers = kv::KV_ISA::sum(total);
    step[at] = size, sum[at] = size * numbers, start4[at] = -8 * static_cast<int32_t>(numbers);
  }
};

}  // namespace KV_ISA
}  // namespace kv
