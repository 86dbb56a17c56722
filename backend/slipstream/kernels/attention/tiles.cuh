// The tiles of a sequence, one after the other through a CTA's shared memory, several copies ahead.
// -D ELEMENT (T), HEAD_SIZE, WARPS, TILE, STAGES (tiles in flight), MMA (1: tensor cores), WINDOWED, SINKS, FORMAT
// (kv_format.cuh)
#pragma once
#if MMA
#include "attention/rows_mma.cuh"
#else
#include "attention/rows_fma.cuh"
#endif

constexpr int STAGE_ELEMENTS = 2 * TILE_ELEMENTS;

extern __shared__ __align__(16) unsigned char shared_bytes[];

DEVICE T* stages() { return reinterpret_cast<T*>(shared_bytes); }
DEVICE T* scratch() {  // of this warp, behind the stages
  const int at = STAGES * STAGE_ELEMENTS * int(sizeof(T)) + threadIdx.x / 32 * WarpRows::SCRATCH;
  return reinterpret_cast<T*>(shared_bytes + at);
}

#if FORMAT == 0
// Run f(tile's K, first token) for every tile of [first, end), STAGES - 1 tiles ahead of the copies; tokens in front
// of `begin` are zeros.
template <class Consume>
DEVICE void for_each_tile(const Pages& pages, int first, int begin, int end, const Consume& consume) {
  const int num_tiles = (end - first + TILE - 1) / TILE;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < num_tiles) pages.start_copy(stages() + i * STAGE_ELEMENTS, first + i * TILE, begin, end);
    copy_commit();
  }
  for (int i = 0; i < num_tiles; ++i) {
    copy_wait<STAGES - 2>();
    __syncthreads();  // tile i is there, and tile i - 1 is consumed: its stage takes the next copy
    const int next = i + STAGES - 1;
    if (next < num_tiles)
      pages.start_copy(stages() + next % STAGES * STAGE_ELEMENTS, first + next * TILE, begin, end);
    copy_commit();
    consume(stages() + i % STAGES * STAGE_ELEMENTS, first + i * TILE);
  }
}
#else
// The same over a quantised cache, whose bytes are a tile ahead, behind the stages and all that is scratch.
template <class Consume>
DEVICE void for_each_tile(const Pages& pages, int first, int begin, int end, const Consume& consume) {
  static_assert(STAGES == 2, "one is written while the other may still be read");
  u8* memory = shared_bytes + STAGES * STAGE_ELEMENTS * int(sizeof(T)) + WARPS * WarpRows::SCRATCH;
  const int num_tiles = (end - first + TILE - 1) / TILE;
  Pages::Scales scales;
  if (num_tiles > 0) pages.start_copy(memory, scales, first, begin, end);
  copy_commit();
  for (int i = 0; i < num_tiles; ++i) {
    T* stage = stages() + i % STAGES * STAGE_ELEMENTS;
    copy_wait<0>();
    pages.store(stage, memory, scales);
    if (i + 1 < num_tiles) pages.start_copy(memory, scales, first + (i + 1) * TILE, begin, end);
    copy_commit();
    __syncthreads();  // tile i is there, and tile i - 1, whose stage is the next to be written, is consumed
    consume(stage, first + i * TILE);
  }
}
#endif
