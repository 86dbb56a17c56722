// A CTA's items of what sequences share: each warp attends 16 query rows to tiles that all warps read (FlashAttention-2;
// Dao, 2023). The rings lend their memory; what is left for each query row is its state.
// -D ELEMENT (T: 16 bits), HEAD_SIZE, WARPS, SLOTS, ROTATES
#pragma once
#include "decode_heads.cuh"

constexpr int SHARED_BYTES = SHARED_TILE * ROW_BYTES;  // of a tile's K, or V
constexpr int STAGES_THERE = WARPS * RING_BYTES / (2 * SHARED_BYTES);
constexpr int STAGES = STAGES_THERE < 4 ? STAGES_THERE : 4;
constexpr int AHEAD = 1;  // tiles of a worker: of 8 on 132 SMs, with 128 dimensions, 17 MB
static_assert(STAGES >= 2, "one tile is read, the next is on its way");

// 16 query rows of a warp.
class PrefixRows {
  const int lane = threadIdx.x % 32;
  u32 query[STEPS][4];
  float output[CHUNKS][4];  // rows g and g + 8, each of dimensions 2t, 2t + 1 of every chunk
  float maximum[2];         // of rows g and g + 8
  float total[2];           // this lane's share: its tokens

  // Elements 2t, 2t + 1 of a chunk of row g + 8 half.
  DEVICE u32& pair(int half, int chunk) { return query[chunk / 2][half + chunk % 2 * 2]; }

 public:
  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) output[i][j] = 0.0f;
    maximum[0] = maximum[1] = -INFINITE;
    total[0] = total[1] = 0.0f;
  }
  // Row g + 8 half; null: there is none. `angles` only if ROTATES.
  DEVICE void load(int half, const T* head, const float* angles) {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
      pair(half, i) =
          head ? load_fresh<1>(reinterpret_cast<const u32*>(head + i * 8 + lane % 4 * 2)).at[0] : 0;
    if (!ROTATES || head == nullptr) return;
    const float* own = angles + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < CHUNKS / 2; ++i)
      rotate_pairs(pair(half, i), pair(half, i + CHUNKS / 2), ::load<2>(own + i * 8),
                   ::load<2>(own + HEAD_SIZE / 2 + i * 8));
  }

  // The first `count` tokens of a tile; one at least.
  DEVICE void attend(u32 keys, u32 values, int count, float scale) {
    float scores[SHARED_TILE / 8][4];
    score(scores, keys);
#pragma unroll
    for (int i = 0; i < SHARED_TILE / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[i][j] *= scale;
    if (count < SHARED_TILE) {
#pragma unroll
      for (int i = 0; i < SHARED_TILE / 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (i * 8 + lane % 4 * 2 + j % 2 >= count) scores[i][j] = -INFINITE;
    }
    exponentiate(scores);
    accumulate(scores, values);
  }

  DEVICE void sum_totals() {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2)
        total[half] += __shfl_xor_sync(ALL_LANES, total[half], mask);
  }
  DEVICE void store(int half, State& state) const {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
      ::store<2>(state.output + i * 8 + lane % 4 * 2,
                 Pack<float, 2>{output[i][half * 2], output[i][half * 2 + 1]});
    if (lane % 4 == 0) ::store<2>(&state.maximum, Pack<float, 2>{maximum[half], total[half]});
  }

 private:
  // Q K^T: rows g and g + 8, each of tokens 2t, 2t + 1 of every eight.
  DEVICE void score(float (&scores)[SHARED_TILE / 8][4], u32 keys) const {
#pragma unroll
    for (int i = 0; i < SHARED_TILE / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[i][j] = 0.0f;
    const u32 own = keys + chunk_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int i = 0; i < SHARED_TILE / 16; ++i) {
        u32 key[4];  // tokens 0-7: dimensions 0-7, 8-15; tokens 8-15: the same
        load_matrices(key, at_step(own, step) + i * 16 * ROW_BYTES);
        multiply_add(scores[i * 2], query[step], key[0], key[1], T{});
        multiply_add(scores[i * 2 + 1], query[step], key[2], key[3], T{});
      }
  }

  // Scores become exponentials; what was summed so far is rescaled.
  DEVICE void exponentiate(float (&scores)[SHARED_TILE / 8][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = maximum[half];
#pragma unroll
      for (int i = 0; i < SHARED_TILE / 8; ++i)
        highest = fmaxf(highest, fmaxf(scores[i][half * 2], scores[i][half * 2 + 1]));
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2)
        highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, mask));
      const float factor = exp2_fast(maximum[half] - highest);
      maximum[half] = highest;
      total[half] *= factor;
#pragma unroll
      for (int i = 0; i < CHUNKS; ++i) {
        output[i][half * 2] *= factor;
        output[i][half * 2 + 1] *= factor;
      }
#pragma unroll
      for (int i = 0; i < SHARED_TILE / 8; ++i)
#pragma unroll
        for (int j = half * 2; j < half * 2 + 2; ++j) {
          scores[i][j] = exp2_fast(scores[i][j] - highest);
          total[half] += scores[i][j];
        }
    }
  }

  // output += P V
  DEVICE void accumulate(const float (&scores)[SHARED_TILE / 8][4], u32 values) {
    const u32 own = values + chunk_offset(lane % 8 + lane / 8 % 2 * 8, lane / 16);
#pragma unroll
    for (int i = 0; i < SHARED_TILE / 16; ++i) {
      const float(&low)[4] = scores[i * 2];
      const float(&high)[4] = scores[i * 2 + 1];
      const u32 weights[4] = {pack_pair(low[0], low[1]), pack_pair(low[2], low[3]),
                              pack_pair(high[0], high[1]), pack_pair(high[2], high[3])};
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        u32 value[4];  // dimensions 0-7: tokens 0-7, 8-15; dimensions 8-15: the same
        load_transposed(value, at_step(own, step) + i * 16 * ROW_BYTES);
        multiply_add(output[step * 2], weights, value[0], value[1], T{});
        multiply_add(output[step * 2 + 1], weights, value[2], value[3], T{});
      }
    }
  }
};

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
  int block;  // in lane i: where piece i of the next tile lies

 public:
  DEVICE SharedTiles(const Cache& cache, u8* memory, const Item& item)
      : cache(cache), memory(memory), item(item), first(item.begin) {
    find_block();
  }

  DEVICE u32 keys(int stage) const { return shared_address(memory) + stage * 2 * SHARED_BYTES; }
  DEVICE u32 values(int stage) const { return keys(stage) + SHARED_BYTES; }

  // The next tile, if there is one. Tokens past the end become zeros: what their memory holds meets no arithmetic.
  DEVICE void start_copy(int stage) {
    if (first < item.end) {
      const i64 piece = cache.offset(block, own_token(), item.head);
      u8* slot = memory + stage * 2 * SHARED_BYTES;
#pragma unroll 2
      for (int step = 0; step < (COPIES + AT_ONCE - 1) / AT_ONCE; ++step) {
        const int i = threadIdx.x + step * AT_ONCE, token = i / CHUNKS;
        const T* source = cache.memory + __shfl_sync(ALL_LANES, piece, token / PIECE) +
                          token % PIECE * HEAD_SIZE + i % CHUNKS * 8;
        if (COPIES % AT_ONCE != 0 && i >= COPIES) continue;
        T* target = reinterpret_cast<T*>(slot + chunk_offset(token, i % CHUNKS));
        copy_async(target, source, first + token < item.end);
        copy_async(target + SHARED_BYTES / 2, source + cache.from_k_to_v(), first + token < item.end);
      }
      first += SHARED_TILE;
      find_block();
    }
    copy_commit();
  }

 private:
  DEVICE int own_token() const { return first + lane * PIECE; }
  DEVICE void find_block() {
    const bool exists = lane * PIECE < SHARED_TILE && own_token() < item.end;
    block = exists ? cache.block(item.leader, own_token()) : 0;
  }
};

// While products are computed memory would be idle: a worker's first pieces of its own come to the L2 cache meanwhile,
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
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int num_done = 0;
  for (int i = blockIdx.x; i < num_items; i += gridDim.x, ++num_done) {
    const Item item = read(prefixes.items + i);
    __syncthreads();  // the tiles of the item before are read
    SharedTiles tiles(cache, memory, item);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) tiles.start_copy(stage);
    // Who its query rows are of was found before the kernels that are waited for.
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
      const int state = (load_fresh<1>(&prefixes.rows[row].states).at[0] >> STATES_BITS) + item.state;
      targets[half] = states + i64(state) * heads.all_queries() + query;
      heads_of[half] = inputs.q + row * inputs.q_stride + query * HEAD_SIZE;
      angles[half] = inputs.angles({row, load_fresh<1>(lengths + row).at[0]});
    }
    wait_for_previous();
    PrefixRows rows;
    rows.clear();
#pragma unroll
    for (int half = 0; half < 2; ++half) rows.load(half, heads_of[half], angles[half]);
    const int num_tokens = item.end - item.begin;
    int stage = 0, next = STAGES - 1;
    for (int begin = 0; begin < num_tokens; begin += SHARED_TILE) {
      copy_wait<STAGES - 2>();
      __syncthreads();  // this tile is there, and the one before is read: its stage takes the next copy
      tiles.start_copy(next);
      ahead.fetch(cache.from_k_to_v());
      if (first < item.num_rows)
        rows.attend(tiles.keys(stage), tiles.values(stage), num_tokens - begin, scale);
      next = stage;
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
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
