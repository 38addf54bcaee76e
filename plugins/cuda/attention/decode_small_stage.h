// A block of slots of a quantized cache in shared memory, for decode_small.h: rows as stored bytes, and numbers of
// every slot (votes, position, scores, and the scales of its key and value).
#pragma once

#include "decode_split.h"
#include "small.h"

namespace kv {
namespace cuda {

template <>
struct Stage<Small> : Slots {
  int statistics;

  // The bytes from row to row in shared memory: an odd number of vectors, as shared_stride.
  static KV_HD int stride(int bytes) { return vector_stride((bytes + 15) / 16); }
  static KV_HD int key_stride_of(const KvVoteAttention& a) { return stride(a.key_size * key_bits(a.cache_type) / 8); }
  static KV_HD int value_stride_of(const KvVoteAttention& a) {
    return stride(a.value_size * value_bits(a.cache_type) / 8);
  }
  static KV_HD int kinds(const KvVoteAttention& a) { return 4 + a.statistics; }
  static KV_HD size_t size(const KvVoteAttention& a) {
    return kBlock * (key_stride_of(a) + value_stride_of(a) + kinds(a) * sizeof(float));
  }
  KV_DEVICE Stage(char* stages, int at, const KvVoteAttention& a)
      : Slots{stages, at, key_stride_of(a), value_stride_of(a)}, statistics(a.statistics) {}
  KV_DEVICE char* key(int slot) const { return key_row(slot); }
  KV_DEVICE char* value(int slot) const { return value_row(slot); }
  KV_DEVICE float* key_scale() const { return score(statistics); }
  KV_DEVICE float* value_scale() const { return score(statistics + 1); }
};

KV_DEVICE const float* first_number(const Head<Small>& head, int kind) {
  const int scale = kind - 2 - head.a.statistics;
  if (scale >= 0) return scale == 0 ? head.key_scale() : head.value_scale();
  return first_number(static_cast<const Head<float>&>(head), kind);
}

// Within a phase: copies `count` contiguous rows of `bytes` bytes, in the largest units that divide a row. to: the
// first row in shared memory; place: the offset of thread t's first vector there; from: that vector in the cache.
template <class Program>
KV_DEVICE void copy_bytes(Block<Program>& block, char* to, int place, int stride, const char* from, int bytes,
                          int count, int t) {
  if (bytes % 16 == 0)
    copy_most<kBlock, 8, 4>(block, to + place, from, bytes / 16, count, t);
  else if (bytes % 4 == 0)
    copy_units<4>(block, to, stride, from - t * 16, bytes / 4, count, t);
  else
    copy_units<2>(block, to, stride, from - t * 16, bytes / 2, count, t);
}

// Within a phase: copies the rows of a block of slots. An earlier launch has written the new token's rows to their
// slots.
template <class Program>
KV_DEVICE void fetch_rows(Block<Program>& block, const Head<Small>& head, const Stage<Small>& stage, const Fetch& fetch,
                          int, int, int count, int t) {
  const int values = kBlock * stage.key_stride;
  copy_bytes(block, stage.key(0), fetch.key_to, stage.key_stride, fetch.key, head.key_bytes(), count, t);
  copy_bytes(block, stage.value(0), fetch.value_to - values, stage.value_stride, fetch.value, head.value_bytes(), count,
             t);
}

}  // namespace cuda
}  // namespace kv
