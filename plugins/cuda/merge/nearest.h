// MergeCache: the target nearest to each of many slots. Some blocks of 128 threads per head divide its work: tiles of
// rows (evicted slots, or slots of the eviction pool) times splits of the targets. This file is for float32 caches, on
// CUDA cores, in tiles of 32 rows (16-bit caches: nearest_mma.h):
//
//   load the rows' keys (and with ByError values), and their squared norms
//   for each 32 targets of the split
//     load their keys (and values)                     a barrier: they are complete before they are multiplied
//     nearness[row, target] = row . target             two rows and every eighth target per thread
//     ... divided by both norms (cosine), or as minus the squared distance; ByError: minus the product of the squared
//         distances of keys and of values
//     keep the nearest target
//   combine the eight threads of a row, where a tie goes to the lowest slot; write the nearest target of the split
//
// The targets of an evicted slot are the slots that can receive. A slot of the eviction pool has as targets the upper
// slots (work.h), and among the rest those of a higher importance than its own; of the rest, only `ease` is kept: how
// near the best target is by policy.order.
//
// `nearest_of` and `ease_of` (work.h) combine the splits in their order.
#pragma once

#include "work.h"

namespace kv {
namespace cuda {

// kOfPool: rows are the eviction pool. kOfAll, kOfRest: rows are the evicted slots, their targets all slots that can
// receive, or those among the rest.
enum Search { kOfPool, kOfAll, kOfRest };

struct NearestArgs {
  MergeWork work;
  Search search;
  int start[kTable + 1];  // the blocks before those of each entry
};
static_assert(sizeof(NearestArgs) <= 4096, "the arguments of a kernel");

// A tile of a search: rows from `begin` on, and the targets of a split (slots, and places in the list of the rest).
struct SearchTile {
  int rows, begin, split, splits;
  Range targets, rest;
};

// Returns a slot that may be a target: slot n, or the n-th of the rest.
KV_DEVICE int target_at(const MergeHead& head, bool of_rest, int n) { return of_rest ? head.of(head.work.rest)[n] : n; }

// Calls search(head, SearchTile) for this block's share of its head's work. The head is found again for every tile, so
// that a search, which takes nearly all registers, keeps none of its numbers.
template <class Kernel, class F>
KV_DEVICE void each_tile(Block<Kernel>& block, const NearestArgs& args, F search) {
  const MergeWork& work = args.work;
  for (int turn = 0;; ++turn) {
    const int at = once(block.index()), entry = entry_of(args.start, at), blocks = work.entry[entry].blocks,
              first = at - args.start[entry];
    const MergeHead head(work, entry, first / blocks);
    const HeadInfo x = head.info();
    if (x.over == 0) return;
    const bool of_pool = args.search == kOfPool;
    const int rows = of_pool ? x.pool : x.evicted, splits = splits_of(head, rows),
              last = of_pool || !work.call.recent_receives ? x.unprotected + x.unprotected_count : x.used;
    int slots = last - x.unprotected, rest = 0;
    if (of_pool) rest = x.rest_unprotected;
    if (args.search == kOfRest) slots = 0, rest = x.rest;
    const int i = first % blocks + turn * blocks, split = i % splits;
    if (i >= tiles_of(rows, work.tile) * splits) return;
    const Range share = share_of(split, splits, slots, Kernel::kSlots);
    // For the pool in the reverse order: splits with one block of slots less take one block of the rest more.
    const Range more = share_of(of_pool ? splits - 1 - split : split, splits, rest, Kernel::kSlots);
    search(
        head,
        SearchTile{
            rows, i / splits * work.tile, split, splits, {x.unprotected + share.from, x.unprotected + share.to}, more});
  }
}

// The results of threads that each searched some of a row's targets; a row has `each` of them. place: the place of the
// nearest target, -1 without; best: how near it is; ease: for the eviction pool, how near the best target is by
// policy.order, kNoTarget without.
struct Candidates {
  float *best, *ease;
  int *place, each;

  KV_DEVICE Candidates(char* shared, int count, int each)
      : best(reinterpret_cast<float*>(shared)),
        ease(best + count),
        place(reinterpret_cast<int*>(ease + count)),
        each(each) {}
  static KV_HD constexpr size_t bytes(int count) { return count * (2 * sizeof(float) + sizeof(int)); }
};

// Within a phase: thread t stores the nearest of row t's candidates; a tie goes to the lowest slot. finish(row, near)
// turns the number by which candidates were compared into the nearness (with ByError that of keys alone).
template <bool ByError, class F>
KV_DEVICE void store_nearest(const MergeHead& head, const SearchTile& x, const NearestArgs& args,
                             const Candidates& candidates, int t, F finish) {
  if (t >= head.work.tile || x.begin + t >= x.rows) return;
  float best = kNoTarget, ease = kNoTarget;
  int place = -1;
  for (int i = t * candidates.each; i < (t + 1) * candidates.each; ++i) {
    ease = fmaxf(ease, candidates.ease[i]);
    if (candidates.place[i] < 0) continue;
    if (place < 0 || candidates.best[i] > best || (candidates.best[i] == best && candidates.place[i] < place))
      best = candidates.best[i], place = candidates.place[i];
  }
  const size_t at = head.split(x.begin + t, x.split, x.splits);
  head.work.nearness[at] = place < 0 ? kNoTarget : finish(t, best);
  head.work.nearest[at] = place < 0 ? -1 : target_at(head, args.search == kOfRest, place);
  if (args.search != kOfPool) return;
  if (!ByError) ease = fmaxf(ease, best);
  head.work.ease[at] = ByError || ease == kNoTarget ? ease : finish(t, ease);
}

// Finds the nearest target of every row of a tile in one pass over the keys of a split. ByError: policy.order is by the
// error, and the best target has the smallest product of the squared distances of keys and of values.
template <class T, bool ByError>
struct Nearest {
  using Args = NearestArgs;
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 2, kRows = 32, kSlots = 32, kQuarters = 4;
  struct Registers {
    float best[2], ease[2];
    int place[2];
  };
  // The keys (or the values) of the rows and of a block of targets, in the cache's type, and the quarters of their
  // squared norms.
  struct Tile {
    char *row, *target;
    float *row_square, *target_square;
    int size, stride;

    static KV_HD constexpr size_t bytes(int size) {
      return (kRows + kSlots) * (shared_stride<T>(size) + kQuarters * sizeof(float));
    }
    KV_DEVICE Tile(char* shared, int size) : row(shared), size(size), stride(shared_stride<T>(size)) {
      target = row + kRows * stride;
      row_square = reinterpret_cast<float*>(target + kSlots * stride);
      target_square = row_square + kRows * kQuarters;
    }
  };
  // Bytes of shared memory: tiles of keys and with ByError of values; the rows' importance; eight candidates of each
  // row.
  static KV_HD size_t tiles(const KvMergeCache& a) {
    return Tile::bytes(a.key_size) + (ByError ? Tile::bytes(a.value_size) : 0);
  }
  static KV_HD size_t size(const NearestArgs& args) {
    return tiles(args.work.call) + kRows * sizeof(float) + Candidates::bytes(8 * kRows);
  }

  static KV_DEVICE void run(Block<Nearest>& block, const Args& args) {
    each_tile(block, args, [&](const MergeHead& head, const SearchTile& x) { search(block, args, head, x); });
  }

  // Searches a tile. Ends with a barrier: shared memory may be written again.
  static KV_DEVICE void search(Block<Nearest>& block, const Args& args, const MergeHead& head, const SearchTile& x) {
    const KvMergeCache& a = head.a;
    const Tile keys(block.shared, a.key_size), values(block.shared + Tile::bytes(a.key_size), a.value_size);
    float* importance = reinterpret_cast<float*>(block.shared + tiles(a));
    const Candidates candidates(reinterpret_cast<char*>(importance + kRows), 8 * kRows, 8);
    const auto row_at = [&](int i) { return x.begin + i < x.rows ? head.rows()[x.begin + i] : -1; };
    block.each([&](int t, Registers& r) {
      r.best[0] = r.best[1] = r.ease[0] = r.ease[1] = kNoTarget, r.place[0] = r.place[1] = -1;
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
    compare(block, args, head, keys, values, importance, x.targets, false);
    compare(block, args, head, keys, values, importance, x.rest, true);
    block.each([&](int t, Registers& r) {
      for (int i = 0; i < 2; ++i) {
        const int at = (t / 8 * 2 + i) * 8 + t % 8;
        candidates.best[at] = r.best[i], candidates.ease[at] = r.ease[i], candidates.place[at] = r.place[i];
      }
    });
    block.each([&](int t, auto&) {
      store_nearest<ByError>(head, x, args, candidates, t, [](int, float near) { return near; });
    });
  }

  // Compares the rows with targets, one block of slots after another. Ends with a barrier: tiles may be loaded again.
  static KV_DEVICE void compare(Block<Nearest>& block, const Args& args, const MergeHead& head, const Tile& keys,
                                const Tile& values, const float* importance, Range targets, bool of_rest) {
    const KvMergeCache& a = head.a;
    const int to = targets.to;
    for (int at = targets.from; at < to; at += kSlots) {
      block.each([&](int t, auto&) {
        load(keys.target, keys, t,
             [&](int i) { return at + i < to ? head.template key<T>(target_at(head, of_rest, at + i)) : nullptr; });
        if (ByError)
          load(values.target, values, t,
               [&](int i) { return at + i < to ? head.template value<T>(target_at(head, of_rest, at + i)) : nullptr; });
      });
      block.each([&](int t, auto&) {
        keys.target_square[t] = square(keys.target, keys, t);
        if (ByError) values.target_square[t] = square(values.target, values, t);
      });
      block.each([&](int t, Registers& r) {
        float near[2][4], apart[2][4];
        measure(near, keys, a.policy.measure, t);
        if (ByError) measure(apart, values, KV_MEASURE_DISTANCE, t);
        update(r, near, apart, head, args, importance, at, to, of_rest, t);
      });
    }
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
  // Returns a quarter of the squared norm of row t / 4.
  static KV_DEVICE float square(const char* rows, const Tile& tile, int t) {
    float sum = 0.0f;
    for (int i = t % kQuarters; i < tile.size / kLanes<T>; i += kQuarters) {
      float x[kLanes<T>];
      widen<T>(load_vector(rows + t / kQuarters * tile.stride + i * 16), x);
      for (int e = 0; e < kLanes<T>; ++e) sum += x[e] * x[e];
    }
    return sum;
  }
  static KV_DEVICE float sum_of_quarters(const float* squares, int row) {
    float sum = 0.0f;
    for (int i = 0; i < kQuarters; ++i) sum += squares[row * kQuarters + i];
    return sum;
  }

  // Computes how near two rows are to every eighth target.
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
      const float target_square = sum_of_quarters(tile.target_square, t % 8 + 8 * j);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float row_square = sum_of_quarters(tile.row_square, row + i);
        near[i][j] = product[i][j];
        if (measure == KV_MEASURE_COSINE)
          near[i][j] /= fmaxf(sqrtf(target_square), 1e-12f) * fmaxf(sqrtf(row_square), 1e-12f);
        if (measure == KV_MEASURE_DISTANCE) near[i][j] = 2.0f * near[i][j] - target_square - row_square;
      }
    }
  }

  // Updates the nearest target so far, and for the eviction pool the ease.
  static KV_DEVICE void update(Registers& r, const float (&near)[2][4], const float (&apart)[2][4],
                               const MergeHead& head, const Args& args, const float* row_importance, int at, int to,
                               bool of_rest, int t) {
    const bool of_pool = args.search == kOfPool;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int place = at + t % 8 + 8 * j;
      if (place >= to) continue;
      const int slot = target_at(head, of_rest, place);
      const float importance = head.of(args.work.importance)[slot];
      if (!(of_pool && of_rest) && head.of(args.work.mark)[slot] != (of_pool ? kUpper : kCanReceive)) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (of_pool && (!of_rest || importance > row_importance[t / 8 * 2 + i]))
          r.ease[i] = fmaxf(r.ease[i], ByError ? fminf(near[i][j], 0.0f) * fmaxf(-apart[i][j], 0.0f) : near[i][j]);
        if (!(of_pool && of_rest) && near[i][j] > r.best[i]) r.best[i] = near[i][j], r.place[i] = place;
      }
    }
  }
};

}  // namespace cuda
}  // namespace kv
