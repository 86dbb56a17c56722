// Paged decode attention for 16-bit elements: every warp is a worker that streams the tiles which the plan gives it
// (decode_plan.cuh) through a ring of its own; then results that several workers have parts of are merged.
// -D ELEMENT (T: 16 bits), HEAD_SIZE, WARPS, SLOTS (of a worker's ring)
#include "decode_merge.cuh"

constexpr int THREADS = 32 * WARPS;

// Attend to the tiles of one worker, from the cursor on.
DEVICE void work(const Heads& heads, const T* q, i64 q_stride, const Output& out, Shared& shared,
                 Ring& ring, Cursor cursor, int left, float scale) {
  const int warp = threadIdx.x / 32;
  Query query, next;
  const auto load_query = [&](Query& target) {
    const T* row = q + cursor.now.row * q_stride;
    target.load(row + heads.first_query(cursor.head) * HEAD_SIZE, heads.num_queries(cursor.head));
  };
  Columns columns;
  load_query(next);
  for (bool is_first = true; left > 0; is_first = false) {
    query = next;
    columns.clear();
    const int row = cursor.now.row, head = cursor.head;
    int flags = PRESENT | (cursor.tile == 0 ? BEGINS : 0);
    for (bool goes_on = true; goes_on;) {
      const int count = cursor.num_tokens();
      if (count <= TILE) flags |= ENDS;
      goes_on = --left > 0 && count > TILE;
      cursor.advance(heads.count);
      if (!goes_on && left > 0) load_query(next);
      float scores[2][4];
      columns.score(scores, query, ring.front());
      ring.pop();
      u32 weights[4];
      columns.exponentiate(scores, weights, count, scale);
      columns.accumulate(weights, ring.front());
      ring.pop();
    }
    columns.sum_totals();
    const int num_queries = heads.num_queries(head);
    if (flags == (PRESENT | BEGINS | ENDS)) {
      columns.write(out.at(heads, row, head), num_queries);
    } else {
      const int entry = warp * 2 + (is_first ? 0 : 1);
      columns.store(shared.part(entry), num_queries);
      if (threadIdx.x % 32 == 0) shared.entries[entry] = {row, head, flags};
    }
  }
}

extern __shared__ __align__(1024) u8 shared_bytes[];

// Grid: a CTA for each SM, of any lengths. Rows of length 0 become zeros.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode_attention(const T* q, i64 q_stride, const T* memory, const int* block_tables,
                     i64 table_stride, const int* lengths, int* plan_memory, T* rows, float scale,
                     i64 num_rows, i64 num_kv_heads, i64 group_size, i64 block_shift) {
  start_next();
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Plan plan{plan_memory, int(gridDim.x), WARPS, int(num_rows)};
  const Start start = plan.starts[blockIdx.x * WARPS + warp];
  const int first_cta = plan.first_ctas[blockIdx.x];
  const int first_row = blockIdx.x + gridDim.x * warp, row_step = gridDim.x * WARPS;
  bool has_empty = false;
  for (int row = first_row; row < num_rows; row += row_step) has_empty |= lengths[row] == 0;
  // Whoever has nothing to do makes room for the next kernel; one CTA keeps the order of kernels.
  if (first_cta == NO_TILES && !has_empty && blockIdx.x > 0) return;

  if (lane == 0) shared.entries[warp * 2] = shared.entries[warp * 2 + 1] = {0, 0, 0};
  const Heads heads{int(num_kv_heads), int(group_size)};
  const Output out = {rows, num_kv_heads * group_size * HEAD_SIZE};
  const Cache cache = {memory,       block_tables,     table_stride,
                       num_kv_heads, int(block_shift), heads.parts};
  const Cursor cursor(plan, start);
  Ring ring(cache, shared_address(shared.rings[warp]), heads.count, cursor, start.count);
  const int filled = ring.fill_early();
  wait_for_previous();
  ring.fill_up(filled);

  if (has_empty)
    for (int row = first_row; row < num_rows; row += row_step)
      if (lengths[row] == 0)
        for (int i = lane * 8; i < out.row_elements; i += 32 * 8)
          store<8>(rows + row * out.row_elements + i, Pack<T, 8>{});
  if (first_cta == NO_TILES) return;
  if (start.count > 0)
    work(heads, q, q_stride, out, shared, ring, cursor, start.count, scale);
  __syncthreads();
  merge(heads, out, shared, reinterpret_cast<Part*>(plan.parts), first_cta);
}
