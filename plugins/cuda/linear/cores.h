// Linear on CUDA cores, in float32, of any sizes: the products that tensor cores cannot compute (float32 rows that must
// not be rounded, and inputs or groups that are no whole steps). A block of 128 threads computes kRows x 64 outputs for
// a split of the inputs:
//
//   for each 64 inputs of the split      rows and dequantized columns, in float32 in shared memory
//     sum[row, column] += their product  kOwnRows x kOwnColumns per thread, in four sums of every fourth input
//   finish: combine the splits, the epilogue (finish.h)
#pragma once

#include "finish.h"

namespace kv {
namespace cuda {

// kMostRows: the rows of a panel, 8 or 64.
template <class T, int kMostRows>
struct LinearCores {
  using Args = LinearArgs;
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = kMostRows > 8 ? 2 : 4;
  static constexpr int kRows = kMostRows, kColumns = 64, kInputs = 64;
  static constexpr int kOwnColumns = kRows > 8 ? 4 : 1, kAcross = kColumns / kOwnColumns, kDown = kThreads / kAcross;
  static constexpr int kOwnRows = kRows / kDown, kStride = kInputs + 4;
  struct Registers {
    float sum[kOwnRows][kOwnColumns], squares;
  };
  struct Shared {
    float *rows, *columns, *factors;  // [kRows, kStride], [kColumns, kStride], [kRows]
    int* number;                      // every column's number in the weight
  };
  static constexpr size_t shared_size() { return ((kRows + kColumns) * kStride + kRows + kColumns) * sizeof(float); }
  static KV_DEVICE Shared divide(char* shared) {
    Shared s;
    s.rows = reinterpret_cast<float*>(shared), s.columns = s.rows + kRows * kStride;
    s.factors = s.columns + kColumns * kStride, s.number = reinterpret_cast<int*>(s.factors + kRows);
    return s;
  }
  static int chunks(const KvLinear& a) { return static_cast<int>((a.inputs + kInputs - 1) / kInputs); }

  static KV_DEVICE void run(Block<LinearCores>& block, const LinearArgs& args) {
    const KvLinear& a = args.call;
    const Work w(args, block.index());
    const KvProduct& p = a.products[w.product];
    const Shared s = divide(block.shared);
    const int first = w.panel * kRows, rows = min_of(kRows, args.rows() - first);
    if (a.norm) find_factors<T, false>(block, args, first, rows, s.factors, s.rows);
    block.each([&](int t, Registers& r) {
      if (t < kColumns) {
        const int tile = t / kTileColumns + w.strip * (kColumns / kTileColumns);
        s.number[t] = column_in(half_of(a, p, tile, t / kPair % 2), t % kPair, static_cast<int>(p.outputs));
      }
#pragma unroll
      for (int i = 0; i < kOwnRows * kOwnColumns; ++i) r.sum[i / kOwnColumns][i % kOwnColumns] = 0.0f;
    });
    const Range range = share_of(w.split, args.splits, args.inputs(), kInputs);
    const InputLayout layout(a);
    for (int from = range.from; from < range.to; from += kInputs) {
      const int count = min_of(kInputs, range.to - from);
      block.each([&](int t, Registers&) { load(args, p, layout, s, first, rows, from, count, t); });
      block.each([&](int t, Registers& r) { multiply(r, s, rows, t); });
    }
    block.each([&](int t, Registers& r) {
#pragma unroll
      for (int i = 0; i < kOwnRows * kOwnColumns; ++i) {
        const int row = t / kAcross + kDown * (i / kOwnColumns), column = t % kAcross + kAcross * (i % kOwnColumns);
        s.columns[row * kColumns + column] = r.sum[i / kOwnColumns][i % kOwnColumns];
      }
    });
    static_assert(kRows * kColumns <= kColumns * kStride, "the sums fit where the columns were");
    finish<T>(block, args, w, s.columns);
  }

  // Within a phase: loads rows and columns; neighbouring threads read neighbouring inputs; zeros after the last.
  static KV_DEVICE void load(const LinearArgs& args, const KvProduct& p, const InputLayout& layout, const Shared& s,
                             int first, int rows, int from, int count, int t) {
    const KvLinear& a = args.call;
    constexpr int kApart = kThreads / kInputs;
    const int i = t % kInputs, k = from + i, last = args.inputs() - 1;
    const float norm = a.norm && i < count ? to_float(static_cast<const T*>(a.norm)[k]) : 1.0f;
    const T* const input = static_cast<const T*>(a.input) + layout.of_input(min_of(k, last));
    for (int row = t / kInputs; row < rows; row += kAhead * kApart) {
      T stored[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) stored[j] = input[layout.of_row(first + min_of(row + j * kApart, rows - 1))];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        float x = i < count ? to_float(stored[j]) : 0.0f;
        if (a.norm) {  // rounded, as LinearRows rounds it
          assign(stored[j], x * s.factors[min_of(row + j * kApart, rows - 1)] * norm);
          x = to_float(stored[j]);
        }
        if (row + j * kApart < rows) s.rows[(row + j * kApart) * kStride + i] = x;
      }
    }
#pragma unroll 8
    for (int column = t / kInputs; column < kColumns; column += kThreads / kInputs) {
      const KvWeight& weight = weight_of(a, p, column / kPair % 2);
      s.columns[column * kStride + i] = i < count ? value(weight, args.inputs(), s.number[column], k) : 0.0f;
    }
  }
  static KV_DEVICE float value(const KvWeight& w, int inputs, int column, int k) {
    const size_t at = static_cast<size_t>(column) * inputs + k;
    if (!w.bits) return to_float(static_cast<const T*>(w.data)[at]);
    const int group = static_cast<int>(w.group);
    const size_t place = static_cast<size_t>(column) * (inputs / group) + k / group;
    const int q = integer_at(w.data, w, at) - zero_at(w, place);
    const float x = static_cast<float>(q) * number_at(w.scale_type, w.scale, place);
    return w.minimum ? x + number_at(w.minimum_type, w.minimum, place) : x;
  }

  // Within a phase: multiplies rows and columns. Rows beyond the last are skipped, by all threads of the row.
  static KV_DEVICE void multiply(Registers& r, const Shared& s, int rows, int t) {
    float partial[kOwnRows][kOwnColumns][4] = {};
#pragma unroll 4
    for (int k = 0; k < kInputs; k += 4) {
      float x[4], c[kOwnColumns][4];
#pragma unroll
      for (int j = 0; j < kOwnColumns; ++j) load_four(s.columns + (t % kAcross + kAcross * j) * kStride + k, c[j]);
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
        const int row = t / kAcross + kDown * i;
        if (row >= rows) continue;
        load_four(s.rows + row * kStride + k, x);
#pragma unroll
        for (int j = 0; j < kOwnColumns; ++j)
#pragma unroll
          for (int l = 0; l < 4; ++l) partial[i][j][l] += x[l] * c[j][l];
      }
    }
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i)
#pragma unroll
      for (int j = 0; j < kOwnColumns; ++j)
        r.sum[i][j] += (partial[i][j][0] + partial[i][j][1]) + (partial[i][j][2] + partial[i][j][3]);
  }
};

}  // namespace cuda
}  // namespace kv
