// Device memory that a plugin instance keeps from one call to the next. The workspace that TensorRT provides is shared
// with other layers between two calls.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "report.h"

namespace kv::tensorrt {

class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() {
    for (void* block : blocks_) cudaFree(block);
  }

  // Returns memory of at least the size of `initial`, which kernels may change; nullptr if `initial` is empty. Memory
  // is allocated, and `initial` copied to it, if there is none or it is too small. Smaller memory stays: a captured
  // CUDA graph may use it.
  void* get(const std::string& initial) {
    if (initial.size() <= size_) return blocks_.empty() ? nullptr : blocks_.back();
    void* memory = nullptr;
    check(cudaMalloc(&memory, initial.size()));
    cudaError_t error = cudaMemcpy(memory, initial.data(), initial.size(), cudaMemcpyHostToDevice);
    // A copy from pageable memory may still be under way.
    if (error == cudaSuccess) error = cudaStreamSynchronize(nullptr);
    if (error != cudaSuccess) cudaFree(memory);
    check(error);
    blocks_.push_back(memory), size_ = initial.size();
    return memory;
  }

 private:
  static void check(cudaError_t error) {
    if (error != cudaSuccess) throw Refusal(std::string("device memory: ") + cudaGetErrorString(error));
  }
  std::vector<void*> blocks_;
  size_t size_ = 0;  // of the last block
};

}  // namespace kv::tensorrt
