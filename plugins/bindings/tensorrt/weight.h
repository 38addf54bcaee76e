// A weight of a plugin, packed or not: consecutive inputs of it.
//
// TensorRT's plugins take neither unsigned integers nor integers of 4 bits. The bytes of such tensors are therefore
// inputs of int8, and the fields `bits` and `signed` tell what they contain (kvexport/backends/tensorrt/packed.py
// writes them): a weight has `inputs * bits / 8` bytes in its last dimension, and zero points are one row of bytes.
#pragma once

#include "../node/packed.h"
#include "tensors.h"

namespace kv::tensorrt {

inline constexpr AttributeName kByteFields[] = {{"bits", kInts}, {"signed", kInts}};

// The packing of a plugin's weights, with the integers of each.
struct PluginPacking : Packing {
  std::vector<int> bits, is_signed;

  PluginPacking(const Fields& node, const Packing& packing) : Packing(packing) {
    const size_t count = packed.size();
    bits.assign(count, 0), is_signed.assign(count, 0);
    if (!node.has("packed")) {
      for (const AttributeName& one : kByteFields)
        node.require(!node.has(one.name), std::string(one.name) + " has no use without packed");
      return;
    }
    bits = node.integers("bits"), is_signed = node.integers("signed");
    node.require(bits.size() == count && is_signed.size() == count,
                 "bits and signed have an entry for each of " + std::to_string(count) + " weights, not " +
                     std::to_string(bits.size()) + " and " + std::to_string(is_signed.size()));
    for (size_t i = 0; i < count; ++i) {
      const bool four = bits[i] == 4;
      check(node, packed[i] ? four || bits[i] == 8 : bits[i] == 0, "bits", bits[i],
            packed[i] ? "4 or 8 of a packed weight" : "0 of a weight that is not packed");
      check(node, is_signed[i] == 0 || (is_signed[i] == 1 && packed[i]), "signed", is_signed[i],
            packed[i] ? "0 or 1" : "0 of a weight that is not packed");
      node.require(!four || group[i] % 2 == 0, "a group of 4-bit weights is odd: " + std::to_string(group[i]));
      node.require(!has_table(packed[i]) || (four && !is_signed[i]),
                   "a weight with a table has no unsigned integers of 4 bits");
    }
  }
};

// One weight [outputs, inputs], or of Experts [experts, outputs, inputs], from input `first` of a plugin on.
struct Weight {
  const char* name;
  int first, packed, group, bits;
  bool is_signed;

  int count() const { return 1 + inputs_after(packed); }
  bool has_offset() const { return packed == kWithZero || packed == kWithMinimum; }

  // Returns the types that the weight's part may have: the weight itself, then what it is packed with.
  Types types(int part, DataType input) const {
    if (!packed) return {input};
    const bool floats = (part == 1 && packed != kExponents) || (part == 2 && packed == kWithMinimum);
    return floats ? Types{DataType::kFLOAT, DataType::kHALF} : Types{DataType::kINT8};
  }

  // Returns the shapes of the weight's tensors. leading: the dimensions before the inputs.
  std::vector<Input> shapes(const Shape& leading, int64_t inputs) const {
    const auto with = [&](int64_t last) {
      Shape shape = leading;
      shape.push_back(last);
      return shape;
    };
    if (!packed) return {{name, with(inputs)}};
    static const char* const second[] = {"", "a scale", "a scale", "a scale", "a scale", "an exponent"};
    static const char* const third[] = {"", "", "a zero point", "a minimum", "a table", "a table"};
    const int64_t groups = inputs < 0 ? -1 : inputs / group, bytes = product_of({inputs, bits});
    const Shape of_groups = with(groups);
    std::vector<Input> all{{name, with(bytes < 0 ? -1 : bytes / 8)}, {second[packed], of_groups}};
    const int64_t zeros = packed == kWithZero ? product_of(of_groups) : 0;
    if (packed == kWithZero) all.push_back({third[packed], {zeros < 0 || bits == 8 ? zeros : zeros / 2 + zeros % 2}});
    if (packed == kWithMinimum) all.push_back({third[packed], of_groups});
    if (has_table(packed)) all.push_back({third[packed], {16}});
    return all;
  }

  // Returns the weight of a call whose tensors have no place yet. Parts that it has are not nullptr.
  KvWeight sized() const {
    static const int8_t somewhere = 0;
    KvWeight x{};
    if (!packed) return x;
    x.bits = bits, x.is_signed = is_signed, x.group = group;
    if (packed == kExponents) x.scale_type = KV_EXPONENTS;
    if (packed == kWithZero) x.zero = &somewhere;
    if (packed == kWithMinimum) x.minimum = &somewhere;
    if (has_table(packed)) x.table = &somewhere;
    return x;
  }
  // Sets the types of floats that the weight is packed with, by the types of all inputs.
  void set_types(KvWeight& x, const Types& inputs) const {
    if (packed && packed != kExponents) x.scale_type = kernel_type(inputs[first + 1]);
    if (packed == kWithMinimum) x.minimum_type = kernel_type(inputs[first + 2]);
  }
  // Sets the places of the weight's tensors, by the places of all inputs.
  void place(KvWeight& x, const void* const* inputs) const {
    x.data = inputs[first];
    if (packed) x.scale = inputs[first + 1];
    if (packed == kWithZero) x.zero = inputs[first + 2];
    if (packed == kWithMinimum) x.minimum = inputs[first + 2];
    if (has_table(packed)) x.table = static_cast<const int8_t*>(inputs[first + 2]);
  }
};

}  // namespace kv::tensorrt
