// Tiles of a paged cache: asynchronous 16-byte copies from pages into shared memory, rows padded by 16 bytes
// so that neither ldmatrix nor a lane-a-row read meets a bank conflict.
// -D ELEMENT (T), HEAD_SIZE, WARPS, TILE (tokens), WINDOWED (1: a row sees its last `window` tokens alone), SINKS (1:
// of these, those within bounds), SCORES (attention/scores.cuh), FORMAT (kv_format.cuh)
#pragma once
#include "runtime/copies.cuh"
#include "attention/scores.cuh"
#include "cache/kv_format.cuh"

#ifndef SINKS
#define SINKS 0
#endif
static_assert(WINDOWED || !SINKS, "without a window there is nothing between sinks and others");
static_assert(HEAD_SIZE <= 128 || !SINKS, "turning wide queries takes more registers than there are");

constexpr int THREADS = 32 * WARPS;
constexpr int VECTOR = 16 / sizeof(T);     // elements of a 16-byte access
constexpr int CHUNKS = HEAD_SIZE / VECTOR;  // 16-byte accesses of a head
constexpr int PITCH = HEAD_SIZE + VECTOR;  // elements between two tokens of a tile
constexpr int TILE_ELEMENTS = TILE * PITCH;
constexpr int COPIES = TILE * CHUNKS / THREADS;       // of K, and of V, by a thread
constexpr int UNROLL = HEAD_SIZE > 128 ? 2 : COPIES;  // rows of wide heads leave no registers for more
static_assert(TILE * CHUNKS % THREADS == 0, "every thread copies as much as every other");

#if FORMAT == 0
// K and V of one kv head of one sequence.
struct Pages {
  const T* head;      // K of this kv head in block 0
  const int* blocks;  // the sequence's block table
  i64 block_stride;   // elements
  int block_shift;

  DEVICE static Pages of(const T* cache, const BlockLayout& layout, i64 kv_head, const int* blocks) {
    return {cache + layout.numbers(kv_head), blocks, layout.size(), layout.block_shift};
  }

  // Starts the copy of tokens [first, first + TILE): K to `tile`, V behind it; zeros outside of [begin, end), so that
  // what an unused row holds (NaN even) meets no arithmetic, and no table's entry is read that may be anything.
  DEVICE void start_copy(T* tile, int first, int begin, int end) const {
    const int mask = (1 << block_shift) - 1;
#pragma unroll UNROLL
    for (int step = 0; step < COPIES; ++step) {
      const int i = threadIdx.x + step * THREADS;
      const int row = i / CHUNKS, column = i % CHUNKS * VECTOR;
      const int token = first + row;
      const bool inside = token < end && !(WINDOWED && token < begin);
      const T* source = head;
      if (inside)
        source += blocks[token >> block_shift] * block_stride + (token & mask) * HEAD_SIZE + column;
      T* target = tile + row * PITCH + column;
      copy_async(target, source, inside);
      copy_async(target + TILE_ELEMENTS, source + ((i64(HEAD_SIZE) << block_shift) & -i64(inside)),
                 inside);
    }
  }
};
#else
#include "cache/pages_quantized.cuh"
#endif

#define EVERYTHING 0x40000000  // a window that hides nothing

// 16 query rows of one warp, `count` of them real; row r sees tokens up to first_position + r * step, the last
// `window` of them.
struct Rows {
  const T* queries;
  i64 stride;  // elements between rows
  int count;
  int first_position;
  int step;
  float scale;  // of the scores, times log2(e): the softmax is in base 2
  int window;
  int begin, end;  // if SINKS: of these, tokens [begin, end) alone
  ScoreInputs changed;  // of the first row's query head
  int head_step;        // from a row's query head to the next row's
  int query;            // position of the first row's query, if SLOPED

  // What SCORES needs of a row.
  DEVICE float own_score(int row) const { return changed.of(max(0, min(row, count - 1)) * head_step); }
  DEVICE float score(float product, int row, int token, float own) const {
    return score_of(product, scale, changed.cap, own, token - (query + row * step));
  }

  DEVICE int last_visible(int row) const {
    const int position = first_position + row * step;
    return SINKS ? min(position, end - 1) : position;
  }
  // If WINDOWED.
  DEVICE int first_visible(int row) const {
    const int first = first_position + row * step - window + 1;
    return SINKS ? max(begin, first) : first;
  }
};
