// y = x W^T for up to COLUMNS rows of x and weights in fewer bits, on Hopper's tensor cores (sm_90a): the weights are A,
// in registers, x is B, in shared memory. A CTA has GROUPS * TILES tiles of 64 rows of the weights and a share of the
// inputs. Each warp streams the codes of its own rows through a ring that no other warp reads, from before the previous
// kernel's end on; one thread copies x for all of them. Where several CTAs share out the inputs, they leave their sums to
// `packed_sum`, which adds them up in order.
// -D ELEMENT (T), BITS, CODE_TYPE, SCALE, PARTS, ZEROS (codes.cuh), COLUMNS (16, 32, 64, 128), TILES (1, 2), SLOTS (of a
// warp's ring), X_SLOTS
#include "gemm/codes.cuh"
#include "runtime/tma.cuh"
#include "gemm/sm90/wgmma_fragments.cuh"

constexpr int GROUPS = 2;  // warpgroups
constexpr int THREADS = GROUPS * 128;
constexpr int SUMS = COLUMNS / 2;  // of a thread and tile
constexpr int CTA_TILES = GROUPS * TILES;
constexpr int CTA_ROWS = CTA_TILES * 64;
constexpr int CHUNK_BYTES = COLUMNS * 128;  // of x: 64 inputs
constexpr int X_BYTES = 2 * CHUNK_BYTES;
constexpr int TURNS = TILES * SUM_PARTS;  // GEMMs of a block that have scales of their own
// Two GEMMs are under way where there are registers for the sums of both.
constexpr int BUFFERS = TURNS % 2 == 0 && COLUMNS < 128 ? 2 : 1;
constexpr int SLOT_BYTES = TILES * BLOCK_BYTES;
constexpr int X_AHEAD = X_SLOTS - 2;  // blocks: so far behind may a warp be before another waits for it
constexpr int PITCH = CTA_ROWS + 4;  // of a row of sums

extern __shared__ __align__(1024) u8 shared_bytes[];

struct Task {
  Codes weights;
  const float* factors;  // of the weights' rows, or null
  const T* bias;
  T* out;
  float* parts;  // where CTAs that share out the inputs leave their sums, or null: [share][row of x][row of the weights]
  i64 out_stride;
  u32 num_rows, num_outputs, num_tiles;  // tiles of 16
  bool gated, adds;
  u32 first;       // of the CTA's tiles of 16; of a gate's, where its ups come in the second half of the CTA's
  u32 begin, end;  // of the CTA's blocks

  // The tile of 16 of a warp of a warpgroup's tile of 64; as many as num_tiles where there is none.
  DEVICE u32 tile(u32 group, int i) const {
    const u32 of_cta = i * GROUPS + group;
    const bool is_up = gated && of_cta >= CTA_TILES / 2;
    const u32 at = first + (is_up ? of_cta - CTA_TILES / 2 : of_cta) * 4 + threadIdx.x / 32 % 4;
    if (at >= (gated ? num_tiles / 2 : num_tiles)) return num_tiles;
    return is_up ? at + num_tiles / 2 : at;
  }
  DEVICE u32 units() const { return gated ? CTA_ROWS / 2 : CTA_ROWS; }
};

struct Shared {
  const u32 base = shared_address(shared_bytes);
  const u32 barriers = base + X_SLOTS * X_BYTES;

  DEVICE u32 x(int slot) const { return base + slot * X_BYTES; }
  DEVICE u32 full(int slot) const { return barriers + slot * 16; }
  DEVICE u32 empty(int slot) const { return full(slot) + 8; }
  DEVICE u8* ring(u32 warp) const { return shared_bytes + X_SLOTS * (X_BYTES + 16) + warp * SLOTS * SLOT_BYTES; }
};

// By one thread: the blocks of x, in order.
struct Inputs {
  const Task& task;
  const Shared& shared;
  const TensorMap* map;
  const int copied;
  u32 block;
  RingPosition next;

  DEVICE Inputs(const Task& task, const Shared& shared, const TensorMap* map, int copied)
      : task(task), shared(shared), map(map), copied(copied), block(task.begin) {}
  DEVICE void copy() {
    if (block < task.end) {
      const u32 full = shared.full(next.slot);
      barrier_wait(shared.empty(next.slot), next.parity ^ 1);
      barrier_expect(full, 2 * copied * 128);
#pragma unroll
      for (int c = 0; c < 2; ++c)
        copy_box(shared.x(next.slot) + c * CHUNK_BYTES, map, block * BLOCK_INPUTS + c * 64, 0, full);
    }
    ++block;
    next.advance(X_SLOTS);
  }
};
// Rows of x that nobody copies are multiplied all the same: zeros take less power.
DEVICE void clear_rest(int copied) {
  for (int chunk = 0; chunk < 2 * X_SLOTS; ++chunk)
    for (int i = copied * 128 + threadIdx.x * 16; i < CHUNK_BYTES; i += THREADS * 16)
      store<4>(reinterpret_cast<u32*>(shared_bytes + chunk * CHUNK_BYTES + i), Pack<u32, 4>{});
  fence_async();
}
// What a warp copies next, SLOTS - 1 blocks ahead of what it multiplies.
struct Ahead {
  const Task& task;
  const u32 ring;
  const u64 policy = evict_first();
  u32 block, slot = 0;

  DEVICE Ahead(const Task& task, u32 ring) : task(task), ring(ring), block(task.begin) {}
  DEVICE void copy() {
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const u32 tile = task.tile(threadIdx.x / 128, i);
      if (block < task.end && tile < task.num_tiles)
        task.weights.copy(ring + slot * SLOT_BYTES + i * BLOCK_BYTES, tile, block, policy);
    }
    copy_commit();
    ++block;
    slot = slot + 1 == SLOTS ? 0 : slot + 1;
  }
};

// A product of some steps, and the scales of its sums.
struct Turn {
  float sums[SUMS];
  float scales[2];
  u32 a[STEPS_A_SUM][4];

  DEVICE void decode_steps(const Block& block, int part) {
    Pack<u32, 4> quad;
#pragma unroll
    for (int i = 0; i < STEPS_A_SUM; ++i) {
      const int step = part * STEPS_A_SUM + i, of_quad = step % STEPS_A_QUAD, of_operand = step / STEPS_A_PART;
      if (i == 0 || of_quad == 0) quad = block.quad(step / STEPS_A_QUAD);
      decode(a[i], quad.at + of_quad * (BITS / 4), block.operand(of_operand, 0), block.operand(of_operand, 1));
    }
    scales[0] = block.scale(part, 0);
    scales[1] = block.scale(part, 1);
  }
  DEVICE void start(u32 x, int part) {
    products_begin();
#pragma unroll
    for (int i = 0; i < STEPS_A_SUM; ++i) {
      const int step = part * STEPS_A_SUM + i;
      multiply(sums, a[i], rows_descriptor(x + step / 4 * CHUNK_BYTES + step % 4 * 32), i > 0, T{});
    }
    products_commit();
  }
  DEVICE void finish(float (&totals)[SUMS]) {
    pin(sums);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) totals[i] += scales[i / 2 % 2] * sums[i];
  }
};

DEVICE void multiply_block(const u8* codes, u32 x, float (&totals)[TILES][SUMS]) {
#pragma unroll
  for (int turn = 0; turn < TURNS; turn += BUFFERS) {
    Turn turns[BUFFERS];
#pragma unroll
    for (int i = 0; i < BUFFERS; ++i) {
      const int tile = (turn + i) / SUM_PARTS, part = (turn + i) % SUM_PARTS;
      turns[i].decode_steps(Block(codes + tile * BLOCK_BYTES), part);
      turns[i].start(x, part);
    }
    if (BUFFERS == 2) {
      products_wait<1>();
      turns[0].finish(totals[turn / SUM_PARTS]);
    }
    products_wait<0>();
    turns[BUFFERS - 1].finish(totals[(turn + BUFFERS - 1) / SUM_PARTS]);
  }
}

DEVICE void multiply_blocks(const Task& task, const Shared& shared, Ahead& ahead, Inputs& inputs,
                            float (&totals)[TILES][SUMS]) {
  const u8* ring = shared.ring(threadIdx.x / 32);
  RingPosition at;
  u32 slot = 0;
#pragma unroll 1
  for (u32 block = task.begin; block < task.end; ++block) {
    if (threadIdx.x == 0) inputs.copy();
    copy_wait<SLOTS - 2>();
    barrier_wait(shared.full(at.slot), at.parity);
    __syncwarp();
    multiply_block(ring + slot * SLOT_BYTES, shared.x(at.slot), totals);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty(at.slot));
    ahead.copy();
    at.advance(X_SLOTS);
    slot = slot + 1 == SLOTS ? 0 : slot + 1;
  }
}

// ---- the end ----

// What a row of x has of one output, or of a gate and its up.
struct Finish {
  const float* factors;
  const T* bias;
  T* out;
  i64 out_stride;
  u32 up;  // output of the first up; 0: there is no gate
  bool adds;

  DEVICE void store(u32 row, u32 output, float value, float of_up) const {
    if (factors != nullptr) value *= factors[output];
    if (bias != nullptr) value += to_float(bias[output]);
    if (up > 0) {
      if (factors != nullptr) of_up *= factors[up + output];
      if (bias != nullptr) of_up += to_float(bias[up + output]);
      value = silu_fast(value) * of_up;
    }
    T* target = out + row * out_stride + output;
    if (adds) value += to_float(load_fresh<1>(target).at[0]);
    *target = from_float<T>(value);
  }
};

// Sums come by rows of x to where the rings were.
DEVICE void put_sums(const float (&totals)[TILES][SUMS]) {
  float* places = reinterpret_cast<float*>(shared_bytes);
  const u32 lane = threadIdx.x % 32, row = threadIdx.x / 128 * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int i = 0; i < SUMS; ++i)
      places[(i / 4 * 8 + lane % 4 * 2 + i % 2) * PITCH + tile * GROUPS * 64 + row + i / 2 % 2 * 8] = totals[tile][i];
}

DEVICE void store_sums(const Task& task, u32 share) {
  const float* places = reinterpret_cast<const float*>(shared_bytes);
  const u32 half = task.num_tiles * 8;
  const Finish finish{task.factors, task.bias, task.out, task.out_stride, task.gated ? half : 0, task.adds};
  for (u32 i = threadIdx.x; i < task.units() * task.num_rows; i += THREADS) {
    const u32 unit = i % task.units(), row = i / task.units(), output = task.first * 16 + unit;
    if (output >= (task.gated ? half : task.num_outputs)) continue;
    const float value = places[row * PITCH + unit];
    const float up = task.gated ? places[row * PITCH + CTA_ROWS / 2 + unit] : 0.0f;
    if (task.parts == nullptr) {
      finish.store(row, output, value, up);
      continue;
    }
    float* part = task.parts + (u64(share) * task.num_rows + row) * task.num_tiles * 16 + output;
    part[0] = value;
    if (task.gated) part[half] = up;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    packed_wgmma(const __grid_constant__ TensorMap x, const u8* codes, const u8* scales, const u8* zeros,
                 const float* factors, const T* bias, T* out, float* parts, i64 out_stride, i64 num_rows, i64 num_inputs, i64 num_outputs, i64 num_tiles,
                 i64 num_groups, i64 group_factor, i64 num_shares, i64 gated, i64 adds, i64 copied) {
  const u32 share = blockIdx.x % u32(num_shares), num_blocks = (num_inputs + BLOCK_INPUTS - 1) / BLOCK_INPUTS;
  const Task task{{codes, scales, zeros, num_blocks, u32(num_groups), u32(group_factor)},
                  factors, bias, out, parts, out_stride, u32(num_rows), u32(num_outputs), u32(num_tiles), gated != 0, adds != 0,
                  blockIdx.x / u32(num_shares) * CTA_TILES * (gated != 0 ? 2 : 4),
                  share * num_blocks / u32(num_shares), (share + 1) * num_blocks / u32(num_shares)};
  const Shared shared;
  start_next();
  if (threadIdx.x == 0) {
    for (int i = 0; i < X_SLOTS; ++i) {
      barrier_init(shared.full(i), 1);
      barrier_init(shared.empty(i), THREADS / 32);
    }
    barrier_init_done();
  }
  Ahead ahead(task, shared_address(shared.ring(threadIdx.x / 32)));
  for (int i = 0; i < SLOTS - 1; ++i) ahead.copy();
  clear_rest(copied);
  __syncthreads();
  wait_for_previous();
  Inputs inputs(task, shared, &x, copied);
  if (threadIdx.x == 0)
    for (int i = 0; i < X_AHEAD; ++i) inputs.copy();
  float totals[TILES][SUMS] = {};
  multiply_blocks(task, shared, ahead, inputs, totals);
  __syncthreads();  // nobody reads the rings any more
  put_sums(totals);
  __syncthreads();
  store_sums(task, share);
}

// Adds up what the CTAs of `packed_wgmma` left, share by share; a thread an output of a row.
extern "C" __global__ void __launch_bounds__(256)
    packed_sum(const float* parts, const float* factors, const T* bias, T* out, i64 out_stride, i64 num_rows,
               i64 num_outputs, i64 num_tiles, i64 num_shares, i64 gated, i64 adds) {
  start_next();
  wait_for_previous();
  const u32 half = gated != 0 ? num_tiles * 8 : 0, outputs = gated != 0 ? half : num_outputs;
  const u32 index = blockIdx.x * 256 + threadIdx.x, row = index / outputs, output = index % outputs;
  if (row >= num_rows) return;
  const Finish finish{factors, bias, out, out_stride, half, adds != 0};
  float value = 0.0f, up = 0.0f;
  for (u32 share = 0; share < num_shares; ++share) {
    const float* part = parts + (share * num_rows + row) * num_tiles * 16 + output;
    value += load_fresh<1>(part).at[0];
    if (gated != 0) up += load_fresh<1>(part + half).at[0];
  }
  finish.store(row, output, value, up);
}
