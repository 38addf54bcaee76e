// A node of MergeCache (docs/contract.md, section 3): attributes and tensors in, the kernels' call out.
#pragma once

#include "../node/attributes.h"
#include "node.h"

namespace kv {

struct MergeCacheNode {
  KvMergeCache attributes{};
  std::vector<float> inverse_frequencies;

  MergeCacheNode(const Ort::ConstKernelInfo& info, const CacheType& cache) {
    const Attributes node(info, "MergeCache");
    attributes.cache_type = cache.type;
    read_merge_cache(node, attributes, inverse_frequencies);
    check_scales(info, node, cache.type, 5, 5);
    const Shape key = declared_shape(info, 0), score = declared_shape(info, 3);
    node.require(key.size() == 4 && score.size() == 4,
                 "key " + text(key) + " and score " + text(score) + " have four dimensions each");
    check_sizes(of_numbers(key, numbers_of_key(cache.type))[3], score[2]);
    const char* names[] = {"key", "value", "votes", "score", "position"};
    for (size_t i = 1; i < 5; ++i) {
      Shape expected(i == 1 || i == 3 ? 4 : 3, -1);
      expected[1] = key[1];
      check_declared(info, node, i, names[i], expected);
    }
  }

  // -1 where a size is not known yet.
  void check_sizes(int64_t key_size, int64_t statistics) const {
    const std::string problem = misfit(attributes, key_size, statistics);
    require(problem.empty(), "MergeCache: " + problem);
  }

  // Tensors that do not fit are refused. The call points to the node's own inverse frequencies.
  KvMergeCache call(const Ort::KernelContext& context) const {
    const Cache cache(context, 0, attributes.cache_type);
    check_sizes(cache.key_size, cache.statistics);
    KvMergeCache call = attributes;
    cache.sizes(call);
    call.inverse_frequencies = inverse_frequencies.data();
    call.past = cache.inputs(context, 0);
    call.present = cache.outputs(context, 0);
    if (is_small(attributes.cache_type)) cache.scales(context, 5, 5, call);
    return call;
  }
};

}  // namespace kv
