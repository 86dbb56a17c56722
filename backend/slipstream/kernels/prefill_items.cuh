// What is to do in a step's chunks, cut into items, and in which order: the longest first, so that all end together.
// A query row is one head of one query: the heads that share a kv head share its tiles.
// -D ELEMENT (T), HEAD_SIZE
#pragma once
#include "tma.cuh"

constexpr int ITEM_ROWS = 128;  // query rows of an item
constexpr int TILE = 128;       // tokens
constexpr i64 CACHED_BYTES = 20 << 20;  // of K and V that stay in the L2 cache while CTAs share them

struct Arguments {
  const T* q;
  i64 q_stride;
  const int* block_tables;
  i64 table_stride;
  const int* query_starts;
  const int* lengths;
  T* out;
  i64 out_stride;
  u32* counter;  // zero between launches
  float scale;   // of the scores, times log2(e): the softmax is in base 2
  int num_sequences, num_kv_heads, group_size, block_shift;
};

// ITEM_ROWS query rows of one kv head of one sequence.
struct alignas(16) Item {
  int sequence, kv_head;
  int start;      // row of the sequence's first query in q
  int num_rows;   // of the sequence: queries times heads of the group
  int first_row;  // of the item, among them
  int position;   // of the sequence's first query
  int length;
  int num_tiles;  // none: there are no more items
};

// One warp; a lane looks at every 32nd sequence. Heads are done in sections whose K and V fit the L2 cache; within
// one, row tiles are ordered by (length from the longest, sequence, row tile from the last), and its heads alternate.
class Schedule {
  const Arguments& a;
  const int lane = threadIdx.x % 32;
  int row_tiles = 0;  // of all sequences
  int longest = 0;    // tiles of tokens
  int section;        // heads
  int number = blockIdx.x;  // of the next item, if it is known

  struct Chunk {
    int start, num_rows, position, length;

    DEVICE int row_tiles() const { return (num_rows + ITEM_ROWS - 1) / ITEM_ROWS; }
    // Row tiles that see `tiles` tiles of tokens or more; they are the last ones.
    DEVICE int row_tiles_of(int tiles, int group_size) const {
      const int first = max(0, ((tiles - 1) * TILE - position) * group_size);  // row that sees the last tile
      return first < num_rows ? row_tiles() - first / ITEM_ROWS : 0;
    }
  };

  Chunk first;  // of this lane's first sequence

  // Of this lane's sequence of the 32 from `window` on.
  DEVICE Chunk chunk(int window) const { return window == 0 ? first : read(window + lane); }
  DEVICE Chunk read(int sequence) const {
    if (sequence >= a.num_sequences) return {0, 0, 0, 0};
    const int start = a.query_starts[sequence], length = a.lengths[sequence];
    const int num_queries = length > 0 ? a.query_starts[sequence + 1] - start : 0;
    return {start, num_queries * a.group_size, length - num_queries, length};
  }

  DEVICE int count(int tiles) const {
    int sum = 0;
    for (int window = 0; window < a.num_sequences; window += 32)
      sum += __reduce_add_sync(ALL_LANES, chunk(window).row_tiles_of(tiles, a.group_size));
    return sum;
  }

  // The row tile with this number in the order above.
  DEVICE Item find(int number, int kv_head) const {
    int tiles = 1;
    for (int high = longest; tiles < high;) {  // the most for which there are more row tiles than `number`
      const int middle = (tiles + high + 1) / 2;
      if (count(middle) > number)
        tiles = middle;
      else
        high = middle - 1;
    }
    int before = count(tiles + 1);
    for (int window = 0;; window += 32) {  // ends: count(tiles) > number
      const Chunk own = chunk(window);
      const int longer = own.row_tiles_of(tiles + 1, a.group_size);
      const int mine = own.row_tiles_of(tiles, a.group_size) - longer;
      int end = mine;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int below = __shfl_up_sync(ALL_LANES, end, distance);
        if (lane >= distance) end += below;
      }
      end += before;
      const u32 later = __ballot_sync(ALL_LANES, number < end);
      before = __shfl_sync(ALL_LANES, end, 31);
      if (later == 0) continue;
      const int rank = longer + number - (end - mine);  // from the last row tile; right in the lane that has it
      const int first_row = (own.row_tiles() - 1 - rank) * ITEM_ROWS;
      Item item = {window + lane, kv_head, own.start, own.num_rows, first_row, own.position, own.length, tiles};
      int* const fields = reinterpret_cast<int*>(&item);
#pragma unroll
      for (int i = 0; i < int(sizeof(Item) / sizeof(int)); ++i)
        fields[i] = __shfl_sync(ALL_LANES, fields[i], __ffs(later) - 1);
      return item;
    }
  }

 public:
  DEVICE explicit Schedule(const Arguments& arguments) : a(arguments), first(read(lane)) {
    i64 tokens = 0;
    for (int window = 0; window < a.num_sequences; window += 32) {
      const Chunk own = chunk(window);
      const bool real = own.num_rows > 0;
      row_tiles += __reduce_add_sync(ALL_LANES, own.row_tiles());
      longest = max(longest, __reduce_max_sync(ALL_LANES, real ? (own.length + TILE - 1) / TILE : 0));
      tokens += __reduce_add_sync(ALL_LANES, real ? own.length : 0);
    }
    const i64 head_bytes = max(i64(1), tokens * HEAD_SIZE * 2 * i64(sizeof(T)));
    const int most = int(max(i64(1), min(i64(a.num_kv_heads), CACHED_BYTES / head_bytes)));
    const int sections = (a.num_kv_heads + most - 1) / most;
    section = (a.num_kv_heads + sections - 1) / sections;  // evenly
  }

  // An item that no other CTA has, or one without tiles.
  DEVICE Item next() {
    const int total = row_tiles * a.num_kv_heads;
    if (number < 0) {
      // Every CTA whose first number is good draws until it gets none: `total` tickets in all, and the last of them
      // sets the counter to zero.
      u32 ticket = 0;
      if (lane == 0) ticket = atomicInc(a.counter, total - 1);
      number = gridDim.x + __shfl_sync(ALL_LANES, ticket, 0);
    }
    if (number >= total) return {0, 0, 0, 0, 0, 0, 0, 0};
    const int first_head = number / (row_tiles * section) * section;
    const int heads = min(section, a.num_kv_heads - first_head);
    const int index = number - first_head * row_tiles;
    number = -1;
    return find(index / heads, first_head + index % heads);
  }
};
