// MergeCache: slots that stay, in order of position, and zeros after them.
#pragma once

#include "plan.h"

namespace kv {
namespace cuda {

// Whether a head's cache is as it should be already.
KV_DEVICE bool untouched(const Merge& plan, const HeadPlan& x) {
  return plan.in_place && x.sorted && x.used == x.in_all && x.leaving == 0;
}

// Where every row comes from, and all of a slot but its rows. One block per head.
struct Order {
  using Args = Merge;
  static constexpr int kThreads = 256, kBlocksPerMultiprocessor = 1;
  struct Registers {
    int count, scanned;
  };
  static KV_HD size_t size(int capacity) { return (kThreads + static_cast<size_t>(capacity)) * sizeof(int); }

  static KV_DEVICE void run(Block<Order>& block, const Merge& plan) {
    const KvMergeCache& a = plan.call;
    const MergeHead head(plan, block.index());
    const HeadPlan x = head.info();
    if (untouched(plan, x)) return;
    int *sums = reinterpret_cast<int*>(block.shared), *source = head.of(plan.source);
    const int* owner = head.of(plan.owner);
    const int each = (x.used + kThreads - 1) / kThreads;
    block.each([&](int t, auto& r) {
      r.count = 0;
      for (int i = t * each; i < min_of((t + 1) * each, x.used); ++i) r.count += owner[i] != kNobody;
    });
    const int kept = scan(block, sums, [](int, auto& r) { return r.count; });
    // The position of what comes out is that of the place where it does.
    int32_t *column = reinterpret_cast<int32_t*>(sums + kThreads), *position = head.of(a.present.position);
    block.each([&](int t, auto& r) {
      if (t == 0) head.info().kept = kept;
      int at = r.scanned;
      for (int i = t * each; i < min_of((t + 1) * each, x.used); ++i) {
        if (owner[i] == kNobody) continue;
        column[at] = head.position(i);
        source[at++] = owner[i] < 0 ? owner[i] : head.slot(owner[i]);
      }
    });
    const int end = plan.in_place ? x.in_all : a.capacity;
    block.each([&](int t, auto&) {
      for (int i = t; i < end; i += kThreads) position[i] = i < kept ? column[i] : 0;
    });
    for (int k = -1; k < a.statistics; ++k) {
      float *from = k < 0 ? head.of(a.present.votes) : head.scores(k), *held = reinterpret_cast<float*>(column);
      const float* merged =
          plan.merged_small + static_cast<size_t>(head.index) * plan.most * (1 + a.statistics) + 1 + k;
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
// no earlier step has written. Slots that did not go through shared memory, four bytes of all rows at a time.
struct Place {
  struct Args {
    Merge plan;
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
    KV_DEVICE const char* merged_row(int group) const { return merged + group * merged_stride; }
  };

  static KV_DEVICE void run(Block<Place>& block, const Args& args) {
    const Merge& plan = args.plan;
    const KvMergeCache& a = plan.call;
    const int key_bytes = a.key_size * args.element, value_bytes = a.value_size * args.element;
    const int key_blocks = blocks_of(key_bytes), each = key_blocks + blocks_of(value_bytes),
              number = block.index() % each;
    const MergeHead head(plan, block.index() / each);
    const HeadPlan x = head.info();
    if (untouched(plan, x)) return;
    const bool keys = number < key_blocks;
    const int bytes = keys ? key_bytes : value_bytes, offset = (keys ? number : number - key_blocks) * kVectors * 16;
    Rows rows;
    rows.stride = bytes, rows.merged_stride = key_bytes + value_bytes;
    rows.base = static_cast<char*>(keys ? a.present.key : a.present.value) + head.slots * bytes + offset;
    rows.merged = static_cast<const char*>(plan.merged) +
                  static_cast<size_t>(head.index) * plan.most * rows.merged_stride + (keys ? 0 : key_bytes) + offset;
    rows.width = min_of(bytes - offset, kVectors * 16);
    const int* source = head.of(plan.source);
    if (x.sorted)
      move_forward(block, rows, source, x.kept);
    else
      move_any(block, rows, source, x.kept);
    block.each([&](int t, auto&) {
      const int at = t % kVectors * 16;
      for (int i = t / kVectors; at < rows.width && i < (plan.in_place ? x.in_all : a.capacity); i += kLanes)
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

}  // namespace cuda
}  // namespace kv
