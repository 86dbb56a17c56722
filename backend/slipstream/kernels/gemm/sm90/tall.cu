// silu(gate) * up, both x W^T, for many rows of x on Hopper's tensor cores. W is [gate | up]; or, of int8, x W^T itself.
// A CTA has 192 or 256 rows of x and a tile of ROWS rows of W, half of them gates if there are any, and keeps its sums in
// nearly all registers of a multiprocessor. So tiles of 256 rows are as many as multiprocessors, where those of half the
// size need a second wave that leaves many idle.
// Two warpgroups multiply, 128 rows of x each, or three of 64, and one lane of them copies: a warp that only copies would
// take registers.
// -D ELEMENT (T: Half or BFloat16), FP8, INT8 (whether W and x are e4m3, or int8, whose sums are scaled, rather than T),
// ROWS (a multiple of 16 up to 224), SLOTS (of the ring), GROUPS (2, 3), CLUSTER (1, 2, 4; without a gate, of int8: so many
// CTAs share out the inputs of a tile, and each adds up and stores some of its columns)
#ifndef GROUPS
#define GROUPS 2
#endif
#ifdef CLUSTER
#define UNGATED 1
#else
#define CLUSTER 1
#define UNGATED 0
#endif
#include "runtime/cluster.cuh"
#include "runtime/copies.cuh"
#include "gemm/row_sums.cuh"
#include "gemm/sm90/wgmma_rows.cuh"

constexpr int THREADS = 128 * GROUPS;
constexpr int BLOCKS = GROUPS == 2 ? 2 : 1;  // of 64 rows of x, of a warpgroup
constexpr int X_ROWS = 64 * BLOCKS * THREADS / 128;
constexpr int X_BYTES = X_ROWS * ROW_BYTES;
constexpr int SLOT_BYTES = X_BYTES + ROWS * ROW_BYTES;  // x, then gates, then ups
constexpr int PIECES = ROWS / 16;                       // of eight outputs, in each half of the tile
constexpr int OUTPUTS = UNGATED ? ROWS : ROWS / 2;        // of a tile
constexpr int BATCH = 2;                                // that a lane takes at once
// So many tiles of rows of x take turns before the next rows of W: together they fit into the L2 cache.
constexpr int GROUP = 8;

extern __shared__ __align__(1024) u8 shared_bytes[];

struct Task {
  const float *row_scales, *column_scales;  // of a product of 8 bits
  const T* bias;                            // of each row of W, or null
  T* out;
  i64 out_stride;
  int num_rows, num_outputs, num_steps;
  int x_rows;     // that are copied: num_rows, rounded up to 8, at most X_ROWS
  int first_row;  // of the tile
  int first;      // output of the tile
  bool adds;      // to `out`
  int rank;        // in the cluster
  int first_step;  // of this CTA's

  // Row of W at which the second half of the tile begins.
  DEVICE int second_half() const { return first + (UNGATED ? ROWS / 2 : num_outputs); }
};

// The first of all steps that belongs to a CTA of the cluster.
DEVICE int step_of(int num_steps, int rank) { return rank * num_steps / CLUSTER; }

// Which of all tiles is the CTA's: {of rows of x, of rows of W}.
DEVICE int2 own_tile(int row_tiles, int column_tiles) {
  const u32 tile = blockIdx.x / CLUSTER;
  const int of_group = GROUP * column_tiles, group = tile / of_group, rest = tile % of_group;
  const int num_rows = min(GROUP, row_tiles - group * GROUP);
  return {group * GROUP + rest % num_rows, rest / num_rows};
}

DEVICE u32 slot_at(int slot) { return shared_address(shared_bytes) + slot * SLOT_BYTES; }
DEVICE u32 full(int slot) { return slot_at(SLOTS) + slot * 8; }
DEVICE u32 columns() { return full(SLOTS + SLOTS % 2); }
DEVICE u32 sent() { return columns() + COLUMN_BYTES; }  // the barrier of what other CTAs send

// ---- the lane that copies ----

DEVICE void copy_weights(const Task& task, const TensorMap* weights, int step, int slot) {
  const u32 gates = slot_at(slot) + X_BYTES, ups = gates + ROWS / 2 * ROW_BYTES;
  const u64 policy = evict_first();
  barrier_expect(full(slot), ROWS * ROW_BYTES);
  copy_eights(gates, weights, task.first_step + step, task.first / 8, full(slot), policy);
  copy_eights(ups, weights, task.first_step + step, task.second_half() / 8, full(slot), policy);
}
DEVICE void copy_x(const Task& task, const TensorMap* x, int step, int slot) {
  barrier_expect(full(slot), task.x_rows * ROW_BYTES);
  copy_box(slot_at(slot), x, (task.first_step + step) * CHUNK, task.first_row, full(slot));
}

DEVICE void fill_ring(const Task& task, const TensorMap* weights, const TensorMap* x) {
  const int count = min(SLOTS, task.num_steps);
  for (int step = 0; step < count; ++step) copy_weights(task, weights, step, step);
  wait_for_previous();
  for (int step = 0; step < count; ++step) copy_x(task, x, step, step);
}

// ---- the warpgroups ----

using Sums = Sum[BLOCKS][SUMS];

DEVICE void multiply_steps(const Task& task, const TensorMap* weights, const TensorMap* x, Sums& sums) {
  const u32 rows_of_x = threadIdx.x / 128 * 64 * BLOCKS * ROW_BYTES;
  RingPosition next;
  int before = 0;
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) pin(sums[block]);
  for (int step = 0; step < task.num_steps; ++step) {
    barrier_wait(full(next.slot), next.parity);
    products_begin();
    const u64 a = rows_descriptor(slot_at(next.slot) + rows_of_x);
    const u64 b = rows_descriptor(slot_at(next.slot) + X_BYTES);
#pragma unroll
    for (int k = 0; k < ROW_BYTES; k += 32)
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block)
        multiply_rows(sums[block], advance(a, block * 64 * ROW_BYTES + k), advance(b, k), Input{});
    products_commit();
    if (step > 0) {
      products_wait<1>();
      __syncthreads();  // nobody reads the slot before any more
      const int ahead = step - 1 + SLOTS;
      if (threadIdx.x == 0 && ahead < task.num_steps) {
        copy_weights(task, weights, ahead, before);
        copy_x(task, x, ahead, before);
      }
    }
    before = next.slot;
    next.advance(SLOTS);
  }
  products_wait<0>();
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) pin(sums[block]);
}

DEVICE void finish(const Task& task, Eight& sums, float row_scale, int row_of_tile) {
  const Columns of_sums(columns(), row_of_tile);
  to_floats(sums);
  if (IS_SCALED) scale(sums, row_scale, of_sums.scales());
  if (task.bias != nullptr) add(sums, of_sums.biases());
}

// ---- the end of a tile of gates and ups ----

// Of a row, every second piece from `first` on.
DEVICE void store_gated(const Task& task, u32 parts, const Lane& lane, int row, float row_scale, int first) {
  Eight gates[BATCH], ups[BATCH];
#pragma unroll
  for (int i = 0; i < BATCH; ++i) {
    const u32 piece = parts + min(first + 2 * i, PIECES - 1) * THREADS * PART_BYTES;
    gates[i] = lane.take(piece, threadIdx.x / 32);
    ups[i] = lane.take(piece + PIECES * THREADS * PART_BYTES, threadIdx.x / 32);
  }
#pragma unroll
  for (int i = 0; i < BATCH; ++i) {
    const int column = task.first + (first + 2 * i) * 8;
    if (first + 2 * i >= PIECES || column >= task.num_outputs) break;
    finish(task, gates[i], row_scale, (first + 2 * i) * 8);
    finish(task, ups[i], row_scale, (first + 2 * i + PIECES) * 8);
    gate(gates[i], ups[i]);
    store_rounded(task.out + row * task.out_stride + column, gates[i]);
  }
}

// Of x, that a lane takes of its warp's block.
DEVICE int row_of(const Task& task, const Lane& lane, int block) {
  const int row_of_tile = (threadIdx.x / 128 * BLOCKS + block) * 64 + threadIdx.x % 128 / 32 * 16 + lane.row;
  return task.first_row + row_of_tile;
}

// By each warp for its own rows, 16 of them at a time, through what was the ring.
DEVICE void finish_gates(const Task& task, const Sums& sums) {
  const Lane lane;
  const u32 parts = slot_at(0);
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2 * PIECES; ++i)
      put_part(parts + i * THREADS * PART_BYTES + part_offset(), Four::of(sums[block] + 4 * i));
    __syncwarp();
    const int row = row_of(task, lane, block);
    if (row >= task.num_rows) continue;
    const float row_scale = IS_SCALED ? load_fresh<1>(task.row_scales + row).at[0] : 1.0f;
#pragma unroll 1
    for (int first = lane.piece; first < PIECES; first += 2 * BATCH)
      store_gated(task, parts, lane, row, row_scale, first);
  }
}

// ---- the end of a tile of which each CTA of a cluster finishes some columns ----

constexpr int OWN = (2 * PIECES + CLUSTER - 1) / CLUSTER;  // pieces of eight columns, at most
constexpr int KEPT = CLUSTER > 1 ? BLOCKS : 1;             // blocks whose sums are in memory at once
constexpr int AHEAD = 4;                                   // pieces that a lane takes at once

DEVICE constexpr int first_piece(int rank) { return rank * 2 * PIECES / CLUSTER; }
DEVICE int num_own(const Task& task) { return first_piece(task.rank + 1) - first_piece(task.rank); }
// What a CTA of the cluster has of a piece of the one that finishes it.
DEVICE u32 parts_of(int sender, int piece, int block) {
  return slot_at(0) + ((sender * OWN + piece) * KEPT + block % KEPT) * THREADS * PART_BYTES;
}

// Pieces of all owners in turn, so that no CTA receives all at once.
DEVICE void hand_over(const Task& task, const Sum (&sums)[SUMS], int block) {
#pragma unroll
  for (int i = 0; i < OWN; ++i)
#pragma unroll
    for (int owner = 0; owner < CLUSTER; ++owner) {
      const int piece = first_piece(owner) + i;
      if (piece >= first_piece(owner + 1)) continue;
      const Four part = Four::of(sums + 4 * piece);
      const u32 target = parts_of(task.rank, i, block) + part_offset();
      if (CLUSTER == 1 || owner == task.rank)
        put_part(target, part);
      else
        send(address_in(owner, target), part.at[0], part.at[1], part.at[2], part.at[3], address_in(owner, sent()));
    }
}

DEVICE Eight sum_of_cluster(const Lane& lane, int piece, int block) {
  Eight values = lane.take(parts_of(0, piece, block), threadIdx.x / 32);
#pragma unroll
  for (int sender = 1; sender < CLUSTER; ++sender)
    add_sums(values, lane.take(parts_of(sender, piece, block), threadIdx.x / 32));
  return values;
}

// A lane takes every second piece; what is added to comes for several at once.
DEVICE void store_own(const Task& task, int block) {
  const Lane lane;
  const int row = row_of(task, lane, block), column = task.first + first_piece(task.rank) * 8;
  const int end = min(num_own(task), (task.num_outputs - column) / 8);
  if (row >= task.num_rows) return;
  T* const target = task.out + row * task.out_stride + column;
  const float row_scale = load_fresh<1>(task.row_scales + row).at[0];
#pragma unroll 1
  for (int first = lane.piece; first < end; first += 2 * AHEAD) {
    Pack<T, 8> before[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (task.adds && first + 2 * i < end) before[i] = load_fresh<8>(target + (first + 2 * i) * 8);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int piece = first + 2 * i;
      if (piece >= end) break;
      Eight values = sum_of_cluster(lane, piece, block);
      finish(task, values, row_scale, (first_piece(task.rank) + piece) * 8);
      if (task.adds) add(values, before[i]);
      store_rounded(target + piece * 8, values);
    }
  }
}

DEVICE void finish_columns(const Task& task, const Sums& sums) {
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) {
    hand_over(task, sums[block], block);
    if (CLUSTER > 1) continue;
    __syncwarp();
    store_own(task, block);
    __syncwarp();
  }
  if (CLUSTER == 1) return;
  barrier_wait(sent(), 0);
  __syncwarp();
#pragma unroll 1
  for (int block = 0; block < BLOCKS; ++block) store_own(task, block);
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1)
    tall(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap x, const float* row_scales,
         const float* column_scales, const T* bias, T* out, i64 out_stride, i64 num_rows, i64 num_outputs,
         i64 num_steps, i64 x_rows, i64 row_tiles, i64 column_tiles, i64 adds) {
  const int2 tile = own_tile(int(row_tiles), int(column_tiles));
  const int rank = blockIdx.x % CLUSTER;
  const Task task{row_scales,
                  column_scales,
                  bias,
                  out,
                  out_stride,
                  int(num_rows),
                  int(num_outputs),
                  step_of(int(num_steps), rank + 1) - step_of(int(num_steps), rank),
                  int(x_rows),
                  tile.x * X_ROWS,
                  tile.y * OUTPUTS,
                  adds != 0,
                  rank,
                  CLUSTER == 1 ? 0 : step_of(int(num_steps), rank)};
  if (threadIdx.x == 0) {
    start_next();
    for (int slot = 0; slot < SLOTS; ++slot) barrier_init(full(slot), 2);  // weights and x
    if (CLUSTER > 1) barrier_init(sent(), 1);
    barrier_init_done();
    if (CLUSTER > 1) barrier_expect(sent(), (CLUSTER - 1) * num_own(task) * BLOCKS * THREADS * PART_BYTES);
  }
  for (int slot = 0; slot < SLOTS; ++slot) clear_rows<THREADS, X_ROWS>(shared_bytes + slot * SLOT_BYTES, task.x_rows);
  put_columns<THREADS>(columns(), column_scales, bias, task.first, task.num_outputs, !UNGATED);
  __syncthreads();
  if (threadIdx.x == 0) fill_ring(task, &weights, &x);
  __syncwarp();
  Sums sums = {};
  multiply_steps(task, &weights, &x, sums);
  wait_for_previous();
  cluster_arrive();
  cluster_wait();
  __syncthreads();  // nobody reads the ring any more
  if (UNGATED)
    finish_columns(task, sums);
  else
    finish_gates(task, sums);
}
