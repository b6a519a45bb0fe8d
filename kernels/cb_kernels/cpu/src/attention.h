// Attention of one work item with vectors: `few_rows` for the query heads of one token, `many_rows` for a tile.
#pragma once
#include "dot.h"

namespace {

constexpr int kFewRows = 8;

// Keys of one split that some row of the item sees.
inline Visible split_keys(const Visible& all, int split) {
  return {most(all.begin, split * kSplit), least(all.end, (split + 1) * kSplit)};
}

template <class Dot, int R, typename T>
void few_rows_step(const Logits& logits, const typename Dot::Unit* q, int pitch, const KeyRows<T>& k,
                   const KeyRows<T>& v, int begin, int end, int head_dim, float* m, float* l, float* o) {
  alignas(64) float s[R][kKeyBlock] = {};
  for (int first = 0; first < kKeyBlock; first += W)
    if (first < end && first + W > begin) by_key<Dot, R, T>(q, pitch, k, first, head_dim, s[0]);
  for (int r = 0; r < R; r++) {
    for (int i = 0; i < kKeyBlock; i += W) store(s[r] + i, logits(load(s[r] + i)));
    for (int j = 0; j < begin; j++) s[r][j] = CB_MINUS_INFINITY;
    for (int j = end; j < kKeyBlock; j++) s[r][j] = CB_MINUS_INFINITY;
    Vec x[kKeyBlock / W], top = set1(CB_MINUS_INFINITY);
    for (int i = 0; i < kKeyBlock / W; i++) top = vmax(x[i] = load(s[r] + i * W), top);
    const Vec old = set1(m[r]), max = vmax(old, set1(max_lane(top)));
    const Vec keep = vexp2(sub(old, max));
    for (int i = 0; i < kKeyBlock / W; i++) store(s[r] + i * W, x[i] = vexp2(sub(x[i], max)));
    alignas(64) float lane[W];
    store(lane, fma(set1(l[r]), keep, set1(sum(fold(x, kKeyBlock / W)))));
    l[r] = lane[0];
    store(lane, max);
    m[r] = lane[0];
    if (!all_equal(keep, set1(1.f)))
      for (int d = 0; d < head_dim; d += W) store(o + r * kMaxHeadDim + d, mul(load(o + r * kMaxHeadDim + d), keep));
  }
  constexpr int N = W == 16 ? 4 : 2;  // vectors of head_dim at a time
  for (int d = 0; d < head_dim; d += N * W) {
    Vec sums[R][N];
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) sums[r][n] = load(o + r * kMaxHeadDim + d + n * W);
    for (int j = begin; j < end; j++) {
      const T* row = v.row(j) + d;
      Vec value[N];
      for (int n = 0; n < N; n++)
        value[n] = d + n * W < head_dim ? load_up_to(row + n * W, head_dim - d - n * W) : zero();
      for (int r = 0; r < R; r++) {
        const Vec p = set1(s[r][j]);
        for (int n = 0; n < N; n++) sums[r][n] = fma(value[n], p, sums[r][n]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) store(o + r * kMaxHeadDim + d + n * W, sums[r][n]);
  }
}

template <class Dot, typename T>
void few_rows(const Attention& a, const Item& item, const Item* next) {
  constexpr int kPitch = kMaxHeadDim;
  alignas(64) typename Dot::Unit q[kFewRows][kPitch];
  alignas(64) float o[kFewRows][kMaxHeadDim], total[kFewRows][kMaxHeadDim];
  alignas(64) T k_scratch[kKeyBlock * kMaxHeadDim], v_scratch[kKeyBlock * kMaxHeadDim];
  float m[kFewRows], l[kFewRows], total_m[kFewRows], total_l[kFewRows];
  const int rows = item.rows, dim = a.head_dim;
  const Logits logits(a);
  const Visible all = visible(a, item, 0);
  for (int r = 0; r < rows; r++) {
    Dot::convert(query<T>(a, item, r), q[r], dim);
    total_m[r] = kNothing;
    total_l[r] = 0.f;
    std::memset(total[r], 0, sizeof total[r]);
  }
  for (int split = item.split_begin; split < item.split_end; split++) {
    const Visible keys = split_keys(all, split);
    for (int r = 0; r < rows; r++) {
      m[r] = kNothing;
      l[r] = 0.f;
      std::memset(o[r], 0, sizeof o[r]);
    }
    for (int block = keys.begin / kKeyBlock; block * kKeyBlock < keys.end; block++) {
      const int begin = most(0, keys.begin - block * kKeyBlock), end = least(kKeyBlock, keys.end - block * kKeyBlock);
      const KeyRows<T> k = locate<T>(a, item, a.k, block, begin, end, k_scratch, dim, false);
      const KeyRows<T> v = locate<T>(a, item, a.v, block, begin, end, v_scratch, dim, false);
      Lookahead<T> ahead(a, item, block, next);
      const int share = ahead.share((rows + 3) / 4);
      for (int r = 0; r < rows; r += 4) {
        ahead.ask(share);
#define CB_ROWS(R) few_rows_step<Dot, R, T>(logits, q[r], kPitch, k, v, begin, end, dim, m + r, l + r, o[r])
        switch (rows - r) {
          case 1: CB_ROWS(1); break;
          case 2: CB_ROWS(2); break;
          case 3: CB_ROWS(3); break;
          default: CB_ROWS(4);
        }
#undef CB_ROWS
      }
    }
    for (int r = 0; r < rows; r++) {
      if (item.partial != nullptr) {
        float* part = item.partial + (int64_t(split - item.split_begin) * rows + r) * (kPartialHeader + dim);
        part[0] = m[r];
        part[1] = l[r];
        std::memcpy(part + kPartialHeader, o[r], dim * sizeof(float));
        continue;
      }
      const Merge merge(set1(total_m[r]), set1(m[r]));
      alignas(64) float lane[W];
      store(lane, merge(set1(total_l[r]), set1(l[r])));
      total_l[r] = lane[0];
      store(lane, merge.max);
      total_m[r] = lane[0];
      for (int d = 0; d < dim; d += W) store(total[r] + d, merge(load(total[r] + d), load(o[r] + d)));
    }
  }
  if (item.partial == nullptr)
    for (int r = 0; r < rows; r++) write_row<T>(a, item, r, total[r], total_m[r], total_l[r]);
}

// A tile's softmax state with one query row per lane: everything is [.., kRows].
template <int NQ>
struct Tile {
  static constexpr int kRows = NQ * W;
  alignas(64) float begin[kRows], end[kRows];  // keys visible; exact up to 2^24
  alignas(64) float m[kRows], l[kRows], total_m[kRows], total_l[kRows];
  alignas(64) float s[kKeyBlock][kRows];
  alignas(64) float keep[kRows];

  void see(const Attention& a, const Item& item) {
    for (int r = 0; r < kRows; r++) {
      const Visible keys = visible(a, item, least(r, item.rows - 1));
      begin[r] = float(keys.begin);
      end[r] = float(keys.end);
      total_m[r] = kNothing;
      total_l[r] = 0.f;
    }
  }
  void start_split() {
    for (int r = 0; r < kRows; r++) m[r] = kNothing, l[r] = 0.f;
  }
  // s: dot products in, probabilities relative to the new maximum out; keep: what older sums are multiplied by, and
  // whether all of them are 1. used: keys of the block, a multiple of 4, after which all probabilities are 0.
  // masked: some row of the tile does not see some key of the block.
  bool step(const Logits& logits, int block, int used, bool masked) {
    if (!logits.scaled)
      for (int j = 0; j < used; j++)
        for (int n = 0; n < NQ; n++) store(s[j] + n * W, logits(load(s[j] + n * W)));
    if (masked) mask(block, used);
    const Vec factor = logits.scaled ? logits.factor : set1(1.f);
    constexpr int kHalfBlock = kKeyBlock / 2;
    bool same = true;
    for (int n = 0; n < NQ; n++) {
      float* column = s[0] + n * W;
      const Vec lowest = set1(CB_MINUS_INFINITY);
      Vec top[4] = {lowest, lowest, lowest, lowest}, sums[kHalfBlock];
      for (int j = 0; j < used; j += 4)
        for (int i = 0; i < 4; i++) top[i] = vmax(load(column + (j + i) * kRows), top[i]);
      // The largest product is the product of the largest: rounding keeps the order, and the factor is positive.
      const Vec old = load(m + n * W), highest = mul(vmax(vmax(top[0], top[1]), vmax(top[2], top[3])), factor);
      const Vec max = vmax(old, highest), scale = vexp2(sub(old, max));
      for (int j = 0; j < kHalfBlock; j++) {  // `sums` start the halving order: key j + key j + kHalfBlock
        sums[j] = zero();
        for (int i = j; i < kKeyBlock; i += kHalfBlock) {
          const Vec p = i < used ? vexp2(sub(mul(load(column + i * kRows), factor), max)) : zero();
          store(column + i * kRows, p);
          sums[j] = add(sums[j], p);
        }
      }
      store(l + n * W, fma(load(l + n * W), scale, fold(sums, kHalfBlock)));
      store(m + n * W, max);
      store(keep + n * W, scale);
      same = same && all_equal(scale, set1(1.f));
    }
    return same;
  }
  void mask(int block, int used) {
    const Vec base = set1(float(block * kKeyBlock)), minus = set1(CB_MINUS_INFINITY);
    for (int n = 0; n < NQ; n++) {
      const Vec from = sub(load(begin + n * W), base), to = sub(load(end + n * W), base);
      for (int j = 0; j < used; j++) {
        const Vec key = set1(float(j)), x = load(s[j] + n * W);
        store(s[j] + n * W, select_less(key, from, minus, select_less(key, to, x, minus)));
      }
    }
  }
  // Merges the split's state into the total; `keep` and `take` are then the factors of the two accumulators.
  void merge(float* take) {
    for (int n = 0; n < NQ; n++) {
      const Merge both(load(total_m + n * W), load(m + n * W));
      store(total_l + n * W, both(load(total_l + n * W), load(l + n * W)));
      store(total_m + n * W, both.max);
      store(keep + n * W, both.keep);
      store(take + n * W, both.take);
    }
  }
};

template <class Dot, int NQ, typename T>
void many_rows(const Attention& a, const Item& item) {
  constexpr int kRows = NQ * W, N = W == 16 ? 8 : 4;  // head_dim elements at a time
  alignas(64) typename Dot::Unit q[kMaxHeadDim / Dot::kSize * kRows];
  alignas(64) float o[kMaxHeadDim * kRows], total[kMaxHeadDim * kRows], values[kKeyBlock * kMaxHeadDim];
  alignas(64) float keys_float[kKeyBlock * kMaxHeadDim];
  alignas(64) T k_scratch[kKeyBlock * kMaxHeadDim], v_scratch[kKeyBlock * kMaxHeadDim];
  alignas(64) typename Dot::Unit units_of_row[kMaxHeadDim];
  alignas(64) float take[kRows];
  Tile<NQ> tile;
  const int rows = item.rows, dim = a.head_dim, units = dim / Dot::kSize;
  const Logits logits(a);
  tile.see(a, item);
  for (int r = 0; r < kRows; r++) {
    Dot::convert(query<T>(a, item, least(r, rows - 1)), units_of_row, dim);
    for (int u = 0; u < units; u++) q[u * kRows + r] = units_of_row[u];
  }
  const Visible first = visible(a, item, 0), last = visible(a, item, rows - 1);
  const bool one_split = item.split_end - item.split_begin == 1;
  std::memset(total, 0, dim * kRows * sizeof(float));
  for (int split = item.split_begin; split < item.split_end; split++) {
    const Visible keys = split_keys({first.begin, last.end}, split);
    tile.start_split();
    std::memset(o, 0, dim * kRows * sizeof(float));
    for (int block = keys.begin / kKeyBlock; block * kKeyBlock < keys.end; block++) {
      const int base = block * kKeyBlock;
      const int begin = most(0, keys.begin - base), end = least(kKeyBlock, keys.end - base);
      const KeyRows<T> k = locate<T>(a, item, a.k, block, begin, end, k_scratch, dim, false);
      const KeyRows<T> v = locate<T>(a, item, a.v, block, begin, end, v_scratch, dim, false);
      for (int j = begin & ~3; j < end; j += 4) {
        const typename Dot::Key* row;
        int64_t stride;
        if constexpr (sizeof(typename Dot::Key) == sizeof(T)) {
          row = k.row(j);
          stride = k.stride;
        } else {
          for (int i = 0; i < 4; i++)
            for (int d = 0; d < dim; d += 8) store8_float(keys_float + i * dim + d, k.row(j + i) + d);
          row = keys_float;
          stride = dim;
        }
        by_query<Dot, NQ>(q, row, stride, units, tile.s[j]);
      }
      const int used = (end + 3) & ~3;
      for (int j = 0; j < (begin & ~3); j++)
        for (int r = 0; r < kRows; r++) tile.s[j][r] = 0.f;
      tile.step(logits, block, used, base + used > first.end || base < last.begin);
      KeyRows<float> value;
      if constexpr (sizeof(T) == sizeof(float)) {
        value = v;
      } else {
        for (int j = begin; j < end; j++)
          for (int d = 0; d < dim; d += 8) store8_float(values + j * dim + d, v.row(j) + d);
        value.stride = dim;
        for (int g = 0; g < kGroups; g++) value.base[g] = values + g * kGroup * dim;
      }
      for (int d = 0; d < dim; d += N) {
        Vec sums[N][NQ];
        for (int i = 0; i < N; i++)
          for (int n = 0; n < NQ; n++) sums[i][n] = mul(load(o + (d + i) * kRows + n * W), load(tile.keep + n * W));
        for (int j = begin; j < end; j++) {
          const float* row = value.row(j) + d;
          Vec p[NQ];
          for (int n = 0; n < NQ; n++) p[n] = load(tile.s[j] + n * W);
          for (int i = 0; i < N; i++)
            for (int n = 0; n < NQ; n++) sums[i][n] = fma(set1(row[i]), p[n], sums[i][n]);
        }
        for (int i = 0; i < N; i++)
          for (int n = 0; n < NQ; n++) store(o + (d + i) * kRows + n * W, sums[i][n]);
      }
    }
    if (item.partial != nullptr) {
      for (int r = 0; r < rows; r++) {
        float* part = item.partial + (int64_t(split - item.split_begin) * rows + r) * (kPartialHeader + dim);
        part[0] = tile.m[r];
        part[1] = tile.l[r];
        for (int d = 0; d < dim; d++) part[kPartialHeader + d] = o[d * kRows + r];
      }
      continue;
    }
    tile.merge(take);
    if (!one_split)
      for (int d = 0; d < dim; d++)
        for (int n = 0; n < NQ; n++) {
          float* sum = total + d * kRows + n * W;
          store(sum, fma(load(o + d * kRows + n * W), load(take + n * W), mul(load(sum), load(tile.keep + n * W))));
        }
  }
  if (item.partial != nullptr) return;
  const float* sums = one_split ? o : total;
  for (int r = 0; r < rows; r++) {
    alignas(64) float row[kMaxHeadDim];
    for (int d = 0; d < dim; d++) row[d] = sums[d * kRows + r];
    write_row<T>(a, item, r, row, tile.total_m[r], tile.total_l[r]);
  }
}

template <class Dot, typename T>
void attend_as(const Attention& a, const Item& item, const Item* next) {
  const int group = group_size(a);
  const bool one_token = item.row / group == (item.row + item.rows - 1) / group;
  if (one_token && item.rows <= kFewRows) few_rows<Dot, T>(a, item, next);
  else if (item.rows <= W) many_rows<Dot, 1, T>(a, item);
  else if constexpr (2 * W >= kTileRows) many_rows<Dot, 2, T>(a, item);
  else many_rows<Dot, 4, T>(a, item);
}

}  // namespace
