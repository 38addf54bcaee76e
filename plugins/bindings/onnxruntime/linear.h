// A node of Linear (docs/contract.md, section 3): products of one input with weights as checkpoints hold them, the norm
// before and the epilogue after.
#pragma once

#include "../node/attributes.h"
#include "huge_pages.h"
#include "node.h"

namespace kv {

// A weight that does not change is taken as it is when the session is made, where it is read fastest.
struct Weight {
  size_t input = 0;  // its number
  Shape shape;       // empty where it is known only when it is run
  std::shared_ptr<const void> copy;

  Weight() = default;
  Weight(const Ort::ConstKernelInfo& info, size_t input) : input(input) {
    int constant = 0;
    const Ort::ConstValue value = info.GetTensorConstantInput(input, &constant);
    if (!constant) return;
    const Ort::TensorTypeAndShapeInfo type = value.GetTensorTypeAndShapeInfo();
    shape = type.GetShape();
    const size_t element = type.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? 4 : 2;
    copy = in_huge_pages(value.GetTensorRawData(), type.GetElementCount() * element);
  }

  Shape shape_in(const Ort::KernelContext& context) const {
    return shape.empty() ? context.GetInput(input).GetTensorTypeAndShapeInfo().GetShape() : shape;
  }
  const void* data(const Ort::KernelContext& context) const {
    return copy ? copy.get() : context.GetInput(input).GetTensorRawData();
  }
};

// Where an attribute names heads they are a dimension of their own before the tokens: [batch, heads, tokens, size]
// instead of [batch, tokens, heads x size]; 0 stands for the latter. What is a list has an entry for each product.
struct LinearNode {
  int type, input_heads;
  bool norm, gate, residual;
  float epsilon;
  std::vector<int> output_heads, bias, rotated;
  std::vector<Weight> weights;
  Weight gate_weight;

  LinearNode(const Ort::ConstKernelInfo& info, int type) : type(type) {
    const Attributes node(info, "Linear");
    input_heads = integer_at_least(0, node, "input_heads"), output_heads = node.integers("output_heads");
    bias = node.integers("bias"), rotated = node.integers("rotated");
    norm = node.integer("norm") != 0, epsilon = node.number("epsilon");
    gate = node.integer("gate") != 0, residual = node.integer("residual") != 0;
    const size_t count = output_heads.size();
    node.require(count >= 1 && count <= KV_MAX_PRODUCTS && bias.size() == count && rotated.size() == count,
                 "output_heads, bias and rotated have an entry for each of one to three products, not " +
                     std::to_string(count) + ", " + std::to_string(bias.size()) + " and " +
                     std::to_string(rotated.size()));
    for (size_t i = 0; i < count; ++i) {
      node.require(output_heads[i] >= 0, "output_heads is negative");
      node.require((bias[i] | rotated[i] | 1) == 1, "bias and rotated are 0 or 1");
      node.require(!rotated[i] || output_heads[i] > 0, "an output without heads is rotated");
    }
    node.require(count == 1 || !(gate || residual), "a gate or a residual goes with one product, not several");
    size_t expected = 1 + norm + count + gate + residual + 2 * turns();
    for (const int one : bias) expected += one != 0;
    node.require(info.GetInputCount() == expected,
                 "there are " + std::to_string(info.GetInputCount()) + " inputs, not " + std::to_string(expected));
    node.require(info.GetOutputCount() == count,
                 "there are " + std::to_string(info.GetOutputCount()) + " outputs, not " + std::to_string(count));
    for (size_t i = 0; i < expected; ++i)
      node.require(has_input(info, i), "input " + std::to_string(i) + " is left out");
    for (size_t i = 0; i < count; ++i)
      node.require(has_output(info, i), "output " + std::to_string(i) + " is left out");
    size_t next = 1 + norm;
    for (const int one : bias) weights.emplace_back(info, next), next += 1 + (one != 0);
    if (gate) gate_weight = Weight(info, next);
    const Shape input = declared_shape(info, 0);
    for (size_t i = 0; i < count; ++i) {
      const Shape weight = declared_shape(info, weights[i].input);
      if (!input.empty() && !weight.empty()) check_shapes(input, weight, output_heads[i]);
    }
  }

  bool turns() const {
    for (const int one : rotated)
      if (one) return true;
    return false;
  }

  void check_shapes(const Shape& input, const Shape& weight, int heads) const {
    const bool rank = input_heads        ? input.size() == 4 && fits(input, {-1, input_heads, -1, -1})
                      : heads || turns() ? input.size() == 3
                                         : !input.empty();
    const int64_t size = rank ? input.back() : -1, inputs = size < 0 || !input_heads ? size : size * input_heads;
    require(rank && weight.size() == 2 && (inputs < 0 || weight[1] < 0 || inputs == weight[1]) &&
                (!heads || weight[0] < 0 || weight[0] % heads == 0),
            [&] {
              return "Linear: input " + text(input) + " does not fit a weight " + text(weight) + " with " +
                     std::to_string(input_heads) + " input heads and " + std::to_string(heads) + " output heads";
            });
  }

  KvLinear call(const Ort::KernelContext& context) const {
    const Ort::ConstValue input = context.GetInput(0);
    const Shape shape = input.GetTensorTypeAndShapeInfo().GetShape();
    Shape rows(shape.begin(), shape.empty() ? shape.end() : shape.end() - 1);  // what comes before the outputs
    if (input_heads && rows.size() > 1) rows.erase(rows.begin() + 1);
    KvLinear call{};
    call.type = type, call.input_heads = input_heads ? input_heads : 1, call.batch = 1;
    call.tokens = rows.empty() ? 1 : rows.back();
    for (size_t i = 0; i + 1 < rows.size(); ++i) call.batch *= rows[i];
    call.input = input.GetTensorRawData(), call.epsilon = epsilon;
    call.count = static_cast<int>(weights.size());
    for (int i = 0; i < call.count; ++i) product(context, shape, rows, i, &call);
    if (norm) call.norm = kv::input<void>(context, 1, "Linear: norm", {call.inputs});
    const int64_t outputs = call.products[0].outputs;
    size_t next = weights.back().input + 1 + (bias.back() != 0);
    if (gate) {
      const Shape found = gate_weight.shape_in(context), wanted{outputs, call.inputs};
      require(found == wanted, [&] { return "Linear: gate is " + text(found) + ", not " + text(wanted); });
      call.gate = gate_weight.data(context), ++next;
    }
    if (residual) {
      Shape plain = rows;
      plain.push_back(outputs);
      call.residual = kv::input<void>(context, next++, "Linear: residual", plain);
    }
    if (turns()) {
      const Shape angles = context.GetInput(next).GetTensorTypeAndShapeInfo().GetShape();
      call.planes = angles.empty() ? 0 : angles.back();
      const Shape wanted{call.batch, call.tokens, call.planes};
      call.cosine = kv::input<void>(context, next, "Linear: cosine", wanted);
      call.sine = kv::input<void>(context, next + 1, "Linear: sine", wanted);
    }
    return call;
  }

  void product(const Ort::KernelContext& context, const Shape& input, const Shape& rows, int i, KvLinear* call) const {
    const Weight& weight = weights[static_cast<size_t>(i)];
    const int heads = output_heads[static_cast<size_t>(i)];
    const Shape sizes = weight.shape_in(context);
    check_shapes(input, sizes, heads);
    KvProduct& p = call->products[i];
    p.outputs = sizes[0], p.heads = heads ? heads : 1, p.rotated = rotated[static_cast<size_t>(i)];
    require(i == 0 || call->inputs == sizes[1], "Linear: its weights have rows of different sizes");
    call->inputs = sizes[1], p.weight = weight.data(context);
    if (bias[static_cast<size_t>(i)]) p.bias = kv::input<void>(context, weight.input + 1, "Linear: bias", {p.outputs});
    Shape made = rows;
    made.push_back(p.outputs);
    if (heads) made = {call->batch, heads, call->tokens, p.outputs / heads};
    p.output = output(context, static_cast<size_t>(i), made);
  }
};

}  // namespace kv
