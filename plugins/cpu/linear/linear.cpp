// Linear for one instruction set: x weight^T for up to three weights as checkpoints hold them, with the norm before and
// the epilogue after. A row is one token of one sequence, a column one output of one weight.
//
//   rows x = input in float32, divided by their root mean square where there is a norm      16 rows a task
//   and rounded, to int8 or bfloat16, where packed weights take them so                     16 rows a task
//   for each share of the columns of all weights, for each panel of rows                    one task each
//     fewer than kMany rows: of packed weights W columns against every row (int8.h)
//     fewer than kRows rows: stream, each weight read once, a column against every row
//     fewer than kMany:      small tiles of kRows x kColumns products
//     otherwise:             blocks of kBlock columns, packed kDepth inputs at a time, against tiles of kTileRows rows;
//                            packed weights with rounded rows as int8.h or amx.h has it
//     epilogue: y = (y + bias) silu(gate product) + residual, in the output's type and its heads' order
//   heads that are rotated are rotated                                                      16 rows a task, after all
//
// Tasks write columns and rows that no other task writes; each line begins when all tasks of the one before have ended.
#include "../core/kernels.h"
#include "../core/scratch.h"
#include "../core/tile.h"
#include "amx.h"
#include "int8.h"
#include "rows.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr int kTask = 1 << 16;               // bytes of weights that are worth a task
constexpr int kTasks = 64;                   // of a call, at most
constexpr int kAhead = 8192;                 // bytes
constexpr int kMany = W < 8 ? 1 << 30 : 48;  // rows for which packing pays; short vectors are busy with the arithmetic
constexpr int kManyTiled = 20;               // for which packed weights are put in tiles, where there are tiles
constexpr int kTall = 48;                    // rows, of which panels are multiples: whole tiles of every kind
constexpr int kDepth = 512;                  // inputs of a packed block
constexpr int kPanel = 516;                  // rows that stay in the second cache while a block passes over them
constexpr int kPanels = 8;                   // tasks that are made by fewer rows, where there are few columns

// A small tile has W sums, which `sums` then folds into one vector. Where there are few registers, or short vectors, it
// is another shape.
constexpr int kRows = W == 8 ? 2 : 4;
constexpr int kColumns = 4;
static_assert(kRows * kColumns % W == 0, "a tile is whole vectors");

static inline vf silu(vf x) { return x / (1.0f + exp(-x)); }

template <class T>
struct Linear {
  const KvLinear& a;
  const int64_t rows;
  const float* input;       // [rows, inputs]
  const Int8Rows* rounded;  // for packed weights of 4 and of 8 bits
  const TiledRows& tiled;   // for all packed ones, where there are tiles and many rows

  bool many() const { return rows >= (tiled.values ? kManyTiled : kMany); }
  bool packed() const { return packed(a); }
  static bool packed(const KvLinear& a) {
    bool any = a.gate.bits != 0;
    for (int i = 0; i < a.count; ++i) any = any || a.products[i].weight.bits;
    return any;
  }
  // A pair of inputs lies in one group.
  bool in_tiles(const KvWeight& weight) const { return weight.bits && tiled.values && weight.group % 2 == 0; }
  bool in_int8(const KvWeight& weight) const { return !a.float_input && !tiled.values && takes_int8(weight, a.inputs); }

  // Columns are shared out in units that no path splits, those of all products in one row.
  int64_t unit() const { return many() ? kBlock : rows < kRows || packed() ? W : kColumns; }
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
  int64_t panels() const {
    if (!many()) return 1;
    const int64_t large = (rows + kPanel - 1) / kPanel, wanted = kPanels / static_cast<int64_t>(shares());
    const int64_t most = rows < kMany ? 1 : rows / kMany;
    return large > wanted ? large : wanted < most ? wanted : most;
  }
  // The first row of a panel, whole tiles.
  int64_t start(int64_t panel) const {
    const int64_t row = (rows + kTall - 1) / kTall * panel / panels() * kTall;
    return row < rows ? row : rows;
  }

  size_t shares() const {
    int64_t bits = sum_of([](const KvProduct& p) { return p.outputs * bits_of(p.weight); });
    if (a.gate.data) bits += a.products[0].outputs * bits_of(a.gate);
    const int64_t wanted = bits / 8 * a.inputs / kTask;
    const int64_t most = wanted < kTasks ? wanted : kTasks;
    return most < 1 ? 1 : most < units() ? most : units();
  }
  int64_t edge(size_t share) const { return units() * static_cast<int64_t>(share) / static_cast<int64_t>(shares()); }

  static int64_t bits_of(const KvWeight& weight) {
    return weight.bits ? weight.bits : 8 * static_cast<int64_t>(sizeof(T));
  }

  // Of a weight that is not packed.
  const T* row_of(const KvWeight& weight, int64_t column) const {
    return static_cast<const T*>(weight.data) + column * a.inputs;
  }

  void run(size_t task) const {
    const size_t share = task % shares();
    const int64_t panel = static_cast<int64_t>(task / shares());
    int64_t from = edge(share), to = edge(share + 1);
    for (const KvProduct* p = a.products; p < a.products + a.count; ++p) {
      const int64_t count = units(*p);
      if (from < count && to > 0)
        columns(*p, panel, (from > 0 ? from : 0) * unit(), to < count ? to * unit() : p->outputs);
      from -= count, to -= count;
    }
  }

  void columns(const KvProduct& p, int64_t panel, int64_t from, int64_t to) const {
    if (many()) {
      for (int64_t column = from; column < to; column += kBlock)
        block(p, start(panel), start(panel + 1) - start(panel), column, to);
    } else if (packed()) {
      few(p, from, to);
    } else if (rows < kRows) {
      stream(p, from, to);
    } else {
      for (int64_t column = from; column < to; column += kColumns)
        for (int64_t row = 0; row < rows; row += kRows) tile(p, row, column, to);
    }
  }

  void few(const KvProduct& p, int64_t from, int64_t to) const {
    static thread_local Scratch<float> scratch;
    float *const x = scratch.reserve(2 * rows * W), *const g = x + rows * W;
    for (int64_t column = from; column < to; column += W) {
      const int count = static_cast<int>(to - column < W ? to - column : W);
      few_products(p.weight, column, count, x);
      if (a.gate.data) few_products(a.gate, column, count, g);
      for (int64_t row = 0; row < rows; ++row) epilogue(p, row, column, count, x + row * W, g + row * W);
    }
  }

  // x [rows, W]
  void few_products(const KvWeight& weight, int64_t column, int count, float* x) const {
    if (in_int8(weight)) return int8_columns(weight, a.inputs, rounded_for(weight), 0, rows, column, count, x, W);
    static thread_local Scratch<float> scratch;
    float* const w = scratch.reserve(weight.bits ? a.inputs : 0);
    for (int i = 0; i < count; ++i) {
      if (weight.bits) dequantize(weight, a.inputs, column + i, 0, static_cast<int>(a.inputs), w);
      for (int64_t row = 0; row < rows; ++row)
        x[row * W + i] = weight.bits ? product(w, input + row * a.inputs)
                                     : product(row_of(weight, column + i), input + row * a.inputs);
    }
  }

  const Int8Rows& rounded_for(const KvWeight& weight) const { return rounded[weight.bits == 8]; }

  void stream(const KvProduct& p, int64_t from, int64_t to) const {
    for (int64_t column = from; column < to; column += W) {
      float x[kRows][W] = {}, g[kRows][W] = {};
      const int count = static_cast<int>(to - column < W ? to - column : W);
      products(p.weight, column, count, x);
      if (a.gate.data) products(a.gate, column, count, g);
      for (int64_t row = 0; row < rows; ++row) epilogue(p, row, column, count, x[row], g[row]);
    }
  }

  void products(const KvWeight& weight, int64_t column, int count, float (*x)[W]) const {
    for (int i = 0; i < count; ++i)
      for (int64_t row = 0; row < rows; ++row) x[row][i] = product(row_of(weight, column + i), input + row * a.inputs);
  }

  // One stream of weights with nothing between its loads: the machine's own prefetching is at its best. Several rows
  // in one pass were slower than one after another, for which the weights then come from the first cache.
  template <class Of>
  float product(const Of* w, const float* x) const {
    vf part[4] = {};
    int64_t i = 0;
    for (; i + 4 * W <= a.inputs; i += 4 * W)
      for (int j = 0; j < 4; ++j) part[j] += load(w + i + j * W) * load(x + i + j * W);
    for (; i + W <= a.inputs; i += W) part[0] += load(w + i) * load(x + i);
    float rest = 0.0f;
    for (; i < a.inputs; ++i) rest += static_cast<float>(w[i]) * x[i];
    return sum((part[0] + part[1]) + (part[2] + part[3])) + rest;
  }

  void tile(const KvProduct& p, int64_t row, int64_t column, int64_t to) const {
    float x[kRows * kColumns], g[kRows * kColumns];
    tile_of(p.weight, row, column, to, x);
    if (a.gate.data) tile_of(a.gate, row, column, to, g);
    const int count = static_cast<int>(to - column < kColumns ? to - column : kColumns);
    for (int i = 0; i < kRows && row + i < rows; ++i)
      epilogue(p, row + i, column, count, x + i * kColumns, g + i * kColumns);
  }

  // Rows and columns past the end repeat the last one.
  void tile_of(const KvWeight& weight, int64_t row, int64_t column, int64_t to, float* result) const {
    const float* r[kRows];
    const T* c[kColumns];
    for (int i = 0; i < kRows; ++i) r[i] = input + (row + i < rows ? row + i : rows - 1) * a.inputs;
    for (int j = 0; j < kColumns; ++j) c[j] = row_of(weight, column + j < to ? column + j : to - 1);
    vf lanes[kRows * kColumns] = {};
    const int64_t whole = a.inputs / W * W;
    const bool ahead = row == 0;
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
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kColumns; ++j)
        for (int64_t k = whole; k < a.inputs; ++k) result[i * kColumns + j] += static_cast<float>(c[j][k]) * r[i][k];
  }

  // `count` rows from `first` on, and the columns [column, column + kBlock) below `to`.
  void block(const KvProduct& p, int64_t first, int64_t count, int64_t column, int64_t to) const {
    static thread_local Scratch<float> scratch;
    const int64_t size = (count + kTall - 1) / kTall * kTall * kBlock;
    float *x = scratch.reserve(2 * size + kDepth * kBlock), *g = x + size, *packed = g + size;
    const int columns = static_cast<int>(to - column < kBlock ? to - column : kBlock);
    block_of(p.weight, first, count, column, columns, packed, x);
    if (a.gate.data) block_of(a.gate, first, count, column, columns, packed, g);
    for (int64_t row = 0; row < count; ++row)
      epilogue(p, first + row, column, columns, x + row * kBlock, g + row * kBlock);
  }

  // Rows past the end repeat the last one.
  void block_of(const KvWeight& weight, int64_t first, int64_t count, int64_t column, int columns, float* packed,
                float* result) const {
#if defined(__AMX_BF16__)
    if (in_tiles(weight)) return tile_columns<kBlock>(weight, a.inputs, tiled, first, count, column, columns, result);
#endif
    if (in_int8(weight))
      return int8_columns(weight, a.inputs, rounded_for(weight), first, count, column, columns, result, kBlock);
    for (int64_t i = 0; i < (count + kTileRows - 1) / kTileRows * kTileRows * kBlock; ++i) result[i] = 0.0f;
    for (int64_t k = 0; k < a.inputs; k += kDepth) {
      const int depth = static_cast<int>(a.inputs - k < kDepth ? a.inputs - k : kDepth);
      if (weight.bits)
        unpack(weight, column, columns, k, depth, packed);
      else
        pack(row_of(weight, column) + k, a.inputs, columns, depth, packed);
      for (int64_t row = 0; row < count; row += kTileRows) {
        const float* r[kTileRows];
        for (int i = 0; i < kTileRows; ++i)
          r[i] = input + (first + (row + i < count ? row + i : count - 1)) * a.inputs + k;
        tile_products<true>(r, packed, depth, result + row * kBlock);
      }
    }
  }

  // packed [depth, kBlock]: of `columns` columns of a packed weight, `depth` inputs each from `first` on.
  void unpack(const KvWeight& weight, int64_t column, int columns, int64_t first, int depth, float* packed) const {
    static thread_local Scratch<float> scratch;
    float* const values = scratch.reserve(kBlock * kDepth);
    for (int i = 0; i < columns; ++i) dequantize(weight, a.inputs, column + i, first, depth, values + i * kDepth);
    pack(values, kDepth, columns, depth, packed);
  }

  // packed [depth, kBlock]: of `columns` rows of a weight, `depth` inputs each, `stride` from one another. Columns past
  // the end repeat the last one.
  template <class Of>
  static void pack(const Of* weight, int64_t stride, int columns, int depth, float* packed) {
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

  // The epilogue of the columns [column, column + count) of a row: x and g are its products with the weight and with
  // the gate.
  void epilogue(const KvProduct& p, int64_t row, int64_t column, int count, float* x, const float* g) const {
    if (p.bias) add(static_cast<const T*>(p.bias) + column, count, x);
    if (a.gate.data) {
      int i = 0;
      for (; i + W <= count; i += W) store(x + i, load(x + i) * silu(load(g + i)));
      for (; i < count; ++i) x[i] *= silu(splat(g[i]))[0];
    }
    if (a.residual) add(static_cast<const T*>(a.residual) + row * p.outputs + column, count, x);
    if (p.heads == 1) return narrow(x, static_cast<T*>(p.output) + row * p.outputs + column, count);
    const int64_t size = p.outputs / p.heads;
    for (int64_t i = 0, run; i < count; i += run) {
      const int64_t h = (column + i) / size, at = (column + i) % size;
      run = size - at < count - i ? size - at : count - i;
      narrow(x + i, head(p, row, h) + at, static_cast<int>(run));
    }
  }

  T* head(const KvProduct& p, int64_t row, int64_t h) const {
    const int64_t size = p.outputs / p.heads, b = row / a.tokens, t = row % a.tokens;
    return static_cast<T*>(p.output) + ((b * p.heads + h) * a.tokens + t) * size;
  }

  bool rotates() const {
    return sum_of([](const KvProduct& p) { return p.rotated; }) > 0;
  }

  // After all products: the planes of a row's heads are rotated.
  void rotate(int64_t row) const {
    const T* const cosine = static_cast<const T*>(a.cosine) + row * a.planes;
    const T* const sine = static_cast<const T*>(a.sine) + row * a.planes;
    for (const KvProduct* p = a.products; p < a.products + a.count; ++p)
      for (int64_t h = 0; p->rotated && h < p->heads; ++h) {
        T *const x = head(*p, row, h), *const y = x + a.planes;
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

  static void add(const T* y, int count, float* x) {
    for (int i = 0; i < count; ++i) x[i] += static_cast<float>(y[i]);
  }
};

// The rows as packed weights of so many bits take them; none where none does.
template <class T>
Int8Rows round_rows(const Linear<T>& call, int bits, KvRunner runner, Scratch<uint8_t>& memory) {
  const auto takes = [&](const KvWeight& weight) { return weight.bits == bits && call.in_int8(weight); };
  bool any = takes(call.a.gate);
  for (int i = 0; i < call.a.count; ++i) any = any || takes(call.a.products[i].weight);
  if (!any) return {};
  const int64_t inputs = call.a.inputs;
  const Int8Rows made(bits, inputs, call.rows, memory.reserve(Int8Rows::bytes(bits, inputs, call.rows)));
  for_rows(runner, call.rows, [&](int64_t row) { made.round(call.input + row * inputs, inputs, row); });
  return made;
}

// The rows in tiles; none where no packed weight takes them so.
template <class T>
TiledRows tile_rows(const KvLinear& a, const float* input, bool amx, KvRunner runner, Scratch<uint16_t>& memory) {
  TiledRows made;
#if defined(__AMX_BF16__)
  const int64_t rows = a.batch * a.tokens;
  if (!amx || a.float_input || rows < kManyTiled || !Linear<T>::packed(a)) return made;
  made.across = tiles_of(a.inputs), made.values = memory.reserve(TiledRows::elements(a.inputs, rows));
  for_rows(runner, rows, [&](int64_t row) { made.round(input + row * a.inputs, a.inputs, row); });
#else
  (void)a, (void)input, (void)amx, (void)runner, (void)memory;
#endif
  return made;
}

template <class T>
void run(const KvLinear& a, KvRunner runner, bool amx) {
  static thread_local Scratch<float> scratch;
  static thread_local Scratch<uint8_t> memory[2];
  static thread_local Scratch<uint16_t> tiles;
  if (a.batch * a.tokens <= 0) return;
  Int8Rows rounded[2];
  const float* const input = rows_of<T>(a, runner, scratch);
  const TiledRows tiled = tile_rows<T>(a, input, amx, runner, tiles);
  const Linear<T> call{a, a.batch * a.tokens, input, rounded, tiled};
  for (int i = 0; i < 2; ++i) rounded[i] = round_rows(call, 4 << i, runner, memory[i]);
  for_all(runner, call.shares() * call.panels(), [&](size_t task) { call.run(task); });
  if (call.rotates()) for_rows(runner, call.rows, [&](int64_t row) { call.rotate(row); });
}

}  // namespace

void linear(const KvLinear& call, KvRunner runner) {
  call.type == KV_FLOAT16 ? run<half>(call, runner, false) : run<float>(call, runner, false);
}

#if defined(__AMX_BF16__)
void linear_amx(const KvLinear& call, KvRunner runner) {
  call.type == KV_FLOAT16 ? run<half>(call, runner, true) : run<float>(call, runner, true);
}
#endif

}  // namespace KV_ISA
}  // namespace kv
