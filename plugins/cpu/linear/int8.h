// Products of rows that are rounded to int8 with packed weights, by dot products of bytes.
//
// A chunk is 4 W bytes of a weight's row. Lane l of its sums is of the bytes 4 l to 4 l + 3: of 4 inputs, or of the 8
// whose 4 bits these hold. Rows are laid out to match, so nothing is interleaved: of 4 bits, first the inputs of all
// low halves of a chunk, then those of all high ones.
//
//   of each row, once     by blocks of kBlockInputs (16 where groups want it): the largest |x| is 127; by lanes: the
//                         block's scale, the sum of its integers
//   for each column       sum over chunks of lanes' (dot products x the row's scale x the group's scale)
//
// The weights' integers are unsigned in these products. What signed ones have in excess is taken off each lane's sum
// beforehand, which is exact; zero points and minima are an offset of the group times the sum of the row's lane.
#pragma once

#include "packed.h"

namespace kv {
namespace KV_ISA {

constexpr int kBlockInputs = 32;
constexpr float kLeastRounded = 1e-36f;  // blocks of smaller numbers count as zeros

typedef uint8_t vb __attribute__((vector_size(W * 4)));

static inline int64_t inputs_of_lane(int bits) { return bits == 4 ? 8 : 4; }

// Whether lanes lie within groups, and chunks read them in one pattern.
static inline bool takes_int8(const KvWeight& weight, int64_t inputs) {
  if (!weight.bits || weight.group == inputs) return weight.bits != 0;
  const int64_t lanes = weight.group / inputs_of_lane(weight.bits);
  return weight.group % 16 == 0 && (W % lanes == 0 || lanes % W == 0);
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

  // One row [inputs], rounded by blocks of `block` inputs. A number that is not finite makes its block NaN.
  void round(const float* x, int64_t inputs, int block, int64_t row) const {
    int8_t* const to = values + row * row_bytes();
    const int64_t lanes = chunks * W, per = inputs_of_lane(bits);
    float *const scales = scale + row * lanes, *const sums = sum + row * lanes;
    int32_t* const starts = start + row * lanes;
    for (int64_t first = 0; first < lanes * per; first += block) {
      const int count = static_cast<int>(inputs - first < block ? (inputs > first ? inputs - first : 0) : block);
      int8_t rounded[kBlockInputs] = {};
      const float factor = round_block(x + first, count, rounded);
      for (int i = 0; i < block && first + i < lanes * per; i += static_cast<int>(per)) {
        const int64_t lane = (first + i) / per;
        int total = 0;
        for (int j = 0; j < per; ++j) total += rounded[i + j];
        scales[lane] = factor, sums[lane] = factor * static_cast<float>(total);
        starts[lane] = -total * (1 << (bits - 1));
        if (bits == 8) {
          memcpy(to + lane * 4, rounded + i, 4);
          continue;
        }
        int8_t* const low = to + lane / W * W * 8 + lane % W * 4;
        for (int j = 0; j < 4; ++j) low[j] = rounded[i + 2 * j], low[4 * W + j] = rounded[i + 2 * j + 1];
      }
    }
  }

  // The numbers over what is returned, to the nearest integer.
  static float round_block(const float* x, int count, int8_t* to) {
    float highest = 0.0f, unusable = 0.0f;
    for (int i = 0; i < count; ++i) {
      const float size = x[i] < 0.0f ? -x[i] : x[i];
      highest = size > highest ? size : highest, unusable += x[i] - x[i];
    }
    if (unusable != 0.0f) return unusable;  // NaN
    if (highest < kLeastRounded) return 0.0f;
    const float factor = 127.0f / highest;
    for (int i = 0; i < count; ++i) {
      const float shifted = x[i] * factor + 12582912.0f;  // 1.5 * 2^23 leaves the integer in the low bits
      int32_t whole;
      memcpy(&whole, &shifted, sizeof whole);
      to[i] = static_cast<int8_t>(whole);
    }
    return highest / 127.0f;
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

// How a chunk's lanes find their group: lane l of chunk c is of group c W / lanes + which[l].
struct Groups {
  int64_t lanes;  // of a group; 0: there is one group
  vi which;

  Groups(const KvWeight& weight, int64_t inputs)
      : lanes(weight.group == inputs ? 0 : weight.group / inputs_of_lane(weight.bits)), which{} {
    for (int i = 0; i < W && lanes; ++i) which[i] = static_cast<int32_t>(i / lanes);
  }
  int64_t first(int64_t chunk) const { return lanes ? chunk * W / lanes : 0; }
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

// kRows rows from `row` on, times kColumns columns: out[i * stride + j]. scale, offset [kColumns, room].
template <int kBits, bool kOffset, int kRows, int kColumns>
static inline void int8_tile(const KvWeight& weight, int64_t inputs, const Int8Rows& x, int64_t row, int64_t column,
                             const Groups& groups, const float* scale, const float* offset, int64_t room, float* out,
                             int64_t stride) {
  constexpr int kParts = Chunk<kBits>::kParts;
  const int64_t bytes = inputs * kBits / 8, lanes = x.chunks * W;
  const uint8_t* const w = integers_of(weight, inputs, column);
  const uint8_t turned = static_cast<uint8_t>(kBits == 4 ? excess_of(weight) * 0x11 : excess_of(weight));
  vf sums[kRows][kColumns] = {};
  for (int64_t c = 0; c < x.chunks; ++c) {
    const int64_t at = c * 4 * W, first = groups.first(c);
    for (int j = 0; j < kColumns; ++j) {
      const Chunk<kBits> chunk(w + j * bytes + at, bytes - at, turned);
      const vf s = spread(scale + j * room + first, groups.which);
      const vf o = kOffset ? spread(offset + j * room + first, groups.which) : vf{};
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
  constexpr int kRows = W > 4 ? 4 : 2, kColumns = 2;
  static thread_local Scratch<float> scratch;
  const Groups groups(weight, inputs);
  const int64_t held = inputs / weight.group, room = held + W;  // `spread` reads W from any group on
  float *const scale = scratch.reserve(2 * kColumns * room), *const offset = scale + kColumns * room;
  const auto read = [&](int64_t one, int place) {
    read_groups(weight, inputs, one, 0, static_cast<int>(held), scale + place * room, offset + place * room);
    for (int64_t i = held; i < room; ++i) scale[place * room + i] = offset[place * room + i] = 0.0f;
  };
  int j = 0;
  const auto one_column = [&] {
    read(column + j, 0);
    int64_t i = 0;
    for (; i + kRows <= count; i += kRows)
      int8_tile<kBits, kOffset, kRows, 1>(weight, inputs, x, first + i, column + j, groups, scale, offset, room,
                                          out + i * stride + j, stride);
    for (; i < count; ++i)
      int8_tile<kBits, kOffset, 1, 1>(weight, inputs, x, first + i, column + j, groups, scale, offset, room,
                                      out + i * stride + j, stride);
  };
  for (; count >= kRows && j + kColumns <= columns; j += kColumns) {
    for (int k = 0; k < kColumns; ++k) read(column + j + k, k);
    int64_t i = 0;
    for (; i + kRows <= count; i += kRows)
      int8_tile<kBits, kOffset, kRows, kColumns>(weight, inputs, x, first + i, column + j, groups, scale, offset, room,
                                                 out + i * stride + j, stride);
    for (; i < count; ++i)
      int8_tile<kBits, kOffset, 1, kColumns>(weight, inputs, x, first + i, column + j, groups, scale, offset, room,
                                             out + i * stride + j, stride);
  }
  for (; j < columns; ++j) one_column();
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
