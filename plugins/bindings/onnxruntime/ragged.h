// Nodes of RaggedVoteAttention and RaggedMergeCache (docs/reference/contract.md, section 3): turn attributes and
// tensors into a call of the kernels, in which every KV head has a cache of its own.
#pragma once

#include "../node/ragged.h"
#include "merge_cache.h"
#include "vote_attention.h"

namespace kv {

// The state tensors of a node's caches, those of one cache after another, from one input and one output of the node on.
struct HeadCaches {
  size_t in, out, tensors, heads;
  CacheType type;
  bool has_ring;

  // query: the type of a query over the caches; without a query, any type of which keys and values have none.
  HeadCaches(const Ort::ConstKernelInfo& info, const Attributes& node, size_t in, size_t out, const CacheType& query,
             bool has_ring)
      : in(in), out(out), type(type_of(info, node, in, query)), has_ring(has_ring) {
    tensors = 5 + (is_small(type.type) ? 2 : 0) + (has_ring ? 2 : 0);
    const size_t state = info.GetInputCount() - in;
    node.require(state % tensors == 0 && info.GetOutputCount() == out + state,
                 "a cache has " + std::to_string(tensors) + " state tensors, and the node takes " +
                     std::to_string(state) + " and returns " + std::to_string(info.GetOutputCount() - out));
    heads = state / tensors;
    for (size_t i = 0; i < state; ++i) check_declared_tensor(info, node, i / tensors, i % tensors);
  }

  // Returns the caches of a run, and sets the sizes of the call; throws if a tensor does not fit. ring_rows: the rows
  // of the ring of reference queries; 0: as many as its tensor has.
  template <class Arguments>
  std::vector<KvHeadCache> caches(const Ort::KernelContext& context, int ring_rows, Arguments& call) const {
    std::vector<KvHeadCache> caches(heads);
    for (size_t h = 0; h < heads; ++h) {
      const size_t first = in + h * tensors, first_out = out + h * tensors;
      const Cache cache(context, first, type.type);
      if (h == 0) cache.sizes(call);
      require(cache.heads == 1 && cache.batch == call.batch && cache.key_size == call.key_size &&
                  cache.value_size == (call.value_prefix ? 0 : call.value_size) && cache.statistics == call.statistics,
              [&] { return misfit(h, cache); });
      KvHeadCache& own = caches[h];
      own.capacity = static_cast<int>(cache.capacity);
      own.past = cache.inputs(context, first), own.present = cache.outputs(context, first_out);
      if (is_small(type.type)) cache.scales(context, first + 5, first_out + 5, own);
      if (has_ring) own.ring = cache.ring(context, first + 5, first_out + 5, rows_of(context, first, ring_rows));
      if (own.capacity > call.capacity) call.capacity = own.capacity;
    }
    call.heads = static_cast<int>(heads);
    return caches;
  }

 private:
  static ONNXTensorElementDataType element_of(const Ort::ConstKernelInfo& info, size_t input) {
    return info.GetInputTypeInfo(input).GetTensorTypeAndShapeInfo().GetElementType();
  }

  static CacheType type_of(const Ort::ConstKernelInfo& info, const Attributes& node, size_t in,
                           const CacheType& query) {
    constexpr auto i8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, u8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
    node.require(in + 1 < info.GetInputCount(), "the node has no cache");
    const ONNXTensorElementDataType key = element_of(info, in), value = element_of(info, in + 1);
    const auto small = [&](int type) { return CacheType(type, key, value, query.query_type, query.query_element); };
    if (key == i8) return small(value == i8 ? KV_INT8 : KV_K8V4);
    if (key == u8) return small(KV_INT4);
    return query;
  }

  void check_declared_tensor(const Ort::ConstKernelInfo& info, const Attributes& node, size_t h, size_t i) const {
    const size_t input = in + h * tensors + i;
    const std::string name = "state tensor " + std::to_string(i) + " of cache " + std::to_string(h);
    node.require(element_of(info, input) == (i < 5 ? state_type(i, type) : extra_type(i - 5, type)),
                 name + " has another type than that of cache 0 or of the query");
    const Shape shape = declared_shape(info, input);
    const size_t rank = i < 2 || i == 3 ? 4 : 3;
    node.require(shape.empty() || i >= 5 || (shape.size() == rank && (shape[1] < 0 || shape[1] == 1)),
                 name + " is " + text(shape) + ", and a cache of a KV head has " + std::to_string(rank) +
                     " dimensions, the second of size 1");
  }

  int rows_of(const Ort::KernelContext& context, size_t first, int ring_rows) const {
    if (ring_rows > 0) return ring_rows;
    const Shape query = context.GetInput(first + (is_small(type.type) ? 7 : 5)).GetTensorTypeAndShapeInfo().GetShape();
    require(query.size() == 4, [&] { return "query " + text(query) + " has four dimensions"; });
    return static_cast<int>(query[2]);
  }

  static std::string misfit(size_t h, const Cache& cache) {
    return "key " + text(cache.shape(0)) + ", value " + text(cache.shape(1)) + " and score " + text(cache.shape(3)) +
           " of cache " + std::to_string(h) + " do not fit the node or its other caches";
  }
};

struct RaggedVoteAttentionNode {
  static constexpr size_t kState = 6;  // the first input of the state
  KvVoteAttention attributes{};
  int reference_queries = 0;
  HeadCaches head_caches;

  // keeps_queries: whether the kernels keep a ring of reference queries.
  RaggedVoteAttentionNode(const Ort::ConstKernelInfo& info, const CacheType& query, bool keeps_queries)
      : head_caches(read(info, query, keeps_queries)) {
    attributes.query_type = query.query_type, attributes.cache_type = head_caches.type.type;
  }

  // Returns the call of a run, and sets the caches of its KV heads; throws if a tensor does not fit.
  KvVoteAttention call(const Ort::KernelContext& context, std::vector<KvHeadCache>& caches) const {
    KvVoteAttention call = attributes;
    caches = head_caches.caches(context, reference_queries, call);
    const int64_t batch = call.batch, heads = call.heads, key_size = call.key_size, value_size = call.value_size;
    const Shape query = context.GetInput(0).GetTensorTypeAndShapeInfo().GetShape();
    require(query.size() == 4 && query[1] > 0 && query[1] % heads == 0, [&] {
      return "RaggedVoteAttention: query " + text(query) +
             " has not four dimensions, or its heads are not a multiple of " + std::to_string(heads) + " caches";
    });
    require(call.statistics == attributes.statistics, [&] {
      return "RaggedVoteAttention: past_score has " + std::to_string(call.statistics) +
             " statistics, `statistics` names " + std::to_string(attributes.statistics);
    });
    const int64_t query_heads = query[1], tokens = query[2];
    call.query_heads = static_cast<int>(query_heads), call.tokens = static_cast<int>(tokens);
    call.query = input<void>(context, 0, "query", {batch, query_heads, tokens, key_size});
    call.key = input<void>(context, 1, "key", {batch, heads, tokens, key_size});
    call.value = input<void>(context, 2, "value", {batch, heads, tokens, value_size});
    call.position = input<int64_t>(context, 3, "position", {batch, tokens});
    call.query_length = input<int64_t>(context, 4, "query_length", {batch, 1});
    if (context.GetInput(5) != nullptr) call.sink_logits = input<float>(context, 5, "sink_logits", {query_heads});
    call.output = output(context, 0, {batch, query_heads, tokens, value_size});
    return call;
  }

 private:
  HeadCaches read(const Ort::ConstKernelInfo& info, const CacheType& query, bool keeps_queries) {
    const Attributes node(info, "RaggedVoteAttention");
    read_vote_attention(node, attributes, keeps_queries ? &reference_queries : nullptr);
    return HeadCaches(info, node, kState, 1, query, reference_queries > 0);
  }
};

struct RaggedMergeCacheNode {
  KvMergeCache attributes{};
  std::vector<float> inverse_frequencies;
  OfCaches of_caches;
  KvFit fit{};
  bool fits = false;
  HeadCaches head_caches;

  // may_fit, may_bfloat: whether the kernels have fits, and take caches of bfloat16.
  RaggedMergeCacheNode(const Ort::ConstKernelInfo& info, bool may_fit, bool may_bfloat)
      : head_caches(read(info, may_fit, may_bfloat)) {
    attributes.cache_type = head_caches.type.type;
    const size_t budgets = of_caches.budget.size(), heads = head_caches.heads;
    require(budgets == heads, [&] {
      return "RaggedMergeCache: budget has " + std::to_string(budgets) + " numbers, but the node has " +
             std::to_string(heads) + " caches";
    });
  }

  // Returns the call of a run, and sets the caches of its KV heads; throws if a tensor does not fit. The call points to
  // the node's own inverse frequencies.
  KvMergeCache call(const Ort::KernelContext& context, std::vector<KvHeadCache>& caches) const {
    KvMergeCache call = attributes;
    caches = head_caches.caches(context, 0, call);
    const std::string problem = misfit(attributes, call.key_size, call.statistics);
    require(problem.empty(), [&] { return "RaggedMergeCache: " + problem; });
    for (size_t h = 0; h < caches.size(); ++h)
      caches[h].budget = of_caches.budget[h], caches[h].recent = of_caches.recent[h];
    call.inverse_frequencies = inverse_frequencies.data();
    return call;
  }

 private:
  HeadCaches read(const Ort::ConstKernelInfo& info, bool may_fit, bool may_bfloat) {
    const Attributes node(info, "RaggedMergeCache");
    fits = read_ragged_merge_cache(node, attributes, of_caches, inverse_frequencies, may_fit ? &fit : nullptr);
    node.require(info.GetInputCount() > 0, "the node has no cache");
    const ONNXTensorElementDataType key = info.GetInputTypeInfo(0).GetTensorTypeAndShapeInfo().GetElementType();
    CacheType plain(KV_FLOAT32, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
    if (key == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16) plain = CacheType(KV_FLOAT16, key);
    if (key == ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16 && may_bfloat) plain = CacheType(KV_BFLOAT16, key);
    return HeadCaches(info, node, 0, 0, plain, fits);
  }
};

}  // namespace kv
