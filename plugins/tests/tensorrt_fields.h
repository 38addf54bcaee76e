// The fields of one plugin of each operator, for tensorrt_fuzz.cpp.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "tensorrt_harness.h"

namespace harness {

struct Item {
  std::string name;
  PluginFieldType type;
  int32_t length;
  std::string bytes;
  bool has_name = true, has_data = true;
};
using Items = std::vector<Item>;

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}
inline Item real(const char* name, std::vector<float> x) {
  return {name, PluginFieldType::kFLOAT32, static_cast<int32_t>(x.size()), bytes_of(x)};
}
inline Item whole(const char* name, std::vector<int32_t> x) {
  return {name, PluginFieldType::kINT32, static_cast<int32_t>(x.size()), bytes_of(x)};
}
inline Item word(const char* name, const std::string& x) {
  return {name, PluginFieldType::kCHAR, static_cast<int32_t>(x.size() + 1), x + '\0'};
}

inline Items vote_attention() {
  return {whole("capacity", {100, 28}),      real("scale", {0.3f}),
          real("vote_exponent", {1}),        word("statistics", "probability,log_ema"),
          real("decay", {1, 0.9f}),          whole("window", {0, 8}),
          real("recency_weight", {1, 1.2f}), real("softcap", {0}),
          whole("sliding_window", {0})};
}

// Returns the fields of a merge policy that drops by position, with these changes.
inline Items merge_cache(const Items& changes) {
  Items items = {whole("capacity", {96, 32}),   whole("budget", {64, 20}),
                 whole("sinks", {4}),           whole("recent", {8, 3}),
                 whole("sliding_window", {0}),  whole("compresses", {1}),
                 whole("recent_receives", {0}), word("statistics", "probability"),
                 word("select", "position"),    real("select_decay", {0.9f}),
                 whole("pooled", {1}),          word("order", "lowest"),
                 whole("eviction_pool", {1}),   real("error_exponent", {0}),
                 whole("merged_last", {0}),     word("merge", "drop"),
                 word("measure", "cosine"),     real("threshold", {-1e38f}),
                 real("weigh_decay", {0.9f}),   word("zip", "mean"),
                 real("key_factor_max", {2}),   real("votes_max", {32}),
                 real("residual", {1}),         whole("mean_adds", {0}),
                 word("weigh", "score"),        real("tau", {0}),
                 whole("share_pairs", {0})};
  for (const Item& change : changes) {
    const auto same = [&](const Item& item) { return item.name == change.name; };
    const auto at = std::find_if(items.begin(), items.end(), same);
    if (at == items.end())
      items.push_back(change);
    else
      *at = change;
  }
  return items;
}

// Returns the fields of one of the methods streaming, snapkv, keepkv, ballot, zeromerge, kvslimmer and asymkv, or of a
// policy that rotates by places.
inline Items merge_cache(size_t which) {
  static const std::vector<Items> changes = {
      {word("statistics", "none")},
      {word("select", "pooled"), whole("pooled", {5})},
      {word("select", "average"), word("statistics", "log_ema"), word("order", "nearest"), whole("eviction_pool", {4}),
       word("merge", "zip"), real("threshold", {0.8f}), word("zip", "key")},
      {word("select", "mean"), word("statistics", "probability,log_ema"), word("order", "least_error"),
       whole("eviction_pool", {4}), real("error_exponent", {0.5f}), word("merge", "zip"), word("measure", "distance"),
       whole("mean_adds", {1}), whole("recent_receives", {1})},
      {word("select", "score"), whole("merged_last", {1}), word("merge", "running_mean"), word("measure", "dot"),
       real("residual", {0.33f})},
      {word("select", "score"), word("merge", "pair"), word("weigh", "hessian"), real("tau", {0.001f})},
      {word("select", "score"), word("merge", "pair"), real("inverse_frequencies", {1, 0.5f}),
       whole("rotary_interleaved", {1})},
      {word("statistics", "none"), real("inverse_frequencies", {1, 0.5f}), whole("rotary_interleaved", {0}),
       whole("cache_positions", {1})},
  };
  return merge_cache(changes[which % changes.size()]);
}

}  // namespace harness
