// Ranks: processes that compute one model together, each with a share of its heads, and add up their partial results
// (docs/tasks/tensor-parallel.md). They share memory that begins as zeros; only all_reduce.cpp knows its layout.
//
// A sum of `count` numbers is computed piece by piece. For each piece a rank
//   writes its numbers to a buffer of its own and increments its counter `turn`,
//   waits until the counter of every rank has reached this piece,
//   adds up the pieces in the order of the ranks, in float32, rounded once: all ranks get the same bits in any timing.
// Pieces alternate between two buffers. A rank writes to a buffer again after all ranks have posted the piece between,
// which they do after they have read this one.
#pragma once

#include "../../abi/kvexport.h"

#ifdef __cplusplus
extern "C" {
#endif

// One rank's view. memory: kv_cpu_ranks_bytes(count) shared bytes; nullptr: the model has no ranks.
typedef struct KvRanks {
  void* memory;
  int rank, count;
} KvRanks;

// Returns the bytes of memory that `count` ranks share; 0 if this number of ranks is not supported.
size_t kv_cpu_ranks_bytes(int count);

// Writes the sum over all ranks of their `count` numbers to `sum`. type: KV_FLOAT32 or KV_FLOAT16. Every rank makes the
// same calls in the same order. Returns nullptr, or a static string that says why there is no sum; after a failure
// every later sum fails on every rank.
const char* kv_cpu_all_reduce(const KvRanks* ranks, int type, const void* numbers, void* sum, size_t count);

// Makes every sum fail from now on, including those that ranks are waiting for.
void kv_cpu_ranks_fail(void* memory);

#ifdef __cplusplus
}
#endif
