// MergeCache: the target nearest to each of many slots, of caches of 16 bits, on tensor cores. The work is shared out
// as in nearest.h; a tile is 64 rows (32 where rows are large), and targets are looked at 64 at a time, a warp 16 of
// them:
//
//   copy the rows' keys, and where policy.order is by the error their values; their squares
//   for each 64 targets of the split, their keys and, by the error, then their values     the next ones on their way
//     square = diagonal of [16, D] x [16, D]^T            a warp its own 16 targets
//     product[32, 16] = row[32, D] x target[16, D]^T      a warp all rows, 32 at a time, with its own targets
//     nearness = factor[target] product + offset[target]  by the error: both distances, and their product
//     keep the nearest of the targets whose importance is above the row's
//   combine the sixteen threads of a row, of equals the lowest slot; write the split's nearest
//
// The products of 16-bit numbers are exact in float32, in which they are added up; the tensor cores' order and rounding
// of these sums are their own. Squares are made by the same operation as products, so that a key is at no distance from
// its equal.
#pragma once

#include "../core/mma.h"
#include "nearest.h"

namespace kv {
namespace cuda {

template <class T, bool ByError>
struct NearestMma {
  using Args = NearestArgs;
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = ByError ? 2 : 3, kStages = 2;
  static constexpr int kSlots = 64, kRows = 64, kParts = ByError ? 2 : 1;  // keys, and values
  static constexpr int kCandidates = 16;                                   // of a row: four lanes of four warps
  static_assert(kSlots == kThreads / kWarp * 16, "a warp's products are of 16 targets");

  struct Registers {
    uint32_t row[2][4], target[4];
    float square[2][4], product[2][2][4];  // [tile of 16 rows, of 8 targets]
    float apart[kRows / 32][2][2][4];      // by the error: the keys' distances, until the values are there
    float best[kRows / 32][2][2];          // [.., tile of 16 rows, row and row + 8]
    int place[kRows / 32][2][2];
  };

  // Keys or values in shared memory. A row is filled up with zeros to whole products, and rows lie an odd number of
  // vectors apart, so that `ldmatrix` meets no bank twice.
  struct Rows {
    char* base;
    int vectors;

    static KV_HD int whole(int size) { return (size / kLanes<T> + 1) / 2 * 2; }
    static KV_HD size_t bytes(int size, int rows) { return static_cast<size_t>(rows) * (whole(size) + 1) * 16; }
    KV_DEVICE Rows(char* base, int size) : base(base), vectors(size / kLanes<T>) {}
    KV_DEVICE int steps() const { return (vectors + 1) / 2; }  // products' depth, of 16 elements
    KV_DEVICE int stride() const { return (2 * steps() + 1) * 16; }
    KV_DEVICE char* corner(int row, int step) const { return base + row * stride() + step * 32; }
  };

  // Keys and values of the rows, stages of targets, and numbers of each row and target.
  struct Shared {
    const Args& args;
    char* base;
    float *importance, *factor, *offset;  // of a block of targets
    float *row_importance, *row_square;   // of the rows; [parts, kRows]
    float* bests;                         // [kRows, kCandidates], in place of the stages
    int* places;

    KV_DEVICE Shared(char* shared, const Args& args) : args(args), base(shared) {
      importance = reinterpret_cast<float*>(shared + rows_bytes(args) + stages_bytes(args));
      factor = importance + kSlots, offset = factor + kSlots, row_importance = offset + kSlots;
      row_square = row_importance + kRows;
      bests = reinterpret_cast<float*>(shared + rows_bytes(args));
      places = reinterpret_cast<int*>(bests + kRows * kCandidates);
    }
    KV_DEVICE int size(int part) const { return part ? args.work.call.value_size : args.work.call.key_size; }
    KV_DEVICE Rows rows(int part) const {
      return {base + (part ? Rows::bytes(args.work.call.key_size, args.work.tile) : 0), size(part)};
    }
    KV_DEVICE Rows stage(int number, int part) const {
      return {base + rows_bytes(args) + number * stage_bytes(args), size(part)};
    }
  };
  static KV_HD size_t rows_bytes(const Args& args) {
    const KvMergeCache& a = args.work.call;
    return Rows::bytes(a.key_size, args.work.tile) + (ByError ? Rows::bytes(a.value_size, args.work.tile) : 0);
  }
  static KV_HD size_t stage_bytes(const Args& args) {
    const KvMergeCache& a = args.work.call;
    return Rows::bytes(ByError && a.value_size > a.key_size ? a.value_size : a.key_size, kSlots);
  }
  static KV_HD size_t stages_bytes(const Args& args) {
    const size_t stages = args.stages * stage_bytes(args), bests = kRows * kCandidates * (sizeof(float) + sizeof(int));
    return stages > bests ? stages : bests;
  }
  static KV_HD size_t size(const Args& args) {
    return rows_bytes(args) + stages_bytes(args) + (3 * kSlots + (1 + kParts) * kRows) * sizeof(float);
  }

  static KV_DEVICE void run(Block<NearestMma>& block, const Args& args) {
    const Shared s(block.shared, args);
    look_at_all(block, args, [&](const MergeHead& head, const Look& x) { look(block, s, head, x); });
  }

  // Ends with a barrier.
  static KV_DEVICE void look(Block<NearestMma>& block, const Shared& s, const MergeHead& head, const Look& x) {
    start(block, s, head, x);
    const int stages = s.args.stages, blocks = (x.targets.to - x.targets.from + kSlots - 1) / kSlots * kParts;
    const auto fetch = [&](int i) {
      const int part = i % kParts, at = x.targets.from + i / kParts * kSlots;
      const Rows stage = s.stage(i % stages, part);
      block.each_alone([&](int t, auto&) {
        copy(block, head, stage, kSlots, part, x.targets.to - at, t, [&](int j) { return at + j; });
      });
      block.cp_async_commit();
    };
    for (int i = 0; i < stages - 1; ++i) fetch(i);
    for (int i = 0; i < blocks; ++i) {
      fetch(i + stages - 1);
      block.cp_async_wait(stages - 1);
      const int at = x.targets.from + i / kParts * kSlots;
      if (i % kParts == 0)
        use<0>(block, s, head, x, s.stage(i % stages, 0), at);
      else
        use<kParts - 1>(block, s, head, x, s.stage(i % stages, 1), at);
    }
    block.cp_async_wait(0);
    block.each([&](int t, Registers& r) {
#pragma unroll
      for (int i = 0; i < kRows / 8; ++i) {
        const int at = (i * 8 + t % kWarp / 4) * kCandidates + t / kWarp * 4 + t % 4;
        s.bests[at] = r.best[i / 4][i / 2 % 2][i % 2], s.places[at] = r.place[i / 4][i / 2 % 2][i % 2];
      }
    });
    const int measure = head.a.policy.measure;
    block.each([&](int t, auto&) {
      store_nearest(head, x, s.bests, s.places, kCandidates, t, [&](int row, float near) {
        if (!ByError && measure == KV_MEASURE_COSINE) return near / norm(s.row_square[row]);
        return !ByError && measure == KV_MEASURE_DISTANCE ? near - s.row_square[row] : near;
      });
    });
  }

  static KV_DEVICE float norm(float square) { return fmaxf(sqrtf(square), 1e-12f); }

  // The rows, their squares and importance. Ends with a barrier.
  static KV_DEVICE void start(Block<NearestMma>& block, const Shared& s, const MergeHead& head, const Look& x) {
    const int tile = head.work.tile, count = min_of(x.rows - x.begin, tile);
    const auto row_at = [&](int i) { return head.rows()[x.begin + i]; };
    block.each_alone([&](int t, Registers& r) {
#pragma unroll
      for (int i = 0; i < kRows / 8; ++i)
        r.best[i / 4][i / 2 % 2][i % 2] = kNoTarget, r.place[i / 4][i / 2 % 2][i % 2] = -1;
      for (int part = 0; part < kParts; ++part) copy(block, head, s.rows(part), tile, part, count, t, row_at);
      // Where targets only have to be able to receive, those that can have an importance of 1.
      if (t < count) s.row_importance[t] = s.args.higher ? head.of(head.work.importance)[row_at(t)] : 0.0f;
    });
    block.cp_async_commit();
    block.cp_async_wait(0);
    for (int part = 0; part < kParts; ++part)
      squares(block, s.rows(part), tile, [&](int row, float square) { s.row_square[part * kRows + row] = square; });
  }

  // Within a phase: asks for the keys or the values of slots from(0), from(1), ..., as many as there are and at most
  // `room`, eight threads a row; and the zeros that fill rows up.
  template <class F>
  static KV_DEVICE void copy(Block<NearestMma>& block, const MergeHead& head, const Rows& to, int room, int part,
                             int count, int t, F from) {
    const int end = min_of(count, room), vectors = to.vectors, stride = to.stride();
#pragma unroll 4
    for (int i = t / 8; i < end; i += kThreads / 8) {
      const T* row = part ? head.template value<T>(from(i)) : head.template key<T>(from(i));
      char* at = to.base + i * stride;
      for (int j = t % 8; j < vectors; j += 8) block.template copy<16>(at + j * 16, row + j * kLanes<T>);
    }
    if (vectors % 2 && t < room) store_vector(to.base + t * stride + vectors * 16, Vector{});
  }

  // keep(row, square) of so many rows, a warp 16. Ends with a barrier.
  template <class Keep>
  static KV_DEVICE void squares(Block<NearestMma>& block, const Rows& rows, int count, Keep keep) {
    block.each_alone([&](int, Registers& r) {
#pragma unroll
      for (int i = 0; i < 8; ++i) r.square[i / 4][i % 4] = 0.0f;
    });
    const int stride = rows.stride(), steps = rows.steps();
    for (int step = 0; step < steps; ++step) {
      const auto corner = [&](int t) { return rows.corner(min_of(t / kWarp * 16, count - 16), step); };
      load_a(block, stride, corner, [](Registers& r) { return r.row[0]; });
      load_b(block, stride, corner, [](Registers& r) { return r.target; });
      multiply<T>(block, [](Registers& r) { return Product{r.square[0], r.row[0], r.target}; });
      multiply<T>(block, [](Registers& r) { return Product{r.square[1], r.row[0], r.target + 2}; });
    }
    block.each([&](int t, Registers& r) {
      // Of the diagonals a lane has the elements of row lane / 4 of the first eight, and of the others; or none.
      const int i = t % kWarp / 4, row = t / kWarp * 16 + i;
      if (t % 4 != i / 2 || row >= count) return;
      keep(row, i % 2 ? r.square[0][1] : r.square[0][0]);
      keep(row + 8, i % 2 ? r.square[1][3] : r.square[1][2]);
    });
  }

  // A block of targets' keys (Part 0) or values. Ends with a barrier.
  template <int Part>
  static KV_DEVICE void use(Block<NearestMma>& block, const Shared& s, const MergeHead& head, const Look& x,
                            const Rows& stage, int at) {
    const int measure = ByError ? int{KV_MEASURE_DISTANCE} : head.a.policy.measure;
    if (Part == 0)
      block.each_alone([&](int t, auto&) {
        if (t >= kSlots) return;
        const int slot = at + t;
        const bool is_one = slot < x.targets.to && (s.args.higher || head.of(head.work.mark)[slot] == kCanReceive);
        s.importance[t] = !is_one ? -INFINITY : s.args.higher ? head.of(head.work.importance)[slot] : 1.0f;
      });
    squares(block, stage, kSlots, [&](int i, float square) {
      s.factor[i] = measure == KV_MEASURE_COSINE ? 1.0f / norm(square) : measure == KV_MEASURE_DISTANCE ? 2.0f : 1.0f;
      s.offset[i] = measure == KV_MEASURE_DISTANCE ? -square : 0.0f;
    });
    const Rows rows = s.rows(Part);
    const int stride = rows.stride(), steps = rows.steps(), count = min_of(x.rows - x.begin, head.work.tile);
#pragma unroll
    for (int pair = 0; pair < kRows / 32; ++pair) {
      if (pair * 32 >= count) continue;
      block.each_alone([&](int, Registers& r) {
#pragma unroll
        for (int i = 0; i < 16; ++i) r.product[i / 8][i / 4 % 2][i % 4] = 0.0f;
      });
      for (int step = 0; step < steps; ++step) {
        load_b(
            block, stride, [&](int t) { return stage.corner(t / kWarp * 16, step); },
            [](Registers& r) { return r.target; });
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          load_a(
              block, stride, [&](int) { return rows.corner(pair * 32 + m * 16, step); },
              [m](Registers& r) { return r.row[m]; });
#pragma unroll
          for (int n = 0; n < 2; ++n)
            multiply<T>(block, [m, n](Registers& r) { return Product{r.product[m][n], r.row[m], r.target + 2 * n}; });
        }
      }
      block.each_alone([&](int t, Registers& r) { update<Part>(r, s, pair, at, t); });
    }
    block.each([](int, auto&) {});  // the stage may be overwritten
  }

  // Of 32 rows and a lane's four targets, in their order: the nearest so far.
  template <int Part>
  static KV_DEVICE void update(Registers& r, const Shared& s, int pair, int at, int t) {
    const int first = t / kWarp * 16;
#pragma unroll
    for (int of = 0; of < 4; ++of) {
      const int n = of / 2, column = first + n * 8 + element_of_sum(t % kWarp, of % 2).column;
      const float factor = s.factor[column], offset = s.offset[column], importance = s.importance[column];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int m = j / 2, low = j % 2, i = 2 * low + of % 2,
                  row = pair * 32 + m * 16 + element_of_sum(t % kWarp, i).row;
        float near = factor * r.product[m][n][i] + offset;
        if constexpr (ByError) {
          near -= s.row_square[Part * kRows + row];
          if (Part == 0) {
            r.apart[pair][m][n][i] = near;
            continue;
          }
          near = fminf(r.apart[pair][m][n][i], 0.0f) * fmaxf(-near, 0.0f);
        }
        if (importance > s.row_importance[row] && near > r.best[pair][m][low])
          r.best[pair][m][low] = near, r.place[pair][m][low] = at + column;
      }
    }
  }
};

}  // namespace cuda
}  // namespace kv
