// One decoder layer in one call: norm, queries, keys and values, rotation, attention, output, norm, gated MLP.
//
// Values are rounded where the single kernels round them, and so where transformers' own code does.

#include "kernels.h"
#include "scratch.h"

namespace {

struct Weight {
  const void *packed, *bias; // bias may be null
  int64_t num_columns, depth;
};

struct Norm {
  const void *weight; // null: there is no such norm
  float epsilon;
};

struct Layer {
  Weight query_key_value, output, gate_up, down;
  Norm input, query, key, mlp;
  int64_t width; // of the hidden state
  int kind, is_bfloat16;
};

// What changes from call to call. `attention` lacks the pointers to queries, keys, values and its output.
struct Call {
  const void *x, *cos, *sin; // [num_tokens, width]; [num_tokens, head_dim]
  void *out;                 // [num_tokens, width]
  AttentionArguments *attention;
  int num_threads;
};

struct Kernels {
  const Layer &layer;
  int64_t num_tokens;
  int num_threads;

  void norm(const Norm &norm, const void *x, void *out, int64_t num_rows, int64_t dim, int64_t row_stride) const {
    tandem_rms_norm(x, norm.weight, out, num_rows, dim, row_stride, norm.epsilon, layer.is_bfloat16);
  }
  int multiply(const Weight &weight, const void *x, const void *residual, void *out) const {
    return tandem_matmul(layer.kind, x, weight.packed, weight.bias, residual, out, num_tokens, weight.num_columns,
                         weight.depth, weight.depth, layer.is_bfloat16, num_threads);
  }
};

// Norms of each head, and rotation, in place.
void turn(const Kernels &kernels, const Call &call, const Norm &norm, char *heads, int64_t num_heads,
          int64_t token_bytes, int64_t token_stride) {
  int64_t dim = call.attention->head_dim;
  if (norm.weight != nullptr)
    for (int64_t t = 0; t < kernels.num_tokens; ++t)
      kernels.norm(norm, heads + t * token_bytes, heads + t * token_bytes, num_heads, dim, dim);
  tandem_rotate(heads, heads, call.cos, call.sin, kernels.num_tokens, num_heads, dim, token_stride, dim, token_stride,
                kernels.layer.is_bfloat16);
}

int attend(const Kernels &kernels, const Call &call, char *fused, void *attended) {
  AttentionArguments &a = *call.attention;
  const int64_t stride = kernels.layer.query_key_value.num_columns, size = kernels.layer.is_bfloat16 ? 2 : 4;
  char *keys = fused + a.num_heads * a.head_dim * size, *values = keys + a.num_kv_heads * a.head_dim * size;
  turn(kernels, call, kernels.layer.query, fused, a.num_heads, stride * size, stride);
  turn(kernels, call, kernels.layer.key, keys, a.num_kv_heads, stride * size, stride);
  a.query = fused;
  a.key = keys;
  a.value = values;
  a.out = attended;
  a.query_token_stride = a.key_token_stride = a.value_token_stride = stride;
  a.query_head_stride = a.key_head_stride = a.value_head_stride = a.head_dim;
  return tandem_paged_attention(kernels.layer.kind, &a, kernels.layer.is_bfloat16, kernels.num_threads);
}

} // namespace

// Returns 0, or 1 if scratch memory could not be allocated.
extern "C" int tandem_decoder_layer(const Layer *layer, const Call *call) {
  const int64_t num_tokens = call->attention->num_tokens, size = layer->is_bfloat16 ? 2 : 4;
  const int64_t width = layer->width, inner = layer->down.depth;
  const int64_t attention_width = layer->query_key_value.num_columns + layer->output.depth;
  const int64_t widest = std::max(attention_width, 3 * inner);
  char *normed = static_cast<char *>(scratch<Layer>(num_tokens * (width + widest) * size));
  if (normed == nullptr) return 1;
  const Kernels kernels = {*layer, num_tokens, call->num_threads};

  char *fused = normed + num_tokens * width * size;
  char *attended = fused + num_tokens * layer->query_key_value.num_columns * size;
  kernels.norm(layer->input, call->x, normed, num_tokens, width, width);
  int failed = kernels.multiply(layer->query_key_value, normed, nullptr, fused);
  failed |= attend(kernels, *call, fused, attended);
  failed |= kernels.multiply(layer->output, attended, call->x, call->out);

  char *both = normed + num_tokens * width * size, *gated = both + num_tokens * 2 * inner * size;
  kernels.norm(layer->mlp, call->out, normed, num_tokens, width, width);
  failed |= kernels.multiply(layer->gate_up, normed, nullptr, both);
  tandem_silu_multiply(both, both + inner * size, gated, num_tokens, inner, 2 * inner, 2 * inner, layer->is_bfloat16);
  failed |= kernels.multiply(layer->down, gated, call->out, call->out);
  return failed;
}
