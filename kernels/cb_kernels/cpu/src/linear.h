// bf16 x bf16 to float32 logits: weight rows are the "keys" of `dot.h`, read once from memory for all rows of x.
#pragma once
#include "dot.h"

namespace {

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
void linear(const Linear* a, int begin, int end) {
  const int units = a->depth / 2, padded = (units + 15) / 16 * 16;
  for (int n = begin; n < end; n += 4) {
    const bf16* weight = reinterpret_cast<const bf16*>(a->weight) + n * a->weight_row;
    for (int row = 0; row < a->rows; row += W) {
      alignas(64) float s[4][W];
      by_query<Pairs, 1>(a->packed + int64_t(row / W) * padded * W, weight, a->weight_row, units, s[0]);
      for (int r = row; r < least(a->rows, row + W); r++)
        for (int i = 0; i < 4; i++) a->out[r * a->out_row + n + i] = s[i][r - row];
    }
  }
}
#define CB_LINEAR linear
#elif !defined(__AMX_BF16__)
#define CB_LINEAR nullptr
#endif

}  // namespace
