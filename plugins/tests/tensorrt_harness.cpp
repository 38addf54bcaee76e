// The plugins' methods behind C functions, for tests/support/tensorrt_harness.py.
#include "tensorrt_harness.h"

#include <vector>

using namespace harness;

#define KV_EXPORT extern "C" __attribute__((visibility("default")))

// An input or output. size: -1 and below are sizes that are not known; most: the largest that a profile allows.
struct Tensor {
  int32_t type, format, rank;
  int64_t size[8], most[8];
  void* data;
};

namespace {

Log& log_of_all() {
  static Log log;
  return log;
}

Dims dims_of(int32_t rank, const int64_t* sizes) {
  Dims dims{};
  dims.nbDims = rank;
  for (int32_t i = 0; i < rank; ++i) dims.d[i] = sizes[i] < -1 ? -1 : sizes[i];
  return dims;
}

PluginTensorDesc desc_of(const Tensor& t) {
  return {dims_of(t.rank, t.size), static_cast<DataType>(t.type), static_cast<TensorFormat>(t.format), 1.0f};
}

struct Described {
  std::vector<PluginTensorDesc> fixed;
  std::vector<DynamicPluginTensorDesc> open;
  std::vector<void*> data;
  Described(const Tensor* tensors, int32_t count) {
    for (const Tensor* t = tensors; t < tensors + count; ++t) {
      fixed.push_back(desc_of(*t));
      open.push_back({fixed.back(), dims_of(t->rank, t->size), dims_of(t->rank, t->most), dims_of(t->rank, t->most)});
      data.push_back(t->data);
    }
  }
};

}  // namespace

// Returns the lines of the log since the last call.
KV_EXPORT const char* kvt_log() {
  static std::string taken;
  taken.swap(log_of_all().lines);
  log_of_all().lines.clear();
  return taken.c_str();
}

KV_EXPORT IPluginV3* kvt_create(const char* name, const PluginField* fields, int32_t count, int32_t phase) {
  setLoggerFinder(&log_of_all());
  const PluginFieldCollection collection{count, fields};
  return creator(name)->createPlugin("layer", &collection, static_cast<TensorRTPhase>(phase));
}
KV_EXPORT void kvt_delete(IPluginV3* plugin) { delete plugin; }
KV_EXPORT IPluginV3* kvt_clone(IPluginV3* plugin) { return plugin->clone(); }
KV_EXPORT IPluginV3* kvt_attach(IPluginV3* plugin) { return runtime_of(plugin)->attachToContext(nullptr); }
// Serializes a plugin and creates it again, as an engine does.
KV_EXPORT IPluginV3* kvt_again(IPluginV3* plugin) {
  const PluginFieldCollection* fields = runtime_of(plugin)->getFieldsToSerialize();
  return creator(core_of(plugin)->getPluginName())->createPlugin("layer", fields, TensorRTPhase::kRUNTIME);
}

KV_EXPORT const char* kvt_identity(IPluginV3* plugin) {
  static std::string identity;
  IPluginV3OneCore* core = core_of(plugin);
  identity = std::string(core->getPluginNamespace()) + " " + core->getPluginName() + " " + core->getPluginVersion();
  return identity.c_str();
}
KV_EXPORT const char* kvt_timing_cache_id(IPluginV3* plugin) { return build_of(plugin)->getTimingCacheID(); }
KV_EXPORT int32_t kvt_outputs(IPluginV3* plugin) { return build_of(plugin)->getNbOutputs(); }

KV_EXPORT int32_t kvt_output_types(IPluginV3* plugin, const Tensor* in, int32_t inputs, Tensor* out, int32_t outputs) {
  std::vector<DataType> sources, answer(outputs);
  for (int32_t i = 0; i < inputs; ++i) sources.push_back(static_cast<DataType>(in[i].type));
  const int32_t code = build_of(plugin)->getOutputDataTypes(answer.data(), outputs, sources.data(), inputs);
  for (int32_t i = 0; i < outputs; ++i) out[i].type = static_cast<int32_t>(answer[i]);
  return code;
}

KV_EXPORT int32_t kvt_output_shapes(IPluginV3* plugin, const Tensor* in, int32_t inputs, Tensor* out, int32_t outputs) {
  Expressions expressions;
  std::vector<DimsExprs> sources(inputs), answer(outputs);
  for (int32_t i = 0; i < inputs; ++i) {
    sources[i].nbDims = in[i].rank;
    for (int32_t d = 0; d < in[i].rank; ++d) sources[i].d[d] = expressions.constant(in[i].size[d]);
  }
  const int32_t code =
      build_of(plugin)->getOutputShapes(sources.data(), inputs, nullptr, 0, answer.data(), outputs, expressions);
  for (int32_t i = 0; code == 0 && i < outputs; ++i) {
    out[i].rank = answer[i].nbDims;
    for (int32_t d = 0; d < answer[i].nbDims; ++d)
      out[i].size[d] = static_cast<const Expression*>(answer[i].d[d])->value;
  }
  return code;
}

KV_EXPORT bool kvt_supports(IPluginV3* plugin, int32_t at, const Tensor* all, int32_t inputs, int32_t outputs) {
  const Described tensors(all, inputs + outputs);
  return build_of(plugin)->supportsFormatCombination(at, tensors.open.data(), inputs, outputs);
}

KV_EXPORT int32_t kvt_configure(IPluginV3* plugin, const Tensor* in, int32_t inputs, const Tensor* out,
                                int32_t outputs) {
  const Described sources(in, inputs), answer(out, outputs);
  return build_of(plugin)->configurePlugin(sources.open.data(), inputs, answer.open.data(), outputs);
}

KV_EXPORT size_t kvt_workspace(IPluginV3* plugin, const Tensor* in, int32_t inputs, const Tensor* out,
                               int32_t outputs) {
  const Described sources(in, inputs), answer(out, outputs);
  return build_of(plugin)->getWorkspaceSize(sources.open.data(), inputs, answer.open.data(), outputs);
}

KV_EXPORT int32_t kvt_shape_change(IPluginV3* plugin, const Tensor* in, int32_t inputs, const Tensor* out,
                                   int32_t outputs) {
  const Described sources(in, inputs), answer(out, outputs);
  return runtime_of(plugin)->onShapeChange(sources.fixed.data(), inputs, answer.fixed.data(), outputs);
}

KV_EXPORT int32_t kvt_enqueue(IPluginV3* plugin, const Tensor* in, int32_t inputs, const Tensor* out, int32_t outputs,
                              void* workspace) {
  const Described sources(in, inputs), answer(out, outputs);
  return runtime_of(plugin)->enqueue(sources.fixed.data(), answer.fixed.data(), sources.data.data(), answer.data.data(),
                                     workspace, nullptr);
}
