// The output of a token: the sum of its rows' results in the order of the experts' numbers. A block has kColumns
// columns of a token.
#pragma once

#include "experts.h"

namespace kv {
namespace cuda {

struct CombineArgs {
  ExpertsArgs all;
  int strips;  // of kColumns columns
};

struct Combine {
  using Args = CombineArgs;
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 8, kColumns = 512;
  struct Registers {};
  static size_t shared_size(const KvExperts& a) { return static_cast<size_t>(a.chosen) * sizeof(int); }

  static KV_DEVICE void run(Block<Combine>& block, const Args& args) {
    const KvExperts& a = args.all.call;
    const int token = block.index() / args.strips, first = block.index() % args.strips * kColumns;
    const int chosen = static_cast<int>(a.chosen), from = token * chosen;
    int* const ordered = reinterpret_cast<int*>(block.shared);  // the rows, -1 for a number that is no expert
    block.each([&](int t, Registers&) {
      for (int i = t; i < chosen; i += kThreads) {
        const int64_t e = a.indices[from + i];
        int rank = 0;
        for (int j = 0; j < chosen; ++j) {
          const int64_t other = a.indices[from + j];
          rank += other < e || (other == e && j < i);
        }
        ordered[rank] = args.all.tile ? args.all.row_of[from + i] : is_expert(a, e) ? i : -1;
      }
    });
    block.each_alone([&](int t, Registers&) {
      for (int column = first + t; column < min_of(first + kColumns, static_cast<int>(a.hidden)); column += kThreads) {
        float sum = 0.0f;
        for (int i = 0; i < chosen; ++i)
          if (ordered[i] >= 0) sum += args.all.result[static_cast<size_t>(ordered[i]) * a.hidden + column];
        const size_t at = static_cast<size_t>(token) * a.hidden + column;
        if (a.type == KV_FLOAT32)
          assign(static_cast<float*>(a.output)[at], sum);
        else if (a.type == KV_FLOAT16)
          assign(static_cast<Half*>(a.output)[at], sum);
        else
          assign(static_cast<BFloat*>(a.output)[at], sum);
      }
    });
  }
};

}  // namespace cuda
}  // namespace kv
