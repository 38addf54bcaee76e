// Work that a session does on several threads while it is created, when ONNX Runtime's own threads are not at hand.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace kv {

// Runs task(i) for every i below count, in any order, on as many threads as the processor runs at once.
template <class Task>
void in_threads(int64_t count, const Task& task) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i; (i = next++) < count;) task(i);
  };
  const int64_t most = std::min<int64_t>(count, std::thread::hardware_concurrency());
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < most; ++i) others.emplace_back(work);
  } catch (const std::exception&) {  // there are no more threads: those that there are do the work
  }
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace kv
