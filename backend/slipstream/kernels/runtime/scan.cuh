#pragma once
#include "runtime/common.cuh"

// Sums of `value` over the threads up to and with this one, and over all, of `num_warps` whole warps; `sums` is shared,
// one for each warp.
DEVICE void scan(u64 value, u64* sums, int num_warps, u64& up_to_here, u64& all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u64 other = __shfl_up_sync(ALL_LANES, value, distance);
    if (lane >= distance) value += other;
  }
  __syncthreads();  // the sums of the call before are read
  if (lane == 31) sums[warp] = value;
  __syncthreads();
  all = 0;
  for (int w = 0; w < num_warps; ++w) {
    if (w == warp) up_to_here = all + value;
    all += sums[w];
  }
}
