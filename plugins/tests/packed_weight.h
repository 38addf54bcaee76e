// A random packed weight, and its values in double precision.
#pragma once

#include "../cpu/kvexport_cpu.h"
#include "../cpu/linear/panels.h"
#include "support.h"

namespace fuzz {

// The fewest rows whose blocks may be rounded to 8 bits, as in cpu/linear/rounding.h.
constexpr int64_t kTallFrom = 48;

struct PackedWeight {
  int64_t outputs, inputs, group;
  int bits;
  bool is_signed, halves, in_panels = false;  // halves: scale and minimum are float16
  bool supers = false;                        // scale and minimum are whole numbers with super-scales
  Buffer integers, high, scale, offset, super_scale, super_minimum, table, panels;
  enum { kNone, kZero, kMinimum, kTable, kExponents } kind = kNone;

  // matrices: panels are of that many matrices [outputs / matrices, inputs], one after another.
  PackedWeight(Random& random, int64_t outputs, int64_t inputs, float most, int64_t matrices = 1)
      : outputs(outputs),
        inputs(inputs),
        group(inputs),
        bits(inputs % 2 ? 8 : random.one_of({4, 8})),
        is_signed(random.one_in(2)),
        halves(random.one_in(2)) {
    if (inputs % 32 == 0 && random.one_in(3)) bits = random.one_of({5, 6});
    if (inputs % KV_SUPER == 0 && random.one_in(3)) bits = random.one_of({2, 3}), is_signed = bits == 3;
    for (const int g : {random.one_of({16, 32, 64, 128, 256}), random.one_of({48, 24, 40}), 16, 6, 3})
      if (inputs % g == 0 && (bits == 8 || g % 2 == 0) && !random.one_in(4)) {
        group = g;
        break;
      }
    if (bits < 4) group = 16;
    kind = random.one_of({kNone, kZero, kMinimum});
    if (bits < 4 || high_bits()) kind = is_signed ? kNone : kMinimum;
    if (bits == 4 && random.one_in(3)) kind = random.one_of({kTable, kExponents}), is_signed = false;
    table = Buffer(random, 16, 1);
    for (int i = 0; i < 16; ++i) table.data<int8_t>()[i] = static_cast<int8_t>(random.between(-128, 127));
    const size_t groups = static_cast<size_t>(outputs * (inputs / group));
    supers = inputs % KV_SUPER == 0 && KV_SUPER % group == 0 && kind != kZero && kind != kExponents && random.one_in(2);
    supers = supers || bits < 4;
    integers = numbers(random, static_cast<size_t>(outputs * inputs));
    if (high_bits()) high = bytes(random, static_cast<size_t>(outputs * inputs * high_bits() / 8));
    if (supers) {
      const size_t blocks = static_cast<size_t>(outputs * (inputs / KV_SUPER));
      const size_t bytes_of_groups = groups * static_cast<size_t>(kv_scale_bits(sub_scales())) / 8;
      halves = true, scale = bytes(random, bytes_of_groups);
      super_scale = floats(random, blocks, 0.02f / 64), super_minimum = floats(random, blocks, 0.1f / 64);
      if (kind == kMinimum) offset = bytes(random, bytes_of_groups);
    } else if (kind == kExponents)
      scale = exponents(random, groups, most);
    else
      scale = floats(random, groups, random.one_in(8) ? most : 0.02f);
    if (kind == kZero) offset = numbers(random, groups);
    if (kind == kMinimum && !supers) offset = floats(random, groups, 0.1f);
    const KvWeight at_rest = view();
    if (kv_cpu_why_no_panels(&at_rest, inputs) || (bits >= 4 && random.one_in(4))) return;
    const int64_t rows = outputs / matrices;
    if (matrices > 1 && !kv_has_matrices(&at_rest, rows, inputs)) return;
    const size_t bytes = kv_cpu_panels_bytes(&at_rest, rows, inputs);
    panels = Buffer(random, static_cast<size_t>(matrices) * bytes, 1);
    for (int64_t i = 0; i < matrices; ++i) {
      const KvWeight one = kv_matrix_of(&at_rest, rows, inputs, i);
      kv_cpu_repack(&one, rows, inputs, panels.data<char>() + static_cast<size_t>(i) * bytes);
    }
    panels.check_canaries(), in_panels = true;
  }

  KvWeight view() {
    KvWeight weight{};
    weight.data = integers.data<void>(), weight.bits = bits, weight.is_signed = is_signed, weight.group = group;
    weight.scale_type = kind == kExponents ? static_cast<int>(KV_EXPONENTS) : type();
    weight.minimum_type = type(), weight.scale = scale.data<void>();
    if (supers) weight.scale_type = weight.minimum_type = sub_scales(), weight.super_scale = super_scale.data<void>();
    if (supers && kind == kMinimum) weight.super_minimum = super_minimum.data<void>();
    if (high_bits()) weight.high = high.data<void>();
    if (has_table()) weight.table = table.data<int8_t>();
    if (kind == kZero) weight.zero = offset.data<void>();
    if (kind == kMinimum) weight.minimum = offset.data<void>();
    if (in_panels) weight.data = panels.data<void>(), weight.layout = KV_PANELS;
    return weight;
  }

  double value(int64_t column, int64_t k) const {
    const int64_t g = column * (inputs / group) + k / group;
    const int zero = kind == kZero ? integer(offset, g) : 0;
    if (has_table()) return table.data<int8_t>()[integer(integers, column * inputs + k)] * scale_at(g);
    return (number(column * inputs + k) - zero) * scale_at(g) + minimum_at(g);
  }

  // Returns a bound on the terms of a value.
  double terms(int64_t column, int64_t k) const {
    const int64_t g = column * (inputs / group) + k / group;
    if (has_table()) return std::fabs(scale_at(g)) * 512;
    return std::fabs(scale_at(g)) * (2 << bits) + std::fabs(minimum_at(g));
  }

  // Returns the inputs that kernels round together for this weight; 0 where they multiply inputs as they are.
  int64_t block() const {
    KvWeight weight{};
    weight.bits = bits, weight.group = group;
    return in_panels ? kv::block_of(weight, inputs) : 0;
  }

  void check_canaries() const { integers.check_canaries(), scale.check_canaries(), offset.check_canaries(); }

  std::string describe() const {
    return std::string(is_signed ? " int" : " uint") + std::to_string(bits) + " in groups of " + std::to_string(group) +
           (kind == kZero      ? " zero"
            : kind == kMinimum ? " minimum"
            : kind == kTable   ? " table"
            : has_table()      ? " exponents and table"
                               : "") +
           (supers   ? " super-scales"
            : halves ? " fp16"
                     : " fp32") +
           (in_panels ? " panels" : "");
  }

 private:
  bool has_table() const { return kind == kTable || kind == kExponents; }
  int high_bits() const { return bits == 3 ? 1 : bits == 5 || bits == 6 ? bits - 4 : 0; }
  int sub_scales() const { return bits == 2 ? KV_SUB_SCALES_4 : bits == 3 ? KV_SUB_SCALES_6 : KV_SUB_SCALES; }
  double scale_at(int64_t g) const {
    return kind == kExponents ? std::ldexp(1.0, scale.data<uint8_t>()[g] - 128) : factor(scale, super_scale, g);
  }
  double minimum_at(int64_t g) const { return kind == kMinimum ? factor(offset, super_minimum, g) : 0.0; }
  double factor(const Buffer& factors, const Buffer& super, int64_t g) const {
    if (!supers) return real(factors, g);
    const uint8_t* const bytes = factors.data<uint8_t>();
    int number = static_cast<int8_t>(bytes[g]);
    if (bits == 2) number = bytes[g / 2] >> (g % 2 * 4) & 15;
    if (bits == 3) {
      const uint8_t* const three = bytes + g / 4 * 3;
      number = g % 4 < 3 ? three[g % 4] & 63 : three[0] >> 6 | three[1] >> 6 << 2 | three[2] >> 6 << 4;
      number -= 32;
    }
    return number * static_cast<double>(real(super, g / (KV_SUPER / group)));
  }
  // Scales of at most `most`, and some that float32 has no normal number for.
  static Buffer exponents(Random& random, size_t count, float most) {
    Buffer buffer(random, count, 1);
    const int highest = 127 + static_cast<int>(std::log2(most < 0.02f ? most : 0.02f));
    for (size_t i = 0; i < count; ++i)
      buffer.data<uint8_t>()[i] =
          static_cast<uint8_t>(random.one_in(9) ? random.between(0, 3) : random.between(highest - 9, highest));
    return buffer;
  }
  int type() const { return halves ? KV_FLOAT16 : KV_FLOAT32; }
  Shape shape() const { return {type(), 0, 0, 0, 0, 0, 0}; }

  Buffer numbers(Random& random, size_t count) const {
    return bytes(random, bits == 8 ? count : bits < 4 ? count / 4 : (count + 1) / 2);
  }
  static Buffer bytes(Random& random, size_t count) {
    Buffer buffer(random, count, 1);
    uint8_t* const bytes = buffer.data<uint8_t>();
    size_t i = 0;
    for (; buffer.size() > kFew && i + 8 <= buffer.size(); i += 8) {
      const uint64_t eight = random.bits();
      memcpy(bytes + i, &eight, 8);
    }
    for (; i < buffer.size(); ++i) bytes[i] = static_cast<uint8_t>(random.between(0, 255));
    return buffer;
  }
  Buffer floats(Random& random, size_t count, float size) const {
    Buffer buffer(random, count, shape().element());
    Normals normal(random, count);
    for (size_t i = 0; i < count; ++i) write(shape(), buffer.data<void>(), i, size * normal());
    return buffer;
  }
  // Returns integer i of the weight.
  int number(int64_t i) const {
    if (bits >= 4 && !high_bits()) return integer(integers, i);
    const int low = bits < 4 ? field(integers, i, 2) : integers.data<uint8_t>()[i / 2] >> (i % 2 * 4) & 15;
    const int upper = high_bits() ? field(high, i, high_bits()) : 0;
    return (low | upper << (bits < 4 ? 2 : 4)) - (is_signed ? 1 << (bits - 1) : 0);
  }
  // Returns number i of those of `size` bits, 1 or 2, of which every four bytes have 32 / size.
  static int field(const Buffer& buffer, int64_t i, int size) {
    const int64_t inputs = 32 / size, at = i % inputs;
    return buffer.data<uint8_t>()[i / inputs * 4 + at % 4] >> (at / 4 * size) & ((1 << size) - 1);
  }
  int integer(const Buffer& buffer, int64_t i) const {
    const uint8_t* const bytes = buffer.data<uint8_t>();
    const int read = bits == 4 ? bytes[i / 2] >> (i % 2 * 4) & 15 : bytes[i], most = 1 << bits;
    return is_signed && read >= most / 2 ? read - most : read;
  }
  float real(const Buffer& buffer, int64_t i) const {
    return read(shape(), buffer.data<void>(), static_cast<size_t>(i));
  }
};

}  // namespace fuzz
