// Prints how the CPU attention cuts its work: the items of each phase, then the bytes that they share. Nothing is run.
//
// Arguments: query heads, key/value heads, head dimension, window, then new tokens and context of each sequence.

#include "kernels.h"

#include <cstdio>

extern "C" int tandem_paged_attention(int kind, const AttentionArguments *arguments, int is_bfloat16, int num_threads);

int Plan::run(void (*)()) {
  for (const Phase &phase : phases_) std::printf("%lld ", static_cast<long long>(phase.num_items));
  std::printf("%lld\n", static_cast<long long>(workspace_bytes_));
  return 0;
}

int main(int num_arguments, char **arguments) {
  AttentionArguments a = {};
  a.num_heads = std::atoi(arguments[1]);
  a.num_kv_heads = std::atoi(arguments[2]);
  a.head_dim = std::atoi(arguments[3]);
  a.window = std::atoi(arguments[4]);
  std::vector<int32_t> starts = {0}, kv_lens;
  for (int i = 5; i + 1 < num_arguments; i += 2) {
    starts.push_back(starts.back() + std::atoi(arguments[i]));
    kv_lens.push_back(std::atoi(arguments[i + 1]));
  }
  a.query_starts = starts.data();
  a.kv_lens = kv_lens.data();
  a.num_seqs = static_cast<int64_t>(kv_lens.size());
  a.num_tokens = starts.back();
  return tandem_paged_attention(VECTORS, &a, 0, 1);
}
