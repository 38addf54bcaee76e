// The operators of docs/contract.md on the device, behind a C ABI: the structs of ../abi/kvexport.h with
// pointers to device memory, a stream, and a workspace.
//
// Calls only enqueue work and allocate nothing, so they can be captured in a CUDA graph. The same input gives the same
// bits: how work is divided depends on batch, heads, slots and the number of multiprocessors alone, and what is divided
// is put together in one order. Every function returns nullptr, or a message that says what cannot be computed (a
// static string) or what CUDA answered.
#pragma once

#include "../abi/kvexport.h"

#ifdef __cplusplus
extern "C" {
#endif

// Where a call runs. The workspace is device memory, aligned to 256 bytes, that no other call in flight uses. Its first
// KV_CUDA_COUNTER_BYTES are counters, zero before the first call that uses them, and zero again after every call; a
// caller that cannot keep a workspace between calls keeps the counters elsewhere.
typedef struct KvCuda {
  void* stream;  // a cudaStream_t
  void* workspace;
  size_t workspace_size;
  void* counters;  // KV_CUDA_COUNTER_BYTES, or nullptr: those of the workspace
  int begin;       // when launches begin, as below
} KvCuda;

// KV_CUDA_EARLY: while the launch before them on the stream ends; they wait for its end before they read or write
// memory. KV_CUDA_EARLY_WEIGHTS: likewise, but a Linear reads its weights, with their scales, zero points and minima,
// before that: for weights that no work on the device writes. Where the device (below compute capability 9.0), the
// driver (before CUDA 12.3) or the environment (KVEXPORT_CUDA_EARLY=0) says otherwise, all begin in order.
enum { KV_CUDA_IN_ORDER, KV_CUDA_EARLY, KV_CUDA_EARLY_WEIGHTS };

enum { KV_CUDA_COUNTER_BYTES = 1 << 18, KV_CUDA_MAX_HEADS = 1 << 16 };

// How large a workspace a call takes on any device of up to 512 multiprocessors; asks CUDA nothing. Of the call only
// sizes and attributes are read.
const char* kv_cuda_vote_attention_workspace(const KvVoteAttention* call, size_t* bytes);
const char* kv_cuda_merge_cache_workspace(const KvMergeCache* call, size_t* bytes);
const char* kv_cuda_linear_workspace(const KvLinear* call, size_t* bytes);

// Why this device, or the kernels, have no room for calls of these sizes, asked before any runs; nullptr where they
// have, and where there is no device to ask. Of the call only sizes and attributes are read.
const char* kv_cuda_vote_attention_problem(const KvVoteAttention* call);
const char* kv_cuda_merge_cache_problem(const KvMergeCache* call);
const char* kv_cuda_linear_problem(const KvLinear* call);

// All pointers of a call are device pointers, `policy.inverse_frequencies` too. Rows of keys and values are whole
// 16-byte vectors, at most 256 elements, and their tensors are aligned to 16 bytes; a group has at most 16 query heads.
const char* kv_cuda_vote_attention(const KvVoteAttention* call, const KvCuda* where);
const char* kv_cuda_merge_cache(const KvMergeCache* call, const KvCuda* where);

// Tensors of a Linear may lie anywhere; those that are aligned to 16 bytes are read faster.
const char* kv_cuda_linear(const KvLinear* call, const KvCuda* where);

// "device", or "host" where the same kernels were compiled for the host to be tested (core/block.h).
const char* kv_cuda_target(void);

#ifdef __cplusplus
}
#endif
