// float32 products with weights in any storage format, packed into panels.
//
// A panel holds kPanel outputs as [depth][kPanel]: one broadcast of x meets contiguous weights. Weights stay in their
// storage format in memory and are widened to float32 in registers, or once per block where many rows use them; both are
// exact, so 16-bit storage gives the bits of a float32 copy. A result adds its terms in the order of depth within blocks of
// kDepthBlock, then the blocks in order, whatever the number of rows: a row's bits are its own.
//
// Another format is another element type with a `widen` (and, for packed groups, another block loop).
#pragma once
#include "elementwise.h"

namespace {

struct f16 {
  uint16_t bits;
};

inline float to_float(f16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  uint32_t bits;
  if (magnitude >= 0x7c00) bits = sign | 0x7f800000 | (magnitude & 0x3ff) << 13;
  else if (magnitude >= 0x400) bits = sign | ((magnitude << 13) + (112u << 23));
  else {  // a subnormal is a count of 2^-24
    const float value = float(magnitude) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  }
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

#if defined(__AVX512F__)
using Lanes = __m512;
constexpr int kLanes = 16, kMostRows = 12;
inline Lanes widen(const float* p) { return _mm512_loadu_ps(p); }
inline Lanes widen(const bf16* p) { return load(p); }
inline Lanes widen(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Lanes every_lane(float x) { return _mm512_set1_ps(x); }
inline Lanes multiply_add(Lanes a, Lanes b, Lanes sum) { return _mm512_fmadd_ps(a, b, sum); }
inline void put(float* p, Lanes x) { _mm512_storeu_ps(p, x); }
constexpr int vectors_for(int rows) { return rows <= 3 ? 8 : rows <= 6 ? 4 : 2; }
#elif defined(__AVX2__)
using Lanes = __m256;
constexpr int kLanes = 8, kMostRows = 6;
inline Lanes widen(const float* p) { return _mm256_loadu_ps(p); }
inline Lanes widen(const bf16* p) { return load(p); }
inline Lanes widen(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Lanes every_lane(float x) { return _mm256_set1_ps(x); }
inline Lanes multiply_add(Lanes a, Lanes b, Lanes sum) { return _mm256_fmadd_ps(a, b, sum); }
inline void put(float* p, Lanes x) { _mm256_storeu_ps(p, x); }
constexpr int vectors_for(int rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : 2; }
#else
typedef float Lanes __attribute__((vector_size(16)));
constexpr int kLanes = 4, kMostRows = 3;
inline Lanes widen(const float* p) {
  Lanes x;
  std::memcpy(&x, p, 16);
  return x;
}
typedef uint16_t Halves __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
inline Halves four_halves(const void* p) {  // and four zeros
  typedef uint64_t Pair __attribute__((vector_size(16)));
  uint64_t low;
  std::memcpy(&low, p, 8);
  return reinterpret_cast<Halves>(Pair{low, 0});
}
#if defined(__clang__)
#define CB_INTERLEAVE(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#else
#define CB_INTERLEAVE(a, b) __builtin_shuffle(a, b, Halves{0, 8, 1, 9, 2, 10, 3, 11})
#endif
inline Lanes widen(const bf16* p) { return reinterpret_cast<Lanes>(CB_INTERLEAVE(Halves{}, four_halves(p))); }
inline Lanes widen(const f16* p) {
  const Words bits = reinterpret_cast<Words>(CB_INTERLEAVE(four_halves(p), Halves{}));
  const Words magnitude = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
  const Words smallest = Words{} + (113u << 23);  // the exponent of the smallest normal number
  const Words normal = magnitude + (112u << 23);
  // Of a subnormal number the fraction alone is there: one more at the same exponent, less that one.
  const Words subnormal =
      reinterpret_cast<Words>(reinterpret_cast<Lanes>(magnitude + smallest) - reinterpret_cast<Lanes>(smallest));
  const Words is_subnormal = reinterpret_cast<Words>(magnitude < (0x400u << 13));
  const Words is_special = reinterpret_cast<Words>(magnitude >= (0x7c00u << 13));
  return reinterpret_cast<Lanes>(sign | (normal & ~is_subnormal) | (subnormal & is_subnormal) | (is_special & 0x7f800000));
}
#undef CB_INTERLEAVE
inline Lanes every_lane(float x) { return Lanes{x, x, x, x}; }
inline Lanes multiply_add(Lanes a, Lanes b, Lanes sum) { return a * b + sum; }
inline void put(float* p, Lanes x) { std::memcpy(p, &x, 16); }
constexpr int vectors_for(int rows) { return rows == 1 ? 8 : 4; }
#endif

constexpr int kPanel = 2 * W;
constexpr int kPanelVectors = kPanel / kLanes;
constexpr int kDepthBlock = 128;  // a block of a panel in float32 stays in the L1 cache
constexpr int kAheadBytes = 1024;  // of each stream of weights, asked for before they are needed

// What to ask memory for while a block is multiplied: `lines` cache lines from `from` on.
struct Ahead {
  const char* from;
  int lines;
};

// sums[r][.] (pitch floats apart) += the block's terms for R rows and V vectors of outputs; `first`: there were none before.
// streams: the weights come from memory, so what follows in each panel is asked for; else `ahead` is.
template <int R, int V, bool streams, typename T>
inline void add_block(const float* x, int64_t x_row, const T* weight, int64_t panel_size, int depth, float* sums,
                      int64_t pitch, bool first, Ahead ahead) {
  Lanes sum[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sum[r][v] = every_lane(0.f);
#pragma GCC unroll 2
  for (int k = 0; k < depth; k++) {
    const T* row = weight + k * kPanel;
    if (!streams) __builtin_prefetch(ahead.from + 64 * least(k, ahead.lines), 0, 2);
    if (streams)
      for (int v = 0; v < V; v += kPanelVectors)
        for (unsigned byte = 0; byte < kPanel * sizeof(T); byte += 64)
          __builtin_prefetch(reinterpret_cast<const char*>(row + v / kPanelVectors * panel_size) + byte + kAheadBytes);
    Lanes w[V];
    for (int v = 0; v < V; v++) w[v] = widen(row + v / kPanelVectors * panel_size + v % kPanelVectors * kLanes);
    for (int r = 0; r < R; r++) {
      const Lanes value = every_lane(x[r * x_row + k]);
      for (int v = 0; v < V; v++) sum[r][v] = multiply_add(value, w[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) {
      float* to = sums + r * pitch + v * kLanes;
      put(to, first ? sum[r][v] : widen(to) + sum[r][v]);
    }
}

// One finished row of a panel.
inline void finish_panel(const Multiply& m, int panel, int row, float* sums) {
  const int n = panel * kPanel, left = least(kPanel, m.weight.n - n);
  if (m.gated) {  // a panel is W gate columns and their W up columns
    float* out = m.out + row * m.out_row + n / 2;
    const int columns = least(W, m.weight.n / 2 - n / 2);
    alignas(64) float gated[W];
    store(gated, mul(silu(load(sums), sums), load(sums + W)));
    std::memcpy(out, gated, columns * sizeof(float));
    return;
  }
  float* out = m.out + row * m.out_row + n;
  if (m.bias != nullptr)
    for (int i = 0; i < left; i++) sums[i] += m.bias[n + i];
  std::memcpy(out, sums, left * sizeof(float));
}

// R rows of V / kPanelVectors panels from `panel` on, weights straight from memory.
template <int R, int V, typename T>
void few_panels(const Multiply& m, int panel, int row) {
  alignas(64) float sums[R][V * kLanes];
  const int depth = m.weight.depth;
  const int64_t size = int64_t(depth) * kPanel;
  const T* weight = static_cast<const T*>(m.weight.data) + panel * size;
  const float* x = m.x + row * m.x_row;
  for (int k = 0; k < depth; k += kDepthBlock)
    add_block<R, V, true>(x + k, m.x_row, weight + int64_t(k) * kPanel, size, least(kDepthBlock, depth - k), sums[0],
                          V * kLanes, k == 0, {});
  for (int i = 0; i < V / kPanelVectors; i++)
    for (int r = 0; r < R; r++) finish_panel(m, panel + i, row + r, sums[r] + i * kPanel);
}

// R <= kMostRows rows of panels [begin, end): as many panels at a time as there are registers for.
template <int R, int V, typename T>
int panels_at_once(const Multiply& m, int begin, int end, int row) {
  for (; begin + V / kPanelVectors <= end; begin += V / kPanelVectors) few_panels<R, V, T>(m, begin, row);
  if constexpr (V > kPanelVectors) return panels_at_once<R, V / 2, T>(m, begin, end, row);
  return begin;
}

template <typename T>
void few_rows_product(const Multiply& m, int begin, int end, int row, int rows) {
#define CB_ROWS(R) \
  case R:          \
    if constexpr (R <= kMostRows) panels_at_once<R, vectors_for(R), T>(m, begin, end, row); break
  switch (rows) {
    CB_ROWS(1);
    CB_ROWS(2);
    CB_ROWS(3);
    CB_ROWS(4);
    CB_ROWS(5);
    CB_ROWS(6);
    CB_ROWS(7);
    CB_ROWS(8);
    CB_ROWS(9);
    CB_ROWS(10);
    CB_ROWS(11);
    CB_ROWS(12);
  }
#undef CB_ROWS
}

inline void add_rows(int rows, const float* x, int64_t x_row, const float* weight, int depth, float* sums, bool first,
                     Ahead ahead) {
#define CB_ROWS(R)                                                                                              \
  case R:                                                                                                       \
    if constexpr (R <= kMostRows)                                                                               \
      add_block<R, kPanelVectors, false>(x, x_row, weight, 0, depth, sums, kPanel, first, ahead);               \
    break
  switch (rows) {
    CB_ROWS(1);
    CB_ROWS(2);
    CB_ROWS(3);
    CB_ROWS(4);
    CB_ROWS(5);
    CB_ROWS(6);
    CB_ROWS(7);
    CB_ROWS(8);
    CB_ROWS(9);
    CB_ROWS(10);
    CB_ROWS(11);
    CB_ROWS(12);
  }
#undef CB_ROWS
}

// Up to kSumRows rows of N panels: each block of weights is widened once and stays in the L1 cache while rows pass by, each
// read from beyond it for N panels at a time; meanwhile memory is asked for the next block.
constexpr int kSumRows = 128, kPanelsTogether = 64 / kPanel;  // 256 bytes of an output row are written at a time
template <int N, typename T>
void many_rows_product(const Multiply& m, int panel, int row, int rows) {
  alignas(64) float sums[N][kSumRows * kPanel], wide[N][kDepthBlock * kPanel];
  const int depth = m.weight.depth, groups = (rows + kMostRows - 1) / kMostRows;
  const int64_t size = int64_t(depth) * kPanel;
  const T* weight = static_cast<const T*>(m.weight.data) + panel * size;
  for (int k = 0; k < depth; k += kDepthBlock) {
    const int count = least(kDepthBlock, depth - k);
    const int lines = kDepthBlock * kPanel * int(sizeof(T)) / 64, share = (lines + groups - 1) / groups;
    const float* ready[N];
    for (int n = 0; n < N; n++) {
      const T* block = weight + n * size + int64_t(k) * kPanel;
      if constexpr (sizeof(T) == sizeof(float)) {
        ready[n] = block;
      } else {
        for (int i = 0; i < count * kPanel; i += kLanes) put(wide[n] + i, widen(block + i));
        ready[n] = wide[n];
      }
    }
    for (int group = 0; group < groups; group++) {
      const int begin = rows * group / groups, end = rows * (group + 1) / groups;
      for (int n = 0; n < N; n++) {
        const char* ahead = reinterpret_cast<const char*>(weight + n * size + int64_t(k + kDepthBlock) * kPanel);
        add_rows(end - begin, m.x + (row + begin) * m.x_row + k, m.x_row, ready[n], count, sums[n] + begin * kPanel, k == 0,
                 {ahead + 64 * share * group, share});
      }
    }
  }
  for (int r = 0; r < rows; r++)
    for (int n = 0; n < N; n++) finish_panel(m, panel + n, row + r, sums[n] + r * kPanel);
}

template <typename T>
void multiply_as(const Multiply& m, int panel_begin, int panel_end, int row_begin, int row_end) {
  const int rows = row_end - row_begin;
  if (rows <= kMostRows) return few_rows_product<T>(m, panel_begin, panel_end, row_begin, rows);
  // Rows outside: a row of the output is a page of its own where it is wide, and these are written panel after panel.
  for (int row = row_begin; row < row_end; row += kSumRows) {
    const int count = least(kSumRows, row_end - row);
    int panel = panel_begin;
    for (; panel + kPanelsTogether <= panel_end; panel += kPanelsTogether)
      many_rows_product<kPanelsTogether, T>(m, panel, row, count);
    for (; panel < panel_end; panel++) many_rows_product<1, T>(m, panel, row, count);
  }
}

void multiply(const Multiply* m, int panel_begin, int panel_end, int row_begin, int row_end) {
  switch (m->weight.format) {
    case kF32: return multiply_as<float>(*m, panel_begin, panel_end, row_begin, row_end);
    case kBF16: return multiply_as<bf16>(*m, panel_begin, panel_end, row_begin, row_end);
    case kF16: return multiply_as<f16>(*m, panel_begin, panel_end, row_begin, row_end);
  }
}

template <typename T>
void pack_as(const T* from, int64_t from_row, int n, int depth, T* to) {
  for (int panel = 0; panel * kPanel < n; panel++, to += int64_t(depth) * kPanel)
    for (int i = 0; i < least(kPanel, n - panel * kPanel); i++) {
      const T* row = from + int64_t(panel * kPanel + i) * from_row;
      for (int k = 0; k < depth; k++) to[int64_t(k) * kPanel + i] = row[k];
    }
}

// Rows [n, depth] into panels; `to` holds n padded to whole panels and is zeroed by the caller.
void pack_panels(const void* from, int64_t from_row, int n, int depth, int format, void* to) {
  if (format == kF32) pack_as(static_cast<const float*>(from), from_row, n, depth, static_cast<float*>(to));
  else pack_as(static_cast<const uint16_t*>(from), from_row, n, depth, static_cast<uint16_t*>(to));
}

template <typename T>
void unpack_as(const Panels& weight, int64_t output, float* to) {
  const T* from = static_cast<const T*>(weight.data) + output / kPanel * weight.depth * kPanel + output % kPanel;
  for (int k = 0; k < weight.depth; k++) to[k] = to_float(from[int64_t(k) * kPanel]);
}

// One output's weights in float32: an embedding's row.
void unpack_output(const Panels* weight, int64_t output, float* to) {
  switch (weight->format) {
    case kF32: return unpack_as<float>(*weight, output, to);
    case kBF16: return unpack_as<bf16>(*weight, output, to);
    case kF16: return unpack_as<f16>(*weight, output, to);
  }
}

}  // namespace
