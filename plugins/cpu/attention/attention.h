// Shared by decode and prefill: one KV head of one sequence, its slots, the bias of its votes, and the writes to its
// cache and output.
//
// Letters in this folder, beside those of the contract: a the arguments of the call, x a KV head, b its sequence, h its
// number, g a query head of its group (in decode a row), t a token, c a slot, k a statistic, d and dv the sizes of keys
// and values, r a row of a tile, i an element of a row, j a vector of columns, s a split.
#pragma once

#include <cmath>

#include "../core/heads.h"
#include "../core/kernels.h"
#include "../core/quantized.h"
#include "../core/scratch.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr float kLowest = -3e38f;

constexpr int kProbes = 15;  // votes that `head` reads at once

// The partial results of the splits of every head, which `finish` combines, and how many splits of every head have not
// ended. The memory belongs to the calling thread: new memory for every call would be pages that the system clears.
struct Partials {
  float* data = nullptr;
  int* left = nullptr;
  size_t stride = 0;
  void reserve(size_t heads, int splits) {
    static thread_local Scratch<float> memory;
    static thread_local Scratch<int> counts;
    data = memory.reserve(stride * heads * splits), left = counts.reserve(heads, splits);
  }
  float* of(size_t task) const { return data + task * stride; }
  // Returns whether a split of a head that has just ended is the head's last one.
  bool ends(size_t head) const { return __atomic_sub_fetch(left + head, 1, __ATOMIC_ACQ_REL) == 0; }
};

// K, V: the types of the keys and values of the cache and of the new tokens. In a quantized cache the new tokens'
// scales are `new_scales`, and the query and output are float32 and rotated (quantized.h).
template <class K, class V>
struct Attention {
  using Query = Wide<K>;
  const KvVoteAttention& a;
  int group, splits;
  Partials partials;
  KvScales new_scales{};  // [B,H,T]

  // partial_size: floats of a split's partial result.
  Attention(const KvVoteAttention& call, int splits, size_t partial_size)
      : a(call), group(call.query_heads / call.heads), splits(splits) {
    partials.stride = partial_size;
    if (splits > 1) partials.reserve(static_cast<size_t>(a.batch) * a.heads, splits);
  }

  // One KV head of one sequence: `used` occupied slots and n new tokens.
  struct Head {
    int b, h, used, n;
    int capacity;  // its slots
    const K *past_key, *key;
    const V *past_value, *value;
    size_t past_value_size;  // elements from one row of past_value to the next
    K* present_key;
    V* present_value;  // nullptr with value_prefix
    const float *past_votes, *past_score;
    float *votes, *score;  // of statistic k: score + k S
    const int32_t* past_position;
    int32_t* position;
    // In a quantized cache: the past scales, the scales of the new tokens, and the present scales.
    struct Scales {
      const float *past, *added;
      float* present;
    } key_scale, value_scale;
    int64_t first;                        // the first new token's position
    int end() const { return used + n; }  // occupied slots after the call
  };

  Head head(size_t index) const {
    Head x;
    x.b = static_cast<int>(index / a.heads);
    x.h = static_cast<int>(index % a.heads);
    x.capacity = a.capacity[x.h];
    const size_t t = a.tokens, d = a.key_size, dv = a.value_size, all = a.slots;
    const size_t before = slots_before(a.capacity, x.h);           // of this sequence
    const size_t first_slot = x.b * all + before;                  // in the tensors [B,S]
    const size_t first_score = x.b * all * a.statistics + before;  // in [B,K,S]
    x.past_votes = a.past.votes + first_slot;
    x.past_position = a.past.position + first_slot;
    x.past_score = a.past.score + first_score;
    x.past_key = at(static_cast<const K*>(a.past.key), first_slot * d);
    x.past_value_size = a.value_prefix ? d : dv;
    x.past_value =
        at(static_cast<const V*>(a.value_prefix ? a.past.key : a.past.value), first_slot * x.past_value_size);
    x.votes = a.present.votes + first_slot;
    x.position = a.present.position + first_slot;
    x.score = a.present.score + first_score;
    x.present_key = at(static_cast<K*>(a.present.key), first_slot * d);
    x.present_value = a.value_prefix ? nullptr : at(static_cast<V*>(a.present.value), first_slot * dv);
    x.key = at(static_cast<const K*>(a.key), index * t * d);
    x.value = at(static_cast<const V*>(a.value), index * t * dv);
    if constexpr (kQuantized<K>) {
      const KvScales &past = a.past_scales, &present = a.present_scales;
      x.key_scale = {past.key + first_slot, new_scales.key + index * t, present.key + first_slot};
      x.value_scale = {past.value + first_slot, new_scales.value + index * t, present.value + first_slot};
    }
    // A call that is only timed may bring numbers that are no positions: clamp so that the others fit after the first.
    const int64_t first = t > 0 ? a.position[x.b * t] : 0, most = INT32_MAX - x.capacity;
    x.first = first < 0 ? 0 : first > most ? most : first;
    // Used slots are a prefix, whose end is from `low` to `high`. In a decode step no cache of the processor has votes,
    // so a search that reads kProbes at once waits for three of them, and a bisection for nine.
    int low = 0, high = x.capacity;
    while (low < high) {
      const int apart = (high - low + kProbes) / (kProbes + 1);
      int used = 0;
      for (int c = low + apart - 1, i = 0; c < high && i < kProbes; c += apart, ++i) used += x.past_votes[c] > 0.0f;
      low += used * apart;
      if (used < kProbes) high = min_of(high, low + apart - 1);
    }
    x.used = low;
    const int64_t length = a.query_length[x.b], room = min_of(a.tokens, x.capacity - x.used);
    x.n = static_cast<int>(length < 0 ? 0 : length > room ? room : length);
    return x;
  }

  // Appends the new tokens; copies the tensors that are not bound in place.
  void append_tokens(const Head& x) const {
    const size_t c = x.capacity, d = a.key_size, dv = a.value_size;
    const bool stores_values = a.value_prefix == 0, moves_values = stores_values && x.present_value != x.past_value;
    if (x.present_key != x.past_key) memcpy(x.present_key, x.past_key, bytes_of<K>(x.used * d));
    if (moves_values) memcpy(x.present_value, x.past_value, bytes_of<V>(x.used * dv));
    if (x.votes != x.past_votes) memcpy(x.votes, x.past_votes, x.used * sizeof(float));
    if (x.position != x.past_position) memcpy(x.position, x.past_position, x.used * sizeof(int32_t));
    if (x.n > 0) {  // without tokens the pointers may be null
      memcpy(at(x.present_key, x.used * d), x.key, bytes_of<K>(x.n * d));
      if (stores_values) memcpy(at(x.present_value, x.used * dv), x.value, bytes_of<V>(x.n * dv));
    }
    for (int i = 0; i < x.n; ++i) {
      x.votes[x.used + i] = 1.0f;
      x.position[x.used + i] = static_cast<int32_t>(x.first + i);
    }
    const size_t rest = c - x.end();
    if (x.present_key != x.past_key)
      memcpy(at(x.present_key, x.end() * d), at(x.past_key, x.end() * d), bytes_of<K>(rest * d));
    if (moves_values) memcpy(at(x.present_value, x.end() * dv), at(x.past_value, x.end() * dv), bytes_of<V>(rest * dv));
    if (x.votes != x.past_votes) memcpy(x.votes + x.end(), x.past_votes + x.end(), rest * sizeof(float));
    if (x.position != x.past_position) memcpy(x.position + x.end(), x.past_position + x.end(), rest * sizeof(int32_t));
    if constexpr (kQuantized<K>) {
      append_scales(x, x.key_scale);
      append_scales(x, x.value_scale);
    }
    if (x.score != x.past_score) {
      const size_t scored = x.n == 0 ? 0 : x.end();  // decode_scores or combine_splits writes the scores of these
      for (int k = 0; k < a.statistics; ++k)
        memcpy(score_of(x.score, k) + scored, score_of(x.past_score, k) + scored, (c - scored) * sizeof(float));
    }
  }

  void append_scales(const Head& x, const typename Head::Scales& scale) const {
    if (scale.present != scale.past) memcpy(scale.present, scale.past, x.capacity * sizeof(float));
    if (x.n > 0) memcpy(scale.present + x.used, scale.added, x.n * sizeof(float));
  }
  // Copies the scales of the slots [from, to) to `out`.
  void scales_of(const Head& x, const typename Head::Scales& scale, int from, int to, float* out) const {
    for (int c = from; c < to; ++c) out[c - from] = c < x.used ? scale.past[c] : scale.added[c - x.used];
  }

  const K* key_row(const Head& x, int slot) const {
    return slot < x.used ? at(x.past_key, static_cast<size_t>(slot) * a.key_size)
                         : at(x.key, static_cast<size_t>(slot - x.used) * a.key_size);
  }
  const V* value_row(const Head& x, int slot) const {
    return slot < x.used ? at(x.past_value, slot * x.past_value_size)
                         : at(x.value, static_cast<size_t>(slot - x.used) * a.value_size);
  }
  int64_t slot_position(const Head& x, int slot) const {
    return slot < x.used ? x.past_position[slot] : x.first + (slot - x.used);
  }

  // Returns the address of a head's statistic k. score: of its first statistic.
  template <class T>
  T* score_of(T* score, int k) const {
    return score + static_cast<size_t>(k) * a.slots;
  }

  vf vote_bias(vf votes) const { return a.vote_exponent * log(votes); }
  float vote_bias(float votes) const { return a.vote_exponent * std::log(votes); }

  // Writes the vote_bias of slots [from, to) to `out`; kLogZero for a slot outside the sliding window of position
  // `now`.
  void bias(const Head& x, int from, int to, int64_t now, float* out) const {
    const int old = min_of(to, x.used);
    int c = from;
    if (a.vote_exponent != 0.0f) {
      for (; c + W <= old; c += W) store(out + c - from, vote_bias(load(x.past_votes + c)));
      for (; c < old; ++c) out[c - from] = vote_bias(x.past_votes[c]);
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
    // softcap tanh(x). The quotient cancels near zero: there Taylor's series to x^9 takes its place, whose relative
    // error is below 3e-8 where x^2 < 0.0625.
    const vf x = logit * (1.0f / a.softcap), square = x * x;
    const vf series =
        x * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315 + square * (62.0f / 2835)))));
    const vf quotient = 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
    return a.softcap * (square < 0.0625f ? series : quotient);
  }

  void write_output(const Head& x, int g, int t, const float* row, float factor) const {
    const int dv = a.value_size;
    Query* out = static_cast<Query*>(a.output) +
                 ((static_cast<size_t>(x.b) * a.query_heads + x.h * group + g) * a.tokens + t) * dv;
    for (int i = 0; i < dv; ++i) out[i] = static_cast<Query>(row[i] * factor);
  }

  void clear_output(const Head& x, int from) const {
    if (from >= a.tokens) return;  // without tokens the output may be null
    for (int g = 0; g < group; ++g) {
      Query* out = static_cast<Query*>(a.output) +
                   (static_cast<size_t>(x.b) * a.query_heads + x.h * group + g) * a.tokens * a.value_size;
      memset(static_cast<void*>(out + static_cast<size_t>(from) * a.value_size), 0,
             static_cast<size_t>(a.tokens - from) * a.value_size * sizeof(Query));
    }
  }

  void append_task(size_t index) {
    const Head x = head(index);
    append_tokens(x);
    clear_output(x, x.n);
  }

  // Runs `Kernel::task` (Decode's or Prefill's) for every split of every head. The task that ends last of a head's runs
  // `Kernel::finish`: threads would wait for each other between these steps, and a wait costs more than a short one.
  template <class Kernel>
  static void run(Kernel& kernel, KvRunner runner) {
    const HeadOrder order(kernel.a.capacity, kernel.a.batch, kernel.a.heads);
    struct Run {
      Kernel& kernel;
      const HeadOrder& order;
    } run{kernel, order};
    runner.parallel_for(
        runner.context, static_cast<size_t>(kernel.a.batch) * kernel.a.heads * kernel.splits,
        [](void* data, size_t i) {
          const auto& [kernel, order] = *static_cast<Run*>(data);
          const size_t index = order.number(i / kernel.splits);
          kernel.task(index * kernel.splits + i % kernel.splits);
          if (kernel.splits > 1) {
            if (!kernel.partials.ends(index)) return;
            const typename Kernel::Head x = kernel.head(index);
            if (x.n > 0) kernel.finish(x, index);
          }
          kernel.append_task(index);
        },
        &run);
  }
};

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
