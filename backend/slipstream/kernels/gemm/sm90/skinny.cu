// y = x W^T for up to 64 * GROUPS rows of x on Hopper's tensor cores, as fast as W can be read. A tile of ROWS weight
// rows, and all rows of x, belong to a cluster, whose CTAs share out the width: each streams its part of both through a
// ring and multiplies, a warpgroup for each 64 rows of x; then each adds up what the cluster has for every CLUSTER-th
// piece of eight columns. Weights are copied from before the previous kernel's end on.
// Sums of e4m3 and int8 are scaled at the end, or left as they are: then those of int8 are integers.
// -D ELEMENT (T: Half or BFloat16), FP8, INT8 (whether W and x are e4m3, or int8, rather than T), ROWS (a multiple of 16
// up to 224), GROUPS (1, 2; 3 without clusters), CLUSTER (1, 2, 4), AT_ONCE (half of ROWS for three groups, as a
// thread has no registers for all of them in one instruction)
#include "runtime/cluster.cuh"
#include "runtime/fetch.cuh"
#include "gemm/row_sums.cuh"
#include "gemm/sm90/wgmma_rows.cuh"

constexpr int THREADS = 128 * GROUPS;  // that multiply; two warps more copy
constexpr int WARPS = THREADS / 32;
// Three warpgroups have their sums in registers that a fourth gives up, of which two warps copy.
constexpr bool MOVES_REGISTERS = GROUPS == 3;
constexpr int COPYING = MOVES_REGISTERS ? 128 : 64;  // threads
constexpr int CHUNKS = GROUPS == 1 ? 2 : 1;  // of a step
constexpr int X_BYTES = 64 * GROUPS * ROW_BYTES;  // of a chunk
constexpr int SLOT_BYTES = CHUNKS * (ROWS * ROW_BYTES + X_BYTES);
constexpr int PIECES = ROWS / 8;  // of eight columns, of which a thread has two in each of two rows
// Whether sums come to where the ring was, or behind it: the one takes room, the other waits for the whole cluster.
constexpr bool IN_RING = CLUSTER == 4 && GROUPS == 2;
constexpr bool SHARES_ENDS = GROUPS < 3;  // whether warps without rows take pieces of others' (their number is a power of 2)
constexpr int OWN = 2 * ((PIECES / 2 + CLUSTER - 1) / CLUSTER);  // pieces that a CTA finishes, at most
// Of them that a lane takes at once; the widest tile of integers has no registers for four.
constexpr int BATCH = OWN <= (INT8 && ROWS == 224 ? 6 : 8) ? OWN / 2 : 2;

extern __shared__ __align__(1024) u8 shared_bytes[];

struct Task {
  const float *row_scales, *column_scales;  // of a product of 8 bits, or null
  const T* bias;                            // of each weight row, or null
  T* out;
  i64 out_stride;
  u32 num_rows;
  int num_outputs;
  int num_slots;
  int x_rows;      // that are copied: num_rows, rounded up to 8
  bool gated;      // silu(gate) * up: a tile has the rows of its gates, and then those of its ups
  bool adds;       // to `out`
  int first;       // output of the tile
  u32 rank;        // in the cluster
  int begin, end;  // this CTA's steps

  // Of outputs, and the most that a CTA of the cluster has of them.
  DEVICE u32 num_pieces() const { return gated ? PIECES / 2 : PIECES; }
  DEVICE u32 own_pieces() const { return (num_pieces() + CLUSTER - 1) / CLUSTER; }
  // Of this CTA's, those within the matrix.
  DEVICE u32 end_of_pieces() const {
    const u32 within = u32(num_outputs - first) / 8;
    return (min(num_pieces(), within) + CLUSTER - 1 - rank) / CLUSTER;
  }
  // Parts of pieces that others send.
  DEVICE u32 num_sent() const {
    return (CLUSTER - 1) * (gated ? 2 : 1) * ((num_pieces() + CLUSTER - 1 - rank) / CLUSTER);
  }
};

// A slot holds a step: x, a chunk behind the other, and the weights, eight rows of all chunks after the other.
struct Shared {
  const u32 base = shared_address(shared_bytes);
  const int num_slots;
  const u32 barriers = base + num_slots * SLOT_BYTES;

  DEVICE explicit Shared(const Task& task) : num_slots(task.num_slots) {}
  DEVICE u32 x(int slot) const { return base + slot * SLOT_BYTES; }
  DEVICE u32 weights(int slot) const { return x(slot) + CHUNKS * X_BYTES; }
  DEVICE u32 full(int slot) const { return barriers + slot * 16; }
  DEVICE u32 empty(int slot) const { return full(slot) + 8; }
  DEVICE u32 sent() const { return full(num_slots); }
  // What a sender has of this CTA's pieces. The last one is this CTA itself, whose place is where the ring was.
  DEVICE u32 parts(u32 sender) const {
    constexpr u32 BYTES = OWN * THREADS * PART_BYTES;
    if (IN_RING) return base + sender * BYTES;
    return sender == CLUSTER - 1 ? base : columns() + COLUMN_BYTES + sender * BYTES;
  }
  // Scales of the tile's rows, which become columns, and then their biases.
  DEVICE u32 columns() const { return sent() + 16; }
};

// ---- the lanes that copy ----

DEVICE void copy_weights(const Task& task, const Shared& shared, const TensorMap* weights, int step,
                         int slot, u64 policy) {
  const u32 target = shared.weights(slot), full = shared.full(slot);
  barrier_expect(full, CHUNKS * ROWS * ROW_BYTES);
  copy_eights(target, weights, step * CHUNKS, task.first / 8, full, policy);
  if (task.gated)
    copy_eights(target + CHUNKS * ROWS / 2 * ROW_BYTES, weights, step * CHUNKS,
                (task.num_outputs + task.first) / 8, full, policy);
}
DEVICE void copy_x(const Task& task, const Shared& shared, const TensorMap* x, int step, int slot) {
  barrier_expect(shared.full(slot), CHUNKS * task.x_rows * ROW_BYTES);
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
    copy_box(shared.x(slot) + c * X_BYTES, x, (step * CHUNKS + c) * CHUNK, 0, shared.full(slot));
}

// Every warp of a warpgroup must come here.
DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); }
DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 160;"); }

// ---- the warpgroups that multiply ----

DEVICE void sync_products() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

DEVICE void clear_rest(const Task& task) {
  if (task.x_rows == 64 * GROUPS) return;
  for (int slot = 0; slot < task.num_slots; ++slot)
    for (int c = 0; c < CHUNKS; ++c)
      clear_rows<THREADS, 64 * GROUPS>(shared_bytes + slot * SLOT_BYTES + c * X_BYTES, task.x_rows);
  sync_products();
}

DEVICE void multiply_steps(const Task& task, const Shared& shared, Sum (&sums)[SUMS]) {
  const u32 rows_of_x = threadIdx.x / 128 * 64 * ROW_BYTES;
  RingPosition next;
  int before = 0;
  pin(sums);
  for (int step = task.begin; step < task.end; ++step) {
    barrier_wait(shared.full(next.slot), next.parity);
    products_begin();
    const u64 a = rows_descriptor(shared.x(next.slot) + rows_of_x);
    const u64 b = rows_descriptor(shared.weights(next.slot), CHUNKS);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
      for (int k = 0; k < ROW_BYTES; k += 32)
#pragma unroll
        for (int first = 0; first < ROWS; first += AT_ONCE)
          multiply_rows(sums + first / 2, advance(a, c * X_BYTES + k),
                        advance(b, (first * CHUNKS + c * 8) * ROW_BYTES + k), Input{});
    products_commit();
    if (step > task.begin) {
      products_wait<1>();
      if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty(before));
    }
    before = next.slot;
    next.advance(task.num_slots);
  }
  products_wait<0>();
  pin(sums);
}

// ---- the end ----

// Each CTA sends what it has of the pieces of others, and keeps its own: of gates and ups, the same.
DEVICE void hand_over(const Task& task, const Shared& shared, const Sum (&sums)[SUMS]) {
  const u32 own = task.own_pieces();
#pragma unroll
  for (u32 i = 0; i < PIECES; ++i) {
    const Four part = Four::of(sums + 4 * i);
    const bool is_up = i >= task.num_pieces();
    const u32 within = is_up ? i - task.num_pieces() : i, owner = within % CLUSTER;
    const u32 index = within / CLUSTER + (is_up ? own : 0), sender = (task.rank - owner - 1) % CLUSTER;
    const u32 target = shared.parts(sender) + index * THREADS * PART_BYTES + part_offset();
    if (owner == task.rank)
      put_part(target, part);
    else
      send(address_in(owner, target), part.at[0], part.at[1], part.at[2], part.at[3],
           address_in(owner, shared.sent()));
  }
}

// A lane takes every `step`-th piece of a row, BATCH of them at once. Warps that multiplied no row that there is have
// their share of the others' pieces.
struct Output {
  const Task& task;
  const Lane lane;
  const u32 log_warps = task.num_rows > 64 ? 3 : task.num_rows > 32 ? 2 : task.num_rows > 16;  // that have rows
  const u32 warp = SHARES_ENDS ? threadIdx.x / 32 & ((1 << log_warps) - 1) : threadIdx.x / 32, row = warp * 16 + lane.row;
  const u32 first_piece = (SHARES_ENDS ? 2 * (threadIdx.x / 32 >> log_warps) : 0) + lane.piece;
  const u32 step = SHARES_ENDS ? 2 * WARPS >> log_warps : 2;
  const u32 end = row < task.num_rows ? task.end_of_pieces() : 0;
  float row_scale = 1.0f;
  Pack<T, 8> before[BATCH];  // what is added to

  DEVICE explicit Output(const Task& task) : task(task) {
    wait_for_previous();
    if (IS_SCALED && task.row_scales != nullptr && end > 0) row_scale = load_fresh<1>(task.row_scales + row).at[0];
    load(first_piece);
  }

  DEVICE void finish(const Shared& shared) {
#pragma unroll 1
    for (u32 begin = first_piece; begin < end; begin += BATCH * step) {
      if (begin > first_piece) load(begin);
      Eight values[BATCH];
      gather(shared, begin, 0, values);
      if (task.gated) {
        Eight ups[BATCH];
        gather(shared, begin, 1, ups);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) gate(values[i], ups[i]);
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const u32 index = begin + i * step;
        if (task.adds) add(values[i], before[i]);
        if (index < end) put_out(index, values[i]);
      }
    }
  }

 private:
  DEVICE u32 column(u32 index) const { return task.first + (index * CLUSTER + task.rank) * 8; }
  DEVICE T* target(u32 index) const { return task.out + row * task.out_stride + column(index); }
  DEVICE bool is_left() const { return INT8 && task.row_scales == nullptr; }  // whether integers stay such
  DEVICE void put_out(u32 index, const Eight& values) const {
    if (is_left())
      store_sums(reinterpret_cast<int*>(task.out) + row * task.out_stride + column(index), values);
    else
      store_rounded(target(index), values);
  }
  DEVICE void load(u32 begin) {
    if (!task.adds) return;
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (begin + i * step < end) before[i] = load_fresh<8>(target(begin + i * step));
  }
  // What the cluster has of BATCH pieces, the last one instead of what is behind it. `stream` 1: of the ups.
  DEVICE void gather(const Shared& shared, u32 begin, u32 stream, Eight (&values)[BATCH]) const {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const u32 index = min(begin + i * step, end - 1) + stream * task.own_pieces();
      values[i] = take(shared, CLUSTER - 1, index);
#pragma unroll
      for (int sender = 0; sender < CLUSTER - 1; ++sender) {
        add_sums(values[i], take(shared, sender, index));
      }
      if (!is_left()) to_floats(values[i]);
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const u32 row_of_tile = stream * (ROWS / 2) + (min(begin + i * step, end - 1) * CLUSTER + task.rank) * 8;
      const Columns columns(shared.columns(), row_of_tile);
      if (IS_SCALED && task.row_scales != nullptr) scale(values[i], row_scale, columns.scales());
      if (task.bias != nullptr) add(values[i], columns.biases());
    }
  }
  DEVICE Eight take(const Shared& shared, u32 sender, u32 index) const {
    return lane.take(shared.parts(sender) + index * THREADS * PART_BYTES, warp);
  }
};

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS + COPYING, 1)
    skinny(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap x,
         const float* row_scales, const float* column_scales, const T* bias, T* out, i64 out_stride,
         i64 num_rows, i64 num_outputs, i64 num_steps, i64 gated, i64 num_slots, i64 x_rows, i64 adds) {
  const u32 rank = blockIdx.x % CLUSTER;
  const Task task{row_scales,
                  column_scales,
                  bias,
                  out,
                  out_stride,
                  u32(num_rows),
                  int(num_outputs),
                  int(num_slots),
                  int(x_rows),
                  gated != 0,
                  adds != 0,
                  int(blockIdx.x / CLUSTER) * (gated != 0 ? ROWS / 2 : ROWS),
                  rank,
                  int(rank * u32(num_steps) / CLUSTER),
                  int((rank + 1) * u32(num_steps) / CLUSTER)};
  const Shared shared(task);
  const bool copies = threadIdx.x == THREADS;
  if (copies) {
    start_next();
    init_slots(shared, num_slots, THREADS / 32);
    barrier_init(shared.sent(), 1);
    barrier_init_done();
    barrier_expect(shared.sent(), task.num_sent() * THREADS * PART_BYTES);
  }
  __syncthreads();
  cluster_arrive();
  if (MOVES_REGISTERS && threadIdx.x >= THREADS) give_registers();
  if (copies) fetch_weights(task, shared, &weights, SLOT_BYTES);
  if (threadIdx.x == THREADS + 32) fetch_x(task, shared, &x);
  __syncwarp();
  if (threadIdx.x >= THREADS) {
    cluster_wait();
    return;
  }
  if (MOVES_REGISTERS) take_registers();
  clear_rest(task);
  put_columns<THREADS>(shared.columns(), task.column_scales, task.bias, task.first, task.num_outputs, task.gated);
  Output output(task);
  Sum sums[SUMS] = {};
  multiply_steps(task, shared, sums);
  cluster_wait();
  if (IN_RING) {
    cluster_arrive();
    cluster_wait();
  }
  sync_products();  // nobody reads the ring any more
  hand_over(task, shared, sums);
  sync_products();
  if (CLUSTER > 1) barrier_wait(shared.sent(), 0);
  output.finish(shared);
}
