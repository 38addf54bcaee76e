// Products with weights of the call's type, stored row by row, and blocks of float32 for the products of prompts.
//
//   row_product     one row times one column: one stream of weights
//   small_tile      kRows rows times kColumns columns
//   pack            a block of columns, kDepth inputs at a time, for core/tile.h
#pragma once

#include "../core/scratch.h"
#include "../core/tile.h"

namespace kv {
namespace KV_ISA {

constexpr int kAhead = 8192;  // bytes from a read to the prefetch that it starts
constexpr int kDepth = 512;   // inputs of a packed block

// A small tile has W sums, which `sums` folds into one vector. With few registers, or short vectors, its shape differs.
constexpr int kRows = W == 8 ? 2 : 4;
constexpr int kColumns = 4;
static_assert(kRows * kColumns % W == 0, "a tile is whole vectors");

// Returns a row times a column. The weights are one stream with nothing between its loads, so hardware prefetching
// works best. Several rows in one pass were slower than one after another, since later rows find the weights in the
// first cache.
template <class Of>
static inline float row_product(const Of* w, const float* x, int64_t inputs) {
  vf part[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= inputs; i += 4 * W)
    for (int j = 0; j < 4; ++j) part[j] += load(w + i + j * W) * load(x + i + j * W);
  for (; i + W <= inputs; i += W) part[0] += load(w + i) * load(x + i);
  float rest = 0.0f;
  for (; i < inputs; ++i) rest += static_cast<float>(w[i]) * x[i];
  return sum((part[0] + part[1]) + (part[2] + part[3])) + rest;
}

// Computes result [kRows, kColumns]: rows r times columns c, of `inputs` numbers each. ahead: whether weights kAhead
// bytes further are prefetched.
template <class T>
static inline void small_tile(const float* const* r, const T* const* c, int64_t inputs, bool ahead, float* result) {
  vf lanes[kRows * kColumns] = {};
  const int64_t whole = inputs / W * W;
  for (int64_t k = 0; k < whole; k += W) {
    vf w[kColumns];
    for (int j = 0; j < kColumns; ++j) w[j] = load(c[j] + k);
    if (ahead)
      for (int j = 0; j < kColumns; ++j) __builtin_prefetch(reinterpret_cast<const char*>(c[j] + k) + kAhead, 0, 2);
    for (int i = 0; i < kRows; ++i) {
      const vf v = load(r[i] + k);
      for (int j = 0; j < kColumns; ++j) lanes[i * kColumns + j] += v * w[j];
    }
  }
  for (int i = 0; i < kRows * kColumns; i += W) store(result + i, sums<1>(lanes + i));
  for (int64_t k = whole; k < inputs; ++k)
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kColumns; ++j) result[i * kColumns + j] += r[i][k] * static_cast<float>(c[j][k]);
}

// Packs `columns` rows of a weight, `depth` inputs each and `stride` elements apart, as packed [depth, kBlock]. Columns
// past the end repeat the last one.
template <class Of>
static inline void pack(const Of* weight, int64_t stride, int columns, int depth, float* packed) {
  for (int column = 0; column < kBlock; column += W) {
    const Of* w[W];
    for (int j = 0; j < W; ++j) w[j] = weight + min_of(column + j, columns - 1) * stride;
    int k = 0;
    for (; k + W <= depth; k += W) {
      vf v[W];
      for (int j = 0; j < W; ++j) v[j] = load(w[j] + k);
      transpose(v);
      for (int j = 0; j < W; ++j) store(packed + (k + j) * kBlock + column, v[j]);
    }
    for (; k < depth; ++k)
      for (int j = 0; j < W; ++j) packed[k * kBlock + column + j] = static_cast<float>(w[j][k]);
  }
}

}  // namespace KV_ISA
}  // namespace kv
