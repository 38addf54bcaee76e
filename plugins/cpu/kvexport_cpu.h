// The operators of docs/reference/contract.md on the CPU, behind a C ABI: the structs of ../abi/kvexport.h, and a task
// runner that the caller provides.
//
// The functions return nullptr, or a static string that says why the call cannot be computed. They allocate only
// scratch memory, keep no state, and give the same bits for the same input with any number of threads.
#pragma once

#include <stddef.h>

#include "../abi/kvexport.h"

#ifdef __cplusplus
extern "C" {
#endif

// Runs task(data, i) for every i below count, in any order, on any threads; returns when all tasks are done.
typedef void (*KvTask)(void* data, size_t index);
typedef void (*KvParallelFor)(void* context, size_t count, KvTask task, void* data);

typedef struct KvRunner {
  KvParallelFor parallel_for;
  void* context;
} KvRunner;

const char* kv_cpu_vote_attention(const KvVoteAttention* call, KvRunner runner);
// Updates the ring of a method that keeps reference queries, after kv_cpu_vote_attention of the same call.
const char* kv_cpu_keep_queries(const KvVoteAttention* call, const KvRing* ring);
const char* kv_cpu_merge_cache(const KvMergeCache* call, KvRunner runner);
// Merges as kv_cpu_merge_cache, then fits the kept slots to the reference queries.
const char* kv_cpu_merge_and_fit(const KvMergeCache* call, const KvFit* fit, const KvRing* ring, KvRunner runner);
const char* kv_cpu_linear(const KvLinear* call, KvRunner runner);
const char* kv_cpu_experts(const KvExperts* call, KvRunner runner);

// Returns why a packed weight with groups of `group` inputs and rows of `inputs` inputs has no panels, or nullptr.
// Panels are the layout that the kernels read fastest (linear/panels.h); a weight without panels is read in the layout
// of artifacts, more slowly.
const char* kv_cpu_why_no_panels(const KvWeight* weight, int64_t inputs);
size_t kv_cpu_panels_bytes(const KvWeight* weight, int64_t outputs, int64_t inputs);
// Writes the panels of a weight in the layout of artifacts. Panels at an address aligned to 64 bytes are read fastest.
void kv_cpu_repack(const KvWeight* weight, int64_t outputs, int64_t inputs, void* panels);

// Returns the instruction set that runs: "amx", "avx512vnni", "avx512", "avxvnni", "avx2", "i8mm", "dotprod", "neon" or
// "portable"; "" if none does. kv_cpu_problem returns why none runs, as every operator does then; nullptr if one runs.
const char* kv_cpu_isa(void);
const char* kv_cpu_problem(void);

#ifdef __cplusplus
}
#endif
