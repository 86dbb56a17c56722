// The groups of rows that a CTA of `shrink` or `expand` comes to. Tables and adapters lie in memory before a step's first
// kernel starts, so they are read before `wait_for_previous`. Both kernels find room beside the ring of a GEMM of few rows
// (gemm/sm90/skinny.py): it has its weights on their way while `shrink` runs, and `expand` its tables and B while it ends.
// -D ELEMENT (T, 16 bits)
#pragma once
#include "lora/table.cuh"

constexpr int ROWS = 16;  // of a group
constexpr int WARPS = 8;  // of a CTA

// The kernels before, which a thread waits for once.
struct Previous {
  bool has_ended = false;

  DEVICE void wait() {
    if (!has_ended) wait_for_previous();
    has_ended = true;
  }
};

// The groups that a CTA comes to, every `distance`th, found by all warps at once: one after another they would cost two
// answers of memory each. With `HAS_ALL` groups of rows without an adapter are among them.
template <int NUM_PARTS, bool HAS_ALL = false>
struct Found {
  static constexpr int MOST = 16, OF_WARP = MOST / WARPS;
  Term terms[MOST][NUM_PARTS];
  int rows[MOST][ROWS];  // -1: there is none

  DEVICE bool has(int slot) const { return slot < MOST && terms[slot][0].count > 0; }
  DEVICE void find(const i64* groups, int first, int distance, int num_groups, const int* list, i64 place, int part,
                   int which) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Group of_warp[OF_WARP];
#pragma unroll
    for (int i = 0; i < OF_WARP; ++i) {
      const int number = first + (warp + i * WARPS) * distance;
      of_warp[i] = number < num_groups ? Group::of(groups, number) : Group::none();
      if (!HAS_ALL && of_warp[i].terms == nullptr) of_warp[i] = Group::none();
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OF_WARP; ++i) {
      const Group& group = of_warp[i];
      const int slot = warp + i * WARPS;
      if (lane < ROWS) rows[slot][lane] = lane < group.count ? load_fresh<1>(list + group.begin + lane).at[0] : -1;
      if (lane >= ROWS && lane < ROWS + NUM_PARTS)
        terms[slot][lane - ROWS] = Term::of(group, place, part + lane - ROWS, which);
    }
    __syncthreads();
  }
};
