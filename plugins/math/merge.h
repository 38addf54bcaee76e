// The arithmetic of merge sets, a target and the evicted slots that merge into it, on the host and on the device:
// votes, weights and key factor of a set (kvexport/methods/primitives/zip.py, pairs.py, select.py).
#pragma once

#include "statistic.h"

namespace kv {

// How many queries have seen a slot, at least one; of any two numbers, since benchmarks make up positions.
KV_HD float observations(int now, int position) {
  const int seen = static_cast<int>(static_cast<unsigned>(now) - static_cast<unsigned>(position) + 1u);
  return static_cast<float>(seen > 1 ? seen : 1);
}

// ln(S / (1 - a^n)) of a log_ema S whose slot n = now - position + 1 queries have seen.
KV_HD float corrected_average(float score, float decay, int now, int position) {
  return score - log1pf(-expf(observations(now, position) * logf(decay)));
}

// Sums over a set's members, with logits l relative to the largest (those of a set that no query has seen are -1e30,
// whose rounding would drown every vote): weights w = p exp(l), w l, and votes p.
struct ZipSums {
  float max_logit = 0.0f, weight = 0.0f, weighted_logit = 0.0f, votes = 0.0f;

  // Adds a member and returns its weight.
  KV_HD float add(float member_votes, float logit) {
    const float l = logit - max_logit, w = member_votes * expf(l);
    weight += w;
    weighted_logit += w * l;
    votes += member_votes;
    return w;
  }
  KV_HD float log_weight() const { return logf(weight); }
  KV_HD float mean_logit() const { return weighted_logit / weight; }
  // Votes with which the mean key stands for the set at the current query: ln p = ln(sum w) - L.
  KV_HD float fractional_votes() const { return expf(log_weight() - mean_logit()); }
  // KeepKV's Eq. 7, ln m / L; 1 where both agree to rounding (L may be 0 there), infinite at the pole.
  KV_HD float key_factor() const {
    const float log_mean = log_weight() - logf(votes) + max_logit, l = mean_logit() + max_logit;
    if (fabsf(log_mean - l) <= 1e-6f * fmaxf(fabsf(l), 1.0f)) return 1.0f;
    return l == 0.0f ? INFINITY : log_mean / l;
  }
};

constexpr float kTooFar = 1e30f;  // no error is as large

// The error of merging a slot of this importance into a target: importance^exponent distance, the product of the
// squared distances of their keys and of their values (kvexport/methods/primitives/select.py).
KV_HD float merge_error(float importance, float exponent, float distance) {
  const float error = powf(importance > 0.0f ? importance : 0.0f, exponent) * distance;
  return error < 0.1f * kTooFar ? error : 0.1f * kTooFar;
}

// KVSlimmer's weights of a pair's keys out of shares a1, a2 of the attention and the norms of the residuals v1 - o, v2
// - o and of their sum; both brackets clamped at 0, a1 and a2 where they vanish together.
KV_HD void hessian_weights(float a1, float a2, float norm1, float norm2, float norm_sum, float tau, float* w1,
                           float* w2) {
  const float c11 = fabsf(a1 * (1.0f - 2.0f * a1)) * norm1, c22 = fabsf(a2 * (1.0f - 2.0f * a2)) * norm2,
              c12 = a1 * a2 * norm_sum;
  *w1 = c11 > c12 ? c11 - c12 : 0.0f;
  *w2 = c22 > c12 ? c22 - c12 : 0.0f;
  if (*w1 + *w2 <= tau * (c11 + c22)) *w1 = a1, *w2 = a2;
}

// A plane (x, y) of a key turned by this angle, as it is so many places later.
KV_HD void turn(float cosine, float sine, float* x, float* y) {
  const float a = *x, b = *y;
  *x = a * cosine - b * sine;
  *y = b * cosine + a * sine;
}

}  // namespace kv
