// Runs a kernel over a grid: on the device as a kernel, on the host block after block.
#pragma once

#include <algorithm>

#include "quantized.h"
#ifdef __CUDACC__
#include <cstdlib>
#else
#include <string>
#include <typeinfo>
#endif
#ifdef KV_PTX
#include "../../tests/ptx/launch.h"
#endif

namespace kv {
namespace cuda {

struct Device {
  int number;
  int multiprocessors;
  size_t shared_limit;            // the most bytes of shared memory of a block
  bool runs;                      // false: launches are only checked
  bool early = false;             // whether launches of one call begin while the one before ends
  mutable bool launched = false;  // whether the call has launched a kernel
};

constexpr size_t kOfIsLast = 16;  // bytes of a block's shared memory that Block::is_last uses
constexpr const char* kTooManyBlocks = "the call is too large for one launch";
constexpr const char* kTooMuchShared =
    "the cache has more slots, or larger rows, than this device's shared memory holds";

#ifdef __CUDACC__

using Stream = cudaStream_t;

inline const char* text_of(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

// Whether kernels wait for earlier launches. Kernels compiled for a capability below 9.0 do not. A device newer than
// all compiled capabilities runs the PTX of the latest one, the only PTX that plugins/building/make.py keeps.
constexpr bool compiled_to_wait() {
  bool waits = false;
  for (const int capability : {__CUDA_ARCH_LIST__}) waits = waits || capability >= 900;
  return waits;
}

// Whether launches may begin early by programmatic dependent launch, which CUDA graphs keep since CUDA 12.3.
inline bool begins_early(int number) {
  static const bool supported = [] {
    const char* setting = getenv("KVEXPORT_CUDA_EARLY");
    int driver = 0;
    return CUDART_VERSION >= 12030 && compiled_to_wait() && !(setting && !strcmp(setting, "0")) &&
           cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12030;
  }();
  int major = 0;
  return supported && cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, number) == cudaSuccess &&
         major >= 9;
}

// Describes the current device. begin: as in KvCuda.
inline const char* this_device(Device* device, int begin = KV_CUDA_IN_ORDER) {
  int number = 0, shared = 0;
  if (const char* problem = text_of(cudaGetDevice(&number))) return problem;
  device->number = number;
  if (const char* problem =
          text_of(cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, number)))
    return problem;
  if (const char* problem = text_of(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, number)))
    return problem;
  device->shared_limit = shared;
  device->runs = true;
  device->early = begin != KV_CUDA_IN_ORDER && begins_early(number);
  return nullptr;
}

// A device with twice the multiprocessors of the largest GPU: the size of a workspace must not depend on the machine
// that computes it.
inline Device largest_device() { return {0, 512, 0, false}; }

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocksPerMultiprocessor)
    run_kernel(const __grid_constant__ typename Kernel::Args args) {
  extern __shared__ __align__(16) char shared[];
  Block<Kernel> block(shared);
  run_block(block, args);
}

// Allows a kernel as much shared memory as the device has for a block, if it needs more than the default. The limit is
// an attribute of the kernel. It is equal for every call, since a call in another thread may set it between this line
// and the launch.
template <class Kernel>
const char* allow(size_t shared, const Device& device) {
  const int limit = static_cast<int>(device.shared_limit - kOfIsLast);
  if (shared <= 48000) return nullptr;
  const char* problem =
      text_of(cudaFuncSetAttribute(run_kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, limit));
  if (problem) cudaGetLastError();  // clears the error, which the next check would report again
  return problem;
}

// Returns how many blocks with this shared memory a multiprocessor of the device holds: at least 1, and at most as
// many as the kernel has registers for. A thread keeps some answers, since CUDA takes microseconds for one.
template <class Kernel>
int blocks_held(size_t shared, const Device& device) {
  struct Answer {
    size_t shared;
    int held, device;
  };
  static thread_local Answer answers[8] = {};
  Answer& last = answers[shared / 16 % 8];
  if (last.held == 0 || last.device != device.number || last.shared != shared) {
    int held = 0;
    if (allow<Kernel>(shared, device) ||
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&held, run_kernel<Kernel>, Kernel::kThreads, shared))
      cudaGetLastError(), held = Kernel::kBlocksPerMultiprocessor;  // the launch reports what is wrong
    last = {shared, held < 1 ? 1 : min_of(held, Kernel::kBlocksPerMultiprocessor), device.number};
  }
  return last.held;
}

template <class Kernel>
const char* launch(const typename Kernel::Args& args, size_t blocks, size_t shared, const Device& device,
                   Stream stream) {
  if (blocks == 0) return nullptr;
  if (blocks >= kLaunchable) return kTooManyBlocks;
  if (shared + kOfIsLast > device.shared_limit) return kTooMuchShared;
  if (!device.runs) return nullptr;
  if (const char* problem = allow<Kernel>(shared, device)) return problem;
  const unsigned count = static_cast<unsigned>(blocks);
  const bool first = !device.launched;
  device.launched = true;
#if CUDART_VERSION >= 12030
  if (device.early && !first) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    const cudaLaunchConfig_t config{dim3(count), dim3(Kernel::kThreads), shared, stream, &early, 1};
    cudaLaunchKernelEx(&config, run_kernel<Kernel>, args);
    return text_of(cudaGetLastError());
  }
#endif
  run_kernel<Kernel><<<count, Kernel::kThreads, shared, stream>>>(args);
  return text_of(cudaGetLastError());
}

inline const char* copy_tensor(void* to, const void* from, size_t bytes, Stream stream) {
  return to == from ? nullptr : text_of(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
}

// Copies `count` rows of `bytes` bytes. to_apart, from_apart: bytes from row to row.
inline const char* copy_rows(void* to, size_t to_apart, const void* from, size_t from_apart, size_t bytes, size_t count,
                             Stream stream) {
  if (bytes == 0 || count == 0) return nullptr;
  return text_of(cudaMemcpy2DAsync(to, to_apart, from, from_apart, bytes, count, cudaMemcpyDeviceToDevice, stream));
}

#else

using Stream = void*;

inline const char* this_device(Device* device, int begin = KV_CUDA_IN_ORDER) {
  host().launches = host().early = 0;
  *device = {0, host().multiprocessors, host().shared_limit, true, begin != KV_CUDA_IN_ORDER};
  return nullptr;
}

// The host's own number of multiprocessors, so that a sanitizer reports the first byte beyond what is used.
inline Device largest_device() { return {0, host().multiprocessors, host().shared_limit, false}; }

// Returns how many blocks a multiprocessor holds that has 1,024 bytes more than a block may use, and keeps 1,024 for
// each block, as GPUs do.
template <class Kernel>
int blocks_held(size_t shared, const Device& device) {
  const size_t held = (device.shared_limit + 1024) / (shared + kOfIsLast + 1024);
  return held < 1 ? 1 : min_of(static_cast<int>(held), Kernel::kBlocksPerMultiprocessor);
}

// For tests: one line for every launch that was only checked, with its kernel and number of blocks.
inline std::string& checked() {
  static thread_local std::string lines;
  return lines;
}

template <class Kernel>
const char* launch(const typename Kernel::Args& args, size_t blocks, size_t shared, const Device& device, Stream) {
  if (blocks >= kLaunchable) return kTooManyBlocks;
  if (shared + kOfIsLast > device.shared_limit) return kTooMuchShared;
  if (!device.runs) {
    checked() += std::string(typeid(Kernel).name()) + " " + std::to_string(blocks) + "\n";
    return nullptr;
  }
  ++host().launches, host().early += device.early && device.launched;
  device.launched = true;
#ifdef KV_PTX
  return ptx::launch(typeid(Kernel).name(), &args, sizeof args, blocks, Kernel::kThreads, shared, host().order,
                     host().late_copies);
#else
  for (size_t i = 0; i < blocks; ++i) {
    // Exactly the bytes of the launch, filled with rubbish for every block.
    void* memory = nullptr;
    if (posix_memalign(&memory, 16, shared > 0 ? shared : 1) != 0) return "out of memory";
    memset(memory, 0xff, shared);
    Block<Kernel> block(static_cast<char*>(memory), host().place(static_cast<int>(i), static_cast<int>(blocks)));
    run_block(block, args);
    free(memory);
  }
  return nullptr;
#endif
}

inline const char* copy_tensor(void* to, const void* from, size_t bytes, Stream) {
  if (to != from) memcpy(to, from, bytes);
  return nullptr;
}

inline const char* copy_rows(void* to, size_t to_apart, const void* from, size_t from_apart, size_t bytes, size_t count,
                             Stream) {
  for (size_t i = 0; i < count; ++i)
    memcpy(static_cast<char*>(to) + i * to_apart, static_cast<const char*>(from) + i * from_apart, bytes);
  return nullptr;
}

#endif

// Divides a workspace into arrays, one after the other; only counts bytes if base is nullptr.
class Workspace {
 public:
  explicit Workspace(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(size_t count) {
    T* array = base_ ? reinterpret_cast<T*>(base_ + size_) : nullptr;
    size_ += (count * sizeof(T) + 255) / 256 * 256;
    return array;
  }
  size_t size() const { return size_; }

 private:
  char* base_;
  size_t size_ = 0;
};

// Copies the tensors of a call's state that are not bound in place, so that kernels can work in place.
template <class Arguments>
const char* copy_state(const Arguments& a, Stream stream) {
  const KvState &from = a.past, &to = a.present;
  const size_t slots = static_cast<size_t>(a.batch) * a.slots, each = slots * sizeof(float);
  const size_t keys = slots * a.key_size * key_bits(a.cache_type) / 8,
               values = slots * a.value_size * value_bits(a.cache_type) / 8;
  if (const char* problem = copy_tensor(to.key, from.key, keys, stream)) return problem;
  if (const char* problem = copy_tensor(to.value, from.value, values, stream)) return problem;
  if (const char* problem = copy_tensor(to.votes, from.votes, each, stream)) return problem;
  if (const char* problem = copy_tensor(to.score, from.score, each * a.statistics, stream)) return problem;
  if (const char* problem = copy_tensor(to.position, from.position, each, stream)) return problem;
  if (!is_quantized(a.cache_type)) return nullptr;
  if (const char* problem = copy_tensor(a.present_scales.key, a.past_scales.key, each, stream)) return problem;
  return copy_tensor(a.present_scales.value, a.past_scales.value, each, stream);
}

constexpr const char* kNoScales = "a quantized cache has no scales";
template <class Arguments>
bool has_scales(const Arguments& a) {
  return !is_quantized(a.cache_type) ||
         (a.past_scales.key && a.past_scales.value && a.present_scales.key && a.present_scales.value);
}

inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Returns the most slots of a KV head, and whether all have as many.
template <class Arguments>
int most_slots(const Arguments& a) {
  return *std::max_element(a.capacity, a.capacity + a.heads);
}
template <class Arguments>
bool has_equal_heads(const Arguments& a) {
  return std::all_of(a.capacity, a.capacity + a.heads, [&](int x) { return x == a.capacity[0]; });
}

template <class Arguments>
const char* check_cache(const Arguments& a) {
  const int type = a.cache_type, key_size = a.key_size, value_size = a.value_size;
  if (type != KV_FLOAT32 && type != KV_FLOAT16 && !is_quantized(type))
    return "the type of the cache is none of float32, float16, int8, int4 and k8v4";
  if (a.batch < 0 || a.heads < 1 || a.slots < 1 || key_size < 1 || value_size < 1)
    return "a dimension is zero or negative";
  if (std::max<int64_t>(a.batch, 1) * a.heads > KV_CUDA_MAX_HEADS)
    return "the batch has more than 65536 KV heads in all";
  int64_t slots = 0;
  for (int h = 0; h < a.heads; ++h) {
    if (a.capacity[h] < 1) return "a KV head has no slots";
    slots += a.capacity[h];
  }
  if (slots != a.slots) return "the KV heads have more or fewer slots than the state";
  if (key_size > 256 || value_size > 256) return "a head size is above 256";
  if (is_quantized(type) && (key_size % 4 || value_size % 4))
    return "a head size of a quantized cache is not a multiple of 4";
  const int lanes = is_quantized(type) ? 4 : 128 / element_bits(type);
  if (key_size % lanes || value_size % lanes) return "a row of keys or values is not a whole number of 16-byte vectors";
  if (a.statistics < 1 || a.statistics > KV_MAX_STATISTICS) return "there are no statistics, or more than 8";
  return nullptr;
}

inline const char* check_workspace(const KvCuda& where, size_t needed) {
  if (!where.workspace || where.workspace_size < needed) return "the workspace is smaller than the call needs";
  if (reinterpret_cast<uintptr_t>(where.workspace) % 256) return "the workspace is not aligned to 256 bytes";
  return nullptr;
}

}  // namespace cuda
}  // namespace kv
