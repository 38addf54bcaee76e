// LinearAttention on the CPU: its function behind the C ABI, and its kernel of every instruction set.
#pragma once

#include "../../abi/linear_attention.h"
#include "../kvexport_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

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
