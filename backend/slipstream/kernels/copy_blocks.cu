// Whole blocks from one place to another: within the cache, or between it and pinned host memory, which a kernel
// reads and writes like its own. One launch for all layers.
#include "common.cuh"

constexpr u32 THREADS = 256, VECTORS = 4;     // of 16 bytes, which a thread has in flight at once
constexpr i64 CHUNK = i64(THREADS) * VECTORS;  // vectors of an item, 16 KB

// A part of every block, contiguous on both sides. Addresses and strides in bytes, size in vectors.
struct Part {
  const char* source;
  i64 source_stride;
  char* destination;
  i64 destination_stride;
  i64 size;
};

// pairs[i] = {source block, destination block}. An item is a chunk of a part of a pair; any grid. Most items of
// parts smaller than the largest are empty.
extern "C" __global__ void __launch_bounds__(THREADS)
    copy_blocks(const int* pairs, i64 num_pairs, const Part* parts, i64 num_parts, i64 num_chunks) {
  const i64 num_items = num_pairs * num_parts * num_chunks;
  for (i64 item = blockIdx.x; item < num_items; item += gridDim.x) {
    const i64 whole = item / num_chunks, first = item % num_chunks * CHUNK;
    const Part part = parts[whole % num_parts];
    const int* pair = pairs + whole / num_parts * 2;
    auto source = reinterpret_cast<const Pack<u32, 4>*>(part.source + pair[0] * part.source_stride);
    auto destination = reinterpret_cast<Pack<u32, 4>*>(part.destination + pair[1] * part.destination_stride);
    Pack<u32, 4> values[VECTORS];
#pragma unroll
    for (u32 i = 0; i < VECTORS; ++i) {
      const i64 at = first + i * THREADS + threadIdx.x;
      if (at < part.size) values[i] = source[at];
    }
#pragma unroll
    for (u32 i = 0; i < VECTORS; ++i) {
      const i64 at = first + i * THREADS + threadIdx.x;
      if (at < part.size) destination[at] = values[i];
    }
  }
}
