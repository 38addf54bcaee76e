// Linear on tensor cores: every weight is read once for all rows of a panel, dequantized in registers, exactly, and
// multiplied by mma.m16n8k16 with its 16 columns as the product's rows and the panel's rows as its columns. A block of
// four warps makes a strip of columns for a panel of rows, over a split of the inputs:
//
//   for each chunk of the strip's columns        128 bytes of each (64) by asynchronous copies, kStages at a time
//     rows of the next chunk                     normalised, in 16 bits, in the order of `Unit`; scales likewise
//     for each group of inputs in the chunk
//       part[column, row] += (integer - zero) x  a warp 16 columns, or 32, of all rows
//       sum[column, row] += part scale           float32, so a scale is nowhere rounded; + minimum sum of x
//   the last block of a strip to finish: combine the splits in order; the epilogue (finish.h)
//
// Rows of float32 become bfloat16, which the contract allows where weights are packed and `float_input` is 0.
#pragma once

#include "finish.h"
#include "pairs.h"

namespace kv {
namespace cuda {

// kBits: of packed weights, 0 of those in 16 bits. kTiles: of 8 rows, of a panel; minima, whose sums take registers of
// their own, go with 4 at most.
template <class T, int kBits, int kTiles>
struct LinearMma {
  using Args = LinearArgs;
  using U = Unit<T, kBits>;
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = kTiles > 1 ? 2 : 4, kStages = kTiles == 4 ? 2 : 3;
  static constexpr int kRows = 8 * kTiles, kHigh = kTiles > 1 ? 2 : 1;  // kHigh: tiles of 16 columns of a warp
  static constexpr int kColumns = kThreads / kWarp * kHigh * kTileColumns;
  static constexpr bool kTakesMinima = kTiles <= 4;
  static constexpr int kChunk = kTiles > 4 ? 64 : 128, kUnits = kChunk / U::kBytes, kInputs = kUnits * U::kInputs;
  static constexpr int kStride = kChunk + 16;  // of a column's bytes: lanes that read neighbouring columns do not meet
  static constexpr int kRowStride = 2 * kInputs + (kBits == 4 ? 64 : 32);  // nor those that read neighbouring rows
  // Columns are copied by neighbouring threads, 16 bytes each, so many at a time.
  static constexpr int kAcross = kChunk / 16, kDown = kThreads / kAcross, kOwn = kColumns / kDown;
  static constexpr int kGroups = kAcross, kGroupStride = kColumns + 4;  // of a chunk, at most

  struct Registers {
    float sum[kHigh][kTiles][4], part[kHigh][kTiles][4], inputs[kTiles][4];  // inputs: sums of a group's x
    uint32_t a[kHigh][U::kSteps][4], b[2 * U::kSteps];
    float scale[kHigh][2];
    uint32_t less[kHigh][2];  // with minima these
    // A thread's share of what is copied: of some columns 16 bytes of a chunk, and a group.
    const char* from[kOwn];
    int column[kOwn];
    float next_scale[kOwn];
    uint32_t next_less[kOwn];
    int groups, whole_groups;  // of all inputs; of every chunk, 0 where its groups are not whole
    float squares;
  };
  struct alignas(8) Group {
    float scale;
    uint32_t less;
  };
  struct Shared {
    char *columns, *rows;
    Group* groups;
    float* factors;

    KV_DEVICE char* column(int stage, int i) const { return columns + (stage * LinearMma::kColumns + i) * kStride; }
    KV_DEVICE char* row(int buffer, int i) const { return rows + (buffer * LinearMma::kRows + i) * kRowStride; }
    KV_DEVICE Group& group(int buffer, int i, int column) const {
      return groups[(buffer * kGroups + i) * kGroupStride + column];
    }
  };
  static constexpr size_t kOfRows = 2 * kRows * kRowStride, kOfGroups = kBits ? 2 * kGroups * kGroupStride * 8 : 0;
  static constexpr size_t shared_size() {
    return kStages * kColumns * kStride + kOfRows + kOfGroups + kRows * sizeof(float);
  }
  static KV_DEVICE Shared divide(char* shared) {
    Shared s;
    s.columns = shared, s.rows = shared + kStages * kColumns * kStride;
    s.groups = reinterpret_cast<Group*>(s.rows + kOfRows);
    s.factors = reinterpret_cast<float*>(s.rows + kOfRows + kOfGroups);
    return s;
  }
  static int chunks(const KvLinear& a) { return static_cast<int>((a.inputs + kInputs - 1) / kInputs); }

  // What a block makes.
  struct Part {
    const Work w;
    const KvProduct& p;
    const Shared s;
    const int inputs;
    const Range range;  // chunks

    KV_DEVICE Part(const LinearArgs& args, const Block<LinearMma>& block)
        : w(args, block.index()),
          p(args.call.products[w.product]),
          s(divide(block.shared)),
          inputs(args.inputs()),
          range(share_of(w.split, args.splits, (inputs + kInputs - 1) / kInputs, 1)) {}
  };

  // The first chunks of columns, and the scales of the first.
  static KV_DEVICE void before(Block<LinearMma>& block, const LinearArgs& args) {
    if (!args.weights_stay) block.wait_for_earlier();
    const Part part(args, block);
    block.each_alone([&](int t, Registers& r) { start(r, args, part.p, part.w.strip, t); });
    for (int i = 0; i < kStages - 1; ++i) fetch(block, part, part.range.from + i, i);
    block.each_alone([&](int t, Registers& r) { load_groups(r, args, part.p, part.range.from, t); });
  }

  static KV_DEVICE void run(Block<LinearMma>& block, const LinearArgs& args) {
    const KvLinear& a = args.call;
    const Part part(args, block);
    const Work& w = part.w;
    const KvProduct& p = part.p;
    const Shared& s = part.s;
    const Range range = part.range;
    const int first = w.panel * kRows, rows = min_of(kRows, args.rows() - first), inputs = part.inputs;
    factors(block, args, s, first, rows);
    block.each_alone([&](int t, Registers& r) {
      keep_groups(r, s, 0, t);
      if (range.from + 1 < range.to) load_groups(r, args, p, range.from + 1, t);
      load_rows(args, s, first, rows, range.from, 0, t);
    });
    const int group = kBits ? static_cast<int>(p.weight.group) / U::kInputs : kUnits;  // in units
    const bool alike = kUnits % group == 0;  // whether groups end with the same units in every whole chunk
    int left = group - range.from * kUnits % group, stage = 0;
    uint32_t ends = alike ? ends_of(kUnits, group, left) : 0;
    for (int chunk = range.from, i = 0; chunk < range.to; ++chunk, ++i) {
      block.cp_async_wait(kStages - 2);  // and the chunk before is no longer needed
      fetch(block, part, chunk + kStages - 1, stage ? stage - 1 : kStages - 1);
      block.each_alone([&](int t, Registers& r) {
        if (chunk + 1 >= range.to) return;
        keep_groups(r, s, (i + 1) % 2, t);
        if (chunk + 2 < range.to) load_groups(r, args, p, chunk + 2, t);
        load_rows(args, s, first, rows, chunk + 1, (i + 1) % 2, t);
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

  // Between phases: the columns of a chunk, where the split has it, are on their way into a stage.
  static KV_DEVICE void fetch(Block<LinearMma>& block, const Part& part, int chunk, int stage) {
    block.each_alone([&](int t, Registers& r) {
      const int at = t % kAcross * 16;
      if (chunk >= part.range.to || at >= part.inputs / U::kInputs * U::kBytes - chunk * kChunk) return;
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        block.template copy<16>(part.s.column(stage, i * kDown + t / kAcross) + at,
                                r.from[i] + static_cast<size_t>(chunk) * kChunk + at);
    });
    block.cp_async_commit();
  }

  static KV_DEVICE int tile_of(int t, int m) { return t / kWarp * kHigh + m; }
  // The half that a thread's columns are in.
  static KV_DEVICE int own_half(int t) { return t / kAcross / kPair % 2; }

  static KV_DEVICE void start(Registers& r, const LinearArgs& args, const KvProduct& p, int strip, int t) {
    const int half = own_half(t), at = t / kAcross;
    const char* const data = static_cast<const char*>(weight_of(args.call, p, half).data);
    const size_t bytes = static_cast<size_t>(args.inputs() / U::kInputs) * U::kBytes;
    if (kBits) {
      const int group = static_cast<int>(p.weight.group);
      r.groups = args.inputs() / group, r.whole_groups = kInputs % group ? 0 : kInputs / group;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) r.next_less[i] = U::less(excess_of(weight_of(args.call, p, half)));
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int tile = strip * (kColumns / kTileColumns) + (i * kDown + at) / kTileColumns;
      r.column[i] = column_in(half_of(args.call, p, tile, half), at % kPair, static_cast<int>(p.outputs));
      r.from[i] = data + r.column[i] * bytes;
    }
#pragma unroll
    for (int i = 0; i < kHigh * kTiles * 4; ++i) r.sum[i / (kTiles * 4)][i / 4 % kTiles][i % 4] = 0.0f;
  }

  static KV_DEVICE void factors(Block<LinearMma>& block, const LinearArgs& args, const Shared& s, int first, int rows) {
    const KvLinear& a = args.call;
    if (!a.norm) return;
    if (args.factors)
      block.each([&](int t, Registers&) {
        if (t < rows) s.factors[t] = args.factors[first + t];
      });
    else if (T::kBrain && a.type == KV_FLOAT32)
      find_factors<float>(block, args, first, rows, s.factors);
    else
      find_factors<T>(block, args, first, rows, s.factors);
  }

  // Of a chunk's groups a thread one, of the columns that it copies.
  static KV_DEVICE void load_groups(Registers& r, const LinearArgs& args, const KvProduct& p, int chunk, int t) {
    if (kBits == 0) return;
    const KvWeight& weight = weight_of(args.call, p, own_half(t));
    const int group = static_cast<int>(weight.group), groups = r.groups;
    const int place = (r.whole_groups ? chunk * r.whole_groups : chunk * kInputs / group) + t % kAcross;
    if (place >= groups || place * group >= (chunk + 1) * kInputs) return;
    const auto of_columns = [&](auto take) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) take(i, static_cast<size_t>(r.column[i]) * groups + place);
    };
    with_numbers(weight.scale_type, weight.scale,
                 [&](auto* scale) { of_columns([&](int i, size_t at) { r.next_scale[i] = to_float(scale[at]); }); });
    if (weight.minimum)
      with_numbers(weight.minimum_type, weight.minimum, [&](auto* minimum) {
        of_columns([&](int i, size_t at) { r.next_less[i] = bits_as<uint32_t>(to_float(minimum[at])); });
      });
    else if (weight.zero)
      of_columns([&](int i, size_t at) { r.next_less[i] = U::less(integer_at<kBits>(weight.zero, weight, at)); });
  }
  static KV_DEVICE void keep_groups(const Registers& r, const Shared& s, int buffer, int t) {
    if (kBits == 0) return;
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      s.group(buffer, t % kAcross, i * kDown + t / kAcross) = Group{r.next_scale[i], r.next_less[i]};
  }

  static KV_DEVICE void load_eight(const KvLinear& a, const void* from, size_t i, float (&x)[8]) {
    if (!T::kBrain || a.type != KV_FLOAT32) return widen<T>(load_vector(static_cast<const T*>(from) + i), x);
    float low[4], high[4];
    load_four(static_cast<const float*>(from) + i, low), load_four(static_cast<const float*>(from) + i + 4, high);
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = low[j], x[j + 4] = high[j];
  }
  static KV_DEVICE void load_rows(const LinearArgs& args, const Shared& s, int first, int rows, int chunk, int buffer,
                                  int t) {
    const KvLinear& a = args.call;
    constexpr int kVectors = kInputs / 8, kApart = kThreads / kVectors;
    static_assert(kThreads % kVectors == 0, "of every row that a thread takes it takes the same vector");
    int row = t / kVectors;
    if (row >= rows) return;
    const int v = t % kVectors, k = chunk * kInputs + v * 8;
    if (k >= args.inputs()) return;
    // Of few rows the norm's weights are read for each, and take no registers beyond it.
    float norm[8];
    if (a.norm && kTiles > 1) load_eight(a, a.norm, k, norm);
    for (; row < rows; row += kApart) {
      float x[8];
      load_eight(a, a.input, input_at(a, first + row, k), x);
      if (a.norm) {
        if (kTiles == 1) load_eight(a, a.norm, k, norm);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = x[j] * s.factors[row] * norm[j];
      }
      U::store_inputs(s.row(buffer, row), v, x);
    }
  }

  // With which units of a chunk a group ends, a bit each; the chunk's last one is among them. left: units of the group
  // that the chunk begins in, afterwards of the one that the next chunk does.
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
    const uint32_t turned[2] = {U::turned(p.weight.is_signed), U::turned(weight_of(a, p, 1).is_signed)};
    const Group* groups = &s.group(buffer, 0, 0);
    if constexpr (kTiles <= 4 && kBits == 4 && !kMinima) {  // groups of 32, or 128, that fill the chunk
      if (ends == 0xff) return multiply_groups<1>(block, s, stage, buffer, turned, rows);
      if (kTiles > 1 && ends == 0x88) return multiply_groups<4>(block, s, stage, buffer, turned, rows);
    }
    begin_group<kMinima>(block, groups);
    // Unrolled, a unit's place is a constant; panels of many rows have work enough for a loop.
#pragma unroll(kTiles == 1 ? kUnits : 1)
    for (int u = 0; u < kUnits; ++u) {
      multiply_unit<kMinima>(block, s, stage, buffer, u, turned, rows);
      if (!(ends >> u & 1)) continue;
      end_group<kMinima>(block);
      if (ends < 2u << u) break;
      begin_group<kMinima>(block, groups += kGroupStride);
    }
  }

  // The same of a chunk of 8 units whose groups are kEach of them: nothing is asked. All 8 in a row, groups of one unit
  // would take more registers than there are.
  template <int kEach>
  static KV_DEVICE void multiply_groups(Block<LinearMma>& block, const Shared& s, int stage, int buffer,
                                        const uint32_t (&turned)[2], int rows) {
#pragma unroll(kTiles == 1 ? 4 : 1)
    for (int u = 0; u < kUnits; u += kEach) {
      begin_group<false, true>(block, &s.group(buffer, u / kEach, 0));
      multiply_unit<false, true>(block, s, stage, buffer, u, turned, rows);
#pragma unroll
      for (int i = 1; i < kEach; ++i) multiply_unit<false>(block, s, stage, buffer, u + i, turned, rows);
      end_group<false>(block);
    }
  }

  // A group of a chunk, of all columns; one that goes on in the next chunk is added up in both. kFirst: its first unit
  // adds to nothing, likewise below.
  template <bool kMinima, bool kFirst = false>
  static KV_DEVICE void begin_group(Block<LinearMma>& block, const Group* groups) {
    if (kBits == 0) return;
    block.each_alone([&](int t, Registers& r) {
#pragma unroll
      for (int i = 0; i < kHigh * 2; ++i) {
        const Group& held = groups[tile_of(t, i / 2) * kTileColumns + i % 2 * kPair + t % kWarp / 4];
        r.scale[i / 2][i % 2] = held.scale, r.less[i / 2][i % 2] = held.less;
      }
      if (kFirst) return;
#pragma unroll
      for (int j = 0; j < kHigh * kTiles * 4; ++j) r.part[j / (kTiles * 4)][j / 4 % kTiles][j % 4] = 0.0f;
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
        sum += r.part[m][n][j % 4] * r.scale[m][half];
        if (kMinima) sum += r.inputs[n][j % 4] * bits_as<float>(r.less[m][half]);
      }
    });
  }

  template <bool kMinima, bool kFirst = false>
  static KV_DEVICE void multiply_unit(Block<LinearMma>& block, const Shared& s, int stage, int buffer, int u,
                                      const uint32_t (&turned)[2], int rows) {
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
        // With minima what stands for zero is the integer 0.
        const uint32_t less =
            kMinima ? U::less(turned[half] == U::turned(true) ? (1 << kBits) / 2 : 0) : r.less[m][half];
#pragma unroll
        for (int step = 0; step < U::kSteps; ++step)
#pragma unroll
          for (int pair = 0; pair < 2; ++pair)
            r.a[m][step][2 * pair + half] = U::pair(word, step, pair, turned[half], less);
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
            return Product{kBits ? r.part[m][n] : r.sum[m][n], r.a[m][step], r.b + 2 * step};
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
