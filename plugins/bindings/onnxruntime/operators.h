// The operators of domain `kvexport` as a session sees them, whatever runs them: their names and types, a kernel of
// each for every type of cache, and the domain that holds them.
#pragma once

#include <tuple>

#include "linear.h"
#include "merge_cache.h"
#include "vote_attention.h"

namespace kv {

// A type of cache, as the kernels and as ONNX Runtime name it.
struct CacheType {
  int type;
  ONNXTensorElementDataType element;
};

// One operator for one type of cache; ONNX Runtime joins those of one name by their types. A kernel says which provider
// it belongs to (nullptr: the CPU's).
template <class TOp, class TKernel>
struct Operator : Ort::CustomOpBase<TOp, TKernel, true> {
  CacheType cache;

  explicit Operator(CacheType cache) : cache(cache) {}
  const char* GetExecutionProviderType() const { return TKernel::kProvider; }
  OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo* info, void** kernel) const {
    return status_of([&] { *kernel = new TKernel(info, cache.type); });
  }
};

template <class TKernel>
struct VoteAttentionOp : Operator<VoteAttentionOp<TKernel>, TKernel> {
  using Base = Operator<VoteAttentionOp<TKernel>, TKernel>;
  using Base::Base, Base::cache;

  const char* GetName() const { return "VoteAttention"; }
  size_t GetInputTypeCount() const { return 11; }
  ONNXTensorElementDataType GetInputType(size_t i) const { return vote_attention_input_type(i, cache.element); }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t i) const {
    return i == 10 ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
  size_t GetOutputTypeCount() const { return 6; }
  ONNXTensorElementDataType GetOutputType(size_t i) const {
    return i == 0 ? cache.element : state_type(i - 1, cache.element);
  }
};

template <class TKernel>
struct MergeCacheOp : Operator<MergeCacheOp<TKernel>, TKernel> {
  using Base = Operator<MergeCacheOp<TKernel>, TKernel>;
  using Base::Base, Base::cache;

  const char* GetName() const { return "MergeCache"; }
  size_t GetInputTypeCount() const { return 5; }
  ONNXTensorElementDataType GetInputType(size_t i) const { return state_type(i, cache.element); }
  size_t GetOutputTypeCount() const { return 5; }
  ONNXTensorElementDataType GetOutputType(size_t i) const { return state_type(i, cache.element); }
};

template <class TKernel>
struct LinearOp : Operator<LinearOp<TKernel>, TKernel> {
  using Base = Operator<LinearOp<TKernel>, TKernel>;
  using Base::Base, Base::cache;

  const char* GetName() const { return "Linear"; }
  // A norm, of each product a weight with a scale, an offset and a bias, cosine and sine.
  size_t GetInputTypeCount() const { return 4 + 4 * KV_MAX_PRODUCTS; }
  // Any type may stand where packed weights may: the node says what is where, and its kernel checks it.
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

// Adds the domain, with these operators for these types, to a session's options.
template <class... Ops>
OrtStatus* register_operators(OrtSessionOptions* options, const OrtApiBase* base, const std::vector<CacheType>& types) {
  constexpr uint32_t kApiVersion = 18;  // ParallelFor and operators with status; every later runtime has it
  const OrtApi* api = base->GetApi(kApiVersion);
  if (!api) return base->GetApi(1)->CreateStatus(ORT_FAIL, "kvexport: this ONNX Runtime is older than 1.18");
  Ort::InitApi(api);
  return status_of([&] {
    static const std::tuple<std::vector<Ops>...> operators{std::vector<Ops>(types.begin(), types.end())...};
    static const Ort::CustomOpDomain domain = [] {
      Ort::CustomOpDomain made("kvexport");
      const auto add = [&](const auto& ops) {
        for (const auto& op : ops) made.Add(&op);
      };
      std::apply([&](const auto&... ops) { (add(ops), ...); }, operators);
      return made;
    }();
    Ort::UnownedSessionOptions(options).Add(domain);
  });
}

}  // namespace kv
