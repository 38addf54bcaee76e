// The kernels of every instruction set; `dispatch.cpp` chooses one set at the first call.
#pragma once

#include "../kvexport_cpu.h"
#include "../linear/adapters.h"

namespace kv {

#define KV_DECLARE(isa)                                                         \
  namespace isa {                                                               \
  void vote_attention(const KvVoteAttention&, KvRunner);                        \
  void keep_queries(const KvVoteAttention&, const KvRing&);                     \
  void merge_cache(const KvMergeCache&, const KvFit*, const KvRing*, KvRunner); \
  void linear(const KvLinear&, const KvAdapters*, KvRunner);                    \
  void experts(const KvExperts&, KvRunner);                                     \
  }

#if defined(__x86_64__)
namespace avx512vnni {
void linear(const KvLinear&, const KvAdapters*, KvRunner);  // attention and merging run avx512's kernels
void linear_amx(const KvLinear&, const KvAdapters*, KvRunner);
void experts(const KvExperts&, KvRunner);
}  // namespace avx512vnni
namespace avxvnni {
void linear(const KvLinear&, const KvAdapters*, KvRunner);  // attention and merging are avx2's
void experts(const KvExperts&, KvRunner);
}  // namespace avxvnni
KV_DECLARE(avx512)
KV_DECLARE(avx2)
#elif defined(__aarch64__)
namespace dotprod {
void linear(const KvLinear&, const KvAdapters*, KvRunner);  // attention and merging are neon's
void experts(const KvExperts&, KvRunner);
}  // namespace dotprod
namespace i8mm {
void linear(const KvLinear&, const KvAdapters*, KvRunner);  // attention and merging are neon's
void experts(const KvExperts&, KvRunner);
}  // namespace i8mm
KV_DECLARE(neon)
#endif
KV_DECLARE(portable)

#undef KV_DECLARE

}  // namespace kv
