// The rows that each expert computes in a call: a token's row once for every expert that it chose.
//
//   count the rows of every expert; begin each expert's rows where the rows of the expert before it end
//   put (token, factor) in the rows of their experts, token by token
//
// So rows are in the order of experts, and those of an expert in the order of tokens, in every run.
#pragma once

#include "../../abi/experts.h"
#include "../core/scratch.h"
#include "../core/simd.h"

namespace kv {
namespace KV_ISA {

// The rows [first, first + count) of one expert.
struct Group {
  int64_t expert, first, count;
};

struct Routes {
  int64_t rows = 0, groups = 0;
  const Group* group = nullptr;       // [groups]; experts without rows have none
  const int64_t* token = nullptr;     // [rows], counted from the first token of the range
  const int64_t* group_of = nullptr;  // [rows]
  const float* factor = nullptr;      // [rows]
};

class Router {
 public:
  // Returns the rows of `count` tokens from `first` on.
  Routes route(const KvExperts& a, int64_t first, int64_t count) {
    const int64_t most = count * a.chosen;
    int64_t* const begin = begins_.reserve(a.experts + 1, 0);
    Group* const group = groups_.reserve(a.experts);
    int64_t *const token = numbers_.reserve(2 * most + 1), *const group_of = token + most;
    float* const factor = factors_.reserve(most + 1);
    const int64_t* const chosen = a.indices + first * a.chosen;
    for (int64_t i = 0; i < most; ++i)
      if (is_expert(a, chosen[i])) ++begin[chosen[i] + 1];
    for (int64_t e = 0; e < a.experts; ++e) begin[e + 1] += begin[e];
    Routes routes{begin[a.experts], 0, group, token, group_of, factor};
    for (int64_t e = 0; e < a.experts; ++e)
      if (begin[e + 1] > begin[e]) group[routes.groups++] = {e, begin[e], begin[e + 1] - begin[e]};
    for (int64_t i = 0; i < most; ++i) {
      if (!is_expert(a, chosen[i])) continue;
      const int64_t row = begin[chosen[i]]++, at = first * a.chosen + i;
      token[row] = i / a.chosen;
      factor[row] = a.weights_type == KV_FLOAT16 ? static_cast<float>(static_cast<const half*>(a.weights)[at])
                                                 : static_cast<const float*>(a.weights)[at];
    }
    for (int64_t g = 0; g < routes.groups; ++g)
      for (int64_t i = 0; i < group[g].count; ++i) group_of[group[g].first + i] = g;
    return routes;
  }

 private:
  static bool is_expert(const KvExperts& a, int64_t e) { return e >= 0 && e < a.experts; }
  Scratch<int64_t> begins_, numbers_;
  Scratch<Group> groups_;
  Scratch<float> factors_;
};

}  // namespace KV_ISA
}  // namespace kv
