// Shared by the steps of MergeCache: the rows of one KV head, and the search for the nearest target of each of many
// slots, in tiles of kTileRows slots against kBlock packed targets:
//
//   pack the targets' keys (and for kCheapestTarget values) in blocks; with the cosine divided by their norms
//   for each tile of slots, for each block of targets
//     product = rows x keys; near = product, or 2 product - |key|^2 - |row|^2 = minus the squared distance
//     per lane: keep the nearest target; a tie goes to the lower slot
//   per slot: the nearest of all lanes
//
// Indices in this folder: i a slot by its number in order of position, c a slot by its row in the cache, k a statistic,
// d and dv the sizes of keys and values, r a row of a tile, j a lane or an element, f a rotary plane. work: the memory
// of a task.
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
struct TargetRule {
  bool higher;    // only targets of higher importance than the slot
  bool by_value;  // near by keys and values: minus the product of their squared distances; otherwise by keys
};
constexpr TargetRule kAnyTarget{false, false}, kHigherTarget{true, false}, kCheapestTarget{true, true};

// K, V: the types of the cache. `widen_all` dequantizes a quantized cache's rows before a merge, so they are read as
// float32.
template <class K, class V>
struct Nearest {
  using Row = Wide<K>;
  const KvMergeCache& call;
  const KvMergePolicy& policy;

  explicit Nearest(const KvMergeCache& call) : call(call), policy(call.policy) {}

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

  Head head_of(size_t index) const {
    Head head;
    const size_t b = index / call.heads, d = call.key_size, dv = call.value_size, all = call.slots;
    const int h = static_cast<int>(index % call.heads);
    head.capacity = call.capacity[h], head.budget = call.budget[h], head.recent = call.recent[h];
    const size_t before = slots_before(call.capacity, h);           // of this sequence
    const size_t first_slot = b * all + before;                     // in the tensors [B,S]
    const size_t first_score = b * all * call.statistics + before;  // in [B,K,S]
    head.key = at(static_cast<const K*>(call.past.key), first_slot * d);
    head.value_size = call.value_prefix ? d : dv;
    head.value =
        at(static_cast<const V*>(call.value_prefix ? call.past.key : call.past.value), first_slot * head.value_size);
    head.votes = call.past.votes + first_slot;
    head.score = call.past.score + first_score;
    head.position = call.past.position + first_slot;
    head.out_key = at(static_cast<K*>(call.present.key), first_slot * d);
    head.out_value = call.value_prefix ? nullptr : at(static_cast<V*>(call.present.value), first_slot * dv);
    head.out_votes = call.present.votes + first_slot;
    head.out_score = call.present.score + first_score;
    head.out_position = call.present.position + first_slot;
    if constexpr (kQuantized<K>) {
      head.key_scale = call.past_scales.key + first_slot, head.value_scale = call.past_scales.value + first_slot;
      head.out_key_scale = call.present_scales.key + first_slot,
      head.out_value_scale = call.present_scales.value + first_slot;
    }
    head.sets = head.evicted = head.merged = 0;
    return head;
  }

  const Row* key_row(const Head& head, const Work& work, int slot) const {
    if constexpr (kQuantized<K>)
      return work.keys.get() + static_cast<size_t>(slot) * call.key_size;
    else
      return head.key + static_cast<size_t>(work.order.get()[slot]) * call.key_size;
  }
  const Row* value_row(const Head& head, const Work& work, int slot) const {
    if constexpr (kQuantized<K>)
      return work.values.get() + static_cast<size_t>(slot) * call.value_size;
    else
      return head.value + work.order.get()[slot] * head.value_size;
  }
  // The two dimensions of rotary plane f.
  int first_of(int f) const { return call.rotary_interleaved ? 2 * f : f; }
  int second_of(int f) const { return call.rotary_interleaved ? 2 * f + 1 : f + call.rotary_planes; }

  // Dequantizes all rows. Keys that rotary planes will turn are rotated back by hadamard; others stay rotated.
  void widen_all(const Head& head, Work& work) const {
    const size_t d = call.key_size, dv = call.value_size;
    float *keys = work.keys.reserve(head.used * d), *values = work.values.reserve(head.used * dv);
    for (int i = 0; i < head.used; ++i) {
      const size_t slot = work.order.get()[i];
      dequantize(at(head.key, slot * d), head.key_scale[slot], call.key_size, keys + i * d);
      if (call.rotary_planes) hadamard(keys + i * d, call.key_size);
      dequantize(at(head.value, slot * dv), head.value_scale[slot], call.value_size, values + i * dv);
    }
  }
  float score_of(const Head& head, const Work& work, int k, int slot) const {
    return head.score[static_cast<size_t>(k) * call.slots + work.order.get()[slot]];
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
  void nearest(const Head& head, Work& work, const int* slots, int count, TargetRule rule, int enough) const {
    const Targets targets = pack_targets(head, work, count, rule);
    int* nearest_target = work.target.reserve(count, -1);
    float* best = work.best.reserve(count, kNoTarget);
    for (int first = 0, near_slots = 0; first < count && near_slots < enough; first += kTileRows) {
      const int height = min_of(kTileRows, count - first);
      widen_rows(head, work, slots + first, height, targets, rule);
      nearest_of_tile(head, work, slots + first, height, targets, rule, nearest_target + first, best + first);
      for (int r = 0; r < height; ++r) near_slots += best[first + r] > policy.threshold;
    }
  }

  // Packs the keys of the targets (and with by_value their values) for a search of `count` slots.
  Targets pack_targets(const Head& head, Work& work, int count, TargetRule rule) const {
    const int d = call.key_size, dv = rule.by_value ? call.value_size : 0;
    const size_t padded = static_cast<size_t>((head.target_count + kBlock - 1) / kBlock) * kBlock;
    Targets t;
    // If most slots look for a target, half of the pairs do not count: a slot's targets have a higher importance than
    // the slot. So the targets of highest importance come first, and a tile of slots skips the others.
    t.ranked = rule.higher && 2 * count > head.target_count;
    t.slots = t.ranked ? by_importance(head, work) : work.target_list.get();
    t.keys = work.packed_keys.reserve(padded * (d + dv)), t.values = t.keys + padded * d;
    t.norms = work.norm.reserve(2 * padded, 0.0f), t.value_norms = t.norms + padded;
    t.importances = work.products.reserve(padded + kTileRows * (2 * kBlock + d + dv + 2), kNoTarget);
    t.products = t.importances + padded, t.value_products = t.products + kTileRows * kBlock;
    t.rows = t.value_products + kTileRows * kBlock, t.value_rows = t.rows + kTileRows * d;
    t.row_norms = t.value_rows + kTileRows * dv, t.value_row_norms = t.row_norms + kTileRows;
    t.padded_slots = work.padded_targets.reserve(padded, 0);
    for (int i = 0; i < head.target_count; ++i)
      t.importances[i] = work.importance.get()[t.slots[i]], t.padded_slots[i] = t.slots[i];
    for (int i = 0; i < static_cast<int>(padded); i += W) {
      const int live = max_of(min_of(W, head.target_count - i), 0);
      const size_t block = static_cast<size_t>(i / kBlock) * kBlock;
      const auto pack = [&](auto row_of, int size, bool unit, float* packed, float* squares) {
        float *wide = work.wide.reserve(W * size, 0.0f), factor[W];
        for (int j = 0; j < W; ++j) {
          if (j < live) squares[i + j] = widened(row_of(t.slots[i + j]), size, wide + j * size);
          factor[j] = unit ? over_norm(squares[i + j]) : 1.0f;
        }
        pack_columns(wide, size, load(factor), packed + block * size + i % kBlock);
      };
      pack([&](int slot) { return key_row(head, work, slot); }, d, policy.measure == KV_MEASURE_COSINE, t.keys,
           t.norms);
      if (rule.by_value)
        pack([&](int slot) { return value_row(head, work, slot); }, dv, false, t.values, t.value_norms);
    }
    return t;
  }

  // Fills the rows of a tile from `height` slots; the last slot fills the remaining rows.
  void widen_rows(const Head& head, const Work& work, const int* slots, int height, const Targets& t,
                  TargetRule rule) const {
    const int d = call.key_size, dv = call.value_size;
    for (int r = 0; r < kTileRows; ++r) {
      const int slot = slots[min_of(r, height - 1)];
      t.row_norms[r] = widened(key_row(head, work, slot), d, t.rows + r * d);
      const float factor = policy.measure == KV_MEASURE_COSINE ? over_norm(t.row_norms[r]) : 1.0f;
      for (int i = 0; i < d; ++i) t.rows[r * d + i] *= factor;
      if (rule.by_value) t.value_row_norms[r] = widened(value_row(head, work, slot), dv, t.value_rows + r * dv);
    }
  }

  // Returns how many targets from the first on a tile of slots has to compare.
  int candidates(const Head& head, const Work& work, const int* slots, int height, const Targets& t) const {
    if (!t.ranked) return head.target_count;
    const float* importance = work.importance.get();
    float lowest = 3.4e38f;
    for (int r = 0; r < height; ++r) lowest = std::min(lowest, importance[slots[r]]);
    return static_cast<int>(std::partition_point(t.slots, t.slots + head.target_count,
                                                 [&](int slot) { return importance[slot] > lowest; }) -
                            t.slots);
  }

  // Finds the nearest targets of the `height` slots of a tile.
  void nearest_of_tile(const Head& head, const Work& work, const int* slots, int height, const Targets& t,
                       TargetRule rule, int* nearest_target, float* best) const {
    const int d = call.key_size, dv = call.value_size, count = candidates(head, work, slots, height, t);
    const float* importance = work.importance.get();
    const float *row[kTileRows], *value_row[kTileRows];
    for (int r = 0; r < kTileRows; ++r) row[r] = t.rows + r * d, value_row[r] = t.value_rows + r * dv;
    // Each lane keeps the nearest target so far; a tie goes to the lower one.
    vf lane_best[kTileRows];
    vi lane_slot[kTileRows];
    for (int r = 0; r < kTileRows; ++r) lane_best[r] = splat(kNoTarget), lane_slot[r] = splat_i(-1);
    for (int block = 0; block * kBlock < count; ++block) {
      tile_products(row, t.keys + static_cast<size_t>(block) * kBlock * d, d, t.products);
      if (rule.by_value)
        tile_products(value_row, t.values + static_cast<size_t>(block) * kBlock * dv, dv, t.value_products);
      for (int column = 0; column < kBlock; column += W) {
        const int place = block * kBlock + column;
        const vi live = lane_numbers() + place < head.target_count, target = load_i(t.padded_slots + place);
        const vf square = load(t.norms + place), value_square = load(t.value_norms + place),
                 target_importance = load(t.importances + place);
        for (int r = 0; r < height; ++r) {
          vf near = load(t.products + r * kBlock + column);
          if (policy.measure == KV_MEASURE_DISTANCE) near = 2.0f * near - square - t.row_norms[r];
          if (rule.by_value) {
            const vf apart = value_square + t.value_row_norms[r] - 2.0f * load(t.value_products + r * kBlock + column);
            near = vmin(near, vf{}) * vmax(apart, vf{});
          }
          vi better = ((near > lane_best[r]) | ((near == lane_best[r]) & (target < lane_slot[r]))) & live;
          if (rule.higher) better &= target_importance > importance[slots[r]];
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
  const int* by_importance(const Head& head, Work& work) const {
    int* list = work.ranked_targets.reserve(head.target_count + 1);
    const float* importance = work.importance.get();
    const auto key = [importance](int i) { return importance[i] == importance[i] ? importance[i] : -INFINITY; };
    memcpy(list, work.target_list.get(), head.target_count * sizeof(int));
    std::sort(list, list + head.target_count,
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
