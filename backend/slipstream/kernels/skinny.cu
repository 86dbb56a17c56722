// y = x W^T for up to 16 rows of x on Hopper's tensor cores, as fast as W can be read. A tile of up to 256 weight rows
// belongs to a cluster, whose CTAs share out the width: each streams its part of the tile and of x through a ring, by
// steps of 64 elements, and multiplies; then each adds up, in rank order, what the others have sent it for its share of
// the outputs. Weights are copied from before the previous kernel's end on.
// -D ELEMENT (T: Half or BFloat16), COLUMNS (rows of x, which are the product's: 8, 16), CLUSTER (1, 4)
#include "cluster.cuh"
#include "fetch.cuh"
#include "wgmma.cuh"

constexpr int GROUPS = 2;                 // warpgroups that multiply
constexpr int BLOCKS = 2;                 // of 64 weight rows, for each of them
constexpr int THREADS = 128 * GROUPS;     // that multiply; two warps more copy
constexpr int ROW_BYTES = 128;            // of a step
constexpr int STEP = ROW_BYTES / sizeof(T);
constexpr int BLOCK_BYTES = 64 * ROW_BYTES;
constexpr int SUMS = COLUMNS / 2;         // of a thread, for a block
constexpr int OWN = 64 * GROUPS * BLOCKS / CLUSTER;  // weight rows at most whose outputs are a CTA's
constexpr int PITCH = COLUMNS + 2;        // floats between sums of two weight rows: few bank conflicts
constexpr int BATCH = 4;                  // outputs that a thread gathers at once

extern __shared__ __align__(1024) u8 shared_bytes[];

struct Task {
  const T* bias;  // of each weight row, or null
  T* out;
  i64 out_stride;
  int num_rows, num_outputs;
  int streams;  // weight rows of an output: 1, or 2 for silu(gate) * up
  int share;    // outputs of a tile
  int num_slots, slot_bytes;
  bool adds;      // to `out`
  int first;      // output of the tile
  int rank;       // in the cluster
  int begin, end;  // this CTA's steps

  // Row of the tile at which the second stream begins.
  DEVICE int second() const { return (share + 63) / 64 * 64; }
  // Outputs of the tile that there are; those that the CTA of a rank finishes, of `width()` at most.
  DEVICE int limit() const { return min(share, num_outputs - first); }
  DEVICE int width() const { return (share + CLUSTER - 1) / CLUSTER; }
  DEVICE int own() const { return max(0, min(width(), limit() - rank * width())); }
};

// A slot holds the weight rows of one stream, those of the other, x; behind the slots lie sums, which others send too.
struct Shared {
  const u32 base = shared_address(shared_bytes);
  const Task& task;

  DEVICE explicit Shared(const Task& task) : task(task) {}
  DEVICE u32 weights(int slot) const { return base + slot * task.slot_bytes; }
  DEVICE u32 x(int slot) const { return weights(slot + 1) - COLUMNS * ROW_BYTES; }
  // What a CTA of the cluster has for one of this CTA's weight rows: a sum for each column.
  DEVICE u32 sums(int rank, int row) const { return weights(task.num_slots) + (rank * OWN + row) * PITCH * 4; }
  DEVICE u32 full(int slot) const { return sums(CLUSTER, 0) + slot * 16; }
  DEVICE u32 empty(int slot) const { return full(slot) + 8; }
  DEVICE u32 sent() const { return full(task.num_slots); }
};

// ---- the lanes that copy ----

DEVICE void copy_box(u32 target, const TensorMap* map, int column, int row, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

DEVICE void copy_weights(const Task& task, const Shared& shared, const TensorMap* weights, int step,
                         int slot, u64 policy) {
  barrier_expect(shared.full(slot), task.share * task.streams * ROW_BYTES);
  for (int stream = 0; stream < task.streams; ++stream)
    copy_box(shared.weights(slot) + stream * task.second() * ROW_BYTES, weights, step * STEP,
             stream * task.num_outputs + task.first, shared.full(slot), policy);
}
DEVICE void copy_x(const Task&, const Shared& shared, const TensorMap* x, int step, int slot) {
  barrier_expect(shared.full(slot), COLUMNS * ROW_BYTES);
  copy_box(shared.x(slot), x, step * STEP, 0, shared.full(slot));
}

// ---- the warpgroups that multiply ----

// sums += A B^T, both in shared memory by rows; 64 rows of A, COLUMNS of B, 16 of k.
#define LIST_8(f, i) f(i), f(i + 1), f(i + 2), f(i + 3), f(i + 4), f(i + 5), f(i + 6), f(i + 7)
#define SUM(i) "+f"(sums[i])
#if COLUMNS == 8
#define OPERANDS "{%0, %1, %2, %3}, %4, %5"
#define ALL_SUMS SUM(0), SUM(1), SUM(2), SUM(3)
#else
#define OPERANDS "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9"
#define ALL_SUMS LIST_8(SUM, 0)
#endif
#define TEXT(x) TEXT_OF(x)
#define TEXT_OF(x) #x
#define MULTIPLY_ADD(ELEMENT_TYPE, TYPE)                                                         \
  DEVICE void multiply_columns(float (&sums)[SUMS], u64 a, u64 b, ELEMENT_TYPE) {                \
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"                                      \
                 "wgmma.mma_async.sync.aligned.m64n" TEXT(COLUMNS) "k16.f32." TYPE "." TYPE " " \
                 OPERANDS ", p, 1, 1, 0, 0;\n}"                                                  \
                 : ALL_SUMS                                                                      \
                 : "l"(a), "l"(b));                                                              \
  }
MULTIPLY_ADD(Half, "f16")
MULTIPLY_ADD(BFloat16, "bf16")
#undef MULTIPLY_ADD

// Block b of a warpgroup is number `group + GROUPS * b` of the tile. Rows behind the last hold anything; they make
// sums that nobody reads.
DEVICE void multiply_steps(const Task& task, const Shared& shared,
                           float (&sums)[BLOCKS][SUMS]) {
  const int group = threadIdx.x / 128;
  RingPosition next;
  int before = 0;
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) pin(sums[b]);
  for (int step = task.begin; step < task.end; ++step) {
    barrier_wait(shared.full(next.slot), next.parity);
    products_begin();
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int k = 0; k < ROW_BYTES; k += 32) {
        const u32 rows = shared.weights(next.slot) + (group + GROUPS * b) * BLOCK_BYTES + k;
        multiply_columns(sums[b], rows_descriptor(rows), rows_descriptor(shared.x(next.slot) + k), T{});
      }
    products_commit();
    if (step > task.begin) {
      products_wait<1>();
      if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty(before));
    }
    before = next.slot;
    next.advance(task.num_slots);
  }
  products_wait<0>();
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) pin(sums[b]);
}

// ---- the end ----

// Each CTA keeps what it has for its own outputs and sends the rest.
DEVICE void share_sums(const Task& task, const Shared& shared, const float (&sums)[BLOCKS][SUMS]) {
  const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int width = task.width(), limit = task.limit();
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (group + GROUPS * b) * 64 + warp * 16 + lane / 4 + half * 8;
      const int stream = task.streams == 2 && row >= task.second(), place = row - stream * task.second();
      if (place >= limit) continue;
      int owner = 0;
#pragma unroll
      for (int rank = 1; rank < CLUSTER; ++rank) owner += place >= rank * width;
      const u32 target = shared.sums(task.rank, stream * width + place - owner * width) + lane % 4 * 8;
#pragma unroll
      for (int i = 0; i < SUMS; i += 4) {
        const float first = sums[b][i + half * 2], second = sums[b][i + half * 2 + 1];
        if (owner != task.rank)
          send(address_in(owner, target + i * 8), first, second, address_in(owner, shared.sent()));
        else
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(target + i * 8), "f"(first), "f"(second) : "memory");
      }
    }
}

// In rank order.
DEVICE float gather(const Shared& shared, int row, int column) {
  float total = 0.0f;
#pragma unroll
  for (int rank = 0; rank < CLUSTER; ++rank) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(shared.sums(rank, row) + column * 4) : "memory");
    total += value;
  }
  return total;
}

// This CTA's share of the tile's outputs, for every row of x.
struct Output {
  const Task& task;
  const int own = task.own();
  const int count = own * task.num_rows;
  float before[BATCH];  // what is added to

  // Of the first outputs it is loaded while products are made.
  DEVICE explicit Output(const Task& task) : task(task) {
    wait_for_previous();
    load(threadIdx.x);
  }

  DEVICE void finish(const Shared& shared) {
    for (int base = threadIdx.x; base < count; base += BATCH * THREADS) {
      if (base >= BATCH * THREADS) load(base);
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int at = base + i * THREADS;
        if (at >= count) break;
        const int row = at / own, place = at % own, column = first() + place;
        float value = gather(shared, place, row) + bias(column);
        if (task.streams == 2) {
          const float up = gather(shared, task.width() + place, row) + bias(task.num_outputs + column);
          value = silu_fast(value) * up;
        }
        *target(at) = from_float<T>(value + (task.adds ? before[i] : 0.0f));
      }
    }
  }

 private:
  DEVICE int first() const { return task.first + task.rank * task.width(); }
  DEVICE T* target(int at) const { return task.out + at / own * task.out_stride + first() + at % own; }
  DEVICE float bias(int weight_row) const {
    return task.bias != nullptr ? to_float(task.bias[weight_row]) : 0.0f;
  }
  DEVICE void load(int base) {
    if (!task.adds) return;
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (base + i * THREADS < count) before[i] = to_float(load_fresh<1>(target(base + i * THREADS)).at[0]);
  }
};

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS + 64, 1)
    skinny(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap x,
           const T* bias, T* out, i64 out_stride, i64 num_rows, i64 num_outputs, i64 num_steps,
           i64 streams, i64 share, i64 num_slots, i64 slot_bytes, i64 adds) {
  const int rank = blockIdx.x % CLUSTER;
  const Task task{bias,
                  out,
                  out_stride,
                  int(num_rows),
                  int(num_outputs),
                  int(streams),
                  int(share),
                  int(num_slots),
                  int(slot_bytes),
                  adds != 0,
                  int(blockIdx.x / CLUSTER) * int(share),
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
    barrier_expect(shared.sent(), (CLUSTER - 1) * task.streams * task.own() * COLUMNS * sizeof(float));
  }
  __syncthreads();
  cluster_arrive();
  if (copies) fetch_weights(task, shared, &weights, int(slot_bytes));
  if (threadIdx.x == THREADS + 32) fetch_x(task, shared, &x);
  __syncwarp();
  if (threadIdx.x >= THREADS) {
    cluster_wait();
    return;
  }
  Output output(task);
  float sums[BLOCKS][SUMS] = {};
  multiply_steps(task, shared, sums);
  cluster_wait();
  share_sums(task, shared, sums);
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
  barrier_wait(shared.sent(), 0);
  output.finish(shared);
}
