// VoteAttention for one instruction set. The meaning is kvexport/ops/vote_attention.py; the letters are the contract's.
#include "decode.h"
#include "prefill.h"
#include "queries.h"
#include "small.h"

namespace kv {
namespace KV_ISA {
namespace {

// How many tasks one head makes: enough for many cores where there are few heads, none below a size worth a task. It
// depends on the shapes alone, so that results do not depend on the threads.
int splits_of(const KvVoteAttention& a, bool decode) {
  const int wanted = (16 + a.batch * a.heads - 1) / (a.batch * a.heads);
  const int worth = decode ? a.capacity / 1024 : a.tokens * (a.query_heads / a.heads) / 64;
  return max_of(1, min_of(wanted, worth));
}

template <template <class, class> class Call, class K, class V>
void run_small(const KvVoteAttention& a, int splits, KvRunner runner) {
  if (a.query_type == KV_FLOAT16)
    run_small<Call, half, K, V>(a, splits, runner);
  else
    run_small<Call, float, K, V>(a, splits, runner);
}

template <template <class, class> class Call>
void run(const KvVoteAttention& a, int splits, KvRunner runner) {
  if (a.cache_type == KV_INT8) {
    run_small<Call, int8_t, int8_t>(a, splits, runner);
  } else if (a.cache_type == KV_INT4) {
    run_small<Call, int4, int4>(a, splits, runner);
  } else if (a.cache_type == KV_K8V4) {
    run_small<Call, int8_t, int4>(a, splits, runner);
  } else if (a.cache_type == KV_FLOAT16) {
    Call<half, half> call(a, splits);
    call.run(call, runner);
  } else {
    Call<float, float> call(a, splits);
    call.run(call, runner);
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
