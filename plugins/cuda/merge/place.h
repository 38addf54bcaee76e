// MergeCache: kept slots stay in their rows, merged rows replace their targets. The lowest hole among the first rows
// takes the last kept slot, the next hole the last but one, and so on. Zeros follow.
//
//   Order, a block per head
//     entry[row] = the kept slot in that row; a prefix sum of the kept slots
//     filler[hole] = the kept slots behind the first rows, the last one first; entry[hole] = its filler
//     list the rows that change and their sources; another prefix sum
//     write positions, votes and statistics of these rows
//     if keys are rotated by places: every place's row, and by how many places its slot has moved
//   Place, a block per head and 64 bytes of every key or value: write the rows that change
//   Turn, a block per head and 32 places, if keys are rotated by places: rotate every plane whose place has changed
//
// A barrier separates the writes of entries, holes and the list from their reads. Keys and values need no barrier:
// their sources are slots behind all rows that are written, or rows of the workspace. A head without changes stays
// untouched.
#pragma once

#include "work.h"

namespace kv {
namespace cuda {

// Returns whether a head needs no change.
KV_DEVICE bool untouched(const MergeWork& work, const HeadInfo& x) {
  return work.in_place && x.used == x.in_all && x.evicted == 0;
}

// Finds the source of every row that changes, and writes all of the row except its key and value.
struct Order {
  using Args = MergeWork;
  static constexpr int kThreads = 256, kBlocksPerMultiprocessor = 1;
  struct Registers {
    int count, scanned;
  };
  static KV_HD size_t size(int capacity) { return (kThreads + static_cast<size_t>(capacity)) * sizeof(int); }

  // set_of returns the merge set of a kept slot, kNone without one; latest_of the slot itself, or its set's latest
  // member.
  static KV_DEVICE int set_of(const MergeHead& head, int i) {
    return head.work.latest ? head.of(head.work.set)[i] : kNone;
  }
  static KV_DEVICE int latest_of(const MergeHead& head, int i) {
    const int set = set_of(head, i);
    return set == kNone ? i : head.work.latest[static_cast<size_t>(head.index) * head.work.most_evicted + set];
  }

  static KV_DEVICE void run(Block<Order>& block, const MergeWork& work) {
    const MergeHead head(work, block.index());
    const HeadInfo x = head.info();
    if (untouched(work, x)) return;
    int *sums = reinterpret_cast<int*>(block.shared), *entry = sums + kThreads;
    const int kept = fill_holes(block, head, x, sums, entry);
    const int changed = list_changes(block, head, kept, sums, entry);
    block.each([&](int t, auto&) {
      if (t == 0) head.info().kept = kept, head.info().changed = changed;
    });
    write_numbers(block, head, x, kept, changed);
    if (work.steps && x.evicted > 0) list_places(block, head, x, kept, sums, entry);
  }

  // Fills entry[row] of the first rows, as many as there are kept slots; returns their number.
  static KV_DEVICE int fill_holes(Block<Order>& block, const MergeHead& head, const HeadInfo& x, int* sums,
                                  int* entry) {
    int* filler = head.of(head.work.source);
    block.each([&](int t, auto&) {
      for (int row = t; row < x.in_all; row += kThreads) entry[row] = kNone;
    });
    block.each([&](int t, auto&) {
      for (int i = t; i < x.used; i += kThreads)
        if (x.over == 0 || head.of(head.work.mark)[i] != kEvicted) entry[head.slot(i)] = i;
    });
    const int each = (x.in_all + kThreads - 1) / kThreads;
    const auto rows = [&](int t, auto use) {
      for (int row = t * each; row < min_of((t + 1) * each, x.in_all); ++row) use(row);
    };
    block.each([&](int t, auto& r) {
      r.count = 0;
      rows(t, [&](int row) { r.count += entry[row] != kNone; });
    });
    const int kept = scan(block, sums, [](int, auto& r) { return r.count; });
    block.each([&](int t, auto& r) {
      int before = r.scanned;
      rows(t, [&](int row) {
        if (entry[row] == kNone) return;
        if (row >= kept) filler[kept - 1 - before] = entry[row];
        ++before;
      });
    });
    block.each([&](int t, auto& r) {
      int before = r.scanned;
      rows(t, [&](int row) {
        if (entry[row] != kNone)
          ++before;
        else if (row < kept)
          entry[row] = filler[row - before];
      });
    });
    return kept;
  }

  // Lists the rows that change and their sources; returns their number.
  static KV_DEVICE int list_changes(Block<Order>& block, const MergeHead& head, int kept, int* sums, const int* entry) {
    int *changed = head.of(head.work.changed), *source = head.of(head.work.source);
    const int each = (kept + kThreads - 1) / kThreads;
    const auto changes = [&](int row) { return head.slot(entry[row]) != row || set_of(head, entry[row]) != kNone; };
    block.each([&](int t, auto& r) {
      r.count = 0;
      for (int row = t * each; row < min_of((t + 1) * each, kept); ++row) r.count += changes(row);
    });
    const int count = scan(block, sums, [](int, auto& r) { return r.count; });
    block.each([&](int t, auto& r) {
      int at = r.scanned;
      for (int row = t * each; row < min_of((t + 1) * each, kept); ++row) {
        if (!changes(row)) continue;
        const int set = set_of(head, entry[row]);
        changed[at] = row;
        source[at++] = set == kNone ? head.slot(entry[row]) : ~set;
      }
    });
    return count;
  }

  // Writes positions, votes and statistics of the rows that change, and zeros behind the kept rows.
  static KV_DEVICE void write_numbers(Block<Order>& block, const MergeHead& head, const HeadInfo& x, int kept,
                                      int changed) {
    const MergeWork& work = head.work;
    const KvMergeCache& a = head.a;
    const int *rows = head.of(work.changed), *source = head.of(work.source), stride = 1 + a.statistics;
    const size_t first_set = static_cast<size_t>(head.index) * work.most_evicted;
    int32_t* position = head.positions();
    const auto column = [&](int k) { return k < 0 ? head.all_votes() : head.scores(k); };
    block.each([&](int t, auto&) {
      for (int i = t; i < changed; i += kThreads) {
        const int row = rows[i], from = source[i];
        position[row] = from >= 0 ? position[from] : work.merged_position[first_set + ~from];
        for (int k = -1; k < a.statistics; ++k)
          column(k)[row] = from >= 0 ? column(k)[from] : work.merged_numbers[(first_set + ~from) * stride + 1 + k];
      }
    });
    const int end = work.in_place ? x.in_all : head.own.capacity;
    block.each([&](int t, auto&) {
      for (int row = kept + t; row < end; row += kThreads) {
        position[row] = 0;
        for (int k = -1; k < a.statistics; ++k) column(k)[row] = 0.0f;
      }
    });
  }

  // Lists for every place the row of its slot, and by how many places that slot has moved.
  static KV_DEVICE void list_places(Block<Order>& block, const MergeHead& head, const HeadInfo& x, int kept, int* sums,
                                    int* entry) {
    int *row_of = head.of(head.work.row), *steps = head.of(head.work.steps);
    block.each([&](int t, auto&) {
      for (int i = t; i < x.used; i += kThreads) row_of[i] = kNone;
    });
    block.each([&](int t, auto&) {
      for (int row = t; row < kept; row += kThreads) row_of[latest_of(head, entry[row])] = row;
    });
    const int each = (x.used + kThreads - 1) / kThreads;
    block.each([&](int t, auto& r) {
      r.count = 0;
      for (int i = t * each; i < min_of((t + 1) * each, x.used); ++i) r.count += row_of[i] != kNone;
    });
    scan(block, sums, [](int, auto& r) { return r.count; });
    block.each([&](int t, auto& r) {
      int place = r.scanned;
      for (int i = t * each; i < min_of((t + 1) * each, x.used); ++i) {
        if (row_of[i] == kNone) continue;
        steps[place] = place - i;
        entry[place++] = row_of[i];
      }
    });
    block.each([&](int t, auto&) {
      for (int place = t; place < kept; place += kThreads) row_of[place] = entry[place];
    });
  }
};

// Writes the keys and values of the rows that change. A block is up to 64 bytes of every key or value of a head: no
// other block reads or writes them.
struct Place {
  struct Args {
    MergeWork work;
    int element;  // bytes of an element
  };
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 1, kVectors = 4, kLanes = kThreads / kVectors;
  struct Registers {};
  static KV_HD int blocks_of(int bytes) { return (bytes / 16 + kVectors - 1) / kVectors; }

  static KV_DEVICE void run(Block<Place>& block, const Args& args) {
    const MergeWork& work = args.work;
    const KvMergeCache& a = work.call;
    const int key_bytes = a.key_size * args.element, value_bytes = a.value_size * args.element;
    const int key_blocks = blocks_of(key_bytes), each = key_blocks + blocks_of(value_bytes),
              number = block.index() % each;
    const MergeHead head(work, block.index() / each);
    const HeadInfo x = head.info();
    if (untouched(work, x)) return;
    const bool keys = number < key_blocks;
    const int bytes = keys ? key_bytes : value_bytes, offset = (keys ? number : number - key_blocks) * kVectors * 16,
              width = min_of(bytes - offset, kVectors * 16);
    char* cache = static_cast<char*>(keys ? a.present.key : a.present.value) + head.first * bytes + offset;
    const size_t merged_bytes = key_bytes + value_bytes;
    const char* merged = static_cast<const char*>(work.merged) +
                         static_cast<size_t>(head.index) * work.most_evicted * merged_bytes + (keys ? 0 : key_bytes) +
                         offset;
    const int *rows = head.of(work.changed), *source = head.of(work.source);
    block.each([&](int t, auto&) {
      const int at = t % kVectors * 16;
      for (int i = t / kVectors; at < width && i < x.changed; i += kLanes) {
        const int from = source[i];
        const char* row = from >= 0 ? cache + static_cast<size_t>(from) * bytes : merged + ~from * merged_bytes;
        store_vector(cache + static_cast<size_t>(rows[i]) * bytes + at, load_vector(row + at));
      }
    });
    const int end = work.in_place ? x.in_all : head.own.capacity;
    block.each([&](int t, auto&) {
      const int at = t % kVectors * 16;
      for (int row = x.kept + t / kVectors; at < width && row < end; row += kLanes)
        store_vector(cache + static_cast<size_t>(row) * bytes + at, Vector{});
    });
  }
};

// Rotates the keys of kept rows from their places before the merge to their new ones; a rotary plane of a row per
// thread.
template <class T>
struct Turn {
  struct Args {
    MergeWork work;
    int start[kTable + 1];  // the blocks before those of each entry
  };
  static constexpr int kThreads = 128, kBlocksPerMultiprocessor = 1, kRows = 32;
  struct Registers {};
  static KV_HD int tiles_of(const MergeEntry& entry) {
    return (min_of(entry.budget, entry.capacity) + kRows - 1) / kRows;
  }

  static KV_DEVICE void run(Block<Turn>& block, const Args& args) {
    const MergeWork& work = args.work;
    const KvMergeCache& a = work.call;
    const int entry = entry_of(args.start, block.index()), tiles = tiles_of(work.entry[entry]),
              number = block.index() - args.start[entry], planes = a.rotary_planes;
    const MergeHead head(work, entry, number / tiles);
    const HeadInfo x = head.info();
    if (x.evicted == 0) return;
    const int first = number % tiles * kRows, rows = min_of(kRows, x.kept - first);
    const int *row_of = head.of(work.row) + first, *steps = head.of(work.steps) + first;
    T* keys = head.template keys<T>();
    block.each([&](int t, auto&) {
      for (int i = t; i < rows * planes; i += kThreads) {
        const int place = i / planes, plane = i % planes;
        if (steps[place] == 0) continue;
        const float angle = static_cast<float>(steps[place]) * a.inverse_frequencies[plane];
        T* key = keys + static_cast<size_t>(row_of[place]) * a.key_size;
        T &first = key[a.rotary_interleaved ? 2 * plane : plane],
          &second = key[a.rotary_interleaved ? 2 * plane + 1 : plane + planes];
        float x = to_float(first), y = to_float(second);
        turn(cosf(angle), sinf(angle), &x, &y);
        assign(first, x);
        assign(second, y);
      }
    });
  }
};

}  // namespace cuda
}  // namespace kv
