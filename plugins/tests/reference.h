// VoteAttention of one KV head in plain loops in double precision, after docs/reference/contract.md. The fuzz compares
// outputs and scores with it, at shapes for which the conformance suite has no traces.
#pragma once

#include "support.h"

namespace fuzz {

struct Expected {
  std::vector<double> output;  // [G, T, Dv]
  std::vector<double> score;   // [K, slots of the head]
};

inline double log_add(double a, double b) {
  const double larger = std::max(a, b);
  return larger <= kNothing ? kNothing : larger + std::log(std::exp(a - larger) + std::exp(b - larger));
}

// Multiplies each block of a row by the Hadamard matrix; the block size is the largest power of two that divides the
// row's (docs/reference/contract.md, "A quantized cache").
inline void hadamard(std::vector<double>& row) {
  const size_t block = row.size() & -row.size();
  const std::vector<double> old = row;
  for (size_t i = 0; i < row.size(); ++i) {
    row[i] = 0.0;
    for (size_t j = 0; j < block; ++j)
      row[i] += (__builtin_popcountll(i % block & j) % 2 ? -1.0 : 1.0) * old[i / block * block + j];
    row[i] /= std::sqrt(static_cast<double>(block));
  }
}

class Reference {
 public:
  // present: the cache after the call; the caller has checked its keys, values, votes and positions.
  Reference(const KvVoteAttention& call, const Cache& past, const Cache& present, size_t row, int used, int n)
      : a_(call),
        past_(past),
        present_(present),
        row_(row),
        used_(used),
        n_(n),
        total_(used + n),
        group_(call.query_heads / call.heads) {}

  Expected compute() {
    expected_.output.assign(static_cast<size_t>(group_) * a_.tokens * a_.value_size, 0.0);
    logits_.assign(static_cast<size_t>(group_) * n_ * total_, 0.0);
    probability_ = logits_;
    for (int g = 0; g < group_; ++g)
      for (int t = 0; t < n_; ++t) attend(g, t);
    for (int k = 0; k < a_.statistics; ++k) score(k);
    return std::move(expected_);
  }

 private:
  int64_t first() const { return a_.position[row_ / a_.heads * a_.tokens]; }
  bool sees(int t, int slot) const {
    const int64_t position = present_.position(row_, slot), now = first() + t;
    return position <= now && (a_.sliding_window == 0 || position > now - a_.sliding_window);
  }

  void attend(int g, int t) {
    const size_t head = row_ / a_.heads * a_.query_heads + row_ % a_.heads * group_ + g;
    const size_t query = (head * a_.tokens + t) * a_.key_size;
    double *logit = &logits_[(static_cast<size_t>(g) * n_ + t) * total_],
           *p = &probability_[(static_cast<size_t>(g) * n_ + t) * total_];
    std::vector<double> row(a_.key_size);
    for (int i = 0; i < a_.key_size; ++i) row[i] = read(past_.shape, a_.query, query + i);
    if (past_.shape.quantized) hadamard(row);
    const double sink = a_.sink_logits ? a_.sink_logits[row_ % a_.heads * group_ + g] : kNothing;
    double top = sink;
    for (int c = 0; c < total_; ++c) {
      double dot = 0.0;
      for (int i = 0; i < a_.key_size; ++i) dot += row[i] * present_.key(row_, c, i);
      logit[c] = dot * a_.scale;
      if (a_.softcap != 0.0f) logit[c] = a_.softcap * std::tanh(logit[c] / a_.softcap);
      p[c] =
          sees(t, c) ? logit[c] + a_.vote_exponent * std::log(static_cast<double>(present_.votes(row_, c))) : kNothing;
      top = std::max(top, p[c]);
    }
    double sum = a_.sink_logits ? std::exp(sink - top) : 0.0;
    for (int c = 0; c < total_; ++c) sum += p[c] = std::exp(p[c] - top);
    std::vector<double> output(a_.value_size, 0.0);
    for (int c = 0; c < total_; ++c) {
      p[c] /= sum;
      for (int i = 0; i < a_.value_size; ++i) output[i] += p[c] * present_.value(row_, c, i);
    }
    if (past_.shape.quantized) hadamard(output);
    std::copy(output.begin(), output.end(),
              expected_.output.begin() + (static_cast<size_t>(g) * a_.tokens + t) * a_.value_size);
  }

  // Returns the weight of query t in statistic s, 0 if it does not count.
  double weight(const KvStatistic& s, int t) const {
    const int counted = s.window == 0 ? n_ : std::min(n_, s.window), back = n_ - 1 - t;
    if (back >= counted) return 0.0;
    const double share = 1.0 - static_cast<double>(back) / std::max(counted - 1, 1);
    return std::pow(static_cast<double>(s.decay), back) * (1.0 + (s.recency_weight - 1.0) * share);
  }

  void score(int k) {
    const KvStatistic& s = a_.statistic[k];
    const int counted = s.window == 0 ? n_ : std::min(n_, s.window);
    const double a = s.decay;
    for (int c = 0; c < past_.shape.capacity(row_); ++c) {
      const double old = past_.score(row_, k, c);
      if (c >= total_ || s.kind == KV_STATISTIC_NONE) {
        expected_.score.push_back(old);
      } else if (s.kind == KV_STATISTIC_PROBABILITY) {
        double sum = c < used_ ? old * std::pow(a, counted) : 0.0;
        for (int t = 0; t < n_; ++t)
          for (int g = 0; g < group_; ++g)
            sum += weight(s, t) / group_ * probability_[(static_cast<size_t>(g) * n_ + t) * total_ + c];
        expected_.score.push_back(sum);
      } else {
        double whole = 0.0, counting = 0.0, mean = kNothing;
        for (int t = 0; t < n_; ++t) {
          if (!sees(t, c)) continue;
          whole += std::pow(a, n_ - 1 - t), counting += weight(s, t);
          for (int g = 0; g < group_ && weight(s, t) > 0.0; ++g)
            mean = log_add(mean,
                           logits_[(static_cast<size_t>(g) * n_ + t) * total_ + c] + std::log(weight(s, t) / group_));
        }
        const double call = counting > 0.0 ? mean + std::log((1.0 - a) * whole / counting) : kNothing;
        expected_.score.push_back(log_add(c < used_ ? old + n_ * std::log(a) : kNothing, call));
      }
    }
  }

  const KvVoteAttention& a_;
  const Cache &past_, &present_;
  size_t row_;
  int used_, n_, total_, group_;
  std::vector<double> logits_, probability_;  // [G, n, used + n]
  Expected expected_;
};

inline bool near(double actual, double expected, double tolerance) {
  if (expected < 0.1 * kNothing) return actual < 0.1 * kNothing;
  return std::abs(actual - expected) <= tolerance * (1.0 + std::abs(expected));
}

}  // namespace fuzz
