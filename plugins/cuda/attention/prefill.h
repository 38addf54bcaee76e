// VoteAttention for several tokens per sequence, in three launches; logits exist only tile by tile. Row t G + g is
// query head g of token t; a tile is 32 rows, on tensor cores more.
//
//   Append, a block per KV head and 32 tokens:     the new tokens' keys, values, positions into their slots
//   Prefill, a block per KV head and tile of rows:
//     for each block of 32 slots, new tokens' too
//       logit = query x key^T, masked by position and window
//       row_max, row_sum, weight = running softmax of logit + vote_exponent ln(votes)
//       output = output exp(old row_max - row_max) + weight x value
//     write output / row_sum
//   PrefillScores, a block per KV head and 32 slots:
//     for each statistic, for each tile of rows that it counts
//       logit = query x key^T again; add it to the slot's sum of probabilities, or of exp(logit)
//     write the slot's statistics
//
// This file has Append, and the other two for float32 caches and for quantized caches, whose rows are read as float32
// and whose first launch is AppendQuantized (quantized.h). 16-bit caches run on tensor cores (prefill_mma.h,
// prefill_mma_scores.h).
#pragma once

#include "quantized.h"

namespace kv {
namespace cuda {

constexpr int kTile = 32;

// Writes the new tokens to their slots, except for their votes, which other blocks of the head read to find its end.
template <class T>
struct Append {
  using Args = Attention;
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 1, kTokens = 32;
  struct Registers {};
  static KV_HD int blocks_per_head(int tokens) { return (tokens + kTokens - 1) / kTokens; }

  static KV_DEVICE void run(Block<Append>& block, const Attention& args) {
    const KvVoteAttention& a = args.call;
    const Part part(args, block.index());
    const Head<T> head(args, part);
    const int chunk = part.split;
    const int used = used_slots(block, head.votes(), head.capacity, reinterpret_cast<int*>(block.shared)),
              n = head.length(used);
    const int from = chunk * kTokens, count = min_of(kTokens, n - from);
    block.each([&](int t, auto&) {
      if (chunk == 0 && t == 0) args.used[2 * head.index] = used, args.used[2 * head.index + 1] = n;
      for (int i = t * kLanes<T>; i < count * a.key_size; i += kThreads * kLanes<T>)
        store_vector(head.key(used + from) + i, load_vector(head.new_key(from) + i));
      for (int i = t * kLanes<T>; i < count * a.value_size; i += kThreads * kLanes<T>)
        store_vector(head.value(used + from) + i, load_vector(head.new_value(from) + i));
      if (t < count) head.position()[used + from + t] = head.first() + from + t;
    });
  }
};

// The product of 32 rows and 32 slots, for both passes. In shared memory queries and rows of the cache have the type
// that kernels compute with, logits float32.
template <class T>
struct Tile {
  using E = Wide<T>;
  char *query, *rows;
  float *logit, *bias;
  int* position;

  static constexpr int kLogitStride = kBlock + 1;
  static KV_HD constexpr size_t size(int key_size, int value_size) {
    const size_t key = kBlock * shared_stride<E>(key_size), value = kBlock * value_size * sizeof(E);
    return kTile * shared_stride<E>(key_size) + (key > value ? key : value) +
           (kTile * kLogitStride + 2 * kBlock) * sizeof(float);
  }
  KV_DEVICE Tile(char* shared, int key_size, int value_size) {
    const size_t key = kBlock * shared_stride<E>(key_size), value = kBlock * value_size * sizeof(E);
    query = shared;
    rows = query + kTile * shared_stride<E>(key_size);
    logit = reinterpret_cast<float*>(rows + (key > value ? key : value));
    bias = logit + kTile * kLogitStride;
    position = reinterpret_cast<int*>(bias + kBlock);
  }

  // Within a phase of `threads` threads: loads rows [first, first + 32) of a head's queries, zeros from `end` on.
  KV_DEVICE void load_queries(const Head<T>& head, int group, int first, int end, int t, int threads) const {
    const int vectors = head.a.key_size / kLanes<E>, stride = shared_stride<E>(head.a.key_size);
    for (int i = t; i < kTile * vectors; i += threads) {
      const int row = first + i / vectors, at = i % vectors;
      Vector vector = {};
      if (row < end) vector = load_vector(head.query(row % group, row / group) + at * kLanes<E>);
      store_vector(query + i / vectors * stride + at * 16, vector);
    }
  }
  // Within a phase: loads the keys of slots [from, from + count), zeros after them, and the slots' positions and
  // biases. No query sees slots after the last, whose position is INT32_MAX.
  KV_DEVICE void load_keys(const Head<T>& head, int used, int from, int count, int t, int threads) const {
    const KvVoteAttention& a = head.a;
    const int vectors = a.key_size / kLanes<E>, stride = shared_stride<E>(a.key_size);
    for (int i = t; i < kBlock * vectors; i += threads) {
      Vector vector = {};
      if (i / vectors < count) vector = head.key_vector(from, i);
      store_vector(rows + i / vectors * stride + i % vectors * 16, vector);
    }
    if (t < kBlock) {
      position[t] = t < count ? head.position()[from + t] : INT32_MAX;
      bias[t] = from + t < used ? vote_bias(head.votes()[from + t], a) : 0.0f;
    }
  }
  KV_DEVICE void load_values(const Head<T>& head, int from, int count, int t, int threads) const {
    for (int i = t; i * kLanes<E> < count * head.a.value_size; i += threads)
      store_vector(rows + i * 16, head.value_vector(from, i));
  }
  // Within a phase: computes the logits of all rows and slots, without bias; 128 threads, two rows and four slots each.
  KV_DEVICE void multiply(const KvVoteAttention& a, int t) const {
    const int stride = shared_stride<E>(a.key_size), row = t / 8 * 2, slot = t % 8;
    float sum[2][4] = {};
    for (int i = 0; i < a.key_size / kLanes<E>; ++i) {
      float q[2][kLanes<E>];
      widen<E>(load_vector(query + row * stride + i * 16), q[0]);
      widen<E>(load_vector(query + (row + 1) * stride + i * 16), q[1]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float key[kLanes<E>];
        widen<E>(load_vector(rows + (slot + 8 * j) * stride + i * 16), key);
#pragma unroll
        for (int e = 0; e < kLanes<E>; ++e) sum[0][j] += q[0][e] * key[e], sum[1][j] += q[1][e] * key[e];
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      logit[row * kLogitStride + slot + 8 * j] = capped(sum[0][j] * a.scale, a.softcap);
      logit[(row + 1) * kLogitStride + slot + 8 * j] = capped(sum[1][j] * a.scale, a.softcap);
    }
  }
};

// Returns whether the query at `now` sees no slot from `from` on, since these are later tokens of the chunk.
KV_DEVICE bool all_later(int from, int used, int first, int now) { return from >= used && first + from - used > now; }

// Pass 1, the output. A block is a tile of a head's rows; kChunks times 128 columns.
template <class T, int kChunks>
struct Prefill {
  using Args = Attention;
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 2, kRows = kTile / (kThreads / kWarp);  // of a warp
  struct Registers {
    float product[kChunks][kRows][4], logit[kRows], block_max[kRows], row_max[kRows], row_sum[kRows];
  };
  static KV_HD int blocks_per_head(int rows) { return (rows + kTile - 1) / kTile; }

  static KV_DEVICE void run(Block<Prefill>& block, const Attention& args) {
    const KvVoteAttention& a = args.call;
    const int group = args.group();
    const Part part(args, block.index());
    const Head<T> head(args, part);
    const Tile<T> tile(block.shared, a.key_size, a.value_size);
    const int used = args.used[2 * head.index], n = args.used[2 * head.index + 1];
    const int begin = part.split * kTile, end = min_of(begin + kTile, n * group);
    // The block of the first rows writes the new slots' votes, which no other block of this launch reads.
    block.each([&](int t, Registers& r) {
      for (int i = t; begin == 0 && i < n; i += kThreads) head.votes()[used + i] = 1.0f;
      if (begin < end) tile.load_queries(head, group, begin, end, t, kThreads);
      start(r, head, begin, end, t);
    });
    const int first = head.first(), latest = first + (end - 1) / group;
    for (int from = 0; from < used + n && begin < end && !all_later(from, used, first, latest); from += kBlock) {
      const int count = min_of(kBlock, used + n - from);
      block.each([&](int t, auto&) { tile.load_keys(head, used, from, count, t, kThreads); });
      block.each([&](int t, auto&) { tile.multiply(a, t); });
      block.each_alone([&](int t, Registers& r) {
        tile.load_values(head, from, count, t, kThreads);
        const int slot = t % kWarp;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const int row = t / kWarp * kRows + i;
          const bool sees = visible(tile.position[slot], first + (begin + row) / group, a.sliding_window);
          r.logit[i] = slot >= count ? kLowest
                       : sees        ? tile.logit[row * Tile<T>::kLogitStride + slot] + tile.bias[slot]
                                     : kLogZero;
          r.block_max[i] = r.logit[i];
        }
      });
#pragma unroll
      for (int i = 0; i < kRows; ++i) block.warp_max([&](Registers& r) -> float& { return r.block_max[i]; });
      block.each([&](int t, Registers& r) { rescale(r, tile, count, t); });
      block.each([&](int t, Registers& r) { multiply_values(r, a, tile, count, t); });
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) block.warp_sum([&](Registers& r) -> float& { return r.row_sum[i]; });
    if constexpr (kQuantized<T>)
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        rotate_rows<4 * kChunks>(block, a.value_size,
                                 [i](Registers& r, int j) -> float& { return r.product[j / 4][i][j % 4]; });
    block.each([&](int t, Registers& r) { finish(r, args, head, begin, end, t); });
  }

  static KV_DEVICE void start(Registers& r, const Head<T>& head, int begin, int end, int t) {
    const int group = head.a.query_heads / head.a.heads;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = begin + t / kWarp * kRows + i;
      const bool sinks = head.a.sink_logits && row < end;
      r.row_max[i] = sinks ? head.a.sink_logits[head.head * group + row % group] : kLowest;
      r.row_sum[i] = sinks && t % kWarp == 0 ? 1.0f : 0.0f;
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
#pragma unroll
        for (int j = 0; j < 4; ++j) r.product[c][i][j] = 0.0f;
    }
  }

  // Within a phase: updates the running softmax; weights replace their own logits.
  static KV_DEVICE void rescale(Registers& r, const Tile<T>& tile, int count, int t) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float row_max = max_of(r.row_max[i], r.block_max[i]), factor = expf(r.row_max[i] - row_max);
      const float weight = t % kWarp < count ? expf(r.logit[i] - row_max) : 0.0f;
      r.row_sum[i] = r.row_sum[i] * factor + weight;
      r.row_max[i] = row_max;
      tile.logit[(t / kWarp * kRows + i) * Tile<T>::kLogitStride + t % kWarp] = weight;
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
#pragma unroll
        for (int j = 0; j < 4; ++j) r.product[c][i][j] *= factor;
    }
  }

  static KV_DEVICE void multiply_values(Registers& r, const KvVoteAttention& a, const Tile<T>& tile, int count, int t) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = (c * kWarp + t % kWarp) * 4;
      if (column >= a.value_size) continue;
      for (int slot = 0; slot < count; ++slot) {
        float value[4];
        load_four(reinterpret_cast<const Wide<T>*>(tile.rows) + slot * a.value_size + column, value);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const float weight = tile.logit[(t / kWarp * kRows + i) * Tile<T>::kLogitStride + slot];
#pragma unroll
          for (int j = 0; j < 4; ++j) r.product[c][i][j] += weight * value[j];
        }
      }
    }
  }

  static KV_DEVICE void finish(Registers& r, const Attention& args, const Head<T>& head, int begin, int end, int t) {
    const KvVoteAttention& a = args.call;
    const int group = args.group();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = begin + t / kWarp * kRows + i;
      if (row >= a.tokens * group) continue;
      const float factor = row < end ? 1.0f / r.row_sum[i] : 0.0f;  // 0 in padding
      if (args.row_softmax && t % kWarp == 0) {
        float* softmax =
            args.row_softmax + 2 * (static_cast<size_t>(head.query_head(row % group)) * a.tokens + row / group);
        softmax[0] = r.row_max[i], softmax[1] = r.row_sum[i];
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int column = (c * kWarp + t % kWarp) * 4;
        for (int j = 0; j < 4 && column < a.value_size; ++j)
          head.store(row % group, row / group, column + j, row < end ? r.product[c][i][j] * factor : 0.0f);
      }
    }
  }
};

// Returns a slot's statistic after the call. For a log_ema, the call's queries add exp(slot_max) slot_sum, before the
// mean over query heads; for a probability, slot_sum is the weighted sum. counted: the total weight of the queries that
// count and see the slot; age: the slot's position relative to the first new token's.
template <class T>
KV_DEVICE float statistic_after(const Head<T>& head, const KvStatistic& statistic, int k, int used, int slot, int age,
                                int n, float slot_max, float slot_sum, float counted) {
  const KvVoteAttention& a = head.a;
  const float heads = static_cast<float>(a.query_heads / a.heads), past = slot < used ? head.score(k)[slot] : 0.0f;
  if (statistic.kind == KV_STATISTIC_PROBABILITY)
    return past * expf(static_cast<float>(counted_queries(statistic, n)) * logf(statistic.decay)) + slot_sum / heads;
  float share = log1pf(-statistic.decay) - logf(heads);
  const float rate = logf(statistic.decay);
  if (statistic.window != 0 || statistic.recency_weight != 1.0f) {
    // The queries that count represent all queries [begin, until) of the call that see the slot: scale their weight to
    // the sum of decay^(n-1-t) over these.
    const int begin = max_of(age, 0), until = a.sliding_window && age < n ? min_of(n, age + a.sliding_window) : n;
    const int queries = max_of(until - begin, 0);
    const float whole = expf(static_cast<float>(n - begin - queries) * rate) *
                        -expm1f(static_cast<float>(queries) * rate) / (1.0f - statistic.decay);
    share += logf(fmaxf(whole, 1e-30f)) - logf(fmaxf(counted, 1e-30f));
  }
  const float start = slot < used ? past + static_cast<float>(n) * rate : kLogZero;
  const float highest = max_of(start, slot_sum > 0.0f ? slot_max + share : kLogZero);
  return highest + logf((slot_sum > 0.0f ? slot_sum * expf(slot_max + share - highest) : 0.0f) + expf(start - highest));
}

// Pass 2, the statistics. A block is 32 slots of a head against all rows that count, one statistic after another; a
// thread is one slot and eight rows of each tile.
template <class T>
struct PrefillScores {
  using Args = Attention;
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 2, kWarps = kThreads / kWarp, kRows = kTile / kWarps;
  // A thread's partial sums. For a log_ema: the running maximum, the sum relative to it, and the total weight of the
  // queries that see the slot. For a probability: only slot_sum.
  struct Registers {
    float slot_max, slot_sum, counted;
  };
  // Bytes of shared memory before the tile. In floats: log weights of rows, their row_max and row_sum, and the partial
  // sums of the warps [3, warps, kBlock].
  static KV_HD constexpr size_t fixed() { return (3 * kTile + 3 * kWarps * kBlock) * sizeof(float); }
  static KV_HD int blocks_per_head(int capacity) { return (capacity + kBlock - 1) / kBlock; }

  static KV_DEVICE void run(Block<PrefillScores>& block, const Attention& args) {
    const KvVoteAttention& a = args.call;
    const int group = args.group();
    const Part part(args, block.index());
    const Head<T> head(args, part);
    const Tile<T> tile(block.shared + fixed(), a.key_size, a.value_size);
    float *share = reinterpret_cast<float*>(block.shared), *rows = share + kTile, *partials = rows + 2 * kTile;
    const int used = args.used[2 * head.index], n = args.used[2 * head.index + 1], first = head.first();
    const int from = part.split * kBlock, count = min_of(kBlock, used + n - from);
    if (n == 0 || count <= 0) return;
    block.each([&](int t, auto&) { tile.load_keys(head, used, from, count, t, kThreads); });
    for (int k = 0; k < a.statistics; ++k) {
      const KvStatistic statistic = statistic_of(a, k);
      if (statistic.kind == KV_STATISTIC_NONE) continue;
      const int counted = counted_queries(statistic, n);
      const int oldest = max_of(n - counted, from - used);  // the first query that counts and sees one of the slots
      block.each([&](int, Registers& r) { r.slot_max = kLogZero, r.slot_sum = r.counted = 0.0f; });
      for (int begin = max_of(oldest, 0) * group / kTile * kTile; begin < n * group; begin += kTile) {
        block.each([&](int t, auto&) {
          tile.load_queries(head, group, begin, n * group, t, kThreads);
          if (t >= kTile) return;
          const int row = begin + t;
          share[t] = row < n * group ? log_query_weight(statistic, n - 1 - row / group, counted) : kLogZero;
          if (!args.row_softmax || row >= n * group) return;
          const float* softmax =
              args.row_softmax + 2 * (static_cast<size_t>(head.query_head(row % group)) * a.tokens + row / group);
          rows[2 * t] = softmax[0], rows[2 * t + 1] = softmax[1];
        });
        block.each([&](int t, auto&) { tile.multiply(a, t); });
        block.each([&](int t, Registers& r) { add_rows(r, a, tile, statistic, share, rows, begin, first, group, t); });
      }
      block.each([&](int t, Registers& r) {
        const float sums[3] = {r.slot_max, r.slot_sum, r.counted};
        for (int i = 0; i < 3; ++i) partials[i * kThreads + t] = sums[i];
      });
      block.each([&](int t, auto&) {
        if (t < count)
          head.score(k)[from + t] =
              combine_partials(head, statistic, partials, k, used, from + t, age_of(tile.position[t], first), n, t);
      });
    }
  }

  static KV_DEVICE void add_rows(Registers& r, const KvVoteAttention& a, const Tile<T>& tile,
                                 const KvStatistic& statistic, const float* share, const float* rows, int begin,
                                 int first, int group, int t) {
    const int slot = t % kWarp;
    for (int i = 0; i < kRows; ++i) {
      const int row = t / kWarp * kRows + i;
      if (share[row] == kLogZero || !visible(tile.position[slot], first + (begin + row) / group, a.sliding_window))
        continue;
      const float logit = tile.logit[row * Tile<T>::kLogitStride + slot];
      if (statistic.kind == KV_STATISTIC_PROBABILITY) {
        r.slot_sum += expf(share[row]) * expf(logit + tile.bias[slot] - rows[2 * row]) / rows[2 * row + 1];
      } else {
        const float slot_max = max_of(r.slot_max, logit + share[row]);
        r.slot_sum = r.slot_sum * expf(r.slot_max - slot_max) + expf(logit + share[row] - slot_max);
        r.slot_max = slot_max;
        if ((begin + row) % group == 0) r.counted += expf(share[row]);
      }
    }
  }

  // Adds up the warps' partial sums and returns the slot's statistic.
  static KV_DEVICE float combine_partials(const Head<T>& head, const KvStatistic& statistic, const float* partials,
                                          int k, int used, int slot, int age, int n, int t) {
    float slot_max = kLogZero, slot_sum = 0.0f, counted = 0.0f;
    for (int i = 0; i < kWarps; ++i)
      slot_max = max_of(slot_max, partials[i * kBlock + t]), counted += partials[2 * kThreads + i * kBlock + t];
    for (int i = 0; i < kWarps; ++i) {
      const float sum = partials[kThreads + i * kBlock + t];
      slot_sum += statistic.kind == KV_STATISTIC_PROBABILITY ? sum : sum * expf(partials[i * kBlock + t] - slot_max);
    }
    return statistic_after(head, statistic, k, used, slot, age, n, slot_max, slot_sum, counted);
  }
};

}  // namespace cuda
}  // namespace kv
