// The operators of docs/contract.md on the CPU, behind a C ABI: the structs of ../abi/kvexport.h, and a task runner of
// the caller's.
//
// The functions return nullptr, or a message that says what cannot be computed (a static string). They allocate no
// more than scratch, keep no state, and give the same bits for the same input whatever the number of threads.
#pragma once

#include "../abi/kvexport.h"

#ifdef __cplusplus
extern "C" {
#endif

// Runs task(data, i) for every i below count, in any order, on any threads, and returns when all are done.
typedef void (*KvTask)(void* data, size_t index);
typedef void (*KvParallelFor)(void* context, size_t count, KvTask task, void* data);

typedef struct KvRunner {
  KvParallelFor parallel_for;
  void* context;
} KvRunner;

const char* kv_cpu_vote_attention(const KvVoteAttention* call, KvRunner runner);
// Of a method that keeps reference queries: their ring after the call, which has been computed.
const char* kv_cpu_keep_queries(const KvVoteAttention* call, const KvRing* ring);
const char* kv_cpu_merge_cache(const KvMergeCache* call, KvRunner runner);
// ... whose policy has a fit.
const char* kv_cpu_merge_and_fit(const KvMergeCache* call, const KvFit* fit, const KvRing* ring, KvRunner runner);
const char* kv_cpu_linear(const KvLinear* call, KvRunner runner);

// The instruction set that runs: "amx", "avx512vnni", "avx512", "avx2", "neon" or "portable".
const char* kv_cpu_isa(void);

#ifdef __cplusplus
}
#endif
