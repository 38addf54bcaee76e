// Which combinations of merge policy fields the native kernels support (kvexport/schema/policy.py).
#pragma once

#include "../abi/kvexport.h"

namespace kv {

// Returns why the kernels do not support this policy, or nullptr if they do. has_queries: whether the call has
// reference queries.
inline const char* policy_problem(const KvMergePolicy& p, bool has_queries = false) {
  if (!(p.votes_max >= 1.0f)) return "votes_max is below 1";
  if (p.share_pairs) return "share_pairs has no native kernel";
  if (p.order != KV_ORDER_LOWEST && p.merge != KV_MERGE_ZIP && p.merge != KV_MERGE_RUNNING_MEAN)
    return "an order by targets needs a merge by nearness, zip or running_mean";
  if (p.order == KV_ORDER_LEAST_ERROR && p.measure != KV_MEASURE_DISTANCE)
    return "order is least_error, which needs the measure distance";
  if (p.merge == KV_MERGE_PAIR && p.merged_last) return "merged_last has no meaning when merge is pair";
  if (p.select == KV_SELECT_ATTENDED && !has_queries)
    return "select is attended, which needs the reference queries of a fit";
  return nullptr;
}

}  // namespace kv
