// MergeCache: which slots leave. One block per head.
#pragma once

#include "plan.h"

namespace kv {
namespace cuda {

// Shared memory: a value per slot, 256 counts, 256 sums, and a mark per slot.
struct Selection {
  static constexpr int kThreads = 256;
  float* value;
  int *counts, *sums, *words;
  uint8_t* mark;  // kLater, kFirst, kChosen

  static KV_HD size_t size(int capacity) {
    return (2 * kThreads + 4) * sizeof(int) + static_cast<size_t>(capacity) * (sizeof(float) + 1);
  }
  KV_DEVICE Selection(char* shared, int capacity) {
    counts = reinterpret_cast<int*>(shared);
    sums = counts + kThreads;
    words = sums + kThreads;
    value = reinterpret_cast<float*>(words + 4);
    mark = reinterpret_cast<uint8_t*>(value + capacity);
  }
};

enum { kLater = 0, kFirst = 1, kChosen = 2 };

// Numbers that compare as the values do; both zeros are one.
KV_DEVICE uint32_t ordered(float x) {
  const uint32_t bits = bits_as<uint32_t>(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Marks the `wanted` lowest of slots [from, to) that are marked `among`, as kChosen; of equals the lowest slots. There
// are enough.
template <class Program>
KV_DEVICE void choose_lowest(Block<Program>& block, const Selection& s, int from, int to, int among, int wanted) {
  constexpr int kThreads = Program::kThreads;
  if (wanted <= 0) return;
  uint32_t prefix = 0, mask = 0;
  int left = wanted;  // of those that share the prefix
  for (int shift = 24; shift >= 0; shift -= 8) {
    block.each([&](int t, auto&) { s.counts[t] = 0; });
    block.each([&](int t, auto&) {
      for (int i = from + t; i < to; i += kThreads) {
        const uint32_t number = ordered(s.value[i]);
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
    block.each([&](int, auto&) {});
  }
  // All below the number found, and the first `left` of those equal to it; a thread looks at neighbours.
  const int each = (to - from + kThreads - 1) / kThreads;
  block.each([&](int t, auto& r) {
    r.count = 0;
    for (int i = from + t * each; i < min_of(from + (t + 1) * each, to); ++i)
      r.count += s.mark[i] == among && ordered(s.value[i]) == prefix;
  });
  scan(block, s.sums, [](int, auto& r) { return r.count; });
  block.each([&](int t, auto& r) {
    int equal = r.scanned;
    for (int i = from + t * each; i < min_of(from + (t + 1) * each, to); ++i) {
      if (s.mark[i] != among || ordered(s.value[i]) > prefix) continue;
      if (ordered(s.value[i]) < prefix || equal++ < left) s.mark[i] = kChosen;
    }
  });
}

// Writes the slots of [0, used) that are marked kChosen, in their order; returns how many.
template <class Program>
KV_DEVICE int list_chosen(Block<Program>& block, const Selection& s, int used, int* list) {
  const int each = (used + Program::kThreads - 1) / Program::kThreads;
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

// Of a head with slots marked kFirst or kLater: which leave, and which may receive. Fills `rows`, `mark` and what is
// known of the head.
template <class Program>
KV_DEVICE void choose(Block<Program>& block, const MergeHead& head, const Selection& s) {
  const KvMergePolicy& p = head.a.policy;
  const HeadPlan x = head.info();
  const int begin = x.free, end = x.free + x.frees, go = min_of(x.over, x.frees);
  block.each([&](int t, auto& r) {
    r.count = 0;
    for (int i = begin + t; i < end; i += Program::kThreads) r.count += s.mark[i] == kFirst;
  });
  const int first = min_of(sum_of(block, s.sums, [](int, auto& r) { return r.count; }), go);
  choose_lowest(block, s, begin, end, kFirst, first);
  choose_lowest(block, s, begin, end, kLater, go - first);
  // More than is free must leave: the earliest of what is protected.
  block.each([&](int t, auto&) {
    for (int i = t; i < x.used; i += Program::kThreads) {
      const int among_protected = i < begin ? i : i - x.frees;
      if ((i < begin || i >= end) && among_protected < x.over - go) s.mark[i] = kChosen;
    }
  });
  const int leaving = list_chosen(block, s, x.used, head.rows());
  block.each([&](int t, auto&) {
    if (t == 0) head.info().leaving = leaving;
    for (int i = t; i < x.used; i += Program::kThreads) {
      const bool leaves = s.mark[i] == kChosen;
      const bool receives =
          !leaves && ((i >= begin && i < end) || (head.a.recent_receives && head.position(i) >= head.a.sinks));
      head.of(head.plan.mark)[i] = leaves ? kLeaves : receives ? kReceives : 0;
    }
  });
  if (p.merge == KV_MERGE_RUNNING_MEAN) residual_region(block, head, s, x);
}

// Those that have merged before, then the lowest, receive; no others.
template <class Program>
KV_DEVICE void residual_region(Block<Program>& block, const MergeHead& head, const Selection& s, const HeadPlan& x) {
  uint8_t* mark = head.of(head.plan.mark);
  block.each([&](int t, auto& r) {
    r.count = 0;
    for (int i = t; i < x.used; i += Program::kThreads) {
      r.count += mark[i] == kReceives;
      s.mark[i] = mark[i] == kReceives ? kFirst : kLater;
      s.value[i] = head.votes(i) > 1.0f ? -1e38f : head.of(head.plan.importance)[i];
    }
  });
  const int count = sum_of(block, s.sums, [](int, auto& r) { return r.count; });
  if (count == 0) return;
  choose_lowest(block, s, 0, x.used, kFirst,
                max_of(static_cast<int>(floorf(head.a.policy.residual * static_cast<float>(count))), 1));
  block.each([&](int t, auto&) {
    for (int i = t; i < x.used; i += Program::kThreads)
      if (mark[i] == kReceives && s.mark[i] != kChosen) mark[i] = 0;
  });
}

// Slots in order of position, their importance, and what leaves (with merge_first: what might).
struct Rank {
  using Args = Merge;
  static constexpr int kThreads = Selection::kThreads, kBlocksPerMultiprocessor = 1;
  struct Registers {
    int count, scanned;
  };

  static KV_DEVICE void run(Block<Rank>& block, const Merge& plan) {
    const MergeHead head(plan, block.index());
    const Selection s(block.shared, plan.call.capacity);
    order_slots(block, head, s);
    const HeadPlan x = head.info();
    if (x.over == 0) return;
    weigh(block, head, s, x);
    if (plan.call.policy.order == KV_ORDER_LOWEST) {
      choose(block, head, s);
      return;
    }
    choose_lowest(block, s, x.free, x.free + x.frees, kLater, x.pool);
    list_chosen(block, s, x.used, head.rows());
  }

  static KV_DEVICE void order_slots(Block<Rank>& block, const MergeHead& head, const Selection& s) {
    const KvMergeCache& a = head.a;
    const int32_t* position = head.of(a.present.position);
    const int in_all = used_slots(block, head.of(a.present.votes), a.capacity, s.words);
    block.each([&](int t, auto& r) {
      r.count = -1;
      for (int i = t; i < in_all; i += kThreads) r.count = max_of(r.count, position[i]);
    });
    const int now =
        reduce(block, s.sums, [](int, auto& r) { return r.count; }, [](int i, int j) { return max_of(i, j); });
    const int passed_at = a.sliding_window ? now - a.sliding_window : -1;
    const auto count_of = [&](auto counts) {
      block.each([&](int t, auto& r) {
        r.count = 0;
        for (int i = t; i < in_all; i += kThreads) r.count += counts(i);
      });
      return sum_of(block, s.sums, [](int, auto& r) { return r.count; });
    };
    const int passed = count_of([&](int i) { return position[i] <= passed_at; });
    const bool sorted = count_of([&](int i) { return i > 0 && position[i - 1] > position[i]; }) == 0;
    const int sinks = count_of([&](int i) { return position[i] > passed_at && position[i] < a.sinks; });
    const int recent =
        count_of([&](int i) { return position[i] > max_of(passed_at, now - a.recent) && position[i] >= a.sinks; });
    block.each([&](int t, auto&) {
      for (int i = t; i < in_all; i += kThreads) {
        int rank = i - passed;
        if (!sorted) {
          rank = 0;
          for (int j = 0; j < in_all; ++j) rank += position[j] > passed_at && position[j] < position[i];
        }
        if (position[i] > passed_at) head.of(head.plan.order)[rank] = i;
      }
      if (t != 0) return;
      HeadPlan& x = head.info();
      x.in_all = in_all, x.used = in_all - passed, x.now = now, x.sorted = sorted;
      x.free = sinks, x.frees = x.used - sinks - recent;
      x.over = a.compresses ? max_of(x.used - a.budget, 0) : 0;
      x.pool = x.over == 0 ? 0 : a.policy.eviction_pool > x.frees / x.over ? x.frees : a.policy.eviction_pool * x.over;
      x.leaving = 0, x.kept = x.used;
    });
  }

  static KV_DEVICE void weigh(Block<Rank>& block, const MergeHead& head, const Selection& s, const HeadPlan& x) {
    const KvMergePolicy& p = head.a.policy;
    float* importance = head.of(head.plan.importance);
    block.each([&](int t, auto&) {
      for (int i = t; i < x.used; i += kThreads) importance[i] = importance_of(head, x, i);
    });
    block.each([&](int t, auto&) {
      for (int i = t; i < x.used; i += kThreads) {
        const bool older = p.merge == KV_MERGE_PAIR && is_older(x, i);
        float value = p.merged_last && head.votes(i) > 1.0f ? 1e38f : importance[i];
        if (older) value = importance[i] + importance[i + 1];
        s.value[i] = head.of(head.plan.value)[i] = value;
        s.mark[i] = older ? kFirst : kLater;
      }
    });
  }

  static KV_DEVICE float importance_of(const MergeHead& head, const HeadPlan& x, int i) {
    const KvMergePolicy& p = head.a.policy;
    const int position = head.position(i);
    switch (p.select) {
      case KV_SELECT_POSITION:
        return static_cast<float>(position);
      case KV_SELECT_AVERAGE:
        return corrected_average(head.score(0, i), p.select_decay, x.now, position);
      case KV_SELECT_MEAN:
        return head.score(0, i) / static_cast<float>(max_of(x.now - position + 1, 1));
      case KV_SELECT_POOLED:
        return pooled(head, x, i, p.pooled / 2);
      default:
        return head.score(0, i);
    }
  }

  // Added up in order of position, so that slots with the same neighbours tie.
  static KV_DEVICE float pooled(const MergeHead& head, const HeadPlan& x, int i, int reach) {
    const int position = head.position(i);
    float total = 0.0f;
    for (int j = max_of(i - reach, x.free); j <= min_of(i + reach, x.free + x.frees - 1); ++j) {
      const int apart = head.position(j) - position;
      if (apart <= reach && -apart <= reach) total += head.score(0, j);
    }
    return total;
  }
};

// With merge_first: slots of the pool with a target nearer than the threshold, or those of the least error, leave
// before the others.
struct Choose {
  using Args = Merge;
  static constexpr int kThreads = Selection::kThreads, kBlocksPerMultiprocessor = 1;
  struct Registers {
    int count, scanned;
  };

  static KV_DEVICE void run(Block<Choose>& block, const Merge& plan) {
    const MergeHead head(plan, block.index());
    const Selection s(block.shared, plan.call.capacity);
    const KvMergePolicy& p = plan.call.policy;
    const HeadPlan x = head.info();
    if (x.over == 0) return;
    block.each([&](int t, auto&) {
      for (int i = t; i < x.used; i += kThreads) s.value[i] = head.of(plan.value)[i], s.mark[i] = kLater;
    });
    block.each([&](int t, auto&) {
      for (int i = t; i < x.pool; i += kThreads) {
        int target;
        const int slot = head.rows()[i];
        const float near = nearest_of(head, i, &target);
        if (near > (p.order == KV_ORDER_LEAST_ERROR ? -kTooFar : p.threshold)) s.mark[slot] = kFirst;
        if (p.order == KV_ORDER_LEAST_ERROR && near > -kTooFar)
          s.value[slot] = merge_error(head.of(plan.importance)[slot], p.error_exponent, -near);
      }
    });
    choose(block, head, s);
  }
};

}  // namespace cuda
}  // namespace kv
