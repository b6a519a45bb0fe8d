// What the library's own units share: the chosen kernels, the process's OpenMP threads, and the work list of a step.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>

#include "abi.h"

#define CB_API extern "C" __attribute__((visibility("default")))

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using TeamSize = int (*)();  // of the parallel region that calls it

extern const Kernels* kernels;
extern GompParallel gomp_parallel;
extern TeamSize team_size;

constexpr int kPanelsAtOnce = 4;  // what a product of one row works on side by side

template <typename Body>
struct Loop {
  const Body* body;
  int count, chunk;
  std::atomic<int> next{0};
  static void run(void* self) {
    auto& loop = *static_cast<Loop*>(self);
    for (;;) {
      const int begin = loop.next.fetch_add(loop.chunk, std::memory_order_relaxed);
      if (begin >= loop.count) return;
      (*loop.body)(begin, std::min(loop.count, begin + loop.chunk));
    }
  }
};

template <typename Body>
void parallel(int count, int chunk, int threads, const Body& body) {
  if (threads <= 1 || gomp_parallel == nullptr || count <= chunk) {
    if (count > 0) body(0, count);
    return;
  }
  Loop<Body> loop{&body, count, chunk};
  // Always the caller's full thread count: a team of another size would make the runtime rebuild its pool.
  gomp_parallel(Loop<Body>::run, &loop, unsigned(threads), 0);
}

struct Split {  // a tile whose splits are separate items
  Item item;
  float* partials;
};

// Work items of one step: the same for every layer.
struct Plan {
  std::vector<Item> items;
  std::vector<Split> splits;
  std::vector<float> partials;
  double cost = 0;  // multiply-adds of q k^T of one layer
};
