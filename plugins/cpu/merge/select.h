// The first half of MergeCache, for one KV head:
//
//   collect: the used slots that the sliding window has not passed, in order of position
//   weigh: which slots are unprotected (neither sinks nor recent); importance[slot] = policy.select
//   choose: keep_score[slot] = importance, 1e38 for merged slots if these are evicted last
//     if policy.order needs targets: the nearest of higher importance, for the slots of lowest keep score
//     evicted = the lowest keep scores; slots with such a target, or the older of a pair, before the others
//   receivers: which slots can receive; for a running mean a share of them
//
// Indices: those of nearest.h.
#pragma once

#include "nearest.h"

namespace kv {
namespace KV_ISA {
namespace {

// K, V: the types of the cache.
template <class K, class V>
struct Select : Nearest<K, V> {
  using Base = Nearest<K, V>;
  using Base::call, Base::policy, Base::Base, Base::score_of;
  using typename Base::Head;

  // Collects the used slots in order of position.
  void collect(Head& head, Work& work) const {
    int in_all = 0;
    while (in_all < head.capacity && head.votes[in_all] > 0.0f) ++in_all;
    head.in_all = in_all;
    head.now = -1;
    for (int c = 0; c < in_all; ++c) head.now = max_of(head.now, head.position[c]);
    int* order = work.order.reserve(in_all + 1);
    head.used = 0;
    bool sorted = true;
    for (int c = 0; c < in_all; ++c) {
      if (call.sliding_window && head.position[c] <= head.now - call.sliding_window) continue;
      sorted &= head.used == 0 || head.position[order[head.used - 1]] < head.position[c];
      order[head.used++] = c;
    }
    if (!sorted) sort_by_position(head, work);
    float* votes = work.votes.reserve(head.used + W);
    int32_t* positions = work.position.reserve(head.used + W);
    for (int i = 0; i < head.used; ++i) votes[i] = head.votes[order[i]], positions[i] = head.position[order[i]];
    work.is_evicted.reserve(head.used + 1, 0);
  }

  // Sorts work.order by position: a radix sort of the distance from the lowest position, 8 bits a pass, low bits first.
  // A context of less than 65,536 tokens takes two passes. A comparison sort takes several times as long, since merges
  // leave slots in any order.
  void sort_by_position(const Head& head, Work& work) const {
    int *from = work.order.get(), *to = work.rank.reserve(head.used);
    uint32_t lowest = UINT32_MAX, highest = 0;
    const auto number = [&](int slot) { return static_cast<uint32_t>(head.position[slot]) ^ 0x80000000u; };
    for (int i = 0; i < head.used; ++i) {
      lowest = std::min(lowest, number(from[i]));
      highest = std::max(highest, number(from[i]));
    }
    for (int shift = 0; shift < 32 && (highest - lowest) >> shift; shift += 8) {
      const auto digit = [&](int slot) { return (number(slot) - lowest) >> shift & 255; };
      int begin[257] = {};
      for (int i = 0; i < head.used; ++i) ++begin[digit(from[i]) + 1];
      for (int i = 1; i < 256; ++i) begin[i] += begin[i - 1];
      for (int i = 0; i < head.used; ++i) to[begin[digit(from[i])]++] = from[i];
      std::swap(from, to);
    }
    if (from != work.order.get()) memcpy(work.order.get(), from, head.used * sizeof(int));
  }

  // Computes which slots are unprotected, and the importance of every slot.
  void weigh(Head& head, Work& work) const {
    const int n = head.used;
    char* is_unprotected = work.is_unprotected.reserve(n);
    const int32_t* position = work.position.get();
    for (int i = 0; i < n; ++i) is_unprotected[i] = position[i] >= call.sinks && position[i] <= head.now - head.recent;
    float* importance = work.importance.reserve(n);
    for (int i = 0; i < n; ++i) {
      switch (policy.select) {
        case KV_SELECT_POSITION:
          importance[i] = static_cast<float>(position[i]);
          break;
        case KV_SELECT_AVERAGE:
          importance[i] = corrected_average(score_of(head, work, 0, i), policy.select_decay, head.now, position[i]);
          break;
        case KV_SELECT_MEAN:
          importance[i] = score_of(head, work, 0, i) / observations(head.now, position[i]);
          break;
        case KV_SELECT_POOLED:
          importance[i] = pooled(head, work, i);
          break;
        default:
          importance[i] = score_of(head, work, 0, i);
      }
    }
  }

  // Returns the sum of scores over neighbouring positions, added in order of position: slots with equal neighbours tie.
  float pooled(const Head& head, const Work& work, int i) const {
    const int reach = policy.pooled / 2;
    const int32_t* position = work.position.get();
    float sum = 0.0f;
    for (int j = max_of(i - reach, 0); j <= min_of(i + reach, head.used - 1); ++j) {
      const int64_t distance = static_cast<int64_t>(position[j]) - position[i];  // hostile positions overflow an int
      if (work.is_unprotected.get()[j] && distance <= reach && -distance <= reach) sum += score_of(head, work, 0, j);
    }
    return sum;
  }

  // Returns whether slot i is the first of a pair of unprotected neighbours; unprotected slots are contiguous.
  bool is_older(const Head& head, const Work& work, int i) const {
    const char* is_unprotected = work.is_unprotected.get();
    return is_unprotected[i] && i + 1 < head.used && is_unprotected[i + 1] && (i - work.target_list.get()[0]) % 2 == 0;
  }

  // Fills `evicted` with the slots to evict, first to last.
  void choose(Head& head, Work& work) const {
    const int n = head.used;
    const char* is_unprotected = work.is_unprotected.get();
    const float *importance = work.importance.get(), *votes = work.votes.get();
    int *rank = work.rank.reserve(n + 1), count = 0;
    for (int i = 0; i < n; ++i)
      if (is_unprotected[i]) rank[count++] = i;
    int* list = work.target_list.reserve(n + 1);
    for (int i = 0; i < count; ++i) list[i] = rank[i];
    head.target_count = count;
    float* keep_score = work.keep_score.reserve(n);
    for (int i = 0; i < n; ++i) keep_score[i] = policy.merged_last && votes[i] > 1.0f ? 1e38f : importance[i];
    char* first = work.is_evicted.get();  // 2 marks a slot that is evicted before unmarked ones; cleared below
    if (policy.merge == KV_MERGE_PAIR)
      for (int i = 0; i < count; ++i)
        if (is_older(head, work, list[i]))
          first[list[i]] = 2, keep_score[list[i]] = importance[list[i]] + importance[list[i] + 1];
    const auto lower = [keep_score](int i, int j) {
      return keep_score[i] < keep_score[j] || (keep_score[i] == keep_score[j] && i < j);
    };
    if (policy.order != KV_ORDER_LOWEST) {
      const int pool = policy.eviction_pool > count / head.over ? count : policy.eviction_pool * head.over;
      std::partial_sort(rank, rank + pool, rank + count, lower);
      if (policy.order == KV_ORDER_LEAST_ERROR)
        this->nearest(head, work, rank, pool, kCheapestTarget, pool + 1);
      else
        this->nearest(head, work, rank, pool, kHigherTarget, head.over);
      for (int i = 0; i < pool; ++i) {
        const float near = work.best.get()[i];
        if (near > (policy.order == KV_ORDER_LEAST_ERROR ? -kTooFar : policy.threshold)) first[rank[i]] = 2;
        if (policy.order == KV_ORDER_LEAST_ERROR && near > -kTooFar)
          keep_score[rank[i]] = merge_error(importance[rank[i]], policy.error_exponent, -near);
      }
    }
    const int chosen = min_of(head.over, count);
    std::partial_sort(rank, rank + chosen, rank + count, [first, lower](int i, int j) {
      return first[i] != first[j] ? first[i] > first[j] : lower(i, j);
    });
    for (int i = 0; i < n; ++i) first[i] = 0;
    int* evicted = work.evicted.reserve(head.over);
    for (int i = 0; i < chosen; ++i) evicted[head.evicted++] = rank[i];
    // If more slots have to be evicted than are unprotected, the earliest protected ones follow.
    for (int i = 0; i < n && head.evicted < head.over; ++i)
      if (!is_unprotected[i]) evicted[head.evicted++] = i;
    for (int i = 0; i < head.evicted; ++i) work.is_evicted.get()[evicted[i]] = 1;
  }

  // Fills `target_list` with the slots that can receive: kept ones that are unprotected or, with recent_receives,
  // recent.
  void receivers(Head& head, Work& work) const {
    int *list = work.target_list.get(), count = 0;
    const int32_t* position = work.position.get();
    for (int i = 0; i < head.used; ++i) {
      const bool receives = work.is_unprotected.get()[i] || (call.recent_receives && position[i] >= call.sinks);
      if (receives && !work.is_evicted.get()[i]) list[count++] = i;
    }
    head.target_count = count;
    if (policy.merge != KV_MERGE_RUNNING_MEAN || count == 0) return;
    // The targets of a running mean: slots that have merged before, then those of lowest importance.
    const int residual = max_of(static_cast<int>(std::floor(policy.residual * static_cast<float>(count))), 1);
    const float *votes = work.votes.get(), *importance = work.importance.get();
    const auto value = [votes, importance](int i) { return votes[i] > 1.0f ? -1e38f : importance[i]; };
    // std::sort could run past the end of the array if a score is NaN; std::partial_sort does not.
    std::partial_sort(list, list + residual, list + count,
                      [value](int i, int j) { return value(i) < value(j) || (value(i) == value(j) && i < j); });
    head.target_count = residual;
    std::sort(list, list + residual, [](int i, int j) { return i < j; });
  }
};

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
