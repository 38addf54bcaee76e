// Shared by decode and prefill: one KV head of one sequence, the bias of its votes, the mask, and the workspace.
//
// Letters in this folder, beside those of core/block.h and the contract: a the arguments of the call, g a query head of
// its group, k a statistic, s the arrays in shared memory, j an element or a column, x a value.
#pragma once

#include "../core/table.h"
#include "../core/types.h"

namespace kv {
namespace cuda {

constexpr float kLowest = -3e38f, kLog2E = 1.44269504f, kLn2 = 0.693147181f;
constexpr int kBlock = 32;  // slots that are read together: one per lane of a warp
constexpr int kMaxGroup = 16;

// The arguments of a call, its workspace, and the heads of a launch. Arrays that a call does not use are null.
//
// Heads of one capacity are one entry of the table (../core/table.h). Otherwise a launch has up to 32 heads of a
// sequence, an entry each:
//
//   block -> entry, KV head of a sequence in it, block of the head
struct Attention {
  KvVoteAttention call;    // `capacity` is the host's memory: kernels read it from `heads`
  int stages;              // decode: blocks of slots in shared memory, including those whose copies are under way
  int* counters;           // decode: [B H]
  int* used;               // [B H, 2]: slots used before the call, and new tokens
  float* logits;           // decode with a sum of probabilities: biased logits, [G, slots] of each head
  float* row_softmax;      // row_max and row_sum of every row of probabilities, [B Hq, T, 2]
  float* partial_output;   // decode: sum of weight * value of every split of the launch, [splits, G, Dv]
  float* partial_softmax;  // decode: row_max and row_sum of every split of the launch, [splits, 2, G]
  // For a statistic that averages logits: the logarithms of a logit's share, (1 - decay) / group, and of the decay.
  float log_share[KV_MAX_STATISTICS], log_decay[KV_MAX_STATISTICS];
  float* rotated;         // quantized cache: the rotated queries, [B, Hq, T, D]
  int start[kTable + 1];  // blocks before those of each entry; behind the last entry, all blocks
  struct Heads {
    int first, count;  // heads of a sequence
    int capacity;      // slots of each of them
    int offset;        // slots of a sequence before theirs
    int blocks;        // of each of them: in a decode step its splits
  } heads[kTable];

  KV_DEVICE int group() const { return call.query_heads / call.heads; }
};
static_assert(sizeof(Attention) <= 4096, "the arguments of a kernel");

// What a block computes: part `split` of a KV head, whose blocks begin with number `start` of the launch.
struct Part {
  int batch, head, split, start;
  int capacity, offset;  // slots of the head, and slots of a sequence before it
  int splits;

  KV_DEVICE Part(const Attention& args, int block) {
    const int entry = entry_of(args.start, block);
    const Attention::Heads& heads = args.heads[entry];
    splits = heads.blocks;
    const int at = block - args.start[entry], row = at / splits;
    split = at - row * splits, start = block - split;
    batch = row / heads.count;
    const int number = row - batch * heads.count;
    head = heads.first + number, capacity = heads.capacity, offset = heads.offset + number * capacity;
  }
};

// One KV head of one sequence. Rows of new tokens are read from the call, rows of slots from the cache, which is
// updated in place.
template <class T>
struct Head {
  const KvVoteAttention& a;
  int batch, head, index;  // index: the number of the head, counted through all sequences
  int capacity;
  size_t slots;  // slots of the cache before those of this head

  KV_DEVICE Head(const Attention& args, const Part& part)
      : a(args.call),
        batch(part.batch),
        head(part.head),
        index(part.batch * args.call.heads + part.head),
        capacity(part.capacity),
        slots(static_cast<size_t>(part.batch) * args.call.slots + part.offset) {}

  KV_DEVICE int key_bytes() const { return a.key_size * static_cast<int>(sizeof(T)); }
  KV_DEVICE int value_bytes() const { return a.value_size * static_cast<int>(sizeof(T)); }
  KV_DEVICE T* key(int slot) const { return static_cast<T*>(a.present.key) + (slots + slot) * a.key_size; }
  KV_DEVICE T* value(int slot) const { return static_cast<T*>(a.present.value) + (slots + slot) * a.value_size; }
  // The i-th vector of the contiguous rows from slot `from` on, in the type that kernels compute with.
  KV_DEVICE Vector key_vector(int from, int i) const { return load_vector(key(from) + i * kLanes<T>); }
  KV_DEVICE Vector value_vector(int from, int i) const { return load_vector(value(from) + i * kLanes<T>); }
  KV_DEVICE float* votes() const { return a.present.votes + slots; }
  KV_DEVICE int32_t* position() const { return a.present.position + slots; }
  KV_DEVICE float* score(int k) const {
    return a.present.score + slots + (static_cast<size_t>(batch) * (a.statistics - 1) + k) * a.slots;
  }

  KV_DEVICE const T* new_key(int t) const {
    return static_cast<const T*>(a.key) + (static_cast<size_t>(index) * a.tokens + t) * a.key_size;
  }
  KV_DEVICE const T* new_value(int t) const {
    return static_cast<const T*>(a.value) + (static_cast<size_t>(index) * a.tokens + t) * a.value_size;
  }
  KV_DEVICE int query_head(int g) const { return batch * a.query_heads + head * (a.query_heads / a.heads) + g; }
  KV_DEVICE const T* query(int g, int t) const {
    return static_cast<const T*>(a.query) + (static_cast<size_t>(query_head(g)) * a.tokens + t) * a.key_size;
  }
  KV_DEVICE T* output(int g, int t) const {
    return static_cast<T*>(a.output) + (static_cast<size_t>(query_head(g)) * a.tokens + t) * a.value_size;
  }
  KV_DEVICE void store(int g, int t, int column, float x) const { assign(output(g, t)[column], x); }
  // The logits of query head g of the group (Attention::logits).
  KV_DEVICE float* logits(const Attention& args, int g) const {
    return args.logits + slots * args.group() + static_cast<size_t>(g) * capacity;
  }

  // The first new token's position and the number of new tokens, as they are stored. Decode reads them early, so that
  // they arrive while it finds the used slots.
  struct Stored {
    int64_t position, length;
  };
  KV_DEVICE Stored stored() const { return {a.position[static_cast<size_t>(batch) * a.tokens], a.query_length[batch]}; }
  // The first new token's position. A call that is only timed may bring numbers that are no positions: they are clamped
  // so that the other positions fit.
  KV_DEVICE int first(const Stored& stored) const {
    const int64_t first = stored.position, most = INT32_MAX - a.slots;
    return static_cast<int>(first < 0 ? 0 : first > most ? most : first);
  }
  KV_DEVICE int first() const { return first(stored()); }
  // The new tokens of this call, at most as many as there is room for.
  KV_DEVICE int length(const Stored& stored, int used) const {
    const int most = min_of(a.tokens, capacity - used);
    return stored.length < 0 ? 0 : stored.length > most ? most : static_cast<int>(stored.length);
  }
  KV_DEVICE int length(int used) const { return length(stored(), used); }
};

KV_DEVICE KvStatistic statistic_of(const KvVoteAttention& a, int k) { return a.statistic[k]; }

KV_DEVICE float capped(float logit, float softcap) {
  return softcap == 0.0f ? logit : softcap * tanhf(logit / softcap);
}

KV_DEVICE float vote_bias(float votes, const KvVoteAttention& a) {
  return a.vote_exponent == 0.0f ? 0.0f : a.vote_exponent * logf(votes);
}

KV_DEVICE float exp2_of(float x) {
#ifdef __CUDACC__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// Returns e^x, x a logit minus a row max. For caches of less than 32 bits it takes two instructions instead of nine,
// with a relative error of about (2 + |x|) 2^-23.
template <class T>
KV_DEVICE float exp_of(float x) {
  if constexpr (sizeof(T) == 4)
    return expf(x);
  else
    return exp2_of(x * kLog2E);
}

// Returns a slot's position relative to the first new token's.
KV_DEVICE int age_of(int position, int first) { return max_of(position, 0) - first; }

// Returns whether the query at position `now` sees the slot at `position`.
KV_DEVICE bool visible(int position, int now, int window) {
  return position <= now && (window == 0 || position > now - window);
}

}  // namespace cuda
}  // namespace kv
