// The launches of a call of VoteAttention and the division of its work: a decode step for all types of caches, and
// prefill in float32.
#pragma once

#include <cmath>

#include "../core/launch.h"
#include "decode_split.h"
#include "decode_sums.h"
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

template <class T, int kChunks>
const char* prefill_in_float(const Attention& args, const Device& device, Stream stream) {
  const KvVoteAttention& a = args.call;
  const size_t heads = static_cast<size_t>(a.batch) * a.heads, tile = Tile<T>::size(a.key_size, a.value_size);
  using Rows = Prefill<T, kChunks>;
  using Scores = PrefillScores<T>;
  if (const char* problem = launch<Rows>(args, heads * ((a.tokens * (a.query_heads / a.heads) + kTile - 1) / kTile),
                                         tile, device, stream))
    return problem;
  if (!keeps_any(a)) return nullptr;
  return launch<Scores>(args, heads * ((a.capacity + kBlock - 1) / kBlock), tile + Scores::fixed(), device, stream);
}

template <class T>
const char* prefill_in_float(const Attention& args, const Device& device, Stream stream) {
  return args.call.value_size <= 128 ? prefill_in_float<T, 1>(args, device, stream)
                                     : prefill_in_float<T, 2>(args, device, stream);
}

// Runs the launches of a call over a quantized cache (vote_attention_small.cu).
const char* run_small(Attention& args, const Device& device, Stream stream);

}  // namespace cuda
}  // namespace kv
