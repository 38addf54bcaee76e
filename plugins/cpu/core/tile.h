// The product of a tile of rows with a block of packed keys. Packing makes the arithmetic the limit: every load of keys
// is used once per row, up to six times. r is a row, k a key's address, i an input, j a vector of columns.
#pragma once

#include "simd.h"

namespace kv {
namespace KV_ISA {

constexpr int kTileRows = 6;
constexpr int kBlock = 64;  // keys
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int kTileVectors = 4;  // 32 registers
#else
constexpr int kTileVectors = 2;  // 16 registers
#endif

// Products are summed in runs of this many inputs, and then the runs are added up. One running sum over a thousand
// inputs or more takes the same time and has twice the rounding error.
constexpr int kRun = 128;

struct Nothing {
  void operator()() const {}
};

// Returns how often tile_products calls `each`, which can prefetch the next block step by step during the arithmetic.
constexpr int tile_steps(int size) { return size * (kBlock / (kTileVectors * W)); }

// out [R, kBlock] = rows x keys, or += with kAdd. rows: the addresses of R rows [size]; keys [size, kBlock].
template <bool kAdd = false, int R = kTileRows, class Each = Nothing>
static inline void tile_products(const float* const* rows, const float* keys, int size, float* out, Each each = {}) {
  for (int first = 0; first < size; first += kRun) {
    const int last = size - first < kRun ? size : first + kRun;
    for (int column = 0; column < kBlock; column += kTileVectors * W) {
      vf product[R][kTileVectors] = {};
      const float* k = keys + static_cast<size_t>(first) * kBlock + column;
      for (int i = first; i < last; ++i, k += kBlock) {
        each();
        vf key[kTileVectors];
        for (int j = 0; j < kTileVectors; ++j) key[j] = load(k + j * W);
        for (int r = 0; r < R; ++r)
          for (int j = 0; j < kTileVectors; ++j) product[r][j] += rows[r][i] * key[j];
      }
      for (int r = 0; r < R; ++r)
        for (int j = 0; j < kTileVectors; ++j) {
          float* const to = out + r * kBlock + column + j * W;
          store(to, kAdd || first > 0 ? load(to) + product[r][j] : product[r][j]);
        }
    }
  }
}

// Packs W rows [W, size], each times its factor, as W columns of a block of keys: out [size, kBlock].
static inline void pack_columns(const float* rows, int size, vf factor, float* out) {
  int i = 0;
  for (; i + W <= size; i += W) {
    vf v[W];
    for (int j = 0; j < W; ++j) v[j] = load(rows + j * size + i);
    transpose(v);
    for (int j = 0; j < W; ++j) store(out + (i + j) * kBlock, v[j] * factor);
  }
  for (; i < size; ++i)
    for (int j = 0; j < W; ++j) out[i * kBlock + j] = rows[j * size + i] * factor[j];
}

}  // namespace KV_ISA
}  // namespace kv
