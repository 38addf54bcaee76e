// plugins/cuda/core/mma.h over one warp, for test_mma_on_host.py: where elements lie, and a product through the functions
// that load its operands.
#include "../../plugins/cuda/core/mma.h"

using namespace kv::cuda;

extern "C" void element(int of, int lane, int i, int* row, int* column) {
  const Element at = of == 0 ? element_of_a(lane, i) : of == 1 ? element_of_b(lane, i) : element_of_sum(lane, i);
  *row = at.row, *column = at.column;
}

namespace {

template <class T>
struct Warps {
  static constexpr int kThreads = 64;
  struct Registers {
    uint32_t a[4], b[4];
    float sum[2][4];
  };
};

// Two warps compute out [16, 16] each: out = a [16, 16] times b, with the elements of `rows` as b's rows or its columns.
template <class T>
void product(const char* a, const char* b, int stride, int rows, float* out) {
  using Registers = typename Warps<T>::Registers;
  Block<Warps<T>> block(nullptr, 0);
  const auto corner = [&](const char* of) { return [=](int t) { return of + t / kWarp * 16 * stride; }; };
  load_a(block, stride, corner(a), [](Registers& r) { return r.a; });
  if (rows)
    load_b_rows(block, stride, corner(b), [](Registers& r) { return r.b; });
  else
    load_b(block, stride, corner(b), [](Registers& r) { return r.b; });
  block.each([](int, Registers& r) { memset(r.sum, 0, sizeof r.sum); });
  for (int half = 0; half < 2; ++half)
    multiply<T>(block, [&](Registers& r) { return Product{r.sum[half], r.a, r.b + 2 * half}; });
  block.each([&](int t, Registers& r) {
    for (int half = 0; half < 2; ++half)
      for (int i = 0; i < 4; ++i) {
        const Element at = element_of_sum(t % kWarp, i);
        out[t / kWarp * 256 + at.row * 16 + half * 8 + at.column] = r.sum[half][i];
      }
  });
}

}  // namespace

extern "C" void product_of(const char* a, const char* b, int stride, int rows, float* out) {
  product<Half>(a, b, stride, rows, out);
}

extern "C" uint32_t packed_of(float low, float high) { return packed<Half>(low, high); }
