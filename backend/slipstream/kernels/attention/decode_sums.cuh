// What a warp keeps of the softmax of up to 8 query heads while tiles go by, whatever the tiles are of: the part that
// all formats of the cache have in common.
// -D ELEMENT (T: 16 bits), HEAD_SIZE, WINDOWED, SINKS, SCORES (scores.cuh), FORMAT (kv_format.cuh)
#pragma once
#include "attention/decode_part.cuh"
#include "attention/scores.cuh"
#include "runtime/mma.cuh"

constexpr int BANDS = TILE / 16;  // of tokens: the rows of a fragment
// Fragments of the output, and of int4 what its zeros come to in each group.
constexpr int FRAGMENTS = STEPS + (FORMAT == INT4 ? int(GROUPS) : 0);
// Exponentials are at most 2 to the power of minus this: so those of int4 times their scales fit in float16.
constexpr float MARGIN = FORMAT == INT4 ? 1.0f : 0.0f;
constexpr bool ARE_SCALED = SCORES == CAPPED || SCORES == SLOPED;  // scores, by what changes them

class Sums {
 protected:
  const int lane = threadIdx.x % 32;
  float output[FRAGMENTS][4];  // two dimensions of every step, each of columns 2t, 2t + 1
  float maximum[2];            // of columns 2t, 2t + 1, and MARGIN
  float total[2];              // this lane's share: its tokens

  // Scores of `count` tokens, of which the first `hidden` do not count, but the first `sinks` do, become exponentials
  // of `scale` (positive) times them; what was summed so far is rescaled.
  DEVICE void exponentiate(float (&scores)[BANDS][4], int count, int hidden, float scale, int sinks = 0) {
    if (count < TILE || (WINDOWED && hidden > 0)) hide(scores, count, hidden, sinks);
    if (ARE_SCALED) scale = 1.0f;
    float highest[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      highest[c] = fmaxf(scores[0][c], scores[0][c + 2]);
#pragma unroll
      for (int i = 1; i < BANDS; ++i) highest[c] = fmaxf(highest[c], fmaxf(scores[i][c], scores[i][c + 2]));
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2)
        highest[c] = fmaxf(highest[c], __shfl_xor_sync(ALL_LANES, highest[c], mask));
      highest[c] = fmaxf(fmaf(highest[c], scale, MARGIN), maximum[c]);
    }
    // Once some tiles have gone by it is rare that one has a new maximum. Over bytes a branch costs registers that 12
    // warps do not have.
    if (FORMAT == E4M3 || FORMAT == INT8 ||
        __any_sync(ALL_LANES, highest[0] > maximum[0] || highest[1] > maximum[1]))
      rescale(highest);
#pragma unroll
    for (int i = 0; i < BANDS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        scores[i][j] = exp2_fast(fmaf(scores[i][j], scale, -highest[j % 2]));
        total[j % 2] += scores[i][j];
      }
  }

 private:
  DEVICE void hide(float (&scores)[BANDS][4], int count, int hidden, int sinks) const {
#pragma unroll
    for (int i = 0; i < BANDS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int token = i * 16 + lane / 4 + j / 2 * 8;
        const bool is_hidden = WINDOWED && token < hidden && !(SINKS && token < sinks);
        if (token >= count || is_hidden) scores[i][j] = -INFINITE;
      }
  }
  DEVICE void rescale(const float (&highest)[2]) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float factor = exp2_fast(maximum[c] - highest[c]);
      maximum[c] = highest[c];
      total[c] *= factor;
#pragma unroll
      for (int i = 0; i < FRAGMENTS; ++i) {
        output[i][c] *= factor;
        output[i][c + 2] *= factor;
      }
    }
  }

 public:
  // What queries and keys of a tile make becomes scores, if these are changed. The query is the last of `count` tokens
  // from the tile's first on; `own` is of columns 2t, 2t + 1.
  DEVICE void change(float (&scores)[BANDS][4], const float (&own)[2], float scale, float cap, int count) const {
    if constexpr (ARE_SCALED) {
#pragma unroll
      for (int i = 0; i < BANDS; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int token = i * 16 + lane / 4 + j / 2 * 8;
          scores[i][j] = score_of(scores[i][j], scale, cap, own[j % 2], token - (count - 1));
        }
    }
  }
  // What columns have before the first token: a score, if SINKING, of which nothing comes.
  DEVICE void start(const float (&own)[2]) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      maximum[c] = own[c] + MARGIN;
      total[c] = lane / 4 == 0 ? exp2_fast(-MARGIN) : 0.0f;
    }
  }
  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < FRAGMENTS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) output[i][j] = 0.0f;
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
