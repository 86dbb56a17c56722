// GEMMs of experts in e4m3 with places in e4m3 on Hopper's tensor cores (sm_90a): up to ROWS places of an expert by 256 of
// its weight rows. Weights are A and places are B, both in shared memory as they come, so that nobody widens, gathers or
// permutes anything, and tensor cores take a fifth to a half of what memory takes. A CTA has a multiprocessor of its own and
// unit after unit of the product: a lane streams boxes through a ring, those of the next unit while the warpgroups finish
// the one before, so that memory is never idle. A warpgroup has every second tile of 64 weight rows.
// -D ELEMENT (T: of outputs), FP8 (1: of both operands), GATED, TERMS (see task.cuh), ROWS (16, 32, 48, 64, 128: of a tile),
// SLOTS (of the ring)
#include "experts/task.cuh"
#include "gemm/sm90/wgmma_rows.cuh"
#include "runtime/copies.cuh"

constexpr int GROUPS = 2;  // warpgroups that multiply; a warp beside them copies
constexpr int THREADS = GROUPS * 128;
constexpr int TILES = 2;  // of 64 weight rows, of a warpgroup
constexpr int WEIGHT_ROWS = GROUPS * TILES * 64;
constexpr int OUTPUTS = GATED ? WEIGHT_ROWS / 2 : WEIGHT_ROWS;
constexpr int WEIGHTS_BYTES = WEIGHT_ROWS * ROW_BYTES;
constexpr int PLACES_BYTES = ROWS * ROW_BYTES;
constexpr int SLOT_BYTES = WEIGHTS_BYTES + PLACES_BYTES;

extern __shared__ __align__(1024) u8 shared_bytes[];

DEVICE u32 slot_at(int slot) { return shared_address(shared_bytes) + slot * SLOT_BYTES; }
DEVICE u32 full(int slot) { return slot_at(SLOTS) + slot * 16; }
DEVICE u32 empty(int slot) { return full(slot) + 8; }

// Tiles that have places; those that have none are behind them. By all lanes of a warp.
DEVICE int count_tiles(const int* tiles, int num_tiles) {
  u32 count = 0;
  for (int tile = threadIdx.x % 32; tile < num_tiles; tile += 32)
    if (load_fresh<1>(tiles + 4 * tile + 2).at[0] > 0) count = tile + 1;
  return int(__reduce_max_sync(ALL_LANES, count));
}

// The CTA's units: a tile of places by OUTPUTS outputs each, every gridDim.x-th is its own. Those of all tiles by the same
// outputs are side by side, so tiles of one expert find its weights in the L2 cache.
struct Units {
  const int* tiles;
  const int num_tiles, num_units;
  Task task;  // of the unit
  int unit = blockIdx.x;

  DEVICE int first_output() const { return unit / num_tiles * OUTPUTS; }
  DEVICE bool is_real() const { return unit < num_units; }
  DEVICE void read() {
    if (!is_real()) return;
    const Pack<int, 4> found = load_fresh<4>(tiles + 4 * (unit % num_tiles));
    task.expert = found.at[0];
    task.first = found.at[1];
    task.count = found.at[2];
  }
  DEVICE void advance() {
    unit += gridDim.x;
    read();
  }
};

// ---- the lane that copies ----

// Eights of weight rows: gates and their ups come in turn (tensor_map.expert_rows).
DEVICE void copy_weights(const Units& units, const TensorMap* map, int step, int slot, u64 policy) {
  barrier_expect(full(slot), WEIGHTS_BYTES);
  const int at[5] = {step * CHUNK, 0, 0, units.first_output() / 8, units.task.expert};
  copy_box(slot_at(slot), map, at, full(slot), policy);
}
// Places behind the tile's come, too: those of another expert, or zeros.
DEVICE void copy_places(const Units& units, const TensorMap* map, int step, int slot) {
  barrier_expect(full(slot), PLACES_BYTES);
  copy_box(slot_at(slot) + WEIGHTS_BYTES, map, step * CHUNK, units.task.first, full(slot));
}

// The first weights are on their way while places are made.
DEVICE void stream(Units units, const TensorMap* weights, const TensorMap* places, int num_steps) {
  const u64 policy = evict_first();
  int requested = units.is_real() ? min(SLOTS, num_steps) : 0;
  for (int step = 0; step < requested; ++step) copy_weights(units, weights, step, step, policy);
  wait_for_previous();
  RingPosition next;
  for (; units.is_real(); units.advance()) {
    for (int step = 0; step < num_steps; ++step) {
      if (step >= requested) {
        barrier_wait(empty(next.slot), next.parity ^ 1);
        copy_weights(units, weights, step, next.slot, policy);
      }
      copy_places(units, places, step, next.slot);
      next.advance(SLOTS);
    }
    requested = 0;
  }
}

// ---- the warpgroups that multiply ----

using Sums = float[TILES][SUMS];

// A slot of which all has been multiplied.
DEVICE void release(int slot) {
  if (threadIdx.x % 32 == 0) barrier_arrive(empty(slot));
}

DEVICE void multiply_steps(Sums& sums, RingPosition& next, int num_steps) {
  const u32 first_rows = threadIdx.x / 128 * 64 * ROW_BYTES;
  int before = 0;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) pin(sums[tile]);
  for (int step = 0; step < num_steps; ++step) {
    barrier_wait(full(next.slot), next.parity);
    products_begin();
    const u64 a = rows_descriptor(slot_at(next.slot) + first_rows);
    const u64 b = rows_descriptor(slot_at(next.slot) + WEIGHTS_BYTES);
#pragma unroll
    for (int k = 0; k < ROW_BYTES; k += 32)
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
        multiply_rows(sums[tile], advance(a, tile * GROUPS * 64 * ROW_BYTES + k), advance(b, k), Input{});
    products_commit();
    if (step > 0) {
      products_wait<1>();
      release(before);
    }
    before = next.slot;
    next.advance(SLOTS);
  }
  products_wait<0>();
  release(before);
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) pin(sums[tile]);
}

// ---- the end of a unit ----

struct Place {
  int target;  // row of `out`
  float scale, weight;
};

DEVICE void describe_places(const Task& task, const float* scales, Place* places) {
  const int row = threadIdx.x;
  if (row >= task.count) return;
  const int place = task.first + row, target = GATED ? place : task.pair(row);
  const float weight = GATED ? 1.0f : load_fresh<1>(task.weights + target).at[0];
  places[row] = {target, load_fresh<1>(scales + place).at[0], weight};
}

// What a thread finishes of a tile: two weight rows, which are a gate and its up or two outputs.
struct Finish {
  int output;  // of the first
  bool real[2];
  float scale[2], bias[2];

  DEVICE void load(const Task& task, int first, int tile) {
    const int block = (tile * GROUPS + threadIdx.x / 128) * 4 + threadIdx.x / 32 % 4;
    output = first + block * (GATED ? 8 : 16) + threadIdx.x % 32 / 4;
    real[0] = output < task.outputs;
    real[1] = GATED ? real[0] : output + 8 < task.outputs;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = output + i * (GATED ? task.outputs : 8);
      scale[i] = real[i] ? task.scale(row) : 0.0f;
      bias[i] = real[i] ? task.bias_of(row) : 0.0f;
    }
  }
  DEVICE void put(const Task& task, const Place& place, float upper, float lower) const {
    T* target = task.out + i64(place.target) * task.outputs + output;
    upper = upper * (scale[0] * place.scale) + bias[0];
    lower = lower * (scale[1] * place.scale) + bias[1];
    if (GATED) {
      if (!real[0]) return;
      upper = task.adapted(upper, place.target, output);
      lower = task.adapted(lower, place.target, task.outputs + output);
      *target = from_float<T>(gated(upper, lower, task.gate));
    } else {
      if (real[0]) target[0] = from_float<T>(upper * place.weight);
      if (real[1]) target[8] = from_float<T>(lower * place.weight);
    }
  }
};

DEVICE void finish(const Task& task, const Place* places, const Finish (&ends)[TILES], const Sums& sums) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < SUMS; i += 4)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = i * 2 + 2 * t + j;
      if (row >= task.count) continue;
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
        ends[tile].put(task, places[row], sums[tile][i + j], sums[tile][i + 2 + j]);
    }
}

DEVICE void sync_products() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// Descriptions of places take turns in two halves: nobody is two units ahead of another, by the barrier between.
DEVICE void multiply_units(Units units, const float* scales, int num_steps) {
  __shared__ Place places[2][ROWS];
  RingPosition next;
  wait_for_previous();
  for (int half = 0; units.is_real(); units.advance(), half ^= 1) {
    describe_places(units.task, scales, places[half]);
    Finish ends[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) ends[tile].load(units.task, units.first_output(), tile);
    Sums sums = {};
    multiply_steps(sums, next, num_steps);
    sync_products();
    finish(units.task, places[half], ends, sums);
  }
}

// The choice is read before the wait: what makes places has waited for it, and only then let this start.
extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
    streamed(const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap place_map,
             const float* place_scales, i64 num_tiles, PARAMETERS) {
  const int column_tiles = (int(outputs) + OUTPUTS - 1) / OUTPUTS;
  const int num_steps = (int(width) + CHUNK - 1) / CHUNK;
  start_next();
  const int count = count_tiles(tiles, int(num_tiles));
  TASK(0);
  Units units{tiles, count, count * column_tiles, task};
  units.read();
  if (threadIdx.x == THREADS) {
    for (int slot = 0; slot < SLOTS; ++slot) {
      barrier_init(full(slot), 2);  // weights and places
      barrier_init(empty(slot), THREADS / 32);
    }
    barrier_init_done();
  }
  __syncthreads();
  if (threadIdx.x < THREADS)
    multiply_units(units, place_scales, num_steps);
  else if (threadIdx.x == THREADS)
    stream(units, &weight_map, &place_map, num_steps);
}
