// TensorRT's side of a plugin, without TensorRT: expressions for shapes, a logger that stores its lines, and the
// library's two entry points.
#pragma once

#include <NvInferRuntime.h>

#include <deque>
#include <string>

extern "C" nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) noexcept;
extern "C" void setLoggerFinder(nvinfer1::ILoggerFinder* finder) noexcept;

namespace harness {

using namespace nvinfer1;

// A constant, or below zero a symbol.
class Expression : public IDimensionExpr, private apiv::VDimensionExpr {
 public:
  explicit Expression(int64_t value) : value(value) { mImpl = this; }
  const int64_t value;

 private:
  bool isConstant() const override { return value >= 0; }
  int64_t getConstantValue() const override { return value; }
  bool isSizeTensor() const override { return false; }
};

// A builder of expressions without operations, which the plugins do not need.
class Expressions : public IExprBuilder, private apiv::VExprBuilder {
 public:
  Expressions() { mImpl = this; }
  const IDimensionExpr* constant(int64_t value) override { return &expressions_.emplace_back(value); }

 private:
  const IDimensionExpr* operation(DimensionOperation, const IDimensionExpr&, const IDimensionExpr&) override {
    return nullptr;
  }
  const IDimensionExpr* declareSizeTensor(int32_t, const IDimensionExpr&, const IDimensionExpr&) override {
    return nullptr;
  }
  std::deque<Expression> expressions_;
};

class Log : public ILogger, public ILoggerFinder {
 public:
  std::string lines;
  void log(Severity severity, const char* line) noexcept override {
    lines += (severity == Severity::kERROR ? "" : "not an error: ") + std::string(line) + "\n";
  }
  ILogger* findLogger() override { return this; }
};

inline IPluginCreatorV3One* creator(const std::string& name) {
  int32_t count = 0;
  IPluginCreatorInterface* const* all = getCreators(count);
  for (int32_t i = 0; i < count; ++i) {
    auto* one = static_cast<IPluginCreatorV3One*>(all[i]);
    if (name == one->getPluginName()) return one;
  }
  return nullptr;
}

inline IPluginV3OneBuild* build_of(IPluginV3* plugin) {
  return static_cast<IPluginV3OneBuild*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
}
inline IPluginV3OneRuntime* runtime_of(IPluginV3* plugin) {
  return static_cast<IPluginV3OneRuntime*>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
}
inline IPluginV3OneCore* core_of(IPluginV3* plugin) {
  return static_cast<IPluginV3OneCore*>(plugin->getCapabilityInterface(PluginCapabilityType::kCORE));
}

}  // namespace harness
