// Attention over a paged cache of latents (latent.py): one row a token, whose first RANK numbers are its value, too.
// A row of queries is a head of a token: ROWS of them, of one sequence, share a tile of the cache.
// -D ELEMENT (T), RANK, ROTATED, ROWS (of queries a CTA), STAGES (tiles in flight), MMA (1: tensor cores)
#include "runtime/copies.cuh"
#if MMA
#include "runtime/mma.cuh"
#endif

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int TILE = 32;        // tokens: a lane each, where scores become exponentials
constexpr int MIN_SPLIT = 128;  // tokens
constexpr int ROW = RANK + ROTATED, HALF_ROW = ROW / 2;  // of the cache: halves of a block's rows lie together
constexpr int VECTOR = 16 / sizeof(T);                   // elements of a 16-byte access
constexpr int CHUNKS = ROW / VECTOR;
constexpr int PITCH = ROW + VECTOR;  // elements between two rows in shared memory: no bank conflicts
constexpr int TILE_ELEMENTS = TILE * PITCH;
constexpr int OWN_ROWS = ROWS / WARPS;  // whose exponentials a warp makes
constexpr int STATE = RANK + 2;         // floats of a split's row: the sum, the maximum, the sum of exponentials
static_assert(HALF_ROW % VECTOR == 0 && TILE * CHUNKS % THREADS == 0, "whole copies, as many for each thread");
static_assert(ROWS % WARPS == 0 && TILE % 32 == 0, "every warp has rows, every lane a token");

extern __shared__ __align__(16) unsigned char shared_bytes[];

// The queries of a CTA, and the tokens that they see.
struct Item {
  int start;   // the sequence's first row of queries, all heads counted
  int first;   // of its rows, this CTA's first
  int count;   // rows
  int before;  // tokens cached in front of the sequence's first query
  int end;     // tokens that the last of the rows sees

  DEVICE Item(const int* query_starts, int length, int sequence, int first_row, int num_heads) {
    const int query = query_starts == nullptr ? sequence : query_starts[sequence];
    const int num_queries = query_starts == nullptr ? 1 : query_starts[sequence + 1] - query;
    start = query * num_heads;
    first = first_row;
    count = min(ROWS, num_queries * num_heads - first_row);
    before = length - num_queries;
    end = count <= 0 ? 0 : before + (first_row + count - 1) / num_heads + 1;
  }
  // The tokens of one split, by the item's own number.
  DEVICE int share(int most) const {
    const int each = (end + most - 1) / most;
    return max(MIN_SPLIT, (each + TILE - 1) / TILE * TILE);
  }
};

// The cache of a sequence.
struct Latents {
  const T* cache;
  const int* blocks;
  int block_shift;

  // Starts the copy of tokens [first, first + TILE); zeros from `end` on, where no entry of the table is read.
  DEVICE void start_copy(T* tile, int first, int end) const {
    const int mask = (1 << block_shift) - 1;
#pragma unroll 3
    for (int step = 0; step < TILE * CHUNKS / THREADS; ++step) {
      const int i = threadIdx.x + step * THREADS;
      const int row = i / CHUNKS, column = i % CHUNKS * VECTOR;
      const int token = first + row;
      const bool inside = token < end, is_last = column >= HALF_ROW;
      const T* source = cache;
      if (inside)
        source += (i64(blocks[token >> block_shift]) * ROW << block_shift) + (is_last ? HALF_ROW << block_shift : 0) +
                  (token & mask) * HALF_ROW + column - (is_last ? HALF_ROW : 0);
      copy_async(tile + row * PITCH + column, source, inside);
    }
  }
};

DEVICE float warp_max(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, mask));
  return value;
}

#if MMA
using Weight = T;
constexpr int BANDS = ROWS / 16;
constexpr int PARTS = WARPS / (BANDS * TILE / 16);  // warps that share the scores of 16 rows and 16 tokens
constexpr int STEPS = ROW / 16 / PARTS;
constexpr int SCORE_PITCH = TILE + 8, WEIGHT_PITCH = TILE + 8;
constexpr int COLUMNS = RANK / WARPS / 8;  // fragments of a warp's part of values
constexpr int NUM_SCORES = PARTS * ROWS * SCORE_PITCH;
static_assert(BANDS * (TILE / 16) * PARTS == WARPS && ROW / 16 % PARTS == 0 && COLUMNS % 2 == 0, "equal parts");

// Queries times a tile's rows: each warp's part of the dimensions to `scores`.
DEVICE void multiply_keys(const T* queries, const T* tile, float* scores) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int part = warp % PARTS, band = warp / PARTS / (TILE / 16), group = warp / PARTS % (TILE / 16);
  float sums[2][4] = {};
  const u32 rows = shared_address(queries + (band * 16 + lane % 16) * PITCH + part * STEPS * 16 + lane / 16 * 8);
  const u32 tokens = shared_address(tile + (group * 16 + lane % 8 + lane / 16 * 8) * PITCH + part * STEPS * 16 +
                                    lane / 8 % 2 * 8);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    u32 query[4], key[4];
    load_matrices(query, rows + step * 16 * int(sizeof(T)));
    load_matrices(key, tokens + step * 16 * int(sizeof(T)));
    multiply_add(sums[0], query, key[0], key[1], T{});
    multiply_add(sums[1], query, key[2], key[3], T{});
  }
  float* target = scores + (part * ROWS + band * 16 + lane / 4) * SCORE_PITCH + group * 16 + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      target[half * 8 * SCORE_PITCH + i * 8] = sums[i][half * 2];
      target[half * 8 * SCORE_PITCH + i * 8 + 1] = sums[i][half * 2 + 1];
    }
}
DEVICE float score_at(const T*, const T*, const float* scores, int row, int token) {
  float sum = scores[row * SCORE_PITCH + token];
#pragma unroll
  for (int part = 1; part < PARTS; ++part) sum += scores[(part * ROWS + row) * SCORE_PITCH + token];
  return sum;
}

// A warp's columns of all rows' sums of values.
class Values {
  const int lane = threadIdx.x % 32;
  const int first = threadIdx.x / 32 * COLUMNS * 8;
  float sums[BANDS][COLUMNS][4] = {};

 public:
  DEVICE void add(const T* weights, const T* tile, const float* factors) {
#pragma unroll
    for (int band = 0; band < BANDS; ++band) {
      const float upper = factors[band * 16 + lane / 4], lower = factors[band * 16 + lane / 4 + 8];
      if (!__any_sync(ALL_LANES, upper != 1.0f || lower != 1.0f)) continue;
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) {
        sums[band][i][0] *= upper;
        sums[band][i][1] *= upper;
        sums[band][i][2] *= lower;
        sums[band][i][3] *= lower;
      }
    }
#pragma unroll
    for (int step = 0; step < TILE / 16; ++step) {
      u32 weight[BANDS][4];
#pragma unroll
      for (int band = 0; band < BANDS; ++band)
        load_matrices(weight[band], shared_address(weights + (band * 16 + lane % 16) * WEIGHT_PITCH + step * 16 +
                                                   lane / 16 * 8));
#pragma unroll
      for (int pair = 0; pair < COLUMNS / 2; ++pair) {
        u32 value[4];
        load_transposed(value, shared_address(tile + (step * 16 + lane % 16) * PITCH + first + pair * 16 +
                                              lane / 16 * 8));
#pragma unroll
        for (int band = 0; band < BANDS; ++band) {
          multiply_add(sums[band][pair * 2], weight[band], value[0], value[1], T{});
          multiply_add(sums[band][pair * 2 + 1], weight[band], value[2], value[3], T{});
        }
      }
    }
  }
  // f(row, column, sums of column and of the next)
  template <class Visit>
  DEVICE void visit(const Visit& f) {
#pragma unroll
    for (int band = 0; band < BANDS; ++band)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i)
          f(band * 16 + lane / 4 + half * 8, first + i * 8 + lane % 4 * 2, sums[band][i][half * 2],
            sums[band][i][half * 2 + 1]);
  }
};
#else
using Weight = float;
constexpr int WEIGHT_PITCH = TILE, NUM_SCORES = 0;
static_assert(ROWS == WARPS && RANK == 2 * THREADS, "a row a warp, two columns a thread");

DEVICE void multiply_keys(const T*, const T*, float*) {}
DEVICE float score_at(const T* queries, const T* tile, const float*, int row, int token) {
  float sum = 0.0f;
#pragma unroll 4
  for (int i = 0; i < ROW; i += VECTOR) {
    const auto query = load<VECTOR>(queries + row * PITCH + i), key = load<VECTOR>(tile + token * PITCH + i);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) sum = fmaf(query.at[j], key.at[j], sum);
  }
  return sum;
}

class Values {
  const int column = threadIdx.x * 2;
  float sums[ROWS][2] = {};

 public:
  DEVICE void add(const float* weights, const T* tile, const float* factors) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      sums[row][0] *= factors[row];
      sums[row][1] *= factors[row];
    }
    for (int token = 0; token < TILE; ++token) {
      const auto value = load<2>(tile + token * PITCH + column);
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        const float weight = weights[row * WEIGHT_PITCH + token];
        sums[row][0] = fmaf(weight, value.at[0], sums[row][0]);
        sums[row][1] = fmaf(weight, value.at[1], sums[row][1]);
      }
    }
  }
  template <class Visit>
  DEVICE void visit(const Visit& f) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) f(row, column, sums[row][0], sums[row][1]);
  }
};
#endif

// What the warp of a row keeps of its softmax.
struct Softmax {
  float maximum[OWN_ROWS], total[OWN_ROWS];  // of this lane's tokens
  int last[OWN_ROWS];                        // token that the row sees

  DEVICE Softmax(const Item& item, int num_heads) {
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
      maximum[i] = -INFINITE;
      total[i] = 0.0f;
      last[i] = item.before + (item.first + min(row(i), item.count - 1)) / num_heads;
    }
  }
  static DEVICE int row(int i) { return int(threadIdx.x) / 32 * OWN_ROWS + i; }

  // Scores of the tile at `first`, of which tokens from `end` on do not count, become weights.
  template <class Score>
  DEVICE void weigh(const Score& score, Weight* weights, float* factors, int first, int end, float scale) {
    const int lane = threadIdx.x % 32, token = first + lane;
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
      const float own = score(row(i), lane) * scale;
      const float shown = token <= last[i] && token < end ? own : -INFINITE;
      const float highest = fmaxf(maximum[i], warp_max(shown));
      const float base = highest == -INFINITE ? 0.0f : highest;
      const float factor = exp2f(maximum[i] - base), weight = exp2f(shown - base);
      maximum[i] = highest;
      total[i] = fmaf(total[i], factor, weight);
      weights[row(i) * WEIGHT_PITCH + lane] = from_float<Weight>(weight);
      if (lane == 0) factors[row(i)] = factor;
    }
  }
  DEVICE void publish(float* maxima, float* totals) {
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
      const float sum = warp_sum(total[i]);
      if (threadIdx.x % 32 != 0) continue;
      maxima[row(i)] = maximum[i];
      totals[row(i)] = sum;
    }
  }
};

// What a CTA has in shared memory.
struct Memory {
  T* queries = reinterpret_cast<T*>(shared_bytes);
  T* tiles = queries + ROWS * PITCH;
  float* scores = reinterpret_cast<float*>(tiles + STAGES * TILE_ELEMENTS);
  Weight* weights = reinterpret_cast<Weight*>(scores + NUM_SCORES);
  float* factors = reinterpret_cast<float*>(weights + ROWS * WEIGHT_PITCH);
  float* totals = factors + ROWS;

  // Starts the copy of `count` rows of queries; zeros behind them.
  DEVICE void copy_queries(const T* source, int count) const {
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
      const int row = i / CHUNKS, column = i % CHUNKS * VECTOR;
      copy_async(queries + row * PITCH + column, source + (row < count ? row * ROW + column : 0), row < count);
    }
  }
};

// All tiles of tokens [begin, end).
DEVICE void attend(const Memory& memory, const Latents& latents, Softmax& softmax, Values& values, int begin, int end,
                   float scale) {
  for (int first = begin, stage = 0; first < end; first += TILE, stage = (stage + 1) % STAGES) {
    const bool has_next = first + TILE < end;
    if (STAGES > 1 && has_next)
      latents.start_copy(memory.tiles + (stage + 1) % STAGES * TILE_ELEMENTS, first + TILE, end);
    copy_commit();
    if (STAGES > 1)
      copy_wait<1>();
    else
      copy_wait<0>();
    __syncthreads();
    const T* tile = memory.tiles + stage * TILE_ELEMENTS;
    multiply_keys(memory.queries, tile, memory.scores);
    if (MMA) __syncthreads();
    const auto score = [&](int row, int token) { return score_at(memory.queries, tile, memory.scores, row, token); };
    softmax.weigh(score, memory.weights, memory.factors, first, end, scale);
    __syncthreads();
    values.add(memory.weights, tile, memory.factors);
    __syncthreads();  // the tile, weights and factors may be written again
    if (STAGES == 1 && has_next) latents.start_copy(memory.tiles, first + TILE, end);
  }
}

// Grid: x = ROWS rows of queries (the last first), y = split, z = sequence: neighbours read the same tokens.
// `query_starts`: null where each sequence has one query. With one split the result goes to `out` [row, RANK], else to
// `partial` [row, split, STATE].
extern "C" __global__ void __launch_bounds__(THREADS, MMA && ROWS == 16 ? 2 : 1)
    latent_attention(const T* q, const T* cache, const int* block_tables, i64 table_stride, const int* query_starts,
                     const int* lengths, T* out, float* partial, float scale, i64 num_heads, i64 block_shift) {
  const int sequence = blockIdx.z, length = lengths[sequence];
  const Item item(query_starts, length, sequence, int(gridDim.x - 1 - blockIdx.x) * ROWS, int(num_heads));
  if (item.count <= 0) return;
  const i64 row = i64(item.start) + item.first;
  if (length == 0) {
    if (blockIdx.y == 0)
      for (int i = threadIdx.x; i < item.count * RANK; i += THREADS) out[row * RANK + i] = from_float<T>(0.0f);
    return;
  }
  const int share = item.share(gridDim.y), begin = blockIdx.y * share;
  if (begin >= item.end) return;
  const int end = min(begin + share, item.end);

  const Memory memory;
  const Latents latents = {cache, block_tables + sequence * table_stride, int(block_shift)};
  latents.start_copy(memory.tiles, begin, end);
  memory.copy_queries(q + row * ROW, item.count);
  copy_commit();
  Softmax softmax(item, int(num_heads));
  Values values;
  attend(memory, latents, softmax, values, begin, end, scale);
  softmax.publish(memory.factors, memory.totals);  // maxima in the place of factors
  __syncthreads();
  const bool is_whole = item.end <= share;
  values.visit([&](int own, int column, float low, float high) {
    if (own >= item.count) return;
    if (is_whole) {
      const float factor = 1.0f / memory.totals[own];
      Pack<T, 2> pair;
      pair.at[0] = from_float<T>(low * factor);
      pair.at[1] = from_float<T>(high * factor);
      store<2>(out + (row + own) * RANK + column, pair);
      return;
    }
    float* target = partial + ((row + own) * gridDim.y + blockIdx.y) * STATE;
    Pack<float, 2> pair = {{low, high}};
    store<2>(target + column, pair);
    if (column == 0) {
      target[RANK] = memory.factors[own];
      target[RANK + 1] = memory.totals[own];
    }
  });
}

// Grid: x = row of a sequence's queries, y = sequence. The splits of a row, in order.
extern "C" __global__ void __launch_bounds__(THREADS)
    combine_latents(const float* partial, const int* query_starts, const int* lengths, T* out, i64 num_heads,
                    i64 max_splits) {
  const int sequence = blockIdx.y, own = blockIdx.x;
  const Item item(query_starts, lengths[sequence], sequence, own / ROWS * ROWS, int(num_heads));
  const int share = item.share(int(max_splits));
  if (own % ROWS >= item.count || lengths[sequence] == 0 || item.end <= share) return;
  const int num_splits = (item.end + share - 1) / share;
  const i64 row = i64(item.start) + own;
  const float* splits = partial + row * max_splits * STATE;
  float maximum = -INFINITE, total = 0.0f;
  for (int i = 0; i < num_splits; ++i) maximum = fmaxf(maximum, splits[i * STATE + RANK]);
  for (int i = 0; i < num_splits; ++i)
    total = fmaf(exp2f(splits[i * STATE + RANK] - maximum), splits[i * STATE + RANK + 1], total);
  for (int column = threadIdx.x; column < RANK; column += THREADS) {
    float sum = 0.0f;
    for (int i = 0; i < num_splits; ++i)
      sum = fmaf(exp2f(splits[i * STATE + RANK] - maximum), splits[i * STATE + column], sum);
    out[row * RANK + column] = from_float<T>(sum / total);
  }
}
