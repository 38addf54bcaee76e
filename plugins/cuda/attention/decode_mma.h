// The products of a decode step (decode.h) over 16-bit caches, on tensor cores:
//
//   logit[16, 32] = query[16, D] x key[32, D]^T        rows: the group's heads, padded with zeros; 8 slots per warp
//   output[16, Dv] += weight[16, 32] x value[32, Dv]   every fourth tile of 8 columns per warp
//
// row_sum adds exact weights; then they get the cache's type.
#pragma once

#include "../core/mma.h"
#include "decode.h"

namespace kv {
namespace cuda {

// kSize: elements of a row in registers, at least the cache's.
template <class T, int kSize>
struct DecodeMma : DecodeStep<DecodeMma<T, kSize>, T> {
  static constexpr int kThreads = kDecodeThreads, kWarps = kDecodeWarps, kBlocksPerMultiprocessor = kSize > 128 ? 2 : 3;
  static constexpr int kRows = 16, kWarpHeads = kRows / kWarps;  // query heads; those of a warp, in the softmax
  static constexpr int kSteps = kSize / 16, kTiles = kSize / 8 / kWarps;
  static_assert(kMaxGroup <= kRows && kBlock == 8 * kWarps, "a warp's product is 16 heads and 8 slots");
  // Strides of rows in shared memory that avoid bank conflicts.
  static constexpr int kLogitStride = kBlock + 8, kWeightStride = kBlock + 8;

  struct Registers : DecodeRegisters<kWarpHeads> {
    uint32_t query[kSteps][4], key[4], weight[2][4], value[4];
    float score[2][4], product[kTiles][4];
  };
  static KV_DEVICE int rows(int group) { return group; }

  struct Shared {
    float *logit, *factor, *bias;  // [heads, slots], [heads], [slots]
    T* weight;                     // [heads, slots]
    int* ends;                     // used_slots
    char* stages;
  };
  // Bytes of shared memory that do not depend on the number of stages.
  static KV_HD constexpr size_t fixed(int) {
    return kRows * (kLogitStride * sizeof(float) + kWeightStride * sizeof(T) + sizeof(float)) + kBlock * sizeof(float) +
           16;
  }
  // Bytes that reuse the memory of the stages at the end.
  static KV_HD constexpr size_t closing(int splits, int group) { return combine_size(splits, group); }

  static KV_DEVICE Shared divide(char* shared, int) {
    Shared s;
    s.logit = reinterpret_cast<float*>(shared);
    s.factor = s.logit + kRows * kLogitStride;
    s.bias = s.factor + kRows;
    s.weight = reinterpret_cast<T*>(s.bias + kBlock);
    s.ends = reinterpret_cast<int*>(s.weight + kRows * kWeightStride);
    s.stages = shared + fixed(0);
    return s;
  }

  // Loads queries into registers, as the product's rows. Rows beyond the group's heads are undefined after the softmax:
  // rows are never added to one another, and these are not stored.
  static KV_DEVICE void load_queries(Block<DecodeMma>& block, const Head<T>& head, const Shared&, int group) {
    block.each_alone([&](int t, Registers& r) { load_query(r, head, group, t); });
  }
  static KV_DEVICE void load_query(Registers& r, const Head<T>& head, int group, int t) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Element at = element_of_a(t % kWarp, 2 * i);
        const int column = step * 16 + at.column;
        r.query[step][i] = 0;
        if (at.row < group && column < head.a.key_size)
          r.query[step][i] = *reinterpret_cast<const uint32_t*>(head.query(at.row, 0) + column);
      }
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) r.product[i][j] = 0.0f;
  }

  // Multiplies the keys with the queries of all heads; eight slots per warp.
  static KV_DEVICE void multiply_keys(Block<DecodeMma>& block, const KvVoteAttention& a, const Stage<T>& stage,
                                      const Shared&, int) {
    block.each_alone([&](int, Registers& r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) r.score[0][i] = r.score[1][i] = 0.0f;
    });
    if (a.key_size == kSize)
      multiply_key_steps<true>(block, a.key_size, stage);
    else
      multiply_key_steps<false>(block, a.key_size, stage);
  }
  // kWhole: rows have kSize elements.
  template <bool kWhole>
  static KV_DEVICE void multiply_key_steps(Block<DecodeMma>& block, int size, const Stage<T>& stage) {
#pragma unroll
    for (int j = 0; j < kSteps / 2; ++j) {
      if (!kWhole && 32 * j >= size) continue;
      load_matrices<false>(
          block,
          [&](int t) {
            const int column = j * 32 + t % kWarp / 8 * 8;
            return stage.key(t / kWarp * 8 + t % 8) + (kWhole || column < size ? column : 0);
          },
          [](Registers& r) { return r.key; });
      if (!kWhole)  // memory beyond a row is undefined: NaN times a zero of the query would be NaN
        block.each_alone([&](int, Registers& r) {
#pragma unroll
          for (int i = 1; i < 4; ++i)
            if (j * 32 + i * 8 >= size) r.key[i] = 0;
        });
      // Two sums, so that consecutive products do not wait for each other.
      multiply<T>(block, [j](Registers& r) { return Product{r.score[0], r.query[2 * j], r.key}; });
      multiply<T>(block, [j](Registers& r) { return Product{r.score[1], r.query[2 * j + 1], r.key + 2}; });
    }
  }

  // Within a phase: stores the logits of a warp's slots, without bias. A lane's first two sums are in rows 0 to 7, its
  // last two in rows 8 to 15, which a group of up to eight heads does not use.
  static KV_DEVICE void store_logits(Registers& r, const KvVoteAttention& a, const Stage<T>& stage, const Shared& s,
                                     int group, int count, int t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && group <= kRows / 2) continue;
      const Element at = element_of_sum(t % kWarp, 2 * half);
      const float *x = r.score[0] + 2 * half, *y = r.score[1] + 2 * half;
      store_pair(s.logit + at.row * kLogitStride + t / kWarp * 8 + at.column, (x[0] + y[0]) * a.scale,
                 (x[1] + y[1]) * a.scale, a.softcap);
    }
    if (count < kBlock) clear_values(a, stage, count, t);
  }
  static KV_DEVICE float logit(const Shared& s, int g, int slot) { return s.logit[g * kLogitStride + slot]; }
  static KV_DEVICE float sum_logit(const KvVoteAttention&, const Shared& s, int g, int slot) {
    return logit(s, g, slot);
  }
  static KV_DEVICE void store_weight(Registers&, const Stage<T>&, const Shared& s, int g, int slot, int, float weight,
                                     float factor) {
    assign(s.weight[g * kWeightStride + slot], weight);
    if (slot == 0) s.factor[g] = factor;
  }

  // Within a phase: zeroes values beyond the last slot. Their weight is zero, and undefined memory could be NaN.
  static KV_DEVICE void clear_values(const KvVoteAttention& a, const Stage<T>& stage, int count, int t) {
    const int vectors = a.value_size / kLanes<T>;
#pragma unroll 1
    for (int i = t; i < (kBlock - count) * vectors; i += kThreads)
      store_vector(stage.value(count + i / vectors) + i % vectors * kLanes<T>, Vector{});
  }

  // Adds weight * value to the products; every fourth tile of eight columns per warp, 16 slots per product.
  static KV_DEVICE void multiply_values(Block<DecodeMma>& block, const KvVoteAttention&, const Stage<T>& stage,
                                        const Shared& s, int group, int) {
#pragma unroll
    for (int step = 0; step < 2; ++step)
      load_a(
          block, kWeightStride * sizeof(T), [&](int) { return reinterpret_cast<const char*>(s.weight + step * 16); },
          [step](Registers& r) { return r.weight[step]; });
    block.each_alone([&](int t, Registers& r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half == 1 && group <= kRows / 2) continue;
        const float factor = s.factor[t % kWarp / 4 + 8 * half];
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
          for (int j = 0; j < 2; ++j) r.product[i][2 * half + j] *= factor;
      }
    });
    if (stage.value_size == kSize)
      multiply_tiles<true>(block, stage);
    else
      multiply_tiles<false>(block, stage);
  }
  // kWhole: rows have kSize elements.
  template <bool kWhole>
  static KV_DEVICE void multiply_tiles(Block<DecodeMma>& block, const Stage<T>& stage) {
    const int tiles = stage.value_size / 8;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (!kWhole && i * kWarps >= tiles) continue;
      load_matrices<true>(
          block,
          [&](int t) {
            const int tile = i * kWarps + t / kWarp;
            return stage.value(t % kWarp) + (kWhole ? tile : min_of(tile, tiles - 1)) * 8;
          },
          [](Registers& r) { return r.value; });
#pragma unroll
      for (int step = 0; step < 2; ++step)
        multiply<T>(block,
                    [i, step](Registers& r) { return Product{r.product[i], r.weight[step], r.value + 2 * step}; });
    }
  }

  static KV_DEVICE void store_output(Block<DecodeMma>& block, const Attention& args, const Shared&, size_t split) {
    const int group = args.group(), size = args.call.value_size;
    block.each([&](int t, Registers& r) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const Element of = element_of_sum(t % kWarp, j);
          const int column = (i * kWarps + t / kWarp) * 8 + of.column;
          if (of.row < group && column < size)
            args.partial_output[(split * group + of.row) * size + column] = r.product[i][j];
        }
    });
  }
};

}  // namespace cuda
}  // namespace kv
