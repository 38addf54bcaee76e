// Reads the attributes of the operators' nodes into the kernels' structs, for every framework's binding. Generated code
// reads attributes of one value (../../abi/attributes.h); this file reads lists, and checks attributes that depend on
// each other.
#pragma once

#include <cstdint>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "../../abi/attributes.h"
#include "../../abi/kvexport.h"
#include "../../math/policy.h"

namespace kv {

// Returns the kinds of a node's statistics, in their order.
template <class Node>
std::vector<int> read_statistic_kinds(const Node& node) {
  std::vector<int> kinds;
  std::istringstream words(node.word("statistics"));
  for (std::string word; std::getline(words, word, ',');)
    kinds.push_back(number_of(node, "statistics", word, {"none", "log_ema", "probability"}));
  node.require(!kinds.empty() && kinds.size() <= KV_MAX_STATISTICS,
               "statistics names 1 to 8 statistics, not " + std::to_string(kinds.size()));
  return kinds;
}

template <class Node>
void read_statistics(const Node& node, KvVoteAttention& call) {
  const std::vector<int> kinds = read_statistic_kinds(node);
  const std::vector<float> decay = node.numbers("decay"), recency_weight = node.numbers("recency_weight");
  const std::vector<int> window = node.integers("window");
  const size_t count = kinds.size();
  const auto number = [](auto x) { return std::to_string(x); };
  node.require(decay.size() == count && window.size() == count && recency_weight.size() == count,
               "statistics, decay, window and recency_weight differ in length: " + number(count) + ", " +
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

// Returns the attribute value_prefix, 0 without one. on_cpu: only the kernels of the CPU read values from keys.
template <class Node>
int read_value_prefix(const Node& node, bool on_cpu) {
  if (!node.has("value_prefix")) return 0;
  node.require(on_cpu, "no kernel here reads values from keys (value_prefix)");
  return integer_at_least(1, node, "value_prefix");
}

// The attributes of a node that have a number for each KV head. A VoteAttention node has only `capacity`.
struct HeadLists {
  std::vector<int> capacity;  // empty: every head has S / H slots
  std::vector<int> budget, recent;
};

// Returns the list of an attribute; throws if a number is below `least`.
template <class Node>
std::vector<int> integers_at_least(int least, const Node& node, const char* name) {
  const std::vector<int> list = node.integers(name);
  for (const int x : list) check(node, x >= least, name, x, ("at least " + std::to_string(least)).c_str());
  return list;
}

template <class Node>
std::vector<int> read_capacity(const Node& node) {
  if (!node.has("capacity")) return {};
  const std::vector<int> capacity = integers_at_least(1, node, "capacity");
  node.require(!capacity.empty(), "capacity holds no integers");
  return capacity;
}

// Points a call, whose slots and heads are set, to the slots of each KV head: those of the attribute `capacity`, or S /
// H in `equal`. Returns why they are not the slots of the call; "" if they are.
template <class Arguments>
std::string set_capacity(const std::vector<int>& capacity, std::vector<int>& equal, Arguments& call) {
  const auto number = [](auto x) { return std::to_string(x); };
  const size_t heads = static_cast<size_t>(call.heads);
  if (capacity.empty() && (call.slots < call.heads || call.slots % call.heads))
    return number(call.slots) + " slots are not the same number for each of " + number(heads) +
           " KV heads, and the node has no capacity";
  if (capacity.empty()) equal.assign(heads, call.slots / call.heads);
  const std::vector<int>& all = capacity.empty() ? equal : capacity;
  if (all.size() != heads)
    return "capacity has " + number(all.size()) + " numbers, but there are " + number(heads) + " KV heads";
  const int64_t sum = std::accumulate(all.begin(), all.end(), int64_t{0});
  if (sum != call.slots)
    return "the sum of capacity is " + number(sum) + ", but there are " + number(call.slots) + " slots";
  call.capacity = all.data();
  return "";
}

// Reads all attributes of a VoteAttention node, and its list `capacity`. reference_queries: receives the rows of the
// ring of reference queries, 0 without one. It is nullptr except on the CPU; then a node with a ring, or with values in
// keys, is refused.
template <class Node>
void read_vote_attention(const Node& node, KvVoteAttention& call, std::vector<int>& capacity,
                         int* reference_queries = nullptr) {
  read_attributes(node, call);
  capacity = read_capacity(node);
  read_statistics(node, call);
  call.value_prefix = read_value_prefix(node, reference_queries);
  if (!node.has("reference_queries")) return;
  node.require(reference_queries, "no kernel here keeps reference_queries");
  *reference_queries = integer_at_least(1, node, "reference_queries");
}

// Reads all attributes of a MergeCache node; the caller sets the call's pointers to the lists. Returns whether the node
// has a fit. fit: receives it. It is nullptr except on the CPU; then a node with a fit, or with values in keys, is
// refused.
template <class Node>
bool read_merge_cache(const Node& node, KvMergeCache& call, HeadLists& heads, std::vector<float>& inverse_frequencies,
                      KvFit* fit = nullptr) {
  read_attributes(node, call);
  heads = {read_capacity(node), integers_at_least(1, node, "budget"), integers_at_least(0, node, "recent")};
  const auto number = [](auto x) { return std::to_string(x); };
  node.require(!heads.budget.empty() && heads.recent.size() == heads.budget.size(),
               "budget and recent have a number for each KV head, not " + number(heads.budget.size()) + " and " +
                   number(heads.recent.size()));
  node.require(heads.capacity.empty() || heads.capacity.size() == heads.budget.size(),
               "capacity has " + number(heads.capacity.size()) + " numbers, and budget " + number(heads.budget.size()));
  call.heads = static_cast<int>(heads.budget.size());
  const std::vector<int> kinds = read_statistic_kinds(node);
  call.statistics = static_cast<int>(kinds.size());
  for (size_t k = 0; k < kinds.size(); ++k) call.statistic_kind[k] = kinds[k];
  node.require(node.has("select"), "the node carries no merge policy: only the function of its method computes it");
  read_attributes(node, call.policy);
  call.value_prefix = read_value_prefix(node, fit);
  const bool fits = node.has("fit");
  node.require(!fits || fit, "no kernel here fits slots to reference queries");
  if (fits) read_attributes(node, *fit);
  const char* problem = policy_problem(call.policy, fits);
  if (!problem && fits && call.policy.merge != KV_MERGE_DROP && call.policy.merge != KV_MERGE_ZIP)
    problem = "a fit needs merge to be drop or zip";
  node.require(!problem, problem ? problem : "");
  call.cache_positions = node.has("cache_positions") ? read_switch(node, "cache_positions") : 0;
  node.require(!call.cache_positions || call.sliding_window == 0,
               "cache_positions is 1, and a sliding_window counts absolute positions");
  if (!node.has("inverse_frequencies")) return fits;  // a layer without a rotary embedding has none
  inverse_frequencies = node.numbers("inverse_frequencies");
  node.require(!inverse_frequencies.empty(), "inverse_frequencies holds no floats");
  call.rotary_planes = static_cast<int>(inverse_frequencies.size());
  call.rotary_interleaved = read_switch(node, "rotary_interleaved");
  return fits;
}

// Returns why keys and scores of these sizes (-1: not known yet) do not fit a node; "" if they fit.
inline std::string misfit(const KvMergeCache& attributes, int64_t key_size, int64_t statistics) {
  if (key_size >= 0 && 2 * attributes.rotary_planes > key_size)
    return std::to_string(attributes.rotary_planes) + " rotary planes do not fit into keys of size " +
           std::to_string(key_size);
  if (statistics >= 0 && statistics != attributes.statistics)
    return "the score has " + std::to_string(statistics) + " statistics, the method keeps " +
           std::to_string(attributes.statistics);
  return "";
}

}  // namespace kv
