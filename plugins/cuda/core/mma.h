// The matrix product of a warp on tensor cores: mma.m16n8k16 of 16-bit elements into float32 sums; the loads of its
// operands from shared memory; and the layout of their elements. The host executes the same operations over the
// registers of a warp's 32 lanes, with the layout of the PTX ISA ("Matrix Fragments for mma.m16n8k16 with floating
// point type"), so an element in the wrong register gives a wrong result there too.
//
// These operations come between phases, like Block::warp_max: functions tell where a thread reads and which of its
// registers take part. Every thread of a block must execute each operation.
#pragma once

#include "types.h"

namespace kv {
namespace cuda {

// A product of a warp: sum [16, 8] += a [16, 16] b [16, 8]. Every lane has 8 elements of a, 4 elements of b and 4 sums.
// A register has two elements of a or of b, the first in the lower half.
struct Product {
  float* sum;
  const uint32_t *a, *b;
};

struct Element {
  int row, column;
};

// The row and column of a lane's i-th element of a, of b, and of the sum.
KV_HD Element element_of_a(int lane, int i) { return {lane / 4 + i / 2 % 2 * 8, lane % 4 * 2 + i % 2 + i / 4 * 8}; }
KV_HD Element element_of_b(int lane, int i) { return {lane % 4 * 2 + i % 2 + i / 2 * 8, lane / 4}; }
KV_HD Element element_of_sum(int lane, int i) { return {lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2}; }

// Returns two numbers as the elements of a register.
template <class T>
KV_DEVICE uint32_t packed(float low, float high) {
#ifdef __CUDACC__
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#else
  T element[2];
  assign(element[0], low), assign(element[1], high);
  return element[0].bits | static_cast<uint32_t>(element[1].bits) << 16;
#endif
}

// Multiplies of(registers), a Product. kFirst: the sum starts at zero, whatever its registers contained.
template <class T, bool kFirst = false, class Kernel, class F>
KV_DEVICE void multiply(Block<Kernel>& block, F of) {
#ifdef __CUDACC__
  const Product x = of(block.registers());
  float from[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) from[i] = kFirst ? 0.0f : x.sum[i];
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(x.sum[0]), "=f"(x.sum[1]), "=f"(x.sum[2]), "=f"(x.sum[3])
      : "r"(x.a[0]), "r"(x.a[1]), "r"(x.a[2]), "r"(x.a[3]), "r"(x.b[0]), "r"(x.b[1]), "f"(from[0]), "f"(from[1]),
        "f"(from[2]), "f"(from[3]));
#else
  for (int warp = 0; warp < Kernel::kThreads / kWarp; ++warp) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < kWarp; ++lane) {
      const Product x = of(block.lanes(warp)[lane]);
      const auto element = [](const uint32_t* from, int i) {
        return to_float(T{static_cast<uint16_t>(from[i / 2] >> i % 2 * 16)});
      };
      for (int i = 0; i < 8; ++i) a[element_of_a(lane, i).row][element_of_a(lane, i).column] = element(x.a, i);
      for (int i = 0; i < 4; ++i) b[element_of_b(lane, i).row][element_of_b(lane, i).column] = element(x.b, i);
    }
    for (int lane = 0; lane < kWarp; ++lane) {
      float* sum = of(block.lanes(warp)[lane]).sum;
      for (int i = 0; i < 4; ++i) {
        const Element at = element_of_sum(lane, i);
        if (kFirst) sum[i] = 0.0f;
        for (int k = 0; k < 16; ++k) sum[i] += a[at.row][k] * b[k][at.column];
      }
    }
  }
#endif
}

// ldmatrix.x4: loads four matrices of 8 rows of 8 elements from shared memory. Lane 8 i + r gives the address of row r
// of matrix i (16 bytes, aligned). Then to(registers)[i] of every lane contains elements 2 (lane % 4) and the next one
// of matrix i's row lane / 4, or of its column lane / 4 if kTransposed.
template <bool kTransposed, class Kernel, class Row, class To>
KV_DEVICE void load_matrices(Block<Kernel>& block, Row row, To to) {
#ifdef __CUDACC__
  const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(row(static_cast<int>(threadIdx.x))));
  uint32_t* x = to(block.registers());
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
#else
  for (int warp = 0; warp < Kernel::kThreads / kWarp; ++warp) {
    uint16_t element[4][8][8];
    for (int lane = 0; lane < kWarp; ++lane) {
      const void* from = row(warp * kWarp + lane);
      if (reinterpret_cast<uintptr_t>(from) % 16) abort();  // as the device would
      memcpy(element[lane / 8][lane % 8], from, 16);
    }
    for (int lane = 0; lane < kWarp; ++lane)
      for (int i = 0; i < 4; ++i) {
        const int line = lane / 4, at = lane % 4 * 2;
        const uint32_t low = kTransposed ? element[i][at][line] : element[i][line][at],
                       high = kTransposed ? element[i][at + 1][line] : element[i][line][at + 1];
        to(block.lanes(warp)[lane])[i] = low | high << 16;
      }
  }
#endif
}

// The following load operands, four registers each, from 16 x 16 elements in shared memory whose rows are `stride`
// bytes apart. corner(thread) is the address of their first element, equal for all threads of a warp. To load several
// operands at constant distances, call `load_matrices` with offset_of_a or offset_of_b and add the distance last, so
// that addresses are computed once.
//
// Loads an operand a, row by row.
KV_DEVICE int offset_of_a(int t, int stride) { return t % 16 * stride + t % kWarp / 16 * 16; }
template <class Kernel, class Corner, class To>
KV_DEVICE void load_a(Block<Kernel>& block, int stride, Corner corner, To to) {
  load_matrices<false>(block, [&](int t) { return corner(t) + offset_of_a(t, stride); }, to);
}
// Loads two operands b; a row of memory is a column of b (keys). The first 8 rows go to registers 0 and 1, the others
// to registers 2 and 3.
KV_DEVICE int offset_of_b(int t, int stride) { return (t % kWarp / 16 * 8 + t % 8) * stride + t / 8 % 2 * 16; }
template <class Kernel, class Corner, class To>
KV_DEVICE void load_b(Block<Kernel>& block, int stride, Corner corner, To to) {
  load_matrices<false>(block, [&](int t) { return corner(t) + offset_of_b(t, stride); }, to);
}
// Loads two operands b; a row of memory is a row of b (values). The first 8 columns go to registers 0 and 1, the others
// to registers 2 and 3.
template <class Kernel, class Corner, class To>
KV_DEVICE void load_b_rows(Block<Kernel>& block, int stride, Corner corner, To to) {
  load_matrices<true>(block, [&](int t) { return corner(t) + t % 16 * stride + t % kWarp / 16 * 16; }, to);
}

}  // namespace cuda
}  // namespace kv
