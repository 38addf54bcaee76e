// Which program computes a decode step.
#pragma once

#include "decode.h"
#include "decode_mma.h"

namespace kv {
namespace cuda {

template <class T>
struct Named {
  using Type = T;
};

// Returns use(Named<Program>{}) for the program of a decode step of the call over a cache of type T.
template <class T, class Use>
const char* with_decode(const KvVoteAttention& a, Use use) {
  const int group = a.query_heads / a.heads;
  if constexpr (sizeof(T) == 2) {
    if (a.key_size <= 128 && a.value_size <= 128) return use(Named<DecodeMma<T, 128>>{});
    return use(Named<DecodeMma<T, 256>>{});
  } else {
    if (group == 1) return use(Named<Decode<T, 1>>{});
    if (group <= 4) return use(Named<Decode<T, 4>>{});
    return group <= 8 ? use(Named<Decode<T, 8>>{}) : use(Named<Decode<T, 16>>{});
  }
}

}  // namespace cuda
}  // namespace kv
