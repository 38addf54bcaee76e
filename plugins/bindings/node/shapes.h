// The shapes of the operators' inputs (docs/reference/contract.md, section 3), for every framework's binding.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../../abi/kvexport.h"

namespace kv {

using Shape = std::vector<int64_t>;  // -1: a size that is not known yet

struct Input {
  std::string name;
  Shape shape;
};

// Returns a shape as text; a size that is not known is a question mark.
inline std::string text(const Shape& shape) {
  std::string s = "[";
  for (size_t i = 0; i < shape.size(); ++i) s += (i ? ", " : "") + (shape[i] < 0 ? "?" : std::to_string(shape[i]));
  return s + "]";
}

// Returns whether two shapes have the same rank and agree in every size that both know.
inline bool fits(const Shape& shape, const Shape& expected) {
  bool fits = shape.size() == expected.size();
  for (size_t d = 0; fits && d < shape.size(); ++d) fits = shape[d] < 0 || expected[d] < 0 || shape[d] == expected[d];
  return fits;
}

// Returns the state tensors of a call of these sizes, in the contract's order; -1 is a size that is not known.
template <class Arguments>
std::vector<Input> state_inputs(const Arguments& a) {
  return {{"key", {a.batch, a.slots, a.key_size}},
          {"value", {a.batch, a.slots, a.value_size}},
          {"votes", {a.batch, a.slots}},
          {"score", {a.batch, a.statistics, a.slots}},
          {"position", {a.batch, a.slots}}};
}

inline std::vector<Input> inputs_of(const KvMergeCache& a) { return state_inputs(a); }

// Returns the eleven inputs of VoteAttention; the last one is optional.
inline std::vector<Input> inputs_of(const KvVoteAttention& a) {
  std::vector<Input> all = {{"query", {a.batch, a.query_heads, a.tokens, a.key_size}},
                            {"key", {a.batch, a.heads, a.tokens, a.key_size}},
                            {"value", {a.batch, a.heads, a.tokens, a.value_size}},
                            {"position", {a.batch, a.tokens}},
                            {"query_length", {a.batch, 1}}};
  static const char* const past[] = {"past_key", "past_value", "past_votes", "past_score", "past_position"};
  const std::vector<Input> state = state_inputs(a);
  for (size_t i = 0; i < state.size(); ++i) all.push_back({past[i], state[i].shape});
  all.push_back({"sink_logits", {a.query_heads}});
  return all;
}

}  // namespace kv
