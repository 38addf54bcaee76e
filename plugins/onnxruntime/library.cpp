// Registers the operators of domain `kvexport` with ONNX Runtime's CPU provider. Bindings only: attributes and tensors
// in, kernels called. A malformed node is an error when the session is made; tensors that do not fit are an error of
// the run.
#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>
#undef ORT_API_MANUAL_INIT

#include "merge_cache.h"
#include "vote_attention.h"

namespace {

// One operator for one type of cache; ONNX Runtime joins those of one name by their types.
template <class TOp, class TKernel>
struct Operator : Ort::CustomOpBase<TOp, TKernel, true> {
  ONNXTensorElementDataType cache;
  int type;

  explicit Operator(int type)
      : cache(type == KV_FLOAT16 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT),
        type(type) {}

  OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo* info, void** kernel) const {
    try {
      *kernel = new TKernel(Ort::ConstKernelInfo(info), type);
    } catch (const std::exception& error) {
      return Ort::Status(error).release();
    }
    return nullptr;
  }
};

struct VoteAttentionOp : Operator<VoteAttentionOp, kv::VoteAttentionKernel> {
  using Operator::Operator;

  const char* GetName() const { return "VoteAttention"; }
  size_t GetInputTypeCount() const { return 11; }
  ONNXTensorElementDataType GetInputType(size_t i) const { return kv::vote_attention_input_type(i, cache); }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t i) const {
    return i == 10 ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
  size_t GetOutputTypeCount() const { return 6; }
  ONNXTensorElementDataType GetOutputType(size_t i) const { return i == 0 ? cache : kv::state_type(i - 1, cache); }
};

struct MergeCacheOp : Operator<MergeCacheOp, kv::MergeCacheKernel> {
  using Operator::Operator;

  const char* GetName() const { return "MergeCache"; }
  size_t GetInputTypeCount() const { return 5; }
  ONNXTensorElementDataType GetInputType(size_t i) const { return kv::state_type(i, cache); }
  size_t GetOutputTypeCount() const { return 5; }
  ONNXTensorElementDataType GetOutputType(size_t i) const { return kv::state_type(i, cache); }
};

}  // namespace

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                               const OrtApiBase* base) {
  constexpr uint32_t kApiVersion = 18;  // ParallelFor and operators with status; every later runtime has it
  const OrtApi* api = base->GetApi(kApiVersion);
  if (!api) return base->GetApi(1)->CreateStatus(ORT_FAIL, "kvexport: this ONNX Runtime is older than 1.18");
  Ort::InitApi(api);
  static const VoteAttentionOp attention[] = {VoteAttentionOp(KV_FLOAT32), VoteAttentionOp(KV_FLOAT16)};
  static const MergeCacheOp merge[] = {MergeCacheOp(KV_FLOAT32), MergeCacheOp(KV_FLOAT16)};
  try {
    static const Ort::CustomOpDomain domain = [] {
      Ort::CustomOpDomain made("kvexport");
      for (const auto& op : attention) made.Add(&op);
      for (const auto& op : merge) made.Add(&op);
      return made;
    }();
    Ort::UnownedSessionOptions(options).Add(domain);
  } catch (const std::exception& error) {
    return Ort::Status(error).release();
  }
  return nullptr;
}

// What kvexport/native.py asks: the instruction set that runs, and the methods that MergeCache has here.
extern "C" __attribute__((visibility("default"))) const char* kvexport_isa() { return kv_cpu_isa(); }
extern "C" __attribute__((visibility("default"))) const char* kvexport_merge_methods() { return kv::kMergeMethods; }
