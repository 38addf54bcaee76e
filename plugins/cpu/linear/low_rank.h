// LoRA adapters of a call of Linear, each of a range of rows of the matrices `first` and `second` of every weight:
//
//   narrow = (x first^T) mask      for each weight, kRowsOfTask rows of x and kColumns rows of `first` one task
//   y      = y + narrow second     for the columns of a row, before its epilogue
//
// Of `first` and `second` only the rows from the first to the last whose mask is not 0 for a sequence are read.
#pragma once

#include "adapters.h"
#include "plain.h"
#include "rows.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr int64_t kSharedWork = 1 << 15;  // products for which tasks are shared out

template <class T>
class Adapted {
 public:
  // input: [rows, inputs]. adapters: nullptr for none.
  Adapted(const KvLinear& call, const KvAdapters* adapters, const float* input) : a_(call), input_(input) {
    static thread_local Scratch<Range> ranges;
    static thread_local Scratch<float> narrow;
    if (!adapters) return;
    adapters_ = adapters, ranges_ = ranges.reserve(static_cast<size_t>(a_.batch));
    for (int64_t b = 0; b < a_.batch; ++b) {
      ranges_[b] = range_of(mask(b));
      if (ranges_[b].rows > rank_) rank_ = ranges_[b].rows;
    }
    narrow_ = narrow.reserve(static_cast<size_t>(weights() * a_.batch * a_.tokens * rank_));
  }

  // Computes narrow of all rows.
  void multiply(KvRunner runner) const {
    if (!rank_) return;
    const int64_t tasks = weights() * a_.batch * groups() * chunks();
    if (weights() * a_.batch * a_.tokens * rank_ * a_.inputs >= kSharedWork)
      return for_all(runner, static_cast<size_t>(tasks), [&](size_t i) { task(static_cast<int64_t>(i)); });
    for (int64_t i = 0; i < tasks; ++i) task(i);
  }

  // Adds the change of weight `w` to x, the columns [column, column + count) of the `outputs` of a row.
  void add(int w, int64_t row, int64_t outputs, int64_t column, int count, float* x) const {
    if (!rank_ || !adapters_->second[w]) return;
    const Range range = ranges_[row / a_.tokens];
    const float* const n = narrow_of(w, row);
    const T* const s = static_cast<const T*>(adapters_->second[w]) + range.from * outputs + column;
    int i = 0;
    for (; i + W <= count; i += W) {
      vf sum = load(x + i);
      for (int64_t r = 0; r < range.rows; ++r) sum += n[r] * load(s + r * outputs + i);
      store(x + i, sum);
    }
    for (; i + kColumns <= count; i += kColumns) add_few<kColumns>(n, s + i, range.rows, outputs, x + i);
    for (; i < count; ++i) add_few<1>(n, s + i, range.rows, outputs, x + i);
  }

 private:
  struct Range {
    int64_t from, rows;
  };

  int64_t weights() const { return a_.count + (a_.gate.data != nullptr); }
  int64_t groups() const { return (a_.tokens + kRowsOfTask - 1) / kRowsOfTask; }
  int64_t chunks() const { return (rank_ + kColumns - 1) / kColumns; }
  const T* mask(int64_t b) const { return static_cast<const T*>(adapters_->mask) + b * adapters_->rows; }
  float* narrow_of(int64_t w, int64_t row) const { return narrow_ + (w * a_.batch * a_.tokens + row) * rank_; }

  Range range_of(const T* mask) const {
    Range range{0, adapters_->rows};
    while (range.rows && static_cast<float>(mask[range.rows - 1]) == 0.0f) --range.rows;
    while (range.rows && static_cast<float>(mask[range.from]) == 0.0f) ++range.from, --range.rows;
    return range;
  }

  void task(int64_t i) const {
    const int64_t chunk = i % chunks(), group = i / chunks() % groups();
    const int64_t b = i / chunks() / groups() % a_.batch, w = i / chunks() / groups() / a_.batch;
    const int64_t column = chunk * kColumns, first = group * kRowsOfTask, left = ranges_[b].rows - column;
    if (!adapters_->first[w] || left <= 0) return;
    const int columns = static_cast<int>(left < kColumns ? left : kColumns);
    const int64_t rows = a_.tokens - first < kRowsOfTask ? a_.tokens - first : kRowsOfTask;
    const T* c[kColumns];  // those past the end repeat the last one
    for (int j = 0; j < kColumns; ++j)
      c[j] =
          static_cast<const T*>(adapters_->first[w]) + (ranges_[b].from + column + min_of(j, columns - 1)) * a_.inputs;
    const T* const factor = mask(b) + ranges_[b].from + column;
    for (int64_t row = 0; row < rows; row += kRows) {
      float tile[kRows * kColumns];
      const int count = static_cast<int>(rows - row < kRows ? rows - row : kRows);
      products(b * a_.tokens + first + row, count, c, columns, tile);
      for (int k = 0; k < count; ++k)
        for (int j = 0; j < columns; ++j)
          narrow_of(w, b * a_.tokens + first + row + k)[column + j] =
              tile[k * kColumns + j] * static_cast<float>(factor[j]);
    }
  }

  // tile [kRows, kColumns]: `count` rows from `row` on times `columns` rows c of `first`.
  void products(int64_t row, int count, const T* const* c, int columns, float* tile) const {
    const float* r[kRows];
    for (int k = 0; k < kRows; ++k) r[k] = input_ + (row + min_of(k, count - 1)) * a_.inputs;
    if (count == kRows) return small_tile(r, c, a_.inputs, false, tile);
    for (int k = 0; k < count; ++k)
      for (int j = 0; j < columns; ++j) tile[k * kColumns + j] = row_product(c[j], r[k], a_.inputs);
  }

  template <int count>
  static void add_few(const float* n, const T* s, int64_t rows, int64_t outputs, float* x) {
    float sum[count];
    for (int j = 0; j < count; ++j) sum[j] = x[j];
    for (int64_t r = 0; r < rows; ++r)
      for (int j = 0; j < count; ++j) sum[j] += n[r] * static_cast<float>(s[r * outputs + j]);
    for (int j = 0; j < count; ++j) x[j] = sum[j];
  }

  const KvLinear& a_;
  const KvAdapters* adapters_ = nullptr;
  const float* input_;
  Range* ranges_ = nullptr;  // [batch]: the rows of `first` and `second` between which a sequence's mask is not 0
  float* narrow_ = nullptr;  // [weights, rows, rank]
  int64_t rank_ = 0;         // the most rows of a range; 0: no sequence has an adapter
};

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
