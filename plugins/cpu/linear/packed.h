// Converts packed weights in the layout of artifacts to float32. Weights without panels (panels.h) are read this way,
// and weights that are not constant.
#pragma once

#include "../../abi/linear.h"
#include "../core/scratch.h"
#include "../core/simd.h"

namespace kv {
namespace KV_ISA {

// Returns the excess with which integers are read. All are read as unsigned ones; a signed integer has its highest bit
// flipped, which adds this excess to it.
static inline int excess_of(const KvWeight& weight) { return weight.is_signed ? 1 << (weight.bits - 1) : 0; }

// Reads `count` integers from `first` on as unsigned ones.
static inline void read_integers(const void* data, int bits, int excess, int64_t first, int count, float* to) {
  const uint8_t* const bytes = static_cast<const uint8_t*>(data) + first * bits / 8;
  int i = 0;
  if (bits == 8) {
    for (; i < count; ++i) to[i] = static_cast<float>(bytes[i] ^ excess);
    return;
  }
  if (first % 2 && count > 0) to[i++] = static_cast<float>(bytes[0] >> 4 ^ excess);
  const uint8_t* const pairs = bytes + i;
  float* const rest = to + i;
  const int whole = (count - i) / 2;
  for (int j = 0; j < whole; ++j) {
    rest[2 * j] = static_cast<float>((pairs[j] & 15) ^ excess);
    rest[2 * j + 1] = static_cast<float>(pairs[j] >> 4 ^ excess);
  }
  if ((count - i) % 2) rest[2 * whole] = static_cast<float>((pairs[whole] & 15) ^ excess);
}

// Returns integer number i of a weight of 5 or 6 bits.
static inline int planes_at(const KvWeight& weight, int64_t i) {
  const int bits = kv_high_bits(&weight), inputs = 32 / bits, at = static_cast<int>(i % inputs);
  const int low = static_cast<const uint8_t*>(weight.data)[i / 2] >> (i % 2 ? 4 : 0) & 15;
  const int high = static_cast<const uint8_t*>(weight.high)[i / inputs * 4 + at % 4] >> at / 4 * bits;
  return low | (high & ((1 << bits) - 1)) << 4;
}

// Returns 2^(e - 128); 0 if that is below the smallest normal number.
static inline float power_of(uint8_t e) {
  const uint32_t bits = e > 1 ? static_cast<uint32_t>(e - 1) << 23 : 0;
  float power;
  memcpy(&power, &bits, sizeof power);
  return power;
}

// super: the super-scales of a type KV_SUB_SCALES, each of `groups` numbers.
static inline void widen_as(int type, const void* from, const void* super, int64_t groups, int64_t first, int count,
                            float* to) {
  if (type == KV_SUB_SCALES) {
    for (int i = 0; i < count; ++i)
      to[i] = static_cast<float>(static_cast<const int8_t*>(from)[first + i]) *
              static_cast<float>(static_cast<const half*>(super)[(first + i) / groups]);
    return;
  }
  if (type == KV_EXPONENTS)
    for (int i = 0; i < count; ++i) to[i] = power_of(static_cast<const uint8_t*>(from)[first + i]);
  else if (type == KV_FLOAT16)
    widen(static_cast<const half*>(from) + first, to, count);
  else
    memcpy(to, static_cast<const float*>(from) + first, static_cast<size_t>(count) * sizeof(float));
}

// Reads scale and offset of `count` groups, from number `at` among the groups of all columns: an integer u, read as
// unsigned, has the value u scale + offset. offset: nullptr if it is not needed.
static inline void read_groups(const KvWeight& weight, int64_t at, int count, float* scale, float* offset) {
  const int excess = excess_of(weight);
  const int64_t groups = KV_SUPER / weight.group;
  widen_as(weight.scale_type, weight.scale, weight.super_scale, groups, at, count, scale);
  if (!offset) return;
  if (weight.minimum) {
    widen_as(weight.minimum_type, weight.minimum, weight.super_minimum, groups, at, count, offset);
    for (int i = 0; i < count; ++i) offset[i] -= static_cast<float>(excess) * scale[i];
  } else if (weight.zero) {
    read_integers(weight.zero, weight.bits, excess, at, count, offset);
    for (int i = 0; i < count; ++i) offset[i] *= -scale[i];
  } else if (weight.table) {
    for (int i = 0; i < count; ++i) offset[i] = 0.0f;
  } else {
    for (int i = 0; i < count; ++i) offset[i] = -static_cast<float>(excess) * scale[i];
  }
}

// Computes `count` values of a column from input `first` on; with 4 bits, `first` is even.
static inline void dequantize(const KvWeight& weight, int64_t inputs, int64_t column, int64_t first, int count,
                              float* out) {
  static thread_local Scratch<float> scratch;
  const int64_t group = weight.group;
  const int64_t begin = first / group, groups = (first + count + group - 1) / group - begin;
  float *const scale = scratch.reserve(2 * groups), *const offset = scale + groups;
  read_groups(weight, column * (inputs / group) + begin, static_cast<int>(groups), scale, offset);
  const uint8_t* const bytes =
      static_cast<const uint8_t*>(weight.data) + (column * inputs + first) * (weight.bits == 8 ? 8 : 4) / 8;
  const uint8_t turned = static_cast<uint8_t>(weight.bits == 4 ? excess_of(weight) * 0x11 : excess_of(weight));
  for (int i = 0; i < count;) {
    const int64_t g = (first + i) / group;
    const float s = scale[g - begin], o = offset[g - begin];
    const int end = static_cast<int>((g + 1) * group - first < count ? (g + 1) * group - first : count);
    if (weight.high) {
      for (; i < end; ++i) out[i] = static_cast<float>(planes_at(weight, column * inputs + first + i)) * s + o;
      continue;
    }
    if (weight.bits == 8) {
      for (; i < end; ++i) out[i] = static_cast<float>(bytes[i] ^ turned) * s + o;
      continue;
    }
    if (weight.table) {
      for (; i < end; ++i) out[i] = static_cast<float>(weight.table[bytes[i / 2] >> (i % 2 ? 4 : 0) & 15]) * s;
      continue;
    }
    for (; i + 1 < end; i += 2) {
      const int byte = bytes[i / 2] ^ turned;
      out[i] = static_cast<float>(byte & 15) * s + o, out[i + 1] = static_cast<float>(byte >> 4) * s + o;
    }
    if (i < end) out[i] = static_cast<float>((bytes[i / 2] ^ turned) & 15) * s + o, ++i;
  }
}

}  // namespace KV_ISA
}  // namespace kv
