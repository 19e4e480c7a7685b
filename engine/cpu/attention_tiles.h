// Attention by AMX tiles: sixteen query rows are the lanes of a vector while scores become weights.
//
//   scores_t [KEYS, 16] = keys [KEYS, dim] x query_t [dim, 16]
//   out      [16, dim] += weights [16, KEYS] x values [KEYS, dim]
//
// With rows as lanes the softmax needs no sums across a vector, and keys are multiplied as they lie in the pool. The
// right operand of a tile product holds pairs along the summed axis; weights are rounded to bfloat16 for it.

#pragma once

#include "attention.h"
#include "tiles.h"

#ifdef HAS_AMX

namespace {

// 2^x for x <= 0 (0 below the normal numbers). Cephes' polynomial; error about 1 ulp.
inline vfloat exp2_nonpositive(vfloat x) {
  constexpr float ROUNDS = 12582912.0f; // 1.5 * 2^23: a float of this size has no bits behind the point
  vfloat shifted = x + ROUNDS;
  vfloat r = x - (shifted - ROUNDS);
  vfloat p = splat(1.535336188319500e-4f);
  p = p * r + 1.339887440266574e-3f;
  p = p * r + 9.618437357674640e-3f;
  p = p * r + 5.550332471162809e-2f;
  p = p * r + 2.402264791363012e-1f;
  p = p * r + 6.931472028550421e-1f;
  p = p * r + 1.0f;
  vint power = reinterpret_cast<vint>(shifted) << 23; // the low bits of `shifted` are the whole part
  vfloat result = reinterpret_cast<vfloat>(reinterpret_cast<vint>(p) + power);
  return x < -126.0f ? splat(0.0f) : result;
}

// {low[0], high[0], low[1], high[1], ...}, rounded.
inline vfloat pair_up(vfloat low, vfloat high) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  __m512bh halves = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low));
  return reinterpret_cast<vfloat>(_mm512_permutexvar_epi16(order, reinterpret_cast<__m512i>(halves)));
}

// to[2 * d] = even[d], to[2 * d + 1] = odd[d], for DIM_UNIT elements.
inline void interleave(__m512i even, __m512i odd, float *to) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                       5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, low, odd));
  _mm512_storeu_si512(to + LANES, _mm512_permutex2var_epi16(even, high, odd));
}

struct TileAttention {
  using T = bfloat16;
  static constexpr float LOG2_E = 1.44269504088896341f;
  static constexpr int ROW_UNIT = LANES;
  static constexpr float SCORE_UNIT = LOG2_E;

  static float weight(float score) { return exp2_nonpositive(splat(score))[0]; }

  // Memory of one work item. A group is LANES rows; `dim` is padded.
  struct Scratch {
    T *keys;         // [KEYS, dim]
    float *values;   // [KEYS / 2, dim] of pairs
    float *query_t;  // [groups, dim / 2, LANES] of pairs
    float *scores_t; // [KEYS, LANES], times log2(e)
    float *pairs;    // [KEYS / 2, LANES] of weights
    float *weights;  // [LANES, KEYS / 2] of pairs
    vint *positions; // [groups]

    Scratch(float *at, int64_t groups, int64_t dim) {
      const auto take = [&at](int64_t num_floats) { return std::exchange(at, at + num_floats); };
      keys = reinterpret_cast<T *>(take(KEYS * dim / 2));
      values = take(KEYS / 2 * dim);
      query_t = take(groups * dim / 2 * LANES);
      scores_t = take(KEYS * LANES);
      pairs = take(KEYS / 2 * LANES);
      weights = take(KEYS / 2 * LANES);
      positions = reinterpret_cast<vint *>(take(groups * LANES));
    }
  };

  static int64_t scratch_floats(int64_t num_rows, int64_t dim) {
    return KEYS * dim + num_rows * (dim / 2 + 1) + KEYS * LANES * 2;
  }

  static Scratch load_queries(const Arguments &a, const WorkItem &item, int num_rows, int dim, float *memory) {
    Scratch s(memory, num_rows / LANES, dim);
    for (int g = 0; g < num_rows / LANES; ++g) load_group(a, item, g, dim, s);
    return s;
  }

  // Adds the keys of positions [start, end), a split.
  static void attend(const Arguments &a, const WorkItem &item, int64_t start, int64_t end, int num_rows, int dim,
                     Scratch &s, const Sums &sums) {
    configure_tiles(TILE, TILE);
    for (int64_t first_key = start; first_key < end; first_key += KEYS) {
      int num_keys = static_cast<int>(std::min<int64_t>(KEYS, end - first_key));
      prefetch_tile<T>(a, item.table, item.kv_head, first_key + KEYS, std::min(first_key + 2 * KEYS, end));
      load_tile(a, item, first_key, num_keys, dim, s);
      for (int g = 0; g < num_rows / LANES; ++g) {
        int64_t oldest = s.positions[g][0], newest = s.positions[g][LANES - 1];
        if (newest < first_key) continue; // causal: none of these rows sees the tile
        if (a.window > 0 && oldest - a.window + 1 >= first_key + KEYS) continue;
        bool sees_all = first_key + KEYS - 1 <= oldest && (a.window == 0 || newest - a.window + 1 <= first_key);
        score(s.query_t + g * dim / 2 * LANES, dim, s);
        vfloat correction = soften(a, g, first_key, sees_all, s, sums);
        add_values(sums.out + g * LANES * dim, correction, dim, s);
      }
    }
    _tile_release();
  }

private:
  // DIM_UNIT elements from `d` on; beyond the head they are zeros.
  static __m512i load_part(const Arguments &a, const T *row, int64_t d) {
    int64_t n = a.head_dim - d;
    if (n >= DIM_UNIT) return _mm512_loadu_si512(row + d);
    return _mm512_maskz_loadu_epi16(n > 0 ? (1u << n) - 1 : 0, row + d);
  }

  static void load_group(const Arguments &a, const WorkItem &item, int g, int dim, Scratch &s) {
    vint positions;
    const T *rows[LANES];
    for (int i = 0; i < LANES; ++i) {
      int64_t row = g * LANES + i;
      positions[i] = static_cast<int32_t>(item.position_of(row));
      rows[i] = row < item.num_rows() ? item.query_row<T>(a, row) : nullptr;
    }
    for (int d = 0; d < dim; d += DIM_UNIT) {
      alignas(64) float square[LANES * LANES];
      for (int i = 0; i < LANES; ++i)
        _mm512_store_si512(square + i * LANES, rows[i] == nullptr ? _mm512_setzero_si512() : load_part(a, rows[i], d));
      transpose_square(square, LANES, s.query_t + (g * dim + d) / 2 * LANES, LANES);
    }
    s.positions[g] = positions;
  }

  static void load_tile(const Arguments &a, const WorkItem &item, int64_t start, int num_keys, int dim, Scratch &s) {
    static const T zeros[MAX_DIM] = {};
    const T *keys = static_cast<const T *>(a.layer_keys), *values = static_cast<const T *>(a.layer_values);
    const T *key_rows[2], *value_rows[2];
    for (int j = 0; j < KEYS; j += 2) {
      for (int i = 0; i < 2; ++i) {
        key_rows[i] = value_rows[i] = zeros; // unwritten slots may hold NaN, and 0 * NaN is not 0
        if (j + i >= num_keys) continue;
        int64_t at = slot_of(a, item.table, start + j + i, item.kv_head);
        key_rows[i] = keys + at;
        value_rows[i] = values + at;
      }
      for (int d = 0; d < dim; d += DIM_UNIT) {
        for (int i = 0; i < 2; ++i) _mm512_storeu_si512(s.keys + (j + i) * dim + d, load_part(a, key_rows[i], d));
        interleave(load_part(a, value_rows[0], d), load_part(a, value_rows[1], d), s.values + j / 2 * dim + d);
      }
    }
  }

  // Tiles 0 to 3 are sums of sixteen keys each, 4 to 6 keys, 7 the query.
  static void score(const float *query_t, int dim, Scratch &s) {
    const T *keys = s.keys;
    const int64_t stride = dim * static_cast<int64_t>(sizeof(T));
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < dim; d += DIM_UNIT) {
      _tile_loadd(7, query_t + d / 2 * LANES, 64);
      _tile_loadd(4, keys + d, stride);
      _tile_dpbf16ps(0, 4, 7);
      _tile_loadd(5, keys + 1 * LANES * dim + d, stride);
      _tile_dpbf16ps(1, 5, 7);
      _tile_loadd(6, keys + 2 * LANES * dim + d, stride);
      _tile_dpbf16ps(2, 6, 7);
      _tile_loadd(4, keys + 3 * LANES * dim + d, stride);
      _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, s.scores_t, 64);
    _tile_stored(1, s.scores_t + 1 * LANES * LANES, 64);
    _tile_stored(2, s.scores_t + 2 * LANES * LANES, 64);
    _tile_stored(3, s.scores_t + 3 * LANES * LANES, 64);
  }

  // Online softmax of a group over a tile: scores become weights. Returns the factor for the previous sums.
  static vfloat soften(const Arguments &a, int g, int64_t first_key, bool sees_all, Scratch &s,
                       const Sums &sums) {
    vfloat old_max = load(sums.max + g * LANES), max = old_max;
    if (a.softcap > 0.0f) cap_scores(a, s);
    if (!sees_all) hide_keys(a, s.positions[g], first_key, s);
    const float scale = a.softcap > 0.0f ? LOG2_E : a.scale * LOG2_E;
    for (int j = 0; j < KEYS; ++j) {
      vfloat x = load(s.scores_t + j * LANES) * scale;
      store(s.scores_t + j * LANES, x);
      max = x > max ? x : max;
    }
    vfloat base = max == MINUS_INFINITY ? splat(0.0f) : max; // nothing visible yet
    vfloat correction = exp2_nonpositive(old_max - base);
    vfloat sum = load(sums.sum + g * LANES) * correction;
    for (int j = 0; j < KEYS; j += 2) {
      vfloat even = exp2_nonpositive(load(s.scores_t + j * LANES) - base);
      vfloat odd = exp2_nonpositive(load(s.scores_t + (j + 1) * LANES) - base);
      sum += even;
      sum += odd;
      store(s.pairs + j / 2 * LANES, pair_up(even, odd));
    }
    for (int j = 0; j < KEYS / 2; j += LANES) transpose_square(s.pairs + j * LANES, LANES, s.weights + j, KEYS / 2);
    store(sums.max + g * LANES, max);
    store(sums.sum + g * LANES, sum);
    return correction;
  }

  static void cap_scores(const Arguments &a, Scratch &s) {
    for (int i = 0; i < KEYS * LANES; ++i) s.scores_t[i] = a.softcap * std::tanh(s.scores_t[i] * a.scale / a.softcap);
  }

  static void hide_keys(const Arguments &a, vint positions, int64_t first_key, Scratch &s) {
    vint last = positions - static_cast<int32_t>(first_key); // of the keys in the tile
    vint first = a.window > 0 ? last - static_cast<int32_t>(std::min<int64_t>(a.window, 1 << 30) - 1) : last - last;
    for (int32_t j = 0; j < KEYS; ++j) {
      vint key = j - vint{};
      vfloat x = load(s.scores_t + j * LANES);
      store(s.scores_t + j * LANES, ((key <= last) & (key >= first)) ? x : splat(MINUS_INFINITY));
    }
  }

  // Tiles 0 to 3 are sums of sixteen dimensions each, 4 and 5 weights, 6 and 7 values.
  static void add_values(float *out, vfloat correction, int dim, Scratch &s) {
    if (_mm512_cmp_ps_mask(reinterpret_cast<__m512>(correction), _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) != 0) // x 1 is x
      for (int i = 0; i < LANES; ++i)
        for (int d = 0; d < dim; d += LANES) store(out + i * dim + d, load(out + i * dim + d) * correction[i]);
    const int64_t stride = dim * static_cast<int64_t>(sizeof(float));
    const float *second = s.values + LANES * dim; // the values of the second half of the keys
    _tile_loadd(4, s.weights, KEYS / 2 * sizeof(float));
    _tile_loadd(5, s.weights + LANES, KEYS / 2 * sizeof(float));
    for (int d = 0; d < dim; d += DIM_UNIT) {
      _tile_loadd(0, out + d, stride);
      _tile_loadd(1, out + d + LANES, stride);
      _tile_loadd(6, s.values + d, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, s.values + d + LANES, stride);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, second + d, stride);
      _tile_dpbf16ps(0, 5, 6);
      _tile_loadd(7, second + d + LANES, stride);
      _tile_dpbf16ps(1, 5, 7);
      _tile_stored(0, out + d, stride);
      _tile_stored(1, out + d + LANES, stride);
    }
  }
};

} // namespace

#endif
