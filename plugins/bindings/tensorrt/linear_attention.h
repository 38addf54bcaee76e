// LinearAttention for TensorRT. All its tensors but the lengths are float32.
#pragma once

#include "../../cuda/kvexport_cuda.h"
#include "../node/linear_attention.h"
#include "tensors.h"

namespace kv::tensorrt {

struct LinearAttention {
  using Arguments = KvLinearAttention;
  static constexpr const char* kName = "LinearAttention";
  // The state among inputs and among outputs; the lengths. A plugin has no optional inputs: those that the update rule
  // needs follow the lengths, the decay first.
  static constexpr int kPast = 3, kPresent = 1, kLength = 4;

  static int outputs() { return 2; }

  static std::vector<PluginField> fields() { return with_alias(fields_of(kLinearAttentionAttributes)); }
  int least_inputs() const { return kLength + 1 + attributes.gated + attributes.delta; }
  int most_inputs() const { return least_inputs(); }
  static int past_of(int output) { return output == kPresent ? kPast : -1; }

  LinearAttentionAttributes attributes;
  explicit LinearAttention(const Fields& fields) : attributes(read_linear_attention(fields)) {}

  static Types types(int i, DataType) { return {i == kLength ? DataType::kINT64 : DataType::kFLOAT}; }
  static void set_types(Arguments&, const Types&) {}

  Arguments sized(const std::vector<Shape>& inputs) const {
    Arguments a{};
    a.heads = attributes.heads, a.key_heads = attributes.key_heads, a.scale = attributes.scale;
    a.batch = size_of(inputs, kPast, 0), a.tokens = size_of(inputs, 0, 1);
    a.key_size = size_of(inputs, kPast, 2), a.value_size = size_of(inputs, kPast, 3);
    const int64_t decays = attributes.gated ? size_of(inputs, kLength + 1, 2) : -1;
    a.by_channel = a.key_size > 1 && decays == product_of({a.heads, a.key_size});
    return a;
  }
  std::vector<Input> inputs(const Arguments& a) const {
    const Shape keys{a.batch, a.tokens, product_of({a.key_heads, a.key_size})};
    const Shape values{a.batch, a.tokens, product_of({a.heads, a.value_size})};
    const Shape state{a.batch, a.heads, a.key_size, a.value_size};
    std::vector<Input> all{
        {"query", keys}, {"key", keys}, {"value", values}, {"past_state", state}, {"query_length", {a.batch, 1}}};
    if (attributes.gated)
      all.push_back({"decay", {a.batch, a.tokens, product_of({a.heads, a.by_channel ? a.key_size : 1})}});
    if (attributes.delta) all.push_back({"beta", {a.batch, a.tokens, a.heads}});
    return all;
  }
  std::string misfit(const Arguments&) const { return ""; }
  static bool is_fixed(const Arguments& a) { return a.key_size >= 0 && a.value_size >= 0; }

  static DimsExprs output_shape(int, const DimsExprs* inputs, IExprBuilder&) { return inputs[2]; }

  static const char* workspace(const Arguments&, size_t* bytes) {
    *bytes = 0;
    return nullptr;
  }
  static const char* problem(const Arguments& a) { return kv_cuda_linear_attention_problem(&a); }
  template <class Use>
  static void each_smaller(const Arguments& a, Use use) {
    use(a);
  }
  static std::string initial_memory() { return ""; }

  const char* run(Arguments a, const KvCuda& where, void*, const void* const* inputs, int, void* const* outputs) const {
    const auto at = [&](int i) { return static_cast<const float*>(inputs[i]); };
    a.query = at(0), a.key = at(1), a.value = at(2), a.past = at(kPast);
    a.length = static_cast<const int64_t*>(inputs[kLength]);
    a.decay = attributes.gated ? at(kLength + 1) : nullptr;
    a.beta = attributes.delta ? at(kLength + 1 + attributes.gated) : nullptr;
    a.output = static_cast<float*>(outputs[0]), a.present = static_cast<float*>(outputs[kPresent]);
    return kv_cuda_linear_attention(&a, &where);
  }
};

}  // namespace kv::tensorrt
