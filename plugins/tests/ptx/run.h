// The runtime of kernels that are translated from PTX: every CUDA thread is a fiber, blocks run one after another, and
// memory.cpp checks that barriers, fences and atomic operations order every access to shared and global memory.
//
// `site` is the source line of an instruction: the number of its file in the PTX, shifted, and the line (translate.py).
#pragma once

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "arithmetic.h"

namespace kv {
namespace ptx {

// ---- the functions that translated code calls ----

struct Copy {
  uint64_t to, from;
  int bytes, site;
};

struct Thread {
  enum State { kReady, kAtBarrier, kInWarp, kEnded };
  uint32_t number = 0;
  State state = kReady;
  void* stack_pointer = nullptr;
  uint64_t instructions = 0;
  std::vector<int>* stretches = nullptr;  // gets the number of every stretch that the thread runs (trips.py)
  bool waited = false;                    // for the end of earlier launches
  // At a barrier or in an operation of its warp: the line, the kind of operation, its input and output.
  int site = 0, kind = 0;
  const void* input = nullptr;
  void* output = nullptr;
  // Asynchronous copies of the open batch, and the committed batches.
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> committed;
  bool unfenced = false;      // whether it wrote to global memory after its last fence
  uint32_t fenced_phase = 0;  // the phase of that fence
  size_t acquired = 0;        // how many of the block's acquisitions (memory.cpp) came before its last fence
};

struct Launched {
  uint64_t arguments, shared;
  uint32_t block, blocks, threads;
};

Thread& thread();
const Launched& launched();
inline void count(int stretch, int instructions) {
  Thread& t = thread();
  t.instructions += instructions;
  if (t.stretches) t.stretches->push_back(stretch);
}

void barrier(int site);
void fence();
void wait_for_earlier(int site);
void read(uint64_t at, int bytes, int site);
void write(uint64_t at, const void* row, int bytes, int site);
inline void store_local(uint64_t at, const void* row, int bytes) { memcpy(reinterpret_cast<void*>(at), row, bytes); }
template <class T>
T load(uint64_t at) {
  T x;
  memcpy(&x, reinterpret_cast<const void*>(at), sizeof x);
  return x;
}

void note_atomic(uint64_t at, int bytes, int site);
template <class T, class F>
T atomic(uint64_t at, int site, F next) {
  note_atomic(at, sizeof(T), site);
  const T old = load<T>(at), now = next(old);
  store_local(at, &now, sizeof now);
  return old;
}
template <class T>
T atomic_add(uint64_t at, T x, int site) {
  return atomic<T>(at, site, [x](T old) { return static_cast<T>(old + x); });
}
template <class T>
T atomic_min(uint64_t at, T x, int site) {
  return atomic<T>(at, site, [x](T old) { return x < old ? x : old; });
}
template <class T>
T atomic_max(uint64_t at, T x, int site) {
  return atomic<T>(at, site, [x](T old) { return x > old ? x : old; });
}

void copy_async(uint64_t to, uint64_t from, int bytes, int site);
void copy_commit();
void copy_wait(int pending);

struct Shuffled {
  uint32_t value;
  bool inside;
};
Shuffled shuffle(uint32_t x, uint32_t by, uint32_t segment, uint32_t mask, int site);
int32_t warp_max(int32_t x, uint32_t mask, int site);
void load_matrices(uint64_t from, bool transposed, uint32_t (&rows)[4], int site);
struct Matrices {
  uint32_t a[4], b[2];
  float c[4];
};
void multiply(const Matrices& in, float (&sum)[4], int site);

// A kernel, which registers itself when the library is loaded.
struct Known {
  const char* program;
  void (*main)();
  int shared, parameters;
  std::vector<std::pair<int, const char*>> files;
  Known(const char* program, void (*main)(), int shared, int parameters,
        std::initializer_list<std::pair<int, const char*>> files);
};

// ---- shared by the files of the runtime ----

constexpr int kWarp = 32;

// `report` reports a fault of the running kernel and ends the launch; `place` returns a site as text.
void report(int site, const char* format, ...) __attribute__((format(printf, 2, 3)));
std::string place(int site);

// memory.cpp
void begin_launch(bool late_copies);
void begin_block();
void begin_phase();
void end_thread();
bool is_shared(uint64_t at);
void set_shared(uint64_t begin, uint64_t end);
void set_private(uint64_t begin, uint64_t end);  // stacks, whose addresses only their own thread has
Thread* threads();

// warp.cpp: performs the operation to which all lanes of a warp have come. `meet` waits for the other lanes.
void perform(Thread* lanes);
void meet(int kind, int site, const void* input, void* output);

}  // namespace ptx
}  // namespace kv
