// The registers and shared memory of a block of nearest_mma.h, and the division of a tile among its warps.
#pragma once

#include "nearest.h"

namespace kv {
namespace cuda {

// kHigh: how many times 16 rows a warp has. Their keys and values take 128 of a thread's registers, whatever their
// size. A four is 64 elements of a row, which are four steps of 16.
template <bool ByError, int kHigh>
struct NearestLayout {
  using Args = NearestArgs;
  static constexpr int kThreads = 128, kWarps = kThreads / kWarp, kBlocksPerMultiprocessor = 2, kStages = 4;
  static constexpr int kTensors = ByError ? 2 : 1;     // keys, and values
  static constexpr int kFours = 8 / kHigh / kTensors;  // the most fours of a row
  static constexpr int kWarpRows = 16 * kHigh, kRows = kWarps * kWarpRows, kSlots = ByError ? 32 : 64;
  static constexpr int kMostStage = 18432;  // bytes of a stage's keys and values

  struct Registers {
    uint32_t row[kTensors][kHigh][4 * kFours][4], target[kTensors][4], squared[4];
    float product[kTensors][kHigh][2][4];   // [.., tile of 16 rows, of 8 targets]
    float row_square[kHigh][2];             // squared norms of the keys, [.., row and row + 8]
    float best[kHigh][2], error[kHigh][2];  // error: minus the ease
    int place[kHigh][2];
    const char* from[kTensors];         // the head's keys and values, at the vector that this thread copies
    int slot[kSlots / (kThreads / 8)];  // in the cache, of the rows of a stage that this thread copies
    float importance;                   // of this thread's target in the stage
  };

  // A target of a stage. importance: -inf if the slot is no target. nearness = factor product + offset; for a distance
  // factor is 2 and offset minus the squared norm of its key. value_square: with ByError, the squared norm of its
  // value.
  struct alignas(16) Target {
    float importance, factor, offset, value_square;
  };

  // Shared memory: stages, each with `slots` rows of keys, as many rows of values, and Targets; then the squared norms
  // and the importance of the tile's rows. Rows are padded with zeros to whole fours, and their stride is an odd number
  // of vectors, so that `ldmatrix` has no bank conflict.
  struct Shared {
    const Args& args;
    char* base;
    int fours, stride, slots;
    float* row_square;  // [tensors, kRows]
    float* row_importance;

    static KV_HD int fours_of(const KvMergeCache& a) {
      const int most = ByError && a.value_size > a.key_size ? a.value_size : a.key_size;
      return (most + 63) / 64;
    }
    static KV_HD int slots_of(int stride) {
      int slots = kSlots;
      while (slots > 16 && slots * kTensors * stride > kMostStage) slots /= 2;
      return slots;
    }
    static KV_HD int stride_of(const KvMergeCache& a) { return fours_of(a) * 128 + 16; }
    static KV_HD int stage_bytes(int slots, int stride) {
      return slots * (kTensors * stride + static_cast<int>(sizeof(Target)));
    }
    KV_DEVICE Shared(char* shared, const Args& args)
        : args(args),
          base(shared),
          fours(fours_of(args.work.call)),
          stride(stride_of(args.work.call)),
          slots(slots_of(stride)) {
      row_square = reinterpret_cast<float*>(stage(kStages));
      row_importance = row_square + kTensors * kRows;
    }
    KV_DEVICE char* stage(int number) const { return base + number * stage_bytes(slots, stride); }
    // Key i, counted through all stages; its value is slots * stride bytes behind it.
    KV_DEVICE char* key(int i) const { return stage(i / slots) + i % slots * stride; }
    KV_DEVICE Target& target(int number, int i) const {
      return reinterpret_cast<Target*>(stage(number) + kTensors * slots * stride)[i];
    }
    KV_DEVICE int size(int tensor) const { return tensor ? args.work.call.value_size : args.work.call.key_size; }
  };
  static KV_HD size_t size(const Args& args) {
    const int stride = Shared::stride_of(args.work.call);
    return kStages * Shared::stage_bytes(Shared::slots_of(stride), stride) + (kTensors + 1) * kRows * sizeof(float);
  }

  // The division of a tile among warps: a warp's rows, and which 16 targets of a stage it compares.
  struct Share {
    int log;  // log2 of the number of groups of rows, 1, 2 or 4, among which the warps are divided

    KV_DEVICE explicit Share(int rows) : log(rows <= kWarpRows ? 0 : rows <= 2 * kWarpRows ? 1 : 2) {}
    KV_DEVICE int group(int t) const { return t / kWarp & ((1 << log) - 1); }
    KV_DEVICE int first_row(int t) const { return group(t) * kWarpRows; }
    KV_DEVICE int row(int t, int m, int low) const { return first_row(t) + m * 16 + low * 8 + t % kWarp / 4; }
    KV_DEVICE int rounds(int slots) const { return ((slots / 16 << log) + kWarps - 1) / kWarps; }
    KV_DEVICE int column(int t, int round) const { return ((round * kWarps + t / kWarp) >> log) * 16; }
    // The number of threads that have a candidate for a row, and the number of this thread's candidate.
    KV_DEVICE int candidates() const { return 4 * kWarps >> log; }
    KV_DEVICE int candidate(int t) const { return (t / kWarp >> log) * 4 + t % 4; }
  };
};

}  // namespace cuda
}  // namespace kv
