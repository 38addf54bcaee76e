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

constexpr int kSplitsAhead = 8;  // splits whose sums a thread loads at a time

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
  // Writes the outputs of a pair of sums x, y, lane i of these halves. All loads come before the first use of one.
  KV_DEVICE void finish(float x, float y, int row, const Half8& first, const Half8& second, int i) const {
    const int u = first.first + i, v = second.first + i;
    const bool has_second = !is_gated(a) && i < second.count;
    if (i >= first.count) return;
    T bias[2] = {}, residual[2] = {}, cosine = {}, sine = {};
    const size_t at = static_cast<size_t>(row) * p.outputs;
    if (p.bias) bias[0] = read(p.bias, u);
    if (p.bias && has_second) bias[1] = read(p.bias, v);
    if (a.residual) residual[0] = read(a.residual, at + u);
    if (a.residual && has_second) residual[1] = read(a.residual, at + v);
    if (p.rotated) {
      const size_t plane = static_cast<size_t>(row) * a.planes + u % (2 * a.planes);
      cosine = read(a.cosine, plane), sine = read(a.sine, plane);
    }
    if (p.bias) x += to_float(bias[0]), y = has_second ? y + to_float(bias[1]) : y;
    if (is_gated(a)) x *= y / (1.0f + expf(-y));
    if (a.residual) x += to_float(residual[0]), y = has_second ? y + to_float(residual[1]) : y;
    if (p.rotated) {
      const float c = to_float(cosine), s = to_float(sine), rotated = x * c - y * s;
      y = y * c + x * s, x = rotated;
    }
    write(x, row, u);
    if (has_second) write(y, row, v);
  }
};

// Finishes a block. sums: [rows of a panel, columns of a strip] in shared memory, visible to all threads.
template <class T, class Program>
KV_DEVICE void finish(Block<Program>& block, const LinearArgs& args, const Work& w, float* sums) {
  constexpr int kRows = Program::kRows, kColumns = Program::kColumns, kSums = kRows * kColumns;
  const int first = w.panel * kRows, rows = min_of(kRows, args.rows() - first), used = rows * kColumns;
  if (args.splits > 1) {
    const size_t place = static_cast<size_t>(w.all_strip) * args.panels + w.panel;
    float* const partials = args.partial + place * args.splits * kSums;
    block.each_alone([&](int t, auto&) {
      for (int i = t; i < used; i += Program::kThreads) partials[w.split * kSums + i] = sums[i];
    });
    if (!block.is_last(args.counters + place, args.splits)) return;
    block.each([&](int t, auto&) {
      for (int i = t; i < used; i += Program::kThreads) {
        float sum = 0.0f;
        for (int split = 0; split < args.splits; split += kSplitsAhead) {
          float part[kSplitsAhead];
#pragma unroll
          for (int j = 0; j < kSplitsAhead; ++j) part[j] = partials[min_of(split + j, args.splits - 1) * kSums + i];
#pragma unroll
          for (int j = 0; j < kSplitsAhead; ++j) sum = split + j < args.splits ? sum + part[j] : sum;
        }
        sums[i] = sum;
      }
    });
  }
  const KvProduct& p = args.call.products[w.product];
  const Outputs<T> outputs{args.call, p};
  const int tiles = kColumns / kTileColumns;
  block.each_alone([&](int t, auto&) {
    for (int i = t; i < used / 2; i += Program::kThreads) {
      const int row = i / (kColumns / 2), tile = i / kPair % tiles, g = i % kPair;
      const float* const pair = sums + row * kColumns + tile * kTileColumns + g;
      const int number = w.strip * tiles + tile;
      outputs.finish(pair[0], pair[kPair], first + row, half_of(args.call, p, number, 0),
                     half_of(args.call, p, number, 1), g);
    }
  });
}

}  // namespace cuda
}  // namespace kv
