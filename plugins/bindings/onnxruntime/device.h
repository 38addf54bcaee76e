// The operations on the device that the binding itself needs. Compiled with KV_ON_HOST, over the kernels for the host
// (../../cuda/core/block.h), the process's memory replaces the device's, and ONNX Runtime's CPU provider the CUDA one.
#pragma once

#include <cstddef>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "node.h"

#ifndef KV_ON_HOST
#include <cuda_runtime_api.h>
#endif

namespace kv {

#ifdef KV_ON_HOST

constexpr const char* kDeviceProvider = nullptr;

inline std::string compiled_for() { return "CUDA kernels on the host"; }
inline void clear(void* to, size_t bytes, void*) { memset(to, 0, bytes); }
inline void upload(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }
// Fills new memory, so that a read before the first write gives NaN.
inline void spoil(void* memory, size_t bytes) { memset(memory, 0xff, bytes); }
inline std::string device_problem() { return ""; }

#else

constexpr const char* kDeviceProvider = "CUDAExecutionProvider";

#define KV_QUOTED(x) #x
#define KV_TEXT(x) KV_QUOTED(x)

// Returns the compute capabilities, times ten, that the kernels are compiled for, ascending; the macro has the form
// 80_90.
inline std::vector<int> architectures() {
  std::istringstream text(KV_TEXT(KV_CUDA_ARCHITECTURES));
  std::vector<int> capabilities;
  for (std::string one; std::getline(text, one, '_');) capabilities.push_back(std::stoi(one));
  return capabilities;
}

inline std::string compiled_for() {
  std::string text;
  for (const int one : architectures()) text += (text.empty() ? "sm_" : ", sm_") + std::to_string(one);
  return text;
}

inline void check(cudaError_t error) { require(error == cudaSuccess, cudaGetErrorString(error)); }

inline void clear(void* to, size_t bytes, void* stream) {
  check(cudaMemsetAsync(to, 0, bytes, static_cast<cudaStream_t>(stream)));
}

inline void spoil(void*, size_t) {}

// Copies to the device, and returns when the copy has ended.
inline void upload(void* to, const void* from, size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
  check(cudaStreamSynchronize(nullptr));  // a copy from pageable memory may still be under way
}

// Returns why the kernels cannot run on the first GPU, "" if they can. Machine code runs on its own major version, from
// its minor version on. The latest capability is included as PTX too, which the driver compiles for any later GPU.
inline std::string device_problem() {
  int count = 0, major = 0, minor = 0;
  for (const cudaError_t error :
       {cudaGetDeviceCount(&count), cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0),
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0)})
    if (error != cudaSuccess) return cudaGetErrorString(error);
  const int here = 10 * major + minor;
  for (const int one : architectures())
    if (one / 10 == major && one <= here) return "";
  if (architectures().back() < here) return "";
  return "the native operators are compiled for " + compiled_for() + ", and this GPU is sm_" + std::to_string(here);
}

#endif

}  // namespace kv
