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
    attributes.type = type;
    attributes.scale = info.GetAttribute<float>("scale");
    attributes.vote_exponent = info.GetAttribute<float>("vote_exponent");
    attributes.softcap = info.GetAttribute<float>("softcap");
    attributes.sliding_window = static_cast<int>(info.GetAttribute<int64_t>("sliding_window"));
    require(attributes.sliding_window >= 0 && attributes.softcap >= 0.0f, "VoteAttention: sliding_window and softcap are not negative");
    std::vector<int> kinds;
    std::istringstream names(info.GetAttribute<std::string>("scores"));
    for (std::string name; std::getline(names, name, ',');) kinds.push_back(statistic_kind(name));
    const auto decay = info.GetAttributes<float>("decay");
    const auto window = info.GetAttributes<int64_t>("window");
    const auto recency_weight = info.GetAttributes<float>("recency_weight");
    const size_t count = kinds.size();
    require(count >= 1 && count <= KV_MAX_STATISTICS, "VoteAttention: `scores` names 1 to 8 statistics, not " + std::to_string(count));
    require(decay.size() == count && window.size() == count && recency_weight.size() == count,
            "VoteAttention: scores, decay, window and recency_weight differ in length");
    attributes.statistics = static_cast<int>(count);
    for (size_t k = 0; k < count; ++k) {
      require(decay[k] > 0.0f && decay[k] <= 1.0f && window[k] >= 0 && recency_weight[k] > 0.0f,
              "VoteAttention: a decay lies in (0, 1], a window is not negative, a recency_weight is positive");
      require(kinds[k] != KV_STATISTIC_LOG_EMA || decay[k] < 1.0f, "VoteAttention: the decay of a log_ema is below 1");
      attributes.statistic[k] = {kinds[k], decay[k], static_cast<int>(window[k]), recency_weight[k]};
    }
    check_shapes(declared_shape(info, 0), declared_shape(info, 5), declared_shape(info, 8));
  }

  // What can be known before a run: ranks, heads that divide, sizes that match.
  void check_shapes(const Shape& query, const Shape& key, const Shape& score) const {
    require(query.size() == 4 && key.size() == 4 && score.size() == 4, "VoteAttention: query, past_key and past_score have four dimensions");
    require(query[1] < 0 || key[1] < 0 || (key[1] > 0 && query[1] > 0 && query[1] % key[1] == 0),
            "VoteAttention: " + std::to_string(query[1]) + " query heads are not a multiple of " + std::to_string(key[1]) + " KV heads");
    require(query[3] < 0 || key[3] < 0 || query[3] == key[3], "VoteAttention: query and past_key differ in head size");
    require(score[2] < 0 || score[2] == attributes.statistics,
            "VoteAttention: past_score has " + std::to_string(score[2]) + " statistics, `scores` names " + std::to_string(attributes.statistics));
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
      call.batch = static_cast<int>(cache.batch), call.query_heads = static_cast<int>(heads), call.heads = static_cast<int>(cache.heads);
      call.tokens = static_cast<int>(tokens), call.capacity = static_cast<int>(cache.capacity);
      call.key_size = static_cast<int>(cache.key_size), call.value_size = static_cast<int>(cache.value_size);
      call.query = input<void>(context, 0, "query", {cache.batch, heads, tokens, cache.key_size});
      call.key = input<void>(context, 1, "key", {cache.batch, cache.heads, tokens, cache.key_size});
      call.value = input<void>(context, 2, "value", {cache.batch, cache.heads, tokens, cache.value_size});
      call.position = input<int64_t>(context, 3, "position", {cache.batch, tokens});
      call.query_length = input<int64_t>(context, 4, "query_length", {cache.batch, 1});
      if (context.GetInputCount() > 10 && context.GetInput(10) != nullptr) call.sink_logits = input<float>(context, 10, "sink_logits", {heads});
      call.past = cache.inputs(context, 5);
      call.output = output(context, 0, {cache.batch, heads, tokens, cache.value_size});
      call.present = cache.outputs(context, 1);
      const char* problem = kv_cpu_vote_attention(&call, runner(context));
      require(!problem, std::string("VoteAttention: ") + (problem ? problem : ""));
    } catch (const Ort::Exception& error) {
      return Ort::Status(error).release();
    }
    return nullptr;
  }
};

}  // namespace kv
