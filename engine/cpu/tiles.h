// Tiles of AMX: sixteen rows of 64 bytes, and one instruction that multiplies two of them.

#pragma once

#include "common.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAS_AMX

#include <immintrin.h>

namespace {

constexpr int TILE = 16; // rows

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// All tiles whole, but for tiles 0, 1 and 4 of `upper` rows and tiles 2, 3 and 5 of `lower`: sums and their left side.
inline void configure_tiles(int upper, int lower) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = TILE;
  }
  config.rows[0] = config.rows[1] = config.rows[4] = static_cast<uint8_t>(upper);
  if (lower > 0) config.rows[2] = config.rows[3] = config.rows[5] = static_cast<uint8_t>(lower);
  _tile_loadconfig(&config);
}

} // namespace

#endif
