// Helpers of the fuzz: random numbers, guarded buffers, caches, and task runners.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../cpu/kvexport_cpu.h"
#include "../cpu/linear/adapters.h"

namespace fuzz {

#if defined(__aarch64__)
using half = __fp16;  // GCC before 13 has no _Float16 there
#else
using half = _Float16;
#endif

constexpr double kNothing = -1e30;  // the score of a log_ema without observations

struct Failure {
  std::string what;
};

inline uint64_t kernel_calls = 0;  // calls of kernels in all cases

inline void check(bool condition, const char* what) {
  if (!condition) throw Failure{what};
}

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int between(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }
  bool one_in(int n) { return between(1, n) == 1; }
  float uniform(float low, float high) { return std::uniform_real_distribution<float>(low, high)(engine_); }
  float normal() { return normal_(engine_); }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<int>(values.size()) - 1)];
  }
  template <class T>
  void shuffle(std::vector<T>& values) {
    std::shuffle(values.begin(), values.end(), engine_);
  }
  uint64_t bits() { return engine_(); }

 private:
  std::mt19937_64 engine_;
  std::normal_distribution<float> normal_;
};

// The most numbers of a tensor that are drawn one by one: to draw all numbers would take two thirds of the fuzz's time.
constexpr size_t kFew = 16384;

// Normal numbers. Many come from a table, in its order from a random place on. Its size is a prime, so that no two rows
// of a tensor have the same numbers.
class Normals {
 public:
  // count: how many will be taken.
  Normals(Random& random, size_t count)
      : random_(random), table_(count > kFew ? table() : nullptr), at_(table_ ? random.bits() % kSize : 0) {}
  float operator()() {
    if (!table_) return random_.normal();
    if (at_ == kSize) at_ = 0;
    return table_[at_++];
  }

 private:
  static constexpr size_t kSize = 65521;
  static const float* table() {
    static const std::vector<float> numbers = [] {
      Random random(0);
      std::vector<float> drawn(kSize);
      for (float& x : drawn) x = random.normal();
      return drawn;
    }();
    return numbers.data();
  }
  Random& random_;
  const float* table_;
  size_t at_;
};

// The share of the usual work that a case may take. The usual most is what a sanitizer runs in about a second; with a
// small share, more cases run in the same time.
inline double work_share = 1.0;

// Elements between canaries, aligned only to their own size, NaN until they are written. Under AddressSanitizer the
// block ends with the data, so that it also reports a read beyond the data.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Random& random, size_t count, size_t element)
      : before_(kGuard + element * random.between(0, 15)),
        size_(count * element),
        bytes_(before_ + size_ + kAfter, kCanary) {
    memset(data<void>(), 0xff, size_);
  }
  template <class T>
  T* data() {
    return reinterpret_cast<T*>(bytes_.data() + before_);
  }
  template <class T>
  const T* data() const {
    return reinterpret_cast<const T*>(bytes_.data() + before_);
  }
  size_t size() const { return size_; }
  bool same(const Buffer& other) const {
    return size_ == other.size_ && (size_ == 0 || memcmp(data<void>(), other.data<void>(), size_) == 0);
  }
  void check_canaries() const {
    const auto is_canary = [](unsigned char x) { return x == kCanary; };
    check(std::all_of(bytes_.begin(), bytes_.begin() + before_, is_canary) &&
              std::all_of(bytes_.begin() + before_ + size_, bytes_.end(), is_canary),
          "wrote outside a buffer");
  }

 private:
  static constexpr size_t kGuard = 64;
#if defined(KV_ADDRESS_SANITIZER)
  static constexpr size_t kAfter = 0;
#else
  static constexpr size_t kAfter = kGuard;
#endif
  static constexpr unsigned char kCanary = 0xa5;
  size_t before_ = 0, size_ = 0;
  std::vector<unsigned char> bytes_;
};

// The tensors of a cache; only a quantized cache has scales.
enum Tensor { kKey, kValue, kVotes, kScore, kPosition, kKeyScale, kValueScale, kTensors };
constexpr unsigned kAllInPlace = (1u << kTensors) - 1;

inline std::string text_of(const std::vector<int>& numbers) {
  std::string text;
  for (const int number : numbers) text += " " + std::to_string(number);
  return text;
}

// type: the type of queries, and of a cache that is not quantized. quantized_type: the type of a quantized cache.
// largest: the most slots of a KV head. in_key: whether values are the first numbers of their keys, and not stored. A
// row is a KV head of a sequence, b H + h.
struct Shape {
  int type, batch, heads, largest, key_size, value_size, statistics;
  bool quantized = false;
  int quantized_type = KV_INT8;
  bool in_key = false;
  std::vector<int> capacities{};  // [H]
  int cache_type() const { return quantized ? quantized_type : type; }
  bool is_int4(int tensor) const {
    return quantized && (tensor == kKey     ? quantized_type == KV_INT4
                         : tensor == kValue ? quantized_type != KV_INT8
                                            : false);
  }
  const char* name() const {
    if (!quantized) return type ? "fp16" : "fp32";
    return quantized_type == KV_INT8 ? "int8" : quantized_type == KV_INT4 ? "int4" : "k8v4";
  }
  size_t element() const { return type == KV_FLOAT16 ? 2 : 4; }
  size_t rows() const { return static_cast<size_t>(batch) * heads; }
  int capacity(size_t row) const { return capacities[row % heads]; }
  int slots() const { return std::accumulate(capacities.begin(), capacities.end(), 0); }
  // Return the place of a row's slot in a tensor [B,S], and of its statistic k in [B,K,S].
  size_t slot(size_t row, int c) const { return row / heads * slots() + before(row) + c; }
  size_t score(size_t row, int k, int c) const { return (row / heads * statistics + k) * slots() + before(row) + c; }

 private:
  int before(size_t row) const { return std::accumulate(capacities.begin(), capacities.begin() + row % heads, 0); }
};

// Read and write an element of a buffer of the query's type.
inline float read(const Shape& shape, const void* data, size_t i) {
  return shape.type == KV_FLOAT16 ? static_cast<float>(static_cast<const half*>(data)[i])
                                  : static_cast<const float*>(data)[i];
}
inline void write(const Shape& shape, void* data, size_t i, float x) {
  if (shape.type == KV_FLOAT16)
    static_cast<half*>(data)[i] = static_cast<half>(x);
  else
    static_cast<float*>(data)[i] = x;
}

constexpr int kInt4[16] = {KV_INT4_NUMBERS};

// Read and write an element of a cache's keys or values; in a quantized cache the number, without its scale.
inline float read_stored(const Shape& shape, int tensor, const void* data, size_t i) {
  if (shape.is_int4(tensor)) return kInt4[static_cast<const uint8_t*>(data)[i / 2] >> 4 * (i % 2) & 15];
  return shape.quantized ? static_cast<const int8_t*>(data)[i] : read(shape, data, i);
}
inline void write_stored(const Shape& shape, int tensor, void* data, size_t i, float x) {
  if (shape.is_int4(tensor)) {
    uint8_t& two = static_cast<uint8_t*>(data)[i / 2];
    const int code = static_cast<int>(std::fabs(x) < 3.0f ? 2.5f * x : 8.0f) & 15;
    two = static_cast<uint8_t>(i % 2 ? (two & 15) | code << 4 : (two & 240) | code);
  } else if (shape.quantized)
    static_cast<int8_t*>(data)[i] = static_cast<int8_t>(std::fabs(x) < 3.0f ? 42.0f * x : 127.0f);
  else
    write(shape, data, i, x);
}

// A cache. Slot c of row `row` is at shape.slot(row, c) in every tensor but the scores.
struct Cache {
  Shape shape;
  std::array<Buffer, kTensors> tensor;

  Cache(Random& random, const Shape& shape) : shape(shape) {
    const size_t slots = static_cast<size_t>(shape.batch) * shape.slots();
    for (int i = 0; i < kTensors; ++i) tensor[i] = Buffer(random, slots * width(i), element(i));
  }
  size_t element(int i) const { return i != kKey && i != kValue ? 4 : shape.quantized ? 1 : shape.element(); }
  // Returns the elements of a slot.
  size_t width(int i) const {
    if (i == kKeyScale || i == kValueScale) return shape.quantized;
    const size_t size = i == kKey     ? shape.key_size
                        : i == kValue ? (shape.in_key ? 0 : shape.value_size)
                        : i == kScore ? shape.statistics
                                      : 1;
    return shape.is_int4(i) ? size / 2 : size;
  }
  // Returns the bytes of a row's slot in tensor i, or of its statistic k, and how many they are.
  const unsigned char* at(int i, int k, size_t row, int c, size_t* bytes) const {
    *bytes = (i == kScore ? 1 : width(i)) * element(i);
    return tensor[i].data<unsigned char>() + (i == kScore ? shape.score(row, k, c) : shape.slot(row, c)) * *bytes;
  }
  KvState view() {
    return {tensor[kKey].data<void>(), tensor[kValue].data<void>(), tensor[kVotes].data<float>(),
            tensor[kScore].data<float>(), tensor[kPosition].data<int32_t>()};
  }
  KvScales scales() {
    return shape.quantized ? KvScales{tensor[kKeyScale].data<float>(), tensor[kValueScale].data<float>()} : KvScales{};
  }
  // Returns the scale of a row, 1 if the cache has no scales.
  float scale(int i, size_t row, int slot) const {
    return shape.quantized ? tensor[i].data<float>()[shape.slot(row, slot)] : 1.0f;
  }
  float votes(size_t row, int slot) const { return tensor[kVotes].data<float>()[shape.slot(row, slot)]; }
  int32_t position(size_t row, int slot) const { return tensor[kPosition].data<int32_t>()[shape.slot(row, slot)]; }
  float score(size_t row, int k, int slot) const { return tensor[kScore].data<float>()[shape.score(row, k, slot)]; }
  float key(size_t row, int slot, int i) const {
    return scale(kKeyScale, row, slot) *
           read_stored(shape, kKey, tensor[kKey].data<void>(), shape.slot(row, slot) * shape.key_size + i);
  }
  float value(size_t row, int slot, int i) const {
    if (shape.in_key) return key(row, slot, i);
    return scale(kValueScale, row, slot) *
           read_stored(shape, kValue, tensor[kValue].data<void>(), shape.slot(row, slot) * shape.value_size + i);
  }
  int used(size_t row) const {
    int n = 0;
    while (n < shape.capacity(row) && votes(row, n) > 0.0f) ++n;
    return n;
  }
  // Returns whether slot `a` has the same bits as slot `b` of `other`.
  bool same_slot(size_t row, int a, const Cache& other, int b) const {
    for (int i = 0; i < kTensors; ++i)
      for (int k = 0; k < (i == kScore ? shape.statistics : 1); ++k) {
        size_t bytes;
        const unsigned char *x = at(i, k, row, a, &bytes), *y = other.at(i, k, row, b, &bytes);
        if (memcmp(x, y, bytes)) return false;
      }
    return true;
  }
  bool same(const Cache& other) const {
    for (int i = 0; i < kTensors; ++i)
      if (!tensor[i].same(other.tensor[i])) return false;
    return true;
  }
  void check_canaries() const {
    for (const Buffer& buffer : tensor) buffer.check_canaries();
  }
};

// Fills a head with `used` slots in any order, at distinct positions; the other slots are NaN and rubbish. Returns a
// position above all of them.
inline int fill_head(Random& random, Cache& cache, size_t row, int used, const std::vector<int>& kinds,
                     bool fractional) {
  const Shape& s = cache.shape;
  std::vector<int32_t> positions;
  Normals normal(random, static_cast<size_t>(used) * (s.key_size + s.value_size));
  int next = random.one_in(3) ? 0 : random.between(0, 5000);
  for (int i = 0; i < used; ++i) positions.push_back(next), next += random.one_in(4) ? random.between(1, 9) : 1;
  if (!random.one_in(3)) random.shuffle(positions);
  const KvState view = cache.view();
  for (int c = 0; c < s.capacity(row); ++c) {
    const bool is_used = c < used;
    const size_t slot = s.slot(row, c);
    view.votes[slot] = !is_used ? 0.0f : fractional && random.one_in(2) ? std::exp(random.normal()) : 1.0f;
    view.position[slot] = is_used ? positions[c] : random.between(0, 1 << 30);
    if (!is_used) continue;
    for (int i = 0; i < s.key_size; ++i) write_stored(s, kKey, view.key, slot * s.key_size + i, normal());
    for (int i = 0; i < s.value_size && !s.in_key; ++i)
      write_stored(s, kValue, view.value, slot * s.value_size + i, normal());
    if (s.quantized)
      for (float* scale : {cache.scales().key, cache.scales().value})
        scale[slot] = random.one_in(20) ? 0.0f : random.uniform(0.01f, 0.03f);
    for (int k = 0; k < s.statistics; ++k)
      view.score[s.score(row, k, c)] = kinds[k] == KV_STATISTIC_LOG_EMA ? 5.0f * random.normal()
                                       : kinds[k] == KV_STATISTIC_NONE  ? 0.0f
                                                                        : std::exp(2.0f * random.normal());
  }
  return next;
}

// ---- task runners ----

inline void forwards(void*, size_t count, KvTask task, void* data) {
  for (size_t i = 0; i < count; ++i) task(data, i);
}
inline void backwards(void*, size_t count, KvTask task, void* data) {
  for (size_t i = count; i-- > 0;) task(data, i);
}
inline void threaded(void* threads, size_t count, KvTask task, void* data) {
  std::atomic<size_t> next{0};
  std::vector<std::thread> pool;
  for (int t = 0; t < *static_cast<int*>(threads); ++t)
    pool.emplace_back([&] {
      for (size_t i; (i = next.fetch_add(1)) < count;) task(data, i);
    });
  for (std::thread& thread : pool) thread.join();
}

// ---- draws ----

inline int any_size(Random& random) {
  return random.one_in(2) ? random.one_of({8, 16, 64, 80, 96, 128}) : random.between(1, 256);
}

inline int any_capacity(Random& random, int at_least) {
  return at_least + (random.one_in(12)  ? random.between(1000, 5000)
                     : random.one_in(4) ? random.between(0, 20)
                                        : random.between(0, 300));
}

inline Shape any_shape(Random& random, int at_least) {
  Shape s{};
  s.type = random.one_of({KV_FLOAT32, KV_FLOAT16});
  s.batch = random.between(random.one_in(10) ? 0 : 1, 4);
  s.heads = random.between(1, 4);
  s.largest = any_capacity(random, at_least);
  s.key_size = any_size(random);
  s.value_size = random.one_in(3) ? any_size(random) : s.key_size;
  s.quantized = random.one_in(3);
  s.quantized_type = random.one_of({KV_INT8, KV_INT4, KV_K8V4});
  if (s.is_int4(kKey)) s.key_size += s.key_size % 2;
  if (s.is_int4(kValue)) s.value_size += s.value_size % 2;
  return s;
}

// Draws the slots of each KV head: equal ones, or for one head the most and for the others any number from `at_least`.
inline void draw_capacities(Random& random, int at_least, Shape& s) {
  s.capacities.assign(s.heads, s.largest);
  if (random.one_in(2)) return;
  for (int& capacity : s.capacities) capacity = random.between(at_least, s.largest);
  s.capacities[random.between(0, s.heads - 1)] = s.largest;
}

// Returns whether a case with values that are the first numbers of their keys may have this shape. Without a draw, so
// that a seed gives the case that it gave before.
inline bool may_be_in_key(const Shape& s) { return !s.quantized && s.value_size <= s.key_size && s.largest % 4 == 1; }

inline KvRunner any_runner(Random& random, int* threads) {
  *threads = random.between(2, 4);
  return {random.one_of<KvParallelFor>({backwards, threaded, threaded}), threads};
}

// Runs `call` on `past` and returns the present cache. Tensor i is updated in place if bit i of `in_place` is set.
// Checks that tensors that are only read do not change.
template <class Arguments, class Kernel>
Cache run(Random& random, Arguments call, const Cache& past, unsigned in_place, KvRunner runner, Kernel kernel) {
  Cache read = past, present(random, past.shape);
  for (Buffer& buffer : present.tensor) memset(buffer.data<void>(), 0x7f, buffer.size());  // not the rubbish of `past`
  for (int i = 0; i < kTensors; ++i)
    if (in_place >> i & 1) present.tensor[i] = past.tensor[i];
  call.past = read.view();
  call.present = present.view();
  call.past_scales = read.scales(), call.present_scales = present.scales();
  if (in_place >> kKeyScale & 1) call.past_scales.key = call.present_scales.key;
  if (in_place >> kValueScale & 1) call.past_scales.value = call.present_scales.value;
  if (in_place & 1) call.past.key = call.present.key;
  if (in_place & 2) call.past.value = call.present.value;
  if (in_place & 4) call.past.votes = call.present.votes;
  if (in_place & 8) call.past.score = call.present.score;
  if (in_place & 16) call.past.position = call.present.position;
  ++kernel_calls;
  const char* problem = kernel(&call, runner);
  check(!problem, problem ? problem : "");
  check(read.same(past), "wrote into what it should only read");
  read.check_canaries();
  present.check_canaries();
  return present;
}

}  // namespace fuzz
