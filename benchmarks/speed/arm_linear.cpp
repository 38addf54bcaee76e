// Calls of Linear on Arm whose instructions arm_instructions.py counts: a product of random rows with one weight.
//
//   arm_linear int4|int8|int8-rows|float16 ROWS OUTPUTS INPUTS CALLS plain|spikes
//
// int4 and int8 are in groups of 32 with scales in float16, int8-rows has one scale per output; all three are in
// panels. With `plain` rows no block of a row has a number above five times the row's root mean square, so that prompts
// are rounded to 8 bits (plugins/cpu/linear/rounding.h). With `spikes` every block has one, so that every block keeps
// its low bytes. The first call reserves scratch memory, which the others use again. Prints the instruction set and the
// sum of the last outputs.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../../plugins/cpu/kvexport_cpu.h"

namespace {

constexpr int64_t kGroup = 32;
constexpr size_t kLine = 64;

[[noreturn]] void fail(const char* why) {
  fprintf(stderr, "arm_linear: %s\n", why);
  exit(2);
}

// Returns zeros at an address aligned to a line, which live as long as the process.
void* memory(size_t bytes) {
  const size_t whole = (bytes + kLine - 1) / kLine * kLine;
  return memset(aligned_alloc(kLine, whole), 0, whole);
}

uint64_t random_bits() {
  static uint64_t state = 88172645463325252u;
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state;
}

// Returns the sum of four uniform numbers, of mean 0 and at most 3.5 times its root mean square.
float number() {
  const uint64_t bits = random_bits();
  float sum = -131070.0f;
  for (int i = 0; i < 64; i += 16) sum += static_cast<float>(bits >> i & 65535);
  return sum / 65536.0f;
}

void serial(void*, size_t count, KvTask task, void* data) {
  for (size_t i = 0; i < count; ++i) task(data, i);
}

// Returns a weight of `bits` bits in groups of `group` inputs, in panels.
KvWeight packed(int bits, int64_t group, int64_t outputs, int64_t inputs) {
  KvWeight weight{};
  weight.bits = bits, weight.is_signed = 1, weight.group = group;
  weight.scale_type = weight.minimum_type = KV_FLOAT16;
  const auto bytes = static_cast<size_t>(outputs * inputs * bits / 8);
  auto* const integers = static_cast<char*>(memory(bytes));
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    const uint64_t eight = random_bits();
    memcpy(integers + i, &eight, 8);
  }
  const auto groups = static_cast<size_t>(outputs * inputs / group);
  auto* const scales = static_cast<__fp16*>(memory(groups * 2));
  for (size_t i = 0; i < groups; ++i) scales[i] = static_cast<__fp16>(0.01f);
  weight.data = integers, weight.scale = scales;
  if (const char* why = kv_cpu_why_no_panels(&weight, inputs)) fail(why);
  void* const panels = memory(kv_cpu_panels_bytes(&weight, outputs, inputs));
  kv_cpu_repack(&weight, outputs, inputs, panels);
  weight.data = panels, weight.layout = KV_PANELS;
  return weight;
}

// Returns float16 numbers of magnitude 2^-7, four at a time.
void* halves(int64_t count) {
  auto* const values = static_cast<uint64_t*>(memory(static_cast<size_t>(count) * 2));
  for (int64_t i = 0; i < count / 4; ++i) values[i] = (random_bits() & 0x83ff83ff83ff83ffu) | 0x2000200020002000u;
  return values;
}

// Returns rows. With `spikes` the first number of every block is far larger than the others.
void* floats(int64_t rows, int64_t inputs, bool spikes) {
  auto* const values = static_cast<float*>(memory(static_cast<size_t>(rows * inputs) * 4));
  for (int64_t i = 0; i < rows * inputs; ++i)
    values[i] = spikes && i % kGroup ? number() / 1000.0f : number() + (spikes ? 100.0f : 0.0f);
  return values;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 7) fail("six arguments: the weight, rows, outputs, inputs, calls, and plain or spikes");
  const bool is_float16 = strcmp(arguments[1], "float16") == 0;
  const int64_t rows = atoll(arguments[2]), outputs = atoll(arguments[3]), inputs = atoll(arguments[4]);
  KvLinear call{};
  call.type = is_float16 ? KV_FLOAT16 : KV_FLOAT32;
  call.batch = 1, call.tokens = rows, call.inputs = inputs, call.input_heads = 1, call.count = 1;
  call.input = is_float16 ? halves(rows * inputs) : floats(rows, inputs, strcmp(arguments[6], "spikes") == 0);
  KvProduct& product = call.products[0];
  product.outputs = outputs, product.heads = 1;
  product.output = memory(static_cast<size_t>(rows * outputs) * 4);
  if (is_float16)
    product.weight.data = halves(outputs * inputs);
  else
    product.weight = packed(strcmp(arguments[1], "int4") == 0 ? 4 : 8,
                            strcmp(arguments[1], "int8-rows") == 0 ? inputs : kGroup, outputs, inputs);
  for (int i = 0; i < atoi(arguments[5]); ++i)
    if (const char* problem = kv_cpu_linear(&call, {serial, nullptr})) fail(problem);
  double sum = 0.0;
  for (int64_t i = 0; i < rows * outputs; ++i)
    sum += is_float16 ? static_cast<__fp16*>(product.output)[i] : static_cast<float*>(product.output)[i];
  if (!std::isfinite(sum)) fail("an output is not finite");
  printf("%s %.6g\n", kv_cpu_isa(), sum);
  return 0;
}
