// The entry points of Linear: check the call, divide the workspace, launch the kernels of each product.
//
//   check the call; if the workspace is too small: refuse
//   with a norm, and rows that are too many or too long for every block to compute the norm: LinearRows, and from here
//   on a call without a norm
//   the products that fit tensor cores, by the bits of their weights: LinearMma; the others: LinearCores
#include <type_traits>

#include "../core/launch.h"
#include "cores.h"
#include "linear_mma.h"

namespace kv {
namespace cuda {
namespace {

constexpr int64_t kMostSize = int64_t(1) << 28;
constexpr int kFewRows = 8, kSomeRows = 32;  // the most rows of a call whose panels have 8 rows, or 32
// The most bytes of several rows that every block reads for their norm. 528 blocks read 8 MB from the L2 cache in
// the time that a launch takes.
constexpr int64_t kOwnBytes = 16384;
enum { kOnCores = -1 };  // the path of a product: kOnCores, or on tensor cores the bits of its weights

const char* check(const KvWeight& weight, int64_t inputs) {
  if (!weight.bits) return nullptr;
  if (weight.bits != 4 && weight.bits != 8) return "a packed weight has neither 4 nor 8 bits";
  if (weight.group < 1 || inputs % weight.group) return "the inputs are no multiple of a weight's group";
  if (weight.bits == 4 && weight.group % 2) return "a group of 4-bit weights is odd";
  if (weight.table) return "there is no kernel for a packed weight with a table of numbers";
  if (weight.zero && weight.minimum) return "a packed weight has both a zero point and a minimum";
  const auto known = [](int type) { return type == KV_FLOAT32 || type == KV_FLOAT16; };
  if (!known(weight.scale_type) || (weight.minimum && !known(weight.minimum_type)))
    return "the scale of a packed weight, or its minimum, is neither float32 nor float16";
  return nullptr;
}

const char* check(const KvLinear& a) {
  if (a.type != KV_FLOAT32 && a.type != KV_FLOAT16 && a.type != KV_BFLOAT16)
    return "the type of the input is neither float32, float16 nor bfloat16";
  if (a.batch < 0 || a.tokens < 0 || a.inputs < 1) return "a dimension is zero or negative";
  if (a.batch > kMostSize || a.tokens > kMostSize || a.batch * a.tokens > kMostSize || a.inputs > kMostSize)
    return "there are more than 2^28 rows or inputs";
  if (a.input_heads < 1 || a.inputs % a.input_heads) return "the inputs are no multiple of their heads";
  if (a.count < 1 || a.count > KV_MAX_PRODUCTS) return "there are no products, or more than 3";
  if ((is_gated(a) || a.residual) && a.count > 1) return "a gate or a residual goes with one product, not several";
  for (const KvProduct* p = a.products; p < a.products + a.count; ++p) {
    if (p->outputs < 1) return "a dimension is zero or negative";
    if (p->outputs > kMostSize) return "there are more than 2^28 outputs";
    if (const char* problem = check(p->weight, a.inputs)) return problem;
    if (p->heads < 1 || p->outputs % p->heads) return "the outputs are no multiple of their heads";
    if (p->rotated && 2 * a.planes != p->outputs / p->heads) return "cosine and sine are not of half a head's size";
    if (p->rotated && is_gated(a)) return "a product that has a gate is not rotated";
  }
  return check(a.gate, a.inputs);
}

int path_of(const KvLinear& a, const KvProduct& p) {
  for (const void* pointer : {a.input, a.norm, p.weight.data, a.gate.data})
    if (!is_aligned(pointer)) return kOnCores;
  return fits_tensor_cores(a, p) ? p.weight.bits : kOnCores;
}

// Returns whether a launch computes the rows after the norm, instead of every block those of its panel.
bool launches_rows(const KvLinear& a) {
  const int64_t rows = a.batch * a.tokens, element = a.type == KV_FLOAT32 ? 4 : 2;
  return a.norm && rows > 1 && (rows > kFewRows || rows * a.inputs * element > kOwnBytes);
}

// Returns whether every head of the input is a whole number of vectors of 16 bytes; these and the norm aligned.
bool has_whole_vectors(const KvLinear& a) {
  const int64_t lanes = a.type == KV_FLOAT32 ? 4 : 8, heads = a.tokens == 1 ? 1 : a.input_heads;
  return is_aligned(a.input) && is_aligned(a.norm) && a.inputs / heads % lanes == 0;
}

bool has_minima(const KvLinear& a) {
  for (int i = 0; i < a.count; ++i)
    if (a.products[i].weight.minimum) return true;
  return false;
}

// Selects the products of one path, and sets the fields of `args` that depend on them; returns whether there are any.
template <class Program>
bool choose(const KvLinear& a, int path, LinearArgs* args) {
  args->call = a, args->call.count = 0;
  for (int i = 0; i < a.count; ++i)
    if (path_of(a, a.products[i]) == path) args->call.products[args->call.count++] = a.products[i];
  args->panels = (args->rows() + Program::kRows - 1) / Program::kRows;
  return args->call.count > 0;
}

// Return how many blocks of the program the device runs at a time, and the most that any device with as many
// multiprocessors can run. A product is split into at most twice as many blocks, which bounds its partial sums.
template <class Program>
size_t places_of(const Device& device) {
  return static_cast<size_t>(blocks_held<Program>(Program::shared_size(), device)) * device.multiprocessors;
}
template <class Program>
size_t most_places_of(const Device& device) {
  return size_t{Program::kBlocksPerMultiprocessor} * device.multiprocessors;
}

template <class Program>
int splits_of(size_t blocks, int chunks, const Device& device) {
  const size_t places = places_of<Program>(device), most = 2 * places / blocks;
  if (most < 2 || blocks > KV_CUDA_COUNTER_BYTES / sizeof(int)) return 1;
  const size_t splits = shares_of(blocks, chunks, places);
  return static_cast<int>(splits < most ? splits : most);
}

template <class Program>
size_t strips_of(const KvLinear& a, LinearArgs* args) {
  size_t all = 0;
  for (int i = 0; i < a.count; ++i) {
    constexpr int64_t kTiles = Program::kColumns / kTileColumns;
    args->strips[i] = static_cast<int>((tiles_of(a, a.products[i]) + kTiles - 1) / kTiles);
    all += args->strips[i];
  }
  return all;
}

// Returns the most partial sums (floats) that any selection of the products has.
template <class Program>
size_t partial_of(const KvLinear& a, const Device& device) {
  LinearArgs args;
  const size_t rows = a.batch * a.tokens,
               blocks = strips_of<Program>(a, &args) * ((rows + Program::kRows - 1) / Program::kRows);
  const size_t all = blocks * Program::chunks(a), most = 2 * most_places_of<Program>(device);
  return (all < most ? all : most) * Program::kRows * Program::kColumns;
}

template <class T>
size_t partial_of_type(const KvLinear& a, const Device& device) {
  using Tensor = std::conditional_t<sizeof(T) == 4, BFloat, T>;
  const bool few = a.batch * a.tokens <= kFewRows;
  size_t most = few ? partial_of<LinearCores<T, 8>>(a, device) : partial_of<LinearCores<T, 64>>(a, device);
  const auto include = [&](size_t sums) { most = sums > most ? sums : most; };
  // Weights of 16 bits have the most chunks.
  include(few                               ? partial_of<LinearMma<Tensor, 0, 1>>(a, device)
          : a.batch * a.tokens <= kSomeRows ? partial_of<LinearMma<Tensor, 0, 4>>(a, device)
                                            : partial_of<LinearMma<Tensor, 0, 8>>(a, device));
  return most;
}

// Divides the workspace among the arrays of a call; returns the bytes that it uses, which do not depend on the
// addresses of tensors.
size_t plan(const KvLinear& a, const Device& device, void* workspace, LinearArgs* args) {
  Workspace space(workspace);
  *args = {};
  args->counters = space.take<int>(KV_CUDA_COUNTER_BYTES / sizeof(int));
  args->whole_vectors = has_whole_vectors(a);
  if (launches_rows(a)) args->normed = space.take<char>(a.batch * a.tokens * a.inputs * (a.type == KV_FLOAT32 ? 4 : 2));
  args->partial = space.take<float>(a.type == KV_FLOAT32   ? partial_of_type<float>(a, device)
                                    : a.type == KV_FLOAT16 ? partial_of_type<Half>(a, device)
                                                           : partial_of_type<BFloat>(a, device));
  return space.size();
}

template <class Program>
const char* run_products(const KvLinear& a, int path, LinearArgs args, const Device& device, Stream stream) {
  if (!choose<Program>(a, path, &args)) return nullptr;
  const size_t blocks = strips_of<Program>(args.call, &args) * args.panels;
  args.splits = splits_of<Program>(blocks, Program::chunks(a), device);
  return launch<Program>(args, blocks * args.splits, Program::shared_size(), device, stream);
}

template <class T, int kBits>
const char* run_mma(const KvLinear& a, const LinearArgs& args, const Device& device, Stream stream) {
  const int64_t rows = a.batch * a.tokens;
  if (rows <= kFewRows) return run_products<LinearMma<T, kBits, 1>>(a, kBits, args, device, stream);
  if (rows <= kSomeRows || has_minima(a)) return run_products<LinearMma<T, kBits, 4>>(a, kBits, args, device, stream);
  return run_products<LinearMma<T, kBits, 8>>(a, kBits, args, device, stream);
}

template <class T>
const char* run_type(KvLinear a, LinearArgs args, const Device& device, Stream stream) {
  using Tensor = std::conditional_t<sizeof(T) == 4, BFloat, T>;
  const bool few = a.batch * a.tokens <= kFewRows;
  if (launches_rows(a)) {
    using Rows = LinearRows<T>;
    args.call = a;
    const size_t each = Rows::rows(a), blocks = (args.rows() + each - 1) / each;
    if (const char* problem = launch<Rows>(args, blocks, Rows::shared_size(), device, stream)) return problem;
    a.input = args.normed, a.input_heads = 1, a.norm = nullptr;
  }
  if (const char* problem = run_mma<Tensor, 8>(a, args, device, stream)) return problem;
  if (const char* problem = run_mma<Tensor, 4>(a, args, device, stream)) return problem;
  if constexpr (sizeof(T) == 2)
    if (const char* problem = run_mma<Tensor, 0>(a, args, device, stream)) return problem;
  if (few) return run_products<LinearCores<T, 8>>(a, kOnCores, args, device, stream);
  return run_products<LinearCores<T, 64>>(a, kOnCores, args, device, stream);
}

const char* run(const KvLinear& a, const LinearArgs& args, const Device& device, Stream stream) {
  if (a.type == KV_FLOAT32) return run_type<float>(a, args, device, stream);
  return a.type == KV_FLOAT16 ? run_type<Half>(a, args, device, stream) : run_type<BFloat>(a, args, device, stream);
}

}  // namespace
}  // namespace cuda
}  // namespace kv

extern "C" const char* kv_cuda_linear_workspace(const KvLinear* call, size_t* bytes) {
  using namespace kv::cuda;
  LinearArgs args;
  if (const char* problem = check(*call)) return problem;
  *bytes = plan(*call, largest_device(), nullptr, &args);
  return nullptr;
}

extern "C" const char* kv_cuda_linear_problem(const KvLinear* call) {
  using namespace kv::cuda;
  Device device;
  LinearArgs args;
  if (const char* problem = check(*call)) return problem;
  if (call->batch * call->tokens == 0 || this_device(&device)) return nullptr;
  device.runs = false;
  plan(*call, device, nullptr, &args);
  return run(*call, args, device, nullptr);
}

extern "C" const char* kv_cuda_linear(const KvLinear* call, const KvCuda* where) {
  using namespace kv::cuda;
  const KvLinear& a = *call;
  Device device;
  LinearArgs args;
  if (const char* problem = check(a)) return problem;
  if (a.batch * a.tokens == 0) return nullptr;
  if (const char* problem = this_device(&device, where->begin)) return problem;
  if (const char* problem = check_workspace(*where, plan(a, device, where->workspace, &args))) return problem;
  args.weights_stay = where->begin == KV_CUDA_EARLY_WEIGHTS;
  if (where->counters) args.counters = static_cast<int*>(where->counters);
  return run(a, args, device, static_cast<Stream>(where->stream));
}
