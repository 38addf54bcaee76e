// Registers the operators of domain `kvexport` with ONNX Runtime's CUDA provider: bindings only, as library.cpp, around
// the kernels of ../cuda. All tensors are in the device's memory; a run only enqueues work on the session's stream, so
// it can be captured in a CUDA graph once it has run as it is.
#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>
#undef ORT_API_MANUAL_INIT

#include "operators.h"
#include "workspace.h"

namespace {

struct VoteAttentionKernel : kv::VoteAttentionNode {
  static constexpr const char* kProvider = kv::kDeviceProvider;
  kv::Streams streams;

  VoteAttentionKernel(const OrtKernelInfo* info, const kv::CacheType& cache)
      : VoteAttentionNode(Ort::ConstKernelInfo(info), cache, false), streams(std::make_shared<kv::Memory>(info)) {}

  OrtStatusPtr ComputeV2(OrtKernelContext* raw) {
    return kv::status_of([&] {
      const Ort::KernelContext context(raw);
      const KvVoteAttention call = this->call(context);
      size_t bytes = 0;
      kv::ran("VoteAttention", kv_cuda_vote_attention_workspace(&call, &bytes));
      streams.run(context, bytes,
                  [&](const KvCuda& where) { kv::ran("VoteAttention", kv_cuda_vote_attention(&call, &where)); });
    });
  }
};

struct MergeCacheKernel : kv::MergeCacheNode {
  static constexpr const char* kProvider = kv::kDeviceProvider;
  kv::Streams streams;
  std::shared_ptr<float> frequencies;  // on the device

  MergeCacheKernel(const OrtKernelInfo* info, const kv::CacheType& cache)
      : MergeCacheKernel(info, cache, std::make_shared<kv::Memory>(info)) {}

  MergeCacheKernel(const OrtKernelInfo* info, const kv::CacheType& cache, const std::shared_ptr<kv::Memory>& memory)
      : MergeCacheNode(Ort::ConstKernelInfo(info), cache, false), streams(memory) {
    if (inverse_frequencies.empty()) return;
    const size_t bytes = inverse_frequencies.size() * sizeof(float);
    frequencies.reset(static_cast<float*>(memory->take(bytes)), [memory](float* held) { memory->give_back(held); });
    kv::upload(frequencies.get(), inverse_frequencies.data(), bytes);
  }

  OrtStatusPtr ComputeV2(OrtKernelContext* raw) {
    return kv::status_of([&] {
      const Ort::KernelContext context(raw);
      KvMergeCache call = this->call(context);
      call.inverse_frequencies = frequencies.get();
      size_t bytes = 0;
      kv::ran("MergeCache", kv_cuda_merge_cache_workspace(&call, &bytes));
      streams.run(context, bytes,
                  [&](const KvCuda& where) { kv::ran("MergeCache", kv_cuda_merge_cache(&call, &where)); });
    });
  }
};

struct LinearKernel : kv::LinearNode {
  static constexpr const char* kProvider = kv::kDeviceProvider;
  kv::Streams streams;

  LinearKernel(const OrtKernelInfo* info, const kv::CacheType& cache)
      : LinearNode(Ort::ConstKernelInfo(info), cache.type, true), streams(std::make_shared<kv::Memory>(info)) {
    kv::require(!gate || !turns(), "Linear: a product that has a gate is not rotated");
  }

  OrtStatusPtr ComputeV2(OrtKernelContext* raw) {
    return kv::status_of([&] {
      const Ort::KernelContext context(raw);
      const KvLinear call = this->call(context);
      size_t bytes = 0;
      kv::ran("Linear", kv_cuda_linear_workspace(&call, &bytes));
      streams.run(context, bytes, [&](const KvCuda& where) { kv::ran("Linear", kv_cuda_linear(&call, &where)); });
    });
  }
};

}  // namespace

#define KV_EXPORT extern "C" __attribute__((visibility("default")))

KV_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  return kv::register_operators<kv::VoteAttentionOp<VoteAttentionKernel>, kv::MergeCacheOp<MergeCacheKernel>,
                                kv::LinearOp<LinearKernel>>(options, base,
                                                            {{KV_FLOAT32, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
                                                             {KV_FLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16},
                                                             {KV_BFLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16}});
}

// What kvexport/backends/onnxruntime/operators.py asks: the operators that the library knows, what the kernels are
// compiled for, why they cannot run on this machine, and why a layer of these sizes has none ("" where they can, and
// where it has).
KV_EXPORT const char* kvexport_schema() { return kv::kSchema; }
KV_EXPORT const char* kvexport_isa() {
  static const std::string text = kv::compiled_for();
  return text.c_str();
}
KV_EXPORT const char* kvexport_device_problem() {
  static const std::string problem = kv::device_problem();
  return problem.c_str();
}
KV_EXPORT const char* kvexport_layer_problem(int type, int query_heads, int heads, int capacity, int key_size,
                                             int value_size, int statistics, int budget) {
  KvVoteAttention attention{};
  attention.query_type = attention.cache_type = type, attention.batch = 1;
  attention.query_heads = query_heads, attention.heads = heads, attention.capacity = capacity;
  attention.key_size = key_size, attention.value_size = value_size, attention.statistics = statistics;
  for (attention.tokens = 1; attention.tokens <= (capacity > 1 ? 2 : 1); ++attention.tokens)
    if (const char* problem = kv_cuda_vote_attention_problem(&attention)) return problem;
  if (budget >= capacity) return "";
  // Of the policies the one whose kernels take the most shared memory.
  KvMergeCache merge{};
  merge.cache_type = type, merge.batch = 1, merge.heads = heads, merge.capacity = capacity, merge.budget = budget;
  merge.key_size = key_size, merge.value_size = value_size, merge.statistics = statistics, merge.compresses = 1;
  merge.policy.merge = KV_MERGE_ZIP, merge.policy.order = KV_ORDER_LEAST_ERROR;
  merge.policy.measure = KV_MEASURE_DISTANCE, merge.policy.votes_max = 1.0f;
  const char* problem = kv_cuda_merge_cache_problem(&merge);
  return problem ? problem : "";
}
