// The second launch of a decode step: the statistics that are sums of probabilities, from the logits and the softmax
// that the first launch stored. A thread per slot of a KV head:
//
//   received = sum over the group's query heads g of exp(logit[g, slot] - row_max[g]) / row_sum[g]
//   score[slot] = decay score[slot] + recency_weight received / group
#pragma once

#include "attention.h"

namespace kv {
namespace cuda {

// Adds the probabilities of the slots of a block, a slot per thread, to their statistics. first: the first slot.
template <class T, class Program>
KV_DEVICE void add_probabilities(Block<Program>& block, const Attention& args, const Head<T>& head, int group,
                                 int first) {
  const KvVoteAttention& a = args.call;
  const int used = args.used[2 * head.index], n = args.used[2 * head.index + 1];
  block.each([&](int t, auto&) {
    const int slot = first + t;
    if (n == 0 || slot > used) return;
    float received = 0.0f;
    for (int g = 0; g < group; ++g) {
      const size_t row = head.query_head(g);
      received +=
          expf(args.logits[row * a.capacity + slot] - args.row_softmax[2 * row]) / args.row_softmax[2 * row + 1];
    }
    for (int k = 0; k < a.statistics; ++k) {
      const KvStatistic& statistic = a.statistic[k];
      if (statistic.kind != KV_STATISTIC_PROBABILITY) continue;
      const float past = slot < used ? head.score(k)[slot] * statistic.decay : 0.0f;
      head.score(k)[slot] = past + statistic.recency_weight / static_cast<float>(group) * received;
    }
  });
}

struct DecodeSums {
  using Args = Attention;
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 1;
  struct Registers {};
  static KV_HD int blocks_per_head(int capacity) { return (capacity + kThreads - 1) / kThreads; }

  static KV_DEVICE void run(Block<DecodeSums>& block, const Attention& args) {
    const int each = blocks_per_head(args.call.capacity), group = args.group();
    const Head<float> head(args.call, block.index() / each);  // any type: no row is read here
    add_probabilities(block, args, head, group, block.index() % each * kThreads);
  }
};

}  // namespace cuda
}  // namespace kv
