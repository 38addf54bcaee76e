// The products of a decode step (decode.h) over float32 caches, on CUDA cores: for keys a slot per lane, a quarter of
// the head size per warp; for values four columns of every few slots per thread.
#pragma once

#include "decode.h"

namespace kv {
namespace cuda {

// G: query heads in registers, at least the group's.
template <class T, int G>
struct Decode : DecodeStep<Decode<T, G>, T> {
  static constexpr int kThreads = kDecodeThreads, kWarps = kDecodeWarps, kBlocksPerMultiprocessor = G > 4 ? 2 : 3;
  static constexpr int kWarpHeads = (G + kWarps - 1) / kWarps;  // query heads of a warp, in the softmax

  struct Registers : DecodeRegisters<kWarpHeads> {
    float product[G][4];
  };
  static KV_DEVICE int rows(int) { return G; }  // the softmax computes weights for all query heads in registers

  // Bytes of shared memory that do not depend on the number of stages. Arrays in floats: queries [G, D], partial logits
  // [warps, G, kBlock], logits [G, kBlock], weights [kBlock, G], bias [kBlock], factors [G]; and two ints.
  static KV_HD constexpr size_t fixed(int key_size) {
    return (G * key_size + (kWarps + 2) * G * kBlock + kBlock + (G + 5) / 4 * 4) * sizeof(float);
  }
  // Bytes that reuse the memory of the stages at the end: partial sums of the output, or the shares of the splits.
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

  static KV_DEVICE void load_queries(Block<Decode>& block, const Head<T>& head, const Shared& s, int group) {
    const KvVoteAttention& a = head.a;
    block.each_alone([&](int t, Registers& r) {
      for (int i = t; i < G * a.key_size; i += kThreads)
        s.query[i] = i < group * a.key_size ? to_float(head.query(i / a.key_size, 0)[i % a.key_size]) * a.scale : 0.0f;
#pragma unroll
      for (int g = 0; g < G; ++g)
#pragma unroll
        for (int j = 0; j < 4; ++j) r.product[g][j] = 0.0f;
    });
  }

  static KV_DEVICE void multiply_keys(Block<Decode>& block, const KvVoteAttention&, const Stage<T>& stage,
                                      const Shared& s, int) {
    block.each_alone([&](int t, Registers&) { multiply_key(stage, s, t); });
  }
  static KV_DEVICE void multiply_key(const Stage<T>& stage, const Shared& s, int t) {
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

  static KV_DEVICE void store_logits(Registers&, const KvVoteAttention&, const Stage<T>&, const Shared&, int, int,
                                     int) {}
  // Returns the sum of a logit's partials, and stores it for the averages.
  static KV_DEVICE float sum_logit(const KvVoteAttention& a, const Shared& s, int g, int slot) {
    float logit = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) logit += s.partial[(warp * G + g) * kBlock + slot];
    return s.logit[g * kBlock + slot] = capped(logit, a.softcap);
  }
  static KV_DEVICE float logit(const Shared& s, int g, int slot) { return s.logit[g * kBlock + slot]; }
  static KV_DEVICE void store_weight(Registers&, const Stage<T>&, const Shared& s, int g, int slot, int, float weight,
                                     float factor) {
    s.weight[slot * G + g] = weight;
    if (slot == 0) s.factor[g] = factor;
  }

  static KV_DEVICE void multiply_values(Block<Decode>& block, const KvVoteAttention&, const Stage<T>& stage,
                                        const Shared& s, int, int count) {
    block.each_alone([&](int t, Registers& r) { multiply_value(r, stage, s, count, t); });
  }
  static KV_DEVICE void multiply_value(Registers& r, const Stage<T>& stage, const Shared& s, int count, int t) {
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

  static KV_DEVICE void store_output(Block<Decode>& block, const Attention& args, const Shared& s, size_t split) {
    const int group = args.group(), size = args.call.value_size, chunks = size / 4, rows = kThreads / chunks;
    float* sums = reinterpret_cast<float*>(s.stages);  // [rows, G, Dv]
    block.each([&](int t, Registers& r) {
      const int row = t / chunks, column = t % chunks * 4;
      if (row < rows)
#pragma unroll
        for (int g = 0; g < G; ++g)
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[(row * G + g) * size + column + j] = r.product[g][j];
    });
    block.each([&](int t, Registers&) {
      for (int i = t; i < group * size; i += kThreads) {
        float sum = 0.0f;
        for (int row = 0; row < rows; ++row) sum += sums[row * G * size + i];
        args.partial_output[split * group * size + i] = sum;
      }
    });
  }
};

}  // namespace cuda
}  // namespace kv
