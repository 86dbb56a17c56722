// Norm, router and choice of up to eight rows in one launch, by one team: each CTA normalises the rows, multiplies its
// share of the router's columns, 16 at once, and sends logits to the first, which chooses and places. Weights are on
// their way before the kernel waits for x. The warps share out the width; parts of a sum are added in their order.
// -D ELEMENT (T: Half or BFloat16), FP8=0, GATED=0 (see pieces.cuh), VALUES, GROUPED (see choice.cuh), PLUS_ONE (1: the
// norm multiplies by 1 + weight)
#include "experts/choice.cuh"
#include "experts/chunks.cuh"

constexpr int COLUMNS = 16;       // at once
constexpr int MAX_COLUMNS = 520;  // experts, a gate, and what fills up to eight
constexpr int AHEAD = 2;          // chunks of a warp that are on their way at once
// CTAs a multiprocessor: with room for two, one may start beside the kernel before.
#if __CUDA_ARCH__ >= 1000
constexpr int CTAS = 1;
#else
constexpr int CTAS = VALUES <= 4 ? 2 : 1;
#endif
constexpr int PAD = 32;           // elements behind a row in shared memory: loads of eight rows meet different banks

struct Normed {
  T* rows;  // shared; the norm's factors are behind the last
  int num_rows, width;

  DEVICE T* row(int i) const { return rows + i * (width + PAD); }
};

// Rows are shared out among the warps of a CTA, by powers of two. `sums`: shared, one for each warp.
DEVICE void load_factors(const T* factors, const Normed& to) {
#pragma unroll 1
  for (int at = threadIdx.x * 8; at < to.width; at += THREADS * 8)
    store<8>(to.row(to.num_rows) + at, load<8>(factors + at));
}
DEVICE void normalise(const T* x, i64 stride, float eps, const Normed& to, float* sums) {
  int warps = WARPS;  // of a row
  while (warps * to.num_rows > WARPS) warps /= 2;
  const int warp = threadIdx.x / 32, row = warp / warps;
  const int first = threadIdx.x % (warps * 32) * 8, step = warps * 32 * 8;
  const int end = row < to.num_rows ? to.width : 0;
  T* own = to.row(row);
  float squares = 0.0f;
#pragma unroll 1
  for (int at = first; at < end; at += step) {
    const Pack<T, 8> pack = load_fresh<8>(x + row * stride + at);
#pragma unroll
    for (int j = 0; j < 8; ++j) squares = fmaf(to_float(pack.at[j]), to_float(pack.at[j]), squares);
    store<8>(own + at, pack);
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) sums[warp] = squares;
  __syncthreads();
  float total = 0.0f;
  for (int i = 0; i < warps; ++i) total += sums[row * warps + i];
  const float scale = 1.0f / sqrtf(total / float(to.width) + eps);
#pragma unroll 1
  for (int at = first; at < end; at += step) {
    Pack<T, 8> pack = load<8>(own + at);
    const Pack<T, 8> by = load<8>(to.row(to.num_rows) + at);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      pack.at[j] =
          from_float<T>(to_float(pack.at[j]) * scale * (PLUS_ONE ? 1.0f + to_float(by.at[j]) : to_float(by.at[j])));
    store<8>(own + at, pack);
  }
  __syncthreads();
}

// A warp's part of COLUMNS columns. Its chunks are warp, warp + WARPS, ...
struct Columns {
  const u8* weight;
  int upper, lower, num_pieces;  // bytes before two weight rows
  WeightChunk ahead[AHEAD];

  DEVICE Columns(const T* weight, int width) : weight(reinterpret_cast<const u8*>(weight)), num_pieces(width / PIECE) {}
  DEVICE void fetch(int i, int chunk) { ahead[i].load(weight + upper, weight + lower, chunk, num_pieces); }
  DEVICE void start(int first, int num_columns) {
    const int g = threadIdx.x % 32 / 4;
    upper = (min(first, num_columns - 8) + g) * num_pieces * 16;
    lower = (min(first + 8, num_columns - 8) + g) * num_pieces * 16;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) fetch(i, threadIdx.x / 32 + i * WARPS);
  }
  DEVICE void finish(const Normed& x, float (&parts)[COLUMNS][ROWS + 1]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    float sums[4] = {};
#pragma unroll 1
    for (int chunk = warp; chunk * CHUNK < num_pieces; chunk += AHEAD * WARPS) {
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        multiply(sums, ahead[i], rows_of(x, g, chunk + i * WARPS));
        fetch(i, chunk + (AHEAD + i) * WARPS);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) parts[g + i / 2 * 8][2 * t + i % 2] = sums[i];
  }

 private:
  DEVICE RowChunk rows_of(const Normed& x, int row, int chunk) const {
    RowChunk result;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int piece = piece_of(chunk, half);
      result.at[half][0] = Bytes{};
      if (piece < num_pieces && row < x.num_rows)
        result.at[half][0] = load<4>(reinterpret_cast<const u32*>(x.row(row) + piece * PIECE));
    }
    return result;
  }
};

extern "C" __global__ void TEAM_DIMS __launch_bounds__(THREADS, CTAS)
    route_rows(const T* x, i64 x_stride, const T* norm, float eps, const T* weight, const T* bias, i64 width,
               i64 num_columns, T* normed, T* outputs, HOW_TO_CHOOSE, WHERE_TO_PLACE) {
  extern __shared__ __align__(16) u8 shared_rows[];
  __shared__ float logits[ROWS][MAX_COLUMNS];  // of the team's first CTA
  __shared__ float parts[WARPS][COLUMNS][ROWS + 1];
  __shared__ float squares[WARPS];
  __shared__ int chosen[MAX_PAIRS];
  __shared__ u64 sums[WARPS];
  start_next();
  const int rank = Team::rank(), thread = threadIdx.x, warp = thread / 32, columns = int(num_columns);
  const Normed rows{reinterpret_cast<T*>(shared_rows), int(num_rows), int(width)};
  Columns own(weight, int(width));
  int first = rank * COLUMNS;
  if (first < columns) own.start(first, columns);
  team_arrive_early();
  load_factors(norm, rows);
  team_wait();  // all have started
  wait_for_previous();
  normalise(x, x_stride, eps, rows, squares);
#pragma unroll 1
  for (; first < columns; first += TEAM * COLUMNS) {
    own.finish(rows, parts[warp]);
    __syncthreads();
    const int row = thread / COLUMNS, within = thread % COLUMNS, column = first + within;
    if (row < num_rows && column < columns) {
      float sum = bias == nullptr ? 0.0f : to_float(bias[column]);
#pragma unroll 4
      for (int i = 0; i < WARPS; ++i) sum += parts[i][within][row];
      const T rounded = from_float<T>(sum);
      if (outputs != nullptr) outputs[row * num_columns + column] = rounded;
      store_at(&logits[row][column], 0, to_float(rounded));
    }
    __syncthreads();
    if (first + TEAM * COLUMNS < columns) own.start(first + TEAM * COLUMNS, columns);
  }
  team_sync();
  if (rank == TEAM - 1)
    for (int i = warp; i < num_rows; i += WARPS)
      for (int at = thread % 32 * 8; at < width; at += 32 * 8) store<8>(normed + i * width + at, load<8>(rows.row(i) + at));
  if (rank != 0) return;
  CHOICE;
  PLAN;
  if (warp < num_rows) choose_for(choice, warp, chosen, [&](int expert) { return logits[warp][expert]; });
  __syncthreads();
  place_pairs(plan, chosen, int(num_rows * top_k), int(num_experts), sums);
}
