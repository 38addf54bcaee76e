// The operations of the 32 lanes of a warp: shuffles, redux, ldmatrix, mma.m16n8k16, with the PTX ISA's layout of
// registers.
#include <algorithm>

#include "run.h"

namespace kv {
namespace ptx {
namespace {

enum { kShuffle, kReduce, kLoad, kMultiply };

struct Shuffling {
  uint32_t x, by, segment;
};
struct Loading {
  uint64_t from;
  bool transposed;
};

// Executes shfl.bfly: every lane gets the register of lane (its own number xor `by`).
void perform_shuffle(Thread* lanes) {
  for (uint32_t lane = 0; lane < kWarp; ++lane) {
    const Shuffling& own = *static_cast<const Shuffling*>(lanes[lane].input);
    const uint32_t segment = own.segment >> 8 & 31, last = (lane & segment) | (own.segment & 31 & ~segment);
    uint32_t other = lane ^ (own.by & 31);
    const bool inside = other <= last;
    if (!inside) other = lane;
    *static_cast<Shuffled*>(lanes[lane].output) = {static_cast<const Shuffling*>(lanes[other].input)->x, inside};
  }
}

// Executes redux.sync.max.s32: every lane gets the largest integer of the warp.
void perform_reduce(Thread* lanes) {
  int32_t most = INT32_MIN;
  for (int lane = 0; lane < kWarp; ++lane) most = std::max(most, *static_cast<const int32_t*>(lanes[lane].input));
  for (int lane = 0; lane < kWarp; ++lane) *static_cast<int32_t*>(lanes[lane].output) = most;
}

// Executes ldmatrix.x4: eight lanes give the rows of each of four matrices of 8 by 8; lane i gets elements 2i and 2i +
// 1 of each matrix.
void perform_load(Thread* lanes) {
  uint16_t matrix[4][8][8];
  const bool transposed = static_cast<const Loading*>(lanes[0].input)->transposed;
  for (int lane = 0; lane < kWarp; ++lane) {
    const uint64_t from = static_cast<const Loading*>(lanes[lane].input)->from;
    memcpy(matrix[lane / 8][lane % 8], reinterpret_cast<const void*>(from), 16);
  }
  for (int lane = 0; lane < kWarp; ++lane)
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4, column = lane % 4 * 2;
      const uint32_t first = transposed ? matrix[i][column][row] : matrix[i][row][column],
                     second = transposed ? matrix[i][column + 1][row] : matrix[i][row][column + 1];
      static_cast<uint32_t*>(lanes[lane].output)[i] = first | second << 16;
    }
}

float element(uint32_t pair, int which) { return from_f16(static_cast<uint16_t>(which ? pair >> 16 : pair)); }

// Executes mma.m16n8k16: d[16, 8] = a[16, 16] b[16, 8] + c.
void perform_multiply(Thread* lanes) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < kWarp; ++lane) {
    const Matrices& in = *static_cast<const Matrices*>(lanes[lane].input);
    const int group = lane / 4, pair = lane % 4 * 2;
    for (int i = 0; i < 8; ++i)
      a[group + (i / 2 % 2 ? 8 : 0)][pair + i % 2 + (i >= 4 ? 8 : 0)] = element(in.a[i / 2], i % 2);
    for (int i = 0; i < 4; ++i) b[pair + i % 2 + (i >= 2 ? 8 : 0)][group] = element(in.b[i / 2], i % 2);
  }
  for (int lane = 0; lane < kWarp; ++lane)
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + (i >= 2 ? 8 : 0), column = lane % 4 * 2 + i % 2;
      float sum = static_cast<const Matrices*>(lanes[lane].input)->c[i];
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      static_cast<float*>(lanes[lane].output)[i] = sum;
    }
}

}  // namespace

void perform(Thread* lanes) {
  if (lanes[0].kind == kShuffle) return perform_shuffle(lanes);
  if (lanes[0].kind == kReduce) return perform_reduce(lanes);
  if (lanes[0].kind == kLoad) return perform_load(lanes);
  perform_multiply(lanes);
}

Shuffled shuffle(uint32_t x, uint32_t by, uint32_t segment, uint32_t mask, int site) {
  if (mask != ~0u) report(site, "a shuffle with the mask %x", mask);
  const Shuffling in{x, by, segment};
  Shuffled out{};
  meet(kShuffle, site, &in, &out);
  return out;
}

int32_t warp_max(int32_t x, uint32_t mask, int site) {
  if (mask != ~0u) report(site, "a reduction with the mask %x", mask);
  int32_t out = 0;
  meet(kReduce, site, &x, &out);
  return out;
}

void load_matrices(uint64_t from, bool transposed, uint32_t (&rows)[4], int site) {
  read(from, 16, site);
  const Loading in{from, transposed};
  meet(kLoad, site, &in, rows);
}

void multiply(const Matrices& in, float (&sum)[4], int site) { meet(kMultiply, site, &in, sum); }

}  // namespace ptx
}  // namespace kv
