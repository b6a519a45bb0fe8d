// bf16 x packed bf16 weights, see `Product`: 32 outputs at a time, so that a block of weights is read from memory once for
// all rows. A result's terms are added in the order of depth whatever the number of rows: a row's bits are its own.
#pragma once
#include "dot.h"
#include "elementwise.h"

namespace {

#if defined(__AVX512BF16__)

constexpr int kBlock = 32;                        // outputs per column block
constexpr int kTileWords = 16 * 16;               // pairs in one tile

// One finished row of a block: 32 sums.
inline void finish_row(const Product& p, int block, int row, Vec low, Vec high) {
  const int n = block * kBlock;
  const bool both = n + 16 < p.n;
  if (p.bias != nullptr) {
    low = add(low, load(p.bias + n));
    if (both) high = add(high, load(p.bias + n + 16));
  }
  bf16* out = reinterpret_cast<bf16*>(p.out) + row * p.out_row;
  if (p.gated) {
    const bf16* type = nullptr;
    store(out + n / 2, mul(silu(rounded(low, type), type), rounded(high, type)));
    return;
  }
  store(out + n, low);
  if (both) store(out + n + 16, high);
}

inline const uint32_t* block_of(const Product& p, int block) {
  return reinterpret_cast<const uint32_t*>(p.weight) + int64_t(block) * p.depth_tiles * 2 * kTileWords;
}

#if defined(__AMX_BF16__)

// The rows of one panel of a block, whose sums are complete.
class Panel {
 public:
  Panel(const Product& p, int block) : p_(p), block_(block) {}
  void begin(const float (*sums)[kTileWords], int row, int count) { sums_ = sums, row_ = row, left_ = count, done_ = 0; }
  // Finishes up to `count` more rows.
  void finish(int count) {
    for (; count > 0 && done_ < left_; count--, done_++)
      finish_row(p_, block_, row_ + done_, load(sums_[done_ / 16 * 2] + done_ % 16 * 16),
                 load(sums_[done_ / 16 * 2 + 1] + done_ % 16 * 16));
  }

 private:
  const Product& p_;
  const int block_;
  const float (*sums_)[kTileWords] = nullptr;
  int row_ = 0, left_ = 0, done_ = 0;
};

// 32 rows (or, alone, the last 16) by 32 outputs. While the tiles multiply, the vector units finish `before`, and memory is
// asked for `lines` of 64 bytes per step from `ahead` on.
template <int rows16>
inline void multiply_tiles(const Product& p, const uint32_t* weight, int row, const char* ahead, int lines, Panel& before,
                           float (*sums)[kTileWords]) {
  const bf16* x = reinterpret_cast<const bf16*>(p.x) + row * p.x_row;
  const int64_t pitch = p.x_row * sizeof(bf16);
  const int finished = (kBlock + p.depth_tiles - 1) / p.depth_tiles;
  _tile_zero(0);
  _tile_zero(1);
  if (rows16 == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < p.depth_tiles; k++) {
    const uint32_t* tiles = weight + k * 2 * kTileWords;
    for (int line = 0; line < lines; line++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    _tile_loadd(4, x + 32 * k, pitch);
    _tile_loadd(6, tiles, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, tiles + kTileWords, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (rows16 == 2) {
      _tile_loadd(5, x + 16 * p.x_row + 32 * k, pitch);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    before.finish(finished);
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  if (rows16 == 2) {
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
  }
}

// While a block is multiplied, the one behind it, which this thread takes next, is brought from memory bit by bit.
void product(const Product* p, int block, int begin, int end) {
  alignas(64) float sums[2][4][kTileWords];
  configure_tiles();
  const uint32_t* weight = block_of(*p, block);
  const int step_lines = 2 * kTileWords * 4 / 64, panels = (end - begin + 31) / 32, lines = (step_lines + panels - 1) / panels;
  const char* ahead = reinterpret_cast<const char*>(weight + p->depth_tiles * 2 * kTileWords);
  Panel panel(*p, block);
  int buffer = 0;
  for (int row = begin; row < end; row += 32, ahead += p->depth_tiles * lines * 64, buffer = 1 - buffer) {
    const int count = least(32, end - row);
    if (count <= 16) multiply_tiles<1>(*p, weight, row, ahead, lines, panel, sums[buffer]);
    else multiply_tiles<2>(*p, weight, row, ahead, lines, panel, sums[buffer]);
    panel.finish(kBlock);
    panel.begin(sums[buffer], row, count);
  }
  panel.finish(kBlock);
  _tile_release();
}

#else

void product(const Product* p, int block, int begin, int end) {
  constexpr int R = 8;
  const uint32_t* weight = block_of(*p, block);
  for (int row = begin; row < end; row += R) {
    const bf16* x = reinterpret_cast<const bf16*>(p->x) + row * p->x_row;
    Vec low[R], high[R];
    for (int r = 0; r < R; r++) low[r] = high[r] = zero();
    for (int k = 0; k < p->depth_tiles; k++)
      for (int pair = 0; pair < 16; pair++) {
        const uint32_t* tile = weight + k * 2 * kTileWords + pair * 16;
        const Vec a = Pairs::load_units(tile), b = Pairs::load_units(tile + kTileWords);
        for (int r = 0; r < R; r++) {
          const Vec value = Pairs::broadcast(x + r * p->x_row, 16 * k + pair);
          low[r] = Pairs::multiply_add(value, a, low[r]);
          high[r] = Pairs::multiply_add(value, b, high[r]);
        }
      }
    for (int r = 0; r < least(R, end - row); r++) finish_row(*p, block, row + r, low[r], high[r]);
  }
}

#endif
#define CB_PRODUCT product
#else
#define CB_PRODUCT nullptr
#endif

}  // namespace
