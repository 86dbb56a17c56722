// The online softmax of FlashAttention-2 (Dao, 2023) for query rows whose scores four lanes hold: of every eight tokens
// lane t % 4 has 2t and 2t + 1, of row g + 8 half at [4 i + 2 half + j].
#pragma once
#include "runtime/common.cuh"

// The largest of a row's first TOKENS scores, and of `before`.
template <int TOKENS, int N>
DEVICE float highest_score(const float (&scores)[N], int half, float before) {
  float highest[2] = {before, -INFINITE};
#pragma unroll
  for (int i = 0; i < TOKENS / 8; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) highest[j] = fmaxf(highest[j], scores[i * 4 + half * 2 + j]);
  float result = fmaxf(highest[0], highest[1]);
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2) result = fmaxf(result, __shfl_xor_sync(ALL_LANES, result, mask));
  return result;
}

// A row's first TOKENS scores become exponentials; their sum, of this lane's tokens, and `before`.
template <int TOKENS, int N>
DEVICE float exponentiate_row(float (&scores)[N], int half, float scale, float base, float before) {
  float sums[2] = {before, 0.0f};
#pragma unroll
  for (int i = 0; i < TOKENS / 8; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float& score = scores[i * 4 + half * 2 + j];
      score = exp2_fast(fmaf(score, scale, -base));
      sums[j] += score;
    }
  return sums[0] + sums[1];
}
