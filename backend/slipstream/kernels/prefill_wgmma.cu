// Paged prefill attention on Hopper's tensor cores, after FlashAttention-3 (Shah et al., 2024): two warpgroups of 64
// query rows attend to tiles of 128 tokens, one multiplies while the other exponentiates; a third fetches.
// -D ELEMENT (T: Half or BFloat16), HEAD_SIZE (64, 128)
#include "prefill_items.cuh"
#include "wgmma.cuh"
#ifndef QREG
#define QREG 0
#endif

constexpr int GROUPS = 2;       // warpgroups that multiply
constexpr int ROWS = 64;        // query rows of each
constexpr int STAGES = 2;       // tiles of K, and of V, in shared memory
constexpr int COLUMNS = HEAD_SIZE / 64;  // of 128 bytes
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int ITEMS = 2;        // handed out, one of them ahead
static_assert(GROUPS * ROWS == ITEM_ROWS);
constexpr int QUERY_COLUMN = ROWS * 128, QUERY_BYTES = COLUMNS * QUERY_COLUMN;
constexpr int TILE_COLUMN = TILE * 128, TILE_BYTES = COLUMNS * TILE_COLUMN;

extern __shared__ __align__(1024) u8 shared_bytes[];

// A warp needs what the barrier guards no more.
DEVICE void release(u32 barrier) {
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// What lies where in shared memory. A barrier's name says whose arrival ends its phase.
struct Shared {
  const u32 base = shared_address(shared_bytes);

  DEVICE u32 queries(int group) const { return base + group * QUERY_BYTES; }
  DEVICE u32 keys(int slot) const { return base + GROUPS * QUERY_BYTES + slot * TILE_BYTES; }
  DEVICE u32 values(int slot) const { return keys(STAGES + slot); }
  DEVICE u32 keys_full(int slot) const { return keys(2 * STAGES) + slot * 8; }
  DEVICE u32 keys_free(int slot) const { return keys_full(STAGES + slot); }
  DEVICE u32 values_full(int slot) const { return keys_full(2 * STAGES + slot); }
  DEVICE u32 values_free(int slot) const { return keys_full(3 * STAGES + slot); }
  DEVICE u32 queries_full(int group) const { return keys_full(4 * STAGES + group); }
  DEVICE u32 queries_free(int group) const { return keys_full(4 * STAGES + GROUPS + group); }
  DEVICE u32 items_full(int slot) const { return keys_full(4 * STAGES + 2 * GROUPS + slot); }
  DEVICE u32 items_free(int slot) const { return items_full(ITEMS + slot); }
  DEVICE Item* item(int slot) const {
    return reinterpret_cast<Item*>(shared_bytes + (items_full(2 * ITEMS) - base)) + slot;
  }

  DEVICE void init() const {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(keys_full(i), 1);
      barrier_init(values_full(i), 1);
      barrier_init(keys_free(i), 4 * GROUPS);  // a lane of each warp
      barrier_init(values_free(i), 4 * GROUPS);
    }
    for (int i = 0; i < GROUPS; ++i) {
      barrier_init(queries_full(i), 32);
      barrier_init(queries_free(i), 4);
    }
    for (int i = 0; i < ITEMS; ++i) {
      barrier_init(items_full(i), 1);
      barrier_init(items_free(i), 4 * GROUPS + 3);  // and of those that fetch K, V and queries
    }
    barrier_init_done();
  }
};

// The items of this CTA, as the scheduling warp hands them out; all lanes of a warp.
class Items {
  const Shared& shared;
  Ring<ITEMS> ring;
  bool has_one = false;

 public:
  DEVICE explicit Items(const Shared& memory) : shared(memory) {}

  // Done with the item before.
  DEVICE bool next(Item& item) {
    if (has_one) {
      release(shared.items_free(ring.slot));
      ring.advance();
    }
    has_one = true;
    barrier_wait(shared.items_full(ring.slot), ring.parity);
    item = *shared.item(ring.slot);
    return item.num_tiles > 0;
  }
};

// One warp.
DEVICE void hand_out_items(const Arguments& a, const Shared& shared) {
  Schedule schedule(a);
  Ring<ITEMS> ring;
  for (bool more = true; more; ring.advance()) {
    const Item item = schedule.next();
    barrier_wait(shared.items_free(ring.slot), ring.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      *shared.item(ring.slot) = item;
      barrier_arrive(shared.items_full(ring.slot));
    }
    more = item.num_tiles > 0;
  }
}

// One warp: tiles of K (or of V, `part` 1), a piece of a page and 64 columns a lane.
DEVICE void fetch_tiles(const Arguments& a, const Shared& shared, const TensorMap* cache, int part) {
  const int lane = threadIdx.x % 32;
  const int column = lane % COLUMNS, piece = lane / COLUMNS;
  const int piece_tokens = min(TILE, 1 << a.block_shift);
  const int piece_bytes = piece_tokens * 128;
  const int offset = column * TILE_COLUMN + piece * piece_bytes;
  const int block_mask = (1 << a.block_shift) - 1;
  Items items(shared);
  Item item;
  Ring<STAGES> ring;
  while (items.next(item)) {
    const int* table = a.block_tables + item.sequence * a.table_stride;
    int token = piece * piece_tokens;
    // Pieces past the sequence's end are not fetched: their tokens are hidden and their values cleared.
    bool inside = token < TILE && token < item.length;
    int block = inside ? table[token >> a.block_shift] : 0;
    for (int tile = 0; tile < item.num_tiles; ++tile) {
      const int bytes = __popc(__ballot_sync(ALL_LANES, inside)) * piece_bytes;
      const int block_row = (block * a.num_kv_heads + item.kv_head) * 2 + part;
      const int row = (block_row << a.block_shift) + (token & block_mask);
      const bool fetched = inside;
      token += TILE;
      inside = piece * piece_tokens < TILE && token < item.length;
      if (inside) block = table[token >> a.block_shift];  // early: the wait below hides it

      const u32 full = part ? shared.values_full(ring.slot) : shared.keys_full(ring.slot);
      barrier_wait(part ? shared.values_free(ring.slot) : shared.keys_free(ring.slot), ring.parity ^ 1);
      if (lane == 0) barrier_expect(full, bytes);
      __syncwarp();
      const u32 target = part ? shared.values(ring.slot) : shared.keys(ring.slot);
      if (fetched) copy_box(target + offset, cache, column * 64, row, full);
      ring.advance();
    }
  }
}

// One warp: the query rows of both groups, zeros where there are none.
DEVICE void fetch_queries(const Arguments& a, const Shared& shared) {
  Items items(shared);
  Item item;
  u32 parity = 1;
  while (items.next(item)) {
    for (int group = 0; group < GROUPS; ++group) {
      barrier_wait(shared.queries_free(group), parity);
      for (int i = threadIdx.x % 32; i < ROWS * COLUMNS * 8; i += 32) {
        const int row = i / (COLUMNS * 8), column = i / 8 % COLUMNS, chunk = i % 8;
        const int flat = item.first_row + group * ROWS + row;
        const int query = flat / a.group_size;
        const int head = item.kv_head * a.group_size + flat - query * a.group_size;
        const bool real = flat < item.num_rows;
        const T* source = a.q;
        if (real) source += (item.start + query) * a.q_stride + head * HEAD_SIZE + column * 64 + chunk * 8;
        const u32 target = shared.queries(group) + column * QUERY_COLUMN + row * 128 + (chunk ^ row % 8) * 16;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                     "r"(real ? 16 : 0)
                     : "memory");
      }
      asm volatile("cp.async.wait_all;" ::: "memory");
      fence_async();
      barrier_arrive(shared.queries_full(group));
    }
    parity ^= 1;
  }
}

// 64 rows of a warpgroup: unnormalised sums, and what the online softmax keeps; rows g and g + 8 of a lane.
class GroupRows {
  static constexpr int STEPS = TILE / 16;
  const int lane = threadIdx.x % 32;
  float scores[TILE / 2];
  float output[HEAD_SIZE / 2];
  u32 probabilities[STEPS][4];
  float maximum[2], total[2], factor[2];

 public:
  DEVICE GroupRows() {
#pragma unroll
    for (int i = 0; i < TILE / 2; ++i) scores[i] = 0.0f;
  }

  DEVICE void reset() {
#pragma unroll
    for (int i = 0; i < HEAD_SIZE / 2; ++i) output[i] = 0.0f;
    maximum[0] = maximum[1] = -INFINITE;
    total[0] = total[1] = 0.0f;
  }

#if QREG
  u32 query[HEAD_SIZE / 16][4];
  DEVICE void load_queries(u32 queries) {
    const int row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < HEAD_SIZE / 16; ++step) {
      const int chunk = step * 2 + lane / 16;
      const u32 address = queries + chunk / 8 * QUERY_COLUMN + row * 128 + (chunk % 8 ^ row % 8) * 16;
      u32(&to)[4] = query[step];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                   : "r"(address)
                   : "memory");
    }
  }
  DEVICE void start_scores(u32 keys) {
    const u64 b = rows_descriptor(keys);
    pin(scores);
    products_begin();
#pragma unroll
    for (int step = 0; step < HEAD_SIZE / 16; ++step)
      multiply(scores, query[step], advance(b, step / 4 * TILE_COLUMN + step % 4 * 32), step > 0, T{});
    products_commit();
  }
#endif

  // Starts scores = Q K^T.
  DEVICE void start_scores(u32 queries, u32 keys) {
    const u64 a = rows_descriptor(queries), b = rows_descriptor(keys);
    pin(scores);
    products_begin();
#pragma unroll
    for (int step = 0; step < HEAD_SIZE / 16; ++step)
      multiply(scores, advance(a, step / 4 * QUERY_COLUMN + step % 4 * 32),
               advance(b, step / 4 * TILE_COLUMN + step % 4 * 32), step > 0, T{});
    products_commit();
  }

  // Starts output += P V.
  DEVICE void start_output(u32 values) {
    const u64 b = columns_descriptor(values, TILE_COLUMN);
    pin(output);
    products_begin();
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
      multiply_add(output, probabilities[step], advance(b, step * 2048), T{});
    products_commit();
  }

  template <int PENDING>
  DEVICE void wait_scores() {
    products_wait<PENDING>();
    pin(scores);
  }
  DEVICE void wait_output() {
    products_wait<0>();
    pin(output);
  }

  // Row h of this lane does not see tokens of the tile past last[h].
  DEVICE void hide(const int (&last)[2]) {
#pragma unroll
    for (int i = 0; i < TILE / 2; ++i)
      if (i / 4 * 8 + i % 2 > last[i / 2 % 2] - lane % 4 * 2) scores[i] = -INFINITE;
  }

  // Scores become exponentials; `factor` is what earlier sums count now.
  DEVICE void exponentiate(float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest[2] = {maximum[half], -INFINITE};
#pragma unroll
      for (int i = 0; i < TILE / 8; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) highest[j] = fmaxf(highest[j], scores[i * 4 + half * 2 + j]);
      float now = fmaxf(highest[0], highest[1]);
      now = fmaxf(now, __shfl_xor_sync(ALL_LANES, now, 1));
      now = fmaxf(now, __shfl_xor_sync(ALL_LANES, now, 2));
      factor[half] = exp2_fast((maximum[half] - now) * scale);
      maximum[half] = now;
      const float base = now * scale;
      float sums[2] = {total[half] * factor[half], 0.0f};
#pragma unroll
      for (int i = 0; i < TILE / 8; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& score = scores[i * 4 + half * 2 + j];
          score = exp2_fast(fmaf(score, scale, -base));
          sums[j] += score;
        }
      total[half] = sums[0] + sums[1];
    }
    // Never so, but a branch: without it the wait for the product that runs meanwhile is moved above all this.
    if (total[0] + total[1] < 0.0f) __nanosleep(1);
  }

  // Exponentials become the next product's operand.
  DEVICE void pack() {
#pragma unroll
    for (int i = 0; i < TILE / 4; ++i)
      probabilities[i / 4][i % 4] = pack_two(scores[2 * i], scores[2 * i + 1], T{});
  }

  DEVICE void rescale() {
#pragma unroll
    for (int i = 0; i < HEAD_SIZE / 2; ++i) output[i] *= factor[i / 2 % 2];
  }

  // Writes row h of this lane to target[h], unless that is null.
  DEVICE void store_rows(T* const (&target)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = total[half];
      sum += __shfl_xor_sync(ALL_LANES, sum, 1);
      sum += __shfl_xor_sync(ALL_LANES, sum, 2);
      const float share = 1.0f / sum;
#pragma unroll
      for (int i = 0; i < HEAD_SIZE / 8; i += 4) {
        Pack<u32, 4> words;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* pair = output + (i + j) * 4 + half * 2;
          words.at[j] = pack_two(pair[0] * share, pair[1] * share, T{});
        }
        transpose(words.at);
        if (target[half])
          store<4>(reinterpret_cast<u32*>(target[half] + (i + lane % 4) * 8), words);
      }
    }
  }

 private:
  // word j of lane t and word t of lane j change places, in every four lanes: 8 columns in one lane.
  DEVICE void transpose(u32 (&words)[4]) const {
#pragma unroll
    for (int mask = 1; mask <= 2; mask *= 2) {
      const bool high = lane & mask;
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int low = mask == 1 ? pair * 2 : pair;
        const u32 mine = high ? words[low] : words[low + mask];
        const u32 other = __shfl_xor_sync(ALL_LANES, mine, mask);
        if (high)
          words[low] = other;
        else
          words[low + mask] = other;
      }
    }
  }
};

// The group's turn to start products: until it ends, the other exponentiates.
DEVICE void turn_begin(int group) { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
DEVICE void turn_end(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory"); }

// What lies past the sequence's end may be NaN, and 0 * NaN is: zeros there, from token `first` of the tile on.
DEVICE void clear_values(u32 values, int first, int group) {
  for (int i = threadIdx.x % 128; i < (TILE - first) * COLUMNS * 8; i += 128) {
    const int row = first + i / 8 / COLUMNS, column = i / 8 % COLUMNS;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(values + column * TILE_COLUMN + row * 128 +
                                                                  i % 8 * 16),
                 "r"(0)
                 : "memory");
  }
  fence_async();
  asm volatile("bar.sync %0, 128;" ::"r"(3 + group) : "memory");
}

DEVICE void attend(const Arguments& a, const Shared& shared, int group) {
  const int own = group * ROWS + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;  // first row of this lane
  Items items(shared);
  Item item;
  Ring<STAGES> keys, values;
  u32 parity = 0;
  GroupRows rows;
  if (group == 1) turn_end(group);
  for (bool more = items.next(item); more;) {
    const int lowest = item.position + (item.first_row + group * ROWS) / a.group_size;
    const int position[2] = {item.position + (item.first_row + own) / a.group_size,
                             item.position + (item.first_row + own + 8) / a.group_size};
    const auto softmax = [&](int tile) {  // of scores that are there
      release(shared.keys_free(keys.slot));
      keys.advance();
#if !QREG
      if (tile == item.num_tiles - 1) release(shared.queries_free(group));
#endif
      const int first = tile * TILE;
      if (first + TILE - 1 > lowest) rows.hide({position[0] - first, position[1] - first});
      rows.exponentiate(a.scale);
    };
    barrier_wait(shared.queries_full(group), parity);
    parity ^= 1;
    barrier_wait(shared.keys_full(keys.slot), keys.parity);
#if QREG
    rows.load_queries(shared.queries(group));
    rows.start_scores(shared.keys(keys.slot));
    release(shared.queries_free(group));
#else
    rows.start_scores(shared.queries(group), shared.keys(keys.slot));
#endif
    rows.reset();
    rows.wait_scores<0>();
    softmax(0);
    rows.pack();
    for (int tile = 1; tile < item.num_tiles; ++tile) {  // scores of this tile, output of the one before
      barrier_wait(shared.keys_full(keys.slot), keys.parity);
      turn_begin(group);
#if QREG
      rows.start_scores(shared.keys(keys.slot));
#else
      rows.start_scores(shared.queries(group), shared.keys(keys.slot));
#endif
      barrier_wait(shared.values_full(values.slot), values.parity);
      rows.start_output(shared.values(values.slot));
      turn_end(group);
      rows.wait_scores<1>();
      softmax(tile);
      rows.wait_output();
      release(shared.values_free(values.slot));
      values.advance();
      rows.pack();
      rows.rescale();
    }
    barrier_wait(shared.values_full(values.slot), values.parity);
    const int end = item.length - (item.num_tiles - 1) * TILE;
    if (end < TILE) clear_values(shared.values(values.slot), end, group);
    rows.start_output(shared.values(values.slot));
    T* target[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = item.first_row + own + half * 8, query = row / a.group_size;
      const i64 head = item.kv_head * a.group_size + row - query * a.group_size;
      T* const place = a.out + (item.start + query) * a.out_stride + head * HEAD_SIZE;
      target[half] = row < item.num_rows ? place : nullptr;
    }
    more = items.next(item);
    rows.wait_output();
    release(shared.values_free(values.slot));
    values.advance();
    rows.store_rows(target);
  }
}

// Grid: any.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_wgmma(const __grid_constant__ TensorMap cache, const T* q, i64 q_stride,
                  const int* block_tables, i64 table_stride, const int* query_starts,
                  const int* lengths, T* out, i64 out_stride, u32* counter, float scale, i64 num_sequences,
                  i64 num_kv_heads, i64 group_size, i64 block_shift) {
  const Arguments a = {q, q_stride, block_tables, table_stride, query_starts, lengths, out, out_stride, counter, scale,
                       int(num_sequences), int(num_kv_heads), int(group_size), int(block_shift)};
  const Shared shared;
  if (threadIdx.x == 0) {
    prefetch_map(&cache);
    shared.init();
  }
  __syncthreads();
  wait_for_previous();
  start_next();
  const int group = __shfl_sync(ALL_LANES, int(threadIdx.x) / 128, 0) - 1;  // known to be the same in a warp
  if (group >= 0) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    attend(a, shared, group);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const int warp = __shfl_sync(ALL_LANES, int(threadIdx.x) / 32, 0);
    if (warp < 2)
      fetch_tiles(a, shared, &cache, warp);
    else if (warp == 2)
      fetch_queries(a, shared);
    else
      hand_out_items(a, shared);
  }
}
