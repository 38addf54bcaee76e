// The functions of CUDA's runtime that the TensorRT plugins call, for the host, and a counter of the calls.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>

extern "C" {

__attribute__((visibility("default"))) int kv_cuda_runtime_calls = 0;

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  ++kv_cuda_runtime_calls;
  *memory = malloc(bytes);
  return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void* memory) {
  ++kv_cuda_runtime_calls;
  free(memory);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  ++kv_cuda_runtime_calls;
  memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) {
  ++kv_cuda_runtime_calls;
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t) { return "out of memory"; }
}
