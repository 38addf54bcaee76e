// The AMX instructions that cpu/linear/amx.h uses, in software: for tests on machines without tiles. Compiled in by
// `-include`, before the kernels' own headers.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace tiles_in_software {

constexpr int kLines = 16, kBytes = 64;
static thread_local unsigned char tile[8][kLines][kBytes];

static inline float widened(uint16_t bfloat16) {
  const uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static inline void load(int to, const void* from, long stride) {
  for (int i = 0; i < kLines; ++i) memcpy(tile[to][i], static_cast<const char*>(from) + i * stride, kBytes);
}

static inline void store(int from, void* to, long stride) {
  for (int i = 0; i < kLines; ++i) memcpy(static_cast<char*>(to) + i * stride, tile[from][i], kBytes);
}

// sums[m][n] += a[m][2 k] b[k][2 n] + a[m][2 k + 1] b[k][2 n + 1], over k
static inline void multiply(int sums, int a, int b) {
  for (int m = 0; m < kLines; ++m) {
    float sum[16];
    uint16_t x[32], y[32];
    memcpy(sum, tile[sums][m], kBytes), memcpy(x, tile[a][m], kBytes);
    for (int k = 0; k < kLines; ++k) {
      memcpy(y, tile[b][k], kBytes);
      for (int n = 0; n < 16; ++n)
        sum[n] += widened(x[2 * k]) * widened(y[2 * n]) + widened(x[2 * k + 1]) * widened(y[2 * n + 1]);
    }
    memcpy(tile[sums][m], sum, kBytes);
  }
}

}  // namespace tiles_in_software

#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_loadconfig
#undef _tile_release
#define _tile_loadd tiles_in_software::load
#define _tile_stored tiles_in_software::store
#define _tile_dpbf16ps tiles_in_software::multiply
#define _tile_loadconfig(shapes) static_cast<void>(shapes)
#define _tile_release() static_cast<void>(0)
