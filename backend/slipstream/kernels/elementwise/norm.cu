// RMS normalisation: a warp or a CTA for each row, fp32 sums in a fixed order.
// -D ELEMENT (T), VECTOR (elements an access), THREADS (for a row: 32 or 256), ROWS (of a CTA; 1 unless THREADS is 32),
// PACKS (accesses of a thread that registers hold; the rest of a row is read twice), PLUS_ONE (1: weights are less 1)
#include "runtime/common.cuh"

static_assert(THREADS == 32 || ROWS == 1, "rows share a CTA only when each has one warp");
constexpr int STEP = THREADS * VECTOR;

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

DEVICE float add_squares(float sum, const Pack<T, VECTOR>& pack) {
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) sum = fmaf(to_float(pack.at[j]), to_float(pack.at[j]), sum);
  return sum;
}
DEVICE void store_scaled(T* out, Pack<T, VECTOR> pack, float scale, const Pack<T, VECTOR>& factor) {
#pragma unroll
  for (int j = 0; j < VECTOR; ++j)
    pack.at[j] = from_float<T>(to_float(pack.at[j]) * scale *
                               (PLUS_ONE ? 1.0f + to_float(factor.at[j]) : to_float(factor.at[j])));
  store<VECTOR>(out, pack);
}

extern "C" __global__ void __launch_bounds__(THREADS* ROWS)
    rms_norm(const T* x, i64 stride, const T* weight, T* out, i64 num_rows, i64 width, float eps) {
  start_next();
  const i64 row = i64(blockIdx.x) * ROWS + threadIdx.x / THREADS;
  if (row >= num_rows) return;
  const int first = (threadIdx.x % THREADS) * VECTOR, end = int(width);
  x += row * stride;
  out += row * width;

  Pack<T, VECTOR> factors[PACKS], packs[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i)
    if (first + i * STEP < end) factors[i] = load<VECTOR>(weight + first + i * STEP);
  wait_for_previous();
#pragma unroll
  for (int i = 0; i < PACKS; ++i)
    if (first + i * STEP < end) packs[i] = load_fresh<VECTOR>(x + first + i * STEP);

  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < PACKS; ++i)
    if (first + i * STEP < end) squares = add_squares(squares, packs[i]);
  for (int at = first + PACKS * STEP; at < end; at += STEP)
    squares = add_squares(squares, load_fresh<VECTOR>(x + at));
  const float scale = 1.0f / sqrtf(row_sum(squares) / float(width) + eps);

#pragma unroll
  for (int i = 0; i < PACKS; ++i)
    if (first + i * STEP < end) store_scaled(out + first + i * STEP, packs[i], scale, factors[i]);
  for (int at = first + PACKS * STEP; at < end; at += STEP)
    store_scaled(out + at, load_fresh<VECTOR>(x + at), scale, load<VECTOR>(weight + at));
}
