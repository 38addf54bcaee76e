// The operators of docs/reference/contract.md on the device, behind a C ABI: the structs of ../abi/kvexport.h with
// pointers to device memory, a stream, and a workspace.
//
// Calls only enqueue work and allocate nothing, so they can be captured in a CUDA graph. The same input gives the same
// bits: the division of work depends only on the call's sizes and the number of multiprocessors, and partial results
// are combined in a fixed order. Every function returns nullptr, or a static string that says why the call cannot be
// computed, or CUDA's error message.
#pragma once

#include "../abi/kvexport.h"

#ifdef __cplusplus
extern "C" {
#endif

// Where a call runs. The workspace is device memory, aligned to 256 bytes, that no other call in flight uses. Its first
// KV_CUDA_COUNTER_BYTES are counters: zero before the first call that uses them, and zero again after every call. A
// caller that cannot keep a workspace between calls provides memory for the counters elsewhere: an int for each KV head
// of each sequence is enough.
typedef struct KvCuda {
  void* stream;  // a cudaStream_t
  void* workspace;
  size_t workspace_size;
  void* counters;  // or nullptr: those of the workspace
  int begin;       // when launches begin, as below
} KvCuda;

// When the launches of a call begin. KV_CUDA_IN_ORDER: after the end of the launch before them on the stream.
// KV_CUDA_EARLY: while that launch ends; they wait for its end before they read or write memory. The first launch of a
// call begins in order, since another program's launch may end before the launches before it. On a device below
// compute capability 9.0, with a driver before CUDA 12.3, or with KVEXPORT_CUDA_EARLY=0 in the environment all launches
// begin in order.
enum { KV_CUDA_IN_ORDER, KV_CUDA_EARLY };

enum { KV_CUDA_COUNTER_BYTES = 1 << 18, KV_CUDA_MAX_HEADS = 1 << 16 };

// Compute the bytes of workspace that a call needs on any device of up to 512 multiprocessors, without a call of CUDA.
// They read only the sizes and attributes of the call.
const char* kv_cuda_vote_attention_workspace(const KvVoteAttention* call, size_t* bytes);
const char* kv_cuda_merge_cache_workspace(const KvMergeCache* call, size_t* bytes);

// Return why this device or the kernels have no room for calls of these sizes, before any call runs; nullptr if they
// have room, or if there is no device. They read only the sizes and attributes of the call.
const char* kv_cuda_vote_attention_problem(const KvVoteAttention* call);
const char* kv_cuda_merge_cache_problem(const KvMergeCache* call);

// All pointers of a call are device pointers, `inverse_frequencies` too; the lists `capacity`, `budget` and `recent`
// are in the memory of the host. Rows of keys and values are whole 16-byte vectors, at most 256 elements, and their
// tensors are aligned to 16 bytes; a group has at most 16 query heads. A call has as many launches for KV heads of one
// capacity, one budget and as many recent positions as for one head, and otherwise as many for each 32 heads.
const char* kv_cuda_vote_attention(const KvVoteAttention* call, const KvCuda* where);
const char* kv_cuda_merge_cache(const KvMergeCache* call, const KvCuda* where);

// Returns "device", or "host" if the kernels were compiled for tests on the host (core/block.h).
const char* kv_cuda_target(void);

#ifdef __cplusplus
}
#endif
