// A growing array for scratch memory. It replaces std::vector, whose code would be emitted once per instruction set
// under one name; the linker would keep any one of these copies, perhaps one that this machine cannot run.
#pragma once

#include <cstdlib>
#include <new>

namespace kv {
namespace KV_ISA {

template <class T>
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { free(data_); }

  // Returns room for `count` elements, whose contents are unspecified.
  T* reserve(size_t count) {
    if (count > capacity_) {
      free(data_);
      data_ = static_cast<T*>(malloc(count * sizeof(T)));
      capacity_ = data_ ? count : 0;
      if (!data_) abort();
    }
    return data_;
  }
  T* reserve(size_t count, T value) {
    reserve(count);
    for (size_t i = 0; i < count; ++i) data_[i] = value;
    return data_;
  }
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
  size_t capacity_ = 0;
};

static inline int min_of(int a, int b) { return a < b ? a : b; }
static inline int max_of(int a, int b) { return a > b ? a : b; }
static inline float max_of(float a, float b) { return a > b ? a : b; }

}  // namespace KV_ISA
}  // namespace kv
