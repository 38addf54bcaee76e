// Copies of weights in huge pages. A step reads every weight once: in pages of 4 KiB, as files are mapped, the
// processor looks addresses up more often than its tables hold them, and its prefetching ends at every page.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kv {

constexpr size_t kHugePage = size_t{2} << 20;

// Memory that weights share, so that small ones lie in huge pages too; it goes with the last of them.
class Chunk {
 public:
  // nullptr where there is no such memory.
  static std::shared_ptr<Chunk> make(size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const size_t size = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    // Room to begin at a huge page's boundary.
    void* const mapped = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    std::shared_ptr<Chunk> chunk(new Chunk(mapped, size));
    if (madvise(chunk->begin_, size, MADV_HUGEPAGE) == 0) return chunk;
#endif
    return nullptr;
  }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;
  ~Chunk() {
#if defined(__linux__)
    munmap(mapped_, size_ + kHugePage);
#endif
  }

  char* take(size_t bytes) {
    if (bytes > size_ - used_) return nullptr;
    char* const place = begin_ + used_;
    used_ += (bytes + 63) / 64 * 64;
    if (used_ > size_) used_ = size_;
    return place;
  }

 private:
  Chunk(void* mapped, size_t size) : mapped_(mapped), size_(size) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(mapped);
    begin_ = static_cast<char*>(mapped) + (kHugePage - address % kHugePage) % kHugePage;
  }

  void* mapped_;
  char* begin_;
  size_t size_, used_ = 0;
};

// The number after `name` in one of the kernel's files ("" for the first there); -1 where there is none.
inline int64_t number_in(const char* path, const std::string& name) {
  std::ifstream file(path);
  int64_t number = -1;
  for (std::string word; !name.empty() && file >> word;)
    if (word == name) break;
  return file >> number ? number : -1;
}

// Whether so many bytes more leave an eighth of the memory, the machine's or the control group's, to others. What the
// kernel holds of files counts as free: it gives that up first.
inline bool has_memory(int64_t bytes) {
  const int64_t total = number_in("/proc/meminfo", "MemTotal:") * 1024;
  if (number_in("/proc/meminfo", "MemAvailable:") * 1024 - bytes < total / 8) return false;
  const int64_t limit = number_in("/sys/fs/cgroup/memory.max", "");
  const int64_t used = number_in("/sys/fs/cgroup/memory.current", "") -
                       number_in("/sys/fs/cgroup/memory.stat", "inactive_file") -
                       number_in("/sys/fs/cgroup/memory.stat", "active_file");
  return limit <= 0 || limit - used - bytes >= limit / 8;
}

// Why weights stay where they are, or nullptr. KVEXPORT_HUGE_PAGES=off asks for it: processes then share the pages of
// one file.
inline const char* why_no_huge_pages() {
  const char* const asked = getenv("KVEXPORT_HUGE_PAGES");
  if (asked && strcmp(asked, "off") == 0) return "switched off by KVEXPORT_HUGE_PAGES";
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  for (std::string word; file >> word;)
    if (word == "[never]")
      return "switched off in the kernel";
    else if (word[0] == '[')
      return nullptr;
  return "the kernel has none";
}

// `bytes` at `data` in huge pages; nullptr where that cannot be, or would leave too little memory to others.
inline std::shared_ptr<const void> in_huge_pages(const void* data, size_t bytes) {
  constexpr size_t kChunk = 16 * kHugePage;
  static std::mutex mutex;
  static std::weak_ptr<Chunk> newest;
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Chunk> chunk = newest.lock();
  char* place = chunk ? chunk->take(bytes) : nullptr;
  if (!place) {
    const size_t size = bytes > kChunk ? bytes : kChunk;
    if (why_no_huge_pages() || !has_memory(static_cast<int64_t>(size))) return nullptr;
    chunk = Chunk::make(size);
    if (!chunk) return nullptr;
    newest = chunk;
    place = chunk->take(bytes);
  }
  memcpy(place, data, bytes);
#if defined(MADV_COLD)
  // Where the data is a mapped file, its pages are the first to go when memory is short.
  const uintptr_t page = 4096, from = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t to = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (to > from) madvise(reinterpret_cast<void*>(from), to - from, MADV_COLD);
#endif
  return std::shared_ptr<const void>(chunk, place);
}

}  // namespace kv
