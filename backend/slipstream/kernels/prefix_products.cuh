// Products of query rows with a tile of tokens that all warps read: on Hopper by warpgroups, 64 rows at a time, else by
// warps, 16. Either way a lane 4 g + t of a warp has what mma.cuh says of its rows g and g + 8; sum [4 i + 2 h + j] is of
// row g + 8 h and column 8 i + 2 t + j.
// -D ELEMENT (T: 16 bits), HEAD_SIZE, WARPS
#pragma once
#include "decode_ring.cuh"
#include "mma.cuh"
#include "prefixes.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && HEAD_SIZE % 64 == 0 && WARPS % 4 == 0
#define BY_WARPGROUPS 1
#include "wgmma.cuh"
#else
#define BY_WARPGROUPS 0
#endif

constexpr int SHARED_BYTES = SHARED_TILE * ROW_BYTES;  // of a tile's K, or V
constexpr int TOGETHER_ROWS = BY_WARPGROUPS ? 64 : 16;  // whose warps multiply together

#if BY_WARPGROUPS

constexpr int TILE_COLUMN = SHARED_TILE * 128;  // bytes of 64 dimensions of a tile

// Where in a tile a chunk of a token lies.
DEVICE int tile_offset(int token, int chunk) { return chunk / 8 * TILE_COLUMN + token * 128 + (chunk ^ token) % 8 * 16; }

// After this thread's copies of a tile have ended, before the barrier behind which products read it.
DEVICE void tile_arrived() { fence_async(); }

// scores = Q K^T
DEVICE void score_tile(float (&scores)[SHARED_TILE / 2], const u32 (&query)[STEPS][4], u32 keys) {
  const u64 b = rows_descriptor(keys);
  pin(scores);
  products_begin();
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
    multiply(scores, query[step], advance(b, step / 4 * TILE_COLUMN + step % 4 * 32), step > 0, T{});
  products_commit();
  products_wait<0>();
  pin(scores);
}

// output += P V
DEVICE void add_tile(float (&output)[HEAD_SIZE / 2], const u32 (&weights)[SHARED_TILE / 16][4], u32 values) {
  const u64 b = columns_descriptor(values, TILE_COLUMN);
  pin(output);
  products_begin();
#pragma unroll
  for (int step = 0; step < SHARED_TILE / 16; ++step) multiply_add(output, weights[step], advance(b, step * 2048), T{});
  products_commit();
  products_wait<0>();
  pin(output);
}

#else

DEVICE int tile_offset(int token, int chunk) { return chunk_offset(token, chunk); }

DEVICE void tile_arrived() {}

// Four sums of a row's eight columns, and of those of row g + 8.
DEVICE void multiply_eight(float* sums, const u32 (&a)[4], u32 b0, u32 b1) {
  multiply_add(*reinterpret_cast<float(*)[4]>(sums), a, b0, b1, T{});
}

DEVICE void score_tile(float (&scores)[SHARED_TILE / 2], const u32 (&query)[STEPS][4], u32 keys) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < SHARED_TILE / 2; ++i) scores[i] = 0.0f;
  const u32 own = keys + chunk_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int i = 0; i < SHARED_TILE / 16; ++i) {
      u32 key[4];  // tokens 0-7: dimensions 0-7, 8-15; tokens 8-15: the same
      load_matrices(key, at_step(own, step) + i * 16 * ROW_BYTES);
      multiply_eight(scores + 8 * i, query[step], key[0], key[1]);
      multiply_eight(scores + 8 * i + 4, query[step], key[2], key[3]);
    }
}

DEVICE void add_tile(float (&output)[HEAD_SIZE / 2], const u32 (&weights)[SHARED_TILE / 16][4], u32 values) {
  const int lane = threadIdx.x % 32;
  const u32 own = values + chunk_offset(lane % 8 + lane / 8 % 2 * 8, lane / 16);
#pragma unroll
  for (int i = 0; i < SHARED_TILE / 16; ++i)
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      u32 value[4];  // dimensions 0-7: tokens 0-7, 8-15; dimensions 8-15: the same
      load_transposed(value, at_step(own, step) + i * 16 * ROW_BYTES);
      multiply_eight(output + 8 * step, weights[i], value[0], value[1]);
      multiply_eight(output + 8 * step + 4, weights[i], value[2], value[3]);
    }
}

#endif
