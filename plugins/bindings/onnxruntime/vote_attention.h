// A node of VoteAttention (docs/reference/contract.md, section 3): turns attributes and tensors into a call of the
// kernels.
#pragma once

#include "../node/attributes.h"
#include "node.h"

namespace kv {

inline ONNXTensorElementDataType vote_attention_input_type(size_t i, const CacheType& cache) {
  if (i < 3) return cache.query_element;
  if (i < 5) return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  if (i < 10) return state_type(i - 5, cache);
  return i == 10 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : extra_type(i - 11, cache);
}

struct VoteAttentionNode {
  KvVoteAttention attributes{};
  std::vector<int> capacity;  // the slots of each KV head; empty: every head has S / H
  int reference_queries = 0;

  // keeps_queries: whether the kernels keep a ring of reference queries.
  VoteAttentionNode(const Ort::ConstKernelInfo& info, const CacheType& cache, bool keeps_queries) {
    const Attributes node(info, "VoteAttention");
    attributes.query_type = cache.query_type, attributes.cache_type = cache.type;
    read_vote_attention(node, attributes, capacity, keeps_queries ? &reference_queries : nullptr);
    check_extra(info, node, cache.type, reference_queries > 0, 11, 6);
    check_shapes(declared_shape(info, 0), declared_shape(info, 1),
                 shape_of_numbers(declared_shape(info, 5), numbers_of_key(cache.type)), declared_shape(info, 8));
    check_declared_shapes(info, node);
  }

  void check_declared_shapes(const Ort::ConstKernelInfo& info, const Attributes& node) const {
    const int64_t in_key = numbers_of_key(attributes.cache_type), in_value = numbers_of_value(attributes.cache_type);
    const Shape query = declared_shape(info, 0), added = declared_shape(info, 1),
                key = shape_of_numbers(declared_shape(info, 5), in_key),
                value = shape_of_numbers(declared_shape(info, 6), in_value);
    KvVoteAttention known = attributes;
    known.batch = known.tokens = -1;
    known.query_heads = static_cast<int>(query[1]), known.heads = static_cast<int>(added[1]);
    known.slots = static_cast<int>(key[1]);
    known.key_size = static_cast<int>(key[2]), known.value_size = value.size() == 3 ? static_cast<int>(value[2]) : -1;
    if (known.value_prefix) known.value_size = known.value_prefix;
    std::vector<Input> expected = inputs_of(known);
    if (known.key_size > 0) expected[5].shape[2] = known.key_size / in_key;
    if (known.value_size > 0) expected[6].shape[2] = known.value_size / in_value;
    if (known.value_prefix) expected[6].shape[2] = 0;
    for (size_t i = 0; i < expected.size(); ++i) check_declared(info, node, i, expected[i].name, expected[i].shape);
    std::vector<int> equal;
    if (known.heads > 0 && known.slots >= 0) require_capacity(known, equal);
  }

  // Throws if ranks, heads or sizes that are known before a run do not match.
  void check_shapes(const Shape& query, const Shape& added, const Shape& key, const Shape& score) const {
    require(query.size() == 4 && added.size() == 4 && key.size() == 3 && score.size() == 3, [&] {
      return "VoteAttention: query " + text(query) + " and key " + text(added) + " have four dimensions, past_key " +
             text(key) + " and past_score " + text(score) + " three";
    });
    require(query[1] < 0 || added[1] < 0 || (added[1] > 0 && query[1] > 0 && query[1] % added[1] == 0), [&] {
      return "VoteAttention: " + std::to_string(query[1]) + " query heads are not a multiple of " +
             std::to_string(added[1]) + " KV heads";
    });
    require(query[3] < 0 || key[2] < 0 || query[3] == key[2], [&] {
      return "VoteAttention: query has heads of " + std::to_string(query[3]) + ", past_key of " +
             std::to_string(key[2]);
    });
    require(score[1] < 0 || score[1] == attributes.statistics, [&] {
      return "VoteAttention: past_score has " + std::to_string(score[1]) + " statistics, `statistics` names " +
             std::to_string(attributes.statistics);
    });
  }

  // Returns the call of a run; throws if a tensor does not fit. The call points to the node's capacity, or to `equal`.
  KvVoteAttention call(const Ort::KernelContext& context, std::vector<int>& equal) const {
    const Cache cache(context, 5, attributes.cache_type);
    const Shape query = context.GetInput(0).GetTensorTypeAndShapeInfo().GetShape(),
                added = context.GetInput(1).GetTensorTypeAndShapeInfo().GetShape();
    check_shapes(query, added, {cache.batch, cache.slots, cache.key_size}, cache.shape(3));
    const int64_t query_heads = query[1], heads = added[1], tokens = query[2];
    KvVoteAttention call = attributes;
    cache.sizes(call);
    call.query_heads = static_cast<int>(query_heads), call.heads = static_cast<int>(heads);
    call.tokens = static_cast<int>(tokens);
    require_capacity(call, equal);
    call.query = input<void>(context, 0, "query", {cache.batch, query_heads, tokens, cache.key_size});
    call.key = input<void>(context, 1, "key", {cache.batch, heads, tokens, cache.key_size});
    call.value = input<void>(context, 2, "value", {cache.batch, heads, tokens, call.value_size});
    call.position = input<int64_t>(context, 3, "position", {cache.batch, tokens});
    call.query_length = input<int64_t>(context, 4, "query_length", {cache.batch, 1});
    if (context.GetInputCount() > 10 && context.GetInput(10) != nullptr)
      call.sink_logits = input<float>(context, 10, "sink_logits", {query_heads});
    call.past = cache.inputs(context, 5);
    call.output = output(context, 0, {cache.batch, query_heads, tokens, call.value_size});
    call.present = cache.outputs(context, 1);
    if (is_quantized(attributes.cache_type)) cache.scales(context, 11, 6, call);
    return call;
  }

  // Returns the ring of a node that has one.
  KvRing ring(const Ort::KernelContext& context, const KvVoteAttention& call) const {
    return Cache(context, 5, call.cache_type).ring(context, 11, 6, call.heads, reference_queries);
  }

 private:
  void require_capacity(KvVoteAttention& call, std::vector<int>& equal) const {
    const std::string problem = set_capacity(capacity, equal, call);
    require(problem.empty(), [&] { return "VoteAttention: " + problem; });
  }
};

}  // namespace kv
