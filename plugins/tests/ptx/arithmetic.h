// The arithmetic of PTX on the bits of registers, as far as it differs from that of C++.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace kv {
namespace ptx {

template <class To, class From>
To as(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float as_float(uint32_t bits) { return as<float>(bits); }
inline double as_double(uint64_t bits) { return as<double>(bits); }
inline uint32_t bits_of(float x) { return as<uint32_t>(x); }
inline uint64_t bits_of(double x) { return as<uint64_t>(x); }

inline float from_f16(uint16_t bits) { return static_cast<float>(as<_Float16>(bits)); }
inline uint16_t to_f16(float x) { return as<uint16_t>(static_cast<_Float16>(x)); }
inline uint32_t packed_f16(float high, float low) { return static_cast<uint32_t>(to_f16(high)) << 16 | to_f16(low); }

inline bool unordered(float x, float y) { return x != x || y != y; }
inline float saturated(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
inline float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }
// Round down (rm) and towards zero (rz) by a double, which is exact for the operands of these kernels.
inline float fma_rm(float x, float y, float z) {
  const double exact = static_cast<double>(x) * y + z;
  const float near = static_cast<float>(exact);
  return near > exact ? nextafterf(near, -INFINITY) : near;
}
inline float add_rz(float x, float y) {
  const double exact = static_cast<double>(x) + y;
  const float near = static_cast<float>(exact);
  return fabs(static_cast<double>(near)) > fabs(exact) ? nextafterf(near, 0.0f) : near;
}
// Converts a rounded float to an integer: the nearest one in range, 0 for NaN.
template <class T>
T whole(float x) {
  if (x != x) return 0;
  const double least = static_cast<double>(std::numeric_limits<T>::min()),
               most = static_cast<double>(std::numeric_limits<T>::max());
  return x <= least ? std::numeric_limits<T>::min() : x >= most ? std::numeric_limits<T>::max() : static_cast<T>(x);
}

inline int64_t multiplied(int32_t x, int32_t y) { return static_cast<int64_t>(x) * y; }
inline uint64_t multiplied(uint32_t x, uint32_t y) { return static_cast<uint64_t>(x) * y; }
inline __int128 multiplied(int64_t x, int64_t y) { return static_cast<__int128>(x) * y; }
inline unsigned __int128 multiplied(uint64_t x, uint64_t y) { return static_cast<unsigned __int128>(x) * y; }
// Returns whether a division is defined; otherwise a device gives some number, and a host would stop.
template <class T>
bool divides(T x, T y) {
  return y != 0 && !(std::numeric_limits<T>::is_signed && x == std::numeric_limits<T>::min() && y == T(-1));
}
template <class T>
T quotient(T x, T y) {
  return divides(x, y) ? x / y : T(-1);
}
template <class T>
T remainder_of(T x, T y) {
  return divides(x, y) ? x % y : x;
}

template <class T>
T shifted_left(T x, uint32_t by) {
  return by >= 8 * sizeof(T) ? 0 : static_cast<T>(x << by);
}
template <class T>
T shifted_right(T x, uint32_t by) {
  const uint32_t most = 8 * sizeof(T);
  return by < most ? static_cast<T>(x >> by) : x < 0 ? static_cast<T>(-1) : T(0);
}
inline uint32_t shf_l(uint32_t low, uint32_t high, uint32_t by) {
  return static_cast<uint32_t>(((static_cast<uint64_t>(high) << 32 | low) << (by & 31)) >> 32);
}
inline uint32_t shf_r(uint32_t low, uint32_t high, uint32_t by) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (by & 31));
}
inline uint32_t ones(uint64_t x) { return __builtin_popcountll(x); }
template <class T>
uint32_t leading_zeros(T x) {
  return x ? __builtin_clzll(x) - (64 - 8 * sizeof(T)) : 8 * sizeof(T);
}
inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t result = 0;
  for (int row = 0; row < 8; ++row)
    if (table >> row & 1) result |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
  return result;
}
inline uint32_t prmt(uint32_t low, uint32_t high, uint32_t selectors) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t selector = selectors >> 4 * i & 15, byte = bytes >> 8 * (selector & 7) & 255;
    result |= (selector & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return result;
}
inline uint32_t low_bits(uint32_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }
inline uint32_t bfe(uint32_t x, uint32_t at, uint32_t count) {
  return (at & 255) > 31 ? 0 : x >> (at & 255) & low_bits(count & 255);
}
inline uint32_t bfi(uint32_t x, uint32_t into, uint32_t at, uint32_t count) {
  if ((at & 255) > 31) return into;
  const uint32_t mask = low_bits(count & 255) << (at & 255);
  return (into & ~mask) | (x << (at & 255) & mask);
}

}  // namespace ptx
}  // namespace kv
