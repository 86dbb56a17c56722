// As decode_columns.cuh, over a quantised cache: its numbers become float16 in registers, exactly, and their scales meet
// scores and weights. A fragment's rows and columns take the dimensions in the order in which `unpack` gives them.
// -D ELEMENT (T: 16 bits), HEAD_SIZE, WINDOWED, FORMAT (not 0)
#pragma once
#include "decode_sums.cuh"

static_assert(FORMAT != INT4 || HEAD_SIZE % 64 == 0, "16-byte accesses, of one group each");

constexpr int CHUNK_NUMBERS = 4 * NUMBERS;      // of 16 bytes
constexpr int GROUP_CHUNKS = CHUNKS / GROUPS;   // that share their scales
// Weights are multiplied by V's scales: times so much, that is at most 53,248 in float16, and rarely subnormal.
constexpr float RAISED = 64.0f;

DEVICE u8 load_shared_byte(u32 address) {
  u32 result;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(result) : "r"(address) : "memory");
  return u8(result);
}
// A token's scale, and 1,024 and its zero, of a group; in a slot.
DEVICE float token_scale(u32 slot, int token, int group) {
  return scale_of(load_shared_byte(slot + SCALES_AT + token * SCALE_BYTES + (FORMAT == INT4 ? group * 2 : 0))) * UNIT;
}
DEVICE u32 token_zero(u32 slot, int token, int group) {
  return FORMAT == INT4 ? zero_of(load_shared_byte(slot + SCALES_AT + token * SCALE_BYTES + group * 2 + 1)) : 0;
}
DEVICE u32 pack_halves(float low, float high) {
  return u32(from_float<Half>(low).bits) | u32(from_float<Half>(high).bits) << 16;
}
// From the address of a chunk 0 to that of another chunk of the same token.
DEVICE u32 at_chunk(u32 address, int chunk) {
  return SWIZZLED ? address ^ u32(chunk * 16) : address + chunk * 16;
}

// Query heads as fragments B, in float16: a lane 4 g + t holds elements of head g.
struct Query {
  u32 pairs[HEAD_SIZE / 8];

  DEVICE void load_angles(const float*) {}
  DEVICE void rotate() {}
  DEVICE void load_heads(const T* heads, int count) {
    const int lane = threadIdx.x % 32;
    const T* own = heads + lane / 4 * HEAD_SIZE + lane % 4 * NUMBERS;
#pragma unroll
    for (int i = 0; i < HEAD_SIZE / 8; ++i) {
      const T* pair = own + i / PAIRS * CHUNK_NUMBERS + i % PAIRS;
      pairs[i] = lane / 4 < count ? pack_halves(to_float(load_fresh<1>(pair).at[0]),
                                                to_float(load_fresh<1>(pair + PAIRS).at[0]))
                                  : 0;
    }
  }
};

// Of every step the dimensions that `dimension` says.
class Columns : public Sums {
  // Of rows g (half 0) and g + 8 (half 1) of a step.
  DEVICE int dimension(int step, int half) const {
    constexpr int STEPS_OF_CHUNK = PAIRS / 2;
    return step / STEPS_OF_CHUNK * CHUNK_NUMBERS + lane / 4 * PAIRS + step % STEPS_OF_CHUNK * 2 + half;
  }

 public:
  using Weights = float[2][4];  // exponentials of a tile, as scores are

  // K q^T: scores of tokens 16 i + g and 16 i + g + 8, each of columns 2t, 2t + 1.
  DEVICE void score(float (&scores)[2][4], const Query& query, u32 keys) const {
    const u32 own = keys + chunk_offset(lane, 0);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      u32 zeros[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) zeros[i] = token_zero(keys, i * 8 + lane / 4, group) * 0x10001u;
      float sums[2][4] = {};
#pragma unroll
      for (int chunk = group * GROUP_CHUNKS; chunk < (group + 1) * GROUP_CHUNKS; ++chunk) {
        u32 words[4];  // of tokens 8 i + g
        load_matrices(words, at_chunk(own, chunk));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          u32 low[PAIRS], high[PAIRS];
          unpack(low, words[i * 2], zeros[i * 2]);
          unpack(high, words[i * 2 + 1], zeros[i * 2 + 1]);
#pragma unroll
          for (int j = 0; j < PAIRS; j += 2) {
            const u32 key[4] = {low[j], high[j], low[j + 1], high[j + 1]};
            const u32* pairs = query.pairs + chunk * PAIRS + j;
            multiply_add(sums[i], key, pairs[0], pairs[1], Half{});
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float sum = sums[i][j] * token_scale(keys, i * 16 + j / 2 * 8 + lane / 4, group);
          scores[i][j] = group == 0 ? sum : scores[i][j] + sum;
        }
    }
  }

  // `Sums::exponentiate`; what `accumulate` takes.
  DEVICE void exponentiate(float (&scores)[2][4], Weights& weights, int count, int hidden, float scale) {
    Sums::exponentiate(scores, count, hidden, scale);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) weights[i][j] = scores[i][j];
  }

  // output += V^T weights
  DEVICE void accumulate(const Weights& weights, u32 values) {
    const u32 own = values + chunk_offset(lane, 0);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      u32 zeros[4], scaled[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = i * 8 + lane % 4 * 2;  // and the next: a pair of `unpack`
        zeros[i] = token_zero(values, token, group) | token_zero(values, token + 1, group) << 16;
        const float factor = token_scale(values, i * 8 + lane / 4, group) * (RAISED / UNIT);
        const float* pair = &weights[i / 2][i % 2 * 2];
        // What is not seen may have any scale, NaN even.
        scaled[i] = transpose(pack_halves(pair[0] == 0.0f ? 0.0f : pair[0] * factor,
                                          pair[1] == 0.0f ? 0.0f : pair[1] * factor));
      }
#pragma unroll
      for (int chunk = group * GROUP_CHUNKS; chunk < (group + 1) * GROUP_CHUNKS; ++chunk) {
        u32 words[4];  // of tokens 8 i + 2t, 8 i + 2t + 1: 16 bits each
        load_transposed(words, at_chunk(own, chunk));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          u32 low[PAIRS], high[PAIRS];
          unpack(low, words[i * 2], zeros[i * 2]);
          unpack(high, words[i * 2 + 1], zeros[i * 2 + 1]);
#pragma unroll
          for (int j = 0; j < PAIRS; j += 2) {
            const u32 value[4] = {low[j], low[j + 1], high[j], high[j + 1]};
            multiply_add(output[(chunk * PAIRS + j) / 2], value, scaled[i * 2], scaled[i * 2 + 1], Half{});
          }
        }
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
        u32* own = reinterpret_cast<u32*>(heads + column * HEAD_SIZE + dimension(step, 0));
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
        float* own = part.output[column] + dimension(step, 0);
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
