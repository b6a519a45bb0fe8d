// bf16 attention and float32 logits on AMX tiles (16 x 16 float32 += 16 x 32 bf16 times 32 x 16).
//
// Scores are computed transposed, S^T = K Q^T: K rows load straight from the cache, Q is packed into pairs once per item,
// and the softmax has one query row per vector lane. For O += P V the rows of V are interleaved into pairs once per key
// block, and P goes in as two bf16 terms (p = high + low), so probabilities keep 16 bits and outputs float32's accuracy.
// A tile element depends on its own row and column only, so decodes, chunks and any tile height give the same bits.
#pragma once
#include "attention.h"

namespace {

constexpr int kPairs = 16;   // pairs of bf16 in one tile row: 32 elements
constexpr int kColumns = 16;
constexpr int kHalf = 32;    // keys that one tile product sums over

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

constexpr TileConfig full_tiles() {
  TileConfig config;
  for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
  return config;
}

// All eight tiles full. Set anew for every item: other libraries of the process (oneDNN) configure tiles too. The table is
// a constant because the intrinsic does not tell the compiler that it reads all of it.
inline void configure_tiles() {
  static constexpr TileConfig config = full_tiles();
  _tile_loadconfig(&config);
}

// The 16 x 16 transpose; `to` may be `from`.
inline void transpose(const Vec* from, Vec* to) {
  Vec a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = from[i];
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      a[i + 2 * j] = _mm512_shuffle_ps(b[i + j], b[i + 2 + j], 0x44);
      a[i + 2 * j + 1] = _mm512_shuffle_ps(b[i + j], b[i + 2 + j], 0xee);
    }
  for (int i = 0; i < 4; i++) {
    b[i] = _mm512_shuffle_f32x4(a[i], a[4 + i], 0x88);
    b[4 + i] = _mm512_shuffle_f32x4(a[i], a[4 + i], 0xdd);
    b[8 + i] = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0x88);
    b[12 + i] = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    to[i] = _mm512_shuffle_f32x4(b[i], b[8 + i], 0x88);
    to[8 + i] = _mm512_shuffle_f32x4(b[i], b[8 + i], 0xdd);
    to[4 + i] = _mm512_shuffle_f32x4(b[4 + i], b[12 + i], 0x88);
    to[12 + i] = _mm512_shuffle_f32x4(b[4 + i], b[12 + i], 0xdd);
  }
}

// The same of rows that lie `pitch` floats apart.
inline void transpose(const float* from, int pitch, Vec* to) {
  Vec rows[16];
  for (int i = 0; i < 16; i++) rows[i] = load(from + i * pitch);
  transpose(rows, to);
}

// The item's q rows as [head_dim padded to 32 / 2][columns] pairs; columns past its rows repeat the last one and are
// not read.
template <int columns>
inline void pack_queries(const Attention& a, const Item& item, int pairs, uint32_t* to) {
  for (int c = 0; c < columns; c++) {
    const bf16* row = query<bf16>(a, item, least(c, item.rows - 1));
    uint32_t* column = to + c;
    for (int u = 0; u < a.head_dim / 2; u++) std::memcpy(column + u * columns, row + 2 * u, 4);
    for (int u = a.head_dim / 2; u < pairs; u++) column[u * columns] = 0;
  }
}

// The same of the 16 rows from `first` on: pairs are transposed 16 at a time.
inline void pack_tile(const Attention& a, const Item& item, int first, int pairs, uint32_t* to) {
  const bf16* row[kColumns];
  for (int c = 0; c < kColumns; c++) row[c] = query<bf16>(a, item, least(first + c, item.rows - 1));
  for (int u = 0; u < pairs; u += kPairs) {
    const int left = a.head_dim / 2 - u;
    const __mmask16 mask = left >= kPairs ? 0xffff : (1u << most(left, 0)) - 1;
    Vec x[kColumns];
    for (int c = 0; c < kColumns; c++) x[c] = _mm512_maskz_loadu_ps(mask, row[c] + 2 * u);
    transpose(x, x);
    for (int i = 0; i < kPairs; i++) store(reinterpret_cast<float*>(to + (u + i) * kColumns), x[i]);
  }
}

// V rows of keys [first, first + 32) as [head_dim padded to 32 / 16 tiles][16 key pairs][16] pairs; keys out of [begin, end)
// are 0.
// Within each 32 columns, columns 0-3, 8-11, 16-19, 24-27 come first: what unpacking within 128 bits leaves.
inline void pack_values(const KeyRows<bf16>& v, int first, int begin, int end, int dim, int padded, uint32_t* to) {
  for (int d = 0; d < padded; d += 32) {
    const __mmask32 mask = dim - d >= 32 ? ~0u : (1u << (dim - d)) - 1;
    uint32_t* low = to + (d / 16) * kPairs * kColumns;
    uint32_t* high = low + kPairs * kColumns;
    for (int pair = 0; pair < kPairs; pair++) {
      const int j = first + 2 * pair;
      const __m512i a = j >= begin && j < end ? _mm512_maskz_loadu_epi16(mask, v.row(j) + d) : _mm512_setzero_si512();
      const __m512i b =
          j + 1 >= begin && j + 1 < end ? _mm512_maskz_loadu_epi16(mask, v.row(j + 1) + d) : _mm512_setzero_si512();
      _mm512_store_si512(low + pair * kColumns, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(high + pair * kColumns, _mm512_unpackhi_epi16(a, b));
    }
  }
}

// Accumulator columns of one 32-column group back into order.
inline void unpermute(const float* low, const float* high, float* to) {
  const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i second = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
  const Vec a = load(low), b = load(high);
  store(to, _mm512_permutex2var_ps(a, first, b));
  store(to + 16, _mm512_permutex2var_ps(a, second, b));
}

// 32 probabilities as the sum of two bf16 terms.
inline void split_row(Vec first, Vec second, bf16* high, bf16* low) {
  const __m512i bits = (__m512i)_mm512_cvtne2ps_pbh(second, first);
  const Vec a = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(bits)), 16));
  const Vec b = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(bits, 1)), 16));
  _mm512_store_si512(high, bits);
  _mm512_store_si512(low, (__m512i)_mm512_cvtne2ps_pbh(sub(second, b), sub(first, a)));
}

// Probabilities s [kHalf keys][pitch] of 16 query rows as two row-major [16][32] bf16 terms.
inline void split_probabilities(const float* s, int pitch, bf16* high, bf16* low) {
  Vec first[16], second[16];
  transpose(s, pitch, first);
  transpose(s + kHalf / 2 * pitch, pitch, second);
  for (int r = 0; r < kColumns; r++) split_row(first[r], second[r], high + r * kHalf, low + r * kHalf);
}

// sums[16 rows][16 * N columns from d on] += P V over the block. Each product waits for the one before it on the same
// accumulator, so N of them alternate.
template <int N, int kValueTiles = kMaxHeadDim / 16 * kPairs * kColumns>
inline void add_values(const bf16* const* terms, const uint32_t (*values)[kValueTiles], int halves, int d, int padded,
                       float* sums) {
  const int64_t pitch = padded * sizeof(float);
  sums += d;
  _tile_loadd(0, sums, pitch);
  _tile_loadd(1, sums + 16, pitch);
  if (N == 4) {
    _tile_loadd(2, sums + 32, pitch);
    _tile_loadd(3, sums + 48, pitch);
  }
  for (int half = 0; half < halves; half++) {
    const uint32_t* value = values[half] + d / 16 * kPairs * kColumns;
    constexpr int kTile = kPairs * kColumns;
    _tile_loadd(4, terms[2 * half], 64);
    _tile_loadd(5, terms[2 * half + 1], 64);
    _tile_loadd(6, value, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, value + kTile, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(0, 5, 6);
    _tile_dpbf16ps(1, 5, 7);
    if (N == 4) {
      _tile_loadd(6, value + 2 * kTile, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, value + 3 * kTile, 64);
      _tile_dpbf16ps(3, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, pitch);
  _tile_stored(1, sums + 16, pitch);
  if (N == 4) {
    _tile_stored(2, sums + 32, pitch);
    _tile_stored(3, sums + 48, pitch);
  }
}

// One split's state of the item's rows; o [rows][padded].
inline void save_partial(const Attention& a, const Item& item, int split, int padded, const float* o, const float* m,
                         const float* l) {
  for (int r = 0; r < item.rows; r++) {
    float* part = item.partial +
                  (int64_t(split - item.split_begin) * item.rows + r) * (kPartialHeader + a.head_dim);
    alignas(64) float row[kMaxHeadDim];
    for (int d = 0; d < padded; d += 32) unpermute(o + r * padded + d, o + r * padded + d + 16, row + d);
    part[0] = m[r];
    part[1] = l[r];
    std::memcpy(part + kPartialHeader, row, a.head_dim * sizeof(float));
  }
}
inline void write_rows(const Attention& a, const Item& item, int padded, const float* o, const float* m,
                       const float* l) {
  for (int r = 0; r < item.rows; r++) {
    alignas(64) float row[kMaxHeadDim];
    for (int d = 0; d < padded; d += 32) unpermute(o + r * padded + d, o + r * padded + d + 16, row + d);
    write_row<bf16>(a, item, r, row, m[r], l[r]);
  }
}

// One item; NQ tiles of 16 query rows. Accumulators are [rows][padded head_dim], columns as pack_values leaves them.
template <int NQ>
void tile_rows(const Attention& a, const Item& item, const Item* next) {
  constexpr int kRows = NQ * kColumns;
  alignas(64) uint32_t q[NQ * kMaxHeadDim / 2 * kColumns], values[2][kMaxHeadDim / 16 * kPairs * kColumns];
  alignas(64) float o[kRows * kMaxHeadDim], total[kRows * kMaxHeadDim];
  alignas(64) bf16 k_scratch[kKeyBlock * kMaxHeadDim], v_scratch[kKeyBlock * kMaxHeadDim];
  alignas(64) bf16 high[2][NQ][kColumns * kHalf], low[2][NQ][kColumns * kHalf];
  alignas(64) float take[kRows];
  Tile<NQ> tile;
  const int rows = item.rows, dim = a.head_dim, padded = (dim + 31) / 32 * 32, pairs = padded / 2;
  const Logits logits(a);
  tile.see(a, item);
  for (int t = 0; t < NQ; t++) pack_tile(a, item, t * kColumns, pairs, q + t * pairs * kColumns);
  const Visible first = visible(a, item, 0), last = visible(a, item, rows - 1);
  const bool one_split = item.split_end - item.split_begin == 1;
  if (!one_split) std::memset(total, 0, rows * padded * sizeof(float));
  configure_tiles();
  for (int split = item.split_begin; split < item.split_end; split++) {
    const Visible keys = split_keys({first.begin, last.end}, split);
    tile.start_split();
    std::memset(o, 0, kRows * padded * sizeof(float));
    for (int block = keys.begin / kKeyBlock; block * kKeyBlock < keys.end; block++) {
      const int base = block * kKeyBlock;
      const int begin = most(0, keys.begin - base), end = least(kKeyBlock, keys.end - base);
      const KeyRows<bf16> k = locate<bf16>(a, item, a.k, block, begin, end, k_scratch, padded, padded != dim);
      const KeyRows<bf16> v = locate<bf16>(a, item, a.v, block, begin, end, v_scratch, dim, false);
      Lookahead<bf16> ahead(a, item, block, next);
      const int share = ahead.share(kGroups * (pairs / kPairs) + 2);
      for (int g = 0; g < kGroups; g++) {
        float* s = tile.s[g * kGroup];
        if (g * kGroup >= end) break;
        if ((g + 1) * kGroup <= begin) {
          std::memset(s, 0, kGroup * kRows * sizeof(float));
          continue;
        }
        _tile_zero(0);
        if (NQ > 1) _tile_zero(1);
        for (int u = 0; u < pairs; u += kPairs) {
          _tile_loadd(2, k.base[g] + 2 * u, k.stride * sizeof(bf16));
          _tile_loadd(3, q + u * kColumns, 64);
          _tile_dpbf16ps(0, 2, 3);
          if (NQ > 1) {
            _tile_loadd(4, q + (pairs + u) * kColumns, 64);
            _tile_dpbf16ps(1, 2, 4);
          }
          ahead.ask(share);
        }
        _tile_stored(0, s, kRows * sizeof(float));
        if (NQ > 1) _tile_stored(1, s + kColumns, kRows * sizeof(float));
      }
      // A row past `end` of the last group may be NaN in the cache: masked, as is what no row sees.
      const int used = (end + kGroup - 1) / kGroup * kGroup;
      const bool same = tile.step(logits, block, used, base + used > first.end || base < last.begin);
      if (!same)
        for (int r = 0; r < rows; r++) {
          const Vec keep = set1(tile.keep[r]);
          for (int d = 0; d < padded; d += W) store(o + r * padded + d, mul(load(o + r * padded + d), keep));
        }
      const int halves = used > kHalf ? 2 : 1;
      for (int half = 0; half < halves; half++) {
        ahead.ask(share);
        pack_values(v, half * kHalf, begin, end, dim, padded, values[half]);
        for (int n = 0; n < NQ; n++)
          split_probabilities(tile.s[half * kHalf] + n * kColumns, kRows, high[half][n], low[half][n]);
      }
      for (int n = 0; n < NQ; n++) {
        const bf16* terms[4] = {high[0][n], low[0][n], high[1][n], low[1][n]};
        float* sums = o + n * kColumns * padded;
        int d = 0;
        for (; d + 64 <= padded; d += 64) add_values<4>(terms, values, halves, d, padded, sums);
        if (d < padded) add_values<2>(terms, values, halves, d, padded, sums);
      }
    }
    if (item.partial != nullptr) {
      save_partial(a, item, split, padded, o, tile.m, tile.l);
      continue;
    }
    tile.merge(take);
    if (!one_split)
      for (int r = 0; r < rows; r++)
        for (int d = 0; d < padded; d += W) {
          float* sum = total + r * padded + d;
          store(sum, fma(load(o + r * padded + d), set1(take[r]), mul(load(sum), set1(tile.keep[r]))));
        }
  }
  _tile_release();
  if (item.partial != nullptr) return;
  write_rows(a, item, padded, one_split ? o : total, tile.total_m, tile.total_l);
}

// 32 weight rows (2 tiles) x 32 rows of x (2 tiles) at a time; every weight row is read from memory once.
void linear(const Linear* a, int begin, int end) {
  const int pairs = (a->depth / 2 + 15) / 16 * 16, whole = a->depth / 32 * 16;
  configure_tiles();
  alignas(64) float c[4][kColumns * kColumns];
  alignas(64) bf16 tail[2][kColumns * 32];
  const int x_tiles = (a->rows + kColumns - 1) / kColumns;
  for (int n = begin; n < end; n += 32) {
    const bool two_n = n + 16 < end;
    const bf16* weight = reinterpret_cast<const bf16*>(a->weight) + n * a->weight_row;
    if (whole < pairs)
      for (int t = 0; t < 1 + two_n; t++)
        for (int r = 0; r < kColumns; r++) {
          std::memset(static_cast<void*>(tail[t] + r * 32), 0, 64);
          std::memcpy(tail[t] + r * 32, weight + (t * 16 + r) * a->weight_row + 2 * whole,
                      (a->depth - 2 * whole) * sizeof(bf16));
        }
    for (int x = 0; x < x_tiles; x += 2) {
      const bool two_x = x + 1 < x_tiles;
      const uint32_t* packed = a->packed + int64_t(x) * pairs * kColumns;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int u = 0; u < pairs; u += kPairs) {
        const bool inside = u < whole;
        const int64_t stride = inside ? a->weight_row * int64_t(sizeof(bf16)) : 64;
        _tile_loadd(4, inside ? weight + 2 * u : tail[0], stride);
        _tile_loadd(6, packed + u * kColumns, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (two_n) {
          _tile_loadd(5, inside ? weight + 16 * a->weight_row + 2 * u : tail[1], stride);
          _tile_dpbf16ps(1, 5, 6);
        }
        if (two_x) {
          _tile_loadd(7, packed + (pairs + u) * kColumns, 64);
          _tile_dpbf16ps(2, 4, 7);
          if (two_n) _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, c[0], 64);
      _tile_stored(1, c[1], 64);
      _tile_stored(2, c[2], 64);
      _tile_stored(3, c[3], 64);
      for (int i = 0; i < 4; i++) {
        const int first_n = n + (i & 1) * 16, first_x = (x + i / 2) * kColumns;
        if (first_n >= end || first_x >= a->rows) continue;
        Vec row[kColumns];
        transpose(c[i], kColumns, row);
        for (int r = first_x; r < least(a->rows, first_x + kColumns); r++)
          store(a->out + r * a->out_row + first_n, row[r - first_x]);
      }
    }
  }
  _tile_release();
}
#define CB_LINEAR linear

}  // namespace
