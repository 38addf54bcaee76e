// Shared by the programs of a decode step: the asynchronous copies of a split's slots, the softmax of a block of slots,
// the averages of their logits; and the combination of the splits by the last block of a head:
//
//   stream_slots: for each block of 32 slots: wait for its copies, start those of a later block, use it
//   softmax_slots: biased = logit + bias; row_max, row_sum, weight = running softmax
//   update_averages: score = ln(exp(past score) decay + sum over g of exp(logit[g]) (1 - decay) / group)
//   combine_splits: row_max, row_sum of all splits; output = sum over splits of exp(their row_max - row_max) output /
//                   row_sum; append the token
#pragma once

#include "../core/copy.h"
#include "attention.h"

namespace kv {
namespace cuda {

constexpr int kDecodeThreads = 128, kDecodeWarps = kDecodeThreads / kWarp;

// A stage: a block of slots in shared memory, `at` bytes from the first stage. Rows of keys, rows of values, and
// numbers of every slot [kinds, slots]: votes, position and scores.
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

// Returns the address in the cache of the head's numbers of one kind.
template <class T>
KV_DEVICE const float* first_number(const Head<T>& head, int kind) {
  if (kind == 0) return head.votes();
  return kind == 1 ? reinterpret_cast<const float*>(head.position()) : head.score(kind - 2);
}

// The addresses of a thread's copies of the next block of slots: its first vectors and first number in the cache, and
// their offsets in a stage.
struct Fetch {
  const char *key, *value;
  const float* number;
  int key_to, value_to;
};

template <class T>
KV_DEVICE void start_fetch(Fetch& fetch, const Head<T>& head, const Stage<T>& first, int from, int t) {
  const int kind = t / kWarp, slot = t % kWarp;
  fetch.key = reinterpret_cast<const char*>(head.key(from)) + t * 16;
  fetch.value = reinterpret_cast<const char*>(head.value(from)) + t * 16;
  fetch.number = first_number(head, min_of(kind, Stage<T>::kinds(head.a) - 1)) + from + slot;
  fetch.key_to = once(place_of(max_of(head.key_bytes() / 16, 1), t));
  fetch.value_to = once(kBlock * first.key_stride + place_of(max_of(head.value_bytes() / 16, 1), t));
}

// Within a phase: copies the rows of a block of slots. The new token, whose rows are in the call, is the last slot.
template <class T, class Program>
KV_DEVICE void fetch_rows(Block<Program>& block, const Head<T>& head, const Stage<T>& stage, const Fetch& fetch,
                          int used, int from, int count, int t) {
  constexpr int kWidth = 128 / kLanes<T>;
  const int key_width = head.a.key_size / kLanes<T>, value_width = head.a.value_size / kLanes<T>;
  const int cached = min_of(count, used - from);
  char *key = stage.stages + (stage.at + fetch.key_to), *value = stage.stages + (stage.at + fetch.value_to);
  copy_most<kBlock, kWidth, kWidth / 2>(block, key, fetch.key, key_width, cached, t);
  copy_most<kBlock, kWidth, kWidth / 2>(block, value, fetch.value, value_width, cached, t);
  if (cached == count) return;
  if (t < key_width) block.template copy<16>(stage.key(cached) + t * kLanes<T>, head.new_key(0) + t * kLanes<T>);
  if (t < value_width) block.template copy<16>(stage.value(cached) + t * kLanes<T>, head.new_value(0) + t * kLanes<T>);
}

// Within a phase: copies a block of slots, and advances `fetch` to the next block.
template <class T, class Program>
KV_DEVICE void fetch_slots(Block<Program>& block, const Head<T>& head, const Stage<T>& stage, Fetch& fetch, int used,
                           int from, int count, int t) {
  if (count <= 0) return;
  fetch_rows(block, head, stage, fetch, used, from, count, t);
  // Numbers of every fourth kind per warp. The new token's are undefined, and no one uses them.
  const int kinds = Stage<T>::kinds(head.a), slot = t % kWarp;
  if (t / kWarp < kinds && slot < count) block.template copy<4>(stage.numbers(0) + t, fetch.number);
#pragma unroll 1
  for (int kind = t / kWarp + kDecodeWarps; kind < kinds; kind += kDecodeWarps)
    if (slot < count) block.template copy<4>(stage.numbers(kind) + slot, first_number(head, kind) + from + slot);
  fetch.key += kBlock * head.key_bytes(), fetch.value += kBlock * head.value_bytes(), fetch.number += kBlock;
}

// Calls use(stage, from, count) for every block of slots of `range`, in order, while the next blocks are copied.
template <class T, class Program, class Use>
KV_DEVICE void stream_slots(Block<Program>& block, const Attention& args, const Head<T>& head, char* stages, int used,
                            Range range, Use use) {
  const KvVoteAttention& a = args.call;
  const int size = once(static_cast<int>(Stage<T>::size(a))), end = once(args.stages * size);
  const auto after = [&](int stage) { return stage + size < end ? stage + size : 0; };
  int next = range.from, to = 0, at = 0;  // the first slot to copy next; the stage to copy to; the stage to use
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

// Stores two neighbouring logits, without bias, in shared memory.
KV_DEVICE void store_pair(float* to, float first, float second, float softcap) {
  if (softcap != 0.0f) first = capped(first, softcap), second = capped(second, softcap);
  store_two(to, {first, second});
}

// Within a phase, by one warp: stores the biases of a block's slots in shared memory. A bias is vote_bias; kLogZero if
// the query at position `now` does not see the slot; kLowest beyond the last slot.
template <class T>
KV_DEVICE void store_bias(const KvVoteAttention& a, const Stage<T>& stage, float* bias, int used, int now, int from,
                          int count, int t) {
  const int slot = t % kWarp;
  if (t / kWarp != kDecodeWarps - 1) return;  // the last warp, since the first ones update averages
  float x = kLowest;
  if (slot < count) {
    x = 0.0f;  // the new token's bias
    if (from + slot != used)
      x = visible(stage.position()[slot], now, a.sliding_window) ? vote_bias(stage.votes()[slot], a) : kLogZero;
  }
  bias[slot] = x;
}

// Computes the running softmax of a block of slots; a slot per lane, every fourth of `heads` query heads per warp.
// logit(g, slot): the logit without bias; bias: the array of store_bias. Calls store(registers, g, slot, weight,
// factor); sums over earlier blocks have to be multiplied by the factor. Ends with a barrier: the writes of `store` are
// visible.
template <class T, class Program, class Logit, class Store>
KV_DEVICE void softmax_slots(Block<Program>& block, const Attention& args, const Head<T>& head, const float* bias,
                             int heads, int from, int count, Logit logit, Store store) {
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
        r.logit[i] = added <= kLogZero ? added : sum;  // beyond the last slot the logit is undefined
        if (args.logits && g < args.group() && slot < count) head.logits(args, g)[from + slot] = r.logit[i];
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
      const float weight = exp_of<T>(r.logit[i] - row_max);  // 0 beyond the last slot
      r.row_sum[i] = r.row_sum[i] * factor + weight;
      r.row_max[i] = row_max;
      store(r, g, slot, weight, factor);
    }
  });
}

// Within a phase: updates the averages of logits of a block of slots, a statistic per warp. logit(g, slot): the logit
// without bias; bias: the array of store_bias.
template <class T, class Logit>
KV_DEVICE void update_averages(const Attention& args, const Head<T>& head, const Stage<T>& stage, const float* bias,
                               int used, int from, int count, int t, Logit logit) {
  const KvVoteAttention& a = args.call;
  const int slot = t % kWarp, group = args.group();
#pragma unroll
  for (int i = 0; i < KV_MAX_STATISTICS / kDecodeWarps; ++i) {
    const int k = t / kWarp + i * kDecodeWarps;
    if (k >= a.statistics || slot >= count || a.statistic[k].kind != KV_STATISTIC_LOG_EMA) continue;
    const float share = args.log_share[k];
    const float start = from + slot == used ? kLogZero : stage.score(k)[slot] + args.log_decay[k];
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

// Stores a zero output if the call brings this sequence no token, or has no room for it.
template <class T, class Program>
KV_DEVICE void store_idle(Block<Program>& block, const Attention& args, const Head<T>& head, int split, int used) {
  const int size = args.call.value_size, group = args.group();
  block.each([&](int t, auto&) {
    if (split != 0) return;
    for (int i = t; i < group * size; i += kDecodeThreads) head.store(i / size, 0, i % size, 0.0f);
    if (t == 0) args.used[2 * head.index] = used, args.used[2 * head.index + 1] = 0;
  });
}

// Stores row_max and row_sum of a split in the workspace. In registers every lane has the sums over the whole warp.
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

// A lane's share of the splits of a query head: every 32nd.
struct SplitShares {
  static constexpr int kOwn = kMostShares / kWarp;
  float max[kOwn], sum[kOwn], row_max, row_sum;
};

// Bytes of shared memory that combine_splits uses.
KV_HD constexpr size_t combine_size(int splits, int group) { return splits * group * sizeof(float); }

// Run by the last block of a head. Stores every split's share of the softmax, [splits, G], in `share` in shared memory,
// and row_max and row_sum of the rows in the workspace; a query head per warp, the splits in its lanes. Ends with a
// barrier: the shares are visible.
template <class T, class Program>
KV_DEVICE void combine_softmax(Block<Program>& block, const Attention& args, const Part& part, const Head<T>& head,
                               float* share) {
  const KvVoteAttention& a = args.call;
  const int group = args.group(), splits = part.splits;
  const float* softmax = args.partial_softmax + 2 * static_cast<size_t>(part.start) * group;
#pragma unroll 1
  for (int first = 0; first < group; first += kDecodeWarps) {
    block.each_alone([&](int t, auto& r) {
      const int g = min_of(first + t / kWarp, group - 1), lane = t % kWarp;
      const float sink = a.sink_logits ? a.sink_logits[head.head * group + g] : kLowest;
#pragma unroll
      for (int i = 0; i < SplitShares::kOwn; ++i) {
        const int split = lane + i * kWarp, at = 2 * min_of(split, splits - 1) * group + g;
        const float max = softmax[at], sum = softmax[at + group];  // no branch: all loads are under way together
        r.shares.max[i] = split < splits ? max : kLowest, r.shares.sum[i] = split < splits ? sum : 0.0f;
      }
      r.shares.row_max = r.shares.row_sum = sink;
#pragma unroll
      for (int i = 0; i < SplitShares::kOwn; ++i) r.shares.row_max = max_of(r.shares.row_max, r.shares.max[i]);
    });
    block.warp_max([](auto& r) -> float& { return r.shares.row_max; });
    block.each_alone([&](int t, auto& r) {
      // A sink counts once: in the first lane.
      r.shares.row_sum = a.sink_logits && t % kWarp == 0 ? expf(r.shares.row_sum - r.shares.row_max) : 0.0f;
#pragma unroll
      for (int i = 0; i < SplitShares::kOwn; ++i) {
        r.shares.max[i] = expf(r.shares.max[i] - r.shares.row_max);
        r.shares.row_sum += r.shares.max[i] * r.shares.sum[i];
      }
    });
    block.warp_sum([](auto& r) -> float& { return r.shares.row_sum; });
    block.each_alone([&](int t, auto& r) {
      const int g = first + t / kWarp, lane = t % kWarp;
      if (g >= group) return;
#pragma unroll
      for (int i = 0; i < SplitShares::kOwn; ++i)
        if (lane + i * kWarp < splits) share[(lane + i * kWarp) * group + g] = r.shares.max[i] / r.shares.row_sum;
      float* const row = args.row_softmax + 2 * static_cast<size_t>(head.query_head(g));
      if (lane == 0) row[0] = r.shares.row_max, row[1] = r.shares.row_sum;
    });
  }
  block.each([](int, auto&) {});
}

// Adds up four neighbouring numbers of the splits' outputs times their shares, in the order of the splits. at: the
// first split's numbers; apart: floats from split to split; share: the first split's share, and the others `group`
// floats apart. kAhead: the splits whose outputs are under way together, since no other block hides their latency.
template <int kAhead>
KV_DEVICE void add_outputs(const float* at, size_t apart, const float* share, int group, int splits, float (&sum)[4]) {
  for (int j = 0; j < 4; ++j) sum[j] = 0.0f;
#pragma unroll 1
  for (int split = 0; split < splits; split += kAhead) {
    float four[kAhead][4];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_four(at + min_of(split + i, splits - 1) * apart, four[i]);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const float part = share[min_of(split + i, splits - 1) * group];
      for (int j = 0; j < 4; ++j) sum[j] = split + i < splits ? sum[j] + part * four[i][j] : sum[j];
    }
  }
}

// Run by the last block of a head: combines its splits in their order, writes the output, appends the token. now: the
// token's position.
template <class T, class Program>
KV_DEVICE void combine_splits(Block<Program>& block, const Attention& args, const Part& part, const Head<T>& head,
                              float* share, int used, int now) {
  const KvVoteAttention& a = args.call;
  const int group = args.group(), size = a.value_size, splits = part.splits;
  const int key_width = a.key_size / kLanes<T>, value_width = size / kLanes<T>;
  combine_softmax(block, args, part, head, share);
  const float* const output = args.partial_output + static_cast<size_t>(part.start) * group * size;
  block.each([&](int t, auto&) {
    Vector key = {}, value = {};  // of the new token
    if (t < key_width) key = load_vector(head.new_key(0) + t * kLanes<T>);
    if (t < value_width) value = load_vector(head.new_value(0) + t * kLanes<T>);
    for (int i = t * 4; i < group * size; i += kDecodeThreads * 4) {
      float sum[4];
      add_outputs<16>(output + i, static_cast<size_t>(group) * size, share + i / size, group, splits, sum);
      for (int j = 0; j < 4; ++j) assign(head.output(i / size, 0)[i % size + j], sum[j]);
    }
    // All blocks of the head have read the votes: they came before this one.
    if (t < key_width) store_vector(head.key(used) + t * kLanes<T>, key);
    if (t < value_width) store_vector(head.value(used) + t * kLanes<T>, value);
    if (t == 0) {
      head.votes()[used] = 1.0f;
      head.position()[used] = now;
      args.used[2 * head.index] = used, args.used[2 * head.index + 1] = 1;
    }
  });
}

}  // namespace cuda
}  // namespace kv
