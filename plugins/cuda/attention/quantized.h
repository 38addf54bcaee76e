// VoteAttention over a quantized cache: a KV head, and the launch before those of decode_quantized.h and prefill.h.
//
//   AppendQuantized, a block per KV head and 8 new tokens, one row per warp at a time
//     key, value = quantize(rotate(row)) into the tokens' slots, with their scales and positions
//     query = rotate(row) into the workspace, for every query head of the group
//   then decode or prefill with rotated queries, which rotate their output back
#pragma once

#include "../core/quantized.h"
#include "attention.h"

namespace kv {
namespace cuda {

// A KV head of a quantized cache. Its queries are the rotated ones of the workspace; its new tokens already have their
// slots.
template <>
struct Head<Quantized> : Head<float> {
  int bytes_of_key, bytes_of_value;

  KV_DEVICE Head(const Attention& args, const Part& part)
      : Head<float>(args, part),
        bytes_of_key(a.key_size * key_bits(a.cache_type) / 8),
        bytes_of_value(a.value_size * value_bits(a.cache_type) / 8) {}
  KV_DEVICE int key_bytes() const { return bytes_of_key; }
  KV_DEVICE int value_bytes() const { return bytes_of_value; }

  KV_DEVICE char* key(int slot) const { return static_cast<char*>(a.present.key) + (slots + slot) * bytes_of_key; }
  KV_DEVICE char* value(int slot) const {
    return static_cast<char*>(a.present.value) + (slots + slot) * bytes_of_value;
  }
  KV_DEVICE float* key_scale() const { return a.present_scales.key + slots; }
  KV_DEVICE float* value_scale() const { return a.present_scales.value + slots; }
  KV_DEVICE Vector key_vector(int from, int i) const {
    const int slot = from + i / (a.key_size / 4), column = i % (a.key_size / 4) * 4;
    return widened(key(slot), key_bits(a.cache_type), column, key_scale()[slot]);
  }
  KV_DEVICE Vector value_vector(int from, int i) const {
    const int slot = from + i / (a.value_size / 4), column = i % (a.value_size / 4) * 4;
    return widened(value(slot), value_bits(a.cache_type), column, value_scale()[slot]);
  }
  KV_DEVICE void store(int g, int t, int column, float x) const {
    const size_t row = static_cast<size_t>(query_head(g)) * a.tokens + t;
    store_number(a.output, a.query_type, row * a.value_size + column, x);
  }
};

// The first launch. `call.query` are the unrotated queries.
struct AppendQuantized {
  using Args = Attention;
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 1, kTokens = 8, kWarps = kThreads / kWarp;
  struct Registers {
    Row row;
  };
  static KV_HD int blocks_per_head(int tokens) { return (tokens + kTokens - 1) / kTokens; }

  static KV_DEVICE void run(Block<AppendQuantized>& block, const Attention& args) {
    const KvVoteAttention& a = args.call;
    const Part part(args, block.index());
    const Head<Quantized> head(args, part);
    const int chunk = part.split;
    const int used = used_slots(block, head.votes(), head.capacity, reinterpret_cast<int*>(block.shared)),
              n = head.length(used);
    const int from = chunk * kTokens, count = min_of(kTokens, n - from), group = args.group();
    block.each_alone([&](int t, auto&) {
      if (chunk == 0 && t == 0) args.used[2 * head.index] = used, args.used[2 * head.index + 1] = n;
      if (t < count) head.position()[used + from + t] = head.first() + from + t;
    });
    if (count <= 0) return;
    // Rows: the key of every token, followed by the queries of the group.
    for (int i = 0; i < count * (group + 1); i += kWarps) {
      const auto row = [&](int t) { return i + t / kWarp; };
      const auto token = [&](int t) { return from + row(t) / (group + 1); };
      const auto query = [&](int t) { return row(t) % (group + 1) - 1; };  // -1: the key
      const auto query_row = [&](int t) {
        return (static_cast<size_t>(head.query_head(query(t))) * a.tokens + token(t)) * a.key_size;
      };
      block.each_alone([&](int t, Registers& r) {
        const bool has_row = row(t) < count * (group + 1);
        load(r.row, query(t) < 0 ? a.key : a.query, a.query_type,
             query(t) < 0 ? new_row(head, token(t), a.key_size) : query_row(t), has_row ? a.key_size : 0, t % kWarp);
      });
      rotate_rows<8>(block, a.key_size, [](Registers& r, int i) -> float& { return r.row.element[i]; });
      block.each_alone([&](int t, Registers& r) {
        if (row(t) >= count * (group + 1) || query(t) < 0) return;
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (column_of(t % kWarp, j) < a.key_size)
            args.rotated[query_row(t) + column_of(t % kWarp, j)] = r.row.element[j];
      });
      quantize_rows(block, [](Registers& r) -> Row& { return r.row; });
      block.each_alone([&](int t, Registers& r) {
        const int slot = used + token(t);
        if (row(t) >= count * (group + 1) || query(t) >= 0) return;
        store_row(r.row, head.key(slot), key_bits(a.cache_type), a.key_size, t % kWarp);
        if (t % kWarp == 0) head.key_scale()[slot] = r.row.scale;
      });
    }
    for (int i = 0; i < count; i += kWarps) {
      block.each_alone([&](int t, Registers& r) {
        const int token = i + t / kWarp;
        load(r.row, a.value, a.query_type, new_row(head, from + token, a.value_size), token < count ? a.value_size : 0,
             t % kWarp);
      });
      rotate_rows<8>(block, a.value_size, [](Registers& r, int i) -> float& { return r.row.element[i]; });
      quantize_rows(block, [](Registers& r) -> Row& { return r.row; });
      block.each_alone([&](int t, Registers& r) {
        const int token = i + t / kWarp, slot = used + from + token;
        if (token >= count) return;
        store_row(r.row, head.value(slot), value_bits(a.cache_type), a.value_size, t % kWarp);
        if (t % kWarp == 0) head.value_scale()[slot] = r.row.scale;
      });
    }
  }

  // Returns the index of the first element of a new token's key or value.
  static KV_DEVICE size_t new_row(const Head<Quantized>& head, int token, int size) {
    return (static_cast<size_t>(head.index) * head.a.tokens + token) * size;
  }

  // Loads a lane's elements of a row of the model's type that begins with element `first`; zeros from `size` on.
  static KV_DEVICE void load(Row& row, const void* from, int type, size_t first, int size, int lane) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int column = column_of(lane, i);
      row.element[i] = column < size ? load_number(from, type, first + column) : 0.0f;
    }
  }
};

}  // namespace cuda
}  // namespace kv
