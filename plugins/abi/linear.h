// The arguments of Linear: one to three matrix products of one input, fused with the norm before them and the bias,
// rotation, gate and residual after them (docs/reference/contract.md, section 3).
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KV_MAX_PRODUCTS 3

// The layout of a packed weight. KV_AT_REST: row by row, as in artifacts. KV_PANELS: the layout that the CPU kernels
// read fastest (cpu/linear/panels.h). Then `data` includes the scales and offsets, and zero and minimum only tell by
// nullptr whether they exist.
enum { KV_AT_REST = 0, KV_PANELS = 1 };

// Types of scales only. KV_EXPONENTS: a byte e is the scale 2^(e - 128), half of the scale 2^(e - 127) of MXFP4.
// KV_SUB_SCALES: a signed byte, the factor of the super-scale of its KV_SUPER consecutive inputs. KV_SUB_SCALES_4: such
// a factor of 4 bits without a sign, two to a byte, the first in its low half. KV_SUB_SCALES_6: such a factor of 6
// bits, 32 more than it stands for; of every four factors three bytes have the first three in their low bits, and bits
// 0 and 1, 2 and 3, 4 and 5 of the fourth in their two highest bits.
enum { KV_EXPONENTS = 16, KV_SUB_SCALES = 17, KV_SUB_SCALES_4 = 18, KV_SUB_SCALES_6 = 19 };
#define KV_SUPER 256

// A weight [outputs, inputs]. If bits is 0, its elements have the call's type. Otherwise the weight is packed: integers
// q of 2 to 6 or of 8 bits, and a value is (q - zero) scale + minimum, in float32. A weight of 4 bits may have a table;
// then a value is table[q] scale. A byte contains two integers of 4 bits, the first in its low half. Of integers of 3,
// 5 and 6 bits `data` has the low 2, 4 and 4 bits and `high` has the others; signed ones are stored as q + 2^(bits -
// 1). Parts of 1 or 2 bits (`high`, and `data` of integers of 2 and 3 bits): byte i of every four bytes has those of
// the inputs i, i + 4, i + 8 and so on of its 32 or 16 inputs, the first in its lowest bits.
//
// Integers of 2 bits have minima and KV_SUB_SCALES_4, those of 3 bits are signed and have KV_SUB_SCALES_6. Both have
// groups of 16 inputs, and kernels read them in KV_PANELS alone.
typedef struct KvWeight {
  const void* data;  // nullptr: no weight
  int bits;          // 0, 2 to 6, or 8
  int is_signed;
  int64_t group;              // consecutive inputs that share a scale; `inputs` is a multiple of it
  int scale_type;             // float32, float16 or sub-scales; with a table KV_EXPONENTS too
  int layout;                 // KV_AT_REST or KV_PANELS, if the weight is packed
  const void* scale;          // [outputs, inputs / group]
  const void* zero;           // the shape of scale, integers of the weight's bits; or nullptr
  int minimum_type;           // float32 or float16; that of the scales if they are sub-scales
  const void* minimum;        // the shape of scale; or nullptr. At least one of zero and minimum is nullptr
  const int8_t* table;        // [16], in every layout; or nullptr. With a table q is unsigned, without zero and minimum
  const void* high;           // the upper bits of integers of 3, 5 and 6 bits; otherwise nullptr
  const void* super_scale;    // float16 [outputs, inputs / KV_SUPER], the factors of sub-scales; or nullptr
  const void* super_minimum;  // likewise of minima
} KvWeight;

// Returns the bits of a scale or a minimum of this type.
static inline int kv_scale_bits(int type) {
  return type == KV_SUB_SCALES_4                         ? 4
         : type == KV_SUB_SCALES_6                       ? 6
         : type == KV_EXPONENTS || type == KV_SUB_SCALES ? 8
         : type == KV_FLOAT32                            ? 32
                                                         : 16;
}
static inline int kv_is_sub_scale(int type) { return type >= KV_SUB_SCALES && type <= KV_SUB_SCALES_6; }

// Returns the bits of an integer that are in `data`: 2, 4 or 8.
static inline int kv_low_bits(const KvWeight* weight) { return weight->bits < 4 ? 2 : weight->bits < 8 ? 4 : 8; }

// Returns the bits of an integer that are in `high`: 0, 1 or 2.
static inline int kv_high_bits(const KvWeight* weight) { return weight->bits ? weight->bits - kv_low_bits(weight) : 0; }

// One of the products of a Linear: rows [batch, tokens, inputs] x weight^T + bias.
typedef struct KvProduct {
  int64_t outputs;
  int64_t heads;  // other than 1: output is [batch, heads, tokens, outputs / heads]
  int rotated;    // whether every head is rotated, as RotaryEmbedding does
  KvWeight weight;
  const void* bias;  // [outputs], or nullptr
  void* output;      // [batch, tokens, outputs]
} KvProduct;

// Products of one input. Every tensor except packed weights has the type `type`; the arithmetic is in float32.
typedef struct KvLinear {
  int type;
  int float_input;  // 1: packed weights are multiplied with the unrounded rows; 0: with rows rounded block by block
  int64_t batch, tokens, inputs;
  int64_t input_heads;  // other than 1: input is [batch, input_heads, tokens, inputs / input_heads]
  const void* input;
  const void* norm;  // [inputs]: each row is first divided by its root mean square and multiplied by this; or nullptr
  float epsilon;     // added to the mean square
  int count;         // the number of products
  KvProduct products[KV_MAX_PRODUCTS];
  KvWeight gate;              // the one product is multiplied by silu(rows x gate^T)
  const void* residual;       // [batch, tokens, outputs]: added to the one product last; or nullptr
  int64_t planes;             // rotated pairs of dimensions (i, i + planes): half the size of a rotated head
  const void *cosine, *sine;  // [batch, tokens, planes]
} KvLinear;

#ifdef __cplusplus
}
#endif
