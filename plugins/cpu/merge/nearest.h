// Shared by the steps of MergeCache: the rows of one KV head, and the search for the nearest target of each of many
// slots, in tiles of kTileRows slots against kBlock packed targets:
//
//   pack the targets' keys (and for kCheapestTarget values) in blocks; with the cosine divided by their norms
//   for each tile of slots, for each block of targets
//     product = rows x keys; near = product, or 2 product - |key|^2 - |row|^2 = minus the squared distance
//     per lane: keep the nearest target; a tie goes to the lower slot
//   per slot: the nearest of all lanes
//
// Letters in this folder: a the arguments of the call, p its policy, x a KV head, w the memory of its task, i a slot by
// its number in order of position, c a slot by its row in the cache, k a statistic, d and dv the sizes of keys and
// values, r a row of a tile, j a lane or an element, f a rotary plane.
#pragma once

#include <algorithm>
#include <cmath>

#include "../../math/merge.h"
#include "../core/heads.h"
#include "../core/kernels.h"
#include "../core/quantized.h"
#include "../core/scratch.h"
#include "../core/tile.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr float kNoTarget = -1e38f;  // below every cosine, dot product and distance

// The arrays of one task, reused by its thread. Slots are numbered in order of position, without the empty ones.
struct Work {
  Scratch<int> order, rank, latest, evicted, target_list, ranked_targets, padded_targets, target, members,
      row_of_target;
  Scratch<float> votes, importance, keep_score, norm, best, products, packed_keys, rows, scores, output, wide, keys,
      values;
  Scratch<int32_t> position;
  Scratch<char> is_unprotected, is_evicted;
};

// Which targets `nearest` may give a slot, and how near a target is.
struct TargetPolicy {
  bool higher;    // only targets of higher importance than the slot
  bool by_value;  // near by keys and values: minus the product of their squared distances; otherwise by keys
};
constexpr TargetPolicy kAnyTarget{false, false}, kHigherTarget{true, false}, kCheapestTarget{true, true};

// K, V: the types of the cache. `widen_all` dequantizes a quantized cache's rows before a merge, so they are read as
// float32.
template <class K, class V>
struct Nearest {
  using Row = Wide<K>;
  const KvMergeCache& a;
  const KvMergePolicy& p;

  explicit Nearest(const KvMergeCache& call) : a(call), p(call.policy) {}

  struct Head {
    const K* key;
    const V* value;
    size_t value_size;  // elements from one row of `value` to the next
    const float *votes, *score;
    const int32_t* position;
    K* out_key;
    V* out_value;  // nullptr with value_prefix
    float *out_votes, *out_score;
    int32_t* out_position;
    const float *key_scale, *value_scale;
    float *out_key_scale, *out_value_scale;
    int capacity, budget, recent;
    int in_all;  // used slots, including those that the sliding window has passed
    int used;    // used slots that the window has not passed
    int now;     // the latest position
    int over;    // slots over the budget
    int evicted, sets, target_count;
    int merged;  // sets of the merge, whose keys are new; sets of a fit follow
  };

  Head head(size_t index) const {
    Head x;
    const size_t b = index / a.heads, d = a.key_size, dv = a.value_size, all = a.slots;
    const int h = static_cast<int>(index % a.heads);
    x.capacity = a.capacity[h], x.budget = a.budget[h], x.recent = a.recent[h];
    const size_t before = slots_before(a.capacity, h);           // of this sequence
    const size_t first_slot = b * all + before;                  // in the tensors [B,S]
    const size_t first_score = b * all * a.statistics + before;  // in [B,K,S]
    x.key = at(static_cast<const K*>(a.past.key), first_slot * d);
    x.value_size = a.value_prefix ? d : dv;
    x.value = at(static_cast<const V*>(a.value_prefix ? a.past.key : a.past.value), first_slot * x.value_size);
    x.votes = a.past.votes + first_slot;
    x.score = a.past.score + first_score;
    x.position = a.past.position + first_slot;
    x.out_key = at(static_cast<K*>(a.present.key), first_slot * d);
    x.out_value = a.value_prefix ? nullptr : at(static_cast<V*>(a.present.value), first_slot * dv);
    x.out_votes = a.present.votes + first_slot;
    x.out_score = a.present.score + first_score;
    x.out_position = a.present.position + first_slot;
    if constexpr (kQuantized<K>) {
      x.key_scale = a.past_scales.key + first_slot, x.value_scale = a.past_scales.value + first_slot;
      x.out_key_scale = a.present_scales.key + first_slot, x.out_value_scale = a.present_scales.value + first_slot;
    }
    x.sets = x.evicted = x.merged = 0;
    return x;
  }

  const Row* key_row(const Head& x, const Work& w, int slot) const {
    if constexpr (kQuantized<K>)
      return w.keys.get() + static_cast<size_t>(slot) * a.key_size;
    else
      return x.key + static_cast<size_t>(w.order.get()[slot]) * a.key_size;
  }
  const Row* value_row(const Head& x, const Work& w, int slot) const {
    if constexpr (kQuantized<K>)
      return w.values.get() + static_cast<size_t>(slot) * a.value_size;
    else
      return x.value + w.order.get()[slot] * x.value_size;
  }
  // The two dimensions of rotary plane f.
  int first_of(int f) const { return a.rotary_interleaved ? 2 * f : f; }
  int second_of(int f) const { return a.rotary_interleaved ? 2 * f + 1 : f + a.rotary_planes; }

  // Dequantizes all rows. Keys that rotary planes will turn are rotated back by hadamard; others stay rotated.
  void widen_all(const Head& x, Work& w) const {
    const size_t d = a.key_size, dv = a.value_size;
    float *keys = w.keys.reserve(x.used * d), *values = w.values.reserve(x.used * dv);
    for (int i = 0; i < x.used; ++i) {
      const size_t slot = w.order.get()[i];
      dequantize(at(x.key, slot * d), x.key_scale[slot], a.key_size, keys + i * d);
      if (a.rotary_planes) hadamard(keys + i * d, a.key_size);
      dequantize(at(x.value, slot * dv), x.value_scale[slot], a.value_size, values + i * dv);
    }
  }
  float score_of(const Head& x, const Work& w, int k, int slot) const {
    return x.score[static_cast<size_t>(k) * a.slots + w.order.get()[slot]];
  }

  // The targets of a search, packed in blocks of kBlock; and the tile of slots that look for a target.
  struct Targets {
    const int* slots;                          // [target_count]
    bool ranked;                               // whether the highest importance comes first
    float *keys, *values;                      // [blocks][size, kBlock]
    float *norms, *value_norms, *importances;  // [padded]; the norms are squared
    int* padded_slots;                         // [padded]
    float *rows, *value_rows;                  // [kTileRows, size]
    float *row_norms, *value_row_norms;        // [kTileRows], squared
    float *products, *value_products;          // [kTileRows, kBlock]
  };

  // Finds for each of `count` slots the nearest target and how near it is, in `target` and `best`; a tie goes to the
  // lowest position. The search stops after `enough` slots that are nearer than the threshold.
  void nearest(const Head& x, Work& w, const int* slots, int count, TargetPolicy policy, int enough) const {
    const Targets targets = pack_targets(x, w, count, policy);
    int* nearest_target = w.target.reserve(count, -1);
    float* best = w.best.reserve(count, kNoTarget);
    for (int first = 0, near_slots = 0; first < count && near_slots < enough; first += kTileRows) {
      const int height = min_of(kTileRows, count - first);
      widen_rows(x, w, slots + first, height, targets, policy);
      nearest_of_tile(x, w, slots + first, height, targets, policy, nearest_target + first, best + first);
      for (int r = 0; r < height; ++r) near_slots += best[first + r] > p.threshold;
    }
  }

  // Packs the keys of the targets (and with by_value their values) for a search of `count` slots.
  Targets pack_targets(const Head& x, Work& w, int count, TargetPolicy policy) const {
    const int d = a.key_size, dv = policy.by_value ? a.value_size : 0;
    const size_t padded = static_cast<size_t>((x.target_count + kBlock - 1) / kBlock) * kBlock;
    Targets t;
    // If most slots look for a target, half of the pairs do not count: a slot's targets have a higher importance than
    // the slot. So the targets of highest importance come first, and a tile of slots skips the others.
    t.ranked = policy.higher && 2 * count > x.target_count;
    t.slots = t.ranked ? by_importance(x, w) : w.target_list.get();
    t.keys = w.packed_keys.reserve(padded * (d + dv)), t.values = t.keys + padded * d;
    t.norms = w.norm.reserve(2 * padded, 0.0f), t.value_norms = t.norms + padded;
    t.importances = w.products.reserve(padded + kTileRows * (2 * kBlock + d + dv + 2), kNoTarget);
    t.products = t.importances + padded, t.value_products = t.products + kTileRows * kBlock;
    t.rows = t.value_products + kTileRows * kBlock, t.value_rows = t.rows + kTileRows * d;
    t.row_norms = t.value_rows + kTileRows * dv, t.value_row_norms = t.row_norms + kTileRows;
    t.padded_slots = w.padded_targets.reserve(padded, 0);
    for (int i = 0; i < x.target_count; ++i)
      t.importances[i] = w.importance.get()[t.slots[i]], t.padded_slots[i] = t.slots[i];
    for (int i = 0; i < static_cast<int>(padded); i += W) {
      const int live = max_of(min_of(W, x.target_count - i), 0);
      const size_t block = static_cast<size_t>(i / kBlock) * kBlock;
      const auto pack = [&](auto row_of, int size, bool unit, float* packed, float* squares) {
        float *wide = w.wide.reserve(W * size, 0.0f), factor[W];
        for (int j = 0; j < W; ++j) {
          if (j < live) squares[i + j] = widened(row_of(t.slots[i + j]), size, wide + j * size);
          factor[j] = unit ? over_norm(squares[i + j]) : 1.0f;
        }
        pack_columns(wide, size, load(factor), packed + block * size + i % kBlock);
      };
      pack([&](int slot) { return key_row(x, w, slot); }, d, p.measure == KV_MEASURE_COSINE, t.keys, t.norms);
      if (policy.by_value) pack([&](int slot) { return value_row(x, w, slot); }, dv, false, t.values, t.value_norms);
    }
    return t;
  }

  // Fills the rows of a tile from `height` slots; the last slot fills the remaining rows.
  void widen_rows(const Head& x, const Work& w, const int* slots, int height, const Targets& t,
                  TargetPolicy policy) const {
    const int d = a.key_size, dv = a.value_size;
    for (int r = 0; r < kTileRows; ++r) {
      const int slot = slots[min_of(r, height - 1)];
      t.row_norms[r] = widened(key_row(x, w, slot), d, t.rows + r * d);
      const float factor = p.measure == KV_MEASURE_COSINE ? over_norm(t.row_norms[r]) : 1.0f;
      for (int i = 0; i < d; ++i) t.rows[r * d + i] *= factor;
      if (policy.by_value) t.value_row_norms[r] = widened(value_row(x, w, slot), dv, t.value_rows + r * dv);
    }
  }

  // Returns how many targets from the first on a tile of slots has to compare.
  int candidates(const Head& x, const Work& w, const int* slots, int height, const Targets& t) const {
    if (!t.ranked) return x.target_count;
    const float* importance = w.importance.get();
    float lowest = 3.4e38f;
    for (int r = 0; r < height; ++r) lowest = std::min(lowest, importance[slots[r]]);
    return static_cast<int>(
        std::partition_point(t.slots, t.slots + x.target_count, [&](int slot) { return importance[slot] > lowest; }) -
        t.slots);
  }

  // Finds the nearest targets of the `height` slots of a tile.
  void nearest_of_tile(const Head& x, const Work& w, const int* slots, int height, const Targets& t,
                       TargetPolicy policy, int* nearest_target, float* best) const {
    const int d = a.key_size, dv = a.value_size, count = candidates(x, w, slots, height, t);
    const float* importance = w.importance.get();
    const float *row[kTileRows], *value_row[kTileRows];
    for (int r = 0; r < kTileRows; ++r) row[r] = t.rows + r * d, value_row[r] = t.value_rows + r * dv;
    // Each lane keeps the nearest target so far; a tie goes to the lower one.
    vf lane_best[kTileRows];
    vi lane_slot[kTileRows];
    for (int r = 0; r < kTileRows; ++r) lane_best[r] = splat(kNoTarget), lane_slot[r] = splat_i(-1);
    for (int block = 0; block * kBlock < count; ++block) {
      tile_products(row, t.keys + static_cast<size_t>(block) * kBlock * d, d, t.products);
      if (policy.by_value)
        tile_products(value_row, t.values + static_cast<size_t>(block) * kBlock * dv, dv, t.value_products);
      for (int column = 0; column < kBlock; column += W) {
        const int place = block * kBlock + column;
        const vi live = lane_numbers() + place < x.target_count, target = load_i(t.padded_slots + place);
        const vf square = load(t.norms + place), value_square = load(t.value_norms + place),
                 target_importance = load(t.importances + place);
        for (int r = 0; r < height; ++r) {
          vf near = load(t.products + r * kBlock + column);
          if (p.measure == KV_MEASURE_DISTANCE) near = 2.0f * near - square - t.row_norms[r];
          if (policy.by_value) {
            const vf apart = value_square + t.value_row_norms[r] - 2.0f * load(t.value_products + r * kBlock + column);
            near = vmin(near, vf{}) * vmax(apart, vf{});
          }
          vi better = ((near > lane_best[r]) | ((near == lane_best[r]) & (target < lane_slot[r]))) & live;
          if (policy.higher) better &= target_importance > importance[slots[r]];
          lane_best[r] = select(better, near, lane_best[r]);
          lane_slot[r] = better ? target : lane_slot[r];
        }
      }
    }
    for (int r = 0; r < height; ++r)
      for (int lane = 0; lane < W; ++lane) {
        const int slot = lane_slot[r][lane];
        const float near = lane_best[r][lane];
        if (slot >= 0 && (nearest_target[r] < 0 || near > best[r] || (near == best[r] && slot < nearest_target[r])))
          best[r] = near, nearest_target[r] = slot;
      }
  }

  // Returns the targets, the highest importance first, NaN last.
  const int* by_importance(const Head& x, Work& w) const {
    int* list = w.ranked_targets.reserve(x.target_count + 1);
    const float* importance = w.importance.get();
    const auto key = [importance](int i) { return importance[i] == importance[i] ? importance[i] : -INFINITY; };
    memcpy(list, w.target_list.get(), x.target_count * sizeof(int));
    std::sort(list, list + x.target_count,
              [key](int i, int j) { return key(i) > key(j) || (key(i) == key(j) && i < j); });
    return list;
  }

  // Converts a row to float32; returns its squared norm.
  static float widened(const Row* from, int size, float* to) {
    widen(from, to, size);
    return dot(to, to, size);
  }
  static float over_norm(float square) { return 1.0f / max_of(std::sqrt(square), 1e-12f); }
};

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
