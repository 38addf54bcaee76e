// Repacks a packed weight from the layout of artifacts into panels (panels.h), once for each tensor, when it is loaded.
#include <cstring>

#include "../kvexport_cpu.h"
#include "panels.h"

namespace {

using kv::kPanelColumns;
using kv::kPanelLine;
using kv::PanelLayout;

// Returns eight nibbles n0 to n7, the first in the lowest bits, as the bytes n0 | n4 << 4 to n3 | n7 << 4.
uint32_t interleaved(uint32_t nibbles) {
  const auto spread = [](uint32_t four) {
    four = (four | four << 8) & 0x00ff00ffu;
    return (four | four << 4) & 0x0f0f0f0fu;
  };
  return spread(nibbles & 0xffffu) | spread(nibbles >> 16) << 4;
}

int integer_at(const void* data, int bits, int64_t i) {
  const uint8_t* const bytes = static_cast<const uint8_t*>(data);
  return bits == 8 ? bytes[i] : bytes[i / 2] >> (i % 2 ? 4 : 0) & 15;
}

// Returns the bits that are flipped in signed integers, for the bytes of a unit.
uint32_t turned_by(const KvWeight& weight) {
  return !weight.is_signed || weight.high ? 0 : weight.bits == 4 ? 0x88888888u : 0x80808080u;
}

// Returns the unit of a column's inputs from `k` on as four bytes of its line; inputs past the last one are `center`.
uint32_t unit_at(const KvWeight& weight, int64_t inputs, int64_t column, int64_t k) {
  const int bits = kv_low_bits(&weight), unit = 32 / bits, center = kv::center_of(weight);
  const int64_t first = column * inputs + k;
  const uint32_t turned = turned_by(weight);
  uint32_t all = 0;
  if (k + unit <= inputs && first * bits % 8 == 0) {
    memcpy(&all, static_cast<const uint8_t*>(weight.data) + first * bits / 8, sizeof all);
  } else {
    for (int i = 0; i < unit; ++i) {
      const int absent = weight.table ? 0 : center ^ static_cast<int>(turned & (bits == 4 ? 15 : 255));
      const int one = k + i < inputs ? integer_at(weight.data, bits, first + i) : absent;
      all |= static_cast<uint32_t>(one) << i * bits;
    }
  }
  all ^= turned;
  return bits == 4 ? interleaved(all) : all;
}

// Repacks 16 lines of 16 columns from `first` on at once, so that 64 bytes of each column are read together.
void repack_lines(const KvWeight& weight, int64_t inputs, const PanelLayout& l, int64_t first, int64_t k,
                  uint8_t* panel) {
  constexpr int kLines = kPanelColumns;  // four bytes of each: 64 bytes of a column
  const uint32_t turned = turned_by(weight);
  const int bits = kv_low_bits(&weight);
  uint32_t units[kPanelColumns][kLines];
  for (int c = 0; c < kPanelColumns; ++c)
    memcpy(units[c], static_cast<const uint8_t*>(weight.data) + ((first + c) * inputs + k) * bits / 8, sizeof units[c]);
  for (int i = 0; i < kLines; ++i) {
    uint32_t line[kPanelColumns];
    for (int c = 0; c < kPanelColumns; ++c) line[c] = units[c][i] ^ turned;
    if (bits == 4)
      for (int c = 0; c < kPanelColumns; ++c) line[c] = interleaved(line[c]);
    memcpy(panel + l.line(k + i * l.unit), line, sizeof line);
  }
}

// Repacks scales or minima. Those that are no whole bytes are repacked byte by byte. to: in the first section.
void repack_numbers(const void* from, int type, const PanelLayout& l, int64_t first, int columns, uint8_t* to) {
  const int bits = kv_scale_bits(type);
  const int64_t size = bits < 8 ? 1 : bits / 8, each = l.groups * bits / 8 / size, count = l.inputs / l.section * each;
  for (int64_t g = 0; g < count; ++g)
    for (int c = 0; c < columns; ++c)
      memcpy(to + g / each * l.bytes + (g % each * kPanelColumns + c) * size,
             static_cast<const uint8_t*>(from) + ((first + c) * count + g) * size, static_cast<size_t>(size));
}

void repack_zeros(const KvWeight& weight, const PanelLayout& l, int64_t first, int columns, uint8_t* to) {
  const int turned = weight.is_signed ? kv::center_of(weight) : 0;
  const int64_t groups = l.inputs / l.group;
  for (int64_t g = 0; g < groups; ++g)
    for (int c = 0; c < columns; ++c) {
      const int zero = weight.zero ? integer_at(weight.zero, weight.bits, (first + c) * groups + g) : 0;
      to[g / l.groups * l.bytes + g % l.groups * kPanelColumns + c] =
          static_cast<uint8_t>((zero ^ turned) - kv::center_of(weight));
    }
}

// Repacks the upper bits of integers: four bytes of each column for each chunk of inputs.
void repack_high(const KvWeight& weight, int64_t inputs, const PanelLayout& l, int64_t first, int columns,
                 uint8_t* panel) {
  for (int64_t k = 0; k < inputs; k += l.chunk)
    for (int c = 0; c < columns; ++c)
      memcpy(panel + l.high_line(k) + 4 * c,
             static_cast<const uint8_t*>(weight.high) + ((first + c) * inputs + k) / l.chunk * 4, 4);
}

void repack_supers(const void* from, int64_t blocks, const PanelLayout& l, int64_t first, int columns, uint8_t* to) {
  for (int64_t b = 0; b < blocks; ++b)
    for (int c = 0; c < columns; ++c)
      memcpy(to + b * l.bytes + 2 * c, static_cast<const uint8_t*>(from) + ((first + c) * blocks + b) * 2, 2);
}

void repack_panel(const KvWeight& weight, int64_t inputs, const PanelLayout& l, int64_t first, int columns,
                  uint8_t* to) {
  for (int64_t k = 0; k < l.inputs; k += l.section) memset(to + l.begin(k), 0, static_cast<size_t>(l.integers));
  if (columns < kPanelColumns) memset(to, 0, static_cast<size_t>(l.panel));
  repack_numbers(weight.scale, weight.scale_type, l, first, columns, to);
  if (kv::has_zeros(weight))
    repack_zeros(weight, l, first, columns, to + l.offsets);
  else if (weight.minimum)
    repack_numbers(weight.minimum, weight.minimum_type, l, first, columns, to + l.offsets);
  const int64_t blocks = inputs / KV_SUPER;
  if (weight.super_scale) repack_supers(weight.super_scale, blocks, l, first, columns, to + l.supers);
  if (weight.super_minimum)
    repack_supers(weight.super_minimum, blocks, l, first, columns, to + l.supers + 2 * kPanelColumns);
  if (l.chunk) repack_high(weight, inputs, l, first, columns, to);
  const int64_t many = kPanelColumns * l.unit;
  int64_t k = 0;
  for (; columns == kPanelColumns && inputs * weight.bits % 8 == 0 && k + many <= inputs; k += many)
    repack_lines(weight, inputs, l, first, k, to);
  for (; k < l.inputs; k += l.unit)
    for (int c = 0; c < columns; ++c) {
      const uint32_t all = unit_at(weight, inputs, first + c, k);
      memcpy(to + l.line(k) + 4 * c, &all, sizeof all);
    }
}

}  // namespace

extern "C" {

const char* kv_cpu_why_no_panels(const KvWeight* weight, int64_t inputs) {
  if (!weight->bits) return "the weight is not packed";
  if (kv::block_of(*weight, inputs)) return nullptr;
  if (weight->bits < 4) return "its row is no multiple of 256 inputs, or its group is not 16";
  if (!kv::fits_supers(*weight, inputs)) return "its row is no multiple of 256 inputs, or its group no divisor of 256";
  if (weight->high) return "its row is no multiple of 32 inputs, or its group none of 32 (5 bits) or 16 (6 bits)";
  return "its group is neither a multiple of 8 inputs nor a whole row";
}

size_t kv_cpu_panels_bytes(const KvWeight* weight, int64_t outputs, int64_t inputs) {
  return static_cast<size_t>(kv::panels_of(outputs) * kv::layout_of(*weight, inputs).panel);
}

void kv_cpu_repack(const KvWeight* weight, int64_t outputs, int64_t inputs, void* panels) {
  const PanelLayout l = kv::layout_of(*weight, inputs);
  for (int64_t p = 0; p < kv::panels_of(outputs); ++p) {
    const int64_t first = p * kPanelColumns, rest = outputs - first;
    repack_panel(*weight, inputs, l, first, static_cast<int>(rest < kPanelColumns ? rest : kPanelColumns),
                 static_cast<uint8_t*>(panels) + p * l.panel);
  }
}

}  // extern "C"
