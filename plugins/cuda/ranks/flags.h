// Flags by which blocks of several devices post their progress to one another, and the clock for their waits. On the
// host ranks are threads or processes, and a flag is an atomic number.
#pragma once

#include "../core/block.h"
#ifndef __CUDACC__
#include <sched.h>
#include <time.h>
#endif

namespace kv {
namespace cuda {

#ifdef __CUDACC__

constexpr uint32_t kPolls = 256;  // reads of a flag for each read of the clock

// Writes a flag. For every device, the block's writes and reads before its last barrier come before the flag.
KV_DEVICE void publish(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
// Reads a flag. Writes before its publication are visible to this thread, and after a barrier to its block.
KV_DEVICE uint64_t read_flag(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}
// Write and read the problem word in the host's memory.
KV_DEVICE void report(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
KV_DEVICE uint32_t reported(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
KV_DEVICE uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
KV_DEVICE void let_others_run() {}

#else

constexpr uint32_t kPolls = 16;

inline void publish(uint64_t* flag, uint64_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
inline uint64_t read_flag(const uint64_t* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }
inline void report(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
inline uint32_t reported(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
inline uint64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000 + static_cast<uint64_t>(now.tv_nsec);
}
inline void let_others_run() { sched_yield(); }

#endif

}  // namespace cuda
}  // namespace kv
