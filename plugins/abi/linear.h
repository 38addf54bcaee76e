// A call of Linear: products of one input with what models do around them (docs/contract.md, section 3).
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KV_MAX_PRODUCTS 3

// One of the products of a Linear: rows [batch, tokens, inputs] x weight^T + bias.
typedef struct KvProduct {
  int64_t outputs;
  int64_t heads;       // other than 1: output is [batch, heads, tokens, outputs / heads]
  int rotated;         // whether every head is rotated, as RotaryEmbedding does
  const void* weight;  // [outputs, inputs]
  const void* bias;    // [outputs], or nullptr
  void* output;        // [batch, tokens, outputs]
} KvProduct;

// Products of one input, all of one type, the arithmetic in float32.
typedef struct KvLinear {
  int type;
  int64_t batch, tokens, inputs;
  int64_t input_heads;  // other than 1: input is [batch, input_heads, tokens, inputs / input_heads]
  const void* input;
  const void* norm;  // [inputs]: rows are divided by their root mean square and multiplied with it first; or nullptr
  float epsilon;     // is added to the mean square
  int count;         // of products
  KvProduct products[KV_MAX_PRODUCTS];
  const void* gate;           // [outputs, inputs]: the one product is multiplied with silu(rows x gate^T); or nullptr
  const void* residual;       // [batch, tokens, outputs]: is added to the one product last; or nullptr
  int64_t planes;             // of dimensions (i, i + planes): half a rotated head
  const void *cosine, *sine;  // [batch, tokens, planes]
} KvLinear;

#ifdef __cplusplus
}
#endif
