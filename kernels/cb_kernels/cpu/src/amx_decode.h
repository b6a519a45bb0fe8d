// bf16 attention of one token on AMX tiles: the up to 8 query heads of a KV head as narrow tiles.
//
// A full tile has 16 query columns, of which a decode would waste most, and with them the exponentials. Here scores lie
// packed as [key][L] with L = 4 or 8 columns, a vector holds 16 / L keys, and every sum keeps the order of `Tile::step`:
// the bits are those that the same row gets in a chunk.
#pragma once
#include "amx.h"

namespace {

template <int L>
struct Decode {
  static constexpr int kVectors = kKeyBlock * L / W;
  alignas(64) float s[kKeyBlock * L + W];
  alignas(64) float keep[W];
  Vec m = set1(kNothing), l = zero();  // lane i: query row i % L

  static Vec halves(Vec x) { return _mm512_shuffle_f32x4(x, x, 0x4e); }    // lane + 8
  static Vec quarters(Vec x) { return _mm512_shuffle_f32x4(x, x, 0xb1); }  // lane + 4
  static Vec max_rows(Vec x) {
    x = vmax(x, halves(x));
    return L == 8 ? x : vmax(x, quarters(x));
  }
  static Vec sum_rows(Vec x) {
    x = add(x, halves(x));
    return L == 8 ? x : add(x, quarters(x));
  }

  // As `Tile::step`; keys out of [begin, end) are not seen, `used` of the block were computed.
  bool step(const Logits& logits, int begin, int end, int used) {
    const int vectors = used * L / W;
    for (int i = 0; i < vectors; i++) store(s + i * W, logits(load(s + i * W)));
    for (int i = 0; i < begin * L; i++) s[i] = CB_MINUS_INFINITY;
    for (int i = end * L; i < used * L; i++) s[i] = CB_MINUS_INFINITY;
    Vec top = set1(CB_MINUS_INFINITY), p[kVectors];
    for (int i = 0; i < vectors; i++) top = vmax(load(s + i * W), top);
    const Vec max = vmax(m, max_rows(top)), scale = vexp2(sub(m, max));
    for (int i = 0; i < kVectors; i++) {
      p[i] = i < vectors ? vexp2(sub(load(s + i * W), max)) : zero();
      store(s + i * W, p[i]);
    }
    l = fma(l, scale, sum_rows(fold(p, kVectors)));
    m = max;
    store(keep, scale);
    return all_equal(scale, set1(1.f));
  }
  // Probabilities of keys [16 g, 16 g + 16): one vector per query row.
  void rows_of(int g, Vec* to) const {
    const float* from = s + g * kGroup * L;
    if (L == 8) {
      Vec all[kGroup];
      transpose(from, L, all);
      for (int r = 0; r < L; r++) to[r] = all[r];
      return;
    }
    const __m512i even = _mm512_set_epi32(29, 25, 21, 17, 13, 9, 5, 1, 28, 24, 20, 16, 12, 8, 4, 0);
    const __m512i odd = _mm512_set_epi32(31, 27, 23, 19, 15, 11, 7, 3, 30, 26, 22, 18, 14, 10, 6, 2);
    const Vec v0 = load(from), v1 = load(from + W), v2 = load(from + 2 * W), v3 = load(from + 3 * W);
    const Vec a = _mm512_permutex2var_ps(v0, even, v1), b = _mm512_permutex2var_ps(v2, even, v3);
    const Vec c = _mm512_permutex2var_ps(v0, odd, v1), d = _mm512_permutex2var_ps(v2, odd, v3);
    to[0] = _mm512_shuffle_f32x4(a, b, 0x44);
    to[1] = _mm512_shuffle_f32x4(a, b, 0xee);
    to[2] = _mm512_shuffle_f32x4(c, d, 0x44);
    to[3] = _mm512_shuffle_f32x4(c, d, 0xee);
  }
};

// Tiles 0 scores and 1 queries, L columns wide; 2 and 5 keys and values, full; 3 and 4 probabilities and 6 and 7
// accumulators, L rows high.
constexpr TileConfig decode_tiles(int columns) {
  TileConfig config;
  for (int i = 0; i < 8; i++) {
    config.bytes[i] = uint16_t(i < 2 ? 4 * columns : 64);
    config.rows[i] = uint8_t(i < 3 || i == 5 ? 16 : columns);
  }
  return config;
}
template <int L>
inline void configure_decode_tiles() {
  static constexpr TileConfig config = decode_tiles(L);
  _tile_loadconfig(&config);
}

template <int L>
void decode_rows(const Attention& a, const Item& item, const Item* next) {
  alignas(64) uint32_t q[kMaxHeadDim / 2 * L], values[2][kMaxHeadDim / 16 * kPairs * kColumns];
  alignas(64) float o[L * kMaxHeadDim], total[L * kMaxHeadDim];
  alignas(64) bf16 k_scratch[kKeyBlock * kMaxHeadDim], v_scratch[kKeyBlock * kMaxHeadDim];
  alignas(64) bf16 high[2][L * kHalf], low[2][L * kHalf];
  alignas(64) float total_m[W], total_l[W], m[W], l[W];
  const int dim = a.head_dim, padded = (dim + 31) / 32 * 32, pairs = padded / 2;
  const Logits logits(a);
  const Visible all = visible(a, item, 0);
  pack_queries<L>(a, item, pairs, q);
  std::memset(total, 0, L * padded * sizeof(float));
  store(total_m, set1(kNothing));
  store(total_l, zero());
  configure_decode_tiles<L>();
  for (int split = item.split_begin; split < item.split_end; split++) {
    const Visible keys = split_keys(all, split);
    Decode<L> state;
    std::memset(o, 0, L * padded * sizeof(float));
    for (int block = keys.begin / kKeyBlock; block * kKeyBlock < keys.end; block++) {
      const int base = block * kKeyBlock;
      const int begin = most(0, keys.begin - base), end = least(kKeyBlock, keys.end - base);
      const KeyRows<bf16> k = locate<bf16>(a, item, a.k, block, begin, end, k_scratch, padded, padded != dim);
      const KeyRows<bf16> v = locate<bf16>(a, item, a.v, block, begin, end, v_scratch, dim, false);
      Lookahead<bf16> ahead(a, item, block, next);
      const int share = ahead.share(kKeyBlock / kGroup * (pairs / kPairs) + 4 + padded / 32 * 2);
      for (int g = 0; g * kGroup < end; g++) {
        if ((g + 1) * kGroup <= begin) continue;  // `step` fills what no row sees
        _tile_zero(0);
        for (int u = 0; u < pairs; u += kPairs) {
          _tile_loadd(2, k.base[g] + 2 * u, k.stride * sizeof(bf16));
          _tile_loadd(1, q + u * L, 4 * L);
          _tile_dpbf16ps(0, 2, 1);
          ahead.ask(share);
        }
        _tile_stored(0, state.s + g * kGroup * L, 4 * L);
      }
      const int used = (end + kGroup - 1) / kGroup * kGroup;
      if (!state.step(logits, begin, end, used))
        for (int r = 0; r < L; r++)
          for (int d = 0; d < padded; d += W)
            store(o + r * padded + d, mul(load(o + r * padded + d), set1(state.keep[r])));
      const int halves = used > kHalf ? 2 : 1;
      for (int half = 0; half < halves; half++) {
        ahead.ask(share);
        pack_values(v, half * kHalf, begin, end, dim, padded, values[half]);
        Vec first[L], second[L];
        ahead.ask(share);
        state.rows_of(2 * half, first);
        state.rows_of(2 * half + 1, second);
        for (int r = 0; r < L; r++) split_row(first[r], second[r], high[half] + r * kHalf, low[half] + r * kHalf);
      }
      for (int d = 0; d < padded; d += 32) {
        _tile_loadd(6, o + d, padded * sizeof(float));
        _tile_loadd(7, o + d + 16, padded * sizeof(float));
        for (int half = 0; half < halves; half++) {
          const uint32_t* value = values[half] + d / 16 * kPairs * kColumns;
          _tile_loadd(3, high[half], 64);
          _tile_loadd(4, low[half], 64);
          _tile_loadd(2, value, 64);
          _tile_loadd(5, value + kPairs * kColumns, 64);
          _tile_dpbf16ps(6, 3, 2);
          _tile_dpbf16ps(7, 3, 5);
          _tile_dpbf16ps(6, 4, 2);
          _tile_dpbf16ps(7, 4, 5);
          ahead.ask(share);
        }
        _tile_stored(6, o + d, padded * sizeof(float));
        _tile_stored(7, o + d + 16, padded * sizeof(float));
      }
    }
    store(m, state.m);
    store(l, state.l);
    if (item.partial != nullptr) {
      save_partial(a, item, split, padded, o, m, l);
      continue;
    }
    const Merge merge(load(total_m), state.m);
    store(total_l, merge(load(total_l), state.l));
    store(total_m, merge.max);
    store(m, merge.keep);
    store(l, merge.take);
    for (int r = 0; r < item.rows; r++)
      for (int d = 0; d < padded; d += W) {
        float* sum = total + r * padded + d;
        store(sum, fma(load(o + r * padded + d), set1(l[r]), mul(load(sum), set1(m[r]))));
      }
  }
  _tile_release();
  if (item.partial == nullptr) write_rows(a, item, padded, total, total_m, total_l);
}

inline void attend_tiles(const Attention& a, const Item& item, const Item* next) {
  const int group = group_size(a);
  const bool one_token = item.row / group == (item.row + item.rows - 1) / group;
  if (one_token && item.rows <= 4) decode_rows<4>(a, item, next);
  else if (one_token && item.rows <= 8) decode_rows<8>(a, item, next);
  else if (item.rows <= kColumns) tile_rows<1>(a, item, next);
  else tile_rows<2>(a, item, next);
}

}  // namespace
