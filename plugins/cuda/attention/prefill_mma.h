// Prefill's output on tensor cores, for 16-bit caches: `Prefill` of prefill.h with larger tiles. A block of four warps
// per KV head and tile of 64 or 128 rows; a warp keeps its 16 or 32 rows in registers from logits to output:
//
//   for each block of 32 or 64 slots
//     wait for its keys; start the copy of its values
//     logit = query x key^T of all slots; row_max, row_sum, weight = running softmax of the first half
//     wait for its values; start the copy of the next keys
//     output += weight x value of the first half; the softmax of the second half, and its product with the values
//   write output / row_sum through shared memory, so that threads write whole vectors
//
// Logits, row_max and weights are base 2: exp(x) is exp2(x log2(e)), and the scale includes the factor log2(e). m is a
// tile of 16 rows of a warp, c a tile of 8 or 16 columns.
#pragma once

#include "../core/mma.h"
#include "prefill.h"

namespace kv {
namespace cuda {

// Computes logits, base 2, from products and the slots' biases (base 2). `cap` is a separate step: few models have a
// softcap, and the operator would test for it at every logit.
struct Logits {
  float scale, softcap, raw_scale;
  KV_DEVICE explicit Logits(const KvVoteAttention& a)
      : scale(a.softcap == 0.0f ? a.scale * kLog2E : kLog2E), softcap(a.softcap), raw_scale(a.scale) {}
  template <int kCount>
  KV_DEVICE void cap(float (&products)[kCount][4]) const {
    if (softcap == 0.0f) return;
#pragma unroll
    for (int i = 0; i < 4 * kCount; ++i) products[i / 4][i % 4] = capped(products[i / 4][i % 4] * raw_scale, softcap);
  }
  KV_DEVICE float operator()(float product, float bias) const { return product * scale + bias; }
};

// Returns a row's token, row / group, without a division. It is exact below 2^27 rows, since the reciprocal is too
// large by less than 1 / 2^31 and a group has at most 16 query heads.
struct Tokens {
  int group;
  uint32_t reciprocal;
  KV_DEVICE explicit Tokens(int group) : group(group), reciprocal((1u << 31) / static_cast<uint32_t>(group) + 1) {}
  KV_DEVICE int operator()(int row) const {
    return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(row)) * reciprocal >> 31);
  }
  // Returns the index of a row among the queries of the group, [G, tokens].
  KV_DEVICE size_t place(int row, int tokens) const {
    const int token = (*this)(row);
    return static_cast<size_t>(row - token * group) * tokens + token;
  }
};

// Rows of up to kSize elements in shared memory, padded with zeros to kSize elements and after the last row.
template <class Kernel>
struct Rows {
  static constexpr int kVectors = Kernel::kSize / 8, kStride = (kVectors | 1) * 16;  // as shared_stride
  char* base;

  // Within a phase: zeroes the columns that no copy writes.
  KV_DEVICE void clear_columns(int rows, int size, int t) const {
    const int rest = kVectors - size / 8;
    for (int i = t; i < rows * rest; i += Kernel::kThreads)
      store_vector(base + i / rest * kStride + (size / 8 + i % rest) * 16, Vector{});
  }
  // Within a phase: copies rows [0, count) of `size` elements from the addresses from(row), and zeroes those up to
  // kRows. The loop is not unrolled: addresses computed ahead would take registers from the products.
  template <int kRows, class From>
  KV_DEVICE void copy(Block<Kernel>& block, int count, int size, int t, From from) const {
    constexpr int kAcross = kVectors >= 32 ? 32 : kVectors >= 16 ? 16 : 8;  // threads of a row
#pragma unroll 1
    for (int row = t / kAcross; row < kRows; row += Kernel::kThreads / kAcross) {
      const auto* source = from(row < count ? row : 0);
#pragma unroll
      for (int i = 0; i < kVectors; i += kAcross) {
        const int at = i + t % kAcross;
        if (at * 8 >= size) continue;
        if (row < count)
          block.template copy<16>(this->row(row) + at * 16, source + at * 8);
        else
          store_vector(this->row(row) + at * 16, Vector{});
      }
    }
  }
  KV_DEVICE char* row(int i) const { return base + i * kStride; }
};

// kMaxSize: the most elements of a row of keys or values, a multiple of 16.
template <class T, int kMaxSize>
struct PrefillMma {
  using Args = Attention;
  static constexpr int kSize = kMaxSize, kThreads = 128, kBlocksPerMultiprocessor = 2;
  static constexpr int kTiles = kSize > 128 ? 1 : 2;  // tiles of 16 rows of a warp
  static constexpr int kSlots = kSize > 128 ? 32 : 64, kHalf = kSlots / 2;
  static constexpr int kRows = kThreads / kWarp * kTiles * 16;
  using Shape = Rows<PrefillMma>;

  // A lane has rows lane / 4 and lane / 4 + 8 of a warp's products of a tile, and two of every 8 columns. Logits and
  // weights belong to half a block of slots; votes and position to a slot of the next block (read_slot).
  struct Registers {
    float product[kTiles][kSize / 8][4], logit[kTiles][kHalf / 8][4];
    float block_max[kTiles][2], row_max[kTiles][2], row_sum[kTiles][2];
    uint32_t weight[kTiles][kHalf / 16][4], a[kTiles][4], b[4];
    float votes;
    int position;
  };

  // The arrays in shared memory. biases, positions: of the slots of two blocks in turn; hidden: how many slots of each
  // some row does not see; now: the rows' positions. The last are here because a lane that computed them itself would
  // keep them in registers.
  struct Shared {
    Shape query, key, value;
    float* biases;
    int *positions, *hidden, *now;
  };
  static KV_HD constexpr size_t shared_size() {
    return (kRows + 2 * kSlots) * Shape::kStride + (4 * kSlots + 2 + kRows) * sizeof(float);
  }
  static KV_DEVICE Shared divide(char* shared) {
    Shared s;
    s.query.base = shared;
    s.key.base = s.query.row(kRows);
    s.value.base = s.key.row(kSlots);
    s.biases = reinterpret_cast<float*>(s.value.row(kSlots));
    s.positions = reinterpret_cast<int*>(s.biases + 2 * kSlots);
    s.hidden = s.positions + 2 * kSlots;
    s.now = s.hidden + 2;
    return s;
  }
  static KV_HD int blocks_per_head(int rows) { return (rows + kRows - 1) / kRows; }
  static KV_DEVICE int row_of(int t, int tile, int half) {
    return t / kWarp * kTiles * 16 + tile * 16 + half * 8 + t % kWarp / 4;
  }

  // The work of a block: rows [begin, end) of a head, which see no slot from `until` on.
  struct Work {
    const Head<T>& head;
    Tokens tokens;
    int used, n, begin, end, first, until;
  };

  static KV_DEVICE void run(Block<PrefillMma>& block, const Attention& args) {
    const KvVoteAttention& a = args.call;
    const Part part(args, block.index());
    const Head<T> head(args, part);
    const Shared s = divide(block.shared);
    Work w{head, Tokens(args.group()), args.used[2 * head.index], args.used[2 * head.index + 1], 0, 0, 0, 0};
    w.begin = part.split * kRows, w.end = min_of(w.begin + kRows, w.n * w.tokens.group);
    w.first = head.first(), w.until = w.begin < w.end ? w.used + w.tokens(w.end - 1) + 1 : 0;
    block.each([&](int t, Registers& r) {
      // The block of the first rows writes the new slots' votes, which no other block of this launch reads.
      for (int i = t; w.begin == 0 && i < w.n; i += kThreads) head.votes()[w.used + i] = 1.0f;
      s.query.clear_columns(kRows + kSlots, a.key_size, t);  // queries, and the keys behind them
      s.value.clear_columns(kSlots, a.value_size, t);
      if (t < 2) s.hidden[t] = 0;
      if (t < kRows) s.now[t] = w.first + w.tokens(w.begin + t);
      start(r, w, t);
    });
    if (w.begin < w.end) attend(block, w, s);
    finish(block, args, w, s);
  }

  static KV_DEVICE void start(Registers& r, const Work& w, int t) {
    const KvVoteAttention& a = w.head.a;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = w.begin + row_of(t, m, half), token = w.tokens(row);
        const bool sinks = a.sink_logits && row < w.end;
        r.row_max[m][half] =
            sinks ? a.sink_logits[w.head.head * w.tokens.group + row - token * w.tokens.group] * kLog2E : kLowest;
        r.row_sum[m][half] = sinks && t % 4 == 0 ? 1.0f : 0.0f;
      }
#pragma unroll
      for (int c = 0; c < kSize / 8; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) r.product[m][c][i] = 0.0f;
    }
  }

  static KV_DEVICE void attend(Block<PrefillMma>& block, const Work& w, const Shared& s) {
    const KvVoteAttention& a = w.head.a;
    const auto copy_keys = [&](int from, int t) {
      s.key.template copy<kSlots>(block, w.until - from, a.key_size, t, [&](int i) { return w.head.key(from + i); });
    };
    block.each_alone([&](int t, Registers& r) {
      s.query.template copy<kRows>(block, w.end - w.begin, a.key_size, t, [&](int i) {
        return w.head.query(0, 0) + w.tokens.place(w.begin + i, a.tokens) * a.key_size;
      });
      copy_keys(0, t);
      read_slot(r, w, 0, t);
      store_slot(block, r, w, s, 0, t);
    });
    block.cp_async_commit();
    for (int from = 0, i = 0; from < w.until; from += kSlots, ++i) {
      const int next = from + kSlots;
      block.cp_async_wait(0);  // the keys are there, and no thread reads the earlier values any more
      block.each_alone([&](int t, Registers&) {
        s.value.template copy<kSlots>(block, w.until - from, a.value_size, t,
                                      [&](int i) { return w.head.value(from + i); });
        if (t == 0) s.hidden[(i + 1) % 2] = 0;
      });
      block.cp_async_commit();
      multiply_keys(block, s, 0);
      softmax_slots(block, w, s, i, 0);
      multiply_keys(block, s, kHalf);
      block.cp_async_wait(0);  // the values are there, and no thread reads these keys any more
      block.each_alone([&](int t, Registers& r) {
        if (next >= w.until) return;
        copy_keys(next, t);
        read_slot(r, w, next, t);
      });
      block.cp_async_commit();
      multiply_values(block, s, 0);
      softmax_slots(block, w, s, i, kHalf);
      multiply_values(block, s, kHalf);
      block.each_alone([&](int t, Registers& r) {
        if (next < w.until) store_slot(block, r, w, s, i + 1, t);
      });
    }
    block.cp_async_wait(0);
  }

  // Within a phase, a slot per thread: read_slot reads votes and position of the block from `from` on early, and
  // store_slot stores its bias and position later, when no thread reads the older ones. No row sees slots from `until`
  // on.
  static KV_DEVICE void read_slot(Registers& r, const Work& w, int from, int t) {
    if (t >= kSlots) return;
    r.votes = from + t < w.used ? w.head.votes()[from + t] : 1.0f;
    r.position = from + t < w.until ? w.head.position()[from + t] : INT32_MAX;
  }
  static KV_DEVICE void store_slot(Block<PrefillMma>& block, const Registers& r, const Work& w, const Shared& s, int i,
                                   int t) {
    if (t >= kSlots) return;
    const int window = w.head.a.sliding_window;
    s.biases[i % 2 * kSlots + t] = vote_bias(r.votes, w.head.a) * kLog2E;
    s.positions[i % 2 * kSlots + t] = r.position;
    if (!visible(r.position, w.first + w.tokens(w.begin), window) ||
        !visible(r.position, w.first + w.tokens(w.end - 1), window))
      block.add(s.hidden + i % 2, 1);
  }

  // Multiplies the queries with kHalf keys of the block, from slot `from` on.
  static KV_DEVICE void multiply_keys(Block<PrefillMma>& block, const Shared& s, int from) {
    block.each_alone([&](int, Registers& r) {
#pragma unroll
      for (int i = 0; i < kTiles * kHalf / 2; ++i) r.logit[i / (kHalf / 2)][i % (kHalf / 2) / 4][i % 4] = 0.0f;
    });
#pragma unroll
    for (int k = 0; k < kSize / 16; ++k) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
        load_a(
            block, Shape::kStride, [&](int t) { return s.query.row((t / kWarp * kTiles + m) * 16) + k * 32; },
            [&](Registers& r) { return r.a[m]; });
#pragma unroll
      for (int j = 0; j < kHalf / 16; ++j) {
        load_b(
            block, Shape::kStride, [&](int) { return s.key.row(from + j * 16) + k * 32; },
            [](Registers& r) { return r.b; });
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i)
          multiply<T>(
              block, [&](Registers& r) { return Product{r.logit[i / 2][2 * j + i % 2], r.a[i / 2], r.b + i % 2 * 2}; });
      }
    }
  }

  // Turns products into weights by the running softmax. The sums of the first 8 of 16 slots are elements 0 to 3 of the
  // next product's left operand, the others elements 4 to 7, so they stay in their lanes.
  static KV_DEVICE void softmax_slots(Block<PrefillMma>& block, const Work& w, const Shared& s, int i, int from) {
    const bool masked = s.hidden[i % 2] > 0;
    const int at = i % 2 * kSlots + from;
    block.each_alone([&](int t, Registers& r) { masked ? bias<true>(r, w, s, at, t) : bias<false>(r, w, s, at, t); });
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i)
      block.template warp_max<4>([&](Registers& r) -> float& { return r.block_max[i / 2][i % 2]; });
    block.each_alone([&](int, Registers& r) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) rescale(r, i / 2, i % 2);
    });
  }

  // Within a phase: replaces products by logits, and computes the maxima of a lane's logits.
  template <bool kMasked>
  static KV_DEVICE void bias(Registers& r, const Work& w, const Shared& s, int at, int t) {
    const Logits logits(w.head.a);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      logits.cap(r.logit[m]);
      r.block_max[m][0] = r.block_max[m][1] = -INFINITY;
    }
#pragma unroll
    for (int j = 0; j < kHalf / 4; ++j) {
      const int slot = at + j / 2 * 8 + t % 4 * 2 + j % 2;
      const float bias = s.biases[slot];
      const int position = kMasked ? s.positions[slot] : 0;
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const int m = i / 2, half = i % 2;
        float& x = r.logit[m][j / 2][2 * half + j % 2];
        x = logits(x, bias);
        if (kMasked && !visible(position, s.now[row_of(t, m, half)], w.head.a.sliding_window)) x = -INFINITY;
        r.block_max[m][half] = fmaxf(r.block_max[m][half], x);
      }
    }
  }

  // Within a phase: updates row_max, row_sum and products of a row, and packs its weights.
  static KV_DEVICE void rescale(Registers& r, int m, int half) {
    const float row_max = fmaxf(r.row_max[m][half], r.block_max[m][half]);
    if (row_max > r.row_max[m][half]) {
      const float factor = exp2_of(r.row_max[m][half] - row_max);
      r.row_max[m][half] = row_max;
      r.row_sum[m][half] *= factor;
#pragma unroll
      for (int j = 0; j < kSize / 4; ++j) r.product[m][j / 2][2 * half + j % 2] *= factor;
    }
#pragma unroll
    for (int j = 0; j < kHalf / 8; ++j) {
      const float* x = r.logit[m][j] + 2 * half;
      const float low = exp2_of(x[0] - row_max), high = exp2_of(x[1] - row_max);
      r.row_sum[m][half] += low + high;
      r.weight[m][j / 2][j % 2 * 2 + half] = packed<T>(low, high);
    }
  }

  static KV_DEVICE void multiply_values(Block<PrefillMma>& block, const Shared& s, int from) {
#pragma unroll
    for (int j = 0; j < kHalf / 16; ++j)
#pragma unroll
      for (int c = 0; c < kSize / 16; ++c) {
        load_b_rows(
            block, Shape::kStride, [&](int) { return s.value.row(from + j * 16) + c * 32; },
            [](Registers& r) { return r.b; });
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i)
          multiply<T>(block, [&](Registers& r) {
            return Product{r.product[i / 2][2 * c + i % 2], r.weight[i / 2][j], r.b + i % 2 * 2};
          });
      }
  }

  // Writes the output (0 in padding) and the rows' softmax. They pass through the shared memory of the queries and of
  // the slots, so that whole vectors are written.
  static KV_DEVICE void finish(Block<PrefillMma>& block, const Attention& args, const Work& w, const Shared& s) {
    const KvVoteAttention& a = args.call;
    float* softmax = s.biases;  // [kRows, 2]
    static_assert(2 * kRows <= 4 * kSlots, "biases and positions have room");
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i)
      block.template warp_sum<4>([&](Registers& r) -> float& { return r.row_sum[i / 2][i % 2]; });
    block.each([&](int t, Registers& r) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const int m = i / 2, half = i % 2, line = row_of(t, m, half);
        const float factor = w.begin + line < w.end ? 1.0f / r.row_sum[m][half] : 0.0f;
        if (t % 4 == 0) softmax[2 * line] = r.row_max[m][half], softmax[2 * line + 1] = r.row_sum[m][half];
#pragma unroll
        for (int c = 0; c < kSize / 8; ++c) {
          const float* pair = r.product[m][c] + 2 * half;
          *reinterpret_cast<uint32_t*>(s.query.row(line) + c * 16 + t % 4 * 4) =
              packed<T>(pair[0] * factor, pair[1] * factor);
        }
      }
    });
    block.each_alone([&](int t, Registers&) {
      const int rows = min_of(kRows, a.tokens * w.tokens.group - w.begin);
      for (int i = t; i < rows * Shape::kVectors; i += kThreads) {
        const int line = i / Shape::kVectors, at = i % Shape::kVectors;
        if (at * 8 < a.value_size)
          store_vector(w.head.output(0, 0) + w.tokens.place(w.begin + line, a.tokens) * a.value_size + at * 8,
                       load_vector(s.query.row(line) + at * 16));
      }
      if (!args.row_softmax || w.begin + t >= w.end || t >= kRows) return;
      float* to = args.row_softmax +
                  2 * (static_cast<size_t>(w.head.query_head(0)) * a.tokens + w.tokens.place(w.begin + t, a.tokens));
      to[0] = softmax[2 * t], to[1] = softmax[2 * t + 1];
    });
  }
};

}  // namespace cuda
}  // namespace kv
