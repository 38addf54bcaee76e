// The order in which the KV heads of a call are computed. If KV heads have caches of their own, those with the most
// slots come first, so that no thread begins a long task when all others have finished.
#pragma once

#include "../../abi/kvexport.h"
#include "scratch.h"

namespace kv {
namespace KV_ISA {

class HeadOrder {
 public:
  // caches: the cache of each KV head, or nullptr: all share one cache.
  HeadOrder(const KvHeadCache* caches, int batch, int heads)
      : sorted_(caches != nullptr), batch_(batch), heads_(heads) {
    if (!caches) return;
    int* const order = order_.reserve(heads);
    for (int h = 0; h < heads; ++h) {
      int place = h;
      for (; place > 0 && caches[order[place - 1]].capacity < caches[h].capacity; --place)
        order[place] = order[place - 1];
      order[place] = h;
    }
  }

  // Returns the number b H + h of the head that is computed as number i.
  size_t number(size_t i) const { return sorted_ ? i % batch_ * heads_ + order_.get()[i / batch_] : i; }

 private:
  bool sorted_;
  size_t batch_, heads_;
  Scratch<int> order_;
};

}  // namespace KV_ISA
}  // namespace kv
