// Outputs of all experts of up to eight rows, added to the residual sum with what is shared: one launch in the place of
// a GEMM and of `combine`. A CTA has 16 outputs and every expert of the batch; `split` warps share out an expert's
// width. Weights are on their way before the kernel waits for x, as the choice is known by then. The parts of a sum
// are added in the order of warps, a row's experts in the order of ranks, in fp32, and all is rounded once.
// -D ELEMENT, FP8, GATED=0 (see pieces.cuh), WARPS (of a CTA)
#include "experts/chunks.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int OUTPUTS = 16;
constexpr int MAX_PARTS = 256;  // pairs times warps that share out one

// Chunks of a warp that are on their way at once, for which registers must do.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int AHEAD = 2;
#else
constexpr int AHEAD = FP8 ? 2 : 3;
#endif

struct Shared {
  float parts[MAX_PARTS][OUTPUTS + 1];  // of place * split + part
  float weights[MAX_PARTS];             // of pairs
  int places[MAX_PARTS];
};

// A warp's part of a tile: chunks part, part + split, ... A lane walks its pieces of them by an address and a count
// of pieces up to the end, so that little is computed between the wait and the first loads of x.
struct Stream {
  const Task& task;
  const int part, split;
  const u8* at;  // of the upper weight row
  int to_lower;  // bytes from there
  int left;
  WeightChunk ahead[AHEAD];
  float scale[2], bias[2];

  DEVICE Stream(const Task& task, int first, int part, int split) : task(task), part(part), split(split) {
    const int g = threadIdx.x % 32 / 4, rows[2] = {first + g, min(first + 8, task.outputs - 8) + g};
    at = weights_of(task, rows[0]) + piece_of(part, 0) * 16;
    to_lower = (rows[1] - rows[0]) * task.width * WEIGHT_BYTES;
    left = task.width / PIECE - piece_of(part, 0);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) load(ahead[i]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale[i] = task.scale(rows[i]);
      bias[i] = part == 0 ? task.bias_of(rows[i]) : 0.0f;
    }
  }
  DEVICE void finish(Shared& shared) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const T* x = task.x_row(g) + piece_of(part, 0) * PIECE;
    int x_left = g < task.count ? task.width / PIECE - piece_of(part, 0) : 0;
    float sums[4] = {};
    for (int chunk = part; chunk * CHUNK * PIECE < task.width; chunk += AHEAD * split) {
      RowChunk rows[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) load(rows[i], x, x_left);
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        multiply(sums, ahead[i], rows[i]);
        load(ahead[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int place = 2 * t + i % 2;
      if (place < task.count)
        shared.parts[(task.first + place) * split + part][g + i / 2 * 8] = sums[i] * scale[i / 2] + bias[i / 2];
    }
  }

 private:
  DEVICE void load(WeightChunk& chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool real = half * 4 < left;
      chunk.at[half][0] = real ? load_once(at + half * 64) : Bytes{};
      chunk.at[half][1] = real ? load_once(at + to_lower + half * 64) : Bytes{};
    }
    at += split * CHUNK * 16;
    left -= split * CHUNK;
  }
  DEVICE void load(RowChunk& chunk, const T*& x, int& x_left) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < X_PIECES; ++i) {
        chunk.at[half][i] = Bytes{};
        if (half * 4 < x_left)
          chunk.at[half][i] = load_fresh<4>(reinterpret_cast<const u32*>(x + half * 4 * PIECE + i * 8));
      }
    x += split * CHUNK * PIECE;
    x_left -= split * CHUNK;
  }
};

// The element that a thread adds to, and what is added beside experts.
struct Output {
  const int row = threadIdx.x / OUTPUTS, within = threadIdx.x % OUTPUTS;
  T* target;
  const T *added, *gate;
  bool real;
  Pack<T, 1> before, term, logit;

  DEVICE void load() {
    if (!real) return;
    before = load_fresh<1>(target);
    if (added != nullptr) term = load_fresh<1>(added);
    if (gate != nullptr) logit = load_fresh<1>(gate);
  }
  DEVICE void finish(const Shared& shared, int top_k, int split) const {
    if (!real) return;
    float total = to_float(before.at[0]);
    for (int pair = row * top_k; pair < (row + 1) * top_k; ++pair) {
      const int at = shared.places[pair] * split;
      float sum = shared.parts[at][within];
      for (int i = 1; i < split; ++i) sum += shared.parts[at + i][within];
      total = fmaf(sum, shared.weights[pair], total);
    }
    if (added != nullptr) {
      const float factor = gate == nullptr ? 1.0f : 1.0f / (1.0f + expf(-to_float(logit.at[0])));
      total = fmaf(to_float(term.at[0]), factor, total);
    }
    *target = from_float<T>(total);
  }
};

// What it reads before it waits had been written before the kernel in front of it went on (skinny.cu).
extern "C" __global__ void __launch_bounds__(THREADS, 16 / WARPS)
    down_add(PARAMETERS, i64 num_tiles, i64 num_rows, i64 split, i64 stride, const T* added, const T* added_gate,
             i64 gate_stride) {
  __shared__ Shared shared;
  start_next();
  const int thread = threadIdx.x, warp = thread / 32, warps = int(split), part = warp % warps;
  const int first = blockIdx.x * OUTPUTS, num_pairs = int(num_rows * top_k);
  Output output;
  const int column = first + output.within;
  output.real = output.row < num_rows && column < outputs;
  output.target = out + output.row * stride + column;
  output.added = added == nullptr ? nullptr : added + output.row * outputs + column;
  output.gate = added_gate == nullptr ? nullptr : added_gate + output.row * gate_stride;
  bool has_waited = false;
  const auto wait_once = [&] {
    if (has_waited) return;
    has_waited = true;
    if (thread < num_pairs) {
      shared.places[load_fresh<1>(order + thread).at[0]] = thread;
      shared.weights[thread] = load_fresh<1>(weights + thread).at[0];
    }
    wait_for_previous();
    output.load();
  };
  for (int tile = warp / warps; tile < num_tiles; tile += WARPS / warps) {
    TASK(tile);
    if (task.count == 0) break;
    Stream stream(task, first, part, warps);
    wait_once();
    stream.finish(shared);
  }
  wait_once();
  __syncthreads();
  output.finish(shared, int(top_k), warps);
}
