// The entry points of VoteAttention over KV heads that have caches of their own: check the call, divide the workspace,
// launch the kernels.
//
//   copy every past to its present, unless they share buffers
//   one token, float32 or 16-bit caches:   for each table of up to 32 heads: Decode or DecodeMma over Ragged<T>;
//                                          RaggedSums if a statistic is a sum of probabilities
//   several tokens, or quantized caches:   a call of kv_cuda_vote_attention for each head, whose query, key and value
//                                          are copied from those of all heads, and its output to theirs, unless they
//                                          are contiguous
#include "plan.h"
#include "programs.h"
#include "ragged.h"

namespace kv {
namespace cuda {
namespace {

// Returns whether a call is one launch for each table of heads, not a call for each head.
bool is_one_launch(const KvVoteAttention& a) { return a.tokens == 1 && !is_small(a.cache_type); }

int table_size(const KvVoteAttention& a) { return min_of(a.heads, kTable); }

// Returns the call of head h: its cache, with the tensors of all heads.
KvVoteAttention call_of(const KvVoteAttention& a, const KvHeadCache* caches, int h) {
  KvVoteAttention own = a;
  own.query_heads = a.query_heads / a.heads, own.heads = 1, own.capacity = caches[h].capacity;
  own.past = caches[h].past, own.present = caches[h].present;
  own.past_scales = caches[h].past_scales, own.present_scales = caches[h].present_scales;
  if (a.sink_logits) own.sink_logits = a.sink_logits + h * own.query_heads;
  return own;
}

// Returns why no kernel computes the call; nullptr if one does.
const char* check_heads(const KvVoteAttention& a, const KvHeadCache* caches) {
  if (const char* problem = check(a)) return problem;
  for (int h = 0; h < a.heads; ++h) {
    if (caches[h].capacity > a.capacity) return "a head has more slots than the call's capacity";
    if (const char* problem = check(call_of(a, caches, h))) return problem;
  }
  return nullptr;
}

// ---- one launch for each table ----

// Returns the most splits of all heads of a table together: one of each head, or eight waves of blocks. places: the
// blocks that run at a time.
size_t most_parts(size_t heads, size_t places) { return 8 * places > heads ? 8 * places : heads; }

size_t plan(const KvVoteAttention& a, const Device& device, void* workspace, RaggedAttention* args) {
  *args = {};
  const size_t heads = static_cast<size_t>(a.batch) * table_size(a), all = heads * min_of(slot_blocks(a), kMostShares),
               most = most_parts(heads, static_cast<size_t>(kMostPlaces) * device.multiprocessors);
  return lay_out(a, all < most ? all : most, workspace, args);
}

// Sets the number of blocks of every head to that of its units of work when a block has at most `each` of them.
void divide(RaggedAttention& args, int heads, int each, int unit) {
  for (int h = 0; h < kTable; ++h) {
    const int units = h < heads ? (args.cache[h].capacity + unit - 1) / unit : 0;
    args.start[h + 1] = args.start[h] + (units + each - 1) / each;
  }
}

// Divides the heads of a table into splits with the least estimated time, which is that of shares_of; a tie goes to the
// fewest splits. places: the blocks that run at a time. Returns the most splits of a head.
int split_heads(RaggedAttention& args, int heads, size_t places) {
  const size_t batch = args.call.batch, most_blocks = most_parts(batch * heads, places);
  int units = 1, best = 0, most = 1;
  for (int h = 0; h < heads; ++h) units = max_of(units, (args.cache[h].capacity + kBlock - 1) / kBlock);
  size_t least = SIZE_MAX;
  for (int splits = 1, last = 0; splits <= min_of(units, kMostShares); ++splits) {
    const int each = (units + splits - 1) / splits;
    if (each == last) continue;
    last = each;
    divide(args, heads, each, kBlock);
    const size_t blocks = batch * args.start[kTable], waves = (blocks + places - 1) / places;
    if (blocks > most_blocks) break;
    const size_t time = waves * (2 * static_cast<size_t>(each) + 1) * 16 + splits;
    if (time < least) least = time, best = each, most = splits;
  }
  divide(args, heads, best, kBlock);
  return most;
}

template <class T>
const char* decode_table(RaggedAttention& args, int heads, const Device& device, Stream stream) {
  return with_decode<Ragged<T>>(args.call, [&](auto named) {
    using Program = typename decltype(named)::Type;
    const size_t batch = args.call.batch, places = size_t{Program::kBlocksPerMultiprocessor} * device.multiprocessors;
    const int most = split_heads(args, heads, places);
    const size_t shared = prepare<Ragged<T>, Program>(args, most, device);
    if (!shared) return kTooMuchShared;
    if (const char* problem = launch<Program>(args, batch * args.start[kTable], shared, device, stream)) return problem;
    if (!keeps(args.call, KV_STATISTIC_PROBABILITY)) return static_cast<const char*>(nullptr);
    divide(args, heads, 1, RaggedSums::kThreads);
    return launch<RaggedSums>(args, batch * args.start[kTable], 0, device, stream);
  });
}

const char* decode_heads(RaggedAttention& args, const KvHeadCache* caches, const Device& device, Stream stream) {
  const KvVoteAttention& a = args.call;
  for (args.first_head = 0; args.first_head < a.heads; args.first_head += kTable) {
    const int heads = min_of(a.heads - args.first_head, kTable);
    for (int h = 0; h < heads; ++h)
      args.cache[h] = {caches[args.first_head + h].present, caches[args.first_head + h].capacity};
    const auto decode = a.cache_type == KV_FLOAT32   ? decode_table<float>
                        : a.cache_type == KV_FLOAT16 ? decode_table<Half>
                                                     : decode_table<BFloat>;
    if (const char* problem = decode(args, heads, device, stream)) return problem;
  }
  return nullptr;
}

// ---- a call for each head ----

// The query, key, value and output of one head: a place in the tensors of all heads, and memory for a copy.
struct Rows {
  size_t apart, bytes;  // from sequence to sequence in the tensors of all heads, and of a sequence of one head
  char *all, *own;

  Rows(const KvVoteAttention& a, const void* tensor, int heads, int size, int of_head, Workspace& space)
      : apart(static_cast<size_t>(heads) * a.tokens * size * element_bits(a.query_type) / 8),
        bytes(apart / a.heads),
        all(const_cast<char*>(static_cast<const char*>(tensor)) + of_head * bytes),
        own(space.take<char>(a.batch * bytes)) {}
  bool is_contiguous(const KvVoteAttention& a) const { return a.batch == 1 && is_aligned(all); }
  // Returns the head's rows, after a copy unless they are contiguous.
  const char* gather(const KvVoteAttention& a, const void** rows, Stream stream) const {
    *rows = is_contiguous(a) ? all : own;
    return is_contiguous(a) ? nullptr : copy_rows(own, bytes, all, apart, bytes, a.batch, stream);
  }
};

// Returns the bytes of workspace of a call for each head.
const char* bytes_of_each(const KvVoteAttention& a, const KvHeadCache* caches, size_t* bytes) {
  *bytes = 0;
  for (int h = 0; h < a.heads; ++h) {
    const KvVoteAttention own = call_of(a, caches, h);
    size_t one = 0;
    if (const char* problem = kv_cuda_vote_attention_workspace(&own, &one)) return problem;
    if (one > *bytes) *bytes = one;
  }
  return nullptr;
}

// Runs a call for each head; only counts the bytes of all copies if `memory` is nullptr.
const char* call_each(const KvVoteAttention& a, const KvHeadCache* caches, const KvCuda& where, char* memory,
                      size_t* bytes) {
  const Stream stream = static_cast<Stream>(where.stream);
  for (int h = 0; h < a.heads; ++h) {
    Workspace space(memory);
    const Rows query(a, a.query, a.query_heads, a.key_size, h, space), key(a, a.key, a.heads, a.key_size, h, space),
        value(a, a.value, a.heads, a.value_size, h, space), output(a, a.output, a.query_heads, a.value_size, h, space);
    *bytes = space.size();
    if (!memory) return nullptr;
    KvVoteAttention own = call_of(a, caches, h);
    if (const char* problem = query.gather(a, &own.query, stream)) return problem;
    if (const char* problem = key.gather(a, &own.key, stream)) return problem;
    if (const char* problem = value.gather(a, &own.value, stream)) return problem;
    own.output = output.is_contiguous(a) ? output.all : output.own;
    if (const char* problem = kv_cuda_vote_attention(&own, &where)) return problem;
    if (output.is_contiguous(a)) continue;
    if (const char* problem =
            copy_rows(output.all, output.apart, output.own, output.bytes, output.bytes, a.batch, stream))
      return problem;
  }
  return nullptr;
}

}  // namespace
}  // namespace cuda
}  // namespace kv

extern "C" const char* kv_cuda_ragged_vote_attention_workspace(const KvVoteAttention* call, const KvHeadCache* caches,
                                                               size_t* bytes) {
  using namespace kv::cuda;
  const KvVoteAttention& a = *call;
  RaggedAttention args;
  size_t copies = 0;
  if (const char* problem = check_heads(a, caches)) return problem;
  if (is_one_launch(a)) {
    *bytes = plan(a, largest_device(), nullptr, &args);
    return nullptr;
  }
  if (const char* problem = bytes_of_each(a, caches, bytes)) return problem;
  call_each(a, caches, {}, nullptr, &copies);
  *bytes += copies;
  return nullptr;
}

extern "C" const char* kv_cuda_ragged_vote_attention_problem(const KvVoteAttention* call, const KvHeadCache* caches) {
  using namespace kv::cuda;
  const KvVoteAttention& a = *call;
  Device device;
  RaggedAttention args;
  if (const char* problem = check_heads(a, caches)) return problem;
  if (a.batch == 0 || a.tokens == 0) return nullptr;
  if (is_one_launch(a)) {
    if (this_device(&device)) return nullptr;
    device.runs = false;
    plan(a, device, nullptr, &args);
    return decode_heads(args, caches, device, nullptr);
  }
  for (int h = 0; h < a.heads; ++h) {
    const KvVoteAttention own = call_of(a, caches, h);
    if (const char* problem = kv_cuda_vote_attention_problem(&own)) return problem;
  }
  return nullptr;
}

extern "C" const char* kv_cuda_ragged_vote_attention(const KvVoteAttention* call, const KvHeadCache* caches,
                                                     const KvCuda* where) {
  using namespace kv::cuda;
  const KvVoteAttention& a = *call;
  if (const char* problem = check_heads(a, caches)) return problem;
  if (a.batch == 0) return nullptr;
  if (!is_one_launch(a)) {
    size_t bytes = 0, copies = 0;
    if (const char* problem = bytes_of_each(a, caches, &bytes)) return problem;
    call_each(a, caches, *where, nullptr, &copies);
    if (const char* problem = check_workspace(*where, bytes + copies)) return problem;
    return call_each(a, caches, *where, static_cast<char*>(where->workspace) + bytes, &copies);
  }
  for (int h = 0; h < a.heads; ++h)
    for (const void* pointer :
         {a.query, a.key, a.value, static_cast<const void*>(a.output), static_cast<const void*>(caches[h].past.key),
          static_cast<const void*>(caches[h].past.value), static_cast<const void*>(caches[h].present.key),
          static_cast<const void*>(caches[h].present.value)})
      if (!is_aligned(pointer)) return "a tensor is not aligned to 16 bytes";
  Device device;
  RaggedAttention args;
  if (const char* problem = this_device(&device, where->begin)) return problem;
  if (const char* problem = check_workspace(*where, plan(a, device, where->workspace, &args))) return problem;
  if (where->counters) args.counters = static_cast<int*>(where->counters);
  const Stream stream = static_cast<Stream>(where->stream);
  for (int h = 0; h < a.heads; ++h)
    if (const char* problem = copy_state(call_of(a, caches, h), stream)) return problem;
  return decode_heads(args, caches, device, stream);
}
