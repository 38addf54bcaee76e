// Shared by the programs of the experts' two products: the arguments of a product, its inputs and outputs, and the
// numbers of its weight.
#pragma once

#include "../core/quantized.h"
#include "experts.h"

namespace kv {
namespace cuda {

// A product of all rows of a call.
struct ProductArgs {
  ExpertsArgs all;
  bool second;   // which product
  int strips;    // of 16 rows of an expert's weight
  bool aligned;  // whether rows of the inputs are whole 16-byte vectors at aligned addresses

  KV_HD const KvWeight& weight() const { return second ? all.call.down : all.call.first; }
  KV_HD bool gated() const { return !second && all.call.gate; }
  KV_HD int inputs() const { return static_cast<int>(second ? all.call.inner : all.call.hidden); }
  KV_HD int outputs() const { return static_cast<int>(second ? all.call.hidden : all.call.inner); }
};

// Returns a weight's number as its inputs are multiplied with it. row: counted over all experts.
KV_DEVICE float scale_at(const KvWeight& w, size_t group) {
  if (w.scale_type == KV_EXPONENTS) {
    const uint32_t exponent = static_cast<const uint8_t*>(w.scale)[group];
    return bits_as<float>((exponent < 2 ? 0 : exponent - 1) << 23);  // 2^(exponent - 128)
  }
  return element_at(w.scale_type, w.scale, group);
}
KV_DEVICE int byte_of(const KvWeight& w, const void* integers, size_t i) {  // as an unsigned integer
  const uint8_t* const bytes = static_cast<const uint8_t*>(integers);
  const int excess = w.is_signed ? 1 << (w.bits - 1) : 0;
  return (w.bits == 4 ? bytes[i / 2] >> (i % 2 * 4) & 15 : bytes[i]) ^ excess;
}
KV_DEVICE int zero_of(const KvWeight& w, size_t group) {
  return w.zero ? byte_of(w, w.zero, group) : w.is_signed ? 1 << (w.bits - 1) : 0;
}
KV_DEVICE float weight_at(const KvWeight& w, int type, size_t row, int inputs, int k) {
  const size_t at = row * inputs + k;
  if (!w.bits) return element_at(type, w.data, at);
  const int in_group = static_cast<int>(w.group);
  const size_t group = row * (inputs / in_group) + k / in_group;
  const int q = byte_of(w, w.data, at);
  const float x = static_cast<float>(w.table ? w.table[q] : q - zero_of(w, group)) * scale_at(w, group);
  return w.minimum ? x + element_at(w.minimum_type, w.minimum, group) : x;
}

// Calls use(elements) with a pointer to the inputs of a product.
template <class Use>
KV_DEVICE void with_inputs(const ProductArgs& args, Use use) {
  if (args.second)
    use(static_cast<const float*>(args.all.inner));
  else
    with_elements(args.all.call.type, args.all.call.input, use);
}
// Returns the row of these inputs that a row of the call reads.
KV_DEVICE int input_row(const ProductArgs& args, int row) {
  if (args.second) return row;
  return args.all.tile ? args.all.number[row] / static_cast<int>(args.all.call.chosen) : 0;
}

// Writes an input of the second product, or its result times the factor of the row's expert, unless there is no such
// column.
KV_DEVICE void write_output(const ProductArgs& args, int row, int column, float x) {
  const ExpertsArgs& all = args.all;
  if (column >= args.outputs()) return;
  const size_t at = static_cast<size_t>(row) * args.outputs() + column;
  if (args.second)
    all.result[at] = element_at(all.call.weights_type, all.call.weights, all.tile ? all.number[row] : row) * x;
  else
    all.inner[at] = x;
}

// Reads the bytes that stand for the integers 0 to 15 of a weight: the numbers of its table, or of unsigned integers or
// two's complement, plus 128.
KV_DEVICE void read_table(const KvWeight& w, uint32_t (&table)[4]) {
  const uint32_t own[4] = {0x83828180u, 0x87868584u, w.is_signed ? 0x7b7a7978u : 0x8b8a8988u,
                           w.is_signed ? 0x7f7e7d7cu : 0x8f8e8d8cu};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    table[i] = own[i];
    if (!w.table) continue;
    uint32_t four = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) four |= static_cast<uint32_t>(static_cast<uint8_t>(w.table[4 * i + j])) << 8 * j;
    table[i] = four ^ kSigns;
  }
}
// Converts eight integers of 4 bits to their bytes.
KV_DEVICE void look_up(const uint32_t (&table)[4], uint32_t codes, uint32_t (&bytes)[2]) {
  const uint32_t place = codes & 0x77777777, half = (codes >> 1 & 0x44444444) | 0x32103210;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    bytes[i] = bytes_of(bytes_of(table[0], table[1], place >> 16 * i), bytes_of(table[2], table[3], place >> 16 * i),
                        half >> 16 * i);
}

}  // namespace cuda
}  // namespace kv
