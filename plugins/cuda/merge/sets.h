// MergeCache: the merge sets (a target and all evicted slots that merge into it), and the row of each set.
//
//   FormSets, a block per head
//     target[evicted] = the younger neighbour, or the nearest slot if it is nearer than the threshold; -1: dropped
//     ... the nearest among the upper slots and the rest; a tie goes to the first
//     set[target] = its first evicted slot; before[evicted] = how many of its set are before it
//   Attended, a block per head, for a Hessian: output = sum of value times its share of the accumulated probabilities
//   MergeRows, some blocks per head, which take turns at the evicted slots that are the first of their set
//     list the members: the target, then the evicted slots in order
//     weight[member] = votes, times exp(logit) for a zip; for a pair the younger key's share
//                      (one thread, except logits)
//     key, value = weighted mean; for a pair the older key is rotated to the younger's place
//                      (an element per thread)
//     latest[set] = the latest member, whose position the row gets
//
// A barrier separates the list, the weights and the means. Rows are read from the cache and written to the workspace,
// so that no set reads a row that another set has merged.
#pragma once

#include "work.h"

namespace kv {
namespace cuda {

// Finds the target of every evicted slot, and the merge sets.
struct FormSets {
  using Args = MergeWork;
  static constexpr int kThreads = 256, kBlocksPerMultiprocessor = 1;
  struct Registers {};

  static KV_DEVICE void run(Block<FormSets>& block, const MergeWork& work) {
    const MergeHead head(work, block.index());
    const KvMergePolicy& p = work.call.policy;
    const HeadInfo x = head.info();
    int* set = head.of(work.set);
    block.each([&](int t, auto&) {
      for (int i = t; i < x.used; i += kThreads) set[i] = kNone;
    });
    if (x.over == 0) return;
    block.each([&](int t, auto&) {
      for (int i = t; i < x.evicted; i += kThreads) {
        int target = -1;
        const int slot = head.rows()[i];
        if (p.merge == KV_MERGE_PAIR) {
          if (is_older(x, slot) && head.of(work.mark)[slot + 1] != kEvicted) target = slot + 1;
        } else {
          float near = nearest_of(head, i, x.evicted, &target);
          // If protected slots are evicted too, the first search did not compare these, and upper slots do not count.
          if (work.upper && x.over <= x.unprotected_count) {
            const int upper = head.of(work.upper)[slot];
            const float upper_near = head.of(work.upper_nearness)[slot];
            if (upper_near > near || (upper_near == near && upper < target)) near = upper_near, target = upper;
          }
          if (!(near > p.threshold)) target = -1;
        }
        head.targets()[i] = target;
        if (target >= 0) block.lower(&set[target], i);
      }
    });
    block.each([&](int t, auto&) {
      for (int i = t; i < x.evicted; i += kThreads) {
        const int target = head.targets()[i];
        int before = 0;
        for (int j = target >= 0 ? set[target] : i; j < i; ++j) before += head.targets()[j] == target;
        head.before_in_set()[i] = before;
      }
    });
  }
};

// For KVSlimmer: the attention output o = sum a v, a the slots' shares of the accumulated probabilities, and the sum of
// these probabilities.
template <class T>
struct Attended {
  using Args = MergeWork;
  static constexpr int kThreads = 256, kBlocksPerMultiprocessor = 1;
  struct Registers {};
  static KV_HD constexpr size_t size() { return kThreads * sizeof(float); }

  static KV_DEVICE void run(Block<Attended>& block, const MergeWork& work) {
    const MergeHead head(work, block.index());
    const HeadInfo x = head.info();
    if (x.over == 0) return;
    const int size = work.call.value_size, rows = kThreads / size, k = work.call.statistics - 1;
    float* sums = reinterpret_cast<float*>(block.shared);
    const float total = sum_of(block, sums, [&](int t, auto&) {
      float sum = 0.0f;
      for (int i = t; i < x.used; i += kThreads) sum += head.score(k, i);
      return sum;
    });
    const float mass = fmaxf(total, 1e-30f);
    block.each([&](int t, auto&) {
      float sum = 0.0f;
      for (int i = t / size; t / size < rows && i < x.used; i += rows)
        sum += head.score(k, i) / mass * to_float(head.template value<T>(i)[t % size]);
      sums[t] = sum;
    });
    float* attended = work.attended + static_cast<size_t>(head.index) * (size + 1);
    block.each([&](int t, auto&) {
      if (t == 0) attended[size] = mass;
      if (t >= size) return;
      float sum = 0.0f;
      for (int row = 0; row < rows; ++row) sum += sums[row * size + t];
      attended[t] = sum;
    });
  }
};

// Computes every set's key and value, votes and statistics.
template <class T>
struct MergeRows {
  using Args = MergeWork;
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 8;
  struct Registers {};
  // Bytes of shared memory: sums over the threads, results of one thread, and the members and their weights.
  static KV_HD constexpr size_t size(int most) {
    return (kThreads + 4 + 2 * (static_cast<size_t>(most) + 1)) * sizeof(float);
  }
  struct Shared {
    int *count, *member;
    float *sums, *weight, *weight_sum, *factor, *share;
  };

  static KV_DEVICE void run(Block<MergeRows>& block, const MergeWork& work) {
    const MergeHead head(work, block.index() / work.set_blocks);
    const HeadInfo x = head.info();
    if (x.over == 0) return;
    Shared s;
    s.sums = reinterpret_cast<float*>(block.shared);
    s.weight_sum = s.sums + kThreads;
    s.factor = s.weight_sum + 1, s.share = s.weight_sum + 2, s.count = reinterpret_cast<int*>(s.weight_sum + 3);
    s.weight = s.weight_sum + 4;
    s.member = reinterpret_cast<int*>(s.weight + work.most_evicted + 1);
    for (int set = block.index() % work.set_blocks; set < x.evicted; set += work.set_blocks) {
      const int target = head.targets()[set];
      if (target >= 0 && head.of(work.set)[target] == set) merge_set(block, head, x, s, set, target);
    }
  }

  // Computes the row of a set. Ends with a barrier: shared memory may be written again.
  static KV_DEVICE void merge_set(Block<MergeRows>& block, const MergeHead& head, const HeadInfo& x, const Shared& s,
                                  int set, int target) {
    const MergeWork& work = head.work;
    const KvMergeCache& a = head.a;
    const int count = list_members(block, head, s, set, x.evicted, target);
    if (a.policy.merge == KV_MERGE_PAIR) weigh_pair(block, head, x, s);
    if (a.policy.merge == KV_MERGE_ZIP)
      block.each([&](int t, auto&) {
        for (int j = t; j < count; j += kThreads)
          s.weight[j] = corrected_average(head.score(a.statistics - 1, s.member[j]), a.policy.weigh_decay, x.now,
                                          head.position(s.member[j]));
      });
    block.each([&](int t, auto&) {
      if (t == 0) weigh(head, x, s, count, set);
    });
    T* row = static_cast<T*>(work.merged) +
             (static_cast<size_t>(head.index) * work.most_evicted + set) * (a.key_size + a.value_size);
    block.each([&](int t, auto&) {
      for (int i = t; i < a.key_size; i += kThreads)
        assign(row[i], a.policy.merge == KV_MERGE_PAIR
                           ? pair_key(head, s, i)
                           : *s.factor * mean(s, count, [&](int slot) { return head.template key<T>(slot)[i]; }));
      for (int i = t; i < a.value_size; i += kThreads)
        assign(row[a.key_size + i], mean(s, count, [&](int slot) { return head.template value<T>(slot)[i]; }));
    });
  }

  // Lists the target, and then the evicted slots that merge into it; returns their number.
  static KV_DEVICE int list_members(Block<MergeRows>& block, const MergeHead& head, const Shared& s, int set,
                                    int evicted, int target) {
    block.each([&](int t, auto&) {
      if (t == 0) *s.count = 1, s.member[0] = target;
    });
    block.each([&](int t, auto&) {
      for (int i = set + t; i < evicted; i += kThreads) {
        if (head.targets()[i] != target) continue;
        s.member[1 + head.before_in_set()[i]] = head.rows()[i];
        block.add(s.count, 1);
      }
    });
    return *s.count;
  }

  template <class F>
  static KV_DEVICE float mean(const Shared& s, int count, F element) {
    float sum = 0.0f;
    for (int j = 0; j < count; ++j) sum += s.weight[j] * to_float(element(s.member[j]));
    return sum / *s.weight_sum;
  }

  // Run by one thread, since a set has few members: weights of the mean, votes, statistics, and the latest member.
  static KV_DEVICE void weigh(const MergeHead& head, const HeadInfo& x, const Shared& s, int count, int set) {
    const KvMergeCache& a = head.a;
    const KvMergePolicy& p = a.policy;
    int latest = s.member[0];
    for (int j = 1; j < count; ++j) latest = max_of(latest, s.member[j]);
    float votes = 0.0f, factor = 1.0f;
    if (p.merge == KV_MERGE_ZIP) {
      zip(head, s, count, &votes, &factor);
    } else {
      for (int j = 0; j < count; ++j) votes += s.weight[j] = head.votes(s.member[j]);
      *s.weight_sum = votes;
    }
    *s.factor = factor;
    const size_t number = static_cast<size_t>(head.index) * head.work.most_evicted + set;
    float* numbers = head.work.merged_numbers + number * (1 + a.statistics);
    numbers[0] = fminf(votes, p.votes_max);
    for (int k = 0; k < a.statistics; ++k) numbers[1 + k] = merged_score(head, x, s, count, k, latest);
    head.work.latest[number] = latest, head.work.merged_position[number] = head.position(latest);
  }

  // Computes the weights of a zip, its votes and key factor. On entry, weights are the members' logits.
  static KV_DEVICE void zip(const MergeHead& head, const Shared& s, int count, float* votes, float* factor) {
    const KvMergePolicy& p = head.a.policy;
    ZipSums sums;
    sums.max_logit = s.weight[0];
    for (int j = 1; j < count; ++j) sums.max_logit = max_of(sums.max_logit, s.weight[j]);
    for (int j = 0; j < count; ++j) s.weight[j] = sums.add(head.votes(s.member[j]), s.weight[j]);
    *s.weight_sum = sums.weight;
    *votes = p.zip == KV_ZIP_MEAN ? sums.votes : sums.fractional_votes();
    if (p.zip != KV_ZIP_KEY) return;
    const float key_factor = sums.key_factor(), limit = fminf(p.key_factor_max, 3.4e38f);
    if (key_factor >= 1.0f / limit && key_factor <= limit) *factor = key_factor, *votes = sums.votes;
  }

  // Returns statistic k of a set: the sum of probabilities, or the mean of exp(logit) averages weighted by votes.
  static KV_DEVICE float merged_score(const MergeHead& head, const HeadInfo& x, const Shared& s, int count, int k,
                                      int latest) {
    const KvMergePolicy& p = head.a.policy;
    const auto queries = [&](int slot) { return observations(x.now, head.position(slot)); };
    if (head.a.statistic_kind[k] == KV_STATISTIC_NONE) return head.score(k, s.member[0]);
    float sum = 0.0f;
    if (head.a.statistic_kind[k] == KV_STATISTIC_PROBABILITY) {
      const bool by_mean = k == 0 && p.mean_adds;
      for (int j = 0; j < count; ++j)
        sum += by_mean ? head.score(k, s.member[j]) / queries(s.member[j]) : head.score(k, s.member[j]);
      return by_mean ? sum * queries(latest) : sum;
    }
    float max_score = head.score(k, s.member[0]), votes = 0.0f;
    for (int j = 1; j < count; ++j) max_score = max_of(max_score, head.score(k, s.member[j]));
    for (int j = 0; j < count; ++j) {
      sum += head.votes(s.member[j]) * expf(head.score(k, s.member[j]) - max_score);
      votes += head.votes(s.member[j]);
    }
    return max_score + logf(sum / votes);
  }

  // Computes the younger key's share of a pair's key.
  static KV_DEVICE void weigh_pair(Block<MergeRows>& block, const MergeHead& head, const HeadInfo&, const Shared& s) {
    const KvMergePolicy& p = head.a.policy;
    const int size = head.a.value_size, younger = s.member[0], older = s.member[1], k = head.a.statistics - 1;
    float younger_weight = head.score(k, younger), older_weight = head.score(k, older);
    if (p.weigh == KV_WEIGH_HESSIAN) {
      const float* output = head.work.attended + static_cast<size_t>(head.index) * (size + 1);
      const auto norm = [&](float a, float b) {
        return sqrtf(sum_of(block, s.sums, [&](int t, auto&) {
          float sum = 0.0f;
          for (int i = t; i < size; i += kThreads) {
            const float x = a * (to_float(head.template value<T>(younger)[i]) - output[i]) +
                            b * (to_float(head.template value<T>(older)[i]) - output[i]);
            sum += x * x;
          }
          return sum;
        }));
      };
      const float first = norm(1.0f, 0.0f), second = norm(0.0f, 1.0f), both = norm(1.0f, 1.0f), mass = output[size];
      hessian_weights(younger_weight / mass, older_weight / mass, first, second, both, p.tau, &younger_weight,
                      &older_weight);
    }
    block.each([&](int t, auto&) {
      if (t == 0)
        *s.share = younger_weight + older_weight > 0.0f ? younger_weight / (younger_weight + older_weight) : 0.5f;
    });
  }

  // Returns element i of a pair's key: the weighted mean of the younger key and the older one, rotated to its place.
  static KV_DEVICE float pair_key(const MergeHead& head, const Shared& s, int i) {
    const KvMergeCache& a = head.a;
    const int younger = s.member[0], older = s.member[1], planes = a.rotary_planes;
    const T* key = head.template key<T>(older);
    float rotated = to_float(key[i]);
    if (i < 2 * planes) {
      const int plane = a.rotary_interleaved ? i / 2 : i % planes;
      const bool first = a.rotary_interleaved ? i % 2 == 0 : i < planes;
      const int other = a.rotary_interleaved ? i ^ 1 : first ? i + planes : i - planes;
      const int steps = a.cache_positions ? younger - older : head.position(younger) - head.position(older);
      const float angle = static_cast<float>(steps) * a.inverse_frequencies[plane];
      rotated = rotated * cosf(angle) + (first ? -1.0f : 1.0f) * to_float(key[other]) * sinf(angle);
    }
    return *s.share * to_float(head.template key<T>(younger)[i]) + (1.0f - *s.share) * rotated;
  }
};

}  // namespace cuda
}  // namespace kv
