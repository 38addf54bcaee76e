// Copies of weights in huge pages. A step reads every weight once. Files are mapped in pages of 4 KiB: the processor
// then translates more addresses than its translation tables have entries, and its prefetching ends at every page.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace kv {

constexpr size_t kHugePage = size_t{2} << 20;

// Memory that several weights share, so that small weights are in huge pages too. It is freed with the last of them.
class Chunk {
 public:
  // Returns nullptr if huge pages are not available.
  static std::shared_ptr<Chunk> make(size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const size_t size = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    // One huge page more, so that the chunk can begin at a huge page's boundary.
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

// Returns the number after the word `name` in one of the kernel's files, or the first number if `name` is ""; -1 if
// there is none.
inline int64_t number_in(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  int64_t number = -1;
  for (std::string word; !name.empty() && file >> word;)
    if (word == name) break;
  return file >> number ? number : -1;
}

// Returns whether a control group has an eighth of its memory left after `bytes` more bytes. As for the machine, the
// kernel's cache of files counts as free, since the kernel frees it first.
inline bool group_has_memory(const std::string& folder, bool first_version, int64_t bytes) {
  const int64_t limit = number_in(folder + (first_version ? "/memory.limit_in_bytes" : "/memory.max"), "");
  if (limit <= 0) return true;
  const std::string stat = folder + "/memory.stat", total = first_version ? "total_" : "";
  int64_t used = number_in(folder + (first_version ? "/memory.usage_in_bytes" : "/memory.current"), "");
  for (const char* files : {"inactive_file", "active_file"}) {
    const int64_t cached = number_in(stat, total + files);
    if (cached > 0) used -= cached;
  }
  return limit - used - bytes >= limit / 8;
}

// Returns whether `bytes` more bytes leave an eighth of the machine's memory free, and of the memory of every control
// group (version 1 or 2) of this process. root: the root of the file system, for tests.
inline bool has_memory(int64_t bytes, const std::string& root = "") {
  const int64_t total = number_in(root + "/proc/meminfo", "MemTotal:") * 1024;
  if (number_in(root + "/proc/meminfo", "MemAvailable:") * 1024 - bytes < total / 8) return false;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // number:controllers:path
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool first_version = controllers.find(",memory,") != std::string::npos;
    if (!first_version && controllers != ",,") continue;
    // In a container the path may be that of the host; the container's own group is then the root.
    std::string path = line.substr(second + 1);
    while (true) {
      while (!path.empty() && path.back() == '/') path.pop_back();
      const std::string folder = root + "/sys/fs/cgroup" + (first_version ? "/memory" : "") + path;
      if (!group_has_memory(folder, first_version, bytes)) return false;
      if (path.empty()) break;
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return true;
}

// Returns why weights are not copied to huge pages, or nullptr. KVEXPORT_HUGE_PAGES=off switches the copies off, so
// that processes share the pages of one file.
inline const char* why_no_huge_pages() {
  const char* const setting = getenv("KVEXPORT_HUGE_PAGES");
  if (setting && strcmp(setting, "off") == 0) return "switched off by KVEXPORT_HUGE_PAGES";
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  for (std::string word; file >> word;)
    if (word == "[never]")
      return "switched off in the kernel";
    else if (word[0] == '[')
      return nullptr;
  return "the kernel has none";
}

// Returns `bytes` of memory in huge pages; nullptr if there is none, or if it would leave too little memory free.
inline std::shared_ptr<void> huge_memory(size_t bytes) {
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
    if (size == kChunk) newest = chunk;  // the rest of a larger chunk is too small to share
    place = chunk->take(bytes);
  }
  return std::shared_ptr<void>(chunk, place);
}

#if defined(__linux__)
// Returns whether the kernel can read all pages from `from` to `to` again: it says that none is anonymous memory.
inline bool pages_of_file(uintptr_t from, uintptr_t to, uintptr_t page) {
  constexpr uint64_t kPresent = uint64_t{1} << 63, kSwapped = uint64_t{1} << 62, kOfFile = uint64_t{1} << 61;
  const int map = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (map < 0) return false;
  bool all = true;
  for (uint64_t entries[512]; all && from < to;) {
    const size_t count = std::min<size_t>(512, (to - from) / page), bytes = count * sizeof(uint64_t);
    all = pread(map, entries, bytes, static_cast<off_t>(from / page * sizeof(uint64_t))) == static_cast<ssize_t>(bytes);
    for (size_t i = 0; all && i < count; ++i)
      all = !(entries[i] & kSwapped) && (!(entries[i] & kPresent) || entries[i] & kOfFile);
    from += count * page;
  }
  close(map);
  return all;
}
#endif

// After a copy of the data: if the data is a mapped file, its pages leave this process's memory. The kernel's cache of
// files keeps them as long as it has room.
inline void give_up(const void* data, size_t bytes) {
#if defined(__linux__)
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t from = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t to = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (to > from && pages_of_file(from, to, page)) madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
#else
  (void)data, (void)bytes;
#endif
}

// Returns a copy of `bytes` bytes at `data` in huge pages; nullptr if huge_memory returns nullptr.
inline std::shared_ptr<const void> in_huge_pages(const void* data, size_t bytes) {
  const std::shared_ptr<void> place = huge_memory(bytes);
  if (!place) return nullptr;
  memcpy(place.get(), data, bytes);
  give_up(data, bytes);
  return place;
}

}  // namespace kv
