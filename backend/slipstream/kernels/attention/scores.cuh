// What becomes of the product of a query and a key before the softmax: scores.py.
// -D SCORES (0: it is scaled; 1: and capped; 2: ALiBi; 3: as 0, and each query head has a score of its own)
#pragma once
#include "runtime/common.cuh"

#ifndef SCORES
#define SCORES 0
#endif
enum { CAPPED = 1, SLOPED = 2, SINKING = 3 };
static_assert(SCORES >= 0 && SCORES <= SINKING, "one change at most");

// What a kernel takes of it besides the scale.
struct ScoreInputs {
  float cap;           // if CAPPED
  const float* heads;  // of each query head: if SLOPED its slope, if SINKING its score

  // Of a query head, times log2(e): the softmax is in base 2.
  DEVICE float of(int head) const { return SCORES >= SLOPED ? heads[head] * LOG2_E : 0.0f; }
};

// A product's score, times log2(e), as `scale` has it; `distance` is from the query to the key, 0 or less.
DEVICE float score_of(float product, float scale, float cap, float slope, int distance) {
  if (SCORES == CAPPED) {
    // cap * tanh(x / cap), where tanh(y) is 1 - 2 / (exp(2 y) + 1).
    const float power = exp2_fast(product * scale * (2.0f / cap));
    return cap * LOG2_E * fmaf(-2.0f, reciprocal_fast(power + 1.0f), 1.0f);
  }
  if (SCORES == SLOPED) return fmaf(product, scale, slope * float(distance));
  return product * scale;
}
