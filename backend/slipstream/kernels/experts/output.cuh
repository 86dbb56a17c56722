// The end of a product of 16 weight rows of an expert and up to eight rows, whose width WARPS warps share out: their parts
// of a sum are added in the order of warps.
// -D ELEMENT, FP8, GATED (see pieces.cuh)
#pragma once
#include "experts/chunks.cuh"

constexpr int WARPS = 4;
constexpr int OUTPUTS = GATED ? 8 : 16;  // of 16 weight rows

using Parts = float[WARPS][16][ROWS + 1];

DEVICE void keep(Parts& parts, int warp, const float (&sums)[4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) parts[warp][g + i / 2 * 8][2 * t + i % 2] = sums[i];
}

// The output that a thread finishes; what it takes beside the sum is loaded before the weights.
struct Output {
  const Task& task;
  const int within, row;
  const int column;
  const bool real;
  float scale[2], bias[2];
  float weight = 1.0f;
  T* target;

  // `thread`: of the WARPS.
  DEVICE Output(const Task& task, int thread, int first)
      : task(task), within(thread % OUTPUTS), row(thread / OUTPUTS), column(first + within), real(row < task.count && column < task.outputs) {
    if (!real) return;
#pragma unroll
    for (int stream = 0; stream < 1 + GATED; ++stream) {
      scale[stream] = task.scale(column + stream * task.outputs);
      const int row_of_weights = column + stream * task.outputs;
      bias[stream] = task.adapted(task.bias_of(row_of_weights), task.first + row, row_of_weights);
    }
    i64 place = task.first + row;
    if (!GATED) {
      place = task.pair(row);
      weight = load_fresh<1>(task.weights + place).at[0];
    }
    target = task.out + place * task.outputs + column;
  }

  DEVICE void finish(const Parts& sums) const {
    if (!real) return;
    float value = total(sums, within) * scale[0] + bias[0];
    if (GATED) value = gated(value, total(sums, within + 8) * scale[1] + bias[1], task.gate);
    *target = from_float<T>(value * weight);
  }

 private:
  DEVICE float total(const Parts& sums, int weight_row) const {
    float sum = sums[0][weight_row][row];
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) sum += sums[warp][weight_row][row];
    return sum;
  }
};
