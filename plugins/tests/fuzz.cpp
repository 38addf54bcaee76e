// Random calls of the C ABI, checked for what must hold whatever the input: nothing outside its buffers, in place or
// not and on any threads the same bits, the invariants of docs/contract.md, and VoteAttention's figures against plain
// loops in double precision.
//
//   kv_fuzz SEED CASES
//
// Case i of seed s is case 0 of seed s + i; where one fails that seed is printed, and its shapes, and the exit code
// is 1. One case in eight is hostile: NaN and infinite numbers, lengths that do not fit. Then only memory and bits are
// checked.
#include <cstdlib>

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
    fprintf(stderr, "kv_fuzz %llu 1 (%s): %s\n  %s\n", static_cast<unsigned long long>(seed), kv_cpu_isa(),
            failure.what.c_str(), one.describe().c_str());
    return false;
  }
  return true;
}

}  // namespace
}  // namespace fuzz

int main(int count, char** arguments) {
  if (count != 3) {
    fprintf(stderr, "kv_fuzz SEED CASES\n");
    return 2;
  }
  const uint64_t seed = strtoull(arguments[1], nullptr, 10), cases = strtoull(arguments[2], nullptr, 10);
  for (uint64_t i = 0; i < cases; ++i)
    if (!fuzz::holds<fuzz::AttentionCase>(seed + i) || !fuzz::holds<fuzz::MergeCase>(seed + i) ||
        !fuzz::holds<fuzz::LinearCase>(seed + i))
      return 1;
  printf("%s: %llu cases of each operator\n", kv_cpu_isa(), static_cast<unsigned long long>(cases));
  return 0;
}
