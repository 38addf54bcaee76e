// Shared by the launches of MergeCache: the arguments of the call, and a workspace that the launches fill in turn:
//
//   Rank       slots in order of position, importance, which are evicted        select.h   a block per head
//   Nearest    if policy.order needs targets: those of the eviction pool        nearest.h  some blocks per head; 16-bit
//                                                                               caches: nearest_mma.h
//   Choose     ... and with them, which slots of the pool are evicted           select.h   per head
//   Nearest    the target nearest to every evicted slot, unless pairs merge     nearest.h  some blocks per head
//   FormSets   merge sets: a target and the evicted slots that merge into it    sets.h     per head
//   Attended   KVSlimmer only: the attention output                             sets.h     per head
//   MergeRows  every set's key, value, votes and statistics                     sets.h     some blocks per head
//   Order      rows that change (holes, targets), their votes and statistics    place.h    per head
//   Place      keys and values of these rows                                    place.h    per head and 64 bytes
//   Turn       keys that are rotated by places, to their new places             place.h    per head and 32 rows
//
// The upper slots are those more important than the whole eviction pool. None of them is evicted, so they are targets
// of every slot of the pool in both searches. For a zip, the first search also keeps the nearest upper slot, and the
// second search only compares the rest.
//
// A launch has the heads of a table (../core/table.h): one entry with all heads of a call, if they have one capacity
// and one budget, or an entry for each of up to 32 heads.
//
// Only the last three launches change the cache. A launch begins when the one before it has ended; this is the only
// barrier between launches.
#pragma once

#include "../core/table.h"
#include "../core/types.h"

namespace kv {
namespace cuda {

constexpr float kNoTarget = -1e38f;  // below every cosine, dot product and distance
constexpr int kNone = INT32_MAX;     // no merge set, or no row

// The numbers of one head.
struct HeadInfo {
  int in_all;       // used slots, including those that the sliding window has passed
  int used;         // used slots that the window has not passed
  int now;          // the latest position
  int unprotected;  // the first slot that is neither a sink nor recent; these slots are contiguous
  int unprotected_count;
  int over;              // slots over the budget, which have to be evicted
  int pool;              // if policy.order needs targets: the size of the eviction pool
  int rest;              // ... and how many slots from `unprotected` on are not upper ones and may be targets
  int rest_unprotected;  // ... and how many of the rest are unprotected
  int evicted;           // evicted slots
  int kept;              // kept slots and merged rows after the merge
  int changed;           // those of the kept rows that are written
};

// Heads of one capacity and one budget.
struct MergeEntry {
  int capacity, budget, recent;
  int count;        // heads of a sequence
  int offset;       // slots of a sequence before theirs
  int most_rows;    // the most rows of a head in Nearest: evicted slots, or the eviction pool
  int blocks;       // blocks of a head in Nearest, which divide the actual work: often far less than the most
  int most_splits;  // the most splits of the targets in Nearest
  int stride;       // elements of a head in the results of Nearest
  int first;        // heads of the entries before this one
  size_t slots;     // slots of the entries before this one
  size_t results;   // elements of the entries before this one in the results of Nearest
};

// The workspace. Slots are numbered in order of position. Arrays without another size have `capacity` elements per
// head.
struct MergeWork {
  KvMergeCache call;  // its lists are the host's memory: kernels read them from `entry`
  MergeEntry entry[kTable];
  int entries;
  int each;        // heads of an entry, over all sequences
  int most_slots;  // the most slots of a head
  bool in_place;
  int most_evicted;  // the most evicted slots of a head: the stride of arrays with an element per evicted slot
  int most_rows;     // the most rows of a head in Nearest: the stride of `rows`
  int tile;          // rows of a tile in Nearest
  int set_blocks;    // blocks of a head in MergeRows, which divide the actual work
  HeadInfo* heads;
  int* order;  // the slot's row in the cache
  float* importance;
  float* keep_score;  // the lowest are evicted first
  uint8_t* mark;      // kEvicted, kCanReceive, kUpper, or 0
  int* rows;          // [most_rows] the slots that look for targets: the eviction pool, later the evicted slots
  float* nearness;    // [stride: rows, splits] how near the nearest target is
  int* nearest;       // [stride: rows, splits] that target
  float* ease;        // [stride: rows, splits] for the pool: how near the best target is by policy.order
  int* rest;          // the slots that are not upper ones
  int* upper;         // the nearest upper slot of a slot of the pool, -1 without; nullptr if it is not used
  float* upper_nearness;
  int* target;            // [most_evicted] the target of every evicted slot, -1 without
  int* before;            // [most_evicted] how many evicted slots before it have the same target
  int* set;               // a target's merge set, the number of its first evicted slot; kNone for other slots
  float* attended;        // [Dv + 1] the attention output, and the sum of its probabilities
  void* merged;           // [most_evicted, D + Dv] the key and value of every set, in the cache's type
  float* merged_numbers;  // [most_evicted, 1 + K] its votes and statistics
  int* merged_position;   // [most_evicted] its position
  int* latest;            // [most_evicted] its latest member
  int* changed;           // the rows that are written
  int* source;            // the source of each of these rows: a row of the cache, or ~set
  int* row;               // the row of every place's slot, if keys are rotated by places; otherwise nullptr
  int* steps;             // by how many places that slot has moved
};

static_assert(sizeof(MergeWork) <= 3900, "the arguments of a kernel are at most 4096 bytes");

enum { kEvicted = 1, kCanReceive = 2, kUpper = 3 };  // marks of a slot

// One head: its arrays in the workspace, and the rows of its cache.
struct MergeHead {
  const MergeWork& work;
  const KvMergeCache& a;
  const MergeEntry& own;
  int index;     // among all heads of the launch
  int batch;     // its sequence
  size_t slots;  // slots of the workspace before those of this head
  size_t first;  // slots of the cache before those of this head

  KV_DEVICE MergeHead(const MergeWork& work, int index) : MergeHead(work, index / work.each, index % work.each) {}
  // number: of the head in its entry.
  KV_DEVICE MergeHead(const MergeWork& work, int entry, int number)
      : work(work),
        a(work.call),
        own(work.entry[entry]),
        index(own.first + number),
        batch(number / own.count),
        slots(own.slots + static_cast<size_t>(number) * own.capacity),
        first(static_cast<size_t>(batch) * a.slots + own.offset +
              static_cast<size_t>(number - batch * own.count) * own.capacity) {}
  KV_DEVICE HeadInfo& info() const { return work.heads[index]; }
  template <class T>
  KV_DEVICE T* of(T* array) const {
    return array + slots;
  }
  KV_DEVICE int* rows() const { return work.rows + static_cast<size_t>(index) * work.most_rows; }
  KV_DEVICE int* targets() const { return work.target + static_cast<size_t>(index) * work.most_evicted; }
  KV_DEVICE int* before_in_set() const { return work.before + static_cast<size_t>(index) * work.most_evicted; }
  // The columns of the cache, by row.
  KV_DEVICE int32_t* positions() const { return a.present.position + first; }
  KV_DEVICE float* all_votes() const { return a.present.votes + first; }
  KV_DEVICE float* scores(int k) const {
    return a.present.score + first + (static_cast<size_t>(batch) * (a.statistics - 1) + k) * a.slots;
  }
  template <class T>
  KV_DEVICE T* keys() const {
    return static_cast<T*>(a.present.key) + first * a.key_size;
  }
  template <class T>
  KV_DEVICE T* values() const {
    return static_cast<T*>(a.present.value) + first * a.value_size;
  }
  // The numbers of slot i, in order of position.
  KV_DEVICE int slot(int i) const { return of(work.order)[i]; }
  KV_DEVICE int position(int i) const { return positions()[slot(i)]; }
  KV_DEVICE float votes(int i) const { return all_votes()[slot(i)]; }
  KV_DEVICE float score(int k, int i) const { return scores(k)[slot(i)]; }
  template <class T>
  KV_DEVICE T* key(int i) const {
    return static_cast<T*>(a.present.key) + (first + slot(i)) * a.key_size;
  }
  template <class T>
  KV_DEVICE T* value(int i) const {
    return static_cast<T*>(a.present.value) + (first + slot(i)) * a.value_size;
  }
  // The index of row i's result in one of `splits` splits.
  KV_DEVICE size_t split(int i, int split, int splits) const {
    return own.results + static_cast<size_t>(index - own.first) * own.stride + static_cast<size_t>(i) * splits + split;
  }
};

KV_HD int tiles_of(int rows, int tile) { return (rows + tile - 1) / tile; }

// Returns into how many splits Nearest divides the targets of `rows` rows: one for each block. The number of splits
// does not change the result.
KV_DEVICE int splits_of(const MergeHead& head, int rows) {
  const int splits = head.own.blocks / (rows > 0 ? tiles_of(rows, head.work.tile) : 1);
  return splits < 1 ? 1 : splits < head.own.most_splits ? splits : head.own.most_splits;
}

// Finds the nearest target of one of `rows` rows; a tie goes to the first. Returns how near it is; kNoTarget and the
// target -1 if there is none.
KV_DEVICE float nearest_of(const MergeHead& head, int row, int rows, int* target) {
  float best = kNoTarget;
  *target = -1;
  const int splits = splits_of(head, rows);
  for (int i = 0; i < splits; ++i) {
    const size_t at = head.split(row, i, splits);
    if (head.work.nearest[at] >= 0 && head.work.nearness[at] > best)
      best = head.work.nearness[at], *target = head.work.nearest[at];
  }
  return best;
}

// Returns how near the best target of a row of the eviction pool is by policy.order; kNoTarget if there is none.
KV_DEVICE float ease_of(const MergeHead& head, int row, int rows) {
  const int splits = splits_of(head, rows);
  float best = kNoTarget;
  for (int i = 0; i < splits; ++i) best = fmaxf(best, head.work.ease[head.split(row, i, splits)]);
  return best;
}

// Returns whether a slot is the older of a pair of neighbours that are both unprotected.
KV_DEVICE bool is_older(const HeadInfo& x, int i) {
  return i >= x.unprotected && i + 1 < x.unprotected + x.unprotected_count && (i - x.unprotected) % 2 == 0;
}

}  // namespace cuda
}  // namespace kv
