// MergeCache for one instruction set. The meaning is kvexport/ops/merge_cache.py and the methods beside it; a policy
// says which.
//
// A task is one KV head of one sequence: slots in order of position, who leaves, where to, the merged rows, and last
// the move into place, which writes only what changed where the cache is updated in place.
#include <algorithm>
#include <cmath>

#include "../math/merge.h"
#include "kernels.h"
#include "scratch.h"
#include "simd.h"
#include "tile.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr float kNoTarget = -1e38f;  // below every cosine, dot product and distance

// Arrays of one task, kept by its thread. Slots are numbered in order of position, the empty ones left out.
struct Work {
  Scratch<int> order, rank, leaving, target_list, to, members, destination;
  Scratch<float> votes, importance, value, norm, best, products, packed_rows, packed_keys, rows, scores, output, turned,
      moved;
  Scratch<int32_t> position;
  Scratch<char> is_target, leaves;
};

template <class T>
struct Merge {
  const KvMergeCache& a;
  const KvMergePolicy& p;

  explicit Merge(const KvMergeCache& call) : a(call), p(call.policy) {}

  struct Head {
    const T *key, *value;
    const float *votes, *score;
    const int32_t* position;
    T *out_key, *out_value;
    float *out_votes, *out_score;
    int32_t* out_position;
    int in_all;  // used slots before the sliding window
    int used, now, over, leaving, groups, target_count;
  };

  void task(size_t index) {
    static thread_local Work w;
    Head x;
    const size_t c = a.capacity, d = a.key_size, dv = a.value_size, k = a.statistics;
    x.key = static_cast<const T*>(a.past.key) + index * c * d;
    x.value = static_cast<const T*>(a.past.value) + index * c * dv;
    x.votes = a.past.votes + index * c;
    x.score = a.past.score + index * k * c;
    x.position = a.past.position + index * c;
    x.out_key = static_cast<T*>(a.present.key) + index * c * d;
    x.out_value = static_cast<T*>(a.present.value) + index * c * dv;
    x.out_votes = a.present.votes + index * c;
    x.out_score = a.present.score + index * k * c;
    x.out_position = a.present.position + index * c;
    x.groups = x.leaving = 0;
    collect(x, w);
    x.over = p.compresses ? max_of(x.used - a.budget, 0) : 0;
    if (x.over > 0) {
      weigh(x, w);
      choose(x, w);
      if (p.merging != KV_DROP) merge(x, w);
    }
    place(x, w);
  }

  const T* key_row(const Head& x, const Work& w, int slot) const {
    return x.key + static_cast<size_t>(w.order.get()[slot]) * a.key_size;
  }
  const T* value_row(const Head& x, const Work& w, int slot) const {
    return x.value + static_cast<size_t>(w.order.get()[slot]) * a.value_size;
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
    const int32_t* position = x.position;
    if (!sorted) std::sort(order, order + x.used, [position](int i, int j) { return position[i] < position[j]; });
    float* votes = w.votes.reserve(x.used + W);
    int32_t* positions = w.position.reserve(x.used + W);
    for (int i = 0; i < x.used; ++i) votes[i] = x.votes[order[i]], positions[i] = x.position[order[i]];
    w.leaves.reserve(x.used + 1, 0);
  }

  // Which slots are free to leave, and the importance of every slot.
  void weigh(Head& x, Work& w) const {
    const int n = x.used;
    char* is_target = w.is_target.reserve(n);
    const int32_t* position = w.position.get();
    for (int i = 0; i < n; ++i) is_target[i] = position[i] >= a.sinks && position[i] <= x.now - a.recent;
    float* importance = w.importance.reserve(n);
    for (int i = 0; i < n; ++i) {
      switch (p.importance) {
        case KV_BY_POSITION:
          importance[i] = static_cast<float>(position[i]);
          break;
        case KV_BY_AVERAGE:
          importance[i] = corrected_average(score_of(x, w, 0, i), p.decay, x.now, position[i]);
          break;
        case KV_BY_MEAN:
          importance[i] = score_of(x, w, 0, i) / static_cast<float>(max_of(x.now - position[i] + 1, 1));
          break;
        case KV_BY_POOLED:
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
    float total = 0.0f;
    for (int j = max_of(i - reach, 0); j <= min_of(i + reach, x.used - 1); ++j)
      if (w.is_target.get()[j] && position[j] - position[i] <= reach && position[i] - position[j] <= reach)
        total += score_of(x, w, 0, j);
    return total;
  }

  // The first slot of a pair of unprotected neighbours, which lie together.
  bool is_older(const Head& x, const Work& w, int i) const {
    const char* is_target = w.is_target.get();
    return is_target[i] && i + 1 < x.used && is_target[i + 1] && (i - w.target_list.get()[0]) % 2 == 0;
  }

  // Fills `leaving` with the slots that leave, the first to go first.
  void choose(Head& x, Work& w) const {
    const int n = x.used;
    const char* is_target = w.is_target.get();
    const float *importance = w.importance.get(), *votes = w.votes.get();
    int *rank = w.rank.reserve(n + 1), count = 0;
    for (int i = 0; i < n; ++i)
      if (is_target[i]) rank[count++] = i;
    int* list = w.target_list.reserve(n + 1);
    for (int i = 0; i < count; ++i) list[i] = rank[i];
    x.target_count = count;
    float* value = w.value.reserve(n);
    for (int i = 0; i < n; ++i) value[i] = p.voted_last && votes[i] > 1.0f ? 1e38f : importance[i];
    char* first = w.leaves.get();  // what goes before all others; marked 2 for now
    if (p.merging == KV_PAIR)
      for (int i = 0; i < count; ++i)
        if (is_older(x, w, list[i])) first[list[i]] = 2, value[list[i]] = importance[list[i]] + importance[list[i] + 1];
    const auto lower = [value](int i, int j) { return value[i] < value[j] || (value[i] == value[j] && i < j); };
    if (p.merge_first) {
      const int pool = p.pool > count / x.over ? count : p.pool * x.over;
      std::partial_sort(rank, rank + pool, rank + count, lower);
      nearest(x, w, rank, pool, true, x.over);
      for (int i = 0; i < pool; ++i)
        if (w.best.get()[i] > p.threshold) first[rank[i]] = 2;
    }
    const int go = min_of(x.over, count);
    std::partial_sort(rank, rank + go, rank + count, [first, lower](int i, int j) {
      return first[i] != first[j] ? first[i] > first[j] : lower(i, j);
    });
    for (int i = 0; i < n; ++i) first[i] = 0;
    int* leaving = w.leaving.reserve(x.over);
    for (int i = 0; i < go; ++i) leaving[x.leaving++] = rank[i];
    // More than is free must leave: the earliest of what is protected.
    for (int i = 0; i < n && x.leaving < x.over; ++i)
      if (!is_target[i]) leaving[x.leaving++] = i;
    for (int i = 0; i < x.leaving; ++i) w.leaves.get()[leaving[i]] = 1;
  }

  // Of each of `count` slots the nearest target and how near it is, in `to` and `best`. Of equals the lowest position.
  // higher: among targets of higher importance only, and no further than the first `enough` slots that are nearer than
  // the threshold.
  void nearest(const Head& x, Work& w, const int* slots, int count, bool higher, int enough) const {
    const int d = a.key_size, blocks = (x.target_count + kBlock - 1) / kBlock;
    const int* targets = w.target_list.get();
    const float* importance = w.importance.get();
    int* to = w.to.reserve(count, -1);
    float* best = w.best.reserve(count, kNoTarget);
    float* keys = w.packed_keys.reserve(static_cast<size_t>(blocks) * kBlock * d);
    float* norms = w.norm.reserve(static_cast<size_t>(blocks) * kBlock, 0.0f);  // their squares, of the targets
    float* importances =
        w.products.reserve(static_cast<size_t>(blocks) * kBlock + kTileRows * (kBlock + d) + kTileRows, kNoTarget);
    float *products = importances + blocks * kBlock, *rows = products + kTileRows * kBlock,
          *row_norm = rows + kTileRows * d;
    for (int i = 0; i < blocks * kBlock; ++i) {
      float* packed = keys + static_cast<size_t>(i / kBlock) * kBlock * d + i % kBlock;
      if (i < x.target_count)
        norms[i] = unpack(x, w, targets[i], packed, kBlock), importances[i] = importance[targets[i]];
      else
        for (int j = 0; j < d; ++j) packed[j * kBlock] = 0.0f;
    }
    for (int first = 0, found = 0; first < count && found < enough; first += kTileRows) {
      const int height = min_of(kTileRows, count - first);
      for (int r = 0; r < kTileRows; ++r)
        row_norm[r] = unpack(x, w, slots[first + min_of(r, height - 1)], rows + r, kTileRows);
      // Per lane the best so far and its place; the first of equals is kept, as places only grow.
      vf lane_best[kTileRows];
      vi lane_place[kTileRows];
      for (int r = 0; r < kTileRows; ++r) lane_best[r] = splat(kNoTarget), lane_place[r] = splat_i(-1);
      for (int block = 0; block < blocks; ++block) {
        tile_products(rows, keys + static_cast<size_t>(block) * kBlock * d, d, products);
        for (int column = 0; column < kBlock; column += W) {
          const int place = block * kBlock + column;
          const vi places = lane_numbers() + place;
          const vf square = load(norms + place), own_importance = load(importances + place);
          for (int r = 0; r < height; ++r) {
            vf near = load(products + r * kBlock + column);
            if (p.measure == KV_DISTANCE) near = 2.0f * near - square - row_norm[r];
            vi better = (near > lane_best[r]) & (places < x.target_count);
            if (higher) better &= own_importance > importance[slots[first + r]];
            lane_best[r] = select(better, near, lane_best[r]);
            lane_place[r] = better ? places : lane_place[r];
          }
        }
      }
      for (int r = 0; r < height; ++r) {
        int place = -1;
        for (int lane = 0; lane < W; ++lane) {
          const int found_at = lane_place[r][lane];
          const float near = lane_best[r][lane];
          if (found_at >= 0 && (place < 0 || near > best[first + r] || (near == best[first + r] && found_at < place)))
            best[first + r] = near, place = found_at;
        }
        if (place >= 0) to[first + r] = targets[place];
        found += best[first + r] > p.threshold;
      }
    }
  }

  // A slot's key, over its norm for a cosine, written with a stride; returns the square of its norm where distances are
  // measured.
  float unpack(const Head& x, Work& w, int slot, float* out, int stride) const {
    const int d = a.key_size;
    float* row = w.turned.reserve(d);
    widen(key_row(x, w, slot), row, d);
    const float square = p.measure == KV_DOT ? 1.0f : dot(row, row, d);
    const float factor = p.measure == KV_COSINE ? 1.0f / max_of(std::sqrt(square), 1e-12f) : 1.0f;
    for (int i = 0; i < d; ++i) out[i * stride] = row[i] * factor;
    return square;
  }

  // Leaves in `target_list` those that may receive: they stay, and are free, or recent where the policy says so.
  void receivers(Head& x, Work& w) const {
    int *list = w.target_list.get(), count = 0;
    const int32_t* position = w.position.get();
    for (int i = 0; i < x.used; ++i) {
      const bool receives = w.is_target.get()[i] || (p.recent_receives && position[i] >= a.sinks);
      if (receives && !w.leaves.get()[i]) list[count++] = i;
    }
    x.target_count = count;
    if (p.merging != KV_RUNNING_MEAN || count == 0) return;
    // The residual region: those that have merged before, then the lowest.
    const int region = max_of(static_cast<int>(std::floor(p.residual * static_cast<float>(count))), 1);
    const float *votes = w.votes.get(), *importance = w.importance.get();
    const auto value = [votes, importance](int i) { return votes[i] > 1.0f ? -1e38f : importance[i]; };
    // Not std::sort, which may leave the array where a score is NaN.
    std::partial_sort(list, list + region, list + count,
                      [value](int i, int j) { return value(i) < value(j) || (value(i) == value(j) && i < j); });
    x.target_count = region;
    std::sort(list, list + region, [](int i, int j) { return i < j; });
  }

  // Who merges with whom, and the merged rows: `members` holds for every group its target and then those that leave
  // into it, -1 between groups; `destination` of a target is the number of its row.
  void merge(Head& x, Work& w) const {
    const int leaving = x.leaving;
    int* destination = w.destination.reserve(x.used, -1);
    if (p.merging == KV_PAIR) {
      int* to = w.to.reserve(leaving, -1);
      for (int i = 0; i < leaving; ++i) {
        const int slot = w.leaving.get()[i];
        if (is_older(x, w, slot) && !w.leaves.get()[slot + 1]) to[i] = slot + 1;
      }
    } else {
      receivers(x, w);
      nearest(x, w, w.leaving.get(), leaving, false, leaving + 1);
      for (int i = 0; i < leaving; ++i)
        if (!(w.best.get()[i] > p.threshold)) w.to.get()[i] = -1;
    }
    const int *to = w.to.get(), *slots = w.leaving.get();
    int* members = w.members.reserve(3 * static_cast<size_t>(leaving) + 1);
    float* rows = w.rows.reserve(static_cast<size_t>(leaving) * (a.key_size + a.value_size));
    float* scores = w.scores.reserve(static_cast<size_t>(leaving) * (a.statistics + 2));
    if (p.merging == KV_PAIR && p.weigh == KV_WEIGH_BY_HESSIAN) attended(x, w);
    for (int i = 0; i < leaving; ++i) {
      if (to[i] < 0 || destination[to[i]] >= 0) continue;
      int count = 0;
      members[count++] = to[i];
      for (int j = i; j < leaving; ++j)
        if (to[j] == to[i]) members[count++] = slots[j];
      float* key = rows + static_cast<size_t>(x.groups) * (a.key_size + a.value_size);
      float* rest = scores + static_cast<size_t>(x.groups) * (a.statistics + 2);
      int32_t latest = 0;
      for (int j = 0; j < count; ++j) latest = max_of(latest, w.position.get()[members[j]]);
      rest[0] = join(x, w, members, count, key, key + a.key_size);
      memcpy(&rest[1], &latest, sizeof latest);
      for (int k = 0; k < a.statistics; ++k) rest[2 + k] = joined_score(x, w, members, count, k, latest);
      destination[to[i]] = x.groups++;
    }
  }

  // sum weight * row, over the members, divided by the sum of the weights.
  template <class Row>
  void mean(const int* members, const float* weight, int count, int size, float* out, Row row) const {
    static thread_local Scratch<float> scratch;
    float *wide = scratch.reserve(size), total = 0.0f;
    for (int i = 0; i < size; ++i) out[i] = 0.0f;
    for (int j = 0; j < count; ++j) {
      widen(row(members[j]), wide, size);
      for (int i = 0; i < size; ++i) out[i] += weight[j] * wide[i];
      total += weight[j];
    }
    for (int i = 0; i < size; ++i) out[i] /= total;
  }

  // A group's key and value; returns its votes.
  float join(const Head& x, const Work& w, const int* members, int count, float* key, float* value) const {
    static thread_local Scratch<float> scratch;
    float* weight = scratch.reserve(2 * static_cast<size_t>(count));
    const float* votes = w.votes.get();
    const auto key_of = [&](int slot) { return key_row(x, w, slot); };
    const auto value_of = [&](int slot) { return value_row(x, w, slot); };
    if (p.merging != KV_ZIP) {
      float total = 0.0f;
      for (int j = 0; j < count; ++j) total += weight[j] = votes[members[j]];
      mean(members, weight, count, a.value_size, value, value_of);
      if (p.merging == KV_PAIR)
        pair_key(x, w, members[0], members[1], key);
      else
        mean(members, weight, count, a.key_size, key, key_of);
      return total;
    }
    ZipSums sums;
    float* logit = weight + count;
    for (int j = 0; j < count; ++j) {
      logit[j] = corrected_average(score_of(x, w, a.statistics - 1, members[j]), p.weigh_decay, x.now,
                                   w.position.get()[members[j]]);
      if (j == 0 || logit[j] > sums.top) sums.top = logit[j];
    }
    for (int j = 0; j < count; ++j) weight[j] = sums.add(votes[members[j]], logit[j]);
    mean(members, weight, count, a.key_size, key, key_of);
    mean(members, weight, count, a.value_size, value, value_of);
    if (p.zip == KV_ZIP_MEAN) return sums.votes;
    if (p.zip == KV_ZIP_VOTE) return sums.fractional_votes();
    const float factor = sums.key_factor(), limit = p.key_factor_max < 3.4e38f ? p.key_factor_max : 3.4e38f;
    if (!(factor >= 1.0f / limit && factor <= limit)) return sums.fractional_votes();
    for (int i = 0; i < a.key_size; ++i) key[i] *= factor;
    return sums.votes;
  }

  // Statistic k of a group: probability mass adds, of averages of exp(logit) the mean by votes.
  float joined_score(const Head& x, const Work& w, const int* members, int count, int k, int32_t latest) const {
    const float* votes = w.votes.get();
    const int32_t* position = w.position.get();
    if (p.statistic[k].kind == KV_STATISTIC_NONE) return score_of(x, w, k, members[0]);
    if (p.statistic[k].kind == KV_STATISTIC_PROBABILITY) {
      const bool by_mean = k == 0 && p.mean_adds;
      float total = 0.0f;
      for (int j = 0; j < count; ++j) {
        const float score = score_of(x, w, k, members[j]);
        total += by_mean ? score / static_cast<float>(max_of(x.now - position[members[j]] + 1, 1)) : score;
      }
      return by_mean ? total * static_cast<float>(x.now - latest + 1) : total;
    }
    float top = score_of(x, w, k, members[0]), share = 0.0f, total = 0.0f;
    for (int j = 1; j < count; ++j) top = max_of(top, score_of(x, w, k, members[j]));
    for (int j = 0; j < count; ++j) {
      share += votes[members[j]] * std::exp(score_of(x, w, k, members[j]) - top);
      total += votes[members[j]];
    }
    return top + std::log(share / total);
  }

  // The attention's output as the accumulated probabilities see it, o = sum a v, and in output[Dv] what they add up to.
  void attended(const Head& x, Work& w) const {
    float* output = w.output.reserve(a.value_size + 1, 0.0f);
    float* wide = w.turned.reserve(max_of(a.value_size, a.key_size));
    float total = 0.0f;
    for (int i = 0; i < x.used; ++i) total += score_of(x, w, a.statistics - 1, i);
    total = max_of(total, 1e-30f);
    for (int i = 0; i < x.used; ++i) {
      const float share = score_of(x, w, a.statistics - 1, i) / total;
      widen(value_row(x, w, i), wide, a.value_size);
      for (int j = 0; j < a.value_size; ++j) output[j] += share * wide[j];
    }
    output[a.value_size] = total;
  }

  // The key of a pair: both in the rotary frame of the younger.
  void pair_key(const Head& x, const Work& w, int younger, int older, float* key) const {
    static thread_local Scratch<float> scratch;
    const int d = a.key_size;
    float *wide = scratch.reserve(2 * static_cast<size_t>(d)), *turned = wide + d;
    widen(key_row(x, w, older), wide, d);
    for (int i = 0; i < d; ++i) turned[i] = wide[i];
    const float steps = static_cast<float>(w.position.get()[younger] - w.position.get()[older]);
    for (int f = 0; f < p.rotary_planes; ++f) {
      const int i = p.rotary_interleaved ? 2 * f : f, j = p.rotary_interleaved ? 2 * f + 1 : f + p.rotary_planes;
      const float angle = steps * p.inverse_frequencies[f], cosine = std::cos(angle), sine = std::sin(angle);
      turned[i] = wide[i] * cosine - wide[j] * sine;
      turned[j] = wide[j] * cosine + wide[i] * sine;
    }
    float own = score_of(x, w, a.statistics - 1, younger), arriving = score_of(x, w, a.statistics - 1, older);
    if (p.weigh == KV_WEIGH_BY_HESSIAN) hessian(x, w, younger, older, &own, &arriving);
    const float share = own + arriving > 0.0f ? own / (own + arriving) : 0.5f;
    widen(key_row(x, w, younger), key, d);
    for (int i = 0; i < d; ++i) key[i] = share * key[i] + (1.0f - share) * turned[i];
  }

  void hessian(const Head& x, const Work& w, int younger, int older, float* own, float* arriving) const {
    const int dv = a.value_size;
    const float *output = w.output.get(), total = output[dv];
    const T *v1 = value_row(x, w, younger), *v2 = value_row(x, w, older);
    float norm1 = 0.0f, norm2 = 0.0f, both = 0.0f;
    for (int i = 0; i < dv; ++i) {
      const float r1 = static_cast<float>(v1[i]) - output[i], r2 = static_cast<float>(v2[i]) - output[i];
      norm1 += r1 * r1;
      norm2 += r2 * r2;
      both += (r1 + r2) * (r1 + r2);
    }
    hessian_weights(*own / total, *arriving / total, std::sqrt(norm1), std::sqrt(norm2), std::sqrt(both), p.tau, own,
                    arriving);
  }

  // Writes what stays in order of position, and zeros after it.
  void place(const Head& x, Work& w) const {
    const size_t d = a.key_size, dv = a.value_size, c = a.capacity;
    const char* leaves = w.leaves.get();
    const int* row_of = x.groups ? w.destination.get() : nullptr;
    const float *rows = w.rows.get(), *scores = w.scores.get();
    int kept = 0, *rank = w.rank.reserve(x.used + 1);
    int32_t* position = w.position.get();
    for (int i = 0; i < x.used; ++i) {
      if (leaves[i]) continue;
      rank[kept++] = i;
      if (row_of && row_of[i] >= 0) memcpy(&position[i], &scores[row_of[i] * (a.statistics + 2) + 1], sizeof(int32_t));
    }
    if (x.groups) std::sort(rank, rank + kept, [position](int i, int j) { return position[i] < position[j]; });
    // Small rows first, by way of scratch; then keys and values, where a row moves only towards the front unless it was
    // merged.
    const int* order = w.order.get();
    const int each = a.statistics + 2;
    float* small = w.moved.reserve(static_cast<size_t>(kept) * each + 1);
    for (int i = 0; i < kept; ++i) {
      const int slot = rank[i], row = row_of ? row_of[slot] : -1;
      float* out = small + static_cast<size_t>(i) * each;
      out[0] = row >= 0 ? scores[row * each] : w.votes.get()[slot];
      memcpy(&out[1], &position[slot], sizeof(int32_t));
      for (int k = 0; k < a.statistics; ++k)
        out[2 + k] = row >= 0 ? scores[row * each + 2 + k] : score_of(x, w, k, slot);
    }
    move_rows(x.key, x.out_key, d, order, rank, row_of, rows, d + dv, kept, w);
    move_rows(x.value, x.out_value, dv, order, rank, row_of, rows + d, d + dv, kept, w);
    for (int i = 0; i < kept; ++i) {
      const float* from = small + static_cast<size_t>(i) * each;
      x.out_votes[i] = from[0];
      memcpy(&x.out_position[i], &from[1], sizeof(int32_t));
      for (int k = 0; k < a.statistics; ++k) x.out_score[k * c + i] = from[2 + k];
    }
    // In place, what lies beyond the used slots is left alone.
    clear(x.out_key, x.key, d, kept, x.in_all);
    clear(x.out_value, x.value, dv, kept, x.in_all);
    clear(x.out_votes, x.votes, 1, kept, x.in_all);
    clear(x.out_position, x.position, 1, kept, x.in_all);
    for (int k = 0; k < a.statistics; ++k) clear(x.out_score + k * c, x.score + k * c, 1, kept, x.in_all);
  }

  template <class U>
  void clear(U* out, const U* in, size_t width, int from, int used) const {
    const int to = out == in ? used : a.capacity;
    if (to > from) memset(static_cast<void*>(out + from * width), 0, (to - from) * width * sizeof(U));
  }

  // out[i] = row order[rank[i]] of `in`, or the merged row.
  void move_rows(const T* in, T* out, size_t width, const int* order, const int* rank, const int* row_of,
                 const float* merged, size_t stride, int kept, Work& w) const {
    const T* source = in;
    if (out == in) {
      bool forward = true;  // every row that moves, moves towards the front
      for (int i = 0; i < kept; ++i) forward &= (row_of && row_of[rank[i]] >= 0) || order[rank[i]] >= i;
      for (int i = 1, last = -1; i < kept && forward; ++i) {
        if (row_of && row_of[rank[i]] >= 0) continue;
        forward = order[rank[i]] > last;
        last = order[rank[i]];
      }
      if (!forward) {
        T* copy = reinterpret_cast<T*>(w.turned.reserve((static_cast<size_t>(a.capacity) * width * sizeof(T) + 3) / 4));
        memcpy(static_cast<void*>(copy), in, static_cast<size_t>(a.capacity) * width * sizeof(T));
        source = copy;
      }
    }
    for (int i = 0; i < kept; ++i) {
      const int row = row_of ? row_of[rank[i]] : -1;
      const T* from = source + static_cast<size_t>(order[rank[i]]) * width;
      T* to = out + static_cast<size_t>(i) * width;
      if (row >= 0)
        narrow(merged + static_cast<size_t>(row) * stride, to, static_cast<int>(width));
      else if (from != to)
        memcpy(static_cast<void*>(to), from, width * sizeof(T));
    }
  }

  void run(KvRunner runner) {
    runner.parallel_for(
        runner.context, static_cast<size_t>(a.batch) * a.heads,
        [](void* self, size_t i) { static_cast<Merge*>(self)->task(i); }, this);
  }
};

}  // namespace

void merge_cache(const KvMergeCache& call, KvRunner runner) {
  if (call.type == KV_FLOAT16)
    Merge<half>(call).run(runner);
  else
    Merge<float>(call).run(runner);
}

}  // namespace KV_ISA
}  // namespace kv
