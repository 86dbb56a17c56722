// What a warp does with blocks of packed weights (codes.cuh) and a few rows of x, by mma.sync: the weights are A. And how
// the sums of warps that share out the inputs become one.
// -D ELEMENT (T), COLUMNS (8, 16, 32), TILES (whose sums a warp has at a time), WARPS, and those of codes.cuh
#pragma once
#include "gemm/codes.cuh"
#include "runtime/mma.cuh"

constexpr int PIECES = COLUMNS / 8;
constexpr int ROW_PITCH = 20;     // of 16 sums
constexpr int HALF = WARPS / 2;   // warps that have a place for sums
constexpr int PLACE_BYTES = HALF * TILES * COLUMNS * ROW_PITCH * int(sizeof(float));

// B fragments of a block, for all pieces of eight rows of x, X_PITCH bytes apart. Rows that do not exist are read from
// zeros.
template <int X_PITCH>
DEVICE void load_x(u32 (&b)[PIECES][STEPS][2], u32 slot, u32 zeros, u32 num_rows) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll
  for (int p = 0; p < PIECES; ++p) {
    const u32 row = p * 8 + lane % 8;
    const u32 address = row < num_rows ? slot + row * X_PITCH + lane / 8 * 16 : zeros;
    const u32 step_bytes = row < num_rows ? 64 : 0;  // of two steps
#pragma unroll
    for (int s = 0; s < STEPS; s += 2) {
      u32 both[4];
      load_matrices(both, address + s / 2 * step_bytes);
      b[p][s][0] = both[0], b[p][s][1] = both[1];
      b[p][s + 1][0] = both[2], b[p][s + 1][1] = both[3];
    }
  }
}

// Sums of the inputs of a block's parts, for the two rows of x of which a lane has sums: minimums multiply them. The
// tensor cores add them up, multiplied by ones.
struct InputSums {
  float at[MINIMUMS ? PARTS : 1][PIECES][2];

  DEVICE void take(const u32 (&b)[PIECES][STEPS][2]) {
    if constexpr (!MINIMUMS) return;
    constexpr u32 ONES = IS_FP16<T> ? 0x3c003c00 : 0x3f803f80;
    const u32 a[4] = {ONES, ONES, ONES, ONES};
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
      for (int p = 0; p < PIECES; ++p) {
        float sums[4] = {};
#pragma unroll
        for (int step = part * STEPS_A_PART; step < (part + 1) * STEPS_A_PART; ++step)
          multiply_add(sums, a, b[p][step][0], b[p][step][1], T{});
        at[part][p][0] = sums[0], at[part][p][1] = sums[1];
      }
  }
};

// Adds what minimums give of a part; what is returned depends on what was read.
DEVICE u32 add_minimums(float (&sums)[PIECES][4], const Block& block, const InputSums& inputs, int part) {
  const float minimums[2] = {block.minimum(part, 0), block.minimum(part, 1)};
#pragma unroll
  for (int p = 0; p < PIECES; ++p)
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[p][j] += minimums[j / 2] * inputs.at[part][p][j % 2];
  return __float_as_uint(minimums[1]);
}

// sums += the block's part of the product; a part of it is summed up before its scale. What is returned depends on
// everything that was read of the block.
DEVICE u32 multiply_block(float (&sums)[PIECES][4], const Block& block, const u32 (&b)[PIECES][STEPS][2],
                          const InputSums& inputs) {
  Pack<u32, 4> quads[QUADS];
  u32 seen = 0;
#pragma unroll
  for (int i = 0; i < QUADS; ++i) {
    quads[i] = block.quad(i);
    seen ^= quads[i].at[3];
  }
#pragma unroll
  for (int part = 0; part < SUM_PARTS; ++part) {
    float of_part[PIECES][4] = {};
#pragma unroll
    for (int i = 0; i < STEPS_A_SUM; ++i) {
      const int step = part * STEPS_A_SUM + i, of_operand = step / STEPS_A_PART;
      u32 a[4];
      const u32 operands[2] = {block.operand(of_operand, 0), block.operand(of_operand, 1)};
      if ((SCALES_NUMBERS || ZEROS) && step % STEPS_A_PART == 0) seen ^= operands[1];
      decode(a, quads[step / STEPS_A_QUAD].at + step % STEPS_A_QUAD * (BITS / 4), operands[0], operands[1]);
#pragma unroll
      for (int p = 0; p < PIECES; ++p) multiply_add(of_part[p], a, b[p][step][0], b[p][step][1], T{});
    }
    const float scales[2] = {block.scale(part, 0), block.scale(part, 1)};
    if (!SCALES_NUMBERS) seen ^= __float_as_uint(scales[1]);
#pragma unroll
    for (int p = 0; p < PIECES; ++p)
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[p][j] += scales[j / 2] * of_part[p][j];
    if (MINIMUMS && part % SCALES_A_PART == 0) seen ^= add_minimums(sums, block, inputs, part / SCALES_A_PART);
  }
  return seen;
}

// ---- the end ----

DEVICE float* sums_at(float* places, u32 warp, int tile) {
  return places + (warp * TILES + tile) * COLUMNS * ROW_PITCH;
}
// The sums of a warp, and those that another left at the same place if `adds`.
DEVICE void put_sums(float* places, u32 warp, float (&sums)[TILES][PIECES][4], bool adds) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int p = 0; p < PIECES; ++p)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float* place = sums_at(places, warp, t) + (p * 8 + lane % 4 * 2 + j % 2) * ROW_PITCH + lane / 4 + 8 * (j / 2);
        *place = adds ? sums[t][p][j] + *place : sums[t][p][j];
      }
}

DEVICE float total(float* places, u32 tile, u32 column, u32 row) {
  float sum = 0.0f;
#pragma unroll
  for (u32 warp = 0; warp < HALF; ++warp) sum += sums_at(places, warp, tile)[column * ROW_PITCH + row];
  return sum;
}
