// The fields from which a plugin is created: a node's attributes, from TensorRT's parser or from a serialized engine.
#pragma once

#include <NvInferRuntime.h>

#include <cstring>
#include <string>
#include <vector>

#include "report.h"

namespace kv::tensorrt {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

// A copy of a collection's fields, all of known names. It is a Node in the sense of ../node/read.h, whose functions
// report missing fields.
class Fields {
 public:
  Fields(const char* op, const std::vector<PluginField>& known, const nvinfer1::PluginFieldCollection* collection)
      : op_(op) {
    require(collection && collection->nbFields >= 0 && (collection->fields || collection->nbFields == 0),
            "no fields were given");
    for (int32_t i = 0; i < collection->nbFields; ++i) require(collection->fields[i].name, "a field has no name");
    for (int32_t i = 0; i < collection->nbFields; ++i) require_known(known, collection->fields[i].name);
    copies_.reserve(known.size());
    for (const PluginField& one : known)
      for (int32_t i = 0; i < collection->nbFields; ++i)
        if (strcmp(collection->fields[i].name, one.name) == 0) add(one.name, collection->fields[i]);
    for (const Field& field : copies_) {
      fields_.emplace_back(field.name, field.bytes.data(), field.type, field.length);
      text_ += std::string(text_.empty() ? "" : " ") + field.name + "=" + text(field);
    }
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }
  Fields(const Fields&) = delete;
  Fields& operator=(const Fields&) = delete;

  const nvinfer1::PluginFieldCollection* collection() const { return &collection_; }
  // Returns the fields as text, equal for equal values in any order and with any width of integers.
  const char* text() const { return text_.c_str(); }

  bool has(const char* name) const { return find(name) != nullptr; }

  float number(const char* name) const {
    const Field& field = read(name, "one float32");
    require_type(field, field.type == PluginFieldType::kFLOAT32 && field.length == 1, "one float32");
    return element<float>(field, 0);
  }
  int integer(const char* name) const {
    const Field& field = read(name, "one int32");
    require_type(field, is_integer(field) && field.length == 1, "one int32");
    return integer(field, 0);
  }
  std::string word(const char* name) const {
    const Field& field = read(name, "characters");
    require_type(field, field.type == PluginFieldType::kCHAR, "characters");
    return characters(field);
  }
  std::vector<float> numbers(const char* name) const {
    const Field& field = read(name, "float32s");
    require_type(field, field.type == PluginFieldType::kFLOAT32, "float32s");
    std::vector<float> result(field.length);
    for (int32_t i = 0; i < field.length; ++i) result[i] = element<float>(field, i);
    return result;
  }
  std::vector<int> integers(const char* name) const {
    const Field& field = read(name, "int32s");
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

  struct Field {
    const char* name;
    PluginFieldType type;
    int32_t length;
    std::string bytes;
  };
  // More than any attribute has, and few enough that a wrong length is refused before any memory is read.
  static constexpr int32_t kMostElements = 1024;

  static size_t element_size(PluginFieldType type) {
    if (type == PluginFieldType::kFLOAT32 || type == PluginFieldType::kINT32) return 4;
    if (type == PluginFieldType::kINT64) return 8;
    return type == PluginFieldType::kCHAR ? 1 : 0;
  }
  static bool is_integer(const Field& field) {
    return field.type == PluginFieldType::kINT32 || field.type == PluginFieldType::kINT64;
  }
  template <class T>
  static T element(const Field& field, int32_t i) {
    T x;
    memcpy(&x, field.bytes.data() + i * sizeof(T), sizeof(T));
    return x;
  }
  // The parser ends a string with a zero; a caller from Python may omit it.
  static std::string characters(const Field& field) {
    const bool ends = !field.bytes.empty() && field.bytes.back() == '\0';
    return field.bytes.substr(0, field.bytes.size() - ends);
  }

  void add(const char* name, const PluginField& field) {
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
    copies_.push_back({name, field.type, field.length, std::move(bytes)});
  }
  const Field* find(const char* name) const {
    for (const Field& field : copies_)
      if (strcmp(field.name, name) == 0) return &field;
    return nullptr;
  }
  const Field& read(const char* name, const char* expected) const {
    const Field* field = find(name);
    require(field, std::string("the field ") + name + " is missing; it should be " + expected);
    return *field;
  }
  void require_type(const Field& field, bool condition, const char* expected) const {
    const char* type = field.type == PluginFieldType::kFLOAT32 ? " float32"
                       : field.type == PluginFieldType::kINT32 ? " int32"
                       : field.type == PluginFieldType::kINT64 ? " int64"
                                                               : " characters";
    require(condition, std::string("the field ") + field.name + " should be " + expected + ", and is " +
                           std::to_string(field.length) + type);
  }
  int integer(const Field& field, int32_t i) const {
    if (field.type == PluginFieldType::kINT32) return element<int32_t>(field, i);
    const int64_t x = element<int64_t>(field, i);
    require(x == static_cast<int>(x),
            std::string("the field ") + field.name + " is out of range: " + std::to_string(x));
    return static_cast<int>(x);
  }
  std::string text(const Field& field) const {
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
  std::vector<Field> copies_;
  std::vector<PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
  std::string text_;
};

}  // namespace kv::tensorrt
