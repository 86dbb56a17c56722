// 16 query rows of one warp against tokens in shared memory, in fp32 (the same interface as rows_mma.cuh).
//
// Scores: lane = token (16) x half of the head. Output: lane = 4 columns of every 128, of all rows.
#pragma once
#include "cache/pages.cuh"

class WarpRows {
  static constexpr int QUADS = (HEAD_SIZE + 127) / 128;
  static_assert(HEAD_SIZE <= 128 || HEAD_SIZE % 128 == 0, "lanes have as many columns as each other");
  const int lane = threadIdx.x % 32;
  const int count;
  T* const query;  // [16][HEAD_SIZE] of shared memory
  float4 output[16][QUADS];
  float maximum[16];
  float total[16];

 public:
  static constexpr int SCRATCH = 16 * HEAD_SIZE * sizeof(T);

  DEVICE WarpRows(const Rows& rows, T* scratch) : count(rows.count), query(scratch) {
    load(rows);
#pragma unroll
    for (int row = 0; row < 16; ++row) {
#pragma unroll
      for (int quad = 0; quad < QUADS; ++quad) output[row][quad] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      maximum[row] = -INFINITE;
      total[row] = 0.0f;
    }
  }

  // With a score of which nothing comes, if SINKING.
  DEVICE void start(const Rows& rows) {
#pragma unroll
    for (int row = 0; row < 16; ++row) {
      maximum[row] = rows.own_score(row);
      total[row] = 1.0f;
    }
  }

  // The queries, as they are in memory.
  DEVICE void load(const Rows& rows) {
    __syncwarp();
    for (int row = 0; row < count; ++row)
      for (int column = lane; column < HEAD_SIZE; column += 32)
        query[row * HEAD_SIZE + column] = rows.queries[row * rows.stride + column];
    __syncwarp();
  }

#if SINKS
  // Turn the queries by `angles [row, HEAD_SIZE]`: cosines, then sines.
  DEVICE void turn(const float* angles, int) {
    for (int row = 0; row < count; ++row)
      for (int i = lane; i < HEAD_SIZE / 2; i += 32) {
        T* own = query + row * HEAD_SIZE + i;
        const float a = own[0], b = own[HEAD_SIZE / 2];
        const float cosine = angles[row * HEAD_SIZE + i], sine = angles[row * HEAD_SIZE + HEAD_SIZE / 2 + i];
        own[0] = a * cosine - b * sine;
        own[HEAD_SIZE / 2] = b * cosine + a * sine;
      }
    __syncwarp();
  }
#endif

  template <int TOKENS>
  DEVICE void attend(const T* keys, const T* values, int first, const Rows& rows) {
    for (int i = 0; i < TOKENS; i += 16)
      if (first + i <= rows.last_visible(15) && !(WINDOWED && first + i + 16 <= rows.first_visible(0)))
        attend_16(keys + i * PITCH, values + i * PITCH, first + i, rows);
  }

  template <class Visit>
  DEVICE void visit(const Visit& f) {
    if (lane >= HEAD_SIZE / 4) return;
#pragma unroll
    for (int row = 0; row < 16; ++row)
#pragma unroll
      for (int quad = 0; quad < QUADS; ++quad) {
        const int column = quad * 128 + lane * 4;
        const float4& sums = output[row][quad];
        f(row, column, sums.x, sums.y, maximum[row], total[row]);
        f(row, column + 2, sums.z, sums.w, maximum[row], total[row]);
      }
  }

 private:
  DEVICE void attend_16(const T* keys, const T* values, int first, const Rows& rows) {
    float scores[16];
    score(scores, keys + lane % 16 * PITCH + lane / 16 * (HEAD_SIZE / 2), lane / 16 * (HEAD_SIZE / 2));
    const int token = first + lane % 16;
#pragma unroll
    for (int row = 0; row < 16; ++row) {
      if (row >= count) break;
      float value = scores[row] + __shfl_xor_sync(ALL_LANES, scores[row], 16);
      const bool is_hidden = token > rows.last_visible(row) || (WINDOWED && token < rows.first_visible(row));
      value = is_hidden ? -INFINITE : rows.score(value, row, token, SCORES == SLOPED ? rows.own_score(row) : 0.0f);
      float highest = value, sum;
#pragma unroll
      for (int mask = 8; mask > 0; mask /= 2)
        highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, mask));
      highest = fmaxf(highest, maximum[row]);
      const float base = highest == -INFINITE ? 0.0f : highest;  // nothing seen yet: keep all zero
      const float factor = exp2f(maximum[row] - base);
      sum = scores[row] = exp2f(value - base);
#pragma unroll
      for (int mask = 8; mask > 0; mask /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, mask);
      maximum[row] = highest;
      total[row] = total[row] * factor + sum;
#pragma unroll
      for (int quad = 0; quad < QUADS; ++quad) {
        output[row][quad].x *= factor;
        output[row][quad].y *= factor;
        output[row][quad].z *= factor;
        output[row][quad].w *= factor;
      }
    }
    accumulate(scores, values + lane % (HEAD_SIZE / 4) * 4);
  }

  // This lane's half of the dot product of its token's key with every row.
  DEVICE void score(float (&scores)[16], const T* key, int column) const {
#pragma unroll
    for (int row = 0; row < 16; ++row) scores[row] = 0.0f;
    for (int i = 0; i < HEAD_SIZE / 2; i += 4) {
      const float4 k = *reinterpret_cast<const float4*>(key + i);
#pragma unroll
      for (int row = 0; row < 16; ++row) {
        if (row >= count) break;
        const float4 q = *reinterpret_cast<const float4*>(query + row * HEAD_SIZE + column + i);
        scores[row] = fmaf(q.x, k.x, fmaf(q.y, k.y, fmaf(q.z, k.z, fmaf(q.w, k.w, scores[row]))));
      }
    }
  }

  DEVICE void accumulate(const float (&scores)[16], const T* values) {
#pragma unroll
    for (int token = 0; token < 16; ++token) {
      float4 v[QUADS];
#pragma unroll
      for (int quad = 0; quad < QUADS; ++quad)
        v[quad] = *reinterpret_cast<const float4*>(values + token * PITCH + quad * 128);
#pragma unroll
      for (int row = 0; row < 16; ++row) {
        if (row >= count) break;
        const float p = __shfl_sync(ALL_LANES, scores[row], token);
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
          float4& sums = output[row][quad];
          sums.x = fmaf(p, v[quad].x, sums.x);
          sums.y = fmaf(p, v[quad].y, sums.y);
          sums.z = fmaf(p, v[quad].z, sums.z);
          sums.w = fmaf(p, v[quad].w, sums.w);
        }
      }
    }
  }
};
