// Shared by the programs of Experts: the arguments of a call, its rows and tiles, and the functions between an expert's
// two products.
//
// A row is one expert of one token. Rows are in the order of experts, those of an expert in the order of tokens; with a
// single token they are in the order of `indices`. A tile is up to `tile_rows` rows of one expert.
//
// Letters in this folder: a the arguments of the call, e an expert, r a row of a tile, c a column of a warp, k an
// input, i a number in `indices`.
#pragma once

#include "../core/types.h"

namespace kv {
namespace cuda {

constexpr int kFewRows = 8, kTallRows = 32;  // the most rows of a tile: on CUDA cores, and on tensor cores

struct Tile {
  int expert, first, count;  // count 0: the tile is empty
};

// The arguments of a call for some of its tokens, and its workspace.
struct ExpertsArgs {
  KvExperts call;
  int rows;       // tokens x chosen
  int tile_rows;  // the most rows of a tile
  int* counter;   // of the blocks of Route
  int* begin;     // [experts]: the first row of each expert
  int* count;     // [experts]: its rows
  int* row_of;    // [rows]: the row of number i in `indices`, or -1 if it is no expert's
  int* number;    // [rows]: the number in `indices` of a row
  Tile* tile;     // [most tiles]; nullptr: there is a single token, and every row is a tile
  int* tiles;     // the number of tiles
  float* inner;   // [rows, inner]: the inputs of the second product
  float* result;  // [rows, hidden]: the weighted results of the second product
};

KV_DEVICE bool is_expert(const KvExperts& a, int64_t e) { return e >= 0 && e < a.experts; }

// Calls use(elements) with a pointer of the tensor's type.
template <class Use>
KV_DEVICE void with_elements(int type, const void* data, Use use) {
  if (type == KV_FLOAT32)
    use(static_cast<const float*>(data));
  else if (type == KV_FLOAT16)
    use(static_cast<const Half*>(data));
  else
    use(static_cast<const BFloat*>(data));
}
KV_DEVICE float element_at(int type, const void* data, size_t i) {
  float x = 0.0f;
  with_elements(type, data, [&](auto* elements) { x = to_float(elements[i]); });
  return x;
}

// Returns the tile of this number.
KV_DEVICE Tile tile_at(const ExpertsArgs& args, int number) {
  const KvExperts& a = args.call;
  if (args.tile) return number < *args.tiles ? args.tile[number] : Tile{0, 0, 0};
  const int64_t e = a.indices[number];
  return {static_cast<int>(e), number, is_expert(a, e) ? 1 : 0};
}

KV_DEVICE float activated(const KvExperts& a, float x) {
  if (a.activation == KV_EXPERTS_SILU) return x / (1.0f + expf(-a.slope * x));
  if (a.activation == KV_EXPERTS_GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  if (a.activation == KV_EXPERTS_GELU_TANH)  // (1 + tanh(z)) / 2 is the sigmoid of 2 z
    return x / (1.0f + expf(-1.5957691216f * (x + 0.044715f * x * x * x)));
  if (a.activation == KV_EXPERTS_RELU) return x < 0.0f ? 0.0f : x;
  return x < 0.0f ? 0.0f : x * x;
}

// Returns an input of the second product. A NaN stays NaN.
KV_DEVICE float inner_of(const KvExperts& a, float gate, float up) {
  if (a.limit > 0.0f) {
    gate = gate > a.limit ? a.limit : gate;
    up = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
  }
  return activated(a, gate) * (up + a.up_offset);
}

}  // namespace cuda
}  // namespace kv
