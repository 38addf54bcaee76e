// Registers the operators of domain `kvexport` with ONNX Runtime's CPU provider. This file only binds the kernels: it
// reads attributes and tensors, calls the kernels, and copies weights to memory that is read fastest. A malformed node
// is an error when the session is created; tensors that do not fit are an error of the run.
#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>
#undef ORT_API_MANUAL_INIT

#include <algorithm>

#include "../../cpu/kvexport_cpu.h"
#include "../../cpu/recurrence/recurrence.h"
#include "operators.h"

namespace {

// Returns the session's threads as a task runner.
KvRunner runner(const Ort::KernelContext& context) {
  return {[](void* context, size_t count, KvTask task, void* data) {
            static_cast<const Ort::KernelContext*>(context)->ParallelFor(task, count, 0, data);
          },
          const_cast<Ort::KernelContext*>(&context)};
}

// Returns the runner of a call over KV heads. If their capacities differ, so do the lengths of tasks, and the threads
// take one task after another.
template <class Arguments>
KvRunner runner_of(const Arguments& call, const Ort::KernelContext& context) {
  if (std::equal(call.capacity + 1, call.capacity + call.heads, call.capacity)) return runner(context);
  return {[](void* context, size_t count, KvTask task, void* data) {
            static_cast<const Ort::KernelContext*>(context)->ParallelFor(task, count, count, data);
          },
          const_cast<Ort::KernelContext*>(&context)};
}

struct VoteAttentionKernel : kv::VoteAttentionNode {
  static constexpr const char* kProvider = nullptr;
  VoteAttentionKernel(const OrtKernelInfo* info, const kv::CacheType& cache)
      : VoteAttentionNode(Ort::ConstKernelInfo(info), cache, true) {}

  OrtStatusPtr ComputeV2(OrtKernelContext* raw) const {
    return kv::status_of([&] {
      const Ort::KernelContext context(raw);
      std::vector<int> equal;
      const KvVoteAttention call = this->call(context, equal);
      kv::require_success("VoteAttention", kv_cpu_vote_attention(&call, runner_of(call, context)));
      if (!reference_queries) return;
      const KvRing ring = this->ring(context, call);
      kv::require_success("VoteAttention", kv_cpu_keep_queries(&call, &ring));
    });
  }
};

struct MergeCacheKernel : kv::MergeCacheNode {
  static constexpr const char* kProvider = nullptr;
  MergeCacheKernel(const OrtKernelInfo* info, const kv::CacheType& cache)
      : MergeCacheNode(Ort::ConstKernelInfo(info), cache, true) {}

  OrtStatusPtr ComputeV2(OrtKernelContext* raw) const {
    return kv::status_of([&] {
      const Ort::KernelContext context(raw);
      std::vector<int> equal;
      const KvMergeCache call = this->call(context, equal);
      const KvRunner runner = runner_of(call, context);
      if (!fits) return kv::require_success("MergeCache", kv_cpu_merge_cache(&call, runner));
      const KvRing ring = this->ring(context);
      kv::require_success("MergeCache", kv_cpu_merge_and_fit(&call, &fit, &ring, runner));
    });
  }
};

constexpr kv::PanelFunctions kPanels{kv_cpu_why_no_panels, kv_cpu_panels_bytes, kv_cpu_repack};

struct LinearKernel : kv::LinearNode {
  static constexpr const char* kProvider = nullptr;
  LinearKernel(const OrtKernelInfo* info, const kv::CacheType& cache)
      : LinearNode(Ort::ConstKernelInfo(info), cache.type, kPanels) {}

  OrtStatusPtr ComputeV2(OrtKernelContext* raw) const {
    return kv::status_of([&] {
      const Ort::KernelContext context(raw);
      const KvLinear call = this->call(context);
      kv::require_success("Linear", kv_cpu_linear(&call, runner(context)));
    });
  }
};

struct AdaptedLinearKernel : kv::LinearNode {
  static constexpr const char* kProvider = nullptr;
  AdaptedLinearKernel(const OrtKernelInfo* info, const kv::CacheType& cache)
      : LinearNode(Ort::ConstKernelInfo(info), cache.type, kPanels, true) {}

  OrtStatusPtr ComputeV2(OrtKernelContext* raw) const {
    return kv::status_of([&] {
      const Ort::KernelContext context(raw);
      const KvLinear call = this->call(context);
      const KvAdapters adapters = this->adapters(context, call);
      kv::require_success("AdaptedLinear", kv_cpu_adapted_linear(&call, &adapters, runner(context)));
    });
  }
};

struct ExpertsKernel : kv::ExpertsNode {
  static constexpr const char* kProvider = nullptr;
  ExpertsKernel(const OrtKernelInfo* info, const kv::CacheType& cache)
      : ExpertsNode(Ort::ConstKernelInfo(info), cache.type, kPanels) {}

  OrtStatusPtr ComputeV2(OrtKernelContext* raw) const {
    return kv::status_of([&] {
      const Ort::KernelContext context(raw);
      const KvExperts call = this->call(context);
      kv::require_success("Experts", kv_cpu_experts(&call, runner(context)));
    });
  }
};

struct LinearAttentionKernel : kv::LinearAttentionNode {
  static constexpr const char* kProvider = nullptr;
  LinearAttentionKernel(const OrtKernelInfo* info, const kv::CacheType&)
      : LinearAttentionNode(Ort::ConstKernelInfo(info)) {}

  OrtStatusPtr ComputeV2(OrtKernelContext* raw) const {
    return kv::status_of([&] {
      const Ort::KernelContext context(raw);
      const KvLinearAttention call = this->call(context);
      kv::require_success("LinearAttention", kv_cpu_linear_attention(&call, runner(context)));
    });
  }
};

}  // namespace

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                               const OrtApiBase* base) {
  if (const char* problem = kv_cpu_problem()) return base->GetApi(1)->CreateStatus(ORT_FAIL, problem);
  constexpr auto f32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, f16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
                 i8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, u8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
  return kv::register_operators<kv::VoteAttentionOp<VoteAttentionKernel>, kv::MergeCacheOp<MergeCacheKernel>,
                                kv::LinearOp<LinearKernel>, kv::AdaptedLinearOp<AdaptedLinearKernel>,
                                kv::ExpertsOp<ExpertsKernel>, kv::LinearAttentionOp<LinearAttentionKernel>>(
      options, base,
      {{KV_FLOAT32, f32},
       {KV_FLOAT16, f16},
       {KV_INT8, i8, i8, KV_FLOAT32, f32},
       {KV_INT8, i8, i8, KV_FLOAT16, f16},
       {KV_INT4, u8, u8, KV_FLOAT32, f32},
       {KV_INT4, u8, u8, KV_FLOAT16, f16},
       {KV_K8V4, i8, u8, KV_FLOAT32, f32},
       {KV_K8V4, i8, u8, KV_FLOAT16, f16}});
}

// The functions that kvexport/backends/onnxruntime/operators.py calls. They return the version of the operators, the
// instruction set that runs, why none runs on this machine ("": one does), and why weights are not in huge pages ("":
// they are).
extern "C" __attribute__((visibility("default"))) const char* kvexport_schema() { return kv::kSchema; }
extern "C" __attribute__((visibility("default"))) const char* kvexport_isa() { return kv_cpu_isa(); }
extern "C" __attribute__((visibility("default"))) const char* kvexport_device_problem() {
  const char* const problem = kv_cpu_problem();
  return problem ? problem : "";
}
extern "C" __attribute__((visibility("default"))) const char* kvexport_huge_pages() {
  const char* const why = kv::why_no_huge_pages();
  return why ? why : "";
}
