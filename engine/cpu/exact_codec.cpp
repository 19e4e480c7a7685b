// Lossless packing of bfloat16: 12 bits an element and a few exceptions. kv_transfer/exact_codec.py describes the bytes.
//
// Packing takes any bits. Unpacking takes any bytes: what no packing has written gives some numbers, within the output.

#include "kernels.h"

namespace {

// Elements of a vector, which is one register: wider ones are split badly.
#if defined(__AVX512BW__)
constexpr int WIDE = 32;
#elif defined(__AVX2__)
constexpr int WIDE = 16;
#else
constexpr int WIDE = 8;
#endif
typedef uint16_t vhalfs __attribute__((vector_size(WIDE * 2), aligned(2), may_alias));
typedef uint8_t vbytes __attribute__((vector_size(WIDE), aligned(1), may_alias));
typedef uint64_t vwords __attribute__((vector_size(WIDE * 2)));

constexpr uint16_t ZERO = 15;       // the code of zeros and denormals, whose exponent is 0
constexpr uint8_t TOO_MANY = 0xff;  // in the place of the number of exceptions

inline vhalfs load_halfs(const uint16_t *p) { return *reinterpret_cast<const vhalfs *>(p); }

// As `widen` and `narrow`: GCC makes one instruction of these only if it is told which.
inline vhalfs widen_bytes(const uint8_t *p) {
  vbytes v = *reinterpret_cast<const vbytes *>(p);
#ifdef __AVX512BW__
  return reinterpret_cast<vhalfs>(_mm512_cvtepu8_epi16(reinterpret_cast<__m256i>(v)));
#elif defined(__AVX2__)
  return reinterpret_cast<vhalfs>(_mm256_cvtepu8_epi16(reinterpret_cast<__m128i>(v)));
#else
  return __builtin_convertvector(v, vhalfs);
#endif
}
inline void store_bytes(uint8_t *p, vhalfs v) {
#ifdef __AVX512BW__
  *reinterpret_cast<vbytes *>(p) = reinterpret_cast<vbytes>(_mm512_cvtepi16_epi8(reinterpret_cast<__m512i>(v)));
#elif defined(__AVX2__)
  const __m256i bytes = _mm256_packus_epi16(reinterpret_cast<__m256i>(v), __m256i{}); // in each half of it
  *reinterpret_cast<vbytes *>(p) = reinterpret_cast<vbytes>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(bytes, 0xd8)));
#else
  *reinterpret_cast<vbytes *>(p) = __builtin_convertvector(v, vbytes);
#endif
}

inline bool any(vhalfs v) {
  vwords words = reinterpret_cast<vwords>(v);
  uint64_t all = 0;
  for (int i = 0; i < WIDE / 4; ++i) all |= words[i];
  return all != 0;
}

// The same for vectors and for single elements.
template <typename V> inline V exponent(V x) { return (x >> 7) & 0xff; }
template <typename V> inline V sign_and_mantissa(V x) { return ((x >> 8) & 0x80) | (x & 0x7f); }
template <typename V> inline V join(V bits, V exponents) { return ((bits & 0x80) << 8) | (exponents << 7) | (bits & 0x7f); }

inline vhalfs code(vhalfs exponents, vhalfs base) {
  vhalfs below = base - exponents; // above the base it is a large number
  return below > ZERO ? vhalfs{} + ZERO : below;
}
inline uint16_t code(uint16_t exponent, uint16_t base) {
  return std::min<uint16_t>(static_cast<uint16_t>(base - exponent), ZERO);
}
inline vhalfs decoded(vhalfs codes, vhalfs base) { return codes == ZERO ? vhalfs{} : (base - codes) & 0xff; }
inline uint16_t decoded(uint16_t code, uint16_t base) { return code == ZERO ? 0 : (base - code) & 0xff; }

// Runs of elements that share a base, one after the other in a block.
struct Unit {
  int64_t size, num_exceptions; // elements, and most exceptions

  int64_t half() const { return (size + 1) / 2; } // element i and element i + half() share a byte of codes
  int64_t bytes() const { return 2 + size + half() + 3 * num_exceptions; }

  static uint16_t base(const uint16_t *x, int64_t size) { // the largest exponent but that of infinity and NaN
    vhalfs most{};
    int64_t i = 0;
    for (; i + WIDE <= size; i += WIDE) {
      vhalfs e = exponent(load_halfs(x + i));
      e = e == 0xff ? vhalfs{} : e;
      most = e > most ? e : most;
    }
    uint16_t base = 0;
    for (int lane = 0; lane < WIDE; ++lane) base = std::max<uint16_t>(base, most[lane]);
    for (; i < size; ++i)
      if (uint16_t e = exponent<uint32_t>(x[i]); e != 0xff) base = std::max(base, e);
    return base;
  }

  void pack(const uint16_t *x, uint8_t *out) const {
    const uint16_t base = Unit::base(x, size);
    const int64_t half = this->half(), num_pairs = size - half;
    uint8_t *bits = out + 2, *codes = bits + size, *places = codes + half, *exponents = places + 2 * num_exceptions;
    std::memset(places, 0, static_cast<size_t>(3 * num_exceptions));
    int64_t count = 0;
    const auto note = [&](int64_t i) { // an exception, if it is one
      uint16_t e = exponent<uint32_t>(x[i]);
      if (e == 0 || code(e, base) != ZERO || ++count > num_exceptions) return;
      places[2 * count - 2] = static_cast<uint8_t>(i), places[2 * count - 1] = static_cast<uint8_t>(i >> 8);
      exponents[count - 1] = static_cast<uint8_t>(e);
    };
    const vhalfs bases = vhalfs{} + base;
    int64_t i = 0;
    for (; i + WIDE <= num_pairs; i += WIDE) {
      vhalfs low = load_halfs(x + i), high = load_halfs(x + half + i);
      vhalfs low_codes = code(exponent(low), bases), high_codes = code(exponent(high), bases);
      store_bytes(bits + i, sign_and_mantissa(low));
      store_bytes(bits + half + i, sign_and_mantissa(high));
      store_bytes(codes + i, low_codes | (high_codes << 4));
      vhalfs is_noted = ((low_codes == ZERO) & (exponent(low) != 0)) | ((high_codes == ZERO) & (exponent(high) != 0));
      if (!any(is_noted)) continue;
      for (int64_t k = i; k < i + WIDE; ++k) note(k), note(half + k);
    }
    for (; i < half; ++i) {
      const bool is_pair = i < num_pairs;
      uint16_t high = is_pair ? x[half + i] : 0;
      codes[i] = static_cast<uint8_t>(code(exponent<uint32_t>(x[i]), base));
      bits[i] = static_cast<uint8_t>(sign_and_mantissa<uint32_t>(x[i]));
      note(i);
      if (!is_pair) continue;
      codes[i] = static_cast<uint8_t>(codes[i] | code(exponent<uint32_t>(high), base) << 4);
      bits[half + i] = static_cast<uint8_t>(sign_and_mantissa<uint32_t>(high));
      note(half + i);
    }
    out[0] = count > num_exceptions ? TOO_MANY : static_cast<uint8_t>(count);
    out[1] = static_cast<uint8_t>(base);
  }

  void unpack(const uint8_t *in, uint16_t *x) const {
    const uint16_t base = in[1];
    const int64_t half = this->half(), num_pairs = size - half;
    const uint8_t *bits = in + 2, *codes = bits + size, *places = codes + half, *exponents = places + 2 * num_exceptions;
    const vhalfs bases = vhalfs{} + base;
    int64_t i = 0;
    for (; i + WIDE <= num_pairs; i += WIDE) {
      vhalfs both = widen_bytes(codes + i);
      vhalfs low = decoded(both & 15, bases), high = decoded(both >> 4, bases);
      *reinterpret_cast<vhalfs *>(x + i) = join(widen_bytes(bits + i), low);
      *reinterpret_cast<vhalfs *>(x + half + i) = join(widen_bytes(bits + half + i), high);
    }
    for (; i < half; ++i) {
      x[i] = static_cast<uint16_t>(join<uint32_t>(bits[i], decoded(codes[i] & 15, base)));
      if (i < num_pairs)
        x[half + i] = static_cast<uint16_t>(join<uint32_t>(bits[half + i], decoded(codes[i] >> 4, base)));
    }
    const int64_t count = std::min<int64_t>(in[0], num_exceptions);
    for (int64_t k = 0; k < count; ++k) {
      const int64_t place = places[2 * k] | places[2 * k + 1] << 8;
      if (place < size) x[place] = static_cast<uint16_t>((x[place] & 0x807f) | exponents[k] << 7);
    }
  }
};

} // namespace

// Block ids[i] of `pool` (block i without ids), contiguous and `num_units` units large, and row i of `data`, whose rows
// are `stride` bytes apart. Both return 0, or 1 if memory was lacking.
extern "C" {

int tandem_exact_pack(const void *pool, const int64_t *ids, int64_t num_blocks, int64_t num_units, int64_t unit_size,
                      int64_t num_exceptions, void *data, int64_t stride, int num_threads) {
  const Unit unit{unit_size, num_exceptions};
  return run_plan(num_threads, [=](Plan &plan) {
    plan.add(num_blocks, [=](int64_t item) {
      const int64_t block = ids == nullptr ? item : ids[item];
      const uint16_t *from = static_cast<const uint16_t *>(pool) + block * num_units * unit.size;
      uint8_t *to = static_cast<uint8_t *>(data) + item * stride;
      for (int64_t i = 0; i < num_units; ++i) unit.pack(from + i * unit.size, to + i * unit.bytes());
    });
  });
}

int tandem_exact_unpack(void *pool, const int64_t *ids, int64_t num_blocks, int64_t num_units, int64_t unit_size,
                        int64_t num_exceptions, const void *data, int64_t stride, int num_threads) {
  const Unit unit{unit_size, num_exceptions};
  return run_plan(num_threads, [=](Plan &plan) {
    plan.add(num_blocks, [=](int64_t item) {
      const int64_t block = ids == nullptr ? item : ids[item];
      uint16_t *to = static_cast<uint16_t *>(pool) + block * num_units * unit.size;
      const uint8_t *from = static_cast<const uint8_t *>(data) + item * stride;
      for (int64_t i = 0; i < num_units; ++i) unit.unpack(from + i * unit.bytes(), to + i * unit.size);
    });
  });
}
}
