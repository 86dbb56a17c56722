// RMS normalisation: a warp or a CTA for each row, fp32 sums in a fixed order.
// -D ELEMENT (T), VECTOR (elements an access), THREADS (for a row: 32 or 256), ROWS (of a CTA; 1 unless THREADS is 32)
#include "common.cuh"

static_assert(THREADS == 32 || ROWS == 1, "rows share a CTA only when each has one warp");

DEVICE float row_sum(float value) {
  value = warp_sum(value);
  if (THREADS == 32) return value;
  __shared__ float sums[THREADS / 32];
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; ++warp) total += sums[warp];
  return total;
}

extern "C" __global__ void __launch_bounds__(THREADS* ROWS)
    rms_norm(const T* x, i64 stride, const T* weight, T* out, i64 num_rows, i64 width, float eps) {
  const i64 row = i64(blockIdx.x) * ROWS + threadIdx.x / THREADS;
  if (row >= num_rows) return;
  const i64 first = (threadIdx.x % THREADS) * VECTOR;
  constexpr i64 STEP = THREADS * VECTOR;
  x += row * stride;
  out += row * width;

  float squares = 0.0f;
  for (i64 i = first; i < width; i += STEP) {
    const auto pack = load<VECTOR>(x + i);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      const float value = to_float(pack.at[j]);
      squares = fmaf(value, value, squares);
    }
  }
  const float scale = 1.0f / sqrtf(row_sum(squares) / float(width) + eps);

  for (i64 i = first; i < width; i += STEP) {
    auto pack = load<VECTOR>(x + i);
    const auto factor = load<VECTOR>(weight + i);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j)
      pack.at[j] = from_float<T>(to_float(pack.at[j]) * scale * to_float(factor.at[j]));
    store<VECTOR>(out + i, pack);
  }
}
