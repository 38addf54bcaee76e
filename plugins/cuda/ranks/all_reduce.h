// The sum over ranks (ranks.h).
//
//   AllReduce, up to 32 blocks with vectors of their own; for each piece of a block's vectors
//     copy the rank's vectors to one half of its mailbox; the halves alternate
//     meet: wait until all ranks have written theirs
//     one shot:   sum = the vectors of all ranks, sum_of_ranks in their order
//     two shots:  add up the rank's share of the vectors in the other half; meet; sum = the shares of all ranks
//
// A block meets only the blocks of its number on the other devices, so no block waits for a whole launch. Blocks wait
// for one another, so all blocks of a launch have to run at a time; a launch that is too large for that is refused.
// Meetings of a block are counted from launch to launch, and the halves alternate by that count: a rank writes to a
// half again after all ranks have come to the next meeting, which they do after they have read this half.
//
// With N ranks, two shots read 2 (N - 1) / N of the bytes from other ranks, one shot N - 1 times the bytes; two shots
// need one more meeting.
#pragma once

#include "../core/types.h"
#include "flags.h"
#include "ranks.h"

namespace kv {
namespace cuda {

constexpr int kMostBlocks = 32, kThreadsOfSum = 512,
              kMostVectors = 8 * kThreadsOfSum;  // kMostVectors: of a block's piece

struct Mailbox {
  uint64_t flag[2][kMostBlocks][KV_CUDA_MOST_RANKS];  // by half and block, each rank's last post: turn << 32 | bytes
  uint32_t turn[kMostBlocks];                         // meetings of each of this rank's blocks
  alignas(256) Vector half[2][kMostBlocks][kMostVectors];
};

struct Sum {
  KvCudaRanks ranks;
  const void* numbers;
  void* sum;
  int64_t count, vectors;  // elements; vectors, of which the last may be incomplete
  uint32_t bytes;          // bytes of the sum, which flags contain
  int blocks, each;        // each: vectors of a block's piece
  bool two_shots, aligned;

  KV_DEVICE Mailbox& mailbox(int rank) const { return *static_cast<Mailbox*>(ranks.mailbox[rank]); }
};

template <class T>
struct AllReduce {
  using Args = Sum;
  static constexpr int kThreads = kThreadsOfSum, kBlocksPerMultiprocessor = 2, kAtOnce = 4;
  struct Registers {};

  static KV_DEVICE void run(Block<AllReduce>& block, const Sum& args) {
    const int number = block.index(), rank = args.ranks.rank, ranks = args.ranks.count;
    Mailbox& own = args.mailbox(rank);
    int* failed = reinterpret_cast<int*>(block.shared);
    uint32_t turn = own.turn[number];
    block.each([&](int t, auto&) {
      if (t == 0) *failed = 0;
    });
    for (int64_t begin = static_cast<int64_t>(number) * args.each; begin < args.vectors;
         begin += static_cast<int64_t>(args.blocks) * args.each) {
      const int64_t left = args.vectors - begin;
      const int count = left < args.each ? static_cast<int>(left) : args.each;
      ++turn;
      Vector* half = own.half[turn % 2][number];
      block.each([&](int t, auto&) {
        for (int i = t; i < count; i += kThreads) half[i] = load(args, begin + i);
      });
      if (!meet(block, args, turn, failed)) return;
      if (!args.two_shots) {
        block.each_alone([&](int t, auto&) {
          for (int i = t; i < count; i += kThreads) store(args, begin + i, sum_of_ranks(args, turn, number, i));
        });
        continue;
      }
      const Range own_share = share_of(rank, ranks, count, 1);
      Vector* sums = own.half[(turn + 1) % 2][number];
      block.each([&](int t, auto&) {
        for (int i = own_share.from + t; i < own_share.to; i += kThreads) sums[i] = sum_of_ranks(args, turn, number, i);
      });
      ++turn;
      if (!meet(block, args, turn, failed)) return;
      for (int from = 0; from < ranks; ++from) {
        const Range share = share_of(from, ranks, count, 1);
        const Vector* sums_of_rank = args.mailbox(from).half[turn % 2][number];
        block.each_alone([&](int t, auto&) {
          for (int i = share.from + t; i < share.to; i += kThreads) store(args, begin + i, sums_of_rank[i]);
        });
      }
    }
    block.each_alone([&](int t, auto&) {
      if (t == 0) own.turn[number] = turn;
    });
  }

  // Returns the sum over all ranks of vector i of the block's piece. kAtOnce loads are under way at a time.
  static KV_DEVICE Vector sum_of_ranks(const Sum& args, uint32_t turn, int number, int i) {
    float total[kLanes<T>] = {};
    for (int first = 0; first < args.ranks.count; first += kAtOnce) {
      Vector vector[kAtOnce] = {};
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (first + j < args.ranks.count) vector[j] = args.mailbox(first + j).half[turn % 2][number][i];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j >= args.ranks.count) break;
        float x[kLanes<T>];
        widen<T>(vector[j], x);
#pragma unroll
        for (int n = 0; n < kLanes<T>; ++n) total[n] = first + j == 0 ? x[n] : total[n] + x[n];
      }
    }
    T rounded[kLanes<T>];
#pragma unroll
    for (int n = 0; n < kLanes<T>; ++n) assign(rounded[n], total[n]);
    Vector sum;
    memcpy(&sum, rounded, sizeof sum);
    return sum;
  }

  static KV_DEVICE bool is_whole(const Sum& args, int64_t i) {
    return args.aligned && (i + 1) * kLanes<T> <= args.count;
  }
  // Loads vector i of this rank's numbers; zeros behind their end.
  static KV_DEVICE Vector load(const Sum& args, int64_t i) {
    const T* from = static_cast<const T*>(args.numbers) + i * kLanes<T>;
    if (is_whole(args, i)) return load_vector(from);
    T element[kLanes<T>] = {};
    for (int n = 0; n < kLanes<T> && i * kLanes<T> + n < args.count; ++n) element[n] = from[n];
    Vector vector;
    memcpy(&vector, element, sizeof vector);
    return vector;
  }
  static KV_DEVICE void store(const Sum& args, int64_t i, const Vector& vector) {
    T* to = static_cast<T*>(args.sum) + i * kLanes<T>;
    if (is_whole(args, i)) return store_vector(to, vector);
    T element[kLanes<T>];
    memcpy(element, &vector, sizeof vector);
    for (int n = 0; n < kLanes<T> && i * kLanes<T> + n < args.count; ++n) to[n] = element[n];
  }

  // Between phases: posts that this rank's block has written its half of this turn, and waits until all ranks have.
  // Returns false if a rank fails. Then all ranks have also read the other half.
  static KV_DEVICE bool meet(Block<AllReduce>& block, const Sum& args, uint32_t turn, int* failed) {
    const KvCudaRanks& ranks = args.ranks;
    const uint64_t post = static_cast<uint64_t>(turn) << 32 | args.bytes;
    const int number = block.index();
    block.each([&](int t, auto&) {
      if (t < ranks.count) publish(&args.mailbox(t).flag[turn % 2][number][ranks.rank], post);
    });
    block.each([&](int t, auto&) {
      if (t < ranks.count && !wait_for(ranks, t, &args.mailbox(ranks.rank).flag[turn % 2][number][t], post))
        *failed = 1;
    });
    return *failed == 0;
  }

  // Waits until rank `other` has posted the same, and returns true. If it posts something else, or is late, this
  // reports the problem to all ranks and returns false.
  static KV_DEVICE bool wait_for(const KvCudaRanks& ranks, int other, const uint64_t* flag, uint64_t post) {
    const uint32_t from = static_cast<uint32_t>(ranks.rank) << 8 | static_cast<uint32_t>(other) << 16;
    uint64_t began = 0;
    for (uint32_t polls = 1;; ++polls) {
      // Until then, the flag has the post of two turns ago.
      const uint64_t value = read_flag(flag);
      if (value == post) return true;
      if (value >> 32 == post >> 32) return give_up(ranks, KV_RANKS_OUT_OF_STEP | from);
      let_others_run();
      if (polls % kPolls) continue;
      const uint64_t now = nanoseconds();
      if (!began) began = now;
      if (reported(ranks.problem)) return false;
      if (now - began > ranks.patience) return give_up(ranks, KV_RANKS_LATE | from);
    }
  }
  static KV_DEVICE bool give_up(const KvCudaRanks& ranks, uint32_t problem) {
    if (!reported(ranks.problem)) report(ranks.problem, problem);
    return false;
  }
};

}  // namespace cuda
}  // namespace kv
