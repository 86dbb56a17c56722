// Blocks of a quantised cache that chunks see, as numbers of T in blocks of their own (unpack.py).
// -D ELEMENT (T), HEAD_SIZE, FORMAT (not 0; kv_format.cuh)
#include "cache/kv_format.cuh"

constexpr int THREADS = 256, EACH = 2;  // accesses that a thread has in flight
constexpr int GROUP_BYTES = ROW_CELLS / GROUPS;
constexpr int WIDTH = GROUP_BYTES % 16 == 0 ? 16 : GROUP_BYTES % 8 == 0 ? 8 : 4;  // of an access
constexpr int ACCESSES = ROW_CELLS / WIDTH;                                       // of a token's row
static_assert(GROUP_BYTES % WIDTH == 0, "an access has one scale");

// Blocks of a chunk that its queries see.
struct Seen {
  int first, count;

  DEVICE Seen(const int* query_starts, const int* lengths, int row, i64 block_shift, i64 window) {
    const int num_queries = query_starts[row + 1] - query_starts[row], length = lengths[row];
    first = window > 0 ? int(max(i64(0), length - num_queries - window + 1) >> block_shift) : 0;
    count = num_queries == 0 || length == 0 ? 0 : ((length - 1) >> block_shift) + 1 - first;
  }
};

// Grid: x = block of `into`, or none, y = kv head. Blocks of a chunk follow those of the chunk before.
extern "C" __global__ void __launch_bounds__(THREADS)
    unpack_blocks(const u8* cache, const int* block_tables, i64 table_stride, const int* query_starts,
                  const int* lengths, i64 num_chunks, T* into, int* tables, i64 own_stride, i64 num_kv_heads,
                  i64 block_shift, i64 window) {
  __shared__ int found[2];  // the chunk, and the block's place in its table
  const int index = int(blockIdx.x), thread = int(threadIdx.x);
  if (thread == 0) found[0] = -1;
  __syncthreads();
  for (int row = thread; row < num_chunks; row += THREADS) {
    int before = 0;
    for (int other = 0; other < row; ++other)
      before += Seen(query_starts, lengths, other, block_shift, window).count;
    const Seen seen(query_starts, lengths, row, block_shift, window);
    if (index < before || index >= before + seen.count) continue;
    found[0] = row;
    found[1] = seen.first + index - before;
  }
  __syncthreads();
  if (found[0] < 0) return;
  const i64 head = blockIdx.y, place = found[1];
  if (head == 0 && thread == 0) tables[found[0] * own_stride + place] = index;

  const int tokens = 1 << block_shift, per_part = ACCESSES << block_shift;  // K and V are parts
  const BlockLayout layout = {num_kv_heads, int(block_shift)};
  const u8* block = cache + block_tables[found[0] * table_stride + place] * layout.size();
  const u8 *numbers = block + layout.numbers(head), *all_scales = block + layout.scales(head);
  T* target = into + (index * num_kv_heads + head) * 2 * tokens * HEAD_SIZE;
  for (int begin = thread; begin < 2 * per_part; begin += EACH * THREADS) {
    Pack<u32, WIDTH / 4> words[EACH];
    float scales[EACH];
    u32 zeros[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = begin + i * THREADS;
      if (at >= 2 * per_part) continue;
      const int token = at / ACCESSES, byte = at % ACCESSES * WIDTH;  // V's tokens follow K's
      const u8* own = all_scales + token * SCALE_BYTES + (FORMAT == INT4 ? byte / GROUP_BYTES * 2 : 0);
      words[i] = load<WIDTH / 4>(reinterpret_cast<const u32*>(numbers + at * WIDTH));
      scales[i] = scale_of(own[0]) * UNIT;
      zeros[i] = FORMAT == INT4 ? zero_of(own[1]) * 0x10001u : 0;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = begin + i * THREADS;
      if (at >= 2 * per_part) continue;
#pragma unroll
      for (int word = 0; word < WIDTH / 4; ++word)
        store_numbers(target + (at * (WIDTH / 4) + word) * NUMBERS, words[i].at[word], scales[i], zeros[i]);
    }
  }
}
