// The small per-token functions between the big matrix products: RMS norm, rotary embedding, SiLU times gate.
//
// In torch each takes five to ten kernel launches of a few microseconds; at batch 1 that is a third of a decode step.
// Values are rounded exactly where transformers' own code rounds them (norm: to bfloat16 before the weight).

#include "kernels.h"

namespace {

constexpr int64_t ROWS_WORTH_THREADS = 32; // with fewer rows, waking other threads costs more than it saves

// Calls body(load, store) for each run of LANES elements in a row of `dim`. A shorter last run goes through a padded
// buffer, so that every element takes the same instructions.
template <typename T, typename Body> inline void for_lanes(int64_t dim, Body body) {
  int64_t d = 0;
  for (; d + LANES <= dim; d += LANES) {
    body([d](const T *row) { return load_lanes(row + d); }, [d](T *row, vfloat v) { store_lanes(row + d, v); });
  }
  if (d == dim) return;
  size_t bytes = static_cast<size_t>(dim - d) * sizeof(T);
  body(
      [d, bytes](const T *row) {
        T buffer[LANES] = {};
        std::memcpy(buffer, row + d, bytes);
        return load_lanes(buffer);
      },
      [d, bytes](T *row, vfloat v) {
        T buffer[LANES];
        store_lanes(buffer, v);
        std::memcpy(row + d, buffer, bytes);
      });
}

template <typename T>
void rms_norm(const T *x, const T *weight, T *out, int64_t num_rows, int64_t dim, int64_t row_stride, float epsilon) {
#pragma omp parallel for schedule(static) if (num_rows >= ROWS_WORTH_THREADS)
  for (int64_t r = 0; r < num_rows; ++r) {
    const T *row = x + r * row_stride;
    vfloat squares = splat(0.0f);
    for_lanes<T>(dim, [&](auto load, auto) {
      vfloat v = load(row);
      squares += v * v;
    });
    float sum = 0.0f;
    for (int i = 0; i < LANES; ++i) sum += squares[i];
    float inverse = 1.0f / std::sqrt(sum / static_cast<float>(dim) + epsilon);
    for_lanes<T>(dim, [&](auto load, auto store) {
      store(out + r * dim, load(weight) * round_to<T>(load(row) * inverse));
    });
  }
}

// x * cos + rotate_half(x) * sin for [num_tokens, num_heads, dim], also in place. Products are rounded before the sum, as in torch.
template <typename T>
void rotate(const T *x, T *out, const T *cos, const T *sin, int64_t num_tokens, int64_t num_heads, int64_t dim,
            int64_t token_stride, int64_t head_stride, int64_t out_token_stride) {
  int64_t half = dim / 2;
#pragma omp parallel for schedule(static) if (num_tokens >= ROWS_WORTH_THREADS)
  for (int64_t t = 0; t < num_tokens; ++t) {
    const T *c = cos + t * dim, *s = sin + t * dim;
    for (int64_t h = 0; h < num_heads; ++h) {
      const T *low = x + t * token_stride + h * head_stride, *high = low + half;
      T *to = out + t * out_token_stride + h * dim;
      for_lanes<T>(half, [&](auto load, auto store) {
        vfloat a = load(low), b = load(high);
        store(to, round_to<T>(a * load(c)) + round_to<T>(-b * load(s)));
        store(to + half, round_to<T>(b * load(c + half)) + round_to<T>(a * load(s + half)));
      });
    }
  }
}

// silu(gate) * up, with silu rounded before the product.
template <typename T>
void silu_multiply(const T *gate, const T *up, T *out, int64_t num_rows, int64_t dim, int64_t gate_stride,
                   int64_t up_stride) {
#pragma omp parallel for schedule(static) if (num_rows >= ROWS_WORTH_THREADS)
  for (int64_t r = 0; r < num_rows; ++r) {
    const T *g = gate + r * gate_stride, *u = up + r * up_stride;
    for_lanes<T>(dim, [&](auto load, auto store) {
      vfloat v = load(g);
      vfloat e = exp_nonpositive(v < 0.0f ? v : -v);
      vfloat sigmoid = (v < 0.0f ? e : splat(1.0f)) / (1.0f + e);
      store(out + r * dim, round_to<T>(v * sigmoid) * load(u));
    });
  }
}

} // namespace

extern "C" {

void tandem_rms_norm(const void *x, const void *weight, void *out, int64_t num_rows, int64_t dim, int64_t row_stride,
                     float epsilon, int is_bfloat16) {
  if (is_bfloat16)
    rms_norm(static_cast<const bfloat16 *>(x), static_cast<const bfloat16 *>(weight), static_cast<bfloat16 *>(out),
             num_rows, dim, row_stride, epsilon);
  else
    rms_norm(static_cast<const float *>(x), static_cast<const float *>(weight), static_cast<float *>(out), num_rows,
             dim, row_stride, epsilon);
}

void tandem_rotate(const void *x, void *out, const void *cos, const void *sin, int64_t num_tokens, int64_t num_heads,
                   int64_t dim, int64_t token_stride, int64_t head_stride, int64_t out_token_stride, int is_bfloat16) {
  if (is_bfloat16)
    rotate(static_cast<const bfloat16 *>(x), static_cast<bfloat16 *>(out), static_cast<const bfloat16 *>(cos),
           static_cast<const bfloat16 *>(sin), num_tokens, num_heads, dim, token_stride, head_stride, out_token_stride);
  else
    rotate(static_cast<const float *>(x), static_cast<float *>(out), static_cast<const float *>(cos),
           static_cast<const float *>(sin), num_tokens, num_heads, dim, token_stride, head_stride, out_token_stride);
}

void tandem_silu_multiply(const void *gate, const void *up, void *out, int64_t num_rows, int64_t dim,
                          int64_t gate_stride, int64_t up_stride, int is_bfloat16) {
  if (is_bfloat16)
    silu_multiply(static_cast<const bfloat16 *>(gate), static_cast<const bfloat16 *>(up), static_cast<bfloat16 *>(out),
                  num_rows, dim, gate_stride, up_stride);
  else
    silu_multiply(static_cast<const float *>(gate), static_cast<const float *>(up), static_cast<float *>(out),
                  num_rows, dim, gate_stride, up_stride);
}
}
