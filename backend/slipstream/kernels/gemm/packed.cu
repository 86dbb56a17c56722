// y = x W^T for up to COLUMNS rows of x and weights in fewer bits, about as fast as these can be read: mma.sync with the
// weights as A. A CTA has some tiles of 16 rows of the weights. Its warps share out the inputs, block by block; each
// streams its own blocks of all tiles through a ring that no other warp reads, and what it needs of x beside them. At
// the end the warps' sums are added up, always in the same order. Weights are copied from before the previous kernel's
// end on.
// -D ELEMENT (T), BITS, FLOATS, SCALE, PARTS, ZEROS (codes.cuh), COLUMNS (8, 16, 32), TILES (at a time), WARPS, SLOTS (of a ring)
#include "gemm/codes.cuh"
#include "runtime/mma.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int PIECES = COLUMNS / 8;
constexpr int X_PITCH = BLOCK_INPUTS * 2 + 16;             // bytes of a row of x in a slot
constexpr int X_SLOTS = (SLOTS - 1 + TILES - 1) / TILES + 1;  // blocks of x that SLOTS blocks of weights may need
constexpr int ROW_PITCH = 20;                              // of 16 sums
constexpr int HALF = WARPS / 2;                            // warps that have a place for sums

extern __shared__ __align__(128) u8 shared_bytes[];

struct Task {
  Codes weights;
  const float* factors;  // of the weights' rows, or null
  const T *x, *bias;
  T* out;
  i64 x_stride, out_stride;
  u32 num_rows;  // of x
  u32 num_inputs;
  u32 num_outputs;
  u32 num_tiles;  // of the weights
  bool gated;     // silu(gate) * up: a CTA has a tile of ups for each of gates
  bool adds;      // to `out`
  u32 begin, end;  // this CTA's tiles, or pairs

  DEVICE u32 at_once() const { return gated ? TILES / 2 : TILES; }
  // Of those that a CTA has at once, from `first` on.
  DEVICE u32 tile(u32 first, int i) const {
    const bool is_up = gated && i >= TILES / 2;
    return first + (is_up ? num_tiles / 2 + i - TILES / 2 : i);
  }
  DEVICE bool exists(u32 first, int i) const { return first + (gated && i >= TILES / 2 ? i - TILES / 2 : i) < end; }
};

// What a warp copies next; it walks the same blocks as the warp itself, SLOTS - 1 of them ahead.
struct Ahead {
  const Task& task;
  const u32 ring, x_ring;
  const u64 policy = evict_first();
  u32 first, block = threadIdx.x / 32, slot = 0, x_slot = 0;
  int tile = 0;

  DEVICE Ahead(const Task& task, u32 ring, u32 x_ring) : task(task), ring(ring), x_ring(x_ring), first(task.begin) {
    if (block >= task.weights.num_blocks) first = task.end;
  }
  DEVICE void copy_weights() const {
    if (first < task.end && task.exists(first, tile))
      task.weights.copy(ring + slot * BLOCK_BYTES, task.tile(first, tile), block, policy);
  }
  // The inputs of a block come with the first of its tiles. Where there are none, zeros.
  DEVICE void copy_x() const {
    if (first >= task.end || tile > 0) return;
    const u32 target = x_ring + x_slot * task.num_rows * X_PITCH;
    for (u32 i = threadIdx.x % 32; i < task.num_rows * 16; i += 32) {
      const u32 row = i / 16, input = block * BLOCK_INPUTS + i % 16 * 8;
      const bool inside = input < task.num_inputs;
      copy_async_bytes<16>(target + row * X_PITCH + i % 16 * 16, task.x + row * task.x_stride + (inside ? input : 0),
                           inside ? 16 : 0);
    }
  }
  DEVICE void advance() {
    slot = slot + 1 == SLOTS ? 0 : slot + 1;
    if (++tile < TILES) return;
    tile = 0;
    x_slot = x_slot + 1 == X_SLOTS ? 0 : x_slot + 1;
    block += WARPS;
    if (block < task.weights.num_blocks) return;
    block = threadIdx.x / 32;
    first += task.at_once();
  }
};

// B fragments of a block, for all pieces of eight rows of x. Rows that do not exist are read from zeros.
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

// Sums of the inputs of each part of a block, of columns 2 t and 2 t + 1: times ones.
DEVICE void sum_x(float (&sums)[PIECES][SUM_PARTS][2], const u32 (&b)[PIECES][STEPS][2]) {
  constexpr u32 ONES = IS_FP16<T> ? 0x3c003c00 : 0x3f803f80;
  const u32 ones[4] = {ONES, ONES, ONES, ONES};
#pragma unroll
  for (int p = 0; p < PIECES; ++p)
#pragma unroll
    for (int part = 0; part < SUM_PARTS; ++part) {
      float of_part[4] = {};
#pragma unroll
      for (int i = 0; i < STEPS_A_SUM; ++i) {
        const int step = part * STEPS_A_SUM + i;
        multiply_add(of_part, ones, b[p][step][0], b[p][step][1], T{});
      }
      sums[p][part][0] = of_part[0], sums[p][part][1] = of_part[1];
    }
}

// sums += the block's part of the product; a part of it is summed up before its scale.
DEVICE void multiply_block(float (&sums)[PIECES][4], const Block& block, const u32 (&b)[PIECES][STEPS][2],
                           const float (&x_sums)[PIECES][SUM_PARTS][2]) {
  Pack<u32, 4> quads[QUADS];
#pragma unroll
  for (int i = 0; i < QUADS; ++i) quads[i] = block.quad(i);
#pragma unroll
  for (int part = 0; part < SUM_PARTS; ++part) {
    float of_part[PIECES][4] = {};
#pragma unroll
    for (int i = 0; i < STEPS_A_SUM; ++i) {
      const int step = part * STEPS_A_SUM + i, of_operand = step / STEPS_A_PART;
      u32 a[4];
      decode(a, quads[step / STEPS_A_QUAD].at + step % STEPS_A_QUAD * (BITS / 4), block.operand(of_operand, 0),
             block.operand(of_operand, 1));
#pragma unroll
      for (int p = 0; p < PIECES; ++p) multiply_add(of_part[p], a, b[p][step][0], b[p][step][1], T{});
    }
    if constexpr (LATE_ZEROS) {
      const float excess[2] = {block.excess(part, 0), block.excess(part, 1)};
#pragma unroll
      for (int p = 0; p < PIECES; ++p)
#pragma unroll
        for (int j = 0; j < 4; ++j) of_part[p][j] -= excess[j / 2] * x_sums[p][part][j % 2];
    }
    const float scales[2] = {block.scale(part, 0), block.scale(part, 1)};
#pragma unroll
    for (int p = 0; p < PIECES; ++p)
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[p][j] += scales[j / 2] * of_part[p][j];
  }
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

DEVICE void finish(const Task& task, float* places, float (&sums)[TILES][PIECES][4], u32 first) {
  const u32 warp = threadIdx.x / 32, half = task.num_tiles * 8;
  __syncthreads();  // the sums of the tiles before have been read
  if (warp >= HALF) put_sums(places, warp - HALF, sums, false);
  __syncthreads();
  if (warp < HALF) put_sums(places, warp, sums, true);
  __syncthreads();
  for (u32 i = threadIdx.x; i < task.at_once() * task.num_rows * 16; i += THREADS) {
    const u32 row = i % 16, column = i / 16 % task.num_rows, tile = i / 16 / task.num_rows;
    const u32 output = (first + tile) * 16 + row;
    if (!task.exists(first, tile) || output >= task.num_outputs) continue;
    float value = total(places, tile, column, row);
    if (task.factors != nullptr) value *= task.factors[output];
    if (task.bias != nullptr) value += to_float(task.bias[output]);
    if (task.gated) {
      float up = total(places, tile + TILES / 2, column, row);
      if (task.factors != nullptr) up *= task.factors[half + output];
      if (task.bias != nullptr) up += to_float(task.bias[half + output]);
      value = silu_fast(value) * up;
    }
    T* target = task.out + column * task.out_stride + output;
    if (task.adds) value += to_float(load_fresh<1>(target).at[0]);
    *target = from_float<T>(value);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    packed(const u8* codes, const u8* scales, const u8* zeros, const float* factors, const T* x, const T* bias, T* out,
           i64 x_stride, i64 out_stride, i64 num_rows, i64 num_inputs, i64 num_outputs, i64 num_tiles, i64 num_groups,
           i64 group_factor, i64 share, i64 gated, i64 adds) {
  start_next();
  const u32 units = gated != 0 ? num_tiles / 2 : num_tiles, begin = blockIdx.x * u32(share);
  const u32 num_blocks = (num_inputs + BLOCK_INPUTS - 1) / BLOCK_INPUTS;
  const Task task{{codes, scales, zeros, num_blocks, u32(num_groups), u32(group_factor)},
                  factors, x, bias, out, x_stride, out_stride, u32(num_rows), u32(num_inputs), u32(num_outputs),
                  u32(num_tiles), gated != 0, adds != 0, begin, min(begin + u32(share), units)};
  const u32 warp = threadIdx.x / 32, x_slot_bytes = task.num_rows * X_PITCH;
  float* places = reinterpret_cast<float*>(shared_bytes);
  u8* zero_bytes = shared_bytes + HALF * TILES * COLUMNS * ROW_PITCH * sizeof(float);
  u8* ring = zero_bytes + 16 + warp * (SLOTS * BLOCK_BYTES + X_SLOTS * x_slot_bytes);
  const u32 x_ring = shared_address(ring) + SLOTS * BLOCK_BYTES;
  if (threadIdx.x < 4) reinterpret_cast<u32*>(zero_bytes)[threadIdx.x] = 0;
  Ahead ahead(task, shared_address(ring), x_ring);
  Ahead ahead_of_x = ahead;
  for (int i = 0; i < SLOTS - 1; ++i) {
    ahead.copy_weights();
    ahead.advance();
  }
  wait_for_previous();
  for (int i = 0; i < SLOTS - 1; ++i) {
    ahead_of_x.copy_x();
    ahead_of_x.advance();
  }
  copy_commit();
  copy_wait<0>();
  __syncthreads();
  u32 slot = 0, x_slot = 0;
  for (u32 first = task.begin; first < task.end; first += task.at_once()) {
    float sums[TILES][PIECES][4] = {};
#pragma unroll 1
    for (u32 block = warp; block < num_blocks; block += WARPS) {
      u32 b[PIECES][STEPS][2];
      float x_sums[PIECES][SUM_PARTS][2];
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        copy_wait<SLOTS - 2>();
        __syncwarp();
        if (t == 0) load_x(b, x_ring + x_slot * x_slot_bytes, shared_address(zero_bytes), task.num_rows);
        if (LATE_ZEROS && t == 0) sum_x(x_sums, b);
        if (task.exists(first, t)) multiply_block(sums[t], Block(ring + slot * BLOCK_BYTES), b, x_sums);
        __syncwarp();
        ahead.copy_weights();
        ahead.copy_x();
        ahead.advance();
        copy_commit();
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
      }
      x_slot = x_slot + 1 == X_SLOTS ? 0 : x_slot + 1;
    }
    finish(task, places, sums, first);
  }
}
