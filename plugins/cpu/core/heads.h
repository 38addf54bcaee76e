// The KV heads of a call: where the slots of a head begin, and the order in which heads are computed.
#pragma once

#include "scratch.h"

namespace kv {
namespace KV_ISA {

// Returns the slots of a sequence before those of KV head h. capacity: the slots of each head.
static inline size_t slots_before(const int* capacity, int h) {
  size_t slots = 0;
  for (int i = 0; i < h; ++i) slots += capacity[i];
  return slots;
}

static inline int largest_capacity(const int* capacity, int heads) {
  int largest = 0;
  for (int h = 0; h < heads; ++h) largest = max_of(largest, capacity[h]);
  return largest;
}

// The order in which heads are computed: if their capacities differ, those with the most slots come first, so that no
// thread begins a long task when all others have finished.
class HeadOrder {
 public:
  HeadOrder(const int* capacity, int batch, int heads) : batch_(batch), heads_(heads) {
    for (int h = 1; h < heads; ++h) sorted_ |= capacity[h] != capacity[0];
    if (!sorted_) return;
    int* const order = order_.reserve(heads);
    for (int h = 0; h < heads; ++h) {
      int place = h;
      for (; place > 0 && capacity[order[place - 1]] < capacity[h]; --place) order[place] = order[place - 1];
      order[place] = h;
    }
  }

  // Returns the number b H + h of the head that is computed as number i.
  size_t number(size_t i) const { return sorted_ ? i % batch_ * heads_ + order_.get()[i / batch_] : i; }

 private:
  bool sorted_ = false;
  size_t batch_, heads_;
  Scratch<int> order_;
};

}  // namespace KV_ISA
}  // namespace kv
