// The arguments of Experts: the chosen experts of every token, computed and summed (docs/reference/contract.md,
// section 3).
#pragma once

#include "linear.h"

#ifdef __cplusplus
extern "C" {
#endif

// The activation: of the gate, or of the first product if experts have no gate.
enum { KV_EXPERTS_SILU = 0, KV_EXPERTS_GELU, KV_EXPERTS_GELU_TANH, KV_EXPERTS_RELU, KV_EXPERTS_RELU_SQUARED };

// For each token t and each of its chosen experts e, in float32:
//
//   first = W_first[e] x + b_first[e]        with a gate: `inner` rows of the gate, then `inner` rows of the ups
//   z     = activation(gate) (up + up_offset), gates clamped to at most `limit`, ups to [-limit, limit]; or
//           activation(first) without a gate
//   y    += weight[t, e] (W_down[e] z + b_down[e]), in the order of the experts' numbers
//
// A packed weight has the rows of all experts, one after another. In panels (KV_PANELS) each of its matrices has panels
// of its own, one matrix after another: for each expert [inner, hidden] of the gate and of the ups, or [hidden, inner].
typedef struct KvExperts {
  int type;          // input, output, biases, and weights that are not packed: float32 or float16
  int weights_type;  // the factors of the chosen experts, likewise
  int float_input;   // as in KvLinear
  int activation, gate;
  float slope, limit, up_offset;  // silu(x) = x sigmoid(slope x); limit 0: nothing is clamped
  int64_t tokens, hidden, inner, experts, chosen;
  const void* input;       // [tokens, hidden]
  const int64_t* indices;  // [tokens, chosen]; numbers without an expert are skipped
  const void* weights;     // [tokens, chosen]
  KvWeight first;          // [experts, inner or 2 inner, hidden]
  const void* first_bias;  // [experts, inner or 2 inner], or nullptr
  KvWeight down;           // [experts, hidden, inner]
  const void* down_bias;   // [experts, hidden], or nullptr
  void* output;            // [tokens, hidden]
} KvExperts;

// Returns whether every matrix [outputs, inputs] of a packed weight at rest begins with a whole byte.
static inline int kv_has_matrices(const KvWeight* weight, int64_t outputs, int64_t inputs) {
  return weight->bits != 4 || !weight->zero || outputs * (inputs / weight->group) % 2 == 0;
}

// Returns matrix i of a packed weight at rest that has several matrices [outputs, inputs], one after another.
static inline KvWeight kv_matrix_of(const KvWeight* weight, int64_t outputs, int64_t inputs, int64_t i) {
  const int64_t groups = i * outputs * (inputs / weight->group);
  KvWeight one = *weight;
  one.data = (const char*)weight->data + i * outputs * inputs * kv_low_bits(weight) / 8;
  one.scale = (const char*)weight->scale + groups * kv_scale_bits(weight->scale_type) / 8;
  if (weight->zero) one.zero = (const char*)weight->zero + groups * weight->bits / 8;
  if (weight->minimum) one.minimum = (const char*)weight->minimum + groups * kv_scale_bits(weight->minimum_type) / 8;
  if (weight->high) one.high = (const char*)weight->high + i * outputs * inputs * kv_high_bits(weight) / 8;
  const int64_t supers = i * outputs * (inputs / KV_SUPER) * 2;
  if (weight->super_scale) one.super_scale = (const char*)weight->super_scale + supers;
  if (weight->super_minimum) one.super_minimum = (const char*)weight->super_minimum + supers;
  return one;
}

#ifdef __cplusplus
}
#endif
