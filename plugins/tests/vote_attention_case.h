// One random call of VoteAttention, and the checks of its result.
#pragma once

#include "reference.h"

namespace fuzz {

struct AttentionCase {
  KvVoteAttention call{};
  Shape shape{};
  std::vector<int> used;    // of each row
  std::vector<int> length;  // of each sequence
  Buffer query, key, value, position, query_length, sink_logits, output;
  std::unique_ptr<Cache> past;
  bool hostile;

  explicit AttentionCase(Random& random) : hostile(random.one_in(8)) {
    draw_shapes(random);
    call.scale = random.one_of({1.0f, 6.0f, 200.0f}) / (4.0f * std::sqrt(static_cast<float>(call.key_size)));
    call.vote_exponent = random.one_of({0.0f, 1.0f, 0.6f});
    call.softcap = random.one_in(4) ? random.uniform(5.0f, 50.0f) : 0.0f;
    call.sliding_window = random.one_in(3) ? random.between(1, shape.largest + 50) : 0;
    std::vector<int> kinds;
    for (int k = 0; k < call.statistics; ++k) {
      const int kind = random.between(0, 2);
      kinds.push_back(kind);
      const float decay = kind != KV_STATISTIC_LOG_EMA && random.one_in(2) ? 1.0f : random.uniform(0.6f, 0.999f);
      call.statistic[k] = {kind, decay, random.one_in(3) ? random.between(1, 100) : 0,
                           random.one_in(3) ? random.uniform(0.3f, 2.0f) : 1.0f};
    }
    past = std::make_unique<Cache>(random, shape);
    draw_lanes(random, kinds);
    draw_tokens(random);
  }

  // Draws sizes until the work is small enough for a sanitizer.
  void draw_shapes(Random& random) {
    do {
      call.tokens = random.one_in(2) ? 1 : random.one_in(20) ? 0 : random.between(1, 96);
      shape = any_shape(random, std::max(call.tokens, 1));
      shape.statistics = call.statistics = random.between(1, 3);
      call.query_heads = shape.heads * random.one_of({1, 1, 2, 3, 4, 5, 7, 8, 16});
    } while (static_cast<double>(shape.batch) * call.query_heads * (call.tokens + 4) * shape.largest *
                 (shape.key_size + shape.value_size) >
             3e7 * work_share);
    draw_capacities(random, std::max(call.tokens, 1), shape);
    shape.in_key = may_be_in_key(shape);
    call.value_prefix = shape.in_key ? shape.value_size : 0;
    call.query_type = shape.type, call.cache_type = shape.cache_type(), call.batch = shape.batch,
    call.heads = shape.heads, call.slots = shape.slots(), call.capacity = shape.capacities.data();
    call.key_size = shape.key_size, call.value_size = shape.value_size;
  }

  void draw_lanes(Random& random, const std::vector<int>& kinds) {
    position = Buffer(random, static_cast<size_t>(call.batch) * call.tokens, 8);
    query_length = Buffer(random, call.batch, 8);
    for (int b = 0; b < call.batch; ++b) {
      length.push_back(random.one_in(4) ? 0 : random.one_in(2) ? call.tokens : random.between(0, call.tokens));
      const bool empty = random.one_in(4), to_the_brim = random.one_in(4);
      int first = 0;
      for (int h = 0; h < call.heads; ++h) {
        used.push_back(to_the_brim ? shape.capacities[h] - length[b]
                       : empty     ? 0
                                   : random.between(0, shape.capacities[h] - call.tokens));
        first =
            std::max(first, fill_head(random, *past, used.size() - 1, used.back(), kinds, call.vote_exponent != 0.0f));
      }
      if (hostile) draw_positions(random, b, first);
      for (int t = 0; t < call.tokens; ++t)
        position.data<int64_t>()[b * call.tokens + t] = t < std::max(length[b], 1) ? first + t : -1;
      query_length.data<int64_t>()[b] = length[b];
      if (!hostile) continue;
      query_length.data<int64_t>()[b] = random.between(-3, call.tokens + 3);
      if (call.tokens > 0 && random.one_in(4))
        position.data<int64_t>()[b * call.tokens] = random.one_of({INT64_MIN, int64_t{-1}, INT64_MAX});
    }
    call.position = position.data<int64_t>();
    call.query_length = query_length.data<int64_t>();
  }

  // Draws positions that no cache has, of any size and beyond the new tokens; and votes that are no prefix.
  void draw_positions(Random& random, int b, int first) {
    const bool holes = random.one_in(3);
    for (int i = 0; i < call.slots; ++i)
      if (holes && random.one_in(4))
        past->tensor[kVotes].data<float>()[b * call.slots + i] = random.one_of({NAN, -1.0f, 0.0f, 1.0f, INFINITY});
      else if (random.one_in(4))
        past->tensor[kPosition].data<int32_t>()[b * call.slots + i] =
            random.one_of({INT32_MIN, -1, INT32_MAX - random.between(0, 200), first + random.between(0, 200)});
  }

  // Padding rows stay NaN.
  void draw_rows(Random& random, Buffer& buffer, int heads, int size) {
    const size_t count = static_cast<size_t>(call.batch) * heads * call.tokens * size;
    buffer = Buffer(random, count, shape.element());
    Normals normal(random, count);
    for (int b = 0; b < call.batch; ++b)
      for (int h = 0; h < heads; ++h)
        for (size_t i = 0; i < static_cast<size_t>(hostile ? call.tokens : length[b]) * size; ++i)
          write(shape, buffer.data<void>(), (static_cast<size_t>(b) * heads + h) * call.tokens * size + i,
                hostile && random.one_in(50) ? random.one_of({NAN, INFINITY, -INFINITY}) : normal());
  }

  void draw_tokens(Random& random) {
    draw_rows(random, query, call.query_heads, call.key_size);
    draw_rows(random, key, call.heads, call.key_size);
    draw_rows(random, value, call.heads, call.value_size);
    const size_t rows = static_cast<size_t>(call.batch) * call.heads * call.tokens;
    for (size_t row = 0; row < rows && shape.in_key; ++row)
      memcpy(value.data<unsigned char>() + row * call.value_size * shape.element(),
             key.data<unsigned char>() + row * call.key_size * shape.element(), call.value_size * shape.element());
    call.query = query.data<void>(), call.key = key.data<void>(), call.value = value.data<void>();
    if (!random.one_in(4)) return;
    sink_logits = Buffer(random, call.query_heads, 4);
    for (int i = 0; i < call.query_heads; ++i) sink_logits.data<float>()[i] = 3.0f * random.normal();
    call.sink_logits = sink_logits.data<float>();
  }

  Cache attempt(Random& random, unsigned in_place, KvRunner runner) {
    output = Buffer(random, static_cast<size_t>(call.batch) * call.query_heads * call.tokens * call.value_size,
                    shape.element());
    call.output = output.data<void>();
    Cache present = run(random, call, *past, in_place, runner, kv_cpu_vote_attention);
    for (const Buffer* buffer : {&query, &key, &value, &position, &query_length, &sink_logits, &output})
      buffer->check_canaries();
    return present;
  }

  void check_all(Random& random) {
    const std::array<Buffer, 6> inputs{query, key, value, position, query_length, sink_logits};
    const Cache once = attempt(random, 0, {forwards, nullptr});
    const Buffer whole = output;
    for (unsigned in_place : {kAllInPlace, 0u, static_cast<unsigned>(random.between(1, kAllInPlace - 1))}) {
      int threads;
      const Cache again = attempt(random, in_place, any_runner(random, &threads));
      check(again.same(once), "in place or on other threads, another cache");
      check(output.same(whole), "in place or on other threads, another output");
    }
    size_t i = 0;
    for (const Buffer* buffer : {&query, &key, &value, &position, &query_length, &sink_logits})
      check(buffer->same(inputs[i++]), "wrote into an input");
    if (hostile) return;
    for (size_t row = 0; row < shape.rows(); ++row) check_head(once, row);
    if (shape.rows()) check_figures(once, random.between(0, static_cast<int>(shape.rows()) - 1));
  }

  // Checks the appended slots, the unchanged ones, and that numbers are finite.
  void check_head(const Cache& present, size_t row) const {
    const int b = static_cast<int>(row / call.heads), from = used[row], n = length[b],
              group = call.query_heads / call.heads;
    check(present.used(row) == from + n, "used slots are not the old and the new ones");
    for (int c = 0; c < shape.capacity(row); ++c) {
      if (n == 0 || c >= from + n) {
        check(present.same_slot(row, c, *past, c), n ? "an empty slot changed" : "an idle lane changed");
        continue;
      }
      const size_t token = row * call.tokens + c - from;
      const bool is_new = c >= from;
      const auto added = [&](const void* rows, int size) {
        std::vector<double> row(size);
        for (int i = 0; i < size; ++i) row[i] = read(shape, rows, token * size + i);
        if (shape.quantized) hadamard(row);
        return row;
      };
      const std::vector<double> key = is_new ? added(call.key, call.key_size) : std::vector<double>(),
                                value = is_new ? added(call.value, call.value_size) : std::vector<double>();
      // A new row of a quantized cache is as near as half a step, and float32's rounding of its sums; of int4 as near
      // as any of the sixteen, and int8's rounding.
      const auto right = [&](double actual, double expected, int tensor) {
        const double step = present.scale(tensor == kKey ? kKeyScale : kValueScale, row, c);
        if (!shape.quantized) return actual == expected;
        if (!shape.is_int4(tensor)) return std::fabs(actual - expected) <= 0.5001 * step + 1e-5;
        return std::all_of(std::begin(kInt4), std::end(kInt4), [&](int number) {
          return std::fabs(actual - expected) <= std::fabs(number * step - expected) + 1.0001 * step + 1e-5;
        });
      };
      for (int i = 0; i < call.key_size; ++i)
        check(is_new ? right(present.key(row, c, i), key[i], kKey) : present.key(row, c, i) == past->key(row, c, i),
              "a key is wrong");
      for (int i = 0; i < call.value_size; ++i)
        check(is_new ? right(present.value(row, c, i), value[i], kValue)
                     : present.value(row, c, i) == past->value(row, c, i),
              "a value is wrong");
      check(present.votes(row, c) == (is_new ? 1.0f : past->votes(row, c)), "votes are wrong");
      check(present.position(row, c) == (is_new ? call.position[b * call.tokens] + c - from : past->position(row, c)),
            "a position is wrong");
      for (int k = 0; k < call.statistics; ++k)
        check(std::isfinite(present.score(row, k, c)) || call.statistic[k].kind == KV_STATISTIC_NONE,
              "a score is not finite");
    }
    const size_t rows = (static_cast<size_t>(b) * call.query_heads + row % call.heads * group) * call.tokens;
    for (int g = 0; g < group; ++g)
      for (int t = 0; t < call.tokens; ++t)
        for (int i = 0; i < call.value_size; ++i) {
          const float x = read(shape, call.output, (rows + g * call.tokens + t) * call.value_size + i);
          check(t < n ? std::isfinite(x) : x == 0.0f,
                t < n ? "an output is not finite" : "the output of padding is not 0");
        }
  }

  void check_figures(const Cache& present, size_t row) const {
    const int b = static_cast<int>(row / call.heads), group = call.query_heads / call.heads;
    const Expected expected = Reference(call, *past, present, row, used[row], length[b]).compute();
    if (length[b] == 0) return;
    // A logit of 200 is known to 1e-5, and its exponential to no more.
    const double tolerance = shape.type == KV_FLOAT16 ? 3e-3 : 1e-3;
    const size_t first =
        (static_cast<size_t>(b) * call.query_heads + row % call.heads * group) * call.tokens * call.value_size;
    for (size_t i = 0; i < expected.output.size(); ++i)
      check(near(read(shape, call.output, first + i), expected.output[i], tolerance),
            "an output differs from the reference");
    for (int k = 0; k < call.statistics; ++k)
      for (int c = 0; c < used[row] + length[b]; ++c)
        check(call.statistic[k].kind == KV_STATISTIC_NONE ||
                  near(present.score(row, k, c), expected.score[k * shape.capacity(row) + c], 1e-3),
              "a score differs from the reference");
  }

  std::string describe() const {
    char text[512];
    snprintf(
        text, sizeof text,
        "VoteAttention%s %s B %d Hq %d H %d T %d C%s D %d Dv %d prefix %d K %d scale %g alpha %g softcap %g window %d "
        "sinks %d lanes",
        hostile ? " hostile" : "", shape.name(), call.batch, call.query_heads, call.heads, call.tokens,
        text_of(shape.capacities).c_str(), call.key_size, call.value_size, call.value_prefix, call.statistics,
        call.scale, call.vote_exponent, call.softcap, call.sliding_window, call.sink_logits != nullptr);
    std::string s = text;
    for (size_t row = 0; row < used.size(); ++row)
      s += " " + std::to_string(used[row]) + "+" + std::to_string(length[row / call.heads]);
    for (int k = 0; k < call.statistics; ++k) {
      const KvStatistic& x = call.statistic[k];
      snprintf(text, sizeof text, " (%d %g %d %g)", x.kind, x.decay, x.window, x.recency_weight);
      s += text;
    }
    return s;
  }
};

}  // namespace fuzz
