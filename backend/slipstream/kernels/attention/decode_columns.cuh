// The running softmax of up to 8 query heads over the tiles of one (sequence, kv head), kept by one warp
// (FlashAttention-2; Dao, 2023). Its GEMMs are transposed: tokens, then dimensions, are the 16 rows of a fragment,
// query heads its 8 columns.
// -D ELEMENT (T: 16 bits), HEAD_SIZE, ROTATES, WINDOWED, SINKS
#pragma once
#include "attention/decode_sums.cuh"
#include "attention/rotation.cuh"

enum { STATES_AT_ONCE = 2 };

// Query heads as fragments B: a lane 4 g + t holds elements 2t, 2t + 1 of every chunk of head g.
struct Query {
  u32 pairs[CHUNKS];
  Pack<float, 2> cosines[CHUNKS / 2];  // of these elements, which those half a head on share
  Pack<float, 2> sines[CHUNKS / 2];

  DEVICE void load_angles(const float* angles) {
    const float* own = angles + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < CHUNKS / 2; ++i) {
      cosines[i] = load_angle(own + i * 8);
      sines[i] = load_angle(own + HEAD_SIZE / 2 + i * 8);
    }
  }
  DEVICE void load_heads(const T* heads, int count) {
    const int lane = threadIdx.x % 32;
    const T* own = heads + lane / 4 * HEAD_SIZE + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
      pairs[i] =
          lane / 4 < count ? load_fresh<1>(reinterpret_cast<const u32*>(own + i * 8)).at[0] : 0;
  }
  DEVICE void prepare() {
    if (ROTATES) rotate();
  }
  DEVICE void rotate() {
#pragma unroll
    for (int i = 0; i < CHUNKS / 2; ++i)
      rotate_pairs(pairs[i], pairs[i + CHUNKS / 2], cosines[i], sines[i]);
  }
};

// Of every step dimensions g and g + 8.
class Columns : public Sums {
 public:
  using Weights = u32[2 * BANDS];  // exponentials of a tile, as fragments B

  // Add what `num_states` times `count` columns have, `stride` apart; loads of several are in flight together.
  DEVICE void merge(const State* states, int num_states, int stride, int count) {
    for (int begin = 0; begin < num_states; begin += STATES_AT_ONCE) {
      Pack<float, 2> sums[STATES_AT_ONCE][2];  // maximum, total
      float values[STATES_AT_ONCE][2][STEPS][2];
#pragma unroll
      for (int i = 0; i < STATES_AT_ONCE; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = min(lane % 4 * 2 + c, count - 1);
          const State& state = states[i64(min(begin + i, num_states - 1)) * stride + column];
          sums[i][c] = load_fresh<2>(&state.maximum);
#pragma unroll
          for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half)
              values[i][c][step][half] =
                  load_fresh<1>(state.output + step * 16 + half * 8 + lane / 4).at[0];
        }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float highest = maximum[c];
#pragma unroll
        for (int i = 0; i < STATES_AT_ONCE; ++i) highest = fmaxf(highest, sums[i][c].at[0]);
        const float factor = exp2_fast(maximum[c] - highest);
        maximum[c] = highest;
        total[c] *= factor;
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
          for (int half = 0; half < 2; ++half) output[step][c + half * 2] *= factor;
#pragma unroll
        for (int i = 0; i < STATES_AT_ONCE; ++i) {
          const float weight = begin + i < num_states ? exp2_fast(sums[i][c].at[0] - highest) : 0.0f;
          if (lane / 4 == 0) total[c] = fmaf(sums[i][c].at[1], weight, total[c]);
#pragma unroll
          for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float& sum = output[step][c + half * 2];
              sum = fmaf(values[i][c][step][half], weight, sum);
            }
        }
      }
    }
  }

  // K q^T: scores of tokens 16 i + g and 16 i + g + 8, each of columns 2t, 2t + 1.
  DEVICE void score(float (&scores)[BANDS][4], const Query& query, u32 keys) const {
#pragma unroll
    for (int i = 0; i < BANDS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[i][j] = 0.0f;
    const u32 own = keys + chunk_offset(lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int i = 0; i < BANDS; ++i) {
        u32 key[4];
        load_matrices(key, at_step(own, step) + i * 16 * ROW_BYTES);
        multiply_add(scores[i], key, query.pairs[step * 2], query.pairs[step * 2 + 1], T{});
      }
  }

#if SINKS
  // The same, but of the first `sinks` tokens as `turned` sees them.
  DEVICE void score_sinks(float (&scores)[BANDS][4], const Query& turned, u32 keys, int sinks) const {
    float others[BANDS][4];
    score(others, turned, keys);
#pragma unroll
    for (int i = 0; i < BANDS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (i * 16 + lane / 4 + j / 2 * 8 < sinks) scores[i][j] = others[i][j];
  }
#endif

  // `Sums::exponentiate`, then the exponentials as fragments B.
  DEVICE void exponentiate(float (&scores)[BANDS][4], Weights& weights, int count, int hidden, float scale,
                           int sinks = 0) {
    Sums::exponentiate(scores, count, hidden, scale, sinks);
#pragma unroll
    for (int i = 0; i < BANDS; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        weights[i * 2 + j] = transpose(pack_pair(scores[i][j * 2], scores[i][j * 2 + 1]));
  }

  // output += V^T weights
  DEVICE void accumulate(const Weights& weights, u32 values) {
    const u32 own = values + chunk_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int i = 0; i < BANDS; ++i) {
        u32 value[4];
        load_transposed(value, at_step(own, step) + i * 16 * ROW_BYTES);
        multiply_add(output[step], value, weights[i * 2], weights[i * 2 + 1], T{});
      }
  }

  // The result: rows of `count` heads.
  DEVICE void write(T* heads, int count) const {
    const float low = 1.0f / total[0], high = 1.0f / total[1];
    u32* own = reinterpret_cast<u32*>(heads + lane / 4 * HEAD_SIZE) + lane % 4;
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* pair = &output[step][half * 2];
        const u32 dimensions = transpose(pack_pair(pair[0] * low, pair[1] * high));
        if (lane / 4 < count) own[step * 8 + half * 4] = dimensions;
      }
  }
  DEVICE void store(Part& part, int count) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = lane % 4 * 2 + c;
      if (column >= count) continue;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        float* own = part.output[column] + step * 16 + lane / 4;
        own[0] = output[step][c];
        own[8] = output[step][c + 2];
      }
      if (lane / 4 == 0) {
        part.maximum[column] = maximum[c];
        part.total[column] = total[c];
      }
    }
  }
};
