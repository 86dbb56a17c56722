// The first kernel of a step: what the host could not write into the step's inputs itself.
#include "runtime/common.cuh"

// header = {where in `staged` the tables begin, columns of each, how many}; any grid.
extern "C" __global__ void __launch_bounds__(256)
    begin_step(const int* header, const int* staged, i64* token_ids, const int* sources, i64 num_tokens,
               const i64* drawn, int* tables, i64 stride) {
  const u32 first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  for (u32 i = first; i < num_tokens; i += step) {
    const int source = sources[i];
    if (source >= 0) token_ids[i] = drawn[source];
  }
  const u32 width = header[1], size = width * header[2];
  const int* compact = staged + header[0];
  for (u32 i = first; i < size; i += step) tables[i64(i / width) * stride + i % width] = compact[i];
}
