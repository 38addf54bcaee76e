// A node of LinearAttention (docs/reference/contract.md, section 3): attention whose memory is a matrix for each head.
#pragma once

#include <tuple>

#include "../../abi/linear_attention.h"
#include "../node/linear_attention.h"
#include "node.h"

namespace kv {

struct LinearAttentionNode : LinearAttentionAttributes {
  // The inputs in their order: query, key, value, past_state, query_length, then decay and beta. The update rule
  // decides which of the last two exist.
  static constexpr size_t kInputs = 7, kLength = 4, kDecay = 5, kBeta = 6;

  explicit LinearAttentionNode(const Ort::ConstKernelInfo& info)
      : LinearAttentionAttributes(read_linear_attention(Attributes(info, "LinearAttention"))) {
    const Attributes node(info, "LinearAttention");
    const std::string rule = node.word("update_rule");
    for (const auto& [i, name, expected] : {std::tuple(kDecay, "decay", gated), std::tuple(kBeta, "beta", delta)})
      node.require((i < info.GetInputCount() && has_input(info, i)) == expected,
                   std::string(name) + (expected ? " is missing" : " has no use") + " with the rule " + rule);
  }

  KvLinearAttention call(const Ort::KernelContext& context) const {
    const Shape state = context.GetInput(3).GetTensorTypeAndShapeInfo().GetShape();
    const Shape rows = context.GetInput(0).GetTensorTypeAndShapeInfo().GetShape();
    require(state.size() == 4 && rows.size() == 3 && state[1] == heads,
            [&] { return "LinearAttention: query " + text(rows) + " does not fit past_state " + text(state); });
    const int64_t batch = state[0], tokens = rows[1], key_size = state[2], value_size = state[3];
    const Shape keys{batch, tokens, key_heads * key_size}, values{batch, tokens, heads * value_size};
    KvLinearAttention call{};
    call.batch = batch, call.tokens = tokens, call.heads = heads, call.key_heads = key_heads, call.scale = scale;
    call.key_size = static_cast<int>(key_size), call.value_size = static_cast<int>(value_size);
    call.query = input<float>(context, 0, "LinearAttention: query", keys);
    call.key = input<float>(context, 1, "LinearAttention: key", keys);
    call.value = input<float>(context, 2, "LinearAttention: value", values);
    call.past = input<float>(context, 3, "LinearAttention: past_state", state);
    call.length = input<int64_t>(context, kLength, "LinearAttention: query_length", {batch, 1});
    if (gated) {
      const Shape decay = context.GetInput(kDecay).GetTensorTypeAndShapeInfo().GetShape();
      call.by_channel = decay.size() == 3 && key_size > 1 && decay[2] == heads * key_size;
      call.decay = input<float>(context, kDecay, "LinearAttention: decay",
                                {batch, tokens, heads * (call.by_channel ? key_size : 1)});
    }
    if (delta) call.beta = input<float>(context, kBeta, "LinearAttention: beta", {batch, tokens, heads});
    call.output = static_cast<float*>(output(context, 0, values));
    call.present = static_cast<float*>(output(context, 1, state));
    return call;
  }
};

}  // namespace kv
