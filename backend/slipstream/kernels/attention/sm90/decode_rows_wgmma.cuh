// Rows that four warps multiply at once (wgmma), the scores of a tile while the one before becomes output (after
// FlashAttention-3; Shah et al., 2024). See decode_rows.cuh.
#pragma once
#include "runtime/wgmma.cuh"

constexpr int ROW_WARPS = 4;  // whose GEMMs are one
static_assert(WARPS % ROW_WARPS == 0);
constexpr int QUERY_BYTES = WARPS * 16 * HEAD_SIZE * sizeof(T);  // of shared memory that queries take
constexpr int MOST_STAGES = 5;  // tiles in shared memory, or on their way to it
constexpr int TILES_READ = 2;   // at once: K of one, V of the one before
constexpr int SHARED_COLUMN = SHARED_TILE * 128;  // bytes of 64 dimensions of a tile

// Where in a tile a chunk of a token lies.
DEVICE int shared_offset(int token, int chunk) {
  return chunk / 8 * SHARED_COLUMN + token * 128 + (chunk ^ token) % 8 * 16;
}

class PrefixRows : public RowStates {
  Scores scores;
  u32 weights[SHARED_TILE / 16][4];  // exponentials, as a product takes them
  const u32 queries;  // of the four warps, in shared memory, where they lie as tiles do

 public:
  // `memory` has room for the rows of all warps.
  DEVICE explicit PrefixRows(u32 memory) : queries(memory + threadIdx.x / 128 * 64 * HEAD_SIZE * sizeof(T)) {
    clear();
#pragma unroll
    for (int i = 0; i < SHARED_TILE / 2; ++i) scores[i] = 0.0f;
  }

  // Row g + 8 half; null: there is none. `angles` only if ROTATES.
  DEVICE void load(int half, const T* head, const float* angles) {
    u32 pairs[CHUNKS];
    load_pairs(pairs, head, angles);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      const int row = threadIdx.x % 128 / 32 * 16 + half * 8 + lane / 4;
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(queries + shared_offset(row, i) + lane % 4 * 4), "r"(pairs[i])
                   : "memory");
    }
  }

  // The rows, if there are some, against the first `num_tokens` of tiles; by all warps. `between` is called for each
  // but the first.
  template <class Tiles, class Between>
  DEVICE void attend(Tiles& tiles, bool has_rows, int num_tokens, float scale, Between between) {
    static_assert(Tiles::COPY_PARTS <= 4, "as many as a step has room for");
    int stage = 0, free = Tiles::FETCHED;
    copy_wait<Tiles::FETCHED - 1>();
    fence_async();
    __syncthreads();
    if (has_rows) begin(tiles.keys(stage), num_tokens, scale);
    for (int first = SHARED_TILE; first < num_tokens; first += SHARED_TILE) {  // `stage`: of the tile before
      copy_wait<Tiles::FETCHED - 2>();
      fence_async();
      __syncthreads();  // this tile is there, and what the copy overwrites is read
      between();
      if (has_rows) {
        step(tiles.values(stage), tiles.keys(Tiles::after(stage)), num_tokens - first, scale,
             [&](int part) { tiles.start_part(free, part); });
        tiles.finish_parts();
      } else {
        tiles.start_copy(free);
      }
      stage = Tiles::after(stage);
      free = Tiles::after(free);
    }
    if (has_rows) end(tiles.values(stage));
  }

 private:
  // K of the first tile, of which `count` tokens are seen, one at least; then V of each tile but the last, with K of
  // the next; then V of the last.
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
};
