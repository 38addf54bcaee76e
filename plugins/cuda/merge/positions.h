// MergeCache: slots in order of position.
#pragma once

#include "work.h"

namespace kv {
namespace cuda {

// Shared memory: a sum per thread, words with a bit per position, and how many bits are before each word.
struct PositionBits {
  static constexpr int kWords = 4096;
  int *sums, *bits, *before;

  static constexpr size_t kBytes = 2 * kWords * sizeof(int);
  KV_DEVICE PositionBits(int* sums, void* words) : sums(sums), bits(static_cast<int*>(words)), before(bits + kWords) {}
};

// Writes slots [0, count) in order of position to `order`, except for the first `passed` of them. `lowest` and
// `highest` bound all positions.
//
//   for each window of 131,072 positions that has slots
//     set a bit for each slot's position
//     before[word] = bits before the word             a prefix sum; a thread counts the bits of neighbouring words
//     place[slot] = bits before its own
//   if slots share a position, which no cache has, there are fewer bits than slots: compare every slot with all others;
//     in a tie the lower slot comes first
template <class Kernel>
KV_DEVICE void write_order(Block<Kernel>& block, const PositionBits& s, const int32_t* position, int count, int passed,
                           int lowest, int highest, int* order) {
  constexpr int kThreads = Kernel::kThreads, kWords = PositionBits::kWords, kEach = kWords / kThreads;
  constexpr uint32_t kWindow = 32 * kWords, kNowhere = ~0u;
  const auto from_lowest = [&](int i) { return static_cast<uint32_t>(position[i]) - static_cast<uint32_t>(lowest); };
  const auto each_in_window = [&](uint32_t from, auto use) {
    block.each([&](int t, auto&) {
      for (int i = t; i < count; i += kThreads) {
        const uint32_t at = from_lowest(i) - from;
        if (at < kWindow && from_lowest(i) >= from) use(i, at);
      }
    });
  };
  const auto write = [&](int slot, int place) {
    if (place >= passed) order[place - passed] = slot;
  };
  const uint32_t range = static_cast<uint32_t>(highest) - static_cast<uint32_t>(lowest);
  int placed = 0;
  for (uint32_t from = 0;;) {
    block.each([&](int t, auto&) {
      for (int i = t; i < kWords; i += kThreads) s.bits[i] = 0;
    });
    each_in_window(from, [&](int, uint32_t at) { block.add(&s.bits[at / 32], static_cast<int>(1u << at % 32)); });
    block.each([&](int t, auto& r) {
      r.count = 0;
      for (int i = 0; i < kEach; ++i) r.count += ones(s.bits[t * kEach + i]);
    });
    const int in_window = scan(block, s.sums, [](int, auto& r) { return r.count; });
    block.each([&](int t, auto& r) {
      int before = placed + r.scanned;
      for (int i = t * kEach; i < (t + 1) * kEach; ++i) {
        s.before[i] = before;
        before += ones(s.bits[i]);
      }
    });
    each_in_window(
        from, [&](int i, uint32_t at) { write(i, s.before[at / 32] + ones(s.bits[at / 32] & ((1u << at % 32) - 1))); });
    placed += in_window;
    if (range - from < kWindow) break;
    block.each([&](int t, auto& r) {
      uint32_t next = kNowhere;
      for (int i = t; i < count; i += kThreads)
        if (from_lowest(i) - from >= kWindow && from_lowest(i) > from) next = min_of(next, from_lowest(i));
      r.count = static_cast<int>(next);
    });
    from = reduce(
        block, reinterpret_cast<uint32_t*>(s.sums), [](int, auto& r) { return static_cast<uint32_t>(r.count); },
        [](uint32_t a, uint32_t b) { return min_of(a, b); });
    if (from == kNowhere) break;
  }
  if (placed == count) return;
  block.each([&](int t, auto&) {
    for (int i = t; i < count; i += kThreads) {
      int place = 0;
      for (int j = 0; j < count; ++j) place += position[j] < position[i] || (position[j] == position[i] && j < i);
      write(i, place);
    }
  });
}

}  // namespace cuda
}  // namespace kv
