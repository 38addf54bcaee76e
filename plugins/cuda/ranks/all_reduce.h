// The sum over ranks (ranks.h).
//
//   AllReduce, up to 32 blocks, each of which adds up vectors of its own; of its pieces, one after another
//     part, the block's vectors of the piece -> the half of the rank's mailbox whose turn it is
//     meet: all ranks have written theirs
//     one shot:   sum = the parts of all ranks, in their order
//     two shots:  the rank's share of the vectors, summed -> the other half; meet; sum = the shares of all ranks
//
// A block meets the blocks of its number on the other devices and no others, so that nothing waits for a whole launch.
// Blocks wait for one another, so all of a launch have to be on the device at a time; and it is refused where they are
// not. Meetings of a block are counted from launch to launch, and halves take turns by that count: a rank writes into
// one again when all ranks have come to the next meeting, which they do after they have read this one.
//
// Two shots read 2 (N - 1) / N of the bytes from others where one shot reads N - 1 times as many, for one more meeting.
#pragma once

#include "../core/types.h"
#include "flags.h"
#include "ranks.h"

namespace kv {
namespace cuda {

constexpr int kMostBlocks = 32, kThreadsOfSum = 512, kMostVectors = 8 * kThreadsOfSum;  // of a block's piece

struct Mailbox {
  uint64_t flag[2][kMostBlocks][KV_CUDA_MOST_RANKS];  // by half and block what each rank said last: turn, bytes
  uint32_t turn[kMostBlocks];                         // meetings that this rank's blocks have come to
  alignas(256) Vector half[2][kMostBlocks][kMostVectors];
};

struct Sum {
  KvCudaRanks ranks;
  const void* part;
  void* sum;
  int64_t count, vectors;  // of elements; of vectors, the last of which may be a part of one
  uint32_t bytes;          // as flags carry it
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
          for (int i = t; i < count; i += kThreads) store(args, begin + i, added(args, turn, number, i));
        });
        continue;
      }
      const Range mine = share_of(rank, ranks, count, 1);
      Vector* sums = own.half[(turn + 1) % 2][number];
      block.each([&](int t, auto&) {
        for (int i = mine.from + t; i < mine.to; i += kThreads) sums[i] = added(args, turn, number, i);
      });
      ++turn;
      if (!meet(block, args, turn, failed)) return;
      for (int from = 0; from < ranks; ++from) {
        const Range share = share_of(from, ranks, count, 1);
        const Vector* there = args.mailbox(from).half[turn % 2][number];
        block.each_alone([&](int t, auto&) {
          for (int i = share.from + t; i < share.to; i += kThreads) store(args, begin + i, there[i]);
        });
      }
    }
    block.each_alone([&](int t, auto&) {
      if (t == 0) own.turn[number] = turn;
    });
  }

  // Vector i of the block's piece, over all ranks. Several are on their way at a time.
  static KV_DEVICE Vector added(const Sum& args, uint32_t turn, int number, int i) {
    float total[kLanes<T>] = {};
    for (int first = 0; first < args.ranks.count; first += kAtOnce) {
      Vector part[kAtOnce] = {};
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (first + j < args.ranks.count) part[j] = args.mailbox(first + j).half[turn % 2][number][i];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j >= args.ranks.count) break;
        float x[kLanes<T>];
        widen<T>(part[j], x);
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
  // Vector i of the part; zeros behind its end.
  static KV_DEVICE Vector load(const Sum& args, int64_t i) {
    const T* from = static_cast<const T*>(args.part) + i * kLanes<T>;
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

  // Between phases: this rank's block has written its half of this turn; whether those of all ranks have. They have
  // then also read the other half.
  static KV_DEVICE bool meet(Block<AllReduce>& block, const Sum& args, uint32_t turn, int* failed) {
    const KvCudaRanks& ranks = args.ranks;
    const uint64_t said = static_cast<uint64_t>(turn) << 32 | args.bytes;
    const int number = block.index();
    block.each([&](int t, auto&) {
      if (t < ranks.count) publish(&args.mailbox(t).flag[turn % 2][number][ranks.rank], said);
    });
    block.each([&](int t, auto&) {
      if (t < ranks.count && !comes(ranks, t, &args.mailbox(ranks.rank).flag[turn % 2][number][t], said)) *failed = 1;
    });
    return *failed == 0;
  }

  // Whether rank `other` says the same; the first that finds it does not tells all ranks.
  static KV_DEVICE bool comes(const KvCudaRanks& ranks, int other, const uint64_t* flag, uint64_t said) {
    const uint32_t from = static_cast<uint32_t>(ranks.rank) << 8 | static_cast<uint32_t>(other) << 16;
    uint64_t began = 0;
    for (uint32_t looks = 1;; ++looks) {
      // What was there before is of two turns ago.
      const uint64_t seen = look(flag);
      if (seen == said) return true;
      if (seen >> 32 == said >> 32) return give_up(ranks, KV_RANKS_OUT_OF_STEP | from);
      let_others_run();
      if (looks % kLooks) continue;
      const uint64_t now = nanoseconds();
      if (!began) began = now;
      if (told(ranks.problem)) return false;
      if (now - began > ranks.patience) return give_up(ranks, KV_RANKS_LATE | from);
    }
  }
  static KV_DEVICE bool give_up(const KvCudaRanks& ranks, uint32_t problem) {
    if (!told(ranks.problem)) tell(ranks.problem, problem);
    return false;
  }
};

}  // namespace cuda
}  // namespace kv
