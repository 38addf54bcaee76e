// Random calls of Linear: nothing outside its buffers, the same bits on any threads, and sums in double precision.
#pragma once

#include "support.h"

namespace fuzz {

struct LinearCase {
  Shape shape{};
  KvLinear call{};
  Buffer input, weight, bias, gate, residual;

  explicit LinearCase(Random& random) {
    shape.type = call.type = random.one_of({KV_FLOAT32, KV_FLOAT16});
    const int rows = random.one_in(3) ? random.between(0, 3) : random.between(4, random.one_in(6) ? 600 : 60);
    call.batch = random.between(1, 3), call.tokens = rows / call.batch;
    call.input_heads = random.one_in(2) ? 1 : random.between(1, 5);
    call.output_heads = random.one_in(2) ? 1 : random.between(1, 5);
    const int wide = random.one_in(8) ? random.between(1000, 5000) : any_size(random);
    call.inputs = (wide + call.input_heads - 1) / call.input_heads * call.input_heads;
    call.outputs = (random.one_in(4) ? random.between(1, 9) : random.between(1, 200)) * call.output_heads;
    input = filled(random, tokens() * call.inputs), weight = filled(random, call.outputs * call.inputs);
    bias = filled(random, call.outputs), gate = filled(random, call.outputs * call.inputs);
    residual = filled(random, tokens() * call.outputs);
    call.input = input.data<void>(), call.weight = weight.data<void>();
    if (random.one_in(2)) call.bias = bias.data<void>();
    if (random.one_in(3)) call.gate = gate.data<void>();
    if (random.one_in(2)) call.residual = residual.data<void>();
  }

  int64_t tokens() const { return call.batch * call.tokens; }

  Buffer filled(Random& random, size_t count) const {
    Buffer buffer(random, count, shape.element());
    for (size_t i = 0; i < count; ++i) write(shape, buffer.data<void>(), i, random.normal());
    return buffer;
  }

  Buffer run(Random& random, KvRunner runner) {
    Buffer output(random, tokens() * call.outputs, shape.element());
    call.output = output.data<void>();
    const char* problem = kv_cpu_linear(&call, runner);
    check(!problem, problem ? problem : "");
    output.check_canaries();
    return output;
  }

  // The place of column `i` of a row whose heads are a dimension before the tokens.
  int64_t place(int64_t row, int64_t i, int64_t heads, int64_t columns) const {
    const int64_t size = columns / heads, b = row / call.tokens, t = row % call.tokens;
    return ((b * heads + i / size) * call.tokens + t) * size + i % size;
  }

  // A product, and in *size the sum of its terms without their signs.
  double product(const void* of, int64_t row, int64_t column, double* size) const {
    double sum = 0.0;
    *size = 0.0;
    for (int64_t k = 0; k < call.inputs; ++k) {
      const double x = static_cast<double>(read(shape, call.input, place(row, k, call.input_heads, call.inputs))) *
                       read(shape, of, column * call.inputs + k);
      sum += x, *size += std::fabs(x);
    }
    return sum;
  }

  void check_all(Random& random) {
    int threads = 0;
    const Buffer once = run(random, {forwards, nullptr}), again = run(random, any_runner(random, &threads));
    check(once.same(again), "the bits depend on the order of the tasks");
    for (const Buffer* buffer : {&input, &weight, &bias, &gate, &residual}) buffer->check_canaries();
    const double tolerance = shape.type == KV_FLOAT16 ? 1e-3 : 1e-5;
    for (int64_t row = 0; row < tokens(); row += 1 + row % 5)
      for (int64_t column = 0; column < call.outputs; column += 1 + column % 3) {
        double size, sum = product(call.weight, row, column, &size);
        if (call.bias) sum += read(shape, call.bias, column);
        if (call.gate) {
          double gate_size;
          const double g = product(call.gate, row, column, &gate_size), silu = g / (1.0 + std::exp(-g));
          // The slope of silu is at most 1.1.
          size = size * std::fabs(silu) + std::fabs(sum) * 1.1 * gate_size, sum *= silu;
        }
        if (call.residual) sum += read(shape, call.residual, row * call.outputs + column);
        const double found = read(shape, once.data<void>(), place(row, column, call.output_heads, call.outputs));
        check(std::fabs(found - sum) <= tolerance * (1.0 + size + std::fabs(sum)) || std::fabs(sum) > 6e4,
              "a product differs from the sum in double precision");
      }
  }

  std::string describe() const {
    return std::string("Linear ") + (shape.type ? "fp16" : "fp32") + " batch " + std::to_string(call.batch) +
           " tokens " + std::to_string(call.tokens) + " inputs " + std::to_string(call.inputs) + " outputs " +
           std::to_string(call.outputs) + " heads " + std::to_string(call.input_heads) + " " +
           std::to_string(call.output_heads) + (call.bias ? " bias" : "") + (call.gate ? " gate" : "") +
           (call.residual ? " residual" : "");
  }
};

}  // namespace fuzz
