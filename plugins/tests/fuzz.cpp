// Random calls of the C ABI, checked for properties that hold for any input: no access outside of buffers, the same
// bits in place or not and on any threads, the invariants of docs/reference/contract.md, and the numbers of
// VoteAttention, Linear and Experts against plain loops in double precision.
//
//   kv_fuzz SEED CASES [linear|small]
//
// linear: only calls of Linear and Experts. small: only small shapes, some hundred times as many cases in a second.
//
// Case i of seed s is case 0 of seed s + i. If a case fails, its seed and shapes are printed, and the exit code is 1.
// One case in eight is hostile: NaN and infinite numbers, lengths that do not fit; for these only memory and bits are
// checked.
#include <cstdlib>

#include "experts_case.h"
#include "linear_case.h"
#include "merge_cache_case.h"
#include "vote_attention_case.h"

namespace fuzz {
namespace {

template <class Case>
bool holds(uint64_t seed) {
  Random random(seed);
  Case one(random);
  try {
    one.check_all(random);
  } catch (const Failure& failure) {
    fprintf(stderr, "kv_fuzz %llu 1%s (%s): %s\n  %s\n", static_cast<unsigned long long>(seed),
            work_share < 1 ? " small" : "", kv_cpu_isa(), failure.what.c_str(), one.describe().c_str());
    return false;
  }
  return true;
}

// Returns whether a query of another type than the cache is refused.
bool refuses_two_types() {
  KvVoteAttention call{};
  call.query_type = KV_FLOAT16, call.cache_type = KV_FLOAT32;
  const char* problem = kv_cpu_vote_attention(&call, {nullptr, nullptr});
  if (problem && strstr(problem, "another type than the cache")) return true;
  fprintf(stderr, "kv_fuzz: a query of float16 over a cache of float32: %s\n", problem ? problem : "taken");
  return false;
}

}  // namespace
}  // namespace fuzz

// Undefined behaviour ends the program by an illegal instruction, for which the address sanitizer prints the line.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() { return "handle_sigill=1"; }

int main(int count, char** arguments) {
  const bool linear = count == 4 && strcmp(arguments[3], "linear") == 0;
  const bool small = count == 4 && strcmp(arguments[3], "small") == 0;
  if (count != 3 && !linear && !small) {
    fprintf(stderr, "kv_fuzz SEED CASES [linear|small]\n");
    return 2;
  }
  if (small) fuzz::work_share = 1.0 / 512;
  const uint64_t seed = strtoull(arguments[1], nullptr, 10), cases = strtoull(arguments[2], nullptr, 10);
  if (!fuzz::refuses_two_types()) return 1;
  for (uint64_t i = 0; i < cases; ++i)
    if ((!linear && !(fuzz::holds<fuzz::AttentionCase>(seed + i) && fuzz::holds<fuzz::MergeCase>(seed + i))) ||
        !fuzz::holds<fuzz::LinearCase>(seed + i) || !fuzz::holds<fuzz::ExpertsCase>(seed + i))
      return 1;
  printf("%s: %llu cases of each operator, %llu calls\n", kv_cpu_isa(), static_cast<unsigned long long>(cases),
         static_cast<unsigned long long>(fuzz::kernel_calls));
  return 0;
}
