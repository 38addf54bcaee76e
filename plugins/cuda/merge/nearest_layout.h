// What a block of the search for targets on tensor cores (nearest_mma.h) keeps, and how its warps share out a tile.
#pragma once

#include "nearest.h"

namespace kv {
namespace cuda {

// kHigh: how many times 16 rows a warp has. Their keys and values take 128 of a thread's registers, whatever their
// size.
template <bool ByError, int kHigh>
struct NearestLayout {
  using Args = NearestArgs;
  static constexpr int kThreads = 128, kWarps = kThreads / kWarp, kBlocksPerMultiprocessor = 2, kStages = 4;
  static constexpr int kParts = ByError ? 2 : 1;     // keys, and values
  static constexpr int kFours = 8 / kHigh / kParts;  // of 64 elements each, at most
  static constexpr int kWarpRows = 16 * kHigh, kRows = kWarps * kWarpRows, kSlots = ByError ? 32 : 64;
  static constexpr int kMostStage = 18432;  // bytes of a stage's keys and values

  struct Registers {
    uint32_t row[kParts][kHigh][4 * kFours][4], target[kParts][4], squared[4];
    float product[kParts][kHigh][2][4];     // [.., tile of 16 rows, of 8 targets]
    float row_square[kHigh][2];             // of the keys, [.., row and row + 8]
    float best[kHigh][2], error[kHigh][2];  // by policy.order, minus how near the best target is
    int place[kHigh][2];
    const char* from[kParts];           // the head's keys and values, at the vector that the thread copies
    int slot[kSlots / (kThreads / 8)];  // in the cache, of the rows of a stage that it copies
    float importance;                   // of the stage's target of this thread
  };

  // Of a target its importance, -inf where it is none; factor and offset of its key, by the error 2 and minus the
  // square; and by the error the value's square.
  struct alignas(16) Target {
    float importance, of[2], value_square;
  };

  // Shared memory: stages, each of `slots` rows of keys, as many of values and what is known of each target; the rows'
  // squares. Rows are filled up with zeros to whole 64 elements, and lie an odd number of vectors apart, so that
  // `ldmatrix` meets no bank twice.
  struct Shared {
    const Args& args;
    char* base;
    int fours, stride, slots;
    float* row_square;  // [parts, kRows]
    float* row_importance;

    static KV_HD int fours_of(const KvMergeCache& a) {
      const int most = ByError && a.value_size > a.key_size ? a.value_size : a.key_size;
      return (most + 63) / 64;
    }
    static KV_HD int slots_of(int stride) {
      int slots = kSlots;
      while (slots > 16 && slots * kParts * stride > kMostStage) slots /= 2;
      return slots;
    }
    static KV_HD int stride_of(const KvMergeCache& a) { return fours_of(a) * 128 + 16; }
    static KV_HD int stage_bytes(int slots, int stride) {
      return slots * (kParts * stride + static_cast<int>(sizeof(Target)));
    }
    KV_DEVICE Shared(char* shared, const Args& args)
        : args(args),
          base(shared),
          fours(fours_of(args.work.call)),
          stride(stride_of(args.work.call)),
          slots(slots_of(stride)) {
      row_square = reinterpret_cast<float*>(stage(kStages));
      row_importance = row_square + kParts * kRows;
    }
    KV_DEVICE char* stage(int number) const { return base + number * stage_bytes(slots, stride); }
    // Key i; its value lies slots * stride behind it. The keys of a stage are followed by those of the next one.
    KV_DEVICE char* key(int i) const { return stage(i / slots) + i % slots * stride; }
    KV_DEVICE Target& target(int number, int i) const {
      return reinterpret_cast<Target*>(stage(number) + kParts * slots * stride)[i];
    }
    KV_DEVICE int size(int part) const { return part ? args.work.call.value_size : args.work.call.key_size; }
  };
  static KV_HD size_t size(const Args& args) {
    const int stride = Shared::stride_of(args.work.call);
    return kStages * Shared::stage_bytes(Shared::slots_of(stride), stride) + (kParts + 1) * kRows * sizeof(float);
  }

  // A warp's share of a tile: its rows, and which 16 targets of a stage it looks at.
  struct Share {
    int log;  // of 1, 2 or 4 groups of rows, among which the warps are divided

    KV_DEVICE explicit Share(int rows) : log(rows <= kWarpRows ? 0 : rows <= 2 * kWarpRows ? 1 : 2) {}
    KV_DEVICE int group(int t) const { return t / kWarp & ((1 << log) - 1); }
    KV_DEVICE int first_row(int t) const { return group(t) * kWarpRows; }
    KV_DEVICE int row(int t, int m, int low) const { return first_row(t) + m * 16 + low * 8 + t % kWarp / 4; }
    KV_DEVICE int rounds(int slots) const { return ((slots / 16 << log) + kWarps - 1) / kWarps; }
    KV_DEVICE int column(int t, int round) const { return ((round * kWarps + t / kWarp) >> log) * 16; }
    // Of the threads that have candidates for a row.
    KV_DEVICE int candidates() const { return 4 * kWarps >> log; }
    KV_DEVICE int candidate(int t) const { return (t / kWarp >> log) * 4 + t % 4; }
  };
};

}  // namespace cuda
}  // namespace kv
