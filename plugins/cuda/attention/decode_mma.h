// VoteAttention for one token per sequence over 16-bit caches, on tensor cores. The program is that of decode.h, one
// block of 128 threads per KV head and split, except for the two products:
//
//   for each block of 32 slots of the split           as in decode.h
//     logit[16, 32] = query[16, D] x key[32, D]^T     rows: the group's heads, padded with zeros; 8 slots per warp
//     row_max, row_sum, weight = running softmax      row_sum adds exact weights; then they get the cache's type
//     output[16, Dv] += weight[16, 32] x value[32, Dv]   every fourth tile of 8 columns per warp
//     log_ema[slot] = average of exp(logit[.., slot])
//   store the split's output, row_max, row_sum; the last block of a head combines the splits and appends the token
#pragma once

#include "../core/mma.h"
#include "decode_split.h"

namespace kv {
namespace cuda {

// kSize: elements of a row in registers, at least the cache's.
template <class T, int kSize>
struct DecodeMma {
  using Args = Attention;
  static constexpr int kThreads = kDecodeThreads, kWarps = kDecodeWarps, kBlocksPerMultiprocessor = kSize > 128 ? 2 : 3;
  static constexpr int kRows = 16, kWarpHeads = kRows / kWarps;  // query heads; those of a warp, in the softmax
  static constexpr int kSteps = kSize / 16, kTiles = kSize / 8 / kWarps;
  static_assert(kMaxGroup <= kRows && kBlock == 8 * kWarps, "a warp's product is 16 heads and 8 slots");
  // Strides of rows in shared memory that avoid bank conflicts.
  static constexpr int kLogitStride = kBlock + 8, kWeightStride = kBlock + 8;

  struct Registers {
    uint32_t query[kSteps][4], key[4], weight[2][4], value[4];
    float score[2][4], product[kTiles][4], logit[kWarpHeads], block_max[kWarpHeads], row_max[kWarpHeads],
        row_sum[kWarpHeads];
    Fetch fetch;
    SplitShares shares;
  };

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

  static KV_DEVICE Shared divide(char* shared) {
    Shared s;
    s.logit = reinterpret_cast<float*>(shared);
    s.factor = s.logit + kRows * kLogitStride;
    s.bias = s.factor + kRows;
    s.weight = reinterpret_cast<T*>(s.bias + kBlock);
    s.ends = reinterpret_cast<int*>(s.weight + kRows * kWeightStride);
    s.stages = shared + fixed(0);
    return s;
  }

  static KV_DEVICE void run(Block<DecodeMma>& block, const Args& args) {
    const KvVoteAttention& a = args.call;
    const Part part(args, block.index());
    const Head<T> head(args, part);
    const int group = args.group();
    const auto stored = head.stored();
    const Shared s = divide(block.shared);
    // Queries arrive while the block finds the used slots.
    block.each_alone([&](int t, Registers& r) { start(r, head, group, t); });
    const int used = used_slots(block, head.votes(), head.capacity, s.ends), now = head.first(stored);
    if (head.length(stored, used) == 0) return store_idle(block, args, head, part.split, used);
    const auto use = [&](const Stage<T>& stage, int from, int count) {
      multiply_keys(block, a, stage);
      block.each([&](int t, Registers& r) {
        store_logits(r, a, s, group, t);
        store_bias(a, stage, s.bias, used, now, from, count, t);
        if (count < kBlock) clear_values(a, stage, count, t);
      });
      softmax_slots<T>(
          block, args, head, s.bias, group, from, count,
          [&](int g, int slot) { return s.logit[g * kLogitStride + slot]; },
          [&](Registers&, int g, int slot, float weight, float factor) {
            assign(s.weight[g * kWeightStride + slot], weight);
            if (slot == 0) s.factor[g] = factor;
          });
      multiply_values(block, stage, s, group);
      block.each([&](int t, Registers&) {
        update_averages(args, head, stage, s.bias, used, from, count, t,
                        [&](int g, int slot) { return s.logit[g * kLogitStride + slot]; });
      });
    };
    stream_slots(block, args, head, s.stages, used, share_of(part.split, part.splits, used + 1, kBlock), use);
    store_partial(block, args, part);
    if (block.is_last(args.counters + head.index, part.splits))
      combine_splits(block, args, part, head, reinterpret_cast<float*>(s.stages), used, now);
  }

  // Loads queries into registers, as the product's rows. Rows beyond the group's heads are undefined after the softmax:
  // rows are never added to one another, and these are not stored.
  static KV_DEVICE void start(Registers& r, const Head<T>& head, int group, int t) {
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
#pragma unroll
    for (int i = 0; i < kWarpHeads; ++i) r.row_max[i] = kLowest, r.row_sum[i] = 0.0f;
  }

  // Multiplies the keys with the queries of all heads; eight slots per warp.
  static KV_DEVICE void multiply_keys(Block<DecodeMma>& block, const KvVoteAttention& a, const Stage<T>& stage) {
    block.each_alone([&](int, Registers& r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) r.score[0][i] = r.score[1][i] = 0.0f;
    });
    if (a.key_size == kSize)
      multiply_keys<true>(block, a.key_size, stage);
    else
      multiply_keys<false>(block, a.key_size, stage);
  }
  // kWhole: rows have kSize elements.
  template <bool kWhole>
  static KV_DEVICE void multiply_keys(Block<DecodeMma>& block, int size, const Stage<T>& stage) {
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
  static KV_DEVICE void store_logits(Registers& r, const KvVoteAttention& a, const Shared& s, int group, int t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && group <= kRows / 2) continue;
      const Element at = element_of_sum(t % kWarp, 2 * half);
      const float *x = r.score[0] + 2 * half, *y = r.score[1] + 2 * half;
      store_pair(s.logit + at.row * kLogitStride + t / kWarp * 8 + at.column, (x[0] + y[0]) * a.scale,
                 (x[1] + y[1]) * a.scale, a.softcap);
    }
  }

  // Within a phase: zeroes values beyond the last slot. Their weight is zero, and undefined memory could be NaN.
  static KV_DEVICE void clear_values(const KvVoteAttention& a, const Stage<T>& stage, int count, int t) {
    const int vectors = a.value_size / kLanes<T>;
#pragma unroll 1
    for (int i = t; i < (kBlock - count) * vectors; i += kThreads)
      store_vector(stage.value(count + i / vectors) + i % vectors * kLanes<T>, Vector{});
  }

  // Adds weight * value to the products; every fourth tile of eight columns per warp, 16 slots per product.
  static KV_DEVICE void multiply_values(Block<DecodeMma>& block, const Stage<T>& stage, const Shared& s, int group) {
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

  // Stores the split's partial output and softmax in the workspace.
  static KV_DEVICE void store_partial(Block<DecodeMma>& block, const Attention& args, const Part& part) {
    const int group = args.group(), size = args.call.value_size;
    const size_t at = static_cast<size_t>(part.start) + part.split;
#pragma unroll
    for (int i = 0; i < kWarpHeads; ++i)
      if (i * kWarps < group) block.warp_sum([&](Registers& r) -> float& { return r.row_sum[i]; });
    block.each([&](int t, Registers& r) {
      store_partial_softmax<kWarpHeads>(args, at, t, r);
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const Element of = element_of_sum(t % kWarp, j);
          const int column = (i * kWarps + t / kWarp) * 8 + of.column;
          if (of.row < group && column < size)
            args.partial_output[(at * group + of.row) * size + column] = r.product[i][j];
        }
    });
  }
};

}  // namespace cuda
}  // namespace kv
