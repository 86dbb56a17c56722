// 16 query rows of a warp against tiles of tokens that many sequences share, with the online softmax of
// FlashAttention-2 (Dao, 2023).
// -D ELEMENT (T: 16 bits), HEAD_SIZE, WARPS, SLOTS, ROTATES
#pragma once
#include "attention/decode_heads.cuh"
#include "attention/row_softmax.cuh"

using Scores = float[SHARED_TILE / 2];  // of every eight tokens rows g and g + 8, each of tokens 2t, 2t + 1

// What the rows have so far.
class RowStates {
 protected:
  const int lane = threadIdx.x % 32;
  float output[CHUNKS * 4];  // of every chunk rows g and g + 8, each of dimensions 2t, 2t + 1
  float maximum[2];          // of rows g and g + 8
  float total[2];            // this lane's share: its tokens

  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < CHUNKS * 4; ++i) output[i] = 0.0f;
    maximum[0] = maximum[1] = -INFINITE;
    total[0] = total[1] = 0.0f;
  }

  // This lane's elements 2t, 2t + 1 of every chunk of a row; of none: zeros. `angles` only if ROTATES.
  DEVICE void load_pairs(u32 (&pairs)[CHUNKS], const T* head, const float* angles) const {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
      pairs[i] = head ? load_fresh<1>(reinterpret_cast<const u32*>(head + i * 8 + lane % 4 * 2)).at[0] : 0;
    if (ROTATES && head != nullptr) {
      const float* own = angles + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < CHUNKS / 2; ++i)
        rotate_pairs(pairs[i], pairs[i + CHUNKS / 2], ::load<2>(own + i * 8), ::load<2>(own + HEAD_SIZE / 2 + i * 8));
    }
  }

  // Of a tile's tokens the first `count` are seen.
  DEVICE void hide(Scores& scores, int count) const {
    if (count >= SHARED_TILE) return;
#pragma unroll
    for (int i = 0; i < SHARED_TILE / 2; ++i)
      if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= count) scores[i] = -INFINITE;
  }

  // Scores of row g + 8 half become exponentials of `scale` (positive) times them; by `factor` the output so far is to
  // be multiplied.
  DEVICE void exponentiate(Scores& scores, int half, float scale, float& factor) {
    const float now = fmaxf(highest_score<SHARED_TILE>(scores, half, -INFINITE) * scale, maximum[half]);
    factor = exp2_fast(maximum[half] - now);
    maximum[half] = now;
    total[half] = exponentiate_row<SHARED_TILE>(scores, half, scale, now, total[half] * factor);
  }
  // Once some tiles have gone by it is rare that one has a new maximum.
  DEVICE void rescale(const float (&factors)[2]) {
    if (!__any_sync(ALL_LANES, factors[0] != 1.0f || factors[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < CHUNKS * 4; ++i) output[i] *= factors[i / 2 % 2];
  }

 public:
  DEVICE void sum_totals() {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2)
        total[half] += __shfl_xor_sync(ALL_LANES, total[half], mask);
  }
  DEVICE void store(int half, State& state) const {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
      ::store<2>(state.output + i * 8 + lane % 4 * 2,
                 Pack<float, 2>{output[i * 4 + half * 2], output[i * 4 + half * 2 + 1]});
    if (lane % 4 == 0) ::store<2>(&state.maximum, Pack<float, 2>{maximum[half], total[half]});
  }
};

// Hopper's tensor cores take rows of whole columns of wgmma.cuh, if the rings have the memory.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && HEAD_SIZE % 64 == 0 && WARPS * SLOTS >= 16
#include "attention/sm90/decode_rows_wgmma.cuh"
#else
#include "attention/decode_rows_mma.cuh"
#endif
