// Shared by the programs of a decode step: a split of a head's slots, the asynchronous copies of its rows, the softmax
// of a block of slots, the averages of their logits; and how the last block of a head combines the splits and appends
// the token.
#pragma once

#include "attention.h"

namespace kv {
namespace cuda {

constexpr int kDecodeThreads = 128, kDecodeWarps = kDecodeThreads / kWarp;

// A block of slots in shared memory.
template <class T>
struct Stage {
  char* base;
  int key_stride, value_stride, key_size, value_size;

  KV_DEVICE Stage(char* base, const KvVoteAttention& a)
      : base(base),
        key_stride(shared_stride<T>(a.key_size)),
        value_stride(shared_stride<T>(a.value_size)),
        key_size(a.key_size),
        value_size(a.value_size) {}
  KV_DEVICE T* key(int slot) const { return reinterpret_cast<T*>(base + slot * key_stride); }
  KV_DEVICE T* value(int slot) const { return reinterpret_cast<T*>(base + kBlock * key_stride + slot * value_stride); }
  KV_DEVICE float* votes() const { return reinterpret_cast<float*>(base + kBlock * (key_stride + value_stride)); }
  KV_DEVICE int* position() const { return reinterpret_cast<int*>(votes() + kBlock); }
  KV_DEVICE float* score(int k) const { return votes() + (2 + k) * kBlock; }
  static KV_HD size_t size(const KvVoteAttention& a) {
    return kBlock *
           (shared_stride<T>(a.key_size) + shared_stride<T>(a.value_size) + (2 + a.statistics) * sizeof(float));
  }
};

// Thread t's share of `count` rows of `width` units of so many bytes, which lie one after another, into shared memory
// where a row takes `stride` bytes: every kDecodeThreads-th unit. Addresses go on by steps, with one division and no
// product.
template <int kUnit, class Program>
KV_DEVICE void copy_rows(Block<Program>& block, void* to, int stride, const void* from, int width, int count, int t) {
  const int step = kDecodeThreads / width * stride + kDecodeThreads % width * kUnit, rest = kDecodeThreads % width;
  int at = t % width;
  char* target = static_cast<char*>(to) + t / width * stride + at * kUnit;
  const char* source = static_cast<const char*>(from) + t * kUnit;
  for (int i = t; i < count * width; i += kDecodeThreads) {
    if constexpr (kUnit == 2)  // which no asynchronous copy takes
      *reinterpret_cast<uint16_t*>(target) = *reinterpret_cast<const uint16_t*>(source);
    else
      block.template copy<kUnit>(target, source);
    source += kDecodeThreads * kUnit, target += step, at += rest;
    if (at >= width) at -= width, target += stride - width * kUnit;
  }
}

template <class T, class Program>
KV_DEVICE void fetch_rows(Block<Program>& block, const Head<T>& head, const Stage<T>& stage, int used, int from,
                          int count, int t) {
  const KvVoteAttention& a = head.a;
  const int key_width = a.key_size / kLanes<T>, value_width = a.value_size / kLanes<T>;
  const int held = min_of(count, used - from);  // the token that is new comes last
  copy_rows<16>(block, stage.key(0), stage.key_stride, head.key(from), key_width, held, t);
  copy_rows<16>(block, stage.value(0), stage.value_stride, head.value(from), value_width, held, t);
  if (count > 0 && held < count) {
    copy_rows<16>(block, stage.key(held), stage.key_stride, head.new_key(0), key_width, 1, t);
    copy_rows<16>(block, stage.value(held), stage.value_stride, head.new_value(0), value_width, 1, t);
  }
  const int slot = t % kWarp;
  if (from + slot >= used || slot >= count) return;
  for (int k = t / kWarp; k < 2 + a.statistics; k += kDecodeWarps) {
    if (k == 0)
      block.template copy<4>(stage.votes() + slot, head.votes() + from + slot);
    else if (k == 1)
      block.template copy<4>(stage.position() + slot, head.position() + from + slot);
    else
      block.template copy<4>(stage.score(k - 2) + slot, head.score(k - 2) + from + slot);
  }
}

// Calls use(stage, from, count) for every block of slots of `range`, in turn, while the next ones are copied.
template <class T, class Program, class Use>
KV_DEVICE void stream_slots(Block<Program>& block, const Attention& args, const Head<T>& head, char* stages, int used,
                            Range range, Use use) {
  const KvVoteAttention& a = args.call;
  const size_t size = Stage<T>::size(a);
  const auto fetch = [&](int ahead) {
    const int from = range.from + ahead * kBlock, count = min_of(kBlock, range.to - from);
    const Stage<T> stage(stages + ahead % args.stages * size, a);
    block.each_alone([&](int t, auto&) { fetch_rows(block, head, stage, used, from, count, t); });
    block.cp_async_commit();
  };
  for (int i = 0; i < args.stages - 1; ++i) fetch(i);
  for (int i = 0, from = range.from; from < range.to; ++i, from += kBlock) {
    fetch(i + args.stages - 1);
    block.cp_async_wait(args.stages - 1);
    use(Stage<T>(stages + i % args.stages * size, a), from, min_of(kBlock, range.to - from));
  }
  block.cp_async_wait(0);
}

// The running softmax of a block of slots. A lane is a slot, a warp every fourth of `heads` query heads. logit(g,
// slot): without votes. Calls keep(registers, g, slot, weight, factor), where the sums over earlier blocks take the
// factor. Ends with a barrier.
template <class T, class Program, class Logit, class Keep>
KV_DEVICE void softmax_slots(Block<Program>& block, const Attention& args, const Head<T>& head, const Stage<T>& stage,
                             int heads, int used, int from, int count, Logit logit, Keep keep) {
  const KvVoteAttention& a = args.call;
  constexpr int kWarpHeads = Program::kWarpHeads;
  const int group = args.group(), now = head.first();
  block.each_alone([&](int t, auto& r) {
    const int slot = t % kWarp;
    float bias = kLowest;
    if (slot < count) {
      const bool is_new = from + slot == used;
      bias = is_new ? 0.0f : vote_bias(stage.votes()[slot], a);
      if (!is_new && !visible(stage.position()[slot], now, a.sliding_window)) bias = kLogZero;
    }
#pragma unroll
    for (int i = 0; i < kWarpHeads; ++i) {
      const int g = t / kWarp + i * kDecodeWarps;
      r.logit[i] = kLowest;
      if (g < heads && slot < count) {
        const float raw = logit(g, slot);
        r.logit[i] = bias == kLogZero ? kLogZero : raw + bias;
        if (args.logits && g < group)
          args.logits[static_cast<size_t>(head.query_head(g)) * a.capacity + from + slot] = r.logit[i];
      }
      r.block_max[i] = r.logit[i];
    }
  });
#pragma unroll
  for (int i = 0; i < kWarpHeads; ++i)
    if (i * kDecodeWarps < heads) block.warp_max([&](auto& r) -> float& { return r.block_max[i]; });
  block.each([&](int t, auto& r) {
    const int slot = t % kWarp;
#pragma unroll
    for (int i = 0; i < kWarpHeads; ++i) {
      const int g = t / kWarp + i * kDecodeWarps;
      if (g >= heads) continue;
      const float row_max = max_of(r.row_max[i], r.block_max[i]), factor = expf(r.row_max[i] - row_max);
      const float weight = slot < count ? expf(r.logit[i] - row_max) : 0.0f;
      r.row_sum[i] = r.row_sum[i] * factor + weight;
      r.row_max[i] = row_max;
      keep(r, g, slot, weight, factor);
    }
  });
}

// Within a phase: the averages of logits of a block of slots, a warp a statistic. logit(g, slot): raw.
template <class T, class Logit>
KV_DEVICE void update_averages(const Attention& args, const Head<T>& head, const Stage<T>& stage, int used, int from,
                               int count, int t, Logit logit) {
  const KvVoteAttention& a = args.call;
  const int slot = t % kWarp, group = args.group();
  for (int k = t / kWarp; k < a.statistics && slot < count; k += kDecodeWarps) {
    if (a.statistic[k].kind != KV_STATISTIC_LOG_EMA) continue;
    const float decay = a.statistic[k].decay, share = log1pf(-decay) - logf(static_cast<float>(group));
    const bool is_new = from + slot == used;
    const float start = is_new ? kLogZero : stage.score(k)[slot] + logf(decay);
    float highest = start, sum = 0.0f;
    if (is_new || visible(stage.position()[slot], head.first(), a.sliding_window)) {
#pragma unroll 4
      for (int g = 0; g < group; ++g) highest = max_of(highest, logit(g, slot) + share);
#pragma unroll 4
      for (int g = 0; g < group; ++g) sum += expf(logit(g, slot) + share - highest);
    }
    head.score(k)[from + slot] = highest + logf(sum + expf(start - highest));
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
