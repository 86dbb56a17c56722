// GEMMs of experts with up to eight rows each, mostly, as fast as their weights can be read. A CTA has OUTPUTS outputs of up to
// eight rows of an expert, its warps share out the width: weights go straight from memory to registers, where they
// are the left operand of tensor cores, each of their bytes once. The parts of a sum are added in the order of warps.
// -D ELEMENT, FP8, GATED (see pieces.cuh)
#include "experts/output.cuh"

constexpr int THREADS = 32 * WARPS;

// Of a multiprocessor, for which registers must do.
#if __CUDA_ARCH__ >= 1000
constexpr int CTAS = 4;
#else
constexpr int CTAS = FP8 ? 4 : 6;
#endif

// Grid: x = outputs, y = tiles. Chunks warp, warp + WARPS, ... are a warp's; one is on its way as another is multiplied.
// What is launched next may read the choice before it waits: that had been made when this kernel went on.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS) skinny(PARAMETERS) {
  __shared__ Parts parts;
  wait_for_previous();
  start_next();
  TASK(blockIdx.y);
  if (task.count == 0) return;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const int first = blockIdx.x * OUTPUTS;
  const u8* upper = weights_of(task, first + g);
  const u8* lower = weights_of(task, GATED ? task.outputs + first + g : min(first + 8, task.outputs - 8) + g);
  const int num_pieces = task.width / PIECE, num_chunks = (num_pieces + CHUNK - 1) / CHUNK;
  WeightChunk weights_now;
  RowChunk x_now;
  weights_now.load(upper, lower, warp, num_pieces);
  const T* row = g < task.count ? task.x_row(g) : nullptr;
  const Output output(task, threadIdx.x, first);
  x_now.load(row, warp, num_pieces);
  float sums[4] = {};
  for (int chunk = warp + WARPS; chunk < num_chunks; chunk += WARPS) {
    WeightChunk weights_next;
    RowChunk x_next;
    weights_next.load(upper, lower, chunk, num_pieces);
    x_next.load(row, chunk, num_pieces);
    multiply(sums, weights_now, x_now);
    weights_now = weights_next;
    x_now = x_next;
  }
  multiply(sums, weights_now, x_now);
  keep(parts, warp, sums);
  __syncthreads();
  output.finish(parts);
}
