// Prefill's statistics on tensor cores, for 16-bit caches: `PrefillScores` of prefill.h with larger tiles. A block of
// four warps per KV head and 64 or 128 slots, whose keys stay in registers as the left operand:
//
//   for each statistic, for each tile of rows that it counts      the next tile is copied while this one is multiplied
//     logit[slots, rows] = key x query^T, masked
//     probability: slot_sum += exp(logit + bias - row_max) weight / row_sum
//     log_ema:     slot_max, slot_sum = running sum of exp(logit + ln(weight))
//   add up over the four lanes that share a slot; write the slot's statistic
//
// w is the work of a block, m a tile of 16 slots of a warp.
#pragma once

#include "prefill_mma.h"

namespace kv {
namespace cuda {

template <class T, int kMaxSize>
struct PrefillMmaScores {
  using Args = Attention;
  static constexpr int kSize = kMaxSize, kThreads = 128, kBlocksPerMultiprocessor = kMaxSize % 64 == 0 ? 3 : 2;
  static constexpr int kTiles = kSize > 128 ? 1 : 2;  // tiles of 16 slots of a warp
  static constexpr int kSlots = kThreads / kWarp * kTiles * 16, kRows = kSlots / 2, kHalf = kRows / 2;
  using Shape = Rows<PrefillMmaScores>;

  // The constants of a row's contribution to every slot. For a probability: exponent = -row_max, factor = weight /
  // row_sum. For a log_ema: exponent = ln(weight), and factor = the weight in the first row of a token, 0 in its
  // others.
  struct alignas(16) Term {
    float exponent, factor;
    int now, unused;
  };

  // A lane has slots lane / 4 and lane / 4 + 8 of a warp's products, and two of every 8 rows. The products belong to
  // half a tile of rows.
  struct Registers {
    uint32_t key[kTiles][kSize / 16][4], b[4];
    float logit[kTiles][kHalf / 8][4];
    float bias[kTiles][2], slot_max[kTiles][2], slot_sum[kTiles][2], counted[kTiles][2], lane_max[kTiles][2];
    Term term;
  };

  // The arrays in shared memory. rows: two tiles of rows in turn, at first the keys; terms: one for each of these rows;
  // slot_max, slot_sum, counted, position: one for every slot; range: the lowest position of the slots, and the lowest
  // complement ~position.
  struct Shared {
    Shape rows;
    Term* terms;
    float *slot_max, *slot_sum, *counted;
    int *position, *range;

    KV_DEVICE Shape tile(int i) const { return {rows.row(i % 2 * kRows)}; }
  };
  static KV_HD constexpr size_t shared_size() {
    return 2 * kRows * (Shape::kStride + sizeof(Term)) + (4 * kSlots + 2) * sizeof(float);
  }
  static KV_DEVICE Shared divide(char* shared) {
    Shared s;
    s.rows.base = shared;
    s.terms = reinterpret_cast<Term*>(s.rows.row(2 * kRows));
    s.slot_max = reinterpret_cast<float*>(s.terms + 2 * kRows);
    s.slot_sum = s.slot_max + kSlots, s.counted = s.slot_sum + kSlots;
    s.position = reinterpret_cast<int*>(s.counted + kSlots);
    s.range = s.position + kSlots;
    return s;
  }
  static KV_HD int blocks_per_head(int capacity) { return (capacity + kSlots - 1) / kSlots; }
  static KV_DEVICE int slot_of(int t, int tile, int half) {
    return t / kWarp * kTiles * 16 + tile * 16 + half * 8 + t % kWarp / 4;
  }

  // The work of a block: slots [from, from + count) of a head, and a statistic that counts the last `counted` of n
  // queries.
  struct Work {
    const Head<T>& head;
    const float* rows;  // row_max and row_sum of the group's rows, or nullptr
    Tokens tokens;
    int used, n, first, from, count;
    int k, counted;
    KvStatistic statistic;

    KV_DEVICE bool is_probability() const { return statistic.kind == KV_STATISTIC_PROBABILITY; }
    KV_DEVICE int end() const { return n * tokens.group; }
  };

  static KV_DEVICE void run(Block<PrefillMmaScores>& block, const Attention& args) {
    const KvVoteAttention& a = args.call;
    const Part part(args, block.index());
    const Head<T> head(args, part);
    const Shared s = divide(block.shared);
    const float* rows =
        args.row_softmax ? args.row_softmax + 2 * static_cast<size_t>(head.query_head(0)) * a.tokens : nullptr;
    Work w{head, rows, Tokens(args.group()), args.used[2 * head.index], args.used[2 * head.index + 1], 0, 0, 0, 0,
           0,    {}};
    w.first = head.first(), w.from = part.split * kSlots;
    w.count = min_of(kSlots, w.used + w.n - w.from);
    if (w.n == 0 || w.count <= 0) return;
    load_slots(block, w, s);
    for (w.k = 0; w.k < a.statistics; ++w.k) {
      w.statistic = statistic_of(a, w.k);
      if (w.statistic.kind == KV_STATISTIC_NONE) continue;
      w.counted = counted_queries(w.statistic, w.n);
      add_rows(block, w, s);
      finish(block, w, s);
    }
  }

  static KV_DEVICE void load_slots(Block<PrefillMmaScores>& block, const Work& w, const Shared& s) {
    const KvVoteAttention& a = w.head.a;
    block.each_alone([&](int t, auto&) {
      s.rows.clear_columns(kSlots, a.key_size, t);
      s.rows.template copy<kSlots>(block, w.count, a.key_size, t, [&](int i) { return w.head.key(w.from + i); });
      if (t < 2) s.range[t] = INT32_MAX;
    });
    block.cp_async_commit();
    block.cp_async_wait(0);
#pragma unroll
    for (int i = 0; i < kTiles * kSize / 16; ++i) {
      const int m = i / (kSize / 16), k = i % (kSize / 16);
      load_a(
          block, Shape::kStride, [&](int t) { return s.rows.row((t / kWarp * kTiles + m) * 16) + k * 32; },
          [&](Registers& r) { return r.key[m][k]; });
    }
    static_assert(kSlots <= kThreads, "a thread for every slot");
    block.each([&](int t, auto&) {
      if (t >= kSlots) return;
      s.position[t] = t < w.count ? w.head.position()[w.from + t] : INT32_MAX;
      if (t >= w.count) return;
      block.lower(s.range, s.position[t]);
      block.lower(s.range + 1, ~s.position[t]);
    });
  }

  // Adds up the rows that count and see one of the slots.
  static KV_DEVICE void add_rows(Block<PrefillMmaScores>& block, const Work& w, const Shared& s) {
    const KvVoteAttention& a = w.head.a;
    const int oldest = max_of(max_of(w.n - w.counted, w.from - w.used), 0);
    const auto copy = [&](int i, int begin, int t) {
      s.tile(i).template copy<kRows>(block, w.end() - begin, a.key_size, t, [&](int row) {
        return w.head.query(0, 0) + w.tokens.place(begin + row, a.tokens) * a.key_size;
      });
    };
    int begin = oldest * w.tokens.group / kRows * kRows;
    block.each_alone([&](int t, Registers& r) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const int m = i / 2, half = i % 2, slot = w.from + slot_of(t, m, half);
        const bool has_bias = w.is_probability() && slot < w.used;  // a log_ema averages logits without votes
        r.bias[m][half] = has_bias ? vote_bias(w.head.votes()[slot], a) * kLog2E : 0.0f;
        r.slot_max[m][half] = kLowest, r.slot_sum[m][half] = r.counted[m][half] = 0.0f;
      }
      copy(0, begin, t);
      if (t < kRows) s.terms[t] = term_of(w, begin + t);
    });
    block.cp_async_commit();
    for (int i = 0; begin < w.end(); ++i, begin += kRows) {
      const int next = begin + kRows;
      block.cp_async_wait(0);  // these rows are there, and no thread reads the earlier ones any more
      block.each_alone([&](int t, Registers& r) {
        if (next >= w.end()) return;
        copy(i + 1, next, t);
        if (t < kRows) r.term = term_of(w, next + t);
      });
      block.cp_async_commit();
      const int earliest = w.first + w.tokens(begin), latest = w.first + w.tokens(min_of(next, w.end()) - 1);
      const bool masked =
          !visible(~s.range[1], earliest, a.sliding_window) || !visible(s.range[0], latest, a.sliding_window);
#pragma unroll 1
      for (int first = 0; first < kRows; first += kHalf) {
        multiply_rows(block, s.tile(i).row(first));
        block.each_alone([&](int t, Registers& r) {
          const Term* terms = s.terms + i % 2 * kRows + first;
          if (w.is_probability())
            masked ? add_probabilities<true>(r, w, s, terms, t) : add_probabilities<false>(r, w, s, terms, t);
          else
            masked ? add_logits<true>(r, w, s, terms, t) : add_logits<false>(r, w, s, terms, t);
        });
      }
      block.each_alone([&](int t, Registers& r) {
        if (next < w.end() && t < kRows) s.terms[(i + 1) % 2 * kRows + t] = r.term;
      });
    }
  }

  static KV_DEVICE Term term_of(const Work& w, int row) {
    const int token = w.tokens(row);
    const float weight = row < w.end() ? log_query_weight(w.statistic, w.n - 1 - token, w.counted) : kLogZero;
    const int now = w.first + token;
    if (weight == kLogZero) return {-INFINITY, 0.0f, now, 0};
    if (!w.is_probability()) return {weight * kLog2E, row == token * w.tokens.group ? expf(weight) : 0.0f, now, 0};
    const float* softmax = w.rows + 2 * w.tokens.place(row, w.head.a.tokens);
    return {-softmax[0], expf(weight) / softmax[1], now, 0};
  }

  static KV_DEVICE void multiply_rows(Block<PrefillMmaScores>& block, const char* rows) {
    block.each_alone([&](int, Registers& r) {
#pragma unroll
      for (int i = 0; i < kTiles * kHalf / 2; ++i) r.logit[i / (kHalf / 2)][i % (kHalf / 2) / 4][i % 4] = 0.0f;
    });
#pragma unroll
    for (int k = 0; k < kSize / 16; ++k)
#pragma unroll
      for (int j = 0; j < kHalf / 16; ++j) {
        load_b(
            block, Shape::kStride, [&](int) { return rows + j * 16 * Shape::kStride + k * 32; },
            [](Registers& r) { return r.b; });
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i)
          multiply<T>(block, [&](Registers& r) {
            return Product{r.logit[i / 2][2 * j + i % 2], r.key[i / 2][k], r.b + i % 2 * 2};
          });
      }
  }

  // Calls f(tile, half, logit, factor) for every logit; the logit is -infinity if the row does not count or see the
  // slot.
  template <bool kMasked, class F>
  static KV_DEVICE void each_logit(Registers& r, const Work& w, const Shared& s, const Term* terms, int t, F f) {
    const Logits logits(w.head.a);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) logits.cap(r.logit[m]);
#pragma unroll
    for (int j = 0; j < kHalf / 4; ++j) {
      const Term term = terms[j / 2 * 8 + t % 4 * 2 + j % 2];
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const int m = i / 2, half = i % 2;
        float& x = r.logit[m][j / 2][2 * half + j % 2];
        const bool sees = !kMasked || visible(s.position[slot_of(t, m, half)], term.now, w.head.a.sliding_window);
        x = sees ? logits(x, r.bias[m][half]) + term.exponent : -INFINITY;
        f(m, half, x, sees ? term.factor : 0.0f);
      }
    }
  }

  template <bool kMasked>
  static KV_DEVICE void add_probabilities(Registers& r, const Work& w, const Shared& s, const Term* terms, int t) {
    each_logit<kMasked>(r, w, s, terms, t,
                        [&](int m, int half, float x, float factor) { r.slot_sum[m][half] += exp2_of(x) * factor; });
  }

  template <bool kMasked>
  static KV_DEVICE void add_logits(Registers& r, const Work& w, const Shared& s, const Term* terms, int t) {
    float slot_max[kTiles][2];
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) slot_max[i / 2][i % 2] = r.slot_max[i / 2][i % 2];
    each_logit<kMasked>(r, w, s, terms, t, [&](int m, int half, float x, float factor) {
      slot_max[m][half] = fmaxf(slot_max[m][half], x), r.counted[m][half] += factor;
    });
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int m = i / 2, half = i % 2;
      r.slot_sum[m][half] *= exp2_of(r.slot_max[m][half] - slot_max[m][half]);
      r.slot_max[m][half] = slot_max[m][half];
#pragma unroll
      for (int j = 0; j < kHalf / 4; ++j)
        r.slot_sum[m][half] += exp2_of(r.logit[m][j / 2][2 * half + j % 2] - slot_max[m][half]);
    }
  }

  // Adds up the four lanes of a slot and writes its statistic.
  static KV_DEVICE void finish(Block<PrefillMmaScores>& block, const Work& w, const Shared& s) {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      block.each_alone([&](int, Registers& r) { r.lane_max[i / 2][i % 2] = r.slot_max[i / 2][i % 2]; });
      block.template warp_max<4>([&](Registers& r) -> float& { return r.slot_max[i / 2][i % 2]; });
      block.each_alone([&](int, Registers& r) {
        r.slot_sum[i / 2][i % 2] *= exp2_of(r.lane_max[i / 2][i % 2] - r.slot_max[i / 2][i % 2]);
      });
      block.template warp_sum<4>([&](Registers& r) -> float& { return r.slot_sum[i / 2][i % 2]; });
      block.template warp_sum<4>([&](Registers& r) -> float& { return r.counted[i / 2][i % 2]; });
    }
    block.each([&](int t, Registers& r) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const int m = i / 2, half = i % 2, slot = slot_of(t, m, half);
        if (t % 4) continue;
        s.slot_max[slot] = r.slot_max[m][half], s.slot_sum[slot] = r.slot_sum[m][half],
        s.counted[slot] = r.counted[m][half];
      }
    });
    block.each([&](int t, auto&) {
      if (t >= w.count) return;
      const int slot = w.from + t;
      w.head.score(w.k)[slot] = statistic_after(w.head, w.statistic, w.k, w.used, slot, age_of(s.position[t], w.first),
                                                w.n, s.slot_max[t] * kLn2, s.slot_sum[t], s.counted[t]);
    });
  }
};

}  // namespace cuda
}  // namespace kv
