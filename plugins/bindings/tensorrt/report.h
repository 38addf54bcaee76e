// Errors of the plugins: a Refusal inside, and at the boundary to TensorRT a line in its log and a failing return
// value.
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

// The finder that TensorRT passes when it loads the library.
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

// Returns the result of `body`; if it throws, logs the reason and returns `otherwise`.
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
