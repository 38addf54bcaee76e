// The arguments of LinearAttention: attention whose memory is one matrix for each head (docs/reference/contract.md,
// section 3).
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// For each sequence, head h and token t below the sequence's length, with the state S [key_size, value_size] of the
// head, row q of query head h / (heads / key_heads), and row k of the key head of that number:
//
//   S   = exp(decay_t) S            decay: a number for the head, or one for each channel of its key
//   v'  = beta_t (v_t - k_t S)      without beta: v' = v_t
//   S   = S + k_t^T v'
//   out = scale q_t S
//
// Outputs of the tokens after a sequence's length are 0. past and present may be one buffer.
typedef struct KvLinearAttention {
  int64_t batch, tokens;
  int heads, key_heads, key_size, value_size;
  int by_channel;  // the decay has key_size numbers for a head, not 1
  float scale;
  const float* query;     // [batch, tokens, key_heads key_size]
  const float* key;       // [batch, tokens, key_heads key_size]
  const float* value;     // [batch, tokens, heads value_size]
  const float* decay;     // [batch, tokens, heads, 1 or key_size], or nullptr
  const float* beta;      // [batch, tokens, heads], or nullptr
  const int64_t* length;  // [batch]
  const float* past;      // [batch, heads, key_size, value_size]
  float* present;         // like past
  float* output;          // [batch, tokens, heads value_size]
} KvLinearAttention;

#ifdef __cplusplus
}
#endif
