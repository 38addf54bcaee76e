// What the launches of MergeCache share: the call, and a workspace that each of them fills further. In order:
//
//   Rank       slots in order of position, importance, which are evicted        select.h   a block per head
//   Nearest    where policy.order asks for targets: those of the eviction pool  nearest.h  some blocks per head; of 16
//                                                                               bits nearest_mma.h
//   Choose     ... and with them, which of the pool are evicted                 select.h   per head
//   Nearest    the target nearest to every evicted slot, unless pairs merge     nearest.h  some blocks per head
//
//   ... of which a zip after an order by targets leaves the second `Nearest` little. Slots that are more important than
//   the whole eviction pool, the upper ones, are targets of every slot of the pool in both searches, since none of them
//   is evicted: the first one keeps the nearest of them as well, so that the second looks at the rest alone.
//
//   FormSets   merge sets: a target and the evicted slots that merge into it    sets.h     per head
//   Attended   KVSlimmer alone: the attention's output                          sets.h     per head
//   MergeRows  every set's key, value, votes and statistics                     sets.h     some blocks per head
//   Order      rows that change (holes, targets), their votes and statistics    place.h    per head
//   Place      keys and values of these                                         place.h    per head and 64 bytes
//   Turn       keys that are rotated by their places, to their new ones         place.h    per head and 32 rows
//
// The cache is changed by the last three alone. A launch begins when the one before it has ended: between them there is
// no other barrier.
#pragma once

#include "../core/types.h"

namespace kv {
namespace cuda {

constexpr float kNoTarget = -1e38f;  // below every cosine, dot product and distance
constexpr int kNone = INT32_MAX;     // no merge set, or no row

// What is known of one head.
struct HeadInfo {
  int in_all;       // used slots
  int used;         // without those that the sliding window has passed
  int now;          // the latest position
  int unprotected;  // the first slot that is neither a sink nor recent; all of these lie together
  int unprotected_count;
  int over;  // how many have to be evicted
  int pool;  // the size of the eviction pool, where policy.order asks for targets, and
  int rest;  // how many slots from the first unprotected one on are not upper ones, and may be targets; of these
  int rest_unprotected;
  int evicted;  // how many are
  int kept;     // slots and merged rows in the end
  int changed;  // of these the ones that are written
};

// The workspace. Slots are numbered in order of position; `capacity` of everything per head unless said otherwise.
struct MergeWork {
  KvMergeCache call;
  bool in_place;
  int most_evicted;  // slots of a head: the stride of arrays with an entry for each evicted slot
  int most_rows;     // that Nearest looks for targets of: those, or the eviction pool
  int tile;          // ... at a time
  int blocks;        // of a head in Nearest, and
  int set_blocks;    // in MergeRows: they share out what there is, which is often far less than what there may be
  int most_splits;   // of the targets in Nearest
  int stride;        // of a head in what Nearest leaves
  HeadInfo* heads;
  int* order;  // the slot in the cache
  float* importance;
  float* keep_score;  // the lowest are evicted first
  uint8_t* mark;      // kEvicted, kCanReceive
  int* rows;          // [most_rows] slots to find targets of: the eviction pool, then the evicted ones
  float* nearness;    // [stride: rows, splits] of the nearest target
  int* nearest;       // [stride: rows, splits] that target
  float* ease;        // [stride: rows, splits] of the pool: how near the best target by policy.order is
  int* rest;          // the slots that are not upper ones
  int* upper;         // of a slot of the pool the nearest upper one, -1 without; nullptr where it is not asked for
  float* upper_nearness;
  int* target;           // [most_evicted] of every evicted slot, -1 without
  int* before;           // [most_evicted] ... and how many evicted slots before it have the same
  int* set;              // of a target: its merge set, the number of its first evicted slot; kNone of other slots
  float* attended;       // [Dv + 1] the attention's output, and the sum of its probabilities
  void* merged;          // [most_evicted, D + Dv] of the cache's type, the row of every set
  float* merged_small;   // [most_evicted, 1 + K]: its votes and statistics
  int* merged_position;  // [most_evicted]
  int* latest;           // [most_evicted] of every set its latest member
  int* changed;          // the rows that are written,
  int* source;           // and of each of them the slot in the cache that it was, or ~set
  int* row;              // of every place the row of its slot, where keys are rotated by places; else nullptr
  int* steps;            // ... and how many places the slot has moved
};

enum { kEvicted = 1, kCanReceive = 2, kUpper = 3 };  // marks of a slot

// A head's part of the workspace and of the cache, which is updated in place.
struct MergeHead {
  const MergeWork& work;
  const KvMergeCache& a;
  int index;
  size_t slots;

  KV_DEVICE MergeHead(const MergeWork& work, int index)
      : work(work), a(work.call), index(index), slots(static_cast<size_t>(index) * work.call.capacity) {}
  KV_DEVICE HeadInfo& info() const { return work.heads[index]; }
  template <class T>
  KV_DEVICE T* of(T* array) const {
    return array + slots;
  }
  KV_DEVICE int* rows() const { return work.rows + static_cast<size_t>(index) * work.most_rows; }
  KV_DEVICE int* targets() const { return work.target + static_cast<size_t>(index) * work.most_evicted; }
  KV_DEVICE int* before() const { return work.before + static_cast<size_t>(index) * work.most_evicted; }
  KV_DEVICE int slot(int i) const { return of(work.order)[i]; }
  KV_DEVICE int position(int i) const { return of(a.present.position)[slot(i)]; }
  KV_DEVICE float votes(int i) const { return of(a.present.votes)[slot(i)]; }
  KV_DEVICE float* scores(int k) const {
    return a.present.score + (static_cast<size_t>(index) * a.statistics + k) * a.capacity;
  }
  KV_DEVICE float score(int k, int i) const { return scores(k)[slot(i)]; }
  template <class T>
  KV_DEVICE T* key(int i) const {
    return static_cast<T*>(a.present.key) + (slots + slot(i)) * a.key_size;
  }
  template <class T>
  KV_DEVICE T* value(int i) const {
    return static_cast<T*>(a.present.value) + (slots + slot(i)) * a.value_size;
  }
  // Where the nearest target of row i is kept, of every one of so many splits.
  KV_DEVICE size_t split(int i, int split, int splits) const {
    return static_cast<size_t>(index) * work.stride + static_cast<size_t>(i) * splits + split;
  }
};

KV_HD int tiles_of(int rows, int tile) { return (rows + tile - 1) / tile; }

// Into how many splits Nearest divides the targets of so many rows: as many as its blocks can look at, since splits
// change nothing of what is found.
KV_HD int splits_of(const MergeWork& work, int rows) {
  const int wanted = work.blocks / (rows > 0 ? tiles_of(rows, work.tile) : 1);
  return wanted < 1 ? 1 : wanted < work.most_splits ? wanted : work.most_splits;
}

// The nearest target of a row, of so many rows: of equals the first. Returns how near it is; kNoTarget and -1 where
// there is none.
KV_DEVICE float nearest_of(const MergeHead& head, int row, int rows, int* target) {
  float best = kNoTarget;
  *target = -1;
  const int splits = splits_of(head.work, rows);
  for (int i = 0; i < splits; ++i) {
    const size_t at = head.split(row, i, splits);
    if (head.work.nearest[at] >= 0 && head.work.nearness[at] > best)
      best = head.work.nearness[at], *target = head.work.nearest[at];
  }
  return best;
}

// How near the best target of a row of the eviction pool is by policy.order; kNoTarget where there is none.
KV_DEVICE float ease_of(const MergeHead& head, int row, int rows) {
  const int splits = splits_of(head.work, rows);
  float best = kNoTarget;
  for (int i = 0; i < splits; ++i) best = fmaxf(best, head.work.ease[head.split(row, i, splits)]);
  return best;
}

// Whether a slot is the older of a pair of neighbours that may both be evicted.
KV_DEVICE bool is_older(const HeadInfo& x, int i) {
  return i >= x.unprotected && i + 1 < x.unprotected + x.unprotected_count && (i - x.unprotected) % 2 == 0;
}

}  // namespace cuda
}  // namespace kv
