// Linear on tensor cores: every weight is read once for all rows of a panel, dequantized exactly in registers, and
// multiplied by mma.m16n8k16 with its 16 columns as the product's rows and the panel's rows as its columns. A block of
// four warps computes a strip of columns for a panel of rows, over a split of the inputs:
//
//   for each chunk of the strip's columns           128 (or 64) bytes of each by asynchronous copies, kStages at once,
//                                                   with the groups' scales and zero points if `CopiedScales` fit
//     store the rows and groups of the next chunk   rows are in 16 bits, in the order of `Unit`
//     load the rows after these                     panels of 8 rows, into registers; larger ones as they are stored
//     for each group of inputs in the chunk
//       partial[column, row] += (integer - zero) x  16 or 32 columns of all rows per warp
//       sum[column, row] += partial scale           float32, so no scale is rounded; + minimum sum of x
//   the last block of a strip: combine the splits in order; the epilogue (finish.h)
//
// Rows of float32 become bfloat16, which the contract allows if weights are packed and `float_input` is 0.
#pragma once

#include <utility>

#include "finish.h"
#include "groups.h"
#include "products.h"
#include "scales.h"

namespace kv {
namespace cuda {

// kWeightBits: bits of packed weights, 0 for weights in 16 bits. kPanelTiles: tiles of 8 rows of a panel, at most 4
// with minima, whose sums need registers of their own.
template <class Type, int kWeightBits, int kPanelTiles>
struct LinearMma {
  using Args = LinearArgs;
  using T = Type;
  using U = Unit<T, kWeightBits>;
  using Products = LinearProducts<LinearMma>;
  static constexpr int kBits = kWeightBits, kTiles = kPanelTiles;
  static constexpr int kThreads = 128,
                       kBlocksPerMultiprocessor = kTiles > 1   ? 2
                                                  : kBits == 4 ? 3
                                                               : 4,
                       kStages = kTiles == 4 ? 2 : 3;
  static constexpr int kRows = 8 * kTiles, kHigh = kTiles > 1 ? 2 : 1;  // kHigh: a warp's tiles of 16 columns
  static constexpr int kColumns = kThreads / kWarp * kHigh * kTileColumns;
  static constexpr bool kTakesMinima = kTiles <= 4, kCopiesScales = kTiles <= 4 && kBits == 4;
  static constexpr int kChunk = kTiles > 4 ? 64 : 128, kUnits = kChunk / U::kBytes, kInputs = kUnits * U::kInputs;
  // Bytes from column to column, and from row to row: lanes that read neighbouring columns or rows have no bank
  // conflict.
  static constexpr int kStride = kChunk + 16;
  static constexpr int kRowStride = 2 * kInputs + (kBits == 4 ? 64 : 32);
  // kAcross neighbouring threads copy a chunk of a column, 16 bytes each; the block copies kDown columns at a time, and
  // so a thread has kOwn columns.
  static constexpr int kAcross = kChunk / 16, kDown = kThreads / kAcross, kOwn = kColumns / kDown;
  // A thread loads the same 8 inputs of every kApart-th row. Panels of 8 rows load them a chunk ahead. Panels of more
  // rows have no registers for this: they load kRowsAhead rows at a time, just before they store them.
  static constexpr int kEights = kInputs / 8, kApart = kThreads / kEights;
  static constexpr bool kLoadsAhead = kTiles == 1;
  static constexpr int kOwnRows = (kRows + kApart - 1) / kApart;
  static constexpr int kRowsAhead = min_of(kOwnRows, T::kBrain ? 2 : 4);  // in bfloat16, 4 would spill
  static_assert(kOwnRows % kRowsAhead == 0, "no row is stored after the panel's last one");
  static_assert(kThreads % kEights == 0, "a thread loads the same inputs of each of its rows");
  using OfGroups = Groups<T, kBits, kColumns, kThreads, kAcross>;
  using OfScales = CopiedScales<kColumns, kInputs>;

  struct Registers {
    float sum[kHigh][kTiles][4], partial[kHigh][kTiles][4];  // partial: sums of a group
    float inputs[kTiles][4];                                 // sums of a group's x, for minima
    uint32_t a[kHigh][U::kSteps][4], b[2 * U::kSteps];
    float scale[kHigh][2], minimum[kHigh][2];  // of a group
    uint32_t less[kHigh][2][2];                // Unit::less and Unit::upper_less of a group
    // A thread's share of the copies: 16 bytes of a chunk of its columns, and the scales of a column.
    const char* from;                       // the weight
    typename OfScales::Column scales_from;  // of the column
    uint32_t column_bytes;
    int column[kOwn];
    // In shared memory: a lane's column of its first tile, this column's scales, and the lane's row.
    const char *weights, *copied, *rows;
    int weights_at, copied_at, rows_at;  // their bytes from the start of a stage or buffer
    OfGroups next_groups;                // groups of a chunk that are not stored yet
    // Inputs of rows, and of the norm, for a chunk that is not stored yet.
    Eight<T> next_row[kLoadsAhead ? kOwnRows : 1], next_norm;
    float squares;
  };
  struct Shared {
    char *columns, *rows;
    Group* groups;
    float *factors, *squares;  // squares: for find_factors, only for 8 rows

    KV_DEVICE char* column(int stage, int i) const { return columns + (stage * LinearMma::kColumns + i) * kStride; }
    KV_DEVICE char* row(int buffer, int i) const { return rows + (buffer * LinearMma::kRows + i) * kRowStride; }
    KV_DEVICE char* scales(int stage) const { return reinterpret_cast<char*>(groups) + stage * OfScales::kBytes; }
  };
  static constexpr size_t kOfRows = 2 * kRows * kRowStride, kOfGroups = OfGroups::kBytes;
  static_assert(!kCopiesScales || kStages * OfScales::kBytes <= kOfGroups, "one of the two is in use");
  static constexpr size_t kOfFactors = kRows * sizeof(float) * (kLoadsAhead ? 1 + kThreads / kWarp : 1);
  static constexpr size_t shared_size() { return kStages * kColumns * kStride + kOfRows + kOfGroups + kOfFactors; }
  static KV_DEVICE Shared divide(char* shared) {
    Shared s;
    s.columns = shared, s.rows = shared + kStages * kColumns * kStride;
    s.groups = reinterpret_cast<Group*>(s.rows + kOfRows);
    s.factors = reinterpret_cast<float*>(s.rows + kOfRows + kOfGroups), s.squares = s.factors + kRows;
    return s;
  }
  static int chunks(const KvLinear& a) { return static_cast<int>((a.inputs + kInputs - 1) / kInputs); }

  // The work of a block, and its memory.
  struct BlockWork {
    const Work w;
    const KvProduct& p;
    const Shared s;
    const int inputs;
    const Range range;  // chunks
    const InputLayout layout;
    const bool copies_scales;  // whether the groups are `OfScales`

    KV_DEVICE BlockWork(const LinearArgs& args, const Block<LinearMma>& block)
        : w(args, block.index()),
          p(args.call.products[w.product]),
          s(divide(block.shared)),
          inputs(args.inputs()),
          range(share_of(w.split, args.splits, (inputs + kInputs - 1) / kInputs, 1)),
          layout(args.call),
          copies_scales(kCopiesScales && OfScales::fit(args.call, p)) {}
    // Returns the first input of a row of the panel.
    KV_DEVICE size_t of_row(int row) const { return layout.of_row(w.panel * kRows + row); }
  };

  // Starts the copies of the first chunks of columns, and reads the groups of the first.
  static KV_DEVICE void before(Block<LinearMma>& block, const LinearArgs& args) {
    if (!args.weights_stay) block.wait_for_earlier();
    const BlockWork work(args, block);
    block.each_alone([&](int t, Registers& r) { start(r, args, work, t); });
    for (int i = 0; i < kStages - 1; ++i) fetch(block, work, work.range.from + i, i);
    if (!work.copies_scales)
      block.each_alone(
          [&](int t, Registers& r) { r.next_groups.load(args, work.p, r.column, kInputs, work.range.from, t); });
  }

  static KV_DEVICE void run(Block<LinearMma>& block, const LinearArgs& args) {
    const KvLinear& a = args.call;
    const BlockWork work(args, block);
    const Work& w = work.w;
    const KvProduct& p = work.p;
    const Shared& s = work.s;
    const Range range = work.range;
    const int first = w.panel * kRows, rows = min_of(kRows, args.rows() - first), inputs = work.inputs;
    const KvWeight& second = weight_of(a, p, 1);
    const uint32_t flip[2] = {U::flip(p.weight.is_signed), U::flip(second.is_signed)};
    const uint32_t excess[2] = {static_cast<uint32_t>(excess_of(p.weight)), static_cast<uint32_t>(excess_of(second))};
    block.each_alone([&](int t, Registers& r) { load_rows(r, a, work, rows, range.from, t); });
    factors(block, args, s, first, rows);
    block.each_alone([&](int t, Registers& r) { prepare(r, args, work, rows, range.from, 0, t); });
    const int group = kBits ? static_cast<int>(p.weight.group) / U::kInputs : kUnits;  // in units
    const bool alike = kUnits % group == 0;  // whether groups end at the same units in every whole chunk
    int left = group - range.from * kUnits % group, stage = 0;
    uint32_t ends = alike ? ends_of(kUnits, group, left) : 0;
    for (int chunk = range.from, i = 0; chunk < range.to; ++chunk, ++i) {
      block.cp_async_wait(kStages - 2);  // this chunk is there, and no thread reads the one before any more
      fetch(block, work, chunk + kStages - 1, stage ? stage - 1 : kStages - 1);
      block.each_alone([&](int t, Registers& r) {
        if (chunk + 1 < range.to) prepare(r, args, work, rows, chunk + 1, (i + 1) % 2, t);
        r.weights = s.column(stage, 0) + r.weights_at, r.copied = OfScales::at(s.scales(stage), r.copied_at);
        r.rows = s.row(i % 2, 0) + r.rows_at;
      });
      if (work.copies_scales) {
        if constexpr (kCopiesScales) {
          if (p.weight.zero)
            Products::template multiply_copied<true>(block, flip, excess, group, chunk, rows);
          else
            Products::template multiply_copied<false>(block, flip, excess, group, chunk, rows);
        }
      } else {
        const int units = min_of(kUnits, inputs / U::kInputs - chunk * kUnits);
        if (!alike || units < kUnits) ends = ends_of(units, group, left);
        if (kTakesMinima && kBits && p.weight.minimum)
          Products::template multiply_chunk<true>(block, s, i % 2, flip, ends, rows);
        else
          Products::template multiply_chunk<false>(block, s, i % 2, flip, ends, rows);
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    block.cp_async_wait(0);
    float* const sums = reinterpret_cast<float*>(s.columns);
    static_assert(kRows * kColumns * sizeof(float) <= kStages * kColumns * kStride + kOfRows,
                  "the sums fit where columns and rows were");
    block.each([&](int t, Registers& r) {
#pragma unroll
      for (int i = 0; i < kHigh * kTiles * 4; ++i) {
        const int m = i / (kTiles * 4), n = i / 4 % kTiles;
        const Element at = element_of_sum(t % kWarp, i % 4);
        sums[(n * 8 + at.column) * kColumns + tile_of(t, m) * kTileColumns + at.row] = r.sum[m][n][i % 4];
      }
    });
    if (T::kBrain && a.type == KV_FLOAT32)
      finish<float>(block, args, w, sums);
    else
      finish<T>(block, args, w, sums);
  }

  // Between phases: starts the copies of the columns of a chunk into a stage, if the split has that chunk.
  static KV_DEVICE void fetch(Block<LinearMma>& block, const BlockWork& work, int chunk, int stage) {
    block.each_alone([&](int t, Registers& r) {
      const int at = t % kAcross * 16;
      if (chunk >= work.range.to) return;
      if (work.copies_scales)
        OfScales::copy(block, work.p.weight, r.scales_from, work.s.scales(stage), chunk, t);
      else if (at >= work.inputs / U::kInputs * U::kBytes - chunk * kChunk)
        return;
      copy_columns(block, r, work.s.column(stage, t / kAcross) + at, r.from + static_cast<size_t>(chunk) * kChunk,
                   std::make_integer_sequence<int, kOwn>());
    });
    block.cp_async_commit();
  }
  template <int... i>
  static KV_DEVICE void copy_columns(Block<LinearMma>& block, const Registers& r, char* to, const char* from,
                                     std::integer_sequence<int, i...>) {
    (block.template copy<16, i * kDown * kStride>(to,
                                                  element_of(from, static_cast<uint32_t>(r.column[i]), r.column_bytes)),
     ...);
  }

  static KV_DEVICE int tile_of(int t, int m) { return t / kWarp * kHigh + m; }

  static KV_DEVICE void start(Registers& r, const LinearArgs& args, const BlockWork& work, int t) {
    const KvProduct& p = work.p;
    const int half = OfGroups::half_of_thread(t), at = t / kAcross, strip = work.w.strip;
    r.from = static_cast<const char*>(weight_of(args.call, p, half).data) + t % kAcross * 16;
    r.column_bytes = static_cast<uint32_t>(args.inputs() / U::kInputs) * U::kBytes;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int tile = strip * (kColumns / kTileColumns) + (i * kDown + at) / kTileColumns;
      r.column[i] = column_in(half_of(args.call, p, tile, half), at % kPair, static_cast<int>(p.outputs));
    }
    if (work.copies_scales)
      r.scales_from = OfScales::column(args, p, strip, t);
    else
      r.next_groups.start(args, p, strip, kInputs, t);
    start_lane(r, t);
#pragma unroll
    for (int i = 0; i < kHigh * 2; ++i)
      Products::set_less(r, i / 2, i % 2, U::less(excess_of(weight_of(args.call, p, i % 2))));
#pragma unroll
    for (int i = 0; i < kHigh * kTiles * 4; ++i) r.sum[i / (kTiles * 4)][i / 4 % kTiles][i % 4] = 0.0f;
  }
  static KV_DEVICE void start_lane(Registers& r, int t) {
    const int column = tile_of(t, 0) * kTileColumns + t % kWarp / 4;
    r.weights_at = once(column * kStride + t % 4 * 4), r.copied_at = once(column);
    r.rows_at = once(t % kWarp / 4 * kRowStride + t % 4 * U::kOfLane);
  }
  // Finds the factors of the norm. Panels of more than 8 rows have none: a launch before has normalized their rows.
  static KV_DEVICE void factors(Block<LinearMma>& block, const LinearArgs& args, const Shared& s, int first, int rows) {
    const KvLinear& a = args.call;
    if (!kLoadsAhead || !a.norm) return;
    if (T::kBrain && a.type == KV_FLOAT32)
      find_factors<float, true>(block, args, first, rows, s.factors, s.squares);
    else
      find_factors<T, true>(block, args, first, rows, s.factors, s.squares);
  }

  static KV_DEVICE int bytes_of_input(const KvLinear& a) { return T::kBrain && a.type == KV_FLOAT32 ? 4 : 2; }
  // Within a phase: stores the groups and rows of a chunk, and loads those of the chunk after it into registers.
  static KV_DEVICE void prepare(Registers& r, const LinearArgs& args, const BlockWork& work, int rows, int chunk,
                                int buffer, int t) {
    const bool more = chunk + 1 < work.range.to;
    if (!work.copies_scales) {
      r.next_groups.store(work.s.groups, buffer, t);
      if (more) r.next_groups.load(args, work.p, r.column, kInputs, chunk + 1, t);
    }
    store_rows(r, args.call, work, rows, chunk, buffer, t);
    if (more) load_rows(r, args.call, work, rows, chunk + 1, t);
  }
  // Within a phase: loads a thread's share of the rows of a chunk into registers.
  static KV_DEVICE void load_rows(Registers& r, const KvLinear& a, const BlockWork& work, int rows, int chunk, int t) {
    if (!kLoadsAhead) return;
    const int k = chunk * kInputs + t % kEights * 8;
    if (k >= a.inputs) return;
    if (a.norm) r.next_norm = load_eight<T>(a, a.norm, k);
    const size_t at = work.layout.of_input(k);
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const int row = t / kEights + i * kApart;
      if (row < rows) r.next_row[kLoadsAhead ? i : 0] = load_eight<T>(a, a.input, at + work.of_row(row));
    }
  }
  // Within a phase: stores a thread's share of the rows of a chunk, which are loaded here if not by load_rows.
  static KV_DEVICE void store_rows(const Registers& r, const KvLinear& a, const BlockWork& work, int rows, int chunk,
                                   int buffer, int t) {
    const Shared& s = work.s;
    const int v = t % kEights, k = chunk * kInputs + v * 8;
    if (t / kEights >= rows || k >= a.inputs) return;
    if constexpr (kLoadsAhead) {
      float norm[8];
      if (a.norm) widen_eight(a, r.next_norm, norm);
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
        const int row = t / kEights + i * kApart;
        if (row >= rows) break;
        if (!a.norm) {
          store_eight(a, r.next_row[i], s.row(buffer, row), v);
          continue;
        }
        float x[8];
        widen_eight(a, r.next_row[i], x);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = x[j] * s.factors[row] * norm[j];
        U::store_inputs(s.row(buffer, row), v, x);
      }
    } else if (kTiles < 8 && work.layout.contiguous) {
      const int own = t / kEights, element = bytes_of_input(a);
      // Panels of 64 rows have no registers for this. Computed here, so that no thread keeps the addresses of all of
      // its rows in registers.
      const uint32_t row_bytes = once(static_cast<int>(a.inputs) * element);
      const char* const first = static_cast<const char*>(a.input) +
                                static_cast<uint64_t>(work.w.panel * kRows + own) * row_bytes +
                                static_cast<size_t>(k) * element;
      char* const to = s.row(buffer, own);
#pragma unroll(kTiles == 8 ? 1 : kOwnRows)
      for (int i = 0; i < kOwnRows; i += kRowsAhead) {
        if (i * kApart >= rows) break;
        Eight<T> from[kRowsAhead];
#pragma unroll
        for (int j = 0; j < kRowsAhead; ++j) {
          const uint32_t row = min_of((i + j) * kApart, rows - 1 - own);
          from[j] = load_eight<T>(a, element_of(first, row, row_bytes), 0);
        }
#pragma unroll
        for (int j = 0; j < kRowsAhead; ++j) store_eight(a, from[j], to + (i + j) * kApart * kRowStride, v);
      }
    } else {
      const size_t at = work.layout.of_input(k);
#pragma unroll 1
      for (int row = t / kEights; row < rows; row += kRowsAhead * kApart) {
        Eight<T> from[kRowsAhead];
#pragma unroll
        for (int i = 0; i < kRowsAhead; ++i)
          from[i] = load_eight<T>(a, a.input, at + work.of_row(min_of(row + i * kApart, rows - 1)));
#pragma unroll
        for (int i = 0; i < kRowsAhead; ++i)
          if (row + i * kApart < rows) store_eight(a, from[i], s.row(buffer, row + i * kApart), v);
      }
    }
  }
  static KV_DEVICE void store_eight(const KvLinear& a, const Eight<T>& from, char* row, int v) {
    if (!T::kBrain || a.type != KV_FLOAT32) return U::store_inputs(row, v, from.part[0]);
    float x[8];
    widen_eight(a, from, x);
    U::store_inputs(row, v, x);
  }

  // Returns a bit for each unit of a chunk at which a group ends; the chunk's last unit always counts. left: the
  // units left of the group that continues into this chunk; on return, of the one that continues into the next chunk.
  static KV_DEVICE uint32_t ends_of(int units, int group, int& left) {
    uint32_t ends = 1u << (units - 1);
    if (left > units) {
      left -= units;
      return ends;
    }
    for (int u = 0; u < units; ++u)
      if (--left == 0) ends |= 1u << u, left = group;
    return ends;
  }
};

}  // namespace cuda
}  // namespace kv
