// The binding of MergeCache (docs/contract.md, section 3): a method's attributes become the policy that the kernel
// runs.
#pragma once

#include <cstring>

#include "node.h"

namespace kv {

// Methods with a native kernel; a session of any other runs the functions that its graph carries.
constexpr const char* kMergeMethods =
    "asymkv,ballot,full,h2o,keepkv,kvslimmer,pyramidinfer,pyramidkv,snapkv,streaming,zeromerge";

class PolicyReader {
 public:
  explicit PolicyReader(const Attributes& node) : node_(node) {}

  KvMergePolicy read(const std::string& method, std::vector<float>& inverse_frequencies) {
    p_.compresses = method != "full";
    p_.threshold = -1e38f;
    p_.statistic[0].kind = method == "streaming" || method == "full" ? KV_STATISTIC_NONE : KV_STATISTIC_PROBABILITY;
    if (method == "streaming" || method == "full")
      p_.importance = KV_BY_POSITION;
    else if (method == "h2o" || method == "pyramidinfer")
      p_.importance = KV_BY_SCORE;
    else if (method == "snapkv" || method == "pyramidkv")
      pool_over(node_.integer("pool"));
    else if (method == "keepkv")
      keepkv();
    else if (method == "ballot")
      ballot();
    else if (method == "zeromerge")
      zeromerge();
    else if (method == "kvslimmer" || method == "asymkv")
      pairs(method, inverse_frequencies);
    else
      node_.require(false, "no native kernel for the method '" + method + "'; there is one for " + kMergeMethods);
    return p_;
  }

 private:
  void pool_over(int width) {
    p_.importance = KV_BY_POOLED;
    p_.pooled = width;
    node_.require(width >= 1, "pool is " + std::to_string(width) + ", and at least 1");
  }

  // Who selects, where it is not the method itself: then the score carries two statistics, and its own comes last. True
  // for "own".
  bool selects_itself(int own_statistic) {
    const std::string selector = node_.word("selector");
    if (selector == "own") return true;
    if (selector == "snapkv")
      pool_over(5);
    else if (selector == "h2o" || selector == "pyramidinfer")
      p_.importance = KV_BY_SCORE;
    else
      node_.require(false, "unknown selector '" + selector + "'");
    p_.statistic[0].kind = KV_STATISTIC_PROBABILITY;
    p_.statistic[1].kind = own_statistic;
    return false;
  }

  void keepkv() {
    p_.merging = KV_ZIP;
    p_.measure = KV_COSINE;
    p_.threshold = node_.number("threshold");
    p_.decay = p_.weigh_decay = decay();
    p_.key_factor_max = node_.number("key_factor_max");
    const std::string zip = node_.word("zip"), order = node_.word("order");
    node_.require(zip == "key" || zip == "vote" || zip == "mean", "unknown zip '" + zip + "'");
    p_.zip = zip == "key" ? KV_ZIP_KEY : zip == "vote" ? KV_ZIP_VOTE : KV_ZIP_MEAN;
    node_.require(order == "merge-first" || order == "evict-first", "unknown order '" + order + "'");
    p_.merge_first = order == "merge-first";
    p_.pool = node_.integer("pool");
    node_.require(p_.pool >= 1, "pool is " + std::to_string(p_.pool) + ", and at least 1");
    p_.statistic[0].kind = KV_STATISTIC_LOG_EMA;
    if (selects_itself(KV_STATISTIC_LOG_EMA)) p_.importance = KV_BY_AVERAGE;
  }

  void ballot() {
    p_.merging = KV_ZIP;
    p_.measure = KV_DISTANCE;
    p_.recent_receives = 1;
    const std::string zip = node_.word("zip");
    node_.require(zip == "vote" || zip == "count", "unknown zip '" + zip + "'");
    p_.zip = zip == "vote" ? KV_ZIP_VOTE : KV_ZIP_MEAN;
    p_.weigh_decay = decay();
    p_.statistic[1].kind = KV_STATISTIC_LOG_EMA;
    if (selects_itself(KV_STATISTIC_LOG_EMA)) p_.importance = KV_BY_MEAN, p_.mean_adds = 1;
  }

  void zeromerge() {
    p_.merging = KV_RUNNING_MEAN;
    p_.measure = KV_DOT;
    p_.voted_last = 1;
    p_.residual = node_.number("residual");
    node_.require(p_.residual > 0.0f && p_.residual <= 1.0f,
                  "residual is " + std::to_string(p_.residual) + ", and lies in (0, 1]");
    if (selects_itself(KV_STATISTIC_PROBABILITY)) p_.importance = KV_BY_SCORE;
  }

  void pairs(const std::string& method, std::vector<float>& inverse_frequencies) {
    p_.merging = KV_PAIR;
    node_.require(node_.integer("share_pairs") == 0, "share_pairs has no native kernel");
    p_.weigh = method == "kvslimmer" ? KV_WEIGH_BY_HESSIAN : KV_WEIGH_BY_SCORE;
    if (method == "kvslimmer") p_.tau = node_.number("tau");
    if (node_.has_numbers("inverse_frequencies")) {  // a layer that turns nothing has none
      inverse_frequencies = node_.numbers("inverse_frequencies");
      node_.require(!inverse_frequencies.empty(), "inverse_frequencies holds no floats");
    }
    p_.rotary_planes = static_cast<int>(inverse_frequencies.size());
    if (p_.rotary_planes > 0) p_.rotary_interleaved = node_.integer("rotary_interleaved");
    if (selects_itself(KV_STATISTIC_PROBABILITY)) p_.importance = KV_BY_SCORE;
  }

  // Of an average, kept as the logarithm of its exponentials.
  float decay() const {
    const float decay = node_.number("decay");
    node_.require(decay > 0.0f && decay < 1.0f, "decay is " + std::to_string(decay) + ", and lies in (0, 1)");
    return decay;
  }

  const Attributes& node_;
  KvMergePolicy p_{};
};

struct MergeCacheKernel {
  KvMergeCache attributes{};
  std::vector<float> inverse_frequencies;

  MergeCacheKernel(const Ort::ConstKernelInfo& info, int type) {
    const Attributes node(info, "MergeCache");
    attributes.type = type;
    attributes.budget = at_least(1, node, "budget");
    attributes.sinks = at_least(0, node, "sinks");
    attributes.recent = at_least(0, node, "recent");
    attributes.sliding_window = at_least(0, node, "sliding_window");
    attributes.policy = PolicyReader(node).read(node.word("method"), inverse_frequencies);
    const Shape key = declared_shape(info, 0), score = declared_shape(info, 3);
    node.require(key.size() == 4 && score.size() == 4,
                 "key " + text(key) + " and score " + text(score) + " have four dimensions each");
    check_sizes(key[3], score[2]);
    const char* names[] = {"key", "value", "votes", "score", "position"};
    for (size_t i = 1; i < 5; ++i) {
      Shape expected(i == 1 || i == 3 ? 4 : 3, -1);
      expected[1] = key[1];
      check_declared(info, node, i, names[i], expected);
    }
  }

  static int at_least(int least, const Attributes& node, const char* name) {
    const int x = node.integer(name);
    node.require(x >= least,
                 std::string(name) + " is " + std::to_string(x) + ", and at least " + std::to_string(least));
    return x;
  }

  // -1 where a size is not known yet.
  void check_sizes(int64_t key_size, int64_t statistics) const {
    require(key_size < 0 || 2 * attributes.policy.rotary_planes <= key_size,
            "MergeCache: " + std::to_string(attributes.policy.rotary_planes) +
                " rotary planes do not fit into keys of size " + std::to_string(key_size));
    int expected = 1;
    for (int k = 1; k < KV_MAX_STATISTICS; ++k)
      if (attributes.policy.statistic[k].kind != KV_STATISTIC_NONE) expected = k + 1;
    require(statistics < 0 || statistics >= expected, "MergeCache: the score has " + std::to_string(statistics) +
                                                          " statistics, the method keeps " + std::to_string(expected));
  }

  OrtStatusPtr ComputeV2(OrtKernelContext* raw) {
    try {
      const Ort::KernelContext context(raw);
      const Cache cache(context, 0);
      check_sizes(cache.key_size, cache.statistics);
      KvMergeCache call = attributes;
      call.policy.inverse_frequencies = inverse_frequencies.data();
      call.batch = static_cast<int>(cache.batch), call.heads = static_cast<int>(cache.heads),
      call.capacity = static_cast<int>(cache.capacity);
      call.key_size = static_cast<int>(cache.key_size), call.value_size = static_cast<int>(cache.value_size);
      call.statistics = static_cast<int>(cache.statistics);
      call.past = cache.inputs(context, 0);
      call.present = cache.outputs(context, 0);
      const char* problem = kv_cpu_merge_cache(&call, runner(context));
      require(!problem, std::string("MergeCache: ") + (problem ? problem : ""));
    } catch (const std::exception& error) {
      return Ort::Status(error).release();
    }
    return nullptr;
  }
};

}  // namespace kv
