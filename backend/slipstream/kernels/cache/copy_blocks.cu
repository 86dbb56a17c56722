// Whole blocks of the cache into others, in all layers by one launch.
#include "runtime/common.cuh"

constexpr u32 THREADS = 256, VECTORS = 4;     // of 16 bytes, which a thread has in flight at once
constexpr i64 CHUNK = i64(THREADS) * VECTORS;  // vectors of an item, 16 KB
using Vector = Pack<u32, 4>;

// cache[part][block][vector]; pairs[i] = {source block, destination block}. An item is a chunk of a part of a pair;
// any grid.
extern "C" __global__ void __launch_bounds__(THREADS)
    copy_blocks(const int* pairs, i64 num_pairs, Vector* cache, i64 num_parts, i64 num_blocks, i64 size) {
  const i64 num_chunks = (size + CHUNK - 1) / CHUNK, num_items = num_pairs * num_parts * num_chunks;
  for (i64 item = blockIdx.x; item < num_items; item += gridDim.x) {
    const i64 whole = item / num_chunks, first = item % num_chunks * CHUNK;
    const int* pair = pairs + whole / num_parts * 2;
    Vector* part = cache + whole % num_parts * num_blocks * size;
    const Vector* source = part + pair[0] * size;
    Vector* destination = part + pair[1] * size;
    Vector values[VECTORS];
#pragma unroll
    for (u32 i = 0; i < VECTORS; ++i) {
      const i64 at = first + i * THREADS + threadIdx.x;
      if (at < size) values[i] = source[at];
    }
#pragma unroll
    for (u32 i = 0; i < VECTORS; ++i) {
      const i64 at = first + i * THREADS + threadIdx.x;
      if (at < size) destination[at] = values[i];
    }
  }
}
