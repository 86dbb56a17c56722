// Sums of experts of a row, added to the residual sum in the order of ranks; grid: x = row, y = a share of the row.
// -D ELEMENT (T), VECTOR (elements of 16 bytes)
#include "runtime/common.cuh"

constexpr int AHEAD = 4;  // terms that are on their way at once

struct Total {
  float at[VECTOR];

  DEVICE void add(const Pack<T, VECTOR>& term, float factor) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) at[i] = fmaf(to_float(term.at[i]), factor, at[i]);
  }
};

extern "C" __global__ void __launch_bounds__(256)
    combine(T* residual, i64 stride, const T* products, const T* shared, const T* shared_gate,
            i64 gate_stride, i64 width, i64 top_k) {
  start_next();
  wait_for_previous();
  const i64 row = blockIdx.x, column = i64(blockIdx.y * blockDim.x + threadIdx.x) * VECTOR;
  if (column >= width) return;
  T* target = residual + row * stride + column;
  const T* terms = products + row * top_k * width + column;
  Total total = {};
  total.add(load_fresh<VECTOR>(target), 1.0f);
  for (int rank = 0; rank < top_k; rank += AHEAD) {
    Pack<T, VECTOR> loaded[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (rank + i < top_k) loaded[i] = load_fresh<VECTOR>(terms + (rank + i) * width);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (rank + i < top_k) total.add(loaded[i], 1.0f);
  }
  if (shared != nullptr) {
    float factor = 1.0f;
    if (shared_gate != nullptr) factor = 1.0f / (1.0f + expf(-to_float(load_fresh<1>(shared_gate + row * gate_stride).at[0])));
    total.add(load_fresh<VECTOR>(shared + row * width + column), factor);
  }
  Pack<T, VECTOR> rounded;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) rounded.at[i] = from_float<T>(total.at[i]);
  store<VECTOR>(target, rounded);
}
