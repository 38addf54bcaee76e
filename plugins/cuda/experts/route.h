// The rows and tiles of a call of several tokens, without the host: a block for each expert.
//
//   count the numbers in `indices` that are this expert, and those that are an expert below it
//   the expert's rows begin behind the rows of the experts below it; a prefix sum over the threads, each of which has
//   consecutive numbers, places its rows in the order of tokens
//   the last block divides the rows of every expert into tiles
#pragma once

#include "experts.h"

namespace kv {
namespace cuda {

struct Route {
  using Args = ExpertsArgs;
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 8;
  struct Registers {
    int scanned;
  };
  static constexpr size_t shared_size() { return kThreads * sizeof(int); }

  // Calls use(i) for a thread's share of `count` numbers or experts, which are consecutive ones.
  template <class Use>
  static KV_DEVICE void each_of(int count, int t, Use use) {
    const int share = (count + kThreads - 1) / kThreads;
    for (int i = t * share; i < min_of((t + 1) * share, count); ++i) use(i);
  }

  static KV_DEVICE void run(Block<Route>& block, const Args& args) {
    const KvExperts& a = args.call;
    const int expert = block.index();
    int* const sums = reinterpret_cast<int*>(block.shared);
    const int first = sum_of(block, sums, [&](int t, Registers&) {
      int lower = 0;
      each_of(args.rows, t, [&](int i) { lower += is_expert(a, a.indices[i]) && a.indices[i] < expert; });
      return lower;
    });
    const int count = scan(block, sums, [&](int t, Registers&) {
      int own = 0;
      each_of(args.rows, t, [&](int i) { own += a.indices[i] == expert; });
      return own;
    });
    block.each_alone([&](int t, Registers& r) {
      int row = first + r.scanned;
      each_of(args.rows, t, [&](int i) {
        if (a.indices[i] == expert) args.row_of[i] = row, args.number[row++] = i;
        if (expert == 0 && !is_expert(a, a.indices[i])) args.row_of[i] = -1;
      });
      if (t == 0) args.begin[expert] = first, args.count[expert] = count;
    });
    if (block.is_last(args.counter, static_cast<int>(a.experts))) divide(block, args, sums);
  }

  // Writes the tiles of all experts.
  static KV_DEVICE void divide(Block<Route>& block, const Args& args, int* sums) {
    const int experts = static_cast<int>(args.call.experts);
    const int tiles = scan(block, sums, [&](int t, Registers&) {
      int own = 0;
      each_of(experts, t, [&](int e) { own += (args.count[e] + args.tile_rows - 1) / args.tile_rows; });
      return own;
    });
    block.each_alone([&](int t, Registers& r) {
      int tile = r.scanned;
      each_of(experts, t, [&](int e) {
        for (int row = 0; row < args.count[e]; row += args.tile_rows)
          args.tile[tile++] = Tile{e, args.begin[e] + row, min_of(args.count[e] - row, args.tile_rows)};
      });
      if (t == 0) *args.tiles = tiles;
    });
  }
};

}  // namespace cuda
}  // namespace kv
