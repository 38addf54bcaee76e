// The rows of a call of Linear before its products: in float32, with the heads put together, normalised.
#pragma once

#include "../core/kernels.h"
#include "../core/scratch.h"
#include "../core/simd.h"

namespace kv {
namespace KV_ISA {

template <class Task>
static void for_all(KvRunner runner, size_t count, const Task& task) {
  runner.parallel_for(
      runner.context, count, [](void* data, size_t i) { (*static_cast<const Task*>(data))(i); },
      const_cast<Task*>(&task));
}

constexpr int kRowsOfTask = 16;

template <class Each>
static void for_rows(KvRunner runner, int64_t rows, const Each& each) {
  const auto task = [&](size_t i) {
    const int64_t first = static_cast<int64_t>(i) * kRowsOfTask;
    for (int64_t row = first; row < first + kRowsOfTask && row < rows; ++row) each(row);
  };
  if (rows <= kRowsOfTask)
    task(0);
  else
    for_all(runner, (rows + kRowsOfTask - 1) / kRowsOfTask, task);
}

// Divides x [size] by its root mean square, and multiplies it by `scale`.
template <class T>
static void normalize(const T* scale, float epsilon, int64_t size, float* x) {
  const int count = static_cast<int>(size);
  const float factor = 1.0f / __builtin_sqrtf(dot(x, x, count) / static_cast<float>(size) + epsilon);
  int i = 0;
  for (; i + W <= count; i += W) store(x + i, load(x + i) * factor * load(scale + i));
  for (; i < count; ++i) x[i] *= factor * static_cast<float>(scale[i]);
}

// Returns the rows of a call in float32, one after another: its input itself, or a copy.
template <class T>
static const float* rows_of(const KvLinear& a, KvRunner runner, Scratch<float>& scratch) {
  const T* const input = static_cast<const T*>(a.input);
  const bool apart = a.input_heads != 1 && a.tokens != 1;
  if constexpr (sizeof(T) == sizeof(float))
    if (!apart && !a.norm) return input;
  const int64_t rows = a.batch * a.tokens, heads = apart ? a.input_heads : 1, size = a.inputs / heads;
  float* const copy = scratch.reserve(rows * a.inputs);
  for_rows(runner, rows, [&](int64_t row) {
    const int64_t b = row / a.tokens, t = row % a.tokens;
    float* const x = copy + row * a.inputs;
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t at = apart ? (b * heads + h) * a.tokens + t : row;
      widen(input + at * size, x + h * size, static_cast<int>(size));
    }
    if (a.norm) normalize(static_cast<const T*>(a.norm), a.epsilon, a.inputs, x);
  });
  return copy;
}

}  // namespace KV_ISA
}  // namespace kv
