// Routing of rows to experts: a warp chooses for a row; then every pair of a row and an expert gets its place in the
// order of experts. No sum or place depends on what runs when.
// -D ELEMENT (T: of logits), VALUES, GROUPED (see choice.cuh)
#include "experts/choice.cuh"

constexpr int OWN = 4;  // pairs of a thread at once

DEVICE auto logits_of(const T* row) {
  return [row](int expert) { return to_float(load_fresh<1>(row + expert).at[0]); };
}

extern "C" __global__ void __launch_bounds__(THREADS)
    route_once(const T* logits, i64 stride, HOW_TO_CHOOSE, WHERE_TO_PLACE) {
  __shared__ int chosen[MAX_PAIRS];
  __shared__ u64 sums[WARPS];
  start_next();
  wait_for_previous();
  CHOICE;
  PLAN;
  for (int row = threadIdx.x / 32; row < num_rows; row += WARPS)
    choose_for(choice, row, chosen, logits_of(logits + row * stride));
  __syncthreads();
  place_pairs(plan, chosen, int(num_rows * top_k), int(num_experts), sums);
}

extern "C" __global__ void __launch_bounds__(128) choose(const T* logits, i64 stride, HOW_TO_CHOOSE) {
  start_next();
  wait_for_previous();
  CHOICE;
  const int row = blockIdx.x * 4 + threadIdx.x / 32;
  if (row < num_rows) choose_for(choice, row, nullptr, logits_of(logits + row * stride));
}

// A CTA puts the pairs of one expert in their places.
extern "C" __global__ void __launch_bounds__(THREADS)
    place(const int* experts, i64 num_pairs, i64 num_experts, WHERE_TO_PLACE) {
  __shared__ int counts[MAX_EXPERTS];
  __shared__ u64 sums[WARPS];
  __shared__ int first_of_own, tile_of_own;
  start_next();
  PLAN;
  const int thread = threadIdx.x, own = blockIdx.x, end = int(num_pairs);
  counts[thread] = 0;
  __syncthreads();
  wait_for_previous();
  for (int pair = thread; pair < end; pair += THREADS) atomicAdd(&counts[load_fresh<1>(experts + pair).at[0]], 1);
  __syncthreads();
  const Places places(plan, counts[thread], sums);
  if (thread == own) {
    first_of_own = places.first;
    tile_of_own = places.first_tile;
  }
  __syncthreads();
  if (own == 0) {
    if (thread < num_experts) offsets[thread] = places.first;
    if (thread == 0) offsets[num_experts] = end;
    for (int tile = places.num_tiles + thread; tile < plan.num_tiles; tile += THREADS) put_tile(plan, tile, 0, 0, 0);
  }
  if (thread == 0) put_tiles(plan, tile_of_own, own, first_of_own, counts[own]);
  int next = first_of_own;
  for (int begin = 0; begin < end; begin += THREADS * OWN) {
    const int first = begin + thread * OWN;
    u32 mine = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i)
      if (first + i < end && load_fresh<1>(experts + first + i).at[0] == own) mine |= 1u << i;
    u64 up_to_here, all;
    scan(__popc(mine), sums, WARPS, up_to_here, all);
    int at = next + int(up_to_here) - __popc(mine);
#pragma unroll
    for (int i = 0; i < OWN; ++i)
      if (mine >> i & 1) order[at++] = first + i;
    next += int(all);
  }
}
