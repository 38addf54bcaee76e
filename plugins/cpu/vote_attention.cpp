// VoteAttention for one instruction set. The meaning is kvexport/ops/vote_attention.py; the letters are the contract's.
//
// One token per sequence (decode): all logits of a KV head's group, then all products with the values, so that every key and every
// value is read once. Several (prefill): blocks of the cache against tiles of query rows with a running softmax, so that only a tile
// of logits ever exists. A row of a tile is one query head of one token.
#include <cmath>
#include <type_traits>

#include "kernels.h"
#include "scratch.h"
#include "simd.h"
#include "tile.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr float kLowest = -3e38f;
constexpr int kAhead = 12288;

// Where splits of one head leave what `finish` puts together.
struct Partials {
  Scratch<float> data;
  size_t stride = 0;
  float* of(size_t task) const { return data.get() + task * stride; }
};

template <class T>
struct Attention {
  const KvVoteAttention& a;
  int group, splits;
  Partials partials;

  Attention(const KvVoteAttention& call, int splits) : a(call), group(call.query_heads / call.heads), splits(splits) {
    if (splits > 1) {
      size_t rows = static_cast<size_t>(group) * (2 * a.capacity + a.value_size + 2);
      partials.stride = a.tokens == 1 ? rows : 2 * static_cast<size_t>(a.statistics) * a.capacity;
      partials.data.reserve(partials.stride * a.batch * a.heads * splits);
    }
  }

  // One KV head of one sequence.
  struct Head {
    int b, h, used, n;
    const T *past_key, *past_value, *key, *value;
    T *present_key, *present_value;
    const float *past_votes, *past_score;
    float *votes, *score;
    const int32_t* past_position;
    int32_t* position;
    int64_t first;  // the first new token's position
    int total() const { return used + n; }
  };

  Head head(size_t index) const {
    Head x;
    x.b = static_cast<int>(index / a.heads);
    x.h = static_cast<int>(index % a.heads);
    const size_t c = a.capacity, t = a.tokens, d = a.key_size, dv = a.value_size, k = a.statistics;
    x.past_votes = a.past.votes + index * c;
    x.past_position = a.past.position + index * c;
    x.past_score = a.past.score + index * k * c;
    x.past_key = static_cast<const T*>(a.past.key) + index * c * d;
    x.past_value = static_cast<const T*>(a.past.value) + index * c * dv;
    x.votes = a.present.votes + index * c;
    x.position = a.present.position + index * c;
    x.score = a.present.score + index * k * c;
    x.present_key = static_cast<T*>(a.present.key) + index * c * d;
    x.present_value = static_cast<T*>(a.present.value) + index * c * dv;
    x.key = static_cast<const T*>(a.key) + index * t * d;
    x.value = static_cast<const T*>(a.value) + index * t * dv;
    x.first = t > 0 ? a.position[x.b * t] : 0;
    // Used slots are a prefix, so where it ends is found without reading all votes.
    int low = 0, high = a.capacity;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (x.past_votes[middle] > 0.0f) low = middle + 1;
      else high = middle;
    }
    x.used = low;
    const int64_t length = a.query_length[x.b], room = min_of(a.tokens, a.capacity - x.used);
    x.n = static_cast<int>(length < 0 ? 0 : length > room ? room : length);
    return x;
  }

  // Copies what is not bound in place, and writes the new tokens.
  void append(const Head& x) const {
    const size_t c = a.capacity, d = a.key_size, dv = a.value_size;
    if (x.present_key != x.past_key) memcpy(x.present_key, x.past_key, x.used * d * sizeof(T));
    if (x.present_value != x.past_value) memcpy(x.present_value, x.past_value, x.used * dv * sizeof(T));
    if (x.votes != x.past_votes) memcpy(x.votes, x.past_votes, x.used * sizeof(float));
    if (x.position != x.past_position) memcpy(x.position, x.past_position, x.used * sizeof(int32_t));
    memcpy(x.present_key + x.used * d, x.key, x.n * d * sizeof(T));
    memcpy(x.present_value + x.used * dv, x.value, x.n * dv * sizeof(T));
    for (int i = 0; i < x.n; ++i) {
      x.votes[x.used + i] = 1.0f;
      x.position[x.used + i] = static_cast<int32_t>(x.first + i);
    }
    const size_t rest = c - x.total();
    if (x.present_key != x.past_key) memcpy(x.present_key + x.total() * d, x.past_key + x.total() * d, rest * d * sizeof(T));
    if (x.present_value != x.past_value)
      memcpy(x.present_value + x.total() * dv, x.past_value + x.total() * dv, rest * dv * sizeof(T));
    if (x.votes != x.past_votes) memcpy(x.votes + x.total(), x.past_votes + x.total(), rest * sizeof(float));
    if (x.position != x.past_position) memcpy(x.position + x.total(), x.past_position + x.total(), rest * sizeof(int32_t));
    if (x.score != x.past_score) {
      const size_t scored = x.n == 0 ? 0 : x.total();  // the scores of these are written elsewhere
      for (int k = 0; k < a.statistics; ++k)
        memcpy(x.score + k * c + scored, x.past_score + k * c + scored, (c - scored) * sizeof(float));
    }
  }

  const T* key_row(const Head& x, int slot) const {
    return slot < x.used ? x.past_key + static_cast<size_t>(slot) * a.key_size
                         : x.key + static_cast<size_t>(slot - x.used) * a.key_size;
  }
  const T* value_row(const Head& x, int slot) const {
    return slot < x.used ? x.past_value + static_cast<size_t>(slot) * a.value_size
                         : x.value + static_cast<size_t>(slot - x.used) * a.value_size;
  }
  int64_t slot_position(const Head& x, int slot) const {
    return slot < x.used ? x.past_position[slot] : x.first + (slot - x.used);
  }

  // alpha ln(votes) of slots [from, to); kLogZero where the query at position `now` does not see the slot for its window.
  void bias(const Head& x, int from, int to, int64_t now, float* out) const {
    const int old = min_of(to, x.used);
    int c = from;
    if (a.vote_exponent != 0.0f) {
      for (; c + W <= old; c += W) store(out + c - from, a.vote_exponent * log(load(x.past_votes + c)));
      for (; c < old; ++c) out[c - from] = a.vote_exponent * std::log(x.past_votes[c]);
    } else {
      for (; c < old; ++c) out[c - from] = 0.0f;
    }
    for (; c < to; ++c) out[c - from] = 0.0f;
    if (a.sliding_window)
      for (c = from; c < to; ++c)
        if (slot_position(x, c) <= now - a.sliding_window) out[c - from] = kLogZero;
  }

  vf capped(vf logit) const {
    if (a.softcap == 0.0f) return logit;
    return a.softcap * (1.0f - 2.0f / (exp(logit * (2.0f / a.softcap)) + 1.0f));  // softcap * tanh(logit / softcap)
  }

  // ---- decode ----

  // Of slots [from, to) of a head: logits and exp(biased - top) [G, capacity], per query head its top and sum, and the products.
  void decode(const Head& x, int from, int to, float* logits, float* weights, float* top, float* total, float* product) const {
    const int d = a.key_size, dv = a.value_size;
    static thread_local Scratch<float> scratch;
    float *query = scratch.reserve(static_cast<size_t>(group) * d + (to - from) + W), *slot_bias = query + group * d;
    for (int g = 0; g < group; ++g) {
      const T* row = static_cast<const T*>(a.query) + (static_cast<size_t>(x.b) * a.query_heads + x.h * group + g) * d;
      for (int i = 0; i < d; ++i) query[g * d + i] = static_cast<float>(row[i]) * a.scale;
    }
    for_each_block(from, to, [&](int c, int end) {
      for_each_rows([&](auto rows, int g) {
        decode_logits<decltype(rows)::value>(x, c, end, query + g * d, logits + static_cast<size_t>(g) * a.capacity);
      });
    });
    bias(x, from, to, x.first, slot_bias);
    for (int g = 0; g < group; ++g) {
      float *l = logits + static_cast<size_t>(g) * a.capacity, *w = weights + static_cast<size_t>(g) * a.capacity;
      float best = kLowest;
      int c = from;
      vf best_v = splat(kLowest);
      for (; c + W <= to; c += W) {
        vf logit = capped(load(l + c)), biased = logit + load(slot_bias + c - from);
        store(l + c, logit);
        store(w + c, biased);
        best_v = vmax(best_v, biased);
      }
      best = max(best_v);
      for (; c < to; ++c) {
        if (a.softcap != 0.0f) l[c] = a.softcap * std::tanh(l[c] / a.softcap);
        w[c] = l[c] + slot_bias[c - from];
        best = max_of(best, w[c]);
      }
      vf sum_v{};
      for (c = from; c + W <= to; c += W) {
        vf e = exp(load(w + c) - best);
        store(w + c, e);
        sum_v += e;
      }
      float rest = 0.0f;
      for (; c < to; ++c) rest += w[c] = std::exp(w[c] - best);
      top[g] = best;
      total[g] = sum(sum_v) + rest;
    }
    for (int i = 0; i < group * dv; ++i) product[i] = 0.0f;
    for_each_block(from, to, [&](int c, int end) {
      for_each_rows([&](auto rows, int g) {
        decode_product<decltype(rows)::value>(x, c, end, weights + static_cast<size_t>(g) * a.capacity, product + g * dv);
      });
    });
  }

  // Blocks of slots small enough to stay in the first cache while all query heads and all columns pass over them.
  template <class F>
  static void for_each_block(int from, int to, F body) {
    constexpr int slots = 32;
    for (int c = from; c < to; c += slots) body(c, min_of(c + slots, to));
  }

  // The query heads of a group by fours, twos and ones: body(integral_constant, first).
  template <class F>
  void for_each_rows(F body) const {
    int g = 0;
    for (; g + 4 <= group; g += 4) body(std::integral_constant<int, 4>(), g);
    for (; g + 2 <= group; g += 2) body(std::integral_constant<int, 2>(), g);
    for (; g < group; ++g) body(std::integral_constant<int, 1>(), g);
  }

  // What comes 12 KB after `count` elements from `row` on, into the second cache: the machine's own prefetching stops at the end of a
  // page, and reads and arithmetic would take turns (71 % of the bandwidth instead of 90 % on an EPYC 9004).
  static void prefetch(const T* row, int count) {
    const char* ahead = reinterpret_cast<const char*>(row) + kAhead;
    for (size_t i = 0; i < count * sizeof(T); i += 64) __builtin_prefetch(ahead + i, 0, 2);
  }

  // Logits of R query heads; S slots at a time, so that R S sums over lanes are one.
  template <int R>
  void decode_logits(const Head& x, int from, int to, const float* query, float* logits) const {
    constexpr int S = R < W ? W / R : 1, N = R * S / W;
    const int d = a.key_size, whole = d / W * W;
    int c = from;
    for (; c + S <= to; c += S) {
      const T* row[S];
      for (int s = 0; s < S; ++s) row[s] = key_row(x, c + s);
      if (R == 4 || group < 4) prefetch(row[0], S * d);
      vf total[R * S] = {};
      for (int i = 0; i < whole; i += W) {
        vf key[S];
        for (int s = 0; s < S; ++s) key[s] = load(row[s] + i);
        for (int r = 0; r < R; ++r) {
          const vf q = load(query + r * d + i);
          for (int s = 0; s < S; ++s) total[r * S + s] += q * key[s];
        }
      }
      float out[R * S];
      for (int n = 0; n < N; ++n) store(out + n * W, sums<1>(total + n * W));
      for (int r = 0; r < R; ++r)
        for (int s = 0; s < S; ++s) {
          float rest = 0.0f;
          for (int i = whole; i < d; ++i) rest += static_cast<float>(row[s][i]) * query[r * d + i];
          logits[static_cast<size_t>(r) * a.capacity + c + s] = out[r * S + s] + rest;
        }
    }
    for (; c < to; ++c)
      for (int r = 0; r < R; ++r) logits[static_cast<size_t>(r) * a.capacity + c] = dot(key_row(x, c), query + r * d, d);
  }

  template <int R>
  void decode_product(const Head& x, int from, int to, const float* weights, float* out) const {
    const int dv = a.value_size;
    int i = 0;
    for (; i + 4 * W <= dv; i += 4 * W) decode_columns<R, 4>(x, from, to, weights, out, i);
    for (; i + W <= dv; i += W) decode_columns<R, 1>(x, from, to, weights, out, i);
    for (; i < dv; ++i)
      for (int r = 0; r < R; ++r) {
        float total = 0.0f;
        for (int c = from; c < to; ++c) total += weights[static_cast<size_t>(r) * a.capacity + c] * static_cast<float>(value_row(x, c)[i]);
        out[r * dv + i] += total;
      }
  }

  template <int R, int N>
  void decode_columns(const Head& x, int from, int to, const float* weights, float* out, int column) const {
    vf total[R][N];
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < N; ++j) total[r][j] = load(out + r * a.value_size + column + j * W);
    for (int c = from; c < to; ++c) {
      const T* row = value_row(x, c) + column;
      prefetch(row, N * W);
      vf value[N];
      for (int j = 0; j < N; ++j) value[j] = load(row + j * W);
      for (int r = 0; r < R; ++r) {
        const float weight = weights[static_cast<size_t>(r) * a.capacity + c];
        for (int j = 0; j < N; ++j) total[r][j] += weight * value[j];
      }
    }
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < N; ++j) store(out + r * a.value_size + column + j * W, total[r][j]);
  }

  // Scores of a head after a call of one token. share[g]: what turns exp(biased - top of its split) into a probability.
  void decode_scores(const Head& x, int from, int to, const float* logits, const float* weights, const float* share) const {
    static thread_local Scratch<float> scratch;
    for (int k = 0; k < a.statistics; ++k) {
      const KvStatistic& s = a.statistic[k];
      const float *past = x.past_score + static_cast<size_t>(k) * a.capacity;
      float* out = x.score + static_cast<size_t>(k) * a.capacity;
      if (s.kind == KV_STATISTIC_NONE) {
        if (out != past) memcpy(out + from, past + from, (to - from) * sizeof(float));
        continue;
      }
      if (s.kind == KV_STATISTIC_PROBABILITY) {
        const float weight = s.recency_weight / static_cast<float>(group);
        for (int c = from; c < to; ++c) {
          float seen = 0.0f;
          for (int g = 0; g < group; ++g) seen += weights[static_cast<size_t>(g) * a.capacity + c] * share[g];
          out[c] = (c < x.used ? past[c] * s.decay : 0.0f) + weight * seen;
        }
        continue;
      }
      const int count = to - from;
      float* seen = scratch.reserve(count + W);
      bias(x, from, to, x.first, seen);  // tells which slots the window hides
      const float log_share = std::log(1.0f - s.decay) - std::log(static_cast<float>(group)), log_decay = std::log(s.decay);
      int c = from;
      for (; c + W <= to; c += W) {
        vi hidden = load(seen + c - from) == kLogZero;
        vf term = select(hidden, splat(kLogZero), splat(log_share));
        vf start = load(past + c) + log_decay;
        if (c + W > x.used)
          for (int i = 0; i < W; ++i)
            if (c + i >= x.used) start[i] = kLogZero;
        vf top = start;
        for (int g = 0; g < group; ++g) top = vmax(top, load(logits + static_cast<size_t>(g) * a.capacity + c) + term);
        vf total = exp(start - top);
        for (int g = 0; g < group; ++g) total += exp(load(logits + static_cast<size_t>(g) * a.capacity + c) + term - top);
        store(out + c, top + log(total));
      }
      for (; c < to; ++c) {
        const float term = seen[c - from] == kLogZero ? kLogZero : log_share;
        const float start = c < x.used ? past[c] + log_decay : kLogZero;
        float top = start, total = 0.0f;
        for (int g = 0; g < group; ++g) top = max_of(top, logits[static_cast<size_t>(g) * a.capacity + c] + term);
        for (int g = 0; g < group; ++g) total += std::exp(logits[static_cast<size_t>(g) * a.capacity + c] + term - top);
        out[c] = top + std::log(total + std::exp(start - top));
      }
    }
  }

  void write_output(const Head& x, int g, int t, const float* row, float factor) const {
    const int dv = a.value_size;
    T* out = static_cast<T*>(a.output) + ((static_cast<size_t>(x.b) * a.query_heads + x.h * group + g) * a.tokens + t) * dv;
    for (int i = 0; i < dv; ++i) out[i] = static_cast<T>(row[i] * factor);
  }

  void clear_output(const Head& x, int from) const {
    for (int g = 0; g < group; ++g) {
      T* out = static_cast<T*>(a.output) + (static_cast<size_t>(x.b) * a.query_heads + x.h * group + g) * a.tokens * a.value_size;
      memset(static_cast<void*>(out + static_cast<size_t>(from) * a.value_size), 0,
             static_cast<size_t>(a.tokens - from) * a.value_size * sizeof(T));
    }
  }

  struct Range {
    int from, to;
  };

  // Slots of split `s` of `total`.
  Range slots_of(int s, int total) const {
    const int each = ((total + splits - 1) / splits + W - 1) / W * W;
    return {min_of(s * each, total), min_of((s + 1) * each, total)};
  }

  // A split's part of the partials: logits and weights [G, capacity], products [G, Dv], tops and sums [G].
  struct DecodePart {
    float *logits, *weights, *product, *top, *total;
    DecodePart(float* p, int group, int capacity, int dv)
        : logits(p), weights(p + static_cast<size_t>(group) * capacity), product(weights + static_cast<size_t>(group) * capacity),
          top(product + group * dv), total(top + group) {}
  };

  void decode_task(size_t task) {
    const Head x = head(task / splits);
    const int s = static_cast<int>(task % splits);
    if (x.n == 0) return;
    static thread_local Scratch<float> own;
    const size_t size = static_cast<size_t>(group) * (2 * a.capacity + a.value_size + 2);
    const DecodePart part(splits == 1 ? own.reserve(size) : partials.of(task), group, a.capacity, a.value_size);
    const auto [from, to] = slots_of(s, x.total());
    decode(x, from, to, part.logits, part.weights, part.top, part.total, part.product);
    if (splits == 1) finish_decode(x, part);
  }

  // Puts the splits of a head together in their order: output, scores, and the new token's slot.
  void finish_decode(const Head& x, const DecodePart& whole) {
    static thread_local Scratch<float> scratch;
    float *shares = scratch.reserve(static_cast<size_t>(splits) * group + a.value_size), *row = shares + splits * group;
    const size_t first_task = (static_cast<size_t>(x.b) * a.heads + x.h) * splits;
    auto part_of = [&](int s) {
      return splits == 1 ? whole : DecodePart(partials.of(first_task + s), group, a.capacity, a.value_size);
    };
    for (int g = 0; g < group; ++g) {
      const float* sink = a.sink_logits ? a.sink_logits + x.h * group + g : nullptr;
      float top = sink ? *sink : kLowest, total = 0.0f;
      for (int s = 0; s < splits; ++s) top = max_of(top, part_of(s).top[g]);
      if (sink) total = std::exp(*sink - top);
      for (int i = 0; i < a.value_size; ++i) row[i] = 0.0f;
      for (int s = 0; s < splits; ++s) {
        const DecodePart part = part_of(s);
        const float factor = std::exp(part.top[g] - top);
        total += factor * part.total[g];
        shares[static_cast<size_t>(s) * group + g] = factor;
        for (int i = 0; i < a.value_size; ++i) row[i] += factor * part.product[g * a.value_size + i];
      }
      for (int s = 0; s < splits; ++s) shares[static_cast<size_t>(s) * group + g] /= total;
      write_output(x, g, 0, row, 1.0f / total);
    }
    for (int s = 0; s < splits; ++s) {
      const DecodePart part = part_of(s);
      const auto [from, to] = slots_of(s, x.total());
      decode_scores(x, from, to, part.logits, part.weights, &shares[static_cast<size_t>(s) * group]);
    }
  }

  // ---- prefill ----

  // A block of the cache, packed: keys [D, kBlock] transposed, values [kBlock, padded Dv], both float32.
  struct Block {
    int from, count;
    float *key, *value, *bias;
    int32_t* position;
    bool plain;  // every row sees every slot
  };

  int padded_value_size() const { return (a.value_size + W - 1) / W * W; }

  void pack(const Head& x, Block& block) const {
    const int d = a.key_size, dv = a.value_size, dvp = padded_value_size();
    static thread_local Scratch<float> scratch;
    float* row = scratch.reserve(d);
    for (int c = 0; c < kBlock; ++c) {
      const int slot = block.from + c;
      if (c < block.count) {
        widen(key_row(x, slot), row, d);
        for (int i = 0; i < d; ++i) block.key[i * kBlock + c] = row[i];
        widen(value_row(x, slot), block.value + c * dvp, dv);
        for (int i = dv; i < dvp; ++i) block.value[c * dvp + i] = 0.0f;
        block.position[c] = static_cast<int32_t>(slot_position(x, slot));
      } else {
        for (int i = 0; i < d; ++i) block.key[i * kBlock + c] = 0.0f;
        block.position[c] = INT32_MAX;  // later than any query
      }
    }
    for (int c = block.count; c < kBlock; ++c) block.bias[c] = kLogZero;
    const int window = a.sliding_window;
    // Positions decide what is hidden, so the bias here knows the votes alone.
    for (int c = 0; c < block.count; ++c) {
      const int slot = block.from + c;
      block.bias[c] = slot < x.used && a.vote_exponent != 0.0f ? x.past_votes[slot] : 1.0f;
    }
    if (a.vote_exponent != 0.0f)
      for (int c = 0; c < block.count; c += W) {
        vf v = a.vote_exponent * log(load(block.bias + c));
        for (int i = 0; i < W && c + i < block.count; ++i) block.bias[c + i] = v[i];
      }
    else
      for (int c = 0; c < block.count; ++c) block.bias[c] = 0.0f;
    block.plain = window == 0 && block.count == kBlock && block.from + kBlock <= x.used;
  }

  // Logits [kTileRows, kBlock] of packed rows query [D, kTileRows].
  void tile_logits(const float* query, const Block& block, float* logits) const {
    tile_products(query, block.key, a.key_size, logits);
    if (a.softcap == 0.0f) return;
    for (int i = 0; i < kTileRows * kBlock; i += W) store(logits + i, capped(load(logits + i)));
  }

  // rows [kTileRows, Dv padded] = rows * factor + weights [kTileRows, kBlock] x values.
  template <int N>
  void tile_product(const float* weights, const Block& block, const float* factor, float* rows, int column) const {
    const int dvp = padded_value_size();
    vf total[kTileRows][N];
    for (int r = 0; r < kTileRows; ++r)
      for (int j = 0; j < N; ++j) total[r][j] = load(rows + r * dvp + column + j * W) * factor[r];
    const float* v = block.value + column;
    for (int c = 0; c < block.count; ++c, v += dvp) {
      vf value[N];
      for (int j = 0; j < N; ++j) value[j] = load(v + j * W);
      for (int r = 0; r < kTileRows; ++r)
        for (int j = 0; j < N; ++j) total[r][j] += weights[r * kBlock + c] * value[j];
    }
    for (int r = 0; r < kTileRows; ++r)
      for (int j = 0; j < N; ++j) store(rows + r * dvp + column + j * W, total[r][j]);
  }

  // Positions that the tokens of a tile's rows see: (low, now].
  struct Rows {
    int first, count;
    int32_t now[kTileRows], low[kTileRows];
  };

  Rows rows_of(const Head& x, int first, int last) const {
    Rows rows{first, min_of(kTileRows, last - first), {}, {}};
    for (int r = 0; r < kTileRows; ++r) {
      const int t = (first + min_of(r, rows.count - 1)) / group;
      rows.now[r] = static_cast<int32_t>(x.first + t);
      rows.low[r] = a.sliding_window ? rows.now[r] - a.sliding_window : -1;
    }
    return rows;
  }

  vi visible(const Block& block, const Rows& rows, int r, int column) const {
    const vi held = load_i(block.position + column);
    return (held <= rows.now[r]) & (held > rows.low[r]);
  }

  // Adds a tile's rows to ln sum exp per slot, kept as its top and the sum relative to it [2, capacity].
  void accumulate_log(const Block& block, const Rows& rows, const float* logits, const float* log_share, float* tops, float* sums) const {
    for (int column = 0; column < kBlock && column < block.count; column += W) {
      vf term[kTileRows], old = load(tops + block.from + column), top = old;
      for (int r = 0; r < rows.count; ++r) {
        term[r] = load(logits + r * kBlock + column) + log_share[r];
        if (!block.plain) term[r] = select(visible(block, rows, r, column), term[r], splat(kLogZero));
        top = vmax(top, term[r]);
      }
      vf total = load(sums + block.from + column) * exp(old - top);
      for (int r = 0; r < rows.count; ++r) total += exp(term[r] - top);
      store(tops + block.from + column, top);
      store(sums + block.from + column, total);
    }
  }

  // A prefill task: rows [first, last) of a head against its whole cache.
  struct Prefill {
    int first, last;
    size_t padded;  // rows, a whole number of tiles
    Scratch<float> query, rows, top, total, log_share, columns;
    float tile[kTileRows * kBlock];
  };

  // The columns (statistics): tops and sums for log_ema, the sum alone for probability; [K, 2, capacity + padding].
  size_t column_stride() const { return a.capacity + kBlock; }

  void prefill_task(size_t task) {
    const Head x = head(task / splits);
    const int s = static_cast<int>(task % splits);
    if (x.n == 0) return;
    static thread_local Prefill p;
    static thread_local Scratch<float> packed;
    int32_t positions[kBlock];
    const int rows_in_all = x.n * group, tiles_in_all = (rows_in_all + kTileRows - 1) / kTileRows;
    const int tiles_each = (tiles_in_all + splits - 1) / splits;
    p.first = min_of(s * tiles_each * kTileRows, rows_in_all);
    p.last = min_of((s + 1) * tiles_each * kTileRows, rows_in_all);
    const int tiles = (p.last - p.first + kTileRows - 1) / kTileRows, d = a.key_size, dvp = padded_value_size();
    pack_queries(x, p, tiles);
    p.rows.reserve(p.padded * dvp, 0.0f);
    p.columns.reserve(2 * a.statistics * column_stride(), 0.0f);
    for (int k = 0; k < a.statistics; ++k)
      for (size_t c = 0; c < column_stride(); ++c) p.columns.get()[2 * k * column_stride() + c] = kLogZero;
    float* keys = packed.reserve(static_cast<size_t>(kBlock) * (d + dvp + 1) + W);
    Block block{0, 0, keys, keys + kBlock * d, keys + kBlock * (d + dvp), positions, false};
    bool second = false;
    for (int k = 0; k < a.statistics; ++k) second |= a.statistic[k].kind == KV_STATISTIC_PROBABILITY;
    for (int pass = 0; pass < (second ? 2 : 1); ++pass) {
      for (block.from = 0; block.from < x.total(); block.from += kBlock) {
        block.count = min_of(kBlock, x.total() - block.from);
        pack(x, block);
        for (int tile = 0; tile < tiles; ++tile) {
          const Rows rows = rows_of(x, p.first + tile * kTileRows, p.last);
          if (block.from > x.used && block.position[0] > rows.now[rows.count - 1]) continue;  // of the future
          pass == 0 ? attend_tile(x, p, block, rows, tile) : count_tile(x, p, block, rows, tile);
        }
      }
    }
    for (int r = 0; r < p.last - p.first; ++r) {
      const int row = p.first + r;
      write_output(x, row % group, row / group, p.rows.get() + static_cast<size_t>(r) * dvp, 1.0f / p.total.get()[r]);
    }
    if (splits == 1) {
      finish_prefill(x, p.columns.get(), column_stride());
    } else {
      float* shared = partials.of(task);
      for (int k = 0; k < 2 * a.statistics; ++k)
        memcpy(shared + static_cast<size_t>(k) * a.capacity, p.columns.get() + k * column_stride(), a.capacity * sizeof(float));
    }
  }

  void pack_queries(const Head& x, Prefill& p, int tiles) const {
    const int d = a.key_size;
    p.padded = static_cast<size_t>(tiles) * kTileRows;
    p.query.reserve(p.padded * d, 0.0f);
    p.top.reserve(p.padded, kLowest);
    p.total.reserve(p.padded, 0.0f);
    p.log_share.reserve(p.padded * a.statistics, kLogZero);
    for (int row = p.first; row < p.last; ++row) {
      const int t = row / group, g = row % group, r = row - p.first;
      const T* from = static_cast<const T*>(a.query) + ((static_cast<size_t>(x.b) * a.query_heads + x.h * group + g) * a.tokens + t) * d;
      float* to = p.query.get() + static_cast<size_t>(r / kTileRows) * kTileRows * d + r % kTileRows;
      for (int i = 0; i < d; ++i) to[i * kTileRows] = static_cast<float>(from[i]) * a.scale;
      if (a.sink_logits) {
        p.top.get()[r] = a.sink_logits[x.h * group + g];
        p.total.get()[r] = 1.0f;
      }
      for (int k = 0; k < a.statistics; ++k) {
        const KvStatistic& s = a.statistic[k];
        const Statistic statistic{s.kind, s.decay, s.window, s.recency_weight};
        const float weight = log_query_weight(statistic, x.n - 1 - t, counted_queries(statistic, x.n));
        if (weight == kLogZero) continue;
        const float own = s.kind == KV_STATISTIC_LOG_EMA ? std::log(1.0f - s.decay) : 0.0f;
        p.log_share.get()[k * p.padded + r] = weight + own - std::log(static_cast<float>(group));
      }
    }
  }

  void attend_tile(const Head&, Prefill& p, const Block& block, const Rows& rows, int tile) const {
    const int d = a.key_size, dvp = padded_value_size(), r0 = tile * kTileRows;
    float* logits = p.tile;
    tile_logits(p.query.get() + static_cast<size_t>(r0) * d, block, logits);
    for (int k = 0; k < a.statistics; ++k) {
      const float* share = p.log_share.get() + k * p.padded + r0;
      if (a.statistic[k].kind != KV_STATISTIC_LOG_EMA || share[rows.count - 1] == kLogZero) continue;
      float* columns = p.columns.get() + 2 * k * column_stride();
      accumulate_log(block, rows, logits, share, columns, columns + column_stride());
    }
    float factor[kTileRows];
    for (int r = 0; r < kTileRows; ++r) {
      vf top = splat(p.top.get()[r0 + r]);
      float* row = logits + r * kBlock;
      for (int column = 0; column < kBlock; column += W) {
        vf biased = load(row + column) + load(block.bias + column);
        if (!block.plain) biased = select(visible(block, rows, r, column), biased, splat(kLogZero));
        store(row + column, biased);
        top = vmax(top, biased);
      }
      const float best = max(top);
      vf total{};
      for (int column = 0; column < kBlock; column += W) {
        vf e = exp(load(row + column) - best);
        store(row + column, e);
        total += e;
      }
      factor[r] = std::exp(p.top.get()[r0 + r] - best);
      p.total.get()[r0 + r] = p.total.get()[r0 + r] * factor[r] + sum(total);
      p.top.get()[r0 + r] = best;
    }
    float* out = p.rows.get() + static_cast<size_t>(r0) * dvp;
    int column = 0;
    for (; column + kTileVectors * W <= dvp; column += kTileVectors * W) tile_product<kTileVectors>(logits, block, factor, out, column);
    for (; column < dvp; column += W) tile_product<1>(logits, block, factor, out, column);
  }

  // The second pass, for sums of probabilities: every row's top and total are known now.
  void count_tile(const Head&, Prefill& p, const Block& block, const Rows& rows, int tile) const {
    const int d = a.key_size, r0 = tile * kTileRows;
    bool counts = false;
    for (int k = 0; k < a.statistics; ++k)
      counts |= a.statistic[k].kind == KV_STATISTIC_PROBABILITY && p.log_share.get()[k * p.padded + r0 + rows.count - 1] != kLogZero;
    if (!counts) return;
    float* logits = p.tile;
    tile_logits(p.query.get() + static_cast<size_t>(r0) * d, block, logits);
    for (int r = 0; r < rows.count; ++r)
      for (int column = 0; column < kBlock; column += W) {
        vf biased = load(logits + r * kBlock + column) + load(block.bias + column);
        if (!block.plain) biased = select(visible(block, rows, r, column), biased, splat(kLogZero));
        store(logits + r * kBlock + column, exp(biased - p.top.get()[r0 + r]) / p.total.get()[r0 + r]);
      }
    for (int k = 0; k < a.statistics; ++k) {
      if (a.statistic[k].kind != KV_STATISTIC_PROBABILITY) continue;
      float* sums = p.columns.get() + (2 * k + 1) * column_stride() + block.from;
      for (int r = 0; r < rows.count; ++r) {
        const float weight = std::exp(p.log_share.get()[k * p.padded + r0 + r]);
        for (int column = 0; column < kBlock; column += W)
          store(sums + column, load(sums + column) + weight * load(logits + r * kBlock + column));
      }
    }
  }

  // Of a windowed or recency-weighted log_ema: ln of what all queries of the call that see a slot would weigh together, over what those
  // of them that count do, as sums over the queries [0, t).
  struct Standing {
    Scratch<float> whole_, counted_;
    Standing(const Statistic& s, int n) {
      float *whole = whole_.reserve(n + 1, 0.0f), *counted = counted_.reserve(n + 1, 0.0f);
      for (int t = 0; t < n; ++t) {
        whole[t + 1] = whole[t] + std::pow(s.decay, static_cast<float>(n - 1 - t));
        counted[t + 1] = counted[t] + std::exp(log_query_weight(s, n - 1 - t, counted_queries(s, n)));
      }
    }
    // Of the queries [from, to).
    float log_ratio(int from, int to) const {
      const float *whole = whole_.get(), *counted = counted_.get(), least = 1e-30f;
      return std::log(max_of(whole[to] - whole[from], least)) - std::log(max_of(counted[to] - counted[from], least));
    }
  };

  // Puts the columns of a head's splits together and writes its scores. columns [splits][K, 2, stride].
  void finish_prefill(const Head& x, const float* columns, size_t stride) const {
    for (int k = 0; k < a.statistics; ++k) {
      const Statistic s{a.statistic[k].kind, a.statistic[k].decay, a.statistic[k].window, a.statistic[k].recency_weight};
      const float* past = x.past_score + static_cast<size_t>(k) * a.capacity;
      const float* column = columns + 2 * k * stride;
      const size_t next = 2 * a.statistics * stride;  // the same column of the next split
      float* out = x.score + static_cast<size_t>(k) * a.capacity;
      if (s.kind == KV_STATISTIC_NONE) {
        if (out != past) memcpy(out, past, x.total() * sizeof(float));
      } else if (s.kind == KV_STATISTIC_PROBABILITY) {
        const float decay = std::exp(static_cast<float>(counted_queries(s, x.n)) * std::log(s.decay));
        for (int c = 0; c < x.total(); ++c) {
          float seen = 0.0f;
          for (int i = 0; i < splits; ++i) seen += column[i * next + stride + c];
          out[c] = (c < x.used ? past[c] * decay : 0.0f) + seen;
        }
      } else {
        const float log_decay = static_cast<float>(x.n) * std::log(s.decay);
        const bool stands = s.window != 0 || s.recency_weight != 1.0f;
        const Standing standing(s, stands ? x.n : 0);
        for (int c = 0; c < x.total(); ++c) {
          const float start = c < x.used ? past[c] + log_decay : kLogZero;
          float shift = 0.0f;
          if (stands) {
            const int64_t age = slot_position(x, c) - x.first, end = a.sliding_window ? age + a.sliding_window : x.n;
            const int from = age < 0 ? 0 : static_cast<int>(age);  // queries [age, end) see the slot
            shift = standing.log_ratio(from, end < from ? from : end > x.n ? x.n : static_cast<int>(end));
          }
          float top = start, total = 0.0f;
          for (int i = 0; i < splits; ++i) top = max_of(top, column[i * next + c] + shift);
          for (int i = 0; i < splits; ++i) total += column[i * next + stride + c] * std::exp(column[i * next + c] + shift - top);
          out[c] = top + std::log(total + std::exp(start - top));
        }
      }
    }
  }

  // ---- the call ----

  void append_task(size_t index) {
    const Head x = head(index);
    append(x);
    clear_output(x, x.n);
  }

  void run(KvRunner runner) {
    struct Call {
      Attention* self;
      void (Attention::*task)(size_t);
    };
    auto each = [&](size_t count, void (Attention::*task)(size_t)) {
      Call call{this, task};
      runner.parallel_for(
          runner.context, count,
          [](void* data, size_t i) {
            const Call& c = *static_cast<Call*>(data);
            (c.self->*c.task)(i);
          },
          &call);
    };
    const size_t heads = static_cast<size_t>(a.batch) * a.heads;
    if (splits == 1) {
      each(heads, &Attention::whole_task);
      return;
    }
    each(heads * splits, a.tokens == 1 ? &Attention::decode_task : &Attention::prefill_task);
    each(heads, &Attention::finish_task);
  }

  void whole_task(size_t index) {
    a.tokens == 1 ? decode_task(index) : prefill_task(index);
    append_task(index);
  }

  void finish_task(size_t index) {
    const Head x = head(index);
    if (x.n > 0) {
      if (a.tokens == 1)
        finish_decode(x, DecodePart(partials.of(index * splits), group, a.capacity, a.value_size));
      else
        finish_prefill(x, partials.of(index * splits), a.capacity);
    }
    append_task(index);
  }
};

// How many tasks one head makes: enough for many cores where there are few heads, none below a size worth a task. It depends on the
// shapes alone, so that results do not depend on the threads.
int splits_of(const KvVoteAttention& a) {
  const int wanted = (16 + a.batch * a.heads - 1) / (a.batch * a.heads);
  const int worth = a.tokens == 1 ? a.capacity / 1024 : a.tokens * (a.query_heads / a.heads) / 64;
  return max_of(1, min_of(wanted, worth));
}

}  // namespace

void vote_attention(const KvVoteAttention& call, KvRunner runner) {
  const int splits = splits_of(call);
  if (call.type == KV_FLOAT16)
    Attention<half>(call, splits).run(runner);
  else
    Attention<float>(call, splits).run(runner);
}

}  // namespace KV_ISA
}  // namespace kv
