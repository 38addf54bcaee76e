// LinearAttention: all tokens of a call for one head of one sequence, and some columns of the head's state.
//
//   without a token: present = past; otherwise
//   S = the columns of past                                  in registers
//   for each kChunk tokens                                   two buffers in shared memory, copied asynchronously
//     decay = exp(decay)
//     for each token
//       S      = decay S;  known = k S
//       row    = beta (v - known), or v
//       S      = S + k^T row;  output = scale q S
//   present = S
//
// A column of the state never meets another one, so blocks need nothing from each other, and within a block the warps
// wait for one another only when a chunk begins. A thread has kOwn rows of kWide neighbouring columns; 8 neighbouring
// lanes have all rows of a column, and add up their sums over rows in a fixed order. Rows beyond the state's are zeros.
//
// Letters: a the arguments of the call, s the arrays of a token in shared memory, g a lane's number among its 8, j four
// rows of a thread, l one of them, c a column of a thread, i a token of a chunk.
#pragma once

#include "../../abi/linear_attention.h"
#include "../core/types.h"

namespace kv {
namespace cuda {

struct RecurrenceArgs {
  KvLinearAttention call;
  int slices;          // slices of columns of a head's state
  int chunk;           // tokens of a buffer
  bool whole_vectors;  // whether every row of every tensor is whole vectors of 16 bytes, at an aligned address
};

// kKeys: the most rows of a state: 64, 128 or 256.
template <int kKeys>
struct Recurrence {
  using Args = RecurrenceArgs;
  static constexpr int kThreads = 64, kBlocksPerMultiprocessor = 8, kChunk = 8, kDown = 8;
  static constexpr int kWide = kKeys > 128 ? 2 : 4, kFours = kKeys / (4 * kDown);
  static constexpr int kColumns = kThreads / kDown * kWide;
  struct Registers {
    float state[kFours][4][kWide], known[kWide], out[kWide];
  };
  // The arrays of a token. decay: [kKeys], or a single number.
  struct Token {
    float *key, *query, *decay, *value, *beta;
  };
  static constexpr int kToken = 3 * kKeys + kColumns + 4;
  static size_t shared_size(int chunk) { return size_t{2} * chunk * kToken * sizeof(float); }
  static KV_DEVICE Token token_at(char* shared, int number) {
    float* const first = reinterpret_cast<float*>(shared) + number * kToken;
    return {first, first + kKeys, first + 2 * kKeys, first + 3 * kKeys, first + 3 * kKeys + kColumns};
  }

  // The work of a block: a head of a sequence, and `columns` columns from `first` on.
  struct Work {
    const KvLinearAttention& a;
    const int slice, head, key_head, first, columns;
    const size_t sequence;
    const int length;  // tokens of the sequence

    KV_DEVICE Work(const Args& args, int block)
        : a(args.call),
          slice(block % args.slices),
          head(block / args.slices % a.heads),
          key_head(head / (a.heads / a.key_heads)),
          first(slice * kColumns),
          columns(min_of(kColumns, a.value_size - first)),
          sequence(block / args.slices / a.heads),
          length(length_of(a, sequence)) {}

    static KV_DEVICE int length_of(const KvLinearAttention& a, size_t sequence) {
      const int64_t length = a.length[sequence], most = length < a.tokens ? length : a.tokens;
      return static_cast<int>(most < 0 ? 0 : most);
    }
    KV_DEVICE size_t row(int t) const { return sequence * a.tokens + t; }
    KV_DEVICE size_t of_key(int t) const { return (row(t) * a.key_heads + key_head) * a.key_size; }
    KV_DEVICE size_t of_head(int t) const { return row(t) * a.heads + head; }
    KV_DEVICE size_t of_value(int t) const { return of_head(t) * a.value_size + first; }
    // Returns the index of the first of the block's columns in a row of the state.
    KV_DEVICE size_t of_state(int state_row) const {
      return ((sequence * a.heads + head) * a.key_size + state_row) * a.value_size + first;
    }
    KV_DEVICE int decays() const { return a.by_channel ? a.key_size : 1; }
  };

  static KV_DEVICE void run(Block<Recurrence>& block, const Args& args) {
    const Work w(args, block.index());
    const KvLinearAttention& a = w.a;
    block.each_alone([&](int t, Registers&) {
      for (int64_t i = w.length; i < a.tokens; ++i)
        if (t < w.columns) a.output[w.of_value(static_cast<int>(i)) + t] = 0.0f;
    });
    if (w.length == 0) {
      if (a.past != a.present) copy_state(block, w);
      return;
    }
    // The copies leave the ends of keys and queries that have fewer than kKeys numbers as they are.
    block.each([&](int t, Registers&) {
      for (int i = 0; i < 2 * args.chunk; ++i)
        for (int k = a.key_size + t; k < kKeys; k += kThreads) {
          const Token s = token_at(block.shared, i);
          s.key[k] = s.query[k] = s.decay[k] = 0.0f;
        }
    });
    fetch(block, args, w, 0, 0);
    block.each_alone([&](int t, Registers& r) { move_state<false>(args, w, t, r); });
    for (int from = 0, buffer = 0; from < w.length; from += args.chunk, buffer ^= 1) {
      block.cp_async_wait(0);  // these tokens are there, and no thread reads those before any more
      fetch(block, args, w, from + args.chunk, buffer ^ 1);
      const int count = min_of(args.chunk, w.length - from);
      if (a.decay)
        block.each([&](int t, Registers&) {
          for (int i = t; i < count * w.decays(); i += kThreads) {
            float& decay = token_at(block.shared, buffer * args.chunk + i / w.decays()).decay[i % w.decays()];
            decay = expf(decay);
          }
        });
      for (int i = 0; i < count; ++i)
        advance(block, args, w, from + i, token_at(block.shared, buffer * args.chunk + i));
    }
    block.each_alone([&](int t, Registers& r) { move_state<true>(args, w, t, r); });
  }

  // Processes one token.
  static KV_DEVICE void advance(Block<Recurrence>& block, const Args& args, const Work& w, int token, const Token& s) {
    const KvLinearAttention& a = w.a;
    block.each_alone([&](int t, Registers& r) {
      const int g = t % kDown;
#pragma unroll
      for (int c = 0; c < kWide; ++c) r.known[c] = r.out[c] = 0.0f;
      if (!a.decay && !a.beta) return;
#pragma unroll
      for (int j = 0; j < kFours; ++j) {
        const int row = (j * kDown + g) * 4;
        float key[4], factor[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        load_four(s.key + row, key);
        if (a.decay && a.by_channel)
          load_four(s.decay + row, factor);
        else if (a.decay)
          factor[0] = factor[1] = factor[2] = factor[3] = s.decay[0];
#pragma unroll
        for (int l = 0; l < 4; ++l)
#pragma unroll
          for (int c = 0; c < kWide; ++c) r.known[c] += key[l] * (r.state[j][l][c] *= factor[l]);
      }
    });
    if (a.beta)
#pragma unroll
      for (int c = 0; c < kWide; ++c)
        block.template warp_sum<kDown>([&](Registers& r) -> float& { return r.known[c]; });
    block.each_alone([&](int t, Registers& r) {
      const int g = t % kDown;
      float row[kWide];
#pragma unroll
      for (int c = 0; c < kWide; ++c) {
        row[c] = s.value[t / kDown * kWide + c];
        if (a.beta) row[c] = s.beta[0] * (row[c] - r.known[c]);
      }
#pragma unroll
      for (int j = 0; j < kFours; ++j) {
        float key[4], query[4];
        load_four(s.key + (j * kDown + g) * 4, key);
        load_four(s.query + (j * kDown + g) * 4, query);
#pragma unroll
        for (int l = 0; l < 4; ++l)
#pragma unroll
          for (int c = 0; c < kWide; ++c) r.out[c] += query[l] * (r.state[j][l][c] += key[l] * row[c]);
      }
    });
#pragma unroll
    for (int c = 0; c < kWide; ++c) block.template warp_sum<kDown>([&](Registers& r) -> float& { return r.out[c]; });
    block.each_alone([&](int t, Registers& r) {
      if (t % kDown) return;
#pragma unroll
      for (int c = 0; c < kWide; ++c) r.out[c] *= a.scale;
      store_row(args, w, a.output + w.of_value(token), t / kDown * kWide, r.out);
    });
  }

  // Between phases: starts the copies of the tokens of a chunk into a buffer, if there are such tokens.
  static KV_DEVICE void fetch(Block<Recurrence>& block, const Args& args, const Work& w, int from, int buffer) {
    const KvLinearAttention& a = w.a;
    block.each_alone([&](int t, Registers&) {
      for (int i = 0; i < args.chunk && from + i < w.length; ++i) {
        const Token s = token_at(block.shared, buffer * args.chunk + i);
        copy_row(block, args, s.key, a.key + w.of_key(from + i), a.key_size, t);
        copy_row(block, args, s.query, a.query + w.of_key(from + i), a.key_size, t);
        copy_row(block, args, s.value, a.value + w.of_value(from + i), w.columns, t);
        if (a.decay) copy_row(block, args, s.decay, a.decay + w.of_head(from + i) * w.decays(), w.decays(), t);
        if (a.beta) copy_row(block, args, s.beta, a.beta + w.of_head(from + i), 1, t);
      }
    });
    block.cp_async_commit();
  }
  static KV_DEVICE void copy_row(Block<Recurrence>& block, const Args& args, float* to, const float* from, int count,
                                 int t) {
    if (args.whole_vectors && count % 4 == 0)
      for (int i = 4 * t; i < count; i += 4 * kThreads) block.template copy<16>(to + i, from + i);
    else
      for (int i = t; i < count; i += kThreads) block.template copy<4>(to + i, from + i);
  }

  // Within a phase: loads a thread's share of the state from past, or stores it to present.
  template <bool kStore>
  static KV_DEVICE void move_state(const Args& args, const Work& w, int t, Registers& r) {
    const int column = t / kDown * kWide;
#pragma unroll
    for (int j = 0; j < kFours; ++j)
#pragma unroll
      for (int l = 0; l < 4; ++l) {
        const int row = (j * kDown + t % kDown) * 4 + l;
        if constexpr (kStore) {
          if (row < w.a.key_size) store_row(args, w, w.a.present + w.of_state(row), column, r.state[j][l]);
        } else if (row < w.a.key_size) {
          load_row(args, w, w.a.past + w.of_state(row), column, r.state[j][l]);
        } else {
#pragma unroll
          for (int i = 0; i < kWide; ++i) r.state[j][l][i] = 0.0f;
        }
      }
  }
  struct alignas(4 * kWide) Wide {
    float x[kWide];
  };
  static KV_DEVICE void load_row(const Args& args, const Work& w, const float* from, int column, float (&x)[kWide]) {
    if (args.whole_vectors) {
      Wide wide = {};
      if (column < w.columns) wide = *reinterpret_cast<const Wide*>(from + column);
#pragma unroll
      for (int i = 0; i < kWide; ++i) x[i] = wide.x[i];
    } else {
#pragma unroll
      for (int i = 0; i < kWide; ++i) x[i] = column + i < w.columns ? from[column + i] : 0.0f;
    }
  }
  static KV_DEVICE void store_row(const Args& args, const Work& w, float* to, int column, const float (&x)[kWide]) {
    if (args.whole_vectors) {
      Wide wide;
#pragma unroll
      for (int i = 0; i < kWide; ++i) wide.x[i] = x[i];
      if (column < w.columns) *reinterpret_cast<Wide*>(to + column) = wide;
    } else {
#pragma unroll
      for (int i = 0; i < kWide; ++i)
        if (column + i < w.columns) to[column + i] = x[i];
    }
  }
  static KV_DEVICE void copy_state(Block<Recurrence>& block, const Work& w) {
    block.each_alone([&](int t, Registers&) {
      for (int row = 0; row < w.a.key_size; ++row)
        if (t < w.columns) w.a.present[w.of_state(row) + t] = w.a.past[w.of_state(row) + t];
    });
  }
};

}  // namespace cuda
}  // namespace kv
