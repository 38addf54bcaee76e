// VoteAttention for one token per sequence or a few, last step: the scores of a split's slots, from its logits and
// weights.
#pragma once

#include "attention.h"

namespace kv {
namespace KV_ISA {
namespace {

template <class K, class V>
struct DecodeScores : Attention<K, V> {
  using Base = Attention<K, V>;
  using Base::a, Base::group, Base::bias;
  using typename Base::Head;

  const int width;  // slots of a split at the most: the columns of its logits and weights

  static int width_of(const KvVoteAttention& a, int splits) {
    return ((a.capacity + splits - 1) / splits + W - 1) / W * W;
  }

  DecodeScores(const KvVoteAttention& call, int splits, size_t part)
      : Base(call, splits, part), width(width_of(call, splits)) {}

  int rows_of(const Head& x) const { return x.n * group; }

  // Scores of a head. share[g]: times this, a split's weights are probabilities. Averages of logits: of one token.
  void decode_scores(const Head& x, int from, int to, const float* logits, const float* weights,
                     const float* share) const {
    static thread_local Scratch<float> scratch;
    for (int k = 0; k < a.statistics; ++k) {
      const KvStatistic& s = a.statistic[k];
      const float* past = x.past_score + static_cast<size_t>(k) * a.capacity;
      float* out = x.score + static_cast<size_t>(k) * a.capacity;
      if (s.kind == KV_STATISTIC_NONE) {
        if (out != past) memcpy(out + from, past + from, (to - from) * sizeof(float));
        continue;
      }
      if (s.kind == KV_STATISTIC_PROBABILITY) {
        const Statistic rule{s.kind, s.decay, s.window, s.recency_weight};
        const int all = rows_of(x), counted = counted_queries(rule, x.n), first = (x.n - counted) * group;
        const float decay = std::pow(s.decay, static_cast<float>(counted));
        float* factor = scratch.reserve(all);
        for (int g = first; g < all; ++g)
          factor[g] =
              share[g] * std::exp(log_query_weight(rule, x.n - 1 - g / group, counted)) / static_cast<float>(group);
        int c = from;
        for (; c + W <= min_of(to, x.used); c += W) {
          vf seen{};
          for (int g = first; g < all; ++g) seen += load(weights + static_cast<size_t>(g) * width + c) * factor[g];
          store(out + c, load(past + c) * decay + seen);
        }
        for (; c < to; ++c) {
          float seen = 0.0f;
          for (int g = first; g < all; ++g) seen += weights[static_cast<size_t>(g) * width + c] * factor[g];
          out[c] = (c < x.used ? past[c] * decay : 0.0f) + seen;
        }
        continue;
      }
      const int count = to - from;
      float* seen = scratch.reserve(count + W);
      bias(x, from, to, x.first, seen);  // tells which slots the window hides
      const float log_share = std::log(1.0f - s.decay) - std::log(static_cast<float>(group)),
                  log_decay = std::log(s.decay);
      int c = from;
      for (; c + W <= to; c += W) {
        vi hidden = load(seen + c - from) == kLogZero;
        vf term = select(hidden, splat(kLogZero), splat(log_share));
        vf start = load(past + c) + log_decay;
        if (c + W > x.used)
          for (int i = 0; i < W; ++i)
            if (c + i >= x.used) start[i] = kLogZero;
        vf highest = start;
        for (int g = 0; g < group; ++g)
          highest = vmax(highest, load(logits + static_cast<size_t>(g) * width + c) + term);
        vf seen_sum = exp(start - highest);
        for (int g = 0; g < group; ++g)
          seen_sum += exp(load(logits + static_cast<size_t>(g) * width + c) + term - highest);
        store(out + c, highest + log(seen_sum));
      }
      for (; c < to; ++c) {
        const float term = seen[c - from] == kLogZero ? kLogZero : log_share;
        const float start = c < x.used ? past[c] + log_decay : kLogZero;
        float highest = start, seen_sum = 0.0f;
        for (int g = 0; g < group; ++g) highest = max_of(highest, logits[static_cast<size_t>(g) * width + c] + term);
        for (int g = 0; g < group; ++g)
          seen_sum += std::exp(logits[static_cast<size_t>(g) * width + c] + term - highest);
        out[c] = highest + std::log(seen_sum + std::exp(start - highest));
      }
    }
  }
};

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
