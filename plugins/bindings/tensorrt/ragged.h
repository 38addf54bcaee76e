// RaggedVoteAttention and RaggedMergeCache for TensorRT: VoteAttention and MergeCache over KV heads that have caches of
// their own. The state tensors follow each other cache by cache. Whatever is not here is as for one cache.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "../node/ragged.h"
#include "operators.h"

namespace kv::tensorrt {

// A field that is no attribute: TensorRT asks a plugin for the number of its outputs before it has seen its inputs.
constexpr const char* kCaches = "caches";

template <class Call>
struct RaggedCall : Call {
  std::vector<KvHeadCache> caches;

  // Sets the sizes of the caches, whose state tensors begin at input `first`.
  void size_caches(const std::vector<Shape>& inputs, int first, int count) {
    Call& a = *this;
    a.batch = size_of(inputs, first, 0), a.heads = count;
    a.key_size = size_of(inputs, first, 3), a.value_size = size_of(inputs, first + 1, 3);
    caches.resize(count);
    for (int h = 0; h < count; ++h) caches[h].capacity = size_of(inputs, first + h * kState, 2);
    a.capacity = 0;
    for (const KvHeadCache& own : caches)
      a.capacity = own.capacity < 0 || a.capacity < 0 ? -1 : std::max(a.capacity, own.capacity);
  }
  void add_inputs(std::vector<Input>& all, const std::string& prefix) const {
    Call own = *this;
    own.heads = 1;
    for (size_t h = 0; h < caches.size(); ++h) {
      own.capacity = caches[h].capacity;
      for (const Input& x : state_inputs(own))
        all.push_back({prefix + x.name + " of cache " + std::to_string(h), x.shape});
    }
  }
  void place_caches(const void* const* past, void* const* present) {
    for (size_t h = 0; h < caches.size(); ++h)
      caches[h].past = state_at(past + h * kState), caches[h].present = state_at(present + h * kState);
  }
};

struct RaggedVoteAttention : VoteAttention {
  using Arguments = RaggedCall<KvVoteAttention>;
  static constexpr const char* kName = "RaggedVoteAttention";

  static std::vector<PluginField> fields() {
    std::vector<PluginField> all = VoteAttention::fields();
    all.push_back({kCaches, nullptr, PluginFieldType::kINT32, 1});
    return all;
  }
  // Sink logits are the last input, as those of VoteAttention, so that the numbers of all others are fixed.
  int outputs() const { return kPresent + kState * caches; }
  int least_inputs() const { return kPast + kState * caches; }
  int most_inputs() const { return least_inputs() + 1; }

  int caches;
  explicit RaggedVoteAttention(const Fields& fields) : VoteAttention(fields), caches(fields.integer(kCaches)) {
    check(fields, caches >= 1 && caches <= KV_CUDA_MAX_HEADS, kCaches, caches, "1 to 65536");
  }

  Types types(int i, DataType query) const {
    if (i < kPast) return VoteAttention::types(i, query);
    return {i < least_inputs() ? state_type((i - kPast) % kState, query) : DataType::kFLOAT};
  }
  Arguments sized(const std::vector<Shape>& inputs) const {
    Arguments a{attributes, {}};
    a.query_heads = size_of(inputs, 0, 1), a.tokens = size_of(inputs, 0, 2);
    a.size_caches(inputs, kPast, caches);
    return a;
  }
  static std::vector<Input> inputs(const Arguments& a) {
    std::vector<Input> all = inputs_of(a);
    const Input sinks = all.back();
    all.resize(kPast);
    a.add_inputs(all, "past_");
    all.push_back(sinks);
    return all;
  }

  static const char* workspace(const Arguments& a, size_t* bytes) {
    return kv_cuda_ragged_vote_attention_workspace(&a, a.caches.data(), bytes);
  }
  static const char* problem(const Arguments& a) { return kv_cuda_ragged_vote_attention_problem(&a, a.caches.data()); }
  const char* run(Arguments a, KvCuda where, void* counters, const void* const* inputs, int count,
                  void* const* outputs) const {
    place_tokens(a, inputs, count, least_inputs(), outputs);
    a.place_caches(inputs + kPast, outputs + kPresent);
    where.counters = counters;
    return kv_cuda_ragged_vote_attention(&a, a.caches.data(), &where);
  }
};

struct RaggedMergeCache : MergeCache {
  using Arguments = RaggedCall<KvMergeCache>;
  static constexpr const char* kName = "RaggedMergeCache";

  static std::vector<PluginField> fields() {
    std::vector<PluginField> all = MergeCache::fields();
    for (PluginField& one : all)
      if (OfCaches().list(one.name)) one.length = 0;
    return all;
  }
  int outputs() const { return kState * static_cast<int>(caches.budget.size()); }
  int least_inputs() const { return outputs(); }
  int most_inputs() const { return outputs(); }

  OfCaches caches;
  explicit RaggedMergeCache(const Fields& fields) {
    read_ragged_merge_cache(fields, attributes, caches, inverse_frequencies);
  }

  static Types types(int i, DataType cache) { return i == 0 ? kFloatTypes : Types{state_type(i % kState, cache)}; }
  Arguments sized(const std::vector<Shape>& inputs) const {
    Arguments a{attributes, {}};
    a.size_caches(inputs, 0, static_cast<int>(caches.budget.size()));
    for (size_t h = 0; h < a.caches.size(); ++h)
      a.caches[h].budget = caches.budget[h], a.caches[h].recent = caches.recent[h];
    return a;
  }
  static std::vector<Input> inputs(const Arguments& a) {
    std::vector<Input> all;
    a.add_inputs(all, "");
    return all;
  }

  static const char* workspace(const Arguments& a, size_t* bytes) {
    return kv_cuda_ragged_merge_cache_workspace(&a, a.caches.data(), bytes);
  }
  static const char* problem(const Arguments& a) { return kv_cuda_ragged_merge_cache_problem(&a, a.caches.data()); }
  const char* run(Arguments a, KvCuda where, void* frequencies, const void* const* inputs, int,
                  void* const* outputs) const {
    a.inverse_frequencies = static_cast<const float*>(frequencies);
    a.place_caches(inputs, outputs);
    return kv_cuda_ragged_merge_cache(&a, a.caches.data(), &where);
  }
};

}  // namespace kv::tensorrt
