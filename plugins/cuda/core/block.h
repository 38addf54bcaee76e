// How a kernel is written here: in phases, from the view of one block. A phase is a function of the thread's number and
// registers. A barrier ends it: the next phase sees all writes of its threads. Code between phases is the same
// for all threads. So one source runs on the device, where each thread executes the phase, and on the host, where a
// loop over the threads does. The host tests indexing, masks, edges and orders without a GPU.
//
// A phase reads captured variables and writes only registers, shared memory and global memory. Within a phase no thread
// reads what another thread writes. The host checks this by running the threads in different orders, which must not
// change a bit.
//
// Letters in this folder: t a thread's number in its block, r its registers, i a number in a loop.
#pragma once

#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "../../math/merge.h"
#include "../kvexport_cuda.h"

#ifdef __CUDACC__
#define KV_DEVICE __device__ __forceinline__
#else
#define KV_DEVICE inline
#include <cstdlib>
#include <vector>
#endif

namespace kv {
namespace cuda {

constexpr int kWarp = 32;
constexpr size_t kLaunchable = size_t(1) << 31;

#ifdef __CUDACC__

template <class Kernel>
class Block {
 public:
  using Registers = typename Kernel::Registers;
  char* shared;

  __device__ explicit Block(char* shared) : shared(shared) {}
  __device__ int index() const { return blockIdx.x; }

  // Between phases: allows the next launch to begin once all blocks of this one have called this or ended.
  KV_DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
  }
  // Between phases: waits until all earlier launches have ended; their writes are then visible.
  KV_DEVICE void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  }
  // Runs a phase, and a barrier.
  template <class F>
  KV_DEVICE void each(F phase) {
    phase(static_cast<int>(threadIdx.x), registers_);
    __syncthreads();
  }
  // Runs a phase without a barrier: until the next barrier a thread reads only its own registers from it.
  template <class F>
  KV_DEVICE void each_alone(F phase) {
    phase(static_cast<int>(threadIdx.x), registers_);
  }
  // Replaces a register by its maximum or sum over the warp, or over kLanes neighbouring lanes, in all of these lanes.
  // If a NaN takes part in a maximum, the result is any number or a NaN.
  template <int kLanes = kWarp, class F>
  KV_DEVICE void warp_max(F of) {
    float& x = of(registers_);
    if constexpr (kLanes == kWarp) {  // one instruction, over integers in the same order as the floats
      const auto ordered = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
      x = __int_as_float(ordered(__reduce_max_sync(~0u, ordered(__float_as_int(x)))));
    } else {
      for (int step = kLanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    }
  }
  template <int kLanes = kWarp, class F>
  KV_DEVICE void warp_sum(F of) {
    float& x = of(registers_);
    for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  }
  // Replaces a register x of every lane by op(x, the x of the lane at distance `apart`, whether this lane is the upper
  // of the two).
  template <class F, class Op>
  KV_DEVICE void warp_pairs(int apart, F of, Op op) {
    float& x = of(registers_);
    const float other = __shfl_xor_sync(~0u, x, apart);
    x = op(x, other, (threadIdx.x & apart) != 0);
  }
  // For operations of whole warps (mma.h): a thread's own registers. On the host `lanes` gives those of a warp's lanes.
  KV_DEVICE Registers& registers() { return registers_; }
  // Within a phase: starts an asynchronous copy of N bytes (4 or 16) into shared memory, complete after
  // `cp_async_wait`. kTo, kFrom: offsets in bytes that the instruction adds to the addresses at no cost.
  template <int N, int kTo = 0, int kFrom = 0>
  KV_DEVICE void copy(void* to, const void* from) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    if (N == 16)
      asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %3], 16;" ::"r"(address), "l"(from), "n"(kTo), "n"(kFrom)
                   : "memory");
    else
      asm volatile("cp.async.ca.shared.global [%0 + %2], [%1 + %3], 4;" ::"r"(address), "l"(from), "n"(kTo), "n"(kFrom)
                   : "memory");
  }
  // Between phases: `cp_async_commit` makes the copies since the last commit one batch. `cp_async_wait` waits until all
  // but the newest `pending` batches are complete, and its barrier makes them visible to all threads.
  KV_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  KV_DEVICE void cp_async_wait(int pending) {
    if (pending <= 0)
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    else if (pending == 1)
      asm volatile("cp.async.wait_group 1;" ::: "memory");
    else
      asm volatile("cp.async.wait_group 2;" ::: "memory");
    __syncthreads();
  }
  // Between phases: returns whether this is the last of `count` blocks to call it. The last block then sees all writes
  // of the other blocks before their calls. The counter is zero again afterwards.
  KV_DEVICE bool is_last(int* counter, int count) {
    __shared__ int before;
    __threadfence();  // what this thread wrote is visible before the counter rises
    __syncthreads();  // all threads have passed their fence
    if (threadIdx.x == 0) before = atomicAdd(counter, 1);
    __syncthreads();  // `before` is written
    if (before != count - 1) return false;
    if (threadIdx.x == 0) *counter = 0;
    __threadfence();  // reads of what the other blocks wrote come after the counter
    return true;
  }
  // Within a phase: atomic operations on integers, whose order does not matter.
  KV_DEVICE static void add(int* to, int value) { atomicAdd(to, value); }
  KV_DEVICE static void lower(int* to, int value) { atomicMin(to, value); }

 private:
  Registers registers_;
};

#else  // the host

// How the host runs: the order of threads and blocks, and whether copies happen when they start or (late_copies) when
// they are waited for.
struct Host {
  enum { kForward, kBackward, kScattered };
  int order = kForward;
  bool late_copies = false;
  int multiprocessors = 4;
  size_t shared_limit = 101376;  // of compute capability 8.6, 8.9 and 12.0, the smallest
  int launches = 0, early = 0;   // of the last call; how many of them may begin early on a device
  int place(int i, int count) const {
    if (order == kBackward) return count - 1 - i;
    if (order == kScattered)
      return static_cast<int>((static_cast<int64_t>(i) * 7919 + 13) % count);  // 7919: a prime above all counts
    return i;
  }
};

inline Host& host() {
  static Host instance;
  return instance;
}

template <class Kernel>
class Block {
 public:
  using Registers = typename Kernel::Registers;
  char* shared;

  Block(char* shared, int index) : shared(shared), index_(index), registers_(Kernel::kThreads) {
    memset(static_cast<void*>(registers_.data()), 0xff, registers_.size() * sizeof(Registers));
  }
  int index() const { return index_; }
  void let_next_begin() {}
  void wait_for_earlier() {}

  template <class F>
  void each(F phase) {
    each_alone(phase);
  }
  template <class F>
  void each_alone(F phase) {
    for (int i = 0; i < Kernel::kThreads; ++i) {
      const int thread = host().place(i, Kernel::kThreads);
      phase(thread, registers_[thread]);
    }
  }
  template <int kLanes = kWarp, class F>
  void warp_max(F of) {
    butterfly<kLanes>(of, [](float x, float y) { return fmaxf(x, y); });
  }
  template <int kLanes = kWarp, class F>
  void warp_sum(F of) {
    butterfly<kLanes>(of, [](float x, float y) { return x + y; });
  }
  template <class F, class Op>
  void warp_pairs(int apart, F of, Op op) {
    for (int warp = 0; warp < Kernel::kThreads; warp += kWarp) {
      float old[kWarp];
      for (int lane = 0; lane < kWarp; ++lane) old[lane] = of(registers_[warp + lane]);
      for (int lane = 0; lane < kWarp; ++lane)
        of(registers_[warp + lane]) = op(old[lane], old[lane ^ apart], (lane & apart) != 0);
    }
  }
  Registers* lanes(int warp) { return registers_.data() + warp * kWarp; }
  template <int N, int kTo = 0, int kFrom = 0>
  void copy(void* to, const void* from) {
    const Copy copy{static_cast<char*>(to) + kTo, static_cast<const char*>(from) + kFrom, N};
    if (host().late_copies)
      pending_.push_back(copy);
    else
      memcpy(copy.to, copy.from, N);
  }
  void cp_async_commit() { committed_.push_back(pending_.size()); }
  void cp_async_wait(int pending) {
    const size_t whole =
        committed_.size() > static_cast<size_t>(pending) ? committed_[committed_.size() - 1 - pending] : 0;
    for (; done_ < whole; ++done_) memcpy(pending_[done_].to, pending_[done_].from, pending_[done_].size);
  }
  bool is_last(int* counter, int count) {
    if (++*counter < count) return false;
    *counter = 0;
    return true;
  }
  static void add(int* to, int value) {  // wraps as on the device
    *to = static_cast<int>(static_cast<unsigned>(*to) + static_cast<unsigned>(value));
  }
  static void lower(int* to, int value) {
    if (value < *to) *to = value;
  }

 private:
  struct Copy {
    void* to;
    const void* from;
    int size;
  };
  template <int kLanes, class F, class Op>
  void butterfly(F of, Op op) {
    for (int warp = 0; warp < Kernel::kThreads; warp += kWarp)
      for (int step = kLanes / 2; step > 0; step /= 2) {
        float old[kWarp];
        for (int lane = 0; lane < kWarp; ++lane) old[lane] = of(registers_[warp + lane]);
        for (int lane = 0; lane < kWarp; ++lane) of(registers_[warp + lane]) = op(old[lane], old[lane ^ step]);
      }
  }
  int index_;
  std::vector<Registers> registers_;
  std::vector<Copy> pending_;
  std::vector<size_t> committed_;
  size_t done_ = 0;
};

#endif

// ---- a block ----

template <class Kernel, class = void>
struct HasBefore : std::false_type {};
template <class Kernel>
struct HasBefore<Kernel, std::void_t<decltype(&Kernel::before)>> : std::true_type {};

// Runs a kernel as one block. The block allows the next launch to begin at once: that launch begins only after all
// blocks of this one have started, so no block loses its place to it. A kernel's `before` (optional) reads memory that
// no launch writes; `run` begins after the end of all earlier launches. Every thread waits for these, so a launch ends
// after the earlier ones, and a launch that waits for it has waited for them too.
template <class Kernel>
KV_DEVICE void run_block(Block<Kernel>& block, const typename Kernel::Args& args) {
  block.let_next_begin();
  if constexpr (HasBefore<Kernel>::value) Kernel::before(block, args);
  block.wait_for_earlier();
  Kernel::run(block, args);
}

// ---- shared by the kernels ----

// Returns x. The compiler computes x here and keeps it, instead of computing it again in every round of a loop.
KV_DEVICE int once(int x) {
#ifdef __CUDACC__
  asm volatile("" : "+r"(x));
#endif
  return x;
}
KV_DEVICE const char* once(const char* x) {
#ifdef __CUDACC__
  asm volatile("" : "+l"(x));
#endif
  return x;
}

KV_HD constexpr int min_of(int a, int b) { return a < b ? a : b; }
KV_DEVICE uint32_t min_of(uint32_t a, uint32_t b) { return a < b ? a : b; }
KV_HD constexpr int max_of(int a, int b) { return a > b ? a : b; }
KV_DEVICE float max_of(float a, float b) { return a > b ? a : b; }

// Returns how many bits of a number are 1.
KV_DEVICE int ones(int bits) {
#ifdef __CUDACC__
  return __popc(bits);
#else
  return __builtin_popcount(static_cast<unsigned>(bits));
#endif
}

constexpr int kMostShares = 128;  // of the work of a head

// Returns the items [from, to) of share `share` when `items` items are divided into `shares` shares of whole units. The
// shares have equally many units, except that the first ones have one more if the division leaves a rest.
struct Range {
  int from, to;
};
KV_DEVICE Range share_of(int share, int shares, int items, int unit) {
  const int units = (max_of(items, 0) + unit - 1) / unit, each = units / shares, more = units % shares;
  const auto begin = [&](int i) { return min_of((i * each + min_of(i, more)) * unit, max_of(items, 0)); };
  return {begin(share), begin(share + 1)};
}

// Returns how many slots are used. Used slots are a prefix, so two rounds of reads by all threads find its end. Votes
// that are no prefix have several ends; each round takes the first one, so all blocks get the same answer. ends: two
// ints of shared memory.
template <class Kernel>
KV_DEVICE int used_slots(Block<Kernel>& block, const float* votes, int capacity, int* ends) {
  const int stride = (capacity + Kernel::kThreads - 1) / Kernel::kThreads;
  const float first = votes[0];
  // Both votes arrive in one round trip, since no branch is between them. With a branch around `lower` the compiler
  // would keep so many numbers in registers that DecodeQuantized spills.
  const auto ends_at = [&](int i, int next) {
    const float here = votes[min_of(i, capacity - 1)], after = votes[min_of(next, capacity - 1)];
    return (i < capacity) & (here > 0.0f) & ((next >= capacity) | !(after > 0.0f));
  };
  block.each([&](int t, auto&) {
    if (t < 2) ends[t] = capacity;
  });
  block.each([&](int t, auto&) {
    const int start = t * stride;
    block.lower(&ends[0], ends_at(start, start + stride) ? start : capacity);
  });
  const int start = first > 0.0f ? ends[0] : capacity;
  block.each([&](int t, auto&) {
    for (int i = start + t; i < min_of(start + stride, capacity); i += Kernel::kThreads)
      block.lower(&ends[1], ends_at(i, i + 1) ? i : capacity);
  });
  const int used = start < capacity ? ends[1] + 1 : 0;
  block.each([&](int, auto&) {});  // all threads have read `ends`, which may be written again
  return used;
}

// Computes the exclusive prefix sums of `number` over the threads, in the register `scanned`; returns the sum of all.
// sums: an int of shared memory per thread.
template <class Kernel, class F>
KV_DEVICE int scan(Block<Kernel>& block, int* sums, F number) {
  block.each([&](int t, auto& r) { sums[t] = number(t, r); });
  for (int step = 1; step < Kernel::kThreads; step *= 2) {
    block.each([&](int t, auto& r) { r.scanned = t >= step ? sums[t - step] : 0; });
    block.each([&](int t, auto& r) { sums[t] += r.scanned; });
  }
  block.each([&](int t, auto& r) { r.scanned = t > 0 ? sums[t - 1] : 0; });
  const int all = sums[Kernel::kThreads - 1];
  block.each([&](int, auto&) {});  // all threads have read `sums`, which may be written again
  return all;
}

// Returns the reduction of `number` by op over the threads, always in the same order. values: an element of shared
// memory per thread.
template <class Kernel, class T, class F, class Op>
KV_DEVICE T reduce(Block<Kernel>& block, T* values, F number, Op op) {
  block.each([&](int t, auto& r) { values[t] = number(t, r); });
  for (int half = Kernel::kThreads / 2; half > 0; half /= 2)
    block.each([&](int t, auto&) {
      if (t < half) values[t] = op(values[t], values[t + half]);
    });
  const T result = values[0];
  block.each([&](int, auto&) {});  // all threads have read the result, and `values` may be written again
  return result;
}

template <class Kernel, class T, class F>
KV_DEVICE T sum_of(Block<Kernel>& block, T* values, F number) {
  return reduce(block, values, number, [](T a, T b) { return a + b; });
}

}  // namespace cuda
}  // namespace kv
