// The fit of one KV head to its reference queries (kvexport/methods/primitives/fit.py). It runs after `choose` has
// decided which slots are evicted, and before `place` writes the kept slots:
//
//   read: logit[r, slot] = query . key, of R reference queries that have seen at least one position
//         before[r, slot] = softmax of logit + alpha ln(votes) over the slots that the query has seen
//   weigh_by_queries: importance[slot] = sum of before^2, if policy.select is attended
//   fit_votes: votes times factors, so that the kept slots receive the probability mass of all slots
//   read_again: after = as before, over the kept slots with their new votes; X = after of the free slots
//   fit_values:
//         Z = (X X^T + ridge)^-1 (before - after) V, by Cholesky's factors, in float64
//         V + X^T Z, the change no more than change_max of the norm
//   write_fit: every free slot, one that is kept and can receive, becomes a merge set of its own with an unchanged key
//
// Arrays [R, slots] are stored in blocks of kBlock slots, so that tile_products can read the rows of a block: element
// (r, i) is at of(r, i). Rows are padded to whole tiles, slots to whole blocks, with zeros. Indices:
// those of nearest.h; f: the memory of a fit (in keep_ring a rotary plane), r a reference query, i a slot, b a block.
#pragma once

#include "select.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr float kHidden = -1e30f;    // the bias of an empty or evicted slot, below every logit
constexpr float kMostShare = 34.5f;  // the largest ln of a slot's share of the mass of all slots, as in fit.py

// The arrays of a fit, reused by its thread.
struct FitWork {
  Scratch<float> query, logits, before, shares, after, bias, free, goal, factor, votes, packed, wide, columns, change,
      mass, whole, product, solution;
  Scratch<int32_t> seen, position;
  Scratch<char> has_free;  // of each block of slots
  Scratch<double> gram, solved;
  int rows = 0, padded = 0, blocks = 0;
  size_t of(int r, int i) const { return (static_cast<size_t>(i / kBlock) * padded + r) * kBlock + i % kBlock; }
  size_t size() const { return static_cast<size_t>(blocks) * padded * kBlock; }
  int slots() const { return blocks * kBlock; }
};

static inline int blocks_of(int count) { return (count + kBlock - 1) / kBlock; }

template <class K, class V>
struct Fit : Select<K, V> {
  using Base = Select<K, V>;
  using Base::call, Base::policy, Base::key_row, Base::value_row, Base::score_of;
  using typename Base::Head;
  using typename Base::Row;
  const KvFit* fit;    // nullptr: no fit
  const KvRing* ring;  // the reference queries of a fit

  Fit(const KvMergeCache& call, const KvFit* fit, const KvRing* ring) : Base(call), fit(fit), ring(ring) {}

  // out [count, kBlock] = rows [count, size] x columns [size, kBlock], or += with add. row_of(r): a row's address.
  template <class RowOf>
  static void products(RowOf row_of, int count, const float* columns, int size, float* out, bool add) {
    for (int first = 0; first < count; first += kTileRows) {
      const float* rows[kTileRows];
      const int height = min_of(kTileRows, count - first);
      for (int r = 0; r < kTileRows; ++r) rows[r] = row_of(first + min_of(r, height - 1));
      float* const to = out + static_cast<size_t>(first) * kBlock;
      if (height <= 2)  // the usual case: 32 rows are five tiles of six and two rows
        add ? tile_products<true, 2>(rows, columns, size, to) : tile_products<false, 2>(rows, columns, size, to);
      else
        add ? tile_products<true>(rows, columns, size, to) : tile_products<false>(rows, columns, size, to);
    }
  }

  // Prefetches a row: slots are in no order, so the processor cannot predict the next row.
  static void fetch(const Row* row, int size) {
    for (int i = 0; i < size; i += static_cast<int>(64 / sizeof(Row))) __builtin_prefetch(row + i);
  }

  // Fills f.logits, f.before and the reference queries that have seen at least one position.
  void read(const Head& head, const Work& work, size_t index, FitWork& f) const {
    const int d = call.key_size, n = head.used;
    const size_t all = index * ring->rows;
    f.rows = 0;
    int32_t* seen = f.seen.reserve(ring->rows);
    float* query = f.query.reserve(static_cast<size_t>(ring->rows + kTileRows) * d);
    for (int r = 0; r < ring->rows; ++r) {
      if (ring->past.seen[all + r] <= 0) continue;  // no query yet in this row of the ring
      float* to = query + static_cast<size_t>(f.rows) * d;
      memcpy(to, ring->past.query + (all + r) * d, d * sizeof(float));
      if (kQuantized<K> && !call.rotary_planes) hadamard(to, d);  // as widen_all leaves the keys
      seen[f.rows++] = ring->past.seen[all + r];
    }
    f.padded = (f.rows + kTileRows - 1) / kTileRows * kTileRows;
    f.blocks = blocks_of(n);
    memset(query + static_cast<size_t>(f.rows) * d, 0, static_cast<size_t>(f.padded - f.rows) * d * sizeof(float));
    int32_t* position = f.position.reserve(f.slots(), INT32_MAX);
    memcpy(position, work.position.get(), n * sizeof(int32_t));
    float *logits = f.logits.reserve(f.size()), *packed = f.packed.reserve(static_cast<size_t>(kBlock) * d);
    for (int b = 0; b < f.blocks; ++b) {
      for (int i = 0; i < kBlock; i += W) {
        const int rows = max_of(min_of(n - b * kBlock - i, W), 0);
        float* wide = f.wide.reserve(static_cast<size_t>(W) * d);
        for (int j = 0; j < rows; ++j) {
          const int slot = b * kBlock + i + j;
          if (slot + W < n) fetch(key_row(head, work, slot + W), d);
          widen(key_row(head, work, slot), wide + j * d, d);
        }
        memset(wide + rows * d, 0, static_cast<size_t>(W - rows) * d * sizeof(float));
        pack_columns(wide, d, splat(1.0f), packed + i);
      }
      products([&](int r) { return query + static_cast<size_t>(r) * d; }, f.rows, packed, d,
               logits + static_cast<size_t>(b) * f.padded * kBlock, false);
    }
    float *bias = f.bias.reserve(f.slots(), kHidden), *before = f.before.reserve(f.size());
    for (int i = 0; i < n; i += W) {
      const vf vote_bias = fit->read_exponent != 0.0f ? fit->read_exponent * log(load(work.votes.get() + i)) : vf{};
      store(bias + i, select(lane_numbers() + i < n, vote_bias, splat(kHidden)));
    }
    float* whole = f.whole.reserve(f.padded);
    for (int r = 0; r < f.padded; ++r) whole[r] = softmax(f, r, bias, before);
  }

  float bias_of(float votes) const { return fit->read_exponent != 0.0f ? fit->read_exponent * std::log(votes) : 0.0f; }

  // Writes query r's probabilities over the slots that it has seen and whose bias is not kHidden to `out`, zeros
  // elsewhere. Returns ln of the sum of their exp(logit + bias), 0 if there is no such slot.
  float softmax(const FitWork& f, int r, const float* bias, float* out) const {
    constexpr float kNone = -3e38f;
    const int32_t seen = r < f.rows ? f.seen.get()[r] : 0;
    vf highest = splat(kNone), sums{};
    for (int i = 0; i < f.slots(); i += W) {
      const vi visible = (load_i(f.position.get() + i) < seen) & (load(bias + i) > splat(kHidden));
      const vf biased = select(visible, load(f.logits.get() + f.of(r, i)) + load(bias + i), splat(kNone));
      store(out + f.of(r, i), biased);
      highest = vmax(highest, biased);
    }
    const float top = max(highest);
    for (int i = 0; i < f.slots(); i += W) {
      const vf e = top > kNone ? exp(load(out + f.of(r, i)) - top) : vf{};
      store(out + f.of(r, i), e);
      sums += e;
    }
    const float row_sum = sum(sums), factor = row_sum > 0.0f ? 1.0f / row_sum : 0.0f;
    for (int i = 0; i < f.slots(); i += W) store(out + f.of(r, i), load(out + f.of(r, i)) * factor);
    return row_sum > 0.0f ? top + std::log(row_sum) : 0.0f;
  }

  // importance = sum over queries of the squared probabilities. Probabilities below 1e-6 count as 0, so that a number
  // that underflows in only one backend decides nothing.
  void weigh_by_queries(const Head& head, Work& work, FitWork& f) const {
    float* squares = f.goal.reserve(f.slots());
    for (int i = 0; i < f.slots(); i += W) {
      vf sums{};
      for (int r = 0; r < f.rows; ++r) {
        const vf read = load(f.before.get() + f.of(r, i));
        sums += select(read > splat(1e-6f), read * read, vf{});
      }
      store(squares + i, sums);
    }
    memcpy(work.importance.get(), squares, head.used * sizeof(float));
  }

  // Fits votes and values, and appends a set for every free slot to work.rows and work.scores after the sets of the
  // merge.
  void fit_slots(Head& head, Work& work, FitWork& f) const {
    float *free = f.free.reserve(f.slots(), 0.0f), *votes = f.votes.reserve(2 * head.used);
    char* has_free = f.has_free.reserve(f.blocks, 0);
    if (policy.merge == KV_MERGE_DROP) work.row_of_target.reserve(head.used, -1);
    for (int i = 0; i < head.used; ++i) {
      const bool receives =
          call.recent_receives ? work.position.get()[i] >= call.sinks : work.is_unprotected.get()[i] != 0;
      if (receives && !work.is_evicted.get()[i]) free[i] = 1.0f, has_free[i / kBlock] = 1;
      votes[i] = work.votes.get()[i];
    }
    const float* shares = head.merged ? share_merged(head, work, f, votes) : f.before.get();
    const float* unfitted = votes + head.used;
    memcpy(votes + head.used, votes, head.used * sizeof(float));
    if (fit->fit == KV_FIT_VOTES_AND_VALUES) fit_votes(head, work, f, shares, votes);
    read_again(head, work, f, shares, unfitted, votes);
    write_fit(head, work, f, votes, fit_values(head, work, f));
  }

  // Returns the share of each query's mass over all slots that a slot receives after the merge: f.before, except for
  // targets, whose logits, positions and votes are new.
  const float* share_merged(const Head& head, const Work& work, FitWork& f, float* votes) const {
    static thread_local Scratch<float> scratch;
    const int d = call.key_size, each = call.statistics + 2;
    float *shares = f.shares.reserve(f.size()), *key = scratch.reserve(d);
    std::copy_n(f.before.get(), f.size(), shares);
    for (int i = 0; i < head.used; ++i) {
      const int row = work.row_of_target.get()[i];
      if (row < 0) continue;
      const float* rest = work.scores.get() + static_cast<size_t>(row) * each;
      int latest;
      memcpy(&latest, &rest[1], sizeof latest);
      votes[i] = rest[0];
      f.position.get()[i] = work.position.get()[latest];
      memcpy(key, work.rows.get() + static_cast<size_t>(row) * (d + call.value_size), d * sizeof(float));
      if (kQuantized<K> && call.rotary_planes) hadamard(key, d);  // undoes the one in `merge`
      const float bias = bias_of(votes[i]);
      for (int r = 0; r < f.rows; ++r) {
        const float logit = dot(key, f.query.get() + static_cast<size_t>(r) * d, d);
        const float log_share = logit + bias - f.whole.get()[r];
        const bool visible = f.position.get()[i] < f.seen.get()[r];
        f.logits.get()[f.of(r, i)] = logit;
        shares[f.of(r, i)] = visible ? std::exp(log_share < kMostShare ? log_share : kMostShare) : 0.0f;
      }
    }
    return shares;
  }

  // f.after = X, the free slots' probabilities among the kept slots with their new votes; f.before becomes before -
  // after. A slot's probability changes in proportion to votes^alpha; if the kept slots' mass for a query falls below
  // 1e-6 or above 1e6, its softmax is computed again. shares: the kept slots' shares of the mass with the votes
  // `unfitted`. votes: the new votes.
  void read_again(const Head& head, const Work& work, FitWork& f, const float* shares, const float* unfitted,
                  const float* votes) const {
    float *lost = f.before.get(), *after = f.after.reserve(f.size()), *ratio = f.factor.reserve(f.slots(), 0.0f);
    const float* free = f.free.get();
    for (int i = 0; i < head.used; ++i)
      if (!work.is_evicted.get()[i])
        ratio[i] =
            fit->read_exponent == 1.0f ? votes[i] / unfitted[i] : std::pow(votes[i] / unfitted[i], fit->read_exponent);
    for (int r = 0; r < f.padded; ++r) {
      vf sums{};
      for (int i = 0; i < f.slots(); i += W) {
        const vf read = load(shares + f.of(r, i)) * load(ratio + i);
        store(after + f.of(r, i), read);
        sums += read;
      }
      const float mass = sum(sums);
      float factor = 1.0f / mass;
      if (!(mass > 1e-6f && mass < 1e6f)) softmax(f, r, bias_after(head, work, f, votes), after), factor = 1.0f;
      for (int i = 0; i < f.slots(); i += W) {
        const vf read = load(after + f.of(r, i)) * factor;
        store(lost + f.of(r, i), load(lost + f.of(r, i)) - read);
        store(after + f.of(r, i), read * load(free + i));
      }
    }
  }

  // Returns the biases of the kept slots with their new votes; kHidden for evicted slots.
  const float* bias_after(const Head& head, const Work& work, const FitWork& f, const float* votes) const {
    float* bias = f.bias.get();
    for (int i = 0; i < head.used; ++i) bias[i] = work.is_evicted.get()[i] ? kHidden : bias_of(votes[i]);
    return bias;
  }

  // Fits factors of the free slots' votes by multiplicative updates factor = factor (P^T 1) / (P^T P factor) (Lee and
  // Seung 2001). P is `shares`, the slots' shares of each query's mass.
  void fit_votes(const Head& head, const Work& work, FitWork& f, const float* shares, float* votes) const {
    const float *read = f.before.get(), *free = f.free.get(), least = std::exp(-fit->bias_max),
                most = std::exp(fit->bias_max);
    float *goals = f.goal.reserve(f.slots()), *factor = f.factor.reserve(2 * f.slots()), *current = factor + f.slots(),
          *mass = f.mass.reserve(2 * f.rows + 1), *current_mass = mass + f.rows;
    for (int i = 0; i < f.slots(); ++i)  // here 1 for a slot whose mass the free slots shall receive
      current[i] = i < head.used && (free[i] != 0.0f || work.is_evicted.get()[i]) ? 1.0f : 0.0f, factor[i] = 1.0f;
    over_slots(f, read, current, mass, false);
    over_rows(f, shares, mass, goals);
    for (int step = 0; step < fit->vote_steps; ++step) {
      for (int i = 0; i < f.slots(); i += W) store(current + i, load(factor + i) * load(free + i));
      over_slots(f, shares, current, current_mass, true);
      over_rows(f, shares, current_mass, current);
      for (int i = 0; i < f.slots(); i += W) {
        const vf goal = load(goals + i), now = load(current + i), old = load(factor + i);
        const vi counts = (load(free + i) > vf{}) & (goal > splat(1e-20f)) & (now > splat(1e-20f));
        store(factor + i, select(counts, old * goal / select(counts, now, splat(1.0f)), old));
      }
    }
    // The votes of the free slots do not exceed those that they and the evicted slots had.
    float votes_before = 0.0f, votes_after = 0.0f;
    for (int i = 0; i < head.used; ++i) {
      if (free[i] != 0.0f || work.is_evicted.get()[i]) votes_before += work.votes.get()[i];
      if (free[i] == 0.0f) continue;
      votes[i] = std::min(std::max(votes[i] * factor[i], least), most);
      votes_after += votes[i];
    }
    const float share = std::min(votes_before / max_of(votes_after, 1e-30f), 1.0f);
    for (int i = 0; i < head.used; ++i)
      if (free[i] != 0.0f) votes[i] *= share;
  }

  // out[r] = sum over slots of read[r, slot] factor[slot]; free_only: over the blocks that have free slots.
  static void over_slots(const FitWork& f, const float* read, const float* factor, float* out, bool free_only) {
    for (int r = 0; r < f.rows; ++r) {
      vf sums[kBlock / W] = {};
      for (int b = 0; b < f.blocks; ++b) {
        if (free_only && !f.has_free.get()[b]) continue;
        const float *row = read + f.of(r, b * kBlock), *factors = factor + b * kBlock;
        for (int j = 0; j < kBlock / W; ++j) sums[j] += load(row + j * W) * load(factors + j * W);
      }
      for (int j = 1; j < kBlock / W; ++j) sums[0] += sums[j];
      out[r] = sum(sums[0]);
    }
  }
  // out[slot] = sum over rows of read[r, slot] factor[r]; zeros in blocks without free slots.
  static void over_rows(const FitWork& f, const float* read, const float* factor, float* out) {
    for (int b = 0; b < f.blocks; ++b) {
      vf sums[kBlock / W] = {};
      if (f.has_free.get()[b])
        for (int r = 0; r < f.rows; ++r)
          for (int j = 0; j < kBlock / W; ++j) sums[j] += load(read + f.of(r, b * kBlock) + j * W) * factor[r];
      for (int j = 0; j < kBlock / W; ++j) store(out + b * kBlock + j * W, sums[j]);
    }
  }

  // Writes the change of the values [slots, padded Dv] to f.change. Returns its factor, which enforces change_max.
  float fit_values(const Head& head, const Work& work, FitWork& f) const {
    const int dv = call.value_size, wide = blocks_of(dv), high = blocks_of(f.rows);
    const float *lost = f.before.get(), *design = f.after.get();
    float squares = 0.0f;
    // Y - X V [wide][padded, kBlock], X X^T [high][padded, kBlock], and X^T [blocks][high][kBlock, kBlock].
    const size_t tile = static_cast<size_t>(f.padded) * kBlock, block = static_cast<size_t>(kBlock) * kBlock;
    float *missing = f.product.reserve((wide + high) * tile, 0.0f), *gram = missing + wide * tile;
    float* columns = f.columns.reserve(f.blocks * high * block);
    const float* const free = f.free.get();
    for (int b = 0; b < f.blocks; ++b) {
      const auto row_of = [&](const float* of) { return [=](int r) { return of + (b * tile + r * kBlock); }; };
      // The values before the merge, and for targets their difference from the merged values:
      // Y - X V = lost V + X (V - V merged).
      float *values = f.packed.reserve(2 * wide * block, 0.0f), *differences = values + wide * block,
            *row = f.wide.reserve(dv);
      bool is_merged = false;
      for (int i = 0; i < kBlock && b * kBlock + i < head.used; ++i) {
        if (b * kBlock + i + W < head.used) fetch(value_row(head, work, b * kBlock + i + W), dv);
        widen(value_row(head, work, b * kBlock + i), row, dv);
        const int set = head.merged ? work.row_of_target.get()[b * kBlock + i] : -1;
        const float* merged =
            work.rows.get() + static_cast<size_t>(max_of(set, 0)) * (call.key_size + dv) + call.key_size;
        const float* now = set < 0 ? row : merged;
        if (free[b * kBlock + i] != 0.0f) squares += dot(now, now, dv);
        is_merged |= set >= 0;
        for (int c = 0; c < wide; ++c) {
          const int size = min_of(dv - c * kBlock, kBlock);
          float *to = values + c * block + i * kBlock, *difference = differences + c * block + i * kBlock;
          memcpy(to, row + c * kBlock, size * sizeof(float));
          for (int j = 0; j < size && set >= 0; ++j) difference[j] = to[j] - merged[c * kBlock + j];
        }
      }
      for (int c = 0; c < wide; ++c)
        products(row_of(lost), f.rows, values + c * block, kBlock, missing + c * tile, true);
      for (int c = 0; c < wide && is_merged; ++c)
        products(row_of(design), f.rows, differences + c * block, kBlock, missing + c * tile, true);
      if (!f.has_free.get()[b]) continue;
      for (int c = 0; c < high; ++c) {
        float* const to = columns + (b * high + c) * block;
        pack_rows(f, design + b * tile, c * kBlock, to);
        products(row_of(design), f.rows, to, kBlock, gram + c * tile, true);
      }
    }
    solve(f, missing, gram, wide);
    float* change = f.change.reserve(static_cast<size_t>(f.slots()) * wide * kBlock, 0.0f);  // 0 if there is no query
    float norm = 0.0f;
    for (int b = 0; b < f.blocks; ++b) {
      if (!f.has_free.get()[b]) continue;
      for (int c = 0; c < wide; ++c)
        for (int h = 0; h < high; ++h) {
          const float *design_rows = columns + (b * high + h) * block,
                      *solution = f.solution.get() + (c * high + h) * block;
          float* to = change + (static_cast<size_t>(b) * wide + c) * block;
          const int count = min_of(f.rows - h * kBlock, kBlock);
          // A block is no whole number of tiles: the last tile repeats the block's last row.
          for (int first = 0; first < kBlock; first += kTileRows) {
            float product[kTileRows * kBlock];
            const float* rows[kTileRows];
            for (int r = 0; r < kTileRows; ++r) rows[r] = design_rows + min_of(first + r, kBlock - 1) * kBlock;
            tile_products(rows, solution, count, product);
            const int live = min_of(kTileRows, kBlock - first) * kBlock;
            for (int i = 0; i < live; i += W)
              store(to + first * kBlock + i,
                    h > 0 ? load(to + first * kBlock + i) + load(product + i) : load(product + i));
          }
        }
      norm += dot(change + b * wide * block, change + b * wide * block, static_cast<int>(wide * block));
    }
    const float allowed = fit->change_max * std::sqrt(squares) / max_of(std::sqrt(norm), 1e-30f);
    return allowed < 1.0f ? allowed : 1.0f;
  }

  // Packs rows [first, first + kBlock) of a block of X as columns; zeros beyond the last row.
  static void pack_rows(const FitWork& f, const float* rows, int first, float* out) {
    for (int r = 0; r < kBlock; r += W) {
      float wide[W * kBlock] = {};
      const int live = min_of(f.padded - first - r, W);
      if (live > 0) memcpy(wide, rows + static_cast<size_t>(first + r) * kBlock, live * kBlock * sizeof(float));
      pack_columns(wide, kBlock, splat(1.0f), out + r);
    }
  }

  // f.solution [wide][high][kBlock, kBlock] = (gram + ridge)^-1 missing, by U^T U = gram + ridge.
  void solve(FitWork& f, const float* missing, const float* gram, int wide) const {
    const int n = f.rows, high = blocks_of(n);
    const size_t tile = static_cast<size_t>(f.padded) * kBlock, width = static_cast<size_t>(wide) * kBlock;
    double *u = f.gram.reserve(static_cast<size_t>(n) * n + 1), *z = f.solved.reserve(n * width + 1);
    for (int r = 0; r < n; ++r) {
      for (int c = r; c < n; ++c) u[r * n + c] = gram[(c / kBlock) * tile + r * kBlock + c % kBlock];
      u[r * n + r] += fit->ridge;
      for (int c = 0; c < wide; ++c)
        for (int j = 0; j < kBlock; ++j) z[r * width + c * kBlock + j] = missing[c * tile + r * kBlock + j];
    }
    const auto subtract = [](double* to, const double* from, double factor, size_t count) {
      for (size_t j = 0; j < count; ++j) to[j] -= factor * from[j];
    };
    const auto scale = [](double* row, double factor, size_t count) {
      for (size_t j = 0; j < count; ++j) row[j] *= factor;
    };
    for (int k = 0; k < n; ++k) {
      const double over = 1.0 / std::sqrt(u[k * n + k]);
      scale(u + k * n + k, over, n - k);
      scale(z + k * width, over, width);
      for (int r = k + 1; r < n; ++r) {
        subtract(u + r * n + r, u + k * n + r, u[k * n + r], n - r);
        subtract(z + r * width, z + k * width, u[k * n + r], width);
      }
    }
    float* out = f.solution.reserve(static_cast<size_t>(wide) * high * kBlock * kBlock, 0.0f);
    for (int k = n - 1; k >= 0; --k) {
      scale(z + k * width, 1.0 / u[k * n + k], width);
      for (int r = 0; r < k; ++r) subtract(z + r * width, z + k * width, u[r * n + k], width);
      for (int c = 0; c < wide; ++c)
        for (int j = 0; j < kBlock; ++j)
          out[((static_cast<size_t>(c) * high + k / kBlock) * kBlock + k % kBlock) * kBlock + j] =
              static_cast<float>(z[k * width + c * kBlock + j]);
    }
  }

  // Writes the fitted votes and values of every free slot to its set; a free slot that is no target gets a new set.
  void write_fit(Head& head, Work& work, const FitWork& f, const float* votes, float share) const {
    const int d = call.key_size, dv = call.value_size, each = call.statistics + 2, wide = blocks_of(dv);
    const size_t block = static_cast<size_t>(kBlock) * kBlock;
    int* row_of = work.row_of_target.get();
    float *rows = work.rows.reserve(static_cast<size_t>(head.used) * (d + dv)),
          *scores = work.scores.reserve(static_cast<size_t>(head.used) * each);
    for (int i = 0; i < head.used; ++i) {
      if (f.free.get()[i] == 0.0f) continue;
      const bool is_new = row_of[i] < 0;
      if (is_new) row_of[i] = head.sets++;
      float *value = rows + static_cast<size_t>(row_of[i]) * (d + dv) + d,
            *rest = scores + static_cast<size_t>(row_of[i]) * each;
      rest[0] = votes[i];
      if (is_new) {
        widen(value_row(head, work, i), value, dv);
        memcpy(&rest[1], &i, sizeof i);
        for (int k = 0; k < call.statistics; ++k) rest[2 + k] = score_of(head, work, k, i);
      }
      const float* change = f.change.get() + (i / kBlock) * wide * block + (i % kBlock) * kBlock;
      for (int c = 0; c < wide; ++c)
        for (int j = c * kBlock; j < min_of(dv, (c + 1) * kBlock); ++j)
          value[j] += share * change[c * block + j - c * kBlock];
    }
  }

  // Writes the present ring. If keys are rotated by places, the queries are rotated back by as many places as slots
  // were evicted, as the recent keys are.
  void keep_ring(const Head& head, size_t index) const {
    const int d = call.key_size, planes = call.cache_positions ? call.rotary_planes : 0;
    const size_t first = index * ring->rows, count = static_cast<size_t>(ring->rows) * d;
    const float* from = ring->past.query + first * d;
    float* to = ring->present.query + first * d;
    if (to != from) memcpy(to, from, count * sizeof(float));
    if (ring->present.seen != ring->past.seen)
      memcpy(ring->present.seen + first, ring->past.seen + first, ring->rows * sizeof(int32_t));
    for (int f = 0; f < planes && head.evicted; ++f) {
      const float angle = static_cast<float>(-head.evicted) * call.inverse_frequencies[f], cosine = std::cos(angle),
                  sine = std::sin(angle);
      for (int r = 0; r < ring->rows; ++r)
        turn(cosine, sine, &to[static_cast<size_t>(r) * d + this->first_of(f)],
             &to[static_cast<size_t>(r) * d + this->second_of(f)]);
    }
  }
};

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
