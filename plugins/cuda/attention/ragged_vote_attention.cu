// The entry points of VoteAttention over KV heads that have caches of their own: check the call, divide the workspace,
// launch the kernels.
//
//   copy every past to its present, unless they share buffers
//   one token, float32 or 16-bit caches:   for each table of up to 32 heads: Decode or DecodeMma over Ragged<T>;
//                                          RaggedSums if a statistic is a sum of probabilities
//   several tokens, or quantized caches:   a call of kv_cuda_vote_attention for each head, whose query, key and value
//                                          are copied from those of all heads, and its output to theirs, unless they
//                                          are contiguous
#include <utility>

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

size_t plan(const KvVoteAttention& a, const Device& device, void* workspace, RaggedAttention* args) {
  *args = {};
  const size_t heads = static_cast<size_t>(a.batch) * table_size(a), all = heads * min_of(slot_blocks(a), kMostShares),
               most = most_shares_of_all(heads, static_cast<size_t>(kMostPlaces) * device.multiprocessors);
  return lay_out(a, all < most ? all : most, workspace, args);
}

int units_of(const RaggedAttention::Cache& cache, int unit) { return (cache.capacity + unit - 1) / unit; }

// Sets the splits of every head, each of at most `each` units of work, and the blocks before those of each head.
// Returns the most splits of a head.
int divide(RaggedAttention& args, int heads, int each, int unit) {
  int most = 1;
  for (int h = 0; h < heads; ++h) {
    args.cache[h].splits = Shares(units_of(args.cache[h], unit), each).count;
    most = max_of(most, args.cache[h].splits);
  }
  set_starts(args.start, heads, [&](int h) { return args.call.batch * args.cache[h].splits; });
  return most;
}

// Moves the heads whose splits are largest to the front, when a split has at most `each` blocks of slots.
void sort_heads(RaggedAttention& args, int heads, int each) {
  const auto largest = [&](int h) { return Shares(units_of(args.cache[h], kBlock), each).largest; };
  for (int h = 1; h < heads; ++h)
    for (int i = h; i > 0 && largest(i) > largest(i - 1); --i) std::swap(args.cache[i], args.cache[i - 1]);
}

// Divides the heads of a table into splits with the least estimated time. places: the blocks that run at a time.
// Returns the most splits of a head.
int split_heads(RaggedAttention& args, int heads, size_t places) {
  int units[kTable];
  for (int h = 0; h < heads; ++h) units[h] = units_of(args.cache[h], kBlock);
  const int each = largest_share(units, heads, args.call.batch, places);
  sort_heads(args, heads, each);
  return divide(args, heads, each, kBlock);
}

template <class T>
const char* decode_table(RaggedAttention& args, int heads, const Device& device, Stream stream) {
  return with_decode<Ragged<T>>(args.call, [&](auto named) {
    using Program = typename decltype(named)::Type;
    const int most = split_heads(args, heads, size_t{Program::kBlocksPerMultiprocessor} * device.multiprocessors);
    const size_t shared = prepare<Ragged<T>, Program>(args, most, device);
    if (!shared) return kTooMuchShared;
    if (const char* problem = launch<Program>(args, args.start[kTable], shared, device, stream)) return problem;
    if (!keeps(args.call, KV_STATISTIC_PROBABILITY)) return static_cast<const char*>(nullptr);
    divide(args, heads, 1, RaggedSums::kThreads);
    return launch<RaggedSums>(args, args.start[kTable], 0, device, stream);
  });
}

const char* decode_heads(RaggedAttention& args, const KvHeadCache* caches, const Device& device, Stream stream) {
  const KvVoteAttention& a = args.call;
  for (int first = 0; first < a.heads; first += kTable) {
    const int heads = min_of(a.heads - first, kTable);
    for (int h = 0; h < heads; ++h)
      args.cache[h] = {caches[first + h].present, caches[first + h].capacity, first + h, 1};
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
