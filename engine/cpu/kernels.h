// The kernels as they are called from Python and from each other.

#pragma once

#include "common.h"
#include "kinds.h"
#include "plan.h"

struct AttentionArguments {
  void *out;       // [num_tokens, num_heads, head_dim]
  const void *query; // [num_tokens, num_heads, head_dim], strided
  const void *key;   // [num_tokens, num_kv_heads, head_dim], strided
  const void *value;
  void *layer_keys;   // this layer's keys of block 0: [block_size, num_kv_heads, head_dim], strided
  void *layer_values;
  const int32_t *block_tables;  // [num_seqs, max_blocks]
  const int32_t *query_starts;  // [num_seqs + 1]
  const int32_t *kv_lens;       // [num_seqs], new tokens included
  const int64_t *slot_mapping;  // [num_tokens]
  const float *sinks;           // [num_heads], or null: one more score that every token sees, of a value of zeros
  int64_t query_token_stride, query_head_stride; // in elements
  int64_t key_token_stride, key_head_stride;
  int64_t value_token_stride, value_head_stride;
  int64_t block_stride, slot_stride, kv_head_stride; // of the pool, in elements
  int64_t num_tokens, num_seqs, max_blocks, block_size;
  int64_t num_heads, num_kv_heads, head_dim;
  int64_t window;   // a token sees itself and the window - 1 tokens before it; 0 = all
  float scale, softcap; // softcap 0 = off
};

// The rows that a product reads, and what becomes of them first.
struct Rows {
  enum Step : int64_t { NONE, NORM, SILU_MULTIPLY }; // the last one takes rows of gates and as many factors
  const void *x;  // `stride` elements from row to row
  int64_t stride;
  Step step = NONE;
  const void *norm_weight = nullptr; // [K]
  float epsilon = 0.0f;
};

// out = rows x weight^T * scales + bias, rounded; then + residual, rounded again.
struct Product {
  Rows rows;
  const void *weight;   // packed, of the rows' type or of int8
  const float *scales;  // [N]: column n of int8 weights stands for this times as much. Null for weights of the rows' type
  const void *bias;     // [N] or null
  const void *residual; // [M, N] or null. It may be `out`
  void *out;            // [M, N]
  int64_t num_rows, num_columns, depth; // M, N, K
};

struct NotCompiled {}; // thrown for a kind that this library does not have

void add_product(Plan &plan, int kind, const Product &product, bool is_bfloat16);

// Writes new keys and values of some tokens into their slots.
void write_cache(const AttentionArguments &arguments, int64_t first_token, int64_t last_token, bool is_bfloat16);
// Attention over what is in the slots.
void add_attention(Plan &plan, int kind, const AttentionArguments &arguments, bool is_bfloat16);

namespace {

constexpr int MAX_DIM = 512;           // largest head dimension; CpuAttention checks it
constexpr int64_t ITEM_TOKENS = 16;    // of phases whose items are cheap
constexpr int64_t REPEATED_TOKENS = 64; // most tokens of a call whose items may be repeated: they are short
constexpr int64_t REPEATED_CONTEXT = 1 << 16;

inline int64_t num_token_items(int64_t num_tokens) { return (num_tokens + ITEM_TOKENS - 1) / ITEM_TOKENS; }

inline bool has_short_items(const AttentionArguments &a) {
  return a.num_tokens <= REPEATED_TOKENS &&
         std::all_of(a.kv_lens, a.kv_lens + a.num_seqs, [](int32_t length) { return length <= REPEATED_CONTEXT; });
}

// Makes a plan by `build(plan)` and runs it. Returns 0; 1 if memory was lacking; 2 for a kind that was not compiled.
template <typename Build> int run_plan(int num_threads, const Build &build, void (*at_stop)() = nullptr) {
  try {
    Plan plan(num_threads);
    build(plan);
    return plan.run(at_stop);
  } catch (const std::bad_alloc &) {
    return 1;
  } catch (const NotCompiled &) {
    return 2;
  }
}

} // namespace
