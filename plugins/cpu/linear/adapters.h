// Linear with LoRA adapters, behind the C ABI of ../kvexport_cpu.h.
#pragma once

#include "../kvexport_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

// The LoRA adapters of a call of Linear, those of all sequences one below the other. Weight i is that of product i; the
// gate's is weight `count`. rows x weight^T grows by ((rows x first^T) mask) x second. A weight whose first is nullptr
// takes no adapters.
typedef struct KvAdapters {
  int64_t rows;                             // of first and second
  const void* mask;                         // [batch, rows]: 0 for all rows but those of a sequence's adapter
  const void* first[KV_MAX_PRODUCTS + 1];   // [rows, inputs]
  const void* second[KV_MAX_PRODUCTS + 1];  // [rows, outputs]
} KvAdapters;

// Computes Linear with the changes by adapters; adapters: nullptr for none.
const char* kv_cpu_adapted_linear(const KvLinear* call, const KvAdapters* adapters, KvRunner runner);

#ifdef __cplusplus
}
#endif
