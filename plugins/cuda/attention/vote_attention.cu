// The entry points of VoteAttention: check the call, divide the workspace, launch the kernels for its types and sizes.
//
//   check the call; if the workspace is too small: refuse
//   copy past to present, unless they share buffers     the launches update present in place
//   one token:      Decode or DecodeMma; DecodeSums if a statistic is a sum of probabilities
//   several tokens: Append, then Prefill and PrefillScores, or PrefillMma and PrefillMmaScores
//   a quantized cache:  vote_attention_quantized.cu
#include "decode_float.h"
#include "decode_mma.h"
#include "plan.h"
#include "prefill_mma_scores.h"

namespace kv {
namespace cuda {
namespace {

template <class T, int kSize>
const char* prefill_mma(Attention& args, int entries, const Device& device, Stream stream) {
  const KvVoteAttention& a = args.call;
  using Rows = PrefillMma<T, kSize>;
  using Scores = PrefillMmaScores<T, kSize>;
  const int blocks = Rows::blocks_per_head(a.tokens * (a.query_heads / a.heads));
  if (const char* problem =
          launch_table<Rows>(args, entries, [&](const auto&) { return blocks; }, Rows::shared_size(), device, stream))
    return problem;
  if (!keeps_any(a)) return nullptr;
  const auto blocks_of = [](const Attention::Heads& heads) { return Scores::blocks_per_head(heads.capacity); };
  return launch_table<Scores>(args, entries, blocks_of, Scores::shared_size(), device, stream);
}

template <class T>
const char* prefill_of(Attention& args, int entries, const Device& device, Stream stream) {
  const KvVoteAttention& a = args.call;
  const int size = a.key_size > a.value_size ? a.key_size : a.value_size, blocks = Append<T>::blocks_per_head(a.tokens);
  if (const char* problem =
          launch_table<Append<T>>(args, entries, [&](const auto&) { return blocks; }, 16, device, stream))
    return problem;
  if constexpr (sizeof(T) == 4)
    return prefill_in_float<T>(args, entries, device, stream);
  else if (size <= 64)
    return prefill_mma<T, 64>(args, entries, device, stream);
  else if (size <= 80)
    return prefill_mma<T, 80>(args, entries, device, stream);
  else if (size <= 96)
    return prefill_mma<T, 96>(args, entries, device, stream);
  else
    return size <= 128 ? prefill_mma<T, 128>(args, entries, device, stream)
                       : prefill_mma<T, 256>(args, entries, device, stream);
}

template <class T>
const char* decode_of(Attention& args, int entries, const Device& device, Stream stream) {
  const KvVoteAttention& a = args.call;
  const int group = a.query_heads / a.heads;
  if constexpr (sizeof(T) == 2) {
    if (a.key_size <= 128 && a.value_size <= 128) return decode<T, DecodeMma<T, 128>>(args, entries, device, stream);
    return decode<T, DecodeMma<T, 256>>(args, entries, device, stream);
  } else {
    if (group == 1) return decode<T, Decode<T, 1>>(args, entries, device, stream);
    if (group <= 4) return decode<T, Decode<T, 4>>(args, entries, device, stream);
    return group <= 8 ? decode<T, Decode<T, 8>>(args, entries, device, stream)
                      : decode<T, Decode<T, 16>>(args, entries, device, stream);
  }
}

template <class T>
const char* run_of(Attention& args, int entries, const Device& device, Stream stream) {
  return args.call.tokens > 1 ? prefill_of<T>(args, entries, device, stream)
                              : decode_of<T>(args, entries, device, stream);
}

const char* run(const Attention& args, const Device& device, Stream stream) {
  return each_table(args, [&](Attention& table, int entries) {
    const int type = table.call.cache_type;
    if (is_quantized(type)) return run_quantized(table, entries, device, stream);
    return type == KV_FLOAT32 ? run_of<float>(table, entries, device, stream)
                              : run_of<Half>(table, entries, device, stream);
  });
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
