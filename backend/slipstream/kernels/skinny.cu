// y = x W^T for up to 16 rows of x on Hopper's tensor cores, as fast as W can be read. A tile of up to 256 weight rows
// belongs to a cluster, whose CTAs share out the width: each streams its part of the tile and of x through a ring, by
// steps of 64 elements, and multiplies; then each adds up, in rank order, what the cluster has for its share of the
// outputs. Weights are copied from before the previous kernel's end on.
// -D ELEMENT (T: Half or BFloat16), COLUMNS (rows of x, which are the product's: 8, 16), CLUSTER (1, 4)
#include "fetch.cuh"
#include "wgmma.cuh"

constexpr int GROUPS = 2;                 // warpgroups that multiply
constexpr int BLOCKS = 2;                 // of 64 weight rows, for each of them
constexpr int THREADS = 128 * GROUPS;     // that multiply; one warp more copies
constexpr int ROW_BYTES = 128;            // of a step
constexpr int STEP = ROW_BYTES / sizeof(T);
constexpr int BLOCK_BYTES = 64 * ROW_BYTES;
constexpr int SUMS = COLUMNS / 2;         // of a thread, for a block
constexpr int PITCH = 64 * GROUPS * BLOCKS + 4;  // floats between two columns of partial sums: no bank conflicts
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
};

// A slot holds the weight rows of one stream, those of the other, x; behind the slots lie the partial sums.
struct Shared {
  const u32 base = shared_address(shared_bytes);
  const Task& task;

  DEVICE explicit Shared(const Task& task) : task(task) {}
  DEVICE u32 weights(int slot) const { return base + slot * task.slot_bytes; }
  DEVICE u32 x(int slot) const { return weights(slot + 1) - COLUMNS * ROW_BYTES; }
  DEVICE float* partial() const {
    return reinterpret_cast<float*>(shared_bytes + task.num_slots * task.slot_bytes);
  }
  DEVICE u32 full(int slot) const { return shared_address(partial() + COLUMNS * PITCH) + slot * 16; }
  DEVICE u32 empty(int slot) const { return full(slot) + 8; }
};

// ---- the lane that copies ----

DEVICE void copy_box(u32 target, const TensorMap* map, int column, int row, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

DEVICE void copy_weights(const Task& task, const Shared& shared, const TensorMap* weights, int step,
                         int slot, u64 policy) {
  barrier_expect(shared.full(slot), (task.share * task.streams + COLUMNS) * ROW_BYTES);
  for (int stream = 0; stream < task.streams; ++stream)
    copy_box(shared.weights(slot) + stream * task.second() * ROW_BYTES, weights, step * STEP,
             stream * task.num_outputs + task.first, shared.full(slot), policy);
}
DEVICE void copy_x(const Shared& shared, const TensorMap* x, int step, int slot) {
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
  int slot = 0, before = 0;
  u32 parity = 0;
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) pin(sums[b]);
  for (int step = task.begin; step < task.end; ++step) {
    barrier_wait(shared.full(slot), parity);
    products_begin();
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
      for (int k = 0; k < ROW_BYTES; k += 32) {
        const u32 rows = shared.weights(slot) + (group + GROUPS * b) * BLOCK_BYTES + k;
        multiply_columns(sums[b], rows_descriptor(rows), rows_descriptor(shared.x(slot) + k), T{});
      }
    products_commit();
    if (step > task.begin) {
      products_wait<1>();
      if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty(before));
    }
    before = slot;
    if (++slot == task.num_slots) {
      slot = 0;
      parity ^= 1;
    }
  }
  products_wait<0>();
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) pin(sums[b]);
}

// `partial [column][row of the tile]`.
DEVICE void store_sums(float* partial, const float (&sums)[BLOCKS][SUMS]) {
  const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
      const int row = (group + GROUPS * b) * 64 + warp * 16 + lane / 4 + i % 4 / 2 * 8;
      const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      partial[column * PITCH + row] = sums[b][i];
    }
}

// ---- the end ----

DEVICE void meet() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// What the CTAs of the cluster have at the same place of their shared memory, in rank order.
DEVICE float gather(u32 address) {
  float total = 0.0f;
#pragma unroll
  for (int rank = 0; rank < CLUSTER; ++rank) {
    float value;
#if CLUSTER > 1
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\n"
        "ld.shared::cluster.f32 %0, [there];\n}"
        : "=f"(value)
        : "r"(address), "r"(rank)
        : "memory");
#else
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
#endif
    total += value;
  }
  return total;
}

// This CTA's share of the tile's outputs, for every row of x.
DEVICE void finish(const Task& task, const float* partial) {
  const int width = (task.share + CLUSTER - 1) / CLUSTER;
  const int first = task.rank * width;
  const int end = min(min(first + width, task.share), task.num_outputs - task.first);
  const int count = (end - first) * task.num_rows;
  wait_for_previous();
  for (int base = threadIdx.x; base < count; base += BATCH * THREADS) {
    float value[BATCH], up[BATCH], before[BATCH];
    T* target[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {  // all loads before the first use
      const int at = min(base + i * THREADS, count - 1);
      const int row = at / (end - first), place = first + at % (end - first);
      const int column = task.first + place;
      const u32 address = shared_address(partial + row * PITCH + place);
      target[i] = task.out + row * task.out_stride + column;
      value[i] = gather(address);
      up[i] = task.streams == 2 ? gather(address + task.second() * sizeof(float)) : 0.0f;
      before[i] = task.adds ? to_float(load_fresh<1>(target[i]).at[0]) : 0.0f;
      if (task.bias != nullptr) {
        value[i] += to_float(task.bias[column]);
        if (task.streams == 2) up[i] += to_float(task.bias[task.num_outputs + column]);
      }
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if (base + i * THREADS >= count) break;
      if (task.streams == 2) value[i] = __fdividef(value[i], 1.0f + __expf(-value[i])) * up[i];
      *target[i] = from_float<T>(value[i] + before[i]);
    }
  }
}

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif
extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS + 32, 1)
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
    for (int i = 0; i < num_slots; ++i) {
      barrier_init(shared.full(i), 1);
      barrier_init(shared.empty(i), THREADS / 32);
    }
    barrier_init_done();
  }
  __syncthreads();
  if (copies) {
    fetch(task, shared, &weights, &x);
  } else if (threadIdx.x < THREADS) {
    float sums[BLOCKS][SUMS] = {};
    multiply_steps(task, shared, sums);
    store_sums(shared.partial(), sums);
  }
  __syncwarp();
  meet();
  if (threadIdx.x < THREADS) finish(task, shared.partial());
  __syncwarp();
  if (CLUSTER > 1) meet();  // nobody leaves while others read its sums
}
