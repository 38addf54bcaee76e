// MergeCache: kept slots and merged rows in order of position, and zeros after them.
//
//   Order, a block per head
//     source[i] = the slot, or the set's row, that comes i-th; a slot's place among those kept is a prefix sum
//     gather positions, votes and each statistic into shared memory; a barrier; write them back in their new order
//   Place, a block per head and 64 bytes of every key or value
//     slots in order of position: move 256 rows towards the front at a time      registers; a barrier; store
//     others: move all rows, 4 bytes of each at a time                           shared memory; a barrier; store
//     then the merged rows from the workspace, and zeros
//   Turn, a block per head and 32 rows, where keys are rotated by their places: every plane whose place has changed
//
// Each barrier stands between reading rows and writing over them. A head that is as it should be is left alone.
#pragma once

#include "work.h"

namespace kv {
namespace cuda {

// Whether a head's cache is as it should be already.
KV_DEVICE bool untouched(const MergeWork& work, const HeadInfo& x) {
  return work.in_place && x.sorted && x.used == x.in_all && x.evicted == 0;
}

// Where every row comes from, and all of a slot but its key and value.
struct Order {
  using Args = MergeWork;
  static constexpr int kThreads = 256, kBlocksPerMultiprocessor = 1;
  struct Registers {
    int count, scanned;
  };
  static KV_HD size_t size(int capacity) { return (kThreads + static_cast<size_t>(capacity)) * sizeof(int); }

  static KV_DEVICE void run(Block<Order>& block, const MergeWork& work) {
    const KvMergeCache& a = work.call;
    const MergeHead head(work, block.index());
    const HeadInfo x = head.info();
    if (untouched(work, x)) return;
    int *sums = reinterpret_cast<int*>(block.shared), *source = head.of(work.source);
    const int* result = head.of(work.result);
    const int each = (x.used + kThreads - 1) / kThreads;
    block.each([&](int t, auto& r) {
      r.count = 0;
      for (int i = t * each; i < min_of((t + 1) * each, x.used); ++i) r.count += result[i] != kNone;
    });
    const int kept = scan(block, sums, [](int, auto& r) { return r.count; });
    // A row's position is that of the slot whose place it takes.
    int32_t *column = reinterpret_cast<int32_t*>(sums + kThreads), *position = head.of(a.present.position);
    block.each([&](int t, auto& r) {
      if (t == 0) head.info().kept = kept;
      int at = r.scanned;
      for (int i = t * each; i < min_of((t + 1) * each, x.used); ++i) {
        if (result[i] == kNone) continue;
        column[at] = head.position(i);
        if (work.steps) head.of(work.steps)[at] = at - i;
        source[at++] = result[i] < 0 ? result[i] : head.slot(result[i]);
      }
    });
    const int end = work.in_place ? x.in_all : a.capacity;
    block.each([&](int t, auto&) {
      for (int i = t; i < end; i += kThreads) position[i] = i < kept ? column[i] : 0;
    });
    for (int k = -1; k < a.statistics; ++k) {
      float *from = k < 0 ? head.of(a.present.votes) : head.scores(k), *held = reinterpret_cast<float*>(column);
      const float* merged =
          work.merged_small + static_cast<size_t>(head.index) * work.most_evicted * (1 + a.statistics) + 1 + k;
      block.each([&](int t, auto&) {
        for (int i = t; i < kept; i += kThreads)
          held[i] = source[i] >= 0 ? from[source[i]] : merged[static_cast<size_t>(~source[i]) * (1 + a.statistics)];
      });
      block.each([&](int t, auto&) {
        for (int i = t; i < end; i += kThreads) from[i] = i < kept ? held[i] : 0.0f;
      });
    }
  }
};

// The rows of keys and values. A block is up to 64 bytes of every key or value of a head: no other block touches them.
//
// Slots that lay in order of position move towards the front, in the order of their places: what a step of rows reads,
// no earlier step has written. Slots in any other order go through shared memory, four bytes of all rows at a time.
struct Place {
  struct Args {
    MergeWork work;
    int element;  // bytes
  };
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 1, kVectors = 4, kLanes = kThreads / kVectors,
                       kSteps = 8;
  struct Registers {
    Vector row[kSteps];
  };
  static KV_HD size_t size(int capacity) { return static_cast<size_t>(capacity) * sizeof(uint32_t); }
  static KV_HD int blocks_of(int bytes) { return (bytes / 16 + kVectors - 1) / kVectors; }

  // Rows of one head as bytes: `width` of them from `offset` on are this block's.
  struct Rows {
    char* base;
    const char* merged;
    size_t stride, merged_stride;
    int width;
    KV_DEVICE char* row(int slot) const { return base + slot * stride; }
    KV_DEVICE const char* merged_row(int set) const { return merged + set * merged_stride; }
  };

  static KV_DEVICE void run(Block<Place>& block, const Args& args) {
    const MergeWork& work = args.work;
    const KvMergeCache& a = work.call;
    const int key_bytes = a.key_size * args.element, value_bytes = a.value_size * args.element;
    const int key_blocks = blocks_of(key_bytes), each = key_blocks + blocks_of(value_bytes),
              number = block.index() % each;
    const MergeHead head(work, block.index() / each);
    const HeadInfo x = head.info();
    if (untouched(work, x)) return;
    const bool keys = number < key_blocks;
    const int bytes = keys ? key_bytes : value_bytes, offset = (keys ? number : number - key_blocks) * kVectors * 16;
    Rows rows;
    rows.stride = bytes, rows.merged_stride = key_bytes + value_bytes;
    rows.base = static_cast<char*>(keys ? a.present.key : a.present.value) + head.slots * bytes + offset;
    rows.merged = static_cast<const char*>(work.merged) +
                  static_cast<size_t>(head.index) * work.most_evicted * rows.merged_stride + (keys ? 0 : key_bytes) +
                  offset;
    rows.width = min_of(bytes - offset, kVectors * 16);
    const int* source = head.of(work.source);
    if (x.sorted)
      move_forward(block, rows, source, x.kept);
    else
      move_any(block, rows, source, x.kept);
    block.each([&](int t, auto&) {
      const int at = t % kVectors * 16;
      for (int i = t / kVectors; at < rows.width && i < (work.in_place ? x.in_all : a.capacity); i += kLanes)
        if (i >= x.kept)
          store_vector(rows.row(i) + at, Vector{});
        else if (source[i] < 0)
          store_vector(rows.row(i) + at, load_vector(rows.merged_row(~source[i]) + at));
    });
  }

  static KV_DEVICE void move_forward(Block<Place>& block, const Rows& rows, const int* source, int kept) {
    for (int from = 0; from < kept; from += kLanes * kSteps) {
      const auto moves = [&](int i, int at) { return i < kept && at < rows.width && source[i] >= 0 && source[i] != i; };
      block.each([&](int t, Registers& r) {
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          const int i = from + j * kLanes + t / kVectors, at = t % kVectors * 16;
          if (moves(i, at)) r.row[j] = load_vector(rows.row(source[i]) + at);
        }
      });
      block.each([&](int t, Registers& r) {
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          const int i = from + j * kLanes + t / kVectors, at = t % kVectors * 16;
          if (moves(i, at)) store_vector(rows.row(i) + at, r.row[j]);
        }
      });
    }
  }

  static KV_DEVICE void move_any(Block<Place>& block, const Rows& rows, const int* source, int kept) {
    uint32_t* column = reinterpret_cast<uint32_t*>(block.shared);
    for (int at = 0; at < rows.width; at += 4) {
      block.each([&](int t, auto&) {
        for (int i = t; i < kept; i += kThreads)
          if (source[i] >= 0) column[i] = *reinterpret_cast<const uint32_t*>(rows.row(source[i]) + at);
      });
      block.each([&](int t, auto&) {
        for (int i = t; i < kept; i += kThreads)
          if (source[i] >= 0) *reinterpret_cast<uint32_t*>(rows.row(i) + at) = column[i];
      });
    }
  }
};

// The keys of kept rows, turned from the places that they had to those that they have; a thread a rotary plane of a
// row.
template <class T>
struct Turn {
  using Args = MergeWork;
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 1, kRows = 32;
  struct Registers {};
  static KV_HD int tiles_of(int rows) { return (rows + kRows - 1) / kRows; }

  static KV_DEVICE void run(Block<Turn>& block, const MergeWork& work) {
    const KvMergeCache& a = work.call;
    const int tiles = tiles_of(min_of(a.budget, a.capacity)), planes = a.rotary_planes;
    const MergeHead head(work, block.index() / tiles);
    const HeadInfo x = head.info();
    if (x.evicted == 0) return;
    const int first = block.index() % tiles * kRows, rows = min_of(kRows, x.kept - first);
    const int* steps = head.of(work.steps);
    T* keys = static_cast<T*>(a.present.key) + head.slots * a.key_size;
    block.each([&](int t, auto&) {
      for (int i = t; i < rows * planes; i += kThreads) {
        const int row = first + i / planes, plane = i % planes;
        if (steps[row] == 0) continue;
        const float angle = static_cast<float>(steps[row]) * a.inverse_frequencies[plane];
        T* key = keys + static_cast<size_t>(row) * a.key_size;
        T &x_of = key[a.rotary_interleaved ? 2 * plane : plane],
          &y_of = key[a.rotary_interleaved ? 2 * plane + 1 : plane + planes];
        float x_turned = to_float(x_of), y_turned = to_float(y_of);
        turn(cosf(angle), sinf(angle), &x_turned, &y_turned);
        assign(x_of, x_turned);
        assign(y_of, y_turned);
      }
    });
  }
};

}  // namespace cuda
}  // namespace kv
