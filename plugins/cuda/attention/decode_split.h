// Shared by the programs of a decode step: a split of a head's slots, the asynchronous copies of its rows, the softmax
// of a block of slots, the averages of their logits; and how the last block of a head combines the splits and appends
// the token.
#pragma once

#include "../core/copy.h"
#include "attention.h"

namespace kv {
namespace cuda {

constexpr int kDecodeThreads = 128, kDecodeWarps = kDecodeThreads / kWarp;

// A block of slots in shared memory, `at` bytes from where the first one begins: rows of keys, rows of values, and
// numbers of every slot, [kinds, slots].
struct Slots {
  char* stages;
  int at, key_stride, value_stride;

  KV_DEVICE char* key_row(int slot) const { return stages + (at + slot * key_stride); }
  KV_DEVICE char* value_row(int slot) const { return stages + (at + kBlock * key_stride + slot * value_stride); }
  KV_DEVICE float* numbers(int kind) const {
    return reinterpret_cast<float*>(stages + (at + kBlock * (key_stride + value_stride + 4 * kind)));
  }
  KV_DEVICE float* votes() const { return numbers(0); }
  KV_DEVICE int* position() const { return reinterpret_cast<int*>(numbers(1)); }
  KV_DEVICE float* score(int k) const { return numbers(2 + k); }
};

template <class T>
struct Stage : Slots {
  int key_size, value_size;

  KV_DEVICE Stage(char* stages, int at, const KvVoteAttention& a)
      : Slots{stages, at, shared_stride<T>(a.key_size), shared_stride<T>(a.value_size)},
        key_size(a.key_size),
        value_size(a.value_size) {}
  KV_DEVICE T* key(int slot) const { return reinterpret_cast<T*>(key_row(slot)); }
  KV_DEVICE T* value(int slot) const { return reinterpret_cast<T*>(value_row(slot)); }
  static KV_HD int kinds(const KvVoteAttention& a) { return 2 + a.statistics; }
  static KV_HD size_t size(const KvVoteAttention& a) {
    return kBlock * (shared_stride<T>(a.key_size) + shared_stride<T>(a.value_size) + kinds(a) * sizeof(float));
  }
};

// Where the numbers of that kind lie in the cache.
template <class T>
KV_DEVICE const float* first_number(const Head<T>& head, int kind) {
  if (kind == 0) return head.votes();
  return kind == 1 ? reinterpret_cast<const float*>(head.position()) : head.score(kind - 2);
}

// A thread's part in the copies of the next block of slots: where in the cache its first vectors and its first number
// begin, and where they go in a stage.
struct Fetch {
  const char *key, *value;
  const float* number;
  int key_to, value_to, number_to;
};

template <class T>
KV_DEVICE void start_fetch(Fetch& fetch, const Head<T>& head, const Stage<T>& first, int from, int t) {
  const int kind = t / kWarp, slot = t % kWarp;
  fetch.key = reinterpret_cast<const char*>(head.key(from)) + t * 16;
  fetch.value = reinterpret_cast<const char*>(head.value(from)) + t * 16;
  fetch.number = first_number(head, min_of(kind, Stage<T>::kinds(head.a) - 1)) + from + slot;
  fetch.key_to = once(place_of(max_of(head.key_bytes() / 16, 1), t));
  fetch.value_to = once(kBlock * first.key_stride + place_of(max_of(head.value_bytes() / 16, 1), t));
  fetch.number_to = once(kBlock * (first.key_stride + first.value_stride) + (kind * kBlock + slot) * 4);
}

// Rows of a block of slots, of which the token that is new comes last, with rows in the call.
template <class T, class Program>
KV_DEVICE void fetch_rows(Block<Program>& block, const Head<T>& head, const Stage<T>& stage, const Fetch& fetch,
                          int used, int from, int count, int t) {
  constexpr int kWidth = 128 / kLanes<T>;
  const int key_width = head.a.key_size / kLanes<T>, value_width = head.a.value_size / kLanes<T>;
  const int held = min_of(count, used - from);
  char *key = stage.stages + (stage.at + fetch.key_to), *value = stage.stages + (stage.at + fetch.value_to);
  copy_most<kBlock, kWidth, kWidth / 2>(block, key, fetch.key, key_width, held, t);
  copy_most<kBlock, kWidth, kWidth / 2>(block, value, fetch.value, value_width, held, t);
  if (held == count) return;
  if (t < key_width) block.template copy<16>(stage.key(held) + t * kLanes<T>, head.new_key(0) + t * kLanes<T>);
  if (t < value_width) block.template copy<16>(stage.value(held) + t * kLanes<T>, head.new_value(0) + t * kLanes<T>);
}

// A block of slots, and on to the next one.
template <class T, class Program>
KV_DEVICE void fetch_slots(Block<Program>& block, const Head<T>& head, const Stage<T>& stage, Fetch& fetch, int used,
                           int from, int count, int t) {
  if (count <= 0) return;
  fetch_rows(block, head, stage, fetch, used, from, count, t);
  // A warp the numbers of every fourth kind. The new token's are anything.
  const int kinds = Stage<T>::kinds(head.a), slot = t % kWarp;
  if (t / kWarp < kinds && slot < count)
    block.template copy<4>(stage.stages + (stage.at + fetch.number_to), fetch.number);
#pragma unroll 1
  for (int kind = t / kWarp + kDecodeWarps; kind < kinds; kind += kDecodeWarps)
    if (slot < count) block.template copy<4>(stage.numbers(kind) + slot, first_number(head, kind) + from + slot);
  fetch.key += kBlock * head.key_bytes(), fetch.value += kBlock * head.value_bytes(), fetch.number += kBlock;
}

// Calls use(stage, from, count) for every block of slots of `range`, in turn, while the next ones are copied.
template <class T, class Program, class Use>
KV_DEVICE void stream_slots(Block<Program>& block, const Attention& args, const Head<T>& head, char* stages, int used,
                            Range range, Use use) {
  const KvVoteAttention& a = args.call;
  const int size = once(static_cast<int>(Stage<T>::size(a))), end = once(args.stages * size);
  const auto after = [&](int stage) { return stage + size < end ? stage + size : 0; };
  int next = range.from, to = 0, at = 0;  // the slots that are copied next, and to where; the stage in use
  block.each_alone([&](int t, auto& r) { start_fetch(r.fetch, head, Stage<T>(stages, 0, a), next, t); });
#pragma unroll 1
  for (int from = range.from - (args.stages - 1) * kBlock; from < range.to; from += kBlock) {
    const int count = min_of(kBlock, range.to - next);
    block.each_alone(
        [&](int t, auto& r) { fetch_slots(block, head, Stage<T>(stages, to, a), r.fetch, used, next, count, t); });
    block.cp_async_commit();
    next += kBlock, to = after(to);
    if (from < range.from) continue;
    block.cp_async_wait(args.stages - 1);
    use(Stage<T>(stages, at, a), from, min_of(kBlock, range.to - from));
    at = after(at);
  }
  block.cp_async_wait(0);
}

// Two neighbouring logits, raw, into shared memory.
KV_DEVICE void store_pair(float* to, float first, float second, float softcap) {
  if (softcap != 0.0f) first = capped(first, softcap), second = capped(second, softcap);
  store_two(to, {first, second});
}

// Within a phase, by one warp: what the logits of a block's slots take on, in shared memory. The votes' bias; kLogZero
// where the query at position `now` does not see the slot; kLowest where there is none.
template <class T>
KV_DEVICE void store_bias(const KvVoteAttention& a, const Stage<T>& stage, float* bias, int used, int now, int from,
                          int count, int t) {
  const int slot = t % kWarp;
  if (t / kWarp != kDecodeWarps - 1) return;  // the first ones have statistics
  float x = kLowest;
  if (slot < count) {
    x = 0.0f;  // of the new token
    if (from + slot != used)
      x = visible(stage.position()[slot], now, a.sliding_window) ? vote_bias(stage.votes()[slot], a) : kLogZero;
  }
  bias[slot] = x;
}

// The running softmax of a block of slots. A lane is a slot, a warp every fourth of `heads` query heads. logit(g,
// slot): without votes; bias: as store_bias left it. Calls keep(registers, g, slot, weight, factor), where the sums
// over earlier blocks take the factor. Ends with a barrier.
template <class T, class Program, class Logit, class Keep>
KV_DEVICE void softmax_slots(Block<Program>& block, const Attention& args, const Head<T>& head, const float* bias,
                             int heads, int from, int count, Logit logit, Keep keep) {
  constexpr int kWarpHeads = Program::kWarpHeads;
  block.each_alone([&](int t, auto& r) {
    const int slot = t % kWarp;
    const float added = bias[slot];
#pragma unroll
    for (int i = 0; i < kWarpHeads; ++i) {
      if (i * kDecodeWarps >= heads) break;
      const int g = t / kWarp + i * kDecodeWarps;
      r.logit[i] = kLowest;
      if (g < heads) {
        const float sum = logit(g, slot) + added;
        r.logit[i] = added <= kLogZero ? added : sum;  // of a slot that is not there the logit may be anything
        if (args.logits && g < args.group() && slot < count)
          args.logits[static_cast<size_t>(head.query_head(g)) * head.a.capacity + from + slot] = r.logit[i];
      }
      r.block_max[i] = r.logit[i];
    }
  });
#pragma unroll
  for (int i = 0; i < kWarpHeads; ++i) {
    if (i * kDecodeWarps >= heads) break;
    block.warp_max([&](auto& r) -> float& { return r.block_max[i]; });
  }
  block.each([&](int t, auto& r) {
    const int slot = t % kWarp;
#pragma unroll
    for (int i = 0; i < kWarpHeads; ++i) {
      const int g = t / kWarp + i * kDecodeWarps;
      if (g >= heads) break;
      const float row_max = max_of(r.row_max[i], r.block_max[i]), factor = exp_of<T>(r.row_max[i] - row_max);
      const float weight = exp_of<T>(r.logit[i] - row_max);  // 0 of a slot that is not there
      r.row_sum[i] = r.row_sum[i] * factor + weight;
      r.row_max[i] = row_max;
      keep(r, g, slot, weight, factor);
    }
  });
}

// What the averages of logits take of their statistics, a warp every fourth of them: the logarithms of a logit's share
// and of how much is left of the past.
struct Averages {
  float share[KV_MAX_STATISTICS / kDecodeWarps], left[KV_MAX_STATISTICS / kDecodeWarps];
};

KV_DEVICE void start_averages(Averages& averages, const Attention& args, int t) {
#pragma unroll
  for (int i = 0; i < KV_MAX_STATISTICS / kDecodeWarps; ++i) {
    const int k = t / kWarp + i * kDecodeWarps;
    averages.share[i] = averages.left[i] = 0.0f;
    if (k >= args.call.statistics || args.call.statistic[k].kind != KV_STATISTIC_LOG_EMA) continue;
    const float decay = args.call.statistic[k].decay;
    averages.share[i] = log1pf(-decay) - logf(static_cast<float>(args.group()));
    averages.left[i] = logf(decay);
  }
}

// Within a phase: the averages of logits of a block of slots, a warp a statistic. logit(g, slot): raw; bias: as
// store_bias left it.
template <class T, class Logit>
KV_DEVICE void update_averages(const Averages& averages, const Attention& args, const Head<T>& head,
                               const Stage<T>& stage, const float* bias, int used, int from, int count, int t,
                               Logit logit) {
  const KvVoteAttention& a = args.call;
  const int slot = t % kWarp, group = args.group();
#pragma unroll
  for (int i = 0; i < KV_MAX_STATISTICS / kDecodeWarps; ++i) {
    const int k = t / kWarp + i * kDecodeWarps;
    if (k >= a.statistics || slot >= count || a.statistic[k].kind != KV_STATISTIC_LOG_EMA) continue;
    const float share = averages.share[i];
    const float start = from + slot == used ? kLogZero : stage.score(k)[slot] + averages.left[i];
    float highest = start, sum = 0.0f;
    if (bias[slot] != kLogZero) {
#pragma unroll 4
      for (int g = 0; g < group; ++g) highest = max_of(highest, logit(g, slot) + share);
#pragma unroll 4
      for (int g = 0; g < group; ++g) sum += exp_of<T>(logit(g, slot) + share - highest);
    }
    head.score(k)[from + slot] = highest + logf(sum + exp_of<T>(start - highest));
  }
}

// A call that brings a sequence no token, or that has no room for it: its output is 0.
template <class T, class Program>
KV_DEVICE void store_idle(Block<Program>& block, const Attention& args, const Head<T>& head, int split, int used) {
  const int size = args.call.value_size, group = args.group();
  block.each([&](int t, auto&) {
    if (split != 0) return;
    for (int i = t; i < group * size; i += kDecodeThreads) head.store(i / size, 0, i % size, 0.0f);
    if (t == 0) args.used[2 * head.index] = used, args.used[2 * head.index + 1] = 0;
  });
}

// row_max and row_sum of a split into the workspace; every lane holds the whole sums.
template <int kWarpHeads, class Registers>
KV_DEVICE void store_partial_softmax(const Attention& args, size_t split, int t, const Registers& r) {
  const int group = args.group();
#pragma unroll
  for (int i = 0; i < kWarpHeads; ++i) {
    const int g = t / kWarp + i * kDecodeWarps;
    if (t % kWarp == 0 && g < group)
      args.partial_softmax[2 * split * group + g] = r.row_max[i],
                                               args.partial_softmax[(2 * split + 1) * group + g] = r.row_sum[i];
  }
}

// Bytes of shared memory that combine_splits takes.
KV_HD constexpr size_t combine_size(int splits, int group) { return (3 * splits + 2) * group * sizeof(float); }

// By the last block of a head: of every split its share of the softmax, [splits, G] in shared memory, and the softmax
// of the rows into the workspace. Ends with a barrier.
template <class T, class Program>
KV_DEVICE const float* combine_softmax(Block<Program>& block, const Attention& args, const Head<T>& head, float* held) {
  const KvVoteAttention& a = args.call;
  const int group = args.group(), splits = args.splits;
  const float* softmax = args.partial_softmax + 2 * static_cast<size_t>(head.index) * splits * group;
  float *share = held + 2 * splits * group, *row = share + splits * group;
  block.each([&](int t, auto&) {
    for (int i = t; i < 2 * splits * group; i += kDecodeThreads) held[i] = softmax[i];
  });
  block.each([&](int g, auto&) {
    if (g >= group) return;
    float row_max = a.sink_logits ? a.sink_logits[head.head * group + g] : kLowest, row_sum = 0.0f;
    for (int i = 0; i < splits; ++i) row_max = max_of(row_max, held[2 * i * group + g]);
    if (a.sink_logits) row_sum = expf(a.sink_logits[head.head * group + g] - row_max);
    for (int i = 0; i < splits; ++i) row_sum += expf(held[2 * i * group + g] - row_max) * held[(2 * i + 1) * group + g];
    row[2 * g] = row_max, row[2 * g + 1] = row_sum;
    args.row_softmax[2 * static_cast<size_t>(head.query_head(g))] = row_max;
    args.row_softmax[2 * static_cast<size_t>(head.query_head(g)) + 1] = row_sum;
  });
  block.each([&](int t, auto&) {
    for (int i = t; i < splits * group; i += kDecodeThreads)
      share[i] = expf(held[2 * (i / group) * group + i % group] - row[2 * (i % group)]) / row[2 * (i % group) + 1];
  });
  return share;
}

// By the last block of a head: combines its splits in their order, writes the output, appends the token.
template <class T, class Program>
KV_DEVICE void combine_splits(Block<Program>& block, const Attention& args, const Head<T>& head, float* held,
                              int used) {
  const KvVoteAttention& a = args.call;
  const int group = args.group(), size = a.value_size, splits = args.splits;
  const float *share = combine_softmax(block, args, head, held),
              *output = args.partial_output + static_cast<size_t>(head.index) * splits * group * size;
  block.each([&](int t, auto&) {
    for (int i = t * 4; i < group * size; i += kDecodeThreads * 4) {
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      // Unrolled so that many reads are under way at once: no other block is left to hide their latency.
#pragma unroll 8
      for (int split = 0; split < splits; ++split) {
        float four[4];
        load_four(output + static_cast<size_t>(split) * group * size + i, four);
        for (int j = 0; j < 4; ++j) sum[j] += share[split * group + i / size] * four[j];
      }
      for (int j = 0; j < 4; ++j) assign(head.output(i / size, 0)[i % size + j], sum[j]);
    }
    // All blocks of the head have read the votes by now.
    for (int i = t; i < a.key_size; i += kDecodeThreads) head.key(used)[i] = head.new_key(0)[i];
    for (int i = t; i < size; i += kDecodeThreads) head.value(used)[i] = head.new_value(0)[i];
    if (t == 0) {
      head.votes()[used] = 1.0f;
      head.position()[used] = head.first();
      args.used[2 * head.index] = used, args.used[2 * head.index + 1] = 1;
    }
  });
}

}  // namespace cuda
}  // namespace kv
