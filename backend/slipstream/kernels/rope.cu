// Rotary embedding of q in place; rotated k, and v, written into the paged cache. One CTA for each token.
// -D ELEMENT (T), HEAD_SIZE, VECTOR (elements an access)
#include "common.cuh"

constexpr int HALF = HEAD_SIZE / 2;
constexpr int CHUNKS = HALF / VECTOR;  // of half a head

// Rotate the pair of chunks (source, source + HALF) into (target, target + HALF).
DEVICE void rotate(const T* source, T* target, const float* cosines) {
  auto first = load<VECTOR>(source);
  auto second = load<VECTOR>(source + HALF);
#pragma unroll
  for (int j = 0; j < VECTOR; ++j) {
    const float cosine = cosines[j], sine = cosines[HALF + j];
    const float a = to_float(first.at[j]), b = to_float(second.at[j]);
    first.at[j] = from_float<T>(a * cosine - b * sine);
    second.at[j] = from_float<T>(b * cosine + a * sine);
  }
  store<VECTOR>(target, first);
  store<VECTOR>(target + HALF, second);
}

extern "C" __global__ void __launch_bounds__(256)
    rope_and_cache(T* q, i64 q_stride, const T* k, i64 k_stride, const T* v, i64 v_stride,
                   const float* cos_sin, const i64* positions, const i64* slots, T* cache,
                   i64 num_q_heads, i64 num_kv_heads, i64 block_shift) {
  const i64 token = blockIdx.x;
  const i64 slot = slots[token];
  const float* angles = cos_sin + positions[token] * HEAD_SIZE;
  const i64 block_size = i64(1) << block_shift;
  // K of kv head 0 at this slot; V lies one block further, the next head two.
  T* cached = cache + (slot >> block_shift) * num_kv_heads * 2 * block_size * HEAD_SIZE +
              (slot & (block_size - 1)) * HEAD_SIZE;
  const int num_heads = int(num_q_heads + (slot < 0 ? 0 : 2 * num_kv_heads));
  for (int i = threadIdx.x; i < num_heads * CHUNKS; i += blockDim.x) {
    int head = i / CHUNKS;
    const int at = (i % CHUNKS) * VECTOR;
    if (head < num_q_heads) {
      T* source = q + token * q_stride + head * HEAD_SIZE + at;
      rotate(source, source, angles + at);
      continue;
    }
    head -= int(num_q_heads);
    if (head < num_kv_heads) {
      const T* source = k + token * k_stride + head * HEAD_SIZE + at;
      rotate(source, cached + head * 2 * block_size * HEAD_SIZE + at, angles + at);
      continue;
    }
    head -= int(num_kv_heads);
    const T* source = v + token * v_stride + head * HEAD_SIZE + at;
    T* target = cached + (head * 2 + 1) * block_size * HEAD_SIZE + at;
    store<VECTOR>(target, load<VECTOR>(source));
    store<VECTOR>(target + HALF, load<VECTOR>(source + HALF));
  }
}
