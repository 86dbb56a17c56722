// Weight rows of experts on their way through a ring in shared memory (sm_90a). A warp brings up to 16 of them at once,
// each lane its own by bulk copies, a part a slot. GROUPS of WARPS warps multiply these in turn by up to eight rows of x,
// which lie in shared memory, too; the warps of a group share out a slot's chunks.
// -D ELEMENT, FP8, GATED (see pieces.cuh)
#pragma once
#include "experts/output.cuh"
#include "runtime/ring.cuh"

constexpr int GROUPS = 2;
constexpr int GROUP_THREADS = 32 * WARPS;
constexpr int READERS = GROUPS * GROUP_THREADS;
constexpr int THREADS = READERS + 32;  // and a warp that fills
constexpr int MAX_SLOTS = 8;
constexpr int PAD = 64;  // bytes behind a part: 16 bytes of each lane of two rows meet all banks once

// A weight row, and its parts: a multiple of WARPS chunks each, or all.
struct Width {
  int row_bytes, part_bytes;

  DEVICE int pitch() const { return part_bytes + PAD; }
  DEVICE int slot_bytes() const { return 16 * pitch(); }
};

DEVICE void barrier_of_readers() { asm volatile("bar.sync 1, %0;" ::"n"(READERS) : "memory"); }
DEVICE void barrier_of_group(int group) {
  if (group == 0)
    asm volatile("bar.sync 2, %0;" ::"n"(GROUP_THREADS) : "memory");
  else
    asm volatile("bar.sync 3, %0;" ::"n"(GROUP_THREADS) : "memory");
}

// By one lane.
class Filler {
  CopyRing ring, arriving;
  const Width width;
  const int most;  // slots that are on their way at once
  int under_way = 0;
  const u64 policy = evict_first();

 public:
  DEVICE Filler(const CopyRing& ring, const Width& width, int most)
      : ring(ring), arriving(ring), width(width), most(most) {}

  // Bring `count` rows: up to eight that follow each other from `upper` on, and what is left from `lower` on.
  DEVICE void bring(const u8* upper, const u8* lower, int count) {
    for (int at = 0; at < width.row_bytes; at += width.part_bytes) {
      const int bytes = min(width.part_bytes, width.row_bytes - at);
      if (under_way == most) {
        arriving.wait();
        arriving.advance();
      } else {
        ++under_way;
      }
      ring.acquire(count * bytes);
      for (int row = 0; row < count; ++row) {
        const u8* from = row < 8 ? upper + row * width.row_bytes : lower + (row - 8) * width.row_bytes;
        ring.copy(row * width.pitch(), from + at, bytes, policy);
      }
      ring.advance();
    }
  }
};

// By the threads that multiply.
DEVICE void start_rows(u8* target, const T* x, i64 x_stride, int num_rows, int width, int pitch) {
  const int pieces = width / 8;
  for (int i = threadIdx.x; i < num_rows * pieces; i += READERS) {
    const int row = i / pieces, piece = i % pieces;
    copy_async(reinterpret_cast<T*>(target + row * pitch + piece * 16), x + row * x_stride + piece * 8, true);
  }
  copy_commit();
}

DEVICE Bytes load_shared(const void* address) { return load<4>(static_cast<const u32*>(address)); }

// A warp's chunks of a slot, `warp`, `warp` + WARPS, ..: its sums are those of a warp whose chunks come from memory.
// `x`: shared, what the slot's weights of a lane's row of x are multiplied by. `pieces`: of the slot.
DEVICE void multiply_slot(float (&sums)[4], const u8* slot, int pitch, const T* x, bool has_x, int warp, int pieces) {
  const u8* upper = slot + threadIdx.x % 32 / 4 * pitch;
  const u8* lower = upper + 8 * pitch;
#pragma unroll 2
  for (int chunk = warp; chunk * CHUNK < pieces; chunk += WARPS) {
    WeightChunk weights;
    RowChunk row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int piece = piece_of(chunk, half);
      const bool real = piece < pieces;
      weights.at[half][0] = real ? load_shared(upper + piece * 16) : Bytes{};
      weights.at[half][1] = real ? load_shared(lower + piece * 16) : Bytes{};
#pragma unroll
      for (int i = 0; i < X_PIECES; ++i)
        row.at[half][i] = real && has_x ? load_shared(x + piece * PIECE + i * 8) : Bytes{};
    }
    multiply(sums, weights, row);
  }
}

// What comes at once, by a warp of its group: sums with a lane's row of x, all of it.
DEVICE void multiply_rows(float (&sums)[4], CopyRing& ring, const Width& width, const T* x, bool has_x, int warp) {
  for (int at = 0; at < width.row_bytes; at += width.part_bytes) {
    const u8* slot = ring.wait();
    const int pieces = min(width.part_bytes, width.row_bytes - at) / 16;
    multiply_slot(sums, slot, width.pitch(), x + at / WEIGHT_BYTES, has_x, warp, pieces);
    ring.release(sums[0]);
    ring.advance();
  }
}
// ... by a warp of another. It has to see each slot full: barriers have a parity alone, by which a warp that left out a pass
// would take the one before for the next.
DEVICE void skip_rows(CopyRing& ring, const Width& width) {
  for (int at = 0; at < width.row_bytes; at += width.part_bytes) {
    ring.wait();
    ring.release(0.0f);
    ring.advance();
  }
}
