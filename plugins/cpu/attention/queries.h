// The ring of reference queries after a call of VoteAttention (kvexport/methods/fitting.py): of every KV head the
// latest W queries, token by token and of each the query heads of the group, times `scale`, oldest first. In the
// calling thread: it is the bytes of a few slots.
#pragma once

#include "attention.h"

namespace kv {
namespace KV_ISA {
namespace {

template <class Query>
void keep_queries_of(const KvVoteAttention& a, const KvRing& ring) {
  const int group = a.query_heads / a.heads, d = a.key_size;
  for (size_t head = 0; head < static_cast<size_t>(a.batch) * a.heads; ++head) {
    const size_t b = head / a.heads, first = head * ring.rows, row = d * sizeof(float);
    const int64_t length = a.query_length[b];
    const int added = group * static_cast<int>(length < 0          ? 0
                                               : length > a.tokens ? a.tokens
                                                                   : length),
              left = max_of(ring.rows - added, 0);
    float* const query = ring.present.query + first * d;
    int32_t* const seen = ring.present.seen + first;
    // What stays moves to the front; nothing does where the buffers are the same and no token came.
    if (left > 0 && (added > 0 || query != ring.past.query + first * d)) {
      const size_t from = first + ring.rows - left;
      memmove(query, ring.past.query + from * d, left * row);
      memmove(seen, ring.past.seen + from, left * sizeof(int32_t));
    }
    for (int r = left, i = added - (ring.rows - left); r < ring.rows; ++r, ++i) {
      const int t = i / group, g = i % group;
      const size_t of_head = b * a.query_heads + head % a.heads * group + g;
      const Query* const from = static_cast<const Query*>(a.query) + (of_head * a.tokens + t) * d;
      for (int j = 0; j < d; ++j) query[static_cast<size_t>(r) * d + j] = static_cast<float>(from[j]) * a.scale;
      seen[r] = static_cast<int32_t>(a.position[b * a.tokens + t] + 1);
    }
  }
}

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
