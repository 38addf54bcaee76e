// Updates the ring of reference queries after a call of VoteAttention (kvexport/methods/fitting.py). The ring of a KV
// head contains its latest W queries times `scale`, oldest first: by token, and within a token by query head of the
// group. It runs in the calling thread, since the ring is as small as a few slots.
#pragma once

#include "attention.h"

namespace kv {
namespace KV_ISA {
namespace {

template <class Query>
void keep_queries_of(const KvVoteAttention& a, const KvRing& ring) {
  const int group = a.query_heads / a.heads, d = a.key_size;
  for (size_t head = 0; head < static_cast<size_t>(a.batch) * a.heads; ++head) {
    const size_t b = head / a.heads, row = d * sizeof(float);
    const size_t first = head * ring.rows;
    const int64_t length = a.query_length[b];
    const int added = group * static_cast<int>(length < 0          ? 0
                                               : length > a.tokens ? a.tokens
                                                                   : length),
              left = max_of(ring.rows - added, 0);
    float* const query = ring.present.query + first * d;
    int32_t* const seen = ring.present.seen + first;
    // The latest `left` past queries move to the front. Nothing moves if past and present share buffers and no token
    // came.
    if (left > 0 && (added > 0 || query != ring.past.query + first * d)) {
      const size_t from = first + ring.rows - left;
      memmove(query, ring.past.query + from * d, left * row);
      memmove(seen, ring.past.seen + from, left * sizeof(int32_t));
    }
    for (int r = left, i = added - (ring.rows - left); r < ring.rows; ++r, ++i) {
      const int t = i / group, g = i % group;
      const size_t query_head = b * a.query_heads + head % a.heads * group + g;
      const Query* const from = static_cast<const Query*>(a.query) + (query_head * a.tokens + t) * d;
      for (int j = 0; j < d; ++j) query[static_cast<size_t>(r) * d + j] = static_cast<float>(from[j]) * a.scale;
      // Unsigned: a hostile position of INT64_MAX wraps to 0.
      seen[r] = static_cast<int32_t>(static_cast<uint64_t>(a.position[b * a.tokens + t]) + 1);
    }
  }
}

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
