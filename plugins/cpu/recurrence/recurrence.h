// LinearAttention on the CPU: its arguments, its function behind the C ABI, and its kernel of every instruction set.
#pragma once

#include "../kvexport_cpu.h"

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

const char* kv_cpu_linear_attention(const KvLinearAttention* call, KvRunner runner);

#ifdef __cplusplus
}

namespace kv {

#define KV_DECLARE(isa)                                      \
  namespace isa {                                            \
  void linear_attention(const KvLinearAttention&, KvRunner); \
  }
#if defined(__x86_64__)
KV_DECLARE(avx512)
KV_DECLARE(avx2)
#elif defined(__aarch64__)
KV_DECLARE(neon)
#endif
KV_DECLARE(portable)
#undef KV_DECLARE

}  // namespace kv
#endif
