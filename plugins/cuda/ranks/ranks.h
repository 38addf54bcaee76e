// Ranks on GPUs: processes that compute one model together, each on a device of its own, and add up what they made
// (docs/tensor-parallel.md). The same sums as those of ../../cpu/ranks/ranks.h, to the bit.
//
// Every rank has a mailbox in its device's memory, which the other devices reach (peer access). Of a call a rank writes
// its part into its mailbox, says so by a flag in the mailbox of every rank, waits for theirs, and adds up the parts in
// the order of the ranks, in float32, rounded once. Calls are counted on the device and nothing of a launch changes
// from one call to the next, so that it can be captured in a CUDA graph.
//
// No rank waits for ever: one that has waited too long, or finds that another rank sums something else, writes
// a number into memory of the host that all ranks share, and every rank that waits leaves when it reads one there. The
// host reads it when the work is done.
#pragma once

#include "../kvexport_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { KV_CUDA_MOST_RANKS = 16 };

// Why there are no sums any more, in the lowest byte of the word; above it the rank that says so and, above that, the
// rank that it waited for.
enum { KV_RANKS_FAILED = 1, KV_RANKS_LATE = 2, KV_RANKS_OUT_OF_STEP = 3 };

// One rank's view. mailbox: of every rank, at the address at which this rank's device reaches it,
// kv_cuda_mailbox_bytes() each, zeros at first, aligned to 256 bytes; null of this rank: no rank. problem: a word of
// the host's memory that all ranks share, zero at first, at the address at which this rank's device reaches it.
typedef struct KvCudaRanks {
  int rank, count;
  uint64_t patience;  // nanoseconds that a rank waits for another
  uint32_t* problem;
  void* mailbox[KV_CUDA_MOST_RANKS];
} KvCudaRanks;

size_t kv_cuda_mailbox_bytes(void);

// Enqueues sum = the parts of all ranks. type: KV_FLOAT32, KV_FLOAT16 or KV_BFLOAT16. Every rank makes the same calls
// in the same order, one after another; `part` and `sum` may be one. nullptr, or why nothing was enqueued.
const char* kv_cuda_all_reduce(const KvCudaRanks* ranks, int type, const void* part, void* sum, size_t count,
                               void* stream);

#ifdef __cplusplus
}
#endif
