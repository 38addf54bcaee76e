// VoteAttention for one token per sequence, or for a few tokens if no statistic averages logits. A row g is one query
// head of one token; rows are ordered by token. One task per KV head and split of its slots; in a task, over blocks of
// 32 slots that stay in the L1 cache, for all rows g:
//
//   logit[g, slot] = scale query[g] . key[slot]                   four rows at a time, sums over lanes as one
//   biased = capped(logit) + vote_exponent ln(votes), or hidden   whole rows, in vectors
//   row_max[g], row_sum[g], weight[g, slot] = softmax of biased
//   output[g] += weight[g, slot] value[slot]                      four rows, four vectors of columns at a time
//
// With kTileRows rows or more, the logits of 64 slots at a time come from packed keys (tile.h), which saves the sums
// over lanes. Then per head: combine_splits in their order, write output / row_sum, update the scores, append the
// token. Every key and every value is read once; prefetches run 12 KB ahead, from the keys of a split into its values,
// and from these into the keys of the next split.
#pragma once

#include <type_traits>

#include "../core/tile.h"
#include "attention.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr int kAhead = 12288;  // bytes
constexpr int kFewRows = 20;   // with more rows, packing the cache pays (prefill.h)
// The slots of a split: fewer take less time than a thread needs to find its next task. A multiple of every W.
constexpr int kLeastSlots = 256;

// Returns whether a call of several tokens has so few rows, and statistics without logits, that Decode computes it.
inline bool few_rows(const KvVoteAttention& call) {
  for (int k = 0; k < call.statistics; ++k)
    if (call.statistic[k].kind == KV_STATISTIC_LOG_EMA) return false;
  return call.tokens * (call.query_heads / call.heads) <= kFewRows;
}

// What a split reads up to `end`; after it the split reads `next`.
struct Stream {
  uintptr_t end, next;
  Stream(const void* end, const void* next)
      : end(reinterpret_cast<uintptr_t>(end)), next(reinterpret_cast<uintptr_t>(next)) {}

  // Prefetches `size` bytes from `from` on into the L2 cache. Hardware prefetching stops at the end of a page;
  // without this, reads and arithmetic would take turns (71 % of the bandwidth instead of 90 % on an EPYC 9004).
  void prefetch(const void* from, size_t size) const {
    uintptr_t p = reinterpret_cast<uintptr_t>(from);
    if (p >= end) p += next - end;
    for (size_t i = 0; i < size; i += 64) __builtin_prefetch(reinterpret_cast<const char*>(p + i), 0, 2);
  }
};

template <class K, class V>
struct Decode : Attention<K, V> {
  using Base = Attention<K, V>;
  using Base::call, Base::group, Base::splits, Base::partials;
  using Base::head_of, Base::key_row, Base::value_row, Base::slot_position, Base::bias, Base::capped,
      Base::write_output, Base::score_of;
  using typename Base::Head;
  using typename Base::Query;

  const int width;  // the most slots of a split: the columns of its logits and weights

  static int width_of(const KvVoteAttention& call, int splits) {
    return ((largest_capacity(call.capacity, call.heads) + splits - 1) / splits + W - 1) / W * W;
  }

  static size_t partial_size(const KvVoteAttention& call, int splits) {
    const size_t rows = static_cast<size_t>(call.tokens) * (call.query_heads / call.heads);
    return rows * ((call.tokens == 1 ? 2 : 1) * static_cast<size_t>(width_of(call, splits)) + call.value_size + 2);
  }

  Decode(const KvVoteAttention& call, int splits)
      : Base(call, splits, partial_size(call, splits)), width(width_of(call, splits)) {}

  int rows_of(const Head& head) const { return head.n * group; }

  struct Range {
    int from, to;
  };

  // Returns the slots of split `s` when the first `slots` are shared among the splits. If there are few slots, the last
  // splits have none.
  Range slots_of(int s, int slots) const {
    const int equal = ((slots + splits - 1) / splits + W - 1) / W * W, each = max_of(equal, kLeastSlots);
    return {min_of(s * each, slots), min_of((s + 1) * each, slots)};
  }

  // A split's partial result in the memory at p: logits and weights [rows, width] of the slots from `from` on, indexed
  // by the slot's number (so they begin at p - from); product [rows, Dv], row_max and row_sum [rows].
  struct DecodePartial {
    float *logits, *weights, *product, *row_max, *row_sum;
    DecodePartial(float* p, const KvVoteAttention& call, int width, int from) : logits(p - from) {
      const size_t rows = static_cast<size_t>(call.tokens) * (call.query_heads / call.heads), all = rows * width;
      weights = call.tokens == 1 ? logits + all : logits;
      product = weights + all + from;
      row_max = product + rows * call.value_size;
      row_sum = row_max + rows;
    }
  };

  void task(size_t task) {
    const Head head = head_of(task / splits);
    const int s = static_cast<int>(task % splits);
    if (head.n == 0) return;
    static thread_local Scratch<float> only_split;
    const auto [from, to] = slots_of(s, head.end());
    const DecodePartial partial(splits == 1 ? only_split.reserve(partial_size(call, 1)) : partials.of(task), call,
                                width, from);
    attend(head, from, to, partial.logits, partial.weights, partial.row_max, partial.row_sum, partial.product);
    if (splits == 1) combine_splits(head, partial);
  }

  // Attends to slots [from, to) of a head. Writes logits and weights exp(biased - row_max) [rows, width], slot c at
  // g * width + c; per row row_max and row_sum; and the sum of weight * value to `product`. With several tokens weights
  // may be the same array as logits.
  void attend(const Head& head, int from, int to, float* logits, float* weights, float* row_max, float* row_sum,
              float* product) const {
    const int d = call.key_size, dv = call.value_size, all = rows_of(head);
    static thread_local Scratch<float> scratch;
    const size_t count = to - from, scaled = kQuantized<K> ? static_cast<size_t>(all) * width + 2 * count : 0;
    float *query = scratch.reserve(static_cast<size_t>(all) * d + count + W + scaled), *slot_bias = query + all * d;
    float *key_scale = slot_bias + count + W, *value_scale = key_scale + count, *factors = value_scale + count - from;
    // Queries in float32, times scale
    for (int g = 0; g < all; ++g) {
      const size_t query_head = static_cast<size_t>(head.b) * call.query_heads + head.h * group + g % group;
      const Query* row = static_cast<const Query*>(call.query) + (query_head * call.tokens + g / group) * d;
      for (int i = 0; i < d; ++i) query[g * d + i] = static_cast<float>(row[i]) * call.scale;
    }
    const auto key_at = [&](int c) { return at(head.past_key, static_cast<size_t>(c) * d); };
    const auto value_at = [&](int c) { return at(head.past_value, c * head.past_value_size); };
    const Stream keys(key_at(to), value_at(from)), values(value_at(to), key_at(to < head.end() ? to : head.capacity));
    // Logits, block by block
    int c = from;
    if (all >= kTileRows)
      for (; c + kBlock <= min_of(to, head.used); c += kBlock) packed_logits(head, c, query, logits, keys);
    for_each_block(c, to, [&](int c, int end) {
      for_each_rows(all, [&](auto rows, int g) {
        decode_logits<decltype(rows)::value>(head, c, end, query + g * d, logits + static_cast<size_t>(g) * width,
                                             g == 0 ? &keys : nullptr);
      });
    });
    if constexpr (kQuantized<K>) {
      this->scales_of(head, head.key_scale, from, to, key_scale);
      this->scales_of(head, head.value_scale, from, to, value_scale);
      scale_rows(logits, key_scale, all, from, to, logits);
    }
    // Softmax, row by row
    for (int g = 0; g < all; ++g) {
      if (g % group == 0) token_bias(head, from, to, g / group, slot_bias);
      const size_t row = static_cast<size_t>(g) * width;
      softmax(from, to, slot_bias - from, logits + row, weights + row, &row_max[g], &row_sum[g]);
    }
    // Weights times values, block by block
    for (int i = 0; i < all * dv; ++i) product[i] = 0.0f;
    if constexpr (kQuantized<K>) scale_rows(weights, value_scale, all, from, to, factors);
    const float* const value_weights = kQuantized<K> ? factors : weights;
    for_each_block(from, to, [&](int c, int end) {
      for_each_tile(all, [&](auto rows, int g) {
        decode_product<decltype(rows)::value>(head, c, end, value_weights + static_cast<size_t>(g) * width,
                                              product + g * dv, g == 0 ? &values : nullptr);
      });
    });
  }

  // Caps a row's logits; weights = exp(logit + slot_bias - row_max), and their sum.
  void softmax(int from, int to, const float* slot_bias, float* logits, float* weights, float* row_max,
               float* row_sum) const {
    int c = from;
    vf highest = splat(kLowest);
    for (; c + W <= to; c += W) {
      const vf logit = capped(load(logits + c)), biased = logit + load(slot_bias + c);
      store(logits + c, logit);
      store(weights + c, biased);
      highest = vmax(highest, biased);
    }
    float most = max(highest);
    for (; c < to; ++c) {
      if (call.softcap != 0.0f) logits[c] = call.softcap * std::tanh(logits[c] / call.softcap);
      weights[c] = logits[c] + slot_bias[c];
      most = max_of(most, weights[c]);
    }
    vf sums{};
    for (c = from; c + W <= to; c += W) {
      const vf weight = exp(load(weights + c) - most);
      store(weights + c, weight);
      sums += weight;
    }
    float rest = 0.0f;
    for (; c < to; ++c) rest += weights[c] = std::exp(weights[c] - most);
    *row_max = most;
    *row_sum = sum(sums) + rest;
  }

  // out [rows, width] = in [rows, width] times the scales of the slots [from, to).
  void scale_rows(const float* in, const float* scale, int rows, int from, int to, float* out) const {
    for (int g = 0; g < rows; ++g) {
      const size_t row = static_cast<size_t>(g) * width;
      for (int c = from; c < to; ++c) out[row + c] = in[row + c] * scale[c - from];
    }
  }

  // Writes the bias of slots [from, to) for new token t to `out`; tokens after t are hidden. On entry `out` is the bias
  // for token t - 1.
  void token_bias(const Head& head, int from, int to, int t, float* out) const {
    const int own = head.used + t;
    if (t == 0 || call.sliding_window) bias(head, from, to, head.first + t, out);
    if (own >= from && own < to) out[own - from] = 0.0f;
    for (int c = max_of(from, own + 1); c < to; ++c) out[c - from] = kLogZero;
  }

  // Runs `body` for blocks of slots small enough to stay in the L1 cache while all rows and columns pass over them.
  template <class F>
  static void for_each_block(int from, int to, F body) {
    constexpr int slots = 32;
    for (int c = from; c < to; c += slots) body(c, min_of(c + slots, to));
  }

  // Runs `body(integral_constant, first)` for the rows by fours, twos and ones.
  template <class F>
  static void for_each_rows(int rows, F body) {
    int g = 0;
    for (; g + 4 <= rows; g += 4) body(std::integral_constant<int, 4>(), g);
    for (; g + 2 <= rows; g += 2) body(std::integral_constant<int, 2>(), g);
    for (; g < rows; ++g) body(std::integral_constant<int, 1>(), g);
  }

  // Runs `body(integral_constant, first)` for tiles of up to kTileRows rows, as equal in size as possible.
  template <class F>
  static void for_each_tile(int rows, F body) {
    for (int g = 0, left = (rows + kTileRows - 1) / kTileRows; left > 0; --left) {
      const int count = (rows - g + left - 1) / left;
      with_count<kTileRows>(count, g, body);
      g += count;
    }
  }

  template <int R, class F>
  static void with_count(int count, int g, F& body) {
    if (count == R)
      body(std::integral_constant<int, R>(), g);
    else if constexpr (R > 1)
      with_count<R - 1>(count, g, body);
  }

  // Computes the logits of all rows for the kBlock slots from `from` on. All of these slots must be past ones.
  void packed_logits(const Head& head, int from, const float* query, float* logits, const Stream& keys) const {
    const int d = call.key_size, all = rows_of(head);
    static thread_local Scratch<float> scratch;
    float *packed = scratch.reserve(static_cast<size_t>(kBlock + W) * d), *wide = packed + kBlock * d;
    for (int c = 0; c < kBlock; c += W) {
      if constexpr (std::is_same_v<K, float>) {
        pack_columns(key_row(head, from + c), d, splat(1.0f), packed + c);
      } else {
        for (int j = 0; j < W; ++j) widen_row(key_row(head, from + c + j), d, wide + j * d);
        pack_columns(wide, d, splat(1.0f), packed + c);
      }
    }
    // The next block arrives while this one is multiplied.
    const size_t bytes = bytes_of<K>(kBlock * d), steps = tile_steps(d) * ((all + kTileRows - 1) / kTileRows);
    const char* next = reinterpret_cast<const char*>(key_row(head, from)) + bytes;
    const auto fetch = [&next, &keys, each = bytes / steps] {
      keys.prefetch(next, each);
      next += each;
    };
    for_each_tile(all, [&](auto rows, int g) {
      constexpr int R = decltype(rows)::value;
      const float* row[R];
      float tile[R * kBlock];
      for (int r = 0; r < R; ++r) row[r] = query + (g + r) * d;
      tile_products<false, R>(row, packed, d, tile, fetch);
      for (int r = 0; r < R; ++r)
        memcpy(logits + static_cast<size_t>(g + r) * width + from, tile + r * kBlock, kBlock * sizeof(float));
    });
  }

  static void widen_row(const K* row, int d, float* out) {
    int i = 0;
    for (; i + W <= d; i += W) store(out + i, load(at(row, i)));
    for (; i < d; ++i) out[i] = element(row, i);
  }

  template <class T>
  static void prefetch(const Stream* stream, const T* row, int count) {
    if (stream) stream->prefetch(reinterpret_cast<const char*>(row) + kAhead, bytes_of<T>(count));
  }

  // Computes the logits of R rows, S slots at a time, so that their R S sums over lanes are one reduction. stream: the
  // keys of the split if these rows are the first to read these slots, and prefetch; otherwise nullptr.
  template <int R>
  void decode_logits(const Head& head, int from, int to, const float* query, float* logits,
                     const Stream* stream) const {
    constexpr int S = R < W ? W / R : 1, N = R * S / W;
    const int d = call.key_size, whole = d / W * W;
    int c = from;
    for (; c + S <= to; c += S) {
      const K* row[S];
      for (int s = 0; s < S; ++s) row[s] = key_row(head, c + s);
      prefetch(stream, row[0], S * d);
      vf dots[R * S] = {};
      for (int i = 0; i < whole; i += W) {
        vf key[S];
        for (int s = 0; s < S; ++s) key[s] = load(at(row[s], i));
        for (int r = 0; r < R; ++r) {
          const vf q = load(query + r * d + i);
          for (int s = 0; s < S; ++s) dots[r * S + s] += q * key[s];
        }
      }
      float out[R * S];
      for (int n = 0; n < N; ++n) store(out + n * W, sums<1>(dots + n * W));
      for (int r = 0; r < R; ++r)
        for (int s = 0; s < S; ++s) {
          float rest = 0.0f;
          for (int i = whole; i < d; ++i) rest += element(row[s], i) * query[r * d + i];
          logits[static_cast<size_t>(r) * width + c + s] = out[r * S + s] + rest;
        }
    }
    for (; c < to; ++c)
      for (int r = 0; r < R; ++r) logits[static_cast<size_t>(r) * width + c] = dot(key_row(head, c), query + r * d, d);
  }

  // Adds weights x values of slots [from, to) to `out` [R, Dv].
  template <int R>
  void decode_product(const Head& head, int from, int to, const float* weights, float* out,
                      const Stream* stream) const {
    const int dv = call.value_size;
    constexpr int N = kTileVectors;  // as many as the registers allow with the sums of four heads
    int i = 0;
    for (; i + N * W <= dv; i += N * W) decode_columns<R, N>(head, from, to, weights, out, i, stream);
    for (; i + W <= dv; i += W) decode_columns<R, 1>(head, from, to, weights, out, i, stream);
    for (; i < dv; ++i)
      for (int r = 0; r < R; ++r) {
        float dots = 0.0f;
        for (int c = from; c < to; ++c)
          dots += weights[static_cast<size_t>(r) * width + c] * element(value_row(head, c), i);
        out[r * dv + i] += dots;
      }
  }

  template <int R, int N>
  void decode_columns(const Head& head, int from, int to, const float* weights, float* out, int column,
                      const Stream* stream) const {
    vf dots[R][N] = {};  // this block's sums: running sums over all blocks would gather rounding errors
    for (int c = from; c < to; ++c) {
      const V* row = at(value_row(head, c), column);
      prefetch(stream, row, N * W);
      vf value[N];
      for (int j = 0; j < N; ++j) value[j] = load(at(row, j * W));
      for (int r = 0; r < R; ++r) {
        const float weight = weights[static_cast<size_t>(r) * width + c];
        for (int j = 0; j < N; ++j) dots[r][j] += weight * value[j];
      }
    }
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < N; ++j) {
        float* const to = out + r * call.value_size + column + j * W;
        store(to, load(to) + dots[r][j]);
      }
  }

  // Combines the splits of a head in their order; writes its output and scores. whole: the partial of the only split.
  void combine_splits(const Head& head, const DecodePartial& whole) {
    static thread_local Scratch<float> scratch;
    const int all = rows_of(head);
    float *shares = scratch.reserve(static_cast<size_t>(splits) * all + call.value_size), *row = shares + splits * all;
    const size_t first_task = (static_cast<size_t>(head.b) * call.heads + head.h) * splits;
    auto partial_of = [&](int s) {
      return splits == 1 ? whole
                         : DecodePartial(partials.of(first_task + s), call, width, slots_of(s, head.end()).from);
    };
    for (int g = 0; g < all; ++g) {
      const float* sink = call.sink_logits ? call.sink_logits + head.h * group + g % group : nullptr;
      float row_max = sink ? *sink : kLowest, row_sum = 0.0f;
      for (int s = 0; s < splits; ++s) row_max = max_of(row_max, partial_of(s).row_max[g]);
      if (sink) row_sum = std::exp(*sink - row_max);
      for (int i = 0; i < call.value_size; ++i) row[i] = 0.0f;
      for (int s = 0; s < splits; ++s) {
        const DecodePartial partial = partial_of(s);
        const float factor = std::exp(partial.row_max[g] - row_max);
        row_sum += factor * partial.row_sum[g];
        shares[static_cast<size_t>(s) * all + g] = factor;
        for (int i = 0; i < call.value_size; ++i) row[i] += factor * partial.product[g * call.value_size + i];
      }
      for (int s = 0; s < splits; ++s) shares[static_cast<size_t>(s) * all + g] /= row_sum;
      write_output(head, g % group, g / group, row, 1.0f / row_sum);
    }
    for (int s = 0; s < splits; ++s) {
      const DecodePartial partial = partial_of(s);
      const auto [from, to] = slots_of(s, head.end());
      update_scores(head, from, to, partial.logits, partial.weights, &shares[static_cast<size_t>(s) * all]);
    }
  }

  void finish(const Head& head, size_t index) {
    combine_splits(head, DecodePartial(partials.of(index * splits), call, width, 0));
  }

  // Writes the scores of slots [from, to). share[g]: the factor that makes row g's weights in this split probabilities.
  void update_scores(const Head& head, int from, int to, const float* logits, const float* weights,
                     const float* share) const {
    for (int k = 0; k < call.statistics; ++k) {
      const KvStatistic& statistic = call.statistic[k];
      const float* past = score_of(head.past_score, k);
      float* out = score_of(head.score, k);
      if (statistic.kind == KV_STATISTIC_PROBABILITY)
        add_probabilities(head, statistic, from, to, weights, share, past, out);
      else if (statistic.kind == KV_STATISTIC_LOG_EMA)
        average_logits(head, statistic, from, to, logits, past, out);
      else if (out != past)
        memcpy(out + from, past + from, (to - from) * sizeof(float));
    }
  }

  // score = past score decay^counted + sum over rows g of weight[g, slot] share[g] (weight of g's query)
  void add_probabilities(const Head& head, const KvStatistic& statistic, int from, int to, const float* weights,
                         const float* share, const float* past, float* out) const {
    static thread_local Scratch<float> scratch;
    const int all = rows_of(head), counted = counted_queries(statistic, head.n), first = (head.n - counted) * group;
    const float decay = std::pow(statistic.decay, static_cast<float>(counted));
    float* factor = scratch.reserve(all);
    for (int g = first; g < all; ++g)
      factor[g] =
          share[g] * std::exp(log_query_weight(statistic, head.n - 1 - g / group, counted)) / static_cast<float>(group);
    int c = from;
    for (; c + W <= min_of(to, head.used); c += W) {
      vf received{};
      for (int g = first; g < all; ++g) received += load(weights + static_cast<size_t>(g) * width + c) * factor[g];
      store(out + c, load(past + c) * decay + received);
    }
    for (; c < to; ++c) {
      float received = 0.0f;
      for (int g = first; g < all; ++g) received += weights[static_cast<size_t>(g) * width + c] * factor[g];
      out[c] = (c < head.used ? past[c] * decay : 0.0f) + received;
    }
  }

  // score = ln(exp(past score) decay + sum over rows g of exp(logit[g, slot]) (1 - decay) / group); a call of one token
  void average_logits(const Head& head, const KvStatistic& statistic, int from, int to, const float* logits,
                      const float* past, float* out) const {
    static thread_local Scratch<float> scratch;
    float* slot_bias = scratch.reserve(to - from + W);
    bias(head, from, to, head.first, slot_bias);  // kLogZero in the slots that the window hides
    const float log_share = std::log(1.0f - statistic.decay) - std::log(static_cast<float>(group)),
                log_decay = std::log(statistic.decay);
    int c = from;
    for (; c + W <= to; c += W) {
      const vi hidden = load(slot_bias + c - from) == kLogZero;
      const vf term = select(hidden, splat(kLogZero), splat(log_share));
      vf start = load(past + c) + log_decay;
      if (c + W > head.used)
        for (int i = 0; i < W; ++i)
          if (c + i >= head.used) start[i] = kLogZero;
      vf highest = start;
      for (int g = 0; g < group; ++g) highest = vmax(highest, load(logits + static_cast<size_t>(g) * width + c) + term);
      vf exp_sum = exp(start - highest);
      for (int g = 0; g < group; ++g)
        exp_sum += exp(load(logits + static_cast<size_t>(g) * width + c) + term - highest);
      store(out + c, highest + log(exp_sum));
    }
    for (; c < to; ++c) {
      const float term = slot_bias[c - from] == kLogZero ? kLogZero : log_share;
      const float start = c < head.used ? past[c] + log_decay : kLogZero;
      float highest = start, exp_sum = 0.0f;
      for (int g = 0; g < group; ++g) highest = max_of(highest, logits[static_cast<size_t>(g) * width + c] + term);
      for (int g = 0; g < group; ++g) exp_sum += std::exp(logits[static_cast<size_t>(g) * width + c] + term - highest);
      out[c] = highest + std::log(exp_sum + std::exp(start - highest));
    }
  }
};

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
