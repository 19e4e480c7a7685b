// Paged attention for CPUs: writes new keys and values into their slots, then attends through block tables.
//
// One guarantee shapes these files: the result for a query token depends, bit for bit, only on that token and the keys
// before it. It never depends on the rest of the batch, on how the prompt was cut into chunks, or on the number of
// threads. So keys are always visited in tiles of KEYS from position 0, every row goes through the same micro-kernel
// (rows are padded; remaining rows have no path of their own), and masked keys add exact zeros.

#include "attention_rows.h"
#include "attention_tiles.h"

namespace {

template <typename T> void write_slots(const Arguments &a, int64_t first_token, int64_t last_token) {
  const T *key = static_cast<const T *>(a.key), *value = static_cast<const T *>(a.value);
  const size_t bytes = static_cast<size_t>(a.head_dim) * sizeof(T);
  for (int64_t t = first_token; t < last_token; ++t) {
    int64_t slot = a.slot_mapping[t];
    int64_t at = slot / a.block_size * a.block_stride + slot % a.block_size * a.slot_stride;
    for (int64_t h = 0; h < a.num_kv_heads; ++h, at += a.kv_head_stride) {
      std::memcpy(static_cast<T *>(a.layer_keys) + at, key + t * a.key_token_stride + h * a.key_head_stride, bytes);
      std::memcpy(static_cast<T *>(a.layer_values) + at, value + t * a.value_token_stride + h * a.value_head_stride,
                  bytes);
    }
  }
}

int64_t num_tiles(const Arguments &a, int64_t seq) {
  return (a.query_starts[seq + 1] - a.query_starts[seq] + QUERIES - 1) / QUERIES;
}

template <typename Kernel> void add(Plan &plan, const Arguments &a) {
  int64_t num_items = 0;
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) num_items += num_tiles(a, seq) * a.num_kv_heads;
  const bool is_one_each = num_items == a.num_seqs * a.num_kv_heads; // as in a step that only decodes
  plan.add(num_items, [=, plan = &plan](int64_t item) {
    void *memory = scratch<Kernel>(Kernel::scratch_bytes(a));
    if (memory == nullptr) return plan->fail();
    int64_t tile = item / a.num_kv_heads, seq = 0;
    if (is_one_each) {
      seq = std::exchange(tile, 0);
    } else {
      for (int64_t tiles; tile >= (tiles = num_tiles(a, seq)); ++seq) tile -= tiles;
    }
    int64_t length = a.query_starts[seq + 1] - a.query_starts[seq], first = tile * QUERIES;
    int64_t num_queries = std::min<int64_t>(QUERIES, length - first);
    Kernel::attend(a, WorkItem(a, seq, first, num_queries, item % a.num_kv_heads), memory);
  });
}

} // namespace

void write_cache(const Arguments &arguments, int64_t first_token, int64_t last_token, bool is_bfloat16) {
  (is_bfloat16 ? write_slots<bfloat16> : write_slots<float>)(arguments, first_token, last_token);
}

void add_attention(Plan &plan, int kind, const Arguments &arguments, bool is_bfloat16) {
  if (kind == VECTORS)
    return is_bfloat16 ? add<RowAttention<FloatFormat<bfloat16>>>(plan, arguments)
                       : add<RowAttention<FloatFormat<float>>>(plan, arguments);
#ifdef __AVX512BF16__
  if (kind == AVX512_BF16) return add<RowAttention<PairFormat>>(plan, arguments);
#endif
#ifdef HAS_AMX
  if (kind == AMX_BF16) return add<TileAttention>(plan, arguments);
#endif
  throw NotCompiled();
}

// Returns what `run_plan` returns.
extern "C" int tandem_paged_attention(int kind, const Arguments *arguments, int is_bfloat16, int num_threads) {
  return run_plan(num_threads, [&](Plan &plan) {
    const Arguments &a = *arguments;
    if (a.num_tokens <= REPEATED_TOKENS) plan.allow_repeats();
    plan.add(num_token_items(a.num_tokens), [=, &a](int64_t item) {
      write_cache(a, item * ITEM_TOKENS, std::min((item + 1) * ITEM_TOKENS, a.num_tokens), is_bfloat16);
    });
    add_attention(plan, kind, a, is_bfloat16);
  });
}
