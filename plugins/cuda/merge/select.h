// MergeCache: which slots are evicted. One block of 256 threads per head, every 256th slot per thread:
//
//   Rank
//     order slots by position (positions.h)
//     importance[slot] = policy.select; keep_score[slot] = importance, 1e38 for merged slots if these are evicted last
//     policy.order = lowest: choose; otherwise the eviction pool = the lowest keep scores
//     ... and the upper slots = those of a higher importance than the whole pool
//   Choose, after Nearest has searched the pool's targets
//     mark slots that have a near enough target, which are evicted before the others; choose
//   choose: the `over` lowest keep scores among marked slots and then, if they are fewer, among the others
//     radix select: find the highest of these keep scores 8 bits at a time, by 256 counts
//     then find which slots can receive; for a running mean only the residual share of them
//
// A barrier separates the counts from their prefix sum, and the prefix sum from its reads.
#pragma once

#include "positions.h"
#include "work.h"

namespace kv {
namespace cuda {

// Shared memory: 256 counts, 256 sums, and a keep score and a mark per slot. While slots are ordered by position, the
// bits of PositionBits use the memory of scores and marks.
struct Selection {
  static constexpr int kThreads = 256;
  float* keep_score;
  int *counts, *sums, *words;
  uint8_t* mark;  // kLater, kFirst, kChosen

  static KV_HD size_t size(int capacity) {
    const size_t scores = static_cast<size_t>(capacity) * (sizeof(float) + 1);
    return (2 * kThreads + 4) * sizeof(int) + (scores > PositionBits::kBytes ? scores : PositionBits::kBytes);
  }
  KV_DEVICE Selection(char* shared, int capacity) {
    counts = reinterpret_cast<int*>(shared);
    sums = counts + kThreads;
    words = sums + kThreads;
    keep_score = reinterpret_cast<float*>(words + 4);
    mark = reinterpret_cast<uint8_t*>(keep_score + capacity);
  }
};

enum { kLater = 0, kFirst = 1, kChosen = 2 };  // evicted after kFirst slots, before kLater slots, or chosen

// Returns an integer that compares as the float does; both zeros give the same integer.
KV_DEVICE uint32_t ordered(float x) {
  const uint32_t bits = bits_as<uint32_t>(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Marks as kChosen the `count` slots of lowest keep score among those of [from, to) that are marked `among`, of which
// there are at least as many. Ties go to the lowest slots.
template <class Kernel>
KV_DEVICE void choose_lowest(Block<Kernel>& block, const Selection& s, int from, int to, int among, int count) {
  constexpr int kThreads = Kernel::kThreads;
  if (count <= 0) return;
  uint32_t prefix = 0, mask = 0;
  int left = count;  // to choose among the slots that share the prefix
  for (int shift = 24; shift >= 0; shift -= 8) {
    block.each([&](int t, auto&) { s.counts[t] = 0; });
    block.each([&](int t, auto&) {
      for (int i = from + t; i < to; i += kThreads) {
        const uint32_t number = ordered(s.keep_score[i]);
        if (s.mark[i] == among && (number & mask) == prefix) block.add(&s.counts[number >> shift & 255], 1);
      }
    });
    scan(block, s.sums, [&](int t, auto&) { return s.counts[t]; });
    block.each([&](int t, auto& r) {
      if (r.scanned < left && r.scanned + s.counts[t] >= left) s.words[0] = t, s.words[1] = r.scanned;
    });
    prefix |= static_cast<uint32_t>(s.words[0]) << shift;
    mask |= 255u << shift;
    left -= s.words[1];
    block.each([&](int, auto&) {});  // all threads have read `words`, which the next round writes
  }
  // Choose all slots below `prefix`, and the first `left` equal to it; a thread has neighbouring slots.
  const int each = (to - from + kThreads - 1) / kThreads;
  block.each([&](int t, auto& r) {
    r.count = 0;
    for (int i = from + t * each; i < min_of(from + (t + 1) * each, to); ++i)
      r.count += s.mark[i] == among && ordered(s.keep_score[i]) == prefix;
  });
  scan(block, s.sums, [](int, auto& r) { return r.count; });
  block.each([&](int t, auto& r) {
    int equal = r.scanned;
    for (int i = from + t * each; i < min_of(from + (t + 1) * each, to); ++i) {
      if (s.mark[i] != among || ordered(s.keep_score[i]) > prefix) continue;
      if (ordered(s.keep_score[i]) < prefix || equal++ < left) s.mark[i] = kChosen;
    }
  });
}

// Lists the slots of [0, used) that are marked kChosen, in their order; returns their number.
template <class Kernel>
KV_DEVICE int list_chosen(Block<Kernel>& block, const Selection& s, int used, int* list) {
  const int each = (used + Kernel::kThreads - 1) / Kernel::kThreads;
  block.each([&](int t, auto& r) {
    r.count = 0;
    for (int i = t * each; i < min_of((t + 1) * each, used); ++i) r.count += s.mark[i] == kChosen;
  });
  const int count = scan(block, s.sums, [](int, auto& r) { return r.count; });
  block.each([&](int t, auto& r) {
    int at = r.scanned;
    for (int i = t * each; i < min_of((t + 1) * each, used); ++i)
      if (s.mark[i] == kChosen) list[at++] = i;
  });
  return count;
}

// Chooses which slots of a head, all marked kFirst or kLater, are evicted, and which can receive. Fills `rows`, `mark`
// and HeadInfo::evicted.
template <class Kernel>
KV_DEVICE void choose(Block<Kernel>& block, const MergeHead& head, const Selection& s) {
  const KvMergePolicy& p = head.a.policy;
  const HeadInfo x = head.info();
  const int begin = x.unprotected, end = x.unprotected + x.unprotected_count,
            chosen = min_of(x.over, x.unprotected_count);
  block.each([&](int t, auto& r) {
    r.count = 0;
    for (int i = begin + t; i < end; i += Kernel::kThreads) r.count += s.mark[i] == kFirst;
  });
  const int first = min_of(sum_of(block, s.sums, [](int, auto& r) { return r.count; }), chosen);
  choose_lowest(block, s, begin, end, kFirst, first);
  choose_lowest(block, s, begin, end, kLater, chosen - first);
  // If more slots have to be evicted than are unprotected, the earliest protected ones follow.
  block.each([&](int t, auto&) {
    for (int i = t; i < x.used; i += Kernel::kThreads) {
      const int among_protected = i < begin ? i : i - x.unprotected_count;
      if ((i < begin || i >= end) && among_protected < x.over - chosen) s.mark[i] = kChosen;
    }
  });
  const int evicted = list_chosen(block, s, x.used, head.rows());
  block.each([&](int t, auto&) {
    if (t == 0) head.info().evicted = evicted;
    for (int i = t; i < x.used; i += Kernel::kThreads) {
      const bool is_evicted = s.mark[i] == kChosen;
      const bool receives =
          !is_evicted && ((i >= begin && i < end) || (head.a.recent_receives && head.position(i) >= head.a.sinks));
      head.of(head.work.mark)[i] = is_evicted ? kEvicted : receives ? kCanReceive : 0;
    }
  });
  if (p.merge == KV_MERGE_RUNNING_MEAN) residual_targets(block, head, s, x);
}

// Reduces the targets of a running mean to the residual share: slots that have merged before, then the lowest.
template <class Kernel>
KV_DEVICE void residual_targets(Block<Kernel>& block, const MergeHead& head, const Selection& s, const HeadInfo& x) {
  uint8_t* mark = head.of(head.work.mark);
  block.each([&](int t, auto& r) {
    r.count = 0;
    for (int i = t; i < x.used; i += Kernel::kThreads) {
      r.count += mark[i] == kCanReceive;
      s.mark[i] = mark[i] == kCanReceive ? kFirst : kLater;
      s.keep_score[i] = head.votes(i) > 1.0f ? -1e38f : head.of(head.work.importance)[i];
    }
  });
  const int count = sum_of(block, s.sums, [](int, auto& r) { return r.count; });
  if (count == 0) return;
  choose_lowest(block, s, 0, x.used, kFirst,
                max_of(static_cast<int>(floorf(head.a.policy.residual * static_cast<float>(count))), 1));
  block.each([&](int t, auto&) {
    for (int i = t; i < x.used; i += Kernel::kThreads)
      if (mark[i] == kCanReceive && s.mark[i] != kChosen) mark[i] = 0;
  });
}

// The first launch: slots in order of position, their importance and keep scores, and which are evicted (if
// policy.order needs targets: which are the eviction pool).
struct Rank {
  using Args = MergeWork;
  static constexpr int kThreads = Selection::kThreads, kBlocksPerMultiprocessor = 3;  // with 4 it spills on 12.0
  struct Registers {
    int count, scanned;
  };

  static KV_DEVICE void run(Block<Rank>& block, const MergeWork& work) {
    const MergeHead head(work, block.index());
    const Selection s(block.shared, work.most_slots);
    order_slots(block, head, s);
    const HeadInfo x = head.info();
    if (x.over == 0) return;
    score(block, head, s, x);
    if (work.call.policy.order == KV_ORDER_LOWEST) {
      choose(block, head, s);
      return;
    }
    choose_lowest(block, s, x.unprotected, x.unprotected + x.unprotected_count, kLater, x.pool);
    list_chosen(block, s, x.used, head.rows());
    find_upper(block, head, s, x);
  }

  // Marks the upper slots, and lists the other slots that may be targets.
  static KV_DEVICE void find_upper(Block<Rank>& block, const MergeHead& head, const Selection& s, const HeadInfo& x) {
    const float* importance = head.of(head.work.importance);
    const float highest = reduce(
        block, reinterpret_cast<float*>(s.sums),
        [&](int t, auto&) {
          float most = -INFINITY;
          for (int i = t; i < x.pool; i += kThreads) most = fmaxf(most, importance[head.rows()[i]]);
          return most;
        },
        [](float a, float b) { return fmaxf(a, b); });
    const int begin = x.unprotected, end = begin + x.unprotected_count, last = head.a.recent_receives ? x.used : end;
    block.each([&](int t, auto&) {
      for (int i = t; i < last; i += kThreads) {
        const bool upper = i >= begin && i < end && importance[i] > highest;
        head.of(head.work.mark)[i] = upper ? kUpper : 0;
        s.mark[i] = i >= begin && !upper ? kChosen : kLater;
      }
    });
    const int rest = list_chosen(block, s, last, head.of(head.work.rest));
    block.each([&](int t, auto&) {
      if (t == 0) head.info().rest = rest, head.info().rest_unprotected = rest - (last - end);
    });
  }

  // The lowest and the highest position, and the number of slots that the window has passed, of sinks and of recent
  // ones.
  struct Span {
    int low, high;
  };
  struct Counts {
    int passed, sinks, recent;
  };

  static KV_DEVICE void order_slots(Block<Rank>& block, const MergeHead& head, const Selection& s) {
    const KvMergeCache& a = head.a;
    const int32_t* position = head.positions();
    const int in_all = used_slots(block, head.all_votes(), head.own.capacity, s.words);
    const auto sum_up = [&](auto x, auto add, auto op) {
      return reduce(
          block, reinterpret_cast<decltype(x)*>(s.keep_score),
          [&](int t, auto&) {
            auto own = x;
            for (int i = t; i < in_all; i += kThreads) add(own, position[i]);
            return own;
          },
          op);
    };
    const Span span = sum_up(
        Span{INT32_MAX, -1}, [](Span& x, int p) { x = {min_of(x.low, p), max_of(x.high, p)}; },
        [](Span a, Span b) { return Span{min_of(a.low, b.low), max_of(a.high, b.high)}; });
    // Without a window nothing has passed, not even pinned slots, whose positions are below 0 during a merge.
    const int now = span.high, passed_at = a.sliding_window ? now - a.sliding_window : INT32_MIN,
              before_recent = max_of(passed_at, now - head.own.recent);
    const Counts counts = sum_up(
        Counts{},
        [&](Counts& x, int p) {
          x.passed += p <= passed_at;
          x.sinks += p > passed_at && p < a.sinks;
          x.recent += p > before_recent && p >= a.sinks;
        },
        [](Counts a, Counts b) { return Counts{a.passed + b.passed, a.sinks + b.sinks, a.recent + b.recent}; });
    write_order(block, {s.sums, s.keep_score}, position, in_all, counts.passed, span.low, now,
                head.of(head.work.order));
    block.each([&](int t, auto&) {
      if (t != 0) return;
      HeadInfo& x = head.info();
      x.in_all = in_all, x.used = in_all - counts.passed, x.now = now;
      x.unprotected = counts.sinks, x.unprotected_count = x.used - counts.sinks - counts.recent;
      x.over = a.compresses ? max_of(x.used - head.own.budget, 0) : 0;
      x.pool = x.over == 0                                             ? 0
               : a.policy.eviction_pool > x.unprotected_count / x.over ? x.unprotected_count
                                                                       : a.policy.eviction_pool * x.over;
      x.evicted = 0, x.kept = x.used;
    });
  }

  static KV_DEVICE void score(Block<Rank>& block, const MergeHead& head, const Selection& s, const HeadInfo& x) {
    const KvMergePolicy& p = head.a.policy;
    float* importance = head.of(head.work.importance);
    block.each([&](int t, auto&) {
      for (int i = t; i < x.used; i += kThreads) importance[i] = importance_of(head, x, i);
    });
    block.each([&](int t, auto&) {
      for (int i = t; i < x.used; i += kThreads) {
        const bool older = p.merge == KV_MERGE_PAIR && is_older(x, i);
        float keep_score = p.merged_last && head.votes(i) > 1.0f ? 1e38f : importance[i];
        if (older) keep_score = importance[i] + importance[i + 1];
        s.keep_score[i] = head.of(head.work.keep_score)[i] = keep_score;
        s.mark[i] = older ? kFirst : kLater;
      }
    });
  }

  static KV_DEVICE float importance_of(const MergeHead& head, const HeadInfo& x, int i) {
    const KvMergePolicy& p = head.a.policy;
    const int position = head.position(i);
    switch (p.select) {
      case KV_SELECT_POSITION:
        return static_cast<float>(position);
      case KV_SELECT_AVERAGE:
        return corrected_average(head.score(0, i), p.select_decay, x.now, position);
      case KV_SELECT_MEAN:
        return head.score(0, i) / observations(x.now, position);
      case KV_SELECT_POOLED:
        return pooled(head, x, i, p.pooled / 2);
      default:
        return head.score(0, i);
    }
  }

  // Returns the sum of scores over neighbouring positions, added in order of position: slots with equal neighbours tie.
  static KV_DEVICE float pooled(const MergeHead& head, const HeadInfo& x, int i, int reach) {
    const int position = head.position(i);
    float sum = 0.0f;
    for (int j = max_of(i - reach, x.unprotected); j <= min_of(i + reach, x.unprotected + x.unprotected_count - 1);
         ++j) {
      const int apart = head.position(j) - position;
      if (apart <= reach && -apart <= reach) sum += head.score(0, j);
    }
    return sum;
  }
};

// Chooses the evicted slots when policy.order needs targets. Slots of the eviction pool that have a target nearer than
// the threshold are evicted before the others; if the order is by the error, slots that have a target, the least error
// first.
struct Choose {
  using Args = MergeWork;
  static constexpr int kThreads = Selection::kThreads, kBlocksPerMultiprocessor = 1;
  struct Registers {
    int count, scanned;
  };

  static KV_DEVICE void run(Block<Choose>& block, const MergeWork& work) {
    const MergeHead head(work, block.index());
    const Selection s(block.shared, work.most_slots);
    const KvMergePolicy& p = work.call.policy;
    const HeadInfo x = head.info();
    if (x.over == 0) return;
    block.each([&](int t, auto&) {
      for (int i = t; i < x.used; i += kThreads) s.keep_score[i] = head.of(work.keep_score)[i], s.mark[i] = kLater;
    });
    block.each([&](int t, auto&) {
      for (int i = t; i < x.pool; i += kThreads) {
        const int slot = head.rows()[i];
        const float near = ease_of(head, i, x.pool);
        if (work.upper) head.of(work.upper_nearness)[slot] = nearest_of(head, i, x.pool, &head.of(work.upper)[slot]);
        if (near > (p.order == KV_ORDER_LEAST_ERROR ? -kTooFar : p.threshold)) s.mark[slot] = kFirst;
        if (p.order == KV_ORDER_LEAST_ERROR && near > -kTooFar)
          s.keep_score[slot] = merge_error(head.of(work.importance)[slot], p.error_exponent, -near);
      }
    });
    choose(block, head, s);
  }
};

}  // namespace cuda
}  // namespace kv
