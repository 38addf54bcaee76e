// KV heads in the caches of one launch. A cache has tensors of its own and any number of KV heads: equal budgets are
// one cache of all heads, budgets of heads are caches of one head each. The arguments of a launch have a table
// (../core/table.h) of up to 32 caches and the blocks of each:
//
//   block -> cache, KV head of a sequence in it, block of the head
//
// Prefill and the programs over quantized caches have this form for all calls, and a decode step over other caches for
// budgets of heads (ragged.h).
#pragma once

#include "../core/table.h"
#include "attention.h"

namespace kv {
namespace cuda {

// The type of elements T in the caches of a table.
template <class T>
struct Ragged {
  T element;
};

struct RaggedAttention : Attention {
  int start[kTable + 1];  // blocks before those of each cache; behind the last cache, all blocks
  struct Cache {
    KvState state;
    KvScales scales;
    int capacity;
    int head, heads;  // the number of its first head in the layer, and how many it has
    int splits;       // blocks of a head of one sequence
  } cache[kTable];
};
static_assert(sizeof(RaggedAttention) <= 4096, "the arguments of a kernel");

template <class T>
struct CacheTraits<Ragged<T>> {
  using Number = T;
  using Args = RaggedAttention;
};

// The place of a block in a launch over the caches of a table.
struct TablePlace {
  const RaggedAttention::Cache& cache;
  int row, split;  // the KV head, counted through the sequences of its cache

  KV_DEVICE TablePlace(const RaggedAttention& args, int block) : TablePlace(args, block, entry_of(args.start, block)) {}
  // The number of the KV head, counted through all sequences of the call.
  KV_DEVICE int index(const RaggedAttention& args) const {
    return row + row / cache.heads * (args.call.heads - cache.heads) + cache.head;
  }

 private:
  KV_DEVICE TablePlace(const RaggedAttention& args, int block, int entry)
      : cache(args.cache[entry]),
        row((block - args.start[entry]) / cache.splits),
        split((block - args.start[entry]) % cache.splits) {}
};

template <class T>
struct Head<Ragged<T>> : HeadOfCall<T> {
  using typename HeadOfCall<T>::Stored;
  using HeadOfCall<T>::a;
  KvState state;  // a copy, so that loops do not read the table again
  int slots_of_head;
  size_t slots;  // slots of the cache before those of this head

  KV_DEVICE Head(const RaggedAttention& args, const TablePlace& place)
      : HeadOfCall<T>(args.call, place.index(args)),
        state(place.cache.state),
        slots_of_head(place.cache.capacity),
        slots(static_cast<size_t>(place.row) * place.cache.capacity) {}

  KV_DEVICE int capacity() const { return slots_of_head; }
  KV_DEVICE T* key(int slot) const { return static_cast<T*>(state.key) + (slots + slot) * a.key_size; }
  KV_DEVICE T* value(int slot) const { return static_cast<T*>(state.value) + (slots + slot) * a.value_size; }
  // The i-th vector of the contiguous rows from slot `from` on, in the type that kernels compute with.
  KV_DEVICE Vector key_vector(int from, int i) const { return load_vector(key(from) + i * kLanes<T>); }
  KV_DEVICE Vector value_vector(int from, int i) const { return load_vector(value(from) + i * kLanes<T>); }
  KV_DEVICE float* votes() const { return state.votes + slots; }
  KV_DEVICE int32_t* position() const { return state.position + slots; }
  KV_DEVICE float* score(int k) const {
    return state.score + slots * a.statistics + static_cast<size_t>(k) * slots_of_head;
  }
  KV_DEVICE int length(const Stored& stored, int used) const {
    return this->length_within(stored, slots_of_head - used);
  }
  KV_DEVICE int length(int used) const { return length(this->stored(), used); }
};

}  // namespace cuda
}  // namespace kv
