// Experts for TensorRT.
#pragma once

#include "../../cuda/kvexport_cuda.h"
#include "../node/experts.h"
#include "weight.h"

namespace kv::tensorrt {

struct Experts {
  using Arguments = KvExperts;
  static constexpr const char* kName = "Experts";
  static constexpr int kIndices = 1, kFactors = 2;

  static int outputs() { return 1; }

  static std::vector<PluginField> fields() {
    std::vector<PluginField> all = fields_of(kExpertsAttributes);
    for (const PluginField& one : fields_of(kByteFields)) all.push_back(one);
    return all;
  }
  // The inputs are those of the operator: rows, indices, factors, and each weight with its bias.
  int least_inputs() const { return down.first + down.count() + attributes.bias; }
  int most_inputs() const { return least_inputs(); }
  static int past_of(int) { return -1; }

  ExpertsAttributes attributes;
  Weight first, down;
  explicit Experts(const Fields& fields) : attributes(read_experts(fields)) {
    const PluginPacking packing(fields, attributes);
    const auto weight = [&](const char* name, int input, size_t i) {
      return Weight{name, input, packing.packed[i], packing.group[i], packing.bits[i], packing.is_signed[i] != 0};
    };
    first = weight("first", kFactors + 1, 0);
    down = weight("down", first.first + first.count() + attributes.bias, 1);
  }

  Types types(int i, DataType rows) const {
    if (i == 0) return kFloatTypes;
    if (i == kIndices) return {DataType::kINT64};
    if (i == kFactors) {
      Types factors{DataType::kFLOAT, DataType::kHALF};
      if (rows == DataType::kBF16) factors.push_back(rows);
      return factors;
    }
    for (const Weight* weight : {&first, &down})
      if (i >= weight->first && i < weight->first + weight->count()) return weight->types(i - weight->first, rows);
    return {rows};  // a bias
  }
  void set_types(Arguments& a, const Types& inputs) const {
    a.type = kernel_type(inputs[0]), a.weights_type = kernel_type(inputs[kFactors]);
    first.set_types(a.first, inputs), down.set_types(a.down, inputs);
  }

  Arguments sized(const std::vector<Shape>& inputs) const {
    Arguments a{};
    a.activation = attributes.activation, a.gate = attributes.gate, a.float_input = attributes.float_input;
    a.slope = attributes.slope, a.limit = attributes.limit, a.up_offset = attributes.up_offset;
    a.tokens = size_of(inputs, 0, 0), a.hidden = size_of(inputs, 0, 1), a.chosen = size_of(inputs, kIndices, 1);
    const int rows = size_of(inputs, first.first, 1);
    a.experts = size_of(inputs, first.first, 0), a.inner = rows < 0 ? -1 : rows / (1 + a.gate);
    a.first = first.sized(), a.down = down.sized();
    return a;
  }
  std::vector<Input> inputs(const Arguments& a) const {
    const int64_t rows = product_of({1 + a.gate, a.inner});
    std::vector<Input> all{
        {"input", {a.tokens, a.hidden}}, {"indices", {a.tokens, a.chosen}}, {"weights", {a.tokens, a.chosen}}};
    const auto add = [&](const Weight& weight, const char* bias, int64_t outputs, int64_t inputs) {
      for (const Input& one : weight.shapes({a.experts, outputs}, inputs)) all.push_back(one);
      if (attributes.bias) all.push_back({bias, {a.experts, outputs}});
    };
    add(first, "first_bias", rows, a.hidden);
    add(down, "down_bias", a.hidden, a.inner);
    return all;
  }
  std::string misfit(const Arguments&) const { return ""; }
  static bool is_fixed(const Arguments& a) { return a.hidden >= 0 && a.inner >= 0 && a.experts >= 0 && a.chosen >= 0; }

  static DimsExprs output_shape(int, const DimsExprs* inputs, IExprBuilder&) { return inputs[0]; }

  static const char* workspace(const Arguments& a, size_t* bytes) { return kv_cuda_experts_workspace(&a, bytes); }
  static const char* problem(const Arguments&) { return nullptr; }  // the workspace checks the call
  // More tokens need no less workspace.
  template <class Use>
  static void each_smaller(const Arguments& a, Use use) {
    use(a);
  }
  // The initial content of the instance's device memory: the kernels' counters.
  static std::string initial_memory() { return std::string(KV_CUDA_COUNTER_BYTES, '\0'); }

  const char* run(Arguments a, KvCuda where, void* counters, const void* const* inputs, int,
                  void* const* outputs) const {
    a.input = inputs[0], a.indices = static_cast<const int64_t*>(inputs[kIndices]), a.weights = inputs[kFactors];
    first.place(a.first, inputs), down.place(a.down, inputs);
    if (attributes.bias) a.first_bias = inputs[down.first - 1], a.down_bias = inputs[down.first + down.count()];
    a.output = outputs[0];
    where.counters = counters;
    return kv_cuda_experts(&a, &where);
  }
};

}  // namespace kv::tensorrt
