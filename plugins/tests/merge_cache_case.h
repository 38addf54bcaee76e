// One random call of MergeCache, and the checks of its result.
#pragma once

#include <set>

#include "support.h"

namespace fuzz {

// Draws any policy that the kernels support, with statistics that it can read, and the call's other arguments of choice
// and placement.
inline void any_policy(Random& random, int key_size, std::vector<float>& frequencies, KvMergeCache& call) {
  KvMergePolicy& p = call.policy;
  call.compresses = !random.one_in(12);
  call.recent_receives = random.one_in(3);
  p.merge =
      random.one_of({KV_MERGE_DROP, KV_MERGE_ZIP, KV_MERGE_ZIP, KV_MERGE_ZIP, KV_MERGE_RUNNING_MEAN, KV_MERGE_PAIR});
  p.select = random.one_of({KV_SELECT_POSITION, KV_SELECT_SCORE, KV_SELECT_AVERAGE, KV_SELECT_POOLED, KV_SELECT_MEAN});
  p.select_decay = random.uniform(0.5f, 0.999f), p.weigh_decay = random.uniform(0.5f, 0.999f);
  p.pooled = random.one_of({1, 5, 7, 30});
  p.eviction_pool = random.between(1, 6);
  p.error_exponent = random.one_of({0.0f, 0.5f, 1.0f});
  p.measure = random.one_of({KV_MEASURE_COSINE, KV_MEASURE_DOT, KV_MEASURE_DISTANCE});
  p.threshold = random.one_of({-1e38f, -1.0f, 0.0f, 0.1f, 0.8f, 1.0f});
  p.zip = random.one_of({KV_ZIP_KEY, KV_ZIP_VOTE, KV_ZIP_MEAN});
  p.key_factor_max = random.one_of({1.0f, 2.0f, INFINITY});
  p.votes_max = random.one_of({1.0f, 3.5f, INFINITY, INFINITY});
  p.residual = random.one_of({0.0f, 0.1f, 0.5f, 1.0f});
  p.weigh = random.one_of({KV_WEIGH_SCORE, KV_WEIGH_HESSIAN});
  p.tau = random.one_of({0.0f, 1e-3f, 0.5f});
  const bool by_nearness = p.merge == KV_MERGE_ZIP || p.merge == KV_MERGE_RUNNING_MEAN;
  if (by_nearness && random.one_in(2))
    p.order = p.measure == KV_MEASURE_DISTANCE ? KV_ORDER_LEAST_ERROR : KV_ORDER_NEAREST;
  p.merged_last = p.merge != KV_MERGE_PAIR && random.one_in(3);
  // The first statistic selects, the last weighs: a zip by an average, a pair by a sum of probabilities.
  const int first = p.select == KV_SELECT_AVERAGE    ? KV_STATISTIC_LOG_EMA
                    : p.select == KV_SELECT_POSITION ? KV_STATISTIC_NONE
                                                     : KV_STATISTIC_PROBABILITY;
  const int last = p.merge == KV_MERGE_ZIP    ? KV_STATISTIC_LOG_EMA
                   : p.merge == KV_MERGE_PAIR ? KV_STATISTIC_PROBABILITY
                                              : first;
  call.statistics = first == last ? random.between(1, 2) : 2;
  call.statistic_kind[0] = first, call.statistic_kind[call.statistics - 1] = last;
  p.mean_adds = first == KV_STATISTIC_PROBABILITY && random.one_in(3);
  call.cache_positions = random.one_in(3);
  if (p.merge != KV_MERGE_PAIR && !call.cache_positions) return;
  for (int planes = random.between(0, key_size / 2); planes > 0; --planes)
    frequencies.push_back(random.uniform(0.0f, 1.0f));
  call.rotary_planes = static_cast<int>(frequencies.size());
  call.rotary_interleaved = random.between(0, 1);
}

// A fit to reference queries after a policy that drops or zips, or none.
struct AnyFit {
  KvFit fit{};
  int rows = 0;  // rows of the ring; 0: no fit
  std::vector<float> query;
  std::vector<int32_t> seen;

  void choose(Random& random, KvMergePolicy& policy) {
    if ((policy.merge != KV_MERGE_DROP && policy.merge != KV_MERGE_ZIP) || random.one_in(3)) return;
    if (policy.merge == KV_MERGE_ZIP && policy.zip == KV_ZIP_KEY && policy.key_factor_max > 4.0f)
      return;  // such a zip may give infinite keys
    rows = random.one_of({1, 5, 32, 70});
    fit.fit = random.one_of({KV_FIT_VALUES, KV_FIT_VOTES_AND_VALUES});
    fit.ridge = random.one_of({1e-3f, 0.05f, 1.0f});
    fit.change_max = random.one_of({0.1f, 10.0f});
    fit.read_exponent = random.one_of({0.0f, 0.6f, 1.0f});
    fit.vote_steps = random.between(0, 6);
    fit.bias_max = random.one_of({0.5f, 3.0f});
    if (random.one_in(2)) policy.select = KV_SELECT_ATTENDED;
  }

  void fill(Random& random, const Cache& past, bool hostile) {
    const float size = random.one_of({0.1f, 1.0f, 30.0f});
    for (size_t row = 0; row < past.shape.rows(); ++row)
      for (int r = 0; r < rows; ++r) {
        const int32_t position = past.position(row, random.between(0, past.shape.capacity(row) - 1));
        seen.push_back(random.one_in(6) ? 0 : position < INT32_MAX ? position + 1 : position);
        for (int i = 0; i < past.shape.key_size; ++i)
          query.push_back(hostile && random.one_in(50) ? random.one_of({NAN, INFINITY}) : random.uniform(-size, size));
      }
  }

  const char* compute(const KvMergeCache* call, KvRunner runner, bool in_place) const {
    if (!rows) return kv_cpu_merge_cache(call, runner);
    std::vector<float> past_query(query), present_query(query.size(), -7.0f);
    std::vector<int32_t> past_seen(seen), present_seen(seen.size(), -7);
    if (in_place) present_query = query, present_seen = seen;
    KvRing ring{rows, {past_query.data(), past_seen.data()}, {present_query.data(), present_seen.data()}};
    if (in_place) ring.past = ring.present;
    const char* problem = kv_cpu_merge_and_fit(call, &fit, &ring, runner);
    check(present_seen == seen, "what reference queries have seen changed");
    const bool turns = call->cache_positions && call->rotary_planes;
    check(turns || query.empty() || memcmp(present_query.data(), query.data(), query.size() * sizeof(float)) == 0,
          "reference queries changed");
    return problem;
  }
};

struct MergeCase {
  KvMergeCache call{};
  AnyFit fit;
  Shape shape{};
  std::vector<float> frequencies;
  std::vector<int> budget, recent;  // of each KV head
  std::unique_ptr<Cache> past;
  bool hostile;

  explicit MergeCase(Random& random) : hostile(random.one_in(8)) {
    do {
      shape = any_shape(random, 1);
    } while (static_cast<double>(shape.rows()) * shape.largest * std::min(shape.largest, 200) * shape.key_size >
             3e7 * work_share);
    draw_capacities(random, 1, shape);
    any_policy(random, shape.key_size, frequencies, call);
    fit.choose(random, call.policy);
    shape.statistics = call.statistics;
    shape.in_key = may_be_in_key(shape) && !fit.rows && frequencies.empty() && call.policy.merge != KV_MERGE_PAIR &&
                   !(call.policy.merge == KV_MERGE_ZIP && call.policy.zip == KV_ZIP_KEY);
    call.value_prefix = shape.in_key ? shape.value_size : 0;
    call.inverse_frequencies = frequencies.data();
    call.cache_type = shape.cache_type(), call.batch = shape.batch, call.heads = shape.heads,
    call.slots = shape.slots(), call.capacity = shape.capacities.data();
    call.key_size = shape.key_size, call.value_size = shape.value_size, call.statistics = shape.statistics;
    for (const int capacity : shape.capacities) {
      const int evicted = random.one_in(6) ? capacity : random.between(0, std::min(capacity, 100));
      budget.push_back(std::max(1, capacity - evicted));
      recent.push_back(random.one_in(8) ? random.between(0, capacity + 10) : random.between(0, 1 + capacity / 4));
    }
    call.budget = budget.data(), call.recent = recent.data();
    call.sinks = random.one_in(8) ? random.between(0, shape.largest + 10) : random.between(0, 4);
    call.sliding_window = !call.cache_positions && random.one_in(4) ? random.between(1, shape.largest + 50) : 0;
    past = std::make_unique<Cache>(random, shape);
    std::vector<int> kinds;
    for (int k = 0; k < shape.statistics; ++k) kinds.push_back(call.statistic_kind[k]);
    for (size_t row = 0; row < shape.rows(); ++row) {
      fill_head(random, *past, row,
                random.one_in(8)   ? 0
                : random.one_in(2) ? shape.capacity(row)
                                   : random.between(0, shape.capacity(row)),
                kinds, true);
      alter(random, row);
    }
  }

  // Draws equal scores and keys, and statistics without observations; in a hostile case also invalid numbers.
  void alter(Random& random, size_t row) {
    const KvState view = past->view();
    for (int c = 1, used = past->used(row); c < used; ++c) {
      if (random.one_in(8))
        for (int i = 0; i < shape.key_size; ++i)
          write_stored(shape, kKey, view.key, shape.slot(row, c) * shape.key_size + i, past->key(row, c - 1, i));
      for (int k = 0; k < shape.statistics; ++k) {
        float& score = view.score[shape.score(row, k, c)];
        if (random.one_in(8)) score = past->score(row, k, c - 1);
        if (random.one_in(8) && call.statistic_kind[k] != KV_STATISTIC_NONE)
          score = call.statistic_kind[k] == KV_STATISTIC_PROBABILITY ? 0.0f : static_cast<float>(kNothing);
        if (hostile && random.one_in(3)) score = random.one_of({NAN, INFINITY, -INFINITY, -1.0f});
      }
      if (!hostile || !random.one_in(10)) continue;
      const float no_number = random.one_of({NAN, INFINITY, -INFINITY});
      if (shape.quantized)
        past->scales().key[shape.slot(row, c)] = no_number;
      else
        write(shape, view.key, shape.slot(row, c) * shape.key_size, no_number);
      view.votes[shape.slot(row, c)] = random.one_of({NAN, INFINITY, 1e-38f, -1.0f});
      view.position[shape.slot(row, c)] =
          random.one_of({random.between(0, 1 << 30), INT32_MIN, -1, INT32_MAX, past->position(row, c - 1)});
    }
  }

  void check_all(Random& random) {
    fit.fill(random, *past, hostile);
    bool ring_in_place = false;
    const auto compute = [&](const KvMergeCache* one, KvRunner runner) {
      ring_in_place = !ring_in_place;
      return fit.compute(one, runner, ring_in_place);
    };
    const Cache once = run(random, call, *past, 0, {forwards, nullptr}, compute);
    for (unsigned in_place : {kAllInPlace, 0u, static_cast<unsigned>(random.between(1, kAllInPlace - 1))}) {
      int threads;
      const KvRunner runner = any_runner(random, &threads);
      const Cache again = run(random, call, *past, in_place, runner, compute);
      for (size_t row = 0; row < shape.rows(); ++row) check_same(again, once, row, in_place);
    }
    if (hostile) return;
    for (size_t row = 0; row < shape.rows(); ++row) check_head(once, row);
  }

  // Checks that two runs give the same bits. In place, slots beyond the used ones stay unchanged; otherwise they are
  // zero.
  void check_same(const Cache& again, const Cache& once, size_t row, unsigned in_place) const {
    const int used = past->used(row);
    for (int i = 0; i < kTensors; ++i)
      for (int k = 0; k < (i == kScore ? shape.statistics : 1); ++k)
        for (int c = 0; c < shape.capacity(row); ++c) {
          const Cache& expected = c >= used && in_place >> i & 1 ? *past : once;
          size_t bytes;
          const unsigned char *x = again.at(i, k, row, c, &bytes), *y = expected.at(i, k, row, c, &bytes);
          check(memcmp(x, y, bytes) == 0, "in place or on other threads, another cache");
        }
  }

  void check_head(const Cache& present, size_t row) const {
    const int h = static_cast<int>(row % call.heads), budget = call.budget[h], recent = call.recent[h];
    int used = past->used(row), now = -1, seen = 0, kept = present.used(row);
    for (int c = 0; c < used; ++c) now = std::max(now, past->position(row, c));
    std::vector<std::pair<int32_t, int>> slots;
    for (int c = 0; c < used; ++c)
      if (!call.sliding_window || past->position(row, c) > now - call.sliding_window)
        slots.push_back({past->position(row, c), c}), ++seen;
    std::sort(slots.begin(), slots.end());
    check(kept == (call.compresses ? std::min(seen, budget) : seen), "not as many slots stay as should");
    const bool drops = (call.policy.merge == KV_MERGE_DROP && !fit.rows) || seen <= budget;
    const auto is_protected = [&](int32_t position) { return position < call.sinks || position > now - recent; };
    double votes_before = 0.0, votes_after = 0.0;
    int protected_before = 0, protected_after = 0;
    const std::vector<int> places = places_of(present, row, kept);
    if (drops) check_rows(present, row, kept, slots);
    for (const auto& slot : slots) {
      votes_before += past->votes(row, slot.second);
      protected_before += is_protected(slot.first);
    }
    for (int c = 0; c < kept; ++c) {
      const int32_t position = present.position(row, c);
      const auto at = std::lower_bound(slots.begin(), slots.end(), std::make_pair(position, -1));
      check(at != slots.end() && at->first == position, "a position that no slot had");
      const bool turned = call.cache_positions && call.rotary_planes && at - slots.begin() != places[c];
      if (!turned && (drops || position < call.sinks || (position > now - recent && !call.recent_receives)))
        check(present.same_slot(row, c, *past, at->second), "a slot that should not change did");
      if (turned && drops && !shape.quantized)
        check_turned(present, row, c, at->second, places[c] - static_cast<int>(at - slots.begin()));
      check_finite(present, row, c);
      votes_after += present.votes(row, c);
      protected_after += is_protected(position);
    }
    check(protected_after == std::min(protected_before, kept), "a sink or a recent slot left before others");
    if (call.policy.zip == KV_ZIP_MEAN || call.policy.merge != KV_MERGE_ZIP)
      check(votes_after <= votes_before * 1.0001, "votes came from nowhere");
    if (kept > 0 && !fit.rows) check_values(present, row, kept, slots);
    for (int i = 0; i < kTensors; ++i)
      for (int k = 0; k < (i == kScore ? shape.statistics : 1); ++k) {
        size_t bytes;
        const unsigned char* rest = present.at(i, k, row, kept, &bytes);
        check(std::all_of(rest, rest + (shape.capacity(row) - kept) * bytes, [](unsigned char x) { return x == 0; }),
              "an empty slot is not zero");
      }
  }

  // Returns for every slot how many slots have lower positions.
  std::vector<int> places_of(const Cache& present, size_t row, int kept) const {
    std::vector<int> order(kept), places(kept);
    for (int c = 0; c < kept; ++c) order[c] = c;
    std::sort(order.begin(), order.end(),
              [&](int i, int j) { return present.position(row, i) < present.position(row, j); });
    for (int i = 0; i < kept; ++i) {
      check(i == 0 || present.position(row, order[i - 1]) < present.position(row, order[i]), "two of one position");
      places[order[i]] = i;
    }
    return places;
  }

  // Checks a merge that only drops: kept slots stay in their rows, and the last ones fill the holes.
  void check_rows(const Cache& present, size_t row, int kept, const std::vector<std::pair<int32_t, int>>& slots) const {
    std::set<int32_t> stays;
    for (int c = 0; c < kept; ++c) stays.insert(present.position(row, c));
    std::vector<int> filling;
    for (const auto& slot : slots)
      if (stays.count(slot.first) && slot.second >= kept) filling.push_back(slot.second);
    std::sort(filling.begin(), filling.end());
    for (int c = 0; c < kept; ++c) {
      int from = c;
      if (!stays.count(past->position(row, c))) {
        check(!filling.empty(), "more holes than slots to fill them");
        from = filling.back();
        filling.pop_back();
      }
      check(present.position(row, c) == past->position(row, from), "a slot lies in another row than it should");
    }
  }

  // Checks a key that was rotated by a number of places, in double precision.
  void check_turned(const Cache& present, size_t row, int c, int slot, int steps) const {
    const int planes = call.rotary_planes;
    for (int f = 0; f < planes; ++f) {
      const int i = call.rotary_interleaved ? 2 * f : f, j = call.rotary_interleaved ? 2 * f + 1 : f + planes;
      const double angle = static_cast<float>(steps) * frequencies[f], x = past->key(row, slot, i),
                   y = past->key(row, slot, j);
      const double allowed = (shape.type ? 2e-3 : 1e-5) * (1.0 + std::fabs(x) + std::fabs(y));
      check(std::fabs(present.key(row, c, i) - (x * std::cos(angle) - y * std::sin(angle))) <= allowed &&
                std::fabs(present.key(row, c, j) - (y * std::cos(angle) + x * std::sin(angle))) <= allowed,
            "a key was not turned to its place");
    }
  }

  void check_finite(const Cache& present, size_t row, int c) const {
    const KvMergePolicy& p = call.policy;
    check(std::isfinite(present.votes(row, c)), "votes are not finite");
    // A key that absorbs the votes may exceed the range of its type.
    const bool bounded = !(p.merge == KV_MERGE_ZIP && p.zip == KV_ZIP_KEY && p.key_factor_max > 4.0f);
    for (int i = 0; i < shape.key_size && bounded; ++i)
      check(std::isfinite(present.key(row, c, i)), "a key is not finite");
    for (int i = 0; i < shape.value_size; ++i) check(std::isfinite(present.value(row, c, i)), "a value is not finite");
    for (int k = 0; k < shape.statistics; ++k) check(std::isfinite(present.score(row, k, c)), "a score is not finite");
  }

  // Checks that a merged value lies between the values, as a mean does.
  void check_values(const Cache& present, size_t row, int kept,
                    const std::vector<std::pair<int32_t, int>>& slots) const {
    for (int i = 0; i < shape.value_size; ++i) {
      float low = INFINITY, high = -INFINITY;
      for (const auto& slot : slots)
        low = std::min(low, past->value(row, slot.second, i)), high = std::max(high, past->value(row, slot.second, i));
      for (int c = 0; c < kept; ++c) {
        const float x = present.value(row, c, i);
        const float steps = shape.is_int4(kValue) ? 17.0f : 0.5f;  // half of int4's largest step, or int8's rounding
        const float off = shape.quantized ? 1e-4f + steps * present.scale(kValueScale, row, c) : 1e-4f;
        check(x >= low - off && x <= high + off, "a value that is no mean of values");
      }
    }
  }

  std::string describe() const {
    const KvMergePolicy& p = call.policy;
    char text[512];
    snprintf(text, sizeof text,
             "MergeCache%s %s B %d H %d C%s D %d Dv %d prefix %d K %d budget%s sinks %d recent%s window %d merge %d "
             "select %d "
             "measure %d threshold %g zip %d factor %g votes %g order %d exponent %g pool %d pooled %d residual %g "
             "weigh %d planes %d places %d fit %d rows %d steps %d",
             hostile ? " hostile" : "", shape.name(), call.batch, call.heads, text_of(shape.capacities).c_str(),
             call.key_size, call.value_size, call.value_prefix, call.statistics, text_of(budget).c_str(), call.sinks,
             text_of(recent).c_str(), call.sliding_window, p.merge, p.select, p.measure, p.threshold, p.zip,
             p.key_factor_max, p.votes_max, p.order, p.error_exponent, p.eviction_pool, p.pooled, p.residual, p.weigh,
             call.rotary_planes, call.cache_positions, fit.fit.fit, fit.rows, fit.fit.vote_steps);
    return text;
  }
};

}  // namespace fuzz
