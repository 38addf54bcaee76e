// Asynchronous copies of rows of 16-byte vectors into shared memory, where a row begins every `vector_stride` bytes.
#pragma once

#include <utility>

#include "types.h"

namespace kv {
namespace cuda {

// Returns where thread t's first vector of rows of `width` vectors goes, in bytes from the first row.
KV_DEVICE int place_of(int width, int t) { return t / width * vector_stride(width) + t % width * 16; }

template <int kWidth, class Kernel, int... kPass>
KV_DEVICE void copy_passes(Block<Kernel>& block, char* to, const char* from, std::integer_sequence<int, kPass...>) {
  constexpr int kVectors = Kernel::kThreads, kTo = kVectors / kWidth * vector_stride(kWidth), kFrom = kVectors * 16;
  (block.template copy<16, kPass * kTo, kPass * kFrom>(to, from), ...);
}

// Within a phase: copies a thread's share of kRows contiguous rows of kWidth vectors asynchronously: every kThreads-th
// vector, one instruction each. to, from: the addresses of the thread's first vector, which is vector t.
template <int kWidth, int kRows, class Kernel>
KV_DEVICE void copy_rows(Block<Kernel>& block, char* to, const char* from) {
  constexpr int kThreads = Kernel::kThreads;
  static_assert(kThreads % kWidth == 0 && kRows * kWidth % kThreads == 0, "every thread has as many vectors");
  copy_passes<kWidth>(block, to, from, std::make_integer_sequence<int, kRows * kWidth / kThreads>());
}

// Within a phase: copies thread t's share of `count` rows of `width` units of kUnit bytes (2, 4 or 16); in shared
// memory rows are `stride` bytes apart. to, from: the addresses of the first row. Addresses advance by additions: the
// only divisions are before the loop.
template <int kUnit, class Kernel>
KV_DEVICE void copy_units(Block<Kernel>& block, void* to, int stride, const void* from, int width, int count, int t) {
  constexpr int kThreads = Kernel::kThreads;
  const int step = kThreads / width * stride + kThreads % width * kUnit, rest = kThreads % width;
  int at = t % width;
  char* target = static_cast<char*>(to) + t / width * stride + at * kUnit;
  const char* source = static_cast<const char*>(from) + t * kUnit;
#pragma unroll 1
  for (int i = t; i < count * width; i += kThreads) {
    if constexpr (kUnit == 2)  // asynchronous copies have at least 4 bytes
      *reinterpret_cast<uint16_t*>(target) = *reinterpret_cast<const uint16_t*>(source);
    else
      block.template copy<kUnit>(target, source);
    source += kThreads * kUnit, target += step, at += rest;
    if (at >= width) at -= width, target += stride - width * kUnit;
  }
}

// Within a phase: copies thread t's share of `count` rows (at most kRows) of `width` vectors; to and from as for
// copy_rows. It calls copy_rows if count is kRows and width is one of kWidths.
template <int kRows, int... kWidths, class Kernel>
KV_DEVICE void copy_most(Block<Kernel>& block, char* to, const char* from, int width, int count, int t) {
  const auto whole = [&](auto named) {
    constexpr int kWidth = decltype(named)::value;
    if (width != kWidth) return false;
    copy_rows<kWidth, kRows>(block, to, from);
    return true;
  };
  if (count < kRows || !(whole(std::integral_constant<int, kWidths>()) || ...))
    copy_units<16>(block, to - place_of(width, t), vector_stride(width), from - t * 16, width, count, t);
}

}  // namespace cuda
}  // namespace kv
