// The operators of domain `kvexport` as a TensorRT plugin library. It exports only the functions that
// IPluginRegistry::loadLibrary looks for, so that it links no TensorRT library.
#include "experts.h"
#include "linear.h"
#include "linear_attention.h"
#include "operators.h"
#include "plugin.h"

namespace {

constexpr int32_t kPlugins = 5;

nvinfer1::IPluginCreatorInterface* const* creators() {
  static kv::tensorrt::Creator<kv::tensorrt::VoteAttention> vote_attention;
  static kv::tensorrt::Creator<kv::tensorrt::MergeCache> merge_cache;
  static kv::tensorrt::Creator<kv::tensorrt::Experts> experts;
  static kv::tensorrt::Creator<kv::tensorrt::LinearAttention> linear_attention;
  static kv::tensorrt::Creator<kv::tensorrt::Linear> linear;
  static nvinfer1::IPluginCreatorInterface* const all[kPlugins] = {&vote_attention, &merge_cache, &experts,
                                                                   &linear_attention, &linear};
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
