// How what cannot be done is said: a Refusal inside, a line in TensorRT's log and a failing answer at its boundary.
#pragma once

#include <NvInferRuntime.h>

#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace kv::tensorrt {

struct Refusal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What TensorRT hands over where it loads the library.
inline std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

inline void log_error(const char* message) noexcept {
  try {
    const std::string line = std::string("kvexport: ") + message;
    nvinfer1::ILoggerFinder* finder = logger_finder;
    nvinfer1::ILogger* logger = finder ? finder->findLogger() : nullptr;
    if (logger)
      logger->log(nvinfer1::ILogger::Severity::kERROR, line.c_str());
    else
      fprintf(stderr, "%s\n", line.c_str());
  } catch (...) {  // no memory for the line, or a finder that throws
  }
}

// What `body` returns; where it throws, the reason is logged and the answer is `otherwise`.
template <class Result, class Body>
Result guarded(Result otherwise, Body body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    log_error(error.what());
  } catch (...) {
    log_error("an unknown error");
  }
  return otherwise;
}

}  // namespace kv::tensorrt
