// y = x W^T for up to 64 * GROUPS rows of x on Hopper's tensor cores, as fast as W can be read. A tile of ROWS weight
// rows, and all rows of x, belong to a cluster, whose CTAs share out the width: each streams its part of both through a
// ring and multiplies, a warpgroup for each 64 rows of x; then each adds up what the cluster has for every CLUSTER-th
// piece of eight columns. Weights are copied from before the previous kernel's end on.
// -D ELEMENT (T: Half or BFloat16), FP8 (whether W and x are e4m3 rather than T), ROWS (a multiple of 16 up to 224),
// GROUPS (1, 2), CLUSTER (1, 2, 4)
#include "cluster.cuh"
#include "fetch.cuh"
#include "wgmma_rows.cuh"

constexpr int THREADS = 128 * GROUPS;  // that multiply; two warps more copy
constexpr int CHUNKS = GROUPS == 1 ? 2 : 1;  // of a step
constexpr int X_BYTES = 64 * GROUPS * ROW_BYTES;  // of a chunk
constexpr int SLOT_BYTES = CHUNKS * (ROWS * ROW_BYTES + X_BYTES);
constexpr int PIECES = ROWS / 8;  // of eight columns, of which a thread has two in each of two rows
// Whether registers are left to load what is added to while products are made.
constexpr bool EARLY = PIECES <= 20;
constexpr int BATCH = EARLY ? 8 : 4;  // pieces whose loads are on their way at once
// Whether sums come to where the ring was, or behind it: the one takes room, the other waits for the whole cluster.
constexpr bool IN_RING = CLUSTER == 4 && GROUPS == 2;
constexpr int OWN = 2 * ((PIECES / 2 + CLUSTER - 1) / CLUSTER);  // pieces that a CTA finishes, at most

extern __shared__ __align__(1024) u8 shared_bytes[];

struct Task {
  const T* bias;  // of each weight row, or null
  T* out;
  i64 out_stride;
  int num_rows, num_outputs;
  int num_slots;
  int x_rows;      // that are copied: num_rows, rounded up to 8
  bool gated;      // silu(gate) * up: a tile has the rows of its gates, and then those of its ups
  bool adds;       // to `out`
  int first;       // output of the tile
  int rank;        // in the cluster
  int begin, end;  // this CTA's steps

  // Parts of pieces that others send.
  DEVICE int num_sent() const {
    const int streams = gated ? 2 : 1;
    return (CLUSTER - 1) * streams * ((PIECES / streams - rank + CLUSTER - 1) / CLUSTER);
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
  // Of this thread: what a sender has of a piece.
  DEVICE u32 part(int sender, int index) const {
    return (IN_RING ? base : sent() + 16) + ((sender * OWN + index) * THREADS + threadIdx.x) * 16;
  }
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

// ---- the warpgroups that multiply ----

DEVICE void clear_rest(const Task& task) {
  if (task.x_rows == 64 * GROUPS) return;
  for (int slot = 0; slot < task.num_slots; ++slot)
    for (int c = 0; c < CHUNKS; ++c)
      clear_rows<THREADS, 64 * GROUPS>(shared_bytes + slot * SLOT_BYTES + c * X_BYTES, task.x_rows);
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

DEVICE void multiply_steps(const Task& task, const Shared& shared, float (&sums)[SUMS]) {
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
        multiply_rows(sums, advance(a, c * X_BYTES + k), advance(b, c * 8 * ROW_BYTES + k), Input{});
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

// A thread's part of a piece: of row g and of row g + 8, two columns each.
struct alignas(16) Four {
  float at[4];
};

// Which CTA finishes a piece, and what number the piece has there; of gates and ups, it has both.
struct Owner {
  int rank, index;

  DEVICE Owner(const Task& task, int piece) {
    const int count = task.gated ? PIECES / 2 : PIECES, stream = piece >= count, within = piece - stream * count;
    rank = within % CLUSTER;
    index = stream * ((count + CLUSTER - 1) / CLUSTER) + within / CLUSTER;
  }
};

// Each CTA sends what it has of the pieces of others.
DEVICE void send_sums(const Task& task, const Shared& shared, const float (&sums)[SUMS]) {
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const Owner owner(task, i);
    if (owner.rank == task.rank) continue;
    const int sender = (task.rank - owner.rank - 1 + CLUSTER) % CLUSTER;
    send(address_in(owner.rank, shared.part(sender, owner.index)), sums[4 * i], sums[4 * i + 1], sums[4 * i + 2],
         sums[4 * i + 3], address_in(owner.rank, shared.sent()));
  }
}

// What the cluster has of piece `i + rank`: what this CTA has, then the next, and so on around.
DEVICE Four gather(const Task& task, const Shared& shared, const float (&sums)[SUMS], int i) {
  Four total;
#pragma unroll
  for (int rank = 0; rank < CLUSTER; ++rank) {
    const int piece = min(i + rank, PIECES - 1);  // what is behind is never asked for, and yet compiled
    if (rank == task.rank) total = {{sums[4 * piece], sums[4 * piece + 1], sums[4 * piece + 2], sums[4 * piece + 3]}};
  }
  const int index = Owner(task, i + task.rank).index;
#pragma unroll
  for (int sender = 0; sender < CLUSTER - 1; ++sender) {
    Four part;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(part.at[0]), "=f"(part.at[1]), "=f"(part.at[2]), "=f"(part.at[3])
                 : "r"(shared.part(sender, index))
                 : "memory");
#pragma unroll
    for (int j = 0; j < 4; ++j) total.at[j] += part.at[j];
  }
  return total;
}

using Pair = Pack<T, 2>;

struct Output {
  const Task& task;
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  Pair before[BATCH][2];  // what is added to

  DEVICE explicit Output(const Task& task) : task(task) {
    wait_for_previous();
    if (EARLY) load(0);
  }

  // Of the pieces that are this CTA's.
  DEVICE void finish(const Shared& shared, const float (&sums)[SUMS]) {
    const int num_pieces = task.gated ? PIECES / 2 : PIECES;
#pragma unroll
    for (int i = 0; i < PIECES; i += CLUSTER) {
      const int piece = i + task.rank;
      if (piece >= num_pieces) break;
      if ((i > 0 || !EARLY) && i / CLUSTER % BATCH == 0) load(i);
      Four value = gather(task, shared, sums, i);
      add_bias(piece, 0, value);
      if (task.gated) {
        Four up = gather(task, shared, sums, i + PIECES / 2);
        add_bias(piece, 1, up);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          value.at[j] = __fdividef(value.at[j], 1.0f + __expf(-value.at[j])) * up.at[j];
      }
      store(piece, value, before[i / CLUSTER % BATCH]);
    }
  }

 private:
  DEVICE void load(int first) {
    if (!task.adds) return;
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int piece = first + i * CLUSTER + task.rank;
        if (has(piece, half)) before[i][half] = load_fresh<2>(target(piece, half));
      }
  }
  DEVICE int column(int piece) const { return task.first + piece * 8 + threadIdx.x % 4 * 2; }
  DEVICE bool has(int piece, int half) const {
    return piece < PIECES && row + 8 * half < task.num_rows && column(piece) < task.num_outputs;
  }
  DEVICE T* target(int piece, int half) const {
    return task.out + (row + 8 * half) * task.out_stride + column(piece);
  }
  // `stream` 1: that of the ups.
  DEVICE void add_bias(int piece, int stream, Four& sums) const {
    if (task.bias == nullptr || column(piece) >= task.num_outputs) return;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      sums.at[j] += to_float(task.bias[stream * task.num_outputs + column(piece) + j % 2]);
  }
  DEVICE void store(int piece, const Four& sums, const Pair (&before)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!has(piece, half)) continue;
      Pair pair;
#pragma unroll
      for (int j = 0; j < 2; ++j)
        pair.at[j] = from_float<T>(sums.at[2 * half + j] +
                                   (task.adds ? to_float(before[half].at[j]) : 0.0f));
      ::store<2>(target(piece, half), pair);
    }
  }
};

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS + 64, 1)
    wide(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap x,
         const T* bias, T* out, i64 out_stride, i64 num_rows, i64 num_outputs, i64 num_steps,
         i64 gated, i64 num_slots, i64 x_rows, i64 adds) {
  const int rank = blockIdx.x % CLUSTER;
  const Task task{bias,
                  out,
                  out_stride,
                  int(num_rows),
                  int(num_outputs),
                  int(num_slots),
                  int(x_rows),
                  gated != 0,
                  adds != 0,
                  int(blockIdx.x / CLUSTER) * (gated != 0 ? ROWS / 2 : ROWS),
                  rank,
                  rank * int(num_steps) / CLUSTER,
                  (rank + 1) * int(num_steps) / CLUSTER};
  const Shared shared(task);
  const bool copies = threadIdx.x == THREADS;
  if (copies) {
    start_next();
    init_slots(shared, num_slots, THREADS / 32);
    barrier_init(shared.sent(), 1);
    barrier_init_done();
    barrier_expect(shared.sent(), task.num_sent() * THREADS * sizeof(Four));
  }
  __syncthreads();
  cluster_arrive();
  if (copies) fetch_weights(task, shared, &weights, SLOT_BYTES);
  if (threadIdx.x == THREADS + 32) fetch_x(task, shared, &x);
  __syncwarp();
  if (threadIdx.x >= THREADS) {
    cluster_wait();
    return;
  }
  clear_rest(task);
  Output output(task);
  float sums[SUMS] = {};
  multiply_steps(task, shared, sums);
  if (CLUSTER > 1) {
    cluster_wait();
    if (IN_RING) {
      cluster_arrive();
      cluster_wait();
    }
    send_sums(task, shared, sums);
    barrier_wait(shared.sent(), 0);
  }
  output.finish(shared, sums);
}
