// VoteAttention for several tokens per sequence. A row is one query head of one token; a tile is kTileRows rows against
// kBlock slots, and only a tile of logits ever exists. One task per KV head and split of its rows:
//
//   pass 1, for each block of slots, packed once in float32, for each tile of rows
//     logit = query x key^T, masked by position and window
//     log_ema: per slot, slot_max and slot_sum = running sum of exp(logit) over the rows that count
//     row_max, row_sum, weight = running softmax of logit + vote_exponent ln(votes)
//     output = output exp(old row_max - row_max) + weight x value
//   pass 2, only for sums of probabilities: logit again, slot_sum += exp(biased - row_max) / row_sum
//   write output / row_sum; combine_splits: the slots' sums of all splits in their order, and the scores; append the
//   tokens
//
// Letters, beside those of attention.h: p the memory of a task, r0 the first row of a tile in its task, dvp Dv rounded
// up to whole vectors.
#pragma once

#include "../core/tile.h"
#include "prefill_scores.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr float kFar = 40.0f;  // weights above exp(-40), and their sums, are far above the smallest float32 number

template <class K, class V>
struct Prefill : PrefillScores<K, V> {
  using Base = PrefillScores<K, V>;
  using Base::a, Base::group, Base::splits, Base::partials;
  using Base::head, Base::key_row, Base::value_row, Base::slot_position, Base::bias, Base::capped, Base::write_output,
      Base::combine_splits;
  using typename Base::Head;
  using typename Base::Query;

  const int largest;  // the most slots of a KV head

  Prefill(const KvVoteAttention& call, int splits)
      : Base(call, splits, 2 * static_cast<size_t>(call.statistics) * largest_capacity(call.capacity, call.heads)),
        largest(largest_capacity(call.capacity, call.heads)) {}

  // A packed block of the cache: keys [D, kBlock], transposed; values [kBlock, padded Dv]; both float32.
  struct Block {
    int from, count;
    float *key, *value, *bias;
    int32_t* position;
    bool plain;  // whether every row sees every slot
  };

  int padded_value_size() const { return (a.value_size + W - 1) / W * W; }

  // Packs the slots [block.from, block.from + block.count), and pads the block with invisible slots.
  void pack(const Head& x, Block& block) const {
    const int d = a.key_size, dv = a.value_size, dvp = padded_value_size();
    static thread_local Scratch<float> scratch;
    float *rows = scratch.reserve(W * d + 2 * kBlock), *key_scale = rows + W * d, *value_scale = key_scale + kBlock;
    if constexpr (kQuantized<K>) {
      this->scales_of(x, x.key_scale, block.from, block.from + block.count, key_scale);
      this->scales_of(x, x.value_scale, block.from, block.from + block.count, value_scale);
      for (int c = block.count; c < kBlock; ++c) key_scale[c] = 0.0f;
    }
    for (int c = 0; c < kBlock; c += W) {
      for (int j = 0; j < W; ++j) {
        const int slot = block.from + c + j;
        if (c + j < block.count)
          widen(key_row(x, slot), rows + j * d, d);
        else
          memset(rows + j * d, 0, d * sizeof(float));
      }
      pack_columns(rows, d, kQuantized<K> ? load(key_scale + c) : splat(1.0f), block.key + c);
    }
    for (int c = 0; c < kBlock; ++c) {
      const int slot = block.from + c;
      block.position[c] = INT32_MAX;  // later than any query
      if (c >= block.count) continue;
      if constexpr (kQuantized<K>)
        dequantize(value_row(x, slot), value_scale[c], dv, block.value + c * dvp);
      else
        widen(value_row(x, slot), block.value + c * dvp, dv);
      for (int i = dv; i < dvp; ++i) block.value[c * dvp + i] = 0.0f;
      block.position[c] = static_cast<int32_t>(slot_position(x, slot));
    }
    for (int c = block.count; c < kBlock; ++c) block.bias[c] = kLogZero;
    const int window = a.sliding_window;
    // `visible` compares positions, so this bias only needs the votes.
    for (int c = 0; c < block.count; ++c) {
      const int slot = block.from + c;
      block.bias[c] = slot < x.used && a.vote_exponent != 0.0f ? x.past_votes[slot] : 1.0f;
    }
    if (a.vote_exponent != 0.0f)
      for (int c = 0; c < block.count; c += W) {
        const vf v = this->vote_bias(load(block.bias + c));
        for (int i = 0; i < W && c + i < block.count; ++i) block.bias[c + i] = v[i];
      }
    else
      for (int c = 0; c < block.count; ++c) block.bias[c] = 0.0f;
    block.plain = window == 0 && block.count == kBlock && block.from + kBlock <= x.used;
  }

  // Computes the logits [kTileRows, kBlock] of the rows `query` [kTileRows, D].
  void tile_logits(const float* query, const Block& block, float* logits) const {
    const float* rows[kTileRows];
    for (int r = 0; r < kTileRows; ++r) rows[r] = query + r * a.key_size;
    tile_products(rows, block.key, a.key_size, logits);
    if (a.softcap == 0.0f) return;
    for (int i = 0; i < kTileRows * kBlock; i += W) store(logits + i, capped(load(logits + i)));
  }

  // rows [kTileRows, padded Dv] = rows * factor + weights [kTileRows, kBlock] x values, in N vectors of columns.
  template <int N>
  void tile_product(const float* weights, const Block& block, const float* factor, float* rows, int column) const {
    const int dvp = padded_value_size();
    vf product[kTileRows][N] = {};  // this block's sums: running sums over all blocks would gather rounding errors
    const float* v = block.value + column;
    for (int c = 0; c < block.count; ++c, v += dvp) {
      vf value[N];
      for (int j = 0; j < N; ++j) value[j] = load(v + j * W);
      for (int r = 0; r < kTileRows; ++r)
        for (int j = 0; j < N; ++j) product[r][j] += weights[r * kBlock + c] * value[j];
    }
    for (int r = 0; r < kTileRows; ++r)
      for (int j = 0; j < N; ++j) {
        float* const to = rows + r * dvp + column + j * W;
        store(to, load(to) * factor[r] + product[r][j]);
      }
  }

  // The rows of a tile, and the positions (low, now] that the token of each row sees.
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
    const vi position = load_i(block.position + column);
    return (position <= rows.now[r]) & (position > rows.low[r]);
  }

  // Adds a tile's rows to ln sum exp per slot, stored as the maximum and the sum relative to it: slot_max, slot_sum
  // [capacity].
  void accumulate_log(const Block& block, const Rows& rows, const float* logits, const float* log_share,
                      float* slot_max, float* slot_sum) const {
    for (int column = 0; column < kBlock && column < block.count; column += W) {
      vf term[kTileRows], old = load(slot_max + block.from + column), highest = old;
      for (int r = 0; r < rows.count; ++r) {
        term[r] = load(logits + r * kBlock + column) + log_share[r];
        if (!block.plain) term[r] = select(visible(block, rows, r, column), term[r], splat(kLogZero));
        highest = vmax(highest, term[r]);
      }
      vf sum = load(slot_sum + block.from + column) * exp(old - highest);
      for (int r = 0; r < rows.count; ++r) sum += exp(term[r] - highest);
      store(slot_max + block.from + column, highest);
      store(slot_sum + block.from + column, sum);
    }
  }

  // Does the same as accumulate_log from weights exp(biased - row_max), for a block that every row sees and without
  // weights near the smallest number. A slot's terms are the weights times exp(log_share + row_max - bias of the slot);
  // log_share and row_max are the row's.
  void accumulate_weights(const Block& block, const Rows& rows, const float* weights, const float* row_max,
                          const float* log_share, float* slot_max, float* slot_sum) const {
    float base = kLogZero, factor[kTileRows];
    for (int r = 0; r < rows.count; ++r) base = max_of(base, log_share[r] + row_max[r]);
    for (int r = 0; r < rows.count; ++r) factor[r] = std::exp(log_share[r] + row_max[r] - base);
    for (int column = 0; column < kBlock; column += W) {
      vf received{};
      for (int r = 0; r < rows.count; ++r) received += factor[r] * load(weights + r * kBlock + column);
      const vf shift = base - load(block.bias + column), old = load(slot_max + block.from + column),
               highest = vmax(old, shift);
      store(slot_sum + block.from + column,
            load(slot_sum + block.from + column) * exp(old - highest) + received * exp(shift - highest));
      store(slot_max + block.from + column, highest);
    }
  }

  // The memory of a task: rows [first, last) of a head against its whole cache.
  struct Work {
    int first, last;
    size_t padded;  // rows, a whole number of tiles
    Scratch<float> query, rows, row_max, row_sum, log_share, columns;
    float tile[kTileRows * kBlock];
  };

  // The stride of Work::columns [K, 2, largest + padding]: slot_max and slot_sum of a log_ema, only slot_sum of a
  // probability.
  size_t column_stride() const { return largest + kBlock; }

  void task(size_t task) {
    const Head x = head(task / splits);
    const int s = static_cast<int>(task % splits);
    if (x.n == 0) return;
    static thread_local Work p;
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
    bool counts = false;  // whether pass 2 is needed
    for (int k = 0; k < a.statistics; ++k) counts |= a.statistic[k].kind == KV_STATISTIC_PROBABILITY;
    for (int pass = 0; pass < (counts ? 2 : 1); ++pass) {
      for (block.from = 0; block.from < x.end(); block.from += kBlock) {
        block.count = min_of(kBlock, x.end() - block.from);
        pack(x, block);
        for (int tile = 0; tile < tiles; ++tile) {
          const Rows rows = rows_of(x, p.first + tile * kTileRows, p.last);
          if (block.from > x.used && block.position[0] > rows.now[rows.count - 1]) continue;  // all slots are later
          pass == 0 ? attend_tile(x, p, block, rows, tile) : count_tile(x, p, block, rows, tile);
        }
      }
    }
    for (int r = 0; r < p.last - p.first; ++r) {
      const int row = p.first + r;
      write_output(x, row % group, row / group, p.rows.get() + static_cast<size_t>(r) * dvp, 1.0f / p.row_sum.get()[r]);
    }
    if (splits == 1) {
      combine_splits(x, p.columns.get(), column_stride());
    } else {
      float* shared = partials.of(task);
      for (int k = 0; k < 2 * a.statistics; ++k)
        memcpy(shared + static_cast<size_t>(k) * largest, p.columns.get() + k * column_stride(),
               x.end() * sizeof(float));
    }
  }

  // Fills the task's query rows (times scale), their initial row_max and row_sum, and the log weights of their queries.
  void pack_queries(const Head& x, Work& p, int tiles) const {
    const int d = a.key_size;
    p.padded = static_cast<size_t>(tiles) * kTileRows;
    p.query.reserve(p.padded * d, 0.0f);
    p.row_max.reserve(p.padded, kLowest);
    p.row_sum.reserve(p.padded, 0.0f);
    p.log_share.reserve(p.padded * a.statistics, kLogZero);
    for (int row = p.first; row < p.last; ++row) {
      const int t = row / group, g = row % group, r = row - p.first;
      const Query* from = static_cast<const Query*>(a.query) +
                          ((static_cast<size_t>(x.b) * a.query_heads + x.h * group + g) * a.tokens + t) * d;
      float* to = p.query.get() + static_cast<size_t>(r) * d;
      for (int i = 0; i < d; ++i) to[i] = static_cast<float>(from[i]) * a.scale;
      if (a.sink_logits) {
        p.row_max.get()[r] = a.sink_logits[x.h * group + g];
        p.row_sum.get()[r] = 1.0f;
      }
      for (int k = 0; k < a.statistics; ++k) {
        const KvStatistic& s = a.statistic[k];
        const float weight = log_query_weight(s, x.n - 1 - t, counted_queries(s, x.n));
        if (weight == kLogZero) continue;
        const float rate = s.kind == KV_STATISTIC_LOG_EMA ? std::log(1.0f - s.decay) : 0.0f;
        p.log_share.get()[k * p.padded + r] = weight + rate - std::log(static_cast<float>(group));
      }
    }
  }

  // Whether statistic k is a log_ema that counts a row of the tile that begins at row r0 of the task.
  bool counts_log(const Work& p, const Rows& rows, int r0, int k) const {
    return a.statistic[k].kind == KV_STATISTIC_LOG_EMA &&
           p.log_share.get()[k * p.padded + r0 + rows.count - 1] != kLogZero;
  }
  bool counts_logs(const Work& p, const Rows& rows, int r0) const {
    for (int k = 0; k < a.statistics; ++k)
      if (counts_log(p, rows, r0, k)) return true;
    return false;
  }

  // Adds a tile to every log_ema, from its weights or (weights = false) its logits.
  void accumulate_logs(Work& p, const Block& block, const Rows& rows, const float* tile, int r0, bool weights) const {
    for (int k = 0; k < a.statistics; ++k) {
      if (!counts_log(p, rows, r0, k)) continue;
      const float* share = p.log_share.get() + k * p.padded + r0;
      float *slot_max = p.columns.get() + 2 * k * column_stride(), *slot_sum = slot_max + column_stride();
      weights ? accumulate_weights(block, rows, tile, p.row_max.get() + r0, share, slot_max, slot_sum)
              : accumulate_log(block, rows, tile, share, slot_max, slot_sum);
    }
  }

  // Pass 1 of a tile: row_max, row_sum, output rows, and the log_ema of its slots.
  void attend_tile(const Head&, Work& p, const Block& block, const Rows& rows, int tile) const {
    const int d = a.key_size, dvp = padded_value_size(), r0 = tile * kTileRows;
    float *logits = p.tile, *query = p.query.get() + static_cast<size_t>(r0) * d;
    tile_logits(query, block, logits);
    const bool logs = counts_logs(p, rows, r0);
    if (logs && !block.plain) accumulate_logs(p, block, rows, logits, r0, false);
    float factor[kTileRows];
    vf far{};  // how far the lowest biased logit is below its row_max
    for (int r = 0; r < kTileRows; ++r) {
      vf highest = splat(p.row_max.get()[r0 + r]), low = splat(3e38f);
      float* row = logits + r * kBlock;
      for (int column = 0; column < kBlock; column += W) {
        vf biased = load(row + column) + load(block.bias + column);
        if (!block.plain) biased = select(visible(block, rows, r, column), biased, splat(kLogZero));
        store(row + column, biased);
        highest = vmax(highest, biased), low = vmin(low, biased);
      }
      const float row_max = max(highest);
      far = vmax(far, row_max - low);
      vf weights{};
      for (int column = 0; column < kBlock; column += W) {
        vf e = exp(load(row + column) - row_max);
        store(row + column, e);
        weights += e;
      }
      factor[r] = std::exp(p.row_max.get()[r0 + r] - row_max);
      p.row_sum.get()[r0 + r] = p.row_sum.get()[r0 + r] * factor[r] + sum(weights);
      p.row_max.get()[r0 + r] = row_max;
    }
    if (logs && block.plain && max(far) < kFar) {
      accumulate_logs(p, block, rows, logits, r0, true);
    } else if (logs && block.plain) {
      float raw[kTileRows * kBlock];
      tile_logits(query, block, raw);
      accumulate_logs(p, block, rows, raw, r0, false);
    }
    float* out = p.rows.get() + static_cast<size_t>(r0) * dvp;
    int column = 0;
    for (; column + kTileVectors * W <= dvp; column += kTileVectors * W)
      tile_product<kTileVectors>(logits, block, factor, out, column);
    for (; column < dvp; column += W) tile_product<1>(logits, block, factor, out, column);
  }

  // Pass 2 of a tile, for sums of probabilities: every row's row_max and row_sum are final.
  void count_tile(const Head&, Work& p, const Block& block, const Rows& rows, int tile) const {
    const int d = a.key_size, r0 = tile * kTileRows;
    bool counts = false;
    for (int k = 0; k < a.statistics; ++k)
      counts |= a.statistic[k].kind == KV_STATISTIC_PROBABILITY &&
                p.log_share.get()[k * p.padded + r0 + rows.count - 1] != kLogZero;
    if (!counts) return;
    float* logits = p.tile;
    tile_logits(p.query.get() + static_cast<size_t>(r0) * d, block, logits);
    for (int r = 0; r < rows.count; ++r)
      for (int column = 0; column < kBlock; column += W) {
        vf biased = load(logits + r * kBlock + column) + load(block.bias + column);
        if (!block.plain) biased = select(visible(block, rows, r, column), biased, splat(kLogZero));
        store(logits + r * kBlock + column, exp(biased - p.row_max.get()[r0 + r]) / p.row_sum.get()[r0 + r]);
      }
    for (int k = 0; k < a.statistics; ++k) {
      if (a.statistic[k].kind != KV_STATISTIC_PROBABILITY) continue;
      float* slot_sum = p.columns.get() + (2 * k + 1) * column_stride() + block.from;
      for (int r = 0; r < rows.count; ++r) {
        const float weight = std::exp(p.log_share.get()[k * p.padded + r0 + r]);
        for (int column = 0; column < kBlock; column += W)
          store(slot_sum + column, load(slot_sum + column) + weight * load(logits + r * kBlock + column));
      }
    }
  }

  void finish(const Head& x, size_t index) { combine_splits(x, partials.of(index * splits), largest); }
};

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
