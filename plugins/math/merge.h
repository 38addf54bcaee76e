// The arithmetic of merge sets, for the host and the device. A merge set is a target and the evicted slots that merge
// into it; these functions compute its votes, weights and key factor (kvexport/methods/primitives/zip.py, pairs.py,
// select.py).
#pragma once

#include "statistic.h"

namespace kv {

// Returns how many queries have seen a slot, at least 1. Any two numbers are valid: benchmarks invent positions.
KV_HD float observations(int now, int position) {
  const int queries = static_cast<int>(static_cast<unsigned>(now) - static_cast<unsigned>(position) + 1u);
  return static_cast<float>(queries > 1 ? queries : 1);
}

// Returns ln(S / (1 - a^n)): the bias-corrected average, where ln(S) is the log_ema score, a the decay, and
// n = now - position + 1 the number of queries that have seen the slot.
KV_HD float corrected_average(float score, float decay, int now, int position) {
  return score - log1pf(-expf(observations(now, position) * logf(decay)));
}

// Sums over a set's members: weights w = p exp(l), w l, and votes p. The logits l are relative to the largest one: in a
// set that no query has seen every logit is -1e30, whose rounding would drown every vote.
struct ZipSums {
  float max_logit = 0.0f, weight = 0.0f, weighted_logit = 0.0f, votes = 0.0f;

  // Adds a member; returns its weight.
  KV_HD float add(float member_votes, float logit) {
    const float l = logit - max_logit, w = member_votes * expf(l);
    weight += w;
    weighted_logit += w * l;
    votes += member_votes;
    return w;
  }
  KV_HD float log_weight() const { return logf(weight); }
  KV_HD float mean_logit() const { return weighted_logit / weight; }
  // The votes p with which the mean key replaces the set at the current query: ln p = ln(sum w) - L, L the mean logit.
  KV_HD float fractional_votes() const { return expf(log_weight() - mean_logit()); }
  // KeepKV's Eq. 7, ln m / L, m the mean of exp(logit): 1 where both agree to rounding (L may be 0), infinite at the
  // pole.
  KV_HD float key_factor() const {
    const float log_mean = log_weight() - logf(votes) + max_logit, l = mean_logit() + max_logit;
    if (fabsf(log_mean - l) <= 1e-6f * fmaxf(fabsf(l), 1.0f)) return 1.0f;
    return l == 0.0f ? INFINITY : log_mean / l;
  }
};

constexpr float kTooFar = 1e30f;  // larger than any merge_error

// Returns the error of merging a slot of this importance into a target: importance^exponent distance. `distance` is the
// product of the squared distances of their keys and of their values (kvexport/methods/primitives/select.py).
KV_HD float merge_error(float importance, float exponent, float distance) {
  const float error = powf(importance > 0.0f ? importance : 0.0f, exponent) * distance;
  return error < 0.1f * kTooFar ? error : 0.1f * kTooFar;
}

// Computes KVSlimmer's weights w1, w2 of a pair's keys. a1, a2: the keys' shares of the attention. norm1, norm2,
// norm_sum: the norms of the residuals v1 - o and v2 - o and of their sum (v a value, o the output). Each weight is a
// difference clamped at 0; where both vanish together (at most tau of the minuends), w1 = a1 and w2 = a2.
KV_HD void hessian_weights(float a1, float a2, float norm1, float norm2, float norm_sum, float tau, float* w1,
                           float* w2) {
  const float c11 = fabsf(a1 * (1.0f - 2.0f * a1)) * norm1, c22 = fabsf(a2 * (1.0f - 2.0f * a2)) * norm2,
              c12 = a1 * a2 * norm_sum;
  *w1 = c11 > c12 ? c11 - c12 : 0.0f;
  *w2 = c22 > c12 ? c22 - c12 : 0.0f;
  if (*w1 + *w2 <= tau * (c11 + c22)) *w1 = a1, *w2 = a2;
}

// Rotates a plane (x, y) of a key by the angle of this cosine and sine: a rotary embedding's move to another place.
KV_HD void turn(float cosine, float sine, float* x, float* y) {
  const float a = *x, b = *y;
  *x = a * cosine - b * sine;
  *y = b * cosine + a * sine;
}

}  // namespace kv
