// The binding of MergeCache (docs/contract.md, section 3): a method's attributes become the policy that the kernel runs.
#pragma once

#include <cstring>

#include "node.h"

namespace kv {

// Methods with a native kernel; a session of any other runs the functions that its graph carries.
constexpr const char* kMergeMethods = "asymkv,ballot,full,h2o,keepkv,kvslimmer,pyramidinfer,pyramidkv,snapkv,streaming,zeromerge";

class PolicyReader {
 public:
  explicit PolicyReader(const Ort::ConstKernelInfo& info) : info_(info) {}

  KvMergePolicy read(const std::string& method, std::vector<float>& inverse_frequencies) {
    p_.compresses = method != "full";
    p_.threshold = -1e38f;
    p_.statistic[0].kind = method == "streaming" || method == "full" ? KV_STATISTIC_NONE : KV_STATISTIC_PROBABILITY;
    if (method == "streaming" || method == "full") p_.importance = KV_BY_POSITION;
    else if (method == "h2o" || method == "pyramidinfer") p_.importance = KV_BY_SCORE;
    else if (method == "snapkv" || method == "pyramidkv") pool_over(integer("pool"));
    else if (method == "keepkv") keepkv();
    else if (method == "ballot") ballot();
    else if (method == "zeromerge") zeromerge();
    else if (method == "kvslimmer" || method == "asymkv") pairs(method, inverse_frequencies);
    else require(false, "MergeCache: no native kernel for the method '" + method + "'; there is one for " + kMergeMethods);
    return p_;
  }

 private:
  float number(const char* name) const { return info_.GetAttribute<float>(name); }
  int integer(const char* name) const { return static_cast<int>(info_.GetAttribute<int64_t>(name)); }
  std::string word(const char* name) const { return info_.GetAttribute<std::string>(name); }

  void pool_over(int width) {
    p_.importance = KV_BY_POOLED;
    p_.pooled = width;
    require(width >= 1, "MergeCache: pool is at least 1");
  }

  // Who selects, where it is not the method itself: then the score carries two statistics, and its own comes last. True for "own".
  bool selects_itself(int own_statistic) {
    const std::string selector = word("selector");
    if (selector == "own") return true;
    if (selector == "snapkv") pool_over(5);
    else if (selector == "h2o" || selector == "pyramidinfer") p_.importance = KV_BY_SCORE;
    else require(false, "MergeCache: unknown selector '" + selector + "'");
    p_.statistic[0].kind = KV_STATISTIC_PROBABILITY;
    p_.statistic[1].kind = own_statistic;
    return false;
  }

  void keepkv() {
    p_.merging = KV_ZIP;
    p_.measure = KV_COSINE;
    p_.threshold = number("threshold");
    p_.decay = p_.weigh_decay = number("decay");
    require(p_.decay > 0.0f && p_.decay < 1.0f, "MergeCache: keepkv's decay lies in (0, 1)");
    p_.key_factor_max = number("key_factor_max");
    const std::string zip = word("zip"), order = word("order");
    require(zip == "key" || zip == "vote" || zip == "mean", "MergeCache: unknown zip '" + zip + "'");
    p_.zip = zip == "key" ? KV_ZIP_KEY : zip == "vote" ? KV_ZIP_VOTE : KV_ZIP_MEAN;
    require(order == "merge-first" || order == "evict-first", "MergeCache: unknown order '" + order + "'");
    p_.merge_first = order == "merge-first";
    p_.pool = integer("pool");
    require(p_.pool >= 1, "MergeCache: pool is at least 1");
    p_.statistic[0].kind = KV_STATISTIC_LOG_EMA;
    if (selects_itself(KV_STATISTIC_LOG_EMA)) p_.importance = KV_BY_AVERAGE;
  }

  void ballot() {
    p_.merging = KV_ZIP;
    p_.measure = KV_DISTANCE;
    p_.recent_receives = 1;
    const std::string zip = word("zip");
    require(zip == "vote" || zip == "count", "MergeCache: unknown zip '" + zip + "'");
    p_.zip = zip == "vote" ? KV_ZIP_VOTE : KV_ZIP_MEAN;
    p_.weigh_decay = number("decay");
    require(p_.weigh_decay > 0.0f && p_.weigh_decay < 1.0f, "MergeCache: ballot's decay lies in (0, 1)");
    p_.statistic[1].kind = KV_STATISTIC_LOG_EMA;
    if (selects_itself(KV_STATISTIC_LOG_EMA)) p_.importance = KV_BY_MEAN, p_.mean_adds = 1;
  }

  void zeromerge() {
    p_.merging = KV_RUNNING_MEAN;
    p_.measure = KV_DOT;
    p_.voted_last = 1;
    p_.residual = number("residual");
    if (selects_itself(KV_STATISTIC_PROBABILITY)) p_.importance = KV_BY_SCORE;
  }

  void pairs(const std::string& method, std::vector<float>& inverse_frequencies) {
    p_.merging = KV_PAIR;
    require(integer("share_pairs") == 0, "MergeCache: share_pairs has no native kernel");
    p_.weigh = method == "kvslimmer" ? KV_WEIGH_BY_HESSIAN : KV_WEIGH_BY_SCORE;
    if (method == "kvslimmer") p_.tau = number("tau");
    try {
      inverse_frequencies = info_.GetAttributes<float>("inverse_frequencies");
    } catch (const Ort::Exception&) {  // a layer that turns nothing
    }
    p_.rotary_planes = static_cast<int>(inverse_frequencies.size());
    if (p_.rotary_planes > 0) p_.rotary_interleaved = integer("rotary_interleaved");
    if (selects_itself(KV_STATISTIC_PROBABILITY)) p_.importance = KV_BY_SCORE;
  }

  const Ort::ConstKernelInfo& info_;
  KvMergePolicy p_{};
};

struct MergeCacheKernel {
  KvMergeCache attributes{};
  std::vector<float> inverse_frequencies;

  MergeCacheKernel(const Ort::ConstKernelInfo& info, int type) {
    attributes.type = type;
    attributes.budget = static_cast<int>(info.GetAttribute<int64_t>("budget"));
    attributes.sinks = static_cast<int>(info.GetAttribute<int64_t>("sinks"));
    attributes.recent = static_cast<int>(info.GetAttribute<int64_t>("recent"));
    attributes.sliding_window = static_cast<int>(info.GetAttribute<int64_t>("sliding_window"));
    require(attributes.budget >= 1 && attributes.sinks >= 0 && attributes.recent >= 0 && attributes.sliding_window >= 0,
            "MergeCache: budget, sinks, recent or sliding_window is out of range");
    attributes.policy = PolicyReader(info).read(info.GetAttribute<std::string>("method"), inverse_frequencies);
    const Shape key = declared_shape(info, 0), score = declared_shape(info, 3);
    require(key.size() == 4 && score.size() == 4, "MergeCache: key and score have four dimensions");
    check_sizes(key[3], score[2]);
  }

  // -1 where a size is not known yet.
  void check_sizes(int64_t key_size, int64_t statistics) const {
    require(key_size < 0 || 2 * attributes.policy.rotary_planes <= key_size, "MergeCache: more rotary planes than the key has dimensions");
    int expected = 1;
    for (int k = 1; k < KV_MAX_STATISTICS; ++k)
      if (attributes.policy.statistic[k].kind != KV_STATISTIC_NONE) expected = k + 1;
    require(statistics < 0 || statistics >= expected,
            "MergeCache: the score has " + std::to_string(statistics) + " statistics, the method keeps " + std::to_string(expected));
  }

  OrtStatusPtr ComputeV2(OrtKernelContext* raw) {
    try {
      const Ort::KernelContext context(raw);
      const Cache cache(context, 0);
      check_sizes(cache.key_size, cache.statistics);
      KvMergeCache call = attributes;
      call.policy.inverse_frequencies = inverse_frequencies.data();
      call.batch = static_cast<int>(cache.batch), call.heads = static_cast<int>(cache.heads), call.capacity = static_cast<int>(cache.capacity);
      call.key_size = static_cast<int>(cache.key_size), call.value_size = static_cast<int>(cache.value_size);
      call.statistics = static_cast<int>(cache.statistics);
      call.past = cache.inputs(context, 0);
      call.present = cache.outputs(context, 0);
      const char* problem = kv_cpu_merge_cache(&call, runner(context));
      require(!problem, std::string("MergeCache: ") + (problem ? problem : ""));
    } catch (const Ort::Exception& error) {
      return Ort::Status(error).release();
    }
    return nullptr;
  }
};

}  // namespace kv
