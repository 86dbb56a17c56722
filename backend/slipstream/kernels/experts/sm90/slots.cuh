// Weight rows of experts on their way through a ring in shared memory (sm_90a). A warp brings 16 of them at once, each
// lane its own by bulk copies, PART_BYTES a slot; other warps share out a slot's chunks and multiply these by up to eight
// rows of x, which lie in shared memory, too.
// -D ELEMENT, FP8, GATED (see pieces.cuh)
#pragma once
#include "experts/chunks.cuh"
#include "runtime/ring.cuh"

constexpr int PART_BYTES = 2048;                // of a weight row in a slot
constexpr int PART_PIECES = PART_BYTES / 16;
constexpr int PITCH = PART_BYTES + 64;          // 16 bytes of each lane of two rows meet all banks once
constexpr int SLOT_BYTES = 16 * PITCH;
constexpr int MAX_SLOTS = 8;

// By a warp, all of it.
class Filler {
  CopyRing ring, arriving;
  const int most;  // slots that are on their way at once
  int under_way = 0;
  const u64 policy = evict_first();

 public:
  DEVICE Filler(const CopyRing& ring, int most) : ring(ring), arriving(ring), most(most) {}

  // Bring a row of each of the first `count` lanes.
  DEVICE void bring(const u8* row, int row_bytes, int count) {
    const int lane = threadIdx.x % 32;
    for (int at = 0; at < row_bytes; at += PART_BYTES) {
      const int bytes = min(PART_BYTES, row_bytes - at);
      if (under_way == most) {
        arriving.wait();
        arriving.advance();
      } else {
        ++under_way;
      }
      if (lane == 0) ring.acquire(count * bytes);
      __syncwarp();
      if (lane < count) ring.copy(lane * PITCH, row + at, bytes, policy);
      ring.advance();
    }
  }
};

DEVICE Bytes load_shared(const void* address) { return load<4>(static_cast<const u32*>(address)); }

// A warp's chunks of a slot, `warp`, `warp` + WARPS, ..: its sums are those of a warp whose chunks come from memory.
// `x`: shared, what the slot's weights of a lane's row of x are multiplied by. `pieces`: of the slot.
template <int WARPS>
DEVICE void multiply_slot(float (&sums)[4], const u8* slot, const T* x, bool has_x, int warp, int pieces) {
  const u8* upper = slot + threadIdx.x % 32 / 4 * PITCH;
#pragma unroll 2
  for (int chunk = warp; chunk * CHUNK < pieces; chunk += WARPS) {
    WeightChunk weights;
    RowChunk row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int piece = piece_of(chunk, half);
      const bool real = piece < pieces;
      weights.at[half][0] = real ? load_shared(upper + piece * 16) : Bytes{};
      weights.at[half][1] = real ? load_shared(upper + 8 * PITCH + piece * 16) : Bytes{};
#pragma unroll
      for (int i = 0; i < X_PIECES; ++i)
        row.at[half][i] = real && has_x ? load_shared(x + piece * PIECE + i * 8) : Bytes{};
    }
    multiply(sums, weights, row);
  }
}
