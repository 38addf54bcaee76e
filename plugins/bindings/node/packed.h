// Reads how the weights of a Linear or Experts node are packed, for every framework's binding.
#pragma once

#include <string>
#include <vector>

#include "read.h"

namespace kv {

// The values of the attribute `packed`: the inputs of a node that follow a packed weight. They are a scale or, for
// kExponents, an exponent; then the zero point, the minimum or the table. kSupers adds the super-scales of scales and
// of minima, and kHigh times 1 or 2 the upper bits of integers of 3, 5 or 6 bits, last. kTwoLow: integers have 2 lower
// bits, four to a byte, in place of 4.
enum Packed {
  kNotPacked,
  kScaled,
  kWithZero,
  kWithMinimum,
  kWithTable,
  kExponents,
  kSupers = 8,
  kHigh = 16,
  kTwoLow = 64
};

constexpr size_t kMostInputs = 6;  // of a weight: itself, scale, minimum, a super-scale of each, and upper bits

inline int without_flags(int packed) { return packed & 7; }
inline int high_bits(int packed) { return packed / kHigh & 3; }
inline bool has_table(int packed) { return without_flags(packed) == kWithTable || without_flags(packed) == kExponents; }
inline int inputs_after(int packed) {
  const int kind = without_flags(packed), parts = kind == kNotPacked ? 0 : kind == kScaled ? 1 : 2;
  const int supers = packed & kSupers ? 1 + (kind == kWithMinimum) : 0;
  return parts + supers + (high_bits(packed) > 0);
}

// Returns whether a weight may have these inputs.
inline bool is_known(int packed) {
  const int kind = without_flags(packed);
  const bool scaled = kind == kScaled || kind == kWithMinimum;
  if (packed >= kTwoLow)
    return packed == (kWithMinimum | kSupers | kTwoLow) || packed == (kScaled | kSupers | kHigh | kTwoLow);
  return packed >= 0 && kind <= kExponents && high_bits(packed) <= 2 && (!high_bits(packed) || scaled) &&
         (!(packed & kSupers) || scaled || kind == kWithTable);
}

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
    check(node, is_known(x.packed[i]), "packed", x.packed[i],
          "0 to 5, 8 more than 1, 3 or 4, 16 or 32 more than 1, 3, 9 or 11, 75, or 89");
    check(node, x.packed[i] ? x.group[i] > 0 : x.group[i] == 0, "group", x.group[i],
          x.packed[i] ? "positive of a packed weight" : "0 of a weight that is not packed");
  }
  return x;
}

}  // namespace kv
