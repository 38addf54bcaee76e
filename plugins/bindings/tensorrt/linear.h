// Linear for TensorRT.
#pragma once

#include "../../cuda/kvexport_cuda.h"
#include "../node/linear.h"
#include "weight.h"

namespace kv::tensorrt {

// A call, with the dimensions of the rows before their inputs.
struct LinearCall : KvLinear {
  Shape leading;
};

struct Linear {
  using Arguments = LinearCall;
  static constexpr const char* kName = "Linear";

  static std::vector<PluginField> fields() {
    std::vector<PluginField> all = fields_of(kLinearAttributes);
    for (const PluginField& one : fields_of(kByteFields)) all.push_back(one);
    return all;
  }
  // The inputs are those of the operator, without gaps.
  int outputs() const { return static_cast<int>(attributes.products()); }
  int least_inputs() const { return last_inputs + attributes.residual + 2 * attributes.is_rotated(); }
  int most_inputs() const { return least_inputs(); }
  static int past_of(int) { return -1; }

  LinearAttributes attributes;
  std::vector<Weight> weights;  // those of the products, then the gate
  int last_inputs;              // the first of the inputs residual, cosine and sine
  explicit Linear(const Fields& fields) : attributes(read_linear(fields)), last_inputs(1 + attributes.norm) {
    const PluginPacking packing(fields, attributes);
    for (size_t i = 0; i < packing.packed.size(); ++i) {
      fields.require(!has_table(packing.packed[i]), "there is no kernel for a packed weight with a table of numbers");
      const bool is_gate = i == attributes.products();
      weights.push_back({is_gate ? "gate" : "weight", last_inputs, packing.packed[i], packing.group[i], packing.bits[i],
                         packing.is_signed[i] != 0});
      last_inputs += weights[i].count() + (!is_gate && attributes.bias[i]);
    }
    for (const int one : attributes.rotated)
      fields.require(!one || !attributes.gate, "a product that has a gate is not rotated");
  }

  Types types(int i, DataType rows) const {
    if (i == 0) return kFloatTypes;
    for (const Weight& one : weights)
      if (i >= one.first && i < one.first + one.count()) return one.types(i - one.first, rows);
    return {rows};
  }
  void set_types(Arguments& a, const Types& inputs) const {
    a.type = kernel_type(inputs[0]);
    for (size_t i = 0; i < weights.size(); ++i) weights[i].set_types(weight_of(a, i), inputs);
  }

  Arguments sized(const std::vector<Shape>& inputs) const {
    Arguments a{};
    Shape& rows = a.leading;
    rows = inputs.empty() ? Shape() : inputs[0];
    if (!rows.empty()) rows.pop_back();
    if (attributes.input_heads && rows.size() == 3) rows.erase(rows.begin() + 1);
    a.tokens = rows.empty() ? 1 : rows.back(),
    a.batch = product_of(rows.empty() ? rows : Shape(rows.begin(), rows.end() - 1));
    a.input_heads = attributes.input_heads ? attributes.input_heads : 1;
    a.inputs = inputs_of(inputs), a.float_input = attributes.float_input, a.epsilon = attributes.epsilon;
    if (attributes.norm) a.norm = somewhere();
    if (attributes.residual) a.residual = somewhere();
    a.count = outputs();
    for (size_t i = 0; i < weights.size(); ++i) weight_of(a, i) = weights[i].sized();
    if (attributes.gate) a.gate.data = somewhere();
    for (int i = 0; i < a.count; ++i) {
      KvProduct& p = a.products[i];
      p.outputs = size_of(inputs, weights[i].first, 0), p.rotated = attributes.rotated[i];
      p.heads = attributes.output_heads[i] ? attributes.output_heads[i] : 1;
      if (attributes.bias[i]) p.bias = somewhere();
    }
    if (attributes.is_rotated()) a.planes = size_of(inputs, last_inputs + attributes.residual, 2);
    return a;
  }
  std::vector<Input> inputs(const Arguments& a) const {
    const auto wide = [&](int64_t last) {
      Shape shape = in_sequences() ? Shape{a.batch, a.tokens} : a.leading;
      shape.push_back(last);
      return shape;
    };
    std::vector<Input> all{{"input", wide(a.inputs)}};
    if (attributes.input_heads)
      all[0].shape = {a.batch, a.input_heads, a.tokens, a.inputs < 0 ? -1 : a.inputs / a.input_heads};
    if (attributes.norm) all.push_back({"norm", {a.inputs}});
    for (size_t i = 0; i < weights.size(); ++i) {
      const int64_t outputs = a.products[i < attributes.products() ? i : 0].outputs;
      for (const Input& one : weights[i].shapes({outputs}, a.inputs)) all.push_back(one);
      if (i < attributes.products() && attributes.bias[i]) all.push_back({"bias", {outputs}});
    }
    if (attributes.residual) all.push_back({"residual", wide(a.products[0].outputs)});
    if (attributes.is_rotated())
      for (const char* name : {"cosine", "sine"}) all.push_back({name, wide(a.planes)});
    return all;
  }
  std::string misfit(const Arguments& a) const {
    const auto divides = [](int64_t heads, int64_t size) { return size < 0 || size % heads == 0; };
    if (!divides(a.input_heads, a.inputs))
      return "input has " + std::to_string(a.inputs) + " numbers in " + std::to_string(a.input_heads) + " heads";
    for (const KvProduct* p = a.products; p < a.products + a.count; ++p)
      if (!divides(p->heads, p->outputs))
        return "an output has " + std::to_string(p->outputs) + " numbers in " + std::to_string(p->heads) + " heads";
    return "";
  }
  static bool is_fixed(const Arguments& a) {
    bool fixed = a.inputs >= 0 && a.planes >= 0;
    for (int i = 0; i < a.count; ++i) fixed = fixed && a.products[i].outputs >= 0;
    return fixed;
  }

  DimsExprs output_shape(int i, const DimsExprs* inputs, IExprBuilder& builder) const {
    DimsExprs shape = inputs[0];
    const DimsExprs& weight = inputs[weights[i].first];
    if (attributes.input_heads) shape.nbDims = 3, shape.d[1] = inputs[0].d[2];
    shape.d[shape.nbDims - 1] = weight.d[0];
    if (const int heads = attributes.output_heads[i]) {
      if (!weight.d[0]->isConstant()) throw Refusal(std::string(kName) + ": the outputs of a weight are not known");
      shape.nbDims = 4, shape.d[2] = shape.d[1];
      shape.d[1] = builder.constant(heads), shape.d[3] = builder.constant(weight.d[0]->getConstantValue() / heads);
    }
    return shape;
  }

  static const char* workspace(const Arguments& a, size_t* bytes) { return kv_cuda_linear_workspace(&a, bytes); }
  static const char* problem(const Arguments& a) { return kv_cuda_linear_problem(&a); }
  // Calls use(call) for the call and for those of fewer rows that may need more workspace: other kernels run calls of
  // few rows, up to a power of two.
  template <class Use>
  static void each_smaller(Arguments a, Use use) {
    use(a);
    const int64_t rows = a.batch * a.tokens;
    a.batch = 1;
    for (a.tokens = 1; a.tokens < rows; a.tokens *= 2) use(a);
  }
  // The initial content of the instance's device memory: the kernels' counters.
  static std::string initial_memory() { return std::string(KV_CUDA_COUNTER_BYTES, '\0'); }

  const char* run(Arguments a, KvCuda where, void* counters, const void* const* inputs, int,
                  void* const* outputs) const {
    a.input = inputs[0];
    if (attributes.norm) a.norm = inputs[1];
    for (size_t i = 0; i < weights.size(); ++i) weights[i].place(weight_of(a, i), inputs);
    for (int i = 0; i < a.count; ++i) {
      if (attributes.bias[i]) a.products[i].bias = inputs[weights[i].first + weights[i].count()];
      a.products[i].output = outputs[i];
    }
    if (attributes.residual) a.residual = inputs[last_inputs];
    const int angles = last_inputs + attributes.residual;
    if (attributes.is_rotated()) a.cosine = inputs[angles], a.sine = inputs[angles + 1];
    where.counters = counters;
    return kv_cuda_linear(&a, &where);
  }

 private:
  // The place of a tensor that a call has, before its address is known.
  static const void* somewhere() {
    alignas(16) static const char place[16] = {};
    return place;
  }
  KvWeight& weight_of(Arguments& a, size_t i) const {
    return i < attributes.products() ? a.products[i].weight : a.gate;
  }
  // Returns whether the rows have a dimension of sequences and one of tokens.
  bool in_sequences() const {
    bool any = attributes.input_heads > 0 || attributes.is_rotated();
    for (const int heads : attributes.output_heads) any = any || heads > 0;
    return any;
  }
  int64_t inputs_of(const std::vector<Shape>& inputs) const {
    const int64_t last = size_of(inputs, weights[0].first, 1);
    return last < 0 || !weights[0].packed ? last : last * 8 / weights[0].bits;
  }
};

}  // namespace kv::tensorrt
