// The types, sizes and fields of plugins.
#pragma once

#include <NvInferRuntime.h>

#include <climits>
#include <string>
#include <vector>

#include "../../abi/kvexport.h"
#include "../node/shapes.h"
#include "fields.h"

namespace kv::tensorrt {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::IExprBuilder;
using Types = std::vector<DataType>;

inline const Types kFloatTypes{DataType::kFLOAT, DataType::kHALF};

// Returns the kernels' type of a tensor of floats; -1 if they do not support it.
inline int kernel_type(DataType type) {
  if (type == DataType::kFLOAT) return KV_FLOAT32;
  return type == DataType::kHALF ? KV_FLOAT16 : -1;
}

// Returns a size of an input, -1 if it is not known. Ranks are checked later.
inline int size_of(const std::vector<Shape>& inputs, size_t i, size_t d) {
  const int64_t x = i < inputs.size() && d < inputs[i].size() ? inputs[i][d] : -1;
  if (x < -1 || x > INT_MAX) throw Refusal("a size is out of range: " + std::to_string(x));
  return static_cast<int>(x);
}

// Returns the product of sizes of at most INT_MAX, -1 if one of them is not known.
inline int64_t product_of(const Shape& sizes) {
  __int128 product = 1;
  for (const int64_t size : sizes) {
    if (size < 0) return -1;
    product *= size;
    if (product > INT64_MAX) throw Refusal("a tensor has more than 2^63 numbers");
  }
  return static_cast<int64_t>(product);
}

// Returns an operator's attributes as the fields of a plugin. TensorRT's parser only passes attributes of these names.
template <size_t N>
std::vector<PluginField> fields_of(const AttributeName (&attributes)[N]) {
  std::vector<PluginField> fields;
  for (const AttributeName& one : attributes) {
    const bool whole = one.kind == kInt || one.kind == kInts, list = one.kind == kFloats || one.kind == kInts;
    const PluginFieldType type = one.kind == kWord ? PluginFieldType::kCHAR
                                 : whole           ? PluginFieldType::kINT32
                                                   : PluginFieldType::kFLOAT32;
    fields.push_back({one.name, nullptr, type, list || one.kind == kWord ? 0 : 1});
  }
  return fields;
}

}  // namespace kv::tensorrt
