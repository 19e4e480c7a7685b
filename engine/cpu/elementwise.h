// The small functions of one row between the big products: RMS norm, rotary embedding, SiLU times gate.
//
// In torch each takes five to ten kernel launches of a few microseconds; at batch 1 that is a third of a decode step.
// Values are rounded exactly where transformers' own code rounds them (norm: to bfloat16 before the weight).

#pragma once

#include "common.h"

namespace {

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

template <typename T> void rms_norm(const T *row, const T *weight, T *out, int64_t dim, float epsilon) {
  vfloat squares = splat(0.0f);
  for_lanes<T>(dim, [&](auto load, auto) {
    vfloat v = load(row);
    squares += v * v;
  });
  float sum = 0.0f;
  for (int i = 0; i < LANES; ++i) sum += squares[i];
  float inverse = 1.0f / std::sqrt(sum / static_cast<float>(dim) + epsilon);
  for_lanes<T>(dim, [&](auto load, auto store) { store(out, load(weight) * round_to<T>(load(row) * inverse)); });
}

// head * cos + rotate_half(head) * sin, also in place. Products are rounded before the sum, as in torch.
template <typename T> void rotate(const T *head, T *out, const T *cos, const T *sin, int64_t dim) {
  int64_t half = dim / 2;
  for_lanes<T>(half, [&](auto load, auto store) {
    vfloat a = load(head), b = load(head + half);
    store(out, round_to<T>(a * load(cos)) + round_to<T>(-b * load(sin)));
    store(out + half, round_to<T>(b * load(cos + half)) + round_to<T>(a * load(sin + half)));
  });
}

// silu(gate) * up, with silu rounded before the product.
template <typename T> void silu_multiply(const T *gate, const T *up, T *out, int64_t dim) {
  for_lanes<T>(dim, [&](auto load, auto store) {
    vfloat v = load(gate);
    vfloat e = exp_nonpositive(v < 0.0f ? v : -v);
    vfloat sigmoid = (v < 0.0f ? e : splat(1.0f)) / (1.0f + e);
    store(out, round_to<T>(v * sigmoid) * load(up));
  });
}

} // namespace
