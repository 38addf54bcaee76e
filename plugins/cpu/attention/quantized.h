// VoteAttention over a quantized cache: the steps before and after Decode or Prefill.
//
//   rotate_inputs:       query = hadamard(query); new keys and values = quantize(hadamard(row)), with their scales
//   decode.h, prefill.h: rotated queries over rotated keys and values
//   rotate_output:       output = hadamard(output), in the query's type
//
// One task per KV head and its query heads; a small call runs all of them in the calling thread. Q is the type of the
// call's query, K and V the types of the cache.
#pragma once

#include "attention.h"

namespace kv {
namespace KV_ISA {
namespace {

template <class Q, class K, class V>
struct QuantizedAttention {
  const KvVoteAttention& call;
  KvVoteAttention rotated;  // the arguments of Decode or Prefill
  KvScales new_scales;

  // Memory of the calling thread.
  struct Rows {
    Scratch<float> query, output, scales;
    Scratch<char> numbers;
  };

  QuantizedAttention(const KvVoteAttention& call, Rows& rows) : call(call), rotated(call) {
    const size_t queries = static_cast<size_t>(call.batch) * call.query_heads * call.tokens,
                 tokens = static_cast<size_t>(call.batch) * call.heads * call.tokens;
    const size_t keys = bytes_of<K>(tokens * call.key_size);
    char* numbers = rows.numbers.reserve(keys + bytes_of<V>(tokens * call.value_size));
    float* scales = rows.scales.reserve(2 * tokens);
    new_scales = {scales, scales + tokens};
    rotated.query = rows.query.reserve(queries * call.key_size);
    rotated.output = rows.output.reserve(queries * call.value_size);
    rotated.key = numbers, rotated.value = numbers + keys;
  }

  void rotate_inputs(size_t index) const {
    const int group = call.query_heads / call.heads, b = static_cast<int>(index / call.heads);
    const int64_t length = call.query_length[b];
    const int n = static_cast<int>(length < 0 ? 0 : length > call.tokens ? call.tokens : length);
    for (int g = 0; g < group; ++g)
      for (int t = 0; t < n; ++t) {
        const size_t row = (index * group + g) * call.tokens + t;
        float* const to = static_cast<float*>(const_cast<void*>(rotated.query)) + row * call.key_size;
        widen(static_cast<const Q*>(call.query) + row * call.key_size, to, call.key_size);
        hadamard(to, call.key_size);
      }
    for (int t = 0; t < n; ++t) {
      const size_t row = index * call.tokens + t;
      quantize_row<K>(call.key, rotated.key, row, call.key_size, new_scales.key);
      quantize_row<V>(call.value, rotated.value, row, call.value_size, new_scales.value);
    }
  }

  template <class T>
  void quantize_row(const void* from, const void* to, size_t row, int size, float* scale) const {
    static thread_local Scratch<float> scratch;
    float* const wide = scratch.reserve(size);
    widen(static_cast<const Q*>(from) + row * size, wide, size);
    hadamard(wide, size);
    scale[row] = quantize(wide, size, at(static_cast<T*>(const_cast<void*>(to)), row * size));
  }

  void rotate_output(size_t index) const {
    const size_t rows = static_cast<size_t>(call.query_heads / call.heads) * call.tokens;
    for (size_t row = index * rows; row < (index + 1) * rows; ++row) {
      float* const from = static_cast<float*>(rotated.output) + row * call.value_size;
      hadamard(from, call.value_size);
      narrow(from, static_cast<Q*>(call.output) + row * call.value_size, call.value_size);
    }
  }

  template <void (QuantizedAttention::*Task)(size_t) const>
  void each(KvRunner runner) {
    constexpr size_t kFew = 1 << 15;  // numbers that take less time than waking a thread
    const size_t count = static_cast<size_t>(call.batch) * call.heads;
    const auto task = [](void* self, size_t i) { (static_cast<QuantizedAttention*>(self)->*Task)(i); };
    if (static_cast<size_t>(call.batch) * call.query_heads * call.tokens * call.key_size > kFew)
      runner.parallel_for(runner.context, count, task, this);
    else
      for (size_t i = 0; i < count; ++i) task(this, i);
  }
};

// Runs Kernel (Decode or Prefill) over a quantized cache.
template <template <class, class> class Kernel, class Q, class K, class V>
void run_quantized(const KvVoteAttention& call, int splits, KvRunner runner) {
  using Rotation = QuantizedAttention<Q, K, V>;
  static thread_local typename Rotation::Rows rows;
  Rotation rotation(call, rows);
  rotation.template each<&Rotation::rotate_inputs>(runner);
  Kernel<K, V> kernel(rotation.rotated, splits);
  kernel.new_scales = rotation.new_scales;
  kernel.run(kernel, runner);
  rotation.template each<&Rotation::rotate_output>(runner);
}

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
