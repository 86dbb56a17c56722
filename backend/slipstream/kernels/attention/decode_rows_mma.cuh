// Rows that a warp multiplies alone (mma.sync). See decode_rows.cuh.
#pragma once

constexpr int ROW_WARPS = 1;    // whose GEMMs are one
constexpr int QUERY_BYTES = 0;  // of shared memory that queries take
constexpr int MOST_STAGES = 4;  // tiles in shared memory, or on their way to it
constexpr int TILES_READ = 1;   // at once

// Where in a tile a chunk of a token lies.
DEVICE int shared_offset(int token, int chunk) { return chunk_offset(token, chunk); }

class PrefixRows : public RowStates {
  u32 query[STEPS][4];

 public:
  DEVICE explicit PrefixRows(u32) { clear(); }

  // Row g + 8 half; null: there is none. `angles` only if ROTATES.
  DEVICE void load(int half, const T* head, const float* angles) {
    u32 pairs[CHUNKS];
    load_pairs(pairs, head, angles);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) query[i / 2][half + i % 2 * 2] = pairs[i];
  }

  // The rows, if there are some, against the first `num_tokens` of tiles; by all warps. `between` is called for each.
  template <class Tiles, class Between>
  DEVICE void attend(Tiles& tiles, bool has_rows, int num_tokens, float scale, Between between) {
    int stage = 0, free = Tiles::FETCHED;
    for (int begin = 0; begin < num_tokens; begin += SHARED_TILE) {
      copy_wait<Tiles::FETCHED - 1>();
      __syncthreads();  // this tile is there, and what the copy overwrites is read
      between();
      tiles.start_copy(free);
      if (has_rows) attend_tile(tiles.keys(stage), tiles.values(stage), num_tokens - begin, scale);
      stage = Tiles::after(stage);
      free = Tiles::after(free);
    }
  }

 private:
  DEVICE void attend_tile(u32 keys, u32 values, int count, float scale) {
    Scores scores;
    score(scores, keys);
    hide(scores, count);
    float factors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) exponentiate(scores, half, scale, factors[half]);
    rescale(factors);
    accumulate(scores, values);
  }

  // Four sums of a product.
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
};
