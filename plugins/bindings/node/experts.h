// Reads the attributes of an Experts node, for every framework's binding.
#pragma once

#include <string>

#include "../../abi/attributes.h"
#include "packed.h"

namespace kv {

struct ExpertsAttributes : Packing {  // of the weights `first` and `down`
  int activation;
  bool gate, bias;
  float slope, limit, up_offset;
};

template <class Node>
int read_activation(const Node& node) {
  static const char* const words[] = {"silu", "gelu", "gelu_tanh", "relu", "relu_squared"};  // in the order of the ABI
  const std::string word = node.word("activation");
  for (int i = 0; i <= KV_EXPERTS_RELU_SQUARED; ++i)
    if (word == words[i]) return i;
  node.require(false, "the activation '" + word + "' is unknown");
  return 0;
}

template <class Node>
ExpertsAttributes read_experts(const Node& node) {
  ExpertsAttributes x;
  x.activation = read_activation(node);
  x.gate = read_switch(node, "gate"), x.bias = read_switch(node, "bias");
  x.slope = node.number("slope"), x.limit = node.number("limit"), x.up_offset = node.number("up_offset");
  check(node, x.slope == x.slope, "slope", x.slope, "a number");
  check(node, x.limit >= 0.0f, "limit", x.limit, "at least 0");
  check(node, x.up_offset == x.up_offset, "up_offset", x.up_offset, "a number");
  static_cast<Packing&>(x) = read_packing(node, 2);
  return x;
}

}  // namespace kv
