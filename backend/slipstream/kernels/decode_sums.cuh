// What a warp keeps of the softmax of up to 8 query heads while tiles go by, whatever the tiles are of: the part that
// decode_columns.cuh and decode_quantized.cuh have in common.
// -D ELEMENT (T: 16 bits), HEAD_SIZE, WINDOWED
#pragma once
#include "decode_part.cuh"
#include "mma.cuh"

class Sums {
 protected:
  const int lane = threadIdx.x % 32;
  float output[STEPS][4];  // two dimensions of every step, each of columns 2t, 2t + 1
  float maximum[2];        // of columns 2t, 2t + 1
  float total[2];          // this lane's share: its tokens

  // Scores of `count` tokens, of which the first `hidden` do not count, become exponentials; what was summed so far is
  // rescaled.
  DEVICE void exponentiate(float (&scores)[2][4], int count, int hidden, float scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int token = i * 16 + lane / 4 + j / 2 * 8;
        scores[i][j] =
            token < count && !(WINDOWED && token < hidden) ? scores[i][j] * scale : -INFINITE;
      }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float highest = fmaxf(fmaxf(scores[0][c], scores[0][c + 2]), fmaxf(scores[1][c], scores[1][c + 2]));
      highest = fmaxf(highest, maximum[c]);
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2)
        highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, mask));
      const float factor = exp2_fast(maximum[c] - highest);
      maximum[c] = highest;
      total[c] *= factor;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        output[step][c] *= factor;
        output[step][c + 2] *= factor;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = c; j < 4; j += 2) {
          scores[i][j] = exp2_fast(scores[i][j] - highest);
          total[c] += scores[i][j];
        }
    }
  }

 public:
  DEVICE void clear() {
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int j = 0; j < 4; ++j) output[step][j] = 0.0f;
    maximum[0] = maximum[1] = -INFINITE;
    total[0] = total[1] = 0.0f;
  }
  DEVICE void sum_totals() {
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2)
        total[c] += __shfl_xor_sync(ALL_LANES, total[c], mask);
  }
};
