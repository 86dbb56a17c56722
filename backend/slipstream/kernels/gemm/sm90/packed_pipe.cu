// y = x W^T for up to COLUMNS rows of x and weights in fewer bits, on Hopper's tensor cores (sm_90a): the weights are A,
// decoded into registers, x is B, in shared memory. A CTA has 2 * TILES tiles of 64 rows of the weights, a warpgroup
// every second, and a share of the inputs. One lane streams codes, scales and zeros through a ring, a block of 128 inputs
// a slot, from before the previous kernel's end on; another does so with x. A warpgroup decodes what it multiplies next
// while the tensor cores multiply what it decoded before; while it scales sums, those of the other one are multiplied.
// Where several CTAs share out the inputs, they leave their sums to `packed_pipe_sum`, which adds them up in order.
// For 64 rows by 128 inputs a warp issues about 60 instructions of the integer pipe, in 120 cycles, and 90 others; the
// tensor cores multiply 4 * COLUMNS cycles.
// Rows of e4m3 (FP8), which have a scale each, are multiplied twice as fast; codes, of 4 bits without zeros, lie otherwise
// then (packing.py), and become e4m3 exactly by 90 instructions of the integer pipe.
// Of records, which are built SCALED, each number is a scale times a code and a minimum, rounded once, by two instructions
// more a number: so a minimum takes neither sums of x nor registers, and scales of 16 inputs cost what others do.
// -D ELEMENT (T: of `out`), BITS, CODE_TYPE, SCALE, PARTS, ZEROS, SCALED, RECORD (codes.cuh), FP8 (0, 1), COLUMNS (16, 32, 64,
// 128, 256), TILES (1, 2), ADAPTS (whether rows have terms of adapters: then no CTAs share out inputs)
#ifndef FP8
#define FP8 0
#endif
#ifndef ADAPTS
#define ADAPTS 0
#endif
#include "gemm/codes.cuh"
#include "runtime/fetch.cuh"
#include "gemm/sm90/packed_finish.cuh"
#include "gemm/sm90/wgmma_fragments.cuh"
#if ADAPTS
#include "gemm/sm90/packed_terms.cuh"
#endif

constexpr int GROUPS = 2;  // warpgroups that multiply; a third one copies
constexpr int THREADS = GROUPS * 128;
constexpr int SUMS = COLUMNS / 2;  // of a thread and tile
constexpr int CTA_ROWS = GROUPS * TILES * 64;
constexpr int HALF_TILES = CTA_ROWS / 32;  // tiles of 16 rows of half a CTA: a gate's, say
constexpr int TURNS = TILES * SUM_PARTS;   // of a block, a product each

#if FP8
using Input = E4m3;
static_assert(BITS == 4 && CODE_TYPE == INTEGERS && !ZEROS && !SCALED, "e4m3 has all integers up to 16");
#else
using Input = T;
#endif
constexpr int CHUNKS = FP8 ? 1 : 2;  // of x, of 128 bytes a row
constexpr int CHUNK_BYTES = COLUMNS * 128;
constexpr int X_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int STEPS_A_PRODUCT = FP8 ? 2 : 1;
constexpr int PRODUCTS_A_SUM = STEPS_A_SUM / STEPS_A_PRODUCT;
constexpr int HALF_CODES = HALF_TILES * CODE_BYTES;
constexpr int HALF_SCALES = HALF_TILES * PARTS * SCALE_BYTES;
constexpr int HALF_ZEROS = HALF_TILES * PARTS * ZERO_BYTES;
constexpr int ZERO_PITCH = (HALF_ZEROS + 127) / 128 * 128;  // boxes arrive at multiples of 128 bytes
constexpr int SLOT_BYTES = (X_BYTES + 2 * (HALF_CODES + HALF_SCALES + ZERO_PITCH) + 1023) / 1024 * 1024;
constexpr int PITCH = CTA_ROWS + 4;  // of a row of sums

extern __shared__ __align__(1024) u8 shared_bytes[];

struct Task {
  Codes weights;  // their groups alone: boxes bring them
  const TensorMap *scales, *zeros;
  const float *row_scales, *factors;  // of rows of x, of those of the weights, or null
  const T* bias;
  T* out;
  float* parts;  // where CTAs that share out the inputs leave their sums, or null: [share][row of x][row of the weights]
  i64 out_stride;
  u32 first_row, last_row, num_rows;  // of x: the CTA's, and all
  u32 num_outputs, num_tiles;         // tiles of 16
  bool gated, adds, wide;                // wide: eights of outputs are aligned
  u32 first;       // of the CTA's tiles of 16; of a gate's, where its ups come in the second half of the CTA's
  int begin, end;  // of the CTA's blocks
  int num_slots, copied;

  DEVICE u32 first_of_half(int half) const {
    return first + (half == 0 ? 0 : gated ? num_tiles / 2 : u32(HALF_TILES));
  }
#if ADAPTS
  DEVICE OwnOutputs own() const {
    return {int(first) * 16, gated ? CTA_ROWS / 2 : CTA_ROWS, int(num_tiles) * 8, int(num_outputs), gated};
  }
#endif
};

struct Shared {
  const u32 base = shared_address(shared_bytes);
  const u32 barriers;

  DEVICE explicit Shared(const Task& task) : barriers(base + task.num_slots * SLOT_BYTES) {}
  DEVICE u32 x(int slot) const { return base + slot * SLOT_BYTES; }
  DEVICE u32 full(int slot) const { return barriers + slot * 16; }
  DEVICE u32 empty(int slot) const { return full(slot) + 8; }
#if ADAPTS
  // Behind the ring, and behind the sums that come to where it was.
  DEVICE float* terms(const Task& task) const {
    const u32 ring = task.num_slots * (SLOT_BYTES + 16);
    return reinterpret_cast<float*>(shared_bytes + max(ring, u32(COLUMNS * PITCH * sizeof(float))));
  }
#endif
};

// ---- the lanes that copy ----

DEVICE void copy_weights(const Task& task, const Shared& shared, const TensorMap* codes, int block, int slot, u64 policy) {
  const u32 full = shared.full(slot), group = task.weights.group(block, 0);
  u32 target = shared.x(slot) + X_BYTES;
  barrier_expect(full, 2 * (HALF_CODES + HALF_SCALES + HALF_ZEROS));
#pragma unroll
  for (int half = 0; half < 2; ++half)
    copy_box(target + half * HALF_CODES, codes, block * (CODE_BYTES / 8), task.first_of_half(half), full, policy);
  target += 2 * HALF_CODES;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    copy_box(target + half * HALF_SCALES, task.scales, group * (SCALE_BYTES / 8), task.first_of_half(half), full, policy);
  if (!ZEROS) return;
  target += 2 * HALF_SCALES;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    copy_box(target + half * ZERO_PITCH, task.zeros, group * (ZERO_BYTES / 8), task.first_of_half(half), full, policy);
}
DEVICE void copy_x(const Task& task, const Shared& shared, const TensorMap* x, int block, int slot) {
  barrier_expect(shared.full(slot), CHUNKS * task.copied * 128);
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
    copy_box(shared.x(slot) + c * CHUNK_BYTES, x, block * BLOCK_INPUTS + c * 64, task.first_row, shared.full(slot));
}

// ---- the warpgroups that multiply ----

DEVICE void sync_products() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// Rows of x that nobody copies are multiplied all the same: zeros take less power.
DEVICE void clear_rest(const Task& task) {
  if (task.copied == COLUMNS) return;
  for (int slot = 0; slot < task.num_slots; ++slot)
    for (int c = 0; c < CHUNKS; ++c)
      for (int i = task.copied * 128 + threadIdx.x * 16; i < CHUNK_BYTES; i += THREADS * 16)
        store<4>(reinterpret_cast<u32*>(shared_bytes + slot * SLOT_BYTES + c * CHUNK_BYTES + i), Pack<u32, 4>{});
  fence_async();
  sync_products();
}

// What is multiplied at once: fragments of a tile and a part of a block, and the scales of their sums.
struct Fragments {
  u32 a[PRODUCTS_A_SUM][4];
  float scales[2];

  DEVICE void decode_step(const Block& block, const u32* words, int i, int of_part) {
    if constexpr (FP8) {
      u32 rows[2];
      decode_e4m3(rows, words[0]);
      a[i / 2][i % 2 * 2] = rows[0], a[i / 2][i % 2 * 2 + 1] = rows[1];
    } else {
      decode(a[i], words, block.operand(of_part, 0), block.operand(of_part, 1));
    }
    if constexpr (SCALED) {
#pragma unroll
      for (int j = 0; j < 4; ++j) a[i][j] = scaled(a[i][j], block, i, of_part, j % 2);
    }
  }
  static DEVICE u32 scaled(u32 pair, const Block& block, int step, int part, int high) {
    if constexpr (RECORD == 0) return scaled_pair(pair, block.scale_pair(part, high));
    return rounded_pair(pair, block.exact_scale(part, step % SCALES_A_PART, high), block.minimum(part, high));
  }
  DEVICE void decode_steps(const Block& block, int part) {
    Pack<u32, 4> quad;
#pragma unroll
    for (int i = 0; i < STEPS_A_SUM; ++i) {
      const int step = part * STEPS_A_SUM + i, of_quad = step % STEPS_A_QUAD, of_part = step / STEPS_A_PART;
      if (i == 0 || of_quad == 0) quad = block.quad(step / STEPS_A_QUAD);
      decode_step(block, quad.at + of_quad * (BITS / 4), i, of_part);
    }
    scales[0] = block.scale(part, 0);
    scales[1] = block.scale(part, 1);
  }
  // Sums are added to if scales multiply numbers, and begun anew else.
  DEVICE void start(float (&sums)[SUMS], u32 x, int part) const {
    products_begin();
#pragma unroll
    for (int i = 0; i < PRODUCTS_A_SUM; ++i) {
      const int step = part * PRODUCTS_A_SUM + i;
      multiply(sums, a[i], rows_descriptor(x + step / 4 * CHUNK_BYTES + step % 4 * 32), SCALES_NUMBERS || i > 0, Input{});
    }
    products_commit();
  }
  DEVICE void finish(float (&totals)[SUMS], float (&sums)[SUMS]) const {
    pin(sums);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) totals[i] += scales[i / 2 % 2] * sums[i];
  }
};

// A branch that is taken now and then, which does no harm, and depends on all that was decoded: else the compiler decodes
// behind what waits for GEMMs.
DEVICE void keep_in_front(const Fragments& decoded) {
  u32 mixed[2] = {};
#pragma unroll
  for (int i = 0; i < PRODUCTS_A_SUM; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) mixed[j] = fma_pairs(decoded.a[i][2 * j], decoded.a[i][2 * j + 1], mixed[j], T{});
  if ((mixed[0] ^ mixed[1]) == 0x5ca1ab1e) __nanosleep(1);
  __syncwarp();
}

struct Multiplier {
  const Task& task;
  const Shared& shared;
  float (&totals)[TILES][SUMS];
  Fragments fragments[2];
  RingPosition at, next;  // of what is multiplied, of what is decoded

  DEVICE Multiplier(const Task& task, const Shared& shared, float (&totals)[TILES][SUMS])
      : task(task), shared(shared), totals(totals) {}
  DEVICE void decode_turn(Fragments& into, int block, int turn) const {
    const u32 tile = (turn / SUM_PARTS * GROUPS + threadIdx.x / 128) * 4 + threadIdx.x / 32 % 4;
    const u8* codes = shared_bytes + next.slot * SLOT_BYTES + X_BYTES;
    const u8* scales = codes + 2 * HALF_CODES;
    const u8* zeros = scales + 2 * HALF_SCALES + tile / HALF_TILES * ZERO_PITCH + tile % HALF_TILES * PARTS * ZERO_BYTES;
    const Block of_warp(task.weights, codes + tile * CODE_BYTES, scales + tile * PARTS * SCALE_BYTES, zeros, block,
                        task.weights.group(block, 0));
    into.decode_steps(of_warp, turn % SUM_PARTS);
  }
  DEVICE void decode_next(Fragments& into, int block, int turn) {
    if (turn + 1 < TURNS) {
      decode_turn(into, block, turn + 1);
      keep_in_front(into);
    } else if (block + 1 < task.end) {
      next.advance(task.num_slots);
      barrier_wait(shared.full(next.slot), next.parity);
      decode_turn(into, block + 1, 0);
    }
  }
  // The fragments of its first turn are number PHASE. Sums that are read must be started and awaited in one round of the
  // loop, or the compiler makes every product wait for the one before; those that grow for ever need not.
  template <int PHASE>
  DEVICE void multiply_block(int block) {
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const int now = (PHASE + turn) % 2, other = 1 - now, tile = turn / SUM_PARTS;
      const u32 x = shared.x(at.slot);
      if constexpr (SCALES_NUMBERS) {
        fragments[now].start(totals[tile], x, turn % SUM_PARTS);
        products_wait<1>();
        if (turn == 0 && block > task.begin) release(at.slot == 0 ? task.num_slots - 1 : at.slot - 1);
        decode_next(fragments[other], block, turn);
      } else {
        float sums[SUMS];
        fragments[now].start(sums, x, turn % SUM_PARTS);
        products_wait<1>();  // waits for nothing: decoding is not moved in front of GEMMs
        decode_next(fragments[other], block, turn);
        products_wait<0>();
        if (turn == TURNS - 1) release(at.slot);
        fragments[now].finish(totals[tile], sums);
      }
    }
    at.advance(task.num_slots);
  }
  DEVICE void multiply_blocks() {
    barrier_wait(shared.full(0), 0);
    decode_turn(fragments[0], task.begin, 0);
    int block = task.begin;
#pragma unroll 1
    while (true) {
      multiply_block<0>(block);
      if (++block == task.end) break;
      if constexpr (TURNS % 2 == 1) {
        multiply_block<1>(block);
        if (++block == task.end) break;
      }
    }
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

// Sums come by rows of x to where the ring was.
DEVICE void put_sums(const float (&totals)[TILES][SUMS]) {
  float* places = reinterpret_cast<float*>(shared_bytes);
  const u32 lane = threadIdx.x % 32, row = threadIdx.x / 128 * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int i = 0; i < SUMS; ++i)
      places[(i / 4 * 8 + lane % 4 * 2 + i % 2) * PITCH + tile * GROUPS * 64 + row + i / 2 % 2 * 8] = totals[tile][i];
}

DEVICE void store_sums(const Task& task, u32 share, const float* terms = nullptr) {
  const float* places = reinterpret_cast<const float*>(shared_bytes);
  const u32 half = task.num_tiles * 8, outputs = task.gated ? half : task.num_outputs;
  const u32 eights = task.gated ? CTA_ROWS / 16 : CTA_ROWS / 8, end = task.gated ? half : task.num_tiles * 16;
  const Finish finish{task.row_scales, task.factors, task.bias, task.out, task.out_stride, outputs, task.gated, task.adds, task.wide};
  for (u32 i = threadIdx.x; i < eights * (task.last_row - task.first_row); i += THREADS) {
    const u32 unit = i % eights * 8, place = i / eights, row = task.first_row + place, output = task.first * 16 + unit;
    if (output >= end) continue;
    Eight values, ups;
    values.load(places + place * PITCH + unit);
    if (task.gated) ups.load(places + place * PITCH + CTA_ROWS / 2 + unit);
    if (task.parts == nullptr) {
      const float* own = terms == nullptr ? nullptr : terms + place * CTA_ROWS + unit;
      if (output < outputs) finish.store(row, output, values, ups, own, CTA_ROWS / 2);
      continue;
    }
    float* part = task.parts + (u64(share) * task.num_rows + row) * task.num_tiles * 16 + output;
    values.store(part);
    if (task.gated) ups.store(part + half);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1)
    packed_pipe(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap codes,
                const __grid_constant__ TensorMap scales, const __grid_constant__ TensorMap zeros,
                const float* row_scales, const float* factors, const T* bias, T* out, float* parts, i64 out_stride,
                i64 num_rows, i64 num_inputs, i64 num_outputs, i64 num_tiles, i64 num_groups, i64 group_factor,
                i64 num_shares, i64 gated, i64 adds, i64 wide, i64 copied, i64 num_slots, i64 row_tiles
#if ADAPTS
                ,
                const i64* groups, i64 num_term_groups, const int* list, i64 place, const T* plain_x, i64 plain_x_stride,
                int* num_readers, float* t, i64 t_width, i64 size0, i64 size1
#endif
    ) {
#if ADAPTS
  shared_terms.clear();
#endif
  const u32 share = blockIdx.x % u32(num_shares), num_blocks = (num_inputs + BLOCK_INPUTS - 1) / BLOCK_INPUTS;
  const u32 tile = blockIdx.x / u32(num_shares), first_row = tile % u32(row_tiles) * COLUMNS;
  const Task task{{nullptr, nullptr, nullptr, num_blocks, u32(num_groups), u32(group_factor)},
                  &scales, &zeros, row_scales, factors, bias, out, parts, out_stride,
                  first_row, min(first_row + COLUMNS, u32(num_rows)), u32(num_rows), u32(num_outputs), u32(num_tiles),
                  gated != 0, adds != 0, wide != 0, tile / u32(row_tiles) * HALF_TILES * (gated != 0 ? 1 : 2),
                  int(share * num_blocks / u32(num_shares)), int((share + 1) * num_blocks / u32(num_shares)),
                  int(num_slots), int(copied)};
  const Shared shared(task);
  if (threadIdx.x == THREADS) {
    start_next();
    init_slots(shared, num_slots, THREADS / 32);
#if ADAPTS
    barrier_init(shared_terms.ready(), TERM_THREADS);
#endif
    barrier_init_done();
  }
  __syncthreads();
  if (threadIdx.x < THREADS) {
    if (!ADAPTS) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    clear_rest(task);
    float totals[TILES][SUMS] = {};
    Multiplier(task, shared, totals).multiply_blocks();
    wait_for_previous();
    sync_products();  // nobody reads the ring any more
    put_sums(totals);
    sync_products();
#if ADAPTS
    barrier_wait(shared_terms.ready(), 0);
    store_sums(task, share, shared.terms(task));
#else
    store_sums(task, share);
#endif
  } else {
    if (!ADAPTS) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == THREADS) fetch_weights(task, shared, &codes, SLOT_BYTES - X_BYTES);
    if (threadIdx.x == THREADS + 32) fetch_x(task, shared, &x);
#if ADAPTS
    if (threadIdx.x >= THREADS + 64)
      make_terms(groups, int(num_term_groups), list, place, plain_x, plain_x_stride, int(num_rows), int(num_inputs),
                 num_readers, t, int(t_width), int(size0), int(size1), task.own(), shared.terms(task));
#endif
  }
}

constexpr int SHARES = 4;  // that a thread loads at once

DEVICE void add_shares(Eight& sums, const float* parts, u64 share_size, u32 count) {
  Pack<float, 4> loaded[SHARES][2];
#pragma unroll
  for (u32 share = 0; share < SHARES; ++share)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (share < count) loaded[share][i] = load_fresh<4>(parts + share * share_size + i * 4);
#pragma unroll
  for (u32 share = 0; share < SHARES; ++share)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (share < count) sums.at[i] += loaded[share][i / 4].at[i % 4];
}

// Adds up what the CTAs of `packed_pipe` left, share by share; a thread eight outputs of a row.
extern "C" __global__ void __launch_bounds__(256)
    packed_pipe_sum(const float* parts, const float* row_scales, const float* factors, const T* bias, T* out,
                    i64 out_stride, i64 num_rows, i64 num_outputs, i64 num_tiles, i64 num_shares, i64 gated, i64 adds, i64 wide) {
  start_next();
  wait_for_previous();
  const u32 half = num_tiles * 8, outputs = gated != 0 ? half : num_outputs, eights = (outputs + 7) / 8;
  const u32 index = blockIdx.x * 256 + threadIdx.x, row = index / eights, output = index % eights * 8;
  if (row >= num_rows) return;
  Eight values{}, ups{};
  const u64 share_size = u64(num_rows) * num_tiles * 16;
  const float* part = parts + u64(row) * num_tiles * 16 + output;
  for (u32 share = 0; share < num_shares; share += SHARES, part += SHARES * share_size) {
    const u32 count = min(u32(SHARES), u32(num_shares) - share);
    add_shares(values, part, share_size, count);
    if (gated != 0) add_shares(ups, part + half, share_size, count);
  }
  const Finish finish{row_scales, factors, bias, out, out_stride, outputs, gated != 0, adds != 0, wide != 0};
  finish.store(row, output, values, ups);
}
