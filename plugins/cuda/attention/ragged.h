// VoteAttention for one token per sequence over the caches of a table (heads.h): the programs of decode.h and
// decode_mma.h with Ragged<T> in place of T, and that of decode_small.h. A block is a split of a head, over the head's
// own slots. Blocks begin in their order, so a table begins with the heads whose splits are largest.
#pragma once

#include "decode_split.h"
#include "decode_sums.h"
#include "heads.h"

namespace kv {
namespace cuda {

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

// The second launch: as DecodeSums, over the caches of a table.
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
