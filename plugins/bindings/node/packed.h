// Reads how the weights of a Linear or Experts node are packed, for every framework's binding.
#pragma once

#include <string>
#include <vector>

#include "read.h"

namespace kv {

// The values of the attribute `packed`: the inputs of a node that follow a packed weight. They are a scale or, for
// kExponents, an exponent; then the zero point, the minimum or the table.
enum Packed { kNotPacked, kScaled, kWithZero, kWithMinimum, kWithTable, kExponents };

inline int inputs_after(int packed) { return packed == kNotPacked ? 0 : packed == kScaled ? 1 : 2; }
inline bool has_table(int packed) { return packed == kWithTable || packed == kExponents; }

struct Packing {
  std::vector<int> packed, group;  // an entry for each weight; group: inputs that share a scale, 0 if it is not packed
  bool float_input = false;
};

// Reads the packing of a node's `count` weights. A node without packed weights has none of the attributes.
template <class Node>
Packing read_packing(const Node& node, size_t count) {
  Packing x{std::vector<int>(count), std::vector<int>(count)};
  if (!node.has("packed")) {
    for (const char* name : {"group", "float_input"})
      node.require(!node.has(name), std::string(name) + " has no use without packed");
    return x;
  }
  x = {node.integers("packed"), node.integers("group"), read_switch(node, "float_input") == 1};
  node.require(x.packed.size() == count && x.group.size() == count,
               "packed and group have an entry for each of " + std::to_string(count) + " weights, not " +
                   std::to_string(x.packed.size()) + " and " + std::to_string(x.group.size()));
  for (size_t i = 0; i < count; ++i) {
    check(node, x.packed[i] >= kNotPacked && x.packed[i] <= kExponents, "packed", x.packed[i], "0 to 5");
    check(node, x.packed[i] ? x.group[i] > 0 : x.group[i] == 0, "group", x.group[i],
          x.packed[i] ? "positive of a packed weight" : "0 of a weight that is not packed");
  }
  return x;
}

}  // namespace kv
