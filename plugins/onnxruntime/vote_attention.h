// The binding of VoteAttention (docs/contract.md, section 3).
#pragma once

#include <sstream>

#include "node.h"

namespace kv {

inline ONNXTensorElementDataType vote_attention_input_type(size_t i, ONNXTensorElementDataType cache) {
  if (i < 3) return cache;
  if (i < 5) return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  return i < 10 ? state_type(i - 5, cache) : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
}

inline int statistic_kind(const std::string& name) {
  if (name == "none") return KV_STATISTIC_NONE;
  if (name == "log_ema") return KV_STATISTIC_LOG_EMA;
  require(name == "probability", "VoteAttention: unknown score '" + name + "'; known: none, log_ema, probability");
  return KV_STATISTIC_PROBABILITY;
}

struct VoteAttentionKernel {
  KvVoteAttention attributes{};

  VoteAttentionKernel(const Ort::ConstKernelInfo& info, int type) {
    const Attributes node(info, "VoteAttention");
    attributes.type = type;
    attributes.scale = node.number("scale");
    attributes.vote_exponent = node.number("vote_exponent");
    attributes.softcap = node.number("softcap");
    attributes.sliding_window = node.integer("sliding_window");
    node.require(attributes.sliding_window >= 0,
                 "sliding_window is " + std::to_string(attributes.sliding_window) + ", and not negative");
    node.require(attributes.softcap >= 0.0f, "softcap is " + std::to_string(attributes.softcap) + ", and not negative");
    read_statistics(node);
    check_shapes(declared_shape(info, 0), declared_shape(info, 5), declared_shape(info, 8));
    check_declared_shapes(info, node);
  }

  void read_statistics(const Attributes& node) {
    std::vector<int> kinds;
    std::istringstream names(node.word("scores"));
    for (std::string name; std::getline(names, name, ',');) kinds.push_back(statistic_kind(name));
    const std::vector<float> decay = node.numbers("decay"), recency_weight = node.numbers("recency_weight");
    const std::vector<int> window = node.integers("window");
    const size_t count = kinds.size();
    const auto number = [](auto x) { return std::to_string(x); };
    node.require(count >= 1 && count <= KV_MAX_STATISTICS, "scores names 1 to 8 statistics, not " + number(count));
    node.require(decay.size() == count && window.size() == count && recency_weight.size() == count,
                 "scores, decay, window and recency_weight differ in length: " + number(count) + ", " +
                     number(decay.size()) + ", " + number(window.size()) + ", " + number(recency_weight.size()));
    attributes.statistics = static_cast<int>(count);
    for (size_t k = 0; k < count; ++k) {
      const bool average = kinds[k] == KV_STATISTIC_LOG_EMA;
      node.require(decay[k] > 0.0f && (average ? decay[k] < 1.0f : decay[k] <= 1.0f),
                   "a decay is " + number(decay[k]) +
                       (average ? ", and that of a log_ema lies in (0, 1)" : ", and lies in (0, 1]"));
      node.require(window[k] >= 0, "a window is " + number(window[k]) + ", and not negative");
      node.require(recency_weight[k] > 0.0f, "a recency_weight is " + number(recency_weight[k]) + ", and positive");
      attributes.statistic[k] = {kinds[k], decay[k], window[k], recency_weight[k]};
    }
  }

  void check_declared_shapes(const Ort::ConstKernelInfo& info, const Attributes& node) const {
    const Shape query = declared_shape(info, 0), key = declared_shape(info, 5), value = declared_shape(info, 6);
    const int64_t h = key[1], d = key[3], dv = value.size() == 4 ? value[3] : -1;
    const std::pair<const char*, Shape> expected[] = {
        {"query", {-1, -1, -1, d}},
        {"key", {-1, h, -1, d}},
        {"value", {-1, h, -1, dv}},
        {"position", {-1, -1}},
        {"query_length", {-1, 1}},
        {"past_key", {-1, h, -1, d}},
        {"past_value", {-1, h, -1, dv}},
        {"past_votes", {-1, h, -1}},
        {"past_score", {-1, h, attributes.statistics, -1}},
        {"past_position", {-1, h, -1}},
        {"sink_logits", {query[1]}},
    };
    for (size_t i = 0; i < 11; ++i) check_declared(info, node, i, expected[i].first, expected[i].second);
  }

  // What can be known before a run: ranks, heads that divide, sizes that match.
  void check_shapes(const Shape& query, const Shape& key, const Shape& score) const {
    require(query.size() == 4 && key.size() == 4 && score.size() == 4,
            "VoteAttention: query " + text(query) + ", past_key " + text(key) + " and past_score " + text(score) +
                " have four dimensions each");
    require(query[1] < 0 || key[1] < 0 || (key[1] > 0 && query[1] > 0 && query[1] % key[1] == 0),
            "VoteAttention: " + std::to_string(query[1]) + " query heads are not a multiple of " +
                std::to_string(key[1]) + " KV heads");
    require(
        query[3] < 0 || key[3] < 0 || query[3] == key[3],
        "VoteAttention: query has heads of " + std::to_string(query[3]) + ", past_key of " + std::to_string(key[3]));
    require(score[2] < 0 || score[2] == attributes.statistics,
            "VoteAttention: past_score has " + std::to_string(score[2]) + " statistics, `scores` names " +
                std::to_string(attributes.statistics));
  }

  OrtStatusPtr ComputeV2(OrtKernelContext* raw) {
    try {
      const Ort::KernelContext context(raw);
      const Cache cache(context, 5);
      const Shape query = context.GetInput(0).GetTensorTypeAndShapeInfo().GetShape();
      const Shape past_score = cache.shape(3);
      check_shapes(query, cache.shape(0), past_score);
      const int64_t heads = query[1], tokens = query[2];
      KvVoteAttention call = attributes;
      call.batch = static_cast<int>(cache.batch), call.query_heads = static_cast<int>(heads),
      call.heads = static_cast<int>(cache.heads);
      call.tokens = static_cast<int>(tokens), call.capacity = static_cast<int>(cache.capacity);
      call.key_size = static_cast<int>(cache.key_size), call.value_size = static_cast<int>(cache.value_size);
      call.query = input<void>(context, 0, "query", {cache.batch, heads, tokens, cache.key_size});
      call.key = input<void>(context, 1, "key", {cache.batch, cache.heads, tokens, cache.key_size});
      call.value = input<void>(context, 2, "value", {cache.batch, cache.heads, tokens, cache.value_size});
      call.position = input<int64_t>(context, 3, "position", {cache.batch, tokens});
      call.query_length = input<int64_t>(context, 4, "query_length", {cache.batch, 1});
      if (context.GetInputCount() > 10 && context.GetInput(10) != nullptr)
        call.sink_logits = input<float>(context, 10, "sink_logits", {heads});
      call.past = cache.inputs(context, 5);
      call.output = output(context, 0, {cache.batch, heads, tokens, cache.value_size});
      call.present = cache.outputs(context, 1);
      const char* problem = kv_cpu_vote_attention(&call, runner(context));
      require(!problem, std::string("VoteAttention: ") + (problem ? problem : ""));
    } catch (const std::exception& error) {
      return Ort::Status(error).release();
    }
    return nullptr;
  }
};

}  // namespace kv
