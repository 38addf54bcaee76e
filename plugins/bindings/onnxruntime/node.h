// Shared by the bindings to ONNX Runtime: reads attributes and tensors of a node, and throws errors that name the
// fault.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "../../abi/kvexport.h"
#include "../node/shapes.h"

namespace kv {

// Throws if the condition is false. message: a text, or a function that returns one, so that the checks of every step
// build no text.
template <class Message>
void require(bool condition, const Message& message) {
  if (condition) return;
  std::string text;
  if constexpr (std::is_invocable_v<const Message&>)
    text = message();
  else
    text = message;
  throw Ort::Exception("kvexport: " + text, ORT_INVALID_ARGUMENT);
}

// Throws if a kernel's call returned a problem instead of nullptr.
inline void require_success(const char* op, const char* problem) {
  require(!problem, [&] { return std::string(op) + ": " + problem; });
}

// Runs `run` and returns its status, since no exception may pass through ONNX Runtime.
template <class Run>
OrtStatusPtr status_of(Run run) {
  try {
    run();
  } catch (const std::exception& error) {
    return Ort::Status(error).release();
  }
  return nullptr;
}

// The attributes of a node. The error of one that is missing or has another type names it.
class Attributes {
 public:
  Attributes(const Ort::ConstKernelInfo& info, const char* op) : info_(info), op_(op) {}

  float number(const char* name) const {
    return read(name, "a float", [&] { return info_.GetAttribute<float>(name); });
  }
  int integer(const char* name) const {
    return narrowed(name, read(name, "an integer", [&] { return info_.GetAttribute<int64_t>(name); }));
  }
  std::string word(const char* name) const {
    return read(name, "a string", [&] { return info_.GetAttribute<std::string>(name); });
  }
  std::vector<float> numbers(const char* name) const {
    return read(name, "a list of floats", [&] { return info_.GetAttributes<float>(name); });
  }
  std::vector<int> integers(const char* name) const {
    std::vector<int> result;
    for (const int64_t x : read(name, "a list of integers", [&] { return info_.GetAttributes<int64_t>(name); }))
      result.push_back(narrowed(name, x));
    return result;
  }
  // Returns false only if there is no such attribute, true if it has another type.
  bool has(const char* name) const {
    try {
      info_.GetAttributes<float>(name);
    } catch (const Ort::Exception& error) {
      return strncmp(error.what(), "No attribute", 12) != 0;
    }
    return true;
  }
  const char* op() const { return op_; }
  void require(bool condition, const std::string& message) const {
    kv::require(condition, std::string(op_) + ": " + message);
  }

 private:
  template <class Read>
  auto read(const char* name, const char* type, Read read) const -> decltype(read()) {
    try {
      return read();
    } catch (const Ort::Exception& error) {
      require(false, std::string("the attribute ") + name + " should be " + type + ": " + error.what());
      throw;
    }
  }
  int narrowed(const char* name, int64_t x) const {
    require(x == static_cast<int>(x), std::string("the attribute ") + name + " is out of range: " + std::to_string(x));
    return static_cast<int>(x);
  }

  const Ort::ConstKernelInfo& info_;
  const char* op_;
};

// The types of a cache's keys and values and of the queries over it, in the numbers of the kernels and of ONNX Runtime.
// They differ if the cache is quantized.
struct CacheType {
  int type;
  ONNXTensorElementDataType element, value_element;
  int query_type;
  ONNXTensorElementDataType query_element;

  CacheType(int type, ONNXTensorElementDataType element) : CacheType(type, element, element, type, element) {}
  CacheType(int type, ONNXTensorElementDataType element, ONNXTensorElementDataType value_element, int query_type,
            ONNXTensorElementDataType query_element)
      : type(type),
        element(element),
        value_element(value_element),
        query_type(query_type),
        query_element(query_element) {}
};

inline bool is_quantized(int type) { return type == KV_INT8 || type == KV_INT4 || type == KV_K8V4; }

// Return how many numbers an element of the tensor of keys, or of values, contains: a byte contains two int4 numbers.
inline int64_t numbers_of_key(int type) { return type == KV_INT4 ? 2 : 1; }
inline int64_t numbers_of_value(int type) { return type == KV_INT4 || type == KV_K8V4 ? 2 : 1; }

// Returns the type of state tensor i: key, value, votes, score, position.
inline ONNXTensorElementDataType state_type(size_t i, const CacheType& cache) {
  if (i < 2) return i == 0 ? cache.element : cache.value_element;
  return i < 4 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
}

// Returns the type of tensor i after the state: the two scales of a quantized cache, then the ring of reference
// queries.
inline ONNXTensorElementDataType extra_type(size_t i, const CacheType& cache) {
  return i == (is_quantized(cache.type) ? 3 : 1) ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32
                                                 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
}
constexpr size_t kMostExtra = 4;

// Returns the declared shape of an input: -1 for a size that is not static, empty if nothing is known.
inline Shape declared_shape(const Ort::ConstKernelInfo& info, size_t input) {
  if (input >= info.GetInputCount()) return {};
  try {
    const Ort::TypeInfo type = info.GetInputTypeInfo(input);
    return type.GetONNXType() == ONNX_TYPE_TENSOR ? type.GetTensorTypeAndShapeInfo().GetShape() : Shape{};
  } catch (const Ort::Exception&) {
    return {};  // an omitted optional input has no type
  }
}

// Returns the shape [..., D] of the rows in a tensor of shape [..., D / in_element].
inline Shape shape_of_numbers(Shape shape, int64_t in_element) {
  if (!shape.empty() && shape.back() > 0) shape.back() *= in_element;
  return shape;
}

// Return whether the node has this input or output, instead of omitting it.
inline bool has_input(const Ort::ConstKernelInfo& info, size_t i) {
  try {
    return info.GetInputTypeInfo(i).GetONNXType() == ONNX_TYPE_TENSOR;
  } catch (const Ort::Exception&) {
    return false;
  }
}
inline bool has_output(const Ort::ConstKernelInfo& info, size_t i) {
  try {
    return info.GetOutputTypeInfo(i).GetONNXType() == ONNX_TYPE_TENSOR;
  } catch (const Ort::Exception&) {
    return false;
  }
}

// Throws if an input's declared shape contradicts `expected`, in which -1 is any size.
inline void check_declared(const Ort::ConstKernelInfo& info, const Attributes& node, size_t i, const std::string& name,
                           const Shape& expected) {
  const Shape shape = declared_shape(info, i);
  node.require(shape.empty() || fits(shape, expected), name + " is " + text(shape) + ", not " + text(expected));
}

// Returns the data of an input; throws if its shape is not `expected`.
template <class T>
const T* input(const Ort::KernelContext& context, size_t i, const char* name, const Shape& expected) {
  const Ort::ConstValue value = context.GetInput(i);
  const Shape shape = value.GetTensorTypeAndShapeInfo().GetShape();
  require(shape == expected, [&] { return std::string(name) + " is " + text(shape) + ", not " + text(expected); });
  return static_cast<const T*>(value.GetTensorRawData());
}

inline void* output(const Ort::KernelContext& context, size_t i, const Shape& shape) {
  return context.GetOutput(i, shape).GetTensorMutableRawData();
}

// The dimensions of a cache, and the state tensors of a node, from input or output number `first` on.
struct Cache {
  int64_t batch, slots, key_size, value_size, statistics;
  int type;

  Cache(const Ort::KernelContext& context, size_t first, int type) : type(type) {
    const Shape key = context.GetInput(first).GetTensorTypeAndShapeInfo().GetShape();
    const Shape value = context.GetInput(first + 1).GetTensorTypeAndShapeInfo().GetShape();
    const Shape score = context.GetInput(first + 3).GetTensorTypeAndShapeInfo().GetShape();
    require(key.size() == 3 && value.size() == 3 && score.size() == 3, "key, value and score have three dimensions");
    batch = key[0], slots = key[1], statistics = score[1];
    key_size = key[2] * numbers_of_key(type), value_size = value[2] * numbers_of_value(type);
  }

  Shape shape(size_t i) const {
    if (i == 0) return {batch, slots, key_size / numbers_of_key(type)};
    if (i == 1) return {batch, slots, value_size / numbers_of_value(type)};
    if (i == 3) return {batch, statistics, slots};
    return {batch, slots};
  }

  template <class Arguments>
  void sizes(Arguments& call) const {
    call.batch = static_cast<int>(batch), call.slots = static_cast<int>(slots);
    call.statistics = static_cast<int>(statistics);
    call.key_size = static_cast<int>(key_size);
    require((value_size == 0) == (call.value_prefix > 0), [&] {
      return "values of size " + std::to_string(value_size) + " are stored, and value_prefix is " +
             std::to_string(call.value_prefix);
    });
    call.value_size = call.value_prefix ? call.value_prefix : static_cast<int>(value_size);
  }

  KvState inputs(const Ort::KernelContext& context, size_t first) const {
    const auto at = [&](size_t i, const char* name) {
      return const_cast<void*>(input<void>(context, first + i, name, shape(i)));
    };
    return {at(0, "key"), at(1, "value"), static_cast<float*>(at(2, "votes")), static_cast<float*>(at(3, "score")),
            static_cast<int32_t*>(at(4, "position"))};
  }

  KvState outputs(const Ort::KernelContext& context, size_t first) const {
    const auto at = [&](size_t i) { return output(context, first + i, shape(i)); };
    return {at(0), at(1), static_cast<float*>(at(2)), static_cast<float*>(at(3)), static_cast<int32_t*>(at(4))};
  }

  // Sets the scales of a quantized cache: inputs `in`, `in` + 1 and outputs `out`, `out` + 1.
  template <class Arguments>
  void scales(const Ort::KernelContext& context, size_t in, size_t out, Arguments& call) const {
    const auto past = [&](size_t i, const char* name) {
      return const_cast<float*>(input<float>(context, in + i, name, shape(2)));
    };
    const auto present = [&](size_t i) { return static_cast<float*>(output(context, out + i, shape(2))); };
    call.past_scales = {past(0, "key_scale"), past(1, "value_scale")};
    call.present_scales = {present(0), present(1)};
  }

  // Returns the ring of reference queries, whose tensors follow the scales of a quantized cache. in, out: the first
  // input and output after the state.
  KvRing ring(const Ort::KernelContext& context, size_t in, size_t out, int heads, int rows) const {
    if (is_quantized(type)) in += 2, out += 2;
    const Shape query{batch, heads, rows, key_size}, seen{batch, heads, rows};
    KvRing ring{};
    ring.rows = rows;
    ring.past = {const_cast<float*>(input<float>(context, in, "query", query)),
                 const_cast<int32_t*>(input<int32_t>(context, in + 1, "query_seen", seen))};
    ring.present = {static_cast<float*>(output(context, out, query)),
                    static_cast<int32_t*>(output(context, out + 1, seen))};
    return ring;
  }
};

// Throws unless the node has scales exactly if the cache is quantized, and the tensors of a ring of reference queries
// exactly if `ring`.
inline void check_extra(const Ort::ConstKernelInfo& info, const Attributes& node, int type, bool ring, size_t in,
                        size_t out) {
  const bool quantized = is_quantized(type);
  const size_t count = 2 * quantized + 2 * ring;
  for (size_t i = 0; i < kMostExtra; ++i) {
    const bool expected = i < count;
    const std::string problem = !expected ? "only a quantized cache has scales, and only a fit a ring of queries"
                                : quantized && i < 2 ? "a quantized cache has key_scale and value_scale"
                                                     : "a method that fits has query and query_seen";
    node.require((in + i < info.GetInputCount() && has_input(info, in + i)) == expected &&
                     (out + i < info.GetOutputCount() && has_output(info, out + i)) == expected,
                 problem);
  }
}

}  // namespace kv
