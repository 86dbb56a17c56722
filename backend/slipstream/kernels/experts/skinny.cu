// GEMMs of experts with up to eight rows each, mostly, as fast as their weights can be read. A CTA has OUTPUTS outputs of up to
// eight rows of an expert, its warps share out the width: weights go straight from memory to registers, where they
// are the left operand of tensor cores, each of their bytes once. The parts of a sum are added in the order of warps.
// -D ELEMENT, FP8, GATED (see pieces.cuh)
#include "experts/chunks.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int OUTPUTS = GATED ? 8 : 16;  // of 16 weight rows

// Of a multiprocessor, for which registers must do.
#if __CUDA_ARCH__ >= 1000
constexpr int CTAS = 4;
#else
constexpr int CTAS = FP8 ? 4 : 6;
#endif

// The output that a thread finishes; what it takes beside the sum is loaded before the weights.
struct Output {
  const Task& task;
  const int within = threadIdx.x % OUTPUTS, row = threadIdx.x / OUTPUTS;
  const int column;
  const bool real;
  float scale[2], bias[2];
  float weight = 1.0f;
  T* target;

  DEVICE Output(const Task& task, int first)
      : task(task), column(first + within), real(row < task.count && column < task.outputs) {
    if (!real) return;
#pragma unroll
    for (int stream = 0; stream < 1 + GATED; ++stream) {
      scale[stream] = task.scale(column + stream * task.outputs);
      const int row_of_weights = column + stream * task.outputs;
      bias[stream] = task.adapted(task.bias_of(row_of_weights), task.first + row, row_of_weights);
    }
    i64 place = task.first + row;
    if (!GATED) {
      place = task.pair(row);
      weight = load_fresh<1>(task.weights + place).at[0];
    }
    target = task.out + place * task.outputs + column;
  }

  DEVICE void finish(const float (&sums)[WARPS][16][ROWS + 1]) const {
    if (!real) return;
    float value = total(sums, within) * scale[0] + bias[0];
    if (GATED) value = gated(value, total(sums, within + 8) * scale[1] + bias[1], task.gate);
    *target = from_float<T>(value * weight);
  }

 private:
  DEVICE float total(const float (&sums)[WARPS][16][ROWS + 1], int weight_row) const {
    float sum = sums[0][weight_row][row];
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) sum += sums[warp][weight_row][row];
    return sum;
  }
};

// Grid: x = outputs, y = tiles. Chunks warp, warp + WARPS, ... are a warp's; one is on its way as another is multiplied.
// What is launched next may read the choice before it waits: that had been made when this kernel went on.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS) skinny(PARAMETERS) {
  __shared__ float parts[WARPS][16][ROWS + 1];
  wait_for_previous();
  start_next();
  TASK(blockIdx.y);
  if (task.count == 0) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x * OUTPUTS;
  const u8* upper = weights_of(task, first + g);
  const u8* lower = weights_of(task, GATED ? task.outputs + first + g : min(first + 8, task.outputs - 8) + g);
  const int num_pieces = task.width / PIECE, num_chunks = (num_pieces + CHUNK - 1) / CHUNK;
  WeightChunk weights_now;
  RowChunk x_now;
  weights_now.load(upper, lower, warp, num_pieces);
  const T* row = g < task.count ? task.x_row(g) : nullptr;
  const Output output(task, first);
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
#pragma unroll
  for (int i = 0; i < 4; ++i) parts[warp][g + i / 2 * 8][2 * t + i % 2] = sums[i];
  __syncthreads();
  output.finish(parts);
}
