// Paged attention for CPUs: writes new keys and values into their slots, then attends through block tables.
//
// One guarantee shapes this file: the result for a query token depends, bit for bit, only on that token and the keys
// before it. It never depends on the rest of the batch, on how the prompt was cut into chunks, or on the number of
// threads. So keys are always visited in tiles of KEYS from position 0, every row goes through the same micro-kernel
// (rows are padded; remaining rows have no path of their own), and masked keys add exact zeros.

#include "common.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#include <omp.h>

namespace {

constexpr int KEYS = 64;    // keys of one tile
constexpr int ROWS = 4;     // query rows of one micro-kernel call
constexpr int QUERIES = 32; // query tokens of one work item
constexpr int MAX_DIM = 512;        // largest head dimension; CpuAttention checks it
constexpr int DIM_UNIT = 2 * LANES; // head dimensions are padded to a multiple of this: whole vectors, even of pairs

struct Arguments {
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

template <typename T> void write_cache(const Arguments &a) {
  const T *key = static_cast<const T *>(a.key), *value = static_cast<const T *>(a.value);
  for (int64_t t = 0; t < a.num_tokens; ++t) {
    int64_t slot = a.slot_mapping[t];
    int64_t at = slot / a.block_size * a.block_stride + slot % a.block_size * a.slot_stride;
    for (int64_t h = 0; h < a.num_kv_heads; ++h) {
      std::memcpy(static_cast<T *>(a.layer_keys) + at + h * a.kv_head_stride,
                  key + t * a.key_token_stride + h * a.key_head_stride, a.head_dim * sizeof(T));
      std::memcpy(static_cast<T *>(a.layer_values) + at + h * a.kv_head_stride,
                  value + t * a.value_token_stride + h * a.value_head_stride, a.head_dim * sizeof(T));
    }
  }
}

// Scratch memory of one thread for one work item. Operands are in the kernel's own format (see Format below).
struct Scratch {
  float *query;  // [rows, dim]
  float *keys_t; // [dim, KEYS]
  float *values; // [KEYS, dim]
  float *scores; // [rows, KEYS]; weights after the softmax step
  float *out;    // [rows, dim]
  float *max;    // [rows]
  float *sum;    // [rows]
};

// to[c][r] = from[r][c] for a LANES x LANES square of 32-bit words.
inline void transpose_square(const float *from, int64_t from_stride, float *to, int64_t to_stride) {
  vfloat r[LANES], s[LANES];
  for (int i = 0; i < LANES; ++i) r[i] = load(from + i * from_stride);
  // Four rounds of pairwise interleaving. After k rounds, runs of 2^k rows are in place.
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 8; ++i) {
      s[2 * i] = __builtin_shuffle(r[i], r[i + 8], (vint){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
      s[2 * i + 1] =
          __builtin_shuffle(r[i], r[i + 8], (vint){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
    }
    std::memcpy(r, s, sizeof r);
  }
  for (int i = 0; i < LANES; ++i) store(to + i * to_stride, r[i]);
}

// The layout and multiplication of operands. A word is the content of one lane: one float here, two bfloat16 below.
template <typename T> struct Format {
  static constexpr int PER_WORD = 1;
  static void load_row(const T *from, float *to, int n) {
    for (int i = 0; i < n; ++i) to[i] = to_float(from[i]);
  }
  static void load_values(const T *even, const T *odd, float *to, int n, int dim) {
    load_row(even, to, n);
    load_row(odd, to + dim, n);
  }
  static void pack_weights(float *) {}
  static void multiply_add(vfloat &acc, float scalar, vfloat words) { acc += scalar * words; }
};

#ifdef __AVX512BF16__
// Pairs of bfloat16 along the summed axis: one instruction multiplies and sums both, at twice the rate of floats.
// Softmax weights are rounded to bfloat16 for the product with the values, as in flash attention.
template <> struct Format<bfloat16> {
  static constexpr int PER_WORD = 2;
  static void load_row(const bfloat16 *from, float *to, int n) { std::memcpy(to, from, n * sizeof(bfloat16)); }
  static void load_values(const bfloat16 *even, const bfloat16 *odd, float *to, int n, int) {
    uint32_t *words = reinterpret_cast<uint32_t *>(to);
    for (int i = 0; i < n; ++i) words[i] = even[i].bits | static_cast<uint32_t>(odd[i].bits) << 16;
  }
  static void pack_weights(float *weights) { // in place: the pairs take the first half of the row
    for (int v = 0; v < KEYS / LANES; ++v) {
      __m256bh half = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(load(weights + v * LANES)));
      std::memcpy(reinterpret_cast<bfloat16 *>(weights) + v * LANES, &half, sizeof half);
    }
  }
  static void multiply_add(vfloat &acc, float scalar, vfloat words) {
    __m512 pair = _mm512_set1_ps(scalar);
    acc = reinterpret_cast<vfloat>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), reinterpret_cast<__m512bh>(pair),
                                                    reinterpret_cast<__m512bh>(words)));
  }
};
#endif

// Scores of ROWS rows against one tile: [ROWS, dim] x [dim, KEYS].
template <typename T> inline void score_rows(const float *query, const float *keys_t, int dim, float *scores) {
  constexpr int V = KEYS / LANES;
  vfloat acc[ROWS][V] = {};
  for (int d = 0; d < dim / Format<T>::PER_WORD; ++d) {
    vfloat k[V];
    for (int v = 0; v < V; ++v) k[v] = load(keys_t + d * KEYS + v * LANES);
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < V; ++v) Format<T>::multiply_add(acc[r][v], query[r * dim + d], k[v]);
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < V; ++v) store(scores + r * KEYS + v * LANES, acc[r][v]);
}

// out = out * correction + weights x values, for ROWS rows and `COLUMNS` vectors of columns.
template <typename T, int COLUMNS>
inline void add_values(const float *weights, const float *values, int num_keys, int dim, const float *correction,
                       float *out) {
  vfloat acc[ROWS][COLUMNS];
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < COLUMNS; ++c) acc[r][c] = load(out + r * dim + c * LANES) * correction[r];
  int num_words = (num_keys + Format<T>::PER_WORD - 1) / Format<T>::PER_WORD;
  for (int j = 0; j < num_words; ++j) {
    vfloat v[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) v[c] = load(values + j * dim + c * LANES);
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < COLUMNS; ++c) Format<T>::multiply_add(acc[r][c], weights[r * KEYS + j], v[c]);
  }
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < COLUMNS; ++c) store(out + r * dim + c * LANES, acc[r][c]);
}

// Brings the rows of a tile towards the caches. Without it each block of a head is a jump that no hardware predicts.
template <typename T>
void prefetch_tile(const Arguments &a, const int32_t *table, int64_t kv_head, int64_t start, int64_t end) {
  constexpr int64_t LINE = 64 / sizeof(T);
  const T *keys = static_cast<const T *>(a.layer_keys), *values = static_cast<const T *>(a.layer_values);
  for (int64_t position = start; position < end; ++position) {
    int64_t at = table[position / a.block_size] * a.block_stride + position % a.block_size * a.slot_stride +
                 kv_head * a.kv_head_stride;
    for (int64_t d = 0; d < a.head_dim; d += LINE) {
      __builtin_prefetch(keys + at + d, 0, 2);
      __builtin_prefetch(values + at + d, 0, 2);
    }
  }
}

template <typename T>
void load_tile(const Arguments &a, const int32_t *table, int64_t kv_head, int64_t start, int num_keys, int dim,
               Scratch &s) {
  static const T zeros[MAX_DIM] = {};
  constexpr int P = Format<T>::PER_WORD;
  const T *keys = static_cast<const T *>(a.layer_keys), *values = static_cast<const T *>(a.layer_values);
  int padded_keys = (num_keys + LANES - 1) / LANES * LANES, head_dim = static_cast<int>(a.head_dim);
  alignas(64) float rows[LANES * MAX_DIM];
  const T *value_rows[LANES];
  for (int base = 0; base < padded_keys; base += LANES) {
    for (int j = 0; j < LANES; ++j) {
      const T *key_row = value_rows[j] = zeros; // unwritten slots may hold NaN, and 0 * NaN is not 0
      if (base + j < num_keys) {
        int64_t position = start + base + j;
        int64_t at = table[position / a.block_size] * a.block_stride +
                     position % a.block_size * a.slot_stride + kv_head * a.kv_head_stride;
        key_row = keys + at;
        value_rows[j] = values + at;
      }
      if (head_dim < dim) std::fill_n(rows + j * dim, dim, 0.0f);
      Format<T>::load_row(key_row, rows + j * dim, head_dim);
    }
    for (int d = 0; d < dim / P; d += LANES) transpose_square(rows + d, dim, s.keys_t + d * KEYS + base, KEYS);
    for (int j = 0; j < LANES; j += 2) {
      float *to = s.values + (base + j) / P * dim;
      if (head_dim < dim) std::fill_n(to, 2 / P * dim, 0.0f);
      Format<T>::load_values(value_rows[j], value_rows[j + 1], to, head_dim, dim);
    }
  }
  for (int d = 0; d < dim / P; ++d)
    for (int j = padded_keys; j < KEYS; ++j) s.keys_t[d * KEYS + j] = 0.0f;
}

// Reduces the lanes in a tree of fixed shape, so that the order of operations never changes.
template <typename Combine> inline float reduce(vfloat v, Combine combine) {
  v = combine(v, __builtin_shuffle(v, (vint){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
  v = combine(v, __builtin_shuffle(v, (vint){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
  v = combine(v, __builtin_shuffle(v, (vint){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
  v = combine(v, __builtin_shuffle(v, (vint){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
  return v[0];
}

// One row's online softmax step over a tile: turns scores into weights, and returns the factor for the previous sums.
inline float soften_row(const Arguments &a, float *scores, int64_t first_key, int64_t position, float &max, float &sum) {
  constexpr int V = KEYS / LANES;
  const vint lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  int32_t last = static_cast<int32_t>(std::min<int64_t>(position - first_key, KEYS));
  int32_t first = a.window > 0 ? static_cast<int32_t>(std::max<int64_t>(position - a.window + 1 - first_key, 0)) : 0;
  vfloat x[V], top = splat(MINUS_INFINITY);
  for (int v = 0; v < V; ++v) {
    x[v] = load(scores + v * LANES) * a.scale;
    if (a.softcap > 0.0f)
      for (int i = 0; i < LANES; ++i) x[v][i] = a.softcap * std::tanh(x[v][i] / a.softcap);
    if (last < KEYS - 1 || first > 0) { // most tiles are entirely visible
      vint key = lane + v * LANES;
      x[v] = ((key <= last) & (key >= first)) ? x[v] : splat(MINUS_INFINITY);
    }
    top = x[v] > top ? x[v] : top;
  }
  float tile_max = reduce(top, [](vfloat p, vfloat q) { return p > q ? p : q; });
  float new_max = std::max(max, tile_max);
  if (new_max == MINUS_INFINITY) { // nothing visible yet
    for (int v = 0; v < V; ++v) store(scores + v * LANES, splat(0.0f));
    return 1.0f;
  }
  vfloat total = splat(0.0f);
  for (int v = 0; v < V; ++v) {
    vfloat weight = exp_nonpositive(x[v] - new_max);
    store(scores + v * LANES, weight);
    total += weight;
  }
  float tile_sum = reduce(total, [](vfloat p, vfloat q) { return p + q; });
  float correction = max == new_max ? 1.0f : exp_nonpositive(splat(max - new_max))[0];
  max = new_max;
  sum = sum * correction + tile_sum;
  return correction;
}

// Attention of up to QUERIES tokens of one sequence for the query heads that share one key/value head.
template <typename T>
void attend(const Arguments &a, int64_t seq, int64_t first_query, int64_t num_queries, int64_t kv_head, Scratch &s) {
  int64_t group = a.num_heads / a.num_kv_heads;
  int dim = static_cast<int>((a.head_dim + DIM_UNIT - 1) / DIM_UNIT * DIM_UNIT);
  int num_rows = static_cast<int>(num_queries * group);
  int padded_rows = (num_rows + ROWS - 1) / ROWS * ROWS;
  int64_t token = a.query_starts[seq] + first_query;
  int64_t first_position = a.kv_lens[seq] - (a.query_starts[seq + 1] - a.query_starts[seq]) + first_query;
  const int32_t *table = a.block_tables + seq * a.max_blocks;

  std::fill_n(s.query, padded_rows * dim, 0.0f);
  std::fill_n(s.out, padded_rows * dim, 0.0f);
  std::fill_n(s.max, padded_rows, MINUS_INFINITY);
  std::fill_n(s.sum, padded_rows, 0.0f);
  for (int r = 0; r < num_rows; ++r) {
    const T *row = static_cast<const T *>(a.query) + (token + r / group) * a.query_token_stride +
                   (kv_head * group + r % group) * a.query_head_stride;
    Format<T>::load_row(row, s.query + r * dim, static_cast<int>(a.head_dim));
    if (a.sinks != nullptr) {
      s.max[r] = a.sinks[kv_head * group + r % group];
      s.sum[r] = 1.0f;
    }
  }

  int64_t last_position = first_position + num_queries - 1;
  int64_t first_key = a.window > 0 ? std::max<int64_t>(first_position - a.window + 1, 0) / KEYS * KEYS : 0;
  for (; first_key <= last_position; first_key += KEYS) {
    int num_keys = static_cast<int>(std::min<int64_t>(KEYS, last_position + 1 - first_key));
    prefetch_tile<T>(a, table, kv_head, first_key + KEYS, std::min(first_key + 2 * KEYS, last_position + 1));
    load_tile<T>(a, table, kv_head, first_key, num_keys, dim, s);
    for (int r = 0; r < padded_rows; r += ROWS) {
      // Padding rows beyond num_rows repeat the last position; their result is dropped.
      int64_t oldest = first_position + std::min<int64_t>(r / group, num_queries - 1);
      int64_t newest = first_position + std::min<int64_t>((r + ROWS - 1) / group, num_queries - 1);
      if (newest < first_key) continue; // causal: none of these rows sees the tile
      if (a.window > 0 && oldest - a.window + 1 >= first_key + KEYS) continue;
      float *scores = s.scores + r * KEYS;
      score_rows<T>(s.query + r * dim, s.keys_t, dim, scores);
      float correction[ROWS];
      for (int i = 0; i < ROWS; ++i) {
        int64_t position = first_position + std::min<int64_t>((r + i) / group, num_queries - 1);
        correction[i] = soften_row(a, scores + i * KEYS, first_key, position, s.max[r + i], s.sum[r + i]);
        Format<T>::pack_weights(scores + i * KEYS);
      }
      int d = 0;
      for (; d + 4 * LANES <= dim; d += 4 * LANES)
        add_values<T, 4>(scores, s.values + d, num_keys, dim, correction, s.out + r * dim + d);
      for (; d < dim; d += LANES)
        add_values<T, 1>(scores, s.values + d, num_keys, dim, correction, s.out + r * dim + d);
    }
  }

  for (int r = 0; r < num_rows; ++r) {
    T *row = static_cast<T *>(a.out) + ((token + r / group) * a.num_heads + kv_head * group + r % group) * a.head_dim;
    for (int d = 0; d < a.head_dim; ++d) from_float(s.out[r * dim + d] / s.sum[r], row + d);
  }
}

int64_t scratch_floats(int64_t rows, int64_t dim) {
  return rows * dim * 2 + dim * KEYS * 2 + rows * KEYS + rows * 2;
}

Scratch carve(float *memory, int64_t rows, int64_t dim) {
  Scratch s;
  s.query = memory;
  s.keys_t = s.query + rows * dim;
  s.values = s.keys_t + dim * KEYS;
  s.scores = s.values + KEYS * dim;
  s.out = s.scores + rows * KEYS;
  s.max = s.out + rows * dim;
  s.sum = s.max + rows;
  return s;
}

template <typename T> int run(const Arguments &a, int num_threads) {
  write_cache<T>(a);
  int64_t group = a.num_heads / a.num_kv_heads;
  int64_t rows = (QUERIES * group + ROWS - 1) / ROWS * ROWS;
  int64_t dim = (a.head_dim + DIM_UNIT - 1) / DIM_UNIT * DIM_UNIT;
  int64_t num_tiles = 0; // query tiles over all sequences
  for (int64_t i = 0; i < a.num_seqs; ++i)
    num_tiles += (a.query_starts[i + 1] - a.query_starts[i] + QUERIES - 1) / QUERIES;
  int64_t num_items = num_tiles * a.num_kv_heads;
  int threads = static_cast<int>(std::min<int64_t>(num_threads, num_items));
  size_t bytes = (scratch_floats(rows, dim) * sizeof(float) + 63) / 64 * 64;
  bool failed = false;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float *memory = static_cast<float *>(std::aligned_alloc(64, bytes));
    if (memory == nullptr) {
#pragma omp atomic write
      failed = true;
    }
    Scratch s = carve(memory, rows, dim);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < num_items; ++item) {
      if (memory == nullptr) continue;
      int64_t tile = item / a.num_kv_heads, seq = 0;
      for (;; ++seq) { // there are few sequences, so a search is cheaper than a table
        int64_t tiles = (a.query_starts[seq + 1] - a.query_starts[seq] + QUERIES - 1) / QUERIES;
        if (tile < tiles) break;
        tile -= tiles;
      }
      int64_t length = a.query_starts[seq + 1] - a.query_starts[seq];
      attend<T>(a, seq, tile * QUERIES, std::min<int64_t>(QUERIES, length - tile * QUERIES), item % a.num_kv_heads, s);
    }
    std::free(memory);
  }
  return failed ? 1 : 0;
}

} // namespace

// Returns 0, or 1 if scratch memory could not be allocated.
extern "C" int tandem_paged_attention(const Arguments *arguments, int is_bfloat16, int num_threads) {
  return is_bfloat16 ? run<bfloat16>(*arguments, num_threads) : run<float>(*arguments, num_threads);
}
