// Products of attention by AMX tiles. The right operand of a tile product holds pairs along the summed axis.

#pragma once

#include "attention_lanes.h"
#include "tiles.h"

#ifdef HAS_AMX

namespace {

struct TileProducts {
  using Format = PairFormat;
  static constexpr int GROUPS = 1;

  TileProducts() { configure_tiles(TILE, TILE); }
  ~TileProducts() { _tile_release(); }
  TileProducts(const TileProducts &) = delete;
  TileProducts &operator=(const TileProducts &) = delete;

  // Tiles 0 to 3 are sums of sixteen keys each, 4 to 6 keys, 7 the query.
  void score(const float *query_t, int, int num_words, LaneScratch &s) const {
    const auto *keys = reinterpret_cast<const bfloat16 *>(s.keys);
    const int dim = num_words * 2;
    const int64_t stride = dim * static_cast<int64_t>(sizeof(bfloat16));
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

  // Tiles 0 to 3 are sums of sixteen dimensions each, 4 and 5 weights, 6 and 7 values.
  void add_values(float *out, vfloat correction, int dim, LaneScratch &s) const {
    for (int j = 0; j < KEYS / 2; j += LANES) transpose_square(s.weights + j * LANES, LANES, s.spare + j, KEYS / 2);
    if (_mm512_cmp_ps_mask(reinterpret_cast<__m512>(correction), _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) != 0) // x 1 is x
      for (int i = 0; i < LANES; ++i)
        for (int d = 0; d < dim; d += LANES) store(out + i * dim + d, load(out + i * dim + d) * correction[i]);
    const int64_t stride = dim * static_cast<int64_t>(sizeof(float));
    const float *second = s.values + LANES * dim; // the values of the second half of the keys
    _tile_loadd(4, s.spare, KEYS / 2 * sizeof(float));
    _tile_loadd(5, s.spare + LANES, KEYS / 2 * sizeof(float));
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
