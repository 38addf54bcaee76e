// Reads the attributes of a RaggedMergeCache node, for every framework's binding. They are those of MergeCache, but
// `budget` and `recent` are lists with a number for each cache.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "attributes.h"

namespace kv {

struct OfCaches {
  std::vector<int> budget, recent;

  // Returns the list of an attribute, nullptr if it has one number for all caches.
  const std::vector<int>* list(const char* name) const {
    if (strcmp(name, "budget") == 0) return &budget;
    return strcmp(name, "recent") == 0 ? &recent : nullptr;
  }
};

// A RaggedMergeCache node as a MergeCache node with the numbers of the first cache.
template <class Node>
struct OfFirstCache {
  const Node& node;
  const OfCaches& caches;

  int integer(const char* name) const {
    const std::vector<int>* list = caches.list(name);
    return list ? list->front() : node.integer(name);
  }
  bool has(const char* name) const { return node.has(name); }
  float number(const char* name) const { return node.number(name); }
  std::string word(const char* name) const { return node.word(name); }
  std::vector<float> numbers(const char* name) const { return node.numbers(name); }
  std::vector<int> integers(const char* name) const { return node.integers(name); }
  void require(bool condition, const std::string& message) const { node.require(condition, message); }
};

// Reads all attributes, as read_merge_cache; the call receives the numbers of the first cache.
template <class Node>
bool read_ragged_merge_cache(const Node& node, KvMergeCache& call, OfCaches& caches,
                             std::vector<float>& inverse_frequencies, KvFit* fit = nullptr) {
  caches = {node.integers("budget"), node.integers("recent")};
  const size_t count = caches.budget.size();
  node.require(count > 0 && caches.recent.size() == count, "budget and recent have a number for each cache, not " +
                                                               std::to_string(count) + " and " +
                                                               std::to_string(caches.recent.size()));
  for (const int x : caches.budget) check(node, x >= 1, "budget", x, "at least 1");
  for (const int x : caches.recent) check(node, x >= 0, "recent", x, "at least 0");
  return read_merge_cache(OfFirstCache<Node>{node, caches}, call, inverse_frequencies, fit);
}

}  // namespace kv
