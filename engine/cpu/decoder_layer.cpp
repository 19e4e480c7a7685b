// Decoder layers in one call: norm, queries, keys and values, rotation, attention, output, norm, gated MLP.
//
// Values are rounded where the single kernels round them, and so where transformers' own code does.

#include "elementwise.h"
#include "kernels.h"

#include <utility>

namespace {

constexpr int64_t REPEAT_BYTES = 32 << 20; // of values between products that repeats may cost

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

  int64_t element_bytes() const { return is_bfloat16 ? 2 : 4; }
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
  char *turned;   // [num_tokens, queries and keys]
  char *attended; // [num_tokens, queries]
  char *between;  // [num_tokens, width], behind attention
  char *gate_up;  // [num_tokens, 2 * inner width]
  char *out;      // [num_tokens, width]

  static int64_t bytes(const Layer &layer, int64_t num_tokens) {
    int64_t num_columns = 2 * (layer.query_key_value.num_columns + layer.width) + layer.output.depth;
    return num_tokens * (num_columns + layer.gate_up.num_columns) * layer.element_bytes();
  }

  Buffers(char *memory, const Layer &layer, int64_t num_tokens) {
    const auto take = [&](int64_t num_columns) {
      return std::exchange(memory, memory + num_tokens * num_columns * layer.element_bytes());
    };
    fused = take(layer.query_key_value.num_columns);
    turned = take(layer.query_key_value.num_columns);
    attended = take(layer.output.depth);
    between = take(layer.width);
    gate_up = take(layer.gate_up.num_columns);
    out = take(layer.width);
  }
};

// Norms and rotates each head of a token.
template <typename T>
void turn(const T *heads, T *out, int64_t num_heads, const Norm &norm, const T *cos, const T *sin, int64_t dim) {
  T normed[MAX_DIM];
  for (int64_t h = 0; h < num_heads; ++h, heads += dim, out += dim) {
    if (norm.weight != nullptr) rms_norm(heads, static_cast<const T *>(norm.weight), normed, dim, norm.epsilon);
    rotate(norm.weight != nullptr ? normed : heads, out, cos, sin, dim);
  }
}

// Prepares queries and keys, and writes keys and values into their slots. `a` has them where they lie then.
template <typename T>
void add_turns(Plan &plan, const Layer *layer, const Call &call, const AttentionArguments &a, const Buffers &buffers) {
  const T *cos = static_cast<const T *>(call.cos), *sin = static_cast<const T *>(call.sin);
  const T *fused = reinterpret_cast<const T *>(buffers.fused);
  T *turned = reinterpret_cast<T *>(buffers.turned);
  plan.add(num_token_items(a.num_tokens), [=](int64_t item) {
    int64_t first = item * ITEM_TOKENS, last = std::min(first + ITEM_TOKENS, a.num_tokens), dim = a.head_dim;
    for (int64_t t = first; t < last; ++t) {
      const int64_t row = t * layer->query_key_value.num_columns, keys = row + a.num_heads * dim;
      turn(fused + row, turned + row, a.num_heads, layer->query, cos + t * dim, sin + t * dim, dim);
      turn(fused + keys, turned + keys, a.num_kv_heads, layer->key, cos + t * dim, sin + t * dim, dim);
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
  const int64_t key = a.num_heads * a.head_dim * layer.element_bytes();
  a.query = buffers.turned;
  a.key = buffers.turned + key;
  a.value = buffers.fused + key + a.num_kv_heads * a.head_dim * layer.element_bytes();
  a.out = buffers.attended;
  a.query_token_stride = a.key_token_stride = a.value_token_stride = layer.query_key_value.num_columns;
  a.query_head_stride = a.key_head_stride = a.value_head_stride = a.head_dim;
  return a;
}

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
    add_turns<bfloat16>(plan, &layer, call, attention, buffers);
  else
    add_turns<float>(plan, &layer, call, attention, buffers);
  add_attention(plan, layer.kind, attention, layer.is_bfloat16);
  multiply(layer.output, {buffers.attended, layer.output.depth}, x, buffers.between);
  multiply(layer.gate_up, normed(buffers.between, layer.mlp), nullptr, buffers.gate_up);
  multiply(layer.down, {buffers.gate_up, layer.gate_up.num_columns, Rows::SILU_MULTIPLY}, buffers.between, buffers.out);
}

} // namespace

// `between_layers` is called at the beginning of each layer, or later. Returns what `run_plan` returns.
extern "C" int tandem_decoder_layers(const Layer *layers, int64_t num_layers, const Call *call,
                                     void (*between_layers)()) {
  return run_plan(
      call->num_threads,
      [=](Plan &plan) {
        const int64_t num_tokens = call->attention->num_tokens;
        int64_t bytes = 0, total = 0;
        for (int64_t i = 0; i < num_layers; ++i) {
          bytes = std::max(bytes, Buffers::bytes(layers[i], num_tokens));
          total += Buffers::bytes(layers[i], num_tokens);
        }
        const bool has_repeats = has_short_items(*call->attention) && total <= REPEAT_BYTES;
        if (has_repeats) plan.allow_repeats();
        // Without repeats two layers take turns, as each reads what the one before it wrote.
        auto *memory = static_cast<char *>(scratch<Layer>(has_repeats ? bytes * num_layers : 2 * bytes));
        if (memory == nullptr) throw std::bad_alloc();
        const void *x = call->x;
        for (int64_t i = 0; i < num_layers; ++i) {
          Buffers buffers(memory + (has_repeats ? i : i % 2) * bytes, layers[i], num_tokens);
          if (i == num_layers - 1) buffers.out = static_cast<char *>(call->out);
          plan.stop();
          add_layer(plan, layers[i], *call, x, buffers);
          x = buffers.out;
        }
      },
      between_layers);
}
