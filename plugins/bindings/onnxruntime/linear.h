// A node of Linear or AdaptedLinear (docs/reference/contract.md, section 3): products of one input with weights in the
// layout of checkpoints, the norm before them and the epilogue after them; AdaptedLinear adds LoRA adapters.
#pragma once

#include "../../cpu/linear/adapters.h"
#include "../node/linear.h"
#include "weight.h"

namespace kv {

// Only AdaptedLinear has `adapted`, an entry for each weight.
struct LinearNode : LinearAttributes {
  int type;
  std::vector<int> adapted;
  std::vector<Weight> weights;
  Weight gate_weight;
  std::vector<size_t> adapter_inputs;  // for each weight, the input `first`, which `second` follows; 0 without adapters
  size_t last_inputs = 0;              // the first of the inputs residual, cosine and sine

  LinearNode(const Ort::ConstKernelInfo& info, int type, const PanelFunctions& panels, bool takes_adapters = false)
      : LinearAttributes(read_linear(Attributes(info, takes_adapters ? "AdaptedLinear" : "Linear"))), type(type) {
    const Attributes node(info, takes_adapters ? "AdaptedLinear" : "Linear");
    const size_t count = products();
    if (takes_adapters) read_adapted(node, count + gate);
    size_t expected = 1 + norm + takes_adapters + count + gate + residual + 2 * is_rotated();
    for (const int one : bias) expected += one != 0;
    for (const int one : adapted) expected += one ? 2 : 0;
    for (const int one : packed) expected += inputs_after(one);
    node.require(info.GetInputCount() == expected,
                 "there are " + std::to_string(info.GetInputCount()) + " inputs, not " + std::to_string(expected));
    node.require(info.GetOutputCount() == count,
                 "there are " + std::to_string(info.GetOutputCount()) + " outputs, not " + std::to_string(count));
    for (size_t i = 0; i < expected; ++i)
      node.require(has_input(info, i), "input " + std::to_string(i) + " is left out");
    for (size_t i = 0; i < count; ++i)
      node.require(has_output(info, i), "output " + std::to_string(i) + " is left out");
    const auto plain = [&](size_t i) {
      node.require(declared_type(info, i) == element(),
                   "input " + std::to_string(i) + " is of another type than input 0");
    };
    const auto weight = [&](size_t next, size_t i) {
      if (!packed[i]) plain(next);
      return Weight(info, next, node, packed[i], group[i], panels);
    };
    if (norm) plain(1);
    size_t next = 1 + norm;
    if (takes_adapters) plain(next++);
    const auto adapters = [&](size_t i) {
      const bool takes = takes_adapters && adapted[i];
      adapter_inputs.push_back(takes ? next : 0);
      for (int k = 0; takes && k < 2; ++k) plain(next++);
    };
    for (size_t i = 0; i < count; ++i) {
      weights.push_back(weight(next, i)), next += weights[i].count();
      if (bias[i]) plain(next++);
      adapters(i);
    }
    if (gate) gate_weight = weight(next, count), next += gate_weight.count(), adapters(count);
    last_inputs = next;
    while (next < expected) plain(next++);
    const Shape input = declared_shape(info, 0);
    for (size_t i = 0; i < count; ++i) {
      const Shape weight = weights[i].declared(info);
      if (!input.empty() && !weight.empty()) check_shapes(input, weight, output_heads[i]);
    }
  }

  void read_adapted(const Attributes& node, size_t count) {
    adapted = node.integers("adapted");
    node.require(adapted.size() == count, "adapted has an entry for each of " + std::to_string(count) +
                                              " weights, not " + std::to_string(adapted.size()));
    int any = 0;
    for (const int one : adapted) any |= one;
    node.require(any == 1, "adapted is 0 or 1, and 1 of at least one weight");
  }

  ONNXTensorElementDataType element() const {
    return type == KV_FLOAT32 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
  }

  void check_shapes(const Shape& input, const Shape& weight, int heads) const {
    const bool rank = input_heads             ? input.size() == 4 && fits(input, {-1, input_heads, -1, -1})
                      : heads || is_rotated() ? input.size() == 3
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
    Shape rows(shape.begin(), shape.empty() ? shape.end() : shape.end() - 1);  // the dimensions before the outputs
    if (input_heads && rows.size() > 1) rows.erase(rows.begin() + 1);
    KvLinear call{};
    call.type = type, call.input_heads = input_heads ? input_heads : 1, call.batch = 1;
    call.tokens = rows.empty() ? 1 : rows.back();
    for (size_t i = 0; i + 1 < rows.size(); ++i) call.batch *= rows[i];
    call.input = input.GetTensorRawData(), call.epsilon = epsilon, call.float_input = float_input;
    call.count = static_cast<int>(weights.size());
    for (int i = 0; i < call.count; ++i) product(context, shape, rows, i, &call);
    if (norm) call.norm = kv::input<void>(context, 1, "Linear: norm", {call.inputs});
    const int64_t outputs = call.products[0].outputs;
    size_t next = last_inputs;
    if (gate) {
      const Shape shape = gate_weight.integers.shape_in(context), expected{outputs, call.inputs};
      require(shape == expected, [&] { return "Linear: gate is " + text(shape) + ", not " + text(expected); });
      call.gate = gate_weight.call(context, shape);
    }
    if (residual) {
      Shape plain = rows;
      plain.push_back(outputs);
      call.residual = kv::input<void>(context, next++, "Linear: residual", plain);
    }
    if (is_rotated()) {
      const Shape angles = context.GetInput(next).GetTensorTypeAndShapeInfo().GetShape();
      call.planes = angles.empty() ? 0 : angles.back();
      const Shape expected{call.batch, call.tokens, call.planes};
      call.cosine = kv::input<void>(context, next, "Linear: cosine", expected);
      call.sine = kv::input<void>(context, next + 1, "Linear: sine", expected);
    }
    return call;
  }

  // Returns the adapters of a call of AdaptedLinear.
  KvAdapters adapters(const Ort::KernelContext& context, const KvLinear& call) const {
    const size_t mask = 1 + norm;
    const Shape shape = context.GetInput(mask).GetTensorTypeAndShapeInfo().GetShape();
    KvAdapters adapters{};
    adapters.rows = shape.empty() ? 0 : shape.back();
    adapters.mask = kv::input<void>(context, mask, "AdaptedLinear: adapter_rows", {call.batch, 1, adapters.rows});
    for (size_t i = 0; i < adapter_inputs.size(); ++i) {
      const size_t first = adapter_inputs[i];
      if (!first) continue;
      const int64_t outputs = call.products[i < weights.size() ? i : 0].outputs;
      adapters.first[i] = kv::input<void>(context, first, "AdaptedLinear: first", {adapters.rows, call.inputs});
      adapters.second[i] = kv::input<void>(context, first + 1, "AdaptedLinear: second", {adapters.rows, outputs});
    }
    return adapters;
  }

  void product(const Ort::KernelContext& context, const Shape& input, const Shape& rows, int i, KvLinear* call) const {
    const Weight& weight = weights[static_cast<size_t>(i)];
    const int heads = output_heads[static_cast<size_t>(i)];
    const Shape sizes = weight.integers.shape_in(context);
    check_shapes(input, sizes, heads);
    KvProduct& p = call->products[i];
    p.outputs = sizes[0], p.heads = heads ? heads : 1, p.rotated = rotated[static_cast<size_t>(i)];
    require(i == 0 || call->inputs == sizes[1], "Linear: its weights have rows of different sizes");
    call->inputs = sizes[1], p.weight = weight.call(context, sizes);
    if (bias[static_cast<size_t>(i)])
      p.bias = kv::input<void>(context, weight.integers.input + weight.count(), "Linear: bias", {p.outputs});
    Shape shape = rows;
    shape.push_back(p.outputs);
    if (heads) shape = {call->batch, heads, call->tokens, p.outputs / heads};
    p.output = output(context, static_cast<size_t>(i), shape);
  }
};

}  // namespace kv
