// A node of Experts (docs/reference/contract.md, section 3): the experts that a router chose for each token.
#pragma once

#include "../node/experts.h"
#include "weight.h"

namespace kv {

struct ExpertsNode : ExpertsAttributes {
  int type, weights_type = KV_FLOAT32;
  Weight first, down;

  ExpertsNode(const Ort::ConstKernelInfo& info, int type, const PanelFunctions& panels)
      : ExpertsAttributes(read_experts(Attributes(info, "Experts"))), type(type) {
    const Attributes node(info, "Experts");
    const size_t expected = 5 + 2 * bias + inputs_after(packed[0]) + inputs_after(packed[1]);
    node.require(info.GetInputCount() == expected,
                 "there are " + std::to_string(info.GetInputCount()) + " inputs, not " + std::to_string(expected));
    for (size_t i = 0; i < expected; ++i)
      node.require(has_input(info, i), "input " + std::to_string(i) + " is left out");
    const auto factors = declared_type(info, 2);
    node.require(factors == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT || factors == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
                 "weights are neither float32 nor float16");
    weights_type = factors == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? KV_FLOAT32 : KV_FLOAT16;
    const auto plain = [&](size_t i) {
      node.require(declared_type(info, i) == declared_type(info, 0),
                   "input " + std::to_string(i) + " is of another type than input 0");
    };
    const auto read = [&](size_t next, size_t i) {
      if (!packed[i]) plain(next);
      Weight weight(info, next, node, packed[i], group[i], panels, i == 0 ? 1 + gate : 1);
      if (bias) plain(next + weight.count());
      return weight;
    };
    first = read(3, 0);
    down = read(3 + first.count() + bias, 1);
    const Shape one = first.declared(info), other = down.declared(info);
    if (!one.empty() && !other.empty()) check_shapes(one, other);
  }

  // Throws if the weights [experts, inner or 2 inner, hidden] and [experts, hidden, inner] do not fit each other.
  void check_shapes(const Shape& one, const Shape& other) const {
    const int64_t rows = one.size() == 3 ? one[1] : -1, parts = 1 + gate;
    require(one.size() == 3 && (rows < 0 || rows % parts == 0) &&
                fits(other, {one[0], one[2], rows < 0 ? -1 : rows / parts}),
            [&] { return "Experts: first " + text(one) + " does not fit down " + text(other); });
  }

  KvExperts call(const Ort::KernelContext& context) const {
    const Shape rows = context.GetInput(0).GetTensorTypeAndShapeInfo().GetShape();
    const Shape chosen = context.GetInput(1).GetTensorTypeAndShapeInfo().GetShape();
    const Shape one = first.integers.shape_in(context), other = down.integers.shape_in(context);
    check_shapes(one, other);
    require(rows.size() == 2 && rows[1] == one[2] && chosen.size() == 2 && chosen[0] == rows[0], [&] {
      return "Experts: input " + text(rows) + " and indices " + text(chosen) + " do not fit first " + text(one);
    });
    KvExperts call{};
    call.type = type, call.weights_type = weights_type, call.float_input = float_input;
    call.activation = activation, call.gate = gate, call.slope = slope, call.limit = limit, call.up_offset = up_offset;
    call.tokens = rows[0], call.hidden = rows[1], call.inner = other[2], call.experts = one[0];
    call.chosen = chosen[1];
    call.input = context.GetInput(0).GetTensorRawData();
    call.indices = input<int64_t>(context, 1, "Experts: indices", chosen);
    call.weights = input<void>(context, 2, "Experts: weights", chosen);
    call.first = first.call(context, one), call.down = down.call(context, other);
    if (bias) {
      call.first_bias = input<void>(context, 3 + first.count(), "Experts: first_bias", {one[0], one[1]});
      call.down_bias =
          input<void>(context, down.integers.input + down.count(), "Experts: down_bias", {one[0], rows[1]});
    }
    call.output = output(context, 0, rows);
    return call;
  }
};

}  // namespace kv
