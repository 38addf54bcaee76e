// A node of Linear (docs/contract.md, section 3): a product with a weight as checkpoints hold it, and what joins it.
#pragma once

#include "../node/attributes.h"
#include "node.h"

namespace kv {

// Where an attribute names heads they are a dimension of their own before the tokens: [batch, heads, tokens, size]
// instead of [batch, tokens, heads x size]; 0 stands for the latter.
struct LinearNode {
  int type, input_heads, output_heads;
  bool bias, gate, residual;

  LinearNode(const Ort::ConstKernelInfo& info, int type) : type(type) {
    const Attributes node(info, "Linear");
    input_heads = integer_at_least(0, node, "input_heads"), output_heads = integer_at_least(0, node, "output_heads");
    bias = node.integer("bias") != 0, gate = node.integer("gate") != 0, residual = node.integer("residual") != 0;
    const size_t expected = 2 + bias + gate + residual;
    node.require(info.GetInputCount() == expected,
                 "there are " + std::to_string(info.GetInputCount()) + " inputs, not " + std::to_string(expected));
    const Shape input = declared_shape(info, 0), weight = declared_shape(info, 1);
    if (!input.empty() && !weight.empty()) check_shapes(input, weight);
  }

  void check_shapes(const Shape& input, const Shape& weight) const {
    const bool rank = input_heads    ? input.size() == 4 && fits(input, {-1, input_heads, -1, -1})
                      : output_heads ? input.size() == 3
                                     : !input.empty();
    const int64_t size = rank ? input.back() : -1, inputs = size < 0 || !input_heads ? size : size * input_heads;
    require(rank && weight.size() == 2 && (inputs < 0 || weight[1] < 0 || inputs == weight[1]) &&
                (!output_heads || weight[0] < 0 || weight[0] % output_heads == 0),
            "Linear: input " + text(input) + " does not fit a weight " + text(weight) + " with " +
                std::to_string(input_heads) + " input heads and " + std::to_string(output_heads) + " output heads");
  }

  KvLinear call(const Ort::KernelContext& context) const {
    const Ort::ConstValue input = context.GetInput(0), weight = context.GetInput(1);
    const Shape shape = input.GetTensorTypeAndShapeInfo().GetShape();
    const Shape sizes = weight.GetTensorTypeAndShapeInfo().GetShape();
    check_shapes(shape, sizes);
    Shape rows(shape.begin(), shape.end() - 1);  // what comes before the outputs
    if (input_heads) rows.erase(rows.begin() + 1);
    KvLinear call{};
    call.type = type, call.inputs = sizes[1], call.outputs = sizes[0], call.batch = 1;
    call.input_heads = input_heads ? input_heads : 1, call.output_heads = output_heads ? output_heads : 1;
    call.tokens = rows.empty() ? 1 : rows.back();
    for (size_t i = 0; i + 1 < rows.size(); ++i) call.batch *= rows[i];
    Shape plain = rows;
    plain.push_back(call.outputs);
    call.input = input.GetTensorRawData(), call.weight = weight.GetTensorRawData();
    size_t next = 2;
    if (bias) call.bias = kv::input<void>(context, next++, "Linear: bias", {call.outputs});
    if (gate) call.gate = kv::input<void>(context, next++, "Linear: gate", sizes);
    if (residual) call.residual = kv::input<void>(context, next++, "Linear: residual", plain);
    const Shape split{call.batch, call.output_heads, call.tokens, call.outputs / call.output_heads};
    call.output = output(context, 0, output_heads ? split : plain);
    return call;
  }
};

}  // namespace kv
