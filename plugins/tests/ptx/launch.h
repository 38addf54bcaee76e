// How a launch of the kernels compiled for the host runs their PTX instead (../../cuda/core/launch.h, with KV_PTX).
#pragma once

#include <cstddef>

namespace kv {
namespace ptx {

// type: the program's, as typeid names it. Returns nullptr, or a static string that says what went wrong.
const char* launch(const char* type, const void* arguments, size_t size, size_t blocks, int threads, size_t shared,
                   int order, bool late_copies);

}  // namespace ptx
}  // namespace kv
