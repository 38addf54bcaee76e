// The C ABI of the CPU kernels.
//
//   at the first call: choose the kernels of the first instruction set that this machine has: amx, avx512vnni, avx512,
//                      avxvnni, avx2 (x86); i8mm, dotprod, neon (Arm); portable. KVEXPORT_CPU_ISA names another set.
//                      A library that was compiled for one set alone (KV_ALONE) has no kernels for others.
//   at each call:      check the sizes, and return the reason if the kernels cannot compute the call;
//                      return if the batch is empty;
//                      kernels().operator(call, runner): the runner runs its tasks in parallel
#include <cstdlib>
#include <cstring>

#include "../math/policy.h"
#include "core/kernels.h"
#include "recurrence/recurrence.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif
#endif

namespace {

struct Kernels {
  const char* name;
  void (*vote_attention)(const KvVoteAttention&, KvRunner);
  void (*keep_queries)(const KvVoteAttention&, const KvRing&);
  void (*merge_cache)(const KvMergeCache&, const KvFit*, const KvRing*, KvRunner);
  void (*linear)(const KvLinear&, const KvAdapters*, KvRunner);
  void (*experts)(const KvExperts&, KvRunner);
  void (*linear_attention)(const KvLinearAttention&, KvRunner);
};

// The kernels of the instruction set `name`: the products of `products`, with its function `linear` for Linear, and the
// rest of `base`.
#define KV_KERNELS(name, base, products, linear)                                                          \
  Kernels {                                                                                               \
    #name, kv::base::vote_attention, kv::base::keep_queries, kv::base::merge_cache, kv::products::linear, \
        kv::products::experts, kv::base::linear_attention                                                 \
  }

// Whether the library has the kernels of an instruction set.
#ifdef KV_ALONE
#define KV_HAS(isa) KV_ALONE_##isa  // 1, or undefined, which #if takes as 0
#else
#define KV_HAS(isa) 1
#endif

#if defined(__aarch64__)
// Return whether the machine has dot products of four bytes, and products of matrices of bytes.
bool has_dots() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return false;
#endif
}
bool has_matrices() {
#if defined(__linux__)
  return has_dots() && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
#else
  return false;
#endif
}
#endif

#if defined(__x86_64__)
// Returns whether the machine has AMX tiles of bfloat16 and the operating system grants this process their state, which
// the process has to request.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         __builtin_cpu_supports("avx512bf16") && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// Returns the best kernels for this machine. KVEXPORT_CPU_ISA restricts the choice to one set, so that tests reach
// every set.
Kernels choose() {
  const char* isa = getenv("KVEXPORT_CPU_ISA");
  auto allowed = [&](const char* name) { return !isa || !*isa || strcmp(isa, name) == 0; };
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  [[maybe_unused]] const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                                       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
#if KV_HAS(avx512vnni)
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (vnni && allowed("amx") && may_use_tiles()) return KV_KERNELS(amx, avx512, avx512vnni, linear_amx);
  if (vnni && allowed("avx512vnni")) return KV_KERNELS(avx512vnni, avx512, avx512vnni, linear);
#endif
#if KV_HAS(avx512)
  if (avx512 && allowed("avx512")) return KV_KERNELS(avx512, avx512, avx512, linear);
#endif
#if KV_HAS(avxvnni)
  if (avx2 && __builtin_cpu_supports("avxvnni") && allowed("avxvnni"))
    return KV_KERNELS(avxvnni, avx2, avxvnni, linear);
#endif
#if KV_HAS(avx2)
  if (avx2 && allowed("avx2")) return KV_KERNELS(avx2, avx2, avx2, linear);
#endif
#elif defined(__aarch64__)
  if (has_matrices() && allowed("i8mm")) return KV_KERNELS(i8mm, neon, i8mm, linear);
  if (has_dots() && allowed("dotprod")) return KV_KERNELS(dotprod, neon, dotprod, linear);
  if (allowed("neon")) return KV_KERNELS(neon, neon, neon, linear);
#endif
#ifdef KV_ALONE
  return {};  // kv_cpu_problem tells why
#else
  return KV_KERNELS(portable, portable, portable, linear);
#endif
}

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

bool is_quantized(int type) { return type == KV_INT8 || type == KV_INT4 || type == KV_K8V4; }

template <class Arguments>
const char* cache_problem(const Arguments& a) {
  if (!is_quantized(a.cache_type) && a.cache_type != KV_FLOAT32 && a.cache_type != KV_FLOAT16)
    return "the type of the cache is none of float32, float16, int8, int4 and k8v4";
  if (is_quantized(a.cache_type) &&
      !(a.past_scales.key && a.past_scales.value && a.present_scales.key && a.present_scales.value))
    return "the cache is quantized and has no scales";
  if (a.batch < 0 || a.heads < 1 || a.key_size < 1 || a.value_size < 1) return "a dimension is zero or negative";
  int64_t slots = 0;
  for (int h = 0; h < a.heads; ++h) {
    if (a.capacity[h] < 1) return "a KV head has no slots";
    slots += a.capacity[h];
  }
  if (slots != a.slots) return "the capacities of the KV heads do not add up to the slots";
  if (a.statistics < 1 || a.statistics > KV_MAX_STATISTICS) return "there are no statistics, or more than 8";
  if ((a.cache_type == KV_INT4 && a.key_size % 2) ||
      (is_quantized(a.cache_type) && a.cache_type != KV_INT8 && a.value_size % 2))
    return "rows of int4 have an odd size";
  return nullptr;
}

template <class Arguments>
const char* prefix_problem(const Arguments& a) {
  if (a.value_prefix == 0) return nullptr;
  if (is_quantized(a.cache_type)) return "a quantized cache stores its values apart from its keys";
  return a.value_prefix == a.value_size && a.value_size <= a.key_size
             ? nullptr
             : "value_prefix is not the size of a value, or is larger than a key";
}

const char* merge_problem(const KvMergeCache& a, bool has_queries) {
  if (const char* problem = cache_problem(a)) return problem;
  if (a.sinks < 0 || a.sliding_window < 0) return "sinks or sliding_window is out of range";
  for (int h = 0; h < a.heads; ++h)
    if (a.budget[h] < 1 || a.recent[h] < 0) return "the budget or recent of a KV head is out of range";
  if (const char* problem = prefix_problem(a)) return problem;
  const bool apart = has_queries || a.rotary_planes || a.policy.merge == KV_MERGE_PAIR ||
                     (a.policy.merge == KV_MERGE_ZIP && a.policy.zip == KV_ZIP_KEY);
  if (a.value_prefix && apart) return "values are a part of their keys, and the merge changes them apart";
  return kv::policy_problem(a.policy, has_queries);
}

const char* ring_problem(const KvRing& ring, int batch) {
  if (ring.rows < 1) return "the ring of reference queries has no rows";
  if (batch == 0) return nullptr;
  if (!ring.past.query || !ring.past.seen || !ring.present.query || !ring.present.seen)
    return "the ring of reference queries is missing";
  return nullptr;
}

}  // namespace

extern "C" {

const char* kv_cpu_problem(void) {
#ifdef KV_ALONE
  if (!kernels().name)
    return "its kernels were compiled for " KV_ALONE " alone, which this machine lacks, or KVEXPORT_CPU_ISA rules out";
#endif
  return nullptr;
}

const char* kv_cpu_isa(void) { return kernels().name ? kernels().name : ""; }

const char* kv_cpu_vote_attention(const KvVoteAttention* call, KvRunner runner) {
  if (const char* problem = kv_cpu_problem()) return problem;
  const KvVoteAttention& a = *call;
  if (a.query_type != KV_FLOAT32 && a.query_type != KV_FLOAT16)
    return "the type of the query is neither float32 nor float16";
  if (a.query_type != a.cache_type && !is_quantized(a.cache_type)) return "the query is of another type than the cache";
  if (const char* problem = cache_problem(a)) return problem;
  if (a.tokens < 0) return "a dimension is zero or negative";
  if (a.query_heads < 1 || a.query_heads % a.heads) return "the query heads are not a multiple of the KV heads";
  for (int h = 0; h < a.heads; ++h)
    if (a.tokens > a.capacity[h]) return "the call brings more tokens than a KV head has slots";
  if (const char* problem = prefix_problem(a)) return problem;
  if (a.batch == 0) return nullptr;
  kernels().vote_attention(a, runner);
  return nullptr;
}

const char* kv_cpu_merge_cache(const KvMergeCache* call, KvRunner runner) {
  if (const char* problem = kv_cpu_problem()) return problem;
  if (const char* problem = merge_problem(*call, false)) return problem;
  if (call->batch > 0) kernels().merge_cache(*call, nullptr, nullptr, runner);
  return nullptr;
}

const char* kv_cpu_merge_and_fit(const KvMergeCache* call, const KvFit* fit, const KvRing* ring, KvRunner runner) {
  if (const char* problem = kv_cpu_problem()) return problem;
  if (const char* problem = merge_problem(*call, true)) return problem;
  if (const char* problem = ring_problem(*ring, call->batch)) return problem;
  if (call->policy.merge != KV_MERGE_DROP && call->policy.merge != KV_MERGE_ZIP)
    return "a fit needs merge to be drop or zip";
  if (!(fit->ridge > 0.0f) || !(fit->change_max > 0.0f) || fit->vote_steps < 0 || !(fit->bias_max > 0.0f))
    return "ridge, change_max, vote_steps or bias_max is out of range";
  if (call->batch > 0) kernels().merge_cache(*call, fit, ring, runner);
  return nullptr;
}

const char* kv_cpu_keep_queries(const KvVoteAttention* call, const KvRing* ring) {
  if (const char* problem = kv_cpu_problem()) return problem;
  if (const char* problem = ring_problem(*ring, call->batch)) return problem;
  kernels().keep_queries(*call, *ring);
  return nullptr;
}

static const char* weight_problem(const KvWeight& weight, int64_t inputs) {
  if (!weight.bits) return nullptr;
  if (weight.bits < 2 || weight.bits == 7 || weight.bits > 8) return "a packed weight has not 2 to 6 or 8 bits";
  if ((kv_high_bits(&weight) > 0) != (weight.high != nullptr)) return "only weights of 3, 5 and 6 bits have upper bits";
  if (weight.high && (weight.zero || weight.table || inputs % 32))
    return "a weight of 3, 5 or 6 bits has zero points or a table, or rows that are no multiple of 32 inputs";
  if (weight.bits < 4 && (weight.layout != KV_PANELS || weight.is_signed != (weight.bits == 3) ||
                          (weight.minimum != nullptr) != (weight.bits == 2) ||
                          weight.scale_type != (weight.bits == 2 ? KV_SUB_SCALES_4 : KV_SUB_SCALES_6)))
    return "a weight of 2 or 3 bits is not in panels, or has scales, minima or a sign of other weights";
  if (weight.bits >= 4 && kv_is_sub_scale(weight.scale_type) && weight.scale_type != KV_SUB_SCALES)
    return "a weight of 4 bits or more has sub-scales of fewer than 8";
  if (weight.group < 1 || inputs % weight.group) return "the inputs are no multiple of a weight's group";
  if (weight.bits == 4 && weight.group % 2) return "a group of 4-bit weights is odd";
  if (weight.layout == KV_PANELS && kv_cpu_why_no_panels(&weight, inputs)) return "a packed weight has no panels";
  if (weight.layout == KV_AT_REST && !weight.scale) return "a packed weight has no scale";
  if (weight.zero && weight.minimum) return "a packed weight has both a zero point and a minimum";
  if (weight.table && (weight.bits != 4 || weight.is_signed || weight.zero || weight.minimum))
    return "a weight with a table has no unsigned indices of 4 bits, or a zero point or a minimum";
  if (weight.scale_type == KV_EXPONENTS && weight.table) return nullptr;
  if (kv_is_sub_scale(weight.scale_type)) {
    if (inputs % KV_SUPER || KV_SUPER % weight.group || weight.zero || !weight.super_scale)
      return "a weight with super-scales has zero points, or rows or groups that 256 inputs do not fit";
    if (weight.minimum && (weight.minimum_type != weight.scale_type || !weight.super_minimum))
      return "a weight with super-scales has minima without them";
    return nullptr;
  }
  const auto known = [](int type) { return type == KV_FLOAT32 || type == KV_FLOAT16; };
  if (!known(weight.scale_type) || (weight.minimum && !known(weight.minimum_type)))
    return "the scale of a packed weight, or its minimum, is neither float32 nor float16";
  return nullptr;
}

const char* kv_cpu_linear(const KvLinear* call, KvRunner runner) {
  return kv_cpu_adapted_linear(call, nullptr, runner);
}

const char* kv_cpu_adapted_linear(const KvLinear* call, const KvAdapters* adapters, KvRunner runner) {
  if (const char* problem = kv_cpu_problem()) return problem;
  const KvLinear& a = *call;
  if (a.type != KV_FLOAT32 && a.type != KV_FLOAT16) return "the type of the weight is neither float32 nor float16";
  if (a.batch < 0 || a.tokens < 0 || a.inputs < 1) return "a dimension is zero or negative";
  if (a.input_heads < 1 || a.inputs % a.input_heads) return "the inputs are no multiple of their heads";
  if (a.count < 1 || a.count > KV_MAX_PRODUCTS) return "there are no products, or more than 3";
  if ((a.gate.data || a.residual) && a.count > 1) return "a gate or a residual goes with one product, not several";
  for (const KvProduct* p = a.products; p < a.products + a.count; ++p) {
    if (p->outputs < 1) return "a dimension is zero or negative";
    if (const char* problem = weight_problem(p->weight, a.inputs)) return problem;
    if (p->heads < 1 || p->outputs % p->heads) return "the outputs are no multiple of their heads";
    if (p->rotated && 2 * a.planes != p->outputs / p->heads) return "cosine and sine are not of half a head's size";
  }
  if (const char* problem = weight_problem(a.gate, a.inputs)) return problem;
  if (adapters && (adapters->rows < 1 || !adapters->mask)) return "adapters have no rows, or no mask";
  kernels().linear(a, adapters, runner);
  return nullptr;
}

const char* kv_cpu_experts(const KvExperts* call, KvRunner runner) {
  if (const char* problem = kv_cpu_problem()) return problem;
  const KvExperts& a = *call;
  const auto known = [](int type) { return type == KV_FLOAT32 || type == KV_FLOAT16; };
  if (!known(a.type) || !known(a.weights_type)) return "a type is neither float32 nor float16";
  if (a.tokens < 0 || a.hidden < 1 || a.inner < 1 || a.experts < 1 || a.chosen < 1)
    return "a dimension is zero or negative";
  if (a.activation < KV_EXPERTS_SILU || a.activation > KV_EXPERTS_RELU_SQUARED) return "the activation is unknown";
  if (!(a.limit >= 0.0f)) return "limit is negative";
  if (const char* problem = weight_problem(a.first, a.hidden)) return problem;
  if (const char* problem = weight_problem(a.down, a.inner)) return problem;
  if (a.tokens > 0) kernels().experts(a, runner);
  return nullptr;
}

const char* kv_cpu_linear_attention(const KvLinearAttention* call, KvRunner runner) {
  if (const char* problem = kv_cpu_problem()) return problem;
  const KvLinearAttention& a = *call;
  if (a.batch < 0 || a.tokens < 0 || a.heads < 1 || a.key_size < 1 || a.value_size < 1)
    return "a dimension is zero or negative";
  if (a.key_heads < 1 || a.heads % a.key_heads) return "the heads are not a multiple of the key heads";
  if (a.batch > 0) kernels().linear_attention(a, runner);
  return nullptr;
}

}  // extern "C"
