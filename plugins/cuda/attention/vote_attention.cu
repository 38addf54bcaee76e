// The entry points of VoteAttention: check the call, divide the workspace, launch the kernels for its types and sizes.
//
//   check the call; if the workspace is too small: refuse
//   copy past to present, unless they share buffers     the launches update present in place
//   one token:      Decode or DecodeMma; DecodeSums if a statistic is a sum of probabilities
//   several tokens: Append, then Prefill and PrefillScores, or PrefillMma and PrefillMmaScores
//   a quantized cache:  vote_attention_small.cu
#include "plan.h"
#include "prefill_mma_scores.h"
#include "programs.h"

namespace kv {
namespace cuda {
namespace {

// Divides the workspace, for the largest number of splits; returns the bytes that the call uses.
size_t plan(const KvVoteAttention& a, const Device& device, void* workspace, Attention* args) {
  const size_t heads = static_cast<size_t>(a.batch) * a.heads;
  *args = {};
  args->splits = most_shares(heads, slot_blocks(a), static_cast<size_t>(kMostPlaces) * device.multiprocessors);
  return lay_out(a, heads * args->splits, workspace, args);
}

template <class T, int kSize>
const char* prefill_mma(const Attention& args, const Device& device, Stream stream) {
  const KvVoteAttention& a = args.call;
  const size_t heads = static_cast<size_t>(a.batch) * a.heads;
  using Rows = PrefillMma<T, kSize>;
  using Scores = PrefillMmaScores<T, kSize>;
  if (const char* problem = launch<Rows>(args, heads * Rows::blocks_per_head(a.tokens * (a.query_heads / a.heads)),
                                         Rows::shared_size(), device, stream))
    return problem;
  if (!keeps_any(a)) return nullptr;
  return launch<Scores>(args, heads * Scores::blocks_per_head(a.capacity), Scores::shared_size(), device, stream);
}

template <class T>
const char* prefill_of(const Attention& args, const Device& device, Stream stream) {
  const KvVoteAttention& a = args.call;
  const size_t heads = static_cast<size_t>(a.batch) * a.heads;
  const int size = a.key_size > a.value_size ? a.key_size : a.value_size;
  if (const char* problem = launch<Append<T>>(args, heads * Append<T>::blocks_per_head(a.tokens), 16, device, stream))
    return problem;
  if constexpr (sizeof(T) == 4)
    return prefill_in_float<T>(args, device, stream);
  else if (size <= 64)
    return prefill_mma<T, 64>(args, device, stream);
  else if (size <= 80)
    return prefill_mma<T, 80>(args, device, stream);
  else if (size <= 96)
    return prefill_mma<T, 96>(args, device, stream);
  else
    return size <= 128 ? prefill_mma<T, 128>(args, device, stream) : prefill_mma<T, 256>(args, device, stream);
}

template <class T>
const char* run(Attention& args, const Device& device, Stream stream) {
  if (args.call.tokens > 1) return prefill_of<T>(args, device, stream);
  return with_decode<T>(
      args.call, [&](auto program) { return decode<T, typename decltype(program)::Type>(args, device, stream); });
}

const char* run(Attention& args, const Device& device, Stream stream) {
  const int type = args.call.cache_type;
  if (is_small(type)) return run_small(args, device, stream);
  if (type == KV_FLOAT32) return run<float>(args, device, stream);
  return type == KV_FLOAT16 ? run<Half>(args, device, stream) : run<BFloat>(args, device, stream);
}

}  // namespace
}  // namespace cuda
}  // namespace kv

extern "C" const char* kv_cuda_vote_attention_workspace(const KvVoteAttention* call, size_t* bytes) {
  using namespace kv::cuda;
  Attention args;
  if (const char* problem = check(*call)) return problem;
  *bytes = plan(*call, largest_device(), nullptr, &args);
  return nullptr;
}

extern "C" const char* kv_cuda_vote_attention_problem(const KvVoteAttention* call) {
  using namespace kv::cuda;
  Device device;
  Attention args;
  if (const char* problem = check(*call)) return problem;
  if (call->batch == 0 || call->tokens == 0 || this_device(&device)) return nullptr;
  device.runs = false;
  plan(*call, device, nullptr, &args);
  return run(args, device, nullptr);
}

extern "C" const char* kv_cuda_vote_attention(const KvVoteAttention* call, const KvCuda* where) {
  using namespace kv::cuda;
  const KvVoteAttention& a = *call;
  Device device;
  Attention args;
  if (const char* problem = check(a)) return problem;
  if (a.batch == 0) return nullptr;
  for (const void* pointer : {a.query, a.key, a.value, static_cast<const void*>(a.past.key),
                              static_cast<const void*>(a.past.value), static_cast<const void*>(a.present.key),
                              static_cast<const void*>(a.present.value), static_cast<const void*>(a.output)})
    if (!is_aligned(pointer)) return "a tensor is not aligned to 16 bytes";
  if (!has_scales(a)) return kNoScales;
  if (const char* problem = this_device(&device, where->begin)) return problem;
  if (const char* problem = check_workspace(*where, plan(a, device, where->workspace, &args))) return problem;
  if (where->counters) args.counters = static_cast<int*>(where->counters);
  const Stream stream = static_cast<Stream>(where->stream);
  if (const char* problem = copy_state(a, stream)) return problem;
  return a.tokens == 0 ? nullptr : run(args, device, stream);
}
