// A policy's fit to reference queries, of one KV head (kvexport/methods/primitives/fit.py), between choosing which
// slots are evicted and placing those that are kept:
//
//   read: logit[r, slot] = query . key, of R queries that have seen something
//         before[r, slot] = softmax of logit + alpha ln(votes) over the slots that the query has seen
//   weigh_by_queries: importance[slot] = sum of before^2, where the policy selects so
//   fit_votes: votes times factors with which the kept slots hold the mass of all
//   read_again: after = as before, over the kept slots with their new votes; X = after of the free slots
//   fit_values:
//         Z = (X X^T + ridge)^-1 (before - after) V, by Cholesky's factors, in float64
//         V + X^T Z, the change no more than change_max of the norm
//   write: every free slot, one that is kept and can receive, becomes a merge set of its own, with the key that it has
//
// Arrays [R, slots] lie in blocks of kBlock slots, so that a block's rows go into tile_products as they are: element
// (r, i) is at of(r, i). Rows are padded to whole tiles, slots to whole blocks, with zeros.
#pragma once

#include "select.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr float kHidden = -1e30f;    // the bias of a slot that is not held, below every logit
constexpr float kMostShare = 34.5f;  // the logarithm of the most that a slot holds of the mass of all, as in fit.py

// Of one thread.
struct FitWork {
  Scratch<float> query, logits, before, shares, after, bias, free, wanted, factor, votes, packed, wide, columns, change,
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
  using Base::a, Base::p, Base::key_row, Base::value_row, Base::score_of;
  using typename Base::Head;
  using typename Base::Row;
  const KvFit* fit;  // nullptr: there is none
  const KvRing* ring;

  Fit(const KvMergeCache& call, const KvFit* fit, const KvRing* ring) : Base(call), fit(fit), ring(ring) {}

  // out[r, 64 columns] (+)= rows[r, 0 .. size) x columns[size, 64], of `count` rows.
  template <class RowOf>
  static void products(RowOf row_of, int count, const float* columns, int size, float* out, bool add) {
    for (int first = 0; first < count; first += kTileRows) {
      const float* rows[kTileRows];
      const int height = min_of(kTileRows, count - first);
      for (int r = 0; r < kTileRows; ++r) rows[r] = row_of(first + min_of(r, height - 1));
      float* const to = out + static_cast<size_t>(first) * kBlock;
      if (height <= 2)  // as much as 32 rows leave behind five tiles
        add ? tile_products<true, 2>(rows, columns, size, to) : tile_products<false, 2>(rows, columns, size, to);
      else
        add ? tile_products<true>(rows, columns, size, to) : tile_products<false>(rows, columns, size, to);
    }
  }

  // Slots lie in any order, so that the processor cannot tell which row comes next.
  static void fetch(const Row* row, int size) {
    for (int i = 0; i < size; i += static_cast<int>(64 / sizeof(Row))) __builtin_prefetch(row + i);
  }

  void read(const Head& x, const Work& w, size_t index, FitWork& f) const {
    const int d = a.key_size, n = x.used;
    const size_t all = index * ring->rows;
    f.rows = 0;
    int32_t* seen = f.seen.reserve(ring->rows);
    float* query = f.query.reserve(static_cast<size_t>(ring->rows + kTileRows) * d);
    for (int r = 0; r < ring->rows; ++r) {
      if (ring->past.seen[all + r] <= 0) continue;  // no query yet: it reads nothing
      float* to = query + static_cast<size_t>(f.rows) * d;
      memcpy(to, ring->past.query + (all + r) * d, d * sizeof(float));
      if (kSmall<K> && !a.rotary_planes) hadamard(to, d);  // as the keys are
      seen[f.rows++] = ring->past.seen[all + r];
    }
    f.padded = (f.rows + kTileRows - 1) / kTileRows * kTileRows;
    f.blocks = blocks_of(n);
    memset(query + static_cast<size_t>(f.rows) * d, 0, static_cast<size_t>(f.padded - f.rows) * d * sizeof(float));
    int32_t* position = f.position.reserve(f.slots(), INT32_MAX);
    memcpy(position, w.position.get(), n * sizeof(int32_t));
    float *logits = f.logits.reserve(f.size()), *packed = f.packed.reserve(static_cast<size_t>(kBlock) * d);
    for (int b = 0; b < f.blocks; ++b) {
      for (int i = 0; i < kBlock; i += W) {
        const int held = max_of(min_of(n - b * kBlock - i, W), 0);
        float* wide = f.wide.reserve(static_cast<size_t>(W) * d);
        for (int j = 0; j < held; ++j) {
          const int slot = b * kBlock + i + j;
          if (slot + W < n) fetch(key_row(x, w, slot + W), d);
          widen(key_row(x, w, slot), wide + j * d, d);
        }
        memset(wide + held * d, 0, static_cast<size_t>(W - held) * d * sizeof(float));
        pack_columns(wide, d, splat(1.0f), packed + i);
      }
      products([&](int r) { return query + static_cast<size_t>(r) * d; }, f.rows, packed, d,
               logits + static_cast<size_t>(b) * f.padded * kBlock, false);
    }
    float *bias = f.bias.reserve(f.slots(), kHidden), *before = f.before.reserve(f.size());
    for (int i = 0; i < n; i += W) {
      const vf of_votes = fit->read_exponent != 0.0f ? fit->read_exponent * log(load(w.votes.get() + i)) : vf{};
      store(bias + i, select(lane_numbers() + i < n, of_votes, splat(kHidden)));
    }
    float* whole = f.whole.reserve(f.padded);
    for (int r = 0; r < f.padded; ++r) whole[r] = softmax(f, r, bias, before);
  }

  float bias_of(float votes) const { return fit->read_exponent != 0.0f ? fit->read_exponent * std::log(votes) : 0.0f; }

  // A query's probabilities over the slots that it has seen and whose bias is not kHidden; zeros where there are none.
  // Returns the logarithm of their mass.
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
    const float sum_of = sum(sums), factor = sum_of > 0.0f ? 1.0f / sum_of : 0.0f;
    for (int i = 0; i < f.slots(); i += W) store(out + f.of(r, i), load(out + f.of(r, i)) * factor);
    return sum_of > 0.0f ? top + std::log(sum_of) : 0.0f;
  }

  // Probabilities below 1e-6 count as none, so that what underflows in one backend and not in another decides nothing.
  void weigh_by_queries(const Head& x, Work& w, FitWork& f) const {
    float* squares = f.wanted.reserve(f.slots());
    for (int i = 0; i < f.slots(); i += W) {
      vf sums{};
      for (int r = 0; r < f.rows; ++r) {
        const vf read = load(f.before.get() + f.of(r, i));
        sums += select(read > splat(1e-6f), read * read, vf{});
      }
      store(squares + i, sums);
    }
    memcpy(w.importance.get(), squares, x.used * sizeof(float));
  }

  // Fills w.rows and w.scores, of as many sets as there are free slots; those of a merge, if there was one, are there.
  void fit_slots(Head& x, Work& w, FitWork& f) const {
    float *free = f.free.reserve(f.slots(), 0.0f), *votes = f.votes.reserve(2 * x.used);
    char* has_free = f.has_free.reserve(f.blocks, 0);
    if (p.merge == KV_MERGE_DROP) w.row_of_target.reserve(x.used, -1);
    for (int i = 0; i < x.used; ++i) {
      const bool receives = a.recent_receives ? w.position.get()[i] >= a.sinks : w.is_unprotected.get()[i] != 0;
      if (receives && !w.is_evicted.get()[i]) free[i] = 1.0f, has_free[i / kBlock] = 1;
      votes[i] = w.votes.get()[i];
    }
    const float* shares = x.merged ? share_merged(x, w, f, votes) : f.before.get();
    const float* unfitted = votes + x.used;
    memcpy(votes + x.used, votes, x.used * sizeof(float));
    if (fit->fit == KV_FIT_VOTES_AND_VALUES) fit_votes(x, w, f, shares, votes);
    read_again(x, w, f, shares, unfitted, votes);
    write(x, w, f, votes, fit_values(x, w, f));
  }

  // Of the mass that a query found in all slots what kept ones hold after the merge: f.before, but for the targets,
  // whose logits, positions and votes are new.
  const float* share_merged(const Head& x, const Work& w, FitWork& f, float* votes) const {
    static thread_local Scratch<float> scratch;
    const int d = a.key_size, each = a.statistics + 2;
    float *shares = f.shares.reserve(f.size()), *key = scratch.reserve(d);
    std::copy_n(f.before.get(), f.size(), shares);
    for (int i = 0; i < x.used; ++i) {
      const int row = w.row_of_target.get()[i];
      if (row < 0) continue;
      const float* rest = w.scores.get() + static_cast<size_t>(row) * each;
      int latest;
      memcpy(&latest, &rest[1], sizeof latest);
      votes[i] = rest[0];
      f.position.get()[i] = w.position.get()[latest];
      memcpy(key, w.rows.get() + static_cast<size_t>(row) * (d + a.value_size), d * sizeof(float));
      if (kSmall<K> && a.rotary_planes) hadamard(key, d);  // back
      const float bias = bias_of(votes[i]);
      for (int r = 0; r < f.rows; ++r) {
        const float logit = dot(key, f.query.get() + static_cast<size_t>(r) * d, d);
        const float of_whole = logit + bias - f.whole.get()[r];
        const bool visible = f.position.get()[i] < f.seen.get()[r];
        f.logits.get()[f.of(r, i)] = logit;
        shares[f.of(r, i)] = visible ? std::exp(of_whole < kMostShare ? of_whole : kMostShare) : 0.0f;
      }
    }
    return shares;
  }

  // f.after = X, the probabilities over the kept slots, of the free ones alone; f.before becomes what is lost of all.
  // A slot's probability changes as its votes do; where next to nothing of a query's is left, or many times as much, it
  // is computed anew.
  // shares, unfitted: of kept slots what they hold, with these votes, and these.
  void read_again(const Head& x, const Work& w, FitWork& f, const float* shares, const float* unfitted,
                  const float* votes) const {
    float *lost = f.before.get(), *after = f.after.reserve(f.size()), *ratio = f.factor.reserve(f.slots(), 0.0f);
    const float* free = f.free.get();
    for (int i = 0; i < x.used; ++i)
      if (!w.is_evicted.get()[i])
        ratio[i] =
            fit->read_exponent == 1.0f ? votes[i] / unfitted[i] : std::pow(votes[i] / unfitted[i], fit->read_exponent);
    for (int r = 0; r < f.padded; ++r) {
      vf sums{};
      for (int i = 0; i < f.slots(); i += W) {
        const vf read = load(shares + f.of(r, i)) * load(ratio + i);
        store(after + f.of(r, i), read);
        sums += read;
      }
      const float left = sum(sums);
      float factor = 1.0f / left;
      if (!(left > 1e-6f && left < 1e6f)) softmax(f, r, bias_after(x, w, f, votes), after), factor = 1.0f;
      for (int i = 0; i < f.slots(); i += W) {
        const vf read = load(after + f.of(r, i)) * factor;
        store(lost + f.of(r, i), load(lost + f.of(r, i)) - read);
        store(after + f.of(r, i), read * load(free + i));
      }
    }
  }

  const float* bias_after(const Head& x, const Work& w, const FitWork& f, const float* votes) const {
    float* bias = f.bias.get();
    for (int i = 0; i < x.used; ++i) bias[i] = w.is_evicted.get()[i] ? kHidden : bias_of(votes[i]);
    return bias;
  }

  // Multiplicative updates f = f (P^T 1) / (P^T P f) of the factors of the free slots' votes (Lee and Seung 2001).
  // Of all slots' mass, P holds `shares`.
  void fit_votes(const Head& x, const Work& w, FitWork& f, const float* shares, float* votes) const {
    const float *read = f.before.get(), *free = f.free.get(), least = std::exp(-fit->bias_max),
                most = std::exp(fit->bias_max);
    float *wanted = f.wanted.reserve(f.slots()), *factor = f.factor.reserve(2 * f.slots()), *held = factor + f.slots(),
          *mass = f.mass.reserve(2 * f.rows + 1), *held_by = mass + f.rows;
    for (int i = 0; i < f.slots(); ++i)  // for now 1 where a slot's mass is for the free ones to hold
      held[i] = i < x.used && (free[i] != 0.0f || w.is_evicted.get()[i]) ? 1.0f : 0.0f, factor[i] = 1.0f;
    over_slots(f, read, held, mass, false);
    over_rows(f, shares, mass, wanted);
    for (int step = 0; step < fit->vote_steps; ++step) {
      for (int i = 0; i < f.slots(); i += W) store(held + i, load(factor + i) * load(free + i));
      over_slots(f, shares, held, held_by, true);
      over_rows(f, shares, held_by, held);
      for (int i = 0; i < f.slots(); i += W) {
        const vf goal = load(wanted + i), has = load(held + i), old = load(factor + i);
        const vi counts = (load(free + i) > vf{}) & (goal > splat(1e-20f)) & (has > splat(1e-20f));
        store(factor + i, select(counts, old * goal / select(counts, has, splat(1.0f)), old));
      }
    }
    float had = 0.0f, has = 0.0f;
    for (int i = 0; i < x.used; ++i) {
      if (free[i] != 0.0f || w.is_evicted.get()[i]) had += w.votes.get()[i];
      if (free[i] == 0.0f) continue;
      votes[i] = std::min(std::max(votes[i] * factor[i], least), most);
      has += votes[i];
    }
    const float share = std::min(had / max_of(has, 1e-30f), 1.0f);
    for (int i = 0; i < x.used; ++i)
      if (free[i] != 0.0f) votes[i] *= share;
  }

  // out[r] = sum over slots of read[r, slot] factor[slot]; of blocks with free slots alone, or of all.
  static void over_slots(const FitWork& f, const float* read, const float* factor, float* out, bool free_only) {
    for (int r = 0; r < f.rows; ++r) {
      vf sums[kBlock / W] = {};
      for (int b = 0; b < f.blocks; ++b) {
        if (free_only && !f.has_free.get()[b]) continue;
        const float *row = read + f.of(r, b * kBlock), *of_block = factor + b * kBlock;
        for (int j = 0; j < kBlock / W; ++j) sums[j] += load(row + j * W) * load(of_block + j * W);
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

  // The change of values [slots, padded size] in f.change; returns what it is multiplied with.
  float fit_values(const Head& x, const Work& w, FitWork& f) const {
    const int dv = a.value_size, wide = blocks_of(dv), high = blocks_of(f.rows);
    const float *lost = f.before.get(), *design = f.after.get();
    float squares = 0.0f;
    // Y - X V [wide][padded, kBlock], X X^T [high][padded, kBlock], and X^T [blocks][high][kBlock, kBlock].
    const size_t tile = static_cast<size_t>(f.padded) * kBlock, block = static_cast<size_t>(kBlock) * kBlock;
    float *missing = f.product.reserve((wide + high) * tile, 0.0f), *gram = missing + wide * tile;
    float* columns = f.columns.reserve(f.blocks * high * block);
    const float* const free = f.free.get();
    for (int b = 0; b < f.blocks; ++b) {
      const auto row_of = [&](const float* of) { return [=](int r) { return of + (b * tile + r * kBlock); }; };
      // The values as they were, and of targets what is gone of them: Y - X V = lost V + X (V - V merged).
      float *values = f.packed.reserve(2 * wide * block, 0.0f), *gone = values + wide * block,
            *row = f.wide.reserve(dv);
      bool is_merged = false;
      for (int i = 0; i < kBlock && b * kBlock + i < x.used; ++i) {
        if (b * kBlock + i + W < x.used) fetch(value_row(x, w, b * kBlock + i + W), dv);
        widen(value_row(x, w, b * kBlock + i), row, dv);
        const int set = x.merged ? w.row_of_target.get()[b * kBlock + i] : -1;
        const float* merged = w.rows.get() + static_cast<size_t>(max_of(set, 0)) * (a.key_size + dv) + a.key_size;
        const float* now = set < 0 ? row : merged;
        if (free[b * kBlock + i] != 0.0f) squares += dot(now, now, dv);
        is_merged |= set >= 0;
        for (int c = 0; c < wide; ++c) {
          const int size = min_of(dv - c * kBlock, kBlock);
          float *to = values + c * block + i * kBlock, *rest = gone + c * block + i * kBlock;
          memcpy(to, row + c * kBlock, size * sizeof(float));
          for (int j = 0; j < size && set >= 0; ++j) rest[j] = to[j] - merged[c * kBlock + j];
        }
      }
      for (int c = 0; c < wide; ++c)
        products(row_of(lost), f.rows, values + c * block, kBlock, missing + c * tile, true);
      for (int c = 0; c < wide && is_merged; ++c)
        products(row_of(design), f.rows, gone + c * block, kBlock, missing + c * tile, true);
      if (!f.has_free.get()[b]) continue;
      for (int c = 0; c < high; ++c) {
        float* const to = columns + (b * high + c) * block;
        pack_rows(f, design + b * tile, c * kBlock, to);
        products(row_of(design), f.rows, to, kBlock, gram + c * tile, true);
      }
    }
    solve(f, missing, gram, wide);
    float* change = f.change.reserve(static_cast<size_t>(f.slots()) * wide * kBlock, 0.0f);  // as no query changes it
    float norm = 0.0f;
    for (int b = 0; b < f.blocks; ++b) {
      if (!f.has_free.get()[b]) continue;
      for (int c = 0; c < wide; ++c)
        for (int h = 0; h < high; ++h) {
          const float *of_block = columns + (b * high + h) * block,
                      *to_columns = f.solution.get() + (c * high + h) * block;
          float* to = change + (static_cast<size_t>(b) * wide + c) * block;
          const int count = min_of(f.rows - h * kBlock, kBlock);
          // Where a block is no whole number of tiles, the last one repeats its last row.
          for (int first = 0; first < kBlock; first += kTileRows) {
            float part[kTileRows * kBlock];
            const float* rows[kTileRows];
            for (int r = 0; r < kTileRows; ++r) rows[r] = of_block + min_of(first + r, kBlock - 1) * kBlock;
            tile_products(rows, to_columns, count, part);
            const int live = min_of(kTileRows, kBlock - first) * kBlock;
            for (int i = 0; i < live; i += W)
              store(to + first * kBlock + i, h > 0 ? load(to + first * kBlock + i) + load(part + i) : load(part + i));
          }
        }
      norm += dot(change + b * wide * block, change + b * wide * block, static_cast<int>(wide * block));
    }
    const float allowed = fit->change_max * std::sqrt(squares) / max_of(std::sqrt(norm), 1e-30f);
    return allowed < 1.0f ? allowed : 1.0f;
  }

  // Rows [first, first + kBlock) of a block of X as columns; zeros beyond the last.
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

  void write(Head& x, Work& w, const FitWork& f, const float* votes, float share) const {
    const int d = a.key_size, dv = a.value_size, each = a.statistics + 2, wide = blocks_of(dv);
    const size_t block = static_cast<size_t>(kBlock) * kBlock;
    int* row_of = w.row_of_target.get();
    float *rows = w.rows.reserve(static_cast<size_t>(x.used) * (d + dv)),
          *scores = w.scores.reserve(static_cast<size_t>(x.used) * each);
    for (int i = 0; i < x.used; ++i) {
      if (f.free.get()[i] == 0.0f) continue;
      const bool is_new = row_of[i] < 0;
      if (is_new) row_of[i] = x.sets++;
      float *value = rows + static_cast<size_t>(row_of[i]) * (d + dv) + d,
            *rest = scores + static_cast<size_t>(row_of[i]) * each;
      rest[0] = votes[i];
      if (is_new) {
        widen(value_row(x, w, i), value, dv);
        memcpy(&rest[1], &i, sizeof i);
        for (int k = 0; k < a.statistics; ++k) rest[2 + k] = score_of(x, w, k, i);
      }
      const float* change = f.change.get() + (i / kBlock) * wide * block + (i % kBlock) * kBlock;
      for (int c = 0; c < wide; ++c)
        for (int j = c * kBlock; j < min_of(dv, (c + 1) * kBlock); ++j)
          value[j] += share * change[c * block + j - c * kBlock];
    }
  }

  // The ring as the merge leaves it: where keys are rotated by places the queries move with the recent ones.
  void keep_ring(const Head& x, size_t index) const {
    const int d = a.key_size, planes = a.cache_positions ? a.rotary_planes : 0;
    const size_t first = index * ring->rows, count = static_cast<size_t>(ring->rows) * d;
    const float* from = ring->past.query + first * d;
    float* to = ring->present.query + first * d;
    if (to != from) memcpy(to, from, count * sizeof(float));
    if (ring->present.seen != ring->past.seen)
      memcpy(ring->present.seen + first, ring->past.seen + first, ring->rows * sizeof(int32_t));
    for (int f = 0; f < planes && x.evicted; ++f) {
      const float angle = static_cast<float>(-x.evicted) * a.inverse_frequencies[f], cosine = std::cos(angle),
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
