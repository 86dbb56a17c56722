// silu(gate) * up, both x W^T, for many rows of x on Hopper's tensor cores. W is [gate | up]; or x W^T itself, if UNGATED.
// A CTA has 256 rows of x and a tile of ROWS rows of W, half of them gates unless UNGATED, and keeps its sums in nearly all
// registers of a multiprocessor. So tiles
// of 256 rows are as many as multiprocessors, where those of half the size need a second wave that leaves many idle.
// Two warpgroups multiply, 128 rows of x each, and one lane of them copies: a warp that only copies would take registers.
// -D ELEMENT (T: Half or BFloat16), FP8, INT8 (whether W and x are e4m3, or int8, whose sums are scaled, rather than T),
// ROWS (a multiple of 16 up to 224), SLOTS (of the ring), UNGATED (whether there is no gate)
#ifndef UNGATED
#define UNGATED 0
#endif
#include "runtime/copies.cuh"
#include "gemm/row_sums.cuh"
#include "gemm/sm90/wgmma_rows.cuh"

constexpr int THREADS = 256;
constexpr int BLOCKS = 2;  // of 64 rows of x, of a warpgroup
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

  // Row of W at which the second half of the tile begins.
  DEVICE int second_half() const { return first + (UNGATED ? ROWS / 2 : num_outputs); }
};

// Which of all tiles is the CTA's: {of rows of x, of rows of W}.
DEVICE int2 own_tile(int row_tiles, int column_tiles) {
  const int of_group = GROUP * column_tiles, group = blockIdx.x / of_group, rest = blockIdx.x % of_group;
  const int num_rows = min(GROUP, row_tiles - group * GROUP);
  return {group * GROUP + rest % num_rows, rest / num_rows};
}

DEVICE u32 slot_at(int slot) { return shared_address(shared_bytes) + slot * SLOT_BYTES; }
DEVICE u32 full(int slot) { return slot_at(SLOTS) + slot * 8; }
DEVICE u32 columns() { return full(SLOTS + SLOTS % 2); }

// ---- the lane that copies ----

DEVICE void copy_weights(const Task& task, const TensorMap* weights, int step, int slot) {
  const u32 gates = slot_at(slot) + X_BYTES, ups = gates + ROWS / 2 * ROW_BYTES;
  const u64 policy = evict_first();
  barrier_expect(full(slot), ROWS * ROW_BYTES);
  copy_eights(gates, weights, step, task.first / 8, full(slot), policy);
  copy_eights(ups, weights, step, task.second_half() / 8, full(slot), policy);
}
DEVICE void copy_x(const Task& task, const TensorMap* x, int step, int slot) {
  barrier_expect(full(slot), task.x_rows * ROW_BYTES);
  copy_box(slot_at(slot), x, step * CHUNK, task.first_row, full(slot));
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

// A piece at a column of its row.
DEVICE void store_piece(const Task& task, int row, int column, Eight& values) {
  if (column >= task.num_outputs) return;
  T* target = task.out + row * task.out_stride + column;
  if (UNGATED && task.adds) add(values, load_fresh<8>(target));
  store_rounded(target, values);
}

// Of a row, every second piece from `first` on.
DEVICE void store_pieces(const Task& task, u32 parts, const Lane& lane, int row, float row_scale, int first) {
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
    if (first + 2 * i >= PIECES || (!UNGATED && column >= task.num_outputs)) break;
    finish(task, gates[i], row_scale, (first + 2 * i) * 8);
    finish(task, ups[i], row_scale, (first + 2 * i + PIECES) * 8);
    if (UNGATED)
      store_piece(task, row, column + ROWS / 2, ups[i]);
    else
      gate(gates[i], ups[i]);
    store_piece(task, row, column, gates[i]);
  }
}

// By each warp for its own rows, 16 of them at a time, through what was the ring.
DEVICE void store_outputs(const Task& task, const Sums& sums) {
  const Lane lane;
  const u32 parts = slot_at(0);
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2 * PIECES; ++i)
      put_part(parts + i * THREADS * PART_BYTES + part_offset(), Four::of(sums[block] + 4 * i));
    __syncwarp();
    const int row_of_tile = (threadIdx.x / 128 * BLOCKS + block) * 64 + threadIdx.x % 128 / 32 * 16 + lane.row;
    const int row = task.first_row + row_of_tile;
    if (row >= task.num_rows) continue;
    const float row_scale = IS_SCALED ? load_fresh<1>(task.row_scales + row).at[0] : 1.0f;
#pragma unroll 1
    for (int first = lane.piece; first < PIECES; first += 2 * BATCH)
      store_pieces(task, parts, lane, row, row_scale, first);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    tall(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap x, const float* row_scales,
         const float* column_scales, const T* bias, T* out, i64 out_stride, i64 num_rows, i64 num_outputs,
         i64 num_steps, i64 x_rows, i64 row_tiles, i64 column_tiles, i64 adds) {
  const int2 tile = own_tile(int(row_tiles), int(column_tiles));
  const Task task{row_scales,
                  column_scales,
                  bias,
                  out,
                  out_stride,
                  int(num_rows),
                  int(num_outputs),
                  int(num_steps),
                  int(x_rows),
                  tile.x * X_ROWS,
                  tile.y * OUTPUTS,
                  adds != 0};
  if (threadIdx.x == 0) {
    start_next();
    for (int slot = 0; slot < SLOTS; ++slot) barrier_init(full(slot), 2);  // weights and x
    barrier_init_done();
  }
  for (int slot = 0; slot < SLOTS; ++slot) clear_rows<THREADS, X_ROWS>(shared_bytes + slot * SLOT_BYTES, task.x_rows);
  put_columns<THREADS>(columns(), column_scales, bias, task.first, task.num_outputs, !UNGATED);
  __syncthreads();
  if (threadIdx.x == 0) fill_ring(task, &weights, &x);
  __syncwarp();
  Sums sums = {};
  multiply_steps(task, &weights, &x, sums);
  wait_for_previous();
  __syncthreads();  // nobody reads the ring any more
  store_outputs(task, sums);
}
