// The functions of elementwise.h over many rows, as Python calls them.

#include "elementwise.h"
#include "kernels.h"

namespace {

// `work(row)` for each row, by a team where there are enough of them. Returns what `run_plan` returns.
template <typename Work> int for_rows(int64_t num_rows, int num_threads, const Work &work) {
  return run_plan(num_rows > ITEM_TOKENS ? num_threads : 1, [&](Plan &plan) {
    plan.add(num_token_items(num_rows), [=](int64_t item) {
      int64_t last = std::min((item + 1) * ITEM_TOKENS, num_rows);
      for (int64_t row = item * ITEM_TOKENS; row < last; ++row) work(row);
    });
  });
}

template <typename T>
int rms_norm_rows(const void *x, const void *weight, void *out, int64_t num_rows, int64_t dim, float epsilon,
                  int num_threads) {
  const T *from = static_cast<const T *>(x), *scale = static_cast<const T *>(weight);
  T *to = static_cast<T *>(out);
  return for_rows(num_rows, num_threads,
                  [=](int64_t row) { rms_norm(from + row * dim, scale, to + row * dim, dim, epsilon); });
}

template <typename T>
int rotate_tokens(const void *x, void *out, const void *cos, const void *sin, int64_t num_tokens, int64_t num_heads,
                  int64_t dim, int64_t token_stride, int64_t head_stride, int num_threads) {
  const T *from = static_cast<const T *>(x), *c = static_cast<const T *>(cos), *s = static_cast<const T *>(sin);
  T *to = static_cast<T *>(out);
  return for_rows(num_tokens, num_threads, [=](int64_t token) {
    for (int64_t head = 0; head < num_heads; ++head)
      rotate(from + token * token_stride + head * head_stride, to + (token * num_heads + head) * dim, c + token * dim,
             s + token * dim, dim);
  });
}

template <typename T>
int silu_multiply_rows(const void *gate, const void *up, void *out, int64_t num_rows, int64_t dim, int64_t gate_stride,
                       int64_t up_stride, int num_threads) {
  const T *g = static_cast<const T *>(gate), *u = static_cast<const T *>(up);
  T *to = static_cast<T *>(out);
  return for_rows(num_rows, num_threads,
                  [=](int64_t row) { silu_multiply(g + row * gate_stride, u + row * up_stride, to + row * dim, dim); });
}

} // namespace

// All return 0, or 1 if memory was lacking.
extern "C" {

int tandem_rms_norm(const void *x, const void *weight, void *out, int64_t num_rows, int64_t dim, float epsilon,
                    int is_bfloat16, int num_threads) {
  return (is_bfloat16 ? rms_norm_rows<bfloat16> : rms_norm_rows<float>)(x, weight, out, num_rows, dim, epsilon,
                                                                        num_threads);
}

int tandem_rotate(const void *x, void *out, const void *cos, const void *sin, int64_t num_tokens, int64_t num_heads,
                  int64_t dim, int64_t token_stride, int64_t head_stride, int is_bfloat16, int num_threads) {
  return (is_bfloat16 ? rotate_tokens<bfloat16> : rotate_tokens<float>)(x, out, cos, sin, num_tokens, num_heads, dim,
                                                                        token_stride, head_stride, num_threads);
}

int tandem_silu_multiply(const void *gate, const void *up, void *out, int64_t num_rows, int64_t dim,
                         int64_t gate_stride, int64_t up_stride, int is_bfloat16, int num_threads) {
  return (is_bfloat16 ? silu_multiply_rows<bfloat16> : silu_multiply_rows<float>)(gate, up, out, num_rows, dim,
                                                                                  gate_stride, up_stride, num_threads);
}
}
