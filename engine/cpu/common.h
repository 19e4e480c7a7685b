// Vectors and the two element types of the CPU kernels.
//
// GCC's portable vectors: with -march=native the same source compiles to AVX-512, AVX2 or NEON. A vector is one register:
// GCC keeps wider ones in memory, which takes ten times as long.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#define LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#elif defined(__AVX2__)
constexpr int LANES = 8, REGISTERS = 16;
#define LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7
#else
constexpr int LANES = 4;
#define LANE_NUMBERS 0, 1, 2, 3
#ifdef __aarch64__
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif
#endif
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

typedef float vfloat __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vint __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

struct bfloat16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline void from_float(float x, float *out) { *out = x; }
inline void from_float(float x, bfloat16 *out) { // round to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) { // NaN: the rounding below would turn some NaNs into infinity
    out->bits = static_cast<uint16_t>((bits >> 16) | 0x40);
    return;
  }
  bits += 0x7fff + ((bits >> 16) & 1);
  out->bits = static_cast<uint16_t>(bits >> 16);
}

inline vfloat load(const float *p) { return *reinterpret_cast<const vfloat *>(p); }
inline void store(float *p, vfloat v) { *reinterpret_cast<vfloat *>(p) = v; }
inline vfloat splat(float x) { return x - vfloat{}; }

typedef uint32_t vword __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t vhalf __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

typedef int8_t vbyte __attribute__((vector_size(LANES), aligned(1), may_alias));

// Widen and narrow lanes. GCC makes one instruction a vector of these conversions only if it is told which.
inline vword widen(vhalf v) {
#ifdef __AVX512F__
  return reinterpret_cast<vword>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(v)));
#elif defined(__AVX2__)
  return reinterpret_cast<vword>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(v)));
#else
  return __builtin_convertvector(v, vword);
#endif
}
inline vint widen(vbyte v) {
#ifdef __AVX512F__
  return reinterpret_cast<vint>(_mm512_cvtepi8_epi32(reinterpret_cast<__m128i>(v)));
#elif defined(__AVX2__)
  return reinterpret_cast<vint>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(reinterpret_cast<int64_t>(v))));
#else
  return __builtin_convertvector(v, vint);
#endif
}
inline vhalf narrow(vword v) {
#ifdef __AVX512F__
  return reinterpret_cast<vhalf>(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(v)));
#elif defined(__AVX2__)
  const __m256i halves = _mm256_packus_epi32(reinterpret_cast<__m256i>(v & 0xffff), __m256i{}); // in each half of it
  return reinterpret_cast<vhalf>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0xd8)));
#else
  return __builtin_convertvector(v, vhalf);
#endif
}

// The bits of bfloat16 in the upper half of each word: rounded to nearest even; NaN stays NaN.
inline vword round_to_bfloat16(vfloat v) {
  vword bits = reinterpret_cast<vword>(v);
  vword rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return (v == v) ? rounded : (bits | 0x400000);
}

// Convert LANES elements to floats and back.
inline vfloat load_lanes(const float *p) { return load(p); }
inline vfloat load_lanes(const int8_t *p) {
  return __builtin_convertvector(widen(*reinterpret_cast<const vbyte *>(p)), vfloat);
}
inline vfloat load_lanes(const bfloat16 *p) {
  return reinterpret_cast<vfloat>(widen(*reinterpret_cast<const vhalf *>(p)) << 16);
}
inline void store_lanes(float *p, vfloat v) { store(p, v); }
inline void store_lanes(bfloat16 *p, vfloat v) { *reinterpret_cast<vhalf *>(p) = narrow(round_to_bfloat16(v) >> 16); }
template <typename T> inline vfloat round_to(vfloat v) { // as if stored and loaded again
  return reinterpret_cast<vfloat>(round_to_bfloat16(v) & 0xffff0000u);
}
template <> inline vfloat round_to<float>(vfloat v) { return v; }

// exp(x) for x <= 0 (-inf gives 0). Splits off a power of two and uses Cephes' polynomial; error about 1 ulp.
inline vfloat exp_nonpositive(vfloat x) {
  vint tiny = x < splat(-87.0f);
  vfloat clamped = tiny ? splat(-87.0f) : x;
  vfloat scaled = clamped * 1.44269504088896341f - 0.5f;
  vint n = __builtin_convertvector(scaled, vint); // truncating a negative number here rounds to nearest
  vfloat nf = __builtin_convertvector(n, vfloat);
  vfloat r = clamped - nf * 0.693359375f + nf * 2.12194440e-4f;
  vfloat p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  vint power = (n + 127) << 23;
  vfloat result = p * reinterpret_cast<vfloat>(power);
  return tiny ? splat(0.0f) : result;
}

} // namespace
