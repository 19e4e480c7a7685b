// The kernels as they are called from Python and from each other.

#pragma once

#include "common.h"
#include "kinds.h"

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

extern "C" {

int tandem_matmul(int kind, const void *x, const void *packed, const void *bias, const void *residual, void *out,
                  int64_t num_rows, int64_t num_columns, int64_t depth, int64_t x_stride, int is_bfloat16,
                  int num_threads);
int tandem_paged_attention(int kind, const AttentionArguments *arguments, int is_bfloat16, int num_threads);
void tandem_rms_norm(const void *x, const void *weight, void *out, int64_t num_rows, int64_t dim, int64_t row_stride,
                     float epsilon, int is_bfloat16);
void tandem_rotate(const void *x, void *out, const void *cos, const void *sin, int64_t num_tokens, int64_t num_heads,
                   int64_t dim, int64_t token_stride, int64_t head_stride, int64_t out_token_stride, int is_bfloat16);
void tandem_silu_multiply(const void *gate, const void *up, void *out, int64_t num_rows, int64_t dim,
                          int64_t gate_stride, int64_t up_stride, int is_bfloat16);
}
