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

template <class T>
struct Outputs {
  const KvLinear& a;
  const KvProduct& p;

  KV_DEVICE float read(const void* from, size_t i) const { return to_float(static_cast<const T*>(from)[i]); }
  KV_DEVICE float with_bias(float x, int column) const { return p.bias ? x + read(p.bias, column) : x; }
  KV_DEVICE float with_residual(float x, int row, int column) const {
    return a.residual ? x + read(a.residual, static_cast<size_t>(row) * p.outputs + column) : x;
  }
  KV_DEVICE void write(float x, int row, int column) const {
    const int size = static_cast<int>(p.outputs / p.heads), tokens = static_cast<int>(a.tokens);
    const int b = row / tokens, t = row % tokens, h = column / size;
    assign(static_cast<T*>(p.output)[((static_cast<size_t>(b) * p.heads + h) * tokens + t) * size + column - h * size],
           x);
  }
  // Writes the outputs of a pair of sums x, y, lane i of these halves.
  KV_DEVICE void finish(float x, float y, int row, const Half8& first, const Half8& second, int i) const {
    const int u = first.first + i, v = second.first + i;
    if (i >= first.count) return;
    if (is_gated(a)) return write(with_residual(with_bias(x, u) * (y / (1.0f + expf(-y))), row, u), row, u);
    x = with_residual(with_bias(x, u), row, u);
    if (i < second.count) y = with_residual(with_bias(y, v), row, v);
    if (p.rotated) {
      const size_t at = static_cast<size_t>(row) * a.planes + u % (2 * a.planes);
      const float c = read(a.cosine, at), s = read(a.sine, at), rotated = x * c - y * s;
      y = y * c + x * s, x = rotated;
    }
    write(x, row, u);
    if (i < second.count) write(y, row, v);
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
        for (int split = 0; split < args.splits; ++split) sum += partials[split * kSums + i];
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
