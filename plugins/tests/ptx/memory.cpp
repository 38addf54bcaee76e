// The check of every access to memory, byte by byte: something must order it with accesses of other threads.
//
//   Within a block       A barrier ends a phase. Two threads' accesses to a byte in one phase race if one of them
//                        writes; two atomic operations do not race, nor do writes that change nothing.
//   Between blocks       An atomic operation after a barrier and a fence publishes that a block's earlier phases are
//                        over (a release). A block whose atomic operation at that address comes later knows this;
//                        after a fence and a barrier (an acquire), its threads' reads are ordered.
//   Between launches     A thread may write global memory, and read global memory that is not constant, after it has
//                        waited for the end of earlier launches. All threads must wait. This orders everything.
//   Asynchronous copies  Until its thread has waited for a copy, no thread may access the bytes that it fills.
//
// Blocks run one after another, and the check is whether anything orders two accesses, not which came first. So a fault
// is found without luck.
#include <algorithm>
#include <map>
#include <memory>
#include <unordered_map>

#include "run.h"

namespace kv {
namespace ptx {
namespace {

// Phases are numbered through all blocks and launches.
struct Cell {
  uint32_t written = 0, read = 0, first_read = 0;  // phases: of the last write and read, of the first read in a launch
  uint16_t writer = 0, reader = 0;                 // threads; kSeveral
  uint16_t copying = 0;                            // 1 + the thread whose asynchronous copy is under way
  bool atomic = false;                             // whether the last write was atomic
  int write_site = 0, read_site = 0;
};
constexpr uint16_t kSeveral = 0xffff;
constexpr uint64_t kPage = 4096;

// A block's knowledge from an atomic operation: the phases [from, until) of another block are over.
struct Acquisition {
  uint32_t from, until;    // phases of the other block
  uint32_t phase;          // the own phase of the atomic operation
  uint32_t thread_number;  // its thread
};

struct Range {
  uint64_t begin = 0, end = 0;
  bool contains(uint64_t at) const { return at >= begin && at < end; }
};

struct Memory {
  std::unordered_map<uint64_t, std::unique_ptr<Cell[]>> pages;
  uint64_t recent_page[64];
  Cell* recent[64] = {};
  Range shared, own;
  bool late_copies = false;
  uint32_t phase = 0, block_began = 0, launch_began = 0;
  size_t acquired = 0;  // how many acquisitions count for the whole block
  std::vector<Acquisition> acquisitions;
  std::map<uint64_t, std::vector<Acquisition>> releases;  // by the address of the atomic operation

  Cell& cell(uint64_t at) {
    const uint64_t page = at / kPage, slot = page % 64;
    if (!recent[slot] || recent_page[slot] != page) {
      std::unique_ptr<Cell[]>& cells = pages[page];
      if (!cells) cells.reset(new Cell[kPage]);
      recent[slot] = cells.get(), recent_page[slot] = page;
    }
    return recent[slot][at % kPage];
  }
  // Returns whether a thread's accesses are ordered after a phase of another block.
  bool ordered(uint32_t other, const Thread& t) const {
    if (other < launch_began || other >= block_began) return true;
    const size_t known = std::max(acquired, t.acquired);
    for (size_t i = 0; i < known; ++i)
      if (other >= acquisitions[i].from && other < acquisitions[i].until) return true;
    return false;
  }
  bool raced(uint32_t phase_of, uint16_t by, const Thread& t) const { return phase_of == phase && by != t.number; }
};

// Every access of a kernel calls this function for each byte, so that it has no guard of a static variable.
Memory instance;
Memory& memory() { return instance; }

const char* space(uint64_t at) { return is_shared(at) ? "shared" : "global"; }

void aligned(uint64_t at, int bytes, int site) {
  if (at % bytes) report(site, "%d bytes at an address that is no multiple of that", bytes);
}

// Reports an access to global memory before the wait for earlier launches.
enum Access { kReads, kWrites };
void after_earlier(uint64_t at, int site, Access access) {
  if (thread().waited || is_shared(at) || memory().own.contains(at)) return;
  report(site, "%s global bytes before it has waited for earlier launches", access == kReads ? "reads" : "writes");
}

// Calls check(cell) for each byte up to the first fault.
template <class F>
void each_cell(uint64_t at, int bytes, F check) {
  Cell* cell = &memory().cell(at);
  for (int i = 0; i < bytes; ++i, ++cell) {
    if (i > 0 && (at + i) % kPage == 0) cell = &memory().cell(at + i);
    if (check(*cell)) return;
  }
}

bool check_read(Cell& cell, uint64_t at, int site, const Thread& t) {
  Memory& m = memory();
  if (cell.copying) return report(site, "reads %s bytes that an asynchronous copy is filling", space(at)), true;
  if (m.raced(cell.written, cell.writer, t))
    return report(site, "reads %s bytes that another thread wrote in the same phase, at %s", space(at),
                  place(cell.write_site).c_str()),
           true;
  if (!m.ordered(cell.written, t) && !is_shared(at))
    return report(site, "reads global bytes that another block wrote, at %s, and nothing orders the two",
                  place(cell.write_site).c_str()),
           true;
  return false;
}

void note_read(Cell& cell, int site, const Thread& t) {
  Memory& m = memory();
  if (cell.first_read < m.launch_began) cell.first_read = m.phase;
  cell.reader = cell.read == m.phase && cell.reader != t.number ? kSeveral : t.number;
  cell.read = m.phase, cell.read_site = site;
}

bool check_write(Cell& cell, uint64_t at, int site, bool atomic, bool same, const Thread& t) {
  Memory& m = memory();
  if (cell.copying && cell.copying != t.number + 1)
    return report(site, "writes %s bytes that an asynchronous copy is filling", space(at)), true;
  if (same) return false;
  if (m.raced(cell.written, cell.writer, t) && !(atomic && cell.atomic))
    return report(site, "writes %s bytes that another thread wrote in the same phase, at %s", space(at),
                  place(cell.write_site).c_str()),
           true;
  if (m.raced(cell.read, cell.reader, t))
    return report(site, "writes %s bytes that another thread read in the same phase, at %s", space(at),
                  place(cell.read_site).c_str()),
           true;
  if (is_shared(at) || (atomic && cell.atomic)) return false;
  if (!m.ordered(cell.written, t))
    return report(site, "writes global bytes that another block wrote, at %s, and nothing orders the two",
                  place(cell.write_site).c_str()),
           true;
  if (!m.ordered(cell.read, t) || !m.ordered(cell.first_read, t))
    return report(site, "writes global bytes that another block read, at %s, and nothing orders the two",
                  place(cell.read_site).c_str()),
           true;
  return false;
}

void note_write(Cell& cell, int site, bool atomic, const Thread& t) {
  cell.written = memory().phase, cell.writer = t.number, cell.atomic = atomic, cell.write_site = site;
}

}  // namespace

bool is_shared(uint64_t at) { return memory().shared.contains(at); }
void set_shared(uint64_t begin, uint64_t end) { memory().shared = {begin, end}; }
void set_private(uint64_t begin, uint64_t end) { memory().own = {begin, end}; }

void begin_launch(bool late_copies) {
  Memory& m = memory();
  m.late_copies = late_copies, m.launch_began = m.phase + 1;
  m.releases.clear();
}

void begin_block() {
  Memory& m = memory();
  m.block_began = ++m.phase;
  m.acquisitions.clear(), m.acquired = 0;
}

// The acquisitions that a thread fenced count for all threads after a barrier.
void begin_phase() {
  Memory& m = memory();
  for (uint32_t i = 0; i < launched().threads; ++i) m.acquired = std::max(m.acquired, threads()[i].acquired);
  ++m.phase;
}

void end_thread() {
  size_t left = thread().open.size();
  for (const auto& batch : thread().committed) left += batch.size();
  if (left > 0) report(thread().site, "the thread ended with asynchronous copies on their way");
  if (!thread().waited) report(thread().site, "the thread ended and had not waited for earlier launches");
}

void wait_for_earlier(int site) { thread().waited = true, thread().site = site; }

void read(uint64_t at, int bytes, int site) {
  aligned(at, bytes, site);
  after_earlier(at, site, kReads);
  if (memory().own.contains(at)) return;
  const Thread& t = thread();
  each_cell(at, bytes, [&](Cell& cell) { return check_read(cell, at, site, t); });
  each_cell(at, bytes, [&](Cell& cell) { return note_read(cell, site, t), false; });
}

void write(uint64_t at, const void* row, int bytes, int site) {
  aligned(at, bytes, site);
  after_earlier(at, site, kWrites);
  if (!memory().own.contains(at)) {
    Thread& t = thread();
    const bool same = memcmp(reinterpret_cast<const void*>(at), row, bytes) == 0;
    each_cell(at, bytes, [&](Cell& cell) { return check_write(cell, at, site, false, same, t); });
    each_cell(at, bytes, [&](Cell& cell) { return note_write(cell, site, false, t), false; });
    if (!is_shared(at)) t.unfenced = true;
  }
  store_local(at, row, bytes);
}

// An atomic operation releases the block's earlier phases if every thread that wrote has fenced before a barrier, or if
// its own thread has fenced after a barrier.
void note_atomic(uint64_t at, int bytes, int site) {
  Memory& m = memory();
  const Thread& t = thread();
  aligned(at, bytes, site);
  after_earlier(at, site, kWrites);
  each_cell(at, bytes, [&](Cell& cell) { return check_write(cell, at, site, true, false, t); });
  each_cell(at, bytes, [&](Cell& cell) { return note_write(cell, site, true, t), false; });
  if (is_shared(at)) return;
  bool fenced = t.fenced_phase == m.phase;
  if (!fenced) {
    fenced = true;
    for (uint32_t i = 0; i < launched().threads; ++i) fenced &= !threads()[i].unfenced;
  }
  std::vector<Acquisition>& released = m.releases[at];
  for (const Acquisition& one : released) m.acquisitions.push_back({one.from, one.until, m.phase, t.number});
  if (fenced) released.push_back({m.block_began, m.phase, 0, 0});
}

void fence() {
  Memory& m = memory();
  Thread& t = thread();
  t.unfenced = false, t.fenced_phase = m.phase;
  while (t.acquired < m.acquisitions.size() &&
         (m.acquisitions[t.acquired].phase < m.phase || m.acquisitions[t.acquired].thread_number == t.number))
    ++t.acquired;
}

// ---- asynchronous copies ----

void copy_async(uint64_t to, uint64_t from, int bytes, int site) {
  aligned(to | from, bytes, site);
  after_earlier(from, site, kReads);
  Thread& t = thread();
  each_cell(from, bytes, [&](Cell& cell) { return check_read(cell, from, site, t); });
  each_cell(from, bytes, [&](Cell& cell) { return note_read(cell, site, t), false; });
  each_cell(to, bytes, [&](Cell& cell) {
    if (cell.copying) return report(site, "copies over bytes that another copy is filling"), true;
    return check_write(cell, to, site, false, false, t);
  });
  each_cell(to, bytes, [&](Cell& cell) {
    note_write(cell, site, false, t), cell.copying = static_cast<uint16_t>(t.number + 1);
    return false;
  });
  if (!memory().late_copies) memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  t.open.push_back({to, from, bytes, site});
}

void copy_commit() {
  thread().committed.push_back(std::move(thread().open));
  thread().open.clear();
}

void copy_wait(int pending) {
  Thread& t = thread();
  std::vector<std::vector<Copy>>& batches = t.committed;
  while (batches.size() > static_cast<size_t>(pending)) {
    for (const Copy& copy : batches.front()) {
      if (memory().late_copies)
        memcpy(reinterpret_cast<void*>(copy.to), reinterpret_cast<const void*>(copy.from), copy.bytes);
      each_cell(copy.from, copy.bytes, [&](Cell& cell) { return check_read(cell, copy.from, copy.site, t); });
      each_cell(copy.to, copy.bytes, [&](Cell& cell) {
        note_write(cell, copy.site, false, t), cell.copying = 0;
        return false;
      });
    }
    batches.erase(batches.begin());
  }
}

}  // namespace ptx
}  // namespace kv
