// The launches of VoteAttention over a quantized cache. They are a source of their own, so that it compiles in
// parallel.
#include "decode_quantized.h"
#include "plan.h"

namespace kv {
namespace cuda {
namespace {

template <int kKeyBits, int kValueBits>
const char* decode_of(Attention& args, int entries, const Device& device, Stream stream) {
  const KvVoteAttention& a = args.call;
  if (a.key_size <= 128 && a.value_size <= 128)
    return decode<Quantized, DecodeQuantized<kKeyBits, kValueBits, 128>>(args, entries, device, stream);
  return decode<Quantized, DecodeQuantized<kKeyBits, kValueBits, 256>>(args, entries, device, stream);
}

}  // namespace

const char* run_quantized(Attention& args, int entries, const Device& device, Stream stream) {
  const KvVoteAttention& a = args.call;
  const int blocks = AppendQuantized::blocks_per_head(a.tokens);
  if (const char* problem =
          launch_table<AppendQuantized>(args, entries, [&](const auto&) { return blocks; }, 16, device, stream))
    return problem;
  args.call.query = args.rotated;
  if (a.tokens > 1) return prefill_in_float<Quantized>(args, entries, device, stream);
  if (a.cache_type == KV_INT8) return decode_of<8, 8>(args, entries, device, stream);
  return a.cache_type == KV_INT4 ? decode_of<4, 4>(args, entries, device, stream)
                                 : decode_of<8, 4>(args, entries, device, stream);
}

}  // namespace cuda
}  // namespace kv
