// Ranks on GPUs: processes that compute one model together, each on its own device, and add up their partial results
// (docs/tasks/tensor-parallel.md). The sums have the same bits as those of ../../cpu/ranks/ranks.h.
//
// Every rank has a mailbox in its device's memory, which the other devices can access (peer access). In a call a rank
//   writes its numbers to its mailbox, and posts a flag in the mailbox of every rank,
//   waits for the flags of all ranks,
//   adds up the numbers in the order of the ranks, in float32, rounded once.
// Calls are counted on the device, and the arguments of a launch do not change from call to call, so that it can be
// captured in a CUDA graph.
//
// No rank waits for ever: a rank that has waited too long, or finds that another rank adds up something else, writes a
// number to the problem word, in memory of the host that all ranks share. Every rank that waits stops when it reads a
// number there. The host reads the word when the work is done.
#pragma once

#include "../kvexport_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { KV_CUDA_MOST_RANKS = 16 };

// The problem word: in its lowest byte why there are no sums any more, in the next byte the rank that reports it, and
// above that the rank that it waited for.
enum { KV_RANKS_FAILED = 1, KV_RANKS_LATE = 2, KV_RANKS_OUT_OF_STEP = 3 };

// One rank's view, with addresses for this rank's device. mailbox: every rank's, kv_cuda_mailbox_bytes() each, zeros at
// first, aligned to 256 bytes; nullptr for this rank: the model has no ranks. problem: the problem word, zero at first.
typedef struct KvCudaRanks {
  int rank, count;
  uint64_t patience;  // nanoseconds that a rank waits for another
  uint32_t* problem;
  void* mailbox[KV_CUDA_MOST_RANKS];
} KvCudaRanks;

size_t kv_cuda_mailbox_bytes(void);

// Enqueues the sum over all ranks of their `count` numbers. type: KV_FLOAT32, KV_FLOAT16 or KV_BFLOAT16. Every rank
// makes the same calls in the same order, one after another; `numbers` and `sum` may be the same buffer. Returns
// nullptr, or why nothing was enqueued.
const char* kv_cuda_all_reduce(const KvCudaRanks* ranks, int type, const void* numbers, void* sum, size_t count,
                               void* stream);

#ifdef __cplusplus
}
#endif
