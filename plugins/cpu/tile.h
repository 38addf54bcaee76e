// The product of a tile of rows with a block of keys, at the speed of the arithmetic: both packed, so that every load
// is used six times.
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

// out [kTileRows, kBlock] = rows x keys, of rows [size, kTileRows] and keys [size, kBlock].
static inline void tile_products(const float* rows, const float* keys, int size, float* out) {
  for (int column = 0; column < kBlock; column += kTileVectors * W) {
    vf total[kTileRows][kTileVectors] = {};
    const float *row = rows, *k = keys + column;
    for (int i = 0; i < size; ++i, row += kTileRows, k += kBlock) {
      vf key[kTileVectors];
      for (int j = 0; j < kTileVectors; ++j) key[j] = load(k + j * W);
      for (int r = 0; r < kTileRows; ++r)
        for (int j = 0; j < kTileVectors; ++j) total[r][j] += row[r] * key[j];
    }
    for (int r = 0; r < kTileRows; ++r)
      for (int j = 0; j < kTileVectors; ++j) store(out + r * kBlock + column + j * W, total[r][j]);
  }
}

// out [kTileRows, kBlock] += rows x keys, of kTileRows separate rows [size] and keys [size, kBlock].
static inline void add_products(const float* const* rows, const float* keys, int size, float* out) {
  for (int column = 0; column < kBlock; column += kTileVectors * W) {
    vf total[kTileRows][kTileVectors];
    for (int r = 0; r < kTileRows; ++r)
      for (int j = 0; j < kTileVectors; ++j) total[r][j] = load(out + r * kBlock + column + j * W);
    const float* k = keys + column;
    for (int i = 0; i < size; ++i, k += kBlock) {
      vf key[kTileVectors];
      for (int j = 0; j < kTileVectors; ++j) key[j] = load(k + j * W);
      for (int r = 0; r < kTileRows; ++r)
        for (int j = 0; j < kTileVectors; ++j) total[r][j] += rows[r][i] * key[j];
    }
    for (int r = 0; r < kTileRows; ++r)
      for (int j = 0; j < kTileVectors; ++j) store(out + r * kBlock + column + j * W, total[r][j]);
  }
}

}  // namespace KV_ISA
}  // namespace kv
