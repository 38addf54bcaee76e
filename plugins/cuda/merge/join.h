// MergeCache: who merges with whom, and what becomes of them.
#pragma once

#include "plan.h"

namespace kv {
namespace cuda {

// Who merges with whom, and who comes out in the place of every slot. One block per head.
struct Group {
  using Args = Merge;
  static constexpr int kThreads = 256, kBlocksPerMultiprocessor = 1;
  struct Registers {};

  static KV_DEVICE void run(Block<Group>& block, const Merge& plan) {
    const MergeHead head(plan, block.index());
    const KvMergePolicy& p = plan.call.policy;
    const HeadPlan x = head.info();
    int* group = head.of(plan.group);
    block.each([&](int t, auto&) {
      for (int i = t; i < x.used; i += kThreads) {
        group[i] = kNobody;
        head.of(plan.owner)[i] = x.over > 0 && head.of(plan.mark)[i] == kLeaves ? kNobody : i;
      }
    });
    if (x.over == 0 || p.merge == KV_MERGE_DROP) return;
    block.each([&](int t, auto&) {
      for (int i = t; i < x.leaving; i += kThreads) {
        int target = -1;
        const int slot = head.rows()[i];
        if (p.merge == KV_MERGE_PAIR) {
          if (is_older(x, slot) && head.of(plan.mark)[slot + 1] != kLeaves) target = slot + 1;
        } else if (!(nearest_of(head, i, &target) > p.threshold)) {
          target = -1;
        }
        head.to()[i] = target;
        if (target >= 0) {
          block.lower(&group[target], i);
          head.of(plan.owner)[target] = kNobody;
        }
      }
    });
  }
};

// KVSlimmer: the attention's output as the accumulated probabilities see it, o = sum a v, and what they add up to. One
// block per head.
template <class T>
struct Attended {
  using Args = Merge;
  static constexpr int kThreads = 256, kBlocksPerMultiprocessor = 1;
  struct Registers {
    float total;
  };
  static KV_HD constexpr size_t size() { return kThreads * sizeof(float); }

  static KV_DEVICE void run(Block<Attended>& block, const Merge& plan) {
    const MergeHead head(plan, block.index());
    const HeadPlan x = head.info();
    if (x.over == 0) return;
    const int size = plan.call.value_size, parts = kThreads / size, k = plan.call.statistics - 1;
    float* sums = reinterpret_cast<float*>(block.shared);
    const float found = sum_of(block, sums, [&](int t, auto&) {
      float total = 0.0f;
      for (int i = t; i < x.used; i += kThreads) total += head.score(k, i);
      return total;
    });
    const float total = fmaxf(found, 1e-30f);
    block.each([&](int t, auto&) {
      float sum = 0.0f;
      for (int i = t / size; t / size < parts && i < x.used; i += parts)
        sum += head.score(k, i) / total * to_float(head.template value<T>(i)[t % size]);
      sums[t] = sum;
    });
    float* attended = plan.attended + static_cast<size_t>(head.index) * (size + 1);
    block.each([&](int t, auto&) {
      if (t == 0) attended[size] = total;
      if (t >= size) return;
      float sum = 0.0f;
      for (int part = 0; part < parts; ++part) sum += sums[part * size + t];
      attended[t] = sum;
    });
  }
};

// A group's key and value, votes and statistics. A block is a leaving slot, and works if that is the first of its
// group.
template <class T>
struct Join {
  using Args = Merge;
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 1;
  struct Registers {
    int count, scanned;
  };
  // Sums over the threads, results of one thread, and the members and their weights.
  static KV_HD constexpr size_t size(int most) {
    return (kThreads + 4 + 2 * (static_cast<size_t>(most) + 1)) * sizeof(float);
  }
  struct Shared {
    int *sums, *member;
    float *weight, *total, *factor, *share, *votes;
  };

  static KV_DEVICE void run(Block<Join>& block, const Merge& plan) {
    const KvMergeCache& a = plan.call;
    const MergeHead head(plan, block.index() / plan.most);
    const int own = block.index() % plan.most;
    const HeadPlan x = head.info();
    if (x.over == 0 || own >= x.leaving) return;
    const int target = head.to()[own];
    if (target < 0 || head.of(plan.group)[target] != own) return;
    Shared s;
    s.sums = reinterpret_cast<int*>(block.shared);
    s.total = reinterpret_cast<float*>(s.sums + kThreads);
    s.factor = s.total + 1, s.share = s.total + 2, s.votes = s.total + 3;
    s.weight = s.total + 4;
    s.member = reinterpret_cast<int*>(s.weight + plan.most + 1);
    const int count = list_members(block, head, s, own, x.leaving, target);
    if (a.policy.merge == KV_MERGE_PAIR) weigh_pair(block, head, x, s);
    block.each([&](int t, auto&) {
      if (t == 0) weigh(head, x, s, count, own);
    });
    T* row = static_cast<T*>(plan.merged) +
             (static_cast<size_t>(head.index) * plan.most + own) * (a.key_size + a.value_size);
    block.each([&](int t, auto&) {
      for (int i = t; i < a.key_size; i += kThreads)
        assign(row[i], a.policy.merge == KV_MERGE_PAIR
                           ? pair_key(head, s, i)
                           : *s.factor * mean(s, count, [&](int slot) { return head.template key<T>(slot)[i]; }));
      for (int i = t; i < a.value_size; i += kThreads)
        assign(row[a.key_size + i], mean(s, count, [&](int slot) { return head.template value<T>(slot)[i]; }));
    });
  }

  // The target, and then all that leave into it.
  static KV_DEVICE int list_members(Block<Join>& block, const MergeHead& head, const Shared& s, int own, int leaving,
                                    int target) {
    const int each = (leaving - own + kThreads - 1) / kThreads;
    const auto last = [&](int t) { return min_of(own + (t + 1) * each, leaving); };
    block.each([&](int t, auto& r) {
      r.count = 0;
      for (int i = own + t * each; i < last(t); ++i) r.count += head.to()[i] == target;
    });
    const int joining = scan(block, s.sums, [](int, auto& r) { return r.count; });
    block.each([&](int t, auto& r) {
      if (t == 0) s.member[0] = target;
      int at = r.scanned + 1;
      for (int i = own + t * each; i < last(t); ++i)
        if (head.to()[i] == target) s.member[at++] = head.rows()[i];
    });
    return joining + 1;
  }

  template <class F>
  static KV_DEVICE float mean(const Shared& s, int count, F element) {
    float sum = 0.0f;
    for (int j = 0; j < count; ++j) sum += s.weight[j] * to_float(element(s.member[j]));
    return sum / *s.total;
  }

  // By one thread: a group has few members. Weights of the mean, votes, statistics, and in whose place the group comes
  // out.
  static KV_DEVICE void weigh(const MergeHead& head, const HeadPlan& x, const Shared& s, int count, int own) {
    const KvMergeCache& a = head.a;
    const KvMergePolicy& p = a.policy;
    int latest = s.member[0];
    for (int j = 1; j < count; ++j) latest = max_of(latest, s.member[j]);
    float votes = 0.0f, factor = 1.0f;
    if (p.merge == KV_MERGE_ZIP) {
      zip(head, x, s, count, &votes, &factor);
    } else {
      for (int j = 0; j < count; ++j) votes += s.weight[j] = head.votes(s.member[j]);
      *s.total = votes;
    }
    *s.factor = factor;
    float* small =
        head.plan.merged_small + (static_cast<size_t>(head.index) * head.plan.most + own) * (1 + a.statistics);
    small[0] = fminf(votes, p.votes_max);
    for (int k = 0; k < a.statistics; ++k) small[1 + k] = joined_score(head, x, s, count, k, latest);
    head.of(head.plan.owner)[latest] = ~own;
  }

  static KV_DEVICE void zip(const MergeHead& head, const HeadPlan& x, const Shared& s, int count, float* votes,
                            float* factor) {
    const KvMergePolicy& p = head.a.policy;
    const auto logit = [&](int j) {
      return corrected_average(head.score(head.a.statistics - 1, s.member[j]), p.weigh_decay, x.now,
                               head.position(s.member[j]));
    };
    ZipSums sums;
    sums.top = logit(0);
    for (int j = 1; j < count; ++j) sums.top = max_of(sums.top, logit(j));
    for (int j = 0; j < count; ++j) s.weight[j] = sums.add(head.votes(s.member[j]), logit(j));
    *s.total = sums.weight;
    *votes = p.zip == KV_ZIP_MEAN ? sums.votes : sums.fractional_votes();
    if (p.zip != KV_ZIP_KEY) return;
    const float found = sums.key_factor(), limit = fminf(p.key_factor_max, 3.4e38f);
    if (found >= 1.0f / limit && found <= limit) *factor = found, *votes = sums.votes;
  }

  // Probability mass adds, of averages of exp(logit) the mean by votes.
  static KV_DEVICE float joined_score(const MergeHead& head, const HeadPlan& x, const Shared& s, int count, int k,
                                      int latest) {
    const KvMergePolicy& p = head.a.policy;
    const auto seen = [&](int slot) { return static_cast<float>(max_of(x.now - head.position(slot) + 1, 1)); };
    if (head.a.statistic_kind[k] == KV_STATISTIC_NONE) return head.score(k, s.member[0]);
    float sum = 0.0f;
    if (head.a.statistic_kind[k] == KV_STATISTIC_PROBABILITY) {
      const bool by_mean = k == 0 && p.mean_adds;
      for (int j = 0; j < count; ++j)
        sum += by_mean ? head.score(k, s.member[j]) / seen(s.member[j]) : head.score(k, s.member[j]);
      return by_mean ? sum * seen(latest) : sum;
    }
    float top = head.score(k, s.member[0]), votes = 0.0f;
    for (int j = 1; j < count; ++j) top = max_of(top, head.score(k, s.member[j]));
    for (int j = 0; j < count; ++j) {
      sum += head.votes(s.member[j]) * expf(head.score(k, s.member[j]) - top);
      votes += head.votes(s.member[j]);
    }
    return top + logf(sum / votes);
  }

  // The younger key's share of a pair's.
  static KV_DEVICE void weigh_pair(Block<Join>& block, const MergeHead& head, const HeadPlan&, const Shared& s) {
    const KvMergePolicy& p = head.a.policy;
    const int size = head.a.value_size, younger = s.member[0], older = s.member[1], k = head.a.statistics - 1;
    float own = head.score(k, younger), arriving = head.score(k, older);
    if (p.weigh == KV_WEIGH_HESSIAN) {
      const float* output = head.plan.attended + static_cast<size_t>(head.index) * (size + 1);
      const auto norm = [&](float a, float b) {
        return sqrtf(sum_of(block, reinterpret_cast<float*>(s.sums), [&](int t, auto&) {
          float total = 0.0f;
          for (int i = t; i < size; i += kThreads) {
            const float x = a * (to_float(head.template value<T>(younger)[i]) - output[i]) +
                            b * (to_float(head.template value<T>(older)[i]) - output[i]);
            total += x * x;
          }
          return total;
        }));
      };
      const float first = norm(1.0f, 0.0f), second = norm(0.0f, 1.0f), both = norm(1.0f, 1.0f), total = output[size];
      hessian_weights(own / total, arriving / total, first, second, both, p.tau, &own, &arriving);
    }
    block.each([&](int t, auto&) {
      if (t == 0) *s.share = own + arriving > 0.0f ? own / (own + arriving) : 0.5f;
    });
  }

  // Element i of a pair's key: the younger's, and the older's turned to the position of the younger.
  static KV_DEVICE float pair_key(const MergeHead& head, const Shared& s, int i) {
    const KvMergeCache& a = head.a;
    const int younger = s.member[0], older = s.member[1], planes = a.rotary_planes;
    const T* key = head.template key<T>(older);
    float turned = to_float(key[i]);
    if (i < 2 * planes) {
      const int plane = a.rotary_interleaved ? i / 2 : i % planes;
      const bool first = a.rotary_interleaved ? i % 2 == 0 : i < planes;
      const int other = a.rotary_interleaved ? i ^ 1 : first ? i + planes : i - planes;
      const float angle =
          static_cast<float>(head.position(younger) - head.position(older)) * a.inverse_frequencies[plane];
      turned = turned * cosf(angle) + (first ? -1.0f : 1.0f) * to_float(key[other]) * sinf(angle);
    }
    return *s.share * to_float(head.template key<T>(younger)[i]) + (1.0f - *s.share) * turned;
  }
};

}  // namespace cuda
}  // namespace kv
