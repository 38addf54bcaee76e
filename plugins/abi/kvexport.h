// The operators of docs/reference/contract.md as plain structs: one struct for a call of each operator,
// with its attributes and the addresses of its tensors. The kernels of the CPU (../cpu/kvexport_cpu.h)
// and of CUDA (../cuda/kvexport_cuda.h) share them.
// Written by `python -m tools.schema` from kvexport/schema: change that, not this.
// clang-format off
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Types of tensors. The last three are those of quantized caches: keys and values in int8, both in int4,
// and keys in int8 with values in int4. Scores, votes and arithmetic are always float32.
enum { KV_FLOAT32 = 0, KV_FLOAT16 = 1, KV_INT8 = 2, KV_INT4 = 3, KV_K8V4 = 4 };
// The int8 numbers that the codes of int4 stand for.
#define KV_INT4_NUMBERS 0, 11, 22, 34, 46, 60, 77, 98, 127, -127, -94, -72, -54, -39, -25, -12
enum { KV_STATISTIC_NONE = 0, KV_STATISTIC_LOG_EMA = 1, KV_STATISTIC_PROBABILITY = 2 };
enum { KV_SELECT_POSITION = 0, KV_SELECT_SCORE = 1, KV_SELECT_AVERAGE = 2, KV_SELECT_POOLED = 3, KV_SELECT_MEAN = 4,
  KV_SELECT_ATTENDED = 5 };
enum { KV_ORDER_LOWEST = 0, KV_ORDER_NEAREST = 1, KV_ORDER_LEAST_ERROR = 2 };
enum { KV_MERGE_DROP = 0, KV_MERGE_ZIP = 1, KV_MERGE_RUNNING_MEAN = 2, KV_MERGE_PAIR = 3 };
enum { KV_MEASURE_COSINE = 0, KV_MEASURE_DOT = 1, KV_MEASURE_DISTANCE = 2 };
enum { KV_ZIP_KEY = 0, KV_ZIP_VOTE = 1, KV_ZIP_MEAN = 2 };
enum { KV_WEIGH_SCORE = 0, KV_WEIGH_HESSIAN = 1 };
enum { KV_FIT_VALUES = 0, KV_FIT_VOTES_AND_VALUES = 1 };
enum { KV_MAX_STATISTICS = 8 };

typedef struct KvState {
  void* key;  // [B,S,D]
  void* value;  // [B,S,Dv]
  float* votes;  // [B,S]
  float* score;  // [B,K,S]
  int32_t* position;  // [B,S]
} KvState;

typedef struct KvScales {
  float* key;  // [B,S], or nullptr
  float* value;  // [B,S], or nullptr
} KvScales;

typedef struct KvStatistic {
  int kind;
  float decay;  // the factor a for each query; below 1 for a log_ema
  int window;  // the number of last queries of a call that count; 0: all
  float recency_weight;  // the weight of the newest counted query, relative to 1 for the oldest and linear between them
} KvStatistic;

typedef struct KvMergePolicy {
  // the importance of a slot: its position, its first statistic, that statistic's bias-corrected average (stored as a
  // logarithm), its sum over neighbouring positions, its mean per observation, or the sum of the squared probabilities
  // of stored recent queries
  int select;
  float select_decay;  // `a` of the average in `select = average`
  int pooled;  // neighbouring positions that `select = pooled` adds up, the slot's own in the middle
  // the slots that are evicted first: those of lowest importance; those that have a target of higher importance nearer
  // than `threshold`; or those whose merge into such a target costs least; then all others, lowest first
  int order;
  int eviction_pool;  // `nearest` and `least_error` choose among so many times as many slots as have to be evicted
  float error_exponent;  // b of the cost of a merge, `importance^b |key - key|^2 |value - value|^2`
  int merged_last;  // whether slots that stand for several tokens are evicted last
  // the merge of evicted slots: none; a zip (KeepKV's rule) into the nearest target; a running mean in the nearest
  // residual slot; or a pair with the younger neighbour
  int merge;
  int measure;  // the nearness of two keys; for distance, minus its square
  float threshold;  // a slot merges only if its nearest target is nearer than this
  float weigh_decay;  // `a` of the last statistic, the average that weights a zip
  int zip;  // what cancels the error of KeepKV's merge: the key's length, a fractional token count, or nothing
  float key_factor_max;  // if a key's factor is outside [1/x, x], `zip: vote` applies
  float votes_max;  // the most tokens that a merged slot stands for
  // the share of the targets that `running_mean` merges into: slots that have merged before, then the lowest
  float residual;
  int mean_adds;  // whether the first statistic adds up as means per observation instead of sums
  int weigh;  // the weights of a pair's keys: the last statistic, or KVSlimmer's Hessian
  float tau;  // the last statistic replaces Hessian weights that are below this share of the diagonal terms
  int share_pairs;  // whether all heads of a layer merge the same pairs
} KvMergePolicy;

typedef struct KvFit {
  int fit;  // the tensors of receiving slots that are fitted: values, or votes (token counts) and then values
  float ridge;  // the regularization of the fit of values: the larger it is, the less they change
  float change_max;  // a head's values change by at most this share of their norm
  float read_exponent;  // alpha of the logit bias `alpha ln(votes)` of the queries of a fit
  int vote_steps;  // multiplicative updates of the votes (token counts)
  float bias_max;  // fitted votes (token counts) stay within exp(+-this)
} KvFit;

typedef struct KvReferenceQueries {
  float* query;  // [B,H,W,D]
  int32_t* seen;  // [B,H,W]
} KvReferenceQueries;

typedef struct KvRing {
  int rows;  // W
  KvReferenceQueries past;  // only read; may be the same buffers in `present`
  KvReferenceQueries present;
} KvRing;

typedef struct KvVoteAttention {
  int cache_type;  // the type of the state's keys and values
  int batch;  // B
  int query_heads;  // Hq
  int heads;  // H
  int tokens;  // T
  int slots;  // S
  int key_size;  // D
  int value_size;  // Dv
  int statistics;  // K
  float scale;  // factor of the products of queries and keys
  float vote_exponent;  // alpha of the bias `alpha ln(votes)`; 0: no bias
  float softcap;  // logits l become `softcap tanh(l / softcap)`; 0: no bound
  int sliding_window;  // the number of latest positions that are visible; 0: all
  const int* capacity;  // [H] in the host's memory: the slots of each KV head; their sum is `slots`
  KvStatistic statistic[KV_MAX_STATISTICS];  // one for each statistic
  int query_type;  // the type of query, key, value and output
  const void* query;  // [B,Hq,T,D]
  const void* key;  // [B,H,T,D]
  const void* value;  // [B,H,T,Dv]
  const int64_t* position;  // [B,T]
  const int64_t* query_length;  // [B,1]
  const float* sink_logits;  // [Hq], or nullptr
  KvState past;  // read only; a tensor may be the same buffer in `present`, and is then updated in place
  KvState present;
  void* output;  // [B,Hq,T,Dv]
  KvScales past_scales;  // the scales of a quantized cache's keys and values; buffers like the state's
  KvScales present_scales;
  int value_prefix;  // value_size, if values are the first numbers of keys and are not stored; otherwise 0
} KvVoteAttention;

typedef struct KvMergeCache {
  int cache_type;  // the type of the state's keys and values
  int batch;  // B
  int slots;  // S
  int key_size;  // D
  int value_size;  // Dv
  int statistics;  // K
  int heads;  // H
  int sinks;  // the number of first positions that are never evicted and never merged into
  int sliding_window;  // the number of latest positions that are visible; 0: all
  int compresses;  // 0: only slots that the sliding window has passed are evicted
  int recent_receives;  // whether evicted slots may merge into recent ones
  const int* capacity;  // [H] in the host's memory: the slots of each KV head; their sum is `slots`
  const int* budget;  // [H] in the host's memory: the slots that each KV head keeps
  const int* recent;  // [H] in the host's memory: the number of latest positions that each KV head never evicts
  int statistic_kind[KV_MAX_STATISTICS];  // one for each statistic
  KvMergePolicy policy;
  int rotary_planes;  // F of the layer's rotary embedding; 0: nothing is rotated
  int rotary_interleaved;  // whether planes are (2f, 2f + 1), not (f, f + F)
  // whether keys are rotated by their slots' places; a merge rotates kept keys to their new places
  int cache_positions;
  const float* inverse_frequencies;  // [rotary_planes]
  KvState past;  // read only; a tensor may be the same buffer in `present`, and is then updated in place
  KvState present;
  KvScales past_scales;  // the scales of a quantized cache's keys and values; buffers like the state's
  KvScales present_scales;
  int value_prefix;  // value_size, if values are the first numbers of keys and are not stored; otherwise 0
} KvMergeCache;

#ifdef __cplusplus
}
#endif

#include "experts.h"
#include "linear.h"
