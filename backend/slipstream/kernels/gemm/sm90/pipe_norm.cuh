// The RMS norm of the rows of x that pass through a ring (packed_pipe.cu, NORM): two warps multiply what came by the norm's
// weight, in place, each number rounded once, and leave the sums of squares of rows, which scale their sums at the end.
// -D ELEMENT (T), COLUMNS (rows of x), NORM (1: by RMS; 2: weights of the norm are less 1)
#pragma once
#include "gemm/codes.cuh"

constexpr int NORM_WARPS = 2;                // each has 64 inputs of a block
constexpr int LANES_A_ROW = 8;               // 16 bytes each
constexpr int ROWS_AT_ONCE = 32 / LANES_A_ROW, ROWS_A_LANE = COLUMNS / ROWS_AT_ONCE;

struct RowNorm {
  const T* weight;
  u32 num_inputs;
  float eps, inverse_width;
  float (*squares)[NORM_WARPS];  // of a row of x, by warps

  DEVICE float inverse_rms(u32 row) const {
    return rsqrtf((squares[row][0] + squares[row][1]) * inverse_width + eps);
  }
  // Of an input and those behind it: zeros behind the end.
  DEVICE Pack<u32, 4> weights(u32 input) const {
    return input < num_inputs ? load<4>(reinterpret_cast<const u32*>(weight + input)) : Pack<u32, 4>{};
  }
};

DEVICE void unpack_pair(u32 pair, float (&values)[2]) {
  T halves[2];
  halves[0].bits = u16(pair), halves[1].bits = u16(pair >> 16);
  values[0] = to_float(halves[0]), values[1] = to_float(halves[1]);
}

// Of a row of a block: its 16 bytes of this lane.
DEVICE void normalise_piece(u32* place, const Pack<u32, 4>& weights, float& squares) {
  auto pairs = load<4>(place);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float values[2];
    unpack_pair(pairs.at[i], values);
    squares = fmaf(values[1], values[1], fmaf(values[0], values[0], squares));
    pairs.at[i] = fma_pairs(pairs.at[i], weights.at[i], NORM == 2 ? pairs.at[i] : 0x80008000, T{});
  }
  store<4>(place, pairs);
}

// By two warps: what arrives at `came` of a slot arrives at `full`, normalised but for the factors of rows.
template <class Task, class Shared>
DEVICE void normalise_rows(const Task& task, const Shared& shared, const RowNorm& norm, u32 warp) {
  const u32 lane = threadIdx.x % 32, unit = lane % LANES_A_ROW, first = lane / LANES_A_ROW;
  const u32 num_rows = task.last_row - task.first_row, input = warp * 64 + unit * 8;
  const u32 place = warp * (COLUMNS * 128) + first * 128 + (unit ^ first) * 16;
  float squares[ROWS_A_LANE] = {};
  RingPosition next;
  auto weights = norm.weights(task.begin * BLOCK_INPUTS + input);
  for (int block = task.begin; block < task.end; ++block) {
    const auto coming = norm.weights((block + 1) * BLOCK_INPUTS + input);
    barrier_wait(shared.came(next.slot), next.parity);
#pragma unroll
    for (int i = 0; i < ROWS_A_LANE; ++i) {
      if (i * ROWS_AT_ONCE >= num_rows) break;  // a row of the last four that is not there is zeros
      u8* row = shared.rows(next.slot) + i * (ROWS_AT_ONCE * 128);
      normalise_piece(reinterpret_cast<u32*>(row + (i % 2 == 0 ? place : place ^ 64)), weights, squares[i]);
    }
    if (block + 1 == task.end) {
#pragma unroll
      for (int i = 0; i < ROWS_A_LANE; ++i) {
#pragma unroll
        for (int mask = LANES_A_ROW / 2; mask > 0; mask /= 2)
          squares[i] += __shfl_xor_sync(ALL_LANES, squares[i], mask);
        if (unit == 0) norm.squares[first + i * ROWS_AT_ONCE][warp] = squares[i];
      }
    }
    fence_async();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.full(next.slot));
    weights = coming;
    next.advance(task.num_slots);
  }
}
