// The small per-token functions around the big matrix products: RMS norm, rotary embedding, SiLU times gate.
//
// In torch each is five to ten kernel launches of a few microseconds; at batch 1 that is a third of a decode step.
// Rounding happens exactly where transformers' own code rounds (norm: to bfloat16 before the weight).

#include "common.h"

namespace {

template <typename T>
void rms_norm(const T *x, const T *weight, T *out, int64_t num_rows, int64_t dim, float epsilon) {
  for (int64_t r = 0; r < num_rows; ++r) {
    const T *row = x + r * dim;
    T *to = out + r * dim;
    float lanes[LANES] = {};
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES)
      for (int i = 0; i < LANES; ++i) {
        float v = to_float(row[d + i]);
        lanes[i] += v * v;
      }
    float sum = 0.0f;
    for (int i = 0; i < LANES; ++i) sum += lanes[i];
    for (; d < dim; ++d) sum += to_float(row[d]) * to_float(row[d]);
    float inverse = 1.0f / std::sqrt(sum / static_cast<float>(dim) + epsilon);
    for (d = 0; d < dim; ++d) {
      T normed;
      from_float(to_float(row[d]) * inverse, &normed);
      from_float(to_float(weight[d]) * to_float(normed), &to[d]);
    }
  }
}

// x * cos + rotate_half(x) * sin for [num_tokens, num_heads, dim]; products are rounded before the sum, as torch does.
template <typename T>
void rotate(const T *x, T *out, const T *cos, const T *sin, int64_t num_tokens, int64_t num_heads, int64_t dim,
            int64_t token_stride, int64_t head_stride) {
  int64_t half = dim / 2;
  for (int64_t t = 0; t < num_tokens; ++t) {
    const T *c = cos + t * dim, *s = sin + t * dim;
    for (int64_t h = 0; h < num_heads; ++h) {
      const T *row = x + t * token_stride + h * head_stride;
      T *to = out + (t * num_heads + h) * dim;
      for (int64_t d = 0; d < half; ++d) {
        T straight, turned;
        from_float(to_float(row[d]) * to_float(c[d]), &straight);
        from_float(-to_float(row[d + half]) * to_float(s[d]), &turned);
        from_float(to_float(straight) + to_float(turned), &to[d]);
      }
      for (int64_t d = half; d < dim; ++d) {
        T straight, turned;
        from_float(to_float(row[d]) * to_float(c[d]), &straight);
        from_float(to_float(row[d - half]) * to_float(s[d]), &turned);
        from_float(to_float(straight) + to_float(turned), &to[d]);
      }
    }
  }
}

// silu(gate) * up, silu rounded before the product.
template <typename T>
void silu_multiply(const T *gate, const T *up, T *out, int64_t num_rows, int64_t dim, int64_t gate_stride,
                   int64_t up_stride) {
  for (int64_t r = 0; r < num_rows; ++r) {
    const T *g = gate + r * gate_stride, *u = up + r * up_stride;
    T *to = out + r * dim;
    int64_t d = 0;
    alignas(64) float x[LANES], y[LANES];
    for (; d < dim; d += LANES) {
      int n = static_cast<int>(std::min<int64_t>(LANES, dim - d));
      for (int i = 0; i < LANES; ++i) x[i] = i < n ? to_float(g[d + i]) : 0.0f;
      vfloat v = load(x), magnitude = v < 0.0f ? v : -v;
      vfloat e = exp_nonpositive(magnitude);
      vfloat sigmoid = (v < 0.0f ? e : splat(1.0f)) / (1.0f + e);
      store(y, v * sigmoid);
      for (int i = 0; i < n; ++i) {
        T activated;
        from_float(y[i], &activated);
        from_float(to_float(activated) * to_float(u[d + i]), &to[d + i]);
      }
    }
  }
}

} // namespace

extern "C" {

void tandem_rms_norm(const void *x, const void *weight, void *out, int64_t num_rows, int64_t dim, float epsilon,
                     int is_bfloat16) {
  if (is_bfloat16)
    rms_norm(static_cast<const bfloat16 *>(x), static_cast<const bfloat16 *>(weight), static_cast<bfloat16 *>(out),
             num_rows, dim, epsilon);
  else
    rms_norm(static_cast<const float *>(x), static_cast<const float *>(weight), static_cast<float *>(out), num_rows,
             dim, epsilon);
}

void tandem_rotate(const void *x, void *out, const void *cos, const void *sin, int64_t num_tokens, int64_t num_heads,
                   int64_t dim, int64_t token_stride, int64_t head_stride, int is_bfloat16) {
  if (is_bfloat16)
    rotate(static_cast<const bfloat16 *>(x), static_cast<bfloat16 *>(out), static_cast<const bfloat16 *>(cos),
           static_cast<const bfloat16 *>(sin), num_tokens, num_heads, dim, token_stride, head_stride);
  else
    rotate(static_cast<const float *>(x), static_cast<float *>(out), static_cast<const float *>(cos),
           static_cast<const float *>(sin), num_tokens, num_heads, dim, token_stride, head_stride);
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
