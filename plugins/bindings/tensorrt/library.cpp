// The operators of domain `kvexport` as a TensorRT plugin library. It exports only the functions that
// IPluginRegistry::loadLibrary looks for, so that it links no TensorRT library.
#include "operators.h"
#include "plugin.h"

namespace {

constexpr int32_t kPlugins = 2;

nvinfer1::IPluginCreatorInterface* const* creators() {
  static kv::tensorrt::Creator<kv::tensorrt::VoteAttention> vote_attention;
  static kv::tensorrt::Creator<kv::tensorrt::MergeCache> merge_cache;
  static nvinfer1::IPluginCreatorInterface* const all[kPlugins] = {&vote_attention, &merge_cache};
  return all;
}

}  // namespace

#define KV_EXPORT extern "C" __attribute__((visibility("default")))

KV_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) noexcept {
  nvinfer1::IPluginCreatorInterface* const* all =
      kv::tensorrt::guarded<nvinfer1::IPluginCreatorInterface* const*>(nullptr, creators);
  count = all ? kPlugins : 0;
  return all;
}

KV_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) noexcept { kv::tensorrt::logger_finder = finder; }
