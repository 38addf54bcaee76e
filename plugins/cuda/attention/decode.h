// VoteAttention for one token per sequence over float32 caches, on CUDA cores (16-bit caches: decode_mma.h). One block
// of 128 threads per KV head and split of its slots:
//
//   for each block of 32 slots of the split          keys and values arrive by asynchronous copies, blocks ahead
//     logit[g, slot] = query[g] . key[slot]           a slot per lane, a quarter of the head size per warp
//     row_max, row_sum, weight = running softmax      of logit + vote_exponent ln(votes)
//     output[g] += weight[g, slot] value[slot]        four columns of every few slots per thread
//     log_ema[slot] = average of exp(logit[.., slot]) the statistics that need no softmax
//   store the split's output, row_max, row_sum
//   the last block of a head to finish: combine the splits in order, write the output, append the token
//
// All query heads of a group are in one block, so every key and every value is read once. Sums of probabilities need
// the softmax of the whole row; a second launch computes them (decode_sums.h).
#pragma once

#include "decode_split.h"

namespace kv {
namespace cuda {

// G: query heads in registers, at least the group's.
template <class T, int G>
struct Decode {
  using Args = Attention;
  static constexpr int kThreads = kDecodeThreads, kWarps = kDecodeWarps, kBlocksPerMultiprocessor = G > 4 ? 2 : 3;
  static constexpr int kWarpHeads = (G + kWarps - 1) / kWarps;  // query heads of a warp, in the softmax

  struct Registers {
    float product[G][4], logit[kWarpHeads], block_max[kWarpHeads], row_max[kWarpHeads], row_sum[kWarpHeads];
    Fetch fetch;
    SplitShares shares;
  };

  // Bytes of shared memory that do not depend on the number of stages. Arrays in floats: queries [G, D], partial logits
  // [warps, G, kBlock], logits [G, kBlock], weights [kBlock, G], bias [kBlock], factors [G]; and two ints.
  static KV_HD constexpr size_t fixed(int key_size) {
    return (G * key_size + (kWarps + 2) * G * kBlock + kBlock + (G + 5) / 4 * 4) * sizeof(float);
  }
  // Bytes that reuse the memory of the stages at the end: partial sums of the output, or the arrays of combine_splits.
  static KV_HD constexpr size_t closing(int splits, int group) {
    const size_t products = kThreads * G * 4 * sizeof(float), shares = combine_size(splits, group);
    return products > shares ? products : shares;
  }

  struct Shared {
    float *query, *partial, *logit, *weight, *bias, *factor;
    int* ends;  // used_slots
    char* stages;
  };

  static KV_DEVICE Shared divide(char* shared, int key_size) {
    Shared s;
    s.stages = shared + fixed(key_size);
    s.query = reinterpret_cast<float*>(shared);
    s.partial = s.query + G * key_size;
    s.logit = s.partial + kWarps * G * kBlock;
    s.weight = s.logit + G * kBlock;
    s.bias = s.weight + G * kBlock;
    s.factor = s.bias + kBlock;
    s.ends = reinterpret_cast<int*>(s.factor + G);
    return s;
  }

  static KV_DEVICE void run(Block<Decode>& block, const Args& args) {
    const KvVoteAttention& a = args.call;
    const Part part(args, block.index());
    const Head<T> head(args, part);
    const int group = args.group();
    const auto stored = head.stored();
    const Shared s = divide(block.shared, a.key_size);
    const int used = used_slots(block, head.votes(), head.capacity, s.ends), now = head.first(stored);
    if (head.length(stored, used) == 0) return store_idle(block, args, head, part.split, used);
    block.each([&](int t, Registers& r) {
      for (int i = t; i < G * a.key_size; i += kThreads)
        s.query[i] = i < group * a.key_size ? to_float(head.query(i / a.key_size, 0)[i % a.key_size]) * a.scale : 0.0f;
#pragma unroll
      for (int i = 0; i < kWarpHeads; ++i) r.row_max[i] = kLowest, r.row_sum[i] = 0.0f;
#pragma unroll
      for (int g = 0; g < G; ++g)
#pragma unroll
        for (int j = 0; j < 4; ++j) r.product[g][j] = 0.0f;
    });
    const auto use = [&](const Stage<T>& stage, int from, int count) {
      block.each([&](int t, Registers&) {
        multiply_keys(stage, s, t);
        store_bias(a, stage, s.bias, used, now, from, count, t);
      });
      softmax_slots<T>(
          block, args, head, s.bias, G, from, count, [&](int g, int slot) { return logit_of(a, s, g, slot); },
          [&](Registers&, int g, int slot, float weight, float factor) {
            s.weight[slot * G + g] = weight;
            if (slot == 0) s.factor[g] = factor;
          });
      block.each([&](int t, Registers& r) {
        multiply_values(r, stage, s, count, t);
        update_averages(args, head, stage, s.bias, used, from, count, t,
                        [&](int g, int slot) { return s.logit[g * kBlock + slot]; });
      });
    };
    stream_slots(block, args, head, s.stages, used, share_of(part.split, part.splits, used + 1, kBlock), use);
    store_partial(block, args, part, s);
    if (block.is_last(args.counters + head.index, part.splits))
      combine_splits(block, args, part, head, reinterpret_cast<float*>(s.stages), used, now);
  }

  // Within a phase: partial logits; a slot per lane, a share of the head size per warp.
  static KV_DEVICE void multiply_keys(const Stage<T>& stage, const Shared& s, int t) {
    const int slot = t % kWarp, warp = t / kWarp, vectors = stage.key_size / kLanes<T>,
              each = (vectors + kWarps - 1) / kWarps;
    float sum[G];
#pragma unroll
    for (int g = 0; g < G; ++g) sum[g] = 0.0f;
#pragma unroll 2
    for (int i = warp * each; i < min_of((warp + 1) * each, vectors); ++i) {
      float key[kLanes<T>];
      widen<T>(load_vector(stage.key(slot) + i * kLanes<T>), key);
#pragma unroll
      for (int g = 0; g < G; ++g) {
        const float* query = s.query + g * stage.key_size + i * kLanes<T>;
#pragma unroll
        for (int j = 0; j < kLanes<T>; j += 4) {
          float four[4];
          load_four(query + j, four);
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[g] += key[j + e] * four[e];
        }
      }
    }
#pragma unroll
    for (int g = 0; g < G; ++g) s.partial[(warp * G + g) * kBlock + slot] = sum[g];
  }

  // Returns the sum of a logit's partials, and stores it for the averages.
  static KV_DEVICE float logit_of(const KvVoteAttention& a, const Shared& s, int g, int slot) {
    float logit = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) logit += s.partial[(warp * G + g) * kBlock + slot];
    return s.logit[g * kBlock + slot] = capped(logit, a.softcap);
  }

  // Within a phase: adds weight * value to the products; four columns of every `rows`-th value per thread.
  static KV_DEVICE void multiply_values(Registers& r, const Stage<T>& stage, const Shared& s, int count, int t) {
    const int chunks = stage.value_size / 4, rows = kThreads / chunks, row = t / chunks, column = t % chunks * 4;
    if (row >= rows) return;
#pragma unroll
    for (int g = 0; g < G; ++g)
#pragma unroll
      for (int j = 0; j < 4; ++j) r.product[g][j] *= s.factor[g];
    for (int slot = row; slot < count; slot += rows) {
      float value[4], weight[G];
      load_four(stage.value(slot) + column, value);
#pragma unroll
      for (int g = 0; g < G; g += kVectorOf) load_weights(s.weight + slot * G + g, weight + g);
#pragma unroll
      for (int g = 0; g < G; ++g)
#pragma unroll
        for (int j = 0; j < 4; ++j) r.product[g][j] += weight[g] * value[j];
    }
  }

  static constexpr int kVectorOf = G % 4 == 0 ? 4 : 1;
  static KV_DEVICE void load_weights(const float* from, float* to) {
    if constexpr (kVectorOf == 4) {
      float four[4];
      load_four(from, four);
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = four[i];
    } else {
      *to = *from;
    }
  }

  // Stores the split's partial output and softmax in the workspace.
  static KV_DEVICE void store_partial(Block<Decode>& block, const Attention& args, const Part& part, const Shared& s) {
    const int group = args.group(), size = args.call.value_size, chunks = size / 4, rows = kThreads / chunks;
    const size_t at = static_cast<size_t>(part.start) + part.split;
    float* sums = reinterpret_cast<float*>(s.stages);  // [rows, G, Dv]
#pragma unroll
    for (int i = 0; i < kWarpHeads; ++i) block.warp_sum([&](Registers& r) -> float& { return r.row_sum[i]; });
    block.each([&](int t, Registers& r) {
      const int row = t / chunks, column = t % chunks * 4;
      if (row < rows)
#pragma unroll
        for (int g = 0; g < G; ++g)
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[(row * G + g) * size + column + j] = r.product[g][j];
      store_partial_softmax<kWarpHeads>(args, at, t, r);
    });
    block.each([&](int t, Registers&) {
      for (int i = t; i < group * size; i += kThreads) {
        float sum = 0.0f;
        for (int row = 0; row < rows; ++row) sum += sums[row * G * size + i];
        args.partial_output[at * group * size + i] = sum;
      }
    });
  }
};

}  // namespace cuda
}  // namespace kv
