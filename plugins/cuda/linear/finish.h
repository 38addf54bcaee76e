// The end of a block of Linear: its sums are put together with those of the other splits, in order, and become outputs.
#pragma once

#include "call.h"

namespace kv {
namespace cuda {

template <class T>
struct Outputs {
  const KvLinear& a;
  const KvProduct& p;

  KV_DEVICE float read(const void* from, size_t i) const { return to_float(static_cast<const T*>(from)[i]); }
  KV_DEVICE float biased(float x, int column) const { return p.bias ? x + read(p.bias, column) : x; }
  KV_DEVICE float ended(float x, int row, int column) const {
    return a.residual ? x + read(a.residual, static_cast<size_t>(row) * p.outputs + column) : x;
  }
  KV_DEVICE void write(float x, int row, int column) const {
    const int size = static_cast<int>(p.outputs / p.heads), tokens = static_cast<int>(a.tokens);
    const int b = row / tokens, t = row % tokens, h = column / size;
    assign(static_cast<T*>(p.output)[((static_cast<size_t>(b) * p.heads + h) * tokens + t) * size + column - h * size],
           x);
  }
  // A pair of sums, of these columns.
  KV_DEVICE void finish(float x, float y, int row, const Half8& first, const Half8& second, int i) const {
    const int u = first.first + i, v = second.first + i;
    if (i >= first.count) return;
    if (is_gated(a)) return write(ended(biased(x, u) * (y / (1.0f + expf(-y))), row, u), row, u);
    x = ended(biased(x, u), row, u);
    if (i < second.count) y = ended(biased(y, v), row, v);
    if (p.rotated) {
      const size_t at = static_cast<size_t>(row) * a.planes + u % (2 * a.planes);
      const float c = read(a.cosine, at), s = read(a.sine, at), turned = x * c - y * s;
      y = y * c + x * s, x = turned;
    }
    write(x, row, u);
    if (i < second.count) write(y, row, v);
  }
};

// sums: [rows of a panel, columns of a strip] of shared memory, complete.
template <class T, class Program>
KV_DEVICE void finish(Block<Program>& block, const LinearArgs& args, const Work& w, float* sums) {
  constexpr int kRows = Program::kRows, kColumns = Program::kColumns, kSums = kRows * kColumns;
  const int first = w.panel * kRows, rows = min_of(kRows, args.rows() - first), used = rows * kColumns;
  if (args.splits > 1) {
    const size_t place = static_cast<size_t>(w.all_strip) * args.panels + w.panel;
    float* const parts = args.partial + place * args.splits * kSums;
    block.each_alone([&](int t, auto&) {
      for (int i = t; i < used; i += Program::kThreads) parts[w.split * kSums + i] = sums[i];
    });
    if (!block.is_last(args.counters + place, args.splits)) return;
    block.each([&](int t, auto&) {
      for (int i = t; i < used; i += Program::kThreads) {
        float sum = 0.0f;
        for (int split = 0; split < args.splits; ++split) sum += parts[split * kSums + i];
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
