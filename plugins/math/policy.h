// Which combinations of merge policy fields the native kernels support (kvexport/schema/policy.py).
// Written by `python -m tools.schema` from kvexport/schema: change that, not this.
// clang-format off
#pragma once

#include "../abi/kvexport.h"

namespace kv {

// Returns why the kernels do not support this policy, or nullptr if they do. has_queries: whether the call
// has reference queries.
inline const char* policy_problem(const KvMergePolicy& p, bool has_queries = false) {
  if (!(p.votes_max >= 1.0f)) return "votes_max is below 1";
  if (p.share_pairs) return "share_pairs has no native kernel";
  if (p.order == KV_ORDER_NEAREST && p.merge != KV_MERGE_ZIP && p.merge != KV_MERGE_RUNNING_MEAN)
    return "order is nearest, which needs merge to be zip or running_mean";
  if (p.order == KV_ORDER_LEAST_ERROR && p.merge != KV_MERGE_ZIP && p.merge != KV_MERGE_RUNNING_MEAN)
    return "order is least_error, which needs merge to be zip or running_mean";
  if (p.order == KV_ORDER_LEAST_ERROR && p.measure != KV_MEASURE_DISTANCE)
    return "order is least_error, which needs measure to be distance";
  if (p.merge == KV_MERGE_PAIR && p.merged_last)
    return "merge is pair, which needs merged_last to be false";
  if (p.select == KV_SELECT_ATTENDED && !has_queries)
    return "select is attended, which needs the reference queries of a fit";
  return nullptr;
}

}  // namespace kv
