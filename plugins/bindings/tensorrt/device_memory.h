// Device memory that an instance keeps from one call to the next; the workspace that TensorRT gives a layer is
// another's in between.
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

  // Memory of this content, for none of none; the first call makes it, and it stays as kernels leave it.
  template <class Content>
  void* holding(Content of) {
    if (memory_) return memory_;
    const std::string content = of();
    if (content.empty()) return nullptr;
    void* made = nullptr;
    check(cudaMalloc(&made, content.size()));
    cudaError_t error = cudaMemcpy(made, content.data(), content.size(), cudaMemcpyHostToDevice);
    // From pageable memory the copy may still be on its way.
    if (error == cudaSuccess) error = cudaStreamSynchronize(nullptr);
    if (error != cudaSuccess) cudaFree(made);
    check(error);
    return memory_ = made;
  }

 private:
  static void check(cudaError_t error) {
    if (error != cudaSuccess) throw Refusal(std::string("device memory: ") + cudaGetErrorString(error));
  }
  void* memory_ = nullptr;
};

}  // namespace kv::tensorrt
