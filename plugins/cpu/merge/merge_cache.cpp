// MergeCache for one instruction set; kvexport/ops/merge_cache.py and kvexport/methods/primitives define it. One task
// per KV head of one sequence:
//
//   collect: the used slots in order of position                         select.h, also for the next two
//   if more than `budget` slots are used
//     weigh, choose: which slots are evicted
//     merge: receivers, nearest: the target of every evicted slot, or the younger neighbour; without one it is dropped
//       for each merge set (a target and the evicted slots that merge into it): row = weighted mean, votes, statistics
//     fit_slots: fit the kept slots to reference queries                 fit.h
//   place: the last kept slots fill the holes, targets get their merged rows, zeros follow; in place, only rows that
//          change are written
//   turn_rows: if keys are rotated by places, rotate those whose place has changed
//
// Tasks share nothing and need no barrier: a task writes only its own head, after it has read all rows that it merges.
// Indices: those of nearest.h.
#include "fit.h"

namespace kv {
namespace KV_ISA {
namespace {

template <class K, class V>
struct Merge : Fit<K, V> {
  using Base = Fit<K, V>;
  using Base::Base, Base::key_row, Base::value_row, Base::score_of, Base::is_older, Base::first_of, Base::second_of;
  using Base::call, Base::policy, Base::fit;
  using typename Base::Head;
  using typename Base::Row;

  void task(size_t index) {
    static thread_local Work work;
    static thread_local FitWork f;
    Head head = this->head_of(index);
    this->collect(head, work);
    head.over = call.compresses ? max_of(head.used - head.budget, 0) : 0;
    if (head.over > 0) {
      if constexpr (kQuantized<K>)
        if (policy.merge != KV_MERGE_DROP || fit) this->widen_all(head, work);
      if (fit) this->read(head, work, index, f);
      this->weigh(head, work);
      if (policy.select == KV_SELECT_ATTENDED) this->weigh_by_queries(head, work, f);
      this->choose(head, work);
      if (policy.merge != KV_MERGE_DROP) merge(head, work);
      head.merged = head.sets;
      if (fit) this->fit_slots(head, work, f);
    }
    place(head, work);
    if (fit) this->keep_ring(head, index);
  }

  // Builds the merge sets and their rows. `members` is a set's target, followed by the evicted slots that merge into
  // it; row_of[target] is the number of its set's row, -1 without a set.
  void merge(Head& head, Work& work) const {
    const int evicted = head.evicted;
    int* row_of = work.row_of_target.reserve(head.used, -1);
    if (policy.merge == KV_MERGE_PAIR) {
      int* target = work.target.reserve(evicted, -1);
      for (int i = 0; i < evicted; ++i) {
        const int slot = work.evicted.get()[i];
        if (is_older(head, work, slot) && !work.is_evicted.get()[slot + 1]) target[i] = slot + 1;
      }
    } else {
      this->receivers(head, work);
      this->nearest(head, work, work.evicted.get(), evicted, kAnyTarget, evicted + 1);
      for (int i = 0; i < evicted; ++i)
        if (!(work.best.get()[i] > policy.threshold)) work.target.get()[i] = -1;
    }
    const int *target = work.target.get(), *slots = work.evicted.get();
    int* members = work.members.reserve(3 * static_cast<size_t>(evicted) + 1);
    const size_t sets = fit ? head.used : evicted;  // a fit adds sets
    float* rows = work.rows.reserve(sets * (call.key_size + call.value_size));
    float* scores = work.scores.reserve(sets * (call.statistics + 2));
    if (policy.merge == KV_MERGE_PAIR && policy.weigh == KV_WEIGH_HESSIAN) attention_output(head, work);
    for (int i = 0; i < evicted; ++i) {
      if (target[i] < 0 || row_of[target[i]] >= 0) continue;
      int count = 0;
      members[count++] = target[i];
      for (int j = i; j < evicted; ++j)
        if (target[j] == target[i]) members[count++] = slots[j];
      float* key = rows + static_cast<size_t>(head.sets) * (call.key_size + call.value_size);
      float* rest = scores + static_cast<size_t>(head.sets) * (call.statistics + 2);
      int latest = 0;  // the latest member: slots are numbered in order of position
      for (int j = 0; j < count; ++j) latest = max_of(latest, members[j]);
      const float votes = merge_set(head, work, members, count, key, key + call.key_size);
      if (kQuantized<K> && call.rotary_planes) hadamard(key, call.key_size);
      rest[0] = votes < policy.votes_max ? votes : policy.votes_max;
      memcpy(&rest[1], &latest, sizeof latest);
      for (int k = 0; k < call.statistics; ++k)
        rest[2 + k] = merged_score(head, work, members, count, k, work.position.get()[latest]);
      row_of[target[i]] = head.sets++;
    }
  }

  // out = sum over the members of weight * row, divided by the sum of the weights.
  template <class RowOf>
  void mean(const int* members, const float* weight, int count, int size, float* out, RowOf row) const {
    static thread_local Scratch<float> scratch;
    float *wide = scratch.reserve(size), weight_sum = 0.0f;
    for (int i = 0; i < size; ++i) out[i] = 0.0f;
    for (int j = 0; j < count; ++j) {
      widen(row(members[j]), wide, size);
      for (int i = 0; i < size; ++i) out[i] += weight[j] * wide[i];
      weight_sum += weight[j];
    }
    for (int i = 0; i < size; ++i) out[i] /= weight_sum;
  }

  // Computes a set's key and value; returns its votes.
  float merge_set(const Head& head, const Work& work, const int* members, int count, float* key, float* value) const {
    static thread_local Scratch<float> scratch;
    float* weight = scratch.reserve(2 * static_cast<size_t>(count));
    const float* votes = work.votes.get();
    const auto key_of = [&](int slot) { return key_row(head, work, slot); };
    const auto value_of = [&](int slot) { return value_row(head, work, slot); };
    const int dv = call.value_prefix ? 0 : call.value_size;
    if (policy.merge != KV_MERGE_ZIP) {
      float vote_sum = 0.0f;
      for (int j = 0; j < count; ++j) vote_sum += weight[j] = votes[members[j]];
      mean(members, weight, count, dv, value, value_of);
      if (policy.merge == KV_MERGE_PAIR)
        pair_key(head, work, members[0], members[1], key);
      else
        mean(members, weight, count, call.key_size, key, key_of);
      return vote_sum;
    }
    ZipSums sums;
    float* logit = weight + count;
    for (int j = 0; j < count; ++j) {
      logit[j] = corrected_average(score_of(head, work, call.statistics - 1, members[j]), policy.weigh_decay, head.now,
                                   work.position.get()[members[j]]);
      if (j == 0 || logit[j] > sums.max_logit) sums.max_logit = logit[j];
    }
    for (int j = 0; j < count; ++j) weight[j] = sums.add(votes[members[j]], logit[j]);
    mean(members, weight, count, call.key_size, key, key_of);
    mean(members, weight, count, dv, value, value_of);
    if (policy.zip == KV_ZIP_MEAN) return sums.votes;
    if (policy.zip == KV_ZIP_VOTE) return sums.fractional_votes();
    const float factor = sums.key_factor(), limit = policy.key_factor_max < 3.4e38f ? policy.key_factor_max : 3.4e38f;
    if (!(factor >= 1.0f / limit && factor <= limit)) return sums.fractional_votes();
    for (int i = 0; i < call.key_size; ++i) key[i] *= factor;
    return sums.votes;
  }

  // Returns statistic k of a set: the sum of probabilities, or the mean of exp(logit) averages weighted by votes.
  float merged_score(const Head& head, const Work& work, const int* members, int count, int k, int32_t latest) const {
    const float* votes = work.votes.get();
    const int32_t* position = work.position.get();
    if (call.statistic_kind[k] == KV_STATISTIC_NONE) return score_of(head, work, k, members[0]);
    if (call.statistic_kind[k] == KV_STATISTIC_PROBABILITY) {
      const bool by_mean = k == 0 && policy.mean_adds;
      float sum = 0.0f;
      for (int j = 0; j < count; ++j) {
        const float score = score_of(head, work, k, members[j]);
        sum += by_mean ? score / observations(head.now, position[members[j]]) : score;
      }
      return by_mean ? sum * observations(head.now, latest) : sum;
    }
    float max_score = score_of(head, work, k, members[0]), share = 0.0f, vote_sum = 0.0f;
    for (int j = 1; j < count; ++j) max_score = max_of(max_score, score_of(head, work, k, members[j]));
    for (int j = 0; j < count; ++j) {
      share += votes[members[j]] * std::exp(score_of(head, work, k, members[j]) - max_score);
      vote_sum += votes[members[j]];
    }
    return max_score + std::log(share / vote_sum);
  }

  // Computes work.output: the attention output o = sum a v, with a the slots' shares of the accumulated probabilities,
  // and in output[Dv] the sum of these probabilities.
  void attention_output(const Head& head, Work& work) const {
    float* output = work.output.reserve(call.value_size + 1, 0.0f);
    float* wide = work.wide.reserve(max_of(call.value_size, call.key_size));
    float mass = 0.0f;
    for (int i = 0; i < head.used; ++i) mass += score_of(head, work, call.statistics - 1, i);
    mass = max_of(mass, 1e-30f);
    for (int i = 0; i < head.used; ++i) {
      const float share = score_of(head, work, call.statistics - 1, i) / mass;
      widen(value_row(head, work, i), wide, call.value_size);
      for (int j = 0; j < call.value_size; ++j) output[j] += share * wide[j];
    }
    output[call.value_size] = mass;
  }

  // Computes the key of a pair: the weighted mean of both keys, the older rotated to the place of the younger.
  void pair_key(const Head& head, const Work& work, int younger, int older, float* key) const {
    static thread_local Scratch<float> scratch;
    const int d = call.key_size;
    float *wide = scratch.reserve(2 * static_cast<size_t>(d)), *rotated = wide + d;
    widen(key_row(head, work, older), wide, d);
    for (int i = 0; i < d; ++i) rotated[i] = wide[i];
    const int32_t* position = work.position.get();
    const float steps = static_cast<float>(
        call.cache_positions ? younger - older : static_cast<int64_t>(position[younger]) - position[older]);
    for (int f = 0; f < call.rotary_planes; ++f) {
      const float angle = steps * call.inverse_frequencies[f];
      turn(std::cos(angle), std::sin(angle), &rotated[first_of(f)], &rotated[second_of(f)]);
    }
    float younger_weight = score_of(head, work, call.statistics - 1, younger),
          older_weight = score_of(head, work, call.statistics - 1, older);
    if (policy.weigh == KV_WEIGH_HESSIAN) hessian(head, work, younger, older, &younger_weight, &older_weight);
    const float share = younger_weight + older_weight > 0.0f ? younger_weight / (younger_weight + older_weight) : 0.5f;
    widen(key_row(head, work, younger), key, d);
    for (int i = 0; i < d; ++i) key[i] = share * key[i] + (1.0f - share) * rotated[i];
  }

  // Replaces the weights of a pair by KVSlimmer's (hessian_weights).
  void hessian(const Head& head, const Work& work, int younger, int older, float* younger_weight,
               float* older_weight) const {
    const int dv = call.value_size;
    const float *output = work.output.get(), mass = output[dv];
    const Row *v1 = value_row(head, work, younger), *v2 = value_row(head, work, older);
    float norm1 = 0.0f, norm2 = 0.0f, both = 0.0f;
    for (int i = 0; i < dv; ++i) {
      const float r1 = static_cast<float>(v1[i]) - output[i], r2 = static_cast<float>(v2[i]) - output[i];
      norm1 += r1 * r1;
      norm2 += r2 * r2;
      both += (r1 + r2) * (r1 + r2);
    }
    hessian_weights(*younger_weight / mass, *older_weight / mass, std::sqrt(norm1), std::sqrt(norm2), std::sqrt(both),
                    policy.tau, younger_weight, older_weight);
  }

  // Writes the present state. Kept slots stay in their rows, merged rows replace their targets. The lowest hole among
  // the first rows takes the last kept slot, the next hole the last but one, and so on. Zeros follow.
  void place(const Head& head, Work& work) const {
    const size_t d = call.key_size, dv = call.value_size, all = call.slots;
    const bool stores_values = call.value_prefix == 0;
    const int each = call.statistics + 2;
    const int *order = work.order.get(), *row_of = head.sets ? work.row_of_target.get() : nullptr;
    const float *rows = work.rows.get(), *scores = work.scores.get();
    int kept, *number = without_holes(head, work, &kept);
    for (int to = 0; to < kept; ++to) {
      const int i = number[to], from = order[i], row = row_of ? row_of[i] : -1;
      if (row < 0 || row >= head.merged) {  // a set of a fit: its key is unchanged
        copy_row(head.key, head.out_key, from, to, d);
        if constexpr (kQuantized<K>) copy_row(head.key_scale, head.out_key_scale, from, to, 1);
      } else {
        write_row(rows + row * (d + dv), call.key_size, at(head.out_key, to * d), head.out_key_scale + to);
      }
      if (row < 0) {
        if (stores_values) copy_row(head.value, head.out_value, from, to, dv);
        if constexpr (kQuantized<K>) copy_row(head.value_scale, head.out_value_scale, from, to, 1);
        copy_row(head.votes, head.out_votes, from, to, 1);
        copy_row(head.position, head.out_position, from, to, 1);
        for (int k = 0; k < call.statistics; ++k) copy_row(head.score + k * all, head.out_score + k * all, from, to, 1);
        continue;
      }
      if (stores_values)
        write_row(rows + row * (d + dv) + d, call.value_size, at(head.out_value, to * dv), head.out_value_scale + to);
      head.out_votes[to] = scores[row * each];
      head.out_position[to] = work.position.get()[latest(work, row)];
      for (int k = 0; k < call.statistics; ++k) head.out_score[k * all + to] = scores[row * each + 2 + k];
    }
    if (call.cache_positions && call.rotary_planes && head.evicted) turn_rows(head, number, kept, row_of, work);
    // In place, slots after the used ones stay untouched.
    clear(head, head.out_key, head.key, d, kept);
    if (stores_values) clear(head, head.out_value, head.value, dv, kept);
    if constexpr (kQuantized<K>) {
      clear(head, head.out_key_scale, head.key_scale, 1, kept);
      clear(head, head.out_value_scale, head.value_scale, 1, kept);
    }
    clear(head, head.out_votes, head.votes, 1, kept);
    clear(head, head.out_position, head.position, 1, kept);
    for (int k = 0; k < call.statistics; ++k) clear(head, head.out_score + k * all, head.score + k * all, 1, kept);
  }

  // Returns, for each of the first `kept` rows, the slot that moves there (its number in order of position).
  int* without_holes(const Head& head, Work& work, int* kept) const {
    int *number = work.rank.reserve(head.in_all + 1, -1), count = 0;
    for (int i = 0; i < head.used; ++i)
      if (!work.is_evicted.get()[i]) number[work.order.get()[i]] = i, ++count;
    // As many kept slots are behind the first `count` rows as there are holes among these rows.
    for (int hole = 0, last = head.in_all - 1; hole < count; ++hole) {
      if (number[hole] >= 0) continue;
      while (number[last] < 0) --last;
      number[hole] = number[last--];
    }
    *kept = count;
    return number;
  }

  // Returns the latest member of a set (its number in order of position).
  int latest(const Work& work, int row) const {
    int number;
    memcpy(&number, &work.scores.get()[row * (call.statistics + 2) + 1], sizeof number);
    return number;
  }

  // Rotates keys from their places before the merge (a set's is the place of its latest member) to their new places.
  // Slots that stay neighbours rotate by the same number of places, so a run of them shares its cosines.
  void turn_rows(const Head& head, const int* number, int kept, const int* row_of, Work& work) const {
    const int planes = call.rotary_planes, d = call.key_size;
    float *cosine = work.wide.reserve(2 * static_cast<size_t>(planes) + d), *sine = cosine + planes,
          *row = sine + planes;
    int* row_at = work.latest.reserve(head.used, -1);  // the present row of the key at each place before the merge
    for (int i = 0; i < kept; ++i)
      row_at[row_of && row_of[number[i]] >= 0 ? latest(work, row_of[number[i]]) : number[i]] = i;
    for (int before = 0, place = 0, steps = 0; before < head.used; ++before) {
      if (row_at[before] < 0) continue;
      const int turned_by = place++ - before;
      if (turned_by == 0) continue;
      for (int f = 0; f < planes && turned_by != steps; ++f) {
        const float angle = static_cast<float>(turned_by) * call.inverse_frequencies[f];
        cosine[f] = std::cos(angle), sine[f] = std::sin(angle);
      }
      steps = turned_by;
      K* key = at(head.out_key, static_cast<size_t>(row_at[before]) * d);
      float* scale = head.out_key_scale + row_at[before];
      read_row(key, kQuantized<K> ? *scale : 1.0f, d, row);
      if (kQuantized<K>) hadamard(row, d);
      for (int f = 0; f < planes; ++f) turn(cosine[f], sine[f], &row[first_of(f)], &row[second_of(f)]);
      if (kQuantized<K>) hadamard(row, d);
      write_row(row, d, key, scale);
    }
  }

  // Zeroes the rows from `from` on: all in another buffer, those of used slots in place.
  template <class U>
  void clear(const Head& head, U* out, const U* in, size_t width, int from) const {
    const int to = out == in ? head.in_all : head.capacity;
    if (to > from) memset(static_cast<void*>(at(out, from * width)), 0, bytes_of<U>((to - from) * width));
  }

  // Convert a row to float32 and back; a quantized cache's row has a scale.
  template <class T>
  static void read_row(const T* from, float scale, int size, float* row) {
    if constexpr (kQuantized<T>)
      dequantize(from, scale, size, row);
    else
      widen(from, row, size);
  }
  template <class T>
  static void write_row(const float* row, int size, T* to, float* scale) {
    if constexpr (kQuantized<T>)
      *scale = quantize(row, size, to);
    else
      narrow(row, to, size);
  }

  // Copies a row, unless it is in its place already. In place, a row that moves comes from behind all written rows.
  template <class T>
  static void copy_row(const T* in, T* out, int from, int to, size_t width) {
    if (at(in, from * width) != at(out, to * width))
      memcpy(static_cast<void*>(at(out, to * width)), at(in, from * width), bytes_of<T>(width));
  }

  void run(KvRunner runner) {
    const HeadOrder order(call.capacity, call.batch, call.heads);
    struct Run {
      Merge& merge;
      const HeadOrder& order;
    } run{*this, order};
    runner.parallel_for(
        runner.context, static_cast<size_t>(call.batch) * call.heads,
        [](void* data, size_t i) {
          const auto& [merge, order] = *static_cast<Run*>(data);
          merge.task(order.number(i));
        },
        &run);
  }
};

}  // namespace

void merge_cache(const KvMergeCache& call, const KvFit* fit, const KvRing* ring, KvRunner runner) {
  if (call.cache_type == KV_INT8)
    Merge<int8_t, int8_t>(call, fit, ring).run(runner);
  else if (call.cache_type == KV_INT4)
    Merge<int4, int4>(call, fit, ring).run(runner);
  else if (call.cache_type == KV_K8V4)
    Merge<int8_t, int4>(call, fit, ring).run(runner);
  else if (call.cache_type == KV_FLOAT16)
    Merge<half, half>(call, fit, ring).run(runner);
  else
    Merge<float, float>(call, fit, ring).run(runner);
}

}  // namespace KV_ISA
}  // namespace kv
