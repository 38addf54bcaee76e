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

template <class T, class Program>
const char* decode(Attention& args, const Device& device, Stream stream) {
  const KvVoteAttention& a = args.call;
  const size_t heads = static_cast<size_t>(a.batch) * a.heads, fixed = Program::fixed(a.key_size);
  const size_t closing = Program::closing(args.splits, a.query_heads / a.heads), stage = Stage<T>::size(a);
  const auto shared_of = [&](int stages) { return fixed + (stages * stage > closing ? stages * stage : closing); };
  args.stages = kMostStages;
  while (args.stages > 0 && shared_of(args.stages) + kOfIsLast > device.shared_limit) --args.stages;
  if (args.stages == 0) return kTooMuchShared;
  // Two stages, if a multiprocessor then holds one more block, which copies more and computes meanwhile.
  if (args.stages > 2 && blocks_held<Program>(shared_of(2), device) > blocks_held<Program>(shared_of(3), device))
    args.stages = 2;
  const size_t shared = shared_of(args.stages);
  static_assert(Program::kBlocksPerMultiprocessor <= kMostPlaces, "the workspace holds as many splits");
  for (int k = 0; k < a.statistics; ++k) {
    if (a.statistic[k].kind != KV_STATISTIC_LOG_EMA) continue;
    args.log_share[k] = std::log1p(-a.statistic[k].decay) - std::log(static_cast<float>(a.query_heads / a.heads));
    args.log_decay[k] = std::log(a.statistic[k].decay);
  }
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
