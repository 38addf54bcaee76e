// Products of many rows with packed weights by tiles of bfloat16 (AMX). Both factors are rounded to bfloat16; sums are
// float32.
//
//   the rows, once                    tiles of 16 rows x 32 inputs, one after another
//   for each block of columns, 512 inputs at a time
//     weights                         tiles of 32 inputs x 16 columns, pairs of inputs side by side
//     for 32 rows, for 32 columns     four sums stay in tiles

#pragma once

#include "../core/scratch.h"
#include "panel_floats.h"

namespace kv {
namespace KV_ISA {

// Rows as tiles of bfloat16: [tiles of rows, tiles of inputs, 16, 32].
struct TiledRows {
  uint16_t* values = nullptr;
  int64_t across = 0;  // tiles of inputs

  static size_t elements(int64_t inputs, int64_t rows);
  void round(const float* x, int64_t inputs, int64_t row) const;
};

#if defined(__AMX_BF16__)

constexpr int kTileInputs = 32, kTileLines = 16, kTileSize = kTileInputs * kTileLines;
constexpr int kTileDepth = 512;  // inputs that are multiplied at a time

static inline int64_t tiles_of(int64_t inputs) { return (inputs + kTileInputs - 1) / kTileInputs; }

inline size_t TiledRows::elements(int64_t inputs, int64_t rows) {
  return static_cast<size_t>((rows + kTileLines - 1) / kTileLines * tiles_of(inputs) * kTileSize);
}

inline void TiledRows::round(const float* x, int64_t inputs, int64_t row) const {
  uint16_t* const to = values + row / kTileLines * across * kTileSize + row % kTileLines * kTileInputs;
  for (int64_t i = 0; i < inputs; i += kTileInputs) {
    float padded[kTileInputs] = {};
    const float* from = x + i;
    if (inputs - i < kTileInputs)
      from = static_cast<const float*>(memcpy(padded, from, static_cast<size_t>(inputs - i) * sizeof(float)));
    const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
    memcpy(to + i / kTileInputs * kTileSize, &both, sizeof both);
  }
}

// Writes the 16 columns of a panel, `depth` inputs from `first` on, to out [tiles of inputs, 16 pairs, 16 columns, 2].
// Inputs past the last one are zeros.
static inline void tile_weights(const PanelFloats& panel, int64_t first, int depth, uint16_t* out) {
  __m512i sides;  // each pair has one of the first half, one of the second
  for (int i = 0; i < 32; ++i) reinterpret_cast<uint16_t*>(&sides)[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
  const int unit = panel.l.unit;
  for (int k = 0; k < tiles_of(depth) * kTileInputs; k += unit) {
    vf v[kMostUnit] = {};
    if (first + k < panel.l.inputs) panel.unit(first + k, 0, v);
    for (int j = 0; j < unit; j += 2, out += kTileInputs) {
      const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)v[j + 1], (__m512)v[j]);
      _mm512_storeu_si512(out, _mm512_permutexvar_epi16(sides, halves));
    }
  }
}

struct TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Computes out [16 or 32, stride] += a x b, where a has one or two rows of `tiles` tiles of inputs (`second` is nullptr
// for one) and b has 32 columns.
static inline void tile_sums(const uint16_t* a, const uint16_t* second, const uint16_t* b, const uint16_t* other,
                             int64_t tiles, float* out, int64_t stride) {
  const int64_t bytes = stride * static_cast<int64_t>(sizeof(float));
  float* const below = out + kTileLines * stride;
  asm volatile("" ::: "memory");  // the compiler does not see the memory that the instructions use
  _tile_loadd(0, out, bytes);
  _tile_loadd(1, out + kTileLines, bytes);
  if (!second) {
    for (int64_t i = 0; i < tiles * kTileSize; i += kTileSize) {
      _tile_loadd(4, a + i, 64);
      _tile_loadd(6, b + i, 64);
      _tile_loadd(7, other + i, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
  } else {
    _tile_loadd(2, below, bytes);
    _tile_loadd(3, below + kTileLines, bytes);
    for (int64_t i = 0; i < tiles * kTileSize; i += kTileSize) {
      _tile_loadd(4, a + i, 64);
      _tile_loadd(6, b + i, 64);
      _tile_loadd(7, other + i, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, second + i, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(2, below, bytes);
    _tile_stored(3, below + kTileLines, bytes);
  }
  _tile_stored(0, out, bytes);
  _tile_stored(1, out + kTileLines, bytes);
  asm volatile("" ::: "memory");
}

// Computes out [count in whole tiles, kBlock]: `count` rows from `first` on, times `columns` columns. Row `first`
// begins a tile.
template <int kBlock>
static void tile_columns(const KvWeight& weight, int64_t inputs, const TiledRows& x, int64_t first, int64_t count,
                         int64_t column, int columns, float* out) {
  static thread_local Scratch<uint16_t> scratch;
  static_assert(kBlock % (2 * kTileLines) == 0 && kTileLines == kPanelColumns, "pairs of tiles, each of a panel");
  const PanelLayout l = layout_of(weight, inputs);
  const int64_t down = (count + kTileLines - 1) / kTileLines, size = kTileLines * kTileDepth;
  uint16_t* const packed = scratch.reserve(kBlock / kTileLines * size);
  for (int64_t i = 0; i < down * kTileLines * kBlock; ++i) out[i] = 0.0f;
  static constexpr TileShapes kShapes;  // in memory, since the compiler does not see how much of it is read
  _tile_loadconfig(&kShapes);
  for (int64_t k = 0; k < inputs; k += kTileDepth) {
    const int depth = static_cast<int>(inputs - k < kTileDepth ? inputs - k : kTileDepth);
    const int64_t tiles = tiles_of(depth);
    const int used = (columns + 2 * kTileLines - 1) / (2 * kTileLines) * 2;
    for (int j = 0; j < used; ++j) {  // a panel past the end repeats the last one
      const int64_t panel = (column + min_of(j * kTileLines, columns - 1)) / kPanelColumns;
      tile_weights(PanelFloats(weight, l, panel), k, depth, packed + j * size);
    }
    for (int64_t i = 0; i < down; i += 2) {
      const uint16_t* const a = x.values + ((first / kTileLines + i) * x.across + k / kTileInputs) * kTileSize;
      for (int j = 0; j < used; j += 2)
        tile_sums(a, i + 1 < down ? a + x.across * kTileSize : nullptr, packed + j * size, packed + (j + 1) * size,
                  tiles, out + i * kTileLines * kBlock + j * kTileLines, kBlock);
    }
  }
  _tile_release();
}

#endif

}  // namespace KV_ISA
}  // namespace kv
