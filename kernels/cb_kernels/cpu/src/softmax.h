// What every attention path of one ISA shares: where keys lie, which keys a row sees, and how partial softmaxes merge.
//
// One row's output is defined without reference to tiles, chunks, neighbours or threads: keys in blocks of kKeyBlock
// aligned to position 0, one online-softmax step per block, sums over a block by halving (key j + key j + 32, ...), a fresh
// state every kSplit keys, states merged in order. Scores live in powers of two (scale * log2 e), so exp is exp2.
#pragma once
#include "abi.h"
#include "simd.h"

namespace {

constexpr int kGroup = 16;  // keys that one base pointer reaches
constexpr int kGroups = kKeyBlock / kGroup;

inline int group_size(const Attention& a) { return a.num_heads / a.num_kv_heads; }

// Keys [begin, end) that a row of the ragged batch sees.
struct Visible {
  int begin, end;
};
inline Visible visible(const Attention& a, const Item& item, int row) {
  const int queries = a.cu_seqlens[item.seq + 1] - a.cu_seqlens[item.seq];
  const int end = a.seq_lens[item.seq] - queries + (item.row + row) / group_size(a) + 1;
  return {a.window > 0 && end > a.window ? end - a.window : 0, end};
}

template <typename T>
inline const T* query(const Attention& a, const Item& item, int row) {
  const int flat = item.row + row, group = group_size(a);
  const int64_t token = a.cu_seqlens[item.seq] + flat / group, head = int64_t(item.kv_head) * group + flat % group;
  return static_cast<const T*>(a.q) + token * a.q_token + head * a.q_head;
}
template <typename T>
inline T* output(const Attention& a, const Item& item, int row) {
  const int flat = item.row + row, group = group_size(a);
  const int64_t token = a.cu_seqlens[item.seq] + flat / group, head = int64_t(item.kv_head) * group + flat % group;
  return static_cast<T*>(a.out) + token * a.out_token + head * a.out_head;
}

// One key block's rows: key j is at base[j / kGroup] + (j % kGroup) * stride.
template <typename T>
struct KeyRows {
  const T* base[kGroups];
  int64_t stride;
  const T* row(int j) const { return base[j / kGroup] + (j % kGroup) * stride; }
};

// Points into the cache where pages hold whole groups of keys, else copies keys [begin, end) of the block to `scratch`
// [kKeyBlock, pitch], whose other rows become 0. Never reads a page that holds none of these keys.
template <typename T>
inline KeyRows<T> locate(const Attention& a, const Item& item, const void* cache, int block, int begin, int end,
                         T* scratch, int pitch, bool copy) {
  const int32_t* table = a.block_tables + int64_t(item.seq) * a.max_blocks;
  const T* head = static_cast<const T*>(cache) + int64_t(item.kv_head) * a.kv_head;
  KeyRows<T> rows;
  if (a.block_size % kGroup == 0 && !copy) {
    rows.stride = a.kv_token;
    for (int g = 0; g < kGroups; g++) {
      const int key = block * kKeyBlock + g * kGroup;
      if (g * kGroup < end && (g + 1) * kGroup > begin)
        rows.base[g] = head + int64_t(table[key / a.block_size]) * a.kv_block + int64_t(key % a.block_size) * a.kv_token;
      else
        rows.base[g] = nullptr;
    }
    return rows;
  }
  rows.stride = pitch;
  for (int g = 0; g < kGroups; g++) rows.base[g] = scratch + g * kGroup * pitch;
  for (int j = 0; j < kKeyBlock; j++) {
    T* to = scratch + j * pitch;
    int filled = 0;
    if (j >= begin && j < end) {
      const int key = block * kKeyBlock + j;
      std::memcpy(to, head + int64_t(table[key / a.block_size]) * a.kv_block + int64_t(key % a.block_size) * a.kv_token,
                  a.head_dim * sizeof(T));
      filled = a.head_dim;
    }
    std::memset(static_cast<void*>(to + filled), 0, (pitch - filled) * sizeof(T));
  }
  return rows;
}

// The cache lines of K and V of one key block, asked for ahead of their use: blocks lie anywhere, which the hardware cannot
// foresee. All at once they would keep the core waiting, as only some can be under way; a few at a time they arrive while
// it computes.
template <typename T>
class Lookahead {
 public:
  // The block of `item` behind `block`, also in its next split, or else the first one of `next` (null: none).
  Lookahead(const Attention& a, const Item& item, int block, const Item* next) {
    const int behind = (block + 1) * kKeyBlock;
    const Visible own = keys_of(a, item);
    if (behind < own.end) add(a, item, behind, own.end);
    else if (next != nullptr) add(a, *next, keys_of(a, *next).begin, keys_of(a, *next).end);
  }
  // How many to ask for at a time to be done after `times`.
  int share(int times) const {
    int all = 0;
    for (int i = 0; i < runs_; i++) all += lines_[i];
    return (all + times - 1) / times;
  }
  void ask(int count) {
    for (; count > 0 && run_ < runs_; count--) {
      __builtin_prefetch(from_[run_] + int64_t(line_) * 64, 0, 2);
      if (++line_ == lines_[run_]) run_++, line_ = 0;
    }
  }

 private:
  // Keys that some row of the item sees, in all of its splits.
  static Visible keys_of(const Attention& a, const Item& item) {
    const Visible first = visible(a, item, 0), last = visible(a, item, item.rows - 1);
    return {most(first.begin, item.split_begin * kSplit), least(last.end, item.split_end * kSplit)};
  }
  // Keys [key, last) as far as they are in the block of the first.
  void add(const Attention& a, const Item& item, int key, int last) {
    const int end = least(last, (key / kKeyBlock + 1) * kKeyBlock);
    const int32_t* table = a.block_tables + int64_t(item.seq) * a.max_blocks;
    while (key < end) {
      const int offset = key % a.block_size, count = least(a.block_size - offset, end - key);
      const int64_t row = item.kv_head * a.kv_head + table[key / a.block_size] * a.kv_block + offset * a.kv_token;
      const int64_t bytes = ((count - 1) * a.kv_token + a.head_dim) * int64_t(sizeof(T));
      add_run(static_cast<const T*>(a.k) + row, bytes);
      add_run(static_cast<const T*>(a.v) + row, bytes);
      key += count;
    }
  }
  void add_run(const T* from, int64_t bytes) {
    from_[runs_] = reinterpret_cast<const char*>(from);
    lines_[runs_++] = int((bytes + 63) / 64);
  }

  const char* from_[2 * kKeyBlock];
  int lines_[2 * kKeyBlock];
  int runs_ = 0, run_ = 0, line_ = 0;
};

// Raw dot products to base-2 logits.
struct Logits {
  Vec factor, inner, cap;
  bool capped, scaled;  // scaled: logits are dot products times a positive factor, and have their order
  explicit Logits(const Attention& a)
      : factor(set1(a.scale * kLog2e)),
        inner(set1(a.softcap > 0.f ? a.scale / a.softcap : 0.f)),
        cap(set1(a.softcap * kLog2e)),
        capped(a.softcap > 0.f),
        scaled(!capped && a.scale > 0.f) {}
  Vec operator()(Vec dot) const { return capped ? mul(vtanh(mul(dot, inner)), cap) : mul(dot, factor); }
};

// Sum of x[0, count) by halving; x is overwritten.
inline Vec fold(Vec* x, int count) {
  for (int half = count / 2; half > 0; half /= 2)
    for (int j = 0; j < half; j++) x[j] = add(x[j], x[j + half]);
  return x[0];
}

// A row's state (max, sum, accumulator) after another's keys; (kNothing, 0, 0) is the state of no key.
struct Merge {
  Vec max, keep, take;
  Merge(Vec m, Vec other) : max(vmax(m, other)), keep(vexp2(sub(m, max))), take(vexp2(sub(other, max))) {}
  Vec operator()(Vec x, Vec other) const { return fma(other, take, mul(x, keep)); }
};

// What the accumulator is multiplied by in the end; the sink is a key without a value.
inline float finish(const Attention& a, const Item& item, int row, float m, float l) {
  if (a.sinks == nullptr) return 1.f / l;
  const int group = group_size(a);
  const float sink = a.sinks[item.kv_head * group + (item.row + row) % group] * kLog2e;
  const Merge merge(set1(m), set1(sink));
  alignas(64) float keep[W], sum[W];
  store(keep, merge.keep);
  store(sum, merge(set1(l), set1(1.f)));
  return keep[0] / sum[0];
}

template <typename T>
void write_row(const Attention& a, const Item& item, int row, const float* o, float m, float l) {
  T* out = output<T>(a, item, row);
  const Vec factor = set1(finish(a, item, row, m, l));
  for (int d = 0; d < a.head_dim; d += W)
    store_up_to(out + d, mul(load_up_to(o + d, a.head_dim - d), factor), a.head_dim - d);
}

// partials: [num_splits][rows][kPartialHeader + head_dim]
template <typename T>
void combine(const Attention& a, const Item& item, const float* partials, int num_splits) {
  const int pitch = kPartialHeader + a.head_dim;
  for (int row = 0; row < item.rows; row++) {
    alignas(64) float o[kMaxHeadDim] = {};
    alignas(64) float m[W], l[W];
    store(m, set1(kNothing));
    store(l, zero());
    for (int split = 0; split < num_splits; split++) {
      const float* part = partials + (int64_t(split) * item.rows + row) * pitch;
      const Merge merge(load(m), set1(part[0]));
      store(m, merge.max);
      store(l, merge(load(l), set1(part[1])));
      for (int d = 0; d < a.head_dim; d += W)
        store(o + d, merge(load(o + d), load_up_to(part + kPartialHeader + d, a.head_dim - d)));
    }
    write_row<T>(a, item, row, o, m[0], l[0]);
  }
}

}  // namespace
