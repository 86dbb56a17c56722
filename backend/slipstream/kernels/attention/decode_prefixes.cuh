// A CTA's items of what sequences share: each warp attends 16 query rows to tiles that all warps read. The rings lend
// their memory; what is left for each query row is its state.
// -D ELEMENT (T: 16 bits), HEAD_SIZE, WARPS, SLOTS, ROTATES
#pragma once
#include "attention/decode_rows.cuh"

constexpr int SHARED_BYTES = SHARED_TILE * ROW_BYTES;  // of a tile's K, or V
constexpr int STAGES_THERE = (WARPS * RING_BYTES - QUERY_BYTES) / (2 * SHARED_BYTES);
constexpr int STAGES = STAGES_THERE < MOST_STAGES ? STAGES_THERE : MOST_STAGES;
static_assert(STAGES > TILES_READ, "some are read, the next is on its way");
constexpr int AHEAD = 1;  // tiles of a worker: of 8 on 132 SMs, with 128 dimensions, 17 MB

// Tiles of an item on their way to shared memory, by all threads.
class SharedTiles {
  static constexpr int COPIES = SHARED_TILE * CHUNKS;
  static constexpr int AT_ONCE = 32 * WARPS;
  static_assert(SHARED_TILE / PIECE <= 32, "a lane for each piece");
  const Cache& cache;
  u8* const memory;
  const Item& item;
  const int lane = threadIdx.x % 32;
  int first;  // token of the next tile
  int block;  // in lane i: of piece i of the next tile

 public:
  static constexpr int COPY_PARTS = (COPIES + AT_ONCE - 1) / AT_ONCE;
  static constexpr int FETCHED = STAGES - 1;  // tiles that are there, or on their way, when one is attended to

  DEVICE SharedTiles(const Cache& cache, u8* memory, const Item& item)
      : cache(cache), memory(memory), item(item), first(item.begin) {
    find_block();
  }

  DEVICE u32 keys(int stage) const { return shared_address(memory) + stage * 2 * SHARED_BYTES; }
  DEVICE u32 values(int stage) const { return keys(stage) + SHARED_BYTES; }

  DEVICE u32 queries() const { return keys(STAGES); }  // of QUERY_BYTES
  DEVICE static int after(int stage) { return stage + 1 == STAGES ? 0 : stage + 1; }

  // Starts to copy the next tile, if there is one, in parts, then what comes after them. Tokens past the end become
  // zeros: what their memory holds meets no arithmetic.
  DEVICE void start_part(int stage, int part) const {
    const int i = threadIdx.x + part * AT_ONCE, token = i / CHUNKS;
    if (first >= item.end || part * AT_ONCE >= COPIES) return;
    const int own_block = __shfl_sync(ALL_LANES, block, token / PIECE % 32);
    const T* source = cache.memory + cache.offset(own_block, first + token, item.head) + i % CHUNKS * 8;
    if (COPIES % AT_ONCE != 0 && i >= COPIES) return;
    T* target = reinterpret_cast<T*>(memory + stage * 2 * SHARED_BYTES + shared_offset(token, i % CHUNKS));
    copy_async(target, source, first + token < item.end);
    copy_async(target + SHARED_BYTES / 2, source + cache.from_k_to_v(), first + token < item.end);
  }
  DEVICE void finish_parts() {
    copy_commit();
    first += SHARED_TILE;
    find_block();
  }
  DEVICE void start_copy(int stage) {
#pragma unroll 2
    for (int part = 0; part < COPY_PARTS; ++part) start_part(stage, part);
    finish_parts();
  }

 private:
  // Beyond the last token as of that.
  DEVICE void find_block() { block = cache.block(item.leader, min(first + lane * PIECE, item.end - 1)); }
};

// While GEMMs are computed memory would be idle: a worker's first pieces of its own come to the L2 cache meanwhile,
// a few at a time, so that nothing else has to wait behind them.
class Ahead {
  static_assert(AHEAD * PIECES <= 32, "a lane for each piece");
  static constexpr int LINE = 64;  // elements
  const int lane = threadIdx.x % 32;
  const T* place = nullptr;  // K of piece number `lane`, if there is one
  int next = 0;

 public:
  DEVICE Ahead(const Cache& cache, Cursor cursor, int count, int num_heads) {
    for (int i = 0; i < min(count, AHEAD); ++i) {
      const int token = cursor.tile * TILE + lane % PIECES * PIECE;
      if (lane / PIECES == i && token < cursor.now.length)
        place = cache.memory +
                cache.offset(cache.block(cursor.now.row, token), token, cursor.head / cache.parts);
      cursor.advance(num_heads);
    }
  }

  // One piece of K and of V.
  DEVICE void fetch(i64 from_k_to_v) {
    if (next == AHEAD * PIECES) return;
    const u64 source = __shfl_sync(ALL_LANES, reinterpret_cast<u64>(place), next);
    ++next;
    const int at = lane % 16 * LINE;
    if (source == 0 || at >= PIECE * HEAD_SIZE) return;
    prefetch(reinterpret_cast<const T*>(source) + at + (lane < 16 ? 0 : from_k_to_v));
  }
};

// This CTA's items. What rows of q hold is of the kernel in front; what sequences share is from earlier steps.
DEVICE void attend_items(const Prefixes& prefixes, int num_items, const Heads& heads, const Inputs& inputs,
                         const Cache& cache, const int* lengths, Ahead ahead, u8* memory, State* states,
                         float scale) {
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(ALL_LANES, int(threadIdx.x) / 32, 0);  // known to be the same in a warp
  int num_done = 0;
  for (int i = blockIdx.x; i < num_items; i += gridDim.x, ++num_done) {
    const Item item = read(prefixes.items + i);
    __syncthreads();  // the tiles of the item before are read
    SharedTiles tiles(cache, memory, item);
#pragma unroll
    for (int stage = 0; stage < SharedTiles::FETCHED; ++stage) tiles.start_copy(stage);
    // The sequences of its query rows were found before the kernels that are waited for.
    const T* heads_of[2] = {nullptr, nullptr};
    const float* angles[2] = {nullptr, nullptr};
    State* targets[2] = {nullptr, nullptr};
    const int first = item.first_row + warp * 16;  // of this warp
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = first + half * 8 + lane / 4;
      if (own >= item.num_rows) continue;
      const int member = own / heads.group, query = item.head * heads.group + own - member * heads.group;
      const int row = load_fresh<1>(prefixes.members + item.first_member + member).at[0];
      const RowPrefix prefix = {0, load_fresh<1>(&prefixes.rows[row].states).at[0]};
      const int state = prefix.first_state() + item.state;
      targets[half] = states + i64(state) * heads.all_queries() + query;
      heads_of[half] = inputs.q + row * inputs.q_stride + query * HEAD_SIZE;
      angles[half] = inputs.angles({row, load_fresh<1>(lengths + row).at[0]});
    }
    wait_for_previous();
    PrefixRows rows(tiles.queries());
#pragma unroll
    for (int half = 0; half < 2; ++half) rows.load(half, heads_of[half], angles[half]);
    const bool has_rows = item.first_row + warp / ROW_WARPS * ROW_WARPS * 16 < item.num_rows;
    rows.attend(tiles, has_rows, item.end - item.begin, scale, [&] { ahead.fetch(cache.from_k_to_v()); });
    rows.sum_totals();
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (targets[half] != nullptr) rows.store(half, *targets[half]);
  }
  __syncthreads();
  if (threadIdx.x == 0 && num_done > 0) {
    __threadfence();
    atomicAdd(prefixes.arrived, num_done);
  }
}

// By a warp: all states are there.
DEVICE void wait_for_items(const Prefixes& prefixes, int num_items) {
  if (threadIdx.x % 32 == 0)
    while (load_acquire(prefixes.arrived) != num_items) __nanosleep(20);
  __syncwarp();
}
// By one thread of every CTA, when none of its warps waits any more.
DEVICE void leave_items(const Prefixes& prefixes) {
  if (atomicAdd(prefixes.left, 1) != int(gridDim.x) - 1) return;
  *prefixes.arrived = 0;
  *prefixes.left = 0;
}
