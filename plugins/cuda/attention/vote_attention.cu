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
const char* prefill_mma(RaggedAttention& args, int caches, const Device& device, Stream stream) {
  const KvVoteAttention& a = args.call;
  using Rows = PrefillMma<T, kSize>;
  using Scores = PrefillMmaScores<T, kSize>;
  const int blocks = Rows::blocks_per_head(a.tokens * (a.query_heads / a.heads));
  if (const char* problem =
          launch_table<Rows>(args, caches, [&](const auto&) { return blocks; }, Rows::shared_size(), device, stream))
    return problem;
  if (!keeps_any(a)) return nullptr;
  const auto blocks_of = [](const RaggedAttention::Cache& cache) { return Scores::blocks_per_head(cache.capacity); };
  return launch_table<Scores>(args, caches, blocks_of, Scores::shared_size(), device, stream);
}

template <class T>
const char* prefill_of(RaggedAttention& args, int caches, const Device& device, Stream stream) {
  const KvVoteAttention& a = args.call;
  const int size = a.key_size > a.value_size ? a.key_size : a.value_size, blocks = Append<T>::blocks_per_head(a.tokens);
  if (const char* problem =
          launch_table<Append<T>>(args, caches, [&](const auto&) { return blocks; }, 16, device, stream))
    return problem;
  if constexpr (sizeof(T) == 4)
    return prefill_in_float<T>(args, caches, device, stream);
  else if (size <= 64)
    return prefill_mma<T, 64>(args, caches, device, stream);
  else if (size <= 80)
    return prefill_mma<T, 80>(args, caches, device, stream);
  else if (size <= 96)
    return prefill_mma<T, 96>(args, caches, device, stream);
  else
    return size <= 128 ? prefill_mma<T, 128>(args, caches, device, stream)
                       : prefill_mma<T, 256>(args, caches, device, stream);
}

template <class T>
const char* decode_of(Attention& args, const Device& device, Stream stream) {
  return with_decode<T>(
      args.call, [&](auto program) { return decode<T, typename decltype(program)::Type>(args, device, stream); });
}

const char* run(Attention& args, const Device& device, Stream stream) {
  const KvVoteAttention& a = args.call;
  if (a.tokens == 1 && !is_small(a.cache_type)) {
    if (a.cache_type == KV_FLOAT32) return decode_of<float>(args, device, stream);
    return a.cache_type == KV_FLOAT16 ? decode_of<Half>(args, device, stream) : decode_of<BFloat>(args, device, stream);
  }
  RaggedAttention table{};
  static_cast<Attention&>(table) = args;
  table.cache[0] = {a.present, a.present_scales, a.capacity, 0, a.heads, 1};
  return is_small(a.cache_type) ? run_small(table, 1, device, stream) : run_prefill(table, 1, device, stream);
}

}  // namespace

const char* run_prefill(RaggedAttention& args, int caches, const Device& device, Stream stream) {
  const int type = args.call.cache_type;
  if (type == KV_FLOAT32) return prefill_of<float>(args, caches, device, stream);
  return type == KV_FLOAT16 ? prefill_of<Half>(args, caches, device, stream)
                            : prefill_of<BFloat>(args, caches, device, stream);
}

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
