// Random calls of Experts: no access outside of buffers, the same bits on any threads, and a comparison with sums in
// double precision.
#pragma once

#include "packed_weight.h"

namespace fuzz {

struct ExpertsCase {
  Shape shape{};
  KvExperts call{};
  Buffer input, indices, weights, first, first_bias, down, down_bias;
  std::unique_ptr<PackedWeight> packed_first, packed_down;
  int64_t rows_of_first = 0;  // rows of an expert in the first product

  explicit ExpertsCase(Random& random) {
    shape.type = call.type = random.one_of({KV_FLOAT32, KV_FLOAT16});
    call.weights_type = shape.type == KV_FLOAT16 && random.one_in(2) ? KV_FLOAT16 : KV_FLOAT32;
    do draw_sizes(random);
    while (static_cast<double>(call.tokens * call.chosen + 30 * call.experts) * call.hidden * call.inner >
           2e7 * work_share);
    call.activation = random.between(KV_EXPERTS_SILU, KV_EXPERTS_RELU_SQUARED), call.gate = random.one_in(3) ? 0 : 1;
    call.slope = random.one_in(2) ? 1.0f : 1.702f, call.limit = random.one_in(2) ? 0.0f : random.uniform(0.2f, 2.0f);
    call.up_offset = random.one_in(2) ? 0.0f : 1.0f, call.float_input = random.one_in(3);
    rows_of_first = call.inner * (1 + call.gate);
    input = filled(random, call.tokens * call.hidden, 1.0f);
    first = filled(random, call.experts * rows_of_first * call.hidden, 0.3f);
    down = filled(random, call.experts * call.hidden * call.inner, 0.3f);
    first_bias = filled(random, call.experts * rows_of_first, 1.0f);
    down_bias = filled(random, call.experts * call.hidden, 1.0f);
    draw_routes(random);
    call.input = input.data<void>(), call.indices = indices.data<int64_t>(), call.weights = weights.data<void>();
    call.first.data = first.data<void>(), call.down.data = down.data<void>();
    if (random.one_in(2)) call.first_bias = first_bias.data<void>(), call.down_bias = down_bias.data<void>();
    if (random.one_in(3)) return;
    const int64_t parts = 1 + call.gate;
    packed_first =
        std::make_unique<PackedWeight>(random, call.experts * rows_of_first, call.hidden, 0.1f, call.experts * parts);
    packed_down = std::make_unique<PackedWeight>(random, call.experts * call.hidden, call.inner, 0.1f, call.experts);
    call.first = packed_first->view();
    if (!random.one_in(4)) call.down = packed_down->view();
  }

  void draw_sizes(Random& random) {
    call.tokens = random.one_in(3) ? random.between(0, 3) : random.between(4, random.one_in(3) ? 300 : 40);
    call.experts = random.between(1, 9), call.chosen = random.between(1, static_cast<int>(call.experts));
    call.hidden = size(random), call.inner = size(random);
  }
  static int size(Random& random) {
    const int any = random.one_in(3) ? random.between(200, 1200) : random.between(1, 200);
    const int whole = any >= 256 && random.one_in(2) ? 256 : 32;  // so that groups of inputs can divide it
    return random.one_in(2) && any >= whole ? any / whole * whole : any;
  }

  // Draws the chosen experts. No token names an expert twice; a few numbers have no expert.
  void draw_routes(Random& random) {
    const Shape factors{call.weights_type, 0, 0, 0, 0, 0, 0};
    const int64_t count = call.tokens * call.chosen;
    indices = Buffer(random, count, sizeof(int64_t)), weights = Buffer(random, count, factors.element());
    std::vector<int64_t> all(call.experts);
    for (int64_t e = 0; e < call.experts; ++e) all[e] = e;
    const bool one_for_all = random.one_in(4);
    for (int64_t t = 0; t < call.tokens; ++t) {
      if (!one_for_all) random.shuffle(all);
      for (int64_t j = 0; j < call.chosen; ++j) {
        indices.data<int64_t>()[t * call.chosen + j] =
            random.one_in(20) ? random.one_of({int64_t{-1}, call.experts, INT64_MAX, INT64_MIN}) : all[j];
        write(factors, weights.data<void>(), t * call.chosen + j, random.uniform(0.0f, 1.0f));
      }
    }
  }

  Buffer filled(Random& random, size_t count, float size) const {
    Buffer buffer(random, count, shape.element());
    Normals normal(random, count);
    for (size_t i = 0; i < count; ++i) write(shape, buffer.data<void>(), i, size * normal());
    return buffer;
  }

  Buffer run(Random& random, KvRunner runner) {
    Buffer output(random, call.tokens * call.hidden, shape.element());
    call.output = output.data<void>();
    const char* const problem = kv_cpu_experts(&call, runner);
    check(!problem, problem ? problem : "");
    output.check_canaries();
    return output;
  }

  // A sum, and a bound on its error.
  struct Number {
    double value = 0.0, error = 0.0;
  };

  double rounding() const { return shape.type == KV_FLOAT16 ? 6e-4 : 3e-6; }

  // Returns row `row` of a weight times x.
  Number product(const KvWeight& weight, const PackedWeight* packed, int64_t row, int64_t inputs,
                 const std::vector<Number>& x) const {
    Number sum;
    double highest = 0.0, block = 0.0, blocks = 0.0, coarse = 0.0, squares = 0.0;
    for (int64_t k = 0; k < inputs; ++k) squares += x[k].value * x[k].value;
    const double small = 5.001 * std::sqrt(squares / static_cast<double>(inputs));
    const bool is_packed = weight.bits != 0;
    for (int64_t k = 0; k < inputs; ++k) {
      if (k % 32 == 0) blocks += highest * block, coarse += std::min(highest, small) * block, highest = block = 0.0;
      const double w = is_packed ? packed->value(row, k) : read(shape, weight.data, row * inputs + k);
      sum.value += w * x[k].value;
      sum.error += std::fabs(w) * x[k].error + 3e-6 * std::fabs(w * x[k].value);
      if (is_packed) sum.error += 1e-5 * std::fabs(x[k].value) * packed->terms(row, k);
      highest = std::max(highest, std::fabs(x[k].value)), block += std::fabs(w);
    }
    coarse += std::min(highest, small) * block;
    if (is_packed && !call.float_input) sum.error += (blocks + highest * block) / 20000.0;
    // An expert may have so many rows that they are rounded to 8 bits (linear_case.h).
    if (is_packed && !call.float_input && call.tokens >= kTallFrom) sum.error += coarse / 253.0;
    return sum;
  }

  double activated(double x) const {
    switch (call.activation) {
      case KV_EXPERTS_SILU:
        return x / (1.0 + std::exp(-call.slope * x));
      case KV_EXPERTS_GELU:
        return 0.5 * x * (1.0 + std::erf(x * std::sqrt(0.5)));
      case KV_EXPERTS_GELU_TANH:
        return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
      case KV_EXPERTS_RELU:
        return std::max(x, 0.0);
      default:
        return x > 0.0 ? x * x : 0.0;
    }
  }
  // Returns the activation of a number that is not exact: no function has a slope above 2 |x| + 1.4.
  Number activated(const Number& x) const {
    const double slope =
        call.activation == KV_EXPERTS_RELU_SQUARED ? 2.0 * (std::fabs(x.value) + x.error) : 1.0 + 0.4 * call.slope;
    const double value = activated(x.value);
    return {value, slope * x.error + 1e-6 * (std::fabs(x.value) + std::fabs(value))};
  }

  Number inner(int64_t e, int64_t i, const std::vector<Number>& x) const {
    const auto one = [&](int64_t row) {
      Number sum = product(call.first, packed_first.get(), e * rows_of_first + row, call.hidden, x);
      if (call.first_bias) sum.value += read(shape, call.first_bias, e * rows_of_first + row);
      sum.error += 1e-6 * std::fabs(sum.value);
      return sum;
    };
    Number gate = one(i);
    if (!call.gate) return activated(gate);
    Number up = one(call.inner + i);
    if (call.limit > 0.0f) {
      const double most = call.limit;
      gate.value = std::min(gate.value, most), up.value = std::max(std::min(up.value, most), -most);
    }
    gate = activated(gate), up.value += call.up_offset;
    return {gate.value * up.value, gate.error * (std::fabs(up.value) + up.error) + up.error * std::fabs(gate.value)};
  }

  void check_token(int64_t t, const Buffer& output) const {
    std::vector<Number> x(call.hidden), sum(call.hidden), z(call.inner);
    for (int64_t k = 0; k < call.hidden; ++k) x[k].value = read(shape, call.input, t * call.hidden + k);
    for (int64_t j = 0; j < call.chosen; ++j) {
      const int64_t e = call.indices[t * call.chosen + j];
      if (e < 0 || e >= call.experts) continue;
      const double factor = read({call.weights_type, 0, 0, 0, 0, 0, 0}, call.weights, t * call.chosen + j);
      for (int64_t i = 0; i < call.inner; ++i) z[i] = inner(e, i, x);
      for (int64_t h = 0; h < call.hidden; ++h) {
        const int64_t row = e * call.hidden + h;
        Number one = product(call.down, packed_down.get(), row, call.inner, z);
        if (call.down_bias) one.value += read(shape, call.down_bias, row);
        sum[h].value += factor * one.value, sum[h].error += factor * (one.error + 1e-6 * std::fabs(one.value));
      }
    }
    for (int64_t h = 0; h < call.hidden; ++h) {
      const double found = read(shape, output.data<void>(), t * call.hidden + h);
      const bool large = shape.type == KV_FLOAT16 && std::fabs(sum[h].value) + sum[h].error > 6e4;
      check(large || std::fabs(found - sum[h].value) <= 1e-6 + sum[h].error + rounding() * std::fabs(sum[h].value),
            "an output differs from the sum in double precision");
    }
  }

  void check_all(Random& random) {
    int threads = 0;
    const Buffer once = run(random, {forwards, nullptr}), again = run(random, any_runner(random, &threads));
    check(once.same(again), "the bits depend on the order of the tasks");
    for (const Buffer* buffer : {&input, &indices, &weights, &first, &first_bias, &down, &down_bias})
      buffer->check_canaries();
    for (int64_t t = 0; t < call.tokens; t += 1 + call.tokens / 4) check_token(t, once);
  }

  std::string describe() const {
    return std::string("Experts ") + (shape.type ? "fp16" : "fp32") + " tokens " + std::to_string(call.tokens) +
           " hidden " + std::to_string(call.hidden) + " inner " + std::to_string(call.inner) + " experts " +
           std::to_string(call.experts) + " chosen " + std::to_string(call.chosen) + " activation " +
           std::to_string(call.activation) + (call.gate ? " gate" : "") + (call.first_bias ? " bias" : "") + " limit " +
           std::to_string(call.limit) + " slope " + std::to_string(call.slope) + " first" +
           (call.first.bits ? packed_first->describe() : " plain") + " down" +
           (call.down.bits ? packed_down->describe() : " plain") + (call.float_input ? " float input" : "");
  }
};

}  // namespace fuzz
