// A weight of Linear or Experts, packed or not: the inputs of a node, and the memory from which a session reads them.
#pragma once

#include <array>

#include "../node/attributes.h"
#include "../node/packed.h"
#include "huge_pages.h"
#include "node.h"
#include "threads.h"

namespace kv {

inline ONNXTensorElementDataType declared_type(const Ort::ConstKernelInfo& info, size_t input) {
  return info.GetInputTypeInfo(input).GetTensorTypeAndShapeInfo().GetElementType();
}

inline size_t bytes_of(ONNXTensorElementDataType type, size_t count) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT4:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT4:
      return (count + 1) / 2;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8:
      return count;
    default:
      return count * (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? 4 : 2);
  }
}

constexpr int64_t kMostSlices = 16;  // of a matrix that threads repack

// The functions of cpu/kvexport_cpu.h by which a provider repacks packed weights that no run changes into panels.
struct PanelFunctions {
  const char* (*why_not)(const KvWeight* weight, int64_t inputs);
  size_t (*bytes)(const KvWeight* weight, int64_t outputs, int64_t inputs);
  void (*repack)(const KvWeight* weight, int64_t outputs, int64_t inputs, void* panels);
};

// A tensor that every step reads. If no run changes it and it is in the process's memory, it is copied, when the
// session is created, to memory that is read fastest.
struct Streamed {
  size_t input = 0;  // the number of the input
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  Shape shape;  // empty if it is only known in a run
  std::shared_ptr<const void> copy;
  const void* initializer = nullptr;  // data in the process's memory, only while the session is created
  size_t bytes = 0;                   // bytes of the initializer

  Streamed() = default;
  Streamed(const Ort::ConstKernelInfo& info, size_t input) : input(input), type(declared_type(info, input)) {
    int constant = 0;
    const Ort::ConstValue value = info.GetTensorConstantInput(input, &constant);
    if (!constant) return;
    const Ort::TensorTypeAndShapeInfo value_info = value.GetTensorTypeAndShapeInfo();
    shape = value_info.GetShape();
    initializer = value.GetTensorRawData(), bytes = bytes_of(type, value_info.GetElementCount());
  }

  void keep() {
    if (initializer) copy = in_huge_pages(initializer, bytes);
    initializer = nullptr;
  }
  Shape shape_in(const Ort::KernelContext& context) const {
    return shape.empty() ? context.GetInput(input).GetTensorTypeAndShapeInfo().GetShape() : shape;
  }
  const void* data(const Ort::KernelContext& context) const {
    return copy ? copy.get() : context.GetInput(input).GetTensorRawData();
  }
};

// A weight [outputs, inputs], or of Experts [experts, outputs, inputs]. If it is packed, its scale or exponent follows
// it, and then its zero point, minimum or table, super-scales and upper bits, if it has them.
struct Weight {
  int packed = kNotPacked, group = 0;
  int parts = 0;  // the matrices [outputs / parts, inputs] of each expert; 0: the weight is one matrix
  std::string op;
  Streamed integers, scale, offset, super_scale, super_minimum, high;
  std::array<int8_t, 16> table{};      // the numbers at the indices of a weight with a table
  std::shared_ptr<const void> panels;  // every part of a packed weight that is read in panels

  Weight() = default;
  Weight(const Ort::ConstKernelInfo& info, size_t input, const Attributes& node, int packed, int group,
         const PanelFunctions& panel_functions, int parts = 0)
      : packed(packed), group(group), parts(parts), op(node.op()), integers(info, input) {
    read_parts(info, input, node);
    if (packed) repack(panel_functions);
    for (Streamed* part : streamed())
      if (!panels) part->keep();
  }

  void read_parts(const Ort::ConstKernelInfo& info, size_t input, const Attributes& node) {
    if (!packed) return;
    const int kind = without_flags(packed);
    if (packed & kTwoLow) {
      node.require(integers.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 && !integers.shape.empty(),
                   "input " + std::to_string(input) + " is a weight of 2 or 3 bits, and not uint8, or no constant");
      integers.shape.back() *= 4;
    }
    node.require(low_bits() != 0,
                 "input " + std::to_string(input) + " is a packed weight, and of no type of 4 or 8 bits");
    node.require(low_bits() == 8 || group % 2 == 0, "a group of 4-bit weights is odd: " + std::to_string(group));
    scale = Streamed(info, input + 1);
    if (kind == kExponents)
      node.require(scale.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8,
                   "input " + std::to_string(input + 1) + " is an exponent, and not uint8");
    else
      require_scale(node, scale);
    if (has_offset()) offset = Streamed(info, input + 2);
    if (kind == kWithMinimum) require_scale(node, offset);
    if (kind == kWithZero)
      node.require(offset.type == integers.type,
                   "input " + std::to_string(offset.input) + " is a zero point, and of another type than its weight");
    if (has_table()) read_table(info, input, node);
    read_planes(info, input + count(), node);
    const Shape weight = declared(info);
    for (const Shape& groups : {declared_shape(info, input + 1), declared_offset(info)})
      if (!weight.empty() && !groups.empty()) require_groups(weight, groups);
  }

  // Returns the shape of the weight's numbers as far as the node declares it.
  Shape declared(const Ort::ConstKernelInfo& info) const {
    return integers.shape.empty() ? declared_shape(info, integers.input) : integers.shape;
  }

  // Reads the super-scales and the upper bits, which are the last of the inputs before `end`.
  void read_planes(const Ort::ConstKernelInfo& info, size_t end, const Attributes& node) {
    const auto read = [&](size_t input, ONNXTensorElementDataType type, int64_t inputs_each) {
      Streamed part(info, input);
      const std::string name = "input " + std::to_string(input) + ", super-scales or upper bits of a weight, ";
      node.require(integers.initializer && part.initializer, name + "is no constant, or its weight is none");
      Shape expected = integers.shape;
      expected.back() /= inputs_each;
      node.require(part.type == type && part.shape == expected,
                   name + "is of another type, or " + text(part.shape) + " and not " + text(expected));
      return part;
    };
    if (const int bits = high_bits(packed)) {
      node.require(packed & kTwoLow || integers.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT4,
                   "input " + std::to_string(integers.input) + " is a weight with upper bits, and not uint4");
      high = read(--end, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, 8 / bits);
    }
    if (!(packed & kSupers)) return;
    const auto super = [&] { return read(--end, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, KV_SUPER); };
    if (without_flags(packed) == kWithMinimum) super_minimum = super();
    super_scale = super();
  }

  void read_table(const Ort::ConstKernelInfo& info, size_t input, const Attributes& node) {
    const std::string name = "input " + std::to_string(input + 2) + ", the table of a weight, ";
    node.require(integers.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT4,
                 "input " + std::to_string(input) + " is a weight with a table, and not uint4");
    int constant = 0;
    const Ort::ConstValue value = info.GetTensorConstantInput(input + 2, &constant);
    node.require(constant != 0, name + "is no constant");
    const Ort::TensorTypeAndShapeInfo shape = value.GetTensorTypeAndShapeInfo();
    node.require(
        shape.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 && shape.GetElementCount() == table.size(),
        name + "has not 16 numbers of int8");
    memcpy(table.data(), value.GetTensorRawData(), table.size());
  }

  // Repacks the weight into panels if every part is an initializer in the process's memory.
  void repack(const PanelFunctions& functions) {
    if (!integers.initializer || !scale.initializer || (has_offset() && !offset.initializer)) return;
    require_groups(integers.shape, scale.shape);
    if (has_offset()) require_groups(integers.shape, offset.shape);
    const int64_t count = parts ? integers.shape[0] * parts : 1, inputs = integers.shape.back();
    const int64_t outputs = parts ? integers.shape[1] / parts : integers.shape[0];
    const KvWeight at_rest = view([](const Streamed& part) { return part.initializer; });
    if (count < 1 || outputs < 1 || inputs < 1 || functions.why_not(&at_rest, inputs)) return;
    if (parts && (integers.shape[1] % parts || !kv_has_matrices(&at_rest, outputs, inputs))) return;
    const size_t one = functions.bytes(&at_rest, outputs, inputs), bytes = static_cast<size_t>(count) * one;
    std::shared_ptr<void> memory = huge_memory(bytes);
    if (!memory) memory.reset(std::aligned_alloc(64, (bytes + 63) / 64 * 64), std::free);
    require(memory != nullptr, [&] {
      return op + ": there is no memory for a packed weight of " + std::to_string(bytes) +
             " bytes, which is laid out for this processor when it is loaded; free memory, or load a smaller model";
    });
    // A matrix whose halves are whole panels is two matrices; threads repack the smallest of them.
    int64_t slices = 1;
    const auto halves = [&](int64_t rows) {
      const int64_t half = rows / 2;  // of whole panels if one row more takes more memory
      return rows % 2 == 0 && functions.bytes(&at_rest, half + 1, inputs) > functions.bytes(&at_rest, half, inputs);
    };
    while (slices < kMostSlices && halves(outputs / slices)) slices *= 2;
    const int64_t rows = outputs / slices;
    const size_t slice = one / static_cast<size_t>(slices);
    in_threads(count * slices, [&](int64_t i) {
      const KvWeight matrix = kv_matrix_of(&at_rest, rows, inputs, i);
      functions.repack(&matrix, rows, inputs, static_cast<char*>(memory.get()) + static_cast<size_t>(i) * slice);
    });
    for (Streamed* part : streamed())
      if (part->initializer) give_up(part->initializer, part->bytes);
    panels = memory;
  }

  std::array<Streamed*, 6> streamed() { return {&integers, &scale, &offset, &super_scale, &super_minimum, &high}; }
  bool has_offset() const { return without_flags(packed) == kWithZero || without_flags(packed) == kWithMinimum; }
  bool has_table() const { return kv::has_table(packed); }
  size_t count() const { return 1 + inputs_after(packed); }
  // Returns the bits of a number that are in the weight itself.
  int low_bits() const {
    if (packed & kTwoLow) return 2;
    switch (integers.type) {
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT4:
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT4:
        return 4;
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8:
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8:
        return 8;
      default:
        return 0;
    }
  }

  KvWeight call(const Ort::KernelContext& context, const Shape& shape) const {
    if (panels) {
      KvWeight call = view([&](const Streamed&) { return panels.get(); });
      call.layout = KV_PANELS;
      return call;
    }
    if (!packed) {
      KvWeight call{};
      call.data = integers.data(context);
      return call;
    }
    require_groups(shape, scale.shape_in(context));
    if (has_offset()) require_groups(shape, offset.shape_in(context));
    return view([&](const Streamed& part) { return part.data(context); });
  }

 private:
  // Returns this node's packed weight with each part at the address that at(part) returns.
  template <class At>
  KvWeight view(const At& at) const {
    KvWeight call{};
    const int kind = without_flags(packed);
    call.data = at(integers), call.bits = low_bits(), call.group = group;
    call.is_signed =
        integers.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT4 || integers.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
    call.scale_type = kind == kExponents ? KV_EXPONENTS : kernel_type(scale), call.scale = at(scale);
    if (has_table()) call.table = table.data();
    if (kind == kWithZero) call.zero = at(offset);
    if (kind == kWithMinimum) call.minimum_type = kernel_type(offset), call.minimum = at(offset);
    if (packed & kSupers) call.super_scale = at(super_scale);
    if (packed & kSupers && kind == kWithMinimum) call.super_minimum = at(super_minimum);
    if (high_bits(packed)) {  // without a minimum the integers are signed
      call.high = at(high), call.is_signed = kind != kWithMinimum;
      call.bits += high_bits(packed);
    }
    return call;
  }
  static int kernel_type(const Streamed& tensor) {
    if (tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8) return KV_SUB_SCALES;
    if (tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT4) return KV_SUB_SCALES_4;
    if (tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8) return KV_SUB_SCALES_6;
    return tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? KV_FLOAT32 : KV_FLOAT16;
  }
  void require_scale(const Attributes& node, const Streamed& tensor) const {
    const std::string name = "input " + std::to_string(tensor.input) + " is a scale or a minimum, and ";
    if (packed & kTwoLow)
      node.require(tensor.type ==
                       (high_bits(packed) ? ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 : ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT4),
                   name + "not uint4 (2 bits) or uint8 (3 bits)");
    else if (packed & kSupers)
      node.require(tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, name + "not int8, with a super-scale");
    else
      node.require(
          tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT || tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
          name + "neither float32 nor float16");
  }
  Shape declared_offset(const Ort::ConstKernelInfo& info) const {
    return has_offset() ? declared_shape(info, offset.input) : Shape{};
  }
  // Throws if `groups`, the shape of a scale, zero point or minimum, is not [outputs, inputs / group] of the weight.
  void require_groups(const Shape& weight, const Shape& groups) const {
    Shape expected = weight;
    const bool divides = weight.size() == (parts ? 3 : 2) && (weight.back() < 0 || weight.back() % group == 0);
    if (divides && weight.back() >= 0) expected.back() /= group;
    if (packed & kTwoLow && high_bits(packed)) expected.back() = expected.back() * 6 / 8;  // bytes of scales of 6 bits
    require(divides && fits(groups, expected), [&] {
      return op + ": a weight " + text(weight) + " in groups of " + std::to_string(group) +
             " does not fit a scale, zero point or minimum " + text(groups);
    });
  }
};

}  // namespace kv
