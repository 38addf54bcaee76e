// Experts for one instruction set: for every token the weighted sum of its chosen experts. Only weights of chosen
// experts are read.
//
//   for each range of tokens whose rows are at most kMostRows
//     rows: each token once for every expert that it chose, in the order of experts (routes.h)
//     rows in float32, and rounded if panels need that                             16 rows a task
//     for each expert that has rows, for each share of its inner columns           shares of equal cost
//       gate and up products of a unit of columns (matrices.h), biases, activation   inner [rows, inner]
//     inner rows rounded if panels need that                                       16 rows a task
//     for each share of the output's columns                                       shares of equal cost
//       for each expert that has rows, in order: y[token] += factor (product + bias)
//
// Tasks write columns that no other task writes; each line begins when all tasks of the one before have ended. Sums
// over experts are in the order of experts, whatever the number of threads.
#include "../core/kernels.h"
#include "../linear/rows.h"
#include "activation.h"
#include "matrices.h"
#include "routes.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr int64_t kMostRows = 8192;
constexpr int64_t kTask = 1 << 16;  // the fewest bytes of weights of a task
constexpr int64_t kTasks = 64;      // the most tasks of a product

template <class T>
struct Experts {
  const KvExperts& a;
  const ExpertMatrices<T> first, down;
  const int64_t parts;  // matrices of an expert's first product

  explicit Experts(const KvExperts& a)
      : a(a),
        first(a.first, a.inner, a.hidden, a.float_input),
        down(a.down, a.hidden, a.inner, a.float_input),
        parts(1 + (a.gate != 0)) {}

  // Returns the cost of a unit of columns of a group: its weights are read once, and multiplied with every tile of its
  // rows.
  static int64_t cost(const Group& group) { return 1 + group.count / kFewRows; }
  static size_t tasks(int64_t bits, int64_t units) {
    const int64_t worth = bits / 8 / kTask, most = worth < kTasks ? worth : kTasks;
    return static_cast<size_t>(most < 1 ? 1 : most < units ? most : units);
  }

  // Computes the first product of a share of all groups' units, and the activation. inner [rows, inner].
  void first_share(const Routes& routes, const Rows& x, bool one_row, size_t share, size_t shares, float* inner) const {
    int64_t all = 0, before = 0;
    for (int64_t g = 0; g < routes.groups; ++g) all += cost(routes.group[g]) * first.units();
    const int64_t begin = all * static_cast<int64_t>(share) / static_cast<int64_t>(shares);
    const int64_t end = all * static_cast<int64_t>(share + 1) / static_cast<int64_t>(shares);
    for (int64_t g = 0; g < routes.groups; ++g) {
      const Group& group = routes.group[g];
      const int64_t each = cost(group);
      const auto unit_at = [&](int64_t at) {  // the first unit that begins at this cost or later
        const int64_t unit = at <= before ? 0 : (at - before + each - 1) / each;
        return unit < first.units() ? unit : first.units();
      };
      for (int64_t unit = unit_at(begin); unit < unit_at(end); ++unit)
        first_unit(group, x, one_row ? 0 : group.first, unit, inner + group.first * a.inner);
      before += each * first.units();
    }
  }

  void first_unit(const Group& group, const Rows& x, int64_t row, int64_t unit, float* inner) const {
    static thread_local Scratch<float> scratch;
    const int64_t size = (group.count + kPad - 1) / kPad * kPad * kBlock, column = unit * first.unit();
    float *const gate = scratch.reserve(2 * size), *const up = gate + size;
    const int columns = first.columns(unit);
    first.products(group.expert * parts, x, row, group.count, unit, gate);
    if (a.gate) first.products(group.expert * parts + 1, x, row, group.count, unit, up);
    const T* const bias =
        a.first_bias ? static_cast<const T*>(a.first_bias) + group.expert * parts * a.inner + column : nullptr;
    for (int64_t i = 0; i < group.count; ++i) {
      float *const g = gate + i * kBlock, *const u = up + i * kBlock;
      if (bias) add_numbers(bias, columns, g);
      if (bias && a.gate) add_numbers(bias + a.inner, columns, u);
      inner_row(a, g, u, columns, inner + i * a.inner + column);
    }
  }

  // Computes the second product of a share of the output's columns, summed over experts. output: the output of the
  // range's first token.
  void down_share(const Routes& routes, const Rows& inner, int64_t tokens, size_t share, size_t shares,
                  T* output) const {
    static thread_local Scratch<float> results, sums;
    const auto edge = [&](size_t i) { return down.units() * static_cast<int64_t>(i) / static_cast<int64_t>(shares); };
    for (int64_t unit = edge(share); unit < edge(share + 1); ++unit) {
      const int columns = down.columns(unit);
      const int64_t column = unit * down.unit();
      float* const sum = sums.reserve(tokens * columns, 0.0f);
      for (int64_t g = 0; g < routes.groups; ++g) {
        const Group& group = routes.group[g];
        float* const result = results.reserve((group.count + kPad - 1) / kPad * kPad * kBlock);
        down.products(group.expert, inner, group.first, group.count, unit, result);
        const T* const bias =
            a.down_bias ? static_cast<const T*>(a.down_bias) + group.expert * a.hidden + column : nullptr;
        for (int64_t i = 0; i < group.count; ++i) {
          float* const x = result + i * kBlock;
          if (bias) add_numbers(bias, columns, x);
          add_times(x, routes.factor[group.first + i], columns, sum + routes.token[group.first + i] * columns);
        }
      }
      for (int64_t t = 0; t < tokens; ++t) narrow(sum + t * columns, output + t * a.hidden + column, columns);
    }
  }

  static void add_numbers(const T* from, int count, float* x) {
    for (int i = 0; i < count; ++i) x[i] += static_cast<float>(from[i]);
  }
  static void add_times(const float* x, float factor, int count, float* sum) {
    for (int i = 0; i < count; ++i) sum[i] += factor * x[i];
  }
};

// Rounds the rows of every group. row_of(i): the address of row i in float32.
template <class T, class RowOf>
void round_groups(const ExpertMatrices<T>& matrices, const Routes& routes, const Rows& x, KvRunner runner,
                  const RowOf& row_of) {
  if (!matrices.rounds) return;
  for_rows(runner, routes.rows, [&](int64_t row) {
    const Group& group = routes.group[routes.group_of[row]];
    const RoundedRows rounded = matrices.rounded(x, group.first, group.count);
    const int64_t i = row - group.first;
    if (i % rounded.tile_rows) return;  // the first row of a tile rounds all rows of the tile
    rounded.round(matrices.inputs, i / rounded.tile_rows, [&](int64_t n) { return row_of(group.first + n); });
  });
}

template <class T>
void run(const KvExperts& a, KvRunner runner) {
  static thread_local Router router;
  static thread_local Scratch<float> widened, gathered, middle;
  static thread_local Scratch<uint8_t> rounded[2];
  const Experts<T> call(a);
  const int64_t range = kMostRows / a.chosen > 1 ? kMostRows / a.chosen : 1;
  for (int64_t begin = 0; begin < a.tokens; begin += range) {
    const int64_t tokens = a.tokens - begin < range ? a.tokens - begin : range;
    const Routes routes = router.route(a, begin, tokens);
    const T* const input = static_cast<const T*>(a.input) + begin * a.hidden;
    const float* wide;
    if constexpr (sizeof(T) == sizeof(float)) {
      wide = input;
    } else {
      float* const copy = widened.reserve(tokens * a.hidden);
      for_rows(runner, tokens,
               [&](int64_t t) { widen(input + t * a.hidden, copy + t * a.hidden, static_cast<int>(a.hidden)); });
      wide = copy;
    }
    // A single token has one row for all of its experts. Only products of float32 need rows that follow one another.
    const bool one_row = tokens == 1 && routes.rows == routes.groups;
    Rows x{wide, rounded[0].reserve(call.first.rounded_bytes(one_row ? 1 : routes.rows))};
    if (one_row && call.first.rounds && routes.rows > 0) {
      call.first.rounded(x, 0, 1).round(a.hidden, 0, [&](int64_t) { return wide; });
    } else if (call.first.rounds) {
      round_groups(call.first, routes, x, runner, [&](int64_t row) { return wide + routes.token[row] * a.hidden; });
    } else if (!one_row) {
      float* const copy = gathered.reserve(routes.rows * a.hidden);
      for_rows(runner, routes.rows, [&](int64_t row) {
        memcpy(copy + row * a.hidden, wide + routes.token[row] * a.hidden,
               static_cast<size_t>(a.hidden) * sizeof(float));
      });
      x.floats = copy;
    }
    float* const inner = middle.reserve(routes.rows * a.inner);
    const size_t shares = call.tasks(routes.groups * call.parts * a.inner * a.hidden * call.first.bits(),
                                     routes.groups * call.first.units());
    for_all(runner, shares, [&](size_t share) { call.first_share(routes, x, one_row, share, shares, inner); });
    const Rows z{inner, rounded[1].reserve(call.down.rounded_bytes(routes.rows))};
    round_groups(call.down, routes, z, runner, [&](int64_t row) { return inner + row * a.inner; });
    const size_t columns = call.tasks(routes.groups * a.inner * a.hidden * call.down.bits(), call.down.units());
    T* const output = static_cast<T*>(a.output) + begin * a.hidden;
    for_all(runner, columns, [&](size_t share) { call.down_share(routes, z, tokens, share, columns, output); });
  }
}

}  // namespace

void experts(const KvExperts& call, KvRunner runner) {
  call.type == KV_FLOAT16 ? run<half>(call, runner) : run<float>(call, runner);
}

}  // namespace KV_ISA
}  // namespace kv
