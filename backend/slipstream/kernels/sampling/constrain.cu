// Bans the tokens that a row's mask forbids: -inf over their logits, in front of `sample`.
#include "sampling/sample_row.cuh"

constexpr u8 LATE = 2;  // `Outcome` of core/batch.py
constexpr int PIECE = THREADS * 16;  // bytes of a mask that are in shared memory at a time
constexpr int TOKENS = 8;            // of a byte
constexpr int VECTOR = 16 / sizeof(T);

// Of host memory that is written while the kernel runs: what was written before the tag is there with it.
DEVICE int load_tag(const int* address) {
  int value;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
DEVICE Pack<u32, 4> load_mask(const u8* address) {
  Pack<u32, 4> pack;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.at[0]), "=r"(pack.at[1]), "=r"(pack.at[2]), "=r"(pack.at[3])
               : "l"(address)
               : "memory");
  return pack;
}

// Ban those of 8 tokens whose bit is 0.
DEVICE void ban(T* logits, u32 bits, int count, bool is_aligned) {
  if (bits == 0 && count >= TOKENS && is_aligned) {
    Pack<T, VECTOR> bans;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) bans.at[i] = from_float<T>(-INFINITE);
#pragma unroll
    for (int i = 0; i < TOKENS; i += VECTOR) store(logits + i, bans);
    return;
  }
  for (int i = 0; i < TOKENS && i < count; ++i)
    if (!(bits >> i & 1)) logits[i] = from_float<T>(-INFINITE);
}

// A CTA a row. Masks and tags lie in pinned memory, one of each for every place of the results.
extern "C" __global__ void __launch_bounds__(THREADS)
    constrain(T* logits, i64 stride, i64 num_tokens, Parameters* rows, const int* tags, const u8* masks,
              i64 mask_stride, u8* applied, u8* outcomes, u8* outcomes_mirror) {
  __shared__ int tag;
  __shared__ alignas(16) u8 bits[PIECE];
  wait_for_previous();
  start_next();
  Parameters& how = rows[blockIdx.x];
  const int wanted = how.mask_tag, place = how.result;
  if (wanted == 0 || place < 0) return;
  if (threadIdx.x == 0) tag = load_tag(tags + place);
  __syncthreads();
  if (tag != abs(wanted)) {
    if (threadIdx.x == 0 && wanted > 0) {
      how.result = -1;  // `sample` leaves it out
      outcomes[place] = LATE;
      if (outcomes_mirror) outcomes_mirror[place] = LATE;
    }
    return;
  }
  if (threadIdx.x == 0) applied[place] = 1;
  logits += blockIdx.x * stride;
  masks += place * mask_stride;
  const bool is_aligned = (stride * sizeof(T)) % 16 == 0 && reinterpret_cast<u64>(logits) % 16 == 0;
  const int num_bytes = int((num_tokens + TOKENS - 1) / TOKENS);
  for (int first = 0; first < num_bytes; first += PIECE) {
    const int mine = 16 * threadIdx.x;
    if (first + mine < num_bytes)
      store(reinterpret_cast<u32*>(bits + mine), load_mask(masks + first + mine));
    __syncthreads();
    for (int i = threadIdx.x; i < PIECE && first + i < num_bytes; i += THREADS) {
      const int token = TOKENS * (first + i);
      if (bits[i] != 0xff) ban(logits + token, bits[i], int(num_tokens) - token, is_aligned);
    }
    __syncthreads();
  }
}
