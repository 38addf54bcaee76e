// MergeCache's first half, of one KV head:
//
//   collect: the used slots that the sliding window has not passed, in order of position
//   weigh: which slots are unprotected, neither sinks nor recent; importance[slot] = policy.select
//   choose: keep_score[slot] = importance, 1e38 where merged slots are evicted last
//     where policy.order asks for targets: the nearest of higher importance, for the slots of lowest keep score
//     evicted = the lowest keep scores, those with such a target, or the older of a pair, before the others
//   receivers: which slots can receive; for a running mean a share of those
//   nearest: for each of many slots the nearest target, in tiles of kTileRows slots against kBlock packed targets
#pragma once

#include <algorithm>
#include <cmath>

#include "../../math/merge.h"
#include "../core/kernels.h"
#include "../core/scratch.h"
#include "../core/small.h"
#include "../core/tile.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr float kNoTarget = -1e38f;  // below every cosine, dot product and distance

// Arrays of one task, kept by its thread. Slots are numbered in order of position, the empty ones left out.
struct Work {
  Scratch<int> order, rank, latest, evicted, target_list, ranked_targets, padded_targets, target, members,
      row_of_target;
  Scratch<float> votes, importance, keep_score, norm, best, products, packed_keys, rows, scores, output, wide, keys,
      values;
  Scratch<int32_t> position;
  Scratch<char> is_unprotected, is_evicted;
};

// Rows of a small cache are read as float32: before anything else, `widen_all` dequantizes those of a head that merges.
template <class K, class V>
struct Select {
  using Row = Wide<K>;
  const KvMergeCache& a;
  const KvMergePolicy& p;

  explicit Select(const KvMergeCache& call) : a(call), p(call.policy) {}

  struct Head {
    const K* key;
    const V* value;
    const float *votes, *score;
    const int32_t* position;
    K* out_key;
    V* out_value;
    float *out_votes, *out_score;
    int32_t* out_position;
    const float *key_scale, *value_scale;
    float *out_key_scale, *out_value_scale;
    int in_all;  // used slots before the sliding window
    int used, now, over, evicted, sets, target_count;
    int merged;  // sets that a merge has made, whose keys are new; those of a fit follow
  };

  Head head(size_t index) const {
    Head x;
    const size_t c = a.capacity, d = a.key_size, dv = a.value_size, k = a.statistics;
    x.key = at(static_cast<const K*>(a.past.key), index * c * d);
    x.value = at(static_cast<const V*>(a.past.value), index * c * dv);
    x.votes = a.past.votes + index * c;
    x.score = a.past.score + index * k * c;
    x.position = a.past.position + index * c;
    x.out_key = at(static_cast<K*>(a.present.key), index * c * d);
    x.out_value = at(static_cast<V*>(a.present.value), index * c * dv);
    x.out_votes = a.present.votes + index * c;
    x.out_score = a.present.score + index * k * c;
    x.out_position = a.present.position + index * c;
    if constexpr (kSmall<K>) {
      x.key_scale = a.past_scales.key + index * c, x.value_scale = a.past_scales.value + index * c;
      x.out_key_scale = a.present_scales.key + index * c, x.out_value_scale = a.present_scales.value + index * c;
    }
    x.sets = x.evicted = x.merged = 0;
    return x;
  }

  const Row* key_row(const Head& x, const Work& w, int slot) const {
    if constexpr (kSmall<K>)
      return w.keys.get() + static_cast<size_t>(slot) * a.key_size;
    else
      return x.key + static_cast<size_t>(w.order.get()[slot]) * a.key_size;
  }
  const Row* value_row(const Head& x, const Work& w, int slot) const {
    if constexpr (kSmall<K>)
      return w.values.get() + static_cast<size_t>(slot) * a.value_size;
    else
      return x.value + static_cast<size_t>(w.order.get()[slot]) * a.value_size;
  }
  // The two dimensions of rotary plane f.
  int first_of(int f) const { return a.rotary_interleaved ? 2 * f : f; }
  int second_of(int f) const { return a.rotary_interleaved ? 2 * f + 1 : f + a.rotary_planes; }

  // Keys as they are where they will be turned, else as they are stored, rotated.
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
    return x.score[static_cast<size_t>(k) * a.capacity + w.order.get()[slot]];
  }

  // Used slots, in order of position.
  void collect(Head& x, Work& w) const {
    int in_all = 0;
    while (in_all < a.capacity && x.votes[in_all] > 0.0f) ++in_all;
    x.in_all = in_all;
    x.now = -1;
    for (int c = 0; c < in_all; ++c) x.now = max_of(x.now, x.position[c]);
    int* order = w.order.reserve(in_all + 1);
    x.used = 0;
    bool sorted = true;
    for (int c = 0; c < in_all; ++c) {
      if (a.sliding_window && x.position[c] <= x.now - a.sliding_window) continue;
      sorted &= x.used == 0 || x.position[order[x.used - 1]] < x.position[c];
      order[x.used++] = c;
    }
    if (!sorted) sort_by_position(x, w);
    float* votes = w.votes.reserve(x.used + W);
    int32_t* positions = w.position.reserve(x.used + W);
    for (int i = 0; i < x.used; ++i) votes[i] = x.votes[order[i]], positions[i] = x.position[order[i]];
    w.is_evicted.reserve(x.used + 1, 0);
  }

  // By the digits of what positions are above the lowest, 8 bits at a time, the last ones first: twice where a context
  // has not seen 65,536 tokens. A comparison sort takes several times as long, and merges leave slots in any order.
  void sort_by_position(const Head& x, Work& w) const {
    int *from = w.order.get(), *to = w.rank.reserve(x.used);
    uint32_t lowest = UINT32_MAX, highest = 0;
    const auto number = [&](int slot) { return static_cast<uint32_t>(x.position[slot]) ^ 0x80000000u; };
    for (int i = 0; i < x.used; ++i) {
      lowest = std::min(lowest, number(from[i]));
      highest = std::max(highest, number(from[i]));
    }
    for (int shift = 0; shift < 32 && (highest - lowest) >> shift; shift += 8) {
      const auto digit = [&](int slot) { return (number(slot) - lowest) >> shift & 255; };
      int begin[257] = {};
      for (int i = 0; i < x.used; ++i) ++begin[digit(from[i]) + 1];
      for (int i = 1; i < 256; ++i) begin[i] += begin[i - 1];
      for (int i = 0; i < x.used; ++i) to[begin[digit(from[i])]++] = from[i];
      std::swap(from, to);
    }
    if (from != w.order.get()) memcpy(w.order.get(), from, x.used * sizeof(int));
  }

  // Which slots are unprotected, and the importance of every slot.
  void weigh(Head& x, Work& w) const {
    const int n = x.used;
    char* is_unprotected = w.is_unprotected.reserve(n);
    const int32_t* position = w.position.get();
    for (int i = 0; i < n; ++i) is_unprotected[i] = position[i] >= a.sinks && position[i] <= x.now - a.recent;
    float* importance = w.importance.reserve(n);
    for (int i = 0; i < n; ++i) {
      switch (p.select) {
        case KV_SELECT_POSITION:
          importance[i] = static_cast<float>(position[i]);
          break;
        case KV_SELECT_AVERAGE:
          importance[i] = corrected_average(score_of(x, w, 0, i), p.select_decay, x.now, position[i]);
          break;
        case KV_SELECT_MEAN:
          importance[i] = score_of(x, w, 0, i) / observations(x.now, position[i]);
          break;
        case KV_SELECT_POOLED:
          importance[i] = pooled(x, w, i);
          break;
        default:
          importance[i] = score_of(x, w, 0, i);
      }
    }
  }

  // Added up in order of position, so that slots with the same neighbours tie.
  float pooled(const Head& x, const Work& w, int i) const {
    const int reach = p.pooled / 2;
    const int32_t* position = w.position.get();
    float sum = 0.0f;
    for (int j = max_of(i - reach, 0); j <= min_of(i + reach, x.used - 1); ++j)
      if (w.is_unprotected.get()[j] && position[j] - position[i] <= reach && position[i] - position[j] <= reach)
        sum += score_of(x, w, 0, j);
    return sum;
  }

  // The first slot of a pair of unprotected neighbours, which lie together.
  bool is_older(const Head& x, const Work& w, int i) const {
    const char* is_unprotected = w.is_unprotected.get();
    return is_unprotected[i] && i + 1 < x.used && is_unprotected[i + 1] && (i - w.target_list.get()[0]) % 2 == 0;
  }

  // Fills `evicted`, in the order in which slots are evicted.
  void choose(Head& x, Work& w) const {
    const int n = x.used;
    const char* is_unprotected = w.is_unprotected.get();
    const float *importance = w.importance.get(), *votes = w.votes.get();
    int *rank = w.rank.reserve(n + 1), count = 0;
    for (int i = 0; i < n; ++i)
      if (is_unprotected[i]) rank[count++] = i;
    int* list = w.target_list.reserve(n + 1);
    for (int i = 0; i < count; ++i) list[i] = rank[i];
    x.target_count = count;
    float* keep_score = w.keep_score.reserve(n);
    for (int i = 0; i < n; ++i) keep_score[i] = p.merged_last && votes[i] > 1.0f ? 1e38f : importance[i];
    char* first = w.is_evicted.get();  // evicted before all others: marked 2 for now
    if (p.merge == KV_MERGE_PAIR)
      for (int i = 0; i < count; ++i)
        if (is_older(x, w, list[i]))
          first[list[i]] = 2, keep_score[list[i]] = importance[list[i]] + importance[list[i] + 1];
    const auto lower = [keep_score](int i, int j) {
      return keep_score[i] < keep_score[j] || (keep_score[i] == keep_score[j] && i < j);
    };
    if (p.order != KV_ORDER_LOWEST) {
      const int pool = p.eviction_pool > count / x.over ? count : p.eviction_pool * x.over;
      std::partial_sort(rank, rank + pool, rank + count, lower);
      nearest(x, w, rank, pool, true, p.order == KV_ORDER_LEAST_ERROR ? pool + 1 : x.over);
      for (int i = 0; i < pool; ++i) {
        const float near = w.best.get()[i];
        if (near > (p.order == KV_ORDER_LEAST_ERROR ? -kTooFar : p.threshold)) first[rank[i]] = 2;
        if (p.order == KV_ORDER_LEAST_ERROR && near > -kTooFar)
          keep_score[rank[i]] = merge_error(importance[rank[i]], p.error_exponent, -near);
      }
    }
    const int chosen = min_of(x.over, count);
    std::partial_sort(rank, rank + chosen, rank + count, [first, lower](int i, int j) {
      return first[i] != first[j] ? first[i] > first[j] : lower(i, j);
    });
    for (int i = 0; i < n; ++i) first[i] = 0;
    int* evicted = w.evicted.reserve(x.over);
    for (int i = 0; i < chosen; ++i) evicted[x.evicted++] = rank[i];
    // Where more have to be evicted than are unprotected: the earliest of the protected ones.
    for (int i = 0; i < n && x.evicted < x.over; ++i)
      if (!is_unprotected[i]) evicted[x.evicted++] = i;
    for (int i = 0; i < x.evicted; ++i) w.is_evicted.get()[evicted[i]] = 1;
  }

  // Of each of `count` slots the nearest target and how near it is, in `target` and `best`. Of equals the lowest
  // position.
  // higher: among targets of higher importance only, no further than the first `enough` slots that are nearer than the
  // threshold, and by keys and values where the policy goes by the error.
  void nearest(const Head& x, Work& w, const int* slots, int count, bool higher, int enough) const {
    const bool by_value = higher && p.order == KV_ORDER_LEAST_ERROR;
    const int d = a.key_size, dv = by_value ? a.value_size : 0, blocks = (x.target_count + kBlock - 1) / kBlock;
    const size_t padded = static_cast<size_t>(blocks) * kBlock;
    const float* importance = w.importance.get();
    const int* targets = w.target_list.get();
    // Where targets of most slots are looked for, half of the pairs are of no account: a slot's targets have a higher
    // importance than itself, so those of the highest importance are laid out first.
    const bool ranked = higher && 2 * count > x.target_count;
    if (ranked) targets = by_importance(x, w);
    int* nearest_target = w.target.reserve(count, -1);
    float* best = w.best.reserve(count, kNoTarget);
    float *keys = w.packed_keys.reserve(padded * (d + dv)), *values = keys + padded * d;
    float *norms = w.norm.reserve(2 * padded, 0.0f), *value_norms = norms + padded;  // their squares, of the targets
    float* importances = w.products.reserve(padded + kTileRows * (2 * kBlock + d + dv + 2), kNoTarget);
    float *products = importances + padded, *value_products = products + kTileRows * kBlock,
          *rows = value_products + kTileRows * kBlock, *value_rows = rows + kTileRows * d,
          *row_norm = value_rows + kTileRows * dv, *value_norm = row_norm + kTileRows;
    int* padded_targets = w.padded_targets.reserve(padded, 0);
    for (int i = 0; i < x.target_count; ++i) importances[i] = importance[targets[i]], padded_targets[i] = targets[i];
    for (int i = 0; i < static_cast<int>(padded); i += W) {
      const int held = max_of(min_of(W, x.target_count - i), 0);
      const size_t block = static_cast<size_t>(i / kBlock) * kBlock;
      const auto pack = [&](auto row_of, int size, bool unit, float* packed, float* squares) {
        float *wide = w.wide.reserve(W * size, 0.0f), factor[W];
        for (int j = 0; j < W; ++j) {
          if (j < held) squares[i + j] = widened(row_of(targets[i + j]), size, wide + j * size);
          factor[j] = unit ? over_norm(squares[i + j]) : 1.0f;
        }
        pack_columns(wide, size, load(factor), packed + block * size + i % kBlock);
      };
      pack([&](int slot) { return key_row(x, w, slot); }, d, p.measure == KV_MEASURE_COSINE, keys, norms);
      if (by_value) pack([&](int slot) { return value_row(x, w, slot); }, dv, false, values, value_norms);
    }
    const float *row[kTileRows], *value_row_of[kTileRows];
    for (int r = 0; r < kTileRows; ++r) row[r] = rows + r * d, value_row_of[r] = value_rows + r * dv;
    for (int first = 0, found = 0; first < count && found < enough; first += kTileRows) {
      const int height = min_of(kTileRows, count - first);
      for (int r = 0; r < kTileRows; ++r) {
        const int slot = slots[first + min_of(r, height - 1)];
        row_norm[r] = widened(key_row(x, w, slot), d, rows + r * d);
        const float factor = p.measure == KV_MEASURE_COSINE ? over_norm(row_norm[r]) : 1.0f;
        for (int i = 0; i < d; ++i) rows[r * d + i] *= factor;
        if (by_value) value_norm[r] = widened(value_row(x, w, slot), dv, value_rows + r * dv);
      }
      int looked_at = x.target_count;
      if (ranked) {
        float lowest = 3.4e38f;
        for (int r = 0; r < height; ++r) lowest = std::min(lowest, importance[slots[first + r]]);
        looked_at = static_cast<int>(std::partition_point(targets, targets + x.target_count,
                                                          [&](int slot) { return importance[slot] > lowest; }) -
                                     targets);
      }
      // Per lane the best so far and its slot, of equals the lower one.
      vf lane_best[kTileRows];
      vi lane_slot[kTileRows];
      for (int r = 0; r < kTileRows; ++r) lane_best[r] = splat(kNoTarget), lane_slot[r] = splat_i(-1);
      for (int block = 0; block * kBlock < looked_at; ++block) {
        tile_products(row, keys + static_cast<size_t>(block) * kBlock * d, d, products);
        if (by_value)
          tile_products(value_row_of, values + static_cast<size_t>(block) * kBlock * dv, dv, value_products);
        for (int column = 0; column < kBlock; column += W) {
          const int place = block * kBlock + column;
          const vi live = lane_numbers() + place < x.target_count, target = load_i(padded_targets + place);
          const vf square = load(norms + place), value_square = load(value_norms + place),
                   target_importance = load(importances + place);
          for (int r = 0; r < height; ++r) {
            vf near = load(products + r * kBlock + column);
            if (p.measure == KV_MEASURE_DISTANCE) near = 2.0f * near - square - row_norm[r];
            if (by_value) {
              const vf apart = value_square + value_norm[r] - 2.0f * load(value_products + r * kBlock + column);
              near = vmin(near, vf{}) * vmax(apart, vf{});
            }
            vi better = ((near > lane_best[r]) | ((near == lane_best[r]) & (target < lane_slot[r]))) & live;
            if (higher) better &= target_importance > importance[slots[first + r]];
            lane_best[r] = select(better, near, lane_best[r]);
            lane_slot[r] = better ? target : lane_slot[r];
          }
        }
      }
      for (int r = 0; r < height; ++r) {
        int& slot = nearest_target[first + r];
        for (int lane = 0; lane < W; ++lane) {
          const int found_at = lane_slot[r][lane];
          const float near = lane_best[r][lane];
          if (found_at >= 0 && (slot < 0 || near > best[first + r] || (near == best[first + r] && found_at < slot)))
            best[first + r] = near, slot = found_at;
        }
        found += best[first + r] > p.threshold;
      }
    }
  }

  // The targets, the highest importance first, NaN last.
  const int* by_importance(const Head& x, Work& w) const {
    int* list = w.ranked_targets.reserve(x.target_count + 1);
    const float* importance = w.importance.get();
    const auto key = [importance](int i) { return importance[i] == importance[i] ? importance[i] : -INFINITY; };
    memcpy(list, w.target_list.get(), x.target_count * sizeof(int));
    std::sort(list, list + x.target_count,
              [key](int i, int j) { return key(i) > key(j) || (key(i) == key(j) && i < j); });
    return list;
  }

  // A row in float32; returns its square.
  static float widened(const Row* from, int size, float* to) {
    widen(from, to, size);
    return dot(to, to, size);
  }
  static float over_norm(float square) { return 1.0f / max_of(std::sqrt(square), 1e-12f); }

  // Fills `target_list` with the slots that can receive: kept, and unprotected, or recent where the policy says so.
  void receivers(Head& x, Work& w) const {
    int *list = w.target_list.get(), count = 0;
    const int32_t* position = w.position.get();
    for (int i = 0; i < x.used; ++i) {
      const bool receives = w.is_unprotected.get()[i] || (a.recent_receives && position[i] >= a.sinks);
      if (receives && !w.is_evicted.get()[i]) list[count++] = i;
    }
    x.target_count = count;
    if (p.merge != KV_MERGE_RUNNING_MEAN || count == 0) return;
    // A running mean's targets: slots that have merged before, then those of lowest importance.
    const int residual = max_of(static_cast<int>(std::floor(p.residual * static_cast<float>(count))), 1);
    const float *votes = w.votes.get(), *importance = w.importance.get();
    const auto value = [votes, importance](int i) { return votes[i] > 1.0f ? -1e38f : importance[i]; };
    // Not std::sort, which may leave the array where a score is NaN.
    std::partial_sort(list, list + residual, list + count,
                      [value](int i, int j) { return value(i) < value(j) || (value(i) == value(j) && i < j); });
    x.target_count = residual;
    std::sort(list, list + residual, [](int i, int j) { return i < j; });
  }
};

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
