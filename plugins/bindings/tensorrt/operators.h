// The operators over KV caches for TensorRT: their fields, the types and sizes of their tensors, and their calls.
// Arguments is the struct of the kernels' C ABI.
#pragma once

#include <NvInferRuntime.h>

#include <climits>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "../../cuda/kvexport_cuda.h"
#include "../node/attributes.h"
#include "tensors.h"

namespace kv::tensorrt {

constexpr int kState = 5;  // the state tensors of a layer

// Returns the type of state tensor i: key, value, votes, score, position.
inline DataType state_type(int i, DataType cache) {
  if (i < 2) return cache;
  return i < 4 ? DataType::kFLOAT : DataType::kINT32;
}

inline KvState state_at(const void* const* tensors) {
  const auto at = [&](int i) { return const_cast<void*>(tensors[i]); };
  return {at(0), at(1), static_cast<float*>(at(2)), static_cast<float*>(at(3)), static_cast<int32_t*>(at(4))};
}

// A call with the lists that it points to, so that its copies outlive the plugin.
template <class Call>
struct OfHeads : Call {
  std::shared_ptr<const HeadLists> lists;

  // Points to the lists of a node; returns why they do not fit the call's KV heads and slots, "" if they fit or if
  // these are not known.
  std::string point(const HeadLists& node) {
    if (this->slots < 0 || this->heads < 1 || this->heads > KV_CUDA_MAX_HEADS) return "";
    const auto own = std::make_shared<HeadLists>(node);
    std::vector<int> equal;
    const std::string problem = set_capacity(node.capacity, equal, *this);
    if (own->capacity.empty()) own->capacity = equal;
    this->capacity = own->capacity.data();
    if constexpr (std::is_same_v<Call, KvMergeCache>)
      this->budget = own->budget.data(), this->recent = own->recent.data();
    lists = own;
    return problem;
  }
};

// Calls use(call) for the call and for those of fewer sequences.
template <class Arguments, class Use>
void each_batch(Arguments call, Use use) {
  for (; call.batch > 0; --call.batch) use(call);
}

struct VoteAttention {
  using Arguments = OfHeads<KvVoteAttention>;
  static constexpr const char* kName = "VoteAttention";
  // The number of inputs without and with sink logits; the first state tensor among inputs and among outputs.
  static constexpr int kLeastInputs = 10, kMostInputs = 11, kPast = 5, kPresent = 1;

  static int outputs() { return kPresent + kState; }

  static std::vector<PluginField> fields() { return fields_of(kVoteAttentionAttributes); }
  static int least_inputs() { return kLeastInputs; }
  static int most_inputs() { return kMostInputs; }
  static int past_of(int output) { return output < kPresent ? -1 : output - kPresent + kPast; }

  KvVoteAttention attributes{};
  HeadLists lists;
  explicit VoteAttention(const Fields& fields) { read_vote_attention(fields, attributes, lists.capacity); }

  static Types types(int i, DataType query) {
    if (i == 0) return kFloatTypes;
    if (i < 3) return {query};
    if (i < kPast) return {DataType::kINT64};
    return {i < kLeastInputs ? state_type(i - kPast, query) : DataType::kFLOAT};
  }

  static void set_types(Arguments& a, const Types& inputs) { a.query_type = a.cache_type = kernel_type(inputs[0]); }
  Arguments sized(const std::vector<Shape>& inputs) const {
    Arguments a{attributes, nullptr};
    a.batch = size_of(inputs, 5, 0), a.query_heads = size_of(inputs, 0, 1), a.heads = size_of(inputs, 1, 1);
    a.tokens = size_of(inputs, 0, 2), a.slots = size_of(inputs, 5, 1);
    a.key_size = size_of(inputs, 5, 2), a.value_size = size_of(inputs, 6, 2);
    a.point(lists);
    return a;
  }
  static std::vector<Input> inputs(const Arguments& a) { return inputs_of(a); }
  std::string misfit(Arguments a) const { return a.point(lists); }
  // Returns whether all sizes are known that an engine may not leave open.
  static bool is_fixed(const Arguments& a) {
    return a.query_heads >= 0 && a.heads >= 0 && a.slots >= 0 && a.key_size >= 0 && a.value_size >= 0;
  }

  static DimsExprs output_shape(int, const DimsExprs* inputs, IExprBuilder&) {
    DimsExprs shape = inputs[0];
    shape.d[3] = inputs[2].d[3];
    return shape;
  }

  static const char* workspace(const Arguments& a, size_t* bytes) {
    return kv_cuda_vote_attention_workspace(&a, bytes);
  }
  static const char* problem(const Arguments& a) { return kv_cuda_vote_attention_problem(&a); }
  // Calls use(call) for the calls, of this size or smaller, that may need the most workspace: one token and several run
  // other kernels, and a smaller batch may have more splits.
  template <class Call, class Use>
  static void each_smaller(Call a, Use use) {
    each_batch(a, use);
    if (a.tokens > 1) a.tokens = 1, each_batch(a, use);
  }

  // The initial content of the instance's device memory: a counter for each KV head of the call, rounded up so that
  // memory grows rarely. Counters are the instance's own, since TensorRT may run two layers at the same time.
  static std::string initial_memory(const Arguments& a) {
    const size_t needed = sizeof(int) * a.batch * a.heads;
    size_t bytes = needed ? 256 : 0;
    while (bytes < needed) bytes *= 2;
    return std::string(bytes, '\0');
  }

  static const char* run(Arguments a, KvCuda where, void* counters, const void* const* inputs, int count,
                         void* const* outputs) {
    a.query = inputs[0], a.key = inputs[1], a.value = inputs[2];
    a.position = static_cast<const int64_t*>(inputs[3]);
    a.query_length = static_cast<const int64_t*>(inputs[4]);
    a.sink_logits = count > kLeastInputs ? static_cast<const float*>(inputs[kLeastInputs]) : nullptr;
    a.output = outputs[0];
    a.past = state_at(inputs + kPast), a.present = state_at(outputs + kPresent);
    where.counters = counters;
    return kv_cuda_vote_attention(&a, &where);
  }
};

struct MergeCache {
  using Arguments = OfHeads<KvMergeCache>;
  static constexpr const char* kName = "MergeCache";
  static int outputs() { return kState; }

  static std::vector<PluginField> fields() { return fields_of(kMergeCacheAttributes); }
  static int least_inputs() { return kState; }
  static int most_inputs() { return kState; }
  static int past_of(int output) { return output; }

  KvMergeCache attributes{};
  HeadLists lists;
  std::vector<float> inverse_frequencies;
  explicit MergeCache(const Fields& fields) { read_merge_cache(fields, attributes, lists, inverse_frequencies); }

  static Types types(int i, DataType cache) { return i == 0 ? kFloatTypes : Types{state_type(i, cache)}; }

  static void set_types(Arguments& a, const Types& inputs) { a.cache_type = kernel_type(inputs[0]); }
  Arguments sized(const std::vector<Shape>& inputs) const {
    Arguments a{attributes, nullptr};
    a.batch = size_of(inputs, 0, 0), a.slots = size_of(inputs, 0, 1), a.key_size = size_of(inputs, 0, 2);
    a.value_size = size_of(inputs, 1, 2), a.statistics = size_of(inputs, 3, 1);
    a.point(lists);
    return a;
  }
  static std::vector<Input> inputs(const Arguments& a) { return inputs_of(a); }
  std::string misfit(Arguments a) const {
    const std::string problem = kv::misfit(attributes, a.key_size, a.statistics);
    return problem.empty() ? a.point(lists) : problem;
  }
  static bool is_fixed(const Arguments& a) {
    return a.slots >= 0 && a.key_size >= 0 && a.value_size >= 0 && a.statistics >= 0;
  }

  static DimsExprs output_shape(int, const DimsExprs* inputs, IExprBuilder&) { return inputs[0]; }

  static const char* workspace(const Arguments& a, size_t* bytes) { return kv_cuda_merge_cache_workspace(&a, bytes); }
  static const char* problem(const Arguments& a) { return kv_cuda_merge_cache_problem(&a); }
  template <class Call, class Use>
  static void each_smaller(const Call& a, Use use) {
    each_batch(a, use);
  }

  // The initial content of the instance's device memory: the inverse frequencies.
  std::string initial_memory(const Arguments&) const {
    const char* bytes = reinterpret_cast<const char*>(inverse_frequencies.data());
    return std::string(bytes, inverse_frequencies.size() * sizeof(float));
  }

  static const char* run(Arguments a, KvCuda where, void* frequencies, const void* const* inputs, int,
                         void* const* outputs) {
    a.inverse_frequencies = static_cast<const float*>(frequencies);
    a.past = state_at(inputs), a.present = state_at(outputs);
    return kv_cuda_merge_cache(&a, &where);
  }
};

}  // namespace kv::tensorrt
