// The groups of a weight of 4 bits, if they have 32 or 128 inputs, scales in float16 and no minima: copied
// asynchronously into shared memory as they are stored, 16 or 4 bytes of scales of a column and chunk, and 4 bytes with
// its zero points.
#pragma once

#include "call.h"

namespace kv {
namespace cuda {

// kColumns: columns of a strip. kInputs: inputs of a chunk.
template <int kColumns, int kInputs>
struct CopiedScales {
  static constexpr int kBytes = kColumns * 20;  // of a stage: the scales of its columns, then their zero points
  // Where a column's scales and zero points begin.
  struct Column {
    const char *scales, *zeros;
  };

  // Returns whether the groups of a product, and of its gate, are of this kind, and the inputs are whole chunks.
  static KV_DEVICE bool fit(const KvLinear& a, const KvProduct& p) {
    const KvWeight &w = p.weight, &second = weight_of(a, p, 1);
    return a.inputs % kInputs == 0 && (w.group == 32 || w.group == 128) && fit(w) && fit(second) &&
           !w.zero == !second.zero && (!w.zero || a.inputs / w.group % 8 == 0);
  }

  // Returns the column whose groups thread t copies, if there are as many columns.
  static KV_DEVICE Column column(const LinearArgs& args, const KvProduct& p, int strip, int t) {
    const int tile = strip * (kColumns / kTileColumns) + t / kTileColumns, half = t / kPair % 2;
    const KvWeight& w = weight_of(args.call, p, half);
    const int number = column_in(half_of(args.call, p, tile, half), t % kPair, static_cast<int>(p.outputs));
    const size_t group = static_cast<size_t>(number) * (args.inputs() / static_cast<int>(w.group));
    return {static_cast<const char*>(w.scale) + group * sizeof(Half), static_cast<const char*>(w.zero) + group / 2};
  }

  // Within a phase: starts the copy of a chunk's groups. to: those of the first column.
  template <class Program>
  static KV_DEVICE void copy(Block<Program>& block, const KvWeight& w, const Column& from, char* to, int chunk, int t) {
    if (kColumns < Program::kThreads && t >= kColumns) return;
    const bool small = w.group == 32;
    if (small)
      block.template copy<16>(to + t * 16, from.scales + static_cast<size_t>(chunk) * 16);
    else
      block.template copy<4>(to + t * 16, from.scales + static_cast<size_t>(chunk) * 4);
    if (!w.zero) return;
    to += kColumns * 16 + t * 4;
    block.template copy<4>(to, from.zeros + static_cast<size_t>(small ? chunk : chunk / 4) * 4);
  }

  // Returns the scales of a column of a stage; and from these, the scales and zero points of the i-th column after it.
  static KV_DEVICE const char* at(const char* stage, int column) { return stage + column * 16; }
  static KV_DEVICE const char* scales(const char* of_column, int i) { return of_column + i * 16; }
  static KV_DEVICE uint32_t zeros(const char* of_column, int column, int i) {
    return *reinterpret_cast<const uint32_t*>(of_column + (kColumns * 16 - column * 12) + i * 4);
  }

 private:
  static KV_DEVICE bool fit(const KvWeight& w) {
    return !w.minimum && w.scale_type == KV_FLOAT16 && reinterpret_cast<uintptr_t>(w.scale) % 16 == 0 &&
           reinterpret_cast<uintptr_t>(w.zero) % 4 == 0;
  }
};

}  // namespace cuda
}  // namespace kv
