// Shared by the programs of Linear: which outputs a block computes, which columns of which weight these are, and a
// row's norm.
//
// A tile is 16 columns in two halves of 8, paired column by column. In a plain product the halves are neighbours; in a
// rotated head a pair is two columns that are rotated together; with a gate it is a product's column and its gate's. So
// all sums that an output needs are in one tile. A strip is the tiles of a block, all of one product. A panel is the
// rows of a block.
//
// Letters in this folder: a the arguments of the call, p a product, w a block's work (for packed weights the weight),
// s the arrays in shared memory, k an input, m a tile of columns of a warp, n a tile of 8 rows, u a unit, x and y sums.
#pragma once

#include "../core/types.h"

namespace kv {
namespace cuda {

constexpr int kTileColumns = 16, kPair = 8;

// The arguments of a call, or some of its products, and its workspace. Arrays that a call does not use are null.
struct LinearArgs {
  KvLinear call;
  int strips[KV_MAX_PRODUCTS];  // strips of each product
  int panels;                   // panels of rows
  int splits;                   // splits of the inputs
  int* counters;                // [strips, panels]
  float* partial;               // [strips, panels, splits, rows of a panel, columns of a strip]
  void* normed;        // [rows, inputs], of the input's type: the rows after the norm, if a launch computes them
  bool whole_vectors;  // whether heads of the input are whole vectors of 16 bytes; these and the norm aligned
  bool weights_stay;   // no launch writes the weights: they may be read before earlier launches have ended

  KV_HD int rows() const { return static_cast<int>(call.batch * call.tokens); }
  KV_HD int inputs() const { return static_cast<int>(call.inputs); }
};

KV_HD bool is_gated(const KvLinear& a) { return a.gate.data != nullptr; }

// Returns the tiles of a rotated head.
KV_HD int tiles_of_head(const KvLinear& a) { return static_cast<int>((a.planes + kPair - 1) / kPair); }

KV_HD int64_t tiles_of(const KvLinear& a, const KvProduct& p) {
  if (p.rotated) return p.heads * tiles_of_head(a);
  const int columns = is_gated(a) ? kPair : kTileColumns;
  return (p.outputs + columns - 1) / columns;
}

// The work of a block.
struct Work {
  int product, strip;  // strip: its number in the product
  int all_strip;       // its number in all products
  int panel, split;

  KV_DEVICE Work(const LinearArgs& args, int block)
      : product(0), strip(0), all_strip(0), panel(0), split(block % args.splits) {
    panel = block / args.splits % args.panels, all_strip = strip = block / args.splits / args.panels;
    while (product < args.call.count - 1 && strip >= args.strips[product]) strip -= args.strips[product++];
  }
};

// One half of a tile: columns first + i for i below `count`, at most 8.
struct Half8 {
  int first, count;
};
KV_DEVICE Half8 half_of(const KvLinear& a, const KvProduct& p, int tile, int half) {
  const int outputs = static_cast<int>(p.outputs);
  if (p.rotated) {
    const int planes = static_cast<int>(a.planes), tiles = tiles_of_head(a);
    const int head = tile / tiles, at = tile % tiles * kPair;
    const int left = head < p.heads ? planes - at : 0;
    return {head * 2 * planes + half * planes + at, min_of(left, kPair)};
  }
  const int first = is_gated(a) ? tile * kPair : tile * kTileColumns + half * kPair;
  return {first, min_of(outputs - first, kPair)};
}

// Returns the weight of a half of the tiles.
KV_DEVICE const KvWeight& weight_of(const KvLinear& a, const KvProduct& p, int half) {
  return half && is_gated(a) ? a.gate : p.weight;
}

// Returns the column of lane i of a half, or another column of the weight if that lane has none.
KV_DEVICE int column_in(const Half8& half, int i, int outputs) {
  return min_of(half.first + (i < half.count ? i : 0), outputs - 1);
}

// ---- rows ----

// Where a row's inputs are, for any layout of its heads: input k of a row is element of_row(row) + of_input(k).
struct InputLayout {
  bool contiguous;       // whether input k is k elements after the first
  size_t inputs, apart;  // inputs of a row; elements from one head to the next
  int size, tokens;      // inputs of a head

  KV_DEVICE explicit InputLayout(const KvLinear& a)
      : contiguous(a.input_heads == 1 || a.tokens == 1), inputs(a.inputs), apart(0), size(a.inputs), tokens(a.tokens) {
    if (!contiguous) size = static_cast<int>(a.inputs / a.input_heads), apart = static_cast<size_t>(tokens) * size;
  }
  KV_DEVICE size_t of_row(int row) const {
    if (contiguous) return row * inputs;
    return static_cast<size_t>(row / tokens) * inputs * tokens + static_cast<size_t>(row % tokens) * size;
  }
  KV_DEVICE size_t of_input(int k) const { return contiguous ? k : without_branch(k); }
  // The same, for several loads that are to be under way together, which a branch would prevent.
  KV_DEVICE size_t without_branch(int k) const { return k / size * apart + k % size; }
};

// A thread has this many loads of a row under way at a time.
constexpr int kAhead = 4;

// Returns a sum of squares plus the squares of kAhead loads of kEach inputs, of which the first `count` are no
// repetition.
template <int kEach>
KV_DEVICE float add_squares(float squares, const float (&x)[kAhead][kEach], int count) {
#pragma unroll
  for (int j = 0; j < kAhead; ++j)
#pragma unroll
    for (int k = 0; k < kEach; ++k) squares += j < count ? x[j][k] * x[j][k] : 0.0f;
  return squares;
}

// Returns the sum of squares of every `step`-th load of a row, from load `from` on. A load has kEach inputs: a vector,
// or one input if vectors would not be aligned.
template <class T, int kEach>
KV_DEVICE float squares_of(const KvLinear& a, int row, int from, int step) {
  const InputLayout layout(a);
  const T* const input = static_cast<const T*>(a.input) + layout.of_row(row);
  const int loads = static_cast<int>(a.inputs) / kEach;
  float squares = 0.0f;
  for (int i = from; i < loads; i += kAhead * step) {
    float x[kAhead][kEach];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      // Past the end: a load of no use instead of a branch.
      const size_t at = layout.without_branch(min_of(i + j * step, loads - 1) * kEach);
      if constexpr (kEach == 1)
        x[j][0] = to_float(input[at]);
      else
        widen<T>(load_vector(input + at), x[j]);
    }
    squares = add_squares(squares, x, (loads - i + step - 1) / step);
  }
  return squares;
}

// Returns how many warps add up a row's squares: one if its lanes read the row at once, otherwise all.
template <class T, int kWarps>
KV_HD int warps_of_row(const KvLinear& a) {
  return a.inputs > int64_t{kAhead} * kWarp * kLanes<T> ? kWarps : 1;
}

// Computes the factors of a panel's rows in factors[0 .. rows), in an order that depends on the number of inputs alone.
// Ends with a barrier: the factors are visible. sums: as many floats of shared memory as there are rows and warps.
// squares(row, lane, lanes, registers): the squares of a lane, of the lanes that share a row of the panel.
template <class T, class Program, class Squares>
KV_DEVICE void find_factors(Block<Program>& block, const LinearArgs& args, int rows, float* factors, float* sums,
                            Squares squares) {
  constexpr int kWarps = Program::kThreads / kWarp;
  const KvLinear& a = args.call;
  const int warps = warps_of_row<T, kWarps>(a);
  for (int from = 0; from < rows; from += kWarps / warps) {
    block.each_alone([&](int t, auto& r) {
      const int row = from + t / kWarp / warps, lane = t % (warps * kWarp);
      r.squares = 0.0f;
      if (row < rows) r.squares = squares(row, lane, warps * kWarp, r);
    });
    block.warp_sum([](auto& r) -> float& { return r.squares; });
    block.each_alone([&](int t, auto& r) {
      const int row = from + t / kWarp / warps;
      if (row < rows && t % kWarp == 0) sums[row * warps + t / kWarp % warps] = r.squares;
    });
  }
  block.each([&](int, auto&) {});
  block.each([&](int t, auto&) {
    if (t >= rows) return;
    float whole = 0.0f;
    for (int i = 0; i < warps; ++i) whole += sums[t * warps + i];
    factors[t] = 1.0f / sqrtf(whole / static_cast<float>(args.inputs()) + a.epsilon);
  });
}
// The same, of rows in global memory, from row `first` on. kAligned: whether args.whole_vectors is known to be true.
template <class T, bool kAligned, class Program>
KV_DEVICE void find_factors(Block<Program>& block, const LinearArgs& args, int first, int rows, float* factors,
                            float* sums) {
  find_factors<T>(block, args, rows, factors, sums, [&](int row, int lane, int lanes, auto&) {
    if (kAligned || args.whole_vectors) return squares_of<T, kLanes<T>>(args.call, first + row, lane, lanes);
    return squares_of<T, 1>(args.call, first + row, lane, lanes);
  });
}

// A launch that computes all rows after the norm, for calls whose blocks would read and multiply too much to do it
// each. If the lanes of a row can read it at once, they keep it in registers: it takes one round trip to memory.
template <class T>
struct LinearRows {
  using Args = LinearArgs;
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 4, kWarps = kThreads / kWarp;
  struct Registers {
    float squares;
    Vector x[kAhead], norm[kAhead];
  };
  static constexpr size_t shared_size() { return 2 * kWarps * sizeof(float); }
  // Returns the rows of a block, which reads them at once.
  static KV_HD int rows(const KvLinear& a) { return kWarps / warps_of_row<T, kWarps>(a); }

  static KV_DEVICE void run(Block<LinearRows>& block, const LinearArgs& args) {
    const int each = rows(args.call), first = block.index() * each, count = min_of(each, args.rows() - first);
    float* const factors = reinterpret_cast<float*>(block.shared);
    if (args.whole_vectors && args.inputs() <= kThreads / each * kAhead * kLanes<T>)
      return run_held(block, args, kThreads / each, first, count, factors);
    find_factors<T, false>(block, args, first, count, factors, factors + kWarps);
    block.each_alone([&](int t, Registers&) {
      if (args.whole_vectors)
        store_rows<kLanes<T>>(args, factors, first, count, t);
      else
        store_rows<1>(args, factors, first, count, t);
    });
  }

  // Computes rows that are kept in registers. lanes: the threads of a row, each of which has every lanes-th vector.
  static KV_DEVICE void run_held(Block<LinearRows>& block, const LinearArgs& args, int lanes, int first, int count,
                                 float* factors) {
    constexpr int kEach = kLanes<T>;
    const KvLinear& a = args.call;
    const InputLayout layout(a);
    const int vectors = args.inputs() / kEach;
    const auto place = [&](int t, int j) { return min_of(t % lanes + j * lanes, vectors - 1) * kEach; };
    block.each_alone([&](int t, Registers& r) {
      const T* const input = static_cast<const T*>(a.input) + layout.of_row(first + min_of(t / lanes, count - 1));
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        r.x[j] = load_vector(input + layout.without_branch(place(t, j)));
        r.norm[j] = load_vector(static_cast<const T*>(a.norm) + place(t, j));
      }
    });
    find_factors<T>(block, args, count, factors, factors + kWarps, [&](int, int lane, int, Registers& r) {
      float x[kAhead][kEach];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) widen<T>(r.x[j], x[j]);
      return add_squares(0.0f, x, (vectors - lane + lanes - 1) / lanes);
    });
    block.each_alone([&](int t, Registers& r) {
      const int row = t / lanes;
      if (row >= count) return;
      T* const to = static_cast<T*>(args.normed) + static_cast<size_t>(first + row) * args.inputs();
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (t % lanes + j * lanes >= vectors) break;
        struct alignas(16) Elements {
          T element[kEach];
        } y;
        float x[kEach], scale[kEach];
        widen<T>(r.x[j], x), widen<T>(r.norm[j], scale);
#pragma unroll
        for (int e = 0; e < kEach; ++e) assign(y.element[e], x[e] * factors[row] * scale[e]);
        *reinterpret_cast<Elements*>(to + place(t, j)) = y;
      }
    });
  }

  // Within a phase: stores the rows after the norm, kEach inputs at a time.
  template <int kEach>
  static KV_DEVICE void store_rows(const LinearArgs& args, const float* factors, int first, int count, int t) {
    struct alignas(kEach * sizeof(T)) Elements {
      T element[kEach];
    };
    const InputLayout layout(args.call);
    const T *const input = static_cast<const T*>(args.call.input), *const norm = static_cast<const T*>(args.call.norm);
    const int loads = args.inputs() / kEach;
    for (int row = 0; row < count; ++row) {
      const T* const from = input + layout.of_row(first + row);
      T* const to = static_cast<T*>(args.normed) + static_cast<size_t>(first + row) * args.inputs();
      for (int i = t; i < loads; i += kAhead * kThreads) {
        Elements x[kAhead], scale[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          const int k = min_of(i + j * kThreads, loads - 1) * kEach;
          x[j] = *reinterpret_cast<const Elements*>(from + layout.without_branch(k));
          scale[j] = *reinterpret_cast<const Elements*>(norm + k);
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          if (i + j * kThreads >= loads) break;
#pragma unroll
          for (int e = 0; e < kEach; ++e)
            assign(x[j].element[e], to_float(x[j].element[e]) * factors[row] * to_float(scale[j].element[e]));
          *reinterpret_cast<Elements*>(to + (i + j * kThreads) * kEach) = x[j];
        }
      }
    }
  }
};

// ---- packed weights ----

// Integers are read as unsigned ones. A signed integer has its highest bit flipped, which adds this excess to it.
KV_DEVICE int excess_of(const KvWeight& w) { return w.is_signed ? 1 << (w.bits - 1) : 0; }

// Returns an integer of a weight as an unsigned one. kBits: the weight's bits if they are known at compile time.
template <int kBits = 0>
KV_DEVICE int integer_at(const void* data, const KvWeight& w, size_t i) {
  const uint8_t* const bytes = static_cast<const uint8_t*>(data);
  const int bits = kBits ? kBits : w.bits, read = bits == 4 ? bytes[i / 2] >> (i % 2 * 4) & 15 : bytes[i];
  return read ^ excess_of(w);
}
// Calls use(numbers) with a pointer of the numbers' type.
template <class Use>
KV_DEVICE void with_numbers(int type, const void* data, Use use) {
  if (type == KV_FLOAT16)
    use(static_cast<const Half*>(data));
  else
    use(static_cast<const float*>(data));
}
KV_DEVICE float number_at(int type, const void* data, size_t i) {
  return type == KV_FLOAT16 ? to_float(static_cast<const Half*>(data)[i]) : static_cast<const float*>(data)[i];
}
// Returns the integer, read as an unsigned one, that represents zero, or the minimum.
KV_DEVICE int zero_at(const KvWeight& w, size_t group) { return w.zero ? integer_at(w.zero, w, group) : excess_of(w); }

// Returns whether tensor cores can compute a product. A step is 16 inputs, which have to be in one group, and a gate
// needs the format of the product's weight.
inline bool fits_tensor_cores(const KvLinear& a, const KvProduct& p) {
  const KvWeight &w = p.weight, &g = a.gate;
  if (is_gated(a) && (g.bits != w.bits || g.group != w.group || !g.minimum != !w.minimum)) return false;
  if (a.type == KV_FLOAT32 && (!w.bits || a.float_input)) return false;
  const int64_t step = w.bits == 4 ? 32 : 16;
  return (w.bits ? w.group : a.inputs) % step == 0 && a.inputs % step == 0 &&
         (a.tokens == 1 || a.inputs / a.input_heads % 8 == 0);
}

}  // namespace cuda
}  // namespace kv
