// Which fields of a merge policy go together (kvexport/schema/policy.py).
#pragma once

#include "../abi/kvexport.h"

namespace kv {

// Why the kernels have no such policy; nullptr where they have. has_queries: whether reference queries come with the
// call.
inline const char* policy_problem(const KvMergePolicy& p, bool has_queries = false) {
  if (!(p.votes_max >= 1.0f)) return "votes_max is below 1";
  if (p.share_pairs) return "share_pairs has no native kernel";
  if (p.order != KV_ORDER_LOWEST && p.merge != KV_MERGE_ZIP && p.merge != KV_MERGE_RUNNING_MEAN)
    return "an order by targets needs a merge by nearness, zip or running_mean";
  if (p.order == KV_ORDER_LEAST_ERROR && p.measure != KV_MEASURE_DISTANCE)
    return "order is least_error, which needs the measure distance";
  if (p.merge == KV_MERGE_PAIR && p.merged_last) return "merged_last says nothing of pairs";
  if (p.select == KV_SELECT_ATTENDED && !has_queries)
    return "select is attended, which needs the reference queries of a fit";
  return nullptr;
}

}  // namespace kv
