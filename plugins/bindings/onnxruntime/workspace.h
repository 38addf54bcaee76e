// The memory in which calls of the CUDA kernels work.
//
// Calls on one stream run one after another, so one workspace serves all of a stream: that of all nodes of a session,
// or of two sessions on the same stream. Two streams never share one, so runs at the same time do not meet. A workspace
// that grows keeps what it had, because a captured CUDA graph goes on using it.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "../../cuda/kvexport_cuda.h"
#include "device.h"

namespace kv {

// A session's memory on the device that its nodes run on.
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

  // Enqueues a call that takes so many bytes; between its launches comes nobody else's.
  template <class Call>
  void run(size_t bytes, void* stream, Call call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (bytes > where_.workspace_size) grow(bytes, stream);
    where_.stream = stream;
    call(where_);
  }

 private:
  // At least to twice the size, so that all blocks together stay below four times what is needed.
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

// The one workspace of a stream, for as long as anyone holds it.
inline std::shared_ptr<Workspace> workspace_of(const std::shared_ptr<Memory>& memory, void* stream) {
  static std::mutex mutex;
  static std::map<std::pair<int, void*>, std::weak_ptr<Workspace>> all;
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto it = all.begin(); it != all.end();) it = it->second.expired() ? all.erase(it) : std::next(it);
  std::weak_ptr<Workspace>& known = all[{memory->device(), stream}];
  std::shared_ptr<Workspace> found = known.lock();
  if (!found) known = found = std::make_shared<Workspace>(memory);
  return found;
}

// A kernel's hold on the workspaces of the streams that it has run on.
class Streams {
 public:
  explicit Streams(std::shared_ptr<Memory> memory) : memory_(std::move(memory)) {}

  template <class Call>
  void run(const Ort::KernelContext& context, size_t bytes, Call call) {
    void* stream = context.GetGPUComputeStream();
    workspace(stream).run(bytes, stream, call);
  }

 private:
  Workspace& workspace(void* stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<Workspace>& held = held_[stream];
    if (!held) held = workspace_of(memory_, stream);
    return *held;
  }

  std::shared_ptr<Memory> memory_;
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<Workspace>> held_;
};

}  // namespace kv
