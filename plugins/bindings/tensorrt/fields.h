// The fields that a plugin is made of: a node's attributes as TensorRT's parser hands them over, and again what an
// engine keeps of a plugin.
#pragma once

#include <NvInferRuntime.h>

#include <cstring>
#include <string>
#include <vector>

#include "report.h"

namespace kv::tensorrt {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

// A copy of a collection's fields, all of known names. A Node in the sense of ../node/read.h: the reader says which
// field is missing.
class Fields {
 public:
  Fields(const char* op, const std::vector<PluginField>& known, const nvinfer1::PluginFieldCollection* given)
      : op_(op) {
    require(given && given->nbFields >= 0 && (given->fields || given->nbFields == 0), "no fields were given");
    for (int32_t i = 0; i < given->nbFields; ++i) require(given->fields[i].name, "a field has no name");
    for (int32_t i = 0; i < given->nbFields; ++i) require_known(known, given->fields[i].name);
    kept_.reserve(known.size());
    for (const PluginField& one : known)
      for (int32_t i = 0; i < given->nbFields; ++i)
        if (strcmp(given->fields[i].name, one.name) == 0) keep(one.name, given->fields[i]);
    for (const Kept& field : kept_) {
      fields_.emplace_back(field.name, field.bytes.data(), field.type, field.length);
      text_ += std::string(text_.empty() ? "" : " ") + field.name + "=" + text(field);
    }
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }
  Fields(const Fields&) = delete;
  Fields& operator=(const Fields&) = delete;

  const nvinfer1::PluginFieldCollection* collection() const { return &collection_; }
  // The same for the same values, whatever their order and the width of their integers.
  const char* text() const { return text_.c_str(); }

  bool has(const char* name) const { return find(name) != nullptr; }

  float number(const char* name) const {
    const Kept& field = read(name, "one float32");
    require_type(field, field.type == PluginFieldType::kFLOAT32 && field.length == 1, "one float32");
    return element<float>(field, 0);
  }
  int integer(const char* name) const {
    const Kept& field = read(name, "one int32");
    require_type(field, is_integer(field) && field.length == 1, "one int32");
    return integer(field, 0);
  }
  std::string word(const char* name) const {
    const Kept& field = read(name, "characters");
    require_type(field, field.type == PluginFieldType::kCHAR, "characters");
    return characters(field);
  }
  std::vector<float> numbers(const char* name) const {
    const Kept& field = read(name, "float32s");
    require_type(field, field.type == PluginFieldType::kFLOAT32, "float32s");
    std::vector<float> result(field.length);
    for (int32_t i = 0; i < field.length; ++i) result[i] = element<float>(field, i);
    return result;
  }
  std::vector<int> integers(const char* name) const {
    const Kept& field = read(name, "int32s");
    require_type(field, is_integer(field), "int32s");
    std::vector<int> result(field.length);
    for (int32_t i = 0; i < field.length; ++i) result[i] = integer(field, i);
    return result;
  }
  void require(bool condition, const std::string& message) const {
    if (!condition) throw Refusal(std::string(op_) + ": " + message);
  }

 private:
  void require_known(const std::vector<PluginField>& known, const char* name) const {
    std::string names;
    for (const PluginField& one : known) {
      if (strcmp(one.name, name) == 0) return;
      names += (names.empty() ? "" : ", ") + std::string(one.name);
    }
    require(false, std::string("there is no field ") + name + "; known: " + names);
  }

  struct Kept {
    const char* name;
    PluginFieldType type;
    int32_t length;
    std::string bytes;
  };
  // More than any attribute has, and few enough that a wrong length is refused before it is believed.
  static constexpr int32_t kMostElements = 1024;

  static size_t element_size(PluginFieldType type) {
    if (type == PluginFieldType::kFLOAT32 || type == PluginFieldType::kINT32) return 4;
    if (type == PluginFieldType::kINT64) return 8;
    return type == PluginFieldType::kCHAR ? 1 : 0;
  }
  static bool is_integer(const Kept& field) {
    return field.type == PluginFieldType::kINT32 || field.type == PluginFieldType::kINT64;
  }
  template <class T>
  static T element(const Kept& field, int32_t i) {
    T x;
    memcpy(&x, field.bytes.data() + i * sizeof(T), sizeof(T));
    return x;
  }
  // The parser ends a string with a zero, a caller from Python need not.
  static std::string characters(const Kept& field) {
    const bool ends = !field.bytes.empty() && field.bytes.back() == '\0';
    return field.bytes.substr(0, field.bytes.size() - ends);
  }

  void keep(const char* name, const PluginField& field) {
    const std::string which = std::string("the field ") + name;
    require(!find(name), which + " is given twice");
    const size_t size = element_size(field.type);
    require(size > 0, which + " has the type " + std::to_string(static_cast<int32_t>(field.type)) +
                          "; here are fields of float32, int32, int64 and characters");
    require(field.length >= 0 && field.length <= kMostElements,
            which + " has " + std::to_string(field.length) + " elements, and 0 to " + std::to_string(kMostElements));
    require(field.data || field.length == 0, which + " has no data");
    std::string bytes(field.length * size, '\0');
    if (!bytes.empty()) memcpy(&bytes[0], field.data, bytes.size());
    kept_.push_back({name, field.type, field.length, std::move(bytes)});
  }
  const Kept* find(const char* name) const {
    for (const Kept& field : kept_)
      if (strcmp(field.name, name) == 0) return &field;
    return nullptr;
  }
  const Kept& read(const char* name, const char* expected) const {
    const Kept* field = find(name);
    require(field, std::string("the field ") + name + " is missing; it should be " + expected);
    return *field;
  }
  void require_type(const Kept& field, bool condition, const char* expected) const {
    const char* type = field.type == PluginFieldType::kFLOAT32 ? " float32"
                       : field.type == PluginFieldType::kINT32 ? " int32"
                       : field.type == PluginFieldType::kINT64 ? " int64"
                                                               : " characters";
    require(condition, std::string("the field ") + field.name + " should be " + expected + ", and is " +
                           std::to_string(field.length) + type);
  }
  int integer(const Kept& field, int32_t i) const {
    if (field.type == PluginFieldType::kINT32) return element<int32_t>(field, i);
    const int64_t x = element<int64_t>(field, i);
    require(x == static_cast<int>(x),
            std::string("the field ") + field.name + " is out of range: " + std::to_string(x));
    return static_cast<int>(x);
  }
  std::string text(const Kept& field) const {
    if (field.type == PluginFieldType::kCHAR) return characters(field);
    std::string result;
    for (int32_t i = 0; i < field.length; ++i) {
      char number[32];
      if (field.type == PluginFieldType::kFLOAT32)
        snprintf(number, sizeof number, "%.9g", static_cast<double>(element<float>(field, i)));
      else
        snprintf(number, sizeof number, "%d", integer(field, i));
      result += (i ? "," : "") + std::string(number);
    }
    return result;
  }

  const char* op_;
  std::vector<Kept> kept_;
  std::vector<PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
  std::string text_;
};

}  // namespace kv::tensorrt
