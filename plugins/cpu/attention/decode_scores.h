// The last step of Decode: the scores of a split's slots, from its logits and weights. For each statistic k, slot c:
//
//   none:        score = past score
//   probability: score = past score decay^counted + sum over rows g of weight[g, c] share[g] (weight of g's query)
//   log_ema:     score = ln(exp(past score) decay + sum over rows g of exp(logit[g, c]) (1 - decay) / group)
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

  const int width;  // the most slots of a split: the columns of its logits and weights

  static int width_of(const KvVoteAttention& a, int splits) {
    return ((largest_capacity(a.capacity, a.heads) + splits - 1) / splits + W - 1) / W * W;
  }

  DecodeScores(const KvVoteAttention& call, int splits, size_t partial_size)
      : Base(call, splits, partial_size), width(width_of(call, splits)) {}

  int rows_of(const Head& x) const { return x.n * group; }

  // Writes the scores of slots [from, to). share[g]: the factor that makes row g's weights in this split probabilities.
  // A log_ema needs a call of one token.
  void decode_scores(const Head& x, int from, int to, const float* logits, const float* weights,
                     const float* share) const {
    static thread_local Scratch<float> scratch;
    for (int k = 0; k < a.statistics; ++k) {
      const KvStatistic& s = a.statistic[k];
      const float* past = this->score_of(x.past_score, k);
      float* out = this->score_of(x.score, k);
      if (s.kind == KV_STATISTIC_NONE) {
        if (out != past) memcpy(out + from, past + from, (to - from) * sizeof(float));
        continue;
      }
      if (s.kind == KV_STATISTIC_PROBABILITY) {
        const int all = rows_of(x), counted = counted_queries(s, x.n), first = (x.n - counted) * group;
        const float decay = std::pow(s.decay, static_cast<float>(counted));
        float* factor = scratch.reserve(all);
        for (int g = first; g < all; ++g)
          factor[g] =
              share[g] * std::exp(log_query_weight(s, x.n - 1 - g / group, counted)) / static_cast<float>(group);
        int c = from;
        for (; c + W <= min_of(to, x.used); c += W) {
          vf received{};
          for (int g = first; g < all; ++g) received += load(weights + static_cast<size_t>(g) * width + c) * factor[g];
          store(out + c, load(past + c) * decay + received);
        }
        for (; c < to; ++c) {
          float received = 0.0f;
          for (int g = first; g < all; ++g) received += weights[static_cast<size_t>(g) * width + c] * factor[g];
          out[c] = (c < x.used ? past[c] * decay : 0.0f) + received;
        }
        continue;
      }
      const int count = to - from;
      float* slot_bias = scratch.reserve(count + W);
      bias(x, from, to, x.first, slot_bias);  // kLogZero in the slots that the window hides
      const float log_share = std::log(1.0f - s.decay) - std::log(static_cast<float>(group)),
                  log_decay = std::log(s.decay);
      int c = from;
      for (; c + W <= to; c += W) {
        vi hidden = load(slot_bias + c - from) == kLogZero;
        vf term = select(hidden, splat(kLogZero), splat(log_share));
        vf start = load(past + c) + log_decay;
        if (c + W > x.used)
          for (int i = 0; i < W; ++i)
            if (c + i >= x.used) start[i] = kLogZero;
        vf highest = start;
        for (int g = 0; g < group; ++g)
          highest = vmax(highest, load(logits + static_cast<size_t>(g) * width + c) + term);
        vf exp_sum = exp(start - highest);
        for (int g = 0; g < group; ++g)
          exp_sum += exp(load(logits + static_cast<size_t>(g) * width + c) + term - highest);
        store(out + c, highest + log(exp_sum));
      }
      for (; c < to; ++c) {
        const float term = slot_bias[c - from] == kLogZero ? kLogZero : log_share;
        const float start = c < x.used ? past[c] + log_decay : kLogZero;
        float highest = start, exp_sum = 0.0f;
        for (int g = 0; g < group; ++g) highest = max_of(highest, logits[static_cast<size_t>(g) * width + c] + term);
        for (int g = 0; g < group; ++g)
          exp_sum += std::exp(logits[static_cast<size_t>(g) * width + c] + term - highest);
        out[c] = highest + std::log(exp_sum + std::exp(start - highest));
      }
    }
  }
};

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
