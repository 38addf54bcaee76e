// MergeCache: the target nearest to each of many slots of a 16-bit cache, on tensor cores. The work is divided as in
// nearest.h. A tile is up to 128 rows (64 if rows have more than 128 elements and the search is by the error). Targets
// come in stages, for instance 64 targets of 128 elements:
//
//   copy the rows' keys (and with ByError values) into the memory of the stages; every warp loads those of 32 rows into
//     registers, and computes their squared norms       with up to 32 rows, all warps have the same rows
//   for each stage of the split's targets: their keys (and values)    the next three stages are being copied
//     square = diagonal of [16, D] x [16, D]^T            every fourth 16 targets per warp, keys or values
//     product[32, 16] = row[32, D] x target[16, D]^T      a warp's rows with the targets of its share
//     nearness = factor[target] product + offset[target]  ByError: also both distances, and their product
//     keep the nearest target and the least error; among the rest, for the eviction pool, only the least error of the
//       targets whose importance is above the row's
//   combine the threads of a row, where a tie goes to the lowest slot; write the nearest target of the split
//
// Slots that are no targets have an offset of -inf.
//
// A barrier separates the copy of a stage, its squares and its products. The slots of a stage are read one stage ahead
// of its copy, so that no copy waits for its address.
//
// The products of 16-bit numbers are exact in float32, in which they are added up; the tensor cores choose the order
// and rounding of these sums. Squares come from the same operation as products, so equal keys have the distance 0.
#pragma once

#include "../core/mma.h"
#include "nearest_layout.h"

namespace kv {
namespace cuda {

template <class T, bool ByError, int kHigh>
struct NearestMma : NearestLayout<ByError, kHigh> {
  using Layout = NearestLayout<ByError, kHigh>;
  using Layout::kThreads, Layout::kWarps, Layout::kStages, Layout::kTensors, Layout::kFours, Layout::kRows,
      Layout::kSlots;
  using typename Layout::Args, typename Layout::Registers, typename Layout::Shared, typename Layout::Share,
      typename Layout::Target;

  static KV_DEVICE void run(Block<NearestMma>& block, const Args& args) {
    const Shared s(block.shared, args);
    each_tile(block, args, [&](const MergeHead& head, const SearchTile& x) { search(block, s, head, x); });
  }

  // The targets of a stage: `count` from place `from` on, among all slots or among the rest.
  struct Stage {
    int from, count;
    bool of_rest;
  };
  static KV_DEVICE int stages_of(const Shared& s, Range targets) {
    return (targets.to - targets.from + s.slots - 1) / s.slots;
  }
  static KV_DEVICE Stage stage_of(const Shared& s, const SearchTile& x, int i) {
    const int before = stages_of(s, x.targets);
    const bool of_rest = i >= before;
    const Range& targets = of_rest ? x.rest : x.targets;
    const int from = targets.from + (of_rest ? i - before : i) * s.slots;
    return {from, min_of(targets.to - from, s.slots), of_rest};
  }

  // Searches a tile. Ends with a barrier: shared memory may be written again.
  static KV_DEVICE void search(Block<NearestMma>& block, const Shared& s, const MergeHead& head, const SearchTile& x) {
    const Share share(min_of(x.rows - x.begin, head.work.tile));
    start(block, s, head, x, share);
    const int stages = stages_of(s, x.targets) + stages_of(s, x.rest);
    read_targets(block, s, head, x, 0);
    for (int i = 0; i < kStages - 1; ++i) fetch(block, s, head, x, i);
    for (int i = 0; i < stages; ++i) {
      block.cp_async_wait(kStages - 2);
      fetch(block, s, head, x, i + kStages - 1);
      square_targets(block, s, head.a.policy.measure, i % kStages);
      const Stage stage = stage_of(s, x, i);
      for (int round = 0; round < share.rounds(s.slots); ++round) {
        multiply_rows(block, s, share, i % kStages, round);
        block.each_alone([&](int t, Registers& r) {
          const int column = share.column(t, round);
          if (column >= s.slots) return;
          const Target* targets = &s.target(i % kStages, column + t % 4 * 2);
          if (stage.of_rest && s.args.search == kOfPool)
            update_error(r, s, targets, share, t);
          else
            update(r, s, targets, share, stage.from + column + t % 4 * 2, t);
        });
      }
    }
    block.cp_async_wait(0);
    const Candidates candidates(s.base, kThreads * kHigh * 2, share.candidates());  // in the memory of the stages
    block.each([&](int t, Registers& r) {
#pragma unroll
      for (int i = 0; i < kHigh * 2; ++i) {
        const int at = share.row(t, i / 2, i % 2) * share.candidates() + share.candidate(t);
        candidates.best[at] = r.best[i / 2][i % 2], candidates.ease[at] = -r.error[i / 2][i % 2];
        candidates.place[at] = r.place[i / 2][i % 2];
      }
    });
    const int measure = head.a.policy.measure;
    block.each([&](int t, auto&) {
      store_nearest<ByError>(head, x, s.args, candidates, t, [&](int row, float near) {
        if (measure == KV_MEASURE_COSINE) return near / norm(s.row_square[row]);
        return measure == KV_MEASURE_DISTANCE ? near - s.row_square[row] : near;
      });
    });
  }

  static KV_DEVICE float norm(float square) { return fmaxf(sqrtf(square), 1e-12f); }

  // Loads the tile's rows, their squared norms and importance. Ends with a barrier: the stages may be written.
  static KV_DEVICE void start(Block<NearestMma>& block, const Shared& s, const MergeHead& head, const SearchTile& x,
                              const Share& share) {
    const int count = min_of(x.rows - x.begin, head.work.tile);
    const int* rows = head.rows() + x.begin;
    block.each_alone([&](int t, Registers& r) {
      for (int tensor = 0; tensor < kTensors; ++tensor) {
        r.from[tensor] = once(
            reinterpret_cast<const char*>(tensor ? head.template values<T>() : head.template keys<T>()) + t % 8 * 16);
      }
      for (int i = t / 8; i < kStages * s.slots; i += kThreads / 8) {
        pad_row(s, i, t % 8);
        if (i < count) copy(block, s, r, s.key(i), head.slot(rows[i]), t % 8);
      }
#pragma unroll
      for (int i = 0; i < kHigh * 2; ++i) {
        r.best[i / 2][i % 2] = kNoTarget, r.place[i / 2][i % 2] = -1;
        r.error[i / 2][i % 2] = -kNoTarget;
      }
      if (s.args.search == kOfPool && t < count) s.row_importance[t] = head.of(head.work.importance)[rows[t]];
    });
    block.cp_async_commit();
    block.cp_async_wait(0);
#pragma unroll
    for (int i = 0; i < kTensors * kHigh; ++i) {
      const int tensor = i / kHigh, m = i % kHigh;
      block.each_alone([](int, Registers& r) { clear(r); });
#pragma unroll
      for (int step = 0; step < 4 * kFours; ++step) {
        if (step / 4 >= s.fours) continue;
        const auto corner = [&](int t) {
          return s.key(share.first_row(t) + m * 16) + tensor * s.slots * s.stride + step * 32;
        };
        load_a(block, s.stride, corner, [=](Registers& r) { return r.row[tensor][m][step]; });
        block.each_alone([=](int, Registers& r) { swap_operand(r.row[tensor][m][step], r.target[0]); });
        square(block, [=](Registers& r) { return r.row[tensor][m][step]; });
      }
      block.each([&](int t, Registers& r) {
        if (share.group(t) != t / kWarp) return;  // other warps have the same rows
        store_square(r, t,
                     [&](int row, float x) { s.row_square[tensor * kRows + share.first_row(t) + m * 16 + row] = x; });
      });
    }
    block.each_alone([&](int t, Registers& r) {
#pragma unroll
      for (int i = 0; i < kHigh * 2; ++i) r.row_square[i / 2][i % 2] = s.row_square[share.row(t, i / 2, i % 2)];
    });
  }

  // Within a phase: eight threads write the zeros that pad a row's key and value.
  static KV_DEVICE void pad_row(const Shared& s, int i, int lane) {
    for (int tensor = 0; tensor < kTensors; ++tensor)
      for (int j = s.size(tensor) / kLanes<T> + lane; j < s.fours * 8; j += 8)
        store_vector(s.key(i) + tensor * s.slots * s.stride + j * 16, Vector{});
  }

  // Within a phase: eight threads start the copies of the key and the value of a slot of the cache.
  static KV_DEVICE void copy(Block<NearestMma>& block, const Shared& s, const Registers& r, char* key, int slot,
                             int lane) {
#pragma unroll
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      const int vectors = s.size(tensor) / kLanes<T>;
      const char* from =
          once(r.from[tensor] + uint64_t{static_cast<uint32_t>(slot)} * static_cast<uint32_t>(vectors * 16));
      char* to = key + tensor * s.slots * s.stride + lane * 16;
#pragma unroll
      for (int j = 0; j < kFours; ++j)
        if (lane + j * 8 < vectors) block.template copy<16>(to + j * 128, from + j * 128);
    }
  }

  // Reads, for the next `fetch`, the slots in the cache of the rows of stage i and the importance of its targets.
  static KV_DEVICE void read_targets(Block<NearestMma>& block, const Shared& s, const MergeHead& head,
                                     const SearchTile& x, int i) {
    const Stage targets = stage_of(s, x, i);
    const bool of_pool = s.args.search == kOfPool;
    block.each_alone([&](int t, Registers& r) {
#pragma unroll
      for (int j = 0; j < kSlots / 16; ++j)
        if (j * 16 + t / 8 < targets.count)
          r.slot[j] = head.slot(target_at(head, targets.of_rest, targets.from + j * 16 + t / 8));
      r.importance = -INFINITY;
      if (t >= targets.count) return;
      const int slot = target_at(head, targets.of_rest, targets.from + t);
      if (of_pool && targets.of_rest)
        r.importance = head.of(head.work.importance)[slot];
      else if (head.of(head.work.mark)[slot] == (of_pool ? kUpper : kCanReceive))
        r.importance = 1.0f;
    });
  }

  // Starts the copies of stage i, and reads the targets of the next one.
  static KV_DEVICE void fetch(Block<NearestMma>& block, const Shared& s, const MergeHead& head, const SearchTile& x,
                              int i) {
    const int count = stage_of(s, x, i).count, stage = i % kStages;
    block.each_alone([&](int t, Registers& r) {
#pragma unroll
      for (int j = 0; j < kSlots / 16; ++j)
        if (j * 16 + t / 8 < count)
          copy(block, s, r, s.stage(stage) + t / 8 * s.stride + j * 16 * s.stride, r.slot[j], t % 8);
      if (t < s.slots) s.target(stage, t).importance = r.importance;
    });
    block.cp_async_commit();
    read_targets(block, s, head, x, i + 1);
  }

  static KV_DEVICE void clear(Registers& r) {
#pragma unroll
    for (int i = 0; i < kTensors * kHigh * 8; ++i) r.product[i / 8 / kHigh][i / 8 % kHigh][i / 4 % 2][i % 4] = 0.0f;
  }

  // Converts 16 rows between the layouts of an operand a and of two operands b.
  static KV_DEVICE void swap_operand(const uint32_t (&from)[4], uint32_t (&to)[4]) {
    to[0] = from[0], to[1] = from[2], to[2] = from[1], to[3] = from[3];
  }

  // Adds the products of 16 rows or targets with themselves, as a and as two b. Some lanes have elements of the
  // diagonal, the squared norms; store_square calls store(row, square) for these.
  template <class A>
  static KV_DEVICE void square(Block<NearestMma>& block, A a) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
      multiply<T>(block, [=](Registers& r) { return Product{r.product[0][0][n], a(r), r.target[0] + 2 * n}; });
  }
  template <class Store>
  static KV_DEVICE void store_square(const Registers& r, int t, Store store) {
    const int row = t % kWarp / 4;
    if (t % 4 != row / 2) return;
    store(row, row % 2 ? r.product[0][0][0][1] : r.product[0][0][0][0]);
    store(row + 8, row % 2 ? r.product[0][0][1][3] : r.product[0][0][1][2]);
  }

  // Computes the squared norms of a stage's targets, and with them factor and offset. Ends with a barrier: they are
  // visible.
  static KV_DEVICE void square_targets(Block<NearestMma>& block, const Shared& s, int measure, int stage) {
    const int all = kTensors * s.slots / 16;
    for (int i = 0; i < all; i += kWarps) {
      const auto number = [&](int t) { return min_of(i + t / kWarp, all - 1); };
      block.each_alone([](int, Registers& r) { clear(r); });
#pragma unroll 1
      for (int four = 0; four < s.fours; ++four) {
        const auto from = [&](int t) { return s.stage(stage) + number(t) * 16 * s.stride + four * 128; };
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          load_matrices<false>(
              block, [&](int t) { return from(t) + offset_of_b(t, s.stride) + step * 32; },
              [](Registers& r) { return r.target[0]; });
          block.each_alone([](int, Registers& r) { swap_operand(r.target[0], r.squared); });
          square(block, [](Registers& r) { return r.squared; });
        }
      }
      block.each_alone([&](int t, Registers& r) {
        if (i + t / kWarp >= all) return;
        store_square(r, t, [&](int row, float x) {
          const int place = number(t) * 16 + row;
          if (ByError && place >= s.slots) {
            s.target(stage, place - s.slots).value_square = x;
            return;
          }
          Target& target = s.target(stage, place);
          const bool distance = measure == KV_MEASURE_DISTANCE;
          target.factor = measure == KV_MEASURE_COSINE ? 1.0f / norm(x) : distance ? 2.0f : 1.0f;
          target.offset = target.importance == -INFINITY ? -INFINITY : distance ? -x : 0.0f;
        });
      });
    }
    block.each([](int, auto&) {});
  }

  // Multiplies a warp's rows with 16 targets of a stage.
  static KV_DEVICE void multiply_rows(Block<NearestMma>& block, const Shared& s, const Share& share, int stage,
                                      int round) {
    block.each_alone([](int, Registers& r) { clear(r); });
    const auto from = [&](int t) {
      return s.stage(stage) + min_of(share.column(t, round), s.slots - 16) * s.stride + offset_of_b(t, s.stride);
    };
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      if (four > 0 && four >= s.fours) continue;
#pragma unroll
      for (int i = 0; i < 4 * kTensors; ++i) {
        const int step = four * 4 + i / kTensors, tensor = i % kTensors;
        load_matrices<false>(
            block, [&](int t) { return from(t) + tensor * s.slots * s.stride + step * 32; },
            [=](Registers& r) { return r.target[tensor]; });
#pragma unroll
        for (int j = 0; j < kHigh * 2; ++j)
          multiply<T>(block, [=](Registers& r) {
            return Product{r.product[tensor][j / 2][j % 2], r.row[tensor][j / 2][step], r.target[tensor] + j % 2 * 2};
          });
      }
    }
  }

  // Returns, with ByError, the squared norm of the value of the thread's row i; registers have no room for it.
  static KV_DEVICE float value_square_of(const Shared& s, const Share& share, int t, int i) {
    return ByError ? s.row_square[kRows + share.row(t, i / 2, i % 2)] : 0.0f;
  }

  // How near a target is to the thread's row i. key: by the key, without terms that only depend on the row (see
  // `search`); error: minus the nearness by policy.order.
  struct Near {
    float key, error;
  };
  static KV_DEVICE Near near_of(const Registers& r, const Target& target, int place, int i, float value_square) {
    const int m = i / 2, low = i % 2, n = place / 8;
    const auto product = [&](int tensor) { return r.product[tensor][m][n][2 * low + place % 2]; };
    const float key = fmaf(target.factor, product(0), target.offset);
    if constexpr (!ByError) return {key, -key};
    constexpr int kValue = kTensors - 1;
    const float apart = fmaf(-2.0f, product(kValue), target.value_square) + value_square;
    return {key, fabsf((r.row_square[m][low] - key) * apart)};
  }

  // Updates the nearest target so far, and with ByError the least error, with a thread's four targets in their order.
  // at: the place of the first.
  static KV_DEVICE void update(Registers& r, const Shared& s, const Target* targets, const Share& share, int at,
                               int t) {
    float value_square[2 * kHigh];
#pragma unroll
    for (int i = 0; i < 2 * kHigh; ++i) value_square[i] = value_square_of(s, share, t, i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int place = j / 2 * 8 + j % 2;
      const Target target = targets[place];
#pragma unroll
      for (int i = 0; i < 2 * kHigh; ++i) {
        const Near near = near_of(r, target, place, i, value_square[i]);
        float &best = r.best[i / 2][i % 2], &error = r.error[i / 2][i % 2];
        if (ByError) error = fminf(error, near.error);
        if (near.key > best) best = near.key, r.place[i / 2][i % 2] = at + place;
      }
    }
  }

  // Updates the least error with those of a thread's four targets whose importance is above the row's.
  static KV_DEVICE void update_error(Registers& r, const Shared& s, const Target* targets, const Share& share, int t) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int place = j / 2 * 8 + j % 2;
      const Target target = targets[place];
#pragma unroll
      for (int i = 0; i < 2 * kHigh; ++i) {
        float& error = r.error[i / 2][i % 2];
        if (target.importance > s.row_importance[share.row(t, i / 2, i % 2)])
          error = fminf(error, near_of(r, target, place, i, value_square_of(s, share, t, i)).error);
      }
    }
  }
};

}  // namespace cuda
}  // namespace kv
