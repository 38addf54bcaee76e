// The operators of docs/reference/contract.md as plain structs: a call of an operator, its attributes, and
// the addresses of its tensors. Shared by the kernels of the CPU (../cpu/kvexport_cpu.h) and of CUDA
// (../cuda/kvexport_cuda.h).
// Written by `python -m kvexport.schema.generate` from kvexport/schema: change that, not this.
// clang-format off
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Types of tensors; KV_BFLOAT16 on CUDA alone. Those after it are of small caches: keys and
// values int8, both int4, and keys int8 with values int4. Scores, votes and arithmetic are float32 in all.
enum { KV_FLOAT32 = 0, KV_FLOAT16 = 1, KV_BFLOAT16 = 2, KV_INT8 = 3, KV_INT4 = 4, KV_K8V4 = 5 };
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
  void* key;  // [B,H,C,D]
  void* value;  // [B,H,C,Dv]
  float* votes;  // [B,H,C]
  float* score;  // [B,H,K,C]
  int32_t* position;  // [B,H,C]
} KvState;

typedef struct KvScales {
  float* key;  // [B,H,C], or nullptr
  float* value;  // [B,H,C], or nullptr
} KvScales;

typedef struct KvStatistic {
  int kind;
  float decay;
  int window;
  float recency_weight;
} KvStatistic;

typedef struct KvMergePolicy {
  // the importance of a slot: its position, its first statistic, the bias-corrected average of that (kept as a
  // logarithm), its sum over neighbouring positions, its mean per observation, or the sum of the squares of the
  // reference queries' probabilities
  int select;
  float select_decay;  // `a` of the average in `select = average`
  int pooled;  // neighbouring positions that `select = pooled` adds up, the slot's own in the middle
  // which slots are evicted first: those of lowest importance; or those that have a target of higher importance nearer
  // than `threshold`; or those whose merge into such a target costs least; then the rest, lowest first
  int order;
  int eviction_pool;  // `nearest` and `least_error` choose among this many times as many slots as have to be evicted
  float error_exponent;  // b of the cost of a merge, `importance^b |key - key|^2 |value - value|^2`
  int merged_last;  // whether slots of more than one vote are evicted last
  // what becomes of evicted slots: dropped; zipped into the nearest target by KeepKV's rule; added to the running mean
  // of the nearest residual slot; or merged with the younger neighbour
  int merge;
  int measure;  // how near two keys are; the distance counts as minus its square
  float threshold;  // a slot merges iff its nearest target is nearer than this
  float weigh_decay;  // `a` of the average that weighs a zip, the last statistic
  int zip;  // what absorbs the error of a zip: the key's length, fractional votes, or nothing (votes add up)
  float key_factor_max;  // a key factor outside [1/x, x] falls back to fractional votes
  float votes_max;  // the most votes of a merged slot
  float residual;  // the share of the targets that `running_mean` merges into: merged ones, then the lowest
  int mean_adds;  // whether of the first statistic the mean per observation adds up, instead of the sum
  int weigh;  // what weighs a pair's keys: the last statistic, or KVSlimmer's Hessian
  float tau;  // where the Hessian's brackets are below this share, the statistic weighs
  int share_pairs;  // whether all heads of a layer merge the same pairs
} KvMergePolicy;

typedef struct KvFit {
  int fit;  // what is fitted, of the slots that may receive: values, or votes and then values
  float ridge;  // of the regression of values: the larger it is, the less they change
  float change_max;  // a head's values change by at most this share of their norm
  float read_exponent;  // alpha of the bias `alpha ln(votes)` that reference queries read with
  int vote_steps;  // multiplicative updates of the votes
  float bias_max;  // fitted votes stay within exp(+-this)
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
  int cache_type;  // of the state's keys and values
  int batch;  // B
  int query_heads;  // Hq
  int heads;  // H
  int tokens;  // T
  int capacity;  // C
  int key_size;  // D
  int value_size;  // Dv
  int statistics;  // K
  float scale;  // factor of the products of queries and keys
  float vote_exponent;  // alpha of the bias `alpha ln(votes)`; 0: no bias
  float softcap;  // logits l become `softcap tanh(l / softcap)`; 0: they stay
  int sliding_window;  // only so many latest positions are visible; 0: all
  KvStatistic statistic[KV_MAX_STATISTICS];  // of each of the statistics
  int query_type;  // of query, key, value and output
  const void* query;  // [B,Hq,T,D]
  const void* key;  // [B,H,T,D]
  const void* value;  // [B,H,T,Dv]
  const int64_t* position;  // [B,T]
  const int64_t* query_length;  // [B,1]
  const float* sink_logits;  // [Hq], or nullptr
  KvState past;  // only read; a tensor may be the same buffer in `present`, and is then updated in place
  KvState present;
  void* output;  // [B,Hq,T,Dv]
  KvScales past_scales;  // of a small cache's keys and values, as the states
  KvScales present_scales;
} KvVoteAttention;

typedef struct KvMergeCache {
  int cache_type;  // of the state's keys and values
  int batch;  // B
  int heads;  // H
  int capacity;  // C
  int key_size;  // D
  int value_size;  // Dv
  int statistics;  // K
  int budget;  // slots that are kept
  int sinks;  // the first positions, which are never evicted and receive nothing
  int recent;  // the latest positions, which are never evicted
  int sliding_window;  // only so many latest positions are visible; 0: all
  int compresses;  // 0: only slots that the sliding window has passed are evicted
  int recent_receives;  // whether evicted slots may merge into recent ones
  int statistic_kind[KV_MAX_STATISTICS];  // of each of the statistics
  KvMergePolicy policy;
  int rotary_planes;  // F of the layer's rotary embedding; 0: nothing is rotated
  int rotary_interleaved;  // whether planes are (2f, 2f + 1), not (f, f + F)
  int cache_positions;  // whether keys are rotated by their slots' places; kept ones are turned to their new places
  const float* inverse_frequencies;  // [rotary_planes]
  KvState past;  // only read; a tensor may be the same buffer in `present`, and is then updated in place
  KvState present;
  KvScales past_scales;  // of a small cache's keys and values, as the states
  KvScales present_scales;
} KvMergeCache;

#ifdef __cplusplus
}
#endif

#include "linear.h"
