// Random calls of Linear: nothing outside its buffers, the same bits on any threads, and sums in double precision.
#pragma once

#include "support.h"

namespace fuzz {

struct LinearCase {
  Shape shape{};
  KvLinear call{};
  Buffer input, weight;

  explicit LinearCase(Random& random) {
    shape.type = call.type = random.one_of({KV_FLOAT32, KV_FLOAT16});
    call.rows = random.one_in(3) ? random.between(0, 3) : random.between(4, random.one_in(6) ? 300 : 20);
    call.inputs = random.one_in(8) ? random.between(1000, 5000) : any_size(random);
    call.outputs = random.one_in(4) ? random.between(1, 9) : random.between(1, 200);
    input = filled(random, call.rows * call.inputs), weight = filled(random, call.outputs * call.inputs);
    call.input = input.data<void>(), call.weight = weight.data<void>();
  }

  Buffer filled(Random& random, size_t count) const {
    Buffer buffer(random, count, shape.element());
    for (size_t i = 0; i < count; ++i) write(shape, buffer.data<void>(), i, random.normal());
    return buffer;
  }

  Buffer run(Random& random, KvRunner runner) {
    Buffer output(random, call.rows * call.outputs, shape.element());
    call.output = output.data<void>();
    const char* problem = kv_cpu_linear(&call, runner);
    check(!problem, problem ? problem : "");
    output.check_canaries();
    return output;
  }

  void check_all(Random& random) {
    int threads = 0;
    const Buffer once = run(random, {forwards, nullptr}), again = run(random, any_runner(random, &threads));
    check(once.same(again), "the bits depend on the order of the tasks");
    input.check_canaries(), weight.check_canaries();
    const double tolerance = shape.type == KV_FLOAT16 ? 1e-3 : 1e-5;
    for (int64_t row = 0; row < call.rows; ++row)
      for (int64_t column = 0; column < call.outputs; column += 1 + column % 3) {
        double sum = 0.0, size = 1.0;
        for (int64_t k = 0; k < call.inputs; ++k) {
          const double x = static_cast<double>(read(shape, call.input, row * call.inputs + k)) *
                           read(shape, call.weight, column * call.inputs + k);
          sum += x, size += std::fabs(x);
        }
        const double found = read(shape, once.data<void>(), row * call.outputs + column);
        check(std::fabs(found - sum) <= tolerance * size, "a product differs from the sum in double precision");
      }
  }

  std::string describe() const {
    return std::string("Linear ") + (shape.type ? "fp16" : "fp32") + " rows " + std::to_string(call.rows) + " inputs " +
           std::to_string(call.inputs) + " outputs " + std::to_string(call.outputs);
  }
};

}  // namespace fuzz
