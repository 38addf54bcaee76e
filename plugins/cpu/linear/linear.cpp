// Linear for one instruction set: it multiplies the rows of one input with up to three weights, x weight^T, and runs
// the norm before and the epilogue after them. A row is one token of one sequence, a column one output of one weight.
//
//   x = the rows in float32; a norm divides each by its root mean square                    16 rows a task (rows.h)
//   round x if packed weights are multiplied with rounded rows (rounding.h, amx.h)          16 rows a task
//   narrow = x first^T if a sequence has a LoRA adapter (low_rank.h)                        16 rows a task
//   for each share of the columns of all weights, for each range of rows                    one task each
//     few rows, packed weights:       `few`: 16 columns against every row (panel_products.cpp, panel_floats.h)
//     fewer than kRows rows:          `stream`: a column against every row, each weight read once (plain.h)
//     fewer than kMany rows:          `tile`: tiles of kRows x kColumns products (plain.h)
//     many rows:                      `block`: blocks of kBlock columns. Rounded rows are multiplied with panels
//                                     (panel_products.cpp, amx.h), and others with columns that are packed as float32,
//                                     kDepth inputs at a time, in tiles of kTileRows rows (core/tile.h)
//     y = y + narrow second (low_rank.h)
//     epilogue: y = (y + bias) silu(gate product) + residual (epilogue.h)
//   rotate the heads that are rotated                                                       16 rows a task
//
// No two tasks write the same element. Each step begins when all tasks of the step before it have ended.
//
// Letters: a the arguments of the call, p a product, l the layout of a panel, x and g the products with the weight and
// with the gate, i a row of a tile, j a column of a tile, k an input.
#include "../core/kernels.h"
#include "amx.h"
#include "epilogue.h"
#include "low_rank.h"
#include "packed.h"
#include "panel_floats.h"
#include "panel_products.h"
#include "plain.h"
#include "rows.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr int kTask = 1 << 16;               // the fewest bytes of weights of a task
constexpr int kTasks = 64;                   // the most shares of the columns
constexpr int kMany = W < 8 ? 1 << 30 : 48;  // rows from which packing pays; with short vectors arithmetic is the limit
constexpr int kManyTiled = 20;               // rows from which AMX tiles, if there are any, multiply packed weights
constexpr int kTall = 48;                    // a range is a multiple of kTall rows: whole tiles of every kind
constexpr int kRange = 516;                  // rows that stay in the L2 cache while a block passes over them
constexpr int kRanges = 8;                   // tasks for which the rows are divided if there are few columns
constexpr int kBlocks = 3;                   // the sizes of blocks of inputs with one step: 32, 16 and 8

template <class T>
struct Linear {
  const KvLinear& a;
  const int64_t rows;
  const float* input;          // [rows, inputs]
  const RoundedRows* rounded;  // [kBlocks]
  const TiledRows& tiled;      // the rows in AMX tiles; without values if the call does not use tiles
  const Adapted<T>& adapted;   // the LoRA adapters, and the products of the rows with them

  bool many() const { return rows >= (tiled.values ? kManyTiled : kMany); }
  static bool packed(const KvLinear& a) {
    bool any = a.gate.bits != 0;
    for (int i = 0; i < a.count; ++i) any = any || a.products[i].weight.bits;
    return any;
  }
  static bool in_panels(const KvWeight& weight) { return weight.bits && weight.layout == KV_PANELS; }
  bool in_tiles(const KvWeight& weight) const { return in_panels(weight) && tiled.values; }
  bool is_rounded(const KvWeight& weight) const { return in_panels(weight) && !a.float_input && !tiled.values; }
  const RoundedRows& rounded_for(const PanelLayout& l) const {
    return rounded[l.block == 32 ? 0 : l.block == 16 ? 1 : 2];
  }

  // Returns the columns of a unit. Tasks share the units of all products, and no path splits a unit.
  int64_t unit() const { return many() ? kBlock : packed(a) ? kPanelColumns : rows < kRows ? W : kColumns; }
  int64_t units(const KvProduct& p) const { return (p.outputs + unit() - 1) / unit(); }
  int64_t units() const {
    return sum_of([&](const KvProduct& p) { return units(p); });
  }
  template <class Of>
  int64_t sum_of(Of of) const {
    int64_t sum = 0;
    for (int i = 0; i < a.count; ++i) sum += of(a.products[i]);
    return sum;
  }
  int64_t ranges() const {
    if (!many()) return 1;
    const int64_t large = (rows + kRange - 1) / kRange, enough = kRanges / static_cast<int64_t>(shares());
    const int64_t most = rows < kMany ? 1 : rows / kMany;
    return large > enough ? large : enough < most ? enough : most;
  }
  // Returns the first row of a range, a multiple of kTall.
  int64_t start(int64_t range) const {
    const int64_t row = (rows + kTall - 1) / kTall * range / ranges() * kTall;
    return row < rows ? row : rows;
  }

  size_t shares() const {
    int64_t bits = sum_of([](const KvProduct& p) { return p.outputs * bits_of(p.weight); });
    if (a.gate.data) bits += a.products[0].outputs * bits_of(a.gate);
    const int64_t worth = bits / 8 * a.inputs / kTask;
    const int64_t most = worth < kTasks ? worth : kTasks;
    return most < 1 ? 1 : most < units() ? most : units();
  }
  int64_t edge(size_t share) const { return units() * static_cast<int64_t>(share) / static_cast<int64_t>(shares()); }

  static int64_t bits_of(const KvWeight& weight) {
    return weight.bits ? weight.bits : 8 * static_cast<int64_t>(sizeof(T));
  }

  // Returns the inputs of a column of a weight that is not packed.
  const T* row_of(const KvWeight& weight, int64_t column) const {
    return static_cast<const T*>(weight.data) + column * a.inputs;
  }

  void run(size_t task) const {
    const size_t share = task % shares();
    const int64_t range = static_cast<int64_t>(task / shares());
    int64_t from = edge(share), to = edge(share + 1);
    for (const KvProduct* p = a.products; p < a.products + a.count; ++p) {
      const int64_t count = units(*p);
      if (from < count && to > 0)
        columns(*p, range, (from > 0 ? from : 0) * unit(), to < count ? to * unit() : p->outputs);
      from -= count, to -= count;
    }
  }

  void columns(const KvProduct& p, int64_t range, int64_t from, int64_t to) const {
    if (many()) {
      for (int64_t column = from; column < to; column += kBlock)
        block(p, start(range), start(range + 1) - start(range), column, to);
    } else if (packed(a)) {
      for (int64_t column = from; column < to; column += kPanelColumns) few(p, column, to);
    } else if (rows < kRows) {
      for (int64_t column = from; column < to; column += W) stream(p, column, to);
    } else {
      for (int64_t column = from; column < to; column += kColumns)
        for (int64_t row = 0; row < rows; row += kRows) tile(p, row, column, to);
    }
  }

  // Computes the steps after the products x and g of a row with a weight and with the gate.
  void finish(const KvProduct& p, int64_t row, int64_t column, int count, float* x, float* g) const {
    adapted.add(static_cast<int>(&p - a.products), row, p.outputs, column, count, x);
    if (a.gate.data) adapted.add(a.count, row, p.outputs, column, count, g);
    epilogue<T>(a, p, row, column, count, x, g);
  }

  // Computes every row of the columns [column, column + 16) that are below `to`.
  void few(const KvProduct& p, int64_t column, int64_t to) const {
    static thread_local Scratch<float> scratch;
    float *const x = scratch.reserve(2 * rows * kPanelColumns), *const g = x + rows * kPanelColumns;
    const int count = static_cast<int>(to - column < kPanelColumns ? to - column : kPanelColumns);
    few_products(p.weight, column, count, x);
    if (a.gate.data) few_products(a.gate, column, count, g);
    for (int64_t row = 0; row < rows; ++row)
      finish(p, row, column, count, x + row * kPanelColumns, g + row * kPanelColumns);
  }

  // Computes x [rows, 16]: the products of every row with `count` columns.
  void few_products(const KvWeight& weight, int64_t column, int count, float* x) const {
    if (in_panels(weight)) {
      const PanelLayout l = layout_of(weight, a.inputs);
      const int64_t panel = column / kPanelColumns;
      if (is_rounded(weight)) return panel_products(weight, l, panel, rounded_for(l), 0, rows, x, kPanelColumns);
      return float_products(weight, l, panel, input, a.inputs, rows, x, kPanelColumns);
    }
    static thread_local Scratch<float> scratch;
    float* const w = scratch.reserve(weight.bits ? a.inputs : 0);
    for (int i = 0; i < count; ++i) {
      if (weight.bits) dequantize(weight, a.inputs, column + i, 0, static_cast<int>(a.inputs), w);
      for (int64_t row = 0; row < rows; ++row) {
        const float* const r = input + row * a.inputs;
        x[row * kPanelColumns + i] =
            weight.bits ? row_product(w, r, a.inputs) : row_product(row_of(weight, column + i), r, a.inputs);
      }
    }
  }

  void stream(const KvProduct& p, int64_t column, int64_t to) const {
    float x[kRows][W] = {}, g[kRows][W] = {};
    const int count = static_cast<int>(to - column < W ? to - column : W);
    products(p.weight, column, count, x);
    if (a.gate.data) products(a.gate, column, count, g);
    for (int64_t row = 0; row < rows; ++row) finish(p, row, column, count, x[row], g[row]);
  }

  void products(const KvWeight& weight, int64_t column, int count, float (*x)[W]) const {
    for (int i = 0; i < count; ++i)
      for (int64_t row = 0; row < rows; ++row)
        x[row][i] = row_product(row_of(weight, column + i), input + row * a.inputs, a.inputs);
  }

  void tile(const KvProduct& p, int64_t row, int64_t column, int64_t to) const {
    float x[kRows * kColumns], g[kRows * kColumns];
    tile_of(p.weight, row, column, to, x);
    if (a.gate.data) tile_of(a.gate, row, column, to, g);
    const int count = static_cast<int>(to - column < kColumns ? to - column : kColumns);
    for (int i = 0; i < kRows && row + i < rows; ++i)
      finish(p, row + i, column, count, x + i * kColumns, g + i * kColumns);
  }

  // Computes result [kRows, kColumns]. Rows and columns past the end repeat the last one.
  void tile_of(const KvWeight& weight, int64_t row, int64_t column, int64_t to, float* result) const {
    const float* r[kRows];
    const T* c[kColumns];
    for (int i = 0; i < kRows; ++i) r[i] = input + (row + i < rows ? row + i : rows - 1) * a.inputs;
    for (int j = 0; j < kColumns; ++j) c[j] = row_of(weight, column + j < to ? column + j : to - 1);
    small_tile(r, c, a.inputs, row == 0, result);
  }

  // Computes `count` rows from `first` on of the columns [column, column + kBlock) that are below `to`.
  void block(const KvProduct& p, int64_t first, int64_t count, int64_t column, int64_t to) const {
    static thread_local Scratch<float> scratch;
    const int64_t size = (count + kTall - 1) / kTall * kTall * kBlock;
    float *x = scratch.reserve(2 * size + kDepth * kBlock), *g = x + size, *block = g + size;
    const int columns = static_cast<int>(to - column < kBlock ? to - column : kBlock);
    block_of(p.weight, first, count, column, columns, block, x);
    if (a.gate.data) block_of(a.gate, first, count, column, columns, block, g);
    for (int64_t row = 0; row < count; ++row)
      finish(p, first + row, column, columns, x + row * kBlock, g + row * kBlock);
  }

  // Computes result [count in whole tiles, kBlock]. block [kDepth, kBlock] is scratch memory.
  void block_of(const KvWeight& weight, int64_t first, int64_t count, int64_t column, int columns, float* block,
                float* result) const {
#if defined(__AMX_BF16__)
    if (in_tiles(weight)) return tile_columns<kBlock>(weight, a.inputs, tiled, first, count, column, columns, result);
#endif
    if (is_rounded(weight)) {
      const PanelLayout l = layout_of(weight, a.inputs);
      const RoundedRows& x = rounded_for(l);
      for (int64_t i = 0; i < count; i += x.tile_rows)  // the tile stays in the caches while all panels multiply it
        for (int j = 0; j < columns; j += kPanelColumns)
          panel_products(weight, l, (column + j) / kPanelColumns, x, first + i,
                         count - i < x.tile_rows ? count - i : x.tile_rows, result + i * kBlock + j, kBlock);
      return;
    }
    for (int64_t i = 0; i < (count + kTileRows - 1) / kTileRows * kTileRows * kBlock; ++i) result[i] = 0.0f;
    for (int64_t k = 0; k < a.inputs; k += kDepth) {
      const int depth = static_cast<int>(a.inputs - k < kDepth ? a.inputs - k : kDepth);
      if (weight.bits)
        unpack(weight, column, columns, k, depth, block);
      else
        pack(row_of(weight, column) + k, a.inputs, columns, depth, block);
      for (int64_t row = 0; row < count; row += kTileRows) {  // rows past the end repeat the last one
        const float* r[kTileRows];
        for (int i = 0; i < kTileRows; ++i)
          r[i] = input + (first + (row + i < count ? row + i : count - 1)) * a.inputs + k;
        tile_products<true>(r, block, depth, result + row * kBlock);
      }
    }
  }

  // Unpacks `depth` inputs from `first` on of `columns` columns of a packed weight into block [depth, kBlock].
  void unpack(const KvWeight& weight, int64_t column, int columns, int64_t first, int depth, float* block) const {
    if (in_panels(weight)) {
      const PanelLayout l = layout_of(weight, a.inputs);
      for (int j = 0; j < columns; j += kPanelColumns)
        unpack_panel(weight, l, (column + j) / kPanelColumns, first, depth, block + j, kBlock);
      return;
    }
    static thread_local Scratch<float> scratch;
    float* const values = scratch.reserve(kBlock * kDepth);
    for (int i = 0; i < columns; ++i) dequantize(weight, a.inputs, column + i, first, depth, values + i * kDepth);
    pack(values, kDepth, columns, depth, block);
  }
};

// Returns the rows, rounded in blocks of `block` inputs; without values if no weight needs blocks of this size.
template <class T>
RoundedRows round_rows(const Linear<T>& call, int block, KvRunner runner, Scratch<uint8_t>& memory) {
  const int64_t inputs = call.a.inputs;
  const auto takes = [&](const KvWeight& weight) {
    return call.is_rounded(weight) && block_of(weight, inputs) == block;
  };
  bool any = takes(call.a.gate);
  for (int i = 0; i < call.a.count; ++i) any = any || takes(call.a.products[i].weight);
  if (!any) return {};
  const size_t bytes = RoundedRows::bytes(block, call.rows, inputs);
  const RoundedRows rounded(block, call.rows, inputs, memory.reserve(bytes));
  const auto row_of = [&](int64_t row) { return call.input + row * inputs; };
  const auto round = [&](size_t tile) { rounded.round(inputs, static_cast<int64_t>(tile), row_of); };
  const auto tiles = static_cast<size_t>(rounded.tiles());
  if (call.rows > kRowsOfTask)
    for_all(runner, tiles, round);
  else
    for (size_t tile = 0; tile < tiles; ++tile) round(tile);
  return rounded;
}

// Returns the rows in AMX tiles; without values if the call does not use tiles.
template <class T>
TiledRows tile_rows(const KvLinear& a, const float* input, bool amx, KvRunner runner, Scratch<uint16_t>& memory) {
  TiledRows tiled;
#if defined(__AMX_BF16__)
  const int64_t rows = a.batch * a.tokens;
  if (!amx || a.float_input || rows < kManyTiled || !Linear<T>::packed(a)) return tiled;
  tiled.across = tiles_of(a.inputs), tiled.values = memory.reserve(TiledRows::elements(a.inputs, rows));
  for_rows(runner, rows, [&](int64_t row) { tiled.round(input + row * a.inputs, a.inputs, row); });
#else
  (void)a, (void)input, (void)amx, (void)runner, (void)memory;
#endif
  return tiled;
}

template <class T>
void run(const KvLinear& a, const KvAdapters* adapters, KvRunner runner, bool amx) {
  static thread_local Scratch<float> scratch;
  static thread_local Scratch<uint8_t> memory[kBlocks];
  static thread_local Scratch<uint16_t> tiles;
  if (a.batch * a.tokens <= 0) return;
  RoundedRows rounded[kBlocks];
  const float* const input = rows_of<T>(a, runner, scratch);
  const TiledRows tiled = tile_rows<T>(a, input, amx, runner, tiles);
  const Adapted<T> adapted(a, adapters, input);
  adapted.multiply(runner);
  const Linear<T> call{a, a.batch * a.tokens, input, rounded, tiled, adapted};
  for (int i = 0; i < kBlocks; ++i) rounded[i] = round_rows(call, kMostBlock >> i, runner, memory[i]);
  for_all(runner, call.shares() * call.ranges(), [&](size_t task) { call.run(task); });
  if (rotates(a)) for_rows(runner, call.rows, [&](int64_t row) { rotate<T>(a, row); });
}

}  // namespace

void linear(const KvLinear& call, const KvAdapters* adapters, KvRunner runner) {
  call.type == KV_FLOAT16 ? run<half>(call, adapters, runner, false) : run<float>(call, adapters, runner, false);
}

#if defined(__AMX_BF16__)
void linear_amx(const KvLinear& call, const KvAdapters* adapters, KvRunner runner) {
  call.type == KV_FLOAT16 ? run<half>(call, adapters, runner, true) : run<float>(call, adapters, runner, true);
}
#endif

}  // namespace KV_ISA
}  // namespace kv
