// A node of MergeCache (docs/reference/contract.md, section 3): turns attributes and tensors into a call of the
// kernels.
#pragma once

#include "../node/attributes.h"
#include "node.h"

namespace kv {

struct MergeCacheNode {
  KvMergeCache attributes{};
  HeadLists heads;
  std::vector<float> inverse_frequencies;
  KvFit fit{};
  bool fits;

  // may_fit: whether the kernels have fits.
  MergeCacheNode(const Ort::ConstKernelInfo& info, const CacheType& cache, bool may_fit) {
    const Attributes node(info, "MergeCache");
    attributes.cache_type = cache.type;
    fits = read_merge_cache(node, attributes, heads, inverse_frequencies, may_fit ? &fit : nullptr);
    check_extra(info, node, cache.type, fits, 5, 5);
    const Shape key = declared_shape(info, 0), score = declared_shape(info, 3);
    node.require(key.size() == 3 && score.size() == 3,
                 "key " + text(key) + " and score " + text(score) + " have three dimensions each");
    check_sizes(shape_of_numbers(key, numbers_of_key(cache.type))[2], score[1]);
    const int64_t slots = key[1];
    const Shape expected[] = {{-1, slots, -1}, {-1, slots, -1}, {-1, slots}, {-1, -1, slots}, {-1, slots}};
    const char* names[] = {"key", "value", "votes", "score", "position"};
    for (size_t i = 1; i < 5; ++i) check_declared(info, node, i, names[i], expected[i]);
    std::vector<int> equal;
    KvMergeCache known = attributes;
    known.slots = static_cast<int>(slots);
    if (slots >= 0) require_capacity(known, equal);
  }

  // Returns the call of a run; throws if a tensor does not fit. The call points to the node's own lists and inverse
  // frequencies, and to `equal` if the node has no capacity.
  KvMergeCache call(const Ort::KernelContext& context, std::vector<int>& equal) const {
    const Cache cache(context, 0, attributes.cache_type);
    check_sizes(cache.key_size, cache.statistics);
    KvMergeCache call = attributes;
    cache.sizes(call);
    require_capacity(call, equal);
    call.budget = heads.budget.data(), call.recent = heads.recent.data();
    call.inverse_frequencies = inverse_frequencies.data();
    call.past = cache.inputs(context, 0);
    call.present = cache.outputs(context, 0);
    if (is_quantized(attributes.cache_type)) cache.scales(context, 5, 5, call);
    return call;
  }

  // Returns the ring of a node that has one, with as many rows as the tensor.
  KvRing ring(const Ort::KernelContext& context) const {
    const Shape query =
        context.GetInput(is_quantized(attributes.cache_type) ? 7 : 5).GetTensorTypeAndShapeInfo().GetShape();
    require(query.size() == 4, [&] { return "MergeCache: query " + text(query) + " has four dimensions"; });
    return Cache(context, 0, attributes.cache_type).ring(context, 5, 5, attributes.heads, static_cast<int>(query[2]));
  }

 private:
  // A size of -1 is not known yet.
  void check_sizes(int64_t key_size, int64_t statistics) const {
    const std::string problem = misfit(attributes, key_size, statistics);
    require(problem.empty(), "MergeCache: " + problem);
  }

  void require_capacity(KvMergeCache& call, std::vector<int>& equal) const {
    const std::string problem = set_capacity(heads.capacity, equal, call);
    require(problem.empty(), [&] { return "MergeCache: " + problem; });
  }
};

}  // namespace kv
