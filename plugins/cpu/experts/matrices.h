// The weights of one of the two products of all experts, and products with columns of one of their matrices, for any
// type and layout of the weights. A matrix is [outputs, inputs]: the gate's or the ups' rows of one expert, or its rows
// of the second product.
#pragma once

#include "../linear/packed.h"
#include "../linear/panel_floats.h"
#include "../linear/panel_products.h"
#include "../linear/plain.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr int kManyRows = W < 8 ? 1 << 30 : 48;  // rows of an expert from which packing pays, as in linear.cpp
constexpr int kPad = 48;                         // rows of results are padded to whole tiles of every kind

// The rows of a product in float32, and rounded if panels need that. Row i of a group is row first + i of both.
struct Rows {
  const float* floats = nullptr;  // [rows, inputs]
  uint8_t* rounded = nullptr;     // RoundedRows of each group, one after another
};

template <class T>
struct ExpertMatrices {
  KvWeight weight;
  int64_t outputs, inputs;
  bool in_panels, rounds;
  PanelLayout layout{};
  int64_t bytes = 0;  // bytes of a matrix in panels

  ExpertMatrices(const KvWeight& weight, int64_t outputs, int64_t inputs, bool float_input)
      : weight(weight),
        outputs(outputs),
        inputs(inputs),
        in_panels(weight.bits && weight.layout == KV_PANELS),
        rounds(in_panels && !float_input) {
    if (in_panels) layout = layout_of(weight, inputs), bytes = panels_of(outputs) * layout.panel;
  }

  // Returns the number of columns that one call of `products` computes. For rounded rows it is one panel, so that there
  // are enough units to share.
  int unit() const { return rounds ? kPanelColumns : kBlock; }
  int64_t units() const { return (outputs + unit() - 1) / unit(); }
  int columns(int64_t unit_number) const {
    const int64_t rest = outputs - unit_number * unit();
    return static_cast<int>(rest < unit() ? rest : unit());
  }
  int64_t bits() const { return weight.bits ? weight.bits : 8 * static_cast<int64_t>(sizeof(T)); }

  size_t rounded_bytes(int64_t rows) const { return rounds ? RoundedRows::bytes(layout.block, rows, inputs) : 0; }
  RoundedRows rounded(const Rows& x, int64_t first, int64_t count) const {
    return {layout.block, count, inputs, x.rounded + RoundedRows::bytes(layout.block, first, inputs)};
  }

  // Computes out [count in whole tiles, kBlock]: rows first to first + count of x times the columns of a unit of a
  // matrix.
  void products(int64_t matrix, const Rows& x, int64_t first, int64_t count, int64_t unit_number, float* out) const {
    const int64_t column = unit_number * unit();
    if (rounds) return panel_products(of(matrix), layout, unit_number, rounded(x, first, count), 0, count, out, kBlock);
    const float* const rows = x.floats + first * inputs;
    if (count >= kManyRows) return many(matrix, rows, count, column, columns(unit_number), out);
    few(matrix, rows, count, column, columns(unit_number), out);
  }

 private:
  // Returns one matrix of a weight in panels.
  KvWeight of(int64_t matrix) const {
    KvWeight one = weight;
    one.data = static_cast<const uint8_t*>(weight.data) + matrix * bytes;
    return one;
  }
  const T* plain(int64_t matrix, int64_t column) const {
    return static_cast<const T*>(weight.data) + (matrix * outputs + column) * inputs;
  }

  void few(int64_t matrix, const float* x, int64_t count, int64_t column, int columns, float* out) const {
    if (in_panels) {
      for (int j = 0; j < columns; j += kPanelColumns)
        float_products(of(matrix), layout, (column + j) / kPanelColumns, x, inputs, count, out + j, kBlock);
      return;
    }
    if (!weight.bits && count >= kRows) return small(matrix, x, count, column, columns, out);
    static thread_local Scratch<float> scratch;
    float* const w = scratch.reserve(weight.bits ? inputs : 0);
    for (int j = 0; j < columns; ++j) {
      if (weight.bits) dequantize(weight, inputs, matrix * outputs + column + j, 0, static_cast<int>(inputs), w);
      for (int64_t i = 0; i < count; ++i)
        out[i * kBlock + j] = weight.bits ? row_product(w, x + i * inputs, inputs)
                                          : row_product(plain(matrix, column + j), x + i * inputs, inputs);
    }
  }

  // Rows and columns past the end repeat the last one.
  void small(int64_t matrix, const float* x, int64_t count, int64_t column, int columns, float* out) const {
    for (int j = 0; j < columns; j += kColumns) {
      const T* c[kColumns];
      for (int n = 0; n < kColumns; ++n) c[n] = plain(matrix, column + min_of(j + n, columns - 1));
      for (int64_t i = 0; i < count; i += kRows) {
        const float* r[kRows];
        for (int n = 0; n < kRows; ++n) r[n] = x + (i + n < count ? i + n : count - 1) * inputs;
        float result[kRows * kColumns];
        small_tile(r, c, inputs, i == 0, result);
        for (int n = 0; n < kRows; ++n)
          memcpy(out + (i + n) * kBlock + j, result + n * kColumns, sizeof(float[kColumns]));
      }
    }
  }

  void many(int64_t matrix, const float* x, int64_t count, int64_t column, int columns, float* out) const {
    static thread_local Scratch<float> scratch;
    float* const block = scratch.reserve(kDepth * kBlock);
    for (int64_t i = 0; i < (count + kTileRows - 1) / kTileRows * kTileRows * kBlock; ++i) out[i] = 0.0f;
    for (int64_t k = 0; k < inputs; k += kDepth) {
      const int depth = static_cast<int>(inputs - k < kDepth ? inputs - k : kDepth);
      pack_columns_of(matrix, column, columns, k, depth, block);
      for (int64_t row = 0; row < count; row += kTileRows) {  // rows past the end repeat the last one
        const float* r[kTileRows];
        for (int i = 0; i < kTileRows; ++i) r[i] = x + (row + i < count ? row + i : count - 1) * inputs + k;
        tile_products<true>(r, block, depth, out + row * kBlock);
      }
    }
  }

  // Packs `depth` inputs from `first` on of `columns` columns as block [depth, kBlock].
  void pack_columns_of(int64_t matrix, int64_t column, int columns, int64_t first, int depth, float* block) const {
    if (in_panels) {
      for (int j = 0; j < columns; j += kPanelColumns)
        unpack_panel(of(matrix), layout, (column + j) / kPanelColumns, first, depth, block + j, kBlock);
      return;
    }
    if (!weight.bits) return pack(plain(matrix, column) + first, inputs, columns, depth, block);
    static thread_local Scratch<float> scratch;
    float* const values = scratch.reserve(kBlock * kDepth);
    for (int j = 0; j < columns; ++j)
      dequantize(weight, inputs, matrix * outputs + column + j, first, depth, values + j * kDepth);
    pack(values, kDepth, columns, depth, block);
  }
};

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
