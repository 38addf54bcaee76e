// Device memory that a plugin instance keeps from one call to the next. The workspace that TensorRT provides is shared
// with other layers between two calls.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "report.h"

namespace kv::tensorrt {

class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() {
    if (memory_) cudaFree(memory_);
  }

  // Returns the memory. The first call allocates it and copies initial() to it; kernels may change it. Returns nullptr
  // if initial() is empty.
  template <class Initial>
  void* get(Initial initial) {
    if (memory_) return memory_;
    const std::string content = initial();
    if (content.empty()) return nullptr;
    void* memory = nullptr;
    check(cudaMalloc(&memory, content.size()));
    cudaError_t error = cudaMemcpy(memory, content.data(), content.size(), cudaMemcpyHostToDevice);
    // A copy from pageable memory may still be under way.
    if (error == cudaSuccess) error = cudaStreamSynchronize(nullptr);
    if (error != cudaSuccess) cudaFree(memory);
    check(error);
    return memory_ = memory;
  }

 private:
  static void check(cudaError_t error) {
    if (error != cudaSuccess) throw Refusal(std::string("device memory: ") + cudaGetErrorString(error));
  }
  void* memory_ = nullptr;
};

}  // namespace kv::tensorrt
