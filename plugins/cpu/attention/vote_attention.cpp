// VoteAttention for one instruction set. kvexport/ops/vote_attention.py defines it; docs/reference/contract.md defines
// the letters.
#include "decode.h"
#include "prefill.h"
#include "quantized.h"
#include "queries.h"

namespace kv {
namespace KV_ISA {
namespace {

// Returns how many splits (tasks) each head has: enough for many cores if there are few heads, and none below a size
// worth a task. The number depends only on the shapes, so results do not depend on the number of threads.
int splits_of(const KvVoteAttention& a, bool decode) {
  const int enough = (16 + a.batch * a.heads - 1) / (a.batch * a.heads);
  const int most =
      decode ? largest_capacity(a.capacity, a.heads) / kLeastSlots : a.tokens * (a.query_heads / a.heads) / 64;
  return max_of(1, min_of(enough, most));
}

template <template <class, class> class Kernel, class K, class V>
void run_quantized(const KvVoteAttention& a, int splits, KvRunner runner) {
  if (a.query_type == KV_FLOAT16)
    run_quantized<Kernel, half, K, V>(a, splits, runner);
  else
    run_quantized<Kernel, float, K, V>(a, splits, runner);
}

template <class Kernel>
void run_floats(const KvVoteAttention& a, int splits, KvRunner runner) {
  Kernel kernel(a, splits);
  kernel.run(kernel, runner);
}

// Runs Kernel (Decode or Prefill) with the types of the cache.
template <template <class, class> class Kernel>
void run(const KvVoteAttention& a, int splits, KvRunner runner) {
  if (a.cache_type == KV_INT8) {
    run_quantized<Kernel, int8_t, int8_t>(a, splits, runner);
  } else if (a.cache_type == KV_INT4) {
    run_quantized<Kernel, int4, int4>(a, splits, runner);
  } else if (a.cache_type == KV_K8V4) {
    run_quantized<Kernel, int8_t, int4>(a, splits, runner);
  } else if (a.cache_type == KV_FLOAT16) {
    run_floats<Kernel<half, half>>(a, splits, runner);
  } else {
    run_floats<Kernel<float, float>>(a, splits, runner);
  }
}

}  // namespace

void keep_queries(const KvVoteAttention& call, const KvRing& ring) {
  if (call.query_type == KV_FLOAT16)
    keep_queries_of<half>(call, ring);
  else
    keep_queries_of<float>(call, ring);
}

void vote_attention(const KvVoteAttention& call, KvRunner runner) {
  const bool decode = call.tokens == 1 || few_rows(call);
  decode ? run<Decode>(call, splits_of(call, true), runner) : run<Prefill>(call, splits_of(call, false), runner);
}

}  // namespace KV_ISA
}  // namespace kv
