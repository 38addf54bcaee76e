// What the launches of MergeCache share: the call, the plan that they fill in one after another, and slots in order of
// position.
//
// `Rank` orders the slots and says which leave; with merge_first it says which might, `Nearest` looks for their targets
// and `Choose` decides. Then `Nearest` finds where leaving slots go, `Group` who merges with whom, `Join` computes the
// merged rows, `Order` where every slot ends up, and `Place` moves the rows. The cache is changed by the last two
// alone.
#pragma once

#include "../core/types.h"

namespace kv {
namespace cuda {

constexpr float kNoTarget = -1e38f;  // below every cosine, dot product and distance
constexpr int kNobody = INT32_MAX;

// What is known of one head.
struct HeadPlan {
  int in_all;       // used slots
  int used;         // without what the sliding window has passed
  int now;          // the latest position
  int sorted;       // whether the slots lie in order of position
  int free, frees;  // the first slot that is free to leave, and how many are: they lie together
  int over;         // how many have to leave
  int pool;         // how many might, with merge_first
  int leaving;
  int kept;
};

// The workspace. Slots are numbered in order of position; `capacity` of everything per head unless said otherwise.
struct Merge {
  KvMergeCache call;
  bool in_place;
  int most;       // that can leave a head: the stride of what is kept per leaving slot
  int most_rows;  // or be looked at as if they did
  int splits;     // of the targets in Nearest
  HeadPlan* heads;
  int* order;  // the slot in the cache
  float* importance;
  float* value;         // by which slots leave
  uint8_t* mark;        // kLeaves, kReceives
  int* rows;            // [most_rows] slots to find targets for: those that might leave, then those that do
  float* near;          // [most_rows, splits] how near the nearest target is
  int* nearest;         // [most_rows, splits]
  int* to;              // [most] the target of every leaving slot, -1 without
  int* group;           // of a target: the first leaving slot that merges into it, kNobody of others
  int* owner;           // who comes out in the place of a slot: itself, ~group, or kNobody
  float* attended;      // [Dv + 1]
  void* merged;         // [most, D + Dv] of the cache's type
  float* merged_small;  // [most, 1 + K]: votes and statistics
  int* source;          // of every row that stays: its slot in the cache, or ~group
};

enum { kLeaves = 1, kReceives = 2 };

// A head's part of the plan and of the cache, which is updated in place.
struct MergeHead {
  const Merge& plan;
  const KvMergeCache& a;
  int index;
  size_t slots;

  KV_DEVICE MergeHead(const Merge& plan, int index)
      : plan(plan), a(plan.call), index(index), slots(static_cast<size_t>(index) * plan.call.capacity) {}
  KV_DEVICE HeadPlan& info() const { return plan.heads[index]; }
  template <class T>
  KV_DEVICE T* of(T* array) const {
    return array + slots;
  }
  KV_DEVICE int* rows() const { return plan.rows + static_cast<size_t>(index) * plan.most_rows; }
  KV_DEVICE int* to() const { return plan.to + static_cast<size_t>(index) * plan.most; }
  KV_DEVICE int slot(int i) const { return of(plan.order)[i]; }
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
  // Where the nearest target of row i is kept, of every split.
  KV_DEVICE size_t split(int i, int split) const {
    return (static_cast<size_t>(index) * plan.most_rows + i) * plan.splits + split;
  }
};

// The nearest of a row's splits: of equals the first. Returns how near it is; kNoTarget and -1 where there is none.
KV_DEVICE float nearest_of(const MergeHead& head, int row, int* target) {
  float best = kNoTarget;
  *target = -1;
  for (int i = 0; i < head.plan.splits; ++i) {
    const size_t at = head.split(row, i);
    if (head.plan.nearest[at] >= 0 && head.plan.near[at] > best)
      best = head.plan.near[at], *target = head.plan.nearest[at];
  }
  return best;
}

// The older of a pair of neighbours that are both free to leave.
KV_DEVICE bool is_older(const HeadPlan& x, int i) {
  return i >= x.free && i + 1 < x.free + x.frees && (i - x.free) % 2 == 0;
}

}  // namespace cuda
}  // namespace kv
