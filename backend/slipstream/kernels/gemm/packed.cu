// y = x W^T for up to COLUMNS rows of x and weights in fewer bits, about as fast as these can be read: mma.sync with the
// weights as A. A CTA has some tiles of 16 rows of the weights. Its warps share out the inputs, block by block; each
// streams its own blocks of all tiles through a ring that no other warp reads, and what it needs of x beside them. At
// the end the warps' sums are added up, always in the same order. Weights are copied from before the previous kernel's
// end on.
// -D ELEMENT (T), BITS, CODE_TYPE, SCALE, PARTS, ZEROS, RECORD (codes.cuh), COLUMNS (8, 16, 32), TILES (at a time), WARPS, SLOTS (of
// a ring)
#include "gemm/packed_rows.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int X_PITCH = BLOCK_INPUTS * 2 + 16;             // bytes of a row of x in a slot
constexpr int X_SLOTS = (SLOTS - 1 + TILES - 1) / TILES + 1;  // blocks of x that SLOTS blocks of weights may need

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

// ---- the end ----

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
  u8* zero_bytes = shared_bytes + PLACE_BYTES;
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
      InputSums inputs;
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        copy_wait<SLOTS - 2>();
        __syncwarp();
        if (t == 0) {
          load_x<X_PITCH>(b, x_ring + x_slot * x_slot_bytes, shared_address(zero_bytes), task.num_rows);
          inputs.take(b);
        }
        if (task.exists(first, t)) multiply_block(sums[t], Block(ring + slot * BLOCK_BYTES), b, inputs);
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
