// A node of Experts (docs/reference/contract.md, section 3): the experts that a router chose for each token.
#pragma once

#include "weight.h"

namespace kv {

struct ExpertsNode {
  int type, weights_type = KV_FLOAT32, activation = 0, float_input = 0;
  bool gate, bias;
  float slope, limit, up_offset;
  std::vector<int> packed{0, 0}, group{0, 0};
  Weight first, down;

  ExpertsNode(const Ort::ConstKernelInfo& info, int type, const Keeping& keeping) : type(type) {
    const Attributes node(info, "Experts");
    activation = activation_of(node, node.word("activation"));
    gate = node.integer("gate") != 0, bias = node.integer("bias") != 0;
    slope = node.number("slope"), limit = node.number("limit"), up_offset = node.number("up_offset");
    check(node, limit >= 0.0f, "limit", limit, "at least 0");
    read_packing(node);
    const size_t expected = 5 + 2 * bias + follow(packed[0]) + follow(packed[1]);
    node.require(info.GetInputCount() == expected,
                 "there are " + std::to_string(info.GetInputCount()) + " inputs, not " + std::to_string(expected));
    for (size_t i = 0; i < expected; ++i)
      node.require(has_input(info, i), "input " + std::to_string(i) + " is left out");
    const auto factors = declared_type(info, 2);
    const bool brain = factors == ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16 && type == KV_BFLOAT16;
    node.require(
        brain || factors == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT || factors == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
        "weights are neither float32 nor float16");
    weights_type = brain ? KV_BFLOAT16 : factors == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? KV_FLOAT32 : KV_FLOAT16;
    const auto plain = [&](size_t i) {
      node.require(declared_type(info, i) == declared_type(info, 0),
                   "input " + std::to_string(i) + " is of another type than input 0");
    };
    const auto read = [&](size_t next, size_t i) {
      if (!packed[i]) plain(next);
      Weight weight(info, next, node, packed[i], group[i], keeping, i == 0 ? 1 + gate : 1);
      if (bias) plain(next + weight.count());
      return weight;
    };
    first = read(3, 0);
    down = read(3 + first.count() + bias, 1);
    const Shape one = declared_shape(info, first.integers.input), other = declared_shape(info, down.integers.input);
    if (!one.empty() && !other.empty()) check_shapes(one, other);
  }

  static size_t follow(int packed) { return packed == 0 ? 0 : packed == 1 ? 1 : 2; }

  static int activation_of(const Attributes& node, const std::string& word) {
    static const char* const words[] = {"silu", "gelu", "gelu_tanh", "relu",
                                        "relu_squared"};  // in the order of the ABI
    for (int i = 0; i <= KV_EXPERTS_RELU_SQUARED; ++i)
      if (word == words[i]) return i;
    node.require(false, "the activation '" + word + "' is unknown");
    return 0;
  }

  void read_packing(const Attributes& node) {
    if (!node.has("packed")) return;
    packed = node.integers("packed"), group = node.integers("group"), float_input = node.integer("float_input") != 0;
    node.require(packed.size() == 2 && group.size() == 2, "packed and group have an entry for each of 2 weights, not " +
                                                              std::to_string(packed.size()) + " and " +
                                                              std::to_string(group.size()));
    for (size_t i = 0; i < 2; ++i) {
      check(node, packed[i] >= 0 && packed[i] <= 5, "packed", packed[i], "0 to 5");
      check(node, packed[i] ? group[i] > 0 : group[i] == 0, "group", group[i],
            packed[i] ? "positive of a packed weight" : "0 of a weight that is not packed");
    }
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
