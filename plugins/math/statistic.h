// The weights of queries in a slot's statistics, in float32, for the host and the device.
#pragma once

#include <math.h>

#include "../abi/kvexport.h"

#ifdef __CUDACC__
#define KV_HD __host__ __device__ __forceinline__
#else
// Always inlined: a function would be emitted once per instruction set under one name (see cpu/core/scratch.h).
#define KV_HD inline __attribute__((always_inline))
#endif

namespace kv {

// The score of a log_ema that has no observation yet, and the bias of an invisible slot (docs/reference/contract.md,
// section 3).
constexpr float kLogZero = -1e30f;

// Returns how many of the n queries of a call the statistic counts: the latest `window`, or all where window is 0.
KV_HD int counted_queries(const KvStatistic& s, int n) { return s.window == 0 || n < s.window ? n : s.window; }

// Returns ln of the weight of the query `back` places before the newest one of a call that counts `counted` queries.
KV_HD float log_query_weight(const KvStatistic& s, int back, int counted) {
  if (back < 0 || back >= counted) return kLogZero;
  float log_weight = static_cast<float>(back) * logf(s.decay);
  if (s.recency_weight != 1.0f) {
    float share = 1.0f - static_cast<float>(back) / static_cast<float>(counted > 1 ? counted - 1 : 1);
    log_weight += log1pf((s.recency_weight - 1.0f) * (share > 0.0f ? share : 0.0f));
  }
  return log_weight;
}

}  // namespace kv
