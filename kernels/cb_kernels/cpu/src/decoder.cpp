// All layers of one step in a single parallel region.
//
// A layer is eight short phases. Started one by one, each costs a call from Python and waking the threads, which for a
// decode is more than its work; here threads meet at a barrier between phases. Within a phase each has a run of items of
// its own, so that what it needs next can be asked for ahead, and then helps the others with theirs: one that the kernel
// scheduler has put aside delays the others by one item at most.
#include <sched.h>
#include <time.h>

#include <cstring>
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

#include "runtime.h"

namespace {

constexpr int kSpins = 1000;  // some 50 microseconds; then the core is offered to others

inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#endif
}

// What the threads of a region share. Every thread calls `each` for the same phases in the same order.
class Phases {
 public:
  int join() { return joined_.fetch_add(1, std::memory_order_relaxed); }  // the number of the calling thread

  // Runs body(item, the item that probably follows or -1) for items [0, count) on the `threads` threads; each leaves when
  // all items are done.
  template <typename Body>
  void each(int count, int threads, int self, const Body& body) {
    const int runs = std::min(threads, kRuns);
    for (int i = 0; i < runs; i++) {
      const int run = (self + i) % runs, begin = int64_t(count) * run / runs, end = int64_t(count) * (run + 1) / runs;
      for (int item; (item = begin + taken_[run].count.fetch_add(1, std::memory_order_relaxed)) < end;)
        body(item, item + 1 < end ? item + 1 : -1);
    }
    meet(threads);
  }

 private:
  void meet(int threads) {
    const int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived_.store(0, std::memory_order_relaxed);
      for (int run = 0; run < std::min(threads, kRuns); run++) taken_[run].count.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
      if (spins < kSpins) relax();
      else sched_yield();
    }
  }

  static constexpr int kRuns = 256;
  struct alignas(64) Taken {
    std::atomic<int> count{0};
  };

  Taken taken_[kRuns];
  std::atomic<int> joined_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};

// How the rows of an elementwise phase are cut: enough items for all threads, none of them tiny.
struct Rows {
  int rows, step;
  Rows(int rows, int threads, int least) : rows(rows), step(std::max(least, (rows + 4 * threads - 1) / (4 * threads))) {}
  int count() const { return (rows + step - 1) / step; }
  int begin(int item) const { return item * step; }
  int end(int item) const { return std::min(rows, (item + 1) * step); }
};

// A product's work: columns in runs of panels, so that weights come from memory once; rows are cut only where that leaves
// threads without work.
struct Blocks {
  int columns, cuts, step;
  Blocks(int columns, int rows, int threads) : columns(columns) {
    const int panels = (rows + 31) / 32;
    cuts = std::min(panels, (4 * threads + columns - 1) / columns);
    step = (panels + cuts - 1) / cuts * 32;
  }
  int count() const { return columns * cuts; }
  int column(int item) const { return item / cuts; }
  int row_begin(int item) const { return item % cuts * step; }
  int row_end(int item, int rows) const { return std::min(rows, row_begin(item) + step); }
};

// One thread's way through the phases; T: uint16_t for bf16, or float.
template <typename T>
class Worker {
 public:
  Worker(const Decoder& decoder, Phases& phases, int threads)
      : d_(decoder), phases_(phases), threads_(threads), self_(phases.join()) {}

  // Leaves the last layer's `projected` to be added to `hidden` by the caller.
  void work() {
    for (int i = 0; i < d_.num_layers; i++) layer(d_.layers[i], i > 0);
  }

 private:
  static constexpr DType kType = sizeof(T) == sizeof(float) ? kF32 : kBF16;

  void layer(const DecoderLayer& l, bool pending) {
    norm(l.input_norm, l.input_eps, pending);
    multiply(d_.normed, d_.normed_row, l.qkv, l.qkv_bias, d_.qkv, d_.qkv_row, false);
    rotate(l);
    attend(l);
    multiply(d_.attended, d_.attended_row, l.out, l.out_bias, d_.projected, d_.projected_row, false);
    norm(l.middle_norm, l.middle_eps, true);
    multiply(d_.normed, d_.normed_row, l.gate_up, nullptr, d_.gated, d_.gated_row, true);
    multiply(d_.gated, d_.gated_row, l.down, nullptr, d_.projected, d_.projected_row, false);
  }

  // normed = norm(hidden [+= projected])
  void norm(const void* weight, float eps, bool pending) {
    RmsNorm n{};
    n.x = pending ? d_.projected : d_.hidden;
    n.x_row = pending ? d_.projected_row : d_.hidden_row;
    n.residual = pending ? d_.hidden : nullptr;
    n.residual_row = d_.hidden_row;
    n.weight = weight;
    n.out = d_.normed;
    n.out_row = d_.normed_row;
    n.rows = d_.rows;
    n.size = d_.hidden_size;
    n.dtype = kType;
    n.eps = eps;
    const Rows rows(d_.rows, threads_, 8);
    each(rows.count(), [&](int item, int) { kernels->rms_norm(&n, rows.begin(item), rows.end(item)); });
  }

  void multiply(const void* x, int64_t x_row, const Panels& weight, const float* bias, void* out, int64_t out_row,
                bool gated) {
    if constexpr (kType == kF32) {
      const Multiply m{static_cast<const float*>(x), weight, bias, static_cast<float*>(out), x_row, out_row, gated};
      const int panels = (weight.n + kernels->panel - 1) / kernels->panel;
      const int run = std::max(1, std::min(kPanelsAtOnce, panels / (4 * threads_)));
      const Blocks blocks((panels + run - 1) / run, d_.rows, threads_);
      each(blocks.count(), [&](int item, int) {
        const int begin = blocks.row_begin(item), end = blocks.row_end(item, d_.rows), first = blocks.column(item) * run;
        if (begin < end) kernels->multiply(&m, first, std::min(panels, first + run), begin, end);
      });
    } else {
      const Product p{static_cast<const T*>(x), static_cast<const T*>(weight.data), bias, static_cast<T*>(out),
                      x_row, out_row, weight.n, (weight.depth + 31) / 32, gated};
      const Blocks blocks((weight.n + 31) / 32, d_.rows, threads_);
      each(blocks.count(), [&](int item, int) {
        const int begin = blocks.row_begin(item), end = blocks.row_end(item, d_.rows);
        if (begin < end) kernels->product(&p, blocks.column(item), begin, end);
      });
    }
  }

  void rotate(const DecoderLayer& l) {
    T* qkv = static_cast<T*>(d_.qkv);
    const int q_size = d_.num_heads * d_.head_dim, kv_size = d_.num_kv_heads * d_.head_dim;
    KvWrite w{};
    w.q = qkv;
    w.k = qkv + q_size;
    w.v = qkv + q_size + kv_size;
    w.cos = d_.cos;
    w.sin = d_.sin;
    w.k_cache = l.k_cache;
    w.v_cache = l.v_cache;
    w.slots = d_.slots;
    w.q_token = w.k_token = w.v_token = d_.qkv_row;
    w.q_head = w.k_head = w.v_head = d_.head_dim;
    w.cos_token = d_.cos_row;
    const Attention& a = *d_.attentions[l.attention];
    w.kv_block = a.kv_block;
    w.kv_head = a.kv_head;
    w.kv_token = a.kv_token;
    w.num_tokens = d_.rows;
    w.num_heads = d_.num_heads;
    w.num_kv_heads = d_.num_kv_heads;
    w.head_dim = d_.head_dim;
    w.block_size = d_.block_size;
    w.dtype = kType;
    const Rows rows(d_.rows, threads_, 4);
    each(rows.count(), [&](int item, int) {
      for (int row = rows.begin(item); l.q_norm != nullptr && row < rows.end(item); row++) {
        norm_heads(qkv + row * d_.qkv_row, l.q_norm, d_.num_heads, l.head_eps);
        norm_heads(qkv + row * d_.qkv_row + q_size, l.k_norm, d_.num_kv_heads, l.head_eps);
      }
      kernels->kv_write(&w, rows.begin(item), rows.end(item));
    });
  }

  void norm_heads(T* x, const void* weight, int heads, float eps) const {
    RmsNorm n{};
    n.x = n.out = x;
    n.x_row = n.out_row = n.size = d_.head_dim;
    n.weight = weight;
    n.rows = heads;
    n.dtype = kType;
    n.eps = eps;
    kernels->rms_norm(&n, 0, heads);
  }

  void attend(const DecoderLayer& l) {
    Attention a = *d_.attentions[l.attention];
    const Plan& plan = *d_.plans[l.attention];
    a.q = d_.qkv;
    a.k = l.k_cache;
    a.v = l.v_cache;
    a.out = d_.attended;
    a.q_token = d_.qkv_row;
    a.out_token = d_.attended_row;
    a.q_head = a.out_head = d_.head_dim;
    each(int(plan.items.size()), [&](int item, int next) {
      kernels->attend(&a, &plan.items[item], next < 0 ? nullptr : &plan.items[next]);
    });
    if (plan.splits.empty()) return;
    each(int(plan.splits.size()), [&](int i, int) {
      const Split& tile = plan.splits[i];
      kernels->combine(&a, &tile.item, tile.partials, tile.item.split_end - tile.item.split_begin);
    });
  }

  template <typename Body>
  void each(int count, const Body& body) {
    phases_.each(count, threads_, self_, body);
  }

  const Decoder& d_;
  Phases& phases_;
  const int threads_, self_;
};

double seconds_of(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

struct Region {
  const Decoder* decoder;
  double began = seconds_of(CLOCK_MONOTONIC);
  Phases phases{};
  std::atomic<int64_t> kept_back{0};  // nanoseconds

  explicit Region(const Decoder* decoder) : decoder(decoder) {}

  // A thread computes or spins from the region's begin to its end: what is missing in its CPU time, others had.
  void work(int threads) {
    const double cpu = seconds_of(CLOCK_THREAD_CPUTIME_ID);
    if (decoder->dtype == kF32) Worker<float>(*decoder, phases, threads).work();
    else Worker<uint16_t>(*decoder, phases, threads).work();
    const double ran = seconds_of(CLOCK_THREAD_CPUTIME_ID) - cpu;
    const int64_t missing = int64_t(1e9 * (seconds_of(CLOCK_MONOTONIC) - began - ran));
    int64_t most = kept_back.load(std::memory_order_relaxed);
    while (missing > most && !kept_back.compare_exchange_weak(most, missing, std::memory_order_relaxed)) {}
  }
  static void run(void* self) { static_cast<Region*>(self)->work(team_size()); }
};

}  // namespace

// 0: done; 1: this instruction set has no kernels of the dtype. kept_back: seconds that the thread that others hindered most did
// not run.
CB_API int cb_decode(const Decoder* decoder, int threads, double* kept_back) {
  if (decoder->dtype == kBF16 && kernels->product == nullptr) return 1;
  Region region(decoder);
  if (threads > 1 && gomp_parallel != nullptr && team_size != nullptr) gomp_parallel(Region::run, &region, unsigned(threads), 0);
  else region.work(1);
  *kept_back = 1e-9 * double(region.kept_back.load(std::memory_order_relaxed));
  return 0;
}

CB_API int cb_has_product() { return kernels->product != nullptr; }

// Reorders weight [n, depth] bf16 rows for `Product`; `to` holds n padded to 32 times depth padded to 32 and is zeroed by
// the caller.
CB_API void cb_pack_weight(const uint16_t* weight, int64_t weight_row, int n, int depth, uint16_t* to) {
  const int tiles = (depth + 31) / 32;
  for (int row = 0; row < n; row++)
    for (int d = 0; d < depth; d += 2)
      std::memcpy(to + ((int64_t(row / 32) * tiles + d / 32) * 2 + row % 32 / 16) * 512 + d % 32 / 2 * 32 + row % 16 * 2,
                  weight + row * weight_row + d, 4);
}
