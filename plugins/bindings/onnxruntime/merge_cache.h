// A node of MergeCache (docs/reference/contract.md, section 3): turns attributes and tensors into a call of the
// kernels.
#pragma once

#include "../node/attributes.h"
#include "node.h"

namespace kv {

struct MergeCacheNode {
  KvMergeCache attributes{};
  std::vector<float> inverse_frequencies;
  KvFit fit{};
  bool fits;

  // may_fit: whether the kernels have fits.
  MergeCacheNode(const Ort::ConstKernelInfo& info, const CacheType& cache, bool may_fit) {
    const Attributes node(info, "MergeCache");
    attributes.cache_type = cache.type;
    fits = read_merge_cache(node, attributes, inverse_frequencies, may_fit ? &fit : nullptr);
    check_extra(info, node, cache.type, fits, 5, 5);
    const Shape key = declared_shape(info, 0), score = declared_shape(info, 3);
    node.require(key.size() == 4 && score.size() == 4,
                 "key " + text(key) + " and score " + text(score) + " have four dimensions each");
    check_sizes(shape_of_numbers(key, numbers_of_key(cache.type))[3], score[2]);
    const char* names[] = {"key", "value", "votes", "score", "position"};
    for (size_t i = 1; i < 5; ++i) {
      Shape expected(i == 1 || i == 3 ? 4 : 3, -1);
      expected[1] = key[1];
      check_declared(info, node, i, names[i], expected);
    }
  }

  // A size of -1 is not known yet.
  void check_sizes(int64_t key_size, int64_t statistics) const {
    const std::string problem = misfit(attributes, key_size, statistics);
    require(problem.empty(), "MergeCache: " + problem);
  }

  // Returns the call of a run; throws if a tensor does not fit. The call points to the node's own inverse frequencies.
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

  // Returns the ring of a node that has one, with as many rows as the tensor.
  KvRing ring(const Ort::KernelContext& context) const {
    const Shape query =
        context.GetInput(is_small(attributes.cache_type) ? 7 : 5).GetTensorTypeAndShapeInfo().GetShape();
    require(query.size() == 4, [&] { return "MergeCache: query " + text(query) + " has four dimensions"; });
    return Cache(context, 0, attributes.cache_type).ring(context, 5, 5, static_cast<int>(query[2]));
  }
};

}  // namespace kv
