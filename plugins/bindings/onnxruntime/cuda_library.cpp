// Registers the operators of domain `kvexport` with ONNX Runtime's CUDA provider. Like library.cpp it only binds the
// kernels, those of ../../cuda. All tensors are in the device's memory. A run only enqueues work on the session's
// stream, so it can be captured in a CUDA graph after one run without capture.
#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>
#undef ORT_API_MANUAL_INIT

#include <algorithm>
#include <numeric>

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
      std::vector<int> equal;
      const KvVoteAttention call = this->call(context, equal);
      size_t bytes = 0;
      kv::require_success("VoteAttention", kv_cuda_vote_attention_workspace(&call, &bytes));
      streams.run(context, bytes, [&](const KvCuda& where) {
        kv::require_success("VoteAttention", kv_cuda_vote_attention(&call, &where));
      });
    });
  }
};

// Returns a copy of a layer's inverse frequencies on the device; nullptr if it has none.
std::shared_ptr<float> on_device(const std::vector<float>& frequencies, const std::shared_ptr<kv::Memory>& memory) {
  if (frequencies.empty()) return nullptr;
  const size_t bytes = frequencies.size() * sizeof(float);
  std::shared_ptr<float> copy(static_cast<float*>(memory->take(bytes)),
                              [memory](float* address) { memory->give_back(address); });
  kv::upload(copy.get(), frequencies.data(), bytes);
  return copy;
}

struct MergeCacheKernel : kv::MergeCacheNode {
  static constexpr const char* kProvider = kv::kDeviceProvider;
  kv::Streams streams;
  std::shared_ptr<float> frequencies;  // on the device

  MergeCacheKernel(const OrtKernelInfo* info, const kv::CacheType& cache)
      : MergeCacheKernel(info, cache, std::make_shared<kv::Memory>(info)) {}

  MergeCacheKernel(const OrtKernelInfo* info, const kv::CacheType& cache, const std::shared_ptr<kv::Memory>& memory)
      : MergeCacheNode(Ort::ConstKernelInfo(info), cache, false),
        streams(memory),
        frequencies(on_device(inverse_frequencies, memory)) {}

  OrtStatusPtr ComputeV2(OrtKernelContext* raw) {
    return kv::status_of([&] {
      const Ort::KernelContext context(raw);
      std::vector<int> equal;
      KvMergeCache call = this->call(context, equal);
      call.inverse_frequencies = frequencies.get();
      size_t bytes = 0;
      kv::require_success("MergeCache", kv_cuda_merge_cache_workspace(&call, &bytes));
      streams.run(context, bytes,
                  [&](const KvCuda& where) { kv::require_success("MergeCache", kv_cuda_merge_cache(&call, &where)); });
    });
  }
};

}  // namespace

#define KV_EXPORT extern "C" __attribute__((visibility("default")))

KV_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  constexpr auto f32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, f16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
                 i8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, u8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
  const std::vector<kv::CacheType> types{{KV_FLOAT32, f32},
                                         {KV_FLOAT16, f16},
                                         {KV_INT8, i8, i8, KV_FLOAT32, f32},
                                         {KV_INT8, i8, i8, KV_FLOAT16, f16},
                                         {KV_INT4, u8, u8, KV_FLOAT32, f32},
                                         {KV_INT4, u8, u8, KV_FLOAT16, f16},
                                         {KV_K8V4, i8, u8, KV_FLOAT32, f32},
                                         {KV_K8V4, i8, u8, KV_FLOAT16, f16}};
  return kv::register_operators<kv::VoteAttentionOp<VoteAttentionKernel>, kv::MergeCacheOp<MergeCacheKernel>>(
      options, base, types);
}

// The functions that kvexport/backends/onnxruntime/operators.py calls. They return the version of the operators, the
// devices that the kernels are compiled for, why they cannot run on this machine, and why no kernel computes
// VoteAttention or MergeCache of a layer of these sizes ("" if they can, and if there is a kernel).
// capacity, budget: a number for each KV head.
KV_EXPORT const char* kvexport_schema() { return kv::kSchema; }
KV_EXPORT const char* kvexport_isa() {
  static const std::string text = kv::compiled_for();
  return text.c_str();
}
KV_EXPORT const char* kvexport_device_problem() {
  static const std::string problem = kv::device_problem();
  return problem.c_str();
}
KV_EXPORT const char* kvexport_attention_problem(int type, int query_heads, int heads, const int* capacity,
                                                 int key_size, int value_size, int statistics) {
  KvVoteAttention call{};
  // Over a quantized cache, any type of query: all take the same memory.
  call.query_type = kv::is_quantized(type) ? int{KV_FLOAT32} : type, call.cache_type = type, call.batch = 1;
  call.query_heads = query_heads, call.heads = heads, call.capacity = capacity;
  call.slots = std::accumulate(capacity, capacity + heads, 0);
  call.key_size = key_size, call.value_size = value_size, call.statistics = statistics;
  const int least = *std::min_element(capacity, capacity + heads);
  for (call.tokens = 1; call.tokens <= (least > 1 ? 2 : 1); ++call.tokens)
    if (const char* problem = kv_cuda_vote_attention_problem(&call)) return problem;
  return "";
}
KV_EXPORT const char* kvexport_merge_problem(int type, int heads, const int* capacity, const int* budget, int key_size,
                                             int value_size, int statistics) {
  // The policy whose kernels take the most shared memory.
  KvMergeCache call{};
  const std::vector<int> recent(heads, 0);
  call.cache_type = type, call.batch = 1, call.heads = heads, call.capacity = capacity, call.budget = budget;
  call.recent = recent.data(), call.slots = std::accumulate(capacity, capacity + heads, 0);
  call.key_size = key_size, call.value_size = value_size, call.statistics = statistics, call.compresses = 1;
  call.policy.merge = KV_MERGE_ZIP, call.policy.order = KV_ORDER_LEAST_ERROR;
  call.policy.measure = KV_MEASURE_DISTANCE, call.policy.votes_max = 1.0f;
  const char* problem = kv_cuda_merge_cache_problem(&call);
  return problem ? problem : "";
}
