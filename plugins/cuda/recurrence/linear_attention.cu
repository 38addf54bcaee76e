// The entry points of LinearAttention (recurrence.h).
#include "../core/launch.h"
#include "recurrence.h"

namespace kv {
namespace cuda {
namespace {

constexpr int kMostKeys = 256;
constexpr int64_t kMostTokens = int64_t(1) << 30;

const char* check(const KvLinearAttention& a) {
  if (a.batch < 0 || a.tokens < 0 || a.heads < 1 || a.key_size < 1 || a.value_size < 1)
    return "a dimension is zero or negative";
  if (a.batch > kMostTokens || a.tokens > kMostTokens) return "there are more than 2^30 sequences or tokens";
  if (a.key_heads < 1 || a.heads % a.key_heads) return "the heads are not a multiple of the key heads";
  if (a.key_size > kMostKeys) return "a head has keys of more than 256 numbers";
  return nullptr;
}

bool has_whole_vectors(const KvLinearAttention& a) {
  for (const void* pointer :
       {static_cast<const void*>(a.query), static_cast<const void*>(a.key), static_cast<const void*>(a.value),
        static_cast<const void*>(a.decay), static_cast<const void*>(a.past), static_cast<const void*>(a.present),
        static_cast<const void*>(a.output)})
    if (!is_aligned(pointer)) return false;
  return a.key_size % 4 == 0 && a.value_size % 4 == 0;
}

template <int kKeys>
const char* run(const KvLinearAttention& a, const Device& device, Stream stream) {
  using Program = Recurrence<kKeys>;
  RecurrenceArgs args{a, (a.value_size + Program::kColumns - 1) / Program::kColumns, 1, has_whole_vectors(a)};
  if (a.tokens > 1) args.chunk = a.tokens < Program::kChunk ? static_cast<int>(a.tokens) : Program::kChunk;
  const size_t blocks = static_cast<size_t>(a.batch) * a.heads * args.slices;
  return launch<Program>(args, blocks, Program::shared_size(args.chunk), device, stream);
}

}  // namespace
}  // namespace cuda
}  // namespace kv

extern "C" const char* kv_cuda_linear_attention_problem(const KvLinearAttention* call) {
  return kv::cuda::check(*call);
}

extern "C" const char* kv_cuda_linear_attention(const KvLinearAttention* call, const KvCuda* where) {
  using namespace kv::cuda;
  Device device;
  if (const char* problem = check(*call)) return problem;
  if (call->batch == 0) return nullptr;
  if (const char* problem = this_device(&device, where->begin)) return problem;
  const Stream stream = static_cast<Stream>(where->stream);
  if (call->key_size <= 64) return run<64>(*call, device, stream);
  return call->key_size <= 128 ? run<128>(*call, device, stream) : run<256>(*call, device, stream);
}
