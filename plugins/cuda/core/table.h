// Launches over KV heads of several capacities. A table in the arguments of a launch has up to kTable entries: heads of
// one capacity are one entry, other heads an entry each. One launch has the blocks of all of them:
//
//   block -> entry of the table, head of a sequence, share of the head
#pragma once

#include "launch.h"

namespace kv {
namespace cuda {

constexpr int kTable = 32;  // the most entries of a table, a power of two

// Returns the entry that block `block` belongs to. start: the blocks before those of each entry; behind the last entry,
// all blocks.
KV_DEVICE int entry_of(const int (&start)[kTable + 1], int block) {
  int entry = 0;
  if (block < start[1]) return entry;  // all blocks of heads of one capacity
#pragma unroll
  for (int step = kTable / 2; step > 0; step /= 2)
    if (block >= start[entry + step]) entry += step;
  return entry;
}

// Sets `start` for entry_of. blocks_of(entry): the blocks of an entry.
template <class F>
void set_starts(int (&start)[kTable + 1], int entries, F blocks_of) {
  start[0] = 0;
  for (int i = 0; i < kTable; ++i) start[i + 1] = start[i] + (i < entries ? blocks_of(i) : 0);
}

// The shares of a head's units of work when a share has at most `each` of them: their number, and the units of the
// largest.
struct Shares {
  int count, largest;
  Shares(int units, int each) : count((units + each - 1) / each), largest((units + count - 1) / count) {}
};

// Returns the most shares of `heads` heads together: one of each head, or eight waves of blocks. places: the blocks
// that run at a time.
inline size_t most_shares_of_all(size_t heads, size_t places) { return 8 * places > heads ? 8 * places : heads; }

// Returns the estimated time when a share has at most `each` units, and blocks begin with the largest shares. A share
// takes its units of work, and half a unit for its fixed work. The time is at least that of all work divided among the
// places, and, because block n of the order is on a place with n / places larger ones, that many times its own.
inline size_t time_of_shares(const int (&units)[kTable], int entries, size_t heads, int each, size_t places) {
  size_t blocks_of[kTable], time_of[kTable], work = 0, blocks = 0, longest = 0;
  for (int i = 0; i < entries; ++i) {
    const Shares shares(units[i], each);
    const size_t own = heads * shares.count, time = 2 * static_cast<size_t>(shares.largest) + 1;
    work += 2 * heads * units[i] + own;
    int at = i;
    for (; at > 0 && time_of[at - 1] < time; --at) time_of[at] = time_of[at - 1], blocks_of[at] = blocks_of[at - 1];
    time_of[at] = time, blocks_of[at] = own;
  }
  for (int i = 0; i < entries; ++i) {
    blocks += blocks_of[i];
    const size_t time = ((blocks - 1) / places + 1) * time_of[i];
    if (time > longest) longest = time;
  }
  const size_t shared = (work + places - 1) / places;
  return shared > longest ? shared : longest;
}

// Returns the most units of work of a share with the least estimated time; a tie goes to the fewest shares.
// units: those of a head of each entry, at least 1; heads: those of an entry, over all sequences.
inline int largest_share(const int (&units)[kTable], int entries, size_t heads, size_t places) {
  const size_t most_blocks = most_shares_of_all(heads * entries, places);
  int most = 1, best = 1;
  for (int i = 0; i < entries; ++i) most = max_of(most, units[i]);
  size_t least = SIZE_MAX;
  for (int shares = 1, last = 0; shares <= min_of(most, kMostShares); ++shares) {
    const int each = (most + shares - 1) / shares;
    if (each == last) continue;
    last = each;
    size_t blocks = 0;
    for (int i = 0; i < entries; ++i) blocks += heads * Shares(units[i], each).count;
    if (blocks > most_blocks) break;
    const size_t time = time_of_shares(units, entries, heads, each, places) * 16 + shares;
    if (time < least) least = time, best = each;
  }
  return best;
}

}  // namespace cuda
}  // namespace kv
