// The plain C types that the dispatcher, the per-ISA kernels and Python (ctypes, see ../binding.py) share.
// No torch and no C++ library type crosses this border.
#pragma once
#include <cstdint>

constexpr int kKeyBlock = 64;    // keys per online-softmax step, aligned to absolute position 0
constexpr int kSplit = 256;      // keys per partial softmax, aligned to absolute position 0; a multiple of kKeyBlock
constexpr int kMaxHeadDim = 256;
constexpr int kTileRows = 32;    // query rows (token x query head of one KV head) of one work item
constexpr int kPartialHeader = 2;  // a partial row is {max, sum, head_dim floats}

enum DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };  // kF16: storage of weights only

// One layer's attention over one step's ragged batch. Strides are in elements.
struct Attention {
  const void* q;    // [num_tokens, num_heads, head_dim]
  const void* k;    // [num_blocks, num_kv_heads, block_size, head_dim], strided; head_dim contiguous
  const void* v;
  void* out;        // [num_tokens, num_heads, head_dim]
  const float* sinks;  // [num_heads] or null
  const int32_t* block_tables;  // [num_seqs, max_blocks]
  const int32_t* seq_lens;      // [num_seqs]
  const int32_t* cu_seqlens;    // [num_seqs + 1]
  int64_t q_token, q_head, out_token, out_head, kv_block, kv_head, kv_token;
  int32_t num_seqs, num_heads, num_kv_heads, head_dim, block_size, max_blocks;
  int32_t window;   // 0: none
  int32_t dtype;
  float scale, softcap;  // softcap 0: none
};

// Rows [row, row + rows) of one sequence and KV head, row = token * group + query head of the group.
// partial: null writes the output; else one split's state per row goes there.
struct Item {
  int32_t seq, kv_head, row, rows;
  int32_t split_begin, split_end;  // splits of kSplit keys
  float* partial;
};

// k, v [num_tokens, num_kv_heads, head_dim] into the cache at slots [num_tokens]; with rotary also q and k in place.
struct KvWrite {
  void* q;         // null: no rotary for q
  void* k;
  const void* v;
  const void* cos;  // [num_tokens, head_dim], dtype of q; null: no rotary
  const void* sin;
  void* k_cache;
  void* v_cache;
  const int64_t* slots;  // null: rotary only
  int64_t q_token, q_head, k_token, k_head, v_token, v_head, cos_token, kv_block, kv_head, kv_token;
  int32_t num_tokens, num_heads, num_kv_heads, head_dim, block_size, dtype;
};

// y = norm(x [+ residual]) * weight; residual, if given, receives x + residual.
struct RmsNorm {
  const void* x;
  void* residual;
  const void* weight;
  void* out;
  int64_t x_row, residual_row, out_row;
  int32_t rows, size, dtype;
  float eps;
};

// out[r] = silu(x[r, :size]) * x[r, size:]
struct SiluMul {
  const void* x;
  void* out;
  int64_t x_row, out_row;
  int32_t rows, size, dtype;
};

// out[rows, n] float32 = x[rows, depth] bf16 @ weight[n, depth]^T bf16, accumulated in float32.
struct Linear {
  const uint16_t* x;
  const uint16_t* weight;
  float* out;
  const uint32_t* packed;  // x as [tiles of 16 rows][depth / 2 padded to 16][16] pairs; set by the dispatcher
  int64_t x_row, weight_row, out_row;
  int32_t rows, n, depth;
};

// out[rows, n] = x[rows, depth] @ weight[n, depth]^T (+ bias), bf16 in and out, accumulated in float32 in one order for
// any number of rows. The weight lies as `cb_pack_weight` leaves it: per 32 outputs, per 32 of depth, two tiles of
// [16 pairs of depth][16 outputs] pairs. x has zeros up to a multiple of 32 of depth, and rows up to a multiple of 32.
struct Product {
  const uint16_t* x;
  const uint16_t* weight;
  const float* bias;  // [n] or null
  uint16_t* out;
  int64_t x_row, out_row;
  int32_t n, depth_tiles;
  int32_t gated;  // tiles alternate between 16 gate and 16 up columns: out[rows, n / 2] = silu(gate) * up
};

// A weight [n, depth] packed into panels of `Kernels::panel` outputs, see panels.h; `format` is a DType. n, depth < 2^31 but
// their product may be more.
struct Panels {
  const void* data;
  int32_t n, depth, format;
};

// out[rows, n] = x[rows, depth] @ weight^T (+ bias), float32 x and out.
struct Multiply {
  const float* x;
  Panels weight;
  const float* bias;  // [n] or null
  float* out;
  int64_t x_row, out_row;
  int32_t gated;  // panels are half gate, half up columns: out[rows, n / 2] = silu(gate) * up
};

// One layer of a Llama-like decoder. In bf16 the matrices' data is as in `Product` and norms are bf16; in float32 they are
// `Panels` of any format and norms are float32.
struct DecoderLayer {
  const void *input_norm, *middle_norm;
  const void *q_norm, *k_norm;  // [head_dim] or null
  Panels qkv, out, gate_up, down;
  const float *qkv_bias, *out_bias;  // or null
  void *k_cache, *v_cache;
  int32_t attention;  // which of the step's prepared attentions
  float input_eps, middle_eps, head_eps;
};

struct Plan;

// One step of all layers; all activations and caches are of `dtype`, kF32 or kBF16. Scratch rows are padded to a multiple of
// 32; their padding columns are 0.
struct Decoder {
  const DecoderLayer* layers;
  const Attention* const* attentions;  // per distinct window
  const Plan* const* plans;
  void* hidden;     // [rows, hidden_size], in and out
  const void* cos;  // [rows, head_dim]
  const void* sin;
  const int64_t* slots;  // [rows]
  void *normed, *qkv, *attended, *gated, *projected;
  int64_t hidden_row, cos_row, normed_row, qkv_row, attended_row, gated_row, projected_row;
  int32_t num_layers, rows, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, block_size, dtype;
};

// One instruction set's kernels.
struct Kernels {
  const char* name;
  void (*attend)(const Attention*, const Item*, const Item* next);  // next: what this thread probably takes then, or null
  void (*combine)(const Attention*, const Item*, const float* partials, int num_splits);
  void (*kv_write)(const KvWrite*, int token_begin, int token_end);
  void (*rms_norm)(const RmsNorm*, int row_begin, int row_end);
  void (*silu_mul)(const SiluMul*, int row_begin, int row_end);
  void (*linear)(const Linear*, int n_begin, int n_end);  // null: not offered
  void (*product)(const Product*, int column_block, int row_begin, int row_end);  // null: not offered
  int panel;  // outputs of a panel; half of it is the width of a gate column's run in a gated product
  void (*multiply)(const Multiply*, int panel_begin, int panel_end, int row_begin, int row_end);
  void (*pack_panels)(const void* from, int64_t from_row, int n, int depth, int format, void* to);
  void (*unpack_output)(const Panels*, int64_t output, float* to);
};

extern const Kernels kernels_portable;
#if defined(__x86_64__) || defined(_M_X64)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx512_bf16;
extern const Kernels kernels_amx;
#endif
