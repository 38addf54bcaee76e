// Linear on tensor cores: every weight is read once for all rows of a panel, dequantized exactly in registers, and
// multiplied by mma.m16n8k16 with its 16 columns as the product's rows and the panel's rows as its columns. A block of
// four warps computes a strip of columns for a panel of rows, over a split of the inputs:
//
//   for each chunk of the strip's columns           128 (or 64) bytes of each by asynchronous copies, kStages at a time
//     store the rows and groups of the next chunk   rows are in 16 bits, in the order of `Unit`
//     load the rows after these                     panels of 8 rows, into registers; larger ones as they are stored
//     for each group of inputs in the chunk
//       partial[column, row] += (integer - zero) x  16 or 32 columns of all rows per warp
//       sum[column, row] += partial scale           float32, so no scale is rounded; + minimum sum of x
//   the last block of a strip: combine the splits in order; the epilogue (finish.h)
//
// Rows of float32 become bfloat16, which the contract allows if weights are packed and `float_input` is 0.
#pragma once

#include "finish.h"
#include "groups.h"

namespace kv {
namespace cuda {

// kBits: bits of packed weights, 0 for weights in 16 bits. kTiles: tiles of 8 rows of a panel, at most 4 with minima,
// whose sums need registers of their own.
template <class T, int kBits, int kTiles>
struct LinearMma {
  using Args = LinearArgs;
  using U = Unit<T, kBits>;
  static constexpr int kThreads = 128,
                       kBlocksPerMultiprocessor = kTiles > 1   ? 2
                                                  : kBits == 4 ? 3
                                                               : 4,
                       kStages = kTiles == 4 ? 2 : 3;
  static constexpr int kRows = 8 * kTiles, kHigh = kTiles > 1 ? 2 : 1;  // kHigh: a warp's tiles of 16 columns
  static constexpr int kColumns = kThreads / kWarp * kHigh * kTileColumns;
  static constexpr bool kTakesMinima = kTiles <= 4;
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
  static constexpr int kOwnRows = kLoadsAhead ? (kRows + kApart - 1) / kApart : 1;
  static constexpr int kRowsAhead = T::kBrain && kTiles == 8 ? 2 : 4;  // 4 would spill registers on capability 8.6
  static_assert(kThreads % kEights == 0, "a thread loads the same inputs of each of its rows");
  using OfGroups = Groups<T, kBits, kColumns, kThreads, kAcross>;

  struct Registers {
    float sum[kHigh][kTiles][4], partial[kHigh][kTiles][4];  // partial: sums of a group
    float inputs[kTiles][4];                                 // sums of a group's x, for minima
    uint32_t a[kHigh][U::kSteps][4], b[2 * U::kSteps];
    float scale[kHigh][2];
    uint32_t less[kHigh][2];  // Unit::less, or with minima the minima
    // A thread's share of the copies: 16 bytes of a chunk of its columns.
    const char* from;  // the weight, and the bytes of a column
    uint32_t column_bytes;
    int column[kOwn];
    OfGroups next_groups;                    // groups of a chunk that are not stored yet
    Eight<T> next_row[kOwnRows], next_norm;  // inputs of rows, and of the norm, for a chunk that is not stored yet
    float squares;
  };
  struct Shared {
    char *columns, *rows;
    Group* groups;
    float *factors, *squares;  // squares: for find_factors, only for 8 rows

    KV_DEVICE char* column(int stage, int i) const { return columns + (stage * LinearMma::kColumns + i) * kStride; }
    KV_DEVICE char* row(int buffer, int i) const { return rows + (buffer * LinearMma::kRows + i) * kRowStride; }
  };
  static constexpr size_t kOfRows = 2 * kRows * kRowStride, kOfGroups = OfGroups::kBytes;
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

    KV_DEVICE BlockWork(const LinearArgs& args, const Block<LinearMma>& block)
        : w(args, block.index()),
          p(args.call.products[w.product]),
          s(divide(block.shared)),
          inputs(args.inputs()),
          range(share_of(w.split, args.splits, (inputs + kInputs - 1) / kInputs, 1)) {}
  };

  // Starts the copies of the first chunks of columns, and reads the groups of the first.
  static KV_DEVICE void before(Block<LinearMma>& block, const LinearArgs& args) {
    if (!args.weights_stay) block.wait_for_earlier();
    const BlockWork work(args, block);
    block.each_alone([&](int t, Registers& r) { start(r, args, work.p, work.w.strip, t); });
    for (int i = 0; i < kStages - 1; ++i) fetch(block, work, work.range.from + i, i);
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
    block.each_alone([&](int t, Registers& r) { load_rows(r, a, first, rows, range.from, t); });
    factors(block, args, s, first, rows);
    block.each_alone([&](int t, Registers& r) { prepare(r, args, work, first, rows, range.from, 0, t); });
    const int group = kBits ? static_cast<int>(p.weight.group) / U::kInputs : kUnits;  // in units
    const bool alike = kUnits % group == 0;  // whether groups end at the same units in every whole chunk
    int left = group - range.from * kUnits % group, stage = 0;
    uint32_t ends = alike ? ends_of(kUnits, group, left) : 0;
    for (int chunk = range.from, i = 0; chunk < range.to; ++chunk, ++i) {
      block.cp_async_wait(kStages - 2);  // this chunk is there, and no thread reads the one before any more
      fetch(block, work, chunk + kStages - 1, stage ? stage - 1 : kStages - 1);
      block.each_alone([&](int t, Registers& r) {
        if (chunk + 1 < range.to) prepare(r, args, work, first, rows, chunk + 1, (i + 1) % 2, t);
      });
      const int units = min_of(kUnits, inputs / U::kInputs - chunk * kUnits);
      if (!alike || units < kUnits) ends = ends_of(units, group, left);
      if (kTakesMinima && kBits && p.weight.minimum)
        multiply_chunk<true>(block, a, p, s, stage, i % 2, ends, rows);
      else
        multiply_chunk<false>(block, a, p, s, stage, i % 2, ends, rows);
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
      if (chunk >= work.range.to || at >= work.inputs / U::kInputs * U::kBytes - chunk * kChunk) return;
      char* const to = work.s.column(stage, t / kAcross) + at;
      const char* const from = r.from + static_cast<size_t>(chunk) * kChunk + at;
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        block.template copy<16>(to + i * kDown * kStride,
                                from + static_cast<uint64_t>(static_cast<uint32_t>(r.column[i])) * r.column_bytes);
    });
    block.cp_async_commit();
  }

  static KV_DEVICE int tile_of(int t, int m) { return t / kWarp * kHigh + m; }

  static KV_DEVICE void start(Registers& r, const LinearArgs& args, const KvProduct& p, int strip, int t) {
    const int half = OfGroups::half_of_thread(t), at = t / kAcross;
    r.from = static_cast<const char*>(weight_of(args.call, p, half).data);
    r.column_bytes = static_cast<uint32_t>(args.inputs() / U::kInputs) * U::kBytes;
    r.next_groups.start(args, p, strip, kInputs, t);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int tile = strip * (kColumns / kTileColumns) + (i * kDown + at) / kTileColumns;
      r.column[i] = column_in(half_of(args.call, p, tile, half), at % kPair, static_cast<int>(p.outputs));
    }
#pragma unroll
    for (int i = 0; i < kHigh * kTiles * 4; ++i) r.sum[i / (kTiles * 4)][i / 4 % kTiles][i % 4] = 0.0f;
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

  // Within a phase: stores the groups and rows of a chunk, and loads those of the chunk after it into registers.
  static KV_DEVICE void prepare(Registers& r, const LinearArgs& args, const BlockWork& work, int first, int rows,
                                int chunk, int buffer, int t) {
    const bool more = chunk + 1 < work.range.to;
    r.next_groups.store(work.s.groups, buffer, t);
    if (more) r.next_groups.load(args, work.p, r.column, kInputs, chunk + 1, t);
    store_rows(r, args.call, work.s, first, rows, chunk, buffer, t);
    if (more) load_rows(r, args.call, first, rows, chunk + 1, t);
  }
  // Within a phase: loads a thread's share of the rows of a chunk into registers.
  static KV_DEVICE void load_rows(Registers& r, const KvLinear& a, int first, int rows, int chunk, int t) {
    if (!kLoadsAhead) return;
    const int k = chunk * kInputs + t % kEights * 8;
    if (k >= a.inputs) return;
    if (a.norm) r.next_norm = load_eight<T>(a, a.norm, k);
    const InputLayout layout(a);
    const size_t at = layout.of_input(k);
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const int row = t / kEights + i * kApart;
      if (row < rows) r.next_row[i] = load_eight<T>(a, a.input, at + layout.of_row(first + row));
    }
  }
  // Within a phase: stores a thread's share of the rows of a chunk, which are loaded here if not by load_rows.
  static KV_DEVICE void store_rows(const Registers& r, const KvLinear& a, const Shared& s, int first, int rows,
                                   int chunk, int buffer, int t) {
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
    } else {
      const InputLayout layout(a);
      const size_t at = layout.of_input(k);
#pragma unroll 1
      for (int row = t / kEights; row < rows; row += kRowsAhead * kApart) {
        Eight<T> from[kRowsAhead];
#pragma unroll
        for (int i = 0; i < kRowsAhead; ++i)
          from[i] = load_eight<T>(a, a.input, at + layout.of_row(first + min_of(row + i * kApart, rows - 1)));
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

  template <bool kMinima>
  static KV_DEVICE void multiply_chunk(Block<LinearMma>& block, const KvLinear& a, const KvProduct& p, const Shared& s,
                                       int stage, int buffer, uint32_t ends, int rows) {
    const uint32_t flip[2] = {U::flip(p.weight.is_signed), U::flip(weight_of(a, p, 1).is_signed)};
    const Group* groups = OfGroups::at(s.groups, buffer, 0, 0);
    if constexpr (kTiles <= 4 && kBits == 4 && !kMinima) {  // groups of 32, or 128, that fill the chunk
      if (ends == 0xff) return multiply_groups<1>(block, s, stage, buffer, flip, rows);
      if (ends == 0x88) return multiply_groups<4>(block, s, stage, buffer, flip, rows);
    }
    begin_group<kMinima>(block, groups);
    // Unrolled, a unit's place is a constant. Panels of many rows have enough work per unit to hide the loop.
#pragma unroll(kTiles == 1 ? kUnits : 1)
    for (int u = 0; u < kUnits; ++u) {
      multiply_unit<kMinima>(block, s, stage, buffer, u, flip, rows);
      if (!(ends >> u & 1)) continue;
      end_group<kMinima>(block);
      if (ends < 2u << u) break;
      begin_group<kMinima>(block, groups += OfGroups::kStride);
    }
  }

  // Multiplies a chunk of 8 units whose groups have kEach units, without a test at each unit. Unrolled by 8, groups of
  // one unit would need more registers than there are.
  template <int kEach>
  static KV_DEVICE void multiply_groups(Block<LinearMma>& block, const Shared& s, int stage, int buffer,
                                        const uint32_t (&flip)[2], int rows) {
#pragma unroll(kTiles == 1 ? 4 : 1)
    for (int u = 0; u < kUnits; u += kEach) {
      begin_group<false, true>(block, OfGroups::at(s.groups, buffer, u / kEach, 0));
      multiply_unit<false, true>(block, s, stage, buffer, u, flip, rows);
#pragma unroll
      for (int i = 1; i < kEach; ++i) multiply_unit<false>(block, s, stage, buffer, u + i, flip, rows);
      end_group<false>(block);
    }
  }

  // begin_group reads scale and less of a group; end_group adds its partial sums to the sums. A group that continues
  // into the next chunk is ended in both. kFirst: the group's first product overwrites the partial sums, here and in
  // multiply_unit.
  template <bool kMinima, bool kFirst = false>
  static KV_DEVICE void begin_group(Block<LinearMma>& block, const Group* groups) {
    if (kBits == 0) return;
    block.each_alone([&](int t, Registers& r) {
#pragma unroll
      for (int m = 0; m < kHigh; ++m) {
        const Vector both = load_vector(groups + tile_of(t, m) * kTileColumns + t % kWarp / 4 * 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          r.scale[m][half] = bits_as<float>(both.word[2 * half]), r.less[m][half] = both.word[2 * half + 1];
        }
      }
      if (kFirst) return;
#pragma unroll
      for (int j = 0; j < kHigh * kTiles * 4; ++j) r.partial[j / (kTiles * 4)][j / 4 % kTiles][j % 4] = 0.0f;
      if (!kMinima) return;
#pragma unroll
      for (int j = 0; j < kTiles * 4; ++j) r.inputs[j / 4][j % 4] = 0.0f;
    });
  }
  template <bool kMinima>
  static KV_DEVICE void end_group(Block<LinearMma>& block) {
    if (kBits == 0) return;
    block.each_alone([&](int, Registers& r) {
#pragma unroll
      for (int j = 0; j < kHigh * kTiles * 4; ++j) {
        const int m = j / (kTiles * 4), n = j / 4 % kTiles, half = j / 2 % 2;
        float& sum = r.sum[m][n][j % 4];
        sum += r.partial[m][n][j % 4] * r.scale[m][half];
        if (kMinima) sum += r.inputs[n][j % 4] * bits_as<float>(r.less[m][half]);
      }
    });
  }

  template <bool kMinima, bool kFirst = false>
  static KV_DEVICE void multiply_unit(Block<LinearMma>& block, const Shared& s, int stage, int buffer, int u,
                                      const uint32_t (&flip)[2], int rows) {
    block.each_alone([&](int t, Registers& r) {
      const int lane = t % kWarp;
#pragma unroll
      for (int i = 0; i < kHigh * 2; ++i) {
        const int m = i / 2, half = i % 2;
        const char* const column = s.column(stage, tile_of(t, m) * kTileColumns + half * kPair + lane / 4);
        uint32_t word[U::kWords];
#pragma unroll
        for (int j = 0; j < U::kWords; ++j)
          word[j] = *reinterpret_cast<const uint32_t*>(column + u * U::kBytes + j * 16 + lane % 4 * 4);
        // With minima the integer 0 represents the minimum.
        const uint32_t lower = kMinima ? U::less(flip[half] == U::flip(true) ? (1 << kBits) / 2 : 0) : r.less[m][half];
        const uint32_t less[2] = {lower, U::upper_less(lower)};
        const uint32_t flips[2] = {flip[half], U::upper_flip(flip[half])};
#pragma unroll
        for (int step = 0; step < U::kSteps; ++step)
#pragma unroll
          for (int pair = 0; pair < 2; ++pair)
            r.a[m][step][2 * pair + half] = U::pair(word, step, pair, flips[pair], less[pair]);
      }
    });
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (kTiles > 1 && n * 8 >= rows) break;
      block.each_alone(
          [&](int t, Registers& r) { U::load_inputs(s.row(buffer, n * 8 + t % kWarp / 4), u, t % kWarp, r.b); });
#pragma unroll
      for (int step = 0; step < U::kSteps; ++step) {
#pragma unroll
        for (int m = 0; m < kHigh; ++m) {
          const auto product = [&](Registers& r) {
            return Product{kBits ? r.partial[m][n] : r.sum[m][n], r.a[m][step], r.b + 2 * step};
          };
          if (kFirst && step == 0)
            multiply<T, true>(block, product);
          else
            multiply<T>(block, product);
        }
        if (kMinima) {
          constexpr uint32_t kOne = T::kBrain ? 0x3f803f80u : 0x3c003c00u;
          const uint32_t ones[4] = {kOne, kOne, kOne, kOne};
          multiply<T>(block, [&](Registers& r) { return Product{r.inputs[n], ones, r.b + 2 * step}; });
        }
      }
    }
  }
};

}  // namespace cuda
}  // namespace kv
