// As decode_columns.cuh, over a cache of int4. A number n of 0 .. 15 is a float16 as it lies in the cache, n * 2^-24 in
// the low four bits and 16 times that in the next: subnormal and exact, so is every product with it. Its zero is not
// subtracted from each n but from the sums of them: scale * (sum q n - zero * sum q) is a score, and of weights
// w = exponential * scale (sum w n - sum w zero) a part of the output; GEMMs compute these, too.
// -D ELEMENT (T: 16 bits), HEAD_SIZE, WINDOWED, FORMAT (3)
#pragma once
#include "attention/decode_quantized.cuh"

static_assert(HEAD_SIZE % 64 == 0 && (GROUPS == 1 || GROUPS % 2 == 0), "16-byte accesses, of one group each");

constexpr float WHOLE = 1 << 24;  // of what n is counted in
// Weights are exponentials times V's scales and this. Up to 2^-MARGIN * 832 * 128 they fit in float16.
constexpr float RAISED = 128.0f;
constexpr int CODES_OF_TILE = TILE / 8;  // of a lane: tokens 8 i + g
constexpr int DUO = GROUPS == 1 ? 1 : 2;  // groups whose codes of a token are 32 bits
constexpr int DUOS = GROUPS / DUO;
constexpr int DUO_CHUNKS = CHUNKS / DUOS;

DEVICE u32 multiply_halves(u32 a, u32 b) {
  u32 result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
DEVICE u32 fma_halves(u32 a, u32 b, u32 c) {
  u32 result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
DEVICE u32 max_halves(u32 a, u32 b) {
  u32 result;
  asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

DEVICE u32 load_shared_word(u32 address) {
  u32 result;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(result) : "r"(address) : "memory");
  return result;
}
DEVICE u32 load_shared_pair(u32 address) {
  u32 result;
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(result) : "r"(address) : "memory");
  return result;
}

// Eight numbers as four pairs: pair j is numbers j and j + 4, those of odd j 16 times.
DEVICE void split(u32 (&pairs)[PAIRS], u32 word) {
  const u32 upper = word >> 8;
  pairs[0] = word & 0x000f000fu;
  pairs[1] = word & 0x00f000f0u;
  pairs[2] = upper & 0x000f000fu;
  pairs[3] = upper & 0x00f000f0u;
}

// Of a lane's tokens the bytes of their scales: for each group that of its scale, then its zero; a word for each duo.
struct Codes {
  u32 words[CODES_OF_TILE][DUOS];
  bool are_large;  // NaN is among the scales, or 512 and more

  DEVICE Codes(u32 slot) {
    const u32 own = slot + SCALES_AT + threadIdx.x % 32 / 4 * SCALE_BYTES;
    u32 any = 0;
#pragma unroll
    for (int i = 0; i < CODES_OF_TILE; ++i) {
#pragma unroll
      for (int duo = 0; duo < DUOS; ++duo) {
        const u32 address = own + i * 8 * SCALE_BYTES + duo * 4;
        words[i][duo] = GROUPS > 1 ? load_shared_word(address) : load_shared_pair(address);
        any |= scales(i, duo) + 0x00080008u;
      }
    }
    are_large = any & 0x01000100u;
  }

  DEVICE u32 scales(int i, int duo) const { return words[i][duo] & 0x00ff00ffu; }
  DEVICE u8 code(int i, int group) const { return u8(words[i][group / 2] >> group % 2 * 16); }
  // 2^-20 zero of both groups, from 1,024 + 128 + zero. Terms with 128 + zero would be so large that what a tensor
  // core cuts off of long sums of them comes to as much as the quantisation.
  DEVICE u32 signed_zeros(int i, int duo) const {
    return fma_halves(words[i][duo] >> 8 & 0x00ff00ffu ^ 0x64806480u, 0x00100010u, 0x94809480u);
  }
  // Of a duo, times WHOLE.
  DEVICE void read_scales(float (&result)[CODES_OF_TILE][DUO], int duo) const {
#pragma unroll
    for (int i = 0; i < CODES_OF_TILE; ++i)
#pragma unroll
      for (int group = 0; group < DUO; ++group) {
        const u32 word = words[i][duo];
        const u32 bits = group == 0 ? (word & 0xffu) * (1u << 20) : (word & 0x00ff0000u) * 16u;
        result[i][group] = __uint_as_float(bits + ((840u + 24 * 8) << 20));
      }
    if (!are_large) return;
#pragma unroll
    for (int i = 0; i < CODES_OF_TILE; ++i)
#pragma unroll
      for (int group = 0; group < DUO; ++group) result[i][group] = scale_of(code(i, duo * DUO + group)) * WHOLE;
  }
  // Of both groups in float16, times RAISED, unless they are large: five bits of exponent lie as in a float16, but the
  // smallest of them are subnormal there.
  DEVICE u32 raised_scales(int i, int duo) const {
    return max_halves(scales(i, duo) * 128u, scales(i, duo) * 64u + 0x02000200u);
  }
};

// Query heads as fragments B, in float16: numbers that meet 16 times theirs are a 16th. Of each group also the sum, a
// 16th of it and in two parts, for its zeros: in low halves of a duo's first, in high ones of its second.
struct Query : Numbers {
  u32 pairs[HEAD_SIZE / 8];
  u32 sums[GROUPS][2];

  DEVICE void prepare() {
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      float sum = 0.0f;
#pragma unroll
      for (int i = group * GROUP_CHUNKS * PAIRS; i < (group + 1) * GROUP_CHUNKS * PAIRS; ++i) {
        const int chunk = i / PAIRS, first = i % PAIRS;
        const float factor = i % 2 == 0 ? 1.0f : 0.0625f;
        pairs[i] = pack_halves(number(chunk, first) * factor, number(chunk, first + PAIRS) * factor);
        sum += (low_half(pairs[i]) + high_half(pairs[i])) * (0.0625f / factor);
      }
      const float most = to_float(from_float<Half>(sum));
      sums[group][0] = group % 2 == 0 ? pack_halves(-most, 0.0f) : pack_halves(0.0f, -most);
      sums[group][1] = group % 2 == 0 ? pack_halves(most - sum, 0.0f) : pack_halves(0.0f, most - sum);
    }
  }
};

class Columns : public Sums {
 public:
  using Weights = u32[CODES_OF_TILE];  // exponentials of a tile: of columns 2t, 2t + 1 of tokens 8 i + g

  // K q^T: scores of tokens 16 i + g and 16 i + g + 8, each of columns 2t, 2t + 1.
  DEVICE void score(float (&scores)[BANDS][4], const Query& query, u32 keys) const {
    const u32 own = keys + chunk_offset(lane, 0);
    const Codes codes(keys);
#pragma unroll
    for (int duo = 0; duo < DUOS; ++duo) {
      float scales[CODES_OF_TILE][DUO];
      codes.read_scales(scales, duo);
#pragma unroll
      for (int i = 0; i < BANDS; i += 2) {
        u32 words[DUO_CHUNKS][4];  // of tokens 16 i + 8 j + g
#pragma unroll
        for (int chunk = 0; chunk < DUO_CHUNKS; ++chunk)
          load_matrices(words[chunk], at_chunk(own, duo * DUO_CHUNKS + chunk) + i * 16 * ROW_BYTES);
#pragma unroll
        for (int k = 0; k < 2; ++k) score_band(scores[i + k], query, codes, i + k, duo, scales, words, k * 2);
      }
    }
  }

  // `Sums::exponentiate`; what `accumulate` takes.
  DEVICE void exponentiate(float (&scores)[BANDS][4], Weights& weights, int count, int hidden, float scale) {
    Sums::exponentiate(scores, count, hidden, scale);
#pragma unroll
    for (int i = 0; i < CODES_OF_TILE; ++i)
      weights[i] = pack_halves(scores[i / 2][i % 2 * 2], scores[i / 2][i % 2 * 2 + 1]);
  }

  // output += V^T weights
  DEVICE void accumulate(const Weights& weights, u32 values) {
    const u32 own = values + chunk_offset(lane, 0);
    const Codes codes(values);
    u32 scaled[GROUPS][CODES_OF_TILE];
    scale_weights(scaled, weights, codes);
#pragma unroll
    for (int duo = 0; duo < DUOS; ++duo) {
      // A row g of what are eight equal columns becomes of a duo's group g % 2.
      u32 zeros[CODES_OF_TILE];
#pragma unroll
      for (int i = 0; i < CODES_OF_TILE; ++i) zeros[i] = transpose(codes.signed_zeros(i, duo));
#pragma unroll
      for (int i = 0; i < BANDS; ++i)
#pragma unroll
        for (int group = duo * DUO; group < (duo + 1) * DUO; ++group) {
          const u32 rows[4] = {zeros[i * 2], 0, zeros[i * 2 + 1], 0};
          multiply_add(output[STEPS + group], rows, scaled[group][i * 2], scaled[group][i * 2 + 1], Half{});
        }
    }
#pragma unroll
    for (int i = 0; i < BANDS; i += 2)
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        u32 words[4];  // of tokens 16 i + 8 j + 2t, and the next: 16 bits each
        load_transposed(words, at_chunk(own, chunk) + i * 16 * ROW_BYTES);
        const u32* factors = scaled[chunk / GROUP_CHUNKS] + i * 2;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          u32 low[PAIRS], high[PAIRS];
          split(low, words[k * 2]);
          split(high, words[k * 2 + 1]);
#pragma unroll
          for (int j = 0; j < PAIRS; j += 2) {
            const u32 value[4] = {low[j], low[j + 1], high[j], high[j + 1]};
            multiply_add(output[(chunk * PAIRS + j) / 2], value, factors[k * 2], factors[k * 2 + 1], Half{});
          }
        }
      }
  }

  // The result: rows of `count` heads.
  DEVICE void write(T* heads, int count) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = lane % 4 * 2 + c;
      float zeros[GROUPS];
      sum_zeros(zeros, c);
      if (column >= count) continue;
      const float share = WHOLE / RAISED / total[c];
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const Pack<float, 2> pair = values_of(step, c, zeros);
        u32* own = reinterpret_cast<u32*>(heads + column * HEAD_SIZE + dimension(step));
        *own = pack_pair(pair.at[0] * share, pair.at[1] * share);
      }
    }
  }
  DEVICE void store(Part& part, int count) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = lane % 4 * 2 + c;
      float zeros[GROUPS];
      sum_zeros(zeros, c);
      if (column >= count) continue;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const Pack<float, 2> pair = values_of(step, c, zeros);
        float* own = part.output[column] + dimension(step);
        own[0] = pair.at[0] * (WHOLE / RAISED);
        own[1] = pair.at[1] * (WHOLE / RAISED);
      }
      if (lane / 4 == 0) {
        part.maximum[column] = maximum[c];
        part.total[column] = total[c];
      }
    }
  }

 private:
  // A duo's part, of tokens 16 band + g, + 8, which are words `first` and the next of every chunk.
  DEVICE static void score_band(float (&scores)[4], const Query& query, const Codes& codes, int band, int duo,
                                const float (&scales)[CODES_OF_TILE][DUO], const u32 (&words)[DUO_CHUNKS][4],
                                int first) {
    u32 zeros[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) zeros[i] = codes.signed_zeros(band * 2 + i, duo);
#pragma unroll
    for (int group = duo * DUO; group < (duo + 1) * DUO; ++group) {
      float sums[4] = {};
      const u32 own[4] = {zeros[0], zeros[1], zeros[0], zeros[1]};
      multiply_add(sums, own, query.sums[group][0], query.sums[group][1], Half{});
#pragma unroll
      for (int chunk = group * GROUP_CHUNKS; chunk < (group + 1) * GROUP_CHUNKS; ++chunk) {
        u32 low[PAIRS], high[PAIRS];
        split(low, words[chunk % DUO_CHUNKS][first]);
        split(high, words[chunk % DUO_CHUNKS][first + 1]);
#pragma unroll
        for (int j = 0; j < PAIRS; j += 2) {
          const u32 key[4] = {low[j], high[j], low[j + 1], high[j + 1]};
          const u32* pairs = query.pairs + chunk * PAIRS + j;
          multiply_add(sums, key, pairs[0], pairs[1], Half{});
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float scale = scales[band * 2 + j / 2][group % 2];
        scores[j] = group == 0 ? sums[j] * scale : fmaf(sums[j], scale, scores[j]);
      }
    }
  }

  // Weights times scales, as fragments B.
  DEVICE static void scale_weights(u32 (&scaled)[GROUPS][CODES_OF_TILE], const Weights& weights, const Codes& codes) {
#pragma unroll
    for (int i = 0; i < CODES_OF_TILE; ++i) {
      u32 factors;
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) {
        if (group % 2 == 0) factors = codes.raised_scales(i, group / 2);
        const u32 both = permute(factors, 0, group % 2 == 0 ? 0x1010 : 0x3232);
        scaled[group][i] = multiply_halves(weights[i], both);
      }
    }
    if (codes.are_large) {
#pragma unroll
      for (int i = 0; i < CODES_OF_TILE; ++i)
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
          const float factor = scale_of(codes.code(i, group)) * RAISED;
          const float low = low_half(weights[i]), high = high_half(weights[i]);
          // What is not seen may have any scale, NaN even.
          scaled[group][i] = pack_halves(low == 0.0f ? 0.0f : low * factor, high == 0.0f ? 0.0f : high * factor);
        }
    }
#pragma unroll
    for (int i = 0; i < CODES_OF_TILE; ++i)
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) scaled[group][i] = transpose(scaled[group][i]);
  }

  // Weights times zeros, of column 2t + c.
  DEVICE void sum_zeros(float (&zeros)[GROUPS], int c) const {
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      const float own = output[STEPS + group][c] * 0.0625f;
      const float other = __shfl_xor_sync(ALL_LANES, own, 4);
      zeros[group] = lane / 4 % 2 == group % 2 ? own : other;
    }
  }
  // Two dimensions of a step in column 2t + c; times RAISED, over WHOLE.
  DEVICE Pack<float, 2> values_of(int step, int c, const float (&zeros)[GROUPS]) const {
    const float zero = zeros[step / (STEPS / GROUPS)];
    return {output[step][c] - zero, output[step][c + 2] * 0.0625f - zero};
  }
};
