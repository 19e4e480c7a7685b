// Attention by rows: four query rows against a tile of keys, by vectors of floats or of pairs of bfloat16.

#pragma once

#include "attention.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

constexpr int ROWS = 4; // query rows of one micro-kernel call

// Scratch memory of one thread for one work item. Operands are in the kernel's own format (see Format below).
struct Scratch {
  float *query;  // [rows, dim]
  float *keys_t; // [dim, KEYS]
  float *values; // [KEYS, dim]
  float *scores; // [rows, KEYS]; weights after the softmax step
};

// The layout and multiplication of operands. A word is the content of one lane: one float here, two bfloat16 below.
template <typename T> struct FloatFormat {
  using Element = T;
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
struct PairFormat {
  using Element = bfloat16;
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
template <typename Format> inline void score_rows(const float *query, const float *keys_t, int dim, float *scores) {
  constexpr int V = KEYS / LANES;
  vfloat acc[ROWS][V] = {};
  for (int d = 0; d < dim / Format::PER_WORD; ++d) {
    vfloat k[V];
    for (int v = 0; v < V; ++v) k[v] = load(keys_t + d * KEYS + v * LANES);
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < V; ++v) Format::multiply_add(acc[r][v], query[r * dim + d], k[v]);
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < V; ++v) store(scores + r * KEYS + v * LANES, acc[r][v]);
}

// out = out * correction + weights x values, for ROWS rows and `COLUMNS` vectors of columns.
template <typename Format, int COLUMNS>
inline void add_values(const float *weights, const float *values, int num_keys, int dim, const float *correction,
                       float *out) {
  vfloat acc[ROWS][COLUMNS];
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < COLUMNS; ++c) acc[r][c] = load(out + r * dim + c * LANES) * correction[r];
  int num_words = (num_keys + Format::PER_WORD - 1) / Format::PER_WORD;
  for (int j = 0; j < num_words; ++j) {
    vfloat v[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) v[c] = load(values + j * dim + c * LANES);
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < COLUMNS; ++c) Format::multiply_add(acc[r][c], weights[r * KEYS + j], v[c]);
  }
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < COLUMNS; ++c) store(out + r * dim + c * LANES, acc[r][c]);
}

template <typename Format>
void load_tile(const Arguments &a, const WorkItem &item, int64_t start, int num_keys, int dim, Scratch &s) {
  using T = typename Format::Element;
  static const T zeros[MAX_DIM] = {};
  constexpr int P = Format::PER_WORD;
  const T *keys = static_cast<const T *>(a.layer_keys), *values = static_cast<const T *>(a.layer_values);
  int padded_keys = (num_keys + LANES - 1) / LANES * LANES, head_dim = static_cast<int>(a.head_dim);
  alignas(64) float rows[LANES * MAX_DIM];
  const T *value_rows[LANES];
  for (int base = 0; base < padded_keys; base += LANES) {
    for (int j = 0; j < LANES; ++j) {
      const T *key_row = value_rows[j] = zeros; // unwritten slots may hold NaN, and 0 * NaN is not 0
      if (base + j < num_keys) {
        int64_t at = slot_of(a, item.table, start + base + j, item.kv_head);
        key_row = keys + at;
        value_rows[j] = values + at;
      }
      if (head_dim < dim) std::fill_n(rows + j * dim, dim, 0.0f);
      Format::load_row(key_row, rows + j * dim, head_dim);
    }
    for (int d = 0; d < dim / P; d += LANES) transpose_square(rows + d, dim, s.keys_t + d * KEYS + base, KEYS);
    for (int j = 0; j < LANES; j += 2) {
      float *to = s.values + (base + j) / P * dim;
      if (head_dim < dim) std::fill_n(to, 2 / P * dim, 0.0f);
      Format::load_values(value_rows[j], value_rows[j + 1], to, head_dim, dim);
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

inline Scratch carve(float *memory, int64_t rows, int64_t dim) {
  Scratch s;
  s.query = memory;
  s.keys_t = s.query + rows * dim;
  s.values = s.keys_t + dim * KEYS;
  s.scores = s.values + KEYS * dim;
  return s;
}

template <typename Format> struct RowAttention {
  using T = typename Format::Element;
  static constexpr int ROW_UNIT = ROWS;
  static constexpr float SCORE_UNIT = 1.0f;

  static float weight(float score) { return exp_nonpositive(splat(score))[0]; }

  static int64_t scratch_floats(int64_t num_rows, int64_t dim) { return num_rows * (dim + KEYS) + dim * KEYS * 2; }

  static Scratch load_queries(const Arguments &a, const WorkItem &item, int num_rows, int dim, float *memory) {
    Scratch s = carve(memory, num_rows, dim);
    std::fill_n(s.query, num_rows * dim, 0.0f);
    for (int r = 0; r < item.num_rows(); ++r)
      Format::load_row(item.query_row<T>(a, r), s.query + r * dim, static_cast<int>(a.head_dim));
    return s;
  }

  // Adds the keys of positions [start, end), a split.
  static void attend(const Arguments &a, const WorkItem &item, int64_t start, int64_t end, int num_rows, int dim,
                     Scratch &s, const Sums &sums) {
    for (int64_t first_key = start; first_key < end; first_key += KEYS) {
      int num_keys = static_cast<int>(std::min<int64_t>(KEYS, end - first_key));
      prefetch_tile<T>(a, item.table, item.kv_head, first_key + KEYS, std::min(first_key + 2 * KEYS, end));
      load_tile<Format>(a, item, first_key, num_keys, dim, s);
      for (int r = 0; r < num_rows; r += ROWS) {
        if (item.position_of(r + ROWS - 1) < first_key) continue; // causal: none of these rows sees the tile
        if (a.window > 0 && item.position_of(r) - a.window + 1 >= first_key + KEYS) continue;
        attend_tile(a, item, r, first_key, num_keys, dim, s, sums);
      }
    }
  }

private:
  // Rows [r, r + ROWS) of the item against the tile that was loaded.
  static void attend_tile(const Arguments &a, const WorkItem &item, int r, int64_t first_key, int num_keys, int dim,
                          Scratch &s, const Sums &sums) {
    float *scores = s.scores + r * KEYS;
    score_rows<Format>(s.query + r * dim, s.keys_t, dim, scores);
    float correction[ROWS];
    for (int i = 0; i < ROWS; ++i) {
      float &max = sums.max[r + i], &sum = sums.sum[r + i];
      correction[i] = soften_row(a, scores + i * KEYS, first_key, item.position_of(r + i), max, sum);
      Format::pack_weights(scores + i * KEYS);
    }
    int d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES)
      add_values<Format, 4>(scores, s.values + d, num_keys, dim, correction, sums.out + r * dim + d);
    for (; d < dim; d += LANES)
      add_values<Format, 1>(scores, s.values + d, num_keys, dim, correction, sums.out + r * dim + d);
  }
};

} // namespace
