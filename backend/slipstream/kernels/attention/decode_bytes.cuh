// As decode_columns.cuh, over a cache of e4m3 or int8: its numbers become float16 in registers, exactly, and their
// scales meet scores and weights.
// -D ELEMENT (T: 16 bits), HEAD_SIZE, WINDOWED, FORMAT (1 or 2)
#pragma once
#include "attention/decode_quantized.cuh"

// Weights are multiplied by V's scales: times so much, that is at most 53,248 in float16, and rarely subnormal.
constexpr float RAISED = 64.0f;

DEVICE u8 load_shared_byte(u32 address) {
  u32 result;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(result) : "r"(address) : "memory");
  return u8(result);
}
// In a slot.
DEVICE float token_scale(u32 slot, int token) {
  return scale_of(load_shared_byte(slot + SCALES_AT + token)) * UNIT;
}

// Query heads as fragments B, in float16.
struct Query : Numbers {
  u32 pairs[HEAD_SIZE / 8];

  DEVICE void prepare() {
#pragma unroll
    for (int i = 0; i < HEAD_SIZE / 8; ++i) {
      const int chunk = i / PAIRS, first = i % PAIRS;
      pairs[i] = pack_halves(number(chunk, first), number(chunk, first + PAIRS));
    }
  }
};

class Columns : public Sums {
 public:
  using Weights = float[BANDS][4];  // exponentials of a tile, as scores are

  // K q^T: scores of tokens 16 i + g and 16 i + g + 8, each of columns 2t, 2t + 1.
  DEVICE void score(float (&scores)[BANDS][4], const Query& query, u32 keys) const {
    static_assert(BANDS == 2, "four matrices at once");
    const u32 own = keys + chunk_offset(lane, 0);
    float sums[BANDS][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      u32 words[4];  // of tokens 8 i + g
      load_matrices(words, at_chunk(own, chunk));
#pragma unroll
      for (int i = 0; i < BANDS; ++i) {
        u32 low[PAIRS], high[PAIRS];
        unpack(low, words[i * 2], 0);
        unpack(high, words[i * 2 + 1], 0);
        const u32 key[4] = {low[0], high[0], low[1], high[1]};
        const u32* pairs = query.pairs + chunk * PAIRS;
        multiply_add(sums[i], key, pairs[0], pairs[1], Half{});
      }
    }
#pragma unroll
    for (int i = 0; i < BANDS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        scores[i][j] = sums[i][j] * token_scale(keys, i * 16 + j / 2 * 8 + lane / 4);
  }

  // `Sums::exponentiate`; what `accumulate` takes.
  DEVICE void exponentiate(float (&scores)[BANDS][4], Weights& weights, int count, int hidden, float scale) {
    Sums::exponentiate(scores, count, hidden, scale);
#pragma unroll
    for (int i = 0; i < BANDS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) weights[i][j] = scores[i][j];
  }

  // output += V^T weights
  DEVICE void accumulate(const Weights& weights, u32 values) {
    u32 scaled[2 * BANDS];
#pragma unroll
    for (int i = 0; i < 2 * BANDS; ++i) {
      const float factor = token_scale(values, i * 8 + lane / 4) * (RAISED / UNIT);
      const float* pair = &weights[i / 2][i % 2 * 2];
      // What is not seen may have any scale, NaN even.
      scaled[i] = transpose(pack_halves(pair[0] == 0.0f ? 0.0f : pair[0] * factor,
                                        pair[1] == 0.0f ? 0.0f : pair[1] * factor));
    }
    const u32 own = values + chunk_offset(lane, 0);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      u32 words[4];  // of tokens 8 i + 2t, 8 i + 2t + 1: 16 bits each
      load_transposed(words, at_chunk(own, chunk));
#pragma unroll
      for (int i = 0; i < BANDS; ++i) {
        u32 low[PAIRS], high[PAIRS];
        unpack(low, words[i * 2], 0);
        unpack(high, words[i * 2 + 1], 0);
        const u32 value[4] = {low[0], low[1], high[0], high[1]};
        multiply_add(output[chunk], value, scaled[i * 2], scaled[i * 2 + 1], Half{});
      }
    }
  }

  // The result: rows of `count` heads.
  DEVICE void write(T* heads, int count) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = lane % 4 * 2 + c;
      if (column >= count) continue;
      const float share = UNIT / RAISED / total[c];
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        u32* own = reinterpret_cast<u32*>(heads + column * HEAD_SIZE + dimension(step));
        *own = pack_pair(output[step][c] * share, output[step][c + 2] * share);
      }
    }
  }
  DEVICE void store(Part& part, int count) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = lane % 4 * 2 + c;
      if (column >= count) continue;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        float* own = part.output[column] + dimension(step);
        own[0] = output[step][c] * (UNIT / RAISED);
        own[1] = output[step][c + 2] * (UNIT / RAISED);
      }
      if (lane / 4 == 0) {
        part.maximum[column] = maximum[c];
        part.total[column] = total[c];
      }
    }
  }
};
