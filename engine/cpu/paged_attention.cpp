// Paged attention for CPUs: writes new keys and values into their slots, then attends through block tables.
//
// One guarantee shapes these files: the result for a query token depends, bit for bit, only on that token and the keys
// before it. It never depends on the rest of the batch, on how the prompt was cut into chunks, or on the number of
// threads. So keys are always visited in tiles of KEYS from position 0, every row goes through the same micro-kernel
// (rows are padded; remaining rows have no path of their own), and masked keys add exact zeros.

#include "attention_rows.h"
#include "attention_tiles.h"
#include "kinds.h"

#include <omp.h>

namespace {

template <typename Kernel> int run(const Arguments &a, int num_threads) {
  write_cache<typename Kernel::T>(a);
  int64_t num_tiles = 0; // query tiles over all sequences
  for (int64_t i = 0; i < a.num_seqs; ++i)
    num_tiles += (a.query_starts[i + 1] - a.query_starts[i] + QUERIES - 1) / QUERIES;
  int64_t num_items = num_tiles * a.num_kv_heads;
  int threads = static_cast<int>(std::min<int64_t>(num_threads, num_items));
  size_t bytes = static_cast<size_t>((Kernel::scratch_bytes(a) + 63) / 64 * 64);
  bool failed = false;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    void *memory = std::aligned_alloc(64, bytes);
    if (memory == nullptr) {
#pragma omp atomic write
      failed = true;
    }
    Kernel::begin();
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < num_items; ++item) {
      if (memory == nullptr) continue;
      int64_t tile = item / a.num_kv_heads, seq = 0;
      for (;; ++seq) { // there are few sequences, so a search is cheaper than a table
        int64_t tiles = (a.query_starts[seq + 1] - a.query_starts[seq] + QUERIES - 1) / QUERIES;
        if (tile < tiles) break;
        tile -= tiles;
      }
      int64_t length = a.query_starts[seq + 1] - a.query_starts[seq], first = tile * QUERIES;
      int64_t num_queries = std::min<int64_t>(QUERIES, length - first);
      Kernel::attend(a, WorkItem(a, seq, first, num_queries, item % a.num_kv_heads), memory);
    }
    Kernel::end();
    std::free(memory);
  }
  return failed ? 1 : 0;
}

} // namespace

// Returns 0; 1 if scratch memory could not be allocated; 2 for a kind that was not compiled.
extern "C" int tandem_paged_attention(int kind, const Arguments *arguments, int is_bfloat16, int num_threads) {
  if (kind == VECTORS)
    return is_bfloat16 ? run<RowAttention<FloatFormat<bfloat16>>>(*arguments, num_threads)
                       : run<RowAttention<FloatFormat<float>>>(*arguments, num_threads);
#ifdef __AVX512BF16__
  if (kind == AVX512_BF16) return run<RowAttention<PairFormat>>(*arguments, num_threads);
#endif
#ifdef HAS_AMX
  if (kind == AMX_BF16) return run<TileAttention>(*arguments, num_threads);
#endif
  return 2;
}
