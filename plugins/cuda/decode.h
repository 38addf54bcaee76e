// VoteAttention for one token per sequence. A block takes one split of a KV head's slots for all query heads of its
// group, so that every key and every value is read once; the last block of a head puts its splits together in their
// order and appends the token.
//
// Averages of logits are updated on the way. Sums of probabilities need the softmax of the whole row: they follow in a
// second launch (decode_sums.h).
#pragma once

#include "attention.h"

namespace kv {
namespace cuda {

// Slots [from, to) of split `split`, whole blocks of `total` slots.
struct Range {
  int from, to;
};
KV_DEVICE Range split_range(int split, int splits, int total) {
  const int each = ((total + splits - 1) / splits + kBlock - 1) / kBlock * kBlock;
  return {min_of(split * each, total), min_of((split + 1) * each, total)};
}

// A block of slots in shared memory.
template <class T>
struct Stage {
  char* base;
  int key_stride, value_size, key_size;

  KV_DEVICE Stage(char* base, const KvVoteAttention& a)
      : base(base), key_stride(shared_stride<T>(a.key_size)), value_size(a.value_size), key_size(a.key_size) {}
  KV_DEVICE const T* key(int slot) const { return reinterpret_cast<const T*>(base + slot * key_stride); }
  KV_DEVICE const T* value(int slot) const {
    return reinterpret_cast<const T*>(base + kBlock * key_stride) + slot * value_size;
  }
  KV_DEVICE float* votes() const {
    return reinterpret_cast<float*>(base + kBlock * (key_stride + value_size * sizeof(T)));
  }
  KV_DEVICE int* position() const { return reinterpret_cast<int*>(votes() + kBlock); }
  KV_DEVICE float* score(int k) const { return votes() + (2 + k) * kBlock; }
};

template <class T>
KV_HD constexpr size_t stage_size(int key_size, int value_size, int statistics) {
  return kBlock * (shared_stride<T>(key_size) + value_size * sizeof(T) + (2 + statistics) * sizeof(float));
}

// G: query heads in registers, the group's or more.
template <class T, int G>
struct Decode {
  using Args = Attention;
  static constexpr int kThreads = 128, kWarps = kThreads / kWarp, kBlocksPerMultiprocessor = G > 4 ? 2 : 3;
  static constexpr int kOwn = (G + kWarps - 1) / kWarps;  // query heads of a warp, in the softmax

  struct Registers {
    float product[G][4], logit[kOwn], peak[kOwn], top[kOwn], total[kOwn];
  };

  // Shared memory that does not depend on the number of stages, in floats: queries [G, D], parts of logits [warps, G,
  // kBlock], logits [G, kBlock], weights [kBlock, G], factors [G], and one int.
  static KV_HD constexpr size_t fixed(int key_size) {
    return (G * key_size + (kWarps + 2) * G * kBlock + (G + 4) / 4 * 4) * sizeof(float);
  }
  // What the end needs in place of the stages.
  static KV_HD constexpr size_t closing(int splits, int group) {
    const size_t products = kThreads * G * 4 * sizeof(float), shares = (3 * splits + 2) * group * sizeof(float);
    return products > shares ? products : shares;
  }

  struct Shared {
    float *query, *part, *logit, *weight, *factor;
    int* found;
    char* stages;
  };

  static KV_DEVICE Shared divide(char* shared, int key_size) {
    Shared s;
    s.stages = shared + fixed(key_size);
    s.query = reinterpret_cast<float*>(shared);
    s.part = s.query + G * key_size;
    s.logit = s.part + kWarps * G * kBlock;
    s.weight = s.logit + G * kBlock;
    s.factor = s.weight + G * kBlock;
    s.found = reinterpret_cast<int*>(s.factor + G);
    return s;
  }

  static KV_DEVICE void run(Block<Decode>& block, const Attention& args) {
    const KvVoteAttention& a = args.call;
    const Head<T> head(a, block.index() / args.splits);
    const int split = block.index() % args.splits, group = args.group();
    const Shared s = divide(block.shared, a.key_size);
    const int used = used_slots(block, head.votes(), a.capacity, s.found);
    if (head.length(used) == 0) {
      block.each([&](int t, auto&) {
        if (split == 0)
          for (int i = t; i < group * a.value_size; i += kThreads)
            assign(head.output(i / a.value_size, 0)[i % a.value_size], 0.0f);
        if (split == 0 && t == 0) args.used[2 * head.index] = used, args.used[2 * head.index + 1] = 0;
      });
      return;
    }
    block.each([&](int t, Registers& r) {
      for (int i = t; i < G * a.key_size; i += kThreads)
        s.query[i] = i < group * a.key_size ? to_float(head.query(i / a.key_size, 0)[i % a.key_size]) * a.scale : 0.0f;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) r.top[i] = kLowest, r.total[i] = 0.0f;
#pragma unroll
      for (int g = 0; g < G; ++g)
#pragma unroll
        for (int j = 0; j < 4; ++j) r.product[g][j] = 0.0f;
    });
    attend(block, args, head, s, used, split_range(split, args.splits, used + 1));
    leave(block, args, head, s, split);
    if (block.is_last(args.counters + head.index, args.splits)) finish(block, args, head, s, used);
  }

  static KV_DEVICE void attend(Block<Decode>& block, const Attention& args, const Head<T>& head, const Shared& s,
                               int used, Range range) {
    const KvVoteAttention& a = args.call;
    const size_t size = stage_size<T>(a.key_size, a.value_size, a.statistics);
    const auto fetch = [&](int ahead) {
      const int from = range.from + ahead * kBlock, count = min_of(kBlock, range.to - from);
      const Stage<T> stage(s.stages + ahead % args.stages * size, a);
      block.each_alone([&](int t, auto&) { fetch_rows(block, head, stage, used, from, count, t); });
      block.close_copies();
    };
    for (int i = 0; i < args.stages - 1; ++i) fetch(i);
    for (int i = 0, from = range.from; from < range.to; ++i, from += kBlock) {
      fetch(i + args.stages - 1);
      block.arrived(args.stages - 1);
      const Stage<T> stage(s.stages + i % args.stages * size, a);
      multiply_keys(block, stage, s);
      weigh(block, args, head, stage, s, used, from, min_of(kBlock, range.to - from));
      multiply_values(block, args, head, stage, s, used, from, min_of(kBlock, range.to - from));
    }
    block.arrived(0);
  }

  static KV_DEVICE void fetch_rows(Block<Decode>& block, const Head<T>& head, const Stage<T>& stage, int used, int from,
                                   int count, int t) {
    const KvVoteAttention& a = head.a;
    fetch_vectors(a.key_size / kLanes<T>, count, t, [&](int slot, int at) {
      const T* row = from + slot < used ? head.key(from + slot) : head.new_key(0);
      block.template copy<16>(const_cast<T*>(stage.key(slot)) + at, row + at);
    });
    fetch_vectors(a.value_size / kLanes<T>, count, t, [&](int slot, int at) {
      const T* row = from + slot < used ? head.value(from + slot) : head.new_value(0);
      block.template copy<16>(const_cast<T*>(stage.value(slot)) + at, row + at);
    });
    const int slot = t % kWarp;
    if (from + slot >= used || slot >= count) return;
    for (int k = t / kWarp; k < 2 + a.statistics; k += kWarps) {
      if (k == 0)
        block.template copy<4>(stage.votes() + slot, head.votes() + from + slot);
      else if (k == 1)
        block.template copy<4>(stage.position() + slot, head.position() + from + slot);
      else
        block.template copy<4>(stage.score(k - 2) + slot, head.score(k - 2) + from + slot);
    }
  }

  // Every kThreads-th vector of `count` rows of `width`, from number t on: copy(row, element). One division, not one
  // per vector.
  template <class F>
  static KV_DEVICE void fetch_vectors(int width, int count, int t, F copy) {
    const int rows = kThreads / width, rest = kThreads % width;
    int slot = t / width, at = t % width;
    while (slot < count) {
      copy(slot, at * kLanes<T>);
      slot += rows, at += rest;
      if (at >= width) at -= width, ++slot;
    }
  }

  // A lane is a slot, a warp a part of the head size.
  static KV_DEVICE void multiply_keys(Block<Decode>& block, const Stage<T>& stage, const Shared& s) {
    block.each([&](int t, Registers&) {
      const int slot = t % kWarp, warp = t / kWarp, vectors = stage.key_size / kLanes<T>,
                each = (vectors + kWarps - 1) / kWarps;
      float total[G];
#pragma unroll
      for (int g = 0; g < G; ++g) total[g] = 0.0f;
      for (int i = warp * each; i < min_of((warp + 1) * each, vectors); ++i) {
        float key[kLanes<T>];
        widen<T>(load_vector(stage.key(slot) + i * kLanes<T>), key);
#pragma unroll
        for (int g = 0; g < G; ++g) {
          const float* query = s.query + g * stage.key_size + i * kLanes<T>;
#pragma unroll
          for (int j = 0; j < kLanes<T>; j += 4) {
            float four[4];
            load_four(query + j, four);
#pragma unroll
            for (int e = 0; e < 4; ++e) total[g] += key[j + e] * four[e];
          }
        }
      }
#pragma unroll
      for (int g = 0; g < G; ++g) s.part[(warp * G + g) * kBlock + slot] = total[g];
    });
  }

  // A lane is a slot, a warp every fourth query head: logits, the running softmax, weights.
  static KV_DEVICE void weigh(Block<Decode>& block, const Attention& args, const Head<T>& head, const Stage<T>& stage,
                              const Shared& s, int used, int from, int count) {
    const KvVoteAttention& a = args.call;
    const int group = args.group(), now = head.first();
    block.each_alone([&](int t, Registers& r) {
      const int slot = t % kWarp;
      float bias = kLowest;
      if (slot < count) {
        const bool is_new = from + slot == used;
        bias = is_new ? 0.0f : vote_bias(stage.votes()[slot], a.vote_exponent);
        if (!is_new && !visible(stage.position()[slot], now, a.sliding_window)) bias = kLogZero;
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int g = t / kWarp + i * kWarps;
        r.logit[i] = kLowest;
        if (g < G && slot < count) {
          float logit = 0.0f;
#pragma unroll
          for (int part = 0; part < kWarps; ++part) logit += s.part[(part * G + g) * kBlock + slot];
          logit = capped(logit, a.softcap);
          s.logit[g * kBlock + slot] = logit;
          r.logit[i] = bias == kLogZero ? kLogZero : logit + bias;
          if (args.logits && g < group)
            args.logits[static_cast<size_t>(head.query_head(g)) * a.capacity + from + slot] = r.logit[i];
        }
        r.peak[i] = r.logit[i];
      }
    });
#pragma unroll
    for (int i = 0; i < kOwn; ++i) block.warp_max([&](Registers& r) -> float& { return r.peak[i]; });
    block.each([&](int t, Registers& r) {
      const int slot = t % kWarp;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int g = t / kWarp + i * kWarps;
        if (g >= G) continue;
        const float top = max_of(r.top[i], r.peak[i]), factor = expf(r.top[i] - top);
        const float weight = slot < count ? expf(r.logit[i] - top) : 0.0f;
        r.total[i] = r.total[i] * factor + weight;
        r.top[i] = top;
        s.weight[slot * G + g] = weight;
        if (slot == 0) s.factor[g] = factor;
      }
    });
  }

  // A thread is four columns of every `parts`-th value; and the averages of logits.
  static KV_DEVICE void multiply_values(Block<Decode>& block, const Attention& args, const Head<T>& head,
                                        const Stage<T>& stage, const Shared& s, int used, int from, int count) {
    const KvVoteAttention& a = args.call;
    block.each([&](int t, Registers& r) {
      const int chunks = a.value_size / 4, parts = kThreads / chunks, part = t / chunks, column = t % chunks * 4;
      if (part < parts) {
#pragma unroll
        for (int g = 0; g < G; ++g)
#pragma unroll
          for (int j = 0; j < 4; ++j) r.product[g][j] *= s.factor[g];
        for (int slot = part; slot < count; slot += parts) {
          float value[4];
          load_four(stage.value(slot) + column, value);
          float weight[G];
#pragma unroll
          for (int g = 0; g < G; g += kVectorOf) load_weights(s.weight + slot * G + g, weight + g);
#pragma unroll
          for (int g = 0; g < G; ++g)
#pragma unroll
            for (int j = 0; j < 4; ++j) r.product[g][j] += weight[g] * value[j];
        }
      }
      const int slot = t % kWarp;
      for (int k = t / kWarp; k < a.statistics && slot < count; k += kWarps)
        if (a.statistic[k].kind == KV_STATISTIC_LOG_EMA) update_average(args, head, stage, s, used, from, slot, k);
    });
  }

  static KV_DEVICE void update_average(const Attention& args, const Head<T>& head, const Stage<T>& stage,
                                       const Shared& s, int used, int from, int slot, int k) {
    const KvVoteAttention& a = args.call;
    const int group = args.group();
    const float decay = a.statistic[k].decay, share = log1pf(-decay) - logf(static_cast<float>(group));
    const bool is_new = from + slot == used;
    const float start = is_new ? kLogZero : stage.score(k)[slot] + logf(decay);
    float top = start, total = 0.0f;
    if (is_new || visible(stage.position()[slot], head.first(), a.sliding_window)) {
      for (int g = 0; g < group; ++g) top = max_of(top, s.logit[g * kBlock + slot] + share);
      for (int g = 0; g < group; ++g) total += expf(s.logit[g * kBlock + slot] + share - top);
    }
    head.score(k)[from + slot] = top + logf(total + expf(start - top));
  }

  static constexpr int kVectorOf = G % 4 == 0 ? 4 : 1;
  static KV_DEVICE void load_weights(const float* from, float* to) {
    if constexpr (kVectorOf == 4) {
      float four[4];
      load_four(from, four);
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = four[i];
    } else {
      *to = *from;
    }
  }

  // The split's products, maxima and sums into the workspace.
  static KV_DEVICE void leave(Block<Decode>& block, const Attention& args, const Head<T>& head, const Shared& s,
                              int split) {
    const int group = args.group(), size = args.call.value_size, chunks = size / 4, parts = kThreads / chunks;
    const size_t at = static_cast<size_t>(head.index) * args.splits + split;
    float* sums = reinterpret_cast<float*>(s.stages);  // [parts, G, Dv]
#pragma unroll
    for (int i = 0; i < kOwn; ++i) block.warp_sum([&](Registers& r) -> float& { return r.total[i]; });
    block.each([&](int t, Registers& r) {
      const int part = t / chunks, column = t % chunks * 4;
      if (part < parts)
#pragma unroll
        for (int g = 0; g < G; ++g)
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[(part * G + g) * size + column + j] = r.product[g][j];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int g = t / kWarp + i * kWarps;
        if (t % kWarp == 0 && g < group)
          args.tops[2 * at * group + g] = r.top[i], args.tops[(2 * at + 1) * group + g] = r.total[i];
      }
    });
    block.each([&](int t, Registers&) {
      for (int i = t; i < group * size; i += kThreads) {
        float total = 0.0f;
        for (int part = 0; part < parts; ++part) total += sums[part * G * size + i];
        args.products[at * group * size + i] = total;
      }
    });
  }

  static KV_DEVICE void finish(Block<Decode>& block, const Attention& args, const Head<T>& head, const Shared& s,
                               int used) {
    const KvVoteAttention& a = args.call;
    const int group = args.group(), size = a.value_size, splits = args.splits;
    const float *tops = args.tops + 2 * static_cast<size_t>(head.index) * splits * group,
                *products = args.products + static_cast<size_t>(head.index) * splits * group * size;
    float *held = reinterpret_cast<float*>(s.stages), *share = held + 2 * splits * group, *row = share + splits * group;
    block.each([&](int t, auto&) {
      for (int i = t; i < 2 * splits * group; i += kThreads) held[i] = tops[i];
    });
    block.each([&](int g, auto&) {
      if (g >= group) return;
      float top = a.sink_logits ? a.sink_logits[head.head * group + g] : kLowest, total = 0.0f;
      for (int i = 0; i < splits; ++i) top = max_of(top, held[2 * i * group + g]);
      if (a.sink_logits) total = expf(a.sink_logits[head.head * group + g] - top);
      for (int i = 0; i < splits; ++i) total += expf(held[2 * i * group + g] - top) * held[(2 * i + 1) * group + g];
      row[2 * g] = top, row[2 * g + 1] = total;
      args.rows[2 * static_cast<size_t>(head.query_head(g))] = top;
      args.rows[2 * static_cast<size_t>(head.query_head(g)) + 1] = total;
    });
    block.each([&](int t, auto&) {
      for (int i = t; i < splits * group; i += kThreads)
        share[i] = expf(held[2 * (i / group) * group + i % group] - row[2 * (i % group)]) / row[2 * (i % group) + 1];
    });
    block.each([&](int t, auto&) {
      for (int i = t * 4; i < group * size; i += kThreads * 4) {
        float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int split = 0; split < splits; ++split) {
          float four[4];
          load_four(products + static_cast<size_t>(split) * group * size + i, four);
          for (int j = 0; j < 4; ++j) total[j] += share[split * group + i / size] * four[j];
        }
        for (int j = 0; j < 4; ++j) assign(head.output(i / size, 0)[i % size + j], total[j]);
      }
      // All blocks of the head have read the votes by now.
      for (int i = t; i < a.key_size; i += kThreads) head.key(used)[i] = head.new_key(0)[i];
      for (int i = t; i < size; i += kThreads) head.value(used)[i] = head.new_value(0)[i];
      if (t == 0) {
        head.votes()[used] = 1.0f;
        head.position()[used] = head.first();
        args.used[2 * head.index] = used, args.used[2 * head.index + 1] = 1;
      }
    });
  }
};

}  // namespace cuda
}  // namespace kv
