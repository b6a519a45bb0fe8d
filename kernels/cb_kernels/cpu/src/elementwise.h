// Normalization, rotary embedding with the KV write, and gated activation.
//
// bf16 results are rounded where the torch modules round (after the norm and after its weight, after each rotary product,
// after silu), so that a model with these is the same model.
#pragma once
#include "abi.h"
#include "simd.h"

namespace {

inline Vec rounded(Vec x, const float*) { return x; }
inline Vec rounded(Vec x, const bf16*) { return rounded_to_bf16(x); }

template <typename T>
void rms_norm_rows(const RmsNorm& n, int begin, int end) {
  const T* type = nullptr;
  for (int row = begin; row < end; row++) {
    const T* x = static_cast<const T*>(n.x) + row * n.x_row;
    const T* weight = static_cast<const T*>(n.weight);
    T* out = static_cast<T*>(n.out) + row * n.out_row;
    if (n.residual != nullptr) {
      T* residual = static_cast<T*>(n.residual) + row * n.residual_row;
      for (int i = 0; i < n.size; i += W) {
        const int left = n.size - i;
        store_up_to(residual + i, add(load_up_to(x + i, left), load_up_to(residual + i, left)), left);
      }
      x = residual;
    }
    Vec squares[4] = {zero(), zero(), zero(), zero()};
    for (int i = 0; i < n.size; i += W) {
      const Vec v = load_up_to(x + i, n.size - i);
      Vec& s = squares[i / W % 4];
      s = fma(v, v, s);
    }
    const float mean = sum(add(add(squares[0], squares[1]), add(squares[2], squares[3]))) / n.size;
    const Vec factor = set1(1.f / __builtin_sqrtf(mean + n.eps));
    for (int i = 0; i < n.size; i += W) {
      const int left = n.size - i;
      const Vec y = rounded(mul(load_up_to(x + i, left), factor), type);
      store_up_to(out + i, mul(y, load_up_to(weight + i, left)), left);
    }
  }
}

// gate / (1 + e^-gate)
inline Vec silu(Vec gate, const float*) { return div(gate, add(set1(1.f), vexp(sub(zero(), gate)))); }
inline Vec silu(Vec gate, const bf16*) {  // the rounding to bf16 hides the cheaper functions' 1e-7
  const Vec power = mul(gate, set1(-kLog2e));
  const Vec exponential = vexp2(select_less(power, set1(126.f), power, set1(126.f)));
  return rounded_to_bf16(mul(gate, reciprocal(add(set1(1.f), exponential))));
}

template <typename T>
void silu_mul_rows(const SiluMul& n, int begin, int end) {
  const T* type = nullptr;
  for (int row = begin; row < end; row++) {
    const T* gate = static_cast<const T*>(n.x) + row * n.x_row;
    const T* up = gate + n.size;
    T* out = static_cast<T*>(n.out) + row * n.out_row;
    for (int i = 0; i < n.size; i += W) {
      const int left = n.size - i;
      const Vec g = load_up_to(gate + i, left);
      store_up_to(out + i, mul(silu(g, type), load_up_to(up + i, left)), left);
    }
  }
}

// x[head_dim] * cos + rotate_half(x) * sin, halves of 4 k elements
template <typename T>
inline void rotate(T* x, const T* cos, const T* sin, int head_dim) {
  const int half = head_dim / 2;
  int i = 0;
  for (; i + W <= half; i += W) {
    const T* type = nullptr;
    const Vec low = load(x + i), high = load(x + half + i);
    const Vec a = rounded(mul(low, load(cos + i)), type), b = rounded(mul(high, load(sin + i)), type);
    const Vec c = rounded(mul(high, load(cos + half + i)), type), d = rounded(mul(low, load(sin + half + i)), type);
    store(x + i, sub(a, b));
    store(x + half + i, add(c, d));
  }
  for (; i < half; i++) {
    const float low = to_float(x[i]), high = to_float(x[half + i]);
    T a, b, c, d;
    from_float(low * to_float(cos[i]), &a);
    from_float(high * to_float(sin[i]), &b);
    from_float(high * to_float(cos[half + i]), &c);
    from_float(low * to_float(sin[half + i]), &d);
    from_float(to_float(a) - to_float(b), x + i);
    from_float(to_float(c) + to_float(d), x + half + i);
  }
}

template <typename T>
void kv_write_tokens(const KvWrite& w, int begin, int end) {
  for (int token = begin; token < end; token++) {
    T* k = static_cast<T*>(w.k) + token * w.k_token;
    const T* v = static_cast<const T*>(w.v) + token * w.v_token;
    if (w.cos != nullptr) {
      const T* cos = static_cast<const T*>(w.cos) + token * w.cos_token;
      const T* sin = static_cast<const T*>(w.sin) + token * w.cos_token;
      T* q = static_cast<T*>(w.q) + token * w.q_token;
      for (int h = 0; h < w.num_heads; h++) rotate(q + h * w.q_head, cos, sin, w.head_dim);
      for (int h = 0; h < w.num_kv_heads; h++) rotate(k + h * w.k_head, cos, sin, w.head_dim);
    }
    if (w.slots == nullptr || w.slots[token] < 0) continue;
    const int64_t block = w.slots[token] / w.block_size, offset = w.slots[token] % w.block_size;
    const int64_t to = block * w.kv_block + offset * w.kv_token;
    for (int h = 0; h < w.num_kv_heads; h++) {
      std::memcpy(static_cast<T*>(w.k_cache) + to + h * w.kv_head, k + h * w.k_head, w.head_dim * sizeof(T));
      std::memcpy(static_cast<T*>(w.v_cache) + to + h * w.kv_head, v + h * w.v_head, w.head_dim * sizeof(T));
    }
  }
}

}  // namespace
