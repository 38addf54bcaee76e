// The entry points of MergeCache; the head of work.h describes the launches.
//
//   check the call; if the workspace is too small: refuse
//   copy past to present, unless they share buffers       the launches update present in place
//   Rank
//   if policy.order needs targets: Nearest over the eviction pool, Choose
//   unless slots are dropped or merge in pairs: Nearest over the evicted slots, among all targets or among those that
//     the first search did not compare
//   unless slots are dropped: FormSets, Attended if a Hessian weighs, MergeRows
//   Order, Place; Turn if keys are rotated by places
//
// a is the arguments of the call, p its policy, m its workspace.
#include "../../math/policy.h"
#include "../core/launch.h"
#include "nearest_mma.h"
#include "place.h"
#include "select.h"
#include "sets.h"

namespace kv {
namespace cuda {
namespace {

constexpr int kNearestPlaces = 2;  // the most blocks of Nearest that a multiprocessor has room for

const char* check(const KvMergeCache& a) {
  if (const char* problem =
          check_cache(a.cache_type, a.batch, a.heads, a.capacity, a.key_size, a.value_size, a.statistics))
    return problem;
  if (is_small(a.cache_type)) return "there is no kernel that merges a quantized cache";
  if (a.budget < 1 || a.sinks < 0 || a.recent < 0 || a.sliding_window < 0)
    return "budget, sinks, recent or sliding_window is out of range";
  if (const char* problem = policy_problem(a.policy)) return problem;
  if (a.rotary_planes < 0 || 2 * a.rotary_planes > a.key_size)
    return "there are more rotary planes than the key has dimensions";
  if (a.cache_positions && a.sliding_window) return "cache_positions is 1, and there is a sliding window";
  return nullptr;
}

// Returns whether the search compares keys and values, and one of these has more than 128 elements.
bool are_wide(const KvMergeCache& a) {
  return a.policy.order == KV_ORDER_LEAST_ERROR && (a.key_size > 128 || a.value_size > 128);
}

// Returns the rows of a tile of Nearest.
int tile_of(const KvMergeCache& a) { return a.cache_type == KV_FLOAT32 ? 32 : are_wide(a) ? 64 : 128; }

// Divides the workspace among the arrays of a call; returns the bytes that it uses.
size_t lay_out(const KvMergeCache& a, const Device& device, void* workspace, MergeWork* merge) {
  const KvMergePolicy& p = a.policy;
  const size_t heads = static_cast<size_t>(a.batch) * a.heads, slots = heads * a.capacity;
  Workspace space(workspace);
  MergeWork& m = *merge;
  m = {};
  m.call = a;
  m.most_evicted = a.compresses && a.capacity > a.budget ? a.capacity - a.budget : 0;
  const int64_t pool = p.order != KV_ORDER_LOWEST
                           ? static_cast<int64_t>(m.most_evicted) * (p.eviction_pool > 1 ? p.eviction_pool : 1)
                           : m.most_evicted;
  m.most_rows = pool < a.capacity ? static_cast<int>(pool) : a.capacity;
  const bool merges = p.merge != KV_MERGE_DROP && m.most_evicted > 0;
  // Few slots are evicted at a time, however large the slack: blocks are planned for at most eight tiles of rows. A
  // split has at least 128 targets.
  m.tile = tile_of(a);
  m.most_splits = a.capacity < 128 ? 1 : a.capacity / 128;
  const int tiles = tiles_of(m.most_rows, m.tile), units = m.most_splits * (tiles < 8 ? tiles : 8);
  const size_t places = size_t{kNearestPlaces} * device.multiprocessors;
  m.blocks = shares_of(heads, units, places);
  const int sets = heads > 0 ? static_cast<int>(16 * static_cast<size_t>(device.multiprocessors) / heads) : 1;
  m.set_blocks = sets < 1 ? 1 : sets < 32 ? sets : 32;
  // The most rows times splits: with one tile there are as many splits as blocks, with many tiles one split.
  const int64_t rows = m.most_rows < m.tile ? m.most_rows : m.tile, most = rows * most_shares(heads, units, places);
  m.stride = static_cast<int>(most < m.most_rows ? m.most_rows : most);
  space.take<int>(KV_CUDA_COUNTER_BYTES / sizeof(int));
  m.heads = space.take<HeadInfo>(heads);
  m.order = space.take<int>(slots);
  m.importance = space.take<float>(slots);
  m.keep_score = space.take<float>(slots);
  m.mark = space.take<uint8_t>(slots);
  m.rows = space.take<int>(heads * m.most_rows);
  m.changed = space.take<int>(slots);
  m.source = space.take<int>(slots);
  if (a.cache_positions && a.rotary_planes > 0 && a.compresses) {
    m.row = space.take<int>(slots);
    m.steps = space.take<int>(slots);
  }
  if (merges) {
    m.nearness = space.take<float>(heads * m.stride);
    m.nearest = space.take<int>(heads * m.stride);
    if (p.order != KV_ORDER_LOWEST) {
      m.ease = space.take<float>(heads * m.stride);
      m.rest = space.take<int>(slots);
      // Only a zip: the targets of a running mean are chosen after the evicted slots are known.
      if (p.merge == KV_MERGE_ZIP) {
        m.upper = space.take<int>(slots);
        m.upper_nearness = space.take<float>(slots);
      }
    }
    m.target = space.take<int>(heads * m.most_evicted);
    m.before = space.take<int>(heads * m.most_evicted);
    m.set = space.take<int>(slots);
    m.merged_position = space.take<int>(heads * m.most_evicted);
    m.latest = space.take<int>(heads * m.most_evicted);
    m.merged = space.take<char>(heads * m.most_evicted * (a.key_size + a.value_size) * element_bits(a.cache_type) / 8);
    m.merged_small = space.take<float>(heads * m.most_evicted * (1 + a.statistics));
    if (p.weigh == KV_WEIGH_HESSIAN) m.attended = space.take<float>(heads * (a.value_size + 1));
  }
  return space.size();
}

template <class Kernel>
const char* launch_nearest(const NearestArgs& args, const Device& device, Stream stream) {
  static_assert(Kernel::kBlocksPerMultiprocessor <= kNearestPlaces, "blocks are planned for as many places");
  const size_t heads = static_cast<size_t>(args.work.call.batch) * args.work.call.heads;
  return launch<Kernel>(args, heads * args.work.blocks, Kernel::size(args), device, stream);
}

template <class T, bool ByError>
const char* nearest(const MergeWork& m, Search search, const Device& device, Stream stream) {
  const NearestArgs args{m, search};
  if constexpr (sizeof(T) == 4) {
    return launch_nearest<Nearest<T, ByError>>(args, device, stream);
  } else {
    if constexpr (ByError)
      if (are_wide(m.call)) return launch_nearest<NearestMma<T, true, 1>>(args, device, stream);
    return launch_nearest<NearestMma<T, ByError, 2>>(args, device, stream);
  }
}

template <class T>
const char* run(const MergeWork& m, const Device& device, Stream stream) {
  const KvMergeCache& a = m.call;
  const KvMergePolicy& p = a.policy;
  const size_t heads = static_cast<size_t>(a.batch) * a.heads;
  const bool merges = p.merge != KV_MERGE_DROP && m.most_evicted > 0;
  if (const char* problem = launch<Rank>(m, heads, Selection::size(a.capacity), device, stream)) return problem;
  if (merges && p.order != KV_ORDER_LOWEST) {
    const auto search = p.order == KV_ORDER_LEAST_ERROR ? nearest<T, true> : nearest<T, false>;
    if (const char* problem = search(m, kOfPool, device, stream)) return problem;
    if (const char* problem = launch<Choose>(m, heads, Selection::size(a.capacity), device, stream)) return problem;
  }
  if (merges && p.merge != KV_MERGE_PAIR)
    if (const char* problem = nearest<T, false>(m, m.upper ? kOfRest : kOfAll, device, stream)) return problem;
  if (merges) {
    if (const char* problem = launch<FormSets>(m, heads, 0, device, stream)) return problem;
    if (p.merge == KV_MERGE_PAIR && p.weigh == KV_WEIGH_HESSIAN)
      if (const char* problem = launch<Attended<T>>(m, heads, Attended<T>::size(), device, stream)) return problem;
    if (const char* problem =
            launch<MergeRows<T>>(m, heads * m.set_blocks, MergeRows<T>::size(m.most_evicted), device, stream))
      return problem;
  }
  if (const char* problem = launch<Order>(m, heads, Order::size(a.capacity), device, stream)) return problem;
  const int element = element_bits(a.cache_type) / 8;
  const size_t each = Place::blocks_of(a.key_size * element) + Place::blocks_of(a.value_size * element);
  if (const char* problem = launch<Place>({m, element}, heads * each, 0, device, stream)) return problem;
  if (!m.steps) return nullptr;
  const int rows = a.budget < a.capacity ? a.budget : a.capacity;
  return launch<Turn<T>>(m, heads * Turn<T>::tiles_of(rows), 0, device, stream);
}

const char* run(const MergeWork& m, const Device& device, Stream stream) {
  const int type = m.call.cache_type;
  if (type == KV_FLOAT32) return run<float>(m, device, stream);
  return type == KV_FLOAT16 ? run<Half>(m, device, stream) : run<BFloat>(m, device, stream);
}

}  // namespace
}  // namespace cuda
}  // namespace kv

extern "C" const char* kv_cuda_merge_cache_workspace(const KvMergeCache* call, size_t* bytes) {
  using namespace kv::cuda;
  MergeWork merge;
  if (const char* problem = check(*call)) return problem;
  *bytes = lay_out(*call, largest_device(), nullptr, &merge);
  return nullptr;
}

extern "C" const char* kv_cuda_merge_cache_problem(const KvMergeCache* call) {
  using namespace kv::cuda;
  Device device;
  MergeWork merge;
  if (const char* problem = check(*call)) return problem;
  if (call->batch == 0 || this_device(&device)) return nullptr;
  device.runs = false;
  lay_out(*call, device, nullptr, &merge);
  return run(merge, device, nullptr);
}

extern "C" const char* kv_cuda_merge_cache(const KvMergeCache* call, const KvCuda* where) {
  using namespace kv::cuda;
  const KvMergeCache& a = *call;
  Device device;
  MergeWork merge;
  if (const char* problem = check(a)) return problem;
  if (a.batch == 0) return nullptr;
  for (const void* pointer : {a.past.key, a.past.value, a.present.key, a.present.value})
    if (!is_aligned(pointer)) return "a tensor is not aligned to 16 bytes";
  if (const char* problem = this_device(&device, where->begin)) return problem;
  if (const char* problem = check_workspace(*where, lay_out(a, device, where->workspace, &merge))) return problem;
  const KvState &past = a.past, &present = a.present;
  merge.in_place = past.key == present.key && past.value == present.value && past.votes == present.votes &&
                   past.score == present.score && past.position == present.position;
  const Stream stream = static_cast<Stream>(where->stream);
  if (const char* problem = copy_state(a, stream)) return problem;
  return run(merge, device, stream);
}

extern "C" const char* kv_cuda_target(void) {
#ifdef __CUDACC__
  return "device";
#else
  return "host";
#endif
}

#ifndef __CUDACC__
// For tests: sets how the host runs (../core/block.h). order: a value of kv::cuda::Host's enumeration, 0 to 2.
extern "C" void kv_host_set(int order, int late_copies, int multiprocessors, size_t shared_limit) {
  kv::cuda::host() = {order, late_copies != 0, multiprocessors, shared_limit, 0};
  kv::cuda::checked().clear();
}
// For tests: return KvCuda.begin of the last call; the launches that were only checked since kv_host_set, one a line;
// and how many items a share has (share_of).
extern "C" int kv_host_began(void) { return kv::cuda::host().began; }
extern "C" const char* kv_host_checked(void) { return kv::cuda::checked().c_str(); }
extern "C" int kv_host_share(int share, int shares, int items, int unit) {
  const kv::cuda::Range range = kv::cuda::share_of(share, shares, items, unit);
  return range.to - range.from;
}
#endif
