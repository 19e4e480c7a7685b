// Products with packed weights: out[M, N] = x[M, K] x weight[N, K]^T + bias, summed in float.
//
// One guarantee shapes this file, as it does paged_attention.cpp: a row of the result depends, bit for bit, only on that
// row of x. Each element is one chain of sums over k = 0, 1, ..., in one accumulator, whatever the number of rows, of
// threads, or the way in which work is cut. So all micro-kernels of a kind may be mixed; those of two kinds may not,
// because tiles and vectors round in different places.

#include "kernels.h"
#include "scratch.h"
#include "tiles.h"

#include <omp.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

constexpr int PANELS = 2;                // panels of one micro-kernel; a panel is LANES columns
constexpr int COLUMNS = PANELS * LANES;  // N is padded to a multiple of this with zeros
constexpr int PAIR_UNIT = 32;            // K of the bfloat16 kinds is padded to a multiple of this: the depth of a tile
constexpr int ITEM_ROWS = 128;           // rows of one work item
constexpr int64_t BLOCK_BYTES = 1 << 20; // of x that is prepared at once: half of a usual L2 cache

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// One product. Packed weights are [panels, K, LANES] of T for vectors, and [panels, K / 2, LANES, 2] for the bfloat16
// kinds, where sixteen pairs of a panel are the 1 KiB of a tile. Prepared rows of x are [M, K] of float, or of bfloat16,
// or tiles [M / 16, K / 32, 16, 32].
struct Product {
  const void *x;       // [M, K], rows `x_stride` apart
  const void *weight;  // packed
  const void *bias;    // [N] or null
  const void *residual; // [M, N] or null: added once the product is rounded. It may be `out`
  void *out;           // [M, N]
  int64_t num_rows, num_columns, depth, x_stride; // M, N, K; elements
};

template <typename T> inline void store_row(const Product &p, int64_t row, int64_t column, const float *sums) {
  int64_t n = std::min<int64_t>(COLUMNS, p.num_columns - column);
  T *to = static_cast<T *>(p.out) + row * p.num_columns + column;
  const T *bias = p.bias == nullptr ? nullptr : static_cast<const T *>(p.bias) + column;
  const T *residual =
      p.residual == nullptr ? nullptr : static_cast<const T *>(p.residual) + row * p.num_columns + column;
  if (n == COLUMNS) {
    for (int v = 0; v < PANELS; ++v) {
      vfloat sum = load(sums + v * LANES);
      if (bias != nullptr) sum += load_lanes(bias + v * LANES);
      if (residual != nullptr) sum = load_lanes(residual + v * LANES) + round_to<T>(sum);
      store_lanes(to + v * LANES, sum);
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    float sum = bias == nullptr ? sums[i] : sums[i] + to_float(bias[i]);
    T rounded;
    from_float(sum, &rounded);
    if (residual != nullptr) from_float(to_float(residual[i]) + to_float(rounded), &rounded);
    to[i] = rounded;
  }
}

// ---- vectors: floats, or bfloat16 widened to floats ----

template <typename T> struct Vectors {
  using Element = T;
  using Prepared = float;
  static int64_t padded_depth(int64_t depth) { return depth; }
  static void prepare(const T *row, Prepared *to, int64_t depth) {
    for (int64_t k = 0; k < depth; ++k) to[k] = to_float(row[k]);
  }
  template <int ROWS>
  static void multiply(const Prepared *rows, const T *panel, int64_t depth, vfloat (&sums)[ROWS][PANELS]) {
    for (int64_t k = 0; k < depth; ++k) {
      vfloat w[PANELS];
      for (int v = 0; v < PANELS; ++v) w[v] = load_lanes(panel + (v * depth + k) * LANES);
      for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < PANELS; ++v) sums[r][v] += rows[r * depth + k] * w[v];
    }
  }
};

// ---- AVX-512 BF16: one instruction multiplies and sums a pair in each lane ----

#ifdef __AVX512BF16__
struct Pairs {
  using Element = bfloat16;
  using Prepared = bfloat16;
  static int64_t padded_depth(int64_t depth) { return round_up(depth, PAIR_UNIT); }
  static void prepare(const bfloat16 *row, Prepared *to, int64_t depth) {
    std::memcpy(to, row, static_cast<size_t>(depth) * sizeof(bfloat16));
    std::memset(to + depth, 0, static_cast<size_t>(padded_depth(depth) - depth) * sizeof(bfloat16));
  }
  template <int ROWS>
  static void multiply(const Prepared *rows, const bfloat16 *panel, int64_t depth, vfloat (&sums)[ROWS][PANELS]) {
    for (int64_t k = 0; k < depth; k += 2) {
      __m512bh w[PANELS];
      for (int v = 0; v < PANELS; ++v)
        w[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel + (v * depth + k) * LANES));
      for (int r = 0; r < ROWS; ++r) {
        int32_t pair;
        std::memcpy(&pair, rows + r * depth + k, sizeof pair);
        __m512bh x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
        for (int v = 0; v < PANELS; ++v)
          sums[r][v] = reinterpret_cast<vfloat>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sums[r][v]), x, w[v]));
      }
    }
  }
};
#endif

// The rows [first, last) of prepared x times the columns of one pair of panels.
template <typename Format> struct ByRows {
  using T = typename Format::Element;
  using Prepared = typename Format::Prepared;
#ifdef __AVX512F__
  static constexpr int MOST = 12; // 24 accumulators of 32 registers
#else
  static constexpr int MOST = 2;
#endif

  static int64_t prepared_elements(int64_t num_rows, int64_t depth) { return num_rows * Format::padded_depth(depth); }
  static int64_t prepare_unit() { return 1; }
  static void prepare(const Product &p, int64_t row, int64_t, const T *x, Prepared *to) {
    Format::prepare(x + row * p.x_stride, to + row * Format::padded_depth(p.depth), p.depth);
  }

  template <int ROWS>
  static void some_rows(const Product &p, const Prepared *rows, const T *panel, int64_t row, int64_t column) {
    vfloat sums[ROWS][PANELS] = {};
    Format::template multiply<ROWS>(rows, panel, Format::padded_depth(p.depth), sums);
    for (int r = 0; r < ROWS; ++r) {
      float line[COLUMNS];
      for (int v = 0; v < PANELS; ++v) store(line + v * LANES, sums[r][v]);
      store_row<T>(p, row + r, column, line);
    }
  }

  static void multiply(const Product &p, const Prepared *x, int64_t first, int64_t last, int64_t column, int64_t base) {
    int64_t depth = Format::padded_depth(p.depth);
    const T *panel = static_cast<const T *>(p.weight) + column * depth;
    int64_t r = first;
    const auto run = [&](auto rows) {
      constexpr int ROWS = decltype(rows)::value;
      for (; r + ROWS <= last; r += ROWS) some_rows<ROWS>(p, x + r * depth, panel, base + r, column);
    };
    if constexpr (MOST == 12) {
      run(std::integral_constant<int, 12>());
      run(std::integral_constant<int, 4>());
    }
    run(std::integral_constant<int, 2>());
    run(std::integral_constant<int, 1>());
  }

  static void begin() {}
  static void end() {}
};

// ---- AMX: tiles of 16 rows by 32 elements ----

#ifdef HAS_AMX
constexpr int TILE_ELEMENTS = TILE * PAIR_UNIT;

struct Tiles {
  using T = bfloat16;
  using Prepared = bfloat16;

  static int64_t prepared_elements(int64_t num_rows, int64_t depth) {
    return round_up(num_rows, TILE) * round_up(depth, PAIR_UNIT);
  }
  static int64_t prepare_unit() { return TILE; }
  static void prepare(const Product &p, int64_t first, int64_t last, const T *x, Prepared *to) {
    int64_t depth = round_up(p.depth, PAIR_UNIT);
    for (int64_t row = first; row < last; ++row) {
      Prepared *line = to + row / TILE * TILE * depth + row % TILE * PAIR_UNIT;
      for (int64_t k = 0; k < depth; k += PAIR_UNIT, line += TILE_ELEMENTS) {
        int64_t n = std::min<int64_t>(PAIR_UNIT, p.depth - k);
        std::memcpy(line, x + row * p.x_stride + k, static_cast<size_t>(n) * sizeof(T));
        if (n < PAIR_UNIT) std::memset(line + n, 0, static_cast<size_t>(PAIR_UNIT - n) * sizeof(T));
      }
    }
  }

  // Tiles 0 to 3 are sums (two by two), 4 and 5 rows of x, 6 and 7 columns of the weight.
  static void multiply(const Product &p, const Prepared *x, int64_t first, int64_t last, int64_t column, int64_t base) {
    int64_t depth = round_up(p.depth, PAIR_UNIT), num_steps = depth / PAIR_UNIT;
    const T *left = static_cast<const T *>(p.weight) + column * depth, *right = left + LANES * depth;
    alignas(64) float sums[2 * TILE * COLUMNS];
    int configured = 0;
    for (int64_t row = first; row < last; row += 2 * TILE) {
      int num_rows = static_cast<int>(std::min<int64_t>(2 * TILE, last - row));
      int upper = std::min(num_rows, TILE), lower = num_rows - upper;
      if (num_rows != configured) configure_tiles(upper, lower);
      configured = num_rows;
      const T *a = x + row * depth, *b = a + TILE * depth;
      _tile_zero(0);
      _tile_zero(1);
      if (lower > 0) {
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < num_steps * TILE_ELEMENTS; k += TILE_ELEMENTS) {
          _tile_loadd(4, a + k, 64);
          _tile_loadd(6, left + k, 64);
          _tile_loadd(7, right + k, 64);
          _tile_loadd(5, b + k, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, sums + TILE * COLUMNS, COLUMNS * sizeof(float));
        _tile_stored(3, sums + TILE * COLUMNS + LANES, COLUMNS * sizeof(float));
      } else {
        for (int64_t k = 0; k < num_steps * TILE_ELEMENTS; k += TILE_ELEMENTS) {
          _tile_loadd(4, a + k, 64);
          _tile_loadd(6, left + k, 64);
          _tile_loadd(7, right + k, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
        }
      }
      _tile_stored(0, sums, COLUMNS * sizeof(float));
      _tile_stored(1, sums + LANES, COLUMNS * sizeof(float));
      for (int r = 0; r < num_rows; ++r) store_row<T>(p, base + row + r, column, sums + r * COLUMNS);
    }
  }

  static void begin() {}
  static void end() { _tile_release(); }
};
#endif

// Returns 0, or 1 if scratch memory could not be allocated.
template <typename Kernel> int multiply(const Product &p, int num_threads) {
  using Prepared = typename Kernel::Prepared;
  int64_t row_bytes = Kernel::prepared_elements(ITEM_ROWS, p.depth) * static_cast<int64_t>(sizeof(Prepared)) / ITEM_ROWS;
  int64_t block_rows = std::max<int64_t>(BLOCK_BYTES / row_bytes / ITEM_ROWS, 1) * ITEM_ROWS;
  block_rows = std::min(block_rows, p.num_rows);
  int64_t bytes = Kernel::prepared_elements(block_rows, p.depth) * static_cast<int64_t>(sizeof(Prepared));
  auto *x = static_cast<Prepared *>(scratch<Product>(bytes));
  if (x == nullptr) return 1;
  const int64_t num_groups = (p.num_columns + COLUMNS - 1) / COLUMNS, unit = Kernel::prepare_unit();
  for (int64_t base = 0; base < p.num_rows; base += block_rows) {
    int64_t num_rows = std::min(block_rows, p.num_rows - base);
    int64_t num_row_items = (num_rows + ITEM_ROWS - 1) / ITEM_ROWS, num_items = num_groups * num_row_items;
    const auto *from = static_cast<const typename Kernel::T *>(p.x) + base * p.x_stride;
    int threads = static_cast<int>(std::min<int64_t>(num_threads, num_items));
    bool is_small = num_rows <= 2 * unit; // not worth a barrier
    if (is_small)
      for (int64_t r = 0; r < num_rows; r += unit) Kernel::prepare(p, r, std::min(r + unit, num_rows), from, x);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      if (!is_small) {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < num_rows; r += unit) Kernel::prepare(p, r, std::min(r + unit, num_rows), from, x);
      }
      Kernel::begin();
#pragma omp for schedule(dynamic) nowait
      for (int64_t item = 0; item < num_items; ++item) { // columns outside: their weights stay in the cache
        int64_t first = item % num_row_items * ITEM_ROWS;
        int64_t last = std::min<int64_t>(first + ITEM_ROWS, num_rows);
        Kernel::multiply(p, x, first, last, item / num_row_items * COLUMNS, base);
      }
      Kernel::end();
    }
  }
  return 0;
}

template <typename T> void pack_vectors(const T *weight, T *packed, int64_t num_columns, int64_t depth) {
  int64_t num_panels = round_up(num_columns, COLUMNS) / LANES;
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < num_panels; ++panel)
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t lane = 0; lane < LANES; ++lane) {
        int64_t n = panel * LANES + lane;
        packed[(panel * depth + k) * LANES + lane] = n < num_columns ? weight[n * depth + k] : T{};
      }
}

void pack_pairs(const bfloat16 *weight, bfloat16 *packed, int64_t num_columns, int64_t depth) {
  int64_t num_panels = round_up(num_columns, COLUMNS) / LANES, padded = round_up(depth, PAIR_UNIT);
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < num_panels; ++panel)
    for (int64_t k = 0; k < padded; ++k)
      for (int64_t lane = 0; lane < LANES; ++lane) {
        int64_t n = panel * LANES + lane;
        bfloat16 *to = packed + panel * padded * LANES + k / 2 * 2 * LANES + lane * 2 + k % 2;
        *to = n < num_columns && k < depth ? weight[n * depth + k] : bfloat16{};
      }
}

} // namespace

extern "C" {

// Elements of a packed weight.
int64_t tandem_matmul_packed_elements(int kind, int64_t num_columns, int64_t depth) {
  return round_up(num_columns, COLUMNS) * (kind == VECTORS ? depth : round_up(depth, PAIR_UNIT));
}

// Packs weight [num_columns, depth]. Products of floats are of kind VECTORS.
void tandem_matmul_pack(int kind, const void *weight, void *packed, int64_t num_columns, int64_t depth,
                        int is_bfloat16) {
  if (kind != VECTORS)
    pack_pairs(static_cast<const bfloat16 *>(weight), static_cast<bfloat16 *>(packed), num_columns, depth);
  else if (is_bfloat16)
    pack_vectors(static_cast<const bfloat16 *>(weight), static_cast<bfloat16 *>(packed), num_columns, depth);
  else
    pack_vectors(static_cast<const float *>(weight), static_cast<float *>(packed), num_columns, depth);
}

// Returns 0; 1 if scratch memory could not be allocated; 2 for a kind that was not compiled.
int tandem_matmul(int kind, const void *x, const void *packed, const void *bias, const void *residual, void *out,
                  int64_t num_rows, int64_t num_columns, int64_t depth, int64_t x_stride, int is_bfloat16,
                  int num_threads) {
  Product p = {x, packed, bias, residual, out, num_rows, num_columns, depth, x_stride};
  if (kind == VECTORS)
    return is_bfloat16 ? multiply<ByRows<Vectors<bfloat16>>>(p, num_threads)
                       : multiply<ByRows<Vectors<float>>>(p, num_threads);
#ifdef __AVX512BF16__
  if (kind == AVX512_BF16) return multiply<ByRows<Pairs>>(p, num_threads);
#endif
#ifdef HAS_AMX
  if (kind == AMX_BF16) return multiply<Tiles>(p, num_threads);
#endif
  return 2;
}
}
