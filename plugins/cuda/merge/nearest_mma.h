// MergeCache: the target nearest to each of many slots, of caches of 16 bits, on tensor cores. The work is shared out
// as in nearest.h. A tile is up to 128 rows (64 where heads are above 128 elements and the nearest is by the error),
// and targets are looked at some at a time, a stage, 64 of 128 elements:
//
//   copy the rows' keys, and where policy.order is by the error their values, into the stages; a warp takes those of 32
//   rows into its registers, and their squares                    the warps of a tile of up to 32 rows all the same
//   ones for each stage of the split's targets, their keys and, by the error, values           the next three on their
//   way
//     square = diagonal of [16, D] x [16, D]^T            a warp every fourth 16 targets, of keys or of values
//     product[32, 16] = row[32, D] x target[16, D]^T      a warp its rows with all targets that no other looks at
//     nearness = factor[target] product + offset[target]  by the error: both distances, and their product
//     keep the nearest of the targets whose importance is above the row's
//   combine the threads of a row, of equals the lowest slot; write the split's nearest
//
// A barrier stands between a stage, its squares and its products. The slots of a stage are looked up before the one
// before it is asked for, so that no copy waits for its address.
//
// The products of 16-bit numbers are exact in float32, in which they are added up; the tensor cores' order and rounding
// of these sums are their own. Squares are made by the same operation as products, so that a key is at no distance from
// its equal.
#pragma once

#include "../core/mma.h"
#include "nearest.h"

namespace kv {
namespace cuda {

// kHigh: how many times 16 rows a warp has. Their keys and values take 128 of a thread's registers, whatever their
// size.
template <class T, bool ByError, int kHigh>
struct NearestMma {
  using Args = NearestArgs;
  static constexpr int kThreads = 128, kWarps = kThreads / kWarp, kBlocksPerMultiprocessor = 2, kStages = 4;
  static constexpr int kParts = ByError ? 2 : 1;     // keys, and values
  static constexpr int kFours = 8 / kHigh / kParts;  // of 64 elements each, at most
  static constexpr int kWarpRows = 16 * kHigh, kRows = kWarps * kWarpRows, kSlots = ByError ? 32 : 64;
  static constexpr int kMostStage = 18432;  // bytes of a stage's keys and values

  struct Registers {
    uint32_t row[kParts][kHigh][4 * kFours][4], target[kParts][4], squared[4];
    float product[kParts][kHigh][2][4];                            // [.., tile of 16 rows, of 8 targets]
    float row_square[kParts][kHigh][2], row_importance[kHigh][2];  // [.., row and row + 8]
    float best[kHigh][2];
    int place[kHigh][2];
    const char* from[kParts];           // the head's keys and values, at the vector that the thread copies
    int slot[kSlots / (kThreads / 8)];  // in the cache, of the rows of a stage that it copies
    float importance;                   // of the stage's target of this thread
  };

  // Of a target its importance, and factor and offset, or by the error the squares of its key and value.
  struct alignas(16) Target {
    float importance, of[2];
  };

  // Shared memory: stages, each of `slots` rows of keys, as many of values and what is known of each target; the rows'
  // squares. Rows are filled up with zeros to whole 64 elements, and lie an odd number of vectors apart, so that
  // `ldmatrix` meets no bank twice.
  struct Shared {
    const Args& args;
    char* base;
    int fours, stride, slots;
    float* row_square;  // [parts, kRows]

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
    return kStages * Shared::stage_bytes(Shared::slots_of(stride), stride) + kParts * kRows * sizeof(float);
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

  static KV_DEVICE void run(Block<NearestMma>& block, const Args& args) {
    const Shared s(block.shared, args);
    look_at_all(block, args, [&](const MergeHead& head, const Look& x) { look(block, s, head, x); });
  }

  // Ends with a barrier.
  static KV_DEVICE void look(Block<NearestMma>& block, const Shared& s, const MergeHead& head, const Look& x) {
    const Share share(min_of(x.rows - x.begin, head.work.tile));
    start(block, s, head, x, share);
    const int stages = (x.targets.to - x.targets.from + s.slots - 1) / s.slots;
    look_up(block, s, head, x, 0);
    for (int i = 0; i < kStages - 1; ++i) fetch(block, s, head, x, i);
    for (int i = 0; i < stages; ++i) {
      block.cp_async_wait(kStages - 2);
      fetch(block, s, head, x, i + kStages - 1);
      squares(block, s, head.a.policy.measure, i % kStages);
      for (int round = 0; round < share.rounds(s.slots); ++round) {
        products(block, s, share, i % kStages, round);
        block.each_alone([&](int t, Registers& r) {
          const int column = share.column(t, round);
          if (column < s.slots) update(r, s, i % kStages, column + t % 4 * 2, x.targets.from + i * s.slots);
        });
      }
    }
    block.cp_async_wait(0);
    float* bests = reinterpret_cast<float*>(s.base);  // [kRows, candidates], in place of the stages
    int* places = reinterpret_cast<int*>(bests + kThreads * kHigh * 2);
    block.each([&](int t, Registers& r) {
#pragma unroll
      for (int i = 0; i < kHigh * 2; ++i) {
        const int at = share.row(t, i / 2, i % 2) * share.candidates() + share.candidate(t);
        bests[at] = r.best[i / 2][i % 2], places[at] = r.place[i / 2][i % 2];
      }
    });
    const int measure = head.a.policy.measure;
    block.each([&](int t, auto&) {
      store_nearest(head, x, bests, places, share.candidates(), t, [&](int row, float near) {
        if (!ByError && measure == KV_MEASURE_COSINE) return near / norm(s.row_square[row]);
        return !ByError && measure == KV_MEASURE_DISTANCE ? near - s.row_square[row] : near;
      });
    });
  }

  static KV_DEVICE float norm(float square) { return fmaxf(sqrtf(square), 1e-12f); }

  // The rows, their squares and importance. Ends with a barrier.
  static KV_DEVICE void start(Block<NearestMma>& block, const Shared& s, const MergeHead& head, const Look& x,
                              const Share& share) {
    const int count = min_of(x.rows - x.begin, head.work.tile);
    const int* rows = head.rows() + x.begin;
    block.each_alone([&](int t, Registers& r) {
      for (int part = 0; part < kParts; ++part) {
        r.from[part] = once(static_cast<const char*>(part ? head.a.present.value : head.a.present.key) +
                            head.slots * s.size(part) * sizeof(T) + t % 8 * 16);
      }
      for (int i = t / 8; i < kStages * s.slots; i += kThreads / 8) {
        fill_up(s, i, t % 8);
        if (i < count) copy(block, s, r, s.key(i), head.slot(rows[i]), t % 8);
      }
#pragma unroll
      for (int i = 0; i < kHigh * 2; ++i) {
        const int row = share.row(t, i / 2, i % 2);
        // Where targets only have to be able to receive, those that can have an importance of 1.
        r.row_importance[i / 2][i % 2] = s.args.higher && row < count ? head.of(head.work.importance)[rows[row]] : 0.0f;
        r.best[i / 2][i % 2] = kNoTarget, r.place[i / 2][i % 2] = -1;
      }
    });
    block.cp_async_commit();
    block.cp_async_wait(0);
#pragma unroll
    for (int i = 0; i < kParts * kHigh; ++i) {
      const int part = i / kHigh, m = i % kHigh;
      block.each_alone([](int, Registers& r) { clear(r); });
#pragma unroll
      for (int step = 0; step < 4 * kFours; ++step) {
        if (step / 4 >= s.fours) continue;
        const auto corner = [&](int t) {
          return s.key(share.first_row(t) + m * 16) + part * s.slots * s.stride + step * 32;
        };
        load_a(block, s.stride, corner, [=](Registers& r) { return r.row[part][m][step]; });
        load_b(block, s.stride, corner, [](Registers& r) { return r.target[0]; });
        square(block, [=](Registers& r) { return r.row[part][m][step]; });
      }
      block.each([&](int t, Registers& r) {
        if (share.group(t) != t / kWarp) return;  // other warps have the same rows
        keep_square(r, t,
                    [&](int row, float x) { s.row_square[part * kRows + share.first_row(t) + m * 16 + row] = x; });
      });
    }
    block.each_alone([&](int t, Registers& r) {
#pragma unroll
      for (int i = 0; i < kParts * kHigh * 2; ++i)
        r.row_square[i / 2 / kHigh][i / 2 % kHigh][i % 2] =
            s.row_square[i / 2 / kHigh * kRows + share.row(t, i / 2 % kHigh, i % 2)];
    });
  }

  // Within a phase: the zeros that fill a row's key and value up, by eight threads.
  static KV_DEVICE void fill_up(const Shared& s, int i, int lane) {
    for (int part = 0; part < kParts; ++part)
      for (int j = s.size(part) / kLanes<T> + lane; j < s.fours * 8; j += 8)
        store_vector(s.key(i) + part * s.slots * s.stride + j * 16, Vector{});
  }

  // Within a phase: asks for the key and the value of a slot of the cache, by eight threads.
  static KV_DEVICE void copy(Block<NearestMma>& block, const Shared& s, const Registers& r, char* key, int slot,
                             int lane) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int vectors = s.size(part) / kLanes<T>;
      // A head's rows are less than 4 GB.
      const char* from = once(r.from[part] + static_cast<uint32_t>(slot) * static_cast<uint32_t>(vectors * 16));
      char* to = key + part * s.slots * s.stride + lane * 16;
#pragma unroll
      for (int j = 0; j < kFours; ++j)
        if (lane + j * 8 < vectors) block.template copy<16>(to + j * 128, from + j * 128);
    }
  }

  // Where the rows of stage i are in the cache, and the importance of its targets; used by the next `fetch`.
  static KV_DEVICE void look_up(Block<NearestMma>& block, const Shared& s, const MergeHead& head, const Look& x,
                                int i) {
    const int at = x.targets.from + i * s.slots, count = min_of(x.targets.to - at, s.slots);
    block.each_alone([&](int t, Registers& r) {
#pragma unroll
      for (int j = 0; j < kSlots / 16; ++j)
        if (j * 16 + t / 8 < count) r.slot[j] = head.slot(at + j * 16 + t / 8);
      r.importance = -INFINITY;
      if (t >= count) return;
      if (s.args.higher)
        r.importance = head.of(head.work.importance)[at + t];
      else if (head.of(head.work.mark)[at + t] == kCanReceive)
        r.importance = 1.0f;
    });
  }

  // Asks for stage i, and looks the next one up.
  static KV_DEVICE void fetch(Block<NearestMma>& block, const Shared& s, const MergeHead& head, const Look& x, int i) {
    const int count = min_of(x.targets.to - (x.targets.from + i * s.slots), s.slots), stage = i % kStages;
    block.each_alone([&](int t, Registers& r) {
#pragma unroll
      for (int j = 0; j < kSlots / 16; ++j)
        if (j * 16 + t / 8 < count)
          copy(block, s, r, s.stage(stage) + t / 8 * s.stride + j * 16 * s.stride, r.slot[j], t % 8);
      if (t < s.slots) s.target(stage, t).importance = r.importance;
    });
    block.cp_async_commit();
    look_up(block, s, head, x, i + 1);
  }

  static KV_DEVICE void clear(Registers& r) {
#pragma unroll
    for (int i = 0; i < kParts * kHigh * 8; ++i) r.product[i / 8 / kHigh][i / 8 % kHigh][i / 4 % 2][i % 4] = 0.0f;
  }

  // Adds up the products of 16 rows or targets with themselves, as a and as two b; a lane has elements of the diagonal
  // or none.
  template <class A>
  static KV_DEVICE void square(Block<NearestMma>& block, A a) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
      multiply<T>(block, [=](Registers& r) { return Product{r.product[0][0][n], a(r), r.target[0] + 2 * n}; });
  }
  template <class Keep>
  static KV_DEVICE void keep_square(const Registers& r, int t, Keep keep) {
    const int row = t % kWarp / 4;
    if (t % 4 != row / 2) return;
    keep(row, row % 2 ? r.product[0][0][0][1] : r.product[0][0][0][0]);
    keep(row + 8, row % 2 ? r.product[0][0][1][3] : r.product[0][0][1][2]);
  }

  // The squares of a stage's targets, and by the key what they mean for the nearness. Ends with a barrier.
  static KV_DEVICE void squares(Block<NearestMma>& block, const Shared& s, int measure, int stage) {
    const int all = kParts * s.slots / 16;
    for (int i = 0; i < all; i += kWarps) {
      const auto number = [&](int t) { return min_of(i + t / kWarp, all - 1); };
      block.each_alone([](int, Registers& r) { clear(r); });
#pragma unroll 1
      for (int four = 0; four < s.fours; ++four) {
        const auto from = [&](int t) { return s.stage(stage) + number(t) * 16 * s.stride + four * 128; };
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          load_matrices<false>(
              block, [&](int t) { return from(t) + offset_of_a(t, s.stride) + step * 32; },
              [](Registers& r) { return r.squared; });
          load_matrices<false>(
              block, [&](int t) { return from(t) + offset_of_b(t, s.stride) + step * 32; },
              [](Registers& r) { return r.target[0]; });
          square(block, [](Registers& r) { return r.squared; });
        }
      }
      block.each_alone([&](int t, Registers& r) {
        if (i + t / kWarp >= all) return;
        keep_square(r, t, [&](int row, float x) {
          const int target = number(t) * 16 + row;
          if (ByError) {
            (i + t / kWarp < s.slots / 16 ? s.target(stage, target).of[0] : s.target(stage, target - s.slots).of[1]) =
                x;
            return;
          }
          const bool distance = measure == KV_MEASURE_DISTANCE;
          s.target(stage, target).of[0] = measure == KV_MEASURE_COSINE ? 1.0f / norm(x) : distance ? 2.0f : 1.0f;
          s.target(stage, target).of[1] = distance ? -x : 0.0f;
        });
      });
    }
    block.each([](int, auto&) {});
  }

  // Of a warp's rows and 16 targets of a stage.
  static KV_DEVICE void products(Block<NearestMma>& block, const Shared& s, const Share& share, int stage, int round) {
    block.each_alone([](int, Registers& r) { clear(r); });
    const auto from = [&](int t) {
      return s.stage(stage) + min_of(share.column(t, round), s.slots - 16) * s.stride + offset_of_b(t, s.stride);
    };
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      if (four > 0 && four >= s.fours) continue;
#pragma unroll
      for (int i = 0; i < 4 * kParts; ++i) {
        const int step = four * 4 + i / kParts, part = i % kParts;
        load_matrices<false>(
            block, [&](int t) { return from(t) + part * s.slots * s.stride + step * 32; },
            [=](Registers& r) { return r.target[part]; });
#pragma unroll
        for (int j = 0; j < kHigh * 2; ++j)
          multiply<T>(block, [=](Registers& r) {
            return Product{r.product[part][j / 2][j % 2], r.row[part][j / 2][step], r.target[part] + j % 2 * 2};
          });
      }
    }
  }

  // Of a warp's rows and a thread's four targets, in their order: the nearest so far. column: the first of them; at:
  // the stage's first target.
  static KV_DEVICE void update(Registers& r, const Shared& s, int stage, int column, int at) {
    const Target* targets = &s.target(stage, column);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int n = j / 2, of = j % 2, place = n * 8 + of;
      const Target target = targets[place];
#pragma unroll
      for (int i = 0; i < 2 * kHigh; ++i) {
        const int m = i / 2, low = i % 2;
        const auto product = [&](int part) { return r.product[part][m][n][2 * low + of]; };
        float near;
        if constexpr (ByError) {
          const auto apart = [&](int part) {
            return fmaf(-2.0f, product(part), target.of[part]) + r.row_square[part][m][low];
          };
          near = -fabsf(apart(0) * apart(1));
        } else {
          near = target.of[0] * product(0) + target.of[1];
        }
        if (target.importance > r.row_importance[m][low] && near > r.best[m][low])
          r.best[m][low] = near, r.place[m][low] = at + column + place;
      }
    }
  }
};

}  // namespace cuda
}  // namespace kv
