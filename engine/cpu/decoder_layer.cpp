// Decoder layers in one call: norm, queries, keys and values, rotation, attention, output, norm, gated MLP.
//
// Values are rounded where the single kernels round them, and so where transformers' own code does.

#include "elementwise.h"
#include "kernels.h"

namespace {

struct Weight {
  const void *packed;
  const float *scales; // null but for int8
  const void *bias;    // may be null
  int64_t num_columns, depth;
};

struct Norm {
  const void *weight; // null: there is no such norm
  float epsilon;
};

struct Layer {
  Weight query_key_value, output, gate_up, down;
  Norm input, query, key, mlp;
  const float *sinks;
  int64_t index, num_heads, window, width; // its place in the pool; the width of the hidden state
  float scale, softcap;
  int kind, is_bfloat16;
};

// What changes from call to call. `attention` describes the step, and keys and values of layer 0 in the pool.
struct Call {
  const void *x, *cos, *sin; // [num_tokens, width]; [num_tokens, head_dim]
  void *out;                 // [num_tokens, width]
  const AttentionArguments *attention;
  int64_t layer_bytes; // of the pool, from one layer to the next
  int num_threads;
};

// Values between the products, all of the layer's type.
struct Buffers {
  char *fused;    // [num_tokens, queries, keys and values]
  char *attended; // [num_tokens, queries]
  char *gate_up;  // [num_tokens, 2 * inner width]

  static int64_t bytes(const Layer &layer, int64_t num_tokens) {
    return num_tokens * (layer.query_key_value.num_columns + layer.output.depth + layer.gate_up.num_columns) *
           (layer.is_bfloat16 ? 2 : 4);
  }

  Buffers(void *memory, const Layer &layer, int64_t num_tokens) {
    const int64_t size = layer.is_bfloat16 ? 2 : 4;
    fused = static_cast<char *>(memory);
    attended = fused + num_tokens * layer.query_key_value.num_columns * size;
    gate_up = attended + num_tokens * layer.output.depth * size;
  }
};

// Norms and rotates each head of a token in place.
template <typename T>
void turn(T *heads, int64_t num_heads, const Norm &norm, const T *cos, const T *sin, int64_t dim) {
  for (int64_t h = 0; h < num_heads; ++h, heads += dim) {
    if (norm.weight != nullptr) rms_norm(heads, static_cast<const T *>(norm.weight), heads, dim, norm.epsilon);
    rotate(heads, heads, cos, sin, dim);
  }
}

// Prepares queries and keys where they lie, and writes keys and values into their slots.
template <typename T> void add_turns(Plan &plan, const Layer *layer, const Call &call, const AttentionArguments &a) {
  const T *cos = static_cast<const T *>(call.cos), *sin = static_cast<const T *>(call.sin);
  plan.add(num_token_items(a.num_tokens), [=](int64_t item) {
    int64_t first = item * ITEM_TOKENS, last = std::min(first + ITEM_TOKENS, a.num_tokens), dim = a.head_dim;
    for (int64_t t = first; t < last; ++t) {
      T *queries = static_cast<T *>(const_cast<void *>(a.query)) + t * a.query_token_stride;
      T *keys = static_cast<T *>(const_cast<void *>(a.key)) + t * a.key_token_stride;
      turn(queries, a.num_heads, layer->query, cos + t * dim, sin + t * dim, dim);
      turn(keys, a.num_kv_heads, layer->key, cos + t * dim, sin + t * dim, dim);
    }
    write_cache(a, first, last, layer->is_bfloat16);
  });
}

AttentionArguments attention_over(const Layer &layer, const Call &call, const Buffers &buffers) {
  AttentionArguments a = *call.attention;
  a.layer_keys = static_cast<char *>(a.layer_keys) + layer.index * call.layer_bytes;
  a.layer_values = static_cast<char *>(a.layer_values) + layer.index * call.layer_bytes;
  a.sinks = layer.sinks;
  a.num_heads = layer.num_heads;
  a.window = layer.window;
  a.scale = layer.scale;
  a.softcap = layer.softcap;
  const int64_t size = layer.is_bfloat16 ? 2 : 4;
  const char *keys = buffers.fused + a.num_heads * a.head_dim * size;
  a.query = buffers.fused;
  a.key = keys;
  a.value = keys + a.num_kv_heads * a.head_dim * size;
  a.out = buffers.attended;
  a.query_token_stride = a.key_token_stride = a.value_token_stride = layer.query_key_value.num_columns;
  a.query_head_stride = a.key_head_stride = a.value_head_stride = a.head_dim;
  return a;
}

// `x` may be the call's `out`.
void add_layer(Plan &plan, const Layer &layer, const Call &call, const void *x, const Buffers &buffers) {
  const AttentionArguments attention = attention_over(layer, call, buffers);
  const auto multiply = [&](const Weight &weight, const Rows &rows, const void *residual, void *out) {
    add_product(plan, layer.kind,
                {rows, weight.packed, weight.scales, weight.bias, residual, out, attention.num_tokens, weight.num_columns,
                 weight.depth},
                layer.is_bfloat16);
  };
  const auto normed = [&](const void *x, const Norm &norm) {
    return Rows{x, layer.width, Rows::NORM, norm.weight, norm.epsilon};
  };
  multiply(layer.query_key_value, normed(x, layer.input), nullptr, buffers.fused);
  if (layer.is_bfloat16)
    add_turns<bfloat16>(plan, &layer, call, attention);
  else
    add_turns<float>(plan, &layer, call, attention);
  add_attention(plan, layer.kind, attention, layer.is_bfloat16);
  multiply(layer.output, {buffers.attended, layer.output.depth}, x, call.out);
  multiply(layer.gate_up, normed(call.out, layer.mlp), nullptr, buffers.gate_up);
  multiply(layer.down, {buffers.gate_up, layer.gate_up.num_columns, Rows::SILU_MULTIPLY}, call.out, call.out);
}

} // namespace

// `between_layers` is called at the beginning of each layer, or later. Returns what `run_plan` returns.
extern "C" int tandem_decoder_layers(const Layer *layers, int64_t num_layers, const Call *call,
                                     void (*between_layers)()) {
  return run_plan(
      call->num_threads,
      [=](Plan &plan) {
        const int64_t num_tokens = call->attention->num_tokens;
        int64_t bytes = 0;
        for (int64_t i = 0; i < num_layers; ++i) bytes = std::max(bytes, Buffers::bytes(layers[i], num_tokens));
        void *memory = scratch<Layer>(bytes);
        if (memory == nullptr) throw std::bad_alloc();
        for (int64_t i = 0; i < num_layers; ++i) {
          plan.stop();
          add_layer(plan, layers[i], *call, i == 0 ? call->x : call->out, Buffers(memory, layers[i], num_tokens));
        }
      },
      between_layers);
}
