// The steps after the products of a row, and the rotation of heads after all products.
//
//   y = (x + bias) silu(g) + residual     x: the product with the weight, g: that with the gate
//   y in the output's type, and in the order of its heads
#pragma once

#include "../../abi/linear.h"
#include "../core/simd.h"

namespace kv {
namespace KV_ISA {

static inline vf silu(vf x) { return x / (1.0f + exp(-x)); }

template <class T>
static inline void add_row(const T* y, int count, float* x) {
  for (int i = 0; i < count; ++i) x[i] += static_cast<float>(y[i]);
}

template <class T>
static inline T* head_of(const KvLinear& a, const KvProduct& p, int64_t row, int64_t h) {
  const int64_t size = p.outputs / p.heads, b = row / a.tokens, t = row % a.tokens;
  return static_cast<T*>(p.output) + ((b * p.heads + h) * a.tokens + t) * size;
}

// Computes the epilogue of the columns [column, column + count) of a row: x and g are its products with the weight and
// with the gate.
template <class T>
static inline void epilogue(const KvLinear& a, const KvProduct& p, int64_t row, int64_t column, int count, float* x,
                            const float* g) {
  if (p.bias) add_row(static_cast<const T*>(p.bias) + column, count, x);
  if (a.gate.data) {
    int i = 0;
    for (; i + W <= count; i += W) store(x + i, load(x + i) * silu(load(g + i)));
    for (; i < count; ++i) x[i] *= silu(splat(g[i]))[0];
  }
  if (a.residual) add_row(static_cast<const T*>(a.residual) + row * p.outputs + column, count, x);
  if (p.heads == 1) return narrow(x, static_cast<T*>(p.output) + row * p.outputs + column, count);
  const int64_t size = p.outputs / p.heads;
  for (int64_t i = 0, run; i < count; i += run) {
    const int64_t h = (column + i) / size, at = (column + i) % size;
    run = size - at < count - i ? size - at : count - i;
    narrow(x + i, head_of<T>(a, p, row, h) + at, static_cast<int>(run));
  }
}

static inline bool rotates(const KvLinear& a) {
  for (const KvProduct* p = a.products; p < a.products + a.count; ++p)
    if (p->rotated) return true;
  return false;
}

// Rotates the planes of a row's heads.
template <class T>
static inline void rotate(const KvLinear& a, int64_t row) {
  const T* const cosine = static_cast<const T*>(a.cosine) + row * a.planes;
  const T* const sine = static_cast<const T*>(a.sine) + row * a.planes;
  for (const KvProduct* p = a.products; p < a.products + a.count; ++p)
    for (int64_t h = 0; p->rotated && h < p->heads; ++h) {
      T *const x = head_of<T>(a, *p, row, h), *const y = x + a.planes;
      int64_t i = 0;
      for (; i + W <= a.planes; i += W) {
        const vf u = load(x + i), v = load(y + i), c = load(cosine + i), s = load(sine + i);
        store(x + i, u * c - v * s), store(y + i, v * c + u * s);
      }
      for (; i < a.planes; ++i) {
        const float u = static_cast<float>(x[i]), v = static_cast<float>(y[i]);
        const float c = static_cast<float>(cosine[i]), s = static_cast<float>(sine[i]);
        x[i] = static_cast<T>(u * c - v * s), y[i] = static_cast<T>(v * c + u * s);
      }
    }
}

}  // namespace KV_ISA
}  // namespace kv
