// The first half of MergeCache, for one KV head:
//
//   collect: the used slots that the sliding window has not passed, in order of position
//   weigh: which slots are unprotected (neither sinks nor recent); importance[slot] = policy.select
//   choose: keep_score[slot] = importance, 1e38 for merged slots if these are evicted last
//     if policy.order needs targets: the nearest of higher importance, for the slots of lowest keep score
//     evicted = the lowest keep scores; slots with such a target, or the older of a pair, before the others
//   receivers: which slots can receive; for a running mean a share of them
//
// Letters: those of nearest.h.
#pragma once

#include "nearest.h"

namespace kv {
namespace KV_ISA {
namespace {

// K, V: the types of the cache.
template <class K, class V>
struct Select : Nearest<K, V> {
  using Base = Nearest<K, V>;
  using Base::a, Base::p, Base::Base, Base::score_of;
  using typename Base::Head;

  // Collects the used slots in order of position.
  void collect(Head& x, Work& w) const {
    int in_all = 0;
    while (in_all < x.capacity && x.votes[in_all] > 0.0f) ++in_all;
    x.in_all = in_all;
    x.now = -1;
    for (int c = 0; c < in_all; ++c) x.now = max_of(x.now, x.position[c]);
    int* order = w.order.reserve(in_all + 1);
    x.used = 0;
    bool sorted = true;
    for (int c = 0; c < in_all; ++c) {
      if (a.sliding_window && x.position[c] <= x.now - a.sliding_window) continue;
      sorted &= x.used == 0 || x.position[order[x.used - 1]] < x.position[c];
      order[x.used++] = c;
    }
    if (!sorted) sort_by_position(x, w);
    float* votes = w.votes.reserve(x.used + W);
    int32_t* positions = w.position.reserve(x.used + W);
    for (int i = 0; i < x.used; ++i) votes[i] = x.votes[order[i]], positions[i] = x.position[order[i]];
    w.is_evicted.reserve(x.used + 1, 0);
  }

  // Sorts w.order by position: a radix sort of the distance from the lowest position, 8 bits a pass, low bits first. A
  // context of less than 65,536 tokens takes two passes. A comparison sort takes several times as long, since merges
  // leave slots in any order.
  void sort_by_position(const Head& x, Work& w) const {
    int *from = w.order.get(), *to = w.rank.reserve(x.used);
    uint32_t lowest = UINT32_MAX, highest = 0;
    const auto number = [&](int slot) { return static_cast<uint32_t>(x.position[slot]) ^ 0x80000000u; };
    for (int i = 0; i < x.used; ++i) {
      lowest = std::min(lowest, number(from[i]));
      highest = std::max(highest, number(from[i]));
    }
    for (int shift = 0; shift < 32 && (highest - lowest) >> shift; shift += 8) {
      const auto digit = [&](int slot) { return (number(slot) - lowest) >> shift & 255; };
      int begin[257] = {};
      for (int i = 0; i < x.used; ++i) ++begin[digit(from[i]) + 1];
      for (int i = 1; i < 256; ++i) begin[i] += begin[i - 1];
      for (int i = 0; i < x.used; ++i) to[begin[digit(from[i])]++] = from[i];
      std::swap(from, to);
    }
    if (from != w.order.get()) memcpy(w.order.get(), from, x.used * sizeof(int));
  }

  // Computes which slots are unprotected, and the importance of every slot.
  void weigh(Head& x, Work& w) const {
    const int n = x.used;
    char* is_unprotected = w.is_unprotected.reserve(n);
    const int32_t* position = w.position.get();
    for (int i = 0; i < n; ++i) is_unprotected[i] = position[i] >= a.sinks && position[i] <= x.now - x.recent;
    float* importance = w.importance.reserve(n);
    for (int i = 0; i < n; ++i) {
      switch (p.select) {
        case KV_SELECT_POSITION:
          importance[i] = static_cast<float>(position[i]);
          break;
        case KV_SELECT_AVERAGE:
          importance[i] = corrected_average(score_of(x, w, 0, i), p.select_decay, x.now, position[i]);
          break;
        case KV_SELECT_MEAN:
          importance[i] = score_of(x, w, 0, i) / observations(x.now, position[i]);
          break;
        case KV_SELECT_POOLED:
          importance[i] = pooled(x, w, i);
          break;
        default:
          importance[i] = score_of(x, w, 0, i);
      }
    }
  }

  // Returns the sum of scores over neighbouring positions, added in order of position: slots with equal neighbours tie.
  float pooled(const Head& x, const Work& w, int i) const {
    const int reach = p.pooled / 2;
    const int32_t* position = w.position.get();
    float sum = 0.0f;
    for (int j = max_of(i - reach, 0); j <= min_of(i + reach, x.used - 1); ++j) {
      const int64_t distance = static_cast<int64_t>(position[j]) - position[i];  // hostile positions overflow an int
      if (w.is_unprotected.get()[j] && distance <= reach && -distance <= reach) sum += score_of(x, w, 0, j);
    }
    return sum;
  }

  // Returns whether slot i is the first of a pair of unprotected neighbours; unprotected slots are contiguous.
  bool is_older(const Head& x, const Work& w, int i) const {
    const char* is_unprotected = w.is_unprotected.get();
    return is_unprotected[i] && i + 1 < x.used && is_unprotected[i + 1] && (i - w.target_list.get()[0]) % 2 == 0;
  }

  // Fills `evicted` with the slots to evict, first to last.
  void choose(Head& x, Work& w) const {
    const int n = x.used;
    const char* is_unprotected = w.is_unprotected.get();
    const float *importance = w.importance.get(), *votes = w.votes.get();
    int *rank = w.rank.reserve(n + 1), count = 0;
    for (int i = 0; i < n; ++i)
      if (is_unprotected[i]) rank[count++] = i;
    int* list = w.target_list.reserve(n + 1);
    for (int i = 0; i < count; ++i) list[i] = rank[i];
    x.target_count = count;
    float* keep_score = w.keep_score.reserve(n);
    for (int i = 0; i < n; ++i) keep_score[i] = p.merged_last && votes[i] > 1.0f ? 1e38f : importance[i];
    char* first = w.is_evicted.get();  // 2 marks a slot that is evicted before unmarked ones; cleared below
    if (p.merge == KV_MERGE_PAIR)
      for (int i = 0; i < count; ++i)
        if (is_older(x, w, list[i]))
          first[list[i]] = 2, keep_score[list[i]] = importance[list[i]] + importance[list[i] + 1];
    const auto lower = [keep_score](int i, int j) {
      return keep_score[i] < keep_score[j] || (keep_score[i] == keep_score[j] && i < j);
    };
    if (p.order != KV_ORDER_LOWEST) {
      const int pool = p.eviction_pool > count / x.over ? count : p.eviction_pool * x.over;
      std::partial_sort(rank, rank + pool, rank + count, lower);
      if (p.order == KV_ORDER_LEAST_ERROR)
        this->nearest(x, w, rank, pool, kCheapestTarget, pool + 1);
      else
        this->nearest(x, w, rank, pool, kHigherTarget, x.over);
      for (int i = 0; i < pool; ++i) {
        const float near = w.best.get()[i];
        if (near > (p.order == KV_ORDER_LEAST_ERROR ? -kTooFar : p.threshold)) first[rank[i]] = 2;
        if (p.order == KV_ORDER_LEAST_ERROR && near > -kTooFar)
          keep_score[rank[i]] = merge_error(importance[rank[i]], p.error_exponent, -near);
      }
    }
    const int chosen = min_of(x.over, count);
    std::partial_sort(rank, rank + chosen, rank + count, [first, lower](int i, int j) {
      return first[i] != first[j] ? first[i] > first[j] : lower(i, j);
    });
    for (int i = 0; i < n; ++i) first[i] = 0;
    int* evicted = w.evicted.reserve(x.over);
    for (int i = 0; i < chosen; ++i) evicted[x.evicted++] = rank[i];
    // If more slots have to be evicted than are unprotected, the earliest protected ones follow.
    for (int i = 0; i < n && x.evicted < x.over; ++i)
      if (!is_unprotected[i]) evicted[x.evicted++] = i;
    for (int i = 0; i < x.evicted; ++i) w.is_evicted.get()[evicted[i]] = 1;
  }

  // Fills `target_list` with the slots that can receive: kept ones that are unprotected or, with recent_receives,
  // recent.
  void receivers(Head& x, Work& w) const {
    int *list = w.target_list.get(), count = 0;
    const int32_t* position = w.position.get();
    for (int i = 0; i < x.used; ++i) {
      const bool receives = w.is_unprotected.get()[i] || (a.recent_receives && position[i] >= a.sinks);
      if (receives && !w.is_evicted.get()[i]) list[count++] = i;
    }
    x.target_count = count;
    if (p.merge != KV_MERGE_RUNNING_MEAN || count == 0) return;
    // The targets of a running mean: slots that have merged before, then those of lowest importance.
    const int residual = max_of(static_cast<int>(std::floor(p.residual * static_cast<float>(count))), 1);
    const float *votes = w.votes.get(), *importance = w.importance.get();
    const auto value = [votes, importance](int i) { return votes[i] > 1.0f ? -1e38f : importance[i]; };
    // std::sort could run past the end of the array if a score is NaN; std::partial_sort does not.
    std::partial_sort(list, list + residual, list + count,
                      [value](int i, int j) { return value(i) < value(j) || (value(i) == value(j) && i < j); });
    x.target_count = residual;
    std::sort(list, list + residual, [](int i, int j) { return i < j; });
  }
};

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
