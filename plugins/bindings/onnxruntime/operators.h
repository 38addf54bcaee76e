// The operators of domain `kvexport` for a session of any provider: their names and types, a kernel of each for every
// type of cache, and the domain that contains them.
#pragma once

#include <tuple>

#include "experts.h"
#include "linear.h"
#include "linear_attention.h"
#include "merge_cache.h"
#include "vote_attention.h"

namespace kv {

// One operator for one type of cache; ONNX Runtime chooses among operators of one name by their types.
// TKernel::kProvider is the kernel's provider, nullptr for the CPU's.
template <class TOp, class TKernel>
struct Operator : Ort::CustomOpBase<TOp, TKernel, true> {
  CacheType cache;

  explicit Operator(const CacheType& cache) : cache(cache) {}
  // Returns whether the operator exists for this type.
  static bool takes(const CacheType&) { return true; }
  const char* GetExecutionProviderType() const { return TKernel::kProvider; }
  OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo* info, void** kernel) const {
    return status_of([&] { *kernel = new TKernel(info, cache); });
  }
};

template <class TKernel>
struct VoteAttentionOp : Operator<VoteAttentionOp<TKernel>, TKernel> {
  using Base = Operator<VoteAttentionOp<TKernel>, TKernel>;
  using Base::Base, Base::cache;

  const char* GetName() const { return "VoteAttention"; }
  size_t GetInputTypeCount() const { return 11 + kMostExtra; }
  ONNXTensorElementDataType GetInputType(size_t i) const { return vote_attention_input_type(i, cache); }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t i) const {
    return i >= 10 ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
  size_t GetOutputTypeCount() const { return 6 + kMostExtra; }
  ONNXTensorElementDataType GetOutputType(size_t i) const {
    if (i >= 6) return extra_type(i - 6, cache);
    return i == 0 ? cache.query_element : state_type(i - 1, cache);
  }
  OrtCustomOpInputOutputCharacteristic GetOutputCharacteristic(size_t i) const {
    return i >= 6 ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
};

template <class TKernel>
struct MergeCacheOp : Operator<MergeCacheOp<TKernel>, TKernel> {
  using Base = Operator<MergeCacheOp<TKernel>, TKernel>;
  using Base::Base, Base::cache;

  // MergeCache has no query: it exists once per type of cache, for the first type of query.
  static bool takes(const CacheType& x) { return x.type == x.query_type || x.query_type == KV_FLOAT32; }
  const char* GetName() const { return "MergeCache"; }
  size_t GetInputTypeCount() const { return 5 + kMostExtra; }
  ONNXTensorElementDataType GetInputType(size_t i) const {
    return i < 5 ? state_type(i, cache) : extra_type(i - 5, cache);
  }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t i) const {
    return i < 5 ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  }
  size_t GetOutputTypeCount() const { return GetInputTypeCount(); }
  ONNXTensorElementDataType GetOutputType(size_t i) const { return GetInputType(i); }
  OrtCustomOpInputOutputCharacteristic GetOutputCharacteristic(size_t i) const { return GetInputCharacteristic(i); }
};

template <class TKernel>
struct LinearOp : Operator<LinearOp<TKernel>, TKernel> {
  using Base = Operator<LinearOp<TKernel>, TKernel>;
  using Base::Base, Base::cache;

  static bool takes(const CacheType& x) { return x.type == x.query_type; }
  const char* GetName() const { return "Linear"; }
  // Input and norm; a weight with its parts and a bias for each product; cosine and sine.
  size_t GetInputTypeCount() const { return 4 + (kMostInputs + 1) * KV_MAX_PRODUCTS; }
  // An input that may be a packed weight may have any type; the kernel checks it by the node's attributes.
  ONNXTensorElementDataType GetInputType(size_t i) const {
    return i == 0 ? cache.element : ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t i) const {
    return i < 2 ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  }
  size_t GetOutputTypeCount() const { return KV_MAX_PRODUCTS; }
  ONNXTensorElementDataType GetOutputType(size_t) const { return cache.element; }
  OrtCustomOpInputOutputCharacteristic GetOutputCharacteristic(size_t i) const {
    return i < 1 ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  }
};

template <class TKernel>
struct AdaptedLinearOp : Operator<AdaptedLinearOp<TKernel>, TKernel> {
  using Base = Operator<AdaptedLinearOp<TKernel>, TKernel>;
  using Base::Base, Base::cache;

  static bool takes(const CacheType& x) { return x.type == x.query_type; }
  const char* GetName() const { return "AdaptedLinear"; }
  // Those of Linear, adapter_rows, and two for each product.
  size_t GetInputTypeCount() const { return 5 + (kMostInputs + 3) * KV_MAX_PRODUCTS; }
  ONNXTensorElementDataType GetInputType(size_t i) const {
    return i == 0 ? cache.element : ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t i) const {
    return i < 5 ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  }
  size_t GetOutputTypeCount() const { return KV_MAX_PRODUCTS; }
  ONNXTensorElementDataType GetOutputType(size_t) const { return cache.element; }
  OrtCustomOpInputOutputCharacteristic GetOutputCharacteristic(size_t i) const {
    return i < 1 ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  }
};

template <class TKernel>
struct ExpertsOp : Operator<ExpertsOp<TKernel>, TKernel> {
  using Base = Operator<ExpertsOp<TKernel>, TKernel>;
  using Base::Base, Base::cache;

  static bool takes(const CacheType& x) { return x.type == x.query_type; }
  const char* GetName() const { return "Experts"; }
  // Input, indices and weights; two weights with their parts and biases.
  size_t GetInputTypeCount() const { return 3 + 2 * (kMostInputs + 1); }
  // The kernel checks the types of weights by the node's attributes.
  ONNXTensorElementDataType GetInputType(size_t i) const {
    return i == 0   ? cache.element
           : i == 1 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64
                    : ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t i) const {
    return i < 5 ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  }
  size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetOutputType(size_t) const { return cache.element; }
};

template <class TKernel>
struct LinearAttentionOp : Operator<LinearAttentionOp<TKernel>, TKernel> {
  using Base = Operator<LinearAttentionOp<TKernel>, TKernel>;
  using Base::Base;

  // Models compute it in float32, whatever their own type.
  static bool takes(const CacheType& x) { return x.type == KV_FLOAT32; }
  const char* GetName() const { return "LinearAttention"; }
  size_t GetInputTypeCount() const { return LinearAttentionNode::kInputs; }
  ONNXTensorElementDataType GetInputType(size_t i) const {
    return i == LinearAttentionNode::kLength ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64
                                             : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t i) const {
    return i > LinearAttentionNode::kLength ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
  size_t GetOutputTypeCount() const { return 2; }
  ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
};

template <class Op>
std::vector<Op> operators_of(const std::vector<CacheType>& types) {
  std::vector<Op> operators;
  for (const CacheType& type : types)
    if (Op::takes(type)) operators.emplace_back(type);
  return operators;
}

// Adds the domain, with these operators for these types, to the options of a session.
template <class... Ops>
OrtStatus* register_operators(OrtSessionOptions* options, const OrtApiBase* base, const std::vector<CacheType>& types) {
  constexpr uint32_t kApiVersion = 18;  // ParallelFor and operators with status; every later runtime has it
  const OrtApi* api = base->GetApi(kApiVersion);
  if (!api) return base->GetApi(1)->CreateStatus(ORT_FAIL, "kvexport: this ONNX Runtime is older than 1.18");
  Ort::InitApi(api);
  return status_of([&] {
    static const std::tuple<std::vector<Ops>...> operators{operators_of<Ops>(types)...};
    static const Ort::CustomOpDomain domain = [] {
      Ort::CustomOpDomain kvexport("kvexport");
      const auto add = [&](const auto& ops) {
        for (const auto& op : ops) kvexport.Add(&op);
      };
      std::apply([&](const auto&... ops) { (add(ops), ...); }, operators);
      return kvexport;
    }();
    Ort::UnownedSessionOptions(options).Add(domain);
  });
}

}  // namespace kv
