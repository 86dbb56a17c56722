// The activations of gates, on which every kernel that applies them agrees to the bit.
// -D ELEMENT (T)
#pragma once
#include "runtime/common.cuh"

// x times the logistic function of y. Of 16 bits, what approximations lose is far below the result's rounding, and exact
// arithmetic would take longer than memory.
DEVICE float times_logistic(float x, float y) {
  return sizeof(T) == 2 ? times_logistic_fast(x, y) : x / (1.0f + expf(-y));
}
struct Silu {
  DEVICE float operator()(float x) const { return times_logistic(x, x); }
};
// x * Phi(x), by tanh: 0.5 * (1 + tanh(y)) is the logistic function of 2y.
struct Gelu {
  DEVICE float operator()(float x) const {
    return times_logistic(x, 1.5957691216057308f * (x + 0.044715f * x * x * x));
  }
};
