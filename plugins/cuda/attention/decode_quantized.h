// The products of a decode step (decode.h) over quantized caches, on tensor cores, for groups of any size. Rows are
// copied as stored bytes and become 16-bit floats in registers, just before a product. Numbers of 8 bits are exact as
// 16-bit floats, and so are the products' terms: the other factor, a float32 number, is the sum of two 16-bit numbers,
// which keeps 22 of its 24 bits.
//
//   (high + low) = query times a power of two, in 16 bits each
//   logit[16, 32] = key_scale (high + low)[16, D] x key[32, D]^T
//   (high + low) = weight value_scale / unit           unit: a power of two, at least the largest value_scale so far
//   output[16, Dv] += (high + low)[16, 32] x value[32, Dv]
//
// An earlier launch has rotated the queries and appended the token; the output is rotated back.
#pragma once

#include "../core/mma.h"
#include "decode.h"
#include "quantized.h"

namespace kv {
namespace cuda {

// A block of slots in shared memory: rows as stored bytes, and numbers of every slot (votes, position, scores, and the
// scales of its key and value).
template <>
struct Stage<Quantized> : Slots {
  int statistics;

  // The bytes from row to row in shared memory: an odd number of vectors, as shared_stride.
  static KV_HD int stride(int bytes) { return vector_stride((bytes + 15) / 16); }
  static KV_HD int key_stride_of(const KvVoteAttention& a) { return stride(a.key_size * key_bits(a.cache_type) / 8); }
  static KV_HD int value_stride_of(const KvVoteAttention& a) {
    return stride(a.value_size * value_bits(a.cache_type) / 8);
  }
  static KV_HD int kinds(const KvVoteAttention& a) { return 4 + a.statistics; }
  static KV_HD size_t size(const KvVoteAttention& a) {
    return kBlock * (key_stride_of(a) + value_stride_of(a) + kinds(a) * sizeof(float));
  }
  KV_DEVICE Stage(char* stages, int at, const KvVoteAttention& a)
      : Slots{stages, at, key_stride_of(a), value_stride_of(a)}, statistics(a.statistics) {}
  KV_DEVICE char* key(int slot) const { return key_row(slot); }
  KV_DEVICE char* value(int slot) const { return value_row(slot); }
  KV_DEVICE float* key_scale() const { return score(statistics); }
  KV_DEVICE float* value_scale() const { return score(statistics + 1); }
};

KV_DEVICE const float* first_number(const Head<Quantized>& head, int kind) {
  const int scale = kind - 2 - head.a.statistics;
  if (scale >= 0) return scale == 0 ? head.key_scale() : head.value_scale();
  return first_number(static_cast<const Head<float>&>(head), kind);
}

// Within a phase: copies `count` contiguous rows of `bytes` bytes, in the largest units that divide a row. to: the
// first row in shared memory; place: the offset of thread t's first vector there; from: that vector in the cache.
template <class Kernel>
KV_DEVICE void copy_bytes(Block<Kernel>& block, char* to, int place, int stride, const char* from, int bytes, int count,
                          int t) {
  if (bytes % 16 == 0)
    copy_most<kBlock, 8, 4>(block, to + place, from, bytes / 16, count, t);
  else if (bytes % 4 == 0)
    copy_units<4>(block, to, stride, from - t * 16, bytes / 4, count, t);
  else
    copy_units<2>(block, to, stride, from - t * 16, bytes / 2, count, t);
}

// Returns the lowest power of two that is at least x, a positive number.
KV_DEVICE float power_above(float x) { return bits_as<float>((bits_as<uint32_t>(x) + 0x7fffff) & 0xff800000); }

// Splits two floats into 16-bit floats: high is the rounded number, low the rounded rest.
KV_DEVICE void split_pair(float first, float second, uint32_t* high, uint32_t* low) {
  *high = packed<Half>(first, second);
  const Half rounded[2] = {{static_cast<uint16_t>(*high)}, {static_cast<uint16_t>(*high >> 16)}};
  *low = packed<Half>(first - to_float(rounded[0]), second - to_float(rounded[1]));
}

// kKeyBits, kValueBits: bits of a number. kSize: elements of a row in registers, at least the cache's.
template <int kKeyBits, int kValueBits, int kSize>
struct DecodeQuantized : DecodeStep<DecodeQuantized<kKeyBits, kValueBits, kSize>, Quantized> {
  using Step = DecodeStep<DecodeQuantized<kKeyBits, kValueBits, kSize>, Quantized>;
  // Keys and values of different widths take more registers: with three blocks 8.6 would spill.
  static constexpr int kThreads = kDecodeThreads, kWarps = kDecodeWarps,
                       kBlocksPerMultiprocessor = kSize > 128 || kKeyBits != kValueBits ? 2 : 3;
  static constexpr int kRows = 16, kWarpHeads = kRows / kWarps, kSteps = kSize / 16;
  // A chunk is the 16 bytes that ldmatrix reads of a row. Per chunk: its columns; for keys the steps of 16 columns, one
  // product each; for values the tiles of 8 columns. A warp has every fourth chunk of values.
  static constexpr int kKeyColumns = 128 / kKeyBits, kKeySteps = kKeyColumns / 16;
  static constexpr int kValueColumns = 128 / kValueBits, kTiles = kValueColumns / 8,
                       kChunks = (kSize / kValueColumns + kWarps - 1) / kWarps;
  static_assert(kMaxGroup <= kRows && kBlock == 8 * kWarps, "a warp's product is 16 heads and 8 slots");
  static constexpr int kLogitStride = kBlock + 8, kWeightStride = kBlock + 8;
  static constexpr float kRoom = 16384.0f;  // the largest number that is split; 16-bit floats reach four times as much

  struct Registers : DecodeRegisters<kWarpHeads> {
    uint32_t query[2][kSteps][4], bytes[4], weight[2][2][4], b[kTiles][4];
    float score[2][4], product[kChunks][kTiles][4];
    float largest[2], factor[2];           // of the two queries whose elements this lane has
    float scale_max, unit, raise, shrink;  // of the values' scales: see update_unit
    Row row;                               // of the output
  };
  static KV_DEVICE int rows(int group) { return group; }

  struct Shared {
    float *logit, *factor, *bias;  // [heads, slots], [heads], [slots]
    Half* weight[2];               // [heads, slots]
    int* ends;                     // used_slots
    char* stages;
  };
  static KV_HD constexpr size_t fixed(int) {
    return kRows * (kLogitStride * sizeof(float) + 2 * kWeightStride * sizeof(Half) + sizeof(float)) +
           kBlock * sizeof(float) + 16;
  }
  static KV_HD constexpr size_t closing(int splits, int group) { return combine_size(splits, group); }

  static KV_DEVICE Shared divide(char* shared, int) {
    Shared s;
    s.logit = reinterpret_cast<float*>(shared);
    s.factor = s.logit + kRows * kLogitStride;
    s.bias = s.factor + kRows;
    s.weight[0] = reinterpret_cast<Half*>(s.bias + kBlock);
    s.weight[1] = s.weight[0] + kRows * kWeightStride;
    s.ends = reinterpret_cast<int*>(s.weight[1] + kRows * kWeightStride);
    s.stages = shared + fixed(0);
    return s;
  }

  // Within a phase: copies the rows of a block of slots, the new token's too.
  static KV_DEVICE void copy_keys_and_values(Block<DecodeQuantized>& block, const Head<Quantized>& head,
                                             const Stage<Quantized>& stage, const Registers& r, int, int, int count,
                                             int t) {
    const int values = kBlock * stage.key_stride;
    copy_bytes(block, stage.key(0), r.next.key_to, stage.key_stride, r.next.key, head.key_bytes(), count, t);
    copy_bytes(block, stage.value(0), r.next.value_to - values, stage.value_stride, r.next.value, head.value_bytes(),
               count, t);
  }

  // Loads queries into registers, as the product's rows, with columns in the order of widen_keys.
  static KV_DEVICE void load_queries(Block<DecodeQuantized>& block, const Head<Quantized>& head, const Shared&,
                                     int group) {
    const int size = head.a.key_size;
    const float* queries = head.query(0, 0);  // contiguous rows, since there is one token
    const auto element = [&](int t, int step, int i, int which) {
      const int row = t % kWarp / 4 + i % 2 * 8, chunk = step / kKeySteps;
      const int column = chunk * kKeyColumns + t % 4 * 4 * kKeySteps + step % kKeySteps * 4 + i / 2 * 2 + which;
      return row < group && column < size ? queries[row * size + column] : 0.0f;
    };
    block.each_alone([&](int t, Registers& r) {
      r.largest[0] = r.largest[1] = 0.0f;
#pragma unroll 1
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int i = 0; i < 8; ++i) r.largest[i % 2] = fmaxf(r.largest[i % 2], fabsf(element(t, step, i % 4, i / 4)));
    });
    block.template warp_max<4>([](Registers& r) -> float& { return r.largest[0]; });
    block.template warp_max<4>([](Registers& r) -> float& { return r.largest[1]; });
    block.each_alone([&](int t, Registers& r) {
      float raise[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Raises the largest element to about kRoom. Tiny, huge and NaN elements have no such factor: it is 1.
        const bool has_factor = r.largest[i] > 1e-30f && r.largest[i] < 1e30f;
        r.factor[i] = has_factor ? power_above(r.largest[i]) * (1.0f / kRoom) : 1.0f;
        raise[i] = 1.0f / r.factor[i];
      }
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i) {
        const int step = i / 4, j = i % 4;
        split_pair(element(t, step, j, 0) * raise[j % 2], element(t, step, j, 1) * raise[j % 2], &r.query[0][step][j],
                   &r.query[1][step][j]);
      }
#pragma unroll
      for (int i = 0; i < kChunks * kTiles * 4; ++i) r.product[i / 4 / kTiles][i / 4 % kTiles][i % 4] = 0.0f;
      r.unit = 7.888609e-31f;  // 2^-100, below the smallest scale that is not 0
    });
  }

  // Converts a word of a row, four or eight columns, to the operands of one or two products.
  static KV_DEVICE void widen_keys(uint32_t word, uint32_t (&b)[4]) {
    uint32_t numbers[2] = {word ^ kSigns, 0};
    if constexpr (kKeyBits == 4) numbers_of(word, numbers);
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step)
      b[2 * step] = halves_of(numbers[step], kFirstTwo), b[2 * step + 1] = halves_of(numbers[step], kLastTwo);
  }

  // Multiplies the keys with the queries of all heads; eight slots per warp.
  static KV_DEVICE void multiply_keys(Block<DecodeQuantized>& block, const KvVoteAttention& a,
                                      const Stage<Quantized>& stage, const Shared&, int count) {
    block.each_alone([&](int, Registers& r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) r.score[0][i] = r.score[1][i] = 0.0f;
    });
#pragma unroll
    for (int j = 0; j < kSize / (4 * kKeyColumns); ++j) {
      if (4 * j * kKeyColumns >= a.key_size) continue;
      load_matrices<false>(
          block,
          [&](int t) {
            // Columns beyond a row repeat its first chunk: finite numbers, which the query's zeros cancel.
            const int chunk = 4 * j + t % kWarp / 8;
            return stage.key(t / kWarp * 8 + t % 8) + (chunk * kKeyColumns < a.key_size ? chunk * 16 : 0);
          },
          [](Registers& r) { return r.bytes; });
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        block.each_alone([i](int, Registers& r) { widen_keys(r.bytes[i], r.b[0]); });
#pragma unroll
        for (int k = 0; k < 2 * kKeySteps; ++k) {
          const int step = (4 * j + i) * kKeySteps + k / 2;
          multiply<Half>(block, [k, step](Registers& r) {
            return Product{r.score[k % 2], r.query[k % 2][step], r.b[0] + k / 2 * 2};
          });
        }
      }
    }
    update_unit(block, stage, count);
  }

  // Within a phase: stores the logits of a warp's slots, without bias. A group of up to eight heads only uses a lane's
  // first two sums.
  static KV_DEVICE void store_logits(Registers& r, const KvVoteAttention& a, const Stage<Quantized>& stage,
                                     const Shared& s, int group, int, int t) {
    const int slot = t / kWarp * 8 + element_of_sum(t % kWarp, 0).column;
    const float first = stage.key_scale()[slot], second = stage.key_scale()[slot + 1];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1 && group <= kRows / 2) continue;
      const float scale = a.scale * r.factor[half], *x = r.score[0] + 2 * half, *y = r.score[1] + 2 * half;
      store_pair(s.logit + element_of_sum(t % kWarp, 2 * half).row * kLogitStride + slot, (x[0] + y[0]) * scale * first,
                 (x[1] + y[1]) * scale * second, a.softcap);
    }
  }

  static KV_DEVICE float logit(const Shared& s, int g, int slot) { return s.logit[g * kLogitStride + slot]; }
  static KV_DEVICE float sum_logit(const KvVoteAttention&, const Shared& s, int g, int slot) {
    return logit(s, g, slot);
  }
  static KV_DEVICE void store_weight(Registers& r, const Stage<Quantized>& stage, const Shared& s, int g, int slot,
                                     int count, float weight, float factor) {
    const float scaled = slot < count ? weight * stage.value_scale()[slot] * r.raise : 0.0f;
    Half& high = s.weight[0][g * kWeightStride + slot];
    assign(high, scaled);
    assign(s.weight[1][g * kWeightStride + slot], scaled - to_float(high));
    if (slot == 0) s.factor[g] = factor * r.shrink;
  }

  // Updates unit, a power of two that is at least every value_scale so far; raise, the factor from unit to kRoom; and
  // shrink, the factor from the old unit to the new one, which earlier products take.
  static KV_DEVICE void update_unit(Block<DecodeQuantized>& block, const Stage<Quantized>& stage, int count) {
    block.each_alone(
        [&](int t, Registers& r) { r.scale_max = t % kWarp < count ? stage.value_scale()[t % kWarp] : 0.0f; });
    block.warp_max([](Registers& r) -> float& { return r.scale_max; });
    block.each_alone([&](int, Registers& r) {
      const float before = r.unit;
      r.unit = power_above(fmaxf(r.unit, r.scale_max));
      r.raise = kRoom / r.unit, r.shrink = before / r.unit;
    });
  }

  // Converts words, each the same columns of two slots, to the operands of every tile.
  static KV_DEVICE void widen_values(const uint32_t (&word)[4], uint32_t (&b)[kTiles][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kValueBits == 8) {
        b[0][i] = halves_of(word[i] ^ kSigns, kEven), b[1][i] = halves_of(word[i] ^ kSigns, kOdd);
      } else {
        uint32_t numbers[2];  // one slot each
        numbers_of(word[i], numbers);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const uint32_t both = bytes_of(numbers[0], numbers[1], pair ? 0x7362 : 0x5140);
          b[2 * pair][i] = halves_of(both, kFirstTwo), b[2 * pair + 1][i] = halves_of(both, kLastTwo);
        }
      }
    }
  }
  // Returns the column of an element of a product: its chunk of the warp, tile, and column in the tile.
  static KV_DEVICE int column_of_sum(int t, int chunk, int tile, int place) {
    return (chunk * kWarps + t / kWarp) * kValueColumns + place * kTiles + tile;
  }

  // Adds weight * value to the products; every fourth chunk of a row per warp, 16 slots per product.
  static KV_DEVICE void multiply_values(Block<DecodeQuantized>& block, const KvVoteAttention& a,
                                        const Stage<Quantized>& stage, const Shared& s, int group, int) {
    const int chunks = (a.value_size + kValueColumns - 1) / kValueColumns;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      load_a(
          block, kWeightStride * sizeof(Half),
          [&](int) { return reinterpret_cast<const char*>(s.weight[i % 2] + i / 2 * 16); },
          [i](Registers& r) { return r.weight[i % 2][i / 2]; });
    block.each_alone([&](int t, Registers& r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half == 1 && group <= kRows / 2) continue;
        const float factor = s.factor[t % kWarp / 4 + 8 * half];
#pragma unroll
        for (int i = 0; i < kChunks * kTiles * 2; ++i)
          r.product[i / 2 / kTiles][i / 2 % kTiles][2 * half + i % 2] *= factor;
      }
    });
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk * kWarps >= chunks) continue;
      load_matrices<true>(
          block, [&](int t) { return stage.value(t % kWarp) + min_of(chunk * kWarps + t / kWarp, chunks - 1) * 16; },
          [](Registers& r) { return r.bytes; });
      block.each_alone([](int, Registers& r) { widen_values(r.bytes, r.b); });
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) {
        const int tile = i % kTiles, low = i / kTiles % 2, step = i / kTiles / 2;  // low: 0 for high, 1 for low
        multiply<Half>(block, [=](Registers& r) {
          return Product{r.product[chunk][tile], r.weight[low][step], r.b[tile] + 2 * step};
        });
      }
    }
  }

  static KV_DEVICE void store_output(Block<DecodeQuantized>& block, const Attention& args, const Shared&,
                                     size_t split) {
    const int group = args.group(), size = args.call.value_size;
    block.each([&](int t, Registers& r) {
#pragma unroll
      for (int i = 0; i < kChunks * kTiles * 4; ++i) {
        const Element of = element_of_sum(t % kWarp, i % 4);
        const int chunk = i / 4 / kTiles, tile = i / 4 % kTiles, column = column_of_sum(t, chunk, tile, of.column);
        if (of.row < group && column < size)
          args.partial_output[(split * group + of.row) * size + column] =
              r.product[chunk][tile][i % 4] * (r.unit * (1.0f / kRoom));
      }
    });
  }

  // By the last block of a head: rotates the output and writes it, a row per warp. The new token already has its slot.
  static KV_DEVICE void write_output(Block<DecodeQuantized>& block, const Attention& args, const Part& part,
                                     const Head<Quantized>& head, const float* share, int used, int) {
    const int group = args.group(), size = args.call.value_size;
    const float* const output = args.partial_output + static_cast<size_t>(part.start) * group * size;
    for (int first = 0; first < group; first += kWarps) {
      block.each_alone([&](int t, Registers& r) {
        const int g = first + t / kWarp;
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
          const int column = column_of(t % kWarp, i);
          float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
          if (g < group && column < size)
            Step::template add_outputs<4>(output + g * size + column, static_cast<size_t>(group) * size, share + g,
                                          group, part.splits, sum);
          for (int j = 0; j < 4; ++j) r.row.element[i + j] = sum[j];
        }
      });
      rotate_rows<8>(block, size, [](Registers& r, int i) -> float& { return r.row.element[i]; });
      block.each_alone([&](int t, Registers& r) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int g = first + t / kWarp, column = column_of(t % kWarp, i);
          if (g < group && column < size) head.store(g, 0, column, r.row.element[i]);
        }
      });
    }
    // All blocks of the head have read the votes: they came before this one.
    block.each([&](int t, auto&) {
      if (t == 0) head.votes()[used] = 1.0f;
    });
  }
};

}  // namespace cuda
}  // namespace kv
