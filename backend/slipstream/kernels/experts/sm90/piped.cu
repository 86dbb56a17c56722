// GEMMs of experts on Hopper's tensor cores (sm_90a): up to ROWS places of an expert by 256 of its weight rows. The weights
// are A, in registers; rows of x are B, in shared memory. Both pass through a ring of slots: a lane streams boxes of
// weights, a warpgroup gathers rows of x. A warpgroup has every second tile of 64 weight rows, and loads what it multiplies
// next while the tensor cores multiply what it loaded before.
// -D ELEMENT, FP8 (0: weights are T), GATED (see pieces.cuh), ROWS (32, 48, 64, 128: of a tile), SLOTS
#include "experts/pieces.cuh"
#include "gemm/sm90/wgmma_fragments.cuh"
#include "runtime/tma.cuh"

static_assert(!FP8, "streamed.cu multiplies with weights in e4m3");
constexpr int GROUPS = 2;  // warpgroups that multiply; a third one copies
constexpr int THREADS = GROUPS * 128;
constexpr int TILES = 2;  // of 64 weight rows, of a warpgroup
constexpr int WEIGHT_ROWS = GROUPS * TILES * 64;
constexpr int OUTPUTS = GATED ? WEIGHT_ROWS / 2 : WEIGHT_ROWS;
constexpr int UNITS = 8;                   // of 16 bytes, of a row of x or a weight row in a slot
constexpr int X_BYTES = ROWS * 128;        // 64 numbers of each row of x
constexpr int WEIGHTS_BYTES = WEIGHT_ROWS * 128;
constexpr int SLOT_BYTES = X_BYTES + WEIGHTS_BYTES;
constexpr int SUMS = ROWS / 2;             // of a thread and tile
constexpr int SLOT_STEPS = 4;              // of 16 numbers, of a slot
static_assert(TILES % 2 == 0, "fragments change places at every tile");
constexpr int COPIES = ROWS * UNITS / 128; // of 16 bytes of x, of a thread and slot
constexpr int AT_ONCE = COPIES < 8 ? COPIES : 8;
constexpr int ROWS_AT_ONCE = 128 / UNITS;
constexpr int PITCH = OUTPUTS + 8;         // of a row of results

extern __shared__ __align__(1024) u8 shared_bytes[];

struct Shared {
  const u32 base = shared_address(shared_bytes);

  DEVICE u32 slot(int i) const { return base + i * SLOT_BYTES; }
  DEVICE u32 full(int i) const { return base + SLOTS * SLOT_BYTES + i * 16; }
  DEVICE u32 empty(int i) const { return full(i) + 8; }
  // Of each place of the tile: the row of x (-1: none), the row of `out`, and what multiplies it.
  DEVICE int* sources() const { return reinterpret_cast<int*>(shared_bytes + SLOTS * (SLOT_BYTES + 16)); }
  DEVICE int* targets() const { return sources() + ROWS; }
  DEVICE float* factors() const { return reinterpret_cast<float*>(targets() + ROWS); }
};

DEVICE void describe_places(const Task& task, const Shared& shared) {
  for (int i = threadIdx.x; i < ROWS; i += THREADS + 128) {
    const bool real = i < task.count;
    const int pair = real ? task.pair(i) : 0, place = task.first + i;
    shared.sources()[i] = !real ? -1 : GATED ? pair / task.top_k : place;
    shared.targets()[i] = GATED ? place : pair;
    shared.factors()[i] = real && !GATED ? load_fresh<1>(task.weights + pair).at[0] : 1.0f;
  }
}

// ---- the warpgroup that copies ----

// Eights of weight rows: gates and their ups come in turn (tensor_map.expert_rows).
DEVICE void copy_weights(const Shared& shared, const TensorMap* map, const Task& task, int first, int step, int slot, u64 policy) {
  barrier_expect(shared.full(slot), WEIGHTS_BYTES);
  const int at[5] = {step * (128 / WEIGHT_BYTES), 0, 0, first / 8, task.expert};
  copy_box(shared.slot(slot) + X_BYTES, map, at, shared.full(slot), policy);
}

// What a thread copies of x: one unit of every ROWS_AT_ONCE-th row.
struct Gather {
  const Task& task;
  const Shared& shared;
  const int thread = threadIdx.x - THREADS, unit = thread % UNITS, first_row = thread / UNITS;
  Bytes loaded[AT_ONCE];

  DEVICE void load(int step, int begin) {
    const int at = step * UNITS + unit;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int source = shared.sources()[first_row + (begin + i) * ROWS_AT_ONCE];
      loaded[i] = Bytes{};
      if (source >= 0 && at < task.width / 8)
        loaded[i] = load_fresh<4>(reinterpret_cast<const u32*>(task.x + source * task.x_stride + i64(at) * 8));
    }
  }
  DEVICE void store(u32 slot, int begin) const {
    u8* x = shared_bytes + (slot - shared.base);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int row = first_row + (begin + i) * ROWS_AT_ONCE;
      ::store<4>(reinterpret_cast<u32*>(x + row * 128 + (unit ^ row % 8) * 16), loaded[i]);
    }
  }
};

DEVICE void fetch(const Task& task, const Shared& shared, const TensorMap* map, int first, int num_steps) {
  const u64 policy = evict_first();
  Gather gather{task, shared};
  const bool leads = gather.thread == 0;
  if (leads)
    for (int step = 0; step < min(num_steps, SLOTS); ++step) copy_weights(shared, map, task, first, step, step, policy);
  RingPosition next;
  for (int step = 0; step < num_steps; ++step) {
    gather.load(step, 0);
    barrier_wait(shared.empty(next.slot), next.parity ^ 1);
    if (leads && step >= SLOTS) copy_weights(shared, map, task, first, step, next.slot, policy);
#pragma unroll
    for (int begin = 0; begin < COPIES; begin += AT_ONCE) {
      if (begin > 0) gather.load(step, begin);
      __syncwarp();
      gather.store(shared.slot(next.slot), begin);
    }
    fence_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.full(next.slot));
    next.advance(SLOTS);
  }
}

// ---- the warpgroups that multiply ----

// 16 weight rows of a warp by the k-steps of a slot.
struct Fragments {
  u32 a[SLOT_STEPS][4];

  DEVICE void load(u32 rows) {
    const int lane = threadIdx.x % 32, row = lane % 16;
#pragma unroll
    for (int i = 0; i < SLOT_STEPS; ++i) load_matrices(a[i], rows + row * 128 + (2 * i + lane / 16 ^ row % 8) * 16);
  }
  DEVICE void multiply_into(float (&sums)[SUMS], u32 x) const {
    products_begin();
#pragma unroll
    for (int i = 0; i < SLOT_STEPS; ++i) multiply(sums, a[i], rows_descriptor(x + i * 32), true, T{});
    products_commit();
  }
};

struct Multiplier {
  const Shared& shared;
  const int num_steps;
  float (&totals)[TILES][SUMS];
  Fragments fragments[2];
  RingPosition at, next;  // of what is multiplied, of what is loaded

  DEVICE void load_tile(Fragments& into, int tile) const {
    const int block = (tile * GROUPS + threadIdx.x / 128) * 4 + threadIdx.x / 32 % 4;
    into.load(shared.slot(next.slot) + X_BYTES + block * 2048);
  }
  DEVICE void load_next(Fragments& into, int step, int tile) {
    if (tile + 1 < TILES) {
      load_tile(into, tile + 1);
    } else if (step + 1 < num_steps) {
      next.advance(SLOTS);
      barrier_wait(shared.full(next.slot), next.parity);
      load_tile(into, 0);
    }
  }
  DEVICE void run() {
    barrier_wait(shared.full(0), 0);
    load_tile(fragments[0], 0);
    int step = 0;
#pragma unroll 1
    do {  // at least once: or sums were zeros or what was summed, by an instruction that GEMMs wait for
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        fragments[tile % 2].multiply_into(totals[tile], shared.slot(at.slot));
        products_wait<1>();
        if (tile == 0 && step > 0) release(at.slot == 0 ? SLOTS - 1 : at.slot - 1);
        load_next(fragments[1 - tile % 2], step, tile);
      }
      at.advance(SLOTS);
    } while (++step < num_steps);
    products_wait<0>();
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) pin(totals[tile]);
  }

 private:
  // A slot of which all has been multiplied.
  DEVICE void release(int slot) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty(slot));
  }
};

// ---- the end ----

DEVICE void sync_products() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// What a thread finishes: two weight rows, which are a gate and its up or two outputs.
struct Finish {
  const Task& task;
  const float* factors;
  const int output;  // of the first
  const bool real[2];
  float scale[2], bias[2];

  DEVICE Finish(const Task& task, const float* factors, int output)
      : task(task), factors(factors), output(output),
        real{output < task.outputs, GATED ? output < task.outputs : output + 8 < task.outputs} {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = output + i * (GATED ? task.outputs : 8);
      scale[i] = real[i] ? task.scale(row) : 0.0f;
      bias[i] = real[i] ? task.bias_of(row) : 0.0f;
    }
  }
  DEVICE void put(T* place, float upper, float lower, int row) const {
    upper = upper * scale[0] + bias[0];
    lower = lower * scale[1] + bias[1];
    if (GATED) {
      if (TERMS && real[0] && row < task.count) {
        upper = task.adapted(upper, task.first + row, output);
        lower = task.adapted(lower, task.first + row, task.outputs + output);
      }
      place[0] = from_float<T>(gated(upper, lower, task.gate));
    } else {
      place[0] = from_float<T>(upper * factors[row]);
      place[8] = from_float<T>(lower * factors[row]);
    }
  }
};

// Results by rows to where the ring was, and from there to memory.
DEVICE void finish(const Task& task, const Shared& shared, const float (&totals)[TILES][SUMS], int first) {
  T* places = reinterpret_cast<T*>(shared_bytes);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  sync_products();  // nobody reads the ring any more
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    const int block = (tile * GROUPS + threadIdx.x / 128) * 4 + threadIdx.x / 32 % 4;
    const int within = block * (GATED ? 8 : 16) + g;
    const Finish done(task, shared.factors(), first + within);
#pragma unroll
    for (int i = 0; i < SUMS; i += 4)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = i * 2 + 2 * t + j;
        done.put(places + row * PITCH + within, totals[tile][i + j], totals[tile][i + 2 + j], row);
      }
  }
  sync_products();
  for (int i = threadIdx.x; i < task.count * (OUTPUTS / 8); i += THREADS) {
    const int row = i / (OUTPUTS / 8), eight = i % (OUTPUTS / 8) * 8;
    if (first + eight >= task.outputs) continue;
    store<8>(task.out + i64(shared.targets()[row]) * task.outputs + first + eight, load<8>(places + row * PITCH + eight));
  }
}

// Grid: x = outputs, y = tiles.
extern "C" __global__ void __launch_bounds__(THREADS + 128, 1) piped(const __grid_constant__ TensorMap map, PARAMETERS) {
  start_next();
  wait_for_previous();
  TASK(blockIdx.y);
  if (task.count == 0) return;
  const Shared shared;
  const int first = blockIdx.x * OUTPUTS;
  const int num_steps = (task.width * WEIGHT_BYTES + 127) / 128;
  describe_places(task, shared);
  if (threadIdx.x == THREADS) {
    for (int i = 0; i < SLOTS; ++i) {
      barrier_init(shared.full(i), 1 + 128 / 32);
      barrier_init(shared.empty(i), THREADS / 32);
    }
    barrier_init_done();
  }
  __syncthreads();
  if (threadIdx.x < THREADS) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
    float totals[TILES][SUMS] = {};
    Multiplier{shared, num_steps, totals}.run();
    finish(task, shared, totals, first);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
    fetch(task, shared, &map, first, num_steps);
  }
}
