// A worker's private ring of slots in shared memory, through which its tiles pass: K, V, K, V, ...
// -D ELEMENT (T: 16 bits), HEAD_SIZE, TILE, SLOTS, ROTATES (1: the newest tokens come past the cache), WINDOWED, SINKS,
// FORMAT
#pragma once
#include "runtime/copies.cuh"
#include "attention/decode_plan.cuh"
#include "cache/kv_format.cuh"

constexpr int PIECE = FORMAT == 0 ? 8 : 16;  // tokens that surely lie in one block
constexpr int PIECES = TILE / PIECE;         // of a tile
constexpr int LANES = 32 / PIECES;           // that know where a piece lies
constexpr int CHUNKS = ROW_CELLS * int(sizeof(Cell)) / 16;  // 16-byte accesses of a token
constexpr int STEPS = HEAD_SIZE / 16;   // of two chunks: a fragment's columns
// Eight tokens of one column of chunks must lie in different banks: rows of 2, 4, 8, 16, 32 chunks are swizzled, others
// are an odd number of chunks, or padded to one.
constexpr bool SWIZZLED = (CHUNKS & (CHUNKS - 1)) == 0;
constexpr int ROW_BYTES = CHUNKS * 16 + (SWIZZLED || CHUNKS % 2 == 1 ? 0 : 16);
enum : int { SCALES_AT = TILE * ROW_BYTES };  // in a slot, of quantised tokens
constexpr int SLOT_ALIGNMENT = SWIZZLED && ROW_BYTES > 128 ? ROW_BYTES : 128;
constexpr int SLOT_BYTES = (SCALES_AT + TILE * SCALE_BYTES + SLOT_ALIGNMENT - 1) / SLOT_ALIGNMENT * SLOT_ALIGNMENT;
constexpr int RING_BYTES = SLOTS * SLOT_BYTES;

constexpr int ROWS_OF_BANKS = CHUNKS < 8 ? 8 / CHUNKS : 1;  // tokens that fill all banks once, if swizzled

// Where in a slot a chunk of a token lies.
DEVICE int chunk_offset(int token, int chunk) {
  return token * ROW_BYTES + (SWIZZLED ? chunk ^ token % 8 / ROWS_OF_BANKS : chunk) * 16;
}
// From the address of a chunk of step 0 to that of the same chunk of another step; slots of swizzled
// rows are aligned to them.
DEVICE u32 at_step(u32 address, int step) {
  return SWIZZLED ? address ^ u32(step * 32) : address + step * 32;
}

// The paged cache of a layer, `[block, kv head, K or V, token in block, row]`.
struct Cache {
  Cell* memory;
  const int* block_tables;
  i64 table_stride;
  int num_kv_heads;
  int block_shift;
  int parts;  // heads of the plan to a kv head

  DEVICE int from_k_to_v() const { return ROW_CELLS << block_shift; }
  // Which block holds a token, and where K of that token lies for a kv head.
  DEVICE int block(int row, int token) const {
    return load_fresh<1>(block_tables + row * table_stride + (token >> block_shift)).at[0];
  }
  DEVICE i64 offset(int block, int token, int kv_head) const {
    const int in_block = kv_head * 2 * from_k_to_v() + within_block(token) * ROW_CELLS;
    return i64(block) * (num_kv_heads * (2 * (ROW_CELLS + SCALE_BYTES) << block_shift)) + in_block;
  }
  // From a token's row of K, or V, to its scales, which lie behind all rows of its block, in their order.
  DEVICE int from_row_to_scales(int kv_head, bool is_value, int token) const {
    const int row = ((kv_head * 2 + is_value) << block_shift) + within_block(token);
    return num_kv_heads * 2 * from_k_to_v() - row * (ROW_CELLS - SCALE_BYTES);
  }

 private:
  DEVICE int within_block(int token) const { return token & ((1 << block_shift) - 1); }
};

// A tile on a worker's way.
struct Cursor {
  Sequence now;
  Sequence following;
  int head;
  int tile;
  const Sequence* rest;  // behind `following`
  Window window;

  DEVICE Cursor(const Plan& plan, const Start& start, const Window& window)
      : now(start.sequence), following(start.following), head(start.head), tile(start.tile),
        rest(plan.sequences + start.index + 2), window(window) {}

  DEVICE int num_tokens() const { return now.length - tile * TILE; }  // of the tile, if no more follow
  // Tokens of the tile that are not seen, if positive; but for the first of them, which are sinks, if positive.
  DEVICE int num_hidden() const { return window.first_seen(now.length) - tile * TILE; }
  DEVICE int num_sinks() const { return SINKS ? window.sinks - tile * TILE : 0; }
  DEVICE bool is_first() const { return tile == first_tile(now, window); }
  DEVICE bool is_last() const { return num_tokens() <= TILE; }
  // Whether the last tile of the sequence is among so many from this one on.
  DEVICE bool ends_within(int count) const {
    const bool is_sinks = SINKS && tile < window.sink_tiles();
    return (count + (is_sinks ? window.num_left_out(now.length) : 0)) * TILE >= num_tokens();
  }
  DEVICE void advance(int num_heads) {
    if (!is_last()) {
      ++tile;
      if (SINKS && tile == window.sink_tiles()) tile += window.num_left_out(now.length);
      return;
    }
    if (++head >= num_heads) {
      head = 0;
      now = following;
      following = read(rest++);
    }
    tile = first_tile(now, window);
  }
};

class Ring {
  const Cache& cache;
  u8* const slots;
  u32 slots_address;
  const int num_heads;
  const u64 policy = evict_first();
  const int lane = threadIdx.x % 32;
  Cursor cursor;  // of the tile that is copied next
  int left;       // tiles to copy
  int kv_head;    // of the cursor
  int slot = 0;   // that is filled next; once all are filled, also the one that is read next
  int block;           // where this lane's piece of the cursor's tile lies
  const Cell* source;  // its K, then its V

 public:
  DEVICE Ring(const Cache& cache, u8* slots, int num_heads, const Cursor& cursor, int count)
      : cache(cache), slots(slots), num_heads(num_heads), cursor(cursor), left(count),
        kv_head(cursor.head / cache.parts) {
    slots_address = shared_address(slots);
    asm("" : "+r"(slots_address));  // or it is computed again for every copy
    find_block();
  }

  // Fill the ring with what earlier steps wrote, but for the newest token of a sequence. Unless that comes from
  // elsewhere, stop at the first tile that holds one. Returns how many slots are filled.
  DEVICE int fill_early() {
    for (int filled = 0; filled < SLOTS; ++filled) {
      if (!ROTATES && left > 0 && cursor.is_last()) {
        warm();
        return filled;
      }
      fill_either(filled);
    }
    return SLOTS;
  }
  DEVICE void fill_up(int filled) {
    for (; filled < SLOTS; ++filled) fill_either(filled);
  }
  // The slot of the next K or V, once it is there.
  DEVICE u8* front() const {
    copy_wait<SLOTS - 1>();
    __syncwarp();
    return slots + slot * SLOT_BYTES;
  }
  // The front, which was K or V, has been read: its slot takes the next copy.
  template <bool WAS_VALUE>
  DEVICE void pop() {
    __syncwarp();
    fill<(SLOTS % 2 == 0) == WAS_VALUE>();
  }

 private:
  // The first of this lane's piece, in the tile.
  DEVICE int own_row() const { return lane / LANES * PIECE; }
  DEVICE int own_token() const { return cursor.tile * TILE + own_row(); }
  DEVICE void find_block() {
    // Where a piece is hidden the table may hold anything.
    const bool is_sink = SINKS && own_row() < cursor.num_sinks();
    const bool is_hidden = WINDOWED && !is_sink && own_row() + PIECE <= cursor.num_hidden();
    const bool exists = left > 0 && own_token() < cursor.now.length && !is_hidden;
    block = exists ? cache.block(cursor.now.row, own_token()) : 0;
  }
  DEVICE const Cell* find_source() const {
    return cache.memory + cache.offset(block, own_token(), kv_head);
  }

  DEVICE void fill_either(int filled) {
    if (filled % 2 == 0) fill<false>();
    else fill<true>();
  }
  template <bool IS_VALUE>
  DEVICE void fill() {
    if (left > 0) {
      source = IS_VALUE ? source + cache.from_k_to_v() : find_source();
      const int count = cursor.num_tokens(), hidden = WINDOWED ? cursor.num_hidden() : 0;
      if (count >= TILE && hidden <= 0) start_copy<true, IS_VALUE>(TILE, 0);
      else start_copy<false, IS_VALUE>(count, hidden);
      if (IS_VALUE) advance();
    }
    copy_commit();
    slot = slot + 1 == SLOTS ? 0 : slot + 1;
  }
  DEVICE void advance() {
    const int head = cursor.head;
    --left;
    cursor.advance(num_heads);
    if (cursor.head != head) kv_head = cursor.head / cache.parts;
    find_block();
  }

  // Tokens that are not seen become zeros: what their memory holds (NaN even) meets no arithmetic. Of a piece's lanes
  // one copies a chunk, the next the next.
  template <bool IS_WHOLE, bool IS_VALUE>
  DEVICE void start_copy(int count, int hidden) const {
    constexpr int COPIES = PIECE * CHUNKS / LANES, CHUNK_CELLS = 16 / int(sizeof(Cell));
    static_assert(COPIES * LANES == PIECE * CHUNKS, "as many for each lane");
    const u32 target = slots_address + slot * SLOT_BYTES, own_piece = target + own_row() * ROW_BYTES;
    const Cell* first = source + lane % LANES * CHUNK_CELLS;
    const int sinks = cursor.num_sinks();
#pragma unroll
    for (int copy = 0; copy < COPIES; ++copy) {
      const int row = own_row() + (lane % LANES + LANES * copy) / CHUNKS;
      const bool is_hidden = WINDOWED && row < hidden && !(SINKS && row < sinks);
      copy_async(own_chunk(own_piece, copy), first + copy * LANES * CHUNK_CELLS,
                 IS_WHOLE || (row < count && !is_hidden), policy);
    }
#if FORMAT != 0
    if (lane % LANES < SCALE_BYTES) copy_scales<IS_WHOLE, IS_VALUE>(target + SCALES_AT, count);
#endif
  }

  // Of those of a piece that this lane copies.
  DEVICE u32 own_chunk(u32 piece, int copy) const {
    const int first = lane % LANES, more = LANES * copy;
    if (!SWIZZLED) return piece + chunk_offset((first + more) / CHUNKS, (first + more) % CHUNKS);
    // Powers of two: no bit of `first` is one of `more`.
    const u32 own = piece + chunk_offset(first / CHUNKS, first % CHUNKS);
    const int token = more / CHUNKS;
    return (own ^ u32(token % 8 / ROWS_OF_BANKS * 16)) + token * ROW_BYTES + more % CHUNKS * 16;
  }

#if FORMAT != 0
  static_assert(PIECE == 16 && SCALE_BYTES <= LANES, "16 bytes of the scales of a piece for each lane");
  // Zeros past the sequence's end. Not through the L1 cache: what it has may be older than the newest token.
  template <bool IS_WHOLE, bool IS_VALUE>
  DEVICE void copy_scales(u32 target, int count) const {
    const int at = lane % LANES * 16, bytes = (count - own_row()) * SCALE_BYTES - at;
    copy_async_bytes<16>(target + own_row() * SCALE_BYTES + at,
                         source + cache.from_row_to_scales(kv_head, IS_VALUE, own_token()) + at,
                         IS_WHOLE ? 16 : max(0, min(16, bytes)));
  }
#endif

  // Bring the cursor's tile into the L2 cache, where the newest token is being written meanwhile.
  DEVICE void warm() const {
    constexpr int LINE = 128 / int(sizeof(Cell));
    const int row = own_row();
    if (row >= cursor.num_tokens() || (WINDOWED && row + PIECE <= cursor.num_hidden())) return;
    const Cell* own = find_source();
    for (int i = lane % LANES * LINE; i < PIECE * ROW_CELLS; i += LANES * LINE) {
      prefetch(own + i);
      prefetch(own + cache.from_k_to_v() + i);
    }
  }
};
