// 64 query rows of a warpgroup against tiles of tokens in shared memory, on Hopper's tensor cores, with the online
// softmax of FlashAttention-2 (Dao, 2023). Fragments are those of wgmma.cuh.
// -D ELEMENT (T: Half or BFloat16), HEAD_SIZE (64, 128, 256), TILE
#pragma once
#include "attention/sm90/prefill_items.cuh"
#include "attention/row_softmax.cuh"
#include "runtime/wgmma.cuh"

constexpr int ROWS = 64;                 // query rows
constexpr int COLUMNS = HEAD_SIZE / 64;  // of 128 bytes, as swizzled operands have
constexpr int QUERY_COLUMN = ROWS * 128, QUERY_BYTES = COLUMNS * QUERY_COLUMN;
constexpr int TILE_COLUMN = TILE * 128, TILE_BYTES = COLUMNS * TILE_COLUMN;
// Whether GEMMs read queries from shared memory; else registers have room for them.
constexpr bool QUERIES_STAY = HEAD_SIZE > 128;
constexpr u32 NOWHERE = ~0u;  // instead of a place in q or in the output, in 16-byte chunks

// 64 rows of a warpgroup: unnormalised sums, and what the online softmax keeps; rows g and g + 8 of a lane.
class GroupRows {
  static constexpr int STEPS = TILE / 16;
  const int lane = threadIdx.x % 32;
#if HEAD_SIZE > 128
  u64 queries_at;
#else
  u32 query[HEAD_SIZE / 16][4];
#endif
  float scores[TILE / 2];
  float output[HEAD_SIZE / 2];
  u32 probabilities[STEPS][4];
  float maximum[2], factor[2];

 public:
#if SPLITS
  static constexpr int PART_FLOATS = 32 * (HEAD_SIZE / 2 + 4);  // that a warp stores
#endif
  float total[2];  // this lane's share of the sum of exponentials

  DEVICE GroupRows() {
    clear_scores();
    clear_output();
    restart();
  }

  // Forgets what was attended to, but for the output.
  DEVICE void restart() {
    maximum[0] = maximum[1] = -INFINITE;
    total[0] = total[1] = 0.0f;
  }
  DEVICE void clear_scores() {
#pragma unroll
    for (int i = 0; i < TILE / 2; ++i) scores[i] = 0.0f;
  }
  DEVICE void clear_output() {
#pragma unroll
    for (int i = 0; i < HEAD_SIZE / 2; ++i) output[i] = 0.0f;
  }

  // From shared memory, where they lie as tiles do.
#if HEAD_SIZE > 128
  DEVICE void load_queries(u32 queries) {
    fence_async();  // they came by cp.async
    queries_at = rows_descriptor(queries);
  }
  DEVICE u64 queries_of(int step) const { return advance(queries_at, step / 4 * QUERY_COLUMN + step % 4 * 32); }
#else
  DEVICE void load_queries(u32 queries) {
    const int row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < HEAD_SIZE / 16; ++step) {
      const int chunk = step * 2 + lane / 16;
      u32(&to)[4] = query[step];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                   : "r"(queries + chunk / 8 * QUERY_COLUMN + row * 128 + (chunk ^ row) % 8 * 16)
                   : "memory");
    }
  }
  DEVICE const u32 (&queries_of(int step) const)[4] { return query[step]; }
#endif

  // Starts scores = Q K^T.
  DEVICE void start_scores(u32 keys) {
    const u64 b = rows_descriptor(keys);
    pin(scores);
    products_begin();
#pragma unroll
    for (int step = 0; step < HEAD_SIZE / 16; ++step)
      multiply(scores, queries_of(step), advance(b, step / 4 * TILE_COLUMN + step % 4 * 32), step > 0, T{});
    products_commit();
  }

  // Starts output += P V, of the tile's first TOKENS.
  template <int TOKENS>
  DEVICE void start_output(u32 values) {
    const u64 b = columns_descriptor(values, TILE_COLUMN);
    pin(output);
    products_begin();
    multiply_columns<TOKENS>(output, probabilities, b, T{});
    products_commit();
  }

  template <int PENDING>
  DEVICE void wait_scores() {
    products_wait<PENDING>();
    pin(scores);
  }
  DEVICE void wait_output() {
    products_wait<0>();
    pin(output);
  }

  // Row h of this lane does not see tokens of the tile past last[h].
  template <int TOKENS>
  DEVICE void hide(const int (&last)[2]) {
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i)
      if (i / 4 * 8 + i % 2 > last[i / 2 % 2] - lane % 4 * 2) scores[i] = -INFINITE;
  }

  // Scores become exponentials; `factor` is what earlier sums count now.
  template <int TOKENS>
  DEVICE void exponentiate(float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float now = highest_score<TOKENS>(scores, half, maximum[half]);
      factor[half] = exp2_fast((maximum[half] - now) * scale);
      maximum[half] = now;
      total[half] = exponentiate_row<TOKENS>(scores, half, scale, now * scale, total[half] * factor[half]);
    }
    // Never so, but a branch: without it the wait for the product that runs meanwhile is moved above all this.
    if (total[0] + total[1] < 0.0f) __nanosleep(1);
  }

  // Exponentials become the next product's operand.
  template <int TOKENS>
  DEVICE void pack() {
    pack_operand<TOKENS>(probabilities, scores, T{});
  }

  DEVICE void rescale() {
#pragma unroll
    for (int i = 0; i < HEAD_SIZE / 2; ++i) output[i] *= factor[i / 2 % 2];
  }

#if SPLITS
  // Writes the unnormalised sums of this warp, each lane its own.
  DEVICE void store_part(float* place) const {
    place += lane * 4;
#pragma unroll
    for (int i = 0; i < HEAD_SIZE / 2; i += 4)
      store<4>(place + i * 32, Pack<float, 4>{{output[i], output[i + 1], output[i + 2], output[i + 3]}});
    store<4>(place + HEAD_SIZE / 2 * 32, Pack<float, 4>{{maximum[0], maximum[1], total[0], total[1]}});
  }

  // Adds what the same warp of another CTA stored of other tokens. a + b has the bits of b + a: no product is fused.
  DEVICE void add_part(const float* place, float scale) {
    place += lane * 4;
    const Pack<float, 4> other = load_fresh<4>(place + HEAD_SIZE / 2 * 32);
    float mine[2], theirs[2];  // what either counts
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float now = fmaxf(maximum[half], other.at[half]);
      mine[half] = exp2_fast((maximum[half] - now) * scale);
      theirs[half] = exp2_fast((other.at[half] - now) * scale);
      maximum[half] = now;
      total[half] = __fadd_rn(__fmul_rn(total[half], mine[half]), __fmul_rn(other.at[2 + half], theirs[half]));
    }
#pragma unroll
    for (int i = 0; i < HEAD_SIZE / 2; i += 4) {
      const Pack<float, 4> sums = load_fresh<4>(place + i * 32);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        output[i + j] = __fadd_rn(__fmul_rn(output[i + j], mine[j / 2]), __fmul_rn(sums.at[j], theirs[j / 2]));
    }
  }
#endif

  // Writes row h of this lane, over its sum of exponentials, to place[h].
  DEVICE void store_rows(T* out, const u32 (&place)[2], const float (&totals)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = totals[half];
      sum += __shfl_xor_sync(ALL_LANES, sum, 1);
      sum += __shfl_xor_sync(ALL_LANES, sum, 2);
      const float share = 1.0f / sum;
#pragma unroll
      for (int i = 0; i < HEAD_SIZE / 8; i += 4) {
        Pack<u32, 4> words;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* pair = output + (i + j) * 4 + half * 2;
          words.at[j] = round_pair(pair[0] * share, pair[1] * share, T{});
        }
        transpose(words.at);
        if (place[half] != NOWHERE)
          store<4>(reinterpret_cast<u32*>(out + i64(place[half] + i + lane % 4) * 8), words);
      }
    }
  }

 private:
  // word j of lane t and word t of lane j change places, in every four lanes: 8 columns in one lane.
  DEVICE void transpose(u32 (&words)[4]) const {
#pragma unroll
    for (int mask = 1; mask <= 2; mask *= 2) {
      const bool high = lane & mask;
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int low = mask == 1 ? pair * 2 : pair;
        const u32 mine = high ? words[low] : words[low + mask];
        const u32 other = __shfl_xor_sync(ALL_LANES, mine, mask);
        if (high)
          words[low] = other;
        else
          words[low + mask] = other;
      }
    }
  }
};
