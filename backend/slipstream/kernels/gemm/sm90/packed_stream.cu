// y = x W^T for up to COLUMNS rows of x and weights in fewer bits, as fast as these can be read (sm_90a). A CTA has some
// tiles of 16 rows of the weights, TILES of them at a time. One lane streams their codes and scales through a ring, a
// piece of WARPS blocks of a tile a slot, from before the previous kernel's end on; another does so with x. Each of the
// other warps multiplies a block of a piece by mma.sync. At the end of the tiles the warps' sums are added up, always in
// the same order.
// Every block takes a warp about 60 instructions of the integer pipe, which starts one every second cycle, and 60 others:
// half of the time that memory takes to bring four blocks, one for each scheduler.
// -D ELEMENT (T), BITS, CODE_TYPE, SCALE, PARTS, ZEROS, RECORD (codes.cuh), COLUMNS (8, 16), TILES, ADAPTS (whether rows have
// terms of adapters)
#define WARPS 16
#ifndef ADAPTS
#define ADAPTS 0
#endif
#include "gemm/packed_rows.cuh"
#include "runtime/fetch.cuh"
#if ADAPTS
#include "gemm/sm90/packed_terms.cuh"
constexpr int OTHERS = 64 + TERM_THREADS;
#else
constexpr int OTHERS = 64;  // two warps that copy
#endif

constexpr int THREADS = 32 * WARPS;  // that multiply
constexpr int X_PITCH = WARPS * BLOCK_INPUTS * 2 + 16;
constexpr int PIECE_PARTS = WARPS * PARTS;
constexpr int SLOT_BYTES = WARPS * CODE_BYTES + PIECE_PARTS * (SCALE_BYTES + ZERO_BYTES);
constexpr bool LOADS_EARLY = (COLUMNS == 8 && !ADAPTS && RECORD == 0) || (BITS == 4 && PARTS == 1);  // or there are too few registers
static_assert(TILES * COLUMNS * 16 <= THREADS, "a thread finishes one output");

extern __shared__ __align__(128) u8 shared_bytes[];

struct Task {
  Codes weights;
  const float* factors;  // of the weights' rows, or null
  const T *x, *bias;
  T* out;
  i64 x_stride, out_stride;
  u32 num_rows, num_inputs, num_outputs, num_tiles;
  bool gated;  // silu(gate) * up: a CTA has a tile of ups for each of gates
  bool adds;   // to `out`
  int num_slots, num_x_slots;
  u32 begin, end;  // this CTA's tiles, or pairs

  DEVICE u32 at_once() const { return gated ? TILES / 2 : TILES; }
  // Of those that a CTA has at once, from `first` on.
  DEVICE u32 tile(u32 first, int i) const {
    const bool is_up = gated && i >= TILES / 2;
    return first + (is_up ? num_tiles / 2 + i - TILES / 2 : i);
  }
  DEVICE bool exists(u32 first, int i) const { return first + (gated && i >= TILES / 2 ? i - TILES / 2 : i) < end; }
  DEVICE u32 num_pieces() const { return (weights.num_blocks + WARPS - 1) / WARPS; }
#if ADAPTS
  DEVICE OwnOutputs own() const {
    return {int(begin) * 16, int(end - begin) * 16, int(num_tiles) * 8, int(num_outputs), gated};
  }
#endif
  DEVICE bool keeps_x() const { return num_x_slots >= int(num_pieces()); }
};

// The rings of weights and of x, their barriers, zeros instead of rows that are not there, and the sums of warps.
struct Shared {
  const u32 base = shared_address(shared_bytes);
  const u32 x_bytes, x_ring, barriers;
  const int num_slots;

  DEVICE explicit Shared(const Task& task)
      : x_bytes(task.num_rows * X_PITCH), x_ring(base + task.num_slots * SLOT_BYTES),
        barriers(x_ring + task.num_x_slots * x_bytes), num_slots(task.num_slots + task.num_x_slots) {}
  DEVICE u32 slot(int i) const { return base + i * SLOT_BYTES; }
  DEVICE const u8* bytes(int i) const { return shared_bytes + i * SLOT_BYTES; }
  DEVICE u32 x(int i) const { return x_ring + i * x_bytes; }
  // Of slots of weights, and then of those of x.
  DEVICE u32 full(int i) const { return barriers + i * 16; }
  DEVICE u32 empty(int i) const { return full(i) + 8; }
  DEVICE u32 zeros() const { return full(num_slots); }
  DEVICE float* places() const { return reinterpret_cast<float*>(shared_bytes + (zeros() + 16 - base)); }
#if ADAPTS
  DEVICE float* terms() const { return places() + PLACE_BYTES / int(sizeof(float)); }
#endif
};

// ---- the lanes that copy ----

// A piece of a tile: its codes, and the scales and zeros of the groups that it has inputs of.
DEVICE void copy_piece(const Task& task, const Shared& shared, u32 tile, u32 piece, int slot, u64 policy) {
  const Codes& weights = task.weights;
  const u32 block = piece * WARPS, count = min(u32(WARPS), weights.num_blocks - block);
  const u32 group = weights.group(block, 0), num_groups = weights.group(block + count - 1, PARTS - 1) - group + 1;
  const u64 at = u64(tile) * weights.num_groups + group;
  const u32 target = shared.slot(slot), full = shared.full(slot);
  barrier_expect(full, count * CODE_BYTES + num_groups * (SCALE_BYTES + ZERO_BYTES));
  copy_bulk(target, weights.codes + (u64(tile) * weights.num_blocks + block) * CODE_BYTES, count * CODE_BYTES, full,
            policy);
  const u32 scales = target + WARPS * CODE_BYTES;
  copy_bulk(scales, weights.scales + at * SCALE_BYTES, num_groups * SCALE_BYTES, full, policy);
  if (ZEROS) copy_bulk(scales + PIECE_PARTS * SCALE_BYTES, weights.zeros + at * 16, num_groups * 16, full, policy);
}

// The ring is first filled no faster than memory can (fetch.cuh says why).
DEVICE void stream_weights(const Task& task, const Shared& shared) {
  const u64 policy = evict_first();
  const i64 begin_ns = now_ns();
  RingPosition next;
  int ahead = 0;
  for (u32 first = task.begin; first < task.end; first += task.at_once())
    for (u32 piece = 0; piece < task.num_pieces(); ++piece)
      for (int t = 0; t < TILES; ++t) {
        if (!task.exists(first, t)) continue;
        while (ahead < task.num_slots && now_ns() - begin_ns < ahead * SLOT_BYTES / BYTES_A_NS) {}
        ++ahead;
        barrier_wait(shared.empty(next.slot), next.parity ^ 1);
        copy_piece(task, shared, task.tile(first, t), piece, next.slot, policy);
        next.advance(task.num_slots);
      }
}

// Once where there is room for all of x, else for all tiles of a time again.
DEVICE void stream_x(const Task& task, const Shared& shared) {
  wait_for_previous();
  RingPosition next;
  for (u32 first = task.begin; first < task.end; first += task.at_once()) {
    for (u32 piece = 0; piece < task.num_pieces(); ++piece) {
      const u32 input = piece * WARPS * BLOCK_INPUTS, count = min(u32(WARPS * BLOCK_INPUTS), task.num_inputs - input);
      const u32 full = shared.full(task.num_slots + next.slot);
      barrier_wait(full + 8, next.parity ^ 1);
      barrier_expect(full, task.num_rows * count * 2);
      for (u32 row = 0; row < task.num_rows; ++row)
        copy_bulk(shared.x(next.slot) + row * X_PITCH, task.x + row * task.x_stride + input, count * 2, full);
      next.advance(task.num_x_slots);
    }
    if (task.keeps_x()) return;
  }
}

// ---- the warps that multiply ----

// Lets a slot be filled again. `seen` must depend on everything that this warp read of it (ring.cuh says why); that the
// branch is taken now and then does no harm.
DEVICE void release(u32 empty, u32 seen) {
  if (seen == 0x5ca1ab1e) __nanosleep(1);
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(empty);
}

// Inputs from `count` on are not there: what the slot holds behind them may be anything.
DEVICE void clear_inputs(u32 (&b)[PIECES][STEPS][2], u32 count) {
#pragma unroll
  for (int p = 0; p < PIECES; ++p)
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (s * 16 + j * 8 >= int(count)) b[p][s][j] = 0;
}

// The one output that a thread finishes of those that a CTA has at once.
struct Output {
  const u32 row = threadIdx.x % 16, column = threadIdx.x / 16 % COLUMNS, tile = threadIdx.x / 16 / COLUMNS;
  u32 output;
  bool is_real;
  float before = 0.0f, factors[2] = {1.0f, 1.0f}, biases[2] = {};

  DEVICE Output(const Task& task, u32 first) : output((first + tile) * 16 + row) {
    is_real = column < task.num_rows && tile < task.at_once() && task.exists(first, tile) && output < task.num_outputs;
  }
  // What it takes beside the sum.
  DEVICE void load(const Task& task) {
    if (!is_real) return;
#pragma unroll
    for (int stream = 0; stream < 2; ++stream) {
      if (stream == 1 && !task.gated) break;
      const u32 at = stream * task.num_tiles * 8 + output;
      if (task.factors != nullptr) factors[stream] = task.factors[at];
      if (task.bias != nullptr) biases[stream] = to_float(task.bias[at]);
    }
    if (task.adds) before = to_float(load_fresh<1>(task.out + column * task.out_stride + output).at[0]);
  }
#if ADAPTS
  DEVICE void add_terms(const Task& task, const float* terms) {
    barrier_wait(shared_terms.ready(), 0);
    if (!is_real) return;
#pragma unroll
    for (int stream = 0; stream < 2; ++stream) {
      if (stream == 1 && !task.gated) break;
      biases[stream] += terms[task.own().place(column, stream, output)];
    }
  }
#endif
  DEVICE void write(const Task& task, float* places) const {
    if (!is_real) return;
    float value = total(places, tile, column, row) * factors[0] + biases[0];
    if (task.gated)
      value = silu_fast(value) * (total(places, tile + TILES / 2, column, row) * factors[1] + biases[1]);
    task.out[column * task.out_stride + output] = from_float<T>(value + before);
  }
};

DEVICE void sync_warps() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

struct Multiplier {
  const Task& task;
  const Shared& shared;
  const u32 warp = threadIdx.x / 32;
  RingPosition next, next_x;
  u32 b[PIECES][STEPS][2];
  InputSums inputs;

  DEVICE Multiplier(const Task& task, const Shared& shared) : task(task), shared(shared) {}
  DEVICE void take_x(u32 block) {
    const u32 full = shared.full(task.num_slots + next_x.slot);
    barrier_wait(full, next_x.parity);
    load_x<X_PITCH>(b, shared.x(next_x.slot) + warp * BLOCK_INPUTS * 2, shared.zeros(), task.num_rows);
    u32 seen = 0;
#pragma unroll
    for (int p = 0; p < PIECES; ++p) seen ^= b[p][STEPS - 1][1];
    if (!task.keeps_x()) release(full + 8, seen);
    const u32 begin = block * BLOCK_INPUTS;
    if (begin + BLOCK_INPUTS > task.num_inputs) clear_inputs(b, max(task.num_inputs, begin) - begin);
    inputs.take(b);
    if (task.keeps_x() && next_x.slot + 1 == int(task.num_pieces()))
      next_x.slot = 0;  // where it stays, in its first phase
    else
      next_x.advance(task.num_x_slots);
  }
  DEVICE void multiply_tile(float (&sums)[PIECES][4], u32 block, u32 first_group) {
    barrier_wait(shared.full(next.slot), next.parity);
    u32 seen = 0;
    if (block < task.weights.num_blocks) {
      const u8* bytes = shared.bytes(next.slot);
      const u8* scales = bytes + WARPS * CODE_BYTES;
      const Block of_warp(task.weights, bytes + warp * CODE_BYTES, scales, scales + PIECE_PARTS * SCALE_BYTES, block,
                          first_group);
      seen = multiply_block(sums, of_warp, b, inputs);
    }
    release(shared.empty(next.slot), seen);
    next.advance(task.num_slots);
  }
  DEVICE void multiply_tiles(u32 first) {
    Output output(task, first);
    if (LOADS_EARLY) output.load(task);
    float sums[TILES][PIECES][4] = {};
#pragma unroll 1
    for (u32 piece = 0; piece < task.num_pieces(); ++piece) {
      const u32 block = piece * WARPS + warp, first_group = task.weights.group(piece * WARPS, 0);
      take_x(block);
#pragma unroll
      for (int t = 0; t < TILES; ++t)
        if (task.exists(first, t)) multiply_tile(sums[t], block, first_group);
    }
    if (!LOADS_EARLY) output.load(task);
    float* places = shared.places();
    if (warp >= HALF) put_sums(places, warp - HALF, sums, false);
    sync_warps();
    if (warp < HALF) put_sums(places, warp, sums, true);
    sync_warps();
#if ADAPTS
    output.add_terms(task, shared.terms());
#endif
    output.write(task, places);
    sync_warps();  // the sums have been read
  }
};

extern "C" __global__ void __launch_bounds__(THREADS + OTHERS, 1)
    packed_stream(const u8* codes, const u8* scales, const u8* zeros, const float* factors, const T* x, const T* bias,
                  T* out, i64 x_stride, i64 out_stride, i64 num_rows, i64 num_inputs, i64 num_outputs, i64 num_tiles,
                  i64 num_groups, i64 group_factor, i64 share, i64 num_slots, i64 num_x_slots, i64 gated, i64 adds
#if ADAPTS
                  ,
                  const i64* groups, i64 num_term_groups, const int* list, i64 place, const T* plain_x, i64 plain_x_stride,
                  int* num_readers, float* t, i64 t_width, i64 size0, i64 size1
#endif
    ) {
#if ADAPTS
  shared_terms.clear();
#endif
  const u32 units = gated != 0 ? num_tiles / 2 : num_tiles, begin = blockIdx.x * u32(share);
  const u32 num_blocks = (num_inputs + BLOCK_INPUTS - 1) / BLOCK_INPUTS;
  const Task task{{codes, scales, zeros, num_blocks, u32(num_groups), u32(group_factor)},
                  factors, x, bias, out, x_stride, out_stride, u32(num_rows), u32(num_inputs), u32(num_outputs),
                  u32(num_tiles), gated != 0, adds != 0, int(num_slots), int(num_x_slots), begin,
                  min(begin + u32(share), units)};
  const Shared shared(task);
  if (threadIdx.x == THREADS) {
    start_next();
    for (int i = 0; i < shared.num_slots; ++i) {
      barrier_init(shared.full(i), 1);
      barrier_init(shared.empty(i), WARPS);
    }
#if ADAPTS
    barrier_init(shared_terms.ready(), TERM_THREADS);
#endif
    barrier_init_done();
  }
  if (threadIdx.x < 4) reinterpret_cast<u32*>(shared_bytes + (shared.zeros() - shared.base))[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x >= THREADS) {
    if (threadIdx.x == THREADS) stream_weights(task, shared);
    if (threadIdx.x == THREADS + 32) stream_x(task, shared);
#if ADAPTS
    if (threadIdx.x >= THREADS + 64)
      make_terms(groups, int(num_term_groups), list, place, plain_x, plain_x_stride, int(num_rows), int(num_inputs),
                 num_readers, t, int(t_width), int(size0), int(size1), task.own(), shared.terms());
#endif
    return;
  }
  wait_for_previous();
  Multiplier multiplier(task, shared);
  for (u32 first = task.begin; first < task.end; first += task.at_once()) multiplier.multiply_tiles(first);
}
