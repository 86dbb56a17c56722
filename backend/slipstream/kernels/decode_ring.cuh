// A worker's private ring of slots in shared memory, through which its tiles pass: K, V, K, V, ...
// -D ELEMENT (T: 16 bits), HEAD_SIZE, SLOTS, ROTATES (1: the newest tokens come past the cache), WINDOWED, FORMAT
#pragma once
#include "copies.cuh"
#include "decode_plan.cuh"
#include "kv_format.cuh"

constexpr int PIECE = 8;                // tokens that surely lie in one block
constexpr int PIECES = TILE / PIECE;    // of a tile
constexpr int CHUNKS = ROW_CELLS * int(sizeof(Cell)) / 16;  // 16-byte accesses of a token
constexpr int STEPS = HEAD_SIZE / 16;   // of two chunks: a fragment's columns
// Eight tokens of one column of chunks must lie in different banks: rows of 8 and 16 chunks are swizzled, others are
// an odd number of chunks, or padded to one.
constexpr bool SWIZZLED = (CHUNKS & (CHUNKS - 1)) == 0 && CHUNKS >= 8;
constexpr int ROW_BYTES = CHUNKS * 16 + (SWIZZLED || CHUNKS % 2 == 1 ? 0 : 16);
enum : int { SCALES_AT = TILE * ROW_BYTES };  // in a slot, of quantised tokens
constexpr int SLOT_BYTES = SCALES_AT + (TILE * SCALE_BYTES + 127) / 128 * 128;
constexpr int RING_BYTES = SLOTS * SLOT_BYTES;

// Where in a slot a chunk of a token lies.
DEVICE int chunk_offset(int token, int chunk) {
  return token * ROW_BYTES + (SWIZZLED ? chunk ^ token % 8 : chunk) * 16;
}
// From the address of a chunk of step 0 to that of the same chunk of another step; slots are aligned to 128 bytes.
DEVICE u32 at_step(u32 address, int step) {
  return SWIZZLED ? address ^ u32(step * 32) : address + step * 32;
}

// The paged cache of a layer, `[block, kv head, K or V, token in block, row]`.
struct Cache {
  Cell* memory;
  const int* block_tables;
  i64 table_stride;
  i64 num_kv_heads;
  int block_shift;
  int parts;  // heads of the plan to a kv head

  DEVICE i64 from_k_to_v() const { return i64(ROW_CELLS + SCALE_BYTES) << block_shift; }
  // Which block holds a token, and where K of that token lies for a head of the plan.
  DEVICE int block(int row, int token) const {
    return load_fresh<1>(block_tables + row * table_stride + (token >> block_shift)).at[0];
  }
  DEVICE i64 offset(int block, int token, int head) const {
    const int within = token & ((1 << block_shift) - 1);
    const i64 pair = block * num_kv_heads + head / parts;
    return pair * 2 * from_k_to_v() + within * ROW_CELLS;
  }
  // From a token's row to its scales, which lie behind the rows of its block.
  DEVICE i64 from_row_to_scales(int token) const {
    const int within = token & ((1 << block_shift) - 1);
    return (i64(ROW_CELLS) << block_shift) - within * (ROW_CELLS - SCALE_BYTES);
  }
};

// A tile on a worker's way.
struct Cursor {
  Sequence now;
  Sequence following;
  int head;
  int tile;
  const Sequence* rest;  // behind `following`
  int window;

  DEVICE Cursor(const Plan& plan, const Start& start, int window)
      : now(start.sequence), following(start.following), head(start.head), tile(start.tile),
        rest(plan.sequences + start.index + 2), window(window) {}

  DEVICE int num_tokens() const { return now.length - tile * TILE; }  // of the tile, if no more follow
  DEVICE int num_hidden() const { return first_seen(now.length, window) - tile * TILE; }  // if positive
  DEVICE bool is_first() const { return tile == first_tile(now, window); }
  DEVICE bool is_last() const { return num_tokens() <= TILE; }
  DEVICE void advance(int num_heads) {
    if (!is_last()) {
      ++tile;
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
  const int num_heads;
  const u64 policy = evict_first();
  const int lane = threadIdx.x % 32;
  Cursor cursor;  // of the tile that is copied next
  int left;       // tiles to copy
  int slot = 0;   // that is filled next; once all are filled, also the one that is read next
  bool is_value = false;
  int block;  // in lane i < PIECES: where piece i of the cursor's tile lies

 public:
  DEVICE Ring(const Cache& cache, u8* slots, int num_heads, const Cursor& cursor, int count)
      : cache(cache), slots(slots), num_heads(num_heads), cursor(cursor), left(count) {
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
      fill();
    }
    return SLOTS;
  }
  DEVICE void fill_up(int filled) {
    for (; filled < SLOTS; ++filled) fill();
  }
  // The slot of the next K or V, once it is there.
  DEVICE u8* front() const {
    copy_wait<SLOTS - 1>();
    __syncwarp();
    return slots + slot * SLOT_BYTES;
  }
  // The front has been read: its slot takes the next copy.
  DEVICE void pop() {
    __syncwarp();
    fill();
  }

 private:
  DEVICE int own_token() const { return cursor.tile * TILE + lane * PIECE; }
  DEVICE void find_block() {
    // Where a piece is hidden the table may hold anything; scales are of two pieces.
    const int last = FORMAT == 0 ? lane : lane | 1;
    const bool is_hidden = WINDOWED && last * PIECE + PIECE <= cursor.num_hidden();
    const bool exists = left > 0 && lane < PIECES && own_token() < cursor.now.length && !is_hidden;
    block = exists ? cache.block(cursor.now.row, own_token()) : 0;
  }

  DEVICE void fill() {
    if (left > 0) {
      start_copy();
      if (is_value) {
        --left;
        cursor.advance(num_heads);
        find_block();
      }
      is_value = !is_value;
    }
    copy_commit();
    slot = slot + 1 == SLOTS ? 0 : slot + 1;
  }

  // Tokens that are not seen become zeros: what their memory holds (NaN even) meets no arithmetic.
  DEVICE void start_copy() const {
    const int count = cursor.num_tokens(), hidden = cursor.num_hidden();
    const i64 offset =
        cache.offset(block, own_token(), cursor.head) + (is_value ? cache.from_k_to_v() : 0);
    const u32 target = shared_address(slots + slot * SLOT_BYTES);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      const Cell* source = cache.memory + __shfl_sync(ALL_LANES, offset, piece);
#pragma unroll
      for (int step = 0; step < (PIECE * CHUNKS + 31) / 32; ++step) {
        const int i = lane + 32 * step, token = i / CHUNKS;
        if (PIECE * CHUNKS % 32 != 0 && i >= PIECE * CHUNKS) continue;
        copy_async(target + piece * PIECE * ROW_BYTES + chunk_offset(token, i % CHUNKS),
                   source + i * (16 / int(sizeof(Cell))),
                   piece * PIECE + token < count && !(WINDOWED && piece * PIECE + token < hidden), policy);
      }
    }
#if FORMAT != 0
    if (lane % 2 == 0 && lane < PIECES) copy_scales(target + SCALES_AT, offset, count);
#endif
  }

#if FORMAT != 0
  // Of this lane's piece and the next, which lie in one block; zeros past the sequence's end. Not through the L1 cache:
  // what it has may be older than the newest token.
  DEVICE void copy_scales(u32 target, i64 offset, int count) const {
    const Cell* source = cache.memory + offset + cache.from_row_to_scales(own_token());
    const int bytes = (count - lane * PIECE) * SCALE_BYTES;
#pragma unroll
    for (int i = 0; i < 2 * PIECE * SCALE_BYTES; i += 16)
      copy_async_bytes<16>(target + lane * PIECE * SCALE_BYTES + i, source + i, max(0, min(16, bytes - i)));
  }
#endif

  // Bring the cursor's tile into the L2 cache, where the newest token is being written meanwhile.
  DEVICE void warm() const {
    const i64 offset = cache.offset(block, own_token(), cursor.head);
    const int count = cursor.num_tokens();
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      const Cell* source = cache.memory + __shfl_sync(ALL_LANES, offset, piece);
      if (piece * PIECE >= count || (WINDOWED && piece * PIECE + PIECE <= cursor.num_hidden())) continue;
      constexpr int LINE = 128 / int(sizeof(Cell));
      for (int i = lane * LINE; i < PIECE * ROW_CELLS; i += 32 * LINE) {
        prefetch(source + i);
        prefetch(source + cache.from_k_to_v() + i);
      }
    }
  }
};
