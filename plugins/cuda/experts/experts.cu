// The entry points of Experts: check the call, divide the workspace, and for each range of tokens launch
//
//   Route                            with several tokens: rows in the order of experts, and tiles of them
//   ExpertsMma, or ExpertsProduct    the first product and the activation, then the second product
//   Combine                          the sum of a token's rows
//
// The number of blocks depends on the sizes of the call alone, so that a CUDA graph can replay it: blocks beyond the
// tiles that Route counted end at once.
#include <type_traits>

#include "../core/launch.h"
#include "combine.h"
#include "product_cores.h"
#include "product_mma.h"
#include "route.h"

namespace kv {
namespace cuda {
namespace {

constexpr int64_t kMostSize = int64_t(1) << 28;
constexpr int64_t kMostRows = 4096;  // of a range of tokens

const char* check(const KvWeight& weight, int64_t inputs) {
  if (!weight.bits) return nullptr;
  if (weight.bits != 4 && weight.bits != 8) return "a packed weight has neither 4 nor 8 bits";
  if (weight.group < 1 || inputs % weight.group) return "the inputs are no multiple of a weight's group";
  if (weight.bits == 4 && weight.group % 2) return "a group of 4-bit weights is odd";
  if (weight.zero && weight.minimum) return "a packed weight has both a zero point and a minimum";
  if (weight.table && (weight.bits != 4 || weight.is_signed || weight.zero || weight.minimum))
    return "a packed weight with a table has not unsigned integers of 4 bits alone";
  const auto known = [](int type) { return type == KV_FLOAT32 || type == KV_FLOAT16; };
  const bool scaled = known(weight.scale_type) || (weight.table && weight.scale_type == KV_EXPONENTS);
  if (!scaled || (weight.minimum && !known(weight.minimum_type)))
    return "the scale of a packed weight, or its minimum, is of a type that no kernel reads";
  return nullptr;
}

const char* check(const KvExperts& a) {
  const auto known = [](int type) { return type == KV_FLOAT32 || type == KV_FLOAT16 || type == KV_BFLOAT16; };
  if (!known(a.type) || !known(a.weights_type))
    return "the type of the input or of the experts' weights is neither float32, float16 nor bfloat16";
  if (a.tokens < 0 || a.chosen < 0 || a.hidden < 1 || a.inner < 1 || a.experts < 1)
    return "a dimension is zero or negative";
  for (const int64_t size : {a.tokens, a.chosen, a.hidden, a.inner, a.experts})
    if (size > kMostSize) return "a dimension is above 2^28";
  if (a.chosen > kMostRows) return "a token chooses more than 4096 experts";
  if (a.activation < KV_EXPERTS_SILU || a.activation > KV_EXPERTS_RELU_SQUARED) return "the activation is unknown";
  if (const char* problem = check(a.first, a.hidden)) return problem;
  return check(a.down, a.inner);
}

// Returns how many tokens are computed at a time.
int64_t range_of(const KvExperts& a) {
  const int64_t most = a.chosen > 1 ? kMostRows / a.chosen : kMostRows;
  return a.tokens < most ? a.tokens : most;
}

size_t most_tiles(const KvExperts& a, int64_t rows, int tile_rows) {
  return static_cast<size_t>(rows < a.experts ? rows : a.experts) + rows / tile_rows;
}

// Returns whether tensor cores can compute a product. A unit of inputs has to be in one group.
bool fits_tensor_cores(const KvExperts& a, const KvWeight& weight, int64_t inputs) {
  if (a.type == KV_FLOAT32 && (!weight.bits || a.float_input)) return false;
  const int64_t unit = weight.bits == 4 ? 32 : 16;
  return is_aligned(weight.data) && is_aligned(a.input) && !weight.minimum && inputs % unit == 0 &&
         (!weight.bits || weight.group % unit == 0);
}

// Returns the most rows of a tile: many if tensor cores compute both products, and experts have at least four rows
// each.
int tile_rows_of(const KvExperts& a) {
  const bool fits = fits_tensor_cores(a, a.first, a.hidden) && fits_tensor_cores(a, a.down, a.inner);
  return fits && a.tokens > 1 && a.tokens * a.chosen >= 4 * a.experts ? kTallRows : kFewRows;
}

// Divides the workspace among the arrays of a range of tokens; returns the bytes that it uses.
size_t plan(const KvExperts& a, void* workspace, ExpertsArgs* args) {
  Workspace space(workspace);
  const size_t rows = range_of(a) * a.chosen;
  *args = {};
  args->counter = space.take<int>(KV_CUDA_COUNTER_BYTES / sizeof(int));
  args->inner = space.take<float>(rows * a.inner), args->result = space.take<float>(rows * a.hidden);
  if (a.tokens <= 1) return space.size();
  args->begin = space.take<int>(a.experts), args->count = space.take<int>(a.experts);
  args->row_of = space.take<int>(rows), args->number = space.take<int>(rows);
  args->tile = space.take<Tile>(most_tiles(a, rows, kFewRows)), args->tiles = space.take<int>(1);
  return space.size();
}

// Returns whether every group and every row of a weight is whole vectors of kInputs numbers.
template <class W>
bool reads_vectors(const KvWeight& weight, int64_t inputs) {
  constexpr int kInputs = lane_inputs<W>();
  return is_aligned(weight.data) && inputs % kInputs == 0 && (!weight.bits || weight.group % kInputs == 0);
}

template <class W>
const char* run_weight(const ProductArgs& args, size_t tiles, const Device& device, Stream stream) {
  if (args.all.tile) {
    using Program = ExpertsProduct<W, kFewRows>;
    return launch<Program>(args, tiles * args.strips, Program::shared_size(), device, stream);
  }
  using Program = ExpertsProduct<W, 1>;
  return launch<Program>(args, tiles * args.strips, Program::shared_size(), device, stream);
}

template <class T>
const char* run_mma(ProductArgs args, size_t tiles, const Device& device, Stream stream) {
  const auto run = [&](auto* program) {
    using Program = std::remove_pointer_t<decltype(program)>;
    const int columns = args.gated() ? Program::kStrip / 2 : Program::kStrip;
    args.strips = (args.outputs() + columns - 1) / columns;
    return launch<Program>(args, tiles * args.strips, Program::shared_size(), device, stream);
  };
  const int bits = args.weight().bits;
  if (bits == 4) return run(static_cast<ExpertsMma<T, 4>*>(nullptr));
  return bits == 8 ? run(static_cast<ExpertsMma<T, 8>*>(nullptr)) : run(static_cast<ExpertsMma<T, 0>*>(nullptr));
}

const char* run_product(const ExpertsArgs& all, bool second, size_t tiles, const Device& device, Stream stream) {
  ProductArgs args{all, second, 0, false};
  if (all.tile_rows == kTallRows)
    return all.call.type == KV_FLOAT16 ? run_mma<Half>(args, tiles, device, stream)
                                       : run_mma<BFloat>(args, tiles, device, stream);
  const int columns = args.gated() ? 8 : 16;
  args.strips = (args.outputs() + columns - 1) / columns;
  const int64_t inputs = args.inputs();
  args.aligned = is_aligned(second ? all.inner : all.call.input) && inputs % 8 == 0;
  const KvWeight& weight = args.weight();
  if (weight.bits == 4 && reads_vectors<Packed<4, 32>>(weight, inputs))
    return run_weight<Packed<4, 32>>(args, tiles, device, stream);
  if (weight.bits == 4 && reads_vectors<Packed<4, 16>>(weight, inputs))
    return run_weight<Packed<4, 16>>(args, tiles, device, stream);
  if (weight.bits == 8 && reads_vectors<Packed<8, 16>>(weight, inputs))
    return run_weight<Packed<8, 16>>(args, tiles, device, stream);
  if (!weight.bits && all.call.type == KV_FLOAT32 && reads_vectors<float>(weight, inputs))
    return run_weight<float>(args, tiles, device, stream);
  if (!weight.bits && all.call.type == KV_FLOAT16 && reads_vectors<Half>(weight, inputs))
    return run_weight<Half>(args, tiles, device, stream);
  if (!weight.bits && all.call.type == KV_BFLOAT16 && reads_vectors<BFloat>(weight, inputs))
    return run_weight<BFloat>(args, tiles, device, stream);
  return run_weight<Any>(args, tiles, device, stream);
}

// Computes a range of tokens.
const char* run(const ExpertsArgs& args, const Device& device, Stream stream) {
  const KvExperts& a = args.call;
  const size_t tiles = args.tile ? most_tiles(a, args.rows, args.tile_rows) : static_cast<size_t>(args.rows);
  if (args.tile && args.rows > 0)
    if (const char* problem = launch<Route>(args, a.experts, Route::shared_size(), device, stream)) return problem;
  if (const char* problem = run_product(args, false, tiles, device, stream)) return problem;
  if (const char* problem = run_product(args, true, tiles, device, stream)) return problem;
  const CombineArgs sums{args, static_cast<int>((a.hidden + Combine::kColumns - 1) / Combine::kColumns)};
  return launch<Combine>(sums, static_cast<size_t>(a.tokens) * sums.strips, Combine::shared_size(a), device, stream);
}

// Returns the call for `count` tokens from `first` on.
KvExperts tokens_of(const KvExperts& a, int64_t first, int64_t count) {
  const auto bytes = [](int type) { return type == KV_FLOAT32 ? 4 : 2; };
  KvExperts some = a;
  some.tokens = count;
  some.input = static_cast<const char*>(a.input) + first * a.hidden * bytes(a.type);
  some.indices = a.indices + first * a.chosen;
  some.weights = static_cast<const char*>(a.weights) + first * a.chosen * bytes(a.weights_type);
  some.output = static_cast<char*>(a.output) + first * a.hidden * bytes(a.type);
  return some;
}

}  // namespace
}  // namespace cuda
}  // namespace kv

extern "C" const char* kv_cuda_experts_workspace(const KvExperts* call, size_t* bytes) {
  using namespace kv::cuda;
  ExpertsArgs args;
  if (const char* problem = check(*call)) return problem;
  *bytes = plan(*call, nullptr, &args);
  return nullptr;
}

extern "C" const char* kv_cuda_experts(const KvExperts* call, const KvCuda* where) {
  using namespace kv::cuda;
  Device device;
  ExpertsArgs args;
  if (const char* problem = check(*call)) return problem;
  if (call->tokens == 0) return nullptr;
  if (const char* problem = this_device(&device, where->begin)) return problem;
  if (const char* problem = check_workspace(*where, plan(*call, where->workspace, &args))) return problem;
  if (where->counters) args.counter = static_cast<int*>(where->counters);
  args.tile_rows = tile_rows_of(*call);
  const int64_t range = range_of(*call);
  for (int64_t first = 0; first < call->tokens; first += range) {
    const int64_t left = call->tokens - first;
    args.call = tokens_of(*call, first, left < range ? left : range);
    args.rows = static_cast<int>(args.call.tokens * args.call.chosen);
    if (const char* problem = run(args, device, static_cast<Stream>(where->stream))) return problem;
  }
  return nullptr;
}
