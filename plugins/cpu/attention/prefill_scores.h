// The last step of Prefill: the scores of a KV head with n new tokens. One task per head, after the tasks of all its
// splits. For each statistic, for each slot:
//
//   add up the splits of the head's rows, in their order: slot_max and slot_sum of a log_ema, slot_sum of probabilities
//   probability: score = past score decay^counted + sum                 counted: the queries of the call that count
//   log_ema:     score = ln(exp(past score) decay^n + sum standing)
//                standing: 1 if all queries count alike; otherwise the total weight of the queries that see the slot,
//                divided by the total weight of those of them that count
#pragma once

#include "attention.h"

namespace kv {
namespace KV_ISA {
namespace {

template <class K, class V>
struct PrefillScores : Attention<K, V> {
  using Base = Attention<K, V>;
  using Base::a, Base::splits, Base::slot_position;
  using Base::Base;
  using typename Base::Head;

  // The standing of a windowed or recency-weighted log_ema: cumulative weights over the queries [0, t), of all queries
  // and of those that count.
  struct Standing {
    Scratch<float> whole_, counted_;
    Standing(const KvStatistic& s, int n) {
      float *whole = whole_.reserve(n + 1, 0.0f), *counted = counted_.reserve(n + 1, 0.0f);
      for (int t = 0; t < n; ++t) {
        whole[t + 1] = whole[t] + std::pow(s.decay, static_cast<float>(n - 1 - t));
        counted[t + 1] = counted[t] + std::exp(log_query_weight(s, n - 1 - t, counted_queries(s, n)));
      }
    }
    // Returns ln(standing) of a slot that the queries [from, to) see.
    float log_ratio(int from, int to) const {
      const float *whole = whole_.get(), *counted = counted_.get(), least = 1e-30f;
      return std::log(max_of(whole[to] - whole[from], least)) - std::log(max_of(counted[to] - counted[from], least));
    }
  };

  // Combines the columns of a head's splits in their order and writes its scores. columns [splits][K, 2, stride].
  void combine_splits(const Head& x, const float* columns, size_t stride) const {
    for (int k = 0; k < a.statistics; ++k) {
      const KvStatistic& s = a.statistic[k];
      const float* past = this->score_of(x.past_score, k);
      const float* column = columns + 2 * k * stride;
      const size_t next = 2 * a.statistics * stride;  // the same column of the next split
      float* out = this->score_of(x.score, k);
      if (s.kind == KV_STATISTIC_NONE) {
        if (out != past) memcpy(out, past, x.end() * sizeof(float));
      } else if (s.kind == KV_STATISTIC_PROBABILITY) {
        const float decay = std::exp(static_cast<float>(counted_queries(s, x.n)) * std::log(s.decay));
        for (int c = 0; c < x.end(); ++c) {
          float received = 0.0f;
          for (int i = 0; i < splits; ++i) received += column[i * next + stride + c];
          out[c] = (c < x.used ? past[c] * decay : 0.0f) + received;
        }
      } else {
        const float log_decay = static_cast<float>(x.n) * std::log(s.decay);
        const bool unequal = s.window != 0 || s.recency_weight != 1.0f;  // queries do not count alike
        const Standing standing(s, unequal ? x.n : 0);
        for (int c = 0; c < x.end(); ++c) {
          const float start = c < x.used ? past[c] + log_decay : kLogZero;
          float shift = 0.0f;
          if (unequal) {
            // Queries [age, end) see the slot: none if its position is after all of them.
            const int64_t age = slot_position(x, c) - x.first, end = a.sliding_window ? age + a.sliding_window : x.n;
            const auto within = [&](int64_t t, int least) {
              return static_cast<int>(t < least ? least : t > x.n ? x.n : t);
            };
            const int from = within(age, 0);
            shift = standing.log_ratio(from, within(end, from));
          }
          float highest = start, sum = 0.0f;
          for (int i = 0; i < splits; ++i) highest = max_of(highest, column[i * next + c] + shift);
          for (int i = 0; i < splits; ++i)
            sum += column[i * next + stride + c] * std::exp(column[i * next + c] + shift - highest);
          out[c] = highest + std::log(sum + std::exp(start - highest));
        }
      }
    }
  }
};

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
