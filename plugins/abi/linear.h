// A call of Linear: products of one input with what models do around them (docs/contract.md, section 3).
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KV_MAX_PRODUCTS 3

// How a packed weight is laid out. KV_AT_REST: row by row, as artifacts hold it. KV_PANELS: as the CPU's kernels read it
// fastest (cpu/linear/panels.h); `data` then holds the scales and offsets as well, and of zero and minimum it matters
// only whether they are nullptr.
enum { KV_AT_REST = 0, KV_PANELS = 1 };

// A weight [outputs, inputs], of the call's type where bits is 0. A packed one holds integers q of 4 or 8 bits, those
// of 4 two in a byte, the first in its low half; a value is (q - zero) scale + minimum, in float32.
typedef struct KvWeight {
  const void* data;  // nullptr: there is none
  int bits;          // 0, 4 or 8
  int is_signed;
  int64_t group;        // inputs in a row that share a scale, of which `inputs` is a multiple
  int scale_type;       // float32 or float16
  int layout;           // of a packed weight
  const void* scale;    // [outputs, inputs / group]
  const void* zero;     // as scale, of integers as the weight's; or nullptr
  int minimum_type;     // float32 or float16
  const void* minimum;  // as scale; or nullptr. Only one of zero and minimum is given
} KvWeight;

// One of the products of a Linear: rows [batch, tokens, inputs] x weight^T + bias.
typedef struct KvProduct {
  int64_t outputs;
  int64_t heads;  // other than 1: output is [batch, heads, tokens, outputs / heads]
  int rotated;    // whether every head is rotated, as RotaryEmbedding does
  KvWeight weight;
  const void* bias;  // [outputs], or nullptr
  void* output;      // [batch, tokens, outputs]
} KvProduct;

// Products of one input. Everything but packed weights is of one type, the arithmetic in float32.
typedef struct KvLinear {
  int type;
  int float_input;  // whether packed weights too are multiplied with the rows as they are, not as rounded by blocks
  int64_t batch, tokens, inputs;
  int64_t input_heads;  // other than 1: input is [batch, input_heads, tokens, inputs / input_heads]
  const void* input;
  const void* norm;  // [inputs]: rows are divided by their root mean square and multiplied with it first; or nullptr
  float epsilon;     // is added to the mean square
  int count;         // of products
  KvProduct products[KV_MAX_PRODUCTS];
  KvWeight gate;              // the one product is multiplied with silu(rows x gate^T)
  const void* residual;       // [batch, tokens, outputs]: is added to the one product last; or nullptr
  int64_t planes;             // of dimensions (i, i + planes): half a rotated head
  const void *cosine, *sine;  // [batch, tokens, planes]
} KvLinear;

#ifdef __cplusplus
}
#endif
