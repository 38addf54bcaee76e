// The operators of docs/contract.md as plain structs: one call of an operator, its attributes and its tensors by their
// addresses. Shared by the kernels of the CPU (../cpu/kvexport_cpu.h) and of CUDA (../cuda/kvexport_cuda.h).
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Types of tensors; KV_BFLOAT16 on CUDA alone. Scores, votes and arithmetic are float32 in all three.
enum { KV_FLOAT32 = 0, KV_FLOAT16 = 1, KV_BFLOAT16 = 2 };
enum { KV_STATISTIC_NONE = 0, KV_STATISTIC_LOG_EMA = 1, KV_STATISTIC_PROBABILITY = 2 };
enum { KV_MAX_STATISTICS = 8 };

// One cache of a layer. key [B,H,C,D], value [B,H,C,Dv] of the cache's type; votes [B,H,C], score [B,H,K,C] float32;
// position [B,H,C].
typedef struct KvState {
  void* key;
  void* value;
  float* votes;
  float* score;
  int32_t* position;
} KvState;

typedef struct KvStatistic {
  int kind;
  float decay;
  int window;
  float recency_weight;
} KvStatistic;

typedef struct KvVoteAttention {
  int cache_type;  // of the state's keys and values
  int batch, query_heads, heads, tokens, capacity, key_size, value_size, statistics;
  float scale, vote_exponent, softcap;
  int sliding_window;
  KvStatistic statistic[KV_MAX_STATISTICS];
  // Of query, key, value and output. Fills what would be padding: elsewhere it would move what the CUDA kernels read of
  // their parameters, and cost registers.
  int query_type;
  const void* query;            // [B,Hq,T,D]
  const void* key;              // [B,H,T,D]
  const void* value;            // [B,H,T,Dv]
  const int64_t* position;      // [B,T]; consecutive within a sequence, above every position of its cache
  const int64_t* query_length;  // [B,1]
  const float* sink_logits;     // [Hq], or nullptr
  KvState past;                 // only read; a tensor may be the same buffer in `present`, and is then updated in place
  KvState present;
  void* output;  // [B,Hq,T,Dv]
} KvVoteAttention;

// How slots are told apart: by position, by the first statistic, by ln of its bias-corrected average, by its sum over
// the `pooled` neighbouring positions (of unprotected slots), or by its mean per observation.
enum { KV_BY_POSITION, KV_BY_SCORE, KV_BY_AVERAGE, KV_BY_POOLED, KV_BY_MEAN };
// What becomes of a slot that leaves: dropped, zipped into its nearest target (kvexport/methods/joint.py), added to the
// running mean of its nearest residual slot (zeromerge.py), or merged with its younger neighbour (pairs.py).
enum { KV_DROP, KV_ZIP, KV_RUNNING_MEAN, KV_PAIR };
enum { KV_COSINE, KV_DOT, KV_DISTANCE };
enum { KV_ZIP_KEY, KV_ZIP_VOTE, KV_ZIP_MEAN };
enum { KV_WEIGH_BY_SCORE, KV_WEIGH_BY_HESSIAN };

// A method, as the operator sees it.
typedef struct KvMergePolicy {
  int compresses;  // 0: only what a sliding window has passed leaves
  int importance;  // KV_BY_...
  float decay;     // of the average in KV_BY_AVERAGE
  int pooled;
  int merge_first;  // slots with a nearby target of higher importance leave first ...
  int pool;         // ... out of this many times as many as have to leave
  int by_error;     // merge_first: not by the nearness of targets, but those of the least error first, importance^
  float attention;  // `attention` x |key - key|^2 x |value - value|^2 of the target for which it is smallest
  int voted_last;   // slots of more than one vote leave last
  int merging;      // KV_DROP, ...
  int measure;      // KV_COSINE, ...
  float threshold;  // a slot merges iff its nearest target is nearer than this
  int recent_receives;
  int zip;  // KV_ZIP_...
  float key_factor_max;
  float votes_max;    // of a merged slot, at least 1; INFINITY: no bound
  float weigh_decay;  // of the average that weighs a zip, the last statistic
  float residual;     // share of the targets that KV_RUNNING_MEAN merges into
  int mean_adds;      // the first statistic's mean per observation adds up, instead of its sum
  int weigh;          // KV_WEIGH_BY_..., of a pair's keys
  float tau;
  int rotary_planes, rotary_interleaved;
  const float* inverse_frequencies;          // [rotary_planes]
  KvStatistic statistic[KV_MAX_STATISTICS];  // only their kinds
} KvMergePolicy;

typedef struct KvMergeCache {
  int cache_type, batch, heads, capacity, key_size, value_size, statistics;
  int budget, sinks, recent, sliding_window;
  KvMergePolicy policy;
  KvState past, present;  // as in KvVoteAttention
} KvMergeCache;

#define KV_MAX_PRODUCTS 3

// One of the products of a Linear: rows [batch, tokens, inputs] x weight^T + bias.
typedef struct KvProduct {
  int64_t outputs;
  int64_t heads;       // other than 1: output is [batch, heads, tokens, outputs / heads]
  int turned;          // whether every head is turned, as RotaryEmbedding turns it
  const void* weight;  // [outputs, inputs]
  const void* bias;    // [outputs], or nullptr
  void* output;        // [batch, tokens, outputs]
} KvProduct;

// Products of one input, all of one type, the arithmetic in float32.
typedef struct KvLinear {
  int type;
  int64_t batch, tokens, inputs;
  int64_t input_heads;  // other than 1: input is [batch, input_heads, tokens, inputs / input_heads]
  const void* input;
  const void* norm;  // [inputs]: rows are divided by their root mean square and multiplied with it first; or nullptr
  float epsilon;     // is added to the mean square
  int count;         // of products
  KvProduct products[KV_MAX_PRODUCTS];
  const void* gate;           // [outputs, inputs]: the one product is multiplied with silu(rows x gate^T); or nullptr
  const void* residual;       // [batch, tokens, outputs]: is added to the one product last; or nullptr
  int64_t planes;             // of dimensions (i, i + planes): half a turned head
  const void *cosine, *sine;  // [batch, tokens, planes]
} KvLinear;

#ifdef __cplusplus
}
#endif
