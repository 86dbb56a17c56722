// 16 query rows of one warp against tokens in shared memory, on tensor cores (16-bit elements), with the
// online softmax of FlashAttention-2 (Dao, 2023).
//
// A fragment C of scores is, packed, a fragment A of probabilities (mma.cuh).
#pragma once
#include "cache/pages.cuh"
#include "attention/rotation.cuh"

class WarpRows {
  static constexpr int STEPS = HEAD_SIZE / 16;
  const int lane = threadIdx.x % 32;
  u32 query[STEPS][4];
  float output[HEAD_SIZE / 8][4];
  float maximum[2];  // of rows g and g + 8
  float total[2];    // this lane's share of the sum of exponentials
  float own[2];      // of these rows, if SCORES needs some

 public:
  static constexpr int SCRATCH = 0;  // bytes of shared memory a warp needs

  DEVICE WarpRows(const Rows& rows, T*) {
    load(rows);
#pragma unroll
    for (int i = 0; i < HEAD_SIZE / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) output[i][j] = 0.0f;
    maximum[0] = maximum[1] = -INFINITE;
    total[0] = total[1] = 0.0f;
    own[0] = rows.own_score(lane / 4);
    own[1] = rows.own_score(lane / 4 + 8);
  }

  // With a score of which nothing comes, if SINKING.
  DEVICE void start(const Rows&) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      maximum[half] = own[half];
      total[half] = lane % 4 == 0 ? 1.0f : 0.0f;
    }
  }

  // The queries, as they are in memory.
  DEVICE void load(const Rows& rows) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int row = lane / 4 + part % 2 * 8;
        const int column = step * 16 + lane % 4 * 2 + part / 2 * 8;
        const bool real = row < rows.count;
        query[step][part] =
            real ? *reinterpret_cast<const u32*>(rows.queries + row * rows.stride + column) : 0;
      }
    }
  }

#if SINKS
  // Turn the `count` queries by `angles [row, HEAD_SIZE]`: cosines, then sines.
  DEVICE void turn(const float* angles, int count) {
    constexpr int PAIRS = HEAD_SIZE / 16;  // chunks of 8 elements, and their partners half a head on
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + half * 8;
      if (row >= count) continue;
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        const float* own = angles + row * HEAD_SIZE + i * 8 + lane % 4 * 2;
        const int other = i + PAIRS;
        rotate_pairs(query[i / 2][i % 2 * 2 + half], query[other / 2][other % 2 * 2 + half],
                     load_angle(own), load_angle(own + HEAD_SIZE / 2));
      }
    }
  }
#endif

  // Attend to TOKENS tokens from absolute position `first` on.
  template <int TOKENS>
  DEVICE void attend(const T* keys, const T* values, int first, const Rows& rows) {
    if (first > rows.last_visible(15)) return;
    if (WINDOWED && first + TOKENS <= rows.first_visible(0)) return;
    float scores[TOKENS / 8][4];
    score<TOKENS>(scores, keys);
    const bool masked = first + TOKENS - 1 > rows.last_visible(0) ||
                        (WINDOWED && first < rows.first_visible(15));
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int token = first + i * 8 + lane % 4 * 2 + j % 2;
        const int row = lane / 4 + j / 2 * 8;
        scores[i][j] = rows.score(scores[i][j], row, token, own[j / 2]);
        if (masked && (token > rows.last_visible(row) || (WINDOWED && token < rows.first_visible(row))))
          scores[i][j] = -INFINITE;
      }
    exponentiate<TOKENS>(scores);
    accumulate<TOKENS>(scores, values);
  }

  // f(row, column, value of column, value of column + 1, maximum, total) of every second column.
  template <class Visit>
  DEVICE void visit(const Visit& f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = total[half];
      sum += __shfl_xor_sync(ALL_LANES, sum, 1);
      sum += __shfl_xor_sync(ALL_LANES, sum, 2);
#pragma unroll
      for (int i = 0; i < HEAD_SIZE / 8; ++i)
        f(lane / 4 + half * 8, i * 8 + lane % 4 * 2, output[i][half * 2], output[i][half * 2 + 1],
          maximum[half], sum);
    }
  }

 private:
  template <int TOKENS>
  DEVICE void score(float (&scores)[TOKENS / 8][4], const T* keys) const {
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[i][j] = 0.0f;
    const u32 base = shared_address(keys + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 8);
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int pair = 0; pair < TOKENS / 16; ++pair) {
        u32 key[4];  // tokens 0-7: dims 0-7, 8-15; tokens 8-15: the same
        load_matrices(key, base + (pair * 16 * PITCH + step * 16) * int(sizeof(T)));
        multiply_add(scores[pair * 2], query[step], key[0], key[1], T{});
        multiply_add(scores[pair * 2 + 1], query[step], key[2], key[3], T{});
      }
  }

  // Scores become exponentials; what was summed so far is rescaled to the new maxima.
  template <int TOKENS>
  DEVICE void exponentiate(float (&scores)[TOKENS / 8][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = maximum[half];
#pragma unroll
      for (int i = 0; i < TOKENS / 8; ++i)
        highest = fmaxf(highest, fmaxf(scores[i][half * 2], scores[i][half * 2 + 1]));
      highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, 2));
      const float base = highest == -INFINITE ? 0.0f : highest;  // nothing seen yet: keep all zero
      const float factor = exp2_fast(maximum[half] - base);
      maximum[half] = highest;
      total[half] *= factor;
#pragma unroll
      for (int i = 0; i < HEAD_SIZE / 8; ++i) {
        output[i][half * 2] *= factor;
        output[i][half * 2 + 1] *= factor;
      }
#pragma unroll
      for (int i = 0; i < TOKENS / 8; ++i)
#pragma unroll
        for (int j = half * 2; j < half * 2 + 2; ++j) {
          scores[i][j] = exp2_fast(scores[i][j] - base);
          total[half] += scores[i][j];
        }
    }
  }

  template <int TOKENS>
  DEVICE void accumulate(const float (&scores)[TOKENS / 8][4], const T* values) {
    const u32 base = shared_address(values + (lane % 8 + lane / 8 % 2 * 8) * PITCH + lane / 16 * 8);
#pragma unroll
    for (int pair = 0; pair < TOKENS / 16; ++pair) {
      const float(&low)[4] = scores[pair * 2];
      const float(&high)[4] = scores[pair * 2 + 1];
      const u32 probabilities[4] = {pack_pair(low[0], low[1]), pack_pair(low[2], low[3]),
                                    pack_pair(high[0], high[1]), pack_pair(high[2], high[3])};
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        u32 value[4];  // dims 0-7: tokens 0-7, 8-15; dims 8-15: the same
        load_transposed(value, base + (pair * 16 * PITCH + step * 16) * int(sizeof(T)));
        multiply_add(output[step * 2], probabilities, value[0], value[1], T{});
        multiply_add(output[step * 2 + 1], probabilities, value[2], value[3], T{});
      }
    }
  }
};
