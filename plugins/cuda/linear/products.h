// The products of Linear on tensor cores, of a chunk that is in shared memory: the groups' sums, or those of weights in
// 16 bits, for all rows of a panel.
#pragma once

#include "groups.h"

namespace kv {
namespace cuda {

// Program: LinearMma.
template <class Program>
struct LinearProducts {
  using T = typename Program::T;
  using U = typename Program::U;
  using Registers = typename Program::Registers;
  using Shared = typename Program::Shared;
  using OfGroups = typename Program::OfGroups;
  using OfScales = typename Program::OfScales;
  static constexpr int kBits = Program::kBits, kTiles = Program::kTiles, kHigh = Program::kHigh;
  static constexpr int kUnits = Program::kUnits, kStride = Program::kStride, kRowStride = Program::kRowStride;

  template <bool kMinima>
  static KV_DEVICE void multiply_chunk(Block<Program>& block, const Shared& s, int buffer, const uint32_t (&flip)[2],
                                       uint32_t ends, int rows) {
    const Group* groups = OfGroups::at(s.groups, buffer, 0, 0);
    begin_group<kMinima>(block, groups);
    // Unrolled, a unit's place is a constant. Panels of many rows have enough work per unit to hide the loop.
#pragma unroll(kTiles == 1 ? kUnits : 1)
    for (int u = 0; u < kUnits; ++u) {
      multiply_unit<kMinima>(block, u, flip, rows);
      if (!(ends >> u & 1)) continue;
      end_group<kMinima>(block);
      if (ends < 2u << u) break;
      begin_group<kMinima>(block, groups += OfGroups::kStride);
    }
  }

  // Multiplies a chunk whose groups are `OfScales`, of one unit or four. kZeros: whether they have zero points.
  template <bool kZeros>
  static KV_DEVICE void multiply_copied(Block<Program>& block, const uint32_t (&flip)[2], const uint32_t (&excess)[2],
                                        int group, int chunk, int rows) {
    if (group == 1)
      multiply_groups<1, kZeros>(block, flip, excess, 0, rows);
    else
      multiply_groups<4, kZeros>(block, flip, excess, chunk % 4 * 8, rows);
  }
  // kEach: the units of a group. shift: the bits before the chunk's zero points.
  template <int kEach, bool kZeros>
  static KV_DEVICE void multiply_groups(Block<Program>& block, const uint32_t (&flip)[2], const uint32_t (&excess)[2],
                                        int shift, int rows) {
    constexpr int kGroups = kUnits / kEach;
#if __CUDA_ARCH__ >= 1200  // more would spill registers there
    constexpr int kMost = kTiles > 1 ? 2 : T::kBrain ? 4 : 8;
#else
    constexpr int kMost = kTiles > 1 && kZeros ? 4 : 8;
#endif
    [[maybe_unused]] constexpr int kUnrolled = kTiles > 1 && kEach > 1 ? 1 : max_of(kMost / kEach, 1);
#pragma unroll(kUnrolled)
    for (int group = 0; group < kGroups; ++group) {
      block.each_alone([&](int, Registers& r) {
#pragma unroll
        for (int i = 0; i < kHigh * 2; ++i) {
          const char* const scales = OfScales::scales(r.copied, i * kPair);
          r.scale[i / 2][i % 2] = to_float(*reinterpret_cast<const Half*>(scales + group * 2));
          if (!kZeros) continue;
          const uint32_t zeros = OfScales::zeros(r.copied, r.copied_at, i * kPair) >> (group * 4 + shift);
          set_less(r, i / 2, i % 2, U::less(static_cast<int>(masked_bits(zeros, 15, excess[i % 2]))));
        }
      });
      multiply_unit<false, true, true>(block, group * kEach, flip, rows);
#pragma unroll
      for (int i = 1; i < kEach; ++i) multiply_unit<false, true>(block, group * kEach + i, flip, rows);
      end_group<false>(block);
    }
  }

  static KV_DEVICE void set_less(Registers& r, int m, int half, uint32_t less) {
    r.less[m][half][0] = less, r.less[m][half][1] = U::upper_less(less);
  }

  // begin_group reads scale and less of a group; end_group adds its partial sums to the sums. A group that continues
  // into the next chunk is ended in both.
  template <bool kMinima>
  static KV_DEVICE void begin_group(Block<Program>& block, const Group* groups) {
    if (kBits == 0) return;
    block.each_alone([&](int t, Registers& r) {
#pragma unroll
      for (int m = 0; m < kHigh; ++m) {
        const Vector both = load_vector(groups + Program::tile_of(t, m) * kTileColumns + t % kWarp / 4 * 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          r.scale[m][half] = bits_as<float>(both.word[2 * half]);
          if (kMinima)
            r.minimum[m][half] = bits_as<float>(both.word[2 * half + 1]);
          else
            set_less(r, m, half, both.word[2 * half + 1]);
        }
      }
#pragma unroll
      for (int j = 0; j < kHigh * kTiles * 4; ++j) r.partial[j / (kTiles * 4)][j / 4 % kTiles][j % 4] = 0.0f;
      if (!kMinima) return;
#pragma unroll
      for (int j = 0; j < kTiles * 4; ++j) r.inputs[j / 4][j % 4] = 0.0f;
    });
  }
  template <bool kMinima>
  static KV_DEVICE void end_group(Block<Program>& block) {
    if (kBits == 0) return;
    block.each_alone([&](int, Registers& r) {
#pragma unroll
      for (int j = 0; j < kHigh * kTiles * 4; ++j) {
        const int m = j / (kTiles * 4), n = j / 4 % kTiles, half = j / 2 % 2;
        float& sum = r.sum[m][n][j % 4];
        sum += r.partial[m][n][j % 4] * r.scale[m][half];
        if (kMinima) sum += r.inputs[n][j % 4] * r.minimum[m][half];
      }
    });
  }

  // kCopied: whether the groups are `OfScales`. kFirst: the unit's product overwrites the partial sums.
  template <bool kMinima, bool kCopied = false, bool kFirst = false>
  static KV_DEVICE void multiply_unit(Block<Program>& block, int u, const uint32_t (&flip)[2], int rows) {
    block.each_alone([&](int, Registers& r) {
#pragma unroll
      for (int i = 0; i < kHigh * 2; ++i) {
        const int m = i / 2, half = i % 2;
        const char* const column = r.weights + i * kPair * kStride;
        uint32_t word[U::kWords];
#pragma unroll
        for (int j = 0; j < U::kWords; ++j)
          word[j] = *reinterpret_cast<const uint32_t*>(column + u * U::kBytes + j * 16);
        const uint32_t flips[2] = {flip[half], U::upper_flip(flip[half])};
        // With copied groups a thread has the registers to keep both.
        const uint32_t less = r.less[m][half][0], upper = kCopied ? r.less[m][half][1] : U::upper_less(less);
#pragma unroll
        for (int step = 0; step < U::kSteps; ++step)
#pragma unroll
          for (int pair = 0; pair < 2; ++pair)
            r.a[m][step][2 * pair + half] = U::pair(word, step, pair, flips[pair], pair ? upper : less);
      }
    });
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (n && n % 2 == 0 && n * 8 >= rows) break;
      block.each_alone([&](int, Registers& r) { U::load_inputs(r.rows + n * 8 * kRowStride, u, 0, r.b); });
#pragma unroll
      for (int step = 0; step < U::kSteps; ++step) {
#pragma unroll
        for (int m = 0; m < kHigh; ++m) {
          const auto product = [&](Registers& r) {
            return Product{kBits ? r.partial[m][n] : r.sum[m][n], r.a[m][step], r.b + 2 * step};
          };
          if (kFirst && step == 0)
            multiply<T, true>(block, product);
          else
            multiply<T>(block, product);
        }
        if (kMinima) {
          constexpr uint32_t kOne = T::kBrain ? 0x3f803f80u : 0x3c003c00u;
          const uint32_t ones[4] = {kOne, kOne, kOne, kOne};
          multiply<T>(block, [&](Registers& r) { return Product{r.inputs[n], ones, r.b + 2 * step}; });
        }
      }
    }
  }
};

}  // namespace cuda
}  // namespace kv
