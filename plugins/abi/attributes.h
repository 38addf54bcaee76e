// A node's attributes: their names, and functions that read those of one value into the structs of a call.
// ../bindings/node/read.h defines the interface of Node.
// Written by `python -m tools.schema` from kvexport/schema: change that, not this.
// clang-format off
#pragma once

#include "../bindings/node/read.h"
#include "kvexport.h"

namespace kv {

// The digest of the schema that the library is compiled with. A library of another version is refused before
// it reads a node.
inline constexpr const char* kSchema = "3238f31d620d";

inline constexpr AttributeName kVoteAttentionAttributes[] = {
    {"scale", kFloat},
    {"capacity", kInts},
    {"vote_exponent", kFloat},
    {"softcap", kFloat},
    {"sliding_window", kInt},
    {"statistics", kWord},
    {"decay", kFloats},
    {"window", kInts},
    {"recency_weight", kFloats},
    {"reference_queries", kInt},
    {"value_prefix", kInt},
};

inline constexpr AttributeName kMergeCacheAttributes[] = {
    {"capacity", kInts},
    {"budget", kInts},
    {"sinks", kInt},
    {"recent", kInts},
    {"sliding_window", kInt},
    {"compresses", kInt},
    {"recent_receives", kInt},
    {"statistics", kWord},
    {"select", kWord},
    {"select_decay", kFloat},
    {"pooled", kInt},
    {"order", kWord},
    {"eviction_pool", kInt},
    {"error_exponent", kFloat},
    {"merged_last", kInt},
    {"merge", kWord},
    {"measure", kWord},
    {"threshold", kFloat},
    {"weigh_decay", kFloat},
    {"zip", kWord},
    {"key_factor_max", kFloat},
    {"votes_max", kFloat},
    {"residual", kFloat},
    {"mean_adds", kInt},
    {"weigh", kWord},
    {"tau", kFloat},
    {"share_pairs", kInt},
    {"fit", kWord},
    {"ridge", kFloat},
    {"change_max", kFloat},
    {"read_exponent", kFloat},
    {"vote_steps", kInt},
    {"bias_max", kFloat},
    {"inverse_frequencies", kFloats},
    {"rotary_interleaved", kInt},
    {"cache_positions", kInt},
    {"value_prefix", kInt},
};

inline constexpr AttributeName kLinearAttributes[] = {
    {"input_heads", kInt},
    {"norm", kInt},
    {"epsilon", kFloat},
    {"output_heads", kInts},
    {"bias", kInts},
    {"rotated", kInts},
    {"gate", kInt},
    {"residual", kInt},
    {"packed", kInts},
    {"group", kInts},
    {"float_input", kInt},
};

inline constexpr AttributeName kExpertsAttributes[] = {
    {"activation", kWord},
    {"gate", kInt},
    {"slope", kFloat},
    {"limit", kFloat},
    {"up_offset", kFloat},
    {"bias", kInt},
    {"packed", kInts},
    {"group", kInts},
    {"float_input", kInt},
};

template <class Node>
void read_attributes(const Node& node, KvVoteAttention& x) {
  x.scale = node.number("scale");
  check(node, x.scale == x.scale, "scale", x.scale, "a number");
  x.vote_exponent = node.number("vote_exponent");
  check(node, x.vote_exponent == x.vote_exponent, "vote_exponent", x.vote_exponent, "a number");
  x.softcap = node.number("softcap");
  check(node, x.softcap >= 0.0f, "softcap", x.softcap, "at least 0");
  x.sliding_window = node.integer("sliding_window");
  check(node, x.sliding_window >= 0, "sliding_window", x.sliding_window, "at least 0");
}

template <class Node>
void read_attributes(const Node& node, KvMergeCache& x) {
  x.sinks = node.integer("sinks");
  check(node, x.sinks >= 0, "sinks", x.sinks, "at least 0");
  x.sliding_window = node.integer("sliding_window");
  check(node, x.sliding_window >= 0, "sliding_window", x.sliding_window, "at least 0");
  x.compresses = read_switch(node, "compresses");
  x.recent_receives = read_switch(node, "recent_receives");
}

template <class Node>
void read_attributes(const Node& node, KvMergePolicy& x) {
  x.select = read_word(node, "select", {"position", "score", "average", "pooled", "mean", "attended"});
  x.select_decay = node.number("select_decay");
  check(node, x.select_decay > 0.0f && x.select_decay < 1.0f, "select_decay", x.select_decay, "above 0 and below 1");
  x.pooled = node.integer("pooled");
  check(node, x.pooled >= 1, "pooled", x.pooled, "at least 1");
  x.order = read_word(node, "order", {"lowest", "nearest", "least_error"});
  x.eviction_pool = node.integer("eviction_pool");
  check(node, x.eviction_pool >= 1, "eviction_pool", x.eviction_pool, "at least 1");
  x.error_exponent = node.number("error_exponent");
  check(node, x.error_exponent >= 0.0f, "error_exponent", x.error_exponent, "at least 0");
  x.merged_last = read_switch(node, "merged_last");
  x.merge = read_word(node, "merge", {"drop", "zip", "running_mean", "pair"});
  x.measure = read_word(node, "measure", {"cosine", "dot", "distance"});
  x.threshold = node.number("threshold");
  check(node, x.threshold == x.threshold, "threshold", x.threshold, "a number");
  x.weigh_decay = node.number("weigh_decay");
  check(node, x.weigh_decay > 0.0f && x.weigh_decay < 1.0f, "weigh_decay", x.weigh_decay, "above 0 and below 1");
  x.zip = read_word(node, "zip", {"key", "vote", "mean"});
  x.key_factor_max = node.number("key_factor_max");
  check(node, x.key_factor_max >= 1.0f, "key_factor_max", x.key_factor_max, "at least 1");
  x.votes_max = node.number("votes_max");
  check(node, x.votes_max >= 1.0f, "votes_max", x.votes_max, "at least 1");
  x.residual = node.number("residual");
  check(node, x.residual > 0.0f && x.residual <= 1.0f, "residual", x.residual, "above 0 and at most 1");
  x.mean_adds = read_switch(node, "mean_adds");
  x.weigh = read_word(node, "weigh", {"score", "hessian"});
  x.tau = node.number("tau");
  check(node, x.tau >= 0.0f, "tau", x.tau, "at least 0");
  x.share_pairs = read_switch(node, "share_pairs");
}

template <class Node>
void read_attributes(const Node& node, KvFit& x) {
  x.fit = read_word(node, "fit", {"values", "votes_and_values"});
  x.ridge = node.number("ridge");
  check(node, x.ridge > 0.0f, "ridge", x.ridge, "above 0");
  x.change_max = node.number("change_max");
  check(node, x.change_max > 0.0f, "change_max", x.change_max, "above 0");
  x.read_exponent = node.number("read_exponent");
  check(node, x.read_exponent == x.read_exponent, "read_exponent", x.read_exponent, "a number");
  x.vote_steps = node.integer("vote_steps");
  check(node, x.vote_steps >= 0, "vote_steps", x.vote_steps, "at least 0");
  x.bias_max = node.number("bias_max");
  check(node, x.bias_max > 0.0f, "bias_max", x.bias_max, "above 0");
}

}  // namespace kv
