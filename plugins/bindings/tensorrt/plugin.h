// One operator as a TensorRT plugin: the three capabilities of IPluginV3, and its creator. Creating a plugin does not
// call CUDA; the first calls come when an instance is attached to a context or learns its shapes.
#pragma once

#include <NvInferRuntime.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "device_memory.h"
#include "tensors.h"

namespace kv::tensorrt {

using nvinfer1::Dims;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

constexpr const char* kVersion = "1";
constexpr const char* kNamespace = "kvexport";
constexpr size_t kAlignment = 256;  // of the kernels' workspace

inline Shape shape_of(const Dims& dims) {
  if (dims.nbDims < 0 || dims.nbDims > Dims::MAX_DIMS) throw Refusal("a tensor of unknown rank");
  return Shape(dims.d, dims.d + dims.nbDims);
}

inline Shape shape_of(const DimsExprs& dims) {
  if (dims.nbDims < 0 || dims.nbDims > Dims::MAX_DIMS) throw Refusal("a tensor of unknown rank");
  Shape shape;
  for (int32_t i = 0; i < dims.nbDims; ++i)
    shape.push_back(dims.d[i]->isConstant() ? dims.d[i]->getConstantValue() : -1);
  return shape;
}

inline size_t round_up(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

template <class Operator>
class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuild,
                     public nvinfer1::IPluginV3OneRuntime {
 public:
  using Arguments = typename Operator::Arguments;

  explicit Plugin(std::shared_ptr<const Fields> fields) : fields_(std::move(fields)), operator_(*fields_) {}

  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override {
    if (type == nvinfer1::PluginCapabilityType::kCORE) return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    if (type == nvinfer1::PluginCapabilityType::kBUILD) return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
    if (type == nvinfer1::PluginCapabilityType::kRUNTIME) return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    return nullptr;
  }
  // A clone knows the shapes of this plugin, since TensorRT may run it without another change of shapes.
  nvinfer1::IPluginV3* clone() noexcept override {
    return guarded<nvinfer1::IPluginV3*>(nullptr, [&] {
      std::unique_ptr<Plugin> copy(new Plugin(fields_));
      copy->call_ = call_, copy->inputs_ = inputs_, copy->workspace_size_ = workspace_size_;
      if (inputs_) copy->device_memory_ = copy->memory_.get(operator_.initial_memory(call_));
      return copy.release();
    });
  }

  const char* getPluginName() const noexcept override { return Operator::kName; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

  // ---- build ----

  int32_t getNbOutputs() const noexcept override { return operator_.outputs(); }

  int32_t getOutputDataTypes(DataType* types, int32_t outputs, const DataType* input_types,
                             int32_t inputs) const noexcept override {
    return guarded(-1, [&] {
      check_counts(inputs, outputs);
      for (int32_t i = 0; i < inputs; ++i)
        require(takes(i, input_types[i], input_types[0]), "input " + std::to_string(i) + " has the type " +
                                                              std::to_string(static_cast<int32_t>(input_types[i])) +
                                                              ", not " + text(operator_.types(i, input_types[0])));
      for (int32_t i = 0; i < outputs; ++i) types[i] = output_type(i, input_types[0]);
      return 0;
    });
  }

  int32_t getOutputShapes(const DimsExprs* inputs, int32_t count, const DimsExprs*, int32_t, DimsExprs* outputs,
                          int32_t output_count, IExprBuilder& builder) noexcept override {
    return guarded(-1, [&] {
      check_counts(count, output_count);
      call_of(shapes_of(inputs, count, [](const DimsExprs& x) { return shape_of(x); }));
      for (int32_t i = 0; i < output_count; ++i)
        outputs[i] =
            Operator::past_of(i) < 0 ? operator_.output_shape(i, inputs, builder) : inputs[Operator::past_of(i)];
      return 0;
    });
  }

  bool supportsFormatCombination(int32_t at, const DynamicPluginTensorDesc* tensors, int32_t inputs,
                                 int32_t outputs) noexcept override {
    return guarded(false, [&] {
      check_counts(inputs, outputs);
      require(at >= 0 && at < inputs + outputs, "there is no tensor " + std::to_string(at));
      const PluginTensorDesc& tensor = tensors[at].desc;
      const DataType first = tensors[0].desc.type;
      return tensor.format == nvinfer1::TensorFormat::kLINEAR && takes(0, first, first) &&
             (at < inputs ? takes(at, tensor.type, first) : tensor.type == output_type(at - inputs, first));
    });
  }

  int32_t configurePlugin(const DynamicPluginTensorDesc* in, int32_t inputs, const DynamicPluginTensorDesc*,
                          int32_t outputs) noexcept override {
    return guarded(-1, [&] {
      check_counts(inputs, outputs);
      const Arguments declared = call_of(shapes_of(in, inputs, [](const auto& x) { return shape_of(x.desc.dims); }));
      require(Operator::is_fixed(declared), "only the batch and the number of tokens may be left open");
      most_workspace(in, inputs);
      return 0;
    });
  }

  size_t getWorkspaceSize(const DynamicPluginTensorDesc* in, int32_t inputs, const DynamicPluginTensorDesc*,
                          int32_t outputs) const noexcept override {
    return guarded<size_t>(0, [&] {
      check_counts(inputs, outputs);
      return most_workspace(in, inputs) + kAlignment;
    });
  }

  const char* getTimingCacheID() noexcept override { return fields_->text(); }
  const char* getMetadataString() noexcept override { return fields_->text(); }

  // ---- runtime ----

  int32_t onShapeChange(const PluginTensorDesc* in, int32_t inputs, const PluginTensorDesc*,
                        int32_t outputs) noexcept override {
    return guarded(-1, [&] {
      check_counts(inputs, outputs);
      call_ = call_of(shapes_of(in, inputs, [](const PluginTensorDesc& x) { return shape_of(x.dims); }));
      operator_.set_types(call_, types_of(in, inputs, [](const PluginTensorDesc& x) { return x.type; }));
      inputs_ = inputs;
      workspace_size_ = workspace_of(call_);
      device_memory_ = memory_.get(operator_.initial_memory(call_));
      return 0;
    });
  }

  int32_t enqueue(const PluginTensorDesc*, const PluginTensorDesc*, const void* const* inputs, void* const* outputs,
                  void* workspace, cudaStream_t stream) noexcept override {
    return guarded(-1, [&] {
      if (inputs_ == 0) refuse("it was run before it learned its shapes");
      void* aligned = reinterpret_cast<void*>(round_up(reinterpret_cast<size_t>(workspace)));
      const KvCuda where{stream, aligned, workspace_size_, nullptr, KV_CUDA_EARLY};
      if (const char* problem = operator_.run(call_, where, device_memory_, inputs, inputs_, outputs)) refuse(problem);
      return 0;
    });
  }

  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override {
    return guarded<nvinfer1::IPluginV3*>(nullptr, [&] {
      std::unique_ptr<Plugin> attached(new Plugin(fields_));
      attached->memory_.get(operator_.initial_memory({}));
      return attached.release();
    });
  }

  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override { return fields_->collection(); }

 private:
  [[noreturn]] static void refuse(const std::string& message) {
    throw Refusal(std::string(Operator::kName) + ": " + message);
  }
  static void require(bool condition, const std::string& message) {
    if (!condition) refuse(message);
  }
  void check_counts(int32_t inputs, int32_t outputs) const {
    const int least = operator_.least_inputs(), most = operator_.most_inputs();
    if (inputs >= least && inputs <= most && outputs == operator_.outputs()) return;
    refuse("it has " + std::to_string(least) + (most > least ? " to " + std::to_string(most) : "") + " inputs and " +
           std::to_string(operator_.outputs()) + " outputs, not " + std::to_string(inputs) + " and " +
           std::to_string(outputs));
  }

  // Returns whether input i may have this type if the first input has the type `first`.
  bool takes(int i, DataType type, DataType first) const {
    const Types types = operator_.types(i, first);
    return std::find(types.begin(), types.end(), type) != types.end();
  }
  // A state output has the type of its past value, and any other output that of the first input.
  DataType output_type(int output, DataType first) const {
    const int past = Operator::past_of(output);
    return past <= 0 ? first : operator_.types(past, first)[0];
  }
  static std::string text(const Types& types) {
    std::string text;
    for (const DataType type : types) text += (text.empty() ? "" : " or ") + std::to_string(static_cast<int32_t>(type));
    return text;
  }

  template <class Tensor, class TypeOf>
  static Types types_of(const Tensor* tensors, int32_t count, TypeOf type) {
    Types types;
    for (int32_t i = 0; i < count; ++i) types.push_back(type(tensors[i]));
    return types;
  }
  template <class Tensor, class ShapeOf>
  static std::vector<Shape> shapes_of(const Tensor* tensors, int32_t count, ShapeOf shape) {
    std::vector<Shape> shapes;
    for (int32_t i = 0; i < count; ++i) shapes.push_back(shape(tensors[i]));
    return shapes;
  }

  // Returns the call of these input shapes; throws if they do not match each other.
  Arguments call_of(const std::vector<Shape>& shapes) const {
    const Arguments call = operator_.sized(shapes);
    const std::vector<Input> expected = operator_.inputs(call);
    for (size_t i = 0; i < shapes.size(); ++i)
      if (!fits(shapes[i], expected[i].shape))
        refuse(expected[i].name + " is " + kv::text(shapes[i]) + ", not " + kv::text(expected[i].shape));
    const std::string problem = operator_.misfit(call);
    require(problem.empty(), problem);
    return call;
  }
  static size_t workspace_of(const Arguments& call) {
    size_t bytes = 0;
    if (const char* problem = Operator::workspace(call, &bytes)) refuse(problem);
    if (const char* problem = Operator::problem(call)) refuse(problem);  // so an engine fails when it is built
    return bytes;
  }
  // Returns the largest workspace of the calls that a profile allows.
  size_t most_workspace(const DynamicPluginTensorDesc* in, int32_t inputs) const {
    Arguments largest = call_of(shapes_of(in, inputs, [](const auto& x) { return shape_of(x.max); }));
    operator_.set_types(largest, types_of(in, inputs, [](const auto& x) { return x.desc.type; }));
    size_t most = workspace_of(largest);
    Operator::each_smaller(largest, [&](const Arguments& call) { most = std::max(most, workspace_of(call)); });
    return most;
  }

  std::shared_ptr<const Fields> fields_;
  Operator operator_;
  DeviceMemory memory_;
  // The state of the last change of shapes.
  Arguments call_{};
  int32_t inputs_ = 0;
  size_t workspace_size_ = 0;
  void* device_memory_ = nullptr;
};

template <class Operator>
class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  Creator() : known_(Operator::fields()), names_{static_cast<int32_t>(known_.size()), known_.data()} {}

  nvinfer1::IPluginV3* createPlugin(const char*, const nvinfer1::PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase) noexcept override {
    return guarded<nvinfer1::IPluginV3*>(
        nullptr, [&] { return new Plugin<Operator>(std::make_shared<const Fields>(Operator::kName, known_, fields)); });
  }
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &names_; }
  const char* getPluginName() const noexcept override { return Operator::kName; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

 private:
  const std::vector<PluginField> known_;
  const nvinfer1::PluginFieldCollection names_;
};

}  // namespace kv::tensorrt
