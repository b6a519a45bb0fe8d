// Dot products of query rows with keys, in two shapes that give the same bits.
//
// A dot product's canonical order: W lanes, lane l adds the products of units l, l + W, l + 2W ... in order; then the
// lanes are summed by halving. A unit is one element (products and sums in float32), or a pair of bf16 where the CPU has
// VDPBF16PS. `by_key` keeps the lanes in a vector's lanes (few rows), `by_query` keeps one query row per vector lane and
// the W partial sums in time (many rows).
#pragma once
#include "softmax.h"

namespace {

// Units of one element; keys are read as T or, in `by_query`, from a float32 copy of the block.
template <typename T>
struct Elements {
  using Key = float;  // by_query
  using Unit = float;
  static constexpr int kSize = 1;
  static Vec multiply_add(Vec q, Vec k, Vec sum) { return fma(q, k, sum); }
  static Vec load_query(const Unit* q, int count) { return load_up_to(q, count); }
  static Vec load_key(const T* k, int count) { return load_up_to(k, count); }
  static Vec load_units(const Unit* q) { return load(q); }
  static Vec broadcast(const Key* k, int unit) { return set1(k[unit]); }
  static void convert(const T* q, Unit* units, int head_dim) {
    for (int d = 0; d < head_dim; d++) units[d] = to_float(q[d]);
  }
};

#if defined(__AVX512BF16__)
struct Pairs {
  using Key = bf16;
  using Unit = uint32_t;
  static constexpr int kSize = 2;
  static __m512bh as_pairs(Vec x) { return (__m512bh)_mm512_castps_si512(x); }
  static Vec multiply_add(Vec q, Vec k, Vec sum) { return _mm512_dpbf16_ps(sum, as_pairs(q), as_pairs(k)); }
  static Vec load_key(const bf16* k, int count) {  // count elements from here on
    return count >= 2 * W ? _mm512_castsi512_ps(_mm512_loadu_si512(k))
                          : _mm512_castsi512_ps(_mm512_maskz_loadu_epi32(__mmask16((1u << (count / 2)) - 1), k));
  }
  static Vec load_query(const Unit* q, int count) {
    return load_key(reinterpret_cast<const bf16*>(q), count);
  }
  static Vec load_units(const Unit* q) { return _mm512_castsi512_ps(_mm512_loadu_si512(q)); }
  static Vec broadcast(const Key* k, int unit) {
    uint32_t pair;
    std::memcpy(&pair, k + 2 * unit, 4);
    return _mm512_castsi512_ps(_mm512_set1_epi32(int32_t(pair)));
  }
  static void convert(const bf16* q, Unit* units, int head_dim) { std::memcpy(units, q, head_dim * sizeof(bf16)); }
};
#endif

// s[r][kKeyBlock] for rows r < R and the W keys from key `first` on. q: [R][pitch] units.
template <class Dot, int R, typename T>
inline void by_key(const typename Dot::Unit* q, int pitch, const KeyRows<T>& keys, int first, int head_dim, float* s) {
  constexpr int K = 4, kStep = W * Dot::kSize;
  Vec lanes[R][W];
  for (int j = 0; j < W; j += K) {
    Vec sums[K][R];
    const T* k[K];
    for (int i = 0; i < K; i++) {
      k[i] = keys.row(first + j + i);
      for (int r = 0; r < R; r++) sums[i][r] = zero();
    }
    for (int d = 0; d < head_dim; d += kStep) {
      Vec key[K];
      for (int i = 0; i < K; i++) key[i] = Dot::load_key(k[i] + d, head_dim - d);
      for (int r = 0; r < R; r++) {
        const Vec query = Dot::load_query(q + r * pitch + d / Dot::kSize, head_dim - d);
        for (int i = 0; i < K; i++) sums[i][r] = Dot::multiply_add(query, key[i], sums[i][r]);
      }
    }
    for (int i = 0; i < K; i++)
      for (int r = 0; r < R; r++) lanes[r][j + i] = sums[i][r];
  }
  for (int r = 0; r < R; r++) store(s + r * kKeyBlock + first, sum_each(lanes[r]));
}

// s[4][NQ * W] for four keys from k on. q: [units][NQ * W].
template <class Dot, int NQ>
inline void by_query(const typename Dot::Unit* q, const typename Dot::Key* k, int64_t stride, int units, float* s) {
  constexpr int K = 4, kRows = NQ * W, kHalf = W / 2;
  Vec lanes[kHalf][K][NQ];
  for (int lane = 0; lane < kHalf; lane++) {
    Vec low[K][NQ], high[K][NQ];
    for (int i = 0; i < K; i++)
      for (int n = 0; n < NQ; n++) low[i][n] = high[i][n] = zero();
    for (int u = lane; u < units; u += W) {
      for (int n = 0; n < NQ; n++) {
        const Vec query = Dot::load_units(q + u * kRows + n * W);
        for (int i = 0; i < K; i++)
          low[i][n] = Dot::multiply_add(query, Dot::broadcast(k + i * stride, u), low[i][n]);
      }
      if (u + kHalf < units)
        for (int n = 0; n < NQ; n++) {
          const Vec query = Dot::load_units(q + (u + kHalf) * kRows + n * W);
          for (int i = 0; i < K; i++)
            high[i][n] = Dot::multiply_add(query, Dot::broadcast(k + i * stride, u + kHalf), high[i][n]);
        }
    }
    for (int i = 0; i < K; i++)
      for (int n = 0; n < NQ; n++) lanes[lane][i][n] = add(low[i][n], high[i][n]);
  }
  for (int half = kHalf / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; lane++)
      for (int i = 0; i < K; i++)
        for (int n = 0; n < NQ; n++) lanes[lane][i][n] = add(lanes[lane][i][n], lanes[lane + half][i][n]);
  for (int i = 0; i < K; i++)
    for (int n = 0; n < NQ; n++) store(s + i * kRows + n * W, lanes[0][i][n]);
}

}  // namespace
