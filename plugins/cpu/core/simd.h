// Vectors of KV_WIDTH floats, by the compiler's vector extensions: one source for AVX-512, AVX2, NEON and any other
// machine. It is compiled once per instruction set, in the namespace KV_ISA. W is the number of lanes, vf a vector of
// float32 numbers, vi of int32 numbers, vh of float16 numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../../abi/kvexport.h"
#include "../../math/statistic.h"

namespace kv {
namespace KV_ISA {

// Arm's vectors, for which the compiler's conversions between types of different sizes go lane by lane.
#if defined(__aarch64__) && KV_WIDTH == 4
#define KV_NEON
#endif

constexpr int W = KV_WIDTH;
typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
#if defined(__aarch64__)
using half = __fp16;  // GCC before 13 has no _Float16 there
#else
using half = _Float16;
#endif
typedef half vh __attribute__((vector_size(W * 2)));

// Two numbers of an int4 cache, the first in the low half. Each is a 4-bit code for an int8 number (KV_INT4_NUMBERS).
struct int4 {
  uint8_t two;
};
alignas(16) constexpr int8_t kInt4[16] = {KV_INT4_NUMBERS};
#if defined(__AVX512F__)
alignas(64) constexpr float kInt4Floats[16] = {KV_INT4_NUMBERS};
#endif

// `at` returns the address of element `i` of a row, `bytes_of` the bytes of `count` elements. For int4 `i` and `count`
// must be even.
template <class T>
static inline T* at(T* row, size_t i) {
  return row + i;
}
static inline int4* at(int4* row, size_t i) { return row + i / 2; }
static inline const int4* at(const int4* row, size_t i) { return row + i / 2; }
template <class T>
constexpr size_t bytes_of(size_t count) {
  return std::is_same<T, int4>::value ? count / 2 : count * sizeof(T);
}

// Returns one element of a row in float32.
template <class T>
static inline float element(const T* row, size_t i) {
  return static_cast<float>(row[i]);
}
static inline float element(const int4* row, size_t i) {
  return kInt4[i % 2 ? row[i / 2].two >> 4 : row[i / 2].two & 15];
}

static inline vf splat(float x) { return x - vf{}; }
static inline vi splat_i(int32_t x) { return x - vi{}; }

static inline vi lane_numbers() {
  vi v;
  for (int i = 0; i < W; ++i) v[i] = i;
  return v;
}

static inline vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline vi load_i(const int32_t* p) {
  vi v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline vf load(const half* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(KV_NEON)
  return (vf)vcvt_f32_f16(vld1_f16(p));
#else
  vh v;
  memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, vf);
#endif
}

// Returns W signed bytes, each in a lane.
static inline vi load_i(const int8_t* p) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#elif defined(KV_NEON)
  int32_t four;
  memcpy(&four, p, sizeof four);
  return (vi)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)))));
#else
  typedef int8_t vb __attribute__((vector_size(W)));
  vb v;
  memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, vi);
#endif
}

static inline vf load(const int8_t* p) { return __builtin_convertvector(load_i(p), vf); }

#if defined(__AVX2__)
// Returns the 4-bit codes of the 8 bytes in the low half, each in a byte of its own.
static inline __m128i codes_of(__m128i bytes) {
  const __m128i words = _mm_cvtepu8_epi16(bytes);
  return _mm_and_si128(_mm_or_si128(words, _mm_slli_epi16(words, 4)), _mm_set1_epi8(15));
}
#endif

static inline vf load(const int4* p) {
#if defined(__AVX512F__)
  const __m128i codes = codes_of(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return (vf)_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes), _mm512_load_ps(kInt4Floats));
#elif defined(__AVX2__)
  int32_t bytes;
  memcpy(&bytes, p, sizeof bytes);
  const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kInt4));
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_shuffle_epi8(table, codes_of(_mm_cvtsi32_si128(bytes)))));
#elif defined(KV_NEON)
  uint16_t two;
  memcpy(&two, p, sizeof two);
  const uint8x8_t bytes = vreinterpret_u8_u16(vdup_n_u16(two));
  const uint8x8_t codes = vzip1_u8(vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8(bytes, 4));
  const int16x4_t words = vget_low_s16(vmovl_s8(vqtbl1_s8(vld1q_s8(kInt4), codes)));
  return (vf)vcvtq_f32_s32(vmovl_s16(words));
#else
  vf v;
  for (int i = 0; i < W; ++i) v[i] = element(p, i);
  return v;
#endif
}

static inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }

static inline void store(half* p, vf v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(KV_NEON)
  vst1_f16(p, vcvt_f16_f32((float32x4_t)v));
#else
  vh h = __builtin_convertvector(v, vh);
  memcpy(p, &h, sizeof h);
#endif
}

typedef int8_t vb __attribute__((vector_size(W)));

// Returns the low byte of each lane.
static inline vb low_bytes(vi v) {
#if defined(KV_NEON)
  const int16x4_t words = vmovn_s32((int32x4_t)v);
  const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
  vb low;
  memcpy(&low, &bytes, sizeof low);
  return low;
#else
  return __builtin_convertvector(v, vb);
#endif
}

// Returns the lanes of `a` where `mask` is set (all ones), and the lanes of `b` elsewhere.
static inline vf select(vi mask, vf a, vf b) { return mask ? a : b; }
static inline vf vmax(vf a, vf b) { return select(a > b, a, b); }
static inline vf vmin(vf a, vf b) { return select(a < b, a, b); }

// Returns the sum over the lanes by halving, so that the order is the same on every machine of this width.
template <int N>
static inline float sum_lanes(const float* x) {
  float half[N / 2];
  for (int i = 0; i < N / 2; ++i) half[i] = x[i] + x[i + N / 2];
  return sum_lanes<N / 2>(half);
}
template <>
inline float sum_lanes<1>(const float* x) {
  return x[0];
}

static inline float sum(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float x[W];
  store(x, v);
  return sum_lanes<W>(x);
#endif
}

// One step of `sums`: adds the two halves of every segment of 2 L lanes of a and b; the segments of a come first.
template <int L, size_t... I>
static inline vf fold(vf a, vf b, std::index_sequence<I...>) {
  constexpr int count = W / (2 * L);  // segments of one operand
  return __builtin_shufflevector(a, b, (I / L < count ? I / L * 2 * L : W + (I / L - count) * 2 * L) + I % L...) +
         __builtin_shufflevector(a, b, (I / L < count ? I / L * 2 * L : W + (I / L - count) * 2 * L) + I % L + L...);
}

// Returns a vector whose lane i is the sum of the lanes of v[i]. The recursion folds vectors down to segments of L
// lanes; the caller asks for L = 1 and gives W vectors.
template <int L>
static inline vf sums(const vf* v) {
  if constexpr (L == W) {
    return *v;
  } else {
    constexpr int half = W / (2 * L);
    return fold<L>(sums<2 * L>(v), sums<2 * L>(v + half), std::make_index_sequence<W>());
  }
}

// One step of `transpose`: exchanges the columns of two rows whose bit L differs from the row's.
template <int L, size_t... I>
static inline void exchange(vf& a, vf& b, std::index_sequence<I...>) {
  const vf first = __builtin_shufflevector(a, b, (I & L ? W + I - L : I)...);
  b = __builtin_shufflevector(a, b, (I & L ? W + I : I + L)...);
  a = first;
}

// Transposes W vectors: v[i][j] becomes v[j][i].
template <int L = 1>
static inline void transpose(vf* v) {
  if constexpr (L < W) {
    for (int i = 0; i < W; ++i)
      if (!(i & L)) exchange<L>(v[i], v[i + L], std::make_index_sequence<W>());
    transpose<2 * L>(v);
  }
}

static inline float max(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float x[W];
  store(x, v);
  float highest = x[0];
  for (int i = 1; i < W; ++i) highest = x[i] > highest ? x[i] : highest;
  return highest;
#endif
}

template <int L, size_t... I>
static inline vf exchanged(vf v, std::index_sequence<I...>) {
  return __builtin_shufflevector(v, v, (I ^ L)...);
}

// Returns a vector whose every lane is the maximum of its aligned neighbourhood of N lanes (of all lanes if N > W). In
// `v`, this is already true of neighbourhoods of L lanes.
template <int L, int N>
static inline vf max_of_neighbours(vf v) {
  if constexpr (L < N && L < W)
    return max_of_neighbours<2 * L, N>(vmax(v, exchanged<L>(v, std::make_index_sequence<W>())));
  else
    return v;
}

// Returns exp(x): 0 below -87.3 (float32's smallest normal number), capped above 88.3; relative error 2e-7 (Cephes'
// polynomial).
static inline vf exp(vf x) {
  vf clamped = vmin(vmax(x, splat(-87.3f)), splat(88.3f));
  vf n = clamped * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23 leaves the integer in the low bits
  vi exponent;
  memcpy(&exponent, &n, sizeof n);
  n = n - 12582912.0f;
  vf r = clamped - n * 0.693359375f - n * -2.12194440e-4f;
  vf y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  vi scale = exponent << 23;
  vi bits;
  memcpy(&bits, &y, sizeof y);
  bits += scale;
  memcpy(&y, &bits, sizeof y);
  return select(x < -87.3f, vf{}, y);
}

// Returns ln(x) of a positive normal number; relative error 2e-7 (Cephes' polynomial).
static inline vf log(vf x) {
  vi bits;
  memcpy(&bits, &x, sizeof x);
  vi exponent = (bits >> 23) - 126;
  bits = (bits & 0x007fffff) | 0x3f000000;
  vf m;
  memcpy(&m, &bits, sizeof m);  // in [0.5, 1)
  vi small = m < 0.707106781186547524f;
  vf n = __builtin_convertvector(exponent + small, vf);  // a set mask is -1
  vf r = select(small, m + m, m) - 1.0f;
  vf z = r * r;
  vf y = splat(7.0376836292e-2f);
  y = y * r - 1.1514610310e-1f;
  y = y * r + 1.1676998740e-1f;
  y = y * r - 1.2420140846e-1f;
  y = y * r + 1.4249322787e-1f;
  y = y * r - 1.6668057665e-1f;
  y = y * r + 2.0000714765e-1f;
  y = y * r - 2.4999993993e-1f;
  y = y * r + 3.3333331174e-1f;
  y = y * r * z + n * -2.12194440e-4f - 0.5f * z;
  return r + y + n * 0.693359375f;
}

// Returns the dot product of two rows of `size` elements; `b` is float32.
template <class T>
static inline float dot(const T* a, const float* b, int size) {
  vf lanes{};
  int i = 0;
  for (; i + W <= size; i += W) lanes += load(at(a, i)) * load(b + i);
  float rest = 0.0f;
  for (; i < size; ++i) rest += element(a, i) * b[i];
  return sum(lanes) + rest;
}

// Converts a row of `size` elements to float32.
template <class T>
static inline void widen(const T* from, float* to, int size) {
  int i = 0;
  for (; i + W <= size; i += W) store(to + i, load(at(from, i)));
  for (; i < size; ++i) to[i] = element(from, i);
}

// Converts a row of `size` float32 elements to the type T.
template <class T>
static inline void narrow(const float* from, T* to, int size) {
  int i = 0;
  for (; i + W <= size; i += W) store(to + i, load(from + i));
  for (; i < size; ++i) to[i] = static_cast<T>(from[i]);
}

}  // namespace KV_ISA
}  // namespace kv
