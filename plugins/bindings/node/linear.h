// Reads the attributes of a Linear or AdaptedLinear node, for every framework's binding.
#pragma once

#include <string>
#include <vector>

#include "../../abi/attributes.h"
#include "packed.h"

namespace kv {

// input_heads, output_heads: if above 0, the tensor is [batch, heads, tokens, size] with this number of heads; if 0, it
// is [batch, tokens, heads x size]. Lists have an entry for each product; those of Packing have a last entry for the
// gate.
struct LinearAttributes : Packing {
  int input_heads;
  bool norm, gate, residual;
  float epsilon;
  std::vector<int> output_heads, bias, rotated;

  size_t products() const { return output_heads.size(); }
  bool is_rotated() const {
    for (const int one : rotated)
      if (one) return true;
    return false;
  }
};

template <class Node>
LinearAttributes read_linear(const Node& node) {
  LinearAttributes x;
  x.input_heads = integer_at_least(0, node, "input_heads"), x.output_heads = node.integers("output_heads");
  x.bias = node.integers("bias"), x.rotated = node.integers("rotated");
  x.norm = read_switch(node, "norm"), x.epsilon = node.number("epsilon");
  x.gate = read_switch(node, "gate"), x.residual = read_switch(node, "residual");
  check(node, x.epsilon >= 0.0f, "epsilon", x.epsilon, "at least 0");
  const size_t count = x.products();
  node.require(count >= 1 && count <= KV_MAX_PRODUCTS && x.bias.size() == count && x.rotated.size() == count,
               "output_heads, bias and rotated have an entry for each of one to three products, not " +
                   std::to_string(count) + ", " + std::to_string(x.bias.size()) + " and " +
                   std::to_string(x.rotated.size()));
  for (size_t i = 0; i < count; ++i) {
    node.require(x.output_heads[i] >= 0, "output_heads is negative");
    node.require((x.bias[i] | x.rotated[i] | 1) == 1, "bias and rotated are 0 or 1");
    node.require(!x.rotated[i] || x.output_heads[i] > 0, "an output without heads is rotated");
  }
  node.require(count == 1 || !(x.gate || x.residual), "a gate or a residual goes with one product, not several");
  static_cast<Packing&>(x) = read_packing(node, count + x.gate);
  return x;
}

}  // namespace kv
