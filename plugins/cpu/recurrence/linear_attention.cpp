// LinearAttention for one instruction set.
//
//   for each sequence, each head, each tile of at most kTile columns of the head's state       one task each
//     n = tokens of the sequence in this call; without one: present = past
//     S = the tile of past                          in the tile's own memory if it is read more than once
//     known = k_0 (exp(decay_0) S)
//     for each token t < n
//       row   = beta_t (v_t - known), or v_t
//       in one pass over the rows i of S, each read and written once:
//         S_i   = exp(decay_t) S_i + k_t[i] row
//         out  += q_t[i] S_i
//         known of the next token += k_t+1[i] exp(decay_t+1) S_i
//       output = scale out
//     present = S
//
// A column of the state never meets another one, so tiles need nothing from each other. A tile of 128 rows and 64
// columns takes 32 KiB and stays in the first cache while a prompt's tokens pass over it. A single token reads past
// twice, the second time from a near cache, and writes present once. Sums over rows are in their order, whatever the
// number of threads.
#include "../core/scratch.h"
#include "../core/simd.h"
#include "recurrence.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr int kVectors = 4;  // vectors of a row of a tile
constexpr int kTile = kVectors * W;

// One head of one sequence.
struct Head {
  const KvLinearAttention& a;
  const int64_t sequence, head, key_head;
  const int64_t length;

  Head(const KvLinearAttention& a, int64_t number)
      : a(a),
        sequence(number / a.heads),
        head(number % a.heads),
        key_head(head / (a.heads / a.key_heads)),
        length(a.length[sequence] < a.tokens ? a.length[sequence] : a.tokens) {}

  int64_t row(int64_t t) const { return sequence * a.tokens + t; }
  const float* query(int64_t t) const { return a.query + (row(t) * a.key_heads + key_head) * a.key_size; }
  const float* key(int64_t t) const { return a.key + (row(t) * a.key_heads + key_head) * a.key_size; }
  const float* value(int64_t t) const { return a.value + (row(t) * a.heads + head) * a.value_size; }
  float* output(int64_t t) const { return a.output + (row(t) * a.heads + head) * a.value_size; }
  int64_t state() const { return (sequence * a.heads + head) * a.key_size * a.value_size; }
  float beta(int64_t t) const { return a.beta[row(t) * a.heads + head]; }

  // Computes the factors of the state's rows before token t: one number if the whole head has one decay.
  void factors(int64_t t, float* to) const {
    const int count = a.by_channel ? a.key_size : 1;
    const float* const decay = a.decay ? a.decay + (row(t) * a.heads + head) * count : nullptr;
    for (int i = 0; i < count; i += W) {
      float x[W] = {};
      const int n = min_of(W, count - i);
      if (decay) memcpy(x, decay + i, n * sizeof(float));
      store(x, exp(load(x)));
      memcpy(to + i, x, n * sizeof(float));
    }
  }
};

// The memory of a task: the key_size factors of this token and of the next, and a tile of the state.
struct Memory {
  float *now, *next, *tile;

  explicit Memory(const KvLinearAttention& a) {
    static thread_local Scratch<float> scratch;
    const size_t rows = (a.key_size + W - 1) / W * W;
    now = scratch.reserve(rows * (2 + kTile)), next = now + rows, tile = next + rows;
  }
};

template <int N>
static inline void add_products(float x, const vf* rows, vf* sums) {
  for (int j = 0; j < N; ++j) sums[j] += x * rows[j];
}

// Runs the pass of one token over N W columns. The rows of `from` and `to` are `from_stride` and `to_stride` apart.
// next: the key of the next token, or nullptr.
template <int N, bool kByChannel, bool kNext>
static void pass(int rows, const float* from, int64_t from_stride, float* to, int64_t to_stride, const float* key,
                 const float* query, const float* now, const float* next, const float* next_factor, const vf* row,
                 vf* out, vf* known) {
  vf o[N], k[N], r[N];
  for (int j = 0; j < N; ++j) o[j] = vf{}, k[j] = vf{}, r[j] = row[j];
  for (int i = 0; i < rows; ++i, from += from_stride, to += to_stride) {
    const float factor = now[kByChannel ? i : 0];
    vf s[N];
    for (int j = 0; j < N; ++j) s[j] = load(from + j * W) * factor + key[i] * r[j];
    for (int j = 0; j < N; ++j) store(to + j * W, s[j]);
    add_products<N>(query[i], s, o);
    if constexpr (kNext) add_products<N>(kByChannel ? next[i] * next_factor[i] : next[i], s, k);
  }
  for (int j = 0; j < N; ++j) out[j] = o[j], known[j] = kNext && !kByChannel ? k[j] * next_factor[0] : k[j];
}

// Processes all tokens of a head for `columns` columns from `first` on, which fit into N vectors.
template <int N, bool kByChannel>
static void tile(const Head& head, int first, int columns, const Memory& memory) {
  const KvLinearAttention& a = head.a;
  const float* from = a.past + head.state() + first;
  float* const present = a.present + head.state() + first;
  int64_t from_stride = a.value_size, to_stride = a.value_size;
  float* to = present;
  const bool own = columns != N * W || head.length > 1;
  if (own) {  // the columns beyond the state's are zeros
    for (int i = 0; i < a.key_size; ++i) {
      float* const line = memory.tile + i * N * W;
      for (int j = columns; j < N * W; ++j) line[j] = 0.0f;
      memcpy(line, from + i * from_stride, columns * sizeof(float));
    }
    from = to = memory.tile, from_stride = to_stride = N * W;
  }
  vf row[N], out[N], known[N] = {};
  float *now = memory.now, *next = memory.next;
  head.factors(0, now);
  if (a.beta) {
    const float* const key = head.key(0);
    for (int i = 0; i < a.key_size; ++i) {
      vf s[N];
      for (int j = 0; j < N; ++j) s[j] = load(from + i * from_stride + j * W);
      add_products<N>(key[i] * now[kByChannel ? i : 0], s, known);
    }
  }
  for (int64_t t = 0; t < head.length; ++t) {
    float padded[N * W] = {};
    memcpy(padded, head.value(t) + first, columns * sizeof(float));
    for (int j = 0; j < N; ++j) {
      row[j] = load(padded + j * W);
      if (a.beta) row[j] = head.beta(t) * (row[j] - known[j]);
    }
    const bool more = a.beta && t + 1 < head.length;
    if (t + 1 < head.length) head.factors(t + 1, next);
    if (more)
      pass<N, kByChannel, true>(a.key_size, from, from_stride, to, to_stride, head.key(t), head.query(t), now,
                                head.key(t + 1), next, row, out, known);
    else
      pass<N, kByChannel, false>(a.key_size, from, from_stride, to, to_stride, head.key(t), head.query(t), now, nullptr,
                                 nullptr, row, out, known);
    for (int j = 0; j < N; ++j) store(padded + j * W, out[j] * a.scale);
    memcpy(head.output(t) + first, padded, columns * sizeof(float));
    float* const spent = now;
    now = next, next = spent;
  }
  if (own)
    for (int i = 0; i < a.key_size; ++i)
      memcpy(present + i * a.value_size, memory.tile + i * N * W, columns * sizeof(float));
}

// Processes `count` columns from `first` on with the fewest vectors that hold them.
template <int N = kVectors>
static void columns(const Head& head, int first, int count, const Memory& memory) {
  if constexpr (N > 1)
    if (count <= (N - 1) * W) return columns<N - 1>(head, first, count, memory);
  if (head.a.by_channel)
    tile<N, true>(head, first, count, memory);
  else
    tile<N, false>(head, first, count, memory);
}

static void task(const KvLinearAttention& a, size_t number) {
  const int64_t tiles = (a.value_size + kTile - 1) / kTile;
  const Head head(a, static_cast<int64_t>(number) / tiles);
  const int first = static_cast<int>(static_cast<int64_t>(number) % tiles) * kTile;
  const int count = min_of(kTile, a.value_size - first);
  for (int64_t t = head.length < 0 ? 0 : head.length; t < a.tokens; ++t)
    memset(head.output(t) + first, 0, count * sizeof(float));
  if (head.length > 0) return columns(head, first, count, Memory(a));
  if (a.past == a.present) return;
  for (int i = 0; i < a.key_size; ++i) {
    const int64_t at = head.state() + i * static_cast<int64_t>(a.value_size) + first;
    memcpy(a.present + at, a.past + at, count * sizeof(float));
  }
}

}  // namespace

void linear_attention(const KvLinearAttention& a, KvRunner runner) {
  const size_t tiles = (a.value_size + kTile - 1) / kTile;
  runner.parallel_for(
      runner.context, a.batch * a.heads * tiles,
      [](void* data, size_t i) { task(*static_cast<const KvLinearAttention*>(data), i); },
      const_cast<KvLinearAttention*>(&a));
}

}  // namespace KV_ISA
}  // namespace kv
