// Runs blocks and their threads. Each thread is a fiber that runs up to a barrier or an operation of its warp. Order 0
// runs threads and blocks forwards, 1 backwards, 2 in random order.
#include "run.h"

#include <cxxabi.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>

#include "launch.h"

// Switches to another fiber; the registers that a call must preserve go onto the stack.
extern "C" void kv_ptx_switch(void** saved, void* to);
asm(R"(
.globl kv_ptx_switch
kv_ptx_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace kv {
namespace ptx {
namespace {

constexpr size_t kStack = 256 << 10, kMostThreads = 512, kSharedBytes = 1 << 20, kGuard = 4096;

struct Runner {
  std::map<std::string, const Known*> programs;
  struct Counts {
    uint64_t all = 0, warps = 0, longest = 0;  // of all threads; of every warp's longest thread; of the longest thread
  };
  std::map<std::string, Counts> instructions;
  std::map<std::string, std::vector<int>> stretches;  // of the first thread of a program's last block
  const Known* running = nullptr;
  Launched launched{};
  std::vector<Thread> threads;
  Thread* current = nullptr;
  bool in_thread = false, stopped = false;  // whether a thread runs; whether a fault has ended the launch
  void* scheduler = nullptr;
  char *stacks = nullptr, *shared_end = nullptr;
  std::string text;  // the reports
  uint64_t random = 88172645463325252ull;

  uint64_t next() {
    random ^= random << 13, random ^= random >> 7, random ^= random << 17;
    return random;
  }
};

Runner& runner() {
  static Runner instance;
  return instance;
}

void yield() { kv_ptx_switch(&runner().current->stack_pointer, runner().scheduler); }

void fiber() {
  runner().running->main();
  end_thread();
  runner().current->state = Thread::kEnded;
  yield();
}

void start(uint32_t number) {
  Runner& r = runner();
  Thread& t = r.threads[number];
  t = Thread();
  t.number = number;
  uint64_t* top = reinterpret_cast<uint64_t*>(r.stacks + (number + 1) * kStack - 64);
  *--top = 0;
  *--top = reinterpret_cast<uint64_t>(&fiber);
  for (int i = 0; i < 6; ++i) *--top = 0;
  t.stack_pointer = top;
}

void* mapped(size_t bytes, int flags) {
  void* memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
  if (memory == MAP_FAILED) abort();
  return memory;
}

// Allocates stacks and shared memory once. A page without access follows shared memory, whose addresses have 32 bits as
// on a device.
void allocate() {
  Runner& r = runner();
  if (r.stacks) return;
  r.stacks = static_cast<char*>(mapped(kMostThreads * kStack, 0));
  char* shared = static_cast<char*>(mapped(kSharedBytes + kGuard, MAP_32BIT));
  r.shared_end = shared + kSharedBytes;
  mprotect(r.shared_end, kGuard, PROT_NONE);
  set_shared(reinterpret_cast<uint64_t>(shared), reinterpret_cast<uint64_t>(r.shared_end));
  set_private(reinterpret_cast<uint64_t>(r.stacks), reinterpret_cast<uint64_t>(r.stacks) + kMostThreads * kStack);
  r.threads.resize(kMostThreads);
}

// Performs a warp's operation if all its lanes have come to it; returns whether they have.
bool advance_warp(uint32_t warp) {
  Thread* lanes = &runner().threads[warp * kWarp];
  for (int i = 0; i < kWarp; ++i)
    if (lanes[i].state != Thread::kInWarp || lanes[i].site != lanes[0].site || lanes[i].kind != lanes[0].kind)
      return false;
  perform(lanes);
  for (int i = 0; i < kWarp; ++i) lanes[i].state = Thread::kReady;
  return true;
}

// Removes and returns the next thread among the ready ones; -1 if there is none.
int next_thread(std::vector<uint32_t>& ready, int order) {
  if (ready.empty()) return -1;
  auto chosen = order == 0   ? std::min_element(ready.begin(), ready.end())
                : order == 1 ? std::max_element(ready.begin(), ready.end())
                             : ready.begin() + runner().next() % ready.size();
  std::swap(*chosen, ready.back());
  const uint32_t thread = ready.back();
  ready.pop_back();
  return static_cast<int>(thread);
}

// Runs threads until all are at a barrier, have ended, or wait for lanes that do not come.
void run_phase(std::vector<uint32_t>& ready, int order) {
  Runner& r = runner();
  const uint32_t warps = r.launched.threads / kWarp;
  for (bool advanced = true; advanced;) {
    for (int next; (next = next_thread(ready, order)) >= 0;) {
      r.current = &r.threads[next];
      r.in_thread = true;
      kv_ptx_switch(&r.scheduler, r.current->stack_pointer);
      r.in_thread = false;
      if (r.stopped) return;
    }
    advanced = false;
    for (uint32_t warp = 0; warp < warps; ++warp) {
      if (!advance_warp(warp)) continue;
      for (uint32_t lane = 0; lane < kWarp; ++lane) ready.push_back(warp * kWarp + lane);
      advanced = true;
    }
  }
}

// Runs a block; returns false after a fault.
bool run_block(int order) {
  Runner& r = runner();
  std::vector<uint32_t> ready;
  for (uint32_t i = 0; i < r.launched.threads; ++i) start(i), ready.push_back(i);
  r.threads[0].stretches = &r.stretches[r.running->program];
  r.threads[0].stretches->clear();
  begin_block();
  for (;;) {
    run_phase(ready, order);
    if (r.stopped) return false;
    uint32_t at_barrier = 0, ended = 0;
    const Thread* stuck = nullptr;
    for (uint32_t i = 0; i < r.launched.threads; ++i) {
      r.current = &r.threads[i];
      at_barrier += r.current->state == Thread::kAtBarrier, ended += r.current->state == Thread::kEnded;
      if (r.current->state == Thread::kInWarp && !stuck) stuck = r.current;
    }
    if (stuck) return report(stuck->site, "lanes of a warp wait here for others that do not come"), false;
    if (at_barrier == 0) break;
    if (ended > 0) return report(r.threads[0].site, "a barrier after some threads have ended"), false;
    begin_phase();
    for (uint32_t i = 0; i < r.launched.threads; ++i)
      if (r.threads[i].state == Thread::kAtBarrier) r.threads[i].state = Thread::kReady, ready.push_back(i);
  }
  Runner::Counts& counts = r.instructions[r.running->program];
  for (uint32_t i = 0; i < r.launched.threads; i += 32) {
    uint64_t longest = 0;
    for (uint32_t j = i; j < i + 32 && j < r.launched.threads; ++j) {
      counts.all += r.threads[j].instructions;
      longest = std::max(longest, r.threads[j].instructions);
    }
    counts.warps += longest;
    counts.longest = std::max(counts.longest, longest);
  }
  return true;
}

std::string demangled(const char* name) {
  int status = 0;
  std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(name, nullptr, nullptr, &status), free);
  return status == 0 ? text.get() : name;
}

}  // namespace

Known::Known(const char* program, void (*main)(), int shared, int parameters,
             std::initializer_list<std::pair<int, const char*>> files)
    : program(program), main(main), shared(shared), parameters(parameters), files(files) {
  runner().programs[program] = this;
}

Thread& thread() { return *runner().current; }
Thread* threads() { return runner().threads.data(); }
const Launched& launched() { return runner().launched; }

std::string place(int site) {
  for (const auto& file : runner().running->files)
    if (file.first == site >> 16) return std::string(file.second) + ":" + std::to_string(site & 0xffff);
  return "an unknown place";
}

void report(int site, const char* format, ...) {
  char text[400];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  Runner& r = runner();
  r.text += std::string(r.running->program) + ", " + place(site) + ": " + text + " (block " +
            std::to_string(r.launched.block) + ", thread " + std::to_string(r.current->number) + ")\n";
  r.stopped = true;
  if (r.in_thread) yield();  // does not return: a faulty kernel could end the process
}

void barrier(int site) {
  thread().state = Thread::kAtBarrier, thread().site = site;
  yield();
}

void meet(int kind, int site, const void* input, void* output) {
  Thread& t = thread();
  t.state = Thread::kInWarp, t.kind = kind, t.site = site, t.input = input, t.output = output;
  yield();
}

const char* launch(const char* type, const void* arguments, size_t size, size_t blocks, int threads, size_t shared,
                   int order, bool late_copies) {
  Runner& r = runner();
  const auto program = r.programs.find(demangled(type));
  if (program == r.programs.end())
    return "this kernel's PTX was not translated: python plugins/build.py cuda-ptx --all";
  r.running = program->second;
  if (static_cast<int>(size) != r.running->parameters) return "a kernel takes parameters of another size";
  allocate();
  const size_t shared_bytes = r.running->shared + shared;
  if (shared_bytes > kSharedBytes) return "a kernel needs more shared memory than there is to run its PTX";
  alignas(16) uint8_t copied_arguments[4096] = {};
  memcpy(copied_arguments, arguments, size);
  r.launched.arguments = reinterpret_cast<uint64_t>(copied_arguments);
  r.launched.shared = reinterpret_cast<uint64_t>(r.shared_end) - (shared_bytes + 15) / 16 * 16;
  r.launched.blocks = static_cast<uint32_t>(blocks), r.launched.threads = threads;
  begin_launch(late_copies);
  r.stopped = false;
  std::vector<uint32_t> turns(blocks);
  for (size_t i = 0; i < blocks; ++i) turns[i] = static_cast<uint32_t>(order == 1 ? blocks - 1 - i : i);
  for (size_t i = blocks; order == 2 && i > 1; --i) std::swap(turns[i - 1], turns[r.next() % i]);
  for (const uint32_t block : turns) {
    r.launched.block = block;
    memset(reinterpret_cast<void*>(r.launched.shared), 0xff, shared_bytes);
    if (!run_block(order)) return "a fault, which kv_ptx_reports names";
  }
  return nullptr;
}

}  // namespace ptx
}  // namespace kv

// For tests: return the reports since the last call, one a line; and the number of a program's instructions since the
// last call: 0 of all threads, 1 of every warp's longest thread, 2 of the longest thread.
extern "C" const char* kv_ptx_reports() {
  static std::string text;
  kv::ptx::Runner& r = kv::ptx::runner();
  text = r.text;
  r.text.clear();
  return text.c_str();
}
// The stretches of instructions that the first thread of a program's last block ran, and how many they are.
extern "C" const int* kv_ptx_stretches(const char* program, size_t* count) {
  const std::vector<int>& stretches = kv::ptx::runner().stretches[program];
  *count = stretches.size();
  return stretches.data();
}
extern "C" uint64_t kv_ptx_instructions(const char* program, int of) {
  auto& counts = kv::ptx::runner().instructions[program];
  uint64_t& count = of == 0 ? counts.all : of == 1 ? counts.warps : counts.longest;
  return std::exchange(count, 0);
}
