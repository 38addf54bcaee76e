// Random calls of Linear: no access outside of buffers, the same bits on any threads, and a comparison with sums in
// double precision.
#pragma once

#include "packed_weight.h"

namespace fuzz {

constexpr int64_t kManyTiled = 20;  // the fewest rows that become bfloat16 with AMX tiles, as in cpu/linear/linear.cpp

struct LinearCase {
  Shape shape{};
  KvLinear call{};
  Buffer input, norm, gate, residual, cosine, sine;
  std::vector<Buffer> weights, biases;
  std::vector<PackedWeight> packed;
  std::vector<const PackedWeight*> packed_of;  // by product, the gate's last; nullptr if that weight is not packed
  KvAdapters adapters{};
  Buffer mask;
  std::vector<Buffer> firsts, seconds;  // by product, the gate's last

  explicit LinearCase(Random& random) {
    shape.type = call.type = random.one_of({KV_FLOAT32, KV_FLOAT16});
    do draw_sizes(random);
    while (work() > 6e7 * work_share);
    input = filled(random, tokens() * call.inputs), norm = filled(random, call.inputs);
    cosine = filled(random, tokens() * call.planes), sine = filled(random, tokens() * call.planes);
    for (int i = 0; i < call.count; ++i) {
      const KvProduct& p = call.products[i];
      weights.push_back(filled(random, p.outputs * call.inputs)), biases.push_back(filled(random, p.outputs));
    }
    gate = filled(random, call.products[0].outputs * call.inputs);
    residual = filled(random, tokens() * call.products[0].outputs);
    call.input = input.data<void>(), call.cosine = cosine.data<void>(), call.sine = sine.data<void>();
    call.epsilon = 1e-5f;
    if (random.one_in(3)) call.norm = norm.data<void>();
    for (int i = 0; i < call.count; ++i) {
      call.products[i].weight.data = weights[i].data<void>();
      if (random.one_in(2)) call.products[i].bias = biases[i].data<void>();
    }
    if (call.count == 1 && random.one_in(3)) call.gate.data = gate.data<void>();
    if (call.count == 1 && random.one_in(2)) call.residual = residual.data<void>();
    call.float_input = random.one_in(3);
    pack(random);
    if (random.one_in(3)) draw_outliers(random);
    if (random.one_in(3)) draw_adapters(random);
  }

  // Gives most sequences the adapter of a range of rows, and most weights the matrices of all adapters.
  void draw_adapters(Random& random) {
    const int rows = random.between(1, 24);
    adapters.rows = rows, mask = filled(random, call.batch * rows);
    for (int64_t b = 0; b < call.batch; ++b) {
      const int from = random.between(0, rows - 1), to = random.one_in(3) ? from : random.between(from, rows);
      for (int r = 0; r < rows; ++r)
        if (r < from || r >= to) write(shape, mask.data<void>(), b * rows + r, 0.0f);
    }
    adapters.mask = mask.data<void>();
    for (int i = 0; i < weight_count(); ++i) {
      firsts.push_back(filled(random, rows * call.inputs));
      seconds.push_back(filled(random, rows * call.products[i < call.count ? i : 0].outputs));
      if (random.one_in(4)) continue;
      adapters.first[i] = firsts[i].data<void>(), adapters.second[i] = seconds[i].data<void>();
    }
  }

  int weight_count() const { return call.count + (call.gate.data != nullptr); }

  // Makes few inputs so large that their blocks keep low bytes in a prompt.
  void draw_outliers(Random& random) {
    for (int64_t i = 0; i < tokens() * call.inputs; ++i)
      if (random.one_in(200)) write(shape, input.data<void>(), i, 50.0f * read(shape, input.data<void>(), i));
  }

  void draw_sizes(Random& random) {
    const int rows = random.one_in(3) ? random.between(0, 3) : random.between(4, random.one_in(4) ? 600 : 60);
    call.batch = random.between(1, 3), call.tokens = rows / call.batch;
    call.input_heads = random.one_in(2) ? 1 : random.between(1, 5);
    int wide = random.one_in(4) ? random.between(1000, 5000) : any_size(random);
    if (wide >= 1000 && random.one_in(2)) wide = wide / 256 * 256;  // so that groups of inputs can divide it
    call.inputs = (wide + call.input_heads - 1) / call.input_heads * call.input_heads;
    call.count = random.one_in(2) ? 1 : random.between(2, KV_MAX_PRODUCTS);
    call.planes = random.one_in(4) ? random.between(16, 40) : random.between(1, 9);
    for (int i = 0; i < call.count; ++i) {
      KvProduct& p = call.products[i];
      p.heads = random.one_in(2) ? 1 : random.between(1, 5), p.rotated = random.one_in(3);
      const int size = random.one_in(4) ? random.between(1, 9) : random.between(1, 200);
      p.outputs = (p.rotated ? 2 * call.planes : size) * p.heads;
    }
  }

  // Returns the work of a case: its products, and the time to draw its weights.
  double work() const {
    int64_t outputs = 0;
    for (int i = 0; i < call.count; ++i) outputs += call.products[i].outputs;
    return static_cast<double>(tokens() + 30) * call.inputs * outputs;
  }

  // Packs weights in half of the cases, in most of these all of them.
  void pack(Random& random) {
    const bool none = random.one_in(2);
    packed_of.assign(call.count + 1, nullptr), packed.reserve(packed_of.size());
    for (int i = 0; i <= call.count && !none; ++i) {
      KvWeight* const weight = i < call.count ? &call.products[i].weight : &call.gate;
      if (!weight->data || random.one_in(5)) continue;
      packed.emplace_back(random, call.products[i < call.count ? i : 0].outputs, call.inputs,
                          shape.type == KV_FLOAT16 ? 0.1f : 40.0f);  // outputs of float16 stay finite
      packed_of[i] = &packed.back(), *weight = packed.back().view();
    }
  }

  int64_t tokens() const { return call.batch * call.tokens; }

  Buffer filled(Random& random, size_t count) const {
    Buffer buffer(random, count, shape.element());
    Normals normal(random, count);
    for (size_t i = 0; i < count; ++i) write(shape, buffer.data<void>(), i, normal());
    return buffer;
  }

  std::vector<Buffer> run(Random& random, KvRunner runner) {
    std::vector<Buffer> outputs;
    for (int i = 0; i < call.count; ++i) {
      outputs.emplace_back(random, tokens() * call.products[i].outputs, shape.element());
      call.products[i].output = outputs.back().data<void>();
    }
    ++kernel_calls;
    const char* problem =
        adapters.rows ? kv_cpu_adapted_linear(&call, &adapters, runner) : kv_cpu_linear(&call, runner);
    check(!problem, problem ? problem : "");
    for (Buffer& output : outputs) output.check_canaries();
    return outputs;
  }

  // Returns the index of column `i` of a row in a tensor [batch, heads, tokens, size].
  int64_t place(int64_t row, int64_t i, int64_t heads, int64_t columns) const {
    const int64_t size = columns / heads, b = row / call.tokens, t = row % call.tokens;
    return ((b * heads + i / size) * call.tokens + t) * size + i % size;
  }

  double element(int64_t row, int64_t k) const {
    return read(shape, call.input, place(row, k, call.input_heads, call.inputs));
  }

  // Returns the factor of a row by the norm.
  double factor(int64_t row) const {
    if (!call.norm) return 1.0;
    double squares = 0.0;
    for (int64_t k = 0; k < call.inputs; ++k) squares += element(row, k) * element(row, k);
    return 1.0 / std::sqrt(squares / static_cast<double>(call.inputs) + call.epsilon);
  }

  double tolerance() const { return shape.type == KV_FLOAT16 ? 1.5e-3 : 1e-5; }

  // A column of a weight. terms, of a packed weight: the sum of the absolute values of each number's terms, which
  // bounds the number's rounding error. block: the inputs that are rounded together for this weight, or 0.
  struct Column {
    std::vector<double> value, terms;
    int64_t block = 0;
  };
  // The columns of a product and of the gate for one output.
  struct Columns {
    Column product, gate;
  };

  Column column_of(int i, int64_t column) const {
    Column result;
    result.value.resize(call.inputs), result.terms.resize(packed_of[i] ? call.inputs : 0);
    double *const value = result.value.data(), *const terms = result.terms.data();
    for (int64_t k = 0; k < call.inputs; ++k) value[k] = weight(i, column, k);
    for (int64_t k = 0; k < call.inputs && packed_of[i]; ++k) terms[k] = packed_of[i]->terms(column, k);
    if (packed_of[i]) result.block = packed_of[i]->block();
    return result;
  }
  Columns columns_of(int i, int64_t column) const {
    return {column_of(i, column), call.gate.data ? column_of(call.count, column) : Column()};
  }

  // Returns a row after the norm.
  std::vector<double> row_of(int64_t row) const {
    std::vector<double> result(call.inputs);
    double* const x = result.data();
    const double scale = factor(row);
    for (int64_t k = 0; k < call.inputs; ++k)
      x[k] = element(row, k) * (call.norm ? scale * read(shape, call.norm, k) : 1.0);
    return result;
  }

  // Returns a row times a column, and in *size the sum of the absolute values of its terms. For weights in panels the
  // row may be rounded by blocks: the error is half a step, and the block's largest number is 32512 steps. In
  // calls of many rows, blocks without a number above five times the row's root mean square have steps of 1/127 of
  // their largest number. In tiles the row and the column are both rounded to bfloat16, whose 8 bits change a number by
  // up to 1/257 of itself, and a product by up to 1/128.
  double product(const std::vector<double>& row, const Column& column, double* size) const {
    double sum = 0.0, products = 0.0, terms = 0.0, squares = 0.0, rounding = 0.0, coarse = 0.0;
    for (const double number : row) squares += number * number;
    const double small = 5.001 * std::sqrt(squares / static_cast<double>(call.inputs));
    const double *const x = row.data(), *const w = column.value.data(), *const term = column.terms.data();
    for (int64_t k = 0; k < call.inputs; ++k) sum += x[k] * w[k], products += std::fabs(x[k] * w[k]);
    // Kernels multiply a packed weight's integer and its offset separately, in float32.
    if (!column.terms.empty())
      for (int64_t k = 0; k < call.inputs; ++k) terms += std::fabs(x[k]) * term[k];
    *size = products + terms * 1e-5 / tolerance();
    if (!column.block || call.float_input) return sum;
    for (int64_t from = 0; from < call.inputs; from += column.block) {
      double highest = 0.0, weights = 0.0;
      for (int64_t k = from; k < std::min(from + column.block, call.inputs); ++k)
        highest = std::max(highest, std::fabs(x[k])), weights += std::fabs(w[k]);
      rounding += highest * weights, coarse += highest <= small ? highest * weights : 0.0;
    }
    if (in_tiles())
      *size += products / 128.0 / tolerance();
    else
      *size += (rounding / 20000.0 + (tokens() >= kTallFrom ? coarse / 253.0 : 0.0)) / tolerance();
    return sum;
  }

  bool in_tiles() const { return tokens() >= kManyTiled && strcmp(kv_cpu_isa(), "amx") == 0; }

  double weight(int i, int64_t column, int64_t k) const {
    if (packed_of[i]) return packed_of[i]->value(column, k);
    const KvWeight& plain = i < call.count ? call.products[i].weight : call.gate;
    return read(shape, plain.data, column * call.inputs + k);
  }

  // The products of a row with the rows of `first` of a weight, times its mask, and the sums of their terms without
  // signs.
  struct Narrow {
    std::vector<double> value, size;
  };
  // A row after the norm, and its products with `first` of one product and of the gate.
  struct Row {
    std::vector<double> x;
    Narrow product, gate;
  };

  Narrow narrow_of(int w, int64_t row, const std::vector<double>& x) const {
    Narrow result;
    for (int64_t r = 0; r < adapters.rows && adapters.first[w]; ++r) {
      const double factor = read(shape, adapters.mask, row / call.tokens * adapters.rows + r);
      double sum = 0.0, size = 0.0;
      for (int64_t k = 0; k < call.inputs && factor != 0.0; ++k) {
        const double term = factor * x[k] * read(shape, adapters.first[w], r * call.inputs + k);
        sum += term, size += std::fabs(term);
      }
      result.value.push_back(sum), result.size.push_back(size);
    }
    return result;
  }

  // Returns the change of an output by adapters, and adds the sum of its terms without signs to *size.
  double change(int w, const Narrow& narrow, int64_t outputs, int64_t column, double* size) const {
    double sum = 0.0;
    for (size_t r = 0; r < narrow.value.size(); ++r) {
      const double factor = read(shape, adapters.second[w], static_cast<int64_t>(r) * outputs + column);
      sum += narrow.value[r] * factor, *size += std::fabs(narrow.size[r] * factor);
    }
    return sum;
  }

  // Returns an output before its rotation, and in *size the sum of its terms' absolute values.
  double expected(const KvProduct& p, int64_t row, int64_t column, const Row& r, const Columns& w, double* size) const {
    double sum = product(r.x, w.product, size);
    sum += change(static_cast<int>(&p - call.products), r.product, p.outputs, column, size);
    if (p.bias) sum += read(shape, p.bias, column);
    if (call.gate.data) {
      double gate_size;
      double g = product(r.x, w.gate, &gate_size);
      g += change(call.count, r.gate, p.outputs, column, &gate_size);
      const double silu = g / (1.0 + std::exp(-g));
      // The slope of silu is at most 1.1. Both factors of the product are off.
      const double off = 1.1 * gate_size;
      *size = *size * (std::fabs(silu) + tolerance() * off) + std::fabs(sum) * off, sum *= silu;
    }
    if (call.residual) sum += read(shape, call.residual, row * p.outputs + column);
    *size += std::fabs(sum);
    return sum;
  }

  // Returns the column with which a column is rotated.
  int64_t partner(int64_t column) const {
    return column % (2 * call.planes) < call.planes ? column + call.planes : column - call.planes;
  }

  void check_all(Random& random) {
    int threads = 0;
    const std::vector<Buffer> once = run(random, {forwards, nullptr}),
                              again = run(random, any_runner(random, &threads));
    for (int i = 0; i < call.count; ++i) check(once[i].same(again[i]), "the bits depend on the order of the tasks");
    for (const Buffer* buffer : {&input, &norm, &gate, &residual, &cosine, &sine, &mask}) buffer->check_canaries();
    for (size_t i = 0; i < firsts.size(); ++i) firsts[i].check_canaries(), seconds[i].check_canaries();
    for (int i = 0; i < call.count; ++i)
      weights[i].check_canaries(), biases[i].check_canaries(), check_product(i, once[i]);
  }

  void check_product(int i, const Buffer& output) const {
    const KvProduct& p = call.products[i];
    std::vector<Row> rows(tokens());
    for (int64_t row = 0; row < tokens(); row += 1 + row % 5) {
      rows[row].x = row_of(row);
      if (!adapters.rows) continue;
      rows[row].product = narrow_of(i, row, rows[row].x);
      if (call.gate.data) rows[row].gate = narrow_of(call.count, row, rows[row].x);
    }
    for (int64_t column = 0; column < p.outputs; column += 1 + column % 3) {
      const int64_t other = p.rotated ? partner(column) : column, plane = std::min(column, other) % (2 * call.planes);
      const Columns own = columns_of(i, column), crossed = p.rotated ? columns_of(i, other) : Columns();
      for (int64_t row = 0; row < tokens(); row += 1 + row % 5) {
        double size, other_size = 0.0;
        double sum = expected(p, row, column, rows[row], own, &size);
        double largest = size;  // of a number that is rounded to the output's type, before the rotation as well
        if (p.rotated) {
          const double c = read(shape, call.cosine, row * call.planes + plane);
          const double s = read(shape, call.sine, row * call.planes + plane) * (column < other ? -1.0 : 1.0);
          sum = sum * c + expected(p, row, other, rows[row], crossed, &other_size) * s;
          largest = std::max(size, other_size);
          size = size * std::fabs(c) + other_size * std::fabs(s);
          largest = std::max(largest, size);
        }
        const double actual = read(shape, output.data<void>(), place(row, column, p.heads, p.outputs));
        check(std::fabs(actual - sum) <= tolerance() * (1.0 + size) || (shape.type == KV_FLOAT16 && largest > 6e4),
              "a product differs from the sum in double precision");
      }
    }
  }

  std::string products() const {
    std::string text;
    for (int i = 0; i < call.count; ++i) {
      const KvProduct& p = call.products[i];
      text += (i ? ", " : "") + std::to_string(p.outputs) + " in heads " + std::to_string(p.heads) +
              (packed_of[i] ? packed_of[i]->describe() : "") + (p.bias ? " bias" : "") + (p.rotated ? " rotated" : "");
    }
    return text;
  }

  std::string describe() const {
    return std::string("Linear ") + (shape.type ? "fp16" : "fp32") + " batch " + std::to_string(call.batch) +
           " tokens " + std::to_string(call.tokens) + " inputs " + std::to_string(call.inputs) + " outputs " +
           products() + " input heads " + std::to_string(call.input_heads) + (call.norm ? " norm" : "") +
           (call.gate.data ? " gate" : "") + (call.gate.bits ? packed_of[call.count]->describe() : "") +
           (call.float_input ? " float input" : "") + (call.residual ? " residual" : "") +
           (adapters.rows ? " adapters of " + std::to_string(adapters.rows) + " rows" : "");
  }
};

}  // namespace fuzz
