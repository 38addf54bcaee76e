// The launches of a call of VoteAttention and the division of its work: a decode step for all types of caches, and
// prefill in float32.
#pragma once

#include <algorithm>
#include <cmath>

#include "../core/launch.h"
#include "decode_split.h"
#include "decode_sums.h"
#include "prefill.h"
#include "ragged.h"

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

// Returns the most blocks of slots of a head; splits divide the blocks in use.
inline int slot_blocks(const KvVoteAttention& a) { return (a.capacity + kBlock - 1) / kBlock; }

inline bool keeps_any(const KvVoteAttention& a) {
  return keeps(a, KV_STATISTIC_PROBABILITY) || keeps(a, KV_STATISTIC_LOG_EMA);
}

// Returns why no kernel computes the call; nullptr if one does.
inline const char* check(const KvVoteAttention& a) {
  if (const char* problem =
          check_cache(a.cache_type, a.batch, a.heads, a.capacity, a.key_size, a.value_size, a.statistics))
    return problem;
  if (is_small(a.cache_type) ? a.query_type < KV_FLOAT32 || a.query_type > KV_BFLOAT16 : a.query_type != a.cache_type)
    return is_small(a.cache_type) ? "the type of the query is neither float32, float16 nor bfloat16"
                                  : "the query is of another type than the cache";
  if (a.tokens < 0) return "a dimension is zero or negative";
  if (a.query_heads < 1 || a.query_heads % a.heads) return "the query heads are not a multiple of the KV heads";
  if (a.query_heads / a.heads > kMaxGroup) return "a KV head has more than 16 query heads";
  if (a.tokens > a.capacity) return "the call brings more tokens than the cache has slots";
  return nullptr;
}

// Divides the workspace among the arrays of a call; returns the bytes that it uses. parts: the most splits of all heads
// together, in a decode step.
inline size_t lay_out(const KvVoteAttention& a, size_t parts, void* workspace, Attention* args) {
  const size_t heads = static_cast<size_t>(a.batch) * a.heads,
               query_heads = static_cast<size_t>(a.batch) * a.query_heads, group = a.query_heads / a.heads;
  Workspace space(workspace);
  args->call = a;
  args->counters = space.take<int>(KV_CUDA_COUNTER_BYTES / sizeof(int));
  args->used = space.take<int>(2 * heads);
  const bool sums = keeps(a, KV_STATISTIC_PROBABILITY);
  if (is_small(a.cache_type)) args->rotated = space.take<float>(query_heads * a.tokens * a.key_size);
  if (a.tokens == 1) {
    args->row_softmax = space.take<float>(2 * query_heads);
    if (sums) args->logits = space.take<float>(query_heads * a.capacity);
    args->partial_output = space.take<float>(parts * group * a.value_size);
    args->partial_softmax = space.take<float>(2 * parts * group);
  } else if (sums) {
    args->row_softmax = space.take<float>(2 * query_heads * a.tokens);
  }
  return space.size();
}

// Sets the stages of a decode step, and the numbers with which it averages logits; returns its bytes of shared memory,
// 0 if the device has too few. splits: the most splits of a head.
template <class T, class Program>
size_t prepare(Attention& args, int splits, const Device& device) {
  const KvVoteAttention& a = args.call;
  const size_t fixed = Program::fixed(a.key_size), closing = Program::closing(splits, a.query_heads / a.heads),
               stage = Stage<T>::size(a);
  const auto shared_of = [&](int stages) { return fixed + (stages * stage > closing ? stages * stage : closing); };
  args.stages = kMostStages;
  while (args.stages > 0 && shared_of(args.stages) + kOfIsLast > device.shared_limit) --args.stages;
  if (args.stages == 0) return 0;
  // Two stages, if a multiprocessor then holds one more block, which copies more and computes meanwhile.
  if (args.stages > 2 && blocks_held<Program>(shared_of(2), device) > blocks_held<Program>(shared_of(3), device))
    args.stages = 2;
  static_assert(Program::kBlocksPerMultiprocessor <= kMostPlaces, "the workspace holds as many splits");
  for (int k = 0; k < a.statistics; ++k) {
    if (a.statistic[k].kind != KV_STATISTIC_LOG_EMA) continue;
    args.log_share[k] = std::log1p(-a.statistic[k].decay) - std::log(static_cast<float>(a.query_heads / a.heads));
    args.log_decay[k] = std::log(a.statistic[k].decay);
  }
  return shared_of(args.stages);
}

template <class T, class Program>
const char* decode(Attention& args, const Device& device, Stream stream) {
  const KvVoteAttention& a = args.call;
  const size_t heads = static_cast<size_t>(a.batch) * a.heads, shared = prepare<T, Program>(args, args.splits, device);
  if (!shared) return kTooMuchShared;
  // Splits do not depend on the device's shared memory, so no bit of a result does.
  args.splits = shares_of(heads, slot_blocks(a), size_t{Program::kBlocksPerMultiprocessor} * device.multiprocessors);
  if (const char* problem = launch<Program>(args, heads * args.splits, shared, device, stream)) return problem;
  if (!args.logits) return nullptr;
  return launch<DecodeSums>(args, heads * DecodeSums::blocks_per_head(a.capacity), 0, device, stream);
}

// ---- launches over the caches of a table ----

// Launches a program over a table. blocks_of(cache): the blocks of a head.
template <class Program, class F>
const char* launch_table(RaggedAttention& args, int caches, F blocks_of, size_t shared, const Device& device,
                         Stream stream) {
  size_t all = 0;
  for (int i = 0; i < caches; ++i) {
    RaggedAttention::Cache& cache = args.cache[i];
    cache.splits = blocks_of(cache);
    all += static_cast<size_t>(args.call.batch) * cache.heads * cache.splits;
  }
  if (all < kLaunchable)
    set_starts(args.start, caches, [&](int i) { return args.call.batch * args.cache[i].heads * args.cache[i].splits; });
  return launch<Program>(args, all, shared, device, stream);
}

inline int units_of(const RaggedAttention::Cache& cache, int unit) { return (cache.capacity + unit - 1) / unit; }

// Moves the caches whose splits are largest to the front, when a split has at most `each` units of `unit` slots.
inline void sort_caches(RaggedAttention& args, int caches, int unit, int each) {
  const auto largest = [&](const RaggedAttention::Cache& cache) { return Shares(units_of(cache, unit), each).largest; };
  std::stable_sort(args.cache, args.cache + caches,
                   [&](const auto& x, const auto& y) { return largest(x) > largest(y); });
}

// Runs a decode step over a table: divides its heads into splits with the least estimated time, and launches.
template <class T, class Program>
const char* decode_table(RaggedAttention& args, int caches, const Device& device, Stream stream) {
  const size_t places = size_t{Program::kBlocksPerMultiprocessor} * device.multiprocessors;
  int units[kTable], most = 1;
  for (int i = 0; i < caches; ++i) units[i] = units_of(args.cache[i], kBlock);
  const int each = largest_share(units, caches, static_cast<size_t>(args.call.batch) * args.cache[0].heads, places);
  const auto splits_of = [&](const RaggedAttention::Cache& cache) {
    return Shares(units_of(cache, kBlock), each).count;
  };
  for (int i = 0; i < caches; ++i) most = max_of(most, splits_of(args.cache[i]));
  sort_caches(args, caches, kBlock, each);
  const size_t shared = prepare<Ragged<T>, Program>(args, most, device);
  if (!shared) return kTooMuchShared;
  if (const char* problem = launch_table<Program>(args, caches, splits_of, shared, device, stream)) return problem;
  if (!keeps(args.call, KV_STATISTIC_PROBABILITY)) return nullptr;
  const auto blocks_of = [](const RaggedAttention::Cache& cache) { return units_of(cache, RaggedSums::kThreads); };
  return launch_table<RaggedSums>(args, caches, blocks_of, 0, device, stream);
}

template <class T, int kChunks>
const char* prefill_in_float(RaggedAttention& args, int caches, const Device& device, Stream stream) {
  const KvVoteAttention& a = args.call;
  const size_t tile = Tile<T>::size(a.key_size, a.value_size);
  using Rows = Prefill<T, kChunks>;
  using Scores = PrefillScores<T>;
  const int blocks = Rows::blocks_per_head(a.tokens * (a.query_heads / a.heads));
  if (const char* problem = launch_table<Rows>(args, caches, [&](const auto&) { return blocks; }, tile, device, stream))
    return problem;
  if (!keeps_any(a)) return nullptr;
  const auto blocks_of = [](const RaggedAttention::Cache& cache) { return Scores::blocks_per_head(cache.capacity); };
  return launch_table<Scores>(args, caches, blocks_of, tile + Scores::fixed(), device, stream);
}

template <class T>
const char* prefill_in_float(RaggedAttention& args, int caches, const Device& device, Stream stream) {
  return args.call.value_size <= 128 ? prefill_in_float<T, 1>(args, caches, device, stream)
                                     : prefill_in_float<T, 2>(args, caches, device, stream);
}

// Run the launches of a call over the first `caches` caches of its table: of several tokens (vote_attention.cu), and
// over quantized caches (vote_attention_small.cu).
const char* run_prefill(RaggedAttention& args, int caches, const Device& device, Stream stream);
const char* run_small(RaggedAttention& args, int caches, const Device& device, Stream stream);

}  // namespace cuda
}  // namespace kv
