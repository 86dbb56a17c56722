// A tile of places of an expert: its rows, what the epilogue takes beside sums, and the gate.
// -D ELEMENT (T: Half or BFloat16), GATED (whether rows [gate | up] of weights give act(gate) * up of places; else rows give
// outputs of pairs, times the pair's weight), TERMS (1: adapters add to sums of places, before the gate; default 0)
#pragma once
#include "runtime/common.cuh"

#ifndef TERMS
#define TERMS 0
#endif

enum Gate { SILU, CLAMPED };

DEVICE float gated(float gate, float up, int kind) {
  if (kind == SILU) return silu_fast(gate) * up;
  gate = fminf(gate, 7.0f);
  up = fminf(fmaxf(up, -7.0f), 7.0f);
  return times_logistic_fast(gate, 1.702f * gate) * (up + 1.0f);
}

struct Task {
  const T* x;
  i64 x_stride;
  const u8* weight;      // [e, rows, width]
  const float* scales;   // [e, rows], or null
  const T* bias;         // [e, rows], or null
  const int* order;      // pair of each place
  const float* weights;  // of pairs
  T* out;                // [p, outputs]
  int width, outputs, top_k, gate;
  int expert, first, count;  // of the tile: places first .. first + count - 1
#if TERMS
  const T* added;    // [p, rows]: what adapters add
  const int* marks;  // [p]: 1: of the place there is such
#endif

  DEVICE int rows() const { return GATED ? 2 * outputs : outputs; }
  DEVICE i64 row_of_all(int row) const { return i64(expert) * rows() + row; }
  DEVICE int pair(int i) const { return load_fresh<1>(order + first + i).at[0]; }
  DEVICE const T* x_row(int i) const { return x + i64(GATED ? pair(i) / top_k : first + i) * x_stride; }
  DEVICE float scale(int row) const { return scales == nullptr ? 1.0f : scales[row_of_all(row)]; }
  DEVICE float bias_of(int row) const { return bias == nullptr ? 0.0f : to_float(bias[row_of_all(row)]); }
  // A sum of a place and a weight row, with what an adapter adds to it.
  DEVICE float adapted(float sum, i64 place, int row) const {
#if TERMS
    if (load_fresh<1>(marks + place).at[0] != 0) sum += to_float(load_fresh<1>(added + place * rows() + row).at[0]);
#endif
    return sum;
  }
};

#if TERMS
#define ADDED_PARAMETERS , const T *added, const int *marks
#define ADDED , added, marks
#else
#define ADDED_PARAMETERS
#define ADDED
#endif

#define PARAMETERS                                                                                                   \
  const T *x, i64 x_stride, const u8 *weight, const float *scales, const T *bias, const int *order,                  \
      const float *weights, const int *tiles, T *out, i64 width, i64 outputs, i64 top_k, i64 gate ADDED_PARAMETERS

// Behind `wait_for_previous`.
#define TASK(tile)                                                                                                   \
  const Pack<int, 4> found = load_fresh<4>(tiles + 4 * i64(tile));                                                   \
  const Task task{x,       x_stride,   weight,      scales,     bias,        order,       weights,    out,           \
                  int(width), int(outputs), int(top_k), int(gate), found.at[0], found.at[1], found.at[2] ADDED}
