// Random calls of the C ABI, checked for what must hold whatever the input: nothing outside its buffers, in place or not and on any
// threads the same bits, the invariants of docs/contract.md, and VoteAttention's figures against plain loops in double precision.
//
//   kv_fuzz SEED CASES    case i of seed s is case 0 of seed s + i; exit code 1 and that seed with its shapes where one fails
//
// One case in eight is hostile: NaN and infinite numbers, lengths that do not fit. Then only memory and bits are checked.
#include <cstdlib>

#include "reference.h"

namespace fuzz {
namespace {

int any_size(Random& random) { return random.one_in(2) ? random.one_of({8, 16, 64, 80, 96, 128}) : random.between(1, 256); }

int any_capacity(Random& random, int at_least) {
  return at_least + (random.one_in(12) ? random.between(1000, 5000) : random.one_in(4) ? random.between(0, 20) : random.between(0, 300));
}

Shape any_shape(Random& random, int at_least) {
  Shape s{};
  s.type = random.one_of({KV_FLOAT32, KV_FLOAT16});
  s.batch = random.between(random.one_in(10) ? 0 : 1, 4);
  s.heads = random.between(1, 4);
  s.capacity = any_capacity(random, at_least);
  s.key_size = any_size(random);
  s.value_size = random.one_in(3) ? any_size(random) : s.key_size;
  return s;
}

KvRunner any_runner(Random& random, int* threads) {
  *threads = random.between(2, 4);
  return {random.one_of<KvParallelFor>({backwards, threaded, threaded}), threads};
}

bool near(double found, double expected, double tolerance) {
  if (expected < 0.1 * kNothing) return found < 0.1 * kNothing;
  return std::abs(found - expected) <= tolerance * (1.0 + std::abs(expected));
}

// ---- VoteAttention ----

struct AttentionCase {
  KvVoteAttention call{};
  Shape shape{};
  std::vector<int> used, length;  // of each sequence
  Buffer query, key, value, position, query_length, sink_logits, output;
  std::unique_ptr<Cache> past;
  bool hostile;

  explicit AttentionCase(Random& random) : hostile(random.one_in(8)) {
    draw_shapes(random);
    call.scale = random.one_of({1.0f, 6.0f, 200.0f}) / (4.0f * std::sqrt(static_cast<float>(call.key_size)));
    call.vote_exponent = random.one_of({0.0f, 1.0f, 0.6f});
    call.softcap = random.one_in(4) ? random.uniform(5.0f, 50.0f) : 0.0f;
    call.sliding_window = random.one_in(3) ? random.between(1, call.capacity + 50) : 0;
    std::vector<int> kinds;
    for (int k = 0; k < call.statistics; ++k) {
      const int kind = random.between(0, 2);
      kinds.push_back(kind);
      const float decay = kind != KV_STATISTIC_LOG_EMA && random.one_in(2) ? 1.0f : random.uniform(0.6f, 0.999f);
      call.statistic[k] = {kind, decay, random.one_in(3) ? random.between(1, 100) : 0, random.one_in(3) ? random.uniform(0.3f, 2.0f) : 1.0f};
    }
    past = std::make_unique<Cache>(random, shape);
    draw_lanes(random, kinds);
    draw_tokens(random);
  }

  // Drawn until the work is small enough for a sanitizer.
  void draw_shapes(Random& random) {
    do {
      call.tokens = random.one_in(2) ? 1 : random.between(1, 96);
      shape = any_shape(random, call.tokens);
      shape.statistics = call.statistics = random.between(1, 3);
      call.query_heads = shape.heads * random.one_of({1, 1, 2, 3, 4, 5, 7, 8, 16});
    } while (static_cast<double>(shape.batch) * call.query_heads * (call.tokens + 4) * shape.capacity * (shape.key_size + shape.value_size) > 3e7);
    call.type = shape.type, call.batch = shape.batch, call.heads = shape.heads, call.capacity = shape.capacity;
    call.key_size = shape.key_size, call.value_size = shape.value_size;
  }

  void draw_lanes(Random& random, const std::vector<int>& kinds) {
    position = Buffer(random, static_cast<size_t>(call.batch) * call.tokens, 8);
    query_length = Buffer(random, call.batch, 8);
    for (int b = 0; b < call.batch; ++b) {
      used.push_back(random.one_in(4) ? 0 : random.between(0, call.capacity - call.tokens));
      length.push_back(random.one_in(4) ? 0 : random.one_in(2) ? call.tokens : random.between(0, call.tokens));
      if (random.one_in(4)) used[b] = call.capacity - length[b];  // to the brim
      int first = 0;
      for (int h = 0; h < call.heads; ++h)
        first = std::max(first, fill_head(random, *past, static_cast<size_t>(b) * call.heads + h, used[b], kinds, call.vote_exponent != 0.0f));
      for (int t = 0; t < call.tokens; ++t) position.data<int64_t>()[b * call.tokens + t] = t < std::max(length[b], 1) ? first + t : -1;
      query_length.data<int64_t>()[b] = length[b];
      if (hostile) query_length.data<int64_t>()[b] = random.between(-3, call.tokens + 3);
    }
    call.position = position.data<int64_t>();
    call.query_length = query_length.data<int64_t>();
  }

  // Padding rows stay NaN.
  void draw_rows(Random& random, Buffer& buffer, int heads, int size) {
    buffer = Buffer(random, static_cast<size_t>(call.batch) * heads * call.tokens * size, shape.element());
    for (int b = 0; b < call.batch; ++b)
      for (int h = 0; h < heads; ++h)
        for (size_t i = 0; i < static_cast<size_t>(hostile ? call.tokens : length[b]) * size; ++i)
          write(shape, buffer.data<void>(), (static_cast<size_t>(b) * heads + h) * call.tokens * size + i,
                hostile && random.one_in(50) ? random.one_of({NAN, INFINITY, -INFINITY}) : random.normal());
  }

  void draw_tokens(Random& random) {
    draw_rows(random, query, call.query_heads, call.key_size);
    draw_rows(random, key, call.heads, call.key_size);
    draw_rows(random, value, call.heads, call.value_size);
    call.query = query.data<void>(), call.key = key.data<void>(), call.value = value.data<void>();
    if (!random.one_in(4)) return;
    sink_logits = Buffer(random, call.query_heads, 4);
    for (int i = 0; i < call.query_heads; ++i) sink_logits.data<float>()[i] = 3.0f * random.normal();
    call.sink_logits = sink_logits.data<float>();
  }

  Cache attempt(Random& random, unsigned in_place, KvRunner runner) {
    output = Buffer(random, static_cast<size_t>(call.batch) * call.query_heads * call.tokens * call.value_size, shape.element());
    call.output = output.data<void>();
    Cache present = run(random, call, *past, in_place, runner, kv_cpu_vote_attention);
    for (const Buffer* buffer : {&query, &key, &value, &position, &query_length, &sink_logits, &output}) buffer->check_canaries();
    return present;
  }

  void check_all(Random& random) {
    const std::array<Buffer, 6> given{query, key, value, position, query_length, sink_logits};
    const Cache once = attempt(random, 0, {forwards, nullptr});
    const Buffer whole = output;
    for (unsigned in_place : {31u, 0u, static_cast<unsigned>(random.between(1, 30))}) {
      int threads;
      const Cache again = attempt(random, in_place, any_runner(random, &threads));
      check(again.same(once), "in place or on other threads, another cache");
      check(output.same(whole), "in place or on other threads, another output");
    }
    size_t i = 0;
    for (const Buffer* buffer : {&query, &key, &value, &position, &query_length, &sink_logits})
      check(buffer->same(given[i++]), "wrote into an input");
    if (hostile) return;
    for (size_t row = 0; row < shape.rows(); ++row) check_head(once, row);
    if (shape.rows()) check_figures(once, random.between(0, static_cast<int>(shape.rows()) - 1));
  }

  // What is appended, what is left alone, what is finite.
  void check_head(const Cache& present, size_t row) const {
    const int b = static_cast<int>(row / call.heads), from = used[b], n = length[b], group = call.query_heads / call.heads;
    check(present.used(row) == from + n, "used slots are not the old and the new ones");
    for (int c = 0; c < call.capacity; ++c) {
      if (n == 0 || c >= from + n) {
        check(present.same_slot(row, c, *past, c), n ? "an empty slot changed" : "an idle lane changed");
        continue;
      }
      const size_t token = row * call.tokens + c - from;
      const bool is_new = c >= from;
      for (int i = 0; i < call.key_size; ++i)
        check(present.key(row, c, i) == (is_new ? read(shape, call.key, token * call.key_size + i) : past->key(row, c, i)), "a key is wrong");
      for (int i = 0; i < call.value_size; ++i)
        check(present.value(row, c, i) == (is_new ? read(shape, call.value, token * call.value_size + i) : past->value(row, c, i)),
              "a value is wrong");
      check(present.votes(row, c) == (is_new ? 1.0f : past->votes(row, c)), "votes are wrong");
      check(present.position(row, c) == (is_new ? call.position[b * call.tokens] + c - from : past->position(row, c)), "a position is wrong");
      for (int k = 0; k < call.statistics; ++k)
        check(std::isfinite(present.score(row, k, c)) || call.statistic[k].kind == KV_STATISTIC_NONE, "a score is not finite");
    }
    const size_t rows = (static_cast<size_t>(b) * call.query_heads + row % call.heads * group) * call.tokens;
    for (int g = 0; g < group; ++g)
      for (int t = 0; t < call.tokens; ++t)
        for (int i = 0; i < call.value_size; ++i) {
          const float x = read(shape, call.output, (rows + g * call.tokens + t) * call.value_size + i);
          check(t < n ? std::isfinite(x) : x == 0.0f, t < n ? "an output is not finite" : "the output of padding is not 0");
        }
  }

  void check_figures(const Cache& present, size_t row) const {
    const int b = static_cast<int>(row / call.heads), group = call.query_heads / call.heads;
    const Expected expected = Reference(call, *past, present, row, used[b], length[b]).compute();
    if (length[b] == 0) return;
    // A logit of 200 is known to 1e-5, and its exponential to no more.
    const double tolerance = shape.type == KV_FLOAT16 ? 3e-3 : 1e-3;
    const size_t first = (static_cast<size_t>(b) * call.query_heads + row % call.heads * group) * call.tokens * call.value_size;
    for (size_t i = 0; i < expected.output.size(); ++i)
      check(near(read(shape, call.output, first + i), expected.output[i], tolerance), "an output differs from the reference");
    for (int k = 0; k < call.statistics; ++k)
      for (int c = 0; c < used[b] + length[b]; ++c)
        check(call.statistic[k].kind == KV_STATISTIC_NONE || near(present.score(row, k, c), expected.score[k * call.capacity + c], 1e-3),
              "a score differs from the reference");
  }

  std::string describe() const {
    char text[512];
    snprintf(text, sizeof text,
             "VoteAttention%s %s B %d Hq %d H %d T %d C %d D %d Dv %d K %d scale %g alpha %g softcap %g window %d sinks %d lanes",
             hostile ? " hostile" : "", shape.type ? "fp16" : "fp32", call.batch, call.query_heads, call.heads, call.tokens, call.capacity,
             call.key_size, call.value_size, call.statistics, call.scale, call.vote_exponent, call.softcap, call.sliding_window,
             call.sink_logits != nullptr);
    std::string s = text;
    for (int b = 0; b < call.batch; ++b) s += " " + std::to_string(used[b]) + "+" + std::to_string(length[b]);
    for (int k = 0; k < call.statistics; ++k) {
      const KvStatistic& x = call.statistic[k];
      snprintf(text, sizeof text, " (%d %g %d %g)", x.kind, x.decay, x.window, x.recency_weight);
      s += text;
    }
    return s;
  }
};

// ---- MergeCache ----

// Every policy that onnxruntime/merge_cache.h can make; `statistics` is what the method keeps.
KvMergePolicy any_policy(Random& random, int key_size, std::vector<float>& frequencies, int* statistics) {
  KvMergePolicy p{};
  p.compresses = !random.one_in(12);
  p.threshold = -1e38f;
  p.importance = KV_BY_SCORE;
  p.statistic[0].kind = KV_STATISTIC_PROBABILITY;
  p.decay = p.weigh_decay = random.uniform(0.5f, 0.999f);
  p.pool = random.between(1, 6);
  p.merging = random.one_of({KV_DROP, KV_ZIP, KV_ZIP, KV_ZIP, KV_RUNNING_MEAN, KV_PAIR});
  *statistics = 1;
  int own = KV_STATISTIC_PROBABILITY;
  if (p.merging == KV_DROP && random.one_in(3)) {  // streaming, full
    p.importance = KV_BY_POSITION;
    p.statistic[0].kind = KV_STATISTIC_NONE;
  } else if (p.merging == KV_ZIP && random.one_in(2)) {  // ballot
    p.measure = KV_DISTANCE;
    p.recent_receives = 1;
    p.zip = random.one_of({KV_ZIP_VOTE, KV_ZIP_MEAN});
    p.importance = KV_BY_MEAN;
    p.mean_adds = 1;
    own = p.statistic[1].kind = KV_STATISTIC_LOG_EMA;
    *statistics = 2;
  } else if (p.merging == KV_ZIP) {  // keepkv
    p.measure = KV_COSINE;
    p.threshold = random.one_of({-1.0f, 0.0f, 0.1f, 0.8f, 1.0f});
    p.zip = random.one_of({KV_ZIP_KEY, KV_ZIP_VOTE, KV_ZIP_MEAN});
    p.key_factor_max = random.one_of({1.0f, 2.0f, INFINITY});
    p.merge_first = random.between(0, 1);
    p.importance = KV_BY_AVERAGE;
    own = p.statistic[0].kind = KV_STATISTIC_LOG_EMA;
  } else if (p.merging == KV_RUNNING_MEAN) {  // zeromerge
    p.measure = KV_DOT;
    p.voted_last = 1;
    p.residual = random.one_of({0.0f, 0.1f, 0.5f, 1.0f});
  } else if (p.merging == KV_PAIR) {  // kvslimmer, asymkv
    p.weigh = random.one_of({KV_WEIGH_BY_SCORE, KV_WEIGH_BY_HESSIAN});
    p.tau = random.one_of({0.0f, 1e-3f, 0.5f});
    for (int planes = random.between(0, key_size / 2); planes > 0; --planes) frequencies.push_back(random.uniform(0.0f, 1.0f));
    p.rotary_planes = static_cast<int>(frequencies.size());
    p.rotary_interleaved = random.between(0, 1);
  }
  if (random.one_in(3)) {  // another selector, whose statistic comes first; alone it is h2o or snapkv
    p.importance = random.one_of({KV_BY_SCORE, KV_BY_POOLED});
    p.pooled = random.one_of({1, 5, 7, 30});
    p.mean_adds = 0;
    p.statistic[0].kind = KV_STATISTIC_PROBABILITY;
    if (p.merging != KV_DROP) p.statistic[1].kind = own, *statistics = 2;
  }
  return p;
}

struct MergeCase {
  KvMergeCache call{};
  Shape shape{};
  std::vector<float> frequencies;
  std::unique_ptr<Cache> past;
  bool hostile;

  explicit MergeCase(Random& random) : hostile(random.one_in(8)) {
    do {
      shape = any_shape(random, 1);
    } while (static_cast<double>(shape.rows()) * shape.capacity * std::min(shape.capacity, 200) * shape.key_size > 3e7);
    call.policy = any_policy(random, shape.key_size, frequencies, &shape.statistics);
    call.policy.inverse_frequencies = frequencies.data();
    call.type = shape.type, call.batch = shape.batch, call.heads = shape.heads, call.capacity = shape.capacity;
    call.key_size = shape.key_size, call.value_size = shape.value_size, call.statistics = shape.statistics;
    const int leaving = random.one_in(6) ? shape.capacity : random.between(0, std::min(shape.capacity, 100));
    call.budget = std::max(1, shape.capacity - leaving);
    call.sinks = random.one_in(8) ? random.between(0, shape.capacity + 10) : random.between(0, 4);
    call.recent = random.one_in(8) ? random.between(0, shape.capacity + 10) : random.between(0, 1 + shape.capacity / 4);
    call.sliding_window = random.one_in(4) ? random.between(1, shape.capacity + 50) : 0;
    past = std::make_unique<Cache>(random, shape);
    std::vector<int> kinds;
    for (int k = 0; k < shape.statistics; ++k) kinds.push_back(call.policy.statistic[k].kind);
    for (size_t row = 0; row < shape.rows(); ++row) {
      fill_head(random, *past, row, random.one_in(8) ? 0 : random.one_in(2) ? shape.capacity : random.between(0, shape.capacity), kinds, true);
      alter(random, row);
    }
  }

  // Equal scores and keys; in a hostile case numbers that should not be there, and averages of nothing, which a merge has no answer to.
  void alter(Random& random, size_t row) {
    const KvState view = past->view();
    for (int c = 1, used = past->used(row); c < used; ++c) {
      if (random.one_in(8))
        for (int i = 0; i < shape.key_size; ++i) write(shape, view.key, (row * shape.capacity + c) * shape.key_size + i, past->key(row, c - 1, i));
      for (int k = 0; k < shape.statistics; ++k) {
        float& score = view.score[(row * shape.statistics + k) * shape.capacity + c];
        if (random.one_in(8)) score = past->score(row, k, c - 1);
        if (random.one_in(8) && call.policy.statistic[k].kind == KV_STATISTIC_PROBABILITY) score = 0.0f;
        if (hostile && random.one_in(3)) score = random.one_of({NAN, INFINITY, -INFINITY, -1.0f, static_cast<float>(kNothing)});
      }
      if (!hostile || !random.one_in(10)) continue;
      write(shape, view.key, (row * shape.capacity + c) * shape.key_size, random.one_of({NAN, INFINITY, -INFINITY}));
      view.votes[row * shape.capacity + c] = random.one_of({NAN, INFINITY, 1e-38f, -1.0f});
      view.position[row * shape.capacity + c] = random.between(0, 1 << 30);
    }
  }

  void check_all(Random& random) {
    const Cache once = run(random, call, *past, 0, {forwards, nullptr}, kv_cpu_merge_cache);
    for (unsigned in_place : {31u, 0u, static_cast<unsigned>(random.between(1, 30))}) {
      int threads;
      const KvRunner runner = any_runner(random, &threads);
      const Cache again = run(random, call, *past, in_place, runner, kv_cpu_merge_cache);
      for (size_t row = 0; row < shape.rows(); ++row) check_same(again, once, row, in_place);
    }
    if (hostile) return;
    for (size_t row = 0; row < shape.rows(); ++row) check_head(once, row);
  }

  // In place, what lies beyond the slots that were used stays as it is; otherwise it is zero.
  void check_same(const Cache& again, const Cache& once, size_t row, unsigned in_place) const {
    for (int i = 0; i < kTensors; ++i) {
      const size_t slots = i == kScore ? static_cast<size_t>(shape.capacity) * shape.statistics : shape.capacity;
      const size_t bytes = once.width(i) / slots * once.element(i), used = past->used(row);
      const unsigned char *x = again.tensor[i].data<unsigned char>() + row * slots * bytes,
                          *y = (in_place >> i & 1 ? past->tensor[i] : once.tensor[i]).data<unsigned char>() + row * slots * bytes,
                          *z = once.tensor[i].data<unsigned char>() + row * slots * bytes;
      for (size_t c = 0; c < slots; ++c)
        check(memcmp(x + c * bytes, (c % shape.capacity < used ? z : y) + c * bytes, bytes) == 0,
              "in place or on other threads, another cache");
    }
  }

  void check_head(const Cache& present, size_t row) const {
    int used = past->used(row), now = -1, seen = 0, kept = present.used(row);
    for (int c = 0; c < used; ++c) now = std::max(now, past->position(row, c));
    std::vector<std::pair<int32_t, int>> slots;
    for (int c = 0; c < used; ++c)
      if (!call.sliding_window || past->position(row, c) > now - call.sliding_window) slots.push_back({past->position(row, c), c}), ++seen;
    std::sort(slots.begin(), slots.end());
    check(kept == (call.policy.compresses ? std::min(seen, call.budget) : seen), "not as many slots stay as should");
    const bool drops = call.policy.merging == KV_DROP || seen <= call.budget;
    double votes_before = 0.0, votes_after = 0.0;
    for (const auto& slot : slots) votes_before += past->votes(row, slot.second);
    for (int c = 0; c < kept; ++c) {
      const int32_t position = present.position(row, c);
      check(c == 0 || position > present.position(row, c - 1), "slots are not in order of position");
      const auto at = std::lower_bound(slots.begin(), slots.end(), std::make_pair(position, -1));
      check(at != slots.end() && at->first == position, "a position that no slot had");
      if (drops || position < call.sinks || (position > now - call.recent && !call.policy.recent_receives))
        check(present.same_slot(row, c, *past, at->second), "a slot that should not change did");
      check_finite(present, row, c);
      votes_after += present.votes(row, c);
    }
    if (call.policy.zip == KV_ZIP_MEAN || call.policy.merging != KV_ZIP) check(votes_after <= votes_before * 1.0001, "votes came from nowhere");
    if (kept > 0) check_values(present, row, kept, slots);
    for (int i = 0; i < kTensors; ++i)
      for (int k = 0; k < (i == kScore ? shape.statistics : 1); ++k) {
        const size_t width = i == kScore ? 4 : present.width(i) / shape.capacity * present.element(i);
        const size_t start = i == kScore ? row * shape.statistics + k : row;
        const unsigned char* rest = present.tensor[i].data<unsigned char>() + (start * shape.capacity + kept) * width;
        check(std::all_of(rest, rest + (shape.capacity - kept) * width, [](unsigned char x) { return x == 0; }), "an empty slot is not zero");
      }
  }

  void check_finite(const Cache& present, size_t row, int c) const {
    const KvMergePolicy& p = call.policy;
    check(std::isfinite(present.votes(row, c)), "votes are not finite");
    // A key that takes in the votes may grow beyond its type.
    const bool bounded = !(p.merging == KV_ZIP && p.zip == KV_ZIP_KEY && p.key_factor_max > 4.0f);
    for (int i = 0; i < shape.key_size && bounded; ++i) check(std::isfinite(present.key(row, c, i)), "a key is not finite");
    for (int k = 0; k < shape.statistics; ++k) check(std::isfinite(present.score(row, k, c)), "a score is not finite");
  }

  // A merged value is a mean of values.
  void check_values(const Cache& present, size_t row, int kept, const std::vector<std::pair<int32_t, int>>& slots) const {
    for (int i = 0; i < shape.value_size; ++i) {
      float low = INFINITY, high = -INFINITY;
      for (const auto& slot : slots) low = std::min(low, past->value(row, slot.second, i)), high = std::max(high, past->value(row, slot.second, i));
      for (int c = 0; c < kept; ++c) {
        const float x = present.value(row, c, i);
        check(x >= low - 1e-4f && x <= high + 1e-4f, "a value that is no mean of values");
      }
    }
  }

  std::string describe() const {
    const KvMergePolicy& p = call.policy;
    char text[512];
    snprintf(text, sizeof text,
             "MergeCache%s %s B %d H %d C %d D %d Dv %d K %d budget %d sinks %d recent %d window %d merging %d importance %d measure %d "
             "threshold %g zip %d factor %g first %d pool %d pooled %d residual %g weigh %d planes %d",
             hostile ? " hostile" : "", shape.type ? "fp16" : "fp32", call.batch, call.heads, call.capacity,
             call.key_size, call.value_size, call.statistics, call.budget, call.sinks, call.recent, call.sliding_window, p.merging, p.importance,
             p.measure, p.threshold, p.zip, p.key_factor_max, p.merge_first, p.pool, p.pooled, p.residual, p.weigh, p.rotary_planes);
    return text;
  }
};

template <class Case>
bool holds(uint64_t seed) {
  Random random(seed);
  Case one(random);
  try {
    one.check_all(random);
  } catch (const Failure& failure) {
    fprintf(stderr, "kv_fuzz %llu 1 (%s): %s\n  %s\n", static_cast<unsigned long long>(seed), kv_cpu_isa(), failure.what.c_str(),
            one.describe().c_str());
    return false;
  }
  return true;
}

}  // namespace
}  // namespace fuzz

int main(int count, char** arguments) {
  if (count != 3) {
    fprintf(stderr, "kv_fuzz SEED CASES\n");
    return 2;
  }
  const uint64_t seed = strtoull(arguments[1], nullptr, 10), cases = strtoull(arguments[2], nullptr, 10);
  for (uint64_t i = 0; i < cases; ++i)
    if (!fuzz::holds<fuzz::AttentionCase>(seed + i) || !fuzz::holds<fuzz::MergeCase>(seed + i)) return 1;
  printf("%s: %llu cases of each operator\n", kv_cpu_isa(), static_cast<unsigned long long>(cases));
  return 0;
}
