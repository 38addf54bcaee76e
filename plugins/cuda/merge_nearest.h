// MergeCache: where leaving slots go.
#pragma once

#include "merge_plan.h"

namespace kv {
namespace cuda {

// The nearest target of every row, in one pass over the keys of one split of the slots. A block is 32 rows against that
// split.
template <class T>
struct Nearest {
  struct Args {
    Merge plan;
    bool higher;  // rows are the pool of merge_first; targets are free slots of higher importance
  };
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 2, kRows = 32, kSlots = 32, kParts = 4;
  struct Registers {
    float best[2];
    int place[2];
  };
  // Rows and keys in their own type; of both the parts of their squares, of the rows their importance; the best of
  // every eighth slot.
  static KV_HD constexpr size_t size(int key_size) {
    return (kRows + kSlots) * shared_stride<T>(key_size) + (2 * kRows * kParts + kRows + 16 * kRows) * sizeof(float);
  }
  struct Shared {
    char *row, *key;
    float *row_square, *key_square, *importance, *best;
    int* place;
  };

  static KV_DEVICE void run(Block<Nearest>& block, const Args& args) {
    const Merge& plan = args.plan;
    const KvMergeCache& a = plan.call;
    const int most = args.higher ? plan.most_rows : plan.most, tiles = (most + kRows - 1) / kRows;
    const MergeHead head(plan, block.index() / (tiles * plan.splits));
    const int split = block.index() % plan.splits, begin = block.index() / plan.splits % tiles * kRows;
    const HeadPlan x = head.info();
    const int rows = args.higher ? x.pool : x.leaving, stride = shared_stride<T>(a.key_size);
    if (x.over == 0 || begin >= rows) return;
    const Shared s = divide(block.shared, stride);
    const int first = x.free, last = args.higher || !a.policy.recent_receives ? x.free + x.frees : x.used;
    const int each = (last - first + plan.splits - 1) / plan.splits, from = first + split * each,
              to = min_of(from + each, last);
    block.each([&](int t, Registers& r) {
      r.best[0] = r.best[1] = kNoTarget, r.place[0] = r.place[1] = -1;
      for (int i = t; i < kRows; i += kThreads)
        s.importance[i] = begin + i < rows ? head.of(plan.importance)[head.rows()[begin + i]] : 0.0f;
      load(s.row, stride, a.key_size, t,
           [&](int i) { return begin + i < rows ? head.template key<T>(head.rows()[begin + i]) : nullptr; });
    });
    block.each([&](int t, auto&) { s.row_square[t] = square(s.row, stride, a.key_size, t); });
    for (int at = from; at < to; at += kSlots) {
      block.each([&](int t, auto&) {
        load(s.key, stride, a.key_size, t, [&](int i) { return at + i < to ? head.template key<T>(at + i) : nullptr; });
      });
      block.each([&](int t, auto&) { s.key_square[t] = square(s.key, stride, a.key_size, t); });
      block.each([&](int t, Registers& r) { compare(r, head, args, s, stride, at, to, t); });
    }
    block.each([&](int t, Registers& r) {
      for (int i = 0; i < 2; ++i)
        s.best[(t / 8 * 2 + i) * 8 + t % 8] = r.best[i], s.place[(t / 8 * 2 + i) * 8 + t % 8] = r.place[i];
    });
    block.each([&](int t, auto&) {
      if (t >= kRows || begin + t >= rows) return;
      float best = kNoTarget;
      int place = -1;
      for (int i = t * 8; i < t * 8 + 8; ++i)
        if (s.place[i] >= 0 && (place < 0 || s.best[i] > best || (s.best[i] == best && s.place[i] < place)))
          best = s.best[i], place = s.place[i];
      plan.near[head.split(begin + t, split)] = best;
      plan.nearest[head.split(begin + t, split)] = place;
    });
  }

  static KV_DEVICE Shared divide(char* shared, int stride) {
    Shared s;
    s.row = shared;
    s.key = s.row + kRows * stride;
    s.row_square = reinterpret_cast<float*>(s.key + kSlots * stride);
    s.key_square = s.row_square + kRows * kParts;
    s.importance = s.key_square + kSlots * kParts;
    s.best = s.importance + kRows;
    s.place = reinterpret_cast<int*>(s.best + 8 * kRows);
    return s;
  }

  template <class F>
  static KV_DEVICE void load(char* to, int stride, int size, int t, F row) {
    const int vectors = size / kLanes<T>;
    for (int i = t; i < kRows * vectors; i += kThreads) {
      const T* from = row(i / vectors);
      Vector vector = {};
      if (from) vector = load_vector(from + i % vectors * kLanes<T>);
      store_vector(to + i / vectors * stride + i % vectors * 16, vector);
    }
  }
  // A quarter of the square of row t / 4.
  static KV_DEVICE float square(const char* rows, int stride, int size, int t) {
    float total = 0.0f;
    for (int i = t % kParts; i < size / kLanes<T>; i += kParts) {
      float x[kLanes<T>];
      widen<T>(load_vector(rows + t / kParts * stride + i * 16), x);
      for (int e = 0; e < kLanes<T>; ++e) total += x[e] * x[e];
    }
    return total;
  }
  static KV_DEVICE float whole(const float* squares, int row) {
    float total = 0.0f;
    for (int i = 0; i < kParts; ++i) total += squares[row * kParts + i];
    return total;
  }

  // Two rows and every eighth slot.
  static KV_DEVICE void compare(Registers& r, const MergeHead& head, const Args& args, const Shared& s, int stride,
                                int at, int to, int t) {
    const KvMergePolicy& p = args.plan.call.policy;
    const int row = t / 8 * 2;
    float total[2][4] = {};
    for (int i = 0; i < head.a.key_size / kLanes<T>; ++i) {
      float x[2][kLanes<T>];
      widen<T>(load_vector(s.row + row * stride + i * 16), x[0]);
      widen<T>(load_vector(s.row + (row + 1) * stride + i * 16), x[1]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float key[kLanes<T>];
        widen<T>(load_vector(s.key + (t % 8 + 8 * j) * stride + i * 16), key);
#pragma unroll
        for (int e = 0; e < kLanes<T>; ++e) total[0][j] += x[0][e] * key[e], total[1][j] += x[1][e] * key[e];
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int in_tile = t % 8 + 8 * j, slot = at + in_tile;
      if (slot >= to || (!args.higher && head.of(args.plan.mark)[slot] != kReceives)) continue;
      const float key_square = whole(s.key_square, in_tile), importance = head.of(args.plan.importance)[slot];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (args.higher && !(importance > s.importance[row + i])) continue;
        const float row_square = whole(s.row_square, row + i);
        float near = total[i][j];
        if (p.measure == KV_COSINE) near /= fmaxf(sqrtf(key_square), 1e-12f) * fmaxf(sqrtf(row_square), 1e-12f);
        if (p.measure == KV_DISTANCE) near = 2.0f * near - key_square - row_square;
        if (near > r.best[i]) r.best[i] = near, r.place[i] = slot;
      }
    }
  }
};

}  // namespace cuda
}  // namespace kv
