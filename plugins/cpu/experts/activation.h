// The functions between the two products of an expert.
#pragma once

#include "../../abi/experts.h"
#include "../core/simd.h"

namespace kv {
namespace KV_ISA {

static inline vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }

// Returns the error function; absolute error 1.5e-7 (Abramowitz and Stegun, 7.1.26).
static inline vf error_function(vf x) {
  const vf size = select(x < 0.0f, -x, x), t = 1.0f / (1.0f + 0.3275911f * size);
  vf y = splat(1.061405429f);
  y = y * t - 1.453152027f;
  y = y * t + 1.421413741f;
  y = y * t - 0.284496736f;
  y = y * t + 0.254829592f;
  const vf result = 1.0f - y * t * exp(-size * size);
  return select(x < 0.0f, -result, result);
}

static inline vf activated(const KvExperts& a, vf x) {
  switch (a.activation) {
    case KV_EXPERTS_SILU:
      return x * sigmoid(a.slope * x);
    case KV_EXPERTS_GELU:
      return 0.5f * x * (1.0f + error_function(x * 0.70710678f));
    case KV_EXPERTS_GELU_TANH:  // (1 + tanh(z)) / 2 is sigmoid(2 z)
      return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
    case KV_EXPERTS_RELU:
      return select(x < 0.0f, vf{}, x);
    default:
      return select(x < 0.0f, vf{}, x * x);
  }
}

// Returns the input of the second product; without a gate `up` is not read. A NaN stays NaN.
static inline vf inner_of(const KvExperts& a, vf gate, vf up) {
  if (!a.gate) return activated(a, gate);
  if (a.limit > 0.0f) {
    const vf most = splat(a.limit), least = splat(-a.limit);
    gate = select(gate > most, most, gate);
    up = select(up > most, most, select(up < least, least, up));
  }
  return activated(a, gate) * (up + a.up_offset);
}

// Writes the inputs of the second product for `count` columns of the rows gate and up to `to`.
static inline void inner_row(const KvExperts& a, const float* gate, const float* up, int count, float* to) {
  int i = 0;
  for (; i + W <= count; i += W) store(to + i, inner_of(a, load(gate + i), a.gate ? load(up + i) : vf{}));
  for (; i < count; ++i) to[i] = inner_of(a, splat(gate[i]), splat(a.gate ? up[i] : 0.0f))[0];
}

}  // namespace KV_ISA
}  // namespace kv
