// The entry points of VoteAttention over KV heads that have caches of their own: check the call, divide the workspace,
// launch the kernels.
//
//   copy every past to its present, unless they share buffers
//   for each table of up to 32 heads: the launches of vote_attention.cu over a table of caches:
//     one token:          Decode or DecodeMma over Ragged<T>; RaggedSums if a statistic is a sum of probabilities
//     several tokens, or quantized caches: the programs that equal budgets have too
#include "plan.h"
#include "programs.h"

namespace kv {
namespace cuda {
namespace {

// Returns the call of head h: its cache, with the tensors of all heads.
KvVoteAttention call_of(const KvVoteAttention& a, const KvHeadCache* caches, int h) {
  KvVoteAttention own = a;
  own.query_heads = a.query_heads / a.heads, own.heads = 1, own.capacity = caches[h].capacity;
  own.past = caches[h].past, own.present = caches[h].present;
  own.past_scales = caches[h].past_scales, own.present_scales = caches[h].present_scales;
  if (a.sink_logits) own.sink_logits = a.sink_logits + h * own.query_heads;
  return own;
}

// Returns why no kernel computes the call; nullptr if one does.
const char* check_heads(const KvVoteAttention& a, const KvHeadCache* caches) {
  if (const char* problem = check(a)) return problem;
  for (int h = 0; h < a.heads; ++h) {
    if (caches[h].capacity > a.capacity) return "a head has more slots than the call's capacity";
    if (const char* problem = check(call_of(a, caches, h))) return problem;
  }
  return nullptr;
}

size_t plan(const KvVoteAttention& a, const Device& device, void* workspace, RaggedAttention* args) {
  *args = {};
  const size_t heads = static_cast<size_t>(a.batch) * min_of(a.heads, kTable),
               all = heads * min_of(slot_blocks(a), kMostShares),
               most = most_shares_of_all(heads, static_cast<size_t>(kMostPlaces) * device.multiprocessors);
  return lay_out(a, all < most ? all : most, workspace, args);
}

template <class T>
const char* decode_of(RaggedAttention& args, int caches, const Device& device, Stream stream) {
  return with_decode<Ragged<T>>(args.call, [&](auto named) {
    return decode_table<T, typename decltype(named)::Type>(args, caches, device, stream);
  });
}

// Runs the launches over the first `caches` caches of a table.
const char* run_table(RaggedAttention& args, int caches, const Device& device, Stream stream) {
  const int type = args.call.cache_type;
  if (is_small(type)) return run_small(args, caches, device, stream);
  if (args.call.tokens > 1) return run_prefill(args, caches, device, stream);
  if (type == KV_FLOAT32) return decode_of<float>(args, caches, device, stream);
  return type == KV_FLOAT16 ? decode_of<Half>(args, caches, device, stream)
                            : decode_of<BFloat>(args, caches, device, stream);
}

const char* run(const RaggedAttention& args, const KvHeadCache* caches, const Device& device, Stream stream) {
  const KvVoteAttention& a = args.call;
  for (int first = 0; first < a.heads; first += kTable) {
    RaggedAttention table = args;
    const int heads = min_of(a.heads - first, kTable);
    for (int h = 0; h < heads; ++h) {
      const KvHeadCache& cache = caches[first + h];
      table.cache[h] = {cache.present, cache.present_scales, cache.capacity, first + h, 1, 1};
    }
    sort_caches(table, heads, 1, a.capacity);  // a block of prefill reads all slots of its head
    if (const char* problem = run_table(table, heads, device, stream)) return problem;
  }
  return nullptr;
}

}  // namespace
}  // namespace cuda
}  // namespace kv

extern "C" const char* kv_cuda_ragged_vote_attention_workspace(const KvVoteAttention* call, const KvHeadCache* caches,
                                                               size_t* bytes) {
  using namespace kv::cuda;
  RaggedAttention args;
  if (const char* problem = check_heads(*call, caches)) return problem;
  *bytes = plan(*call, largest_device(), nullptr, &args);
  return nullptr;
}

extern "C" const char* kv_cuda_ragged_vote_attention_problem(const KvVoteAttention* call, const KvHeadCache* caches) {
  using namespace kv::cuda;
  Device device;
  RaggedAttention args;
  if (const char* problem = check_heads(*call, caches)) return problem;
  if (call->batch == 0 || call->tokens == 0 || this_device(&device)) return nullptr;
  device.runs = false;
  plan(*call, device, nullptr, &args);
  return run(args, caches, device, nullptr);
}

extern "C" const char* kv_cuda_ragged_vote_attention(const KvVoteAttention* call, const KvHeadCache* caches,
                                                     const KvCuda* where) {
  using namespace kv::cuda;
  const KvVoteAttention& a = *call;
  if (const char* problem = check_heads(a, caches)) return problem;
  if (a.batch == 0) return nullptr;
  for (int h = 0; h < a.heads; ++h) {
    for (const void* pointer :
         {a.query, a.key, a.value, static_cast<const void*>(a.output), static_cast<const void*>(caches[h].past.key),
          static_cast<const void*>(caches[h].past.value), static_cast<const void*>(caches[h].present.key),
          static_cast<const void*>(caches[h].present.value)})
      if (!is_aligned(pointer)) return "a tensor is not aligned to 16 bytes";
    if (!has_scales(call_of(a, caches, h))) return kNoScales;
  }
  Device device;
  RaggedAttention args;
  if (const char* problem = this_device(&device, where->begin)) return problem;
  if (const char* problem = check_workspace(*where, plan(a, device, where->workspace, &args))) return problem;
  if (where->counters) args.counters = static_cast<int*>(where->counters);
  const Stream stream = static_cast<Stream>(where->stream);
  for (int h = 0; h < a.heads; ++h)
    if (const char* problem = copy_state(call_of(a, caches, h), stream)) return problem;
  return a.tokens == 0 ? nullptr : run(args, caches, device, stream);
}
