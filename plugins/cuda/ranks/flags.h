// Numbers by which blocks of several devices tell one another how far they are, and a clock that runs on while they
// wait. On the host ranks are threads or processes, and a flag is an atomic number.
#pragma once

#include "../core/block.h"
#ifndef __CUDACC__
#include <sched.h>
#include <time.h>
#endif

namespace kv {
namespace cuda {

#ifdef __CUDACC__

constexpr uint32_t kLooks = 256;  // at a flag, before the clock is looked at

// What the block wrote, and read, before its last barrier comes before the flag, for every device.
KV_DEVICE void publish(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
// What was written before the value was published is there for this thread, and after a barrier for its block.
KV_DEVICE uint64_t look(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}
// Of memory of the host.
KV_DEVICE void tell(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
KV_DEVICE uint32_t told(const uint32_t* word) {
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

constexpr uint32_t kLooks = 16;

inline void publish(uint64_t* flag, uint64_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
inline uint64_t look(const uint64_t* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }
inline void tell(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
inline uint32_t told(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
inline uint64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000 + static_cast<uint64_t>(now.tv_nsec);
}
inline void let_others_run() { sched_yield(); }

#endif

}  // namespace cuda
}  // namespace kv
