// Fills one `Kernels` table. A translation unit includes this once, compiled with its ISA's flags:
//   #define CB_TABLE kernels_avx2
//   #define CB_NAME "avx2"
#include "attention.h"
#include "elementwise.h"
#include "panels.h"
#include "product.h"

namespace {

#if !defined(CB_LINEAR)
#define CB_LINEAR nullptr  // only tiles are faster than the float32 product
#endif
#if defined(__AVX512BF16__)
using Bf16Dot = Pairs;
#else
using Bf16Dot = Elements<bf16>;
#endif

void attend(const Attention* a, const Item* item, const Item* next) {
  if (a->dtype == kF32) return attend_as<Elements<float>, float>(*a, *item, next);
#if defined(__AMX_BF16__)
  attend_tiles(*a, *item, next);
#else
  attend_as<Bf16Dot, bf16>(*a, *item, next);
#endif
}
void combine_any(const Attention* a, const Item* item, const float* partials, int num_splits) {
  if (a->dtype == kF32) combine<float>(*a, *item, partials, num_splits);
  else combine<bf16>(*a, *item, partials, num_splits);
}
void kv_write(const KvWrite* w, int begin, int end) {
  if (w->dtype == kF32) kv_write_tokens<float>(*w, begin, end);
  else kv_write_tokens<bf16>(*w, begin, end);
}
void rms_norm(const RmsNorm* n, int begin, int end) {
  if (n->dtype == kF32) rms_norm_rows<float>(*n, begin, end);
  else rms_norm_rows<bf16>(*n, begin, end);
}
void silu_mul(const SiluMul* n, int begin, int end) {
  if (n->dtype == kF32) silu_mul_rows<float>(*n, begin, end);
  else silu_mul_rows<bf16>(*n, begin, end);
}

}  // namespace

extern const Kernels CB_TABLE = {CB_NAME,   attend,     combine_any, kv_write, rms_norm,    silu_mul,
                                 CB_LINEAR, CB_PRODUCT, kPanel,      multiply, pack_panels, unpack_output};
