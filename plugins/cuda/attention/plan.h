// The launches of a call of VoteAttention and the division of its work: a decode step for all types of caches, and
// prefill in float32.
#pragma once

#include <cmath>

#include "../core/launch.h"
#include "decode.h"
#include "prefill.h"

namespace kv {
namespace cuda {

constexpr int kMostPlaces = 3;  // the most blocks of a decode step that a multiprocessor has room for
constexpr int kMostStages = 3;

// Returns whether the call has a statistic of this kind.
inline bool keeps(const KvVoteAttention& a, int kind) {
  for (int k = 0; k < a.statistics; ++k)
    if (a.statistic[k].kind == kind) return true;
  return false;
}

inline bool keeps_any(const KvVoteAttention& a) {
  return keeps(a, KV_STATISTIC_PROBABILITY) || keeps(a, KV_STATISTIC_LOG_EMA);
}

// Returns why no kernel computes the call; nullptr if one does.
inline const char* check(const KvVoteAttention& a) {
  if (const char* problem = check_cache(a)) return problem;
  if (is_quantized(a.cache_type) ? a.query_type < KV_FLOAT32 || a.query_type > KV_FLOAT16
                                 : a.query_type != a.cache_type)
    return is_quantized(a.cache_type) ? "the type of the query is neither float32 nor float16"
                                      : "the query is of another type than the cache";
  if (a.tokens < 0) return "a dimension is zero or negative";
  if (a.query_heads < 1 || a.query_heads % a.heads) return "the query heads are not a multiple of the KV heads";
  if (a.query_heads / a.heads > kMaxGroup) return "a KV head has more than 16 query heads";
  for (int h = 0; h < a.heads; ++h)
    if (a.tokens > a.capacity[h]) return "the call brings more tokens than a KV head has slots";
  return nullptr;
}

inline int units_of(int slots, int unit) { return (slots + unit - 1) / unit; }

// Divides the workspace among the arrays of a call, for the most splits that a decode step has on the device; returns
// the bytes that it uses.
inline size_t plan(const KvVoteAttention& a, const Device& device, void* workspace, Attention* args) {
  const size_t heads = static_cast<size_t>(a.batch) * a.heads,
               query_heads = static_cast<size_t>(a.batch) * a.query_heads, group = a.query_heads / a.heads;
  const size_t together = has_equal_heads(a) ? heads : static_cast<size_t>(a.batch) * min_of(a.heads, kTable),
               most = most_shares_of_all(together, static_cast<size_t>(kMostPlaces) * device.multiprocessors),
               all = together * min_of(units_of(most_slots(a), kBlock), kMostShares), splits = all < most ? all : most;
  Workspace space(workspace);
  *args = {};
  args->call = a;
  args->counters = space.take<int>(KV_CUDA_COUNTER_BYTES / sizeof(int));
  args->used = space.take<int>(2 * heads);
  const bool sums = keeps(a, KV_STATISTIC_PROBABILITY);
  if (is_quantized(a.cache_type)) args->rotated = space.take<float>(query_heads * a.tokens * a.key_size);
  if (a.tokens == 1) {
    args->row_softmax = space.take<float>(2 * query_heads);
    if (sums) args->logits = space.take<float>(static_cast<size_t>(a.batch) * a.slots * group);
    args->partial_output = space.take<float>(splits * group * a.value_size);
    args->partial_softmax = space.take<float>(2 * splits * group);
  } else if (sums) {
    args->row_softmax = space.take<float>(2 * query_heads * a.tokens);
  }
  return space.size();
}

// Sets the stages of a decode step, and the numbers with which it averages logits; returns its bytes of shared memory,
// 0 if the device has too few. splits: the most splits of a head.
template <class T, class Kernel>
size_t prepare(Attention& args, int splits, const Device& device) {
  const KvVoteAttention& a = args.call;
  const size_t fixed = Kernel::fixed(a.key_size), closing = Kernel::closing(splits, a.query_heads / a.heads),
               stage = Stage<T>::size(a);
  const auto shared_of = [&](int stages) { return fixed + (stages * stage > closing ? stages * stage : closing); };
  args.stages = kMostStages;
  while (args.stages > 0 && shared_of(args.stages) + kOfIsLast > device.shared_limit) --args.stages;
  if (args.stages == 0) return 0;
  // Two stages, if a multiprocessor then holds one more block, which copies more and computes meanwhile.
  if (args.stages > 2 && blocks_held<Kernel>(shared_of(2), device) > blocks_held<Kernel>(shared_of(3), device))
    args.stages = 2;
  static_assert(Kernel::kBlocksPerMultiprocessor <= kMostPlaces, "the workspace holds as many splits");
  for (int k = 0; k < a.statistics; ++k) {
    if (a.statistic[k].kind != KV_STATISTIC_LOG_EMA) continue;
    args.log_share[k] = std::log1p(-a.statistic[k].decay) - std::log(static_cast<float>(a.query_heads / a.heads));
    args.log_decay[k] = std::log(a.statistic[k].decay);
  }
  return shared_of(args.stages);
}

// ---- launches over the entries of a table ----

// Launches a kernel. blocks_of(heads): the blocks of each head of an entry.
template <class Kernel, class F>
const char* launch_table(Attention& args, int entries, F blocks_of, size_t shared, const Device& device,
                         Stream stream) {
  const auto blocks = [&](int i) {
    return static_cast<size_t>(args.call.batch) * args.heads[i].count * args.heads[i].blocks;
  };
  size_t all = 0;
  for (int i = 0; i < entries; ++i) {
    args.heads[i].blocks = blocks_of(args.heads[i]);
    all += blocks(i);
  }
  if (all < kLaunchable) set_starts(args.start, entries, [&](int i) { return static_cast<int>(blocks(i)); });
  return launch<Kernel>(args, all, shared, device, stream);
}

// Moves the heads whose splits are largest to the front, since blocks begin in their order. A split has at most `each`
// units of `unit` slots.
inline void sort_heads(Attention& args, int entries, int unit, int each) {
  const auto largest = [&](const Attention::Heads& heads) {
    return Shares(units_of(heads.capacity, unit), each).largest;
  };
  std::stable_sort(args.heads, args.heads + entries,
                   [&](const auto& x, const auto& y) { return largest(x) > largest(y); });
}

// Calls use(args, entries) for each table of the call's heads, until it returns a problem.
template <class Use>
const char* each_table(const Attention& args, Use use) {
  const KvVoteAttention& a = args.call;
  const bool equal = has_equal_heads(a);
  for (int first = 0, offset = 0; first < a.heads;) {
    Attention table = args;
    int entries = 0;
    while (entries < kTable && first < a.heads) {
      table.heads[entries++] = {first, equal ? a.heads : 1, a.capacity[first], offset, 1};
      offset += a.capacity[first], first += equal ? a.heads : 1;
    }
    sort_heads(table, entries, 1, a.slots);  // a block of prefill reads all slots of its head
    if (const char* problem = use(table, entries)) return problem;
  }
  return nullptr;
}

// Runs a decode step: divides the heads into splits with the least estimated time, and launches. Splits do not depend
// on the device's shared memory, so no bit of a result does.
template <class T, class Kernel>
const char* decode(Attention& args, int entries, const Device& device, Stream stream) {
  const size_t places = size_t{Kernel::kBlocksPerMultiprocessor} * device.multiprocessors;
  int units[kTable], most = 1;
  for (int i = 0; i < entries; ++i) units[i] = units_of(args.heads[i].capacity, kBlock);
  const int each = largest_share(units, entries, static_cast<size_t>(args.call.batch) * args.heads[0].count, places);
  const auto splits_of = [&](const Attention::Heads& heads) {
    return Shares(units_of(heads.capacity, kBlock), each).count;
  };
  for (int i = 0; i < entries; ++i) most = max_of(most, splits_of(args.heads[i]));
  sort_heads(args, entries, kBlock, each);
  const size_t shared = prepare<T, Kernel>(args, most, device);
  if (!shared) return kTooMuchShared;
  if (const char* problem = launch_table<Kernel>(args, entries, splits_of, shared, device, stream)) return problem;
  if (!keeps(args.call, KV_STATISTIC_PROBABILITY)) return nullptr;
  const auto blocks_of = [](const Attention::Heads& heads) { return units_of(heads.capacity, DecodeSums::kThreads); };
  return launch_table<DecodeSums>(args, entries, blocks_of, 0, device, stream);
}

template <class T, int kChunks>
const char* prefill_in_float(Attention& args, int entries, const Device& device, Stream stream) {
  const KvVoteAttention& a = args.call;
  const size_t tile = Tile<T>::size(a.key_size, a.value_size);
  using Rows = Prefill<T, kChunks>;
  using Scores = PrefillScores<T>;
  const int blocks = Rows::blocks_per_head(a.tokens * (a.query_heads / a.heads));
  if (const char* problem =
          launch_table<Rows>(args, entries, [&](const auto&) { return blocks; }, tile, device, stream))
    return problem;
  if (!keeps_any(a)) return nullptr;
  const auto blocks_of = [](const Attention::Heads& heads) { return Scores::blocks_per_head(heads.capacity); };
  return launch_table<Scores>(args, entries, blocks_of, tile + Scores::fixed(), device, stream);
}

template <class T>
const char* prefill_in_float(Attention& args, int entries, const Device& device, Stream stream) {
  return args.call.value_size <= 128 ? prefill_in_float<T, 1>(args, entries, device, stream)
                                     : prefill_in_float<T, 2>(args, entries, device, stream);
}

// Runs the launches over a quantized cache (vote_attention_quantized.cu).
const char* run_quantized(Attention& args, int entries, const Device& device, Stream stream);

}  // namespace cuda
}  // namespace kv
