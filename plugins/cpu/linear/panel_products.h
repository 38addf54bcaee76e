// Products of rounded rows with the panels of a packed weight. Linear and Experts call one copy of them, since no other
// kernels take as long to compile.
#pragma once

#include "rounding.h"

namespace kv {
namespace KV_ISA {

// Computes out[i * stride + c] = row first + i times column c of a panel, for `count` rows. Row `first` begins a tile.
void panel_products(const KvWeight& weight, const PanelLayout& l, int64_t panel, const RoundedRows& x, int64_t first,
                    int64_t count, float* out, int64_t stride);

}  // namespace KV_ISA
}  // namespace kv
