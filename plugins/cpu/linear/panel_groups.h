// Scales and offsets of a panel's groups of inputs (panels.h).
#pragma once

#include "../core/simd.h"
#include "panels.h"

namespace kv {
namespace KV_ISA {

constexpr int kSlices = kPanelColumns / W;  // vectors of a panel's columns

// The scale and the offset of W columns of one group: a value is (u - center) scale + offset.
struct PanelGroups {
  const uint8_t *scale, *offset, *super;
  int scale_type, center;  // offset = minimum + center scale; center is 0 for signed weights
  int64_t section;         // bytes of a section
  int shift;               // 2^shift groups of a section share super-scales; 62 without sections
  enum Kind { kNone, kZero, kHalfMinimum, kFloatMinimum, kSubMinimum } kind;

  PanelGroups(const KvWeight& weight, const PanelLayout& l, const uint8_t* panel)
      : scale(panel), offset(panel + l.offsets), super(panel + l.supers), scale_type(weight.scale_type) {
    kind = has_zeros(weight)                      ? kZero
           : !weight.minimum                      ? kNone
           : kv_is_sub_scale(weight.minimum_type) ? kSubMinimum
           : weight.minimum_type == KV_FLOAT32    ? kFloatMinimum
                                                  : kHalfMinimum;
    center = weight.is_signed ? 0 : center_of(weight);
    shift = kv_is_sub_scale(scale_type) ? __builtin_ctz(static_cast<unsigned>(l.groups)) : 62;
    section = l.bytes;
  }

  // Returns the bytes from the first section to that of a group, and the groups of that section before it.
  int64_t begin(int64_t group) const { return (group >> shift) * section; }
  int64_t within(int64_t group) const { return group & ((int64_t{1} << shift) - 1); }

  static vf numbers(const uint8_t* at, bool floats, int64_t i) {
    return floats ? load(reinterpret_cast<const float*>(at) + i) : load(reinterpret_cast<const half*>(at) + i);
  }
  // Returns W bytes, each in a lane.
  static vi bytes(const uint8_t* at) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
#elif defined(KV_NEON)
    uint32_t four;
    memcpy(&four, at, sizeof four);
    return (vi)vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
#else
    typedef uint8_t vb __attribute__((vector_size(W)));
    vb bytes;
    memcpy(&bytes, at, sizeof bytes);
    return __builtin_convertvector(bytes, vi);
#endif
  }
  // Returns 2^(e - 128) for W bytes e, with the same bits as power_of (packed.h).
  static vf powers(const uint8_t* at) {
    vi exponents = bytes(at);
    exponents = (exponents + (exponents > 0)) << 23;
    vf power;
    memcpy(&power, &exponents, sizeof power);
    return power;
  }
  // Returns sub-scales number i of four groups, whose bytes begin at `four`.
  template <int kType>
  static vi factor(const uint8_t* four, int i) {
    const auto row = [&](int n) { return bytes(four + n * kPanelColumns); };
    if (kType == KV_SUB_SCALES) return load_i(reinterpret_cast<const int8_t*>(four) + i * kPanelColumns);
    if (kType == KV_SUB_SCALES_4) return row(i >> 1) >> 4 * (i & 1) & 15;
    return (i < 3 ? row(i) & 63 : row(0) >> 6 | row(1) >> 6 << 2 | row(2) >> 6 << 4) - 32;
  }
  // Returns the sub-scales at `at`.
  vf factors(const uint8_t* at, int64_t group, int slice) const {
    const uint8_t* const four = at + slice * W + group / 4 * kPanelColumns * kv_scale_bits(scale_type) / 2;
    const int i = static_cast<int>(group % 4);
    return __builtin_convertvector(scale_type == KV_SUB_SCALES     ? factor<KV_SUB_SCALES>(four, i)
                                   : scale_type == KV_SUB_SCALES_4 ? factor<KV_SUB_SCALES_4>(four, i)
                                                                   : factor<KV_SUB_SCALES_6>(four, i),
                                   vf);
  }
  // Returns the sub-scales at `at` times their super-scales. minimum: 1 for those of minima.
  vf sub_scales(const uint8_t* at, int64_t group, int slice, int minimum) const {
    const half* const supers = reinterpret_cast<const half*>(super + begin(group)) + minimum * kPanelColumns;
    return factors(at + begin(group), within(group), slice) * load(supers + slice * W);
  }
  vf scales(int64_t group, int slice) const {
    if (kv_is_sub_scale(scale_type)) return sub_scales(scale, group, slice, 0);
    if (scale_type == KV_EXPONENTS) return powers(scale + group * kPanelColumns + slice * W);
    return numbers(scale, scale_type == KV_FLOAT32, group * kPanelColumns + slice * W);
  }
  vf offsets(int64_t group, int slice, vf scale_of_group) const {
    const int64_t i = group * kPanelColumns + slice * W;
    if (kind == kZero) {
      const uint8_t* const at = offset + begin(group) + within(group) * kPanelColumns + slice * W;
      return load(reinterpret_cast<const int8_t*>(at)) * -scale_of_group;
    }
    const vf minimum =
        kind == kSubMinimum ? sub_scales(offset, group, slice, 1) : numbers(offset, kind == kFloatMinimum, i);
    return minimum + static_cast<float>(center) * scale_of_group;
  }
};

}  // namespace KV_ISA
}  // namespace kv
