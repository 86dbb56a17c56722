// Rows of a cache of latents: a latent's RMS norm, and the rotation of a key and of the queries' last parts.
// -D ELEMENT (T)
#include "runtime/common.cuh"

constexpr int THREADS = 256;

// Of `pairs` pairs: number i and its partner, of which one lies `pairs` behind the other, or beside it.
struct Turn {
  const float* angles;  // cosines, then sines
  int pairs;
  bool is_interleaved;

  DEVICE void operator()(const T* source, int i, T& low, T& high) const {
    const float first = to_float(source[is_interleaved ? 2 * i : i]);
    const float second = to_float(source[is_interleaved ? 2 * i + 1 : i + pairs]);
    const float cosine = angles[i], sine = angles[pairs + i];
    low = from_float<T>(__fmul_rn(first, cosine) - __fmul_rn(second, sine));
    high = from_float<T>(__fmul_rn(second, cosine) + __fmul_rn(first, sine));
  }
};

// Grid: x = token. `x` [n, rank + 2 * pairs], `q` [n, heads, plain + 2 * pairs], `out` [n, heads, rank + 2 * pairs].
extern "C" __global__ void __launch_bounds__(THREADS)
    latent_rows(const T* x, i64 x_stride, const T* weight, float eps, const float* cos_sin, const i64* positions,
                const i64* slots, T* cache, const T* q, T* out, i64 rank, i64 pairs, i64 plain, i64 num_heads,
                i64 block_shift, i64 is_interleaved) {
  __shared__ float shares[THREADS / 32];
  const i64 token = blockIdx.x, slot = slots[token];
  const int row = int(rank + 2 * pairs), half_row = row / 2;
  const T* source = x + token * x_stride;
  const Turn turn = {cos_sin + positions[token] * 2 * pairs, int(pairs), is_interleaved != 0};
  float squares = 0.0f;
  for (int i = threadIdx.x; i < rank; i += THREADS) {
    const float value = to_float(source[i]);
    squares = fmaf(value, value, squares);
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) shares[threadIdx.x / 32] = squares;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < THREADS / 32; ++i) sum += shares[i];
  const float rstd = 1.0f / sqrtf(sum / float(rank) + eps);
  if (slot >= 0) {
    const i64 mask = (i64(1) << block_shift) - 1;
    T* first = cache + (slot >> block_shift) * (i64(row) << block_shift) + (slot & mask) * half_row;
    T* last = first + (i64(half_row) << block_shift) - half_row;
    const auto write = [&](int column, T value) { (column < half_row ? first : last)[column] = value; };
    for (int i = threadIdx.x; i < rank; i += THREADS)
      write(i, from_float<T>(to_float(source[i]) * rstd * to_float(weight[i])));
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
      T low, high;
      turn(source + rank, i, low, high);
      write(int(rank) + i, low);
      write(int(rank + pairs) + i, high);
    }
  }
  for (int i = threadIdx.x; i < num_heads * pairs; i += THREADS) {
    const i64 head = token * num_heads + i / pairs;
    const int pair = i % int(pairs);
    T low, high;
    turn(q + head * (plain + 2 * pairs) + plain, pair, low, high);
    out[head * row + rank + pair] = low;
    out[head * row + rank + pairs + pair] = high;
  }
}
