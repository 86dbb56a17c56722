// GEMMs of experts whose weights are in fewer bits (gemm/codes.cuh): 16-bit numbers only in registers, where they are the
// left operand of tensor cores. Tiles of up to ROWS places of an expert share what is read of its weights. A warp has a
// unit of two tiles of weight rows, of gates and of their ups or neighbours, which come block by block through a ring of
// its own; the rows of x beside them are the CTA's. SPLIT warps share out the blocks of a unit: where rows are few, more
// warps read at once so. The sum of a group is scaled in fp32. Sums have one order for each SPLIT, whatever ROWS is.
//
// What a layer reads and computes, for gates, ups and outputs together: GB of weights by distinct experts of rows that choose
// alike, and TFLOP. An H200 reads 4.7 TB/s and multiplies 790 TFLOP/s in 16 bits: up to 350 rows of gpt-oss and 690 of
// Qwen3, bytes are the limit.
//   rows                                   1       32      128    2,048
//   gpt-oss-20b, MXFP4 by 32 (24 x)    0.053    0.417    0.423    0.423 GB        0.0064   0.0255   0.408 TFLOP from 32 on
//   Qwen3-30B-A3B, int4 by 128 (48 x) 0.0195    0.272    0.311    0.311 GB        0.0024   0.0097   0.155 TFLOP
// So a step of 1, 32, 128 rows takes 0.27, 2.1 and 2.2 ms of gpt-oss, 0.20, 2.8 and 3.2 ms of Qwen3; a prompt of 2,048 takes
// 12.4 and 9.4 ms.
// -D ELEMENT, GATED (see task.cuh), BITS, CODE_TYPE, SCALE, PARTS, ZEROS, RECORD (gemm/codes.cuh), ROWS (8, 16, 32, of e2m1 64: of a tile), SPLIT
// (1, 2, 4), SLOTS (of a ring)
#include "experts/task.cuh"
#include "gemm/codes.cuh"
#include "runtime/mma.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int UNITS = WARPS / SPLIT;  // of a CTA
constexpr int TILES = 2;              // of a unit
constexpr int PIECES = ROWS / 8;
constexpr bool HAS_ALL = UNITS == 1;      // there are as many CTAs as units
constexpr bool IS_ALONE = SPLIT == WARPS;  // no other warp reads what one copies
constexpr int ROWS_AT_ONCE = THREADS / 16 / SPLIT;  // of x, that copies of 16 bytes a thread have
constexpr int X_PITCH = BLOCK_INPUTS * 2 + 16;  // bytes of a row of x in a slot
constexpr int X_BYTES = ROWS * X_PITCH;         // of a block
constexpr int SLOT_BYTES = SPLIT * X_BYTES + WARPS * TILES * BLOCK_BYTES;

// Of a multiprocessor, for which registers must do.
#if __CUDA_ARCH__ >= 1000
constexpr int CTAS_OF_16 = 3;
#else
constexpr int CTAS_OF_16 = MINIMUMS || TERMS ? 3 : 4;
#endif
constexpr bool IS_LARGE = (ROWS == 32 && !SCALES_NUMBERS) || (ROWS == 64 && TERMS);
constexpr int CTAS = ROWS == 8 ? 4 : ROWS == 16 ? CTAS_OF_16 : IS_LARGE ? 2 : 3;
constexpr int SUMS_AT_ONCE = STEPS_A_SUM == 1 ? 2 : 1;  // two steps of x are read at a time
constexpr int STEPS_AT_ONCE = STEPS_A_SUM * SUMS_AT_ONCE;

extern __shared__ __align__(128) u8 shared_bytes[];

// Of the threads that read the same slots.
DEVICE void sync_readers() {
  if constexpr (IS_ALONE)
    __syncwarp();
  else
    __syncthreads();
}

// The places of a tile: a row of x, where its outputs go, and their factor.
struct Places {
  const T* x[ROWS];
  i64 target[ROWS];
  float weight[ROWS];

  DEVICE void load(const Task& task) {
    const int row = threadIdx.x;
    if (row >= task.count) return;
    const i64 pair = task.pair(row);
    x[row] = task.x + (GATED ? pair / task.top_k : task.first + row) * task.x_stride;
    target[row] = (GATED ? task.first + row : pair) * task.outputs;
    weight[row] = GATED ? 1.0f : load_fresh<1>(task.weights + pair).at[0];
  }
};

using Sums = float[TILES][PIECES][4];

// What a warp multiplies.
struct Unit {
  const Task& task;
  const Codes& weights;
  const u32 warp = threadIdx.x / 32, share = warp % SPLIT, number = blockIdx.x * UNITS + warp / SPLIT;
  const u32 num_tiles = task.rows() / 16;  // of an expert
  const u64 policy = evict_first();
  u32 tile[TILES];
  bool exists[TILES];
  const u32 first_tile = task.expert * num_tiles;
  // What a thread copies: pieces of codes, of scales and, from row `first_row` on, of x.
  const u32 thread = IS_ALONE ? threadIdx.x % 32 : threadIdx.x, part = IS_ALONE ? share : thread / 16 % SPLIT;
  const u32 first_row = thread / (IS_ALONE ? 16 : 16 * SPLIT), first_input = part * BLOCK_INPUTS + thread % 16 * 8;
  const u32 own_inputs = shared_address(shared_bytes + part * X_BYTES + first_row * X_PITCH + thread % 16 * 16);
  const u32 own_codes = shared_address(codes(shared_bytes, 0) + threadIdx.x % 32 * 16);
  const u8 *code_bytes[TILES], *scale_bytes[TILES];  // of the next block, and of the first group
  float scale[TILES][2], bias[TILES][2];  // of rows g and g + 8

  DEVICE Unit(const Task& task, const Codes& weights) : task(task), weights(weights) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 t = 0; t < TILES; ++t) {
      tile[t] = GATED ? number + t * (num_tiles / 2) : number * TILES + t;
      exists[t] = (HAS_ALL && (GATED || t == 0)) || (GATED ? number < num_tiles / 2 : tile[t] < num_tiles);
      const u64 of_all = first_tile + tile[t];
      code_bytes[t] = weights.codes + (of_all * weights.num_blocks + share) * CODE_BYTES + lane * 16;
      scale_bytes[t] = weights.scales + of_all * weights.num_groups * SCALE_BYTES + lane % LANES_A_PART * 16;
    }
  }
  DEVICE void load_rows() {
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const int row = tile[t] * 16 + threadIdx.x % 32 / 4 + 8 * high;
        scale[t][high] = exists[t] ? task.scale(row) : 1.0f;
        bias[t][high] = exists[t] ? task.bias_of(row) : 0.0f;
      }
  }
  // A step's blocks to a slot, for which the choice of experts is enough. Steps come in their order.
  DEVICE void copy_codes(u32 step, u32 slot) {
    const u32 lane = threadIdx.x % 32, block = step * SPLIT + share, target = in_register(own_codes + slot);
    if (block < weights.num_blocks) {
      const u32 of_group = weights.group(block, lane % SCALE_LANES / LANES_A_PART) * SCALE_BYTES;
#pragma unroll
      for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < QUADS; ++i)
          if (exists[t]) copy_async(target + t * BLOCK_BYTES + i * 512, code_bytes[t] + i * 512, true, policy);
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        const u32 behind = target + t * BLOCK_BYTES + CODE_BYTES;
        if (exists[t] && lane < SCALE_LANES) copy_async_bytes<16>(behind, scale_bytes[t] + of_group, 16);
        if (ZEROS && exists[t]) weights.copy_zeros(behind - CODE_BYTES - lane * 16, first_tile + tile[t], block);
        code_bytes[t] += SPLIT * CODE_BYTES;
      }
    }
  }
  // The inputs beside them; zeros behind the width. Where warps share out all blocks, each copies what it reads.
  DEVICE void copy_inputs(u32 step, u32 slot, const Places& places) const {
    const u32 input = step * SPLIT * BLOCK_INPUTS + first_input;
    const u32 bytes = input < task.width ? 16 : 0, begin = bytes == 0 ? 0 : input;
    u32 target = own_inputs + slot;
#pragma unroll 1
    for (u32 row = first_row; row < task.count; row += ROWS_AT_ONCE, target += ROWS_AT_ONCE * X_PITCH)
      copy_async_bytes<16>(target, places.x[row] + begin, bytes);
  }
  DEVICE void multiply(Sums& sums, const u8* slot) const {
    const u32 lane = threadIdx.x % 32;
    const Block blocks[TILES] = {Block(codes(slot, 0)), Block(codes(slot, 1))};
    const u32 x = shared_address(slot + share * X_BYTES) + lane % 8 * X_PITCH + lane / 8 * 16;
#pragma unroll
    for (int first = 0; first < STEPS; first += STEPS_AT_ONCE) add(sums, blocks, x, first);
  }

 private:
  DEVICE static u8* codes(u8* slot, int t) {
    return slot + SPLIT * X_BYTES + (threadIdx.x / 32 * TILES + t) * BLOCK_BYTES;
  }
  DEVICE static const u8* codes(const u8* slot, int t) { return codes(const_cast<u8*>(slot), t); }

  // The sums of some steps of the blocks. Columns of x that do not exist give sums that nobody reads.
  DEVICE static void add(Sums& sums, const Block (&blocks)[TILES], u32 x, int begin) {
    constexpr u32 ONES = IS_FP16<T> ? 0x3c003c00 : 0x3f803f80;
    Pack<u32, 4> quads[TILES];
    Sums of_part[SUMS_AT_ONCE] = {};
    float inputs[PIECES][4] = {};  // their sums: minimums multiply them
    if (MINIMUMS) __syncwarp();    // or codes of the next steps become numbers early, which takes too many registers
#pragma unroll
    for (int first = begin; first < begin + STEPS_AT_ONCE; first += 2) {
      u32 a[TILES][2][4];
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        if (first == begin || first % STEPS_A_QUAD == 0) quads[t] = blocks[t].quad(first / STEPS_A_QUAD);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int step = first + k, of_operand = step / STEPS_A_PART;
          decode(a[t][k], quads[t].at + step % STEPS_A_QUAD * (BITS / 4), blocks[t].operand(of_operand, 0),
                 blocks[t].operand(of_operand, 1));
        }
      }
#pragma unroll
      for (int p = 0; p < PIECES; ++p) {
        u32 b[4];
        load_matrices(b, x + p * 8 * X_PITCH + first / 2 * 64);
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            float(&into)[4] = SCALES_NUMBERS ? sums[t][p] : of_part[k % SUMS_AT_ONCE][t][p];
            multiply_add(into, a[t][k], b[2 * k], b[2 * k + 1], T{});
          }
        if constexpr (MINIMUMS) {
          const u32 ones[4] = {ONES, ONES, ONES, ONES};
#pragma unroll
          for (int k = 0; k < 2; ++k) multiply_add(inputs[p], ones, b[2 * k], b[2 * k + 1], T{});
        }
      }
    }
    add_scaled(sums, of_part, inputs, blocks, begin);
  }
  DEVICE static void add_scaled(Sums& sums, const Sums (&of_part)[SUMS_AT_ONCE], const float (&inputs)[PIECES][4],
                                const Block (&blocks)[TILES], int begin) {
    if constexpr (!SCALES_NUMBERS) {
#pragma unroll
      for (int i = 0; i < SUMS_AT_ONCE; ++i)
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
          const int part = begin / STEPS_A_SUM + i;
          const float scales[2] = {blocks[t].scale(part, 0), blocks[t].scale(part, 1)};
#pragma unroll
          for (int p = 0; p < PIECES; ++p)
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[t][p][j] = fmaf(scales[j / 2], of_part[i][t][p][j], sums[t][p][j]);
        }
    }
    if constexpr (MINIMUMS) {
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        const int part = begin / STEPS_A_PART;
        const float minimums[2] = {blocks[t].minimum(part, 0), blocks[t].minimum(part, 1)};
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[t][p][j] = fmaf(minimums[j / 2], inputs[p][j % 2], sums[t][p][j]);
      }
    }
  }
};

// The sums of all shares in the warp of the first, in their order; `parts` is the ring, which nobody reads any more.
DEVICE void add_shares(Sums& sums, float* parts) {
  const u32 warp = threadIdx.x / 32, share = warp % SPLIT, lane = threadIdx.x % 32;
  constexpr int COUNT = TILES * PIECES * 4;  // of a lane
  float* own = parts + warp / SPLIT * SPLIT * COUNT * 32 + lane;
  float* const values = &sums[0][0][0];
  __syncthreads();
  if (share > 0)
#pragma unroll
    for (int i = 0; i < COUNT; ++i) own[(share * COUNT + i) * 32] = values[i];
  __syncthreads();
  if (share > 0) return;
#pragma unroll
  for (int other = 1; other < SPLIT; ++other)
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] += own[(other * COUNT + i) * 32];
}

DEVICE void finish(const Unit& unit, const Places& places, const Sums& sums) {
  const int lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll
  for (int p = 0; p < PIECES; ++p)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = p * 8 + lane % 4 * 2 + j % 2, high = j / 2;
      if (row >= unit.task.count) continue;
      T* target = unit.task.out + places.target[row] + g + 8 * high;
      float values[TILES];
#pragma unroll
      for (int t = 0; t < TILES; ++t) values[t] = fmaf(sums[t][p][j], unit.scale[t][high], unit.bias[t][high]);
      if constexpr (GATED) {
        if (!unit.exists[0]) continue;
#pragma unroll
        for (int t = 0; t < TILES; ++t)
          values[t] = unit.task.adapted(values[t], unit.task.first + row, unit.tile[t] * 16 + g + 8 * high);
        target[unit.tile[0] * 16] = from_float<T>(gated(values[0], values[1], unit.task.gate));
      } else {
#pragma unroll
        for (int t = 0; t < TILES; ++t)
          if (unit.exists[t]) target[unit.tile[t] * 16] = from_float<T>(values[t] * places.weight[row]);
      }
    }
}

// Grid: x = units, UNITS to a CTA, y = tiles of places. What is launched next may read the choice before it waits: that
// had been made when this kernel went on.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    packed(PARAMETERS, const u8* group_scales, const u8* zeros, i64 num_groups, i64 group_factor) {
  __shared__ Places places;
  wait_for_previous();
  start_next();
  TASK(blockIdx.y);
  if (task.count == 0) return;
  const u32 num_blocks = (task.width + BLOCK_INPUTS - 1) / BLOCK_INPUTS, num_steps = (num_blocks + SPLIT - 1) / SPLIT;
  const Codes codes{weight, group_scales, zeros, num_blocks, u32(num_groups), u32(group_factor)};
  Unit unit(task, codes);
#pragma unroll
  for (int step = 0; step < SLOTS - 1; ++step)
    if (step < num_steps) unit.copy_codes(step, step * SLOT_BYTES);
  places.load(task);
  __syncthreads();
#pragma unroll
  for (int step = 0; step < SLOTS - 1; ++step) {  // the first group has the codes of all
    if (step < num_steps) unit.copy_inputs(step, step * SLOT_BYTES, places);
    copy_commit();
  }
  unit.load_rows();
  Sums sums = {};
  int slot = 0;
#pragma unroll 1
  for (u32 step = 0; step < num_steps; ++step) {
    copy_wait<SLOTS - 2>();
    sync_readers();  // what all copied is there, and nobody reads the slot before
    const u32 ahead = step + SLOTS - 1;
    if (ahead < num_steps) {
      const u32 free_slot = (slot == 0 ? SLOTS - 1 : slot - 1) * SLOT_BYTES;
      unit.copy_codes(ahead, free_slot);
      unit.copy_inputs(ahead, free_slot, places);
    }
    copy_commit();
    if (step * SPLIT + unit.share < num_blocks) unit.multiply(sums, shared_bytes + slot * SLOT_BYTES);
    slot = slot == SLOTS - 1 ? 0 : slot + 1;
  }
  if constexpr (SPLIT > 1) {
    add_shares(sums, reinterpret_cast<float*>(shared_bytes));
    if (unit.share > 0) return;
  }
  finish(unit, places, sums);
}
