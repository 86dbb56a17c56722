// Paged prefill attention on Hopper's tensor cores, after FlashAttention-3 (Shah et al., 2024): two warpgroups of 64
// query rows attend to tiles of tokens, one multiplies while the other exponentiates; a third fetches.
// -D ELEMENT (T: Half or BFloat16), HEAD_SIZE (64, 128, 256), TILE (tokens), SPLITS (1: several CTAs may share
// an item, which makes the others a little slower; not of wide heads, whose sums leave no registers to add others)
#include "attention/sm90/prefill_parts.cuh"

constexpr int GROUPS = 2;  // warpgroups that multiply, of ROWS query rows each
constexpr int STAGES = 2;  // tiles of K, and of V, in shared memory
constexpr int ITEMS = 2;   // handed out, one of them ahead
constexpr int THREADS = 128 * (GROUPS + 1);
static_assert(GROUPS * ROWS == ITEM_ROWS);

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
  Ring<ITEMS> ring{~0u};

 public:
  DEVICE explicit Items(const Shared& memory) : shared(memory) {}

  // The next one, null after the last. The one before may be overwritten from now on.
  DEVICE const Item* next() {
    const int before = ring.slot();
    ring.advance();
    if (ring.count > 0) release(shared.items_free(before));
    barrier_wait(shared.items_full(ring.slot()), ring.parity());
    return current().end > 0 ? &current() : nullptr;
  }

  DEVICE u32 number() const { return ring.count; }
  DEVICE const Item& current() const { return *shared.item(ring.slot()); }
};

// One warp.
DEVICE void hand_out_items(const Arguments& a, const Shared& shared) {
  Schedule schedule(a);
  Ring<ITEMS> ring;
  for (bool more = true; more; ring.advance()) {
    const Item item = schedule.next();
    barrier_wait(shared.items_free(ring.slot()), ring.parity() ^ 1);
    if (threadIdx.x % 32 == 0) {
      *shared.item(ring.slot()) = item;
      barrier_arrive(shared.items_full(ring.slot()));
    }
    more = item.end > 0;
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
  Ring<STAGES> ring;
  while (const Item* next = items.next()) {
    const Item item = *next;
    const int* table = a.block_tables + item.sequence * a.table_stride;
    int token = item.begin() * TILE + piece * piece_tokens;
    // Pieces past the sequence's end are not fetched: their tokens are hidden and their values cleared.
    bool inside = piece * piece_tokens < TILE && token < item.length;
    int block = inside ? table[token >> a.block_shift] : 0;
    for (int tile = item.begin(); tile < item.end; ++tile) {
      const int bytes = __popc(__ballot_sync(ALL_LANES, inside)) * piece_bytes;
      const int block_row = (block * a.num_kv_heads + item.kv_head) * 2 + part;
      const int row = (block_row << a.block_shift) + (token & block_mask);
      const bool fetched = inside;
      token += TILE;
      inside = piece * piece_tokens < TILE && token < item.length;
      if (inside) block = table[token >> a.block_shift];  // early: the wait below hides it

      const u32 full = part ? shared.values_full(ring.slot()) : shared.keys_full(ring.slot());
      barrier_wait(part ? shared.values_free(ring.slot()) : shared.keys_free(ring.slot()), ring.parity() ^ 1);
      if (lane == 0) barrier_expect(full, bytes);
      __syncwarp();
      const u32 target = part ? shared.values(ring.slot()) : shared.keys(ring.slot());
      if (fetched) copy_box(target + offset, cache, column * 64, row, full);
      ring.advance();
    }
  }
}

// One warp: the query rows of both groups, zeros where there are none.
DEVICE void fetch_queries(const Arguments& a, const Shared& shared) {
  constexpr int CHUNKS = COLUMNS * 8;    // of 16 bytes, in a row
  constexpr int PERIOD = CHUNKS / 4;     // copies of the warp that make 8 rows, after which the swizzle repeats
  const int lane = threadIdx.x % 32, chunk = lane % CHUNKS;
  u32 swizzled[PERIOD];
#pragma unroll
  for (int i = 0; i < PERIOD; ++i) {
    const int row = i * (32 / CHUNKS) + lane / CHUNKS;
    swizzled[i] = chunk / 8 * QUERY_COLUMN + row * 128 + (chunk ^ row) % 8 * 16;
  }
  Items items(shared);
  while (const Item* next = items.next()) {
    const Item item = *next;
    for (int part = 0; part < ITEM_ROWS; part += 32) {
      const int group = part / ROWS;
      const int own = item.first_row + part + lane, query = own / a.group_size;
      const i64 head = item.kv_head * a.group_size + own - query * a.group_size;
      const i64 offset = (item.start + query) * a.q_stride + head * HEAD_SIZE;
      const u32 mine = own < item.num_rows ? u32(offset / 8) : NOWHERE;
      const u32 target = shared.queries(group) + part % ROWS * 128;
      if (part % ROWS == 0) barrier_wait(shared.queries_free(group), items.number() % 2 ^ 1);
#pragma unroll
      for (int i = 0; i < CHUNKS; ++i) {
        const u32 place = __shfl_sync(ALL_LANES, mine, i * (32 / CHUNKS) + lane / CHUNKS);
        const T* source = a.q + i64(place == NOWHERE ? 0 : place + chunk) * 8;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target + swizzled[i % PERIOD] +
                                                                           i / PERIOD * 1024),
                     "l"(source), "r"(place == NOWHERE ? 0 : 16)
                     : "memory");
      }
      if (part % ROWS == ROWS - 32) barrier_arrive_copied(shared.queries_full(group));
    }
  }
}

// The group's turn to start GEMMs: until it ends, the other exponentiates.
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

// A warpgroup's rows of one item after the other. The scores of a tile are multiplied while the one before becomes
// output; that goes on over the end of an item, unless that is a part.
class Attention {
  const Arguments& a;
  const Shared& shared;
  const int group;
  const int own = group * ROWS + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;  // first row of this lane
  Items items;
  Ring<STAGES> keys, values;
  GroupRows rows;
  int begin = 0, end, lowest, position[2];  // of the item, the group's first row, this lane's rows
  bool ends_half;  // only the first half of the last tile is seen
  u32 target[2];                       // of this lane's rows

  // The next item, if there is one, is the one to attend to.
  DEVICE bool take() {
    const Item* item = items.next();
    if (!item) return false;
    begin = item->begin();
    end = item->end;
    const int last_row = min(item->first_row + ITEM_ROWS, item->num_rows) - 1;
    const int last = item->position + last_row / a.group_size;
    ends_half = __shfl_sync(ALL_LANES, last % TILE < TILE / 2 && (!SPLITS || last / TILE < end), 0);
    lowest = item->position + (item->first_row + group * ROWS) / a.group_size;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      position[half] = item->position + (item->first_row + own + half * 8) / a.group_size;
    return true;
  }

  // Where its output goes.
  DEVICE void aim() {
    const Item& item = items.current();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = item.first_row + own + half * 8, query = row / a.group_size;
      const i64 head = item.kv_head * a.group_size + row - query * a.group_size;
      const i64 place = (item.start + query) * a.out_stride + head * HEAD_SIZE;
      target[half] = row < item.num_rows ? u32(place / 8) : NOWHERE;
    }
  }

  // The item's queries and first keys are there.
  DEVICE void start_item() {
    barrier_wait(shared.queries_full(group), items.number() % 2);
    rows.load_queries(shared.queries(group));
    barrier_wait(shared.keys_full(keys.slot()), keys.parity());
  }

  // Of scores that are there.
  template <int TOKENS>
  DEVICE void softmax(int tile) {
    release(shared.keys_free(keys.slot()));
    keys.advance();
    const int first = tile * TILE;
    if (first + TOKENS - 1 > lowest) rows.hide<TOKENS>({position[0] - first, position[1] - first});
    rows.exponentiate<TOKENS>(a.scale);
  }

  DEVICE void finish_output() {
    rows.wait_output();
    release(shared.values_free(values.slot()));
    values.advance();
  }

  // The scores of a tile, of which the first TOKENS are seen, and the output of the one before.
  template <int TOKENS>
  DEVICE void step(int tile) {
    barrier_wait(shared.keys_full(keys.slot()), keys.parity());
    turn_begin(group);
    rows.start_scores(shared.keys(keys.slot()));
    barrier_wait(shared.values_full(values.slot()), values.parity());
    rows.start_output<TILE>(shared.values(values.slot()));
    turn_end(group);
    rows.wait_scores<1>();
    softmax<TOKENS>(tile);
    finish_output();
    rows.pack<TOKENS>();
    rows.rescale();
  }

  // From the first tile's probabilities to the last's.
  DEVICE void attend() {
    const int whole = ends_half ? end - 1 : end;
    for (int tile = begin + 1; tile < whole; ++tile) step<TILE>(tile);
    if (ends_half && end > begin + 1) step<TILE / 2>(end - 1);
    if (QUERIES_STAY) release(shared.queries_free(group));
    aim();
    barrier_wait(shared.values_full(values.slot()), values.parity());
    const int real = items.current().length - (end - 1) * TILE;
    if (real < (ends_half ? TILE / 2 : TILE)) clear_values(shared.values(values.slot()), real, group);
  }

  // The first scores of an item, and the last output of the one before, to which TOKENS of a tile contribute.
  template <int TOKENS>
  DEVICE void change() {
    start_item();
    turn_begin(group);
    rows.start_scores(shared.keys(keys.slot()));
    release(shared.queries_free(group));
    rows.start_output<TOKENS>(shared.values(values.slot()));
    turn_end(group);
    rows.wait_scores<1>();
    const float totals[2] = {rows.total[0], rows.total[1]};
    rows.restart();
    softmax<TILE>(begin);
    finish_output();
    rows.store_rows(a.out, target, totals);
    rows.clear_output();
    rows.pack<TILE>();
  }

  // The first scores of an item, with nothing left of one before.
  DEVICE void start() {
    if (QUERIES_STAY) rows.clear_scores();  // no register keeps them from one item to the next
    start_item();
    rows.start_scores(shared.keys(keys.slot()));
    if (!QUERIES_STAY) release(shared.queries_free(group));
    rows.wait_scores<0>();
    softmax<TILE>(begin);
    rows.pack<TILE>();
  }

  // The last output of the last item, to which TOKENS of a tile contribute.
  template <int TOKENS>
  DEVICE void finish() {
    rows.start_output<TOKENS>(shared.values(values.slot()));
    finish_output();
    rows.store_rows(a.out, target, rows.total);
  }

  // The last output of a part, or of an item with which no scores of the next go.
  DEVICE void finish_apart() {
    if (ends_half)
      rows.start_output<TILE / 2>(shared.values(values.slot()));
    else
      rows.start_output<TILE>(shared.values(values.slot()));
    finish_output();
#if SPLITS
    if (merge(a, items.current(), group * 4 + threadIdx.x % 128 / 32, rows))
#endif
      rows.store_rows(a.out, target, rows.total);
    rows.clear_output();
    rows.restart();
  }

 public:
  DEVICE Attention(const Arguments& arguments, const Shared& memory, int number)
      : a(arguments), shared(memory), group(number), items(memory) {}

  DEVICE void run() {
    if (group == 1) turn_end(group);
    if (!take()) return;
    start();
    for (;;) {
      attend();
#if SPLITS
      const bool ends_apart = items.current().parts > 1;
#else
      constexpr bool ends_apart = QUERIES_STAY;
#endif
      if (ends_apart) {
        finish_apart();
        if (!take()) return;
        start();
        continue;
      }
      const bool ended_half = ends_half;  // take() leaves it where there is no next item
      if (!take()) break;
      if (ended_half)
        change<TILE / 2>();
      else
        change<TILE>();
    }
    if (ends_half)
      finish<TILE / 2>();
    else
      finish<TILE>();
  }
};

// Grid: any.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_wgmma(const __grid_constant__ TensorMap cache, const T* q, i64 q_stride,
                  const int* block_tables, i64 table_stride, const int* query_starts,
                  const int* lengths, T* out, i64 out_stride, u32* counters, float scale, i64 num_sequences,
                  i64 num_kv_heads, i64 group_size, i64 block_shift
#if SPLITS
                  ,
                  float* parts
#endif
    ) {
#if !SPLITS
  float* const parts = nullptr;
#endif
  const Arguments a = {q, q_stride, block_tables, table_stride, query_starts, lengths, out, out_stride, counters, scale,
                       int(num_sequences), int(num_kv_heads), int(group_size), int(block_shift), parts};
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
    Attention(a, shared, group).run();
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
