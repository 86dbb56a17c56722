// GEMMs of experts with up to eight rows each, mostly, as fast as their weights can be read. A CTA has OUTPUTS outputs of up to
// eight rows of an expert, its warps share out the width: weights go straight from memory to registers, where they
// are the left operand of tensor cores, each of their bytes once. The parts of a sum are added in the order of warps.
// -D ELEMENT, FP8, GATED (see pieces.cuh)
#include "experts/pieces.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = 8;                     // of x
constexpr int OUTPUTS = GATED ? 8 : 16;     // of 16 weight rows
constexpr int CHUNK = 8;                    // pieces of a row: 128 bytes of weights
constexpr int AHEAD = 1;                    // chunks of a warp that are on their way at once, and as many that arrived

// Of a multiprocessor, for which registers must do.
#if __CUDA_ARCH__ >= 1000
constexpr int CTAS = 4;
#else
constexpr int CTAS = FP8 ? 4 : 6;
#endif

// For what is read once: past the L1 cache.
DEVICE Bytes load_once(const u8* address) {
  Bytes result;
  u32(&to)[4] = result.at;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(address));
  return result;
}

// Chunks warp, warp + WARPS, ... are a warp's. A lane has pieces t and t + 4 of each, of two weight rows and one of x.
struct Chunks {
  Bytes weights[AHEAD][2][2];
  Bytes x[AHEAD][2][X_PIECES];

  DEVICE void load(const u8* upper, const u8* lower, const T* row, int first, int num_pieces) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int piece = (first + i * WARPS) * CHUNK + half * 4 + t;
        const bool real = piece < num_pieces;
        weights[i][half][0] = real ? load_once(upper + piece * 16) : Bytes{};
        weights[i][half][1] = real ? load_once(lower + piece * 16) : Bytes{};
#pragma unroll
        for (int j = 0; j < X_PIECES; ++j) {
          x[i][half][j] = Bytes{};
          if (real && row != nullptr)
            x[i][half][j] = load_fresh<4>(reinterpret_cast<const u32*>(row + piece * PIECE + j * 8));
        }
      }
  }
  DEVICE void multiply_into(float (&sums)[4]) const {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        multiply(sums, operand(weights[i][half][0]), operand(weights[i][half][1]), operand(x[i][half]));
  }
};

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
      bias[stream] = task.bias_of(column + stream * task.outputs);
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

// Grid: x = outputs, y = tiles.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS) skinny(PARAMETERS) {
  __shared__ float parts[WARPS][16][ROWS + 1];
  start_next();
  wait_for_previous();
  TASK(blockIdx.y);
  if (task.count == 0) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x * OUTPUTS;
  const u8* upper = task.weight_row(first + g);
  const u8* lower = task.weight_row(GATED ? task.outputs + first + g : min(first + 8, task.outputs - 8) + g);
  const T* row = g < task.count ? task.x_row(g) : nullptr;
  const Output output(task, first);
  const int num_pieces = task.width / PIECE, num_chunks = (num_pieces + CHUNK - 1) / CHUNK;
  float sums[4] = {};
  Chunks now;
  now.load(upper, lower, row, warp, num_pieces);
  for (int chunk = warp + AHEAD * WARPS; chunk < num_chunks; chunk += AHEAD * WARPS) {
    Chunks next;
    next.load(upper, lower, row, chunk, num_pieces);
    now.multiply_into(sums);
    now = next;
  }
  now.multiply_into(sums);
#pragma unroll
  for (int i = 0; i < 4; ++i) parts[warp][g + i / 2 * 8][2 * t + i % 2] = sums[i];
  __syncthreads();
  output.finish(parts);
}
