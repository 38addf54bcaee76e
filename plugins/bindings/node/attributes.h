// What the attributes of the operators' nodes mean, for every framework's binding: attributes in, the kernels' structs
// out.
//
// A Node reads an attribute by its name (number, integer, word, numbers, integers; has_numbers is false only where
// there is none) and refuses what is not as it should be (require). Whatever it throws passes through.
#pragma once

#include <cmath>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "../../abi/kvexport.h"

namespace kv {

// Methods with a native kernel; a session of any other runs the functions that its graph carries.
constexpr const char* kMergeMethods =
    "asymkv,ballot,full,h2o,keepkv,kvslimmer,pyramidinfer,pyramidkv,snapkv,streaming,zeromerge";

template <class Node>
int integer_at_least(int least, const Node& node, const char* name) {
  const int x = node.integer(name);
  node.require(x >= least, std::string(name) + " is " + std::to_string(x) + ", and at least " + std::to_string(least));
  return x;
}

template <class Node>
int statistic_kind(const Node& node, const std::string& name) {
  if (name == "none") return KV_STATISTIC_NONE;
  if (name == "log_ema") return KV_STATISTIC_LOG_EMA;
  node.require(name == "probability", "unknown score '" + name + "'; known: none, log_ema, probability");
  return KV_STATISTIC_PROBABILITY;
}

template <class Node>
void read_statistics(const Node& node, KvVoteAttention& call) {
  std::vector<int> kinds;
  std::istringstream names(node.word("scores"));
  for (std::string name; std::getline(names, name, ',');) kinds.push_back(statistic_kind(node, name));
  const std::vector<float> decay = node.numbers("decay"), recency_weight = node.numbers("recency_weight");
  const std::vector<int> window = node.integers("window");
  const size_t count = kinds.size();
  const auto number = [](auto x) { return std::to_string(x); };
  node.require(count >= 1 && count <= KV_MAX_STATISTICS, "scores names 1 to 8 statistics, not " + number(count));
  node.require(decay.size() == count && window.size() == count && recency_weight.size() == count,
               "scores, decay, window and recency_weight differ in length: " + number(count) + ", " +
                   number(decay.size()) + ", " + number(window.size()) + ", " + number(recency_weight.size()));
  call.statistics = static_cast<int>(count);
  for (size_t k = 0; k < count; ++k) {
    const bool average = kinds[k] == KV_STATISTIC_LOG_EMA;
    node.require(decay[k] > 0.0f && (average ? decay[k] < 1.0f : decay[k] <= 1.0f),
                 "a decay is " + number(decay[k]) +
                     (average ? ", and that of a log_ema lies in (0, 1)" : ", and lies in (0, 1]"));
    node.require(window[k] >= 0, "a window is " + number(window[k]) + ", and not negative");
    node.require(recency_weight[k] > 0.0f, "a recency_weight is " + number(recency_weight[k]) + ", and positive");
    call.statistic[k] = {kinds[k], decay[k], window[k], recency_weight[k]};
  }
}

// All of a call that the node's attributes say.
template <class Node>
void read_vote_attention(const Node& node, KvVoteAttention& call) {
  call.scale = node.number("scale");
  call.vote_exponent = node.number("vote_exponent");
  call.softcap = node.number("softcap");
  call.sliding_window = node.integer("sliding_window");
  node.require(call.sliding_window >= 0,
               "sliding_window is " + std::to_string(call.sliding_window) + ", and not negative");
  node.require(call.softcap >= 0.0f, "softcap is " + std::to_string(call.softcap) + ", and not negative");
  read_statistics(node, call);
}

// A method's attributes become the policy that the kernel runs.
template <class Node>
class PolicyReader {
 public:
  explicit PolicyReader(const Node& node) : node_(node) {}

  KvMergePolicy read(const std::string& method, std::vector<float>& inverse_frequencies) {
    p_.compresses = method != "full";
    p_.threshold = -1e38f;
    p_.votes_max = INFINITY;
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
    p_.pool = integer_at_least(1, node_, "pool");
    p_.statistic[0].kind = KV_STATISTIC_LOG_EMA;
    if (selects_itself(KV_STATISTIC_LOG_EMA)) p_.importance = KV_BY_AVERAGE;
  }

  void ballot() {
    p_.merging = KV_ZIP;
    p_.measure = KV_DISTANCE;
    p_.recent_receives = 1;
    const std::string zip = node_.word("zip"), order = node_.word("order");
    node_.require(order == "least-error" || order == "least-attended", "unknown order '" + order + "'");
    p_.merge_first = p_.by_error = order == "least-error";
    p_.pool = integer_at_least(1, node_, "pool");
    p_.attention = node_.number("attention");
    node_.require(p_.attention >= 0.0f, "attention is " + std::to_string(p_.attention) + ", and not negative");
    node_.require(zip == "vote" || zip == "count", "unknown zip '" + zip + "'");
    p_.zip = zip == "vote" ? KV_ZIP_VOTE : KV_ZIP_MEAN;
    p_.votes_max = node_.number("votes_max");
    node_.require(p_.votes_max >= 1.0f, "votes_max is " + std::to_string(p_.votes_max) + ", and at least 1");
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

  const Node& node_;
  KvMergePolicy p_{};
};

// All of a call that the node's attributes say; the policy points to no inverse frequencies yet.
template <class Node>
void read_merge_cache(const Node& node, KvMergeCache& call, std::vector<float>& inverse_frequencies) {
  call.budget = integer_at_least(1, node, "budget");
  call.sinks = integer_at_least(0, node, "sinks");
  call.recent = integer_at_least(0, node, "recent");
  call.sliding_window = integer_at_least(0, node, "sliding_window");
  call.policy = PolicyReader<Node>(node).read(node.word("method"), inverse_frequencies);
}

// Why keys and scores of these sizes (-1: not known yet) cannot be a policy's; empty where they can.
inline std::string misfit(const KvMergePolicy& policy, int64_t key_size, int64_t statistics) {
  if (key_size >= 0 && 2 * policy.rotary_planes > key_size)
    return std::to_string(policy.rotary_planes) + " rotary planes do not fit into keys of size " +
           std::to_string(key_size);
  int expected = 1;
  for (int k = 1; k < KV_MAX_STATISTICS; ++k)
    if (policy.statistic[k].kind != KV_STATISTIC_NONE) expected = k + 1;
  if (statistics >= 0 && statistics != expected)
    return "the score has " + std::to_string(statistics) + " statistics, the method keeps " + std::to_string(expected);
  return "";
}

}  // namespace kv
