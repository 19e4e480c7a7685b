// Products with packed weights: out[M, N] = x[M, K] x weight[N, K]^T + bias, summed in float.
//
// One guarantee shapes this file, as it does paged_attention.cpp: a row of the result depends, bit for bit, only on that
// row of x. Each element is one chain of sums over k = 0, 1, ..., in one accumulator, whatever the number of rows, of
// threads, or the way in which work is cut. So all micro-kernels of a kind may be mixed; those of two kinds may not,
// because tiles and vectors round in different places.

#include "elementwise.h"
#include "kernels.h"
#include "tiles.h"

namespace {

constexpr int PANELS = LANES == 16 ? 2 : 4; // panels of one work item; a panel is LANES columns
constexpr int COLUMNS = PANELS * LANES;     // N is padded to a multiple of this with zeros
constexpr int PAIR_UNIT = 32;            // K is padded to a multiple of this with zeros: the depth of a tile
constexpr int ITEM_ROWS = 128;           // rows of one work item
constexpr int64_t BLOCK_BYTES = 1 << 20; // of rows that are prepared at once: half of a usual L2 cache
constexpr int64_t OWN_BYTES = 16 << 10;  // rows that each thread prepares for itself: not worth a phase

// Packed weights are [panels, K, LANES] of floats or int8, and [panels, K / 2, LANES, 2] of bfloat16: sixteen such pairs of
// sixteen lanes are the 1 KiB of a tile. The bfloat16 kinds have int8 in another order (`pack_int8_pairs`). Prepared rows are
// [M, K] of float, or of bfloat16, or tiles [M / 16, K / 32, 16, 32].

inline int64_t padded_depth(int64_t depth) { return round_up(depth, PAIR_UNIT); }

// A function of its own, never inlined: where the compiler sees what is added to a product next, it rounds once or twice
// as it likes, and a row's bits would depend on the micro-kernel.
__attribute__((noinline)) void scale(float *sums, const float *scales, int64_t num_columns) {
  for (int64_t i = 0; i < num_columns; ++i) sums[i] *= scales[i];
}

template <typename T> inline void store_row(const Product &p, int64_t row, int64_t column, float *sums) {
  int64_t n = std::min<int64_t>(COLUMNS, p.num_columns - column);
  if (p.scales != nullptr) scale(sums, p.scales + column, n);
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
    float sum = sums[i];
    if (bias != nullptr) sum += to_float(bias[i]);
    T rounded;
    from_float(sum, &rounded);
    if (residual != nullptr) from_float(to_float(residual[i]) + to_float(rounded), &rounded);
    to[i] = rounded;
  }
}

// What an item multiplies: prepared rows [first, last), which count from row `base` of x, and one group of panels.
struct Block {
  int64_t base, first, last;
  int64_t column, next_column; // first columns of this group, and of the one that the thread probably multiplies next

  int64_t num_rows() const { return last - first; }
};

// Brings the panels that a thread multiplies next towards its cache, some of each with each step of the same panel of now.
// A core has room for few requests: it goes on computing only as long as they are spread.
class Prefetcher {
public:
  Prefetcher(const void *panels, int64_t panel_bytes) : panels_(static_cast<const char *>(panels)), panel_bytes_(panel_bytes) {}

  // From now on a pass of `num_steps` steps is for `num_rows` of all rows, and brings as large a share of its panels.
  void begin_passes(int64_t num_steps, int64_t num_rows, int64_t num_all) {
    num_steps_ = num_steps;
    stride_ = panel_bytes_ * num_rows / std::max<int64_t>(num_steps * num_all, 1); // a depth of 0 has no steps
  }

  void begin_pass(int first_panel) { at_ = panels_ + brought_ + first_panel * panel_bytes_; }
  void end_passes() { brought_ += stride_ * num_steps_; }

  // A step of `WIDTH` panels.
  template <int WIDTH> void step() {
    int64_t i = 0;
    do {
      for (int v = 0; v < WIDTH; ++v) __builtin_prefetch(at_ + v * panel_bytes_ + i, 0, 2);
    } while ((i += LINE_BYTES) < stride_);
    at_ += stride_;
  }

private:
  static constexpr int64_t LINE_BYTES = 64;
  const char *panels_, *at_ = nullptr;
  int64_t panel_bytes_, brought_ = 0, num_steps_ = 0, stride_ = 0; // bytes of each panel
};

// ---- vectors: floats, or bfloat16 widened to floats ----

// A pair along K of each lane. One of it is widened at a time: with most rows nearly all registers have sums.
template <typename W> struct Pair {
  const W *at;

  Pair(const W *panel, int64_t k) : at(panel + k * LANES) {}
  vfloat element(int i) const { return load_lanes(at + i * LANES); }
};
template <> struct Pair<bfloat16> {
  vword words;

  Pair(const bfloat16 *panel, int64_t k) : words(*reinterpret_cast<const vword *>(panel + k * LANES)) {}
  vfloat element(int i) const { return reinterpret_cast<vfloat>(i == 0 ? words << 16 : words & 0xffff0000); }
};

template <typename T> struct Vectors {
  using Element = T;
  using Prepared = float;
  static void prepare(const T *row, Prepared *to, int64_t depth) {
    for (int64_t k = 0; k < depth; ++k) to[k] = to_float(row[k]);
    std::fill(to + depth, to + padded_depth(depth), 0.0f);
  }
  template <int ROWS, int WIDTH, typename W>
  static void multiply(const Prepared *rows, const W *panel, int64_t depth, vfloat (&sums)[ROWS][WIDTH],
                       Prefetcher &prefetcher) {
    multiply(rows, panel, depth, sums, prefetcher, std::make_index_sequence<WIDTH>());
  }

private:
  template <int ROWS, int WIDTH, typename W, size_t... V>
  static void multiply(const Prepared *rows, const W *panel, int64_t depth, vfloat (&sums)[ROWS][WIDTH],
                       Prefetcher &prefetcher, std::index_sequence<V...>) {
    for (int64_t k = 0; k < depth; k += 2) {
      prefetcher.step<WIDTH>();
      const Pair<W> pairs[WIDTH] = {Pair<W>(panel + V * depth * LANES, k)...};
      for (int i = 0; i < 2; ++i)
        for (int r = 0; r < ROWS; ++r) {
          const vfloat x = splat(rows[r * depth + k + i]);
          for (int v = 0; v < WIDTH; ++v) sums[r][v] += x * pairs[v].element(i);
        }
    }
  }
};

// Int8 weights of the bfloat16 kinds: a byte is a sign and seven bits of magnitude, and 64 of them hold one pair along K
// of all lanes of both panels, so that widening needs no permutation across a vector.
inline int64_t int8_place(int64_t lane_element, int64_t panel) {
  return lane_element / 8 * 16 + panel * 8 + lane_element % 8;
}

// ---- AVX-512 BF16: one instruction multiplies and sums a pair in each lane ----

#ifdef __AVX512BF16__
struct WideningTables {
  alignas(64) uint8_t low[128], high[128]; // of the bfloat16 of each magnitude

  WideningTables() {
    for (int magnitude = 0; magnitude < 128; ++magnitude) {
      bfloat16 exact;
      from_float(static_cast<float>(magnitude), &exact);
      low[magnitude] = static_cast<uint8_t>(exact.bits);
      high[magnitude] = static_cast<uint8_t>(exact.bits >> 8);
    }
  }
};
const WideningTables TABLES;

// The pairs of both panels.
inline void load_pairs(const bfloat16 *left, const bfloat16 *right, int64_t k, __m512bh (&w)[PANELS]) {
  w[0] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(left + k * LANES));
  w[1] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(right + k * LANES));
}
inline void load_pairs(const int8_t *group, const int8_t *, int64_t k, __m512bh (&w)[PANELS]) {
  const int8_t *bytes = group + k * COLUMNS;
#ifdef __AVX512VBMI__
  const __m512i *low = reinterpret_cast<const __m512i *>(TABLES.low), *high = reinterpret_cast<const __m512i *>(TABLES.high);
  __m512i x = _mm512_loadu_si512(bytes);
  __m512i lows = _mm512_permutex2var_epi8(low[0], x, low[1]);
  __m512i highs = _mm512_permutex2var_epi8(high[0], x, high[1]);
  highs = _mm512_or_si512(highs, _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(0x80))));
  w[0] = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi8(lows, highs));
  w[1] = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi8(lows, highs));
#else
  alignas(64) uint16_t wide[PANELS][2 * LANES];
  for (int panel = 0; panel < PANELS; ++panel)
    for (int i = 0; i < 2 * LANES; ++i) {
      auto byte = static_cast<uint8_t>(bytes[int8_place(i, panel)]);
      wide[panel][i] = static_cast<uint16_t>(TABLES.low[byte & 127] | (TABLES.high[byte & 127] | (byte & 128)) << 8);
    }
  for (int panel = 0; panel < PANELS; ++panel) w[panel] = reinterpret_cast<__m512bh>(_mm512_load_si512(wide[panel]));
#endif
}

struct Pairs {
  using Element = bfloat16;
  using Prepared = bfloat16;
  static void prepare(const bfloat16 *row, Prepared *to, int64_t depth) {
    std::memcpy(to, row, static_cast<size_t>(depth) * sizeof(bfloat16));
    std::memset(to + depth, 0, static_cast<size_t>(padded_depth(depth) - depth) * sizeof(bfloat16));
  }
  template <int ROWS, int WIDTH, typename W>
  static void multiply(const Prepared *rows, const W *panel, int64_t depth, vfloat (&sums)[ROWS][WIDTH],
                       Prefetcher &prefetcher) {
    static_assert(WIDTH == PANELS);
    for (int64_t k = 0; k < depth; k += 2) {
      prefetcher.step<WIDTH>();
      __m512bh w[PANELS];
      load_pairs(panel, panel + depth * LANES, k, w);
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

// The rows [first, last) of prepared x times the columns of one group of panels.
//
// A core starts two sums a cycle, and each waits for the one before it in its accumulator: eight accumulators or more keep
// it busy. One and two rows have them in four panels.
template <typename Format> struct ByRows {
  using T = typename Format::Element;
  using Prepared = typename Format::Prepared;
  static constexpr int MOST = REGISTERS == 32 ? 12 : 6; // rows at once, of two sums each

  static int64_t prepared_elements(int64_t num_rows, int64_t depth) { return num_rows * padded_depth(depth); }
  static void prepare(const T *row, int64_t idx, Prepared *to, int64_t depth) {
    Format::prepare(row, to + idx * padded_depth(depth), depth);
  }

  static void multiply(const Product &p, const Prepared *x, const Block &block) {
    p.scales == nullptr ? multiply_by<T>(p, x, block) : multiply_by<int8_t>(p, x, block);
  }

private:
  template <typename W> static void multiply_by(const Product &p, const Prepared *x, const Block &block) {
    const int64_t depth = padded_depth(p.depth);
    const W *weight = static_cast<const W *>(p.weight), *panel = weight + block.column * depth;
    Prefetcher prefetcher(weight + block.next_column * depth, depth * LANES * static_cast<int64_t>(sizeof(W)));
    int64_t r = block.first;
    const auto run = [&](auto rows) {
      constexpr int ROWS = decltype(rows)::value, WIDTH = ROWS <= 2 ? PANELS : 2;
      if (ROWS > MOST || r + ROWS > block.last) return;
      prefetcher.begin_passes(depth / 2, ROWS, block.num_rows());
      for (; r + ROWS <= block.last; r += ROWS)
        some_rows<ROWS, WIDTH>(p, x + r * depth, panel, block.base + r, block.column, prefetcher);
    };
    run(std::integral_constant<int, 12>());
    run(std::integral_constant<int, 8>());
    run(std::integral_constant<int, 6>());
    run(std::integral_constant<int, 5>());
    run(std::integral_constant<int, 4>());
    run(std::integral_constant<int, 3>());
    run(std::integral_constant<int, 2>());
    run(std::integral_constant<int, 1>());
  }

  template <int ROWS, int WIDTH, typename W>
  static void some_rows(const Product &p, const Prepared *rows, const W *panel, int64_t row, int64_t column,
                        Prefetcher &prefetcher) {
    const int64_t depth = padded_depth(p.depth);
    float lines[ROWS][COLUMNS];
    for (int first = 0; first < PANELS; first += WIDTH) {
      vfloat sums[ROWS][WIDTH] = {};
      prefetcher.begin_pass(first);
      Format::multiply(rows, panel + first * depth * LANES, depth, sums, prefetcher);
      for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < WIDTH; ++v) store(lines[r] + (first + v) * LANES, sums[r][v]);
    }
    prefetcher.end_passes();
    for (int r = 0; r < ROWS; ++r) store_row<T>(p, row + r, column, lines[r]);
  }
};

// ---- AMX: tiles of 16 rows by 32 elements ----

#ifdef HAS_AMX
constexpr int TILE_ELEMENTS = TILE * PAIR_UNIT;

struct Tiles {
  using T = bfloat16;
  using Prepared = bfloat16;

  static int64_t prepared_elements(int64_t num_rows, int64_t depth) {
    return round_up(num_rows, TILE) * padded_depth(depth);
  }
  static void prepare(const T *row, int64_t idx, Prepared *to, int64_t depth) {
    Prepared *line = to + idx / TILE * TILE * padded_depth(depth) + idx % TILE * PAIR_UNIT;
    for (int64_t k = 0; k < depth; k += PAIR_UNIT, line += TILE_ELEMENTS) {
      int64_t n = std::min<int64_t>(PAIR_UNIT, depth - k);
      std::memcpy(line, row + k, static_cast<size_t>(n) * sizeof(T));
      if (n < PAIR_UNIT) std::memset(line + n, 0, static_cast<size_t>(PAIR_UNIT - n) * sizeof(T));
    }
  }

  static void multiply(const Product &p, const Prepared *x, const Block &block) {
    p.scales == nullptr ? multiply_by<T>(p, x, block) : multiply_by<int8_t>(p, x, block);
  }

private:
  // The tiles of both panels from pair k / 2 on.
  static void load_tiles(const T *left, const T *right, int64_t k, T (&)[PANELS][TILE_ELEMENTS]) {
    _tile_loadd(6, left + k * LANES, 64);
    _tile_loadd(7, right + k * LANES, 64);
  }
  static void load_tiles(const int8_t *group, const int8_t *, int64_t k, T (&room)[PANELS][TILE_ELEMENTS]) {
    for (int i = 0; i < PAIR_UNIT; i += 2) {
      __m512bh w[PANELS];
      load_pairs(group, group, k + i, w);
      for (int panel = 0; panel < PANELS; ++panel)
        _mm512_store_si512(room[panel] + i * LANES, reinterpret_cast<__m512i>(w[panel]));
    }
    asm volatile("" : : "r"(room) : "memory"); // GCC does not know that a tile is loaded from memory
    _tile_loadd(6, room[0], 64);
    _tile_loadd(7, room[1], 64);
  }

  // Tiles 0 to 3 are sums (two by two), 4 and 5 rows of x, 6 and 7 columns of the weight.
  template <typename W> static void multiply_by(const Product &p, const Prepared *x, const Block &block) {
    const int64_t depth = padded_depth(p.depth), num_steps = depth / PAIR_UNIT;
    const W *weight = static_cast<const W *>(p.weight);
    const W *left = weight + block.column * depth, *right = left + LANES * depth;
    Prefetcher prefetcher(weight + block.next_column * depth, depth * LANES * static_cast<int64_t>(sizeof(W)));
    alignas(64) T room[PANELS][TILE_ELEMENTS];
    alignas(64) float sums[2 * TILE * COLUMNS];
    int configured = 0;
    for (int64_t row = block.first; row < block.last; row += 2 * TILE) {
      int num_rows = static_cast<int>(std::min<int64_t>(2 * TILE, block.last - row));
      int upper = std::min(num_rows, TILE), lower = num_rows - upper;
      if (num_rows != configured) configure_tiles(upper, lower);
      configured = num_rows;
      prefetcher.begin_passes(num_steps, num_rows, block.num_rows());
      prefetcher.begin_pass(0);
      const T *a = x + row * depth, *b = a + TILE * depth;
      _tile_zero(0);
      _tile_zero(1);
      if (lower > 0) {
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < num_steps * TILE_ELEMENTS; k += TILE_ELEMENTS) {
          prefetcher.step<PANELS>();
          _tile_loadd(4, a + k, 64);
          load_tiles(left, right, k / TILE, room);
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
          prefetcher.step<PANELS>();
          _tile_loadd(4, a + k, 64);
          load_tiles(left, right, k / TILE, room);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
        }
      }
      prefetcher.end_passes();
      _tile_stored(0, sums, COLUMNS * sizeof(float));
      _tile_stored(1, sums + LANES, COLUMNS * sizeof(float));
      for (int r = 0; r < num_rows; ++r) store_row<T>(p, block.base + row + r, block.column, sums + r * COLUMNS);
    }
    _tile_release();
  }
};
#endif

// Prepares the rows [first, last), which count from `base`. Returns false if memory is lacking.
template <typename Kernel>
bool prepare_rows(const Product &p, int64_t base, int64_t first, int64_t last, typename Kernel::Prepared *to) {
  using T = typename Kernel::T;
  T *changed = p.rows.step == Rows::NONE ? nullptr : static_cast<T *>(scratch<Rows>(p.depth * sizeof(T)));
  if (p.rows.step != Rows::NONE && changed == nullptr) return false;
  for (int64_t r = first; r < last; ++r) {
    const T *row = static_cast<const T *>(p.rows.x) + (base + r) * p.rows.stride;
    if (p.rows.step == Rows::NORM)
      rms_norm(row, static_cast<const T *>(p.rows.norm_weight), changed, p.depth, p.rows.epsilon);
    else if (p.rows.step == Rows::SILU_MULTIPLY)
      silu_multiply(row, row + p.depth, changed, p.depth);
    Kernel::prepare(changed == nullptr ? row : changed, r, to, p.depth);
  }
  return true;
}

// The rows of a product as this thread itself has prepared them, once; null if memory is lacking.
template <typename Kernel> const typename Kernel::Prepared *own_rows(const Product &p, uint64_t product_id) {
  using Prepared = typename Kernel::Prepared;
  thread_local uint64_t prepared_id = 0;
  auto *x = static_cast<Prepared *>(
      scratch<Kernel>(Kernel::prepared_elements(p.num_rows, p.depth) * static_cast<int64_t>(sizeof(Prepared))));
  if (x == nullptr || prepared_id == product_id) return x;
  if (!prepare_rows<Kernel>(p, 0, 0, p.num_rows, x)) return nullptr;
  prepared_id = product_id;
  return x;
}

template <typename Kernel> void add_few_rows(Plan &plan, const Product &p) {
  static std::atomic<uint64_t> num_products{0};
  const uint64_t product_id = ++num_products;
  const int64_t num_groups = (p.num_columns + COLUMNS - 1) / COLUMNS;
  plan.add(num_groups, [=, plan = &plan](int64_t item) {
    const auto *x = own_rows<Kernel>(p, product_id);
    if (x == nullptr) return plan->fail();
    const int64_t next = std::min(item + plan->stride(), num_groups - 1);
    Kernel::multiply(p, x, {0, 0, p.num_rows, item * COLUMNS, next * COLUMNS});
  });
}

template <typename Kernel> void add(Plan &plan, const Product &p) {
  using Prepared = typename Kernel::Prepared;
  const auto bytes_of = [&p](int64_t num_rows) {
    return Kernel::prepared_elements(num_rows, p.depth) * static_cast<int64_t>(sizeof(Prepared));
  };
  if (bytes_of(p.num_rows) <= OWN_BYTES) return add_few_rows<Kernel>(plan, p);
  int64_t block_rows = std::max<int64_t>(BLOCK_BYTES / bytes_of(ITEM_ROWS), 1) * ITEM_ROWS;
  block_rows = std::min(block_rows, p.num_rows);
  const int64_t num_groups = (p.num_columns + COLUMNS - 1) / COLUMNS;
  for (int64_t base = 0; base < p.num_rows; base += block_rows) {
    const int64_t num_rows = std::min(block_rows, p.num_rows - base);
    const int64_t offset = plan.reserve(bytes_of(num_rows));
    plan.add(num_token_items(num_rows), [=, plan = &plan](int64_t item) {
      int64_t first = item * ITEM_TOKENS, last = std::min(first + ITEM_TOKENS, num_rows);
      if (!prepare_rows<Kernel>(p, base, first, last, static_cast<Prepared *>(plan->workspace(offset)))) plan->fail();
    });
    const int64_t num_row_items = (num_rows + ITEM_ROWS - 1) / ITEM_ROWS;
    plan.add(num_groups * num_row_items, [=, plan = &plan](int64_t item) {
      int64_t first = item % num_row_items * ITEM_ROWS; // columns outside: their weights stay in the cache
      int64_t last = std::min<int64_t>(first + ITEM_ROWS, num_rows);
      const auto *x = static_cast<const Prepared *>(plan->workspace(offset));
      const int64_t next = std::min(item + plan->stride(), num_groups * num_row_items - 1);
      Kernel::multiply(p, x, {base, first, last, item / num_row_items * COLUMNS, next / num_row_items * COLUMNS});
    });
  }
}

// Weights [N, K] become panels; `place(k, lane)` is where an element of a panel goes, and `code(weight)` what is kept.
template <typename W, typename Place, typename Code>
void add_packing(Plan &plan, const void *weight, void *packed, int64_t num_columns, int64_t depth, const Place &place,
                 const Code &code) {
  const W *from = static_cast<const W *>(weight);
  W *to = static_cast<W *>(packed);
  plan.add(round_up(num_columns, COLUMNS) / LANES, [=](int64_t panel) {
    for (int64_t k = 0; k < padded_depth(depth); ++k)
      for (int64_t lane = 0; lane < LANES; ++lane) {
        int64_t n = panel * LANES + lane;
        W element = n < num_columns && k < depth ? from[n * depth + k] : W{};
        to[place(panel, k, lane)] = code(element);
      }
  });
}

template <typename W>
void pack(Plan &plan, const void *weight, void *packed, int64_t num_columns, int64_t depth) {
  constexpr int64_t UNIT = std::is_same_v<W, bfloat16> ? 2 : 1;
  const auto in_panels = [=](int64_t panel, int64_t k, int64_t lane) {
    return panel * padded_depth(depth) * LANES + (k / UNIT * LANES + lane) * UNIT + k % UNIT;
  };
  add_packing<W>(plan, weight, packed, num_columns, depth, in_panels, [](W element) { return element; });
}

// For `load_pairs`. Weights are from -127 to 127.
void pack_int8_pairs(Plan &plan, const void *weight, void *packed, int64_t num_columns, int64_t depth) {
  const int64_t padded = padded_depth(depth);
  const auto in_groups = [=](int64_t panel, int64_t k, int64_t lane) {
    return panel / PANELS * PANELS * padded * LANES + k / 2 * 2 * COLUMNS + int8_place(lane * 2 + k % 2, panel % PANELS);
  };
  add_packing<int8_t>(plan, weight, packed, num_columns, depth, in_groups,
                      [](int8_t x) { return static_cast<int8_t>(x < 0 ? 0x80 | -x : x); });
}

} // namespace

void add_product(Plan &plan, int kind, const Product &product, bool is_bfloat16) {
  if (kind == VECTORS)
    return is_bfloat16 ? add<ByRows<Vectors<bfloat16>>>(plan, product) : add<ByRows<Vectors<float>>>(plan, product);
#ifdef __AVX512BF16__
  if (kind == AVX512_BF16) return add<ByRows<Pairs>>(plan, product);
#endif
#ifdef HAS_AMX
  if (kind == AMX_BF16) return add<Tiles>(plan, product);
#endif
  throw NotCompiled();
}

extern "C" {

// Elements of a packed weight.
int64_t tandem_matmul_packed_elements(int64_t num_columns, int64_t depth) {
  return round_up(num_columns, COLUMNS) * padded_depth(depth);
}

// Packs weight [num_columns, depth], of elements of 1, 2 or 4 bytes. Products of floats are of kind VECTORS. Returns what
// `run_plan` returns.
int tandem_matmul_pack(int kind, const void *weight, void *packed, int64_t num_columns, int64_t depth,
                       int element_bytes, int num_threads) {
  return run_plan(num_threads, [&](Plan &plan) {
    if (element_bytes == 1 && kind != VECTORS)
      pack_int8_pairs(plan, weight, packed, num_columns, depth);
    else if (element_bytes == 1)
      pack<int8_t>(plan, weight, packed, num_columns, depth);
    else if (element_bytes == 2)
      pack<bfloat16>(plan, weight, packed, num_columns, depth);
    else
      pack<float>(plan, weight, packed, num_columns, depth);
  });
}

// x is [num_rows, depth], rows `x_stride` elements apart. Returns what `run_plan` returns.
int tandem_matmul(int kind, const void *x, const void *packed, const float *scales, const void *bias, void *out,
                  int64_t num_rows, int64_t num_columns, int64_t depth, int64_t x_stride, int is_bfloat16,
                  int num_threads) {
  const Product product = {{x, x_stride}, packed, scales, bias, nullptr, out, num_rows, num_columns, depth};
  return run_plan(num_threads, [&](Plan &plan) {
    if (num_rows <= REPEATED_TOKENS) plan.allow_repeats();
    add_product(plan, kind, product, is_bfloat16);
  });
}
}
