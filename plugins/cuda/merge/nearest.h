// MergeCache: the target nearest to each of many slots. Some blocks of 128 threads per head, which share out its work,
// a tile of rows (evicted slots, or those of the eviction pool) and a split of the targets at a time. In float32, whose
// products are made on CUDA cores (of 16 bits: nearest_mma.h), tiles of 32 rows:
//
//   load the rows' keys, and where policy.order is by the error their values; the squares of each
//   for each 32 targets of the split
//     load theirs                                      a barrier: they are complete before anything is multiplied
//     nearness[row, target] = row . target             a thread two rows and every eighth target
//     ... over both norms (cosine), or as a distance   by the error: the product of keys' and values' distances
//     keep the nearest target that can receive, or in the pool that has a higher importance
//   combine the eight threads of a row, of equals the lowest slot; write the split's nearest
//
// Splits are combined in their order by `nearest_of`.
#pragma once

#include "work.h"

namespace kv {
namespace cuda {

struct NearestArgs {
  MergeWork work;
  bool higher;  // rows are the eviction pool; targets are unprotected slots of higher importance
};

// A tile of rows from `begin` on, and the targets of a split.
struct Look {
  int rows, begin, split, splits;
  Range targets;
};

// Calls look(head, Look) for this block's share of its head's work.
template <class Program, class F>
KV_DEVICE void look_at_all(Block<Program>& block, const NearestArgs& args, F look) {
  const MergeWork& work = args.work;
  const MergeHead head(work, block.index() / work.blocks);
  const HeadInfo x = head.info();
  if (x.over == 0) return;
  const int rows = args.higher ? x.pool : x.evicted, splits = splits_of(work, rows),
            last = args.higher || !work.call.recent_receives ? x.unprotected + x.unprotected_count : x.used;
  for (int i = block.index() % work.blocks; i < tiles_of(rows, work.tile) * splits; i += work.blocks) {
    const Range share = share_of(i % splits, splits, last - x.unprotected, Program::kSlots);
    look(
        head,
        Look{rows, i / splits * work.tile, i % splits, splits, {x.unprotected + share.from, x.unprotected + share.to}});
  }
}

// By thread t: the nearest of so many candidates of row t, of equals the lowest slot. finish(row, near) of what they
// were compared by: how near it is.
template <class F>
KV_DEVICE void store_nearest(const MergeHead& head, const Look& x, const float* bests, const int* places,
                             int candidates, int t, F finish) {
  if (t >= head.work.tile || x.begin + t >= x.rows) return;
  float best = kNoTarget;
  int place = -1;
  for (int i = t * candidates; i < (t + 1) * candidates; ++i)
    if (places[i] >= 0 && (place < 0 || bests[i] > best || (bests[i] == best && places[i] < place)))
      best = bests[i], place = places[i];
  head.work.nearness[head.split(x.begin + t, x.split, x.splits)] = place < 0 ? kNoTarget : finish(t, best);
  head.work.nearest[head.split(x.begin + t, x.split, x.splits)] = place;
}

// The nearest target of every row, in one pass over the keys of one split of the slots. ByError: nearest is where the
// product of the squared distances of keys and of values is smallest.
template <class T, bool ByError>
struct Nearest {
  using Args = NearestArgs;
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 2, kRows = 32, kSlots = 32, kParts = 4;
  struct Registers {
    float best[2];
    int place[2];
  };
  // Of the rows and of a block of targets the keys (or the values), in their own type, and the parts of their squares.
  struct Tile {
    char *row, *target;
    float *row_square, *target_square;
    int size, stride;

    static KV_HD constexpr size_t bytes(int size) {
      return (kRows + kSlots) * (shared_stride<T>(size) + kParts * sizeof(float));
    }
    KV_DEVICE Tile(char* shared, int size) : row(shared), size(size), stride(shared_stride<T>(size)) {
      target = row + kRows * stride;
      row_square = reinterpret_cast<float*>(target + kSlots * stride);
      target_square = row_square + kRows * kParts;
    }
  };
  // Tiles of keys and, by the error, of values; of the rows their importance; the best of every eighth slot.
  static KV_HD size_t size(const NearestArgs& args) {
    const KvMergeCache& a = args.work.call;
    return Tile::bytes(a.key_size) + (ByError ? Tile::bytes(a.value_size) : 0) + (kRows + 16 * kRows) * sizeof(float);
  }

  static KV_DEVICE void run(Block<Nearest>& block, const Args& args) {
    look_at_all(block, args, [&](const MergeHead& head, const Look& x) { look(block, args, head, x); });
  }

  // Ends with a barrier.
  static KV_DEVICE void look(Block<Nearest>& block, const Args& args, const MergeHead& head, const Look& x) {
    const KvMergeCache& a = head.a;
    const Tile keys(block.shared, a.key_size), values(block.shared + Tile::bytes(a.key_size), a.value_size);
    float* importance = reinterpret_cast<float*>(block.shared + size(args)) - 17 * kRows;
    float* bests = importance + kRows;
    int* places = reinterpret_cast<int*>(bests + 8 * kRows);
    const int to = x.targets.to;
    const auto row_at = [&](int i) { return x.begin + i < x.rows ? head.rows()[x.begin + i] : -1; };
    block.each([&](int t, Registers& r) {
      r.best[0] = r.best[1] = kNoTarget, r.place[0] = r.place[1] = -1;
      for (int i = t; i < kRows; i += kThreads)
        importance[i] = row_at(i) >= 0 ? head.of(head.work.importance)[row_at(i)] : 0.0f;
      load(keys.row, keys, t, [&](int i) { return row_at(i) >= 0 ? head.template key<T>(row_at(i)) : nullptr; });
      if (ByError)
        load(values.row, values, t,
             [&](int i) { return row_at(i) >= 0 ? head.template value<T>(row_at(i)) : nullptr; });
    });
    block.each([&](int t, auto&) {
      keys.row_square[t] = square(keys.row, keys, t);
      if (ByError) values.row_square[t] = square(values.row, values, t);
    });
    for (int at = x.targets.from; at < to; at += kSlots) {
      block.each([&](int t, auto&) {
        load(keys.target, keys, t, [&](int i) { return at + i < to ? head.template key<T>(at + i) : nullptr; });
        if (ByError)
          load(values.target, values, t, [&](int i) { return at + i < to ? head.template value<T>(at + i) : nullptr; });
      });
      block.each([&](int t, auto&) {
        keys.target_square[t] = square(keys.target, keys, t);
        if (ByError) values.target_square[t] = square(values.target, values, t);
      });
      block.each([&](int t, Registers& r) {
        float near[2][4], apart[2][4];
        measure(near, keys, a.policy.measure, t);
        if (ByError) {
          measure(apart, values, KV_MEASURE_DISTANCE, t);
          for (int i = 0; i < 2; ++i)
            for (int j = 0; j < 4; ++j) near[i][j] = fminf(near[i][j], 0.0f) * fmaxf(-apart[i][j], 0.0f);
        }
        update_best(r, near, head, args, importance, at, to, t);
      });
    }
    block.each([&](int t, Registers& r) {
      for (int i = 0; i < 2; ++i)
        bests[(t / 8 * 2 + i) * 8 + t % 8] = r.best[i], places[(t / 8 * 2 + i) * 8 + t % 8] = r.place[i];
    });
    block.each(
        [&](int t, auto&) { store_nearest(head, x, bests, places, 8, t, [](int, float near) { return near; }); });
  }

  template <class F>
  static KV_DEVICE void load(char* to, const Tile& tile, int t, F row) {
    const int vectors = tile.size / kLanes<T>;
    for (int i = t; i < kRows * vectors; i += kThreads) {
      const T* from = row(i / vectors);
      Vector vector = {};
      if (from) vector = load_vector(from + i % vectors * kLanes<T>);
      store_vector(to + i / vectors * tile.stride + i % vectors * 16, vector);
    }
  }
  // A quarter of the square of row t / 4.
  static KV_DEVICE float square(const char* rows, const Tile& tile, int t) {
    float sum = 0.0f;
    for (int i = t % kParts; i < tile.size / kLanes<T>; i += kParts) {
      float x[kLanes<T>];
      widen<T>(load_vector(rows + t / kParts * tile.stride + i * 16), x);
      for (int e = 0; e < kLanes<T>; ++e) sum += x[e] * x[e];
    }
    return sum;
  }
  static KV_DEVICE float sum_of_parts(const float* squares, int row) {
    float sum = 0.0f;
    for (int i = 0; i < kParts; ++i) sum += squares[row * kParts + i];
    return sum;
  }

  // How near two rows are to every eighth target.
  static KV_DEVICE void measure(float (&near)[2][4], const Tile& tile, int measure, int t) {
    const int row = t / 8 * 2;
    float product[2][4] = {};
    for (int i = 0; i < tile.size / kLanes<T>; ++i) {
      float x[2][kLanes<T>];
      widen<T>(load_vector(tile.row + row * tile.stride + i * 16), x[0]);
      widen<T>(load_vector(tile.row + (row + 1) * tile.stride + i * 16), x[1]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float target[kLanes<T>];
        widen<T>(load_vector(tile.target + (t % 8 + 8 * j) * tile.stride + i * 16), target);
#pragma unroll
        for (int e = 0; e < kLanes<T>; ++e) product[0][j] += x[0][e] * target[e], product[1][j] += x[1][e] * target[e];
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float target_square = sum_of_parts(tile.target_square, t % 8 + 8 * j);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float row_square = sum_of_parts(tile.row_square, row + i);
        near[i][j] = product[i][j];
        if (measure == KV_MEASURE_COSINE)
          near[i][j] /= fmaxf(sqrtf(target_square), 1e-12f) * fmaxf(sqrtf(row_square), 1e-12f);
        if (measure == KV_MEASURE_DISTANCE) near[i][j] = 2.0f * near[i][j] - target_square - row_square;
      }
    }
  }

  // The nearest so far of those that can receive.
  static KV_DEVICE void update_best(Registers& r, const float (&near)[2][4], const MergeHead& head, const Args& args,
                                    const float* row_importance, int at, int to, int t) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int slot = at + t % 8 + 8 * j;
      if (slot >= to || (!args.higher && head.of(args.work.mark)[slot] != kCanReceive)) continue;
      const float importance = head.of(args.work.importance)[slot];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (args.higher && !(importance > row_importance[t / 8 * 2 + i])) continue;
        if (near[i][j] > r.best[i]) r.best[i] = near[i][j], r.place[i] = slot;
      }
    }
  }
};

}  // namespace cuda
}  // namespace kv
