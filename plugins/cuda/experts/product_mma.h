// One of the two products of the experts on tensor cores, for calls of many rows: a weight is read once for up to 32
// rows of its expert, dequantized exactly in registers (../linear/pairs.h), and multiplied by mma.m16n8k16 with its 16
// rows as the product's rows and the tile's rows as its columns. A block of four warps has 128 rows of the weight; with
// a gate these are 64 columns and their gates, so that a thread has both sums of a column. A warp has two times 16:
//
//   load a chunk of the weight's rows               one word of every 16 bytes a lane
//   for each chunk of inputs
//     store the inputs of the tile's rows           in 16 bits in shared memory, in the order of `Unit`; and the groups
//     for each unit of the chunk                    32 inputs in 4 bits, otherwise 16
//       sum[column, row] += (integer - zero) x scale
//     load the next chunk of the weight's rows
//   finish as product_cores.h
//
// Rows of float32, and inputs of the second product, are rounded to 16 bits, which the contract allows if weights are
// packed and `float_input` is 0, or the call has 16 bits.
#pragma once

#include "../linear/pairs.h"
#include "product.h"

namespace kv {
namespace cuda {

template <class T, int kBits>
struct ExpertsMma {
  using Args = ProductArgs;
  using U = Unit<T, kBits>;
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 2, kHigh = 2, kTiles = kTallRows / 8;
  static constexpr int kStrip = kThreads / kWarp * kHigh * kTileColumns;
  static constexpr int kChunk = 64, kUnits = kChunk / U::kBytes, kInputs = kUnits * U::kInputs;
  static constexpr int kRowStride = 2 * kInputs + (kBits == 4 ? 64 : 32), kEights = kInputs / 8;
  // A thread stores the same 8 inputs of every kApart-th row, of which it loads kAhead at a time.
  static constexpr int kApart = kThreads / kEights, kAhead = kTallRows / kApart < 4 ? kTallRows / kApart : 4;
  struct Registers {
    float sum[kHigh][kTiles][4], partial[kHigh][kTiles][4];
    uint32_t word[kHigh][2][kUnits][U::kWords];
    uint32_t a[kHigh][U::kSteps][4], b[2 * U::kSteps];
    uint32_t table[4];
  };
  struct alignas(8) Group {
    float scale;
    uint32_t less;
  };
  static constexpr size_t kOfRows = kTallRows * kRowStride, kOfGroups = kBits ? kUnits * kStrip * sizeof(Group) : 0;
  static constexpr size_t kOfSums = kTallRows * kStrip * sizeof(float);  // at the end, where rows and groups were
  static constexpr size_t shared_size() { return kOfRows + kOfGroups > kOfSums ? kOfRows + kOfGroups : kOfSums; }

  // The work of a block: a tile of the call's rows, and a strip of the weight's rows.
  struct Work {
    const Args& args;
    const KvWeight& weight;
    const Tile tile;
    const int strip, inputs;

    KV_DEVICE Work(const Args& args, int block)
        : args(args),
          weight(args.weight()),
          tile(tile_at(args.all, block / args.strips)),
          strip(block % args.strips),
          inputs(args.inputs()) {}

    // Returns the output's column of row i of the strip. The halves of 16 rows are 8 columns and their gates' ups, or
    // neighbouring columns.
    KV_DEVICE int column(int i) const {
      return args.gated() ? strip * (kStrip / 2) + i / kTileColumns * kPair + i % kPair : strip * kStrip + i;
    }
    // Returns the number of this row over all experts; if it is beyond the last, that of another row.
    KV_DEVICE size_t row(int i) const {
      const int outputs = args.outputs(), part = args.gated() ? i / kPair % 2 : 0;
      return static_cast<size_t>(tile.expert * (args.gated() ? 2 : 1) + part) * outputs +
             min_of(column(i), outputs - 1);
    }
  };
  // Returns the first row of a strip of tile m of thread t's warp.
  static KV_DEVICE int row_of(int t, int m, int half) {
    return (t / kWarp * kHigh + m) * kTileColumns + half * kPair + t % kWarp / 4;
  }

  static KV_DEVICE void run(Block<ExpertsMma>& block, const Args& args) {
    const Work w(args, block.index());
    const int count = w.tile.count;
    if (count == 0) return;
    Group* const groups = reinterpret_cast<Group*>(block.shared + kOfRows);
    block.each_alone([&](int t, Registers& r) {
#pragma unroll
      for (int i = 0; i < kHigh * kTiles * 4; ++i) r.sum[i / (kTiles * 4)][i / 4 % kTiles][i % 4] = 0.0f;
      if (kBits == 4 && w.weight.table) read_table(w.weight, r.table);
      load(r, w, 0, t);
    });
    for (int from = 0; from < w.inputs; from += kInputs) {
      block.each([&](int t, Registers&) {
        store_rows(w, block.shared, from, t);
        store_groups(w, groups, from, t);
      });
      const int units = min_of(kUnits, (w.inputs - from) / U::kInputs);
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
        if (u < units) multiply_unit(block, w, groups, u, count);
      block.each([&](int t, Registers& r) { load(r, w, from + kInputs, t); });
    }
    float* const sums = reinterpret_cast<float*>(block.shared);
    block.each([&](int t, Registers& r) {
#pragma unroll
      for (int i = 0; i < kHigh * kTiles * 4; ++i) {
        const int m = i / (kTiles * 4), n = i / 4 % kTiles;
        const Element at = element_of_sum(t % kWarp, i % 4);
        sums[(n * 8 + at.column) * kStrip + row_of(t, m, 0) - t % kWarp / 4 + at.row] = r.sum[m][n][i % 4];
      }
    });
    block.each_alone([&](int t, Registers&) {
      for (int i = t; i < count * (kStrip / 2); i += kThreads) {
        const int row = i / (kStrip / 2), pair = i % (kStrip / 2), at = pair / kPair * kTileColumns + pair % kPair;
        const float* const both = sums + row * kStrip + at;
        finish(w, w.tile.first + row, both[0], both[kPair], at);
      }
    });
  }

  // Within a phase: loads a lane's words of its warp's rows of the weight in a chunk.
  static KV_DEVICE void load(Registers& r, const Work& w, int from, int t) {
    const size_t bytes = static_cast<size_t>(w.inputs / U::kInputs) * U::kBytes;
#pragma unroll
    for (int m = 0; m < kHigh; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const char* const row = static_cast<const char*>(w.weight.data) + w.row(row_of(t, m, half)) * bytes;
#pragma unroll
        for (int u = 0; u < kUnits; ++u)
#pragma unroll
          for (int j = 0; j < U::kWords; ++j)
            if (from + u * U::kInputs < w.inputs)
              r.word[m][half][u][j] = *reinterpret_cast<const uint32_t*>(row + (from / U::kInputs + u) * U::kBytes +
                                                                         j * 16 + t % kWarp % 4 * 4);
      }
  }

  // Within a phase: stores thread t's share of a chunk of the tile's rows.
  static KV_DEVICE void store_rows(const Work& w, char* rows, int from, int t) {
    const int count = w.tile.count, v = t % kEights, k = from + v * 8;
    if (k >= w.inputs) return;
    with_inputs(w.args, [&](auto* elements) {
      for (int first = t / kEights; first < count; first += kAhead * kApart) {
        float x[kAhead][8];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int row = input_row(w.args, w.tile.first + min_of(first + i * kApart, count - 1));
          const auto* const at = elements + static_cast<size_t>(row) * w.inputs + k;
          float four[2][4];
          load_four(at, four[0]), load_four(at + 4, four[1]);
#pragma unroll
          for (int j = 0; j < 8; ++j) x[i][j] = four[j / 4][j % 4];
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
          if (first + i * kApart < count) U::store_inputs(rows + (first + i * kApart) * kRowStride, v, x[i]);
      }
    });
  }

  // Within a phase: stores thread t's share of the groups of a chunk, one for each unit and row of the weight.
  static KV_DEVICE void store_groups(const Work& w, Group* groups, int from, int t) {
    if constexpr (kBits != 0) {
      const int in_group = static_cast<int>(w.weight.group);
#pragma unroll
      for (int i = t; i < kUnits * kStrip; i += kThreads) {
        const int k = from + i / kStrip * U::kInputs;
        if (k >= w.inputs) break;
        const size_t group = w.row(i % kStrip) * (w.inputs / in_group) + k / in_group;
        groups[i] = Group{scale_at(w.weight, group), U::less(zero_of(w.weight, group))};
      }
    }
  }

  static KV_DEVICE void multiply_unit(Block<ExpertsMma>& block, const Work& w, const Group* groups, int u, int count) {
    const uint32_t flip = U::flip(w.weight.is_signed), flips[2] = {flip, U::upper_flip(flip)};
    block.each_alone([&](int t, Registers& r) {
#pragma unroll
      for (int m = 0; m < kHigh; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t lower = kBits ? groups[u * kStrip + row_of(t, m, half)].less : 0;
          const uint32_t less[2] = {lower, U::upper_less(lower)};
#pragma unroll
          for (int step = 0; step < U::kSteps; ++step)
#pragma unroll
            for (int pair = 0; pair < 2; ++pair)
              r.a[m][step][2 * pair + half] = kBits == 4 && w.weight.table
                                                  ? numbers_at(r.table, r.word[m][half][u][0], 2 * step + pair)
                                                  : U::pair(r.word[m][half][u], step, pair, flips[pair], less[pair]);
        }
    });
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (n * 8 >= count) break;
      block.each_alone([&](int t, Registers& r) {
        U::load_inputs(block.shared + (n * 8 + t % kWarp / 4) * kRowStride, u, t % kWarp, r.b);
      });
#pragma unroll
      for (int step = 0; step < U::kSteps; ++step)
#pragma unroll
        for (int m = 0; m < kHigh; ++m) {
          const auto product = [&](Registers& r) {
            return Product{kBits ? r.partial[m][n] : r.sum[m][n], r.a[m][step], r.b + 2 * step};
          };
          if (kBits && step == 0)
            multiply<T, true>(block, product);
          else
            multiply<T>(block, product);
        }
    }
    if constexpr (kBits != 0)
      block.each_alone([&](int t, Registers& r) {
#pragma unroll
        for (int m = 0; m < kHigh; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float scale = groups[u * kStrip + row_of(t, m, half)].scale;
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
              for (int j = 0; j < 2; ++j)
                if (n * 8 < count) r.sum[m][n][2 * half + j] += r.partial[m][n][2 * half + j] * scale;
          }
      });
  }

  // Returns the numbers of integers i and i + 4 of a word, by the weight's table, as a pair of 16-bit elements.
  static KV_DEVICE uint32_t numbers_at(const uint32_t (&table)[4], uint32_t word, int i) {
    uint32_t bytes[2];
    look_up(table, word, bytes);
    if constexpr (T::kBrain) return packed<T>(float_of(bytes[0], i), float_of(bytes[1], i));
    const uint32_t raised = bytes_of(bytes_of(bytes[0], bytes[1], i | (i + 4) << 4), 0x64646464u, kFirstTwo);
    return add_pairs<T>(raised, 0xe480e480u);  // less 1024 + 128
  }

  // Within a phase: writes the outputs of a row's two sums, of row i of the strip and of the row 8 behind it.
  static KV_DEVICE void finish(const Work& w, int row, float x, float y, int i) {
    const KvExperts& a = w.args.all.call;
    const void* const bias = w.args.second ? a.down_bias : a.first_bias;
    if (bias) x += element_at(a.type, bias, w.row(i)), y += element_at(a.type, bias, w.row(i + kPair));
    if (w.args.gated()) return write_output(w.args, row, w.column(i), inner_of(a, x, y));
    write_output(w.args, row, w.column(i), w.args.second ? x : activated(a, x));
    write_output(w.args, row, w.column(i + kPair), w.args.second ? y : activated(a, y));
  }
};

}  // namespace cuda
}  // namespace kv
