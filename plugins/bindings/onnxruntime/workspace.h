// The workspaces of calls of the CUDA kernels.
//
// Calls on one stream run one after another, so one workspace serves all calls on a stream: those of all nodes of a
// session, or of two sessions on the same stream. Two streams never share a workspace, so runs at the same time do not
// interfere. A workspace that grows keeps its earlier blocks, because a captured CUDA graph continues to use them.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "../../cuda/kvexport_cuda.h"
#include "device.h"

namespace kv {

// A session's allocator on the device of its nodes.
class Memory {
 public:
  explicit Memory(const OrtKernelInfo* info) {
    Ort::ThrowOnError(Ort::GetApi().KernelInfoGetAllocator(info, OrtMemTypeDefault, &allocator_));
    Ort::ThrowOnError(Ort::GetApi().MemoryInfoGetId(allocator_->Info(allocator_), &device_));
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { Ort::GetApi().ReleaseAllocator(allocator_); }

  int device() const { return device_; }
  void* take(size_t bytes) {
    void* memory = allocator_->Alloc(allocator_, bytes);
    require(memory != nullptr, "the device has no " + std::to_string(bytes) + " bytes left");
    return memory;
  }
  void give_back(void* memory) { allocator_->Free(allocator_, memory); }

 private:
  OrtAllocator* allocator_ = nullptr;
  int device_ = 0;
};

class Workspace {
 public:
  explicit Workspace(std::shared_ptr<Memory> memory) : memory_(std::move(memory)) {}
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() {
    for (void* block : blocks_) memory_->give_back(block);
  }

  // Runs enqueue(KvCuda) with a workspace of at least `bytes`; no other call's launches come between its launches.
  template <class Enqueue>
  void run(size_t bytes, void* stream, Enqueue enqueue) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (bytes > where_.workspace_size) grow(bytes, stream);
    where_.stream = stream;
    enqueue(where_);
  }

 private:
  // Grows to at least twice the size, so that all blocks together stay below four times the bytes that are needed.
  void grow(size_t bytes, void* stream) {
    const size_t size = bytes > 2 * where_.workspace_size ? bytes : 2 * where_.workspace_size;
    void* block = memory_->take(size + kAlignment);
    blocks_.push_back(block);
    where_.workspace =
        reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(block) + kAlignment - 1) / kAlignment * kAlignment);
    where_.workspace_size = size;
    spoil(where_.workspace, size);
    clear(where_.workspace, KV_CUDA_COUNTER_BYTES, stream);
  }

  static constexpr size_t kAlignment = 256;
  std::shared_ptr<Memory> memory_;
  std::mutex mutex_;
  std::vector<void*> blocks_;
  KvCuda where_{nullptr, nullptr, 0, nullptr, KV_CUDA_EARLY};
};

// Returns the workspace of a stream, which exists while any kernel refers to it.
inline std::shared_ptr<Workspace> workspace_of(const std::shared_ptr<Memory>& memory, void* stream) {
  static std::mutex mutex;
  static std::map<std::pair<int, void*>, std::weak_ptr<Workspace>> all;
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto it = all.begin(); it != all.end();) it = it->second.expired() ? all.erase(it) : std::next(it);
  std::weak_ptr<Workspace>& entry = all[{memory->device(), stream}];
  std::shared_ptr<Workspace> workspace = entry.lock();
  if (!workspace) entry = workspace = std::make_shared<Workspace>(memory);
  return workspace;
}

// The workspaces of the streams on which one kernel has run.
class Streams {
 public:
  explicit Streams(std::shared_ptr<Memory> memory) : memory_(std::move(memory)) {}

  template <class Enqueue>
  void run(const Ort::KernelContext& context, size_t bytes, Enqueue enqueue) {
    void* stream = context.GetGPUComputeStream();
    workspace(stream).run(bytes, stream, enqueue);
  }

 private:
  Workspace& workspace(void* stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<Workspace>& workspace = workspaces_[stream];
    if (!workspace) workspace = workspace_of(memory_, stream);
    return *workspace;
  }

  std::shared_ptr<Memory> memory_;
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<Workspace>> workspaces_;
};

}  // namespace kv
