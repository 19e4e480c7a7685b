// What the attention kernels share: their arguments, the items into which their work is cut, and the way to the pool.

#pragma once

#include "kernels.h"

namespace {

using Arguments = AttentionArguments;

constexpr int KEYS = 64;    // keys of one tile
constexpr int QUERIES = 32; // query tokens of one work item
constexpr int64_t SPLIT = 4096; // keys that are summed apart from others; the sums are merged in order. Whole tiles
constexpr int DIM_UNIT = 2 * LANES; // head dimensions are padded to a multiple of this: whole vectors, even of pairs
constexpr float LOG2_E = 1.44269504088896341f;

// The next part of a thread's memory, of which `at` is the rest.
inline float *take(float *&at, int64_t num_floats) { return std::exchange(at, at + num_floats); }

inline int64_t padded_dim(const Arguments &a) { return round_up(a.head_dim, DIM_UNIT); }

// What turns a score into the exponent of its weight, a power of two.
inline float score_factor(const Arguments &a) { return a.softcap > 0.0f ? LOG2_E : a.scale * LOG2_E; }

// Up to QUERIES tokens of one sequence, a tile, for the query heads that share one key/value head. Row r of the item is
// head r % group of token r / group.
struct WorkItem {
  const int32_t *table;
  int64_t token, first_position; // of the first query
  int64_t num_queries, kv_head, group;

  static int64_t num_tokens(const Arguments &a, int64_t seq) { return a.query_starts[seq + 1] - a.query_starts[seq]; }

  WorkItem(const Arguments &a, int64_t seq, int64_t tile, int64_t kv_head)
      : table(a.block_tables + seq * a.max_blocks), token(a.query_starts[seq] + tile * QUERIES),
        first_position(a.kv_lens[seq] - num_tokens(a, seq) + tile * QUERIES),
        num_queries(std::min<int64_t>(QUERIES, num_tokens(a, seq) - tile * QUERIES)), kv_head(kv_head),
        group(a.num_heads / a.num_kv_heads) {}

  int num_rows() const { return static_cast<int>(num_queries * group); }
  int64_t head_of(int64_t row) const { return kv_head * group + row % group; }
  // Rows of padding repeat the last position; their result is dropped.
  int64_t position_of(int64_t row) const { return first_position + std::min(row / group, num_queries - 1); }
  int64_t end_key() const { return first_position + num_queries; }
  // The first key of the first tile that any query sees. Tiles begin at position 0, whatever is seen.
  int64_t first_key(const Arguments &a) const { return first_visible(a, first_position) / KEYS * KEYS; }
  static int64_t first_visible(const Arguments &a, int64_t position) {
    return a.window > 0 ? std::max<int64_t>(position - a.window + 1, 0) : 0;
  }
  // The splits of which any query sees a key.
  int64_t first_split(const Arguments &a) const { return first_key(a) / SPLIT; }
  int64_t end_split() const { return (end_key() + SPLIT - 1) / SPLIT; }
  template <typename T> const T *query_row(const Arguments &a, int64_t row) const {
    return static_cast<const T *>(a.query) + (token + row / group) * a.query_token_stride +
           head_of(row) * a.query_head_stride;
  }
  template <typename T> T *out_row(const Arguments &a, int64_t row) const {
    return static_cast<T *>(a.out) + ((token + row / group) * a.num_heads + head_of(row)) * a.head_dim;
  }
};

// Sums over the keys of one split, or of several, for each row of an item.
struct Sums {
  float *out; // [rows, dim]: values times weights, 2^(score - max)
  float *max; // [rows]: the largest score times log2(e), -infinity where no key is visible
  float *sum; // [rows]: of the weights

  Sums(float *memory, int64_t num_rows, int64_t dim) : out(memory), max(out + num_rows * dim), sum(max + num_rows) {}
  static int64_t num_floats(int64_t num_rows, int64_t dim) { return round_up(num_rows * (dim + 2), LANES); }

  // The sums before the first key of a split. A sink is a score ahead of the first key that its row sees.
  void begin(const Arguments &a, const WorkItem &item, int64_t split, int64_t num_rows, int64_t dim) const {
    std::fill_n(out, num_rows * dim, 0.0f);
    std::fill_n(max, num_rows, MINUS_INFINITY);
    std::fill_n(sum, num_rows, 0.0f);
    for (int64_t r = 0; a.sinks != nullptr && r < num_rows; ++r) {
      if (WorkItem::first_visible(a, item.position_of(r)) / SPLIT != split) continue;
      max[r] = a.sinks[item.head_of(r)] * LOG2_E;
      sum[r] = 1.0f;
    }
  }

  void copy(const Sums &from, int64_t first_row, int64_t num_rows, int64_t dim) const {
    std::copy_n(from.out + first_row * dim, num_rows * dim, out + first_row * dim);
    std::copy_n(from.max + first_row, num_rows, max + first_row);
    std::copy_n(from.sum + first_row, num_rows, sum + first_row);
  }
};

// Adds the sums of the next split. A split of which a row sees nothing changes no bit: decoding passes over it. Never
// inlined, so that there is one order of roundings.
template <typename Kernel>
__attribute__((noinline)) void merge(const Sums &total, const Sums &next, int64_t num_rows, int64_t dim) {
  for (int64_t r = 0; r < num_rows; ++r) {
    if (next.max[r] == MINUS_INFINITY) continue;
    if (total.max[r] == MINUS_INFINITY) {
      total.copy(next, r, 1, dim);
      continue;
    }
    const float max = std::max(total.max[r], next.max[r]);
    const float keep = Kernel::weight(total.max[r] - max), take = Kernel::weight(next.max[r] - max);
    float *out = total.out + r * dim;
    for (int64_t d = 0; d < dim; d += LANES)
      store(out + d, load(out + d) * keep + load(next.out + r * dim + d) * take);
    total.max[r] = max;
    total.sum[r] = total.sum[r] * keep + next.sum[r] * take;
  }
}

template <typename T> void write_out(const Arguments &a, const WorkItem &item, const Sums &sums, int64_t dim) {
  for (int64_t r = 0; r < item.num_rows(); ++r) {
    T *row = item.out_row<T>(a, r);
    for (int64_t d = 0; d < a.head_dim; ++d) from_float(sums.out[r * dim + d] / sums.sum[r], row + d);
  }
}

// Where the keys and values of a tile, from position `start` on, lie in the pool. Those from num_keys on are zeros:
// unwritten slots may hold NaN, and 0 * NaN is not 0.
template <typename T> struct TileRows {
  const T *keys[KEYS], *values[KEYS];

  TileRows(const Arguments &a, const WorkItem &item, int64_t start, int64_t num_keys) {
    static const T zeros[MAX_DIM] = {};
    const int32_t *block = item.table + start / a.block_size;
    int64_t offset = start % a.block_size;
    for (int64_t j = 0; j < num_keys; ++block, offset = 0) {
      const int64_t end = std::min(num_keys, j + a.block_size - offset);
      int64_t at = *block * a.block_stride + offset * a.slot_stride + item.kv_head * a.kv_head_stride;
      for (; j < end; ++j, at += a.slot_stride) {
        keys[j] = static_cast<const T *>(a.layer_keys) + at;
        values[j] = static_cast<const T *>(a.layer_values) + at;
      }
    }
    for (int64_t j = std::max<int64_t>(num_keys, 0); j < KEYS; ++j) keys[j] = values[j] = zeros;
  }
};

// Brings LANES rows towards the caches. Without it each block of a head is a jump that no hardware predicts. Called
// between other work: a core has room for some requests only, and waits when they are used up.
template <typename T> inline void prefetch_rows(const T *const *rows, int64_t dim) {
  constexpr int64_t LINE = 64 / sizeof(T);
  for (int i = 0; i < LANES; ++i)
    for (int64_t d = 0; d < dim; d += LINE) __builtin_prefetch(rows[i] + d, 0, 2);
}

// Turns the rows of a LANES x LANES square of 32-bit words into columns.
inline void transpose(vfloat (&r)[LANES]) {
  const vint lane = {LANE_NUMBERS};
  const vint low = lane / 2 + lane % 2 * LANES, high = low + LANES / 2; // 0, LANES, 1, LANES + 1, ...
  vfloat s[LANES];
  // Rounds of pairwise interleaving. After k rounds, runs of 2^k rows are in place.
  for (int run = 1; run < LANES; run *= 2) {
    for (int i = 0; i < LANES / 2; ++i) {
      s[2 * i] = __builtin_shuffle(r[i], r[i + LANES / 2], low);
      s[2 * i + 1] = __builtin_shuffle(r[i], r[i + LANES / 2], high);
    }
    std::memcpy(r, s, sizeof r);
  }
}

// to[c][r] = from[r][c] for such a square.
inline void transpose_square(const float *from, int64_t from_stride, float *to, int64_t to_stride) {
  vfloat square[LANES];
  for (int i = 0; i < LANES; ++i) square[i] = load(from + i * from_stride);
  transpose(square);
  for (int i = 0; i < LANES; ++i) store(to + i * to_stride, square[i]);
}

} // namespace
