// The C ABI: picks an instruction set, splits work into items, and runs them on the process's OpenMP threads.
//
// The library links no OpenMP runtime: torch brings its own copy, and a second one in the process means two pools of
// spinning threads. Python passes the address of the loaded runtime's GOMP_parallel; without it, work runs on the caller.
// Items are taken one by one from a counter, so a thread that the kernel scheduler has put aside delays one item only.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "runtime.h"
#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

const Kernels* kernels = &kernels_portable;
GompParallel gomp_parallel = nullptr;
TeamSize team_size = nullptr;

namespace {

#if defined(__x86_64__) || defined(_M_X64)
struct Cpu {
  bool avx2 = false, avx512 = false, avx512_bf16 = false, amx = false;
  Cpu() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_FMA) || !(c & bit_F16C)) return;
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 0x6) != 0x6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    avx2 = b & bit_AVX2;
    const unsigned needed = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
    avx512 = avx2 && (low & 0xe6) == 0xe6 && (b & needed) == needed;
    const bool tiles = (d & (1u << 24)) && (d & (1u << 22)) && (low & 0x60000) == 0x60000;
    avx512_bf16 = avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
    amx = avx512_bf16 && tiles;
  }
};
#ifndef ARCH_REQ_XCOMP_PERM
#define ARCH_REQ_XCOMP_PERM 0x1023
#endif
// Linux hands out the tile registers only on request, per process.
[[maybe_unused]] bool request_tiles() { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, 18) == 0; }
#endif

int chunk_for(int count, int threads) { return std::max(1, count / (threads * 8)); }

}  // namespace

// Hash of the sources this was built from: Python refuses a library that is older than the code beside it.
CB_API const char* cb_source_hash() { return CB_SOURCE_HASH; }

// isa: null for the best one, or a name; returns the name chosen, or null when this CPU cannot run the one asked for.
CB_API const char* cb_init(void* gomp, void* size, const char* isa) {
  gomp_parallel = reinterpret_cast<GompParallel>(gomp);
  team_size = reinterpret_cast<TeamSize>(size);
  const Kernels* usable[5] = {&kernels_portable};
  int count = 1;
#if defined(__x86_64__) || defined(_M_X64)
  const Cpu cpu;
#if defined(CB_HAVE_AVX2)
  if (cpu.avx2) usable[count++] = &kernels_avx2;
#endif
#if defined(CB_HAVE_AVX512)
  if (cpu.avx512) usable[count++] = &kernels_avx512;
#endif
#if defined(CB_HAVE_AVX512_BF16)
  if (cpu.avx512_bf16) usable[count++] = &kernels_avx512_bf16;
#endif
#if defined(CB_HAVE_AMX)
  if (cpu.amx && request_tiles()) usable[count++] = &kernels_amx;
#endif
#endif
  for (int i = count - 1; i >= 0; i--)
    if (isa == nullptr || std::strcmp(isa, usable[i]->name) == 0) {
      kernels = usable[i];
      return kernels->name;
    }
  return nullptr;
}

// Null when memory is lacking. Reads seq_lens and cu_seqlens now; the other arrays at `cb_attend`.
CB_API Plan* cb_plan(const Attention* a, int threads) try {
  auto plan = new Plan;
  const int group = a->num_heads / a->num_kv_heads;
  // Sequences with most work first, so that the last item to finish is a short one; within a sequence head by head, so
  // that the tiles of a chunk find their head's K and V in the core's cache.
  struct Sequence {
    int seq;
    int64_t cost;
  };
  std::vector<Sequence> order;
  for (int seq = 0; seq < a->num_seqs; seq++) {
    const int64_t queries = a->cu_seqlens[seq + 1] - a->cu_seqlens[seq], keys = a->seq_lens[seq];
    if (queries > 0) order.push_back({seq, queries * (a->window > 0 ? std::min<int64_t>(keys, a->window + queries) : keys)});
  }
  std::stable_sort(order.begin(), order.end(), [](const Sequence& x, const Sequence& y) { return x.cost > y.cost; });
  std::vector<Item> tiles;
  for (const Sequence& sequence : order) {
    const int seq = sequence.seq, queries = a->cu_seqlens[seq + 1] - a->cu_seqlens[seq], rows = queries * group;
    const int past = a->seq_lens[seq] - queries;
    for (int head = 0; head < a->num_kv_heads; head++)
      for (int row = (rows - 1) / kTileRows * kTileRows; row >= 0; row -= kTileRows) {
        const int count = std::min(kTileRows, rows - row);
        const int end = past + (row + count - 1) / group + 1, first = past + row / group + 1;
        const int begin = a->window > 0 && first > a->window ? first - a->window : 0;
        plan->cost += double(count) * (end - begin) * a->head_dim;
        tiles.push_back({seq, head, row, count, begin / kSplit, (end + kSplit - 1) / kSplit, nullptr});
      }
  }
  // Too few items to keep the threads busy evenly: the splits of a tile become items. Merging is in the same order either
  // way, so this changes no bit.
  const bool split = threads > 1 && int(tiles.size()) < 4 * threads;
  size_t floats = 0;
  for (const Item& tile : tiles)
    if (split && tile.split_end - tile.split_begin > 1)
      floats += size_t(tile.split_end - tile.split_begin) * tile.rows * (kPartialHeader + a->head_dim);
  plan->partials.resize(floats);
  float* next = plan->partials.data();
  for (const Item& tile : tiles) {
    const int splits = tile.split_end - tile.split_begin;
    if (!split || splits == 1) {
      plan->items.push_back(tile);
      continue;
    }
    plan->splits.push_back({tile, next});
    for (int i = 0; i < splits; i++) {
      Item item = tile;
      item.split_begin += i;
      item.split_end = item.split_begin + 1;
      item.partial = next;
      next += size_t(item.rows) * (kPartialHeader + a->head_dim);
      plan->items.push_back(item);
    }
  }
  return plan;
} catch (const std::bad_alloc&) {
  return nullptr;
}

CB_API void cb_plan_free(Plan* plan) { delete plan; }

CB_API void cb_attend(const Plan* plan, Attention* a, const void* q, const void* k, const void* v, void* out,
                      int threads) {
  a->q = q;
  a->k = k;
  a->v = v;
  a->out = out;
  const int count = int(plan->items.size());
  const int team = plan->cost < 32768 ? 1 : threads;  // below that, waking the threads costs more
  parallel(count, count > 64 * threads ? 2 : 1, team, [&](int begin, int end) {
    for (int i = begin; i < end; i++) kernels->attend(a, &plan->items[i], i + 1 < end ? &plan->items[i + 1] : nullptr);
  });
  for (const Split& tile : plan->splits)
    kernels->combine(a, &tile.item, tile.partials, tile.item.split_end - tile.item.split_begin);
}

CB_API void cb_kv_write(const KvWrite* w, int threads) {
  const int work = w->num_tokens * w->head_dim * (w->cos ? w->num_heads + w->num_kv_heads : w->num_kv_heads);
  parallel(w->num_tokens, chunk_for(w->num_tokens, threads), work < 32768 ? 1 : threads,
           [&](int begin, int end) { kernels->kv_write(w, begin, end); });
}

CB_API void cb_rms_norm(const RmsNorm* n, int threads) {
  parallel(n->rows, chunk_for(n->rows, threads), n->rows * n->size < 32768 ? 1 : threads,
           [&](int begin, int end) { kernels->rms_norm(n, begin, end); });
}

CB_API void cb_silu_mul(const SiluMul* n, int threads) {
  parallel(n->rows, chunk_for(n->rows, threads), n->rows * n->size < 16384 ? 1 : threads,
           [&](int begin, int end) { kernels->silu_mul(n, begin, end); });
}

// 0: done; 1: this instruction set has no such kernel; 2: no memory.
CB_API int cb_linear(Linear* a, int threads) try {
  if (kernels->linear == nullptr) return 1;
  const int units = a->depth / 2, padded = (units + 15) / 16 * 16, tiles = (a->rows + 15) / 16;
  std::vector<uint32_t> packed(size_t(tiles) * padded * 16 + 16);
  uint32_t* to = packed.data() + (64 - reinterpret_cast<uintptr_t>(packed.data()) % 64) / 4 % 16;
  for (int row = 0; row < a->rows; row++)
    for (int u = 0; u < units; u++)
      std::memcpy(to + (size_t(row / 16) * padded + u) * 16 + row % 16, a->x + row * a->x_row + 2 * u, 4);
  a->packed = to;
  const int step = 64;
  parallel((a->n + step - 1) / step, 2, threads,
           [&](int begin, int end) { kernels->linear(a, begin * step, std::min(a->n, end * step)); });
  return 0;
} catch (const std::bad_alloc&) {
  return 2;
}

// Outputs of a panel of this instruction set, see `Panels`.
CB_API int cb_panel() { return kernels->panel; }

// Packs rows [n, depth] of a DType; `to` holds n padded to whole panels times depth, and zeros.
CB_API void cb_pack_panels(const void* from, int64_t from_row, int n, int depth, int format, void* to) {
  kernels->pack_panels(from, from_row, n, depth, format, to);
}

CB_API void cb_multiply(const Multiply* m, int rows, int threads) {
  const int panels = (m->weight.n + kernels->panel - 1) / kernels->panel;
  const int team = double(rows) * m->weight.n * m->weight.depth < 65536 ? 1 : threads;
  parallel(panels, kPanelsAtOnce, team, [&](int begin, int end) { kernels->multiply(m, begin, end, 0, rows); });
}

// out[i] = the weights of output ids[i] in float32. 0: done; 1: an id is none of the outputs.
CB_API int cb_unpack_outputs(const Panels* weight, const int64_t* ids, int count, float* out) {
  for (int i = 0; i < count; i++)
    if (ids[i] < 0 || ids[i] >= weight->n) return 1;
  for (int i = 0; i < count; i++) kernels->unpack_output(weight, ids[i], out + int64_t(i) * weight->depth);
  return 0;
}
