// Panels of a packed weight (panels.h) as float32, for rows that are not rounded, and for tiles of bfloat16.
#pragma once

#include "dot.h"
#include "panel_groups.h"

namespace kv {
namespace KV_ISA {

constexpr int kMostUnit = 16;  // inputs of a unit of panels.h

// The values of a panel's units.
struct PanelFloats {
  const PanelLayout& l;
  PanelGroups groups;
  const uint8_t* at;  // the panel
  int bits, middle;
  bool has_table;
  Table<false> table;

  PanelFloats(const KvWeight& weight, const PanelLayout& l, int64_t panel)
      : l(l),
        groups(weight, l, static_cast<const uint8_t*>(weight.data) + panel * l.panel),
        at(static_cast<const uint8_t*>(weight.data) + panel * l.panel),
        bits(weight.bits),
        middle(center_of(weight)),
        has_table(weight.table != nullptr) {
    if (has_table) table = Table<false>(weight.table);
  }

  // Computes v[i], W columns of input k + i, for the inputs of the unit that begins with k. v: room for kMostUnit.
  void unit(int64_t k, int slice, vf* v) const {
    const int64_t group = k / l.group;
    const vf scale = groups.scales(group, slice);
    const vf offset = groups.kind == PanelGroups::kNone ? vf{} : groups.offsets(group, slice, scale);
    vi all;
    memcpy(&all, at + l.line(k) + 4 * W * slice, sizeof all);
    if (bits < 4) return narrow_unit(k, slice, all, scale, offset, v);
    vi low = all & 0x0f0f0f0f, high = (all >> 4) & 0x0f0f0f0f;
    if (has_table) {
      low = table.of(low), high = table.of(high);
      for (int i = 0; i < 4; ++i) {
        v[i] = __builtin_convertvector(low << (24 - 8 * i) >> 24, vf) * scale;
        v[i + 4] = __builtin_convertvector(high << (24 - 8 * i) >> 24, vf) * scale;
      }
      return;
    }
    if (bits == 8) low = all;
    if (l.chunk) {
      const int each = bits - 4, shift = static_cast<int>(k % l.chunk) / 4 * each;
      vi upper;
      memcpy(&upper, at + l.high_line(k) + 4 * W * slice, sizeof upper);
      const int32_t mask = each == 1 ? 0x01010101 : 0x03030303;
      low |= (upper >> shift & mask) << 4, high |= (upper >> (shift + each) & mask) << 4;
    }
    for (int i = 0; i < 4; ++i, low >>= 8, high >>= 8) {
      v[i] = __builtin_convertvector((low & 255) - middle, vf) * scale + offset;
      if (bits != 8) v[i + 4] = __builtin_convertvector((high & 255) - middle, vf) * scale + offset;
    }
  }

 private:
  // Computes a unit of numbers of 2 or 3 bits. all: their lower bits.
  void narrow_unit(int64_t k, int slice, vi all, vf scale, vf offset, vf* v) const {
    vi upper{};
    if (l.chunk) {
      memcpy(&upper, at + l.high_line(k) + 4 * W * slice, sizeof upper);
      upper >>= static_cast<int>(k % l.chunk / 4);
    }
    for (int j = 0; j < l.unit; j += 4, all >>= 2, upper >>= 1) {
      vi four = (all & 0x03030303) | (upper & 0x01010101) << 2;
      for (int i = 0; i < 4; ++i, four >>= 8)
        v[j + i] = __builtin_convertvector((four & 255) - middle, vf) * scale + offset;
    }
  }
};

constexpr int kFloatRows = W == 16 ? 4 : 2;  // rows that are multiplied in one pass over a panel
constexpr int kFloatSums = 4;                // sums of a row, added up at the end: one running sum would be less exact

// Computes out[i * stride + c] = row i of the kRows rows x [inputs] times column c of a panel.
template <int kRows>
static inline void float_panel(const PanelFloats& panel, const float* x, int64_t inputs, float* out, int64_t stride) {
  for (int slice = 0; slice < kSlices; ++slice) {
    vf y[kRows][kFloatSums] = {};
    for (int64_t k = 0; k < inputs; k += panel.l.unit) {
      vf v[kMostUnit];
      panel.unit(k, slice, v);
      const int64_t rest = inputs - k < panel.l.unit ? inputs - k : panel.l.unit;
      for (int64_t j = 0; j < rest; ++j)
        for (int i = 0; i < kRows; ++i) y[i][j % kFloatSums] += v[j] * x[i * inputs + k + j];
    }
    for (int i = 0; i < kRows; ++i) store(out + i * stride + slice * W, (y[i][0] + y[i][1]) + (y[i][2] + y[i][3]));
  }
}

static inline void float_products(const KvWeight& weight, const PanelLayout& l, int64_t panel, const float* x,
                                  int64_t inputs, int64_t rows, float* out, int64_t stride) {
  const PanelFloats floats(weight, l, panel);
  int64_t i = 0;
  for (; i + kFloatRows <= rows; i += kFloatRows)
    float_panel<kFloatRows>(floats, x + i * inputs, inputs, out + i * stride, stride);
  for (; i < rows; ++i) float_panel<1>(floats, x + i * inputs, inputs, out + i * stride, stride);
}

// Writes the 16 columns of a panel for `depth` inputs to `to` [depth, stride]. `first` begins a unit.
static inline void unpack_panel(const KvWeight& weight, const PanelLayout& l, int64_t panel, int64_t first, int depth,
                                float* to, int64_t stride) {
  const PanelFloats floats(weight, l, panel);
  for (int slice = 0; slice < kSlices; ++slice)
    for (int k = 0; k < depth; k += l.unit) {
      vf v[kMostUnit];
      floats.unit(first + k, slice, v);
      for (int j = 0; j < l.unit && k + j < depth; ++j) store(to + (k + j) * stride + slice * W, v[j]);
    }
}

}  // namespace KV_ISA
}  // namespace kv
