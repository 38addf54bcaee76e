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
// first_row: the first row of a tile in its task. padded_size: Dv rounded up to whole vectors.
#pragma once

#include "../core/tile.h"
#include "attention.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr float kFar = 40.0f;  // weights above exp(-40), and their sums, are far above the smallest float32 number

template <class K, class V>
struct Prefill : Attention<K, V> {
  using Base = Attention<K, V>;
  using Base::call, Base::group, Base::splits, Base::partials;
  using Base::head_of, Base::key_row, Base::value_row, Base::slot_position, Base::bias, Base::capped,
      Base::write_output, Base::score_of;
  using typename Base::Head;
  using typename Base::Query;

  const int largest;  // the most slots of a KV head

  Prefill(const KvVoteAttention& call, int splits)
      : Base(call, splits, 2 * static_cast<size_t>(call.statistics) * largest_capacity(call.capacity, call.heads)),
        largest(largest_capacity(call.capacity, call.heads)) {}

  // The rows of a tile, and the positions (low, now] that the token of each row sees.
  struct Rows {
    int first, count;
    int32_t now[kTileRows], low[kTileRows];
  };

  // A packed block of the cache: keys [D, kBlock], transposed; values [kBlock, padded Dv]; both float32.
  struct Block {
    int from, count;
    float *key, *value, *bias;
    int32_t* position;
    bool plain;  // whether every row sees every slot
  };

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

  int padded_value_size() const { return (call.value_size + W - 1) / W * W; }

  void task(size_t task) {
    const Head head = head_of(task / splits);
    const int s = static_cast<int>(task % splits);
    if (head.n == 0) return;
    static thread_local Work work;
    static thread_local Scratch<float> packed;
    int32_t positions[kBlock];
    // Rows of this split
    const int rows_in_all = head.n * group, tiles_in_all = (rows_in_all + kTileRows - 1) / kTileRows;
    const int tiles_each = (tiles_in_all + splits - 1) / splits;
    work.first = min_of(s * tiles_each * kTileRows, rows_in_all);
    work.last = min_of((s + 1) * tiles_each * kTileRows, rows_in_all);
    const int tiles = (work.last - work.first + kTileRows - 1) / kTileRows, d = call.key_size,
              padded_size = padded_value_size();
    pack_queries(head, work, tiles);
    work.rows.reserve(work.padded * padded_size, 0.0f);
    work.columns.reserve(2 * call.statistics * column_stride(), 0.0f);
    for (int k = 0; k < call.statistics; ++k)
      for (size_t c = 0; c < column_stride(); ++c) work.columns.get()[2 * k * column_stride() + c] = kLogZero;
    // Passes over all slots, block by block
    float* keys = packed.reserve(static_cast<size_t>(kBlock) * (d + padded_size + 1) + W);
    Block block{0, 0, keys, keys + kBlock * d, keys + kBlock * (d + padded_size), positions, false};
    bool counts = false;  // whether pass 2 is needed
    for (int k = 0; k < call.statistics; ++k) counts |= call.statistic[k].kind == KV_STATISTIC_PROBABILITY;
    for (int pass = 0; pass < (counts ? 2 : 1); ++pass) {
      for (block.from = 0; block.from < head.end(); block.from += kBlock) {
        block.count = min_of(kBlock, head.end() - block.from);
        pack(head, block);
        for (int tile = 0; tile < tiles; ++tile) {
          const Rows rows = rows_of(head, work.first + tile * kTileRows, work.last);
          if (block.from > head.used && block.position[0] > rows.now[rows.count - 1]) continue;  // all slots are later
          pass == 0 ? attend_tile(work, block, rows, tile) : count_tile(work, block, rows, tile);
        }
      }
    }
    // Outputs of the rows
    for (int r = 0; r < work.last - work.first; ++r) {
      const int row = work.first + r;
      write_output(head, row % group, row / group, work.rows.get() + static_cast<size_t>(r) * padded_size,
                   1.0f / work.row_sum.get()[r]);
    }
    // Scores, or the sums of this split
    if (splits == 1) {
      combine_splits(head, work.columns.get(), column_stride());
    } else {
      float* shared = partials.of(task);
      for (int k = 0; k < 2 * call.statistics; ++k)
        memcpy(shared + static_cast<size_t>(k) * largest, work.columns.get() + k * column_stride(),
               head.end() * sizeof(float));
    }
  }

  // Fills the task's query rows (times scale), their initial row_max and row_sum, and the log weights of their queries.
  void pack_queries(const Head& head, Work& work, int tiles) const {
    const int d = call.key_size;
    work.padded = static_cast<size_t>(tiles) * kTileRows;
    work.query.reserve(work.padded * d, 0.0f);
    work.row_max.reserve(work.padded, kLowest);
    work.row_sum.reserve(work.padded, 0.0f);
    work.log_share.reserve(work.padded * call.statistics, kLogZero);
    for (int row = work.first; row < work.last; ++row) {
      const int t = row / group, g = row % group, r = row - work.first;
      const Query* from = static_cast<const Query*>(call.query) +
                          ((static_cast<size_t>(head.b) * call.query_heads + head.h * group + g) * call.tokens + t) * d;
      float* to = work.query.get() + static_cast<size_t>(r) * d;
      for (int i = 0; i < d; ++i) to[i] = static_cast<float>(from[i]) * call.scale;
      if (call.sink_logits) {
        work.row_max.get()[r] = call.sink_logits[head.h * group + g];
        work.row_sum.get()[r] = 1.0f;
      }
      for (int k = 0; k < call.statistics; ++k) {
        const KvStatistic& statistic = call.statistic[k];
        const float weight = log_query_weight(statistic, head.n - 1 - t, counted_queries(statistic, head.n));
        if (weight == kLogZero) continue;
        const float rate = statistic.kind == KV_STATISTIC_LOG_EMA ? std::log(1.0f - statistic.decay) : 0.0f;
        work.log_share.get()[k * work.padded + r] = weight + rate - std::log(static_cast<float>(group));
      }
    }
  }

  // Packs the slots [block.from, block.from + block.count), and pads the block with invisible slots.
  void pack(const Head& head, Block& block) const {
    const int d = call.key_size, dv = call.value_size, padded_size = padded_value_size();
    static thread_local Scratch<float> scratch;
    float *rows = scratch.reserve(W * d + 2 * kBlock), *key_scale = rows + W * d, *value_scale = key_scale + kBlock;
    if constexpr (kQuantized<K>) {
      this->scales_of(head, head.key_scale, block.from, block.from + block.count, key_scale);
      this->scales_of(head, head.value_scale, block.from, block.from + block.count, value_scale);
      for (int c = block.count; c < kBlock; ++c) key_scale[c] = 0.0f;
    }
    // Keys, transposed
    for (int c = 0; c < kBlock; c += W) {
      for (int j = 0; j < W; ++j) {
        const int slot = block.from + c + j;
        if (c + j < block.count)
          widen(key_row(head, slot), rows + j * d, d);
        else
          memset(rows + j * d, 0, d * sizeof(float));
      }
      pack_columns(rows, d, kQuantized<K> ? load(key_scale + c) : splat(1.0f), block.key + c);
    }
    // Values and positions
    for (int c = 0; c < kBlock; ++c) {
      const int slot = block.from + c;
      block.position[c] = INT32_MAX;  // later than any query
      if (c >= block.count) continue;
      if constexpr (kQuantized<K>)
        dequantize(value_row(head, slot), value_scale[c], dv, block.value + c * padded_size);
      else
        widen(value_row(head, slot), block.value + c * padded_size, dv);
      for (int i = dv; i < padded_size; ++i) block.value[c * padded_size + i] = 0.0f;
      block.position[c] = static_cast<int32_t>(slot_position(head, slot));
    }
    // The votes' bias; `visible` compares positions
    for (int c = block.count; c < kBlock; ++c) block.bias[c] = kLogZero;
    for (int c = 0; c < block.count; ++c) {
      const int slot = block.from + c;
      block.bias[c] = slot < head.used && call.vote_exponent != 0.0f ? head.past_votes[slot] : 1.0f;
    }
    if (call.vote_exponent != 0.0f)
      for (int c = 0; c < block.count; c += W) {
        const vf v = this->vote_bias(load(block.bias + c));
        for (int i = 0; i < W && c + i < block.count; ++i) block.bias[c + i] = v[i];
      }
    else
      for (int c = 0; c < block.count; ++c) block.bias[c] = 0.0f;
    block.plain = call.sliding_window == 0 && block.count == kBlock && block.from + kBlock <= head.used;
  }

  Rows rows_of(const Head& head, int first, int last) const {
    Rows rows{first, min_of(kTileRows, last - first), {}, {}};
    for (int r = 0; r < kTileRows; ++r) {
      const int t = (first + min_of(r, rows.count - 1)) / group;
      rows.now[r] = static_cast<int32_t>(head.first + t);
      rows.low[r] = call.sliding_window ? rows.now[r] - call.sliding_window : -1;
    }
    return rows;
  }

  vi visible(const Block& block, const Rows& rows, int r, int column) const {
    const vi position = load_i(block.position + column);
    return (position <= rows.now[r]) & (position > rows.low[r]);
  }

  // Pass 1 of a tile: row_max, row_sum, output rows, and the log_ema of its slots.
  void attend_tile(Work& work, const Block& block, const Rows& rows, int tile) const {
    const int d = call.key_size, padded_size = padded_value_size(), first_row = tile * kTileRows;
    float *logits = work.tile, *query = work.query.get() + static_cast<size_t>(first_row) * d;
    tile_logits(query, block, logits);
    const bool logs = counts_logs(work, rows, first_row);
    if (logs && !block.plain) accumulate_logs(work, block, rows, logits, first_row, false);
    // Running softmax of every row
    float factor[kTileRows];
    vf far{};  // how far the lowest biased logit is below its row_max
    for (int r = 0; r < kTileRows; ++r) {
      vf highest = splat(work.row_max.get()[first_row + r]), low = splat(3e38f);
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
      factor[r] = std::exp(work.row_max.get()[first_row + r] - row_max);
      work.row_sum.get()[first_row + r] = work.row_sum.get()[first_row + r] * factor[r] + sum(weights);
      work.row_max.get()[first_row + r] = row_max;
    }
    // Averages of logits, from weights if possible
    if (logs && block.plain && max(far) < kFar) {
      accumulate_logs(work, block, rows, logits, first_row, true);
    } else if (logs && block.plain) {
      float raw[kTileRows * kBlock];
      tile_logits(query, block, raw);
      accumulate_logs(work, block, rows, raw, first_row, false);
    }
    // Weights times values
    float* out = work.rows.get() + static_cast<size_t>(first_row) * padded_size;
    int column = 0;
    for (; column + kTileVectors * W <= padded_size; column += kTileVectors * W)
      tile_product<kTileVectors>(logits, block, factor, out, column);
    for (; column < padded_size; column += W) tile_product<1>(logits, block, factor, out, column);
  }

  // Computes the logits [kTileRows, kBlock] of the rows `query` [kTileRows, D].
  void tile_logits(const float* query, const Block& block, float* logits) const {
    const float* rows[kTileRows];
    for (int r = 0; r < kTileRows; ++r) rows[r] = query + r * call.key_size;
    tile_products(rows, block.key, call.key_size, logits);
    if (call.softcap == 0.0f) return;
    for (int i = 0; i < kTileRows * kBlock; i += W) store(logits + i, capped(load(logits + i)));
  }

  // rows [kTileRows, padded Dv] = rows * factor + weights [kTileRows, kBlock] x values, in N vectors of columns.
  template <int N>
  void tile_product(const float* weights, const Block& block, const float* factor, float* rows, int column) const {
    const int padded_size = padded_value_size();
    vf product[kTileRows][N] = {};  // this block's sums: running sums over all blocks would gather rounding errors
    const float* v = block.value + column;
    for (int c = 0; c < block.count; ++c, v += padded_size) {
      vf value[N];
      for (int j = 0; j < N; ++j) value[j] = load(v + j * W);
      for (int r = 0; r < kTileRows; ++r)
        for (int j = 0; j < N; ++j) product[r][j] += weights[r * kBlock + c] * value[j];
    }
    for (int r = 0; r < kTileRows; ++r)
      for (int j = 0; j < N; ++j) {
        float* const to = rows + r * padded_size + column + j * W;
        store(to, load(to) * factor[r] + product[r][j]);
      }
  }

  // Whether statistic k is a log_ema that counts a row of the tile that begins at row first_row of the task.
  bool counts_log(const Work& work, const Rows& rows, int first_row, int k) const {
    return call.statistic[k].kind == KV_STATISTIC_LOG_EMA &&
           work.log_share.get()[k * work.padded + first_row + rows.count - 1] != kLogZero;
  }
  bool counts_logs(const Work& work, const Rows& rows, int first_row) const {
    for (int k = 0; k < call.statistics; ++k)
      if (counts_log(work, rows, first_row, k)) return true;
    return false;
  }

  // Adds a tile to every log_ema, from its weights or (weights = false) its logits.
  void accumulate_logs(Work& work, const Block& block, const Rows& rows, const float* tile, int first_row,
                       bool weights) const {
    for (int k = 0; k < call.statistics; ++k) {
      if (!counts_log(work, rows, first_row, k)) continue;
      const float* share = work.log_share.get() + k * work.padded + first_row;
      float *slot_max = work.columns.get() + 2 * k * column_stride(), *slot_sum = slot_max + column_stride();
      weights ? accumulate_weights(block, rows, tile, work.row_max.get() + first_row, share, slot_max, slot_sum)
              : accumulate_log(block, rows, tile, share, slot_max, slot_sum);
    }
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

  // Pass 2 of a tile, for sums of probabilities: every row's row_max and row_sum are final.
  void count_tile(Work& work, const Block& block, const Rows& rows, int tile) const {
    const int d = call.key_size, first_row = tile * kTileRows;
    bool counts = false;
    for (int k = 0; k < call.statistics; ++k)
      counts |= call.statistic[k].kind == KV_STATISTIC_PROBABILITY &&
                work.log_share.get()[k * work.padded + first_row + rows.count - 1] != kLogZero;
    if (!counts) return;
    float* logits = work.tile;
    tile_logits(work.query.get() + static_cast<size_t>(first_row) * d, block, logits);
    for (int r = 0; r < rows.count; ++r)
      for (int column = 0; column < kBlock; column += W) {
        vf biased = load(logits + r * kBlock + column) + load(block.bias + column);
        if (!block.plain) biased = select(visible(block, rows, r, column), biased, splat(kLogZero));
        store(logits + r * kBlock + column,
              exp(biased - work.row_max.get()[first_row + r]) / work.row_sum.get()[first_row + r]);
      }
    for (int k = 0; k < call.statistics; ++k) {
      if (call.statistic[k].kind != KV_STATISTIC_PROBABILITY) continue;
      float* slot_sum = work.columns.get() + (2 * k + 1) * column_stride() + block.from;
      for (int r = 0; r < rows.count; ++r) {
        const float weight = std::exp(work.log_share.get()[k * work.padded + first_row + r]);
        for (int column = 0; column < kBlock; column += W)
          store(slot_sum + column, load(slot_sum + column) + weight * load(logits + r * kBlock + column));
      }
    }
  }

  void finish(const Head& head, size_t index) { combine_splits(head, partials.of(index * splits), largest); }

  // Combines the columns of a head's splits in their order and writes its scores. columns [splits][K, 2, stride].
  void combine_splits(const Head& head, const float* columns, size_t stride) const {
    for (int k = 0; k < call.statistics; ++k) {
      const KvStatistic& statistic = call.statistic[k];
      const float* past = score_of(head.past_score, k);
      const float* column = columns + 2 * k * stride;
      const size_t next = 2 * call.statistics * stride;  // the same column of the next split
      float* out = score_of(head.score, k);
      if (statistic.kind == KV_STATISTIC_NONE) {
        if (out != past) memcpy(out, past, head.end() * sizeof(float));
      } else if (statistic.kind == KV_STATISTIC_PROBABILITY) {
        const float decay =
            std::exp(static_cast<float>(counted_queries(statistic, head.n)) * std::log(statistic.decay));
        for (int c = 0; c < head.end(); ++c) {
          float received = 0.0f;
          for (int i = 0; i < splits; ++i) received += column[i * next + stride + c];
          out[c] = (c < head.used ? past[c] * decay : 0.0f) + received;
        }
      } else {
        const float log_decay = static_cast<float>(head.n) * std::log(statistic.decay);
        const bool unequal = statistic.window != 0 || statistic.recency_weight != 1.0f;  // queries do not count alike
        const Standing standing(statistic, unequal ? head.n : 0);
        for (int c = 0; c < head.end(); ++c) {
          const float start = c < head.used ? past[c] + log_decay : kLogZero;
          float shift = 0.0f;
          if (unequal) {
            // Queries [age, end) see the slot: none if its position is after all of them.
            const int64_t age = slot_position(head, c) - head.first,
                          end = call.sliding_window ? age + call.sliding_window : head.n;
            const auto within = [&](int64_t t, int least) {
              return static_cast<int>(t < least ? least : t > head.n ? head.n : t);
            };
            const int from = within(age, 0);
            shift = standing.log_ratio(from, within(end, from));
          }
          float highest = start, sum = 0.0f;
          for (int i = 0; i < splits; ++i) highest = max_of(highest, column[i * next + c] + shift);
          for (int i = 0; i < splits; ++i)
            sum += column[i * next + stride + c] * std::exp(column[i * next + c] + shift - highest);
          out[c] = highest + std::log(sum + std::exp(start - highest));
        }
      }
    }
  }

  // The standing of a windowed or recency-weighted log_ema: cumulative weights over the queries [0, t), of all queries
  // and of those that count.
  struct Standing {
    Scratch<float> whole_, counted_;
    Standing(const KvStatistic& s, int n) {
      float *whole = whole_.reserve(n + 1, 0.0f), *counted = counted_.reserve(n + 1, 0.0f);
      for (int t = 0; t < n; ++t) {
        whole[t + 1] = whole[t] + std::pow(s.decay, static_cast<float>(n - 1 - t));
        counted[t + 1] = counted[t] + std::exp(log_query_weight(s, n - 1 - t, counted_queries(s, n)));
      }
    }
    // Returns ln(standing) of a slot that the queries [from, to) see.
    float log_ratio(int from, int to) const {
      const float *whole = whole_.get(), *counted = counted_.get(), least = 1e-30f;
      return std::log(max_of(whole[to] - whole[from], least)) - std::log(max_of(counted[to] - counted[from], least));
    }
  };
};

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
