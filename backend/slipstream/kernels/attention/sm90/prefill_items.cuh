// What is to do in a step's chunks, cut into items, and in which order: the longest first, so that all end together.
// A query row is one head of one query: the heads that share a kv head share its tiles. With SPLITS, where items are
// fewer than CTAs, those of chunks behind many tokens are cut into parts, whose sums prefill_parts.cuh puts together.
// -D ELEMENT (T), HEAD_SIZE, TILE (tokens), SPLITS
#pragma once
#include "runtime/tma.cuh"

constexpr int ITEM_ROWS = 128;  // query rows of an item
constexpr i64 CACHED_BYTES = 20 << 20;  // of K and V that stay in the L2 cache while CTAs share them
#if SPLITS
constexpr int MIN_PART = 4;      // tiles, nearly: all rows of an item see a token of two or more
constexpr int MOST_PARTS = 384;  // of a launch that have a place in `parts`
constexpr int PART_TILES = 2;    // that could be attended to while a part begins and ends
constexpr int UNCUT = 1 << 30;
#endif

struct Arguments {
  const T* q;
  i64 q_stride;
  const int* block_tables;
  i64 table_stride;
  const int* query_starts;
  const int* lengths;
  T* out;
  i64 out_stride;
  u32* counters;  // of items, then of arrivals (prefill_parts.cuh): zero between launches
  float scale;    // of the scores, times log2(e): the softmax is in base 2
  int num_sequences, num_kv_heads, group_size, block_shift;
  float* parts;  // sums of parts
};

// ITEM_ROWS query rows of one kv head of one sequence, and the tiles of tokens they attend to.
struct alignas(16) Item {
  int sequence, kv_head;
  int start;      // row of the sequence's first query in q
  int num_rows;   // of the sequence: queries times heads of the group
  int first_row;  // of the item, among them
  int position;   // of the sequence's first query
  int length;
  int end;  // of the tiles; 0: there are no more items
#if SPLITS
  int first_tile;
  int part, parts;  // which it is, of so many, if it is cut
  int first_part;   // place of part 0 among all parts

  DEVICE int begin() const { return first_tile; }
#else
  DEVICE int begin() const { return 0; }
#endif
};

// Queries of a sequence.
struct Chunk {
  int start, num_rows, position, length;

  DEVICE int row_tiles() const { return (num_rows + ITEM_ROWS - 1) / ITEM_ROWS; }
  DEVICE int tiles() const { return num_rows > 0 ? (length + TILE - 1) / TILE : 0; }
  // Row tiles that see `tiles` tiles of tokens or more; they are the last ones.
  DEVICE int row_tiles_of(int tiles, int group_size) const {
    const int first = max(0, ((tiles - 1) * TILE - position) * group_size);  // row that sees the last tile
    return first < num_rows ? row_tiles() - first / ITEM_ROWS : 0;
  }
  // Tiles of which every query sees a token.
  DEVICE int prefix_tiles() const { return num_rows > 0 ? position / TILE + 1 : 0; }
  // Parts into which each of its items is cut where a part may have `part_tiles` tiles of its prefix.
  DEVICE int parts(int part_tiles) const {
    return prefix_tiles() > part_tiles ? (prefix_tiles() + part_tiles - 1) / part_tiles : 1;
  }
};

// One warp; a lane looks at every 32nd sequence. First come the parts of items that are cut, by (sequence, head, row
// tile from the last, part). The others follow: heads are done in sections whose K and V fit the L2 cache; within
// one, row tiles are ordered by (length from the longest, sequence, row tile from the last), and its heads alternate.
class Schedule {
  const Arguments& a;
  const int lane = threadIdx.x % 32;
#if SPLITS
  int part_tiles = UNCUT;  // chunks with more tiles in front of them are cut
#endif
  int num_parts = 0;
  int row_tiles = 0;  // of all sequences that are not cut
  int longest = 0;    // tiles of tokens of one of them
  int section;        // heads
  int number = blockIdx.x;  // of the next item, if it is known

  Chunk first;  // of this lane's first sequence

  // Of this lane's sequence of the 32 from `window` on.
  DEVICE Chunk chunk(int window) const { return window == 0 ? first : read(window + lane); }
  DEVICE Chunk read(int sequence) const {
    if (sequence >= a.num_sequences) return {0, 0, 0, 0};
    const int start = a.query_starts[sequence], length = a.lengths[sequence];
    const int num_queries = length > 0 ? a.query_starts[sequence + 1] - start : 0;
    return {start, num_queries * a.group_size, length - num_queries, length};
  }

  // The same, if its items are not cut.
  DEVICE Chunk whole(int window) const {
#if SPLITS
    Chunk own = chunk(window);
    if (own.prefix_tiles() > part_tiles) own.num_rows = 0;
    return own;
#else
    return chunk(window);
#endif
  }

  DEVICE int count(int tiles) const {
    int sum = 0;
    for (int window = 0; window < a.num_sequences; window += 32)
      sum += __reduce_add_sync(ALL_LANES, whole(window).row_tiles_of(tiles, a.group_size));
    return sum;
  }

  // The lanes whose numbers end after `number`, where each has `mine` of them from `before` on, and which of the first
  // one's it is. `before` becomes where the next 32 lanes begin.
  DEVICE u32 owners(int mine, int number, int& before, int& index) const {
    int end = mine;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int below = __shfl_up_sync(ALL_LANES, end, distance);
      if (lane >= distance) end += below;
    }
    end += before;
    const u32 later = __ballot_sync(ALL_LANES, number < end);
    before = __shfl_sync(ALL_LANES, end, 31);
    index = number - (end - mine);  // right in the lane that has it
    return later;
  }

  DEVICE static Item of_lane(Item item, int from) {
    int* const fields = reinterpret_cast<int*>(&item);
#pragma unroll
    for (int i = 0; i < int(sizeof(Item) / sizeof(int)); ++i)
      fields[i] = __shfl_sync(ALL_LANES, fields[i], from);
    return item;
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
      const Chunk own = whole(window);
      const int longer = own.row_tiles_of(tiles + 1, a.group_size);
      const int mine = own.row_tiles_of(tiles, a.group_size) - longer;
      int index;
      const u32 later = owners(mine, number, before, index);
      if (later == 0) continue;
      const int rank = longer + index;  // from the last row tile
      const int first_row = (own.row_tiles() - 1 - rank) * ITEM_ROWS;
      return of_lane({window + lane, kv_head, own.start, own.num_rows, first_row, own.position, own.length, tiles},
                     __ffs(later) - 1);
    }
  }

#if SPLITS
  // Finds `part_tiles`: by `lane + 1` parts of the deepest chunk, whichever ends soonest, if that is much sooner than
  // without.
  DEVICE void cut() {
    const int ctas = gridDim.x, heads = a.num_kv_heads;
    int deepest = 0, work = 0;  // in tiles
    for (int window = 0; window < a.num_sequences; window += 32) {
      const Chunk own = chunk(window);
      deepest = max(deepest, __reduce_max_sync(ALL_LANES, own.prefix_tiles()));
      const int mean = (own.position + own.length) / (2 * TILE) + 1;
      work += __reduce_add_sync(ALL_LANES, own.row_tiles() * mean) * heads;
    }
    if (deepest < 2 * MIN_PART - 1) return;
    // Many items, none of them much longer than what each CTA has to do: they end together as they are.
    if (row_tiles * heads >= ctas && i64(longest) * ctas <= 2 * i64(work)) return;
    const int tiles = (deepest + lane) / (lane + 1);
    int count = 0, parts = 0, largest = 0;
    for (int window = 0; window < a.num_sequences; window += 32) {
      const Chunk own = chunk(window);
      for (u32 rest = __ballot_sync(ALL_LANES, own.num_rows > 0); rest; rest &= rest - 1) {
        const int from = __ffs(rest) - 1;
        const int items = __shfl_sync(ALL_LANES, own.row_tiles(), from) * heads;
        const Chunk one = {0, 1, __shfl_sync(ALL_LANES, own.position, from), __shfl_sync(ALL_LANES, own.length, from)};
        const int each = one.parts(tiles);
        count += items * each;
        if (each > 1) parts += items * each;
        largest = max(largest, (one.tiles() + each - 1) / each);
      }
    }
    const int in_turns = (count + ctas - 1) / ctas * (largest + PART_TILES);
    const int in_a_row = (work + count * PART_TILES) / ctas + largest + PART_TILES;
    const int merges = 32 - __clz(lane);  // one after the other
    const bool is_legal = tiles >= MIN_PART && parts <= MOST_PARTS;
    const u32 cost = is_legal ? min(u32(min(in_turns, in_a_row) + merges), UNCUT / 32) : UNCUT / 32;
    const u32 best = __reduce_min_sync(ALL_LANES, cost * 32 + lane);
    if (best / 32 * 8 > __shfl_sync(ALL_LANES, cost, 0) * 7) return;
    part_tiles = __shfl_sync(ALL_LANES, tiles, best % 32);
    row_tiles = longest = 0;
    for (int window = 0; window < a.num_sequences; window += 32) {
      const Chunk own = chunk(window);
      const int each = own.parts(part_tiles);
      row_tiles += __reduce_add_sync(ALL_LANES, each > 1 ? 0 : own.row_tiles());
      longest = max(longest, __reduce_max_sync(ALL_LANES, each > 1 ? 0 : own.tiles()));
      num_parts += __reduce_add_sync(ALL_LANES, each > 1 ? own.row_tiles() * each : 0) * heads;
    }
  }

  // The part with this number.
  DEVICE Item find_part(int number) const {
    int before = 0;
    for (int window = 0;; window += 32) {  // ends: number < num_parts
      const Chunk own = chunk(window);
      const int parts = own.parts(part_tiles), of_head = own.row_tiles() * parts;
      int index;
      const u32 later = owners(parts > 1 ? of_head * a.num_kv_heads : 0, number, before, index);
      if (later == 0) continue;
      const int kv_head = index / max(1, of_head), rest = index - kv_head * of_head;
      const int part = rest % parts;
      const int first_row = (own.row_tiles() - 1 - rest / parts) * ITEM_ROWS;
      const int last = own.position + (min(first_row + ITEM_ROWS, own.num_rows) - 1) / a.group_size;
      const int tiles = last / TILE + 1;
      return of_lane({window + lane, kv_head, own.start, own.num_rows, first_row, own.position, own.length,
                      tiles * (part + 1) / parts, tiles * part / parts, part, parts, number - part},
                     __ffs(later) - 1);
    }
  }
#endif

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
#if SPLITS
    cut();
#endif
  }

  // An item that no other CTA has, or one without tiles.
  DEVICE Item next() {
    const int total = num_parts + row_tiles * a.num_kv_heads;
    if (number < 0) {
      // Every CTA whose first number is good goes on until it gets none: `total` tickets in all, and the last of them
      // sets the counter to zero.
      u32 ticket = 0;
      if (lane == 0) ticket = atomicInc(a.counters, total - 1);
      number = gridDim.x + __shfl_sync(ALL_LANES, ticket, 0);
    }
    if (number >= total) return {0, 0, 0, 0, 0, 0, 0, 0};
#if SPLITS
    if (number < num_parts) {
      const int part = number;
      number = -1;
      return find_part(part);
    }
    number -= num_parts;
#endif
    const int first_head = number / (row_tiles * section) * section;
    const int heads = min(section, a.num_kv_heads - first_head);
    const int index = number - first_head * row_tiles;
    number = -1;
    return find(index / heads, first_head + index % heads);
  }
};
