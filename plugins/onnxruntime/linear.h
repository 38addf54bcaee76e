// A node of Linear (docs/contract.md, section 3): a product with a weight as checkpoints hold it.
#pragma once

#include "node.h"

namespace kv {

struct LinearNode {
  int type;

  LinearNode(const Ort::ConstKernelInfo& info, int type) : type(type) {
    const Shape input = declared_shape(info, 0), weight = declared_shape(info, 1);
    if (!input.empty() && !weight.empty()) check_shapes(input, weight);
  }

  static void check_shapes(const Shape& input, const Shape& weight) {
    require(weight.size() == 2 && !input.empty() && (input.back() < 0 || weight[1] < 0 || input.back() == weight[1]),
            "Linear: input " + text(input) + " does not fit a weight " + text(weight));
  }

  KvLinear call(const Ort::KernelContext& context) const {
    const Ort::ConstValue input = context.GetInput(0), weight = context.GetInput(1);
    Shape shape = input.GetTensorTypeAndShapeInfo().GetShape();
    const Shape sizes = weight.GetTensorTypeAndShapeInfo().GetShape();
    check_shapes(shape, sizes);
    KvLinear call{};
    call.type = type, call.rows = 1, call.inputs = sizes[1], call.outputs = sizes[0];
    for (size_t i = 0; i + 1 < shape.size(); ++i) call.rows *= shape[i];
    shape.back() = sizes[0];
    call.input = input.GetTensorRawData(), call.weight = weight.GetTensorRawData();
    call.output = output(context, 0, shape);
    return call;
  }
};

}  // namespace kv
