// Panels: the layout in which the kernels of every instruction set read a packed weight [outputs, inputs].
//
//   panel p holds columns 16 p to 16 p + 15; columns past the last one are zeros
//     16 scales of each group of inputs         float16, float32, or bytes: exponents or sub-scales. Sub-scales of 4
//     and
//                                               6 bits: 16 times each byte that KvWeight.scale has of a column
//     16 offsets of each group                  zero - center as a byte; minima in the scales' types; or nothing
//     16 super-scales                           float16, and then 16 of minima if there are any; only with sub-scales
//     the integers                              64 bytes for each unit of inputs
//       4 bits: the unit of inputs k to k + 7; byte 4 c + i holds input k + i of column c in its low half and input
//               k + 4 + i in its high half
//       8 bits: the unit of inputs k to k + 3; byte 4 c + i holds input k + i of column c
//       2 bits: the unit of inputs k to k + 15; of column c the four bytes of KvWeight.data from 4 c on
//       3, 5 and 6 bits: the low 2 or 4 bits as those of 2 or 4 bits. Before each 32 inputs of 3 and 5 bits, and 16 of
//               6 bits, 64 bytes hold their upper bits: of column c the four bytes of KvWeight.high from 4 c on
//   each of the four begins at a multiple of 64 bytes. With sub-scales, the four parts hold 256 inputs (a section), and
//   the sections of a panel follow one another.
//
// With a table, integers are its indices, and u below is 128 + the number at an index; center is 128.
//
// Integers u and zero points are unsigned; signed ones have their highest bit flipped. center is 2^(bits - 1), or 0 for
// 2 bits. A value is (u - center) scale + offset. offset is (center - zero) scale; or minimum of a signed weight and
// minimum + center scale of an unsigned one; or 0. If the group is a whole row, inputs are padded to a multiple of 32
// with integers equal to `center`.
#pragma once

#include "../../abi/linear.h"

namespace kv {

constexpr int kPanelColumns = 16;
constexpr int64_t kPanelLine = 64;  // bytes of one unit, and the alignment of each part
constexpr int kMostBlock = 32;      // the most inputs of a row that are rounded with one scale

struct PanelLayout {
  int64_t inputs;    // inputs with the padding
  int64_t group;     // inputs that share a scale
  int64_t section;   // inputs of a section: all of them, but with sub-scales 256
  int64_t groups;    // groups of a column in a section
  int64_t offsets;   // bytes from the begin of a section to its offsets
  int64_t supers;    // bytes from the begin of a section to its super-scales
  int64_t integers;  // bytes from the begin of a section to its integers
  int64_t bytes;     // bytes of a section
  int64_t panel;     // bytes of a panel
  int unit;          // inputs of a unit: 16, 8 or 4
  int block;         // inputs of a row that are rounded with one scale: 32, 16 or 8; a group is whole blocks
  int chunk;         // inputs whose upper bits are together: 32, 16, or 0 if integers have no others

  int section_bits;  // 2^section_bits is `section` with sub-scales, and otherwise more than all inputs

  // Returns the bytes from the begin of a panel to the section of input k, and the inputs of that section before k.
  int64_t begin(int64_t k) const { return (k >> section_bits) * bytes; }
  int64_t within(int64_t k) const { return k & ((int64_t{1} << section_bits) - 1); }
  // Returns the bytes from the begin of a panel to the upper bits of input k.
  int64_t high_line(int64_t k) const {
    return begin(k) + integers + within(k) / chunk * (kPanelLine + chunk / unit * kPanelLine);
  }
  // Returns the bytes from the begin of a panel to the unit of input k.
  int64_t line(int64_t k) const {
    return chunk ? high_line(k) + kPanelLine + k % chunk / unit * kPanelLine
                 : begin(k) + integers + within(k) / unit * kPanelLine;
  }
};

static inline int64_t whole_lines(int64_t bytes) { return (bytes + kPanelLine - 1) / kPanelLine * kPanelLine; }
static inline int center_of(const KvWeight& weight) {
  return weight.table ? 128 : weight.bits == 2 ? 0 : 1 << (weight.bits - 1);
}

// Returns whether offsets are zero points. An unsigned weight without offsets has zero points of 0: its values are u
// scale.
static inline bool has_zeros(const KvWeight& weight) {
  return weight.zero || (!weight.is_signed && !weight.minimum && !weight.table);
}

// Returns whether super-scales, if there are any, have whole groups and a row whole super-scales.
static inline bool fits_supers(const KvWeight& weight, int64_t inputs) {
  return !kv_is_sub_scale(weight.scale_type) || (inputs % KV_SUPER == 0 && KV_SUPER % weight.group == 0);
}

// Returns the number of inputs of a row that are rounded with one scale; 0 if such a weight has no panels.
static inline int block_of(const KvWeight& weight, int64_t inputs) {
  const int64_t group = weight.group;
  if (!fits_supers(weight, inputs)) return 0;
  if (weight.bits < 4) return inputs % KV_SUPER || group != 16 ? 0 : 16;
  if (const int high = kv_high_bits(&weight)) return inputs % kMostBlock || group % (32 / high) ? 0 : 32 / high;
  if (group == inputs) return kMostBlock;
  for (int block = kMostBlock; block >= 8; block /= 2)
    if (group % block == 0) return block;
  return 0;
}

static inline PanelLayout layout_of(const KvWeight& weight, int64_t inputs) {
  PanelLayout l{};
  l.block = block_of(weight, inputs), l.unit = 32 / kv_low_bits(&weight);
  l.chunk = kv_high_bits(&weight) ? 32 / kv_high_bits(&weight) : 0;
  const bool is_row = weight.group == inputs;
  l.inputs = is_row ? (inputs + kMostBlock - 1) / kMostBlock * kMostBlock : inputs;
  l.section = kv_is_sub_scale(weight.scale_type) ? KV_SUPER : l.inputs;
  l.section_bits = kv_is_sub_scale(weight.scale_type) ? 8 : 62;
  static_assert(KV_SUPER == 1 << 8);
  l.group = is_row ? l.inputs : weight.group, l.groups = l.section / l.group;
  const int64_t offset = has_zeros(weight) ? 8 : weight.minimum ? kv_scale_bits(weight.minimum_type) : 0;
  l.offsets = whole_lines(l.groups * kPanelColumns * kv_scale_bits(weight.scale_type) / 8);
  l.supers = l.offsets + whole_lines(l.groups * kPanelColumns * offset / 8);
  const int64_t supers = kv_is_sub_scale(weight.scale_type) ? (weight.minimum ? 2 : 1) : 0;
  l.integers = l.supers + whole_lines(supers * kPanelColumns * 2);
  l.bytes = l.integers + l.section * kPanelColumns * weight.bits / 8;
  l.panel = l.inputs / l.section * l.bytes;
  return l;
}

static inline int64_t panels_of(int64_t outputs) { return (outputs + kPanelColumns - 1) / kPanelColumns; }

}  // namespace kv
