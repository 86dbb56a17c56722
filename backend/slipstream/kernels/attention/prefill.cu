// Paged prefill attention: 16 query rows a warp, every warp reads every tile.
// -D ELEMENT (T), HEAD_SIZE, WARPS, TILE (tokens), STAGES (in flight), MMA (1: tensor cores), WINDOWED (1: a token
// sees the last `window` alone), SINKS (1: and the first `num_sinks` of its sequence, by a query that is turned
// further by `angles`: sinks.py), SCORES (scores.cuh), FORMAT (of the cache: kv_format.cuh)
#include "attention/tiles.cuh"

constexpr int ROWS = 16 * WARPS;  // queries of a CTA
static_assert(SCORES == 0 || !SINKS, "sequences that stream have plain scores");

// Grid: x = q head, y = ROWS queries (the longest rows first), z = sequence.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_attention(const T* q, i64 q_stride, const Cell* cache, const int* block_tables,
                      i64 table_stride, const int* query_starts, const int* lengths, T* out, i64 out_stride,
                      float scale, i64 num_kv_heads, i64 group_size, i64 block_shift, i64 window,
                      i64 num_sinks, const float* angles, const i64* positions, float cap,
                      const float* head_scores) {
  const i64 sequence = blockIdx.z, head = blockIdx.x;
  const int start = query_starts[sequence];
  const int num_queries = query_starts[sequence + 1] - start;
  const int first_query = int(gridDim.y - 1 - blockIdx.y) * ROWS;
  const int length = lengths[sequence];
  if (first_query >= num_queries || length == 0) return;
  const int own = first_query + threadIdx.x / 32 * 16;  // this warp's first query
  const int count = max(0, min(16, num_queries - own));
  const int position = length - num_queries + own;
  const Rows rows = {q + (start + own) * q_stride + head * HEAD_SIZE, q_stride, count, position, 1,
                     scale, int(window), int(num_sinks), length, {cap, head_scores + head}, 0, position};
  const BlockLayout layout = {num_kv_heads, int(block_shift)};
  const Pages pages = Pages::of(cache, layout, head / group_size, block_tables + sequence * table_stride);

  WarpRows mine(rows, scratch());
  if (SCORES == SINKING) mine.start(rows);
  const int end = min(length, length - num_queries + first_query + ROWS);
  int begin = WINDOWED ? max(0, length - num_queries + first_query - int(window) + 1) : 0;
  // Tiles begin at multiples, wherever the chunk does: a row's bits are its position's.
  int first_tile = begin / TILE * TILE;
#if SINKS
  mine.turn(angles + i64(start + own) * HEAD_SIZE, count);
  const Rows sink_rows = {rows.queries, q_stride, count, position, 1, scale, EVERYTHING, 0, int(num_sinks)};
  for_each_tile(pages, 0, 0, min(end, int(num_sinks)), [&](const T* keys, int first) {
    if (count > 0) mine.attend<TILE>(keys, keys + TILE_ELEMENTS, first, sink_rows);
  });
  copy_wait<0>();
  __syncthreads();  // nobody reads the stages any more
  mine.load(rows);
  // Multiples are those of positions in the sequence: its table lacks some of its tokens.
  begin = max(begin, int(num_sinks));
  const int gap = int((positions[start] - (length - num_queries)) & (TILE - 1));
  first_tile = begin - ((begin + gap) & (TILE - 1));
#endif
  for_each_tile(pages, first_tile, begin, end, [&](const T* keys, int first) {
    if (count > 0) mine.attend<TILE>(keys, keys + TILE_ELEMENTS, first, rows);
  });
  T* target = out + (start + own) * out_stride + head * HEAD_SIZE;
  mine.visit([&](int row, int column, float low, float high, float, float total) {
    if (row >= count) return;
    const float factor = total > 0.0f || total != total ? 1.0f / total : 0.0f;
    Pack<T, 2> pair;
    pair.at[0] = from_float<T>(low * factor);
    pair.at[1] = from_float<T>(high * factor);
    store<2>(target + row * out_stride + column, pair);
  });
}
