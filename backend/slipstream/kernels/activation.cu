// silu(gate) * up of rows [gate | up]; grid: x = row, y = a share of the row.
// -D ELEMENT (T), VECTOR (elements an access)
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    silu_mul(const T* gate_up, i64 stride, T* out, i64 width) {
  start_next();
  wait_for_previous();
  const T* gates = gate_up + i64(blockIdx.x) * stride;
  const T* ups = gates + width;
  T* results = out + i64(blockIdx.x) * width;
  const i64 step = i64(gridDim.y) * blockDim.x * VECTOR;
  for (i64 i = (i64(blockIdx.y) * blockDim.x + threadIdx.x) * VECTOR; i < width; i += step) {
    auto pack = load_fresh<VECTOR>(gates + i);
    const auto up = load_fresh<VECTOR>(ups + i);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      const float gate = to_float(pack.at[j]);
      pack.at[j] = from_float<T>(gate / (1.0f + expf(-gate)) * to_float(up.at[j]));
    }
    store<VECTOR>(results + i, pack);
  }
}
