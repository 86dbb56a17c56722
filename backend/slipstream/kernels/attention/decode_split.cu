// Paged decode attention whose bits depend on a sequence alone (flash-decoding): its tokens are split over CTAs by its
// own length, then over warps, and combined in a fixed order.
// -D ELEMENT (T), HEAD_SIZE, WARPS, TILE (tokens), STAGES (in flight), MMA (1: tensor cores), WINDOWED (1: the last
// `window` tokens alone), SCORES (scores.cuh), FORMAT (of the cache: kv_format.cuh)
#include "attention/tiles.cuh"

constexpr int MIN_SPLIT = 256;  // tokens
constexpr int MAX_SPLITS = 32;
static_assert(TILE == 16 * WARPS, "each warp has 16 tokens of a tile");

// How many tokens are seen.
DEVICE int num_seen(int length, int window) { return WINDOWED ? min(length, window) : length; }

// The tokens of one split: of how many the sequence's own newest sees, so that neighbours change no bit.
DEVICE int split_length(int count) {
  const int share = (count + MAX_SPLITS - 1) / MAX_SPLITS;
  return max(MIN_SPLIT, (share + TILE - 1) / TILE * TILE);
}

// Merge the warps' results in warp order: each saw its own tokens of the same rows. f(row, column, sum, m, l).
template <class Visit>
DEVICE void merge_warps(WarpRows& mine, const Visit& f) {
  float* outputs = reinterpret_cast<float*>(shared_bytes);  // [WARPS][16][HEAD_SIZE]
  float* sums = outputs + WARPS * 16 * HEAD_SIZE;           // [WARPS][16][2]
  const int warp = threadIdx.x / 32;
  copy_wait<0>();
  __syncthreads();
  mine.visit([&](int row, int column, float low, float high, float maximum, float total) {
    float* target = outputs + (warp * 16 + row) * HEAD_SIZE + column;
    target[0] = low;
    target[1] = high;
    if (column == 0) {
      sums[(warp * 16 + row) * 2] = maximum;
      sums[(warp * 16 + row) * 2 + 1] = total;
    }
  });
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * HEAD_SIZE; i += THREADS) {
    const int row = i / HEAD_SIZE;
    float maximum = -INFINITE, total = 0.0f, sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) maximum = fmaxf(maximum, sums[(w * 16 + row) * 2]);
    const float base = maximum == -INFINITE ? 0.0f : maximum;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float factor = exp2f(sums[(w * 16 + row) * 2] - base);
      total = fmaf(factor, sums[(w * 16 + row) * 2 + 1], total);
      sum = fmaf(factor, outputs[w * 16 * HEAD_SIZE + i], sum);
    }
    f(row, i % HEAD_SIZE, sum, maximum, total);
  }
}

// Grid: x = split, y = (kv head, 16 of its q heads), z = sequence. With one split the result goes to `out`, else
// to `partial` [sequence, q head, split, HEAD_SIZE + 2]: the unnormalised sum, the maximum, the sum of exponentials.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode_split(const T* q, i64 q_stride, const Cell* cache, const int* block_tables,
                     i64 table_stride, const int* lengths, T* out, float* partial, float scale,
                     i64 num_kv_heads, i64 group_size, i64 block_shift, i64 window, float cap,
                     const float* head_scores) {
  const i64 sequence = blockIdx.z;
  const int length = lengths[sequence];
  const int num_tokens = num_seen(length, int(window)), first = length - num_tokens;
  const int share = split_length(num_tokens);
  const int begin = first + blockIdx.x * share;
  if (begin >= length && blockIdx.x > 0) return;
  const int end = min(begin + share, length);
  const bool is_whole = num_tokens <= share;

  const int parts = int(group_size + 15) / 16;
  const int kv_head = blockIdx.y / parts, first_head = blockIdx.y % parts * 16;
  const i64 head = kv_head * group_size + first_head;
  const i64 num_heads = num_kv_heads * group_size;
  const int count = min(16, int(group_size) - first_head);
  const Rows rows = {q + sequence * q_stride + head * HEAD_SIZE, HEAD_SIZE, count, end - 1, 0, scale, EVERYTHING,
                     0, 0, {cap, head_scores + head}, 1, length - 1};
  const BlockLayout layout = {num_kv_heads, int(block_shift)};
  const Pages pages = Pages::of(cache, layout, kv_head, block_tables + sequence * table_stride);

  WarpRows mine(rows, scratch());
  if (SCORES == SINKING && blockIdx.x == 0 && threadIdx.x < 32) mine.start(rows);
  for_each_tile(pages, begin, begin, end, [&](const T* keys, int first) {
    const int own = threadIdx.x / 32 * 16;  // this warp's tokens of the tile
    mine.attend<16>(keys + own * PITCH, keys + TILE_ELEMENTS + own * PITCH, first + own, rows);
  });
  merge_warps(mine, [&](int row, int column, float sum, float maximum, float total) {
    if (row >= count) return;
    const i64 at = sequence * num_heads + head + row;
    if (is_whole) {
      out[at * HEAD_SIZE + column] = from_float<T>(total > 0.0f || total != total ? sum / total : 0.0f);
      return;
    }
    float* target = partial + (at * gridDim.x + blockIdx.x) * (HEAD_SIZE + 2);
    target[column] = sum;
    if (column == 0) {
      target[HEAD_SIZE] = maximum;
      target[HEAD_SIZE + 1] = total;
    }
  });
}

// Grid: x = q head, y = sequence; thread = column. The splits of a sequence, in order.
extern "C" __global__ void __launch_bounds__(HEAD_SIZE)
    combine_splits(const float* partial, const int* lengths, T* out, i64 max_splits, i64 window) {
  const int count = num_seen(lengths[blockIdx.y], int(window));
  const int share = split_length(count);
  if (count <= share) return;  // decode_split wrote the result
  const int num_splits = (count + share - 1) / share;
  const i64 at = i64(blockIdx.y) * gridDim.x + blockIdx.x;
  const float* splits = partial + at * max_splits * (HEAD_SIZE + 2);
  float maximum = -INFINITE, total = 0.0f, sum = 0.0f;
  for (int i = 0; i < num_splits; ++i)
    maximum = fmaxf(maximum, splits[i * (HEAD_SIZE + 2) + HEAD_SIZE]);
  const float base = maximum == -INFINITE ? 0.0f : maximum;
  for (int i = 0; i < num_splits; ++i) {
    const float* split = splits + i * (HEAD_SIZE + 2);
    const float factor = exp2f(split[HEAD_SIZE] - base);
    total = fmaf(factor, split[HEAD_SIZE + 1], total);
    sum = fmaf(factor, split[threadIdx.x], sum);
  }
  out[at * HEAD_SIZE + threadIdx.x] = from_float<T>(sum / total);
}
