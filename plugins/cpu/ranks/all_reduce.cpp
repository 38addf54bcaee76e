// The all-reduce of ranks.h: post a piece, wait for the pieces of all ranks, add them in the order of the ranks.
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "ranks.h"

namespace {

#if defined(__aarch64__)
using half = __fp16;
#else
using half = _Float16;
#endif

constexpr int kMost = 64;             // the most ranks
constexpr size_t kPiece = 256 << 10;  // the most bytes of a rank's numbers that are added up at once
constexpr unsigned kSpins = 2000;     // polls before the thread yields its core
constexpr unsigned kYields = 2000;    // polls with a yield before the thread sleeps between polls
constexpr long kRestNanoseconds = 50'000;
constexpr const char* kFailed = "a rank has failed";

// The progress of a rank. turn: how many pieces the rank has written. bytes: the sizes of the last two pieces.
struct alignas(64) Rank {
  std::atomic<uint64_t> turn;
  uint64_t bytes[2];
};
struct Shared {
  alignas(64) std::atomic<int32_t> failed;
  Rank rank[kMost];

  char* buffer(uint64_t turn, int rank, int count) {
    const size_t number = turn % 2 * static_cast<size_t>(count) + static_cast<size_t>(rank);
    return reinterpret_cast<char*>(this + 1) + number * kPiece;
  }
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<int32_t>::is_always_lock_free);

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `rank` has written piece `turn`. Returns false if a rank has failed.
bool wait_for(const Shared& shared, int rank, uint64_t turn) {
  for (unsigned polls = 0; shared.rank[rank].turn.load(std::memory_order_acquire) < turn; ++polls) {
    if (shared.failed.load(std::memory_order_relaxed)) return false;
    if (polls < kSpins) {
      pause();
    } else if (polls < kSpins + kYields) {
      sched_yield();
    } else {
      const timespec rest{0, kRestNanoseconds};
      nanosleep(&rest, nullptr);
    }
  }
  return true;
}

// Computes sum: the pieces of all ranks, added in float32 in the order of the ranks, and rounded once.
template <class T>
void add_up(Shared& shared, uint64_t turn, int ranks, T* sum, size_t count) {
  constexpr size_t kBlock = 512;
  float total[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = std::min(kBlock, count - begin);
    for (int rank = 0; rank < ranks; ++rank) {
      const T* numbers = reinterpret_cast<const T*>(shared.buffer(turn, rank, ranks)) + begin;
      if (rank == 0)
        for (size_t i = 0; i < n; ++i) total[i] = static_cast<float>(numbers[i]);
      else
        for (size_t i = 0; i < n; ++i) total[i] += static_cast<float>(numbers[i]);
    }
    for (size_t i = 0; i < n; ++i) sum[begin + i] = static_cast<T>(total[i]);
  }
}

template <class T>
const char* all_reduce(const KvRanks& ranks, const T* numbers, T* sum, size_t count) {
  Shared& shared = *static_cast<Shared*>(ranks.memory);
  Rank& own = shared.rank[ranks.rank];
  if (shared.failed.load(std::memory_order_relaxed)) return kFailed;
  constexpr size_t kNumbers = kPiece / sizeof(T);
  for (size_t begin = 0; begin < count; begin += kNumbers) {
    const size_t n = std::min(kNumbers, count - begin);
    const uint64_t turn = own.turn.load(std::memory_order_relaxed) + 1;
    std::memcpy(shared.buffer(turn, ranks.rank, ranks.count), numbers + begin, n * sizeof(T));
    own.bytes[turn % 2] = n * sizeof(T);
    own.turn.store(turn, std::memory_order_release);
    for (int rank = 0; rank < ranks.count; ++rank) {
      if (!wait_for(shared, rank, turn)) return kFailed;
      if (shared.rank[rank].bytes[turn % 2] != n * sizeof(T)) {
        kv_cpu_ranks_fail(ranks.memory);
        return "the ranks are out of step: they add up different tensors";
      }
    }
    add_up(shared, turn, ranks.count, sum + begin, n);
  }
  return nullptr;
}

}  // namespace

extern "C" size_t kv_cpu_ranks_bytes(int count) {
  return count >= 1 && count <= kMost ? sizeof(Shared) + 2 * static_cast<size_t>(count) * kPiece : 0;
}

extern "C" const char* kv_cpu_all_reduce(const KvRanks* ranks, int type, const void* numbers, void* sum, size_t count) {
  if (type == KV_FLOAT32)
    return all_reduce(*ranks, static_cast<const float*>(numbers), static_cast<float*>(sum), count);
  if (type == KV_FLOAT16) return all_reduce(*ranks, static_cast<const half*>(numbers), static_cast<half*>(sum), count);
  return "only float32 and float16 are added up";
}

extern "C" void kv_cpu_ranks_fail(void* memory) { static_cast<Shared*>(memory)->failed.store(1); }
