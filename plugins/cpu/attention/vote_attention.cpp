// VoteAttention for one instruction set. kvexport/ops/vote_attention.py defines it; docs/reference/contract.md defines
// the letters.
#include "decode.h"
#include "prefill.h"
#include "quantized.h"

namespace kv {
namespace KV_ISA {
namespace {

// Returns how many splits (tasks) each head has: enough for many cores if there are few heads, and none below a size
// worth a task. The number depends only on the shapes, so results do not depend on the number of threads.
int splits_of(const KvVoteAttention& call, bool decode) {
  const int enough = (16 + call.batch * call.heads - 1) / (call.batch * call.heads);
  const int most = decode ? largest_capacity(call.capacity, call.heads) / kLeastSlots
                          : call.tokens * (call.query_heads / call.heads) / 64;
  return max_of(1, min_of(enough, most));
}

template <template <class, class> class Kernel, class K, class V>
void run_quantized(const KvVoteAttention& call, int splits, KvRunner runner) {
  if (call.query_type == KV_FLOAT16)
    run_quantized<Kernel, half, K, V>(call, splits, runner);
  else
    run_quantized<Kernel, float, K, V>(call, splits, runner);
}

template <class Kernel>
void run_floats(const KvVoteAttention& call, int splits, KvRunner runner) {
  Kernel kernel(call, splits);
  kernel.run(kernel, runner);
}

// Runs Kernel (Decode or Prefill) with the types of the cache.
template <template <class, class> class Kernel>
void run(const KvVoteAttention& call, int splits, KvRunner runner) {
  if (call.cache_type == KV_INT8) {
    run_quantized<Kernel, int8_t, int8_t>(call, splits, runner);
  } else if (call.cache_type == KV_INT4) {
    run_quantized<Kernel, int4, int4>(call, splits, runner);
  } else if (call.cache_type == KV_K8V4) {
    run_quantized<Kernel, int8_t, int4>(call, splits, runner);
  } else if (call.cache_type == KV_FLOAT16) {
    run_floats<Kernel<half, half>>(call, splits, runner);
  } else {
    run_floats<Kernel<float, float>>(call, splits, runner);
  }
}

// Updates the ring of reference queries (kvexport/methods/fitting.py): it contains the latest W queries of a KV head,
// times `scale`, oldest first: by token, and within a token by query head of the group. It runs in the calling thread,
// since the ring is as small as a few slots.
template <class Query>
void keep_queries_of(const KvVoteAttention& call, const KvRing& ring) {
  const int group = call.query_heads / call.heads, d = call.key_size;
  for (size_t head = 0; head < static_cast<size_t>(call.batch) * call.heads; ++head) {
    const size_t b = head / call.heads, row = d * sizeof(float);
    const size_t first = head * ring.rows;
    const int64_t length = call.query_length[b];
    const int added = group * static_cast<int>(length < 0             ? 0
                                               : length > call.tokens ? call.tokens
                                                                      : length),
              left = max_of(ring.rows - added, 0);
    float* const query = ring.present.query + first * d;
    int32_t* const seen = ring.present.seen + first;
    // The latest `left` past queries move to the front. Nothing moves if past and present share buffers and no token
    // came.
    if (left > 0 && (added > 0 || query != ring.past.query + first * d)) {
      const size_t from = first + ring.rows - left;
      memmove(query, ring.past.query + from * d, left * row);
      memmove(seen, ring.past.seen + from, left * sizeof(int32_t));
    }
    for (int r = left, i = added - (ring.rows - left); r < ring.rows; ++r, ++i) {
      const int t = i / group, g = i % group;
      const size_t query_head = b * call.query_heads + head % call.heads * group + g;
      const Query* const from = static_cast<const Query*>(call.query) + (query_head * call.tokens + t) * d;
      for (int j = 0; j < d; ++j) query[static_cast<size_t>(r) * d + j] = static_cast<float>(from[j]) * call.scale;
      // Unsigned: a hostile position of INT64_MAX wraps to 0.
      seen[r] = static_cast<int32_t>(static_cast<uint64_t>(call.position[b * call.tokens + t]) + 1);
    }
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
