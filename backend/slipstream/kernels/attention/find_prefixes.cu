// Finds what the rows of a decode batch share (prefixes.cuh). One CTA, a thread for each row.
//
// Level by level: rows of a class whose next unit ends with the same block are a class from now on, and have in common
// what all of them have in common with the first. That is a run if it pays; else the runs of its classes begin where it
// would. Rows are compared by units of whole blocks, of a tile of the plan at least.
#include "attention/prefixes.cuh"
#include "runtime/scan.cuh"

constexpr int MAX_ROWS = 1024, MAX_WARPS = MAX_ROWS / 32;
constexpr int OWN_TILE = 32;      // of decode_plan.cuh
constexpr int MAX_SPLITS = 8;     // of a run
constexpr int MAX_SEGMENTS = 256;
constexpr int MIN_RUN = 4;        // tiles that an item has at least, if the run has them
constexpr int MIN_TOKENS = 64;    // of a run
constexpr int MIN_SAVED = 1024;   // tokens that a run saves reading, at least
constexpr int SLOTS = 2 * MAX_ROWS;
constexpr u64 FREE = ~0ull;
constexpr int UNROLL = 4;

// Classes of a level, by hash: key and first row.
struct Table {
  u64 keys[SLOTS];
  int firsts[SLOTS];
};
struct Segment {
  int leader, begin, end, num_members, first_member, row_tiles;
  int first_state, num_splits, first_item;

  DEVICE int num_tiles() const { return (end - begin + SHARED_TILE - 1) / SHARED_TILE; }
};

// What is known of classes once they are found.
struct Classes {
  int counts[MAX_ROWS];  // of a leader: members so far
  int common[MAX_ROWS];  // of a leader: units
  int begins[MAX_ROWS];  // of a row: units that are compared
};

struct Shared {
  union {
    Table table;
    Classes classes;
  };
  Segment segments[MAX_SEGMENTS];
  int leaders[MAX_ROWS];     // of the class of a row, -1 without one
  int limits[MAX_ROWS];      // units before the newest token
  int segment_of[MAX_ROWS];  // of a leader's class, -1 without one
  u64 sums[MAX_WARPS];
  u64 saved;      // tokens
  int own_tiles;  // that no other row has
};

struct Arguments {
  const int* tables;
  i64 table_stride;
  int num_rows, block_shift, num_kv_heads, group_size, item_rows, num_ctas, max_row_tiles, max_items;
  i64 min_saved;

  DEVICE int columns() const { return max(1, OWN_TILE >> block_shift); }  // of a unit
  DEVICE int unit() const { return columns() << block_shift; }            // tokens
  DEVICE int block(int row, int column) const { return tables[row * table_stride + column]; }
};

// The first row with this key; FREE is no key.
DEVICE int first_of(Table& table, u64 key, int row) {
  __syncthreads();
  for (int i = threadIdx.x; i < SLOTS; i += blockDim.x) {
    table.keys[i] = FREE;
    table.firsts[i] = MAX_ROWS;
  }
  __syncthreads();
  // Of the lanes with a key, which are often many, the lowest alone.
  const u32 same = __match_any_sync(ALL_LANES, key);
  const int lowest = __ffs(same) - 1;
  int slot = int(u32((key * 0x9e3779b97f4a7c15ull) >> 40)) % SLOTS;
  if (key != FREE && lowest == int(threadIdx.x) % 32) {
    for (;; slot = (slot + 1) % SLOTS) {
      const u64 there = atomicCAS(&table.keys[slot], FREE, key);
      if (there == FREE || there == key) break;
    }
    atomicMin(&table.firsts[slot], row);
  }
  slot = __shfl_sync(ALL_LANES, slot, lowest);
  __syncthreads();
  return key == FREE ? -1 : table.firsts[slot];
}

// How many of the class of `leader` are in rows before this one; all of them are counted in the end.
DEVICE int rank_of(int* counts, int leader, int row) {
  __syncthreads();  // the table is read
  counts[row] = 0;
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 same = __match_any_sync(ALL_LANES, leader);
  int rank = 0;
  for (int w = 0; w < int(blockDim.x) / 32; ++w) {
    if (w == warp) {
      const int before = leader < 0 ? 0 : counts[leader];
      rank = before + __popc(same & ((1u << lane) - 1));
      __syncwarp();
      if (leader >= 0 && __ffs(same) - 1 == lane) counts[leader] = before + __popc(same);
    }
    __syncthreads();
  }
  return rank;
}

// What each class has in common: a warp for each row compares it with the first of its class.
DEVICE void compare(const Arguments& a, Shared& shared, int begin_of_row) {
  Classes& classes = shared.classes;
  classes.begins[threadIdx.x] = begin_of_row;
  classes.common[threadIdx.x] = shared.limits[threadIdx.x];
  __syncthreads();
  const int lane = threadIdx.x % 32, columns = a.columns();
  for (int row = threadIdx.x / 32; row < a.num_rows; row += blockDim.x / 32) {
    const int leader = shared.leaders[row];
    if (leader < 0 || leader == row) continue;
    const int end = min(shared.limits[row], shared.limits[leader]) * columns;
    int same = end;
    for (int base = classes.begins[row] * columns; base < end; base += 32 * UNROLL) {
      int own[UNROLL], other[UNROLL];
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        const int column = min(base + i * 32 + lane, end - 1);
        own[i] = a.block(row, column);
        other[i] = a.block(leader, column);
      }
      bool found = false;
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        const u32 differ = __ballot_sync(ALL_LANES, own[i] != other[i]);
        if (differ != 0 && !found) {
          same = min(end, base + i * 32 + __ffs(differ) - 1);
          found = true;
        }
      }
      if (found) break;
    }
    if (lane == 0) atomicMin(&classes.common[leader], same / columns);
  }
  __syncthreads();
}

// A row on its way through the levels.
struct Row {
  int leader = 0;   // of its class; -1: it has none
  int begin = 0;    // units that its class has in common
  int own = 0;      // tokens that are in runs
  int runs[LEVELS];  // segments, -1 where it has none

  DEVICE Row() {
    for (int level = 0; level < LEVELS; ++level) runs[level] = -1;
  }
};

struct Found {
  int num_segments = 0;
  int num_members = 0;
  int row_tiles = 0;  // of all that would pay
};

// The runs of a level; false if no two rows share anything more.
DEVICE bool find_level(const Arguments& a, Shared& shared, int level, Row& mine, Found& found,
                       int* members) {
  const int row = threadIdx.x;
  u64 key = FREE;
  if (mine.leader >= 0 && mine.begin < shared.limits[row])
    key = u64(mine.leader) << 32 | u32(a.block(row, (mine.begin + 1) * a.columns() - 1));
  const int leader = first_of(shared.table, key, row);
  const int rank = rank_of(shared.classes.counts, leader, row);
  const int size = leader < 0 ? 0 : shared.classes.counts[leader];
  mine.leader = size > 1 ? leader : -1;
  shared.leaders[row] = mine.leader;
  shared.segment_of[row] = -1;
  if (!__syncthreads_or(mine.leader >= 0)) return false;
  compare(a, shared, mine.begin);

  const int end = mine.leader < 0 ? 0 : shared.classes.common[mine.leader];
  const int tokens = end * a.unit() - mine.own;
  const i64 saved = i64(size - 1) * tokens;
  const bool pays = mine.leader == row && tokens >= MIN_TOKENS && saved >= MIN_SAVED;
  const int row_tiles = (size * a.group_size + a.item_rows - 1) / a.item_rows;
  // Row tiles, members and runs of the rows up to this one.
  const u64 own = pays ? u64(row_tiles) << 32 | u64(size) << 12 | 1 : 0;
  u64 here, all;
  scan(own, shared.sums, int(blockDim.x) / 32, here, all);
  const bool fits = pays && found.row_tiles + int(here >> 32) <= a.max_row_tiles;
  if (fits) {
    const int segment = found.num_segments + int(here & 0xfff) - 1;
    shared.segment_of[row] = segment;
    shared.segments[segment] = {row, mine.own, end * a.unit(), size,
                                found.num_members + int(here >> 12 & 0xfffff) - size, row_tiles};
    atomicAdd(&shared.saved, u64(saved));
  }
  const int num_fitting = __syncthreads_count(fits);
  const int segment = mine.leader < 0 ? -1 : shared.segment_of[mine.leader];
  if (segment >= 0) {
    members[shared.segments[segment].first_member + rank] = row;
    mine.own = shared.segments[segment].end;
    mine.runs[level] = segment;
  }
  mine.begin = end;
  if (num_fitting > 0) {
    const Segment& last = shared.segments[found.num_segments + num_fitting - 1];
    found.num_members = last.first_member + last.num_members;
  }
  found.num_segments += num_fitting;
  found.row_tiles += int(all >> 32);
  return true;
}

// How many splits a run gets if an item has so many tiles.
DEVICE int num_splits(const Segment& segment, int tiles) {
  return min(MAX_SPLITS, (segment.num_tiles() + tiles - 1) / tiles);
}

// Cut the runs so that all CTAs get about as much. Returns the number of items.
DEVICE int split(const Arguments& a, Shared& shared, const Row& mine, int num_segments) {
  i64 tiles = 0;
  for (int i = 0; i < num_segments; ++i)
    tiles += i64(shared.segments[i].row_tiles) * shared.segments[i].num_tiles();
  tiles *= a.num_kv_heads;
  int run = int(max(i64(MIN_RUN), (tiles + a.num_ctas - 1) / a.num_ctas)), count = 0;
  for (int i = 0; i < num_segments; ++i)
    count += shared.segments[i].row_tiles * num_splits(shared.segments[i], run) * a.num_kv_heads;
  if (count > a.num_ctas) run *= 2;  // some would get two short items
  for (int i = threadIdx.x; i < num_segments; i += blockDim.x)
    shared.segments[i].num_splits = num_splits(shared.segments[i], run);
  __syncthreads();
  int first = 0;
#pragma unroll
  for (int level = 0; level < LEVELS; ++level) {
    if (mine.runs[level] < 0) continue;
    Segment& segment = shared.segments[mine.runs[level]];
    if (segment.leader == int(threadIdx.x)) segment.first_state = first;
    first += segment.num_splits;
  }
  int num_items = 0;
  for (int i = 0; i < num_segments; ++i) {
    Segment& segment = shared.segments[i];
    if (threadIdx.x == 0) segment.first_item = num_items;
    num_items += segment.row_tiles * segment.num_splits * a.num_kv_heads;
  }
  __syncthreads();
  return num_items;
}

// A warp for each run.
DEVICE void write_items(const Arguments& a, const Shared& shared, int num_segments, Item* items) {
  for (int i = threadIdx.x / 32; i < num_segments; i += blockDim.x / 32) {
    const Segment& segment = shared.segments[i];
    const int splits = segment.num_splits, tiles = segment.num_tiles();
    const int count = segment.row_tiles * splits * a.num_kv_heads;
    for (int item = threadIdx.x % 32; item < count; item += 32) {
      const int part = item % splits, row_tile = item / splits % segment.row_tiles;
      const int begin = segment.begin + tiles * part / splits * SHARED_TILE;
      const int end = segment.begin + tiles * (part + 1) / splits * SHARED_TILE;
      items[segment.first_item + item] = {segment.leader,
                                          begin,
                                          min(end, segment.end),
                                          item / splits / segment.row_tiles,
                                          segment.first_member,
                                          segment.num_members * a.group_size,
                                          row_tile * a.item_rows,
                                          segment.first_state + part};
    }
  }
}

// Starts no kernel before it has ended: those that follow read the result without waiting for it.
extern "C" __global__ void __launch_bounds__(MAX_ROWS)
    find_prefixes(const int* tables, i64 table_stride, const int* lengths, int* memory, i64 num_rows,
                  i64 block_shift, i64 num_kv_heads, i64 group_size, i64 item_rows, i64 num_ctas,
                  i64 max_row_tiles, i64 max_items, i64 min_saved) {
  __shared__ Shared shared;
  const Arguments a = {tables,          table_stride,   int(num_rows),      int(block_shift), int(num_kv_heads),
                       int(group_size), int(item_rows), int(num_ctas), int(max_row_tiles), int(max_items),
                       min_saved};
  const Prefixes prefixes(memory, int(num_rows));
  const int row = threadIdx.x;
  const int length = row < num_rows ? lengths[row] : 0;
  shared.limits[row] = max(0, length - 1) / a.unit();
  if (row == 0) shared.saved = shared.own_tiles = 0;
  __syncthreads();

  Row mine;
  Found found;
#pragma unroll
  for (int level = 0; level < LEVELS; ++level)
    if (!find_level(a, shared, level, mine, found, prefixes.members)) break;
  atomicAdd(&shared.own_tiles, (length + OWN_TILE - 1) / OWN_TILE - mine.own / OWN_TILE);
  __syncthreads();
  const i64 least = min(a.min_saved, max(a.min_saved / 2, i64(shared.own_tiles) * OWN_TILE));
  const bool pays = shared.saved > 0 && i64(shared.saved) >= least;
  const int num_items = pays ? split(a, shared, mine, found.num_segments) : 0;
  int num_states = 0;
#pragma unroll
  for (int level = 0; level < LEVELS; ++level)
    if (pays && mine.runs[level] >= 0) num_states += shared.segments[mine.runs[level]].num_splits;
  u64 up_to_here, all;
  scan(num_states, shared.sums, int(blockDim.x) / 32, up_to_here, all);
  const int first_state = int(up_to_here) - num_states;
  if (row < num_rows)
    prefixes.rows[row] = pays ? RowPrefix{mine.own / OWN_TILE, first_state << STATES_BITS | num_states}
                              : RowPrefix{0, 0};
  if (row == 0) {
    *prefixes.num_items = num_items;
    *prefixes.arrived = *prefixes.left = memory[3] = 0;
  }
  if (pays) write_items(a, shared, found.num_segments, prefixes.items);
}
