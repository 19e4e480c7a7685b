// Paged attention for CPUs: writes new keys and values into their slots, then attends through block tables.
//
// One guarantee shapes these files: the result for a query token depends, bit for bit, only on that token and the keys
// before it. It never depends on the rest of the batch, on how the prompt was cut into chunks, or on the number of
// threads. So keys are always visited in tiles of KEYS from position 0, every row goes through the same micro-kernel
// (rows are padded; remaining rows have no path of their own), and masked keys add exact zeros.
//
// The keys of each SPLIT from position 0 on are summed apart, and the sums are merged in order. So several threads may
// share one long context, as in flash decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html); where it is
// not worth the memory, one item goes through the splits by itself, in the same arithmetic.

#include "attention_tiles.h"

#include <vector>

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

constexpr int64_t MANY_ITEMS = 64;          // of one sequence: threads need not share its contexts
constexpr int64_t PARTIAL_BYTES = 16 << 20; // for the sums of shared contexts
constexpr int64_t REPEATED_PARTIAL_BYTES = 1 << 20; // the same where items are repeated, as each layer has its own

// What the sequences before have: items of both phases, and floats of the workspace.
struct Counts {
  int64_t items = 0, merges = 0, floats = 0;
};

// The items of one sequence: for each tile of queries and each key/value head one, or one per split.
struct Span {
  Counts before;
  int64_t num_pairs;      // of a tile and a head
  int64_t first_split = 0, num_splits = 0; // 0 splits: the contexts are not shared
  int64_t num_rows = 0, dim;               // of the sums of a split

  Span(const Arguments &a, int64_t seq)
      : num_pairs((WorkItem::num_tokens(a, seq) + QUERIES - 1) / QUERIES * a.num_kv_heads), dim(padded_dim(a)) {
    if (num_pairs == 0 || num_pairs >= MANY_ITEMS) return;
    const WorkItem first(a, seq, 0, 0), last(a, seq, num_pairs / a.num_kv_heads - 1, 0);
    if (last.end_key() - first.first_key(a) <= SPLIT) return;
    first_split = first.first_split(a);
    num_splits = last.end_split() - first_split;
    num_rows = first.num_rows();
  }

  int64_t num_floats() const { return num_pairs * num_splits * Sums::num_floats(num_rows, dim); }
  Sums part(void *workspace, int64_t idx) const {
    return {static_cast<float *>(workspace) + before.floats + idx * Sums::num_floats(num_rows, dim), num_rows, dim};
  }
};

// The spans of all sequences, and what they have together. Sums of shared contexts take `most_bytes` at most.
std::vector<Span> make_spans(const Arguments &a, int64_t most_bytes, Counts &total) {
  std::vector<Span> spans;
  spans.reserve(static_cast<size_t>(a.num_seqs));
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) spans.emplace_back(a, seq);
  int64_t room = most_bytes / static_cast<int64_t>(sizeof(float));
  for (auto span = spans.rbegin(); span != spans.rend(); ++span) { // from the last: the phase ends in small items
    if (span->num_floats() > room) span->num_splits = 0;
    room -= span->num_floats();
  }
  for (Span &span : spans) {
    span.before = total;
    total.items += span.num_pairs * std::max<int64_t>(span.num_splits, 1);
    total.merges += span.num_splits > 0 ? span.num_pairs : 0;
    total.floats += span.num_floats();
  }
  return spans;
}

// The sequence whose items of a phase, counted by `count`, hold this one.
int64_t find(const Span *spans, int64_t num_seqs, int64_t Counts::*count, int64_t item) {
  const auto is_before = [count](int64_t item, const Span &span) { return item < span.before.*count; };
  return std::upper_bound(spans, spans + num_seqs, item, is_before) - spans - 1;
}

// The sums of an item over splits [begin, end), in `memory`.
template <typename Kernel>
Sums attend(const Arguments &a, const WorkItem &item, int64_t begin, int64_t end, float *memory) {
  const int dim = static_cast<int>(padded_dim(a));
  const int num_rows = static_cast<int>(Kernel::padded_rows(item.num_rows()));
  auto s = Kernel::load_queries(a, item, num_rows, dim, memory);
  const Sums total(memory + Kernel::scratch_floats(num_rows, dim), num_rows, dim);
  const Sums next(total.out + Sums::num_floats(num_rows, dim), num_rows, dim);
  for (int64_t split = begin; split < end; ++split) {
    const Sums &sums = split == begin ? total : next;
    sums.begin(a, item, split, num_rows, dim);
    const int64_t first_key = std::max(item.first_key(a), split * SPLIT);
    Kernel::attend(a, item, first_key, std::min(item.end_key(), (split + 1) * SPLIT), num_rows, dim, s, sums);
    if (split > begin) merge<Kernel>(total, next, item.num_rows(), dim);
  }
  return total;
}

template <typename Kernel> int64_t scratch_bytes(const Arguments &a) {
  const int64_t num_rows = Kernel::padded_rows(QUERIES * a.num_heads / a.num_kv_heads), dim = padded_dim(a);
  return (Kernel::scratch_floats(num_rows, dim) + 2 * Sums::num_floats(num_rows, dim)) *
         static_cast<int64_t>(sizeof(float));
}

template <typename Kernel> void add(Plan &plan, const Arguments &a) {
  using T = typename Kernel::T;
  Counts total;
  const int64_t most_bytes = plan.has_repeats() ? REPEATED_PARTIAL_BYTES : PARTIAL_BYTES;
  const Span *spans = plan.keep(make_spans(a, most_bytes, total));
  const int64_t offset = plan.reserve(total.floats * static_cast<int64_t>(sizeof(float)));
  plan.add(total.items, [=, plan = &plan](int64_t item) {
    auto *memory = static_cast<float *>(scratch<Kernel>(scratch_bytes<Kernel>(a)));
    if (memory == nullptr) return plan->fail();
    const int64_t seq = find(spans, a.num_seqs, &Counts::items, item);
    const Span &span = spans[seq];
    const int64_t idx = item - span.before.items, num_parts = std::max<int64_t>(span.num_splits, 1);
    const WorkItem work(a, seq, idx / num_parts / a.num_kv_heads, idx / num_parts % a.num_kv_heads);
    const bool is_part = span.num_splits > 0;
    const int64_t split = span.first_split + idx % num_parts;
    const Sums sums = attend<Kernel>(a, work, is_part ? split : work.first_split(a),
                                     is_part ? split + 1 : work.end_split(), memory);
    if (is_part)
      span.part(plan->workspace(offset), idx).copy(sums, 0, work.num_rows(), span.dim);
    else
      write_out<T>(a, work, sums, span.dim);
  });
  plan.add(total.merges, [=, plan = &plan](int64_t item) {
    const int64_t seq = find(spans, a.num_seqs, &Counts::merges, item);
    const Span &span = spans[seq];
    const int64_t pair = item - span.before.merges;
    const WorkItem work(a, seq, pair / a.num_kv_heads, pair % a.num_kv_heads);
    auto *memory = static_cast<float *>(scratch<Kernel>(scratch_bytes<Kernel>(a)));
    if (memory == nullptr) return plan->fail();
    const Sums sums(memory, span.num_rows, span.dim);
    sums.copy(span.part(plan->workspace(offset), pair * span.num_splits), 0, work.num_rows(), span.dim);
    for (int64_t i = 1; i < span.num_splits; ++i)
      merge<Kernel>(sums, span.part(plan->workspace(offset), pair * span.num_splits + i), work.num_rows(), span.dim);
    write_out<T>(a, work, sums, span.dim);
  });
}

} // namespace

void write_cache(const Arguments &arguments, int64_t first_token, int64_t last_token, bool is_bfloat16) {
  (is_bfloat16 ? write_slots<bfloat16> : write_slots<float>)(arguments, first_token, last_token);
}

void add_attention(Plan &plan, int kind, const Arguments &arguments, bool is_bfloat16) {
  if (kind == VECTORS)
    return is_bfloat16 ? add<VectorAttention<FloatFormat<bfloat16>>>(plan, arguments)
                       : add<VectorAttention<FloatFormat<float>>>(plan, arguments);
#ifdef __AVX512BF16__
  if (kind == AVX512_BF16) return add<VectorAttention<PairFormat>>(plan, arguments);
#endif
#ifdef HAS_AMX
  if (kind == AMX_BF16) return add<LaneAttention<TileProducts>>(plan, arguments);
#endif
  throw NotCompiled();
}

// Returns what `run_plan` returns.
extern "C" int tandem_paged_attention(int kind, const Arguments *arguments, int is_bfloat16, int num_threads) {
  return run_plan(num_threads, [&](Plan &plan) {
    const Arguments &a = *arguments;
    if (has_short_items(a)) plan.allow_repeats();
    plan.add(num_token_items(a.num_tokens), [=, &a](int64_t item) {
      write_cache(a, item * ITEM_TOKENS, std::min((item + 1) * ITEM_TOKENS, a.num_tokens), is_bfloat16);
    });
    add_attention(plan, kind, a, is_bfloat16);
  });
}
