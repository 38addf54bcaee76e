// VoteAttention for one token per sequence over KV heads whose caches are tensors of their own, of several capacities:
// the programs of decode.h and decode_mma.h with Ragged<T> in place of T. The table of a launch (../core/table.h) has
// the caches of up to 32 heads and the splits of each:
//
//   block -> head of the table, sequence, split of the head
//   then as in decode.h, over the head's own slots
//
// Blocks begin in their order, so a table begins with the heads whose splits are largest.
#pragma once

#include "../core/table.h"
#include "decode_split.h"
#include "decode_sums.h"

namespace kv {
namespace cuda {

// The type of elements T in caches of single KV heads.
template <class T>
struct Ragged {
  T element;
};

struct RaggedAttention : Attention {
  int start[kTable + 1];  // blocks before those of each head of the table; behind the last head, all blocks
  struct Cache {
    KvState state;
    int capacity;
    int head;    // its number in the layer
    int splits;  // blocks of one sequence
  } cache[kTable];
};
static_assert(sizeof(RaggedAttention) <= 4096, "the arguments of a kernel");

template <class T>
struct CacheTraits<Ragged<T>> {
  using Number = T;
  using Args = RaggedAttention;
};

// The place of a block in a launch over heads of a table.
struct TablePlace {
  const RaggedAttention::Cache& cache;
  int batch, split;

  KV_DEVICE TablePlace(const RaggedAttention& args, int block) : TablePlace(args, block, entry_of(args.start, block)) {}
  // The number of the KV head, counted through all sequences.
  KV_DEVICE int index(const RaggedAttention& args) const { return batch * args.call.heads + cache.head; }

 private:
  KV_DEVICE TablePlace(const RaggedAttention& args, int block, int entry)
      : cache(args.cache[entry]),
        batch((block - args.start[entry]) / cache.splits),
        split((block - args.start[entry]) % cache.splits) {}
};

template <class T>
struct Head<Ragged<T>> : HeadOfCall<T> {
  using typename HeadOfCall<T>::Stored;
  using HeadOfCall<T>::a;
  const RaggedAttention::Cache& cache;
  size_t slots;  // slots of all sequences before this one

  KV_DEVICE Head(const RaggedAttention& args, const TablePlace& place)
      : HeadOfCall<T>(args.call, place.index(args)),
        cache(place.cache),
        slots(static_cast<size_t>(place.batch) * cache.capacity) {}

  KV_DEVICE int capacity() const { return cache.capacity; }
  KV_DEVICE T* key(int slot) const { return static_cast<T*>(cache.state.key) + (slots + slot) * a.key_size; }
  KV_DEVICE T* value(int slot) const { return static_cast<T*>(cache.state.value) + (slots + slot) * a.value_size; }
  KV_DEVICE float* votes() const { return cache.state.votes + slots; }
  KV_DEVICE int32_t* position() const { return cache.state.position + slots; }
  KV_DEVICE float* score(int k) const {
    return cache.state.score + slots * a.statistics + static_cast<size_t>(k) * cache.capacity;
  }
  KV_DEVICE int length(const Stored& stored, int used) const {
    return this->length_within(stored, cache.capacity - used);
  }
};

template <class T>
struct Part<Ragged<T>> {
  const RaggedAttention& args;
  TablePlace place;
  int index, split, start;

  KV_DEVICE Part(const RaggedAttention& args, int block)
      : args(args), place(args, block), index(place.index(args)), split(place.split), start(block - split) {}
  KV_DEVICE int splits() const { return place.cache.splits; }
  KV_DEVICE size_t before(size_t each, int) const { return each * start; }
  KV_DEVICE Head<Ragged<T>> head() const { return {args, place}; }
};

template <class T>
struct Stage<Ragged<T>> : Stage<T> {
  using Stage<T>::Stage;
};

// The second launch: as DecodeSums, with the blocks of each head in the place of its splits.
struct RaggedSums {
  using Args = RaggedAttention;
  static constexpr int kThreads = DecodeSums::kThreads, kBlocksPerMultiprocessor = 1;
  struct Registers {};

  static KV_DEVICE void run(Block<RaggedSums>& block, const RaggedAttention& args) {
    const TablePlace place(args, block.index());
    const Head<Ragged<float>> head(args, place);  // any type: no row is read here
    add_probabilities(block, args, head, args.group(), place.split * kThreads);
  }
};

}  // namespace cuda
}  // namespace kv
