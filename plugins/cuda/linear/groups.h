// The scales of a packed weight's groups, with their zero points or minima: from global memory, in the registers of the
// threads a chunk ahead, into shared memory in float32.
#pragma once

#include "pairs.h"

namespace kv {
namespace cuda {

struct alignas(8) Group {
  float scale;
  uint32_t less;  // Unit::less, or with minima the minimum
};

// kColumns: columns of a strip. kAcross: the threads that share the groups of a column, and the most groups of a chunk.
template <class T, int kBits, int kColumns, int kThreads, int kAcross>
struct Groups {
  using U = Unit<T, kBits>;
  static constexpr int kDown = kThreads / kAcross, kOwn = kColumns / kDown, kFours = kOwn / 4, kStride = kColumns + 4;
  static constexpr size_t kBytes = kBits ? 2 * kAcross * kStride * sizeof(Group) : 0;  // two chunks in shared memory

  int all, whole;  // groups of all inputs; of every chunk, 0 if they are not whole
  float scale[kOwn];
  uint32_t less[kOwn];
  // Whether a thread loads four neighbouring scales at once, of these columns, instead of one of each of its columns.
  // Panels of 8-bit weights have no registers for it.
  bool by_fours;
  int four_column[kFours];

  // Returns the i-th group of a chunk in shared memory. A tile's columns are ordered in pairs of both halves, so that a
  // lane loads the groups of both at once.
  static KV_DEVICE Group* at(Group* groups, int buffer, int i, int column) {
    const int in_tile = column % kPair * 2 + column / kPair % 2;
    return groups + (buffer * kAcross + i) * kStride + column / kTileColumns * kTileColumns + in_tile;
  }
  // Returns the half of the tiles that a thread's columns are in.
  static KV_DEVICE int half_of_thread(int t) { return t / kAcross / kPair % 2; }

  // inputs: of a chunk.
  KV_DEVICE void start(const LinearArgs& args, const KvProduct& p, int strip, int inputs, int t) {
    if (kBits == 0) return;
    const int group = static_cast<int>(p.weight.group);
    all = args.inputs() / group, whole = inputs % group ? 0 : inputs / group;
    by_fours = kBits == 4 && whole % 4 == 0 && whole && all % 4 == 0 && has_fours(p.weight) &&
               has_fours(weight_of(args.call, p, 1));
    int half = half_of_thread(t);
    if (by_fours)
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        const int column = column_of_four(i, t) % kColumns;  // past the last: any column
        half = column / kPair % 2;
        const int tile = strip * (kColumns / kTileColumns) + column / kTileColumns;
        four_column[i] = column_in(half_of(args.call, p, tile, half), column % kPair, static_cast<int>(p.outputs));
      }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) less[i] = U::less(excess_of(weight_of(args.call, p, half)));
  }

  // Within a phase: loads a thread's share of the groups of a chunk. column: the thread's own columns.
  KV_DEVICE void load(const LinearArgs& args, const KvProduct& p, const int (&column)[kOwn], int inputs, int chunk,
                      int t) {
    if (kBits == 0) return;
    if (by_fours) return load_fours(args, p, chunk, t);
    const KvWeight& weight = weight_of(args.call, p, half_of_thread(t));
    const int group = static_cast<int>(weight.group);
    const int place = (whole ? chunk * whole : chunk * inputs / group) + t % kAcross;
    if (place >= all || place * group >= (chunk + 1) * inputs) return;
    const auto each_column = [&](auto load) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) load(i, static_cast<size_t>(column[i]) * all + place);
    };
    with_numbers(weight.scale_type, weight.scale,
                 [&](auto* from) { each_column([&](int i, size_t at) { scale[i] = to_float(from[at]); }); });
    if (weight.minimum)
      with_numbers(weight.minimum_type, weight.minimum, [&](auto* from) {
        each_column([&](int i, size_t at) { less[i] = bits_as<uint32_t>(to_float(from[at])); });
      });
    else if (weight.zero)
      each_column([&](int i, size_t at) { less[i] = U::less(integer_at<kBits>(weight.zero, weight, at)); });
  }
  // Within a phase: stores the groups that were loaded.
  KV_DEVICE void store(Group* groups, int buffer, int t) const {
    if (kBits == 0) return;
    if (by_fours) return store_fours(groups, buffer, t);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) *at(groups, buffer, t % kAcross, i * kDown + t / kAcross) = Group{scale[i], less[i]};
  }

 private:
  // Returns whether four neighbouring groups of a column, from any fourth one on, have nothing but scales, which one
  // load can read.
  static KV_DEVICE bool has_fours(const KvWeight& w) {
    return !w.zero && !w.minimum && reinterpret_cast<uintptr_t>(w.scale) % 16 == 0;
  }
  // The column of a thread's i-th four groups of a chunk, and the first of them: a chunk has four or eight groups.
  KV_DEVICE int column_of_four(int i, int t) const { return (i * kThreads + t) >> whole / 8; }
  KV_DEVICE int first_of_four(int t) const { return whole == 8 ? t % 2 * 4 : 0; }

  KV_DEVICE void load_fours(const LinearArgs& args, const KvProduct& p, int chunk, int t) {
    const int place = chunk * whole + first_of_four(t);
    if (place >= all) return;
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int column = column_of_four(i, t);
      if (column >= kColumns) return;
      const KvWeight& weight = weight_of(args.call, p, column / kPair % 2);
      float four[4];
      with_numbers(weight.scale_type, weight.scale,
                   [&](auto* from) { load_four(from + static_cast<size_t>(four_column[i]) * all + place, four); });
#pragma unroll
      for (int j = 0; j < 4; ++j) scale[4 * i + j] = four[j];
    }
  }
  KV_DEVICE void store_fours(Group* groups, int buffer, int t) const {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int column = column_of_four(i, t);
      if (column >= kColumns) return;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        *at(groups, buffer, first_of_four(t) + j, column) = Group{scale[4 * i + j], less[4 * i + j]};
    }
  }
};

}  // namespace cuda
}  // namespace kv
