// Reads the attributes of a LinearAttention node, for every framework's binding.
#pragma once

#include <string>

#include "read.h"

namespace kv {

inline constexpr AttributeName kLinearAttentionAttributes[] = {
    {"heads", kInt}, {"key_heads", kInt}, {"update_rule", kWord}, {"scale", kFloat}};

struct LinearAttentionAttributes {
  int heads, key_heads;
  float scale;
  bool gated, delta;  // whether the node has the inputs decay and beta
};

template <class Node>
LinearAttentionAttributes read_linear_attention(const Node& node) {
  LinearAttentionAttributes x;
  x.heads = node.integer("heads"), x.key_heads = node.integer("key_heads"), x.scale = node.number("scale");
  node.require(x.heads > 0 && x.key_heads > 0 && x.heads % x.key_heads == 0,
               std::to_string(x.heads) + " heads are no multiple of " + std::to_string(x.key_heads) + " key heads");
  check(node, x.scale == x.scale, "scale", x.scale, "a number");
  const std::string rule = node.word("update_rule");
  x.gated = rule == "gated" || rule == "gated_delta", x.delta = rule == "delta" || rule == "gated_delta";
  node.require(x.gated || x.delta || rule == "linear", "the update rule '" + rule + "' is unknown");
  return x;
}

}  // namespace kv
