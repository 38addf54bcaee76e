// Products of rows that are rounded to int8 with packed weights, by dot products of bytes.
//
// A chunk is 4 W bytes of a weight's row. Lane l of its sums is of the bytes 4 l to 4 l + 3: of 4 inputs, or of the 8
// whose 4 bits these hold. Rows are laid out to match, so nothing is interleaved: of 4 bits, first the inputs of all
// low halves of a chunk, then those of all high ones.
//
//   of each row, once     by lanes: the largest |x| is 127; the scale, the sum of the integers
//   for each column       sum over chunks of lanes' (dot products x the row's scale x the group's scale)
//
// The weights' integers are unsigned in these products. What signed ones have in excess is taken off each lane's sum
// beforehand, which is exact; zero points and minima are an offset of the group times the sum of the row's lane.
#pragma once

#include <type_traits>

#include "packed.h"

namespace kv {
namespace KV_ISA {

constexpr int kBlockInputs = 32;  // that are rounded in one go
// Bytes that are fetched beforehand: a column of 4-bit weights is so short a stream that the machine's own prefetching
// has hardly begun when it ends; what follows is the next columns'.
constexpr int64_t kWeightsAhead = 8192;
constexpr float kLeastRounded = 1e-36f;  // lanes of smaller numbers count as zeros

typedef uint8_t vb __attribute__((vector_size(W * 4)));

static inline int64_t inputs_of_lane(int bits) { return bits == 4 ? 8 : 4; }

// Whether lanes lie within groups, and chunks read them in one pattern.
static inline bool takes_int8(const KvWeight& weight, int64_t inputs) {
  if (!weight.bits || weight.group == inputs) return weight.bits != 0;
  const int64_t lanes = weight.group / inputs_of_lane(weight.bits);
  return lanes > 0 && weight.group % inputs_of_lane(weight.bits) == 0 && (W % lanes == 0 || lanes % W == 0);
}

// Rows for weights of one number of bits.
struct Int8Rows {
  int bits = 0;
  int64_t chunks = 0;
  int8_t* values = nullptr;  // [rows, chunks, W inputs_of_lane]
  float* scale = nullptr;    // [rows, chunks, W], as all below
  float* sum = nullptr;      // of the values of a lane, times its scale
  int32_t* start = nullptr;  // of the values of a lane, times minus the excess of signed weights

  int64_t row_bytes() const { return chunks * W * inputs_of_lane(bits); }
  static int64_t chunks_of(int bits, int64_t inputs) {
    const int64_t size = W * inputs_of_lane(bits);
    return (inputs + size - 1) / size;
  }
  static size_t bytes(int bits, int64_t inputs, int64_t rows) {
    return static_cast<size_t>(rows * chunks_of(bits, inputs) * W * (inputs_of_lane(bits) + 12));
  }
  Int8Rows() = default;
  Int8Rows(int bits, int64_t inputs, int64_t rows, uint8_t* memory) : bits(bits), chunks(chunks_of(bits, inputs)) {
    const int64_t lanes = rows * chunks * W;
    scale = reinterpret_cast<float*>(memory), sum = scale + lanes;
    start = reinterpret_cast<int32_t*>(sum + lanes), values = reinterpret_cast<int8_t*>(start + lanes);
  }

  // One row [inputs], rounded by lanes. A number that is not finite makes its lane NaN.
  void round(const float* x, int64_t inputs, int64_t row) const {
    int8_t* const to = values + row * row_bytes();
    const int64_t lanes = chunks * W, per = inputs_of_lane(bits);
    float *const scales = scale + row * lanes, *const sums = sum + row * lanes;
    int32_t* const starts = start + row * lanes;
    for (int64_t first = 0; first < lanes * per; first += kBlockInputs) {
      float padded[kBlockInputs] = {};
      const float* from = x + first;
      if (inputs - first < kBlockInputs) {
        if (inputs > first) memcpy(padded, from, static_cast<size_t>(inputs - first) * sizeof(float));
        from = padded;
      }
      int8_t rounded[kBlockInputs];
      float steps[kBlockInputs];
      bits == 8 ? round_block<4>(from, rounded, steps) : round_block<8>(from, rounded, steps);
      for (int64_t i = 0; i < kBlockInputs && first + i < lanes * per; i += per) {
        const int64_t lane = (first + i) / per;
        uint64_t all = 0;
        memcpy(&all, rounded + i, static_cast<size_t>(per));
        const int total = sum_of_bytes(all);
        scales[lane] = steps[i], sums[lane] = steps[i] * static_cast<float>(total);
        starts[lane] = -total * (1 << (bits - 1));
        const uint32_t low = bits == 8 ? static_cast<uint32_t>(all) : even_bytes(all), high = even_bytes(all >> 8);
        int8_t* const place = to + (bits == 8 ? lane * 4 : lane / W * W * 8 + lane % W * 4);
        memcpy(place, &low, sizeof low);
        if (bits == 4) memcpy(place + 4 * W, &high, sizeof high);
      }
    }
  }

  // Bytes 0, 2, 4 and 6.
  static uint32_t even_bytes(uint64_t x) {
    x &= 0x00ff00ff00ff00ff, x = (x | x >> 8) & 0x0000ffff0000ffff;
    return static_cast<uint32_t>(x | x >> 16);
  }
  // Of eight signed ones.
  static int sum_of_bytes(uint64_t x) {
    x ^= 0x8080808080808080;
    const uint64_t pairs = (x & 0x00ff00ff00ff00ff) + (x >> 8 & 0x00ff00ff00ff00ff);
    return static_cast<int>(pairs * 0x0001000100010001 >> 48) - 8 * 128;
  }

  // Each number over the step of its `kPer` neighbours, to the nearest integer.
  template <int kPer>
  static void round_block(const float* x, int8_t* to, float* steps) {
    constexpr int kVectors = kPer < W ? 1 : kPer / W;
    const vf infinite = splat(__builtin_inff());
    for (int i = 0; i < kBlockInputs; i += kVectors * W) {
      vf highest{};
      for (int j = 0; j < kVectors; ++j) {
        const vf v = load(x + i + j * W);
        highest = vmax(select(v - v == 0.0f, select(v < 0.0f, -v, v), infinite), highest);
      }
      highest = max_of_neighbours<1, kPer>(highest);
      const vi usable = (highest >= kLeastRounded) & (highest < infinite);
      const vf factor = 127.0f / highest,
               step = select(highest < infinite, highest / 127.0f, splat(__builtin_nanf("")));
      for (int j = 0; j < kVectors; ++j) {
        const int at = i + j * W;
        const vf shifted = select(usable, load(x + at) * factor, vf{}) + 12582912.0f;  // the integer is in the low bits
        vi whole;
        memcpy(&whole, &shifted, sizeof whole);
        typedef int8_t vs __attribute__((vector_size(W)));
        const vs narrow = __builtin_convertvector(whole, vs);
        memcpy(to + at, &narrow, sizeof narrow);
        store(steps + at, select(highest < kLeastRounded, vf{}, step));
      }
    }
  }
};

// sum + the products of unsigned bytes with signed ones, four in a lane.
template <int kBits>
static inline vi dot_bytes(vi sum, vb w, const int8_t* x) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_loadu_si512(x));
#elif defined(__AVX512BW__)
  const __m512i v = _mm512_loadu_si512(x), u = (__m512i)w, ones = _mm512_set1_epi16(1);
  if constexpr (kBits == 4)
    return sum + (vi)_mm512_madd_epi16(_mm512_maddubs_epi16(u, v), ones);
  else  // the sums of two would not fit into 16 bits
    return sum +
           (vi)_mm512_madd_epi16(_mm512_and_si512(u, _mm512_set1_epi16(255)),
                                 _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8)) +
           (vi)_mm512_madd_epi16(_mm512_srli_epi16(u, 8), _mm512_srai_epi16(v, 8));
#elif defined(__AVX2__)
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)), u = (__m256i)w;
  if constexpr (kBits == 4)
    return sum + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(u, v), _mm256_set1_epi16(1));
  else
    return sum +
           (vi)_mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)),
                                 _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8)) +
           (vi)_mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(v, 8));
#else
  typedef uint32_t vu __attribute__((vector_size(W * 4)));
  vu u, v;
  memcpy(&u, &w, sizeof u), memcpy(&v, x, sizeof v);
  for (int i = 0; i < 4; ++i) sum += (vi)(u >> 8 * i & 255) * ((vi)(v << (24 - 8 * i)) >> 24);
  return sum;
#endif
}

// Lane l becomes p[which[l]], which is below W.
static inline vf spread(const float* p, vi which) {
#if defined(__AVX512F__)
  return (vf)_mm512_permutexvar_ps((__m512i)which, _mm512_loadu_ps(p));
#elif defined(__AVX2__)
  return (vf)_mm256_permutevar8x32_ps(_mm256_loadu_ps(p), (__m256i)which);
#else
  vf v;
  for (int i = 0; i < W; ++i) v[i] = p[which[i]];
  return v;
#endif
}

// How a chunk's lanes find their group: lane l of chunk c is of group first(c) + which(c)[l]. What lies past the last
// input is of the last group, so that no other column's scale is read.
struct Groups {
  int64_t lanes;  // of a group; 0: there is one group
  int64_t chunks;
  vi inside{}, end{};

  Groups(const KvWeight& weight, int64_t inputs, int64_t chunks)
      : lanes(weight.group == inputs ? 0 : weight.group / inputs_of_lane(weight.bits)), chunks(chunks) {
    const int64_t last = inputs / weight.group - 1 - first(chunks - 1);
    for (int i = 0; i < W && lanes; ++i) {
      inside[i] = static_cast<int32_t>(i / lanes);
      end[i] = static_cast<int32_t>(i / lanes < last ? i / lanes : last);
    }
  }
  int64_t first(int64_t chunk) const { return lanes ? chunk * W / lanes : 0; }
  vi which(int64_t chunk) const { return chunk + 1 < chunks ? inside : end; }
};

template <int kBits>
struct Chunk {
  static constexpr int kParts = kBits == 4 ? 2 : 1;
  vb part[kParts];

  // Of `size` bytes, zeros after them; not one byte more is read.
  Chunk(const uint8_t* bytes, int64_t size, uint8_t turned) {
    vb all{};
    if (size >= static_cast<int64_t>(sizeof all))
      memcpy(&all, bytes, sizeof all);
    else
      memcpy(&all, bytes, static_cast<size_t>(size));
    all ^= turned;
    if constexpr (kBits == 4)
      part[0] = all & 15, part[1] = all >> 4;
    else
      part[0] = all;
  }
};

// kRows rows from `row` on, times kColumns columns: out[i * stride + j]. scale, offset [kColumns, groups].
template <int kBits, bool kOffset, int kRows, int kColumns>
static inline void int8_tile(const KvWeight& weight, int64_t inputs, const Int8Rows& x, int64_t row, int64_t column,
                             const Groups& groups, const float* scale, const float* offset, float* out,
                             int64_t stride) {
  constexpr int kParts = Chunk<kBits>::kParts;
  const int64_t bytes = inputs * kBits / 8, lanes = x.chunks * W, held = inputs / weight.group;
  const uint8_t* const w = integers_of(weight, inputs, column);
  const uint8_t turned = static_cast<uint8_t>(kBits == 4 ? excess_of(weight) * 0x11 : excess_of(weight));
  vf sums[kRows][kColumns] = {};
  for (int64_t c = 0; c < x.chunks; ++c) {
    const int64_t at = c * 4 * W, first = groups.first(c);
    const vi which = groups.which(c);
    for (int j = 0; j < kColumns; ++j) {
      __builtin_prefetch(w + j * bytes + at + kWeightsAhead, 0, 3);
      const Chunk<kBits> chunk(w + j * bytes + at, bytes - at, turned);
      const vf s = spread(scale + j * held + first, which);
      const vf o = kOffset ? spread(offset + j * held + first, which) : vf{};
      for (int i = 0; i < kRows; ++i) {
        const int64_t lane = (row + i) * lanes + c * W;
        vi dots = kOffset ? vi{} : load_i(x.start + lane);
        for (int part = 0; part < kParts; ++part)
          dots = dot_bytes<kBits>(dots, chunk.part[part], x.values + (lane * kParts + part * W) * 4);
        sums[i][j] += __builtin_convertvector(dots, vf) * (s * load(x.scale + lane));
        if (kOffset) sums[i][j] += o * load(x.sum + lane);
      }
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kColumns; ++j) out[i * stride + j] = sum(sums[i][j]);
}

template <int kBits, bool kOffset>
static void int8_products(const KvWeight& weight, int64_t inputs, const Int8Rows& x, int64_t first, int64_t count,
                          int64_t column, int columns, float* out, int64_t stride) {
  constexpr int kRows = W > 4 ? 4 : 2, kFew = 2, kMost = W > 8 ? 4 : 2;  // columns of a tile, and of one row's
  static thread_local Scratch<float> scratch;
  const Groups groups(weight, inputs, x.chunks);
  const int64_t held = inputs / weight.group, all = columns * held;
  float* const scale = scratch.reserve(2 * (all + W));  // `spread` reads W, and takes of these what is there
  float* const offset = kOffset ? scale + all + W : nullptr;
  read_groups(weight, column * held, static_cast<int>(all), scale, offset);
  const auto tile = [&](auto rows, auto wide, int64_t i, int j) {
    int8_tile<kBits, kOffset, decltype(rows)::value, decltype(wide)::value>(
        weight, inputs, x, first + i, column + j, groups, scale + j * held, kOffset ? offset + j * held : nullptr,
        out + i * stride + j, stride);
  };
  using std::integral_constant;
  const int64_t whole = count / kRows * kRows;
  for (int j = 0; j < columns;) {
    const int wide = columns - j >= kFew ? kFew : 1;
    for (int64_t i = 0; i < whole; i += kRows)
      if (wide == kFew)
        tile(integral_constant<int, kRows>(), integral_constant<int, kFew>(), i, j);
      else
        tile(integral_constant<int, kRows>(), integral_constant<int, 1>(), i, j);
    j += wide;
  }
  for (int64_t i = whole; i < count; ++i) {
    int j = 0;
    for (; j + kMost <= columns; j += kMost) tile(integral_constant<int, 1>(), integral_constant<int, kMost>(), i, j);
    for (; j < columns; ++j) tile(integral_constant<int, 1>(), integral_constant<int, 1>(), i, j);
  }
}

// out[i * stride + j] = row first + i times column + j, for `count` rows and `columns` columns.
static inline void int8_columns(const KvWeight& weight, int64_t inputs, const Int8Rows& x, int64_t first, int64_t count,
                                int64_t column, int columns, float* out, int64_t stride) {
  const bool offset = weight.zero || weight.minimum || !weight.is_signed;
  const auto products = weight.bits == 4 ? offset ? int8_products<4, true> : int8_products<4, false>
                        : offset         ? int8_products<8, true>
                                         : int8_products<8, false>;
  products(weight, inputs, x, first, count, column, columns, out, stride);
}

}  // namespace KV_ISA
}  // namespace kv
