// The element types of a cache, and loads and stores that convert them to float32. Half is stored as bits.
#pragma once

#include "block.h"
#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

namespace kv {
namespace cuda {

struct Half {
  uint16_t bits;
};

template <class To, class From>
KV_DEVICE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

KV_DEVICE float to_float(float x) { return x; }
KV_DEVICE float to_float(Half x) {
#ifdef __CUDACC__
  return __half2float(__ushort_as_half(x.bits));
#else
  return static_cast<float>(bits_as<_Float16>(x.bits));
#endif
}

KV_DEVICE void assign(float& to, float x) { to = x; }
KV_DEVICE void assign(Half& to, float x) {
#ifdef __CUDACC__
  to.bits = __half_as_ushort(__float2half_rn(x));
#else
  to.bits = bits_as<uint16_t>(static_cast<_Float16>(x));
#endif
}

struct alignas(16) Vector {
  uint32_t word[4];
};

template <class T>
constexpr int kLanes = 16 / sizeof(T);  // elements of a vector

KV_DEVICE Vector load_vector(const void* from) { return *static_cast<const Vector*>(from); }
KV_DEVICE void store_vector(void* to, const Vector& x) { *static_cast<Vector*>(to) = x; }

template <class T>
KV_DEVICE void widen(const Vector& vector, float (&out)[kLanes<T>]) {
  T element[kLanes<T>];
  memcpy(element, &vector, sizeof vector);
#pragma unroll
  for (int i = 0; i < kLanes<T>; ++i) out[i] = to_float(element[i]);
}

// Loads four neighbouring elements, aligned to their total size.
template <class T>
KV_DEVICE void load_four(const T* from, float (&out)[4]) {
  struct alignas(4 * sizeof(T)) Four {
    T element[4];
  };
  const Four four = *reinterpret_cast<const Four*>(from);
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = to_float(four.element[i]);
}

// Stores two neighbouring numbers at an address aligned to 8 bytes.
KV_DEVICE void store_two(float* to, const float (&x)[2]) {
  struct alignas(8) Two {
    float element[2];
  };
  *reinterpret_cast<Two*>(to) = Two{{x[0], x[1]}};
}

// The bytes from row to row in shared memory: an odd number of vectors, so that lanes that read the same vector of
// neighbouring rows have no bank conflict.
KV_HD constexpr int vector_stride(int vectors) { return (vectors | 1) * 16; }
template <class T>
KV_HD constexpr int shared_stride(int size) {
  return vector_stride(size / kLanes<T>);
}

}  // namespace cuda
}  // namespace kv
