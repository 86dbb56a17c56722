// y = x W^T for up to ROWS rows of x, as fast as W can be read. Each CTA owns a contiguous range of outputs: one lane
// streams their weight rows through a ring, from before the previous kernel's end on; 8 warps, which hold their part
// of x in registers, multiply. The partial sums of an output are added in an order that depends on nothing but the
// width, so a row's result does not depend on its neighbours.
// -D ELEMENT (T: of x and y, 16 bits), FP8 (whether W is e4m3 rather than T), ROWS (1 or 2), CHUNKS (pieces of 8
// weights of a row for each thread), GROUP (weight rows multiplied at once), CTAS (of a multiprocessor), CENTRES
// (whether the norm is a layer norm), ACTIVATES (every output: 0 not, 1 by GELU, 2 by GELU's tanh form, 3 by ReLU)
#ifndef CENTRES
#define CENTRES 0
#endif
#ifndef ACTIVATES
#define ACTIVATES 0
#endif
#include "gemm/sm90/gemv_part.cuh"
#include "runtime/ring.cuh"

#if FP8
using Weight = E4m3;
using Pair = u16;
#else
using Weight = T;
using Pair = u32;
#endif

constexpr int WARPS = 8;  // that multiply; one more copies
constexpr int THREADS = 32 * WARPS;
constexpr int SUMS = GROUP * ROWS;  // of a group; each is left with LANES lanes
constexpr int LANES = 32 / SUMS;
constexpr int MAX_SLOTS = 16;
// Bytes of weights that the CTAs of a multiprocessor ask for at once: about what memory gives in the time that it takes
// to answer. More would queue before memory, and whatever else is read meanwhile behind it: for the query of attention
// in front, which the kernel before has just written, that was 4 us.
constexpr int UNDER_WAY = 64 << 10;
constexpr bool PACKED = CHUNKS > 7;  // x stays in 16 bits: fp32 takes too many registers

struct Task {
  const T* x;
  i64 x_stride;
  const u8* weight;  // [streams * num_outputs, width]
  const T* norm;     // x is normalised with it, unless null
  const T* bias;     // of each weight row, or null
  const float* scales;
  T* out;
  i64 out_stride;
  int num_rows, num_outputs, width;
  int streams;  // weight rows of an output: 1, or 2 for silu(gate) * up
  int share;    // outputs of a slot, which holds their rows of one stream behind those of the other
  int batch;    // outputs that are finished together: a multiple of the share, at most one a thread
  bool adds;    // to `out`
  float eps, inverse_width;
  int begin, end;  // this CTA's outputs
#if CENTRES
  const T* shift;  // added by the layer norm, or null
#endif

  DEVICE int row_bytes() const { return width * int(sizeof(Weight)); }
  DEVICE int slot_rows() const { return share * streams; }
};

DEVICE void barrier_of_readers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

DEVICE void stream_weights(const Task& task, CopyRing& ring) {
  const u64 policy = evict_first();
  const int most = max(2, UNDER_WAY / (task.slot_rows() * task.row_bytes())) / CTAS;
  CopyRing arriving = ring;
  int under_way = 0;
  for (int first = task.begin; first < task.end; first += task.share) {
    const u32 bytes = min(task.share, task.end - first) * task.row_bytes();
    if (under_way == most) {
      arriving.wait();
      arriving.advance();
    } else {
      ++under_way;
    }
    ring.acquire(bytes * task.streams);
    for (int stream = 0; stream < task.streams; ++stream) {
      const i64 row = i64(stream) * task.num_outputs + first;
      ring.copy(stream * task.share * task.row_bytes(), task.weight + row * task.row_bytes(), bytes,
                policy);
    }
    ring.advance();
  }
}

// Element at which piece i of this thread begins; of a piece behind the end, where x counts as zero, the row's first.
DEVICE int piece_begin(const Task& task, int i) {
  const int element = (threadIdx.x + THREADS * i) * PIECE;
  return element < task.width ? element : 0;
}
DEVICE bool is_inside(const Task& task, int i) {
  return (threadIdx.x + THREADS * i) * PIECE < task.width;
}

using Words = Pack<u32, 4>;  // a piece of x or of the norm

// `squares` gets this thread's share of the sum of squares of each row, if they are normalised.
template <bool NORMS>
DEVICE void convert(const Task& task, const Words (&words)[ROWS][CHUNKS],
                    const Words (&factors)[CHUNKS], Part<PACKED>& part, float (&squares)[ROWS]) {
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    squares[row] = 0.0f;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      const bool real = is_inside(task, i) && row < task.num_rows;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 word = real ? words[row][i].at[j] : 0;
        float pair[2], factor[2] = {1.0f, 1.0f};
        unpack(word, pair, T{});
        if (NORMS) {
          squares[row] = fmaf(pair[1], pair[1], fmaf(pair[0], pair[0], squares[row]));
          unpack(factors[i].at[j], factor, T{});
        }
        pair[0] *= factor[0];
        pair[1] *= factor[1];
        part.set(row, i, 2 * j, word, pair);
      }
    }
  }
}

DEVICE float total(const float* of_warps) {
  float result = of_warps[0];
#pragma unroll
  for (int warp = 1; warp < WARPS; ++warp) result += of_warps[warp];
  return result;
}

#if CENTRES
// Add up a value of each row over all threads that multiply, in an order that depends on nothing else.
DEVICE void sum_over_threads(float (&values)[ROWS], float* of_warps) {
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const float sum = warp_sum(values[row]);
    if (threadIdx.x % 32 == 0) of_warps[row * WARPS + threadIdx.x / 32] = sum;
  }
  barrier_of_readers();
#pragma unroll
  for (int row = 0; row < ROWS; ++row) values[row] = total(of_warps + row * WARPS);
  barrier_of_readers();
}

// The layer norm of x, in place. A mean and then the squares around it: one pass over both would lose what a large mean
// hides. Behind the end there are zeros, which stay.
DEVICE void centre(const Task& task, Part<false>& part, float* of_warps) {
  float mean[ROWS] = {}, rstd[ROWS] = {};
#pragma unroll
  for (int row = 0; row < ROWS; ++row)
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
      for (int j = 0; j < PIECE; ++j) mean[row] += part.values[row][i][j];
  sum_over_threads(mean, of_warps);
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    mean[row] *= task.inverse_width;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
      for (int j = 0; j < PIECE; ++j) {
        float& value = part.values[row][i][j];
        value = is_inside(task, i) ? value - mean[row] : 0.0f;
        rstd[row] = fmaf(value, value, rstd[row]);
      }
  }
  sum_over_threads(rstd, of_warps);
#pragma unroll
  for (int row = 0; row < ROWS; ++row) rstd[row] = rsqrtf(rstd[row] * task.inverse_width + task.eps);
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    if (!is_inside(task, i)) continue;
    const int begin = piece_begin(task, i);
    const auto factors = load<4>(reinterpret_cast<const u32*>(task.norm + begin));
    Words shifts = {};
    if (task.shift != nullptr) shifts = load<4>(reinterpret_cast<const u32*>(task.shift + begin));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float factor[2], shift[2];
      unpack(factors.at[j], factor, T{});
      unpack(shifts.at[j], shift, T{});
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float& value = part.values[row][i][2 * j + k];
          value = fmaf(value * rstd[row], factor[k], shift[k]);
        }
    }
  }
}
#endif

// Waits for the kernels before. `of_warps [ROWS * WARPS]` is memory for sums.
DEVICE void load_part(const Task& task, Part<PACKED>& part, float (&squares)[ROWS], float* of_warps) {
  const bool norms = !CENTRES && !PACKED && task.norm != nullptr;
  Words factors[CHUNKS], words[ROWS][CHUNKS];
  if (norms) {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
      factors[i] = load<4>(reinterpret_cast<const u32*>(task.norm + piece_begin(task, i)));
  }
  wait_for_previous();
  // All loads before the first use: no latency comes twice.
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const T* x = task.x + min(row, task.num_rows - 1) * task.x_stride;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
      words[row][i] = load_fresh<4>(reinterpret_cast<const u32*>(x + piece_begin(task, i)));
  }
  if (norms)
    convert<true>(task, words, factors, part, squares);
  else
    convert<false>(task, words, factors, part, squares);
#if CENTRES
  centre(task, part, of_warps);
#endif
}

// Multiply GROUP weight rows with this thread's part of every row of x.
DEVICE void multiply(const Task& task, const u8* weights, const Part<PACKED>& part,
                     float (&sums)[SUMS]) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    // Only the last half of the pieces may lie behind the end.
    const int begin = i < CHUNKS / 2 ? (threadIdx.x + THREADS * i) * PIECE : piece_begin(task, i);
    float weight[GROUP][PIECE];
#pragma unroll
    for (int r = 0; r < GROUP; ++r) {
      const u8* piece = weights + r * task.row_bytes() + begin * int(sizeof(Weight));
      const auto pairs = load<4>(reinterpret_cast<const Pair*>(piece));
#pragma unroll
      for (int j = 0; j < 4; ++j) unpack(pairs.at[j], &weight[r][2 * j], Weight{});
    }
#pragma unroll
    for (int j = 0; j < PIECE; j += 2)
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        float pair[2];
        part.get(row, i, j, pair);
#pragma unroll
        for (int r = 0; r < GROUP; ++r) {
          float& sum = sums[r * ROWS + row];
          sum = fmaf(weight[r][j], pair[0], sum);
          sum = fmaf(weight[r][j + 1], pair[1], sum);
        }
      }
  }
}

// Sums over the warp: lane l is left with number l / LANES, added in the same order however many there are.
template <int MASK = 16, int COUNT>
DEVICE float reduce(const float (&sums)[COUNT]) {
  constexpr int HALF = COUNT / 2;
  const bool upper = threadIdx.x & MASK;
  float folded[HALF > 0 ? HALF : 1];
  if constexpr (HALF == 0) folded[0] = sums[0] + __shfl_xor_sync(ALL_LANES, sums[0], MASK);
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    const float kept = upper ? sums[HALF + i] : sums[i];
    folded[i] = kept + __shfl_xor_sync(ALL_LANES, upper ? sums[i] : sums[HALF + i], MASK);
  }
  if constexpr (MASK == 1)
    return folded[0];
  else
    return reduce<MASK / 2>(folded);
}

DEVICE float activated(float x) {
  if constexpr (ACTIVATES == 1) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
  if constexpr (ACTIVATES == 2) return times_logistic_fast(x, 1.5957691216057308f * (x + 0.044715f * x * x * x));
  return x < 0.0f ? 0.0f : x;  // a NaN stays one
}

// The one output of a batch that this thread finishes. What it takes beside the sum is loaded as the batch begins.
class Output {
  bool real;
  int row, column;
  int at;  // where the batch's sums of it begin
  float before = 0.0f, scale[2] = {1.0f, 1.0f}, bias[2] = {};

 public:
  DEVICE Output(const Task& task, int first, int end)
      : row(threadIdx.x % ROWS), column(first + threadIdx.x / ROWS) {
    const int slot = (column - first) / task.share, place = (column - first) % task.share;
    at = ((slot * task.slot_rows() + place) * ROWS + row) * WARPS;
    real = row < task.num_rows && column < end;
    if (!real) return;
#pragma unroll
    for (int stream = 0; stream < 2; ++stream) {
      if (stream == task.streams) break;
      const int weight_row = stream * task.num_outputs + column;
      if (task.scales != nullptr) scale[stream] = task.scales[weight_row];
      if (task.bias != nullptr) bias[stream] = to_float(task.bias[weight_row]);
    }
    if (task.adds) before = to_float(load_fresh<1>(task.out + row * task.out_stride + column).at[0]);
  }

  // `sums [row of the batch's slots][row of x][warp]`, `squares [row of x][warp]`.
  DEVICE void write(const Task& task, const float* sums, const float* squares) const {
    if (!real) return;
    float rstd = 1.0f;
    if (!CENTRES && task.norm != nullptr)
      rstd = rsqrtf(total(squares + row * WARPS) * task.inverse_width + task.eps);
    float value = total(sums + at) * rstd * scale[0] + bias[0];
    if (task.streams == 2) {
      const float up = total(sums + at + task.share * ROWS * WARPS) * rstd * scale[1] + bias[1];
      value = silu_fast(value) * up;
    }
    if constexpr (ACTIVATES != 0) value = activated(value);
    task.out[row * task.out_stride + column] = from_float<T>(value + before);
  }
};

DEVICE void multiply_rows(const Task& task, CopyRing& ring, float* sums, float* squares) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Part<PACKED> part;
  float square[ROWS];
  load_part(task, part, square, squares);
#pragma unroll
  for (int row = 0; row < ROWS && !CENTRES && task.norm != nullptr; ++row) {
    square[row] = warp_sum(square[row]);
    if (lane == 0) squares[row * WARPS + warp] = square[row];
  }
  for (int first = task.begin; first < task.end; first += task.batch) {
    const int end = min(first + task.batch, task.end);
    const Output output(task, first, end);
    float* target = sums + warp;
    for (int begin = first; begin < end; begin += task.share) {
      // Behind the last output lies what the slot held before: summed, never written.
      const int num_rows = task.streams == 1 ? end - begin : task.slot_rows();
      const u8* weights = ring.wait();
      float seen = 0.0f;
      for (int row = 0; row < min(num_rows, task.slot_rows()); row += GROUP) {
        float group[SUMS];
        multiply(task, weights + row * task.row_bytes(), part, group);
        seen = reduce(group);
        if (lane % LANES == 0) target[(row * ROWS + lane / LANES) * WARPS] = seen;
      }
      ring.release(seen);
      ring.advance();
      target += task.slot_rows() * ROWS * WARPS;
    }
    barrier_of_readers();
    output.write(task, sums, squares);
    if (end < task.end) barrier_of_readers();
  }
}

// Every CTA has `quotient` outputs, the first `remainder` one more.
extern "C" __global__ void __launch_bounds__(THREADS + 32, CTAS)
    gemv(const T* x, i64 x_stride, const u8* weight, const T* norm, const T* bias,
         const float* scales, T* out, i64 out_stride, i64 num_rows, i64 num_outputs, i64 width,
         i64 streams, i64 share, i64 batch, i64 num_slots, i64 quotient, i64 remainder, i64 adds,
         float eps, float inverse_width
#if CENTRES
         ,
         const T* shift
#endif
    ) {
  extern __shared__ __align__(128) u8 slots[];
  __shared__ u64 barriers[2 * MAX_SLOTS];
  __shared__ float sums[THREADS * WARPS], squares[ROWS * WARPS];
  const int cta = blockIdx.x, begin = cta * int(quotient) + min(cta, int(remainder));
  const Task task{x,
                  x_stride,
                  weight,
                  norm,
                  bias,
                  scales,
                  out,
                  out_stride,
                  int(num_rows),
                  int(num_outputs),
                  int(width),
                  int(streams),
                  int(share),
                  int(batch),
                  adds != 0,
                  eps,
                  inverse_width,
                  begin,
                  begin + int(quotient) + (cta < remainder)
#if CENTRES
                      ,
                  shift
#endif
  };
  CopyRing ring(slots, barriers, task.slot_rows() * task.row_bytes(), int(num_slots));
  const bool copies = threadIdx.x == THREADS;
  if (copies) {
    start_next();
    ring.init(WARPS);
  }
  __syncthreads();
  if (copies)
    stream_weights(task, ring);
  else if (threadIdx.x < THREADS)
    multiply_rows(task, ring, sums, squares);
}
