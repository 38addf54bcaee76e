// VoteAttention over a small cache: what its kernels are given, and what becomes of their output.
//
//   prepare: query = hadamard(query); new keys and values = quantize(hadamard(row)), with their scales
//   decode.h, prefill.h: rotated queries over rotated keys and values
//   finish: output = hadamard(output), in the query's type
//
// One task per KV head and its query heads, or all of them in this thread where they are few.
#pragma once

#include "attention.h"

namespace kv {
namespace KV_ISA {
namespace {

template <class Q, class K, class V>
struct SmallCall {
  const KvVoteAttention& a;
  KvVoteAttention inner;
  KvScales new_scales;

  // Memory of the calling thread.
  struct Rows {
    Scratch<float> query, output, scales;
    Scratch<char> numbers;
  };

  SmallCall(const KvVoteAttention& call, Rows& rows) : a(call), inner(call) {
    const size_t queries = static_cast<size_t>(a.batch) * a.query_heads * a.tokens,
                 tokens = static_cast<size_t>(a.batch) * a.heads * a.tokens;
    const size_t keys = bytes_of<K>(tokens * a.key_size);
    char* numbers = rows.numbers.reserve(keys + bytes_of<V>(tokens * a.value_size));
    float* scales = rows.scales.reserve(2 * tokens);
    new_scales = {scales, scales + tokens};
    inner.query = rows.query.reserve(queries * a.key_size);
    inner.output = rows.output.reserve(queries * a.value_size);
    inner.key = numbers, inner.value = numbers + keys;
  }

  void prepare(size_t index) const {
    const int group = a.query_heads / a.heads, b = static_cast<int>(index / a.heads);
    const int64_t length = a.query_length[b];
    const int n = static_cast<int>(length < 0 ? 0 : length > a.tokens ? a.tokens : length);
    for (int g = 0; g < group; ++g)
      for (int t = 0; t < n; ++t) {
        const size_t row = (index * group + g) * a.tokens + t;
        float* const to = static_cast<float*>(const_cast<void*>(inner.query)) + row * a.key_size;
        widen(static_cast<const Q*>(a.query) + row * a.key_size, to, a.key_size);
        hadamard(to, a.key_size);
      }
    for (int t = 0; t < n; ++t) {
      const size_t row = index * a.tokens + t;
      append<K>(a.key, inner.key, row, a.key_size, new_scales.key);
      append<V>(a.value, inner.value, row, a.value_size, new_scales.value);
    }
  }

  template <class T>
  void append(const void* from, const void* to, size_t row, int size, float* scale) const {
    static thread_local Scratch<float> scratch;
    float* const wide = scratch.reserve(size);
    widen(static_cast<const Q*>(from) + row * size, wide, size);
    hadamard(wide, size);
    scale[row] = quantize(wide, size, at(static_cast<T*>(const_cast<void*>(to)), row * size));
  }

  void finish(size_t index) const {
    const size_t rows = static_cast<size_t>(a.query_heads / a.heads) * a.tokens;
    for (size_t row = index * rows; row < (index + 1) * rows; ++row) {
      float* const from = static_cast<float*>(inner.output) + row * a.value_size;
      hadamard(from, a.value_size);
      narrow(from, static_cast<Q*>(a.output) + row * a.value_size, a.value_size);
    }
  }

  template <void (SmallCall::*Task)(size_t) const>
  void each(KvRunner runner) {
    constexpr size_t kFew = 1 << 15;  // numbers; they take less time than it takes to wake a thread
    const size_t count = static_cast<size_t>(a.batch) * a.heads;
    const auto task = [](void* self, size_t i) { (static_cast<SmallCall*>(self)->*Task)(i); };
    if (static_cast<size_t>(a.batch) * a.query_heads * a.tokens * a.key_size > kFew)
      runner.parallel_for(runner.context, count, task, this);
    else
      for (size_t i = 0; i < count; ++i) task(this, i);
  }
};

template <template <class, class> class Call, class Q, class K, class V>
void run_small(const KvVoteAttention& a, int splits, KvRunner runner) {
  using Small = SmallCall<Q, K, V>;
  static thread_local typename Small::Rows rows;
  Small small(a, rows);
  small.template each<&Small::prepare>(runner);
  Call<K, V> call(small.inner, splits);
  call.new_scales = small.new_scales;
  call.run(call, runner);
  small.template each<&Small::finish>(runner);
}

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
