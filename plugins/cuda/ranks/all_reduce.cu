// The entry points of the sum over ranks, and its division among blocks (all_reduce.h).
#include "../core/launch.h"
#include "all_reduce.h"

namespace kv {
namespace cuda {
namespace {

constexpr int64_t kTwoShotsFrom = 2 << 20;  // bytes of the sum times (ranks - 2), above which two shots are used

template <class T>
const char* run(Sum args, const Device& device, Stream stream) {
  args.vectors = (args.count + kLanes<T> - 1) / kLanes<T>;
  const int64_t filling = (args.vectors + kThreadsOfSum - 1) / kThreadsOfSum;
  args.blocks = filling < kMostBlocks ? static_cast<int>(filling) : kMostBlocks;
  const int64_t each = (args.vectors + args.blocks - 1) / args.blocks;
  args.each = each < kMostVectors ? static_cast<int>(each) : kMostVectors;
  const int64_t bytes = args.count * static_cast<int64_t>(sizeof(T));
  args.bytes = static_cast<uint32_t>(bytes);
  args.two_shots = (args.ranks.count - 2) * bytes > kTwoShotsFrom;
  // Blocks wait for those of other devices, so all of them have to run at a time.
  if (args.blocks > device.multiprocessors * AllReduce<T>::kBlocksPerMultiprocessor)
    return "the sum over ranks has more blocks, which wait for those of other devices, than this device runs at a time";
  return launch<AllReduce<T>>(args, args.blocks, 16, device, stream);
}

}  // namespace
}  // namespace cuda
}  // namespace kv

extern "C" size_t kv_cuda_mailbox_bytes(void) { return sizeof(kv::cuda::Mailbox); }

extern "C" const char* kv_cuda_all_reduce(const KvCudaRanks* ranks, int type, const void* numbers, void* sum,
                                          size_t count, void* stream) {
  using namespace kv::cuda;
  if (ranks->count < 1 || ranks->count > KV_CUDA_MOST_RANKS) return "there are no ranks, or more than 16";
  if (ranks->rank < 0 || ranks->rank >= ranks->count) return "the rank is none of the ranks";
  for (int rank = 0; rank < ranks->count; ++rank)
    if (!ranks->mailbox[rank]) return "a rank has no mailbox";
  if (count == 0) return nullptr;
  Device device;
  if (const char* problem = this_device(&device, KV_CUDA_EARLY)) return problem;
  Sum args{};
  args.ranks = *ranks, args.numbers = numbers, args.sum = sum, args.count = static_cast<int64_t>(count);
  args.aligned = is_aligned(numbers) && is_aligned(sum);
  if (type == KV_FLOAT32) return run<float>(args, device, static_cast<Stream>(stream));
  if (type == KV_FLOAT16) return run<Half>(args, device, static_cast<Stream>(stream));
  if (type == KV_BFLOAT16) return run<BFloat>(args, device, static_cast<Stream>(stream));
  return "only float32, float16 and bfloat16 are added up";
}
