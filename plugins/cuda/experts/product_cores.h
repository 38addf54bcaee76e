// One of the two products of the experts: of a tile's rows with rows of its expert's weight, in float32 on CUDA cores.
// A block of four warps has 16 rows of the weight; with a gate these are 8 columns and their gates. A warp has four:
//
//   load a chunk of the weight's rows, and its scales    16 or 8 bytes of each of the warp's four rows a lane
//   for each chunk of inputs
//     store the inputs of the tile's rows                in float32 in shared memory
//     sum[row, column] += x (integer - zero) scale
//     load the next chunk of the weight's rows
//   add up the lanes' sums
//   first product: bias, activation -> inner;   second product: factor (sum + bias) -> result
//
// Packed integers become bytes (those of 4 bits by a table, which is the weight's own or that of two's complement), and
// bytes become floats by the addition of 2^23, so that one exact subtraction gives integer - zero.
#pragma once

#include "product.h"

namespace kv {
namespace cuda {

// The storage of a weight of which a lane reads whole vectors: packed, kInputs numbers of one group at a time, or
// float, Half, BFloat. `Any` stands for all of them with other groups and sizes, and reads one number at a time.
template <int kBitsOf, int kInputsOf>
struct Packed {
  static constexpr int kBits = kBitsOf, kInputs = kInputsOf;
};
struct Any {};

template <class W>
constexpr bool kPacked = false;
template <int kBits, int kInputs>
constexpr bool kPacked<Packed<kBits, kInputs>> = true;
// Returns the numbers of a weight that a lane reads at a time.
template <class W>
constexpr int lane_inputs() {
  if constexpr (kPacked<W>)
    return W::kInputs;
  else if constexpr (std::is_same<W, Any>::value)
    return 8;
  else
    return kLanes<W>;
}
// Returns the bits of a number of a weight.
template <class W>
constexpr int number_bits() {
  if constexpr (kPacked<W>)
    return W::kBits;
  else
    return 8 * sizeof(W);
}

template <class W, int kRows>
struct ExpertsProduct {
  using Args = ProductArgs;
  // With more blocks, capabilities 8.x or 12.0 would spill.
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = kRows > 1 ? 2 : lane_inputs<W>() == 32 ? 3 : 4;
  static constexpr int kOwn = 4, kStrip = kThreads / kWarp * kOwn;  // a warp's rows of the weight, and a block's
  static constexpr int kInputs = lane_inputs<W>(), kChunk = kWarp * kInputs, kUnit = kInputs < 8 ? kInputs : 8;
  static constexpr int kApart = (kInputs / 4 | 1) * 4,
                       kStride = kWarp * kApart;  // floats from lane to lane, row to row
  static constexpr bool kWhole = !std::is_same<W, Any>::value;
  static constexpr int kBits = number_bits<W>(), kBytes = kInputs * kBits / 8;  // bytes that a lane reads at a time
  static_assert(!kWhole || kBytes == 16 || (kPacked<W> && kBytes == 8), "a lane reads 16 or 8 bytes");
  static constexpr int kStep = 4 * kThreads, kLoads = (kChunk + kStep - 1) / kStep, kRowsAhead = kRows < 4 ? kRows : 4;
  struct alignas(8) Two {
    uint32_t word[2];
  };
  struct Registers {
    float sum[kRows][kOwn];
    // What the lane reads of each of the warp's rows of the weight in a chunk, and the numbers of its group.
    Vector own[kOwn];
    float scale[kOwn], less[kOwn], minimum[kOwn];
    uint32_t table[4];
    float mine[kOwn];  // the sums of the row that this lane finishes
  };
  static constexpr size_t shared_size() { return kRows * kStride * sizeof(float); }

  // The work of a block: a tile, and a strip of the weight's rows.
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

    // Returns the column of the output of a warp's row c of the weight.
    KV_DEVICE int column(int t, int c) const {
      const int warp = t / kWarp;
      return args.gated() ? strip * (kStrip / 2) + warp * (kOwn / 2) + c % (kOwn / 2)
                          : strip * kStrip + warp * kOwn + c;
    }
    // Returns the number of this row over all experts; if it is beyond the last, that of another row.
    KV_DEVICE size_t row(int t, int c) const {
      const int outputs = args.outputs(), parts = args.gated() ? 2 : 1, part = args.gated() ? c / (kOwn / 2) : 0;
      return (static_cast<size_t>(tile.expert) * parts + part) * outputs + min_of(column(t, c), outputs - 1);
    }
  };

  static KV_DEVICE void run(Block<ExpertsProduct>& block, const Args& args) {
    const Work w(args, block.index());
    const int count = w.tile.count;
    if (count == 0) return;
    float* const x = reinterpret_cast<float*>(block.shared);
    block.each_alone([&](int t, Registers& r) {
#pragma unroll
      for (int i = 0; i < kRows * kOwn; ++i) r.sum[i / kOwn][i % kOwn] = 0.0f;
      if constexpr (kBits == 4) read_table(w.weight, r.table);
      if constexpr (kWhole) load(r, w, 0, t);
    });
    for (int from = 0; from < w.inputs; from += kChunk) {
      block.each([&](int t, Registers&) { store_inputs(w, x, from, t); });
      block.each([&](int t, Registers& r) {
        if constexpr (kWhole) {
          multiply(r, w, x, from, t);
          load(r, w, from + kChunk, t);
        } else {
          multiply_singly(r, w, x, from, t);
        }
      });
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (kRows > 1 && r >= count) break;
#pragma unroll
      for (int c = 0; c < kOwn; ++c) block.warp_sum([&](Registers& own) -> float& { return own.sum[r][c]; });
      block.each_alone([&](int t, Registers& own) {  // lane r keeps the sums of row r
        if (t % kWarp == r)
#pragma unroll
          for (int c = 0; c < kOwn; ++c) own.mine[c] = own.sum[r][c];
      });
    }
    block.each_alone([&](int t, Registers& own) {
      if (t % kWarp < count) finish(w, w.tile.first + t % kWarp, own.mine, t);
    });
  }

  // Within a phase: loads a lane's share of its warp's rows of the weight in a chunk, and the scales of its groups.
  static KV_DEVICE void load(Registers& r, const Work& w, int from, int t) {
    const int k = from + t % kWarp * kInputs;
    if (k >= w.inputs) return;
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      const size_t at = w.row(t, c) * w.inputs + k;
      const char* const data = static_cast<const char*>(w.weight.data) + at / kInputs * kBytes;
      if constexpr (kBytes == 16) {
        r.own[c] = load_vector(data);
      } else {
        const Two two = *reinterpret_cast<const Two*>(data);
        r.own[c].word[0] = two.word[0], r.own[c].word[1] = two.word[1];
      }
      if constexpr (kPacked<W>) {
        const int in_group = static_cast<int>(w.weight.group);
        const size_t group = w.row(t, c) * (w.inputs / in_group) + k / in_group;
        r.scale[c] = scale_at(w.weight, group);
        r.minimum[c] = w.weight.minimum ? element_at(w.weight.minimum_type, w.weight.minimum, group) : 0.0f;
        // The byte that stands for zero. A byte of 4 bits is 128 more than its number, one of 8 bits is unsigned.
        int zero = kBits == 4 || w.weight.is_signed ? 128 : 0;
        if (w.weight.zero)
          zero = byte_of(w.weight, w.weight.zero, group) + (kBits == 8 ? 0 : w.weight.is_signed ? 120 : 128);
        r.less[c] = 8388608.0f + static_cast<float>(zero);
      }
    }
  }

  // Within a phase: stores thread t's share of a chunk of the tile's rows; zeros beyond the last input.
  static KV_DEVICE void store_inputs(const Work& w, float* x, int from, int t) {
    const int count = w.tile.count;
    with_inputs(w.args, [&](auto* elements) {
      for (int first = 0; first < count; first += kRowsAhead) {
        float four[kRowsAhead][kLoads][4];
#pragma unroll
        for (int r = 0; r < kRowsAhead; ++r) {
          const auto* const row =
              elements +
              static_cast<size_t>(input_row(w.args, w.tile.first + min_of(first + r, count - 1))) * w.inputs + from;
#pragma unroll
          for (int i = 0; i < kLoads; ++i) {
            const int k = 4 * t + i * kStep, left = w.inputs - from - k;
            if (w.args.aligned && left >= 4)
              load_four(row + k, four[r][i]);
            else
#pragma unroll
              for (int j = 0; j < 4; ++j) four[r][i][j] = j < left ? to_float(row[k + j]) : 0.0f;
          }
        }
#pragma unroll
        for (int r = 0; r < kRowsAhead; ++r)
#pragma unroll
          for (int i = 0; i < kLoads; ++i) {
            const int k = 4 * t + i * kStep;
            if (k >= kChunk || first + r >= count) continue;
            Vector all;
            memcpy(&all, four[r][i], sizeof all);
            store_vector(x + (first + r) * kStride + k / kInputs * kApart + k % kInputs, all);
          }
      }
    });
  }

  // Within a phase: multiplies a chunk of a weight that is read one number at a time.
  static KV_DEVICE void multiply_singly(Registers& r, const Work& w, const float* x, int from, int t) {
    const int lane = t % kWarp, count = min_of(kInputs, w.inputs - from - lane * kInputs);
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      float weights[kOwn];
#pragma unroll
      for (int c = 0; c < kOwn; ++c)
        weights[c] = weight_at(w.weight, w.args.all.call.type, w.row(t, c), w.inputs, from + lane * kInputs + k);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (kRows > 1 && row >= w.tile.count) break;
#pragma unroll
        for (int c = 0; c < kOwn; ++c) r.sum[row][c] += x[row * kStride + lane * kApart + k] * weights[c];
      }
    }
  }

  // Within a phase: multiplies a chunk.
  static KV_DEVICE void multiply(Registers& r, const Work& w, const float* x, int from, int t) {
    const int lane = t % kWarp, count = w.tile.count;
    if (from + lane * kInputs >= w.inputs) return;
    float partial[kRows][kOwn] = {}, inputs[kRows] = {};  // sums of the lane's group; of its inputs, for minima
#pragma unroll
    for (int u = 0; u < kInputs / kUnit; ++u) {
      float weights[kOwn][kUnit];
#pragma unroll
      for (int c = 0; c < kOwn; ++c) expand(r, w, c, u, weights[c]);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (kRows > 1 && row >= count) break;
#pragma unroll
        for (int k = 0; k < kUnit; k += 4) {
          float four[4];
          load_four(x + row * kStride + lane * kApart + u * kUnit + k, four);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int c = 0; c < kOwn; ++c) partial[row][c] += four[j] * weights[c][k + j];
            if (kPacked<W> && w.weight.minimum) inputs[row] += four[j];
          }
        }
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row)
#pragma unroll
      for (int c = 0; c < kOwn; ++c) {
        if constexpr (kPacked<W>)
          r.sum[row][c] += partial[row][c] * r.scale[c] + inputs[row] * r.minimum[c];
        else
          r.sum[row][c] += partial[row][c];
      }
  }

  // Expands unit u of what a lane has read of row c: integers less the zero point, or a weight that is not packed.
  static KV_DEVICE void expand(const Registers& r, const Work& w, int c, int u, float (&to)[kUnit]) {
    if constexpr (!kPacked<W>) {
      widen<W>(r.own[c], to);
    } else {
      uint32_t bytes[2];
      if constexpr (kBits == 4) {
        look_up(r.table, r.own[c].word[u], bytes);
      } else {
        const uint32_t flip = w.weight.is_signed ? kSigns : 0;
        bytes[0] = r.own[c].word[2 * u] ^ flip, bytes[1] = r.own[c].word[2 * u + 1] ^ flip;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j)
        to[j] = bits_as<float>(bytes_of(bytes[j / 4], 0x4b000000u, 0x7440 + j % 4)) - r.less[c];
    }
  }

  // Within a phase: finishes a row's columns of the warp of thread t.
  static KV_DEVICE void finish(const Work& w, int row, const float (&sum)[kOwn], int t) {
    const KvExperts& a = w.args.all.call;
    const void* const bias = w.args.second ? a.down_bias : a.first_bias;
    float x[kOwn];
#pragma unroll
    for (int c = 0; c < kOwn; ++c) x[c] = bias ? sum[c] + element_at(a.type, bias, w.row(t, c)) : sum[c];
    if (w.args.gated()) {
#pragma unroll
      for (int c = 0; c < kOwn / 2; ++c) write_output(w.args, row, w.column(t, c), inner_of(a, x[c], x[c + kOwn / 2]));
      return;
    }
#pragma unroll
    for (int c = 0; c < kOwn; ++c) write_output(w.args, row, w.column(t, c), w.args.second ? x[c] : activated(a, x[c]));
  }
};

}  // namespace cuda
}  // namespace kv
