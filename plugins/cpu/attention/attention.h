// Shared by decode and prefill: one KV head of one sequence, its slots, the bias of its votes, and the writes to its
// cache and output.
//
// Indices in this folder, beside those of the contract: b a sequence, h a KV head, g a query head of its group (in
// decode a row), t a token, c a slot, k a statistic, d and dv the sizes of keys and values, r a row of a tile, i an
// element of a row, j a vector of columns, s a split.
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
  const KvVoteAttention& call;
  int group, splits;
  Partials partials;
  KvScales new_scales{};  // [B,H,T]

  // partial_size: floats of a split's partial result.
  Attention(const KvVoteAttention& call, int splits, size_t partial_size)
      : call(call), group(call.query_heads / call.heads), splits(splits) {
    partials.stride = partial_size;
    if (splits > 1) partials.reserve(static_cast<size_t>(call.batch) * call.heads, splits);
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

  Head head_of(size_t index) const {
    Head head;
    head.b = static_cast<int>(index / call.heads);
    head.h = static_cast<int>(index % call.heads);
    head.capacity = call.capacity[head.h];
    const size_t t = call.tokens, d = call.key_size, dv = call.value_size, all = call.slots;
    const size_t before = slots_before(call.capacity, head.h);           // of this sequence
    const size_t first_slot = head.b * all + before;                     // in the tensors [B,S]
    const size_t first_score = head.b * all * call.statistics + before;  // in [B,K,S]
    head.past_votes = call.past.votes + first_slot;
    head.past_position = call.past.position + first_slot;
    head.past_score = call.past.score + first_score;
    head.past_key = at(static_cast<const K*>(call.past.key), first_slot * d);
    head.past_value_size = call.value_prefix ? d : dv;
    head.past_value = at(static_cast<const V*>(call.value_prefix ? call.past.key : call.past.value),
                         first_slot * head.past_value_size);
    head.votes = call.present.votes + first_slot;
    head.position = call.present.position + first_slot;
    head.score = call.present.score + first_score;
    head.present_key = at(static_cast<K*>(call.present.key), first_slot * d);
    head.present_value = call.value_prefix ? nullptr : at(static_cast<V*>(call.present.value), first_slot * dv);
    head.key = at(static_cast<const K*>(call.key), index * t * d);
    head.value = at(static_cast<const V*>(call.value), index * t * dv);
    if constexpr (kQuantized<K>) {
      const KvScales &past = call.past_scales, &present = call.present_scales;
      head.key_scale = {past.key + first_slot, new_scales.key + index * t, present.key + first_slot};
      head.value_scale = {past.value + first_slot, new_scales.value + index * t, present.value + first_slot};
    }
    // A call that is only timed may bring numbers that are no positions: clamp so that the others fit after the first.
    const int64_t first = t > 0 ? call.position[head.b * t] : 0, most = INT32_MAX - head.capacity;
    head.first = first < 0 ? 0 : first > most ? most : first;
    // Used slots are a prefix, whose end is from `low` to `high`. In a decode step no cache of the processor has votes,
    // so a search that reads kProbes at once waits for three of them, and a bisection for nine.
    int low = 0, high = head.capacity;
    while (low < high) {
      const int apart = (high - low + kProbes) / (kProbes + 1);
      int used = 0;
      for (int c = low + apart - 1, i = 0; c < high && i < kProbes; c += apart, ++i) used += head.past_votes[c] > 0.0f;
      low += used * apart;
      if (used < kProbes) high = min_of(high, low + apart - 1);
    }
    head.used = low;
    const int64_t length = call.query_length[head.b], room = min_of(call.tokens, head.capacity - head.used);
    head.n = static_cast<int>(length < 0 ? 0 : length > room ? room : length);
    return head;
  }

  // Appends the new tokens; copies the tensors that are not bound in place.
  void append_tokens(const Head& head) const {
    const size_t c = head.capacity, d = call.key_size, dv = call.value_size;
    const bool stores_values = call.value_prefix == 0,
               moves_values = stores_values && head.present_value != head.past_value;
    if (head.present_key != head.past_key) memcpy(head.present_key, head.past_key, bytes_of<K>(head.used * d));
    if (moves_values) memcpy(head.present_value, head.past_value, bytes_of<V>(head.used * dv));
    if (head.votes != head.past_votes) memcpy(head.votes, head.past_votes, head.used * sizeof(float));
    if (head.position != head.past_position) memcpy(head.position, head.past_position, head.used * sizeof(int32_t));
    if (head.n > 0) {  // without tokens the pointers may be null
      memcpy(at(head.present_key, head.used * d), head.key, bytes_of<K>(head.n * d));
      if (stores_values) memcpy(at(head.present_value, head.used * dv), head.value, bytes_of<V>(head.n * dv));
    }
    for (int i = 0; i < head.n; ++i) {
      head.votes[head.used + i] = 1.0f;
      head.position[head.used + i] = static_cast<int32_t>(head.first + i);
    }
    const size_t rest = c - head.end();
    if (head.present_key != head.past_key)
      memcpy(at(head.present_key, head.end() * d), at(head.past_key, head.end() * d), bytes_of<K>(rest * d));
    if (moves_values)
      memcpy(at(head.present_value, head.end() * dv), at(head.past_value, head.end() * dv), bytes_of<V>(rest * dv));
    if (head.votes != head.past_votes)
      memcpy(head.votes + head.end(), head.past_votes + head.end(), rest * sizeof(float));
    if (head.position != head.past_position)
      memcpy(head.position + head.end(), head.past_position + head.end(), rest * sizeof(int32_t));
    if constexpr (kQuantized<K>) {
      append_scales(head, head.key_scale);
      append_scales(head, head.value_scale);
    }
    if (head.score != head.past_score) {
      const size_t scored = head.n == 0 ? 0 : head.end();  // update_scores or combine_splits writes these scores
      for (int k = 0; k < call.statistics; ++k)
        memcpy(score_of(head.score, k) + scored, score_of(head.past_score, k) + scored, (c - scored) * sizeof(float));
    }
  }

  void append_scales(const Head& head, const typename Head::Scales& scale) const {
    if (scale.present != scale.past) memcpy(scale.present, scale.past, head.capacity * sizeof(float));
    if (head.n > 0) memcpy(scale.present + head.used, scale.added, head.n * sizeof(float));
  }
  // Copies the scales of the slots [from, to) to `out`.
  void scales_of(const Head& head, const typename Head::Scales& scale, int from, int to, float* out) const {
    for (int c = from; c < to; ++c) out[c - from] = c < head.used ? scale.past[c] : scale.added[c - head.used];
  }

  const K* key_row(const Head& head, int slot) const {
    return slot < head.used ? at(head.past_key, static_cast<size_t>(slot) * call.key_size)
                            : at(head.key, static_cast<size_t>(slot - head.used) * call.key_size);
  }
  const V* value_row(const Head& head, int slot) const {
    return slot < head.used ? at(head.past_value, slot * head.past_value_size)
                            : at(head.value, static_cast<size_t>(slot - head.used) * call.value_size);
  }
  int64_t slot_position(const Head& head, int slot) const {
    return slot < head.used ? head.past_position[slot] : head.first + (slot - head.used);
  }

  // Returns the address of a head's statistic k. score: of its first statistic.
  template <class T>
  T* score_of(T* score, int k) const {
    return score + static_cast<size_t>(k) * call.slots;
  }

  vf vote_bias(vf votes) const { return call.vote_exponent * log(votes); }
  float vote_bias(float votes) const { return call.vote_exponent * std::log(votes); }

  // Writes the vote_bias of slots [from, to) to `out`; kLogZero for a slot outside the sliding window of position
  // `now`.
  void bias(const Head& head, int from, int to, int64_t now, float* out) const {
    const int old = min_of(to, head.used);
    int c = from;
    if (call.vote_exponent != 0.0f) {
      for (; c + W <= old; c += W) store(out + c - from, vote_bias(load(head.past_votes + c)));
      for (; c < old; ++c) out[c - from] = vote_bias(head.past_votes[c]);
    } else {
      for (; c < old; ++c) out[c - from] = 0.0f;
    }
    for (; c < to; ++c) out[c - from] = 0.0f;
    if (call.sliding_window)
      for (c = from; c < to; ++c)
        if (slot_position(head, c) <= now - call.sliding_window) out[c - from] = kLogZero;
  }

  vf capped(vf logit) const {
    if (call.softcap == 0.0f) return logit;
    // softcap tanh(ratio). The quotient cancels near zero: there Taylor's series to the 9th power takes its place,
    // whose relative error is below 3e-8 where ratio^2 < 0.0625.
    const vf ratio = logit * (1.0f / call.softcap), square = ratio * ratio;
    const vf series =
        ratio *
        (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315 + square * (62.0f / 2835)))));
    const vf quotient = 1.0f - 2.0f / (exp(2.0f * ratio) + 1.0f);
    return call.softcap * (square < 0.0625f ? series : quotient);
  }

  void write_output(const Head& head, int g, int t, const float* row, float factor) const {
    const int dv = call.value_size;
    Query* out = static_cast<Query*>(call.output) +
                 ((static_cast<size_t>(head.b) * call.query_heads + head.h * group + g) * call.tokens + t) * dv;
    for (int i = 0; i < dv; ++i) out[i] = static_cast<Query>(row[i] * factor);
  }

  void clear_output(const Head& head, int from) const {
    if (from >= call.tokens) return;  // without tokens the output may be null
    for (int g = 0; g < group; ++g) {
      Query* out =
          static_cast<Query*>(call.output) +
          (static_cast<size_t>(head.b) * call.query_heads + head.h * group + g) * call.tokens * call.value_size;
      memset(static_cast<void*>(out + static_cast<size_t>(from) * call.value_size), 0,
             static_cast<size_t>(call.tokens - from) * call.value_size * sizeof(Query));
    }
  }

  void append_task(size_t index) {
    const Head head = head_of(index);
    append_tokens(head);
    clear_output(head, head.n);
  }

  // Runs `Kernel::task` (Decode's or Prefill's) for every split of every head. The task that ends last of a head's runs
  // `Kernel::finish`: threads would wait for each other between these steps, and a wait costs more than a short one.
  template <class Kernel>
  static void run(Kernel& kernel, KvRunner runner) {
    const HeadOrder order(kernel.call.capacity, kernel.call.batch, kernel.call.heads);
    struct Run {
      Kernel& kernel;
      const HeadOrder& order;
    } run{kernel, order};
    runner.parallel_for(
        runner.context, static_cast<size_t>(kernel.call.batch) * kernel.call.heads * kernel.splits,
        [](void* data, size_t i) {
          const auto& [kernel, order] = *static_cast<Run*>(data);
          const size_t index = order.number(i / kernel.splits);
          kernel.task(index * kernel.splits + i % kernel.splits);
          if (kernel.splits > 1) {
            if (!kernel.partials.ends(index)) return;
            const typename Kernel::Head head = kernel.head_of(index);
            if (head.n > 0) kernel.finish(head, index);
          }
          kernel.append_task(index);
        },
        &run);
  }
};

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
