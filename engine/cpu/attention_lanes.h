// Attention of LANES query rows at once, which are the lanes of vectors. For prompts.
//
//   scores_t [KEYS, LANES] = keys [KEYS, dim] x query_t [dim, LANES]
//   out      [LANES, dim] += weights [LANES, KEYS] x values [KEYS, dim]
//
// The softmax needs no sums across a vector, and keys are multiplied as they lie in the pool. `Products` multiplies:
// vectors here, AMX tiles in attention_tiles.h.
//
// By vectors a row has the same bits as in attention_rows.h: a score is summed over the words of the head in order, a
// value over the words of the tile's keys in order, and weights are summed in the same tree.

#pragma once

#include "attention_rows.h"

namespace {

constexpr int MAX_GROUPS = 2; // of LANES rows, whose scores are computed at once

// Memory of one work item, in words of the format; `dim` is padded.
struct LaneScratch {
  float *keys;     // [KEYS, dim]
  float *values;   // [KEYS, dim]
  float *query_t;  // [groups, dim, LANES]
  float *scores_t; // [MAX_GROUPS, KEYS, LANES]
  float *weights;  // [KEYS, LANES]
  float *spare;    // [KEYS, LANES], for the products
  vint *positions; // [groups]

  LaneScratch() = default;
  LaneScratch(float *at, int64_t num_rows, int64_t dim) {
    keys = take(at, KEYS * dim);
    values = take(at, KEYS * dim);
    query_t = take(at, num_rows * dim);
    scores_t = take(at, MAX_GROUPS * KEYS * LANES);
    weights = take(at, KEYS * LANES);
    spare = take(at, KEYS * LANES);
    positions = reinterpret_cast<vint *>(take(at, num_rows));
  }
  static int64_t num_floats(int64_t num_rows, int64_t dim) {
    return 2 * KEYS * dim + num_rows * (dim + 1) + (MAX_GROUPS + 2) * KEYS * LANES;
  }
  float *scores_of(int group) const { return scores_t + group * KEYS * LANES; }
};

template <typename F> struct VectorProducts {
  using Format = F;
  static constexpr int GROUPS = MAX_GROUPS; // so that each word of a key is loaded for two products

  void score(const float *query_t, int num_groups, int num_words, LaneScratch &s) const {
    num_groups == GROUPS ? score_groups<GROUPS>(query_t, num_words, s) : score_groups<1>(query_t, num_words, s);
  }

  void add_values(float *out, vfloat correction, int dim, LaneScratch &s) const {
    float corrections[LANES];
    store(corrections, correction);
    for (int r = 0; r < LANES; r += ROWS)
      ::add_values<Format, 1, LANES>(s.weights + r, s.values, KEYS, dim, corrections + r, out + r * dim);
  }

private:
  static constexpr int SUMS = REGISTERS / 2;

  template <int NUM_GROUPS> static void score_groups(const float *query_t, int num_words, LaneScratch &s) {
    constexpr int UNIT = SUMS / NUM_GROUPS; // keys
    for (int j = 0; j < KEYS; j += UNIT) {
      const float *keys = s.keys + j * num_words;
      vfloat acc[NUM_GROUPS][UNIT] = {};
      for (int d = 0; d < num_words; ++d)
        for (int i = 0; i < UNIT; ++i)
          for (int g = 0; g < NUM_GROUPS; ++g)
            Format::add_product(acc[g][i], keys[i * num_words + d], load(query_t + (g * num_words + d) * LANES));
      for (int g = 0; g < NUM_GROUPS; ++g)
        for (int i = 0; i < UNIT; ++i) store(s.scores_of(g) + (j + i) * LANES, acc[g][i]);
    }
  }
};

template <typename Products> struct LaneAttention {
  using Format = typename Products::Format;
  using T = typename Format::Element;
  using Scratch = LaneScratch;
  static constexpr int PER_WORD = Format::PER_WORD;

  static int64_t padded_rows(int64_t num_rows) { return round_up(num_rows, LANES); }

  static float weight(float score) { return weight_of<Format>(splat(score), splat(1.0f), splat(0.0f))[0]; }

  static int64_t scratch_floats(int64_t num_rows, int64_t dim) { return LaneScratch::num_floats(num_rows, dim); }

  static LaneScratch load_queries(const Arguments &a, const WorkItem &item, int num_rows, int dim, float *memory) {
    LaneScratch s(memory, num_rows, dim);
    for (int g = 0; g < num_rows / LANES; ++g) load_group(a, item, g, dim, s);
    return s;
  }

  // Adds the keys of positions [start, end), a split.
  static void attend(const Arguments &a, const WorkItem &item, int64_t start, int64_t end, int num_rows, int dim,
                     LaneScratch &s, const Sums &sums) {
    const Products products;
    const int num_groups = num_rows / LANES, num_words = dim / PER_WORD, head_dim = static_cast<int>(a.head_dim);
    TileRows<T> rows(a, item, start, std::min<int64_t>(end - start, KEYS));
    for (int64_t first_key = start; first_key < end; first_key += KEYS) {
      const TileRows<T> next(a, item, first_key + KEYS, std::min<int64_t>(end - first_key - KEYS, KEYS));
      load_keys<Format>(rows, next, head_dim, dim, s.keys);
      load_values<Format>(rows, next, KEYS, head_dim, dim, s.values);
      for (int g = 0; g < num_groups; g += Products::GROUPS) {
        const int num_scored = std::min(Products::GROUPS, num_groups - g);
        if (s.positions[g + num_scored - 1][LANES - 1] < first_key) continue; // causal: no row sees the tile
        products.score(s.query_t + g * num_words * LANES, num_scored, num_words, s);
        for (int i = 0; i < num_scored; ++i) add_group(a, products, g + i, first_key, dim, s.scores_of(i), s, sums);
      }
      rows = next;
    }
  }

private:
  static void load_group(const Arguments &a, const WorkItem &item, int g, int dim, LaneScratch &s) {
    const int num_words = dim / PER_WORD;
    vint positions;
    alignas(64) float rows[LANES * MAX_DIM];
    std::fill_n(rows, LANES * num_words, 0.0f);
    for (int i = 0; i < LANES; ++i) {
      int64_t row = g * LANES + i;
      positions[i] = static_cast<int32_t>(item.position_of(row));
      if (row < item.num_rows())
        Format::load_row(item.query_row<T>(a, row), rows + i * num_words, static_cast<int>(a.head_dim));
    }
    for (int d = 0; d < num_words; d += LANES)
      transpose_square(rows + d, num_words, s.query_t + (g * num_words + d) * LANES, LANES);
    s.positions[g] = positions;
  }

  // Adds a tile to the sums of a group, whose scores are there.
  static void add_group(const Arguments &a, const Products &products, int g, int64_t first_key, int dim, float *scores_t,
                        LaneScratch &s, const Sums &sums) {
    int64_t oldest = s.positions[g][0], newest = s.positions[g][LANES - 1];
    if (newest < first_key) return;
    if (a.window > 0 && oldest - a.window + 1 >= first_key + KEYS) return;
    bool sees_all = first_key + KEYS - 1 <= oldest && (a.window == 0 || newest - a.window + 1 <= first_key);
    if (a.softcap > 0.0f) cap_scores(a, scores_t);
    if (!sees_all) hide_keys(a, s.positions[g], first_key, scores_t);
    vfloat correction = soften(a, g, scores_t, s, sums);
    products.add_values(sums.out + g * LANES * dim, correction, dim, s);
  }

  // Online softmax of a group over a tile: scores become weights. Returns the factor for the previous sums.
  static vfloat soften(const Arguments &a, int g, const float *scores_t, LaneScratch &s, const Sums &sums) {
    vfloat top = load(scores_t);
    for (int j = 1; j < KEYS; ++j) top = larger(load(scores_t + j * LANES), top);
    const vfloat factor = splat(score_factor(a)), old_max = load(sums.max + g * LANES);
    const vfloat max = larger(top * factor, old_max);
    const vfloat base = max == MINUS_INFINITY ? splat(0.0f) : max; // nothing visible yet
    const vfloat correction = weight_of<Format>(old_max, splat(1.0f), base);
    const vfloat sum = weigh(scores_t, factor, base, s.weights);
    store(sums.max + g * LANES, max);
    store(sums.sum + g * LANES, load(sums.sum + g * LANES) * correction + sum);
    return correction;
  }

  static vfloat larger(vfloat x, vfloat y) { return x > y ? x : y; }

  // The weights of a tile, and their sum: of every key that is LANES after the last, then of those sums in a tree.
  static vfloat weigh(const float *scores_t, vfloat factor, vfloat base, float *weights) {
    vfloat sums[LANES];
    for (int i = 0; i < LANES; i += 2) {
      for (int j = i; j < KEYS; j += LANES) {
        const vfloat even = weight_of<Format>(load(scores_t + j * LANES), factor, base);
        const vfloat odd = weight_of<Format>(load(scores_t + (j + 1) * LANES), factor, base);
        sums[i] = j == i ? even : sums[i] + even;
        sums[i + 1] = j == i ? odd : sums[i + 1] + odd;
        Format::store_weights(even, odd, weights + j / PER_WORD * LANES);
      }
    }
    for (int half = LANES / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    return sums[0];
  }

  static void cap_scores(const Arguments &a, float *scores_t) {
    for (int i = 0; i < KEYS * LANES; ++i) scores_t[i] = a.softcap * std::tanh(scores_t[i] * a.scale / a.softcap);
  }

  static void hide_keys(const Arguments &a, vint positions, int64_t first_key, float *scores_t) {
    vint last = positions - static_cast<int32_t>(first_key); // of the keys in the tile
    vint first = a.window > 0 ? last - static_cast<int32_t>(std::min<int64_t>(a.window, 1 << 30) - 1) : last - last;
    for (int32_t j = 0; j < KEYS; ++j) {
      vint key = j - vint{};
      vfloat x = load(scores_t + j * LANES);
      store(scores_t + j * LANES, ((key <= last) & (key >= first)) ? x : splat(MINUS_INFINITY));
    }
  }
};

// By vectors: LANES rows at once where there are that many, else four.
template <typename Format> struct VectorAttention {
  using T = typename Format::Element;
  using Few = RowAttention<Format>;
  using Many = LaneAttention<VectorProducts<Format>>;

  struct Scratch {
    typename Few::Scratch few;
    LaneScratch many;
  };

  static int64_t padded_rows(int64_t num_rows) { return round_up(num_rows, num_rows < LANES ? ROWS : LANES); }

  static float weight(float score) { return Many::weight(score); }

  static int64_t scratch_floats(int64_t num_rows, int64_t dim) {
    return std::max(Few::Scratch::num_floats(LANES, dim), LaneScratch::num_floats(num_rows, dim));
  }

  static Scratch load_queries(const Arguments &a, const WorkItem &item, int num_rows, int dim, float *memory) {
    if (num_rows < LANES) return {Few::load_queries(a, item, num_rows, dim, memory), {}};
    return {{}, Many::load_queries(a, item, num_rows, dim, memory)};
  }

  static void attend(const Arguments &a, const WorkItem &item, int64_t start, int64_t end, int num_rows, int dim,
                     Scratch &s, const Sums &sums) {
    num_rows < LANES ? Few::attend(a, item, start, end, num_rows, dim, s.few, sums)
                     : Many::attend(a, item, start, end, num_rows, dim, s.many, sums);
  }
};

} // namespace
