// 16 query rows of a warp against tiles of tokens that many sequences share, with the online softmax of
// FlashAttention-2 (Dao, 2023). On Hopper's tensor cores four warps multiply their rows at once, the scores of a tile
// while the one before becomes output (after FlashAttention-3; Shah et al., 2024), if a row is whole columns of
// wgmma.cuh and the rings have the memory.
// -D ELEMENT (T: 16 bits), HEAD_SIZE, WARPS, SLOTS, ROTATES
#pragma once
#include "decode_heads.cuh"
#include "row_softmax.cuh"
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && HEAD_SIZE % 64 == 0 && WARPS * SLOTS >= 16
#define BY_GROUPS 1
#include "wgmma.cuh"
#else
#define BY_GROUPS 0
#endif

constexpr int ROW_WARPS = BY_GROUPS ? 4 : 1;  // whose products are one
static_assert(WARPS % ROW_WARPS == 0);
constexpr int SHARED_COLUMN = SHARED_TILE * 128;  // bytes of 64 dimensions of a tile, if BY_GROUPS

// Where in a tile a chunk of a token lies.
DEVICE int shared_offset(int token, int chunk) {
  if (!BY_GROUPS) return chunk_offset(token, chunk);
  return chunk / 8 * SHARED_COLUMN + token * 128 + (chunk ^ token) % 8 * 16;
}

class PrefixRows {
  using Scores = float[SHARED_TILE / 2];  // of every eight tokens rows g and g + 8, each of tokens 2t, 2t + 1
  const int lane = threadIdx.x % 32;
#if !BY_GROUPS
  u32 query[STEPS][4];
#endif
  float output[CHUNKS * 4];  // of every chunk rows g and g + 8, each of dimensions 2t, 2t + 1
  float maximum[2];          // of rows g and g + 8
  float total[2];            // this lane's share: its tokens
#if BY_GROUPS
  Scores scores;
  u32 weights[SHARED_TILE / 16][4];  // exponentials, as a product takes them
  const u32 queries;  // of the group, in shared memory, where they lie as tiles do
#endif

 public:
#if BY_GROUPS
  // `memory` has room for the rows of all groups.
  DEVICE explicit PrefixRows(u32 memory) : queries(memory + threadIdx.x / 128 * 64 * HEAD_SIZE * sizeof(T)) {}
#endif

  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < CHUNKS * 4; ++i) output[i] = 0.0f;
    maximum[0] = maximum[1] = -INFINITE;
    total[0] = total[1] = 0.0f;
#if BY_GROUPS
#pragma unroll
    for (int i = 0; i < SHARED_TILE / 2; ++i) scores[i] = 0.0f;
#endif
  }
  // Row g + 8 half; null: there is none. `angles` only if ROTATES.
  DEVICE void load(int half, const T* head, const float* angles) {
    u32 pairs[CHUNKS];  // elements 2t, 2t + 1 of every chunk
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
      pairs[i] = head ? load_fresh<1>(reinterpret_cast<const u32*>(head + i * 8 + lane % 4 * 2)).at[0] : 0;
    if (ROTATES && head != nullptr) {
      const float* own = angles + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < CHUNKS / 2; ++i)
        rotate_pairs(pairs[i], pairs[i + CHUNKS / 2], ::load<2>(own + i * 8), ::load<2>(own + HEAD_SIZE / 2 + i * 8));
    }
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
#if BY_GROUPS
      const int row = threadIdx.x % 128 / 32 * 16 + half * 8 + lane / 4;
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(queries + shared_offset(row, i) + lane % 4 * 4), "r"(pairs[i])
                   : "memory");
#else
      query[i / 2][half + i % 2 * 2] = pairs[i];
#endif
    }
  }

#if BY_GROUPS
  // By four warps: K of the first tile, of which `count` tokens are seen, one at least; then V of each tile but the
  // last, with K of the next; then V of the last.
  DEVICE void begin(u32 keys, int count, float scale) {
    start_scores(keys);
    products_wait<0>();
    pin(scores);
    hide(scores, count);
    float factors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) exponentiate(scores, half, scale, factors[half]);
    pack();
  }
  // `copy` starts each of four parts of a copy: in one piece they would take as long as half of all this, and every
  // warp would wait for them.
  template <class Copy>
  DEVICE void step(u32 values, u32 keys, int count, float scale, Copy copy) {
    start_scores(keys);
    start_output(values);
    copy(0);
    products_wait<1>();
    pin(scores);
    copy(1);
    hide(scores, count);
    float factors[2];
    exponentiate(scores, 0, scale, factors[0]);
    copy(2);
    exponentiate(scores, 1, scale, factors[1]);
    copy(3);
    // Never so, but a branch: without it the wait for the product that runs meanwhile is moved above all this.
    if (total[0] + total[1] < 0.0f) __nanosleep(1);
    products_wait<0>();
    pin(output);
    pack();
    rescale(factors);
  }
  DEVICE void end(u32 values) {
    start_output(values);
    products_wait<0>();
    pin(output);
  }
#else
  // The first `count` tokens of a tile; one at least.
  DEVICE void attend(u32 keys, u32 values, int count, float scale) {
    Scores scores;
    score(scores, keys);
    hide(scores, count);
    float factors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) exponentiate(scores, half, scale, factors[half]);
    rescale(factors);
    accumulate(scores, values);
  }
#endif

  DEVICE void sum_totals() {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2)
        total[half] += __shfl_xor_sync(ALL_LANES, total[half], mask);
  }
  DEVICE void store(int half, State& state) const {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
      ::store<2>(state.output + i * 8 + lane % 4 * 2,
                 Pack<float, 2>{output[i * 4 + half * 2], output[i * 4 + half * 2 + 1]});
    if (lane % 4 == 0) ::store<2>(&state.maximum, Pack<float, 2>{maximum[half], total[half]});
  }

 private:
  DEVICE void hide(Scores& scores, int count) const {
    if (count >= SHARED_TILE) return;
#pragma unroll
    for (int i = 0; i < SHARED_TILE / 2; ++i)
      if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= count) scores[i] = -INFINITE;
  }

  // Scores of row g + 8 half become exponentials of `scale` (positive) times them; by `factor` the output so far is to
  // be multiplied.
  DEVICE void exponentiate(Scores& scores, int half, float scale, float& factor) {
    const float now = fmaxf(highest_score<SHARED_TILE>(scores, half, -INFINITE) * scale, maximum[half]);
    factor = exp2_fast(maximum[half] - now);
    maximum[half] = now;
    total[half] = exponentiate_row<SHARED_TILE>(scores, half, scale, now, total[half] * factor);
  }
  // Once some tiles have gone by it is rare that one has a new maximum.
  DEVICE void rescale(const float (&factors)[2]) {
    if (!__any_sync(ALL_LANES, factors[0] != 1.0f || factors[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < CHUNKS * 4; ++i) output[i] *= factors[i / 2 % 2];
  }

#if BY_GROUPS
  // Starts scores = Q K^T.
  DEVICE void start_scores(u32 keys) {
    const u64 a = rows_descriptor(queries), b = rows_descriptor(keys);
    pin(scores);
    products_begin();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const u32 offset = step / 4 * SHARED_COLUMN + step % 4 * 32;
      multiply(scores, advance(a, offset), advance(b, offset), step > 0, T{});
    }
    products_commit();
  }

  // Starts output += P V.
  DEVICE void start_output(u32 values) {
    const u64 b = columns_descriptor(values, SHARED_COLUMN);
    pin(output);
    products_begin();
    multiply_columns<SHARED_TILE>(output, weights, b, T{});
    products_commit();
  }

  DEVICE void pack() { pack_operand<SHARED_TILE>(weights, scores, T{}); }
#else
  // Four sums of a warp's own product.
  template <int N>
  DEVICE static float (&four(float (&sums)[N], int i))[4] {
    return reinterpret_cast<float(&)[4]>(sums[i * 4]);
  }

  // Q K^T
  DEVICE void score(Scores& scores, u32 keys) const {
#pragma unroll
    for (int i = 0; i < SHARED_TILE / 2; ++i) scores[i] = 0.0f;
    const u32 own = keys + chunk_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int i = 0; i < SHARED_TILE / 16; ++i) {
        u32 key[4];  // tokens 0-7: dimensions 0-7, 8-15; tokens 8-15: the same
        load_matrices(key, at_step(own, step) + i * 16 * ROW_BYTES);
        multiply_add(four(scores, i * 2), query[step], key[0], key[1], T{});
        multiply_add(four(scores, i * 2 + 1), query[step], key[2], key[3], T{});
      }
  }

  // output += P V
  DEVICE void accumulate(const Scores& scores, u32 values) {
    const u32 own = values + chunk_offset(lane % 8 + lane / 8 % 2 * 8, lane / 16);
#pragma unroll
    for (int i = 0; i < SHARED_TILE / 16; ++i) {
      u32 weights[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) weights[j] = pack_pair(scores[i * 8 + j * 2], scores[i * 8 + j * 2 + 1]);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        u32 value[4];  // dimensions 0-7: tokens 0-7, 8-15; dimensions 8-15: the same
        load_transposed(value, at_step(own, step) + i * 16 * ROW_BYTES);
        multiply_add(four(output, step * 2), weights, value[0], value[1], T{});
        multiply_add(four(output, step * 2 + 1), weights, value[2], value[3], T{});
      }
    }
  }
#endif
};
