// The entry points of MergeCache; the head of work.h describes the launches.
//
//   check the call; if the workspace is too small: refuse
//   copy past to present, unless they share buffers       the launches update present in place
//   for all heads of one capacity and one budget, or for each 32 other heads:
//     Rank
//     if policy.order needs targets: Nearest over the eviction pool, Choose
//     unless slots are dropped or merge in pairs: Nearest over the evicted slots, among all targets or among those that
//       the first search did not compare
//     unless slots are dropped: FormSets, Attended if a Hessian weighs, MergeRows
//     Order, Place; Turn if keys are rotated by places
//
// a is the arguments of the call, p its policy, m its workspace.
#include <algorithm>

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
  if (const char* problem = check_cache(a)) return problem;
  if (is_quantized(a.cache_type)) return "there is no kernel that merges a quantized cache";
  const auto least = [&](const int* list) { return *std::min_element(list, list + a.heads); };
  if (least(a.budget) < 1 || a.sinks < 0 || least(a.recent) < 0 || a.sliding_window < 0)
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

// Returns whether a merge rotates kept keys to their new places.
bool turns_keys(const KvMergeCache& a) { return a.cache_positions && a.rotary_planes > 0 && a.compresses; }

// Returns the rows of a tile of Nearest.
int tile_of(const KvMergeCache& a) { return a.cache_type == KV_FLOAT32 ? 32 : are_wide(a) ? 64 : 128; }

// ---- the heads of a launch ----

bool is_in_place(const KvMergeCache& a) {
  const KvState &past = a.past, &present = a.present;
  return past.key == present.key && past.value == present.value && past.votes == present.votes &&
         past.score == present.score && past.position == present.position;
}

// Adds an entry for `count` heads from head h on. offset: slots of a sequence before theirs.
void add_entry(MergeWork& m, int h, int count, int offset) {
  const KvMergeCache& a = m.call;
  const KvMergePolicy& p = a.policy;
  MergeEntry& own = m.entry[m.entries++];
  own.capacity = a.capacity[h], own.budget = a.budget[h], own.recent = a.recent[h];
  own.count = count, own.offset = offset;
  const int evicted = a.compresses && own.capacity > own.budget ? own.capacity - own.budget : 0;
  const int64_t pool = p.order != KV_ORDER_LOWEST
                           ? static_cast<int64_t>(evicted) * (p.eviction_pool > 1 ? p.eviction_pool : 1)
                           : evicted;
  own.most_rows = pool < own.capacity ? static_cast<int>(pool) : own.capacity;
  own.most_splits = own.capacity < 128 ? 1 : own.capacity / 128;  // a split has at least 128 targets
  m.most_slots = max_of(m.most_slots, own.capacity);
  m.most_evicted = max_of(m.most_evicted, evicted);
  m.most_rows = max_of(m.most_rows, own.most_rows);
}

// Calls use(MergeWork) for each launch over the heads of a call, until it returns a problem; the work has no workspace.
template <class F>
const char* each_table(const KvMergeCache& a, F use) {
  const auto one = [&](const int* list) { return std::count(list, list + a.heads, list[0]) == a.heads; };
  const int count = one(a.capacity) && one(a.budget) && one(a.recent) ? a.heads : 1;
  for (int h = 0, offset = 0; h < a.heads;) {
    MergeWork m = {};
    m.call = a, m.in_place = is_in_place(a), m.tile = tile_of(a), m.each = a.batch * count;
    for (; m.entries < kTable && h < a.heads; offset += a.capacity[h], h += count) add_entry(m, h, count, offset);
    // Blocks of one kernel begin in their order, those of the largest caches first.
    std::stable_sort(m.entry, m.entry + m.entries,
                     [](const MergeEntry& x, const MergeEntry& y) { return x.capacity > y.capacity; });
    if (const char* problem = use(m)) return problem;
  }
  return nullptr;
}

// Returns the units of work of a head in Nearest: tiles of rows times splits. Few slots are evicted at a time, however
// large the slack: blocks are planned for at most eight tiles of rows.
int units_of(const MergeWork& m, const MergeEntry& own) {
  const int tiles = tiles_of(own.most_rows, m.tile);
  return own.most_splits * (tiles < 1 ? 1 : tiles < 8 ? tiles : 8);
}

size_t places_of(const Device& device) { return size_t{kNearestPlaces} * device.multiprocessors; }

// Divides the workspace among the arrays of a call; returns the bytes that it uses.
size_t lay_out(const Device& device, void* workspace, MergeWork* merge) {
  MergeWork& m = *merge;
  const KvMergeCache& a = m.call;
  const KvMergePolicy& p = a.policy;
  const size_t each = m.each, heads = each * m.entries;
  const bool merges = p.merge != KV_MERGE_DROP && m.most_evicted > 0;
  size_t slots = 0, rows = 0, blocks = 0;
  for (MergeEntry* own = m.entry; own < m.entry + m.entries; ++own) {
    own->slots = slots, own->first = static_cast<int>(own - m.entry) * m.each;
    slots += each * own->capacity, rows += each * own->most_rows;
    blocks += each * min_of(units_of(m, *own), kMostShares);
  }
  // The most rows times splits of all heads: with one tile there are as many splits as blocks, with many one split.
  const size_t most = most_shares_of_all(heads, places_of(device)), tile = min_of(m.most_rows, m.tile),
               results = rows + tile * (blocks < most ? blocks : most);
  const int sets = heads > 0 ? static_cast<int>(16 * static_cast<size_t>(device.multiprocessors) / heads) : 1;
  m.set_blocks = sets < 1 ? 1 : sets < 32 ? sets : 32;
  Workspace space(workspace);
  space.take<int>(KV_CUDA_COUNTER_BYTES / sizeof(int));
  m.heads = space.take<HeadInfo>(heads);
  m.order = space.take<int>(slots);
  m.importance = space.take<float>(slots);
  m.keep_score = space.take<float>(slots);
  m.mark = space.take<uint8_t>(slots);
  m.rows = space.take<int>(heads * m.most_rows);
  m.changed = space.take<int>(slots);
  m.source = space.take<int>(slots);
  if (turns_keys(a)) {
    m.row = space.take<int>(slots);
    m.steps = space.take<int>(slots);
  }
  if (merges) {
    m.nearness = space.take<float>(results);
    m.nearest = space.take<int>(results);
    if (p.order != KV_ORDER_LOWEST) {
      m.ease = space.take<float>(results);
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
    m.merged_numbers = space.take<float>(heads * m.most_evicted * (1 + a.statistics));
    if (p.weigh == KV_WEIGH_HESSIAN) m.attended = space.take<float>(heads * (a.value_size + 1));
  }
  return space.size();
}

// Divides the work of Nearest among the blocks of every head.
void divide(MergeWork& m, const Device& device) {
  int units[kTable];
  for (int i = 0; i < m.entries; ++i) units[i] = units_of(m, m.entry[i]);
  const int each = largest_share(units, m.entries, m.each, places_of(device));
  size_t results = 0;
  for (int i = 0; i < m.entries; ++i) {
    MergeEntry& own = m.entry[i];
    own.blocks = Shares(units[i], each).count;
    own.stride = max_of(own.most_rows, min_of(own.most_rows, m.tile) * own.blocks);
    own.results = results;
    results += static_cast<size_t>(m.each) * own.stride;
  }
}

// ---- launches ----

template <class Kernel>
const char* launch_nearest(const NearestArgs& args, const Device& device, Stream stream) {
  static_assert(Kernel::kBlocksPerMultiprocessor <= kNearestPlaces, "blocks are planned for as many places");
  return launch<Kernel>(args, args.start[kTable], Kernel::size(args), device, stream);
}

template <class T, bool ByError>
const char* nearest(const MergeWork& m, Search search, const Device& device, Stream stream) {
  NearestArgs args{m, search, {}};
  set_starts(args.start, m.entries, [&](int i) { return m.each * m.entry[i].blocks; });
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
  const size_t heads = static_cast<size_t>(m.each) * m.entries;
  const bool merges = p.merge != KV_MERGE_DROP && m.most_evicted > 0;
  if (const char* problem = launch<Rank>(m, heads, Selection::size(m.most_slots), device, stream)) return problem;
  if (merges && p.order != KV_ORDER_LOWEST) {
    const auto search = p.order == KV_ORDER_LEAST_ERROR ? nearest<T, true> : nearest<T, false>;
    if (const char* problem = search(m, kOfPool, device, stream)) return problem;
    if (const char* problem = launch<Choose>(m, heads, Selection::size(m.most_slots), device, stream)) return problem;
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
  if (const char* problem = launch<Order>(m, heads, Order::size(m.most_slots), device, stream)) return problem;
  const int element = element_bits(a.cache_type) / 8;
  const size_t each = Place::blocks_of(a.key_size * element) + Place::blocks_of(a.value_size * element);
  if (const char* problem = launch<Place>({m, element}, heads * each, 0, device, stream)) return problem;
  if (!turns_keys(a)) return nullptr;
  typename Turn<T>::Args args{m, {}};
  set_starts(args.start, m.entries, [&](int i) { return m.each * Turn<T>::tiles_of(m.entry[i]); });
  return launch<Turn<T>>(args, args.start[kTable], 0, device, stream);
}

const char* run(MergeWork& m, const Device& device, Stream stream) {
  divide(m, device);
  return m.call.cache_type == KV_FLOAT32 ? run<float>(m, device, stream) : run<Half>(m, device, stream);
}

bool is_aligned_state(const KvMergeCache& a) {
  return is_aligned(a.past.key) && is_aligned(a.past.value) && is_aligned(a.present.key) && is_aligned(a.present.value);
}

}  // namespace
}  // namespace cuda
}  // namespace kv

extern "C" const char* kv_cuda_merge_cache_workspace(const KvMergeCache* call, size_t* bytes) {
  using namespace kv::cuda;
  if (const char* problem = check(*call)) return problem;
  *bytes = 0;
  return each_table(*call, [&](MergeWork& work) {
    const size_t own = lay_out(largest_device(), nullptr, &work);
    if (own > *bytes) *bytes = own;
    return static_cast<const char*>(nullptr);
  });
}

extern "C" const char* kv_cuda_merge_cache_problem(const KvMergeCache* call) {
  using namespace kv::cuda;
  Device device;
  if (const char* problem = check(*call)) return problem;
  if (call->batch == 0 || this_device(&device)) return nullptr;
  device.runs = false;
  return each_table(*call, [&](MergeWork& work) {
    lay_out(device, nullptr, &work);
    return run(work, device, nullptr);
  });
}

extern "C" const char* kv_cuda_merge_cache(const KvMergeCache* call, const KvCuda* where) {
  using namespace kv::cuda;
  const KvMergeCache& a = *call;
  const Stream stream = static_cast<Stream>(where->stream);
  Device device;
  if (const char* problem = check(a)) return problem;
  if (a.batch == 0) return nullptr;
  if (!is_aligned_state(a)) return "a tensor is not aligned to 16 bytes";
  if (const char* problem = this_device(&device, where->begin)) return problem;
  const auto check_room = [&](MergeWork& work) {
    return check_workspace(*where, lay_out(device, where->workspace, &work));
  };
  if (const char* problem = each_table(a, check_room)) return problem;
  if (const char* problem = copy_state(a, stream)) return problem;
  return each_table(a, [&](MergeWork& work) {
    lay_out(device, where->workspace, &work);
    return run(work, device, stream);
  });
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
  kv::cuda::host() = {order, late_copies != 0, multiprocessors, shared_limit, 0, 0};
  kv::cuda::checked().clear();
}
// For tests: return the launches of the last call; how many of them may begin early; the launches that were only
// checked since kv_host_set, one a line; and how many items a share has (share_of).
extern "C" int kv_host_launches(void) { return kv::cuda::host().launches; }
extern "C" int kv_host_early(void) { return kv::cuda::host().early; }
extern "C" const char* kv_host_checked(void) { return kv::cuda::checked().c_str(); }
extern "C" int kv_host_share(int share, int shares, int items, int unit) {
  const kv::cuda::Range range = kv::cuda::share_of(share, shares, items, unit);
  return range.to - range.from;
}
#endif
