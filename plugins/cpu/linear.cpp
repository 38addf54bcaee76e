// Linear for one instruction set: products of rows with the rows of a weight, both as they lie in memory. Nothing is
// packed and nothing transposed, so weights are read where the checkpoint's file was mapped, each once a call.
#include "kernels.h"
#include "scratch.h"
#include "simd.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr int kTask = 1 << 16;   // bytes of weights that are worth a task
constexpr int kPanel = 1 << 19;  // bytes of rows that stay in the second cache while the weights pass over them
constexpr int kAhead = 8192;     // bytes

// A tile of products has W sums, which `sums` then folds into one vector. Where there are few registers, or short
// vectors, it is another shape.
constexpr int kRows = W == 8 ? 2 : 4;
constexpr int kColumns = 4;
static_assert(kRows * kColumns % W == 0, "a tile is whole vectors");

template <class T>
struct Linear {
  const KvLinear& a;

  size_t tasks() const {
    const size_t wanted = static_cast<size_t>(a.outputs) * a.inputs * sizeof(T) / kTask;
    return wanted < 1 ? 1 : wanted > 64 ? 64 : wanted;
  }

  // Output columns of one task, whole tiles.
  int64_t edge(size_t task) const {
    const int64_t tiles = (a.outputs + kColumns - 1) / kColumns;
    const int64_t column = tiles * static_cast<int64_t>(task) / static_cast<int64_t>(tasks()) * kColumns;
    return column < a.outputs ? column : a.outputs;
  }

  const T* weight(int64_t column) const { return static_cast<const T*>(a.weight) + column * a.inputs; }

  void put(int64_t row, int64_t column, float x) const {
    static_cast<T*>(a.output)[row * a.outputs + column] = static_cast<T>(x);
  }

  void run(size_t task) const {
    const int64_t panel = kPanel / (a.inputs * sizeof(float)) / kRows * kRows, from = edge(task), to = edge(task + 1);
    const int64_t count = panel < kRows ? kRows : panel;
    static thread_local Scratch<float> scratch;
    for (int64_t first = 0; first < a.rows; first += count) {
      const int64_t rows = a.rows - first < count ? a.rows - first : count;
      const float* x = widened(static_cast<const T*>(a.input) + first * a.inputs, rows, scratch);
      if (rows < kRows) {
        for (int64_t column = from; column < to; ++column)
          for (int64_t row = 0; row < rows; ++row)
            put(first + row, column, product(weight(column), x + row * a.inputs));
      } else {
        for (int64_t column = from; column < to; column += kColumns)
          for (int64_t row = 0; row < rows; row += kRows) tile(x, row, rows, first, column, to);
      }
    }
  }

  const float* widened(const float* x, int64_t, Scratch<float>&) const { return x; }
  const float* widened(const half* x, int64_t rows, Scratch<float>& scratch) const {
    float* wide = scratch.reserve(rows * a.inputs);
    widen(x, wide, static_cast<int>(rows * a.inputs));
    return wide;
  }

  // One stream of weights with nothing between its loads: the machine's own prefetching is at its best. Several rows
  // in one pass were slower than one after another, for which the weights then come from the first cache.
  float product(const T* w, const float* x) const {
    vf total[4] = {};
    int64_t i = 0;
    for (; i + 4 * W <= a.inputs; i += 4 * W)
      for (int j = 0; j < 4; ++j) total[j] += load(w + i + j * W) * load(x + i + j * W);
    for (; i + W <= a.inputs; i += W) total[0] += load(w + i) * load(x + i);
    float rest = 0.0f;
    for (; i < a.inputs; ++i) rest += static_cast<float>(w[i]) * x[i];
    return sum((total[0] + total[1]) + (total[2] + total[3])) + rest;
  }

  // Rows and columns past the end repeat the last one and are not stored.
  void tile(const float* x, int64_t row, int64_t rows, int64_t first, int64_t column, int64_t to) const {
    const float* r[kRows];
    const T* c[kColumns];
    for (int i = 0; i < kRows; ++i) r[i] = x + (row + i < rows ? row + i : rows - 1) * a.inputs;
    for (int j = 0; j < kColumns; ++j) c[j] = weight(column + j < to ? column + j : to - 1);
    vf total[kRows * kColumns] = {};
    const int64_t whole = a.inputs / W * W;
    const bool ahead = row == 0;
    for (int64_t k = 0; k < whole; k += W) {
      vf w[kColumns];
      for (int j = 0; j < kColumns; ++j) w[j] = load(c[j] + k);
      if (ahead)
        for (int j = 0; j < kColumns; ++j) __builtin_prefetch(reinterpret_cast<const char*>(c[j] + k) + kAhead, 0, 2);
      for (int i = 0; i < kRows; ++i) {
        const vf v = load(r[i] + k);
        for (int j = 0; j < kColumns; ++j) total[i * kColumns + j] += v * w[j];
      }
    }
    float result[kRows * kColumns];
    for (int i = 0; i < kRows * kColumns; i += W) store(result + i, sums<1>(total + i));
    for (int i = 0; i < kRows && row + i < rows; ++i)
      for (int j = 0; j < kColumns && column + j < to; ++j) {
        float y = result[i * kColumns + j];
        for (int64_t k = whole; k < a.inputs; ++k) y += static_cast<float>(c[j][k]) * r[i][k];
        put(first + row + i, column + j, y);
      }
  }
};

template <class T>
void run(const KvLinear& a, KvRunner runner) {
  const Linear<T> call{a};
  runner.parallel_for(
      runner.context, call.tasks(), [](void* data, size_t task) { static_cast<Linear<T>*>(data)->run(task); },
      const_cast<Linear<T>*>(&call));
}

}  // namespace

void linear(const KvLinear& call, KvRunner runner) {
  call.type == KV_FLOAT16 ? run<half>(call, runner) : run<float>(call, runner);
}

}  // namespace KV_ISA
}  // namespace kv
