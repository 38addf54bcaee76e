// The end of a block of Linear: combine its sums with those of the other splits, in order, and write outputs:
//
//   sum = sum over the splits, by the last block of a strip and panel
//   with a gate:  output = (sum + bias) silu(gate's sum) + residual
//   rotated head: output = rotation of both columns' sum + bias (+ residual) by their cosine and sine
//   otherwise:    output = sum + bias + residual
#pragma once

#include "call.h"

namespace kv {
namespace cuda {

constexpr int kSplitsAhead = 8, kPairsAhead = 4;  // splits, and pairs of sums, that a thread loads at a time

template <class T>
struct Outputs {
  const KvLinear& a;
  const KvProduct& p;

  KV_DEVICE T read(const void* from, size_t i) const { return static_cast<const T*>(from)[i]; }
  KV_DEVICE void write(float x, int row, int column) const {
    const int size = static_cast<int>(p.outputs / p.heads), tokens = static_cast<int>(a.tokens);
    const int b = row / tokens, t = row % tokens, h = column / size;
    assign(static_cast<T*>(p.output)[((static_cast<size_t>(b) * p.heads + h) * tokens + t) * size + column - h * size],
           x);
  }
  // What the outputs of lane i of two halves need beside their sums.
  struct Operands {
    T bias[2], residual[2], cosine, sine;
  };
  KV_DEVICE bool has_second(const Half8& second, int i) const { return !is_gated(a) && i < second.count; }
  KV_DEVICE Operands load(int row, const Half8& first, const Half8& second, int i) const {
    const int u = first.first + i, v = second.first + i;
    Operands from = {};
    if (i >= first.count) return from;
    const size_t at = static_cast<size_t>(row) * p.outputs;
    if (p.bias) from.bias[0] = read(p.bias, u);
    if (p.bias && has_second(second, i)) from.bias[1] = read(p.bias, v);
    if (a.residual) from.residual[0] = read(a.residual, at + u);
    if (a.residual && has_second(second, i)) from.residual[1] = read(a.residual, at + v);
    if (p.rotated) {
      const size_t plane = static_cast<size_t>(row) * a.planes + u % (2 * a.planes);
      from.cosine = read(a.cosine, plane), from.sine = read(a.sine, plane);
    }
    return from;
  }
  // Writes the outputs of a pair of sums x, y, lane i of these halves.
  KV_DEVICE void finish(float x, float y, const Operands& from, int row, const Half8& first, const Half8& second,
                        int i) const {
    const bool both = has_second(second, i);
    if (i >= first.count) return;
    if (p.bias) x += to_float(from.bias[0]), y = both ? y + to_float(from.bias[1]) : y;
    if (is_gated(a)) x *= y / (1.0f + expf(-y));
    if (a.residual) x += to_float(from.residual[0]), y = both ? y + to_float(from.residual[1]) : y;
    if (p.rotated) {
      const float c = to_float(from.cosine), s = to_float(from.sine), rotated = x * c - y * s;
      y = y * c + x * s, x = rotated;
    }
    write(x, row, first.first + i);
    if (both) write(y, row, second.first + i);
  }
};

// Within a phase: adds up the pairs of sums at `at` over the splits, in order, all loads of eight splits at once.
// partials: the splits' sums, `apart` floats from split to split.
template <int kPairs>
KV_DEVICE void add_splits(const float* partials, int splits, int apart, const int (&at)[kPairs],
                          float (&sum)[kPairs][2]) {
#pragma unroll
  for (int j = 0; j < kPairs * 2; ++j) sum[j / 2][j % 2] = 0.0f;
#pragma unroll 1
  for (int split = 0; split < splits; split += kSplitsAhead) {
    float part[kPairs][2][kSplitsAhead];
#pragma unroll
    for (int j = 0; j < kPairs * 2 * kSplitsAhead; ++j) {
      const int pair = j / (2 * kSplitsAhead), half = j / kSplitsAhead % 2, ahead = j % kSplitsAhead;
      part[pair][half][ahead] = partials[min_of(split + ahead, splits - 1) * apart + at[pair] + half * kPair];
    }
#pragma unroll
    for (int j = 0; j < kPairs * 2 * kSplitsAhead; ++j) {
      const int pair = j / (2 * kSplitsAhead), half = j / kSplitsAhead % 2, ahead = j % kSplitsAhead;
      float& to = sum[pair][half];
      to = split + ahead < splits ? to + part[pair][half][ahead] : to;
    }
  }
}

// Finishes a block. sums: [rows of a panel, columns of a strip] in shared memory, visible to all threads. A thread
// loads everything that several pairs of sums need, before it uses any of it.
template <class T, class Program>
KV_DEVICE void finish(Block<Program>& block, const LinearArgs& args, const Work& w, float* sums) {
  constexpr int kRows = Program::kRows, kColumns = Program::kColumns, kSums = kRows * kColumns;
  constexpr int kThreads = Program::kThreads, kPairs = min_of(kPairsAhead, kSums / 2 / kThreads);
  const int first = w.panel * kRows, rows = min_of(kRows, args.rows() - first), used = rows * kColumns;
  const size_t place = static_cast<size_t>(w.all_strip) * args.panels + w.panel;
  float* const partials = args.partial + place * args.splits * kSums;
  if (args.splits > 1) {
    block.each_alone([&](int t, auto&) {
      for (int i = t; i < used; i += kThreads) partials[w.split * kSums + i] = sums[i];
    });
    if (!block.is_last(args.counters + place, args.splits)) return;
  }
  const KvProduct& p = args.call.products[w.product];
  const Outputs<T> outputs{args.call, p};
  const int tiles = kColumns / kTileColumns, pairs = used / 2;
  block.each_alone([&](int t, auto&) {
#pragma unroll 1
    for (int from = t; from < pairs; from += kPairs * kThreads) {
      typename Outputs<T>::Operands operands[kPairs];
      int at[kPairs], row[kPairs];
      Half8 half[kPairs][2];
      float sum[kPairs][2];
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int i = min_of(from + j * kThreads, pairs - 1), tile = i / kPair % tiles;
        row[j] = i / (kColumns / 2), at[j] = row[j] * kColumns + tile * kTileColumns + i % kPair;
        for (int k = 0; k < 2; ++k) half[j][k] = half_of(args.call, p, w.strip * tiles + tile, k);
        operands[j] = outputs.load(first + row[j], half[j][0], half[j][1], i % kPair);
      }
      if (args.splits > 1)
        add_splits(partials, args.splits, kSums, at, sum);
      else
#pragma unroll
        for (int j = 0; j < kPairs; ++j) sum[j][0] = sums[at[j]], sum[j][1] = sums[at[j] + kPair];
#pragma unroll
      for (int j = 0; j < kPairs; ++j)
        if (from + j * kThreads < pairs)
          outputs.finish(sum[j][0], sum[j][1], operands[j], first + row[j], half[j][0], half[j][1], from % kPair);
    }
  });
}

}  // namespace cuda
}  // namespace kv
