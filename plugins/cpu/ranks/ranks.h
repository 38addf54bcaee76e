// Ranks: processes that compute one model together, each with a share of its heads, and add up what they made
// (docs/tensor-parallel.md). They share memory that begins as zeros and is laid out here alone.
//
// A sum of `count` numbers goes in pieces. For each one a rank writes its part into a buffer of its own, says so by a
// number that grows, waits until every rank has said so, and adds up the parts in the order of the ranks, in float32,
// rounded once: all ranks get the same bits, whoever was first. Of two buffers the pieces take turns. A rank writes
// into one of them again when all ranks have said the piece between, which they do after they have read this one.
#pragma once

#include "../../abi/kvexport.h"

#ifdef __cplusplus
extern "C" {
#endif

// One rank's view. memory: of kv_cpu_ranks_bytes(count) bytes, shared; null: no rank.
typedef struct KvRanks {
  void* memory;
  int rank, count;
} KvRanks;

// Bytes of the memory of so many ranks; 0 where there cannot be as many.
size_t kv_cpu_ranks_bytes(int count);

// sum = the parts of all ranks. type: KV_FLOAT32 or KV_FLOAT16. Every rank makes the same calls in the same order.
// nullptr, or why there is no sum: a static string. Then no rank gets a sum ever again.
const char* kv_cpu_all_reduce(const KvRanks* ranks, int type, const void* part, void* sum, size_t count);

// From now on every sum fails, those that are waited for too.
void kv_cpu_ranks_fail(void* memory);

#ifdef __cplusplus
}
#endif
