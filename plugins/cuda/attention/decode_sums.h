// The second launch of a decode step: the statistics that are sums of probabilities, from the logits and the softmax
// that the first launch stored. A thread per slot of a KV head:
//
//   received = sum over the group's query heads g of exp(logit[g, slot] - row_max[g]) / row_sum[g]
//   score[slot] = decay score[slot] + recency_weight received / group
#pragma once

#include "attention.h"

namespace kv {
namespace cuda {

struct DecodeSums {
  using Args = Attention;
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 1;
  struct Registers {};

  static KV_DEVICE void run(Block<DecodeSums>& block, const Attention& args) {
    const KvVoteAttention& a = args.call;
    const Part part(args, block.index());
    const Head<float> head(args, part);  // any type: no row is read here
    const int group = args.group(), used = args.used[2 * head.index], n = args.used[2 * head.index + 1];
    block.each([&](int t, auto&) {
      const int slot = part.split * kThreads + t;
      if (n == 0 || slot > used) return;
      float received = 0.0f;
      for (int g = 0; g < group; ++g) {
        const float* softmax = args.row_softmax + 2 * static_cast<size_t>(head.query_head(g));
        received += expf(head.logits(args, g)[slot] - softmax[0]) / softmax[1];
      }
      for (int k = 0; k < a.statistics; ++k) {
        const KvStatistic& statistic = a.statistic[k];
        if (statistic.kind != KV_STATISTIC_PROBABILITY) continue;
        const float past = slot < used ? head.score(k)[slot] * statistic.decay : 0.0f;
        head.score(k)[slot] = past + statistic.recency_weight / static_cast<float>(group) * received;
      }
    });
  }
};

}  // namespace cuda
}  // namespace kv
