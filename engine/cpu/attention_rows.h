// Attention by rows: four query rows against a tile of keys, which are the lanes of vectors. For few rows, as in decoding.

#pragma once

#include "attention.h"

namespace {

constexpr int ROWS = 4; // query rows of one micro-kernel call
constexpr int ACROSS = REGISTERS / 8; // vectors side by side: sums are half of the registers

// 2^x for x <= 0 (0 below the normal numbers). Cephes' polynomial, whose error is about 1 ulp; without its two smallest
// terms another one, whose relative error is 3e-6.
template <bool IS_EXACT> inline vfloat exp2_nonpositive(vfloat x) {
  constexpr float ROUNDS = 12582912.0f; // 1.5 * 2^23: a float of this size has no bits behind the point
  vfloat shifted = x + ROUNDS;
  vfloat r = x - (shifted - ROUNDS), p;
  if (IS_EXACT) {
    p = splat(1.535336188319500e-4f);
    p = p * r + 1.339887440266574e-3f;
    p = p * r + 9.618437357674640e-3f;
    p = p * r + 5.550332471162809e-2f;
    p = p * r + 2.402264791363012e-1f;
    p = p * r + 6.931472028550421e-1f;
  } else {
    p = splat(9.58285e-3f);
    p = p * r + 5.590643e-2f;
    p = p * r + 2.4024099e-1f;
    p = p * r + 6.931242e-1f;
  }
  p = p * r + 1.0f;
  vword power = reinterpret_cast<vword>(shifted) << 23; // the low bits of `shifted` are the whole part
  vfloat result = reinterpret_cast<vfloat>(reinterpret_cast<vword>(p) + power);
  return x < -126.0f ? splat(0.0f) : result;
}

// score * factor - base. A fused product would not be rounded as `base`, the largest of them, was: of large scores even
// the largest's exponent would be far from 0.
inline vfloat exponent(vfloat score, vfloat factor, vfloat base) {
  const vfloat product = score * factor;
  return (product > base ? base : product) - base; // never more, but compilers fuse only a product
}

// The layout and multiplication of operands. A word is the content of one lane: one float here, two bfloat16 below.
template <typename T> struct FloatFormat {
  using Element = T;
  static constexpr int PER_WORD = 1;
  static void load_row(const T *from, float *to, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, load_lanes(from + i));
    for (; i < n; ++i) to[i] = to_float(from[i]);
  }
  static void load_values(const T *even, const T *odd, float *to, int n, int dim) {
    load_row(even, to, n);
    load_row(odd, to + dim, n);
  }
  static void store_key_words(vfloat words, float *to) { // of the tile's transposed keys
    if constexpr (sizeof(T) == sizeof(float)) {
      store(to, words);
    } else {
      store(to, reinterpret_cast<vfloat>(reinterpret_cast<vword>(words) << 16));
      store(to + KEYS, reinterpret_cast<vfloat>(reinterpret_cast<vword>(words) & 0xffff0000u));
    }
  }
  static void pack_weights(float *) {}
  static void store_weights(vfloat even, vfloat odd, float *to) {
    store(to, even);
    store(to + LANES, odd);
  }
  static void add_product(vfloat &acc, float scalar, vfloat words) { acc += scalar * words; }
};

#ifdef __AVX512BF16__
// Pairs of bfloat16 along the summed axis, which one instruction multiplies and sums. Softmax weights are rounded to
// bfloat16 for the product with the values, as in flash attention.
struct PairFormat {
  using Element = bfloat16;
  static constexpr int PER_WORD = 2;
  static void load_row(const bfloat16 *from, float *to, int n) { std::memcpy(to, from, n * sizeof(bfloat16)); }
  static void load_values(const bfloat16 *even, const bfloat16 *odd, float *to, int n, int) {
    uint32_t *words = reinterpret_cast<uint32_t *>(to);
    for (int i = 0; i < n; ++i) words[i] = even[i].bits | static_cast<uint32_t>(odd[i].bits) << 16;
  }
  static void store_key_words(vfloat words, float *to) { store(to, words); }
  static void pack_weights(float *weights) { // in place: the pairs take the first half of the row
    for (int v = 0; v < KEYS / LANES; ++v) {
      __m256bh half = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(load(weights + v * LANES)));
      std::memcpy(reinterpret_cast<bfloat16 *>(weights) + v * LANES, &half, sizeof half);
    }
  }
  static void store_weights(vfloat even, vfloat odd, float *to) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512bh halves = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(odd), reinterpret_cast<__m512>(even));
    store(to, reinterpret_cast<vfloat>(_mm512_permutexvar_epi16(order, reinterpret_cast<__m512i>(halves))));
  }
  static void add_product(vfloat &acc, float scalar, vfloat words) {
    __m512 pair = _mm512_set1_ps(scalar);
    acc = reinterpret_cast<vfloat>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), reinterpret_cast<__m512bh>(pair),
                                                    reinterpret_cast<__m512bh>(words)));
  }
};
#endif

// The weight of a score: 2^(score * factor - base). Keys of bfloat16 are not worth the last bits.
template <typename Format> inline vfloat weight_of(vfloat score, vfloat factor, vfloat base) {
  return exp2_nonpositive<sizeof(typename Format::Element) == sizeof(float)>(exponent(score, factor, base));
}

// Keys as words [KEYS, dim / PER_WORD]. This, `load_keys_t` and `load_values` fetch the rows of the `next` tile meanwhile.
template <typename Format, typename T = typename Format::Element>
void load_keys(const TileRows<T> &rows, const TileRows<T> &next, int head_dim, int dim, float *words) {
  const int num_words = dim / Format::PER_WORD;
  if (head_dim < dim) std::fill_n(words, KEYS * num_words, 0.0f);
  for (int j = 0; j < KEYS; ++j) {
    if (j % LANES == 0) prefetch_rows(next.keys + j, head_dim);
    Format::load_row(rows.keys[j], words + j * num_words, head_dim);
  }
}

// A vector of elements from `d` on of each of LANES keys, of which `num` are left from there; zeros behind them.
template <typename T> inline void load_square(const T *const *keys, int d, int num, vfloat (&square)[LANES]) {
  constexpr int WIDTH = sizeof(vfloat) / sizeof(T);
  if (num < WIDTH) std::memset(square, 0, sizeof square);
  for (int i = 0; i < LANES; ++i)
    if (num >= WIDTH)
      std::memcpy(&square[i], keys[i] + d, sizeof(vfloat));
    else if (num > 0)
      std::memcpy(&square[i], keys[i] + d, static_cast<size_t>(num) * sizeof(T));
}

// Keys as words [dim / PER_WORD, KEYS]. Elements that share 32 bits are transposed as one; columns from num_keys on are
// zeros.
template <typename Format, typename T = typename Format::Element>
void load_keys_t(const TileRows<T> &rows, const TileRows<T> &next, int num_keys, int head_dim, int dim, float *words) {
  constexpr int WIDTH = sizeof(vfloat) / sizeof(T);
  int j = 0;
  for (; j < num_keys; j += LANES) {
    prefetch_rows(next.keys + j, head_dim);
    for (int d = 0; d < dim; d += WIDTH) {
      vfloat square[LANES];
      load_square(rows.keys + j, d, head_dim - d, square);
      transpose(square);
      for (int i = 0; i < LANES; ++i)
        Format::store_key_words(square[i], words + (d + i * WIDTH / LANES) / Format::PER_WORD * KEYS + j);
    }
  }
  for (int d = 0; d < dim / Format::PER_WORD; ++d) std::fill(words + d * KEYS + j, words + (d + 1) * KEYS, 0.0f);
}

// Values [padded_keys / PER_WORD, dim].
template <typename Format, typename T = typename Format::Element>
void load_values(const TileRows<T> &rows, const TileRows<T> &next, int padded_keys, int head_dim, int dim,
                 float *words) {
  constexpr int P = Format::PER_WORD;
  if (head_dim < dim) std::fill_n(words, padded_keys / P * dim, 0.0f);
  for (int j = 0; j < padded_keys; j += 2) {
    if (j % LANES == 0) prefetch_rows(next.values + j, head_dim);
    Format::load_values(rows.values[j], rows.values[j + 1], words + j / P * dim, head_dim, dim);
  }
}

// Scores of ROWS rows against one tile: [ROWS, dim] x [dim, KEYS].
template <typename Format> inline void score_rows(const float *query, const float *keys_t, int dim, float *scores) {
  for (int j = 0; j < KEYS; j += ACROSS * LANES) {
    vfloat acc[ROWS][ACROSS] = {};
    for (int d = 0; d < dim / Format::PER_WORD; ++d) {
      vfloat k[ACROSS];
      for (int v = 0; v < ACROSS; ++v) k[v] = load(keys_t + d * KEYS + j + v * LANES);
      for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < ACROSS; ++v) Format::add_product(acc[r][v], query[r * dim + d], k[v]);
    }
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < ACROSS; ++v) store(scores + r * KEYS + j + v * LANES, acc[r][v]);
  }
}

// out = out * correction + weights x values, for ROWS rows and `COLUMNS` vectors of columns. The weight of word j in row
// r is `weights[r * ROW + j * WORD]`.
template <typename Format, int COLUMNS, int ROW, int WORD>
inline void add_columns(const float *weights, const float *values, int num_keys, int dim, const float *correction,
                        float *out) {
  vfloat acc[ROWS][COLUMNS];
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < COLUMNS; ++c) acc[r][c] = load(out + r * dim + c * LANES) * correction[r];
  int num_words = (num_keys + Format::PER_WORD - 1) / Format::PER_WORD;
  for (int j = 0; j < num_words; ++j) {
    vfloat v[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) v[c] = load(values + j * dim + c * LANES);
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < COLUMNS; ++c) Format::add_product(acc[r][c], weights[r * ROW + j * WORD], v[c]);
  }
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < COLUMNS; ++c) store(out + r * dim + c * LANES, acc[r][c]);
}

template <typename Format, int ROW, int WORD>
inline void add_values(const float *weights, const float *values, int num_keys, int dim, const float *correction,
                       float *out) {
  int d = 0;
  for (; d + ACROSS * LANES <= dim; d += ACROSS * LANES)
    add_columns<Format, ACROSS, ROW, WORD>(weights, values + d, num_keys, dim, correction, out + d);
  for (; d < dim; d += LANES)
    add_columns<Format, 1, ROW, WORD>(weights, values + d, num_keys, dim, correction, out + d);
}

// Reduces the lanes in a tree of fixed shape, so that the order of operations never changes.
template <typename Combine> inline float reduce(vfloat v, Combine combine) {
  for (int half = LANES / 2; half > 0; half /= 2) v = combine(v, __builtin_shuffle(v, (vint){LANE_NUMBERS} ^ half));
  return v[0];
}

// One row's online softmax step over a tile: turns scores into weights, and returns the factor for the previous sums.
// `LaneAttention::soften` does the same for LANES rows, operation by operation.
template <typename Format>
inline float soften_row(const Arguments &a, float *scores, int64_t first_key, int64_t position, float &max, float &sum) {
  constexpr int V = KEYS / LANES;
  const vint lane = {LANE_NUMBERS};
  int32_t last = static_cast<int32_t>(std::min<int64_t>(position - first_key, KEYS));
  int32_t first = a.window > 0 ? static_cast<int32_t>(std::max<int64_t>(position - a.window + 1 - first_key, 0)) : 0;
  vfloat x[V], top = splat(MINUS_INFINITY);
  for (int v = 0; v < V; ++v) {
    x[v] = load(scores + v * LANES);
    if (a.softcap > 0.0f)
      for (int i = 0; i < LANES; ++i) x[v][i] = a.softcap * std::tanh(x[v][i] * a.scale / a.softcap);
    if (last < KEYS - 1 || first > 0) { // most tiles are entirely visible
      vint key = lane + v * LANES;
      x[v] = ((key <= last) & (key >= first)) ? x[v] : splat(MINUS_INFINITY);
    }
    top = x[v] > top ? x[v] : top;
  }
  const float factor = score_factor(a);
  float tile_max = reduce(top, [](vfloat p, vfloat q) { return p > q ? p : q; }) * factor;
  float new_max = std::max(max, tile_max);
  if (new_max == MINUS_INFINITY) { // nothing visible yet
    for (int v = 0; v < V; ++v) store(scores + v * LANES, splat(0.0f));
    return 1.0f;
  }
  vfloat total = splat(0.0f);
  for (int v = 0; v < V; ++v) {
    vfloat weight = weight_of<Format>(x[v], splat(factor), splat(new_max));
    store(scores + v * LANES, weight);
    total += weight;
  }
  float tile_sum = reduce(total, [](vfloat p, vfloat q) { return p + q; });
  float correction = weight_of<Format>(splat(max), splat(1.0f), splat(new_max))[0];
  max = new_max;
  sum = sum * correction + tile_sum;
  return correction;
}

template <typename Format> struct RowAttention {
  using T = typename Format::Element;

  // Memory of one work item, in words of the format; `dim` is padded.
  struct Scratch {
    float *query;  // [rows, dim]
    float *keys_t; // [dim, KEYS]
    float *values; // [KEYS, dim]
    float *scores; // [rows, KEYS]; weights after the softmax step

    Scratch() = default;
    Scratch(float *at, int64_t rows, int64_t dim) {
      query = take(at, rows * dim);
      keys_t = take(at, KEYS * dim);
      values = take(at, KEYS * dim);
      scores = take(at, rows * KEYS);
    }
    static int64_t num_floats(int64_t rows, int64_t dim) { return rows * (dim + KEYS) + 2 * KEYS * dim; }
  };

  static Scratch load_queries(const Arguments &a, const WorkItem &item, int num_rows, int dim, float *memory) {
    Scratch s(memory, num_rows, dim);
    std::fill_n(s.query, num_rows * dim, 0.0f);
    for (int r = 0; r < item.num_rows(); ++r)
      Format::load_row(item.query_row<T>(a, r), s.query + r * dim, static_cast<int>(a.head_dim));
    return s;
  }

  // Adds the keys of positions [start, end), a split.
  static void attend(const Arguments &a, const WorkItem &item, int64_t start, int64_t end, int num_rows, int dim,
                     Scratch &s, const Sums &sums) {
    const int head_dim = static_cast<int>(a.head_dim);
    TileRows<T> rows(a, item, start, std::min<int64_t>(end - start, KEYS));
    for (int64_t first_key = start; first_key < end; first_key += KEYS) {
      int num_keys = static_cast<int>(std::min<int64_t>(KEYS, end - first_key));
      const TileRows<T> next(a, item, first_key + KEYS, std::min<int64_t>(end - first_key - KEYS, KEYS));
      load_keys_t<Format>(rows, next, num_keys, head_dim, dim, s.keys_t);
      load_values<Format>(rows, next, (num_keys + 1) / 2 * 2, head_dim, dim, s.values);
      for (int r = 0; r < num_rows; r += ROWS) {
        if (item.position_of(r + ROWS - 1) < first_key) continue; // causal: none of these rows sees the tile
        if (a.window > 0 && item.position_of(r) - a.window + 1 >= first_key + KEYS) continue;
        attend_tile(a, item, r, first_key, num_keys, dim, s, sums);
      }
      rows = next;
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
      correction[i] = soften_row<Format>(a, scores + i * KEYS, first_key, item.position_of(r + i), max, sum);
      Format::pack_weights(scores + i * KEYS);
    }
    add_values<Format, KEYS, 1>(scores, s.values, num_keys, dim, correction, sums.out + r * dim);
  }
};

} // namespace
