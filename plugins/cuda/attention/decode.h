// VoteAttention for one token per sequence. A block of 128 threads has a KV head of one sequence, or a split of its
// slots; all query heads of the group are in one block, so every key and every value is read once:
//
//   load the queries; find the used slots
//   for each block of 32 slots of the split, the new token's too    (its copies began blocks before)
//     logit[g, slot] = query[g] . key[slot]
//     row_max, row_sum, weight = running softmax of logit + vote_exponent ln(votes)
//     output[g] += weight[g, slot] value[slot]
//     log_ema[slot] = average of exp(logit[.., slot])
//   store the split's output, row_max, row_sum
//   the last block of a head to finish: combine the splits in their order, write the output, append the token
//
// `DecodeStep::run` below is this, for all types of caches. A kernel of a type has the two products and the arrays that
// they need:
//
//   load_queries     the queries, into registers or shared memory
//   multiply_keys    products of queries and 32 keys
//   store_logits     ... into shared memory, if other threads need them
//   store_weight     one weight of the softmax, into shared memory
//   multiply_values  output += weights x 32 values
//   store_output     the split's output, into the workspace
//
// decode_float.h has them for float32 on CUDA cores, decode_mma.h for 16 bits and decode_quantized.h for quantized
// caches on tensor cores. Sums of probabilities need the softmax of the whole row: a second launch, DecodeSums.
#pragma once

#include "../core/copy.h"
#include "attention.h"

namespace kv {
namespace cuda {

constexpr int kDecodeThreads = 128, kDecodeWarps = kDecodeThreads / kWarp;
constexpr int kSplitsOfLane = kMostShares / kWarp;  // a lane combines every 32nd split

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

// The registers of a thread beside those of the products. In the softmax a warp has every fourth query head and a lane
// one slot; `next` are the addresses of the thread's copies of the next block of slots.
template <int kWarpHeads>
struct DecodeRegisters {
  float logit[kWarpHeads], block_max[kWarpHeads], row_max[kWarpHeads], row_sum[kWarpHeads];
  struct {
    const char *key, *value;  // the thread's first vectors in the cache
    const float* number;      // its first number there
    int key_to, value_to;     // the offsets of its first vectors in a stage
  } next;
  float split_max[kSplitsOfLane], split_sum[kSplitsOfLane], all_max, all_sum;  // when the last block combines splits
};

// Bytes of shared memory that combining the splits uses.
KV_HD constexpr size_t combine_size(int splits, int group) { return splits * group * sizeof(float); }

// A decode step over a cache of type T, by a kernel that derives from it.
template <class Kernel, class T>
struct DecodeStep {
  using Args = Attention;
  static constexpr int kThreads = kDecodeThreads, kWarps = kDecodeWarps;
  static constexpr bool kStoresApart = sizeof(T) == 2;

  static KV_DEVICE void run(Block<Kernel>& block, const Attention& args) {
    const KvVoteAttention& a = args.call;
    const Part part(args, block.index());
    const Head<T> head(args, part);
    const int group = args.group();
    const auto token = head.stored();
    const auto s = Kernel::divide(block.shared, a.key_size);

    // Queries arrive while the block finds the used slots.
    Kernel::load_queries(block, head, s, group);
    clear_softmax(block);
    const int used = used_slots(block, head.votes(), head.capacity, s.ends), now = head.first(token);
    if (head.length(token, used) == 0) return store_idle(block, args, head, part.split, used);

    const Range slots = share_of(part.split, part.splits, used + 1, kBlock);
    stream_slots(block, args, head, s.stages, used, slots, [&](const Stage<T>& stage, int from, int count) {
      Kernel::multiply_keys(block, a, stage, s, count);
      block.each([&](int t, auto& r) {
        Kernel::store_logits(r, a, stage, s, group, count, t);
        store_bias(a, stage, s.bias, used, now, from, count, t);
      });
      softmax_slots(block, args, head, stage, s, from, count);
      Kernel::multiply_values(block, a, stage, s, group, count);
      block.each([&](int t, auto&) { update_averages(args, head, stage, s, used, from, count, t); });
    });

    const size_t split = static_cast<size_t>(part.start) + part.split;
    store_softmax(block, args, split);
    Kernel::store_output(block, args, s, split);
    if (!block.is_last(args.counters + head.index, part.splits)) return;
    float* const share = reinterpret_cast<float*>(s.stages);
    combine_softmax(block, args, part, head, share);
    Kernel::write_output(block, args, part, head, share, used, now);
  }

  // ---- before the slots ----

  static KV_DEVICE void clear_softmax(Block<Kernel>& block) {
    block.each_alone([](int, auto& r) {
#pragma unroll
      for (int i = 0; i < Kernel::kWarpHeads; ++i) r.row_max[i] = kLowest, r.row_sum[i] = 0.0f;
    });
  }

  // Stores a zero output if the call brings this sequence no token, or has no room for it.
  static KV_DEVICE void store_idle(Block<Kernel>& block, const Attention& args, const Head<T>& head, int split,
                                   int used) {
    const int size = args.call.value_size, group = args.group();
    block.each([&](int t, auto&) {
      if (split != 0) return;
      for (int i = t; i < group * size; i += kThreads) head.store(i / size, 0, i % size, 0.0f);
      if (t == 0) args.used[2 * head.index] = used, args.used[2 * head.index + 1] = 0;
    });
  }

  // ---- copies of slots into shared memory ----

  // Calls use(stage, from, count) for every block of slots of `range`, in order, while the next blocks are copied.
  template <class Use>
  static KV_DEVICE void stream_slots(Block<Kernel>& block, const Attention& args, const Head<T>& head, char* stages,
                                     int used, Range range, Use use) {
    const KvVoteAttention& a = args.call;
    const int size = once(static_cast<int>(Stage<T>::size(a))), end = once(args.stages * size);
    const auto after = [&](int stage) { return stage + size < end ? stage + size : 0; };
    int next = range.from, to = 0, at = 0;  // the first slot to copy next; the stage to copy to; the stage to use
    block.each_alone([&](int t, auto& r) { start_copies(r, head, Stage<T>(stages, 0, a), next, t); });
#pragma unroll 1
    for (int from = range.from - (args.stages - 1) * kBlock; from < range.to; from += kBlock) {
      const int count = min_of(kBlock, range.to - next);
      block.each_alone(
          [&](int t, auto& r) { copy_slots(block, head, Stage<T>(stages, to, a), r, used, next, count, t); });
      block.cp_async_commit();
      next += kBlock, to = after(to);
      if (from < range.from) continue;
      block.cp_async_wait(args.stages - 1);
      use(Stage<T>(stages, at, a), from, once(min_of(kBlock, range.to - from)));
      at = after(at);
    }
    block.cp_async_wait(0);
  }

  template <class Registers>
  static KV_DEVICE void start_copies(Registers& r, const Head<T>& head, const Stage<T>& first, int from, int t) {
    const int kind = t / kWarp, slot = t % kWarp;
    r.next.key = reinterpret_cast<const char*>(head.key(from)) + t * 16;
    r.next.value = reinterpret_cast<const char*>(head.value(from)) + t * 16;
    r.next.number = first_number(head, min_of(kind, Stage<T>::kinds(head.a) - 1)) + from + slot;
    r.next.key_to = once(place_of(max_of(head.key_bytes() / 16, 1), t));
    r.next.value_to = once(kBlock * first.key_stride + place_of(max_of(head.value_bytes() / 16, 1), t));
  }

  // Within a phase: copies a block of slots, and advances the addresses to the next block.
  template <class Registers>
  static KV_DEVICE void copy_slots(Block<Kernel>& block, const Head<T>& head, const Stage<T>& stage, Registers& r,
                                   int used, int from, int count, int t) {
    if (count <= 0) return;
    Kernel::copy_keys_and_values(block, head, stage, r, used, from, count, t);
    // Numbers of every fourth kind per warp. The new token's are undefined, and no one uses them.
    const int kinds = Stage<T>::kinds(head.a), slot = t % kWarp;
    if (t / kWarp < kinds && slot < count) block.template copy<4>(stage.numbers(0) + t, r.next.number);
#pragma unroll 1
    for (int kind = t / kWarp + kWarps; kind < kinds; kind += kWarps)
      if (slot < count) block.template copy<4>(stage.numbers(kind) + slot, first_number(head, kind) + from + slot);
    r.next.key += kBlock * head.key_bytes(), r.next.value += kBlock * head.value_bytes(), r.next.number += kBlock;
  }

  // Within a phase: copies the rows of a block of slots. The new token, whose rows are in the call, is the last slot.
  template <class Registers>
  static KV_DEVICE void copy_keys_and_values(Block<Kernel>& block, const Head<T>& head, const Stage<T>& stage,
                                             const Registers& r, int used, int from, int count, int t) {
    constexpr int kWidth = 128 / kLanes<T>;
    const int key_width = head.a.key_size / kLanes<T>, value_width = head.a.value_size / kLanes<T>;
    const int cached = min_of(count, used - from);
    char *key = stage.stages + (stage.at + r.next.key_to), *value = stage.stages + (stage.at + r.next.value_to);
    copy_most<kBlock, kWidth, kWidth / 2>(block, key, r.next.key, key_width, cached, t);
    copy_most<kBlock, kWidth, kWidth / 2>(block, value, r.next.value, value_width, cached, t);
    if (cached == count) return;
    if (t < key_width) block.template copy<16>(stage.key(cached) + t * kLanes<T>, head.new_key(0) + t * kLanes<T>);
    if (t < value_width)
      block.template copy<16>(stage.value(cached) + t * kLanes<T>, head.new_value(0) + t * kLanes<T>);
  }

  // ---- softmax and averages of a block of slots ----

  // Within a phase, by one warp: stores the biases of a block's slots in shared memory. A bias is vote_bias; kLogZero
  // if the query at position `now` does not see the slot; kLowest beyond the last slot.
  static KV_DEVICE void store_bias(const KvVoteAttention& a, const Stage<T>& stage, float* bias, int used, int now,
                                   int from, int count, int t) {
    const int slot = t % kWarp;
    if (t / kWarp != kWarps - 1) return;  // the last warp, since the first ones update averages
    float x = kLowest;
    if (slot < count) {
      x = 0.0f;  // the new token's bias
      if (from + slot != used)
        x = visible(stage.position()[slot], now, a.sliding_window) ? vote_bias(stage.votes()[slot], a) : kLogZero;
    }
    bias[slot] = x;
  }

  // Computes the running softmax; sums over earlier blocks have to be multiplied by the factor that store_weight gets.
  // Ends with a barrier: the weights are visible.
  template <class Shared>
  static KV_DEVICE void softmax_slots(Block<Kernel>& block, const Attention& args, const Head<T>& head,
                                      const Stage<T>& stage, const Shared& s, int from, int count) {
    constexpr int kWarpHeads = Kernel::kWarpHeads;
    const int heads = Kernel::rows(args.group());
    block.each_alone([&](int t, auto& r) {
      const int slot = t % kWarp;
      const float bias = s.bias[slot];
#pragma unroll
      for (int i = 0; i < kWarpHeads; ++i) {
        if (i * kWarps >= heads) break;
        const int g = t / kWarp + i * kWarps;
        r.logit[i] = kLowest;
        if (g < heads) {
          const float biased = Kernel::sum_logit(args.call, s, g, slot) + bias;
          r.logit[i] = bias <= kLogZero ? bias : biased;  // beyond the last slot the logit is undefined
          if (!kStoresApart && args.logits && g < args.group() && slot < count)
            head.logits(args, g)[from + slot] = r.logit[i];
        }
        r.block_max[i] = r.logit[i];
      }
    });
    if constexpr (kStoresApart)
      if (args.logits) store_biased(block, args, head, from, count);
#pragma unroll
    for (int i = 0; i < kWarpHeads; ++i) {
      if (i * kWarps >= heads) break;
      block.warp_max([&](auto& r) -> float& { return r.block_max[i]; });
    }
    block.each([&](int t, auto& r) {
      const int slot = t % kWarp;
#pragma unroll
      for (int i = 0; i < kWarpHeads; ++i) {
        const int g = t / kWarp + i * kWarps;
        if (g >= heads) break;
        const float row_max = max_of(r.row_max[i], r.block_max[i]), factor = exp_of<T>(r.row_max[i] - row_max);
        const float weight = exp_of<T>(r.logit[i] - row_max);  // 0 beyond the last slot
        r.row_sum[i] = r.row_sum[i] * factor + weight;
        r.row_max[i] = row_max;
        Kernel::store_weight(r, stage, s, g, slot, count, weight, factor);
      }
    });
  }

  // Stores the biased logits for DecodeSums. By count, a 16-bit cache's heads would take 3 % more instructions with the
  // branch in the loop above, and others' 1 % more without it.
  static KV_DEVICE void store_biased(Block<Kernel>& block, const Attention& args, const Head<T>& head, int from,
                                     int count) {
    block.each_alone([&](int t, auto& r) {
      const int slot = t % kWarp;
#pragma unroll
      for (int i = 0; i < Kernel::kWarpHeads; ++i) {
        const int g = t / kWarp + i * kWarps;
        if (g < args.group() && slot < count) head.logits(args, g)[from + slot] = r.logit[i];
      }
    });
  }

  // Within a phase: updates the averages of logits of a block of slots, a statistic per warp:
  // score = ln(exp(past score) decay + sum over g of exp(logit[g]) (1 - decay) / group).
  template <class Shared>
  static KV_DEVICE void update_averages(const Attention& args, const Head<T>& head, const Stage<T>& stage,
                                        const Shared& s, int used, int from, int count, int t) {
    const KvVoteAttention& a = args.call;
    const int slot = t % kWarp, group = args.group();
#pragma unroll
    for (int i = 0; i < KV_MAX_STATISTICS / kWarps; ++i) {
      const int k = t / kWarp + i * kWarps;
      if (k >= a.statistics || slot >= count || a.statistic[k].kind != KV_STATISTIC_LOG_EMA) continue;
      const float share = args.log_share[k];
      const float start = from + slot == used ? kLogZero : stage.score(k)[slot] + args.log_decay[k];
      float highest = start, sum = 0.0f;
      if (s.bias[slot] != kLogZero) {
#pragma unroll 4
        for (int g = 0; g < group; ++g) highest = max_of(highest, Kernel::logit(s, g, slot) + share);
#pragma unroll 4
        for (int g = 0; g < group; ++g) sum += exp_of<T>(Kernel::logit(s, g, slot) + share - highest);
      }
      head.score(k)[from + slot] = highest + logf(sum + exp_of<T>(start - highest));
    }
  }

  // ---- splits ----

  // Stores row_max and row_sum of a split in the workspace.
  static KV_DEVICE void store_softmax(Block<Kernel>& block, const Attention& args, size_t split) {
    const int group = args.group();
#pragma unroll
    for (int i = 0; i < Kernel::kWarpHeads; ++i)
      if (i * kWarps < group) block.warp_sum([&](auto& r) -> float& { return r.row_sum[i]; });
    block.each_alone([&](int t, auto& r) {
      float* const softmax = args.partial_softmax + 2 * split * group;
#pragma unroll
      for (int i = 0; i < Kernel::kWarpHeads; ++i) {
        const int g = t / kWarp + i * kWarps;
        if (t % kWarp == 0 && g < group) softmax[g] = r.row_max[i], softmax[group + g] = r.row_sum[i];
      }
    });
  }

  // By the last block of a head: stores every split's share of the softmax, [splits, G], in `share` in shared memory,
  // and row_max and row_sum of the rows in the workspace; a query head per warp, the splits in its lanes. Ends with a
  // barrier: the shares are visible.
  static KV_DEVICE void combine_softmax(Block<Kernel>& block, const Attention& args, const Part& part,
                                        const Head<T>& head, float* share) {
    const KvVoteAttention& a = args.call;
    const int group = args.group(), splits = part.splits;
    const float* softmax = args.partial_softmax + 2 * static_cast<size_t>(part.start) * group;
#pragma unroll 1
    for (int first = 0; first < group; first += kWarps) {
      block.each_alone([&](int t, auto& r) {
        const int g = min_of(first + t / kWarp, group - 1), lane = t % kWarp;
        const float sink = a.sink_logits ? a.sink_logits[head.head * group + g] : kLowest;
#pragma unroll
        for (int i = 0; i < kSplitsOfLane; ++i) {
          const int split = lane + i * kWarp, at = 2 * min_of(split, splits - 1) * group + g;
          const float max = softmax[at], sum = softmax[at + group];  // no branch: all loads are under way together
          r.split_max[i] = split < splits ? max : kLowest, r.split_sum[i] = split < splits ? sum : 0.0f;
        }
        r.all_max = r.all_sum = sink;
#pragma unroll
        for (int i = 0; i < kSplitsOfLane; ++i) r.all_max = max_of(r.all_max, r.split_max[i]);
      });
      block.warp_max([](auto& r) -> float& { return r.all_max; });
      block.each_alone([&](int t, auto& r) {
        // A sink counts once: in the first lane.
        r.all_sum = a.sink_logits && t % kWarp == 0 ? expf(r.all_sum - r.all_max) : 0.0f;
#pragma unroll
        for (int i = 0; i < kSplitsOfLane; ++i) {
          r.split_max[i] = expf(r.split_max[i] - r.all_max);
          r.all_sum += r.split_max[i] * r.split_sum[i];
        }
      });
      block.warp_sum([](auto& r) -> float& { return r.all_sum; });
      block.each_alone([&](int t, auto& r) {
        const int g = first + t / kWarp, lane = t % kWarp;
        if (g >= group) return;
#pragma unroll
        for (int i = 0; i < kSplitsOfLane; ++i)
          if (lane + i * kWarp < splits) share[(lane + i * kWarp) * group + g] = r.split_max[i] / r.all_sum;
        float* const row = args.row_softmax + 2 * static_cast<size_t>(head.query_head(g));
        if (lane == 0) row[0] = r.all_max, row[1] = r.all_sum;
      });
    }
    block.each([](int, auto&) {});
  }

  // Adds up four neighbouring numbers of the splits' outputs times their shares, in the order of the splits. at: the
  // first split's numbers; apart: floats from split to split; share: the first split's share, and the others `group`
  // floats apart. kAhead: the splits whose outputs are under way together, since no other block hides their latency.
  template <int kAhead>
  static KV_DEVICE void add_outputs(const float* at, size_t apart, const float* share, int group, int splits,
                                    float (&sum)[4]) {
    for (int j = 0; j < 4; ++j) sum[j] = 0.0f;
#pragma unroll 1
    for (int split = 0; split < splits; split += kAhead) {
      float four[kAhead][4];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) load_four(at + min_of(split + i, splits - 1) * apart, four[i]);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const float own = share[min_of(split + i, splits - 1) * group];
        for (int j = 0; j < 4; ++j) sum[j] = split + i < splits ? sum[j] + own * four[i][j] : sum[j];
      }
    }
  }

  // By the last block of a head: writes the output, and appends the token.
  static KV_DEVICE void write_output(Block<Kernel>& block, const Attention& args, const Part& part, const Head<T>& head,
                                     const float* share, int used, int now) {
    const KvVoteAttention& a = args.call;
    const int group = args.group(), size = a.value_size;
    const int key_width = a.key_size / kLanes<T>, value_width = size / kLanes<T>;
    const float* const output = args.partial_output + static_cast<size_t>(part.start) * group * size;
    block.each([&](int t, auto&) {
      Vector key = {}, value = {};  // of the new token
      if (t < key_width) key = load_vector(head.new_key(0) + t * kLanes<T>);
      if (t < value_width) value = load_vector(head.new_value(0) + t * kLanes<T>);
      for (int i = t * 4; i < group * size; i += kThreads * 4) {
        float sum[4];
        add_outputs<16>(output + i, static_cast<size_t>(group) * size, share + i / size, group, part.splits, sum);
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
};

// Stores two neighbouring logits, without bias, in shared memory.
KV_DEVICE void store_pair(float* to, float first, float second, float softcap) {
  if (softcap != 0.0f) first = capped(first, softcap), second = capped(second, softcap);
  store_two(to, {first, second});
}

// The second launch: the statistics that are sums of probabilities, from the logits and the softmax that the first
// launch stored. A thread per slot of a KV head:
//
//   received = sum over the group's query heads g of exp(logit[g, slot] - row_max[g]) / row_sum[g]
//   score[slot] = decay score[slot] + recency_weight received / group
struct DecodeSums {
  using Args = Attention;
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 1;
  struct Registers {};

  static KV_DEVICE void run(Block<DecodeSums>& block, const Attention& args) {
    const KvVoteAttention& a = args.call;
    const Part part(args, block.index());
    const Head<float> head(args, part);  // any type: no row is read here
    const int group = args.group(), used = args.used[2 * head.index], n = args.used[2 * head.index + 1];
    block.each([&](int t, auto&) {
      const int slot = part.split * kThreads + t;
      if (n == 0 || slot > used) return;
      float received = 0.0f;
      for (int g = 0; g < group; ++g) {
        const float* softmax = args.row_softmax + 2 * static_cast<size_t>(head.query_head(g));
        received += expf(head.logits(args, g)[slot] - softmax[0]) / softmax[1];
      }
      for (int k = 0; k < a.statistics; ++k) {
        const KvStatistic& statistic = a.statistic[k];
        if (statistic.kind != KV_STATISTIC_PROBABILITY) continue;
        const float past = slot < used ? head.score(k)[slot] * statistic.decay : 0.0f;
        head.score(k)[slot] = past + statistic.recency_weight / static_cast<float>(group) * received;
      }
    });
  }
};

}  // namespace cuda
}  // namespace kv
