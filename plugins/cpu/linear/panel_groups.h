// Scales and offsets of a panel's groups of inputs (panels.h).
#pragma once

#include "../core/simd.h"
#include "panels.h"

namespace kv {
namespace KV_ISA {

constexpr int kSlices = kPanelColumns / W;  // vectors of a panel's columns

// The scale and the offset of W columns of one group: a value is (u - center) scale + offset.
struct PanelGroups {
  const uint8_t *scale, *offset;
  const half* super;
  int scale_type, center;        // offset = minimum + center scale; center is 0 for signed weights
  int groups_shift, super_step;  // 2^groups_shift groups share super-scales, which are super_step numbers from the next
  enum Kind { kNone, kZero, kHalfMinimum, kFloatMinimum, kSubMinimum } kind;

  PanelGroups(const KvWeight& weight, const PanelLayout& l, const uint8_t* panel)
      : scale(panel),
        offset(panel + l.offsets),
        super(reinterpret_cast<const half*>(panel + l.supers)),
        scale_type(weight.scale_type) {
    kind = has_zeros(weight)                      ? kZero
           : !weight.minimum                      ? kNone
           : weight.minimum_type == KV_SUB_SCALES ? kSubMinimum
           : weight.minimum_type == KV_FLOAT32    ? kFloatMinimum
                                                  : kHalfMinimum;
    center = weight.is_signed ? 0 : center_of(weight);
    groups_shift = l.group < KV_SUPER ? __builtin_ctz(static_cast<unsigned>(KV_SUPER / l.group)) : 0;
    super_step = kind == kSubMinimum ? 2 * kPanelColumns : kPanelColumns;
  }

  static vf numbers(const uint8_t* at, bool floats, int64_t i) {
    return floats ? load(reinterpret_cast<const float*>(at) + i) : load(reinterpret_cast<const half*>(at) + i);
  }
  // Returns 2^(e - 128) for W bytes e, with the same bits as power_of (packed.h).
  static vf powers(const uint8_t* at) {
    typedef uint8_t vb __attribute__((vector_size(W)));
    vb bytes;
    memcpy(&bytes, at, sizeof bytes);
    vi exponents = __builtin_convertvector(bytes, vi);
    exponents = (exponents + (exponents > 0)) << 23;
    vf power;
    memcpy(&power, &exponents, sizeof power);
    return power;
  }
  // Returns the numbers at `at` times their super-scales. minimum: 1 for those of minima.
  vf sub_scales(const uint8_t* at, int64_t group, int slice, int minimum) const {
    const half* const factors = super + (group >> groups_shift) * super_step + minimum * kPanelColumns;
    return load(reinterpret_cast<const int8_t*>(at) + group * kPanelColumns + slice * W) * load(factors + slice * W);
  }
  vf scales(int64_t group, int slice) const {
    if (scale_type == KV_SUB_SCALES) return sub_scales(scale, group, slice, 0);
    if (scale_type == KV_EXPONENTS) return powers(scale + group * kPanelColumns + slice * W);
    return numbers(scale, scale_type == KV_FLOAT32, group * kPanelColumns + slice * W);
  }
  vf offsets(int64_t group, int slice, vf scale_of_group) const {
    const int64_t i = group * kPanelColumns + slice * W;
    if (kind == kZero) return load(reinterpret_cast<const int8_t*>(offset) + i) * -scale_of_group;
    const vf minimum =
        kind == kSubMinimum ? sub_scales(offset, group, slice, 1) : numbers(offset, kind == kFloatMinimum, i);
    return minimum + static_cast<float>(center) * scale_of_group;
  }
};

}  // namespace KV_ISA
}  // namespace kv
