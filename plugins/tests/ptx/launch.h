// The launch that runs the PTX of a kernel instead of its host version (../../cuda/core/launch.h, with KV_PTX).
#pragma once

#include <cstddef>

namespace kv {
namespace ptx {

// type: the program's name by typeid. Returns nullptr, or a static string that says what went wrong.
const char* launch(const char* type, const void* arguments, size_t size, size_t blocks, int threads, size_t shared,
                   int order, bool late_copies);

}  // namespace ptx
}  // namespace kv
