// y = x W^T for up to ROWS rows of x, as fast as W can be read. Each CTA owns a contiguous range of outputs: one lane
// streams their weight rows through a ring, from before the previous kernel's end on; 8 warps, which hold their part
// of x in registers, multiply. The partial sums of an output are added in an order that depends on nothing but the
// width, so a row's result does not depend on its neighbours.
// -D ELEMENT (T: of x and y, 16 bits), FP8, INT8 (whether W is e4m3, or int8, rather than T), ROWS (1 or 2), CHUNKS
// (pieces of 8 weights of a row for each thread), GROUP (weight rows multiplied at once), CTAS (of a multiprocessor),
// CENTRES (whether the norm is a layer norm), ACTIVATES (every output: 0 not, 1 by GELU, 2 by GELU's tanh form, 3 by
// ReLU), ADAPTS (whether rows have terms of adapters)
#ifndef INT8
#define INT8 0
#endif
#ifndef CENTRES
#define CENTRES 0
#endif
#ifndef ACTIVATES
#define ACTIVATES 0
#endif
#ifndef ADAPTS
#define ADAPTS 0
#endif
#include "gemm/sm90/gemv_task.cuh"
#include "runtime/ring.cuh"

constexpr int SUMS = GROUP * ROWS;  // of a group; each is left with LANES lanes
constexpr int LANES = 32 / SUMS;
constexpr int MAX_SLOTS = 16;
// Bytes of weights that the CTAs of a multiprocessor ask for at once: about what memory gives in the time that it takes
// to answer. More would queue before memory, and whatever else is read meanwhile behind it: for the query of attention
// in front, which the kernel before has just written, that was 4 us.
constexpr int UNDER_WAY = 64 << 10;

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

// What a sum of each row of x begins with: less the excess of weights, times this thread's part.
DEVICE void begin_sums(const Part<PACKED>& part, float (&begins)[ROWS]) {
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    begins[row] = 0.0f;
#pragma unroll
    for (int i = 0; INT8 && i < CHUNKS; ++i)
#pragma unroll
      for (int j = 0; j < PIECE; j += 2) {
        float pair[2];
        part.get(row, i, j, pair);
        begins[row] -= pair[0] + pair[1];
      }
    begins[row] *= EXCESS;
  }
}

// Multiply GROUP weight rows with this thread's part of every row of x.
DEVICE void multiply(const Task& task, const u8* weights, const Part<PACKED>& part, const float (&begins)[ROWS],
                     float (&sums)[SUMS]) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) sums[i] = INT8 ? begins[i % ROWS] : 0.0f;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    // Only the last half of the pieces may lie behind the end.
    const int begin = i < CHUNKS / 2 ? (threadIdx.x + THREADS * i) * PIECE : piece_begin(task, i);
    float weight[GROUP][PIECE];
#pragma unroll
    for (int r = 0; r < GROUP; ++r) {
      const u8* piece = weights + r * task.row_bytes() + begin * int(sizeof(Weight));
      const auto units = load<PIECE / UNIT>(reinterpret_cast<const Unit*>(piece));
#pragma unroll
      for (int j = 0; j < PIECE / UNIT; ++j) unpack(units.at[j], &weight[r][UNIT * j], Weight{});
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

DEVICE float activated(float x) {
  if constexpr (ACTIVATES == 1) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
  if constexpr (ACTIVATES == 2) return times_logistic_fast(x, 1.5957691216057308f * (x + 0.044715f * x * x * x));
  return x < 0.0f ? 0.0f : x;  // a NaN stays one
}

#if ADAPTS
// Multiplies this CTA's rows of A, of all that there are, with the row of x that has them. By all threads that multiply.
DEVICE void make_t(const Task& task, const Part<PACKED>& part, const float* squares) {
  SharedTerms& shared = *task.terms;
  int next = int(gridDim.x - 1 - blockIdx.x), first = 0;
#pragma unroll 1
  for (int i = 0; i < ROWS * PLACE_PARTS; ++i) {
    const Term& term = shared.of_row[i / PLACE_PARTS][i % PLACE_PARTS];
    for (; next < first + term.rank; next += gridDim.x) {
      const int rank = next - first;
      const T* a = term.tile(rank, 0) + i64(rank % RANKS) * task.width;
      Words words[CHUNKS];
      float sums[ROWS] = {};
#pragma unroll
      for (int k = 0; k < CHUNKS; ++k)
        words[k] = load_fresh<4>(reinterpret_cast<const u32*>(a + piece_begin(task, k)));
#pragma unroll
      for (int k = 0; k < CHUNKS; ++k)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float of_a[2], x[2];
          unpack(words[k].at[j], of_a, T{});
#pragma unroll
          for (int row = 0; row < ROWS; ++row) {
            part.get(row, k, 2 * j, x);
            sums[row] = fmaf(of_a[1], x[1], fmaf(of_a[0], x[0], sums[row]));
          }
        }
      const float sum = reduce(sums);
      if (threadIdx.x % (32 / ROWS) == 0) shared.sums[threadIdx.x % 32 * ROWS / 32][threadIdx.x / 32] = sum;
      barrier_of_readers();
      if (threadIdx.x == 0) {
        const int row = i / PLACE_PARTS;
        task.adapters.t[row * task.adapters.width + term.column + rank] =
            total(shared.sums[row]) * inverse_rms(task, squares + row * WARPS);
        __threadfence();
        atomicAdd(task.adapters.arrivals, 1);
      }
      barrier_of_readers();
    }
    first += term.rank;
  }
}
#endif

// The one output of a batch that this thread finishes. What it takes beside the sum is loaded as the batch begins.
class Output {
  bool real;
  int row, column;
  int at;  // where the batch's sums of it begin
  float before = 0.0f, scale[2] = {1.0f, 1.0f}, bias[2] = {};
#if ADAPTS
  OutputTerm terms[2];
#endif

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
#if ADAPTS
  DEVICE void load_terms(const Task& task) {
    if (!real) return;
    if (task.streams == 1) {
      terms[0] = OutputTerm::of_stacked(task.adapters, *task.terms, row, column);
      return;
    }
#pragma unroll
    for (int stream = 0; stream < 2; ++stream) terms[stream] = OutputTerm(*task.terms, row, stream, column);
  }
  // Adds terms as if they were biases.
  DEVICE void add_terms(const Task& task) {
#pragma unroll
    for (int stream = 0; stream < 2; ++stream)
      if (terms[stream].is_there()) bias[stream] += terms[stream].value(task.adapters, *task.terms);
  }
#endif

  // `sums [row of the batch's slots][row of x][warp]`, `squares [row of x][warp]`.
  DEVICE void write(const Task& task, const float* sums, const float* squares) const {
    if (!real) return;
    const float rstd = inverse_rms(task, squares + row * WARPS);
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
  float square[ROWS], begins[ROWS];
  load_part(task, part, square, squares);
  begin_sums(part, begins);
#pragma unroll
  for (int row = 0; row < ROWS && !CENTRES && task.norm != nullptr; ++row) {
    square[row] = warp_sum(square[row]);
    if (lane == 0) squares[row * WARPS + warp] = square[row];
  }
#if ADAPTS
  task.terms->find(task.adapters);
  barrier_of_readers();
  make_t(task, part, squares);
#endif
  for (int first = task.begin; first < task.end; first += task.batch) {
    const int end = min(first + task.batch, task.end);
    Output output(task, first, end);
#if ADAPTS
    output.load_terms(task);
#endif
    float* target = sums + warp;
    for (int begin = first; begin < end; begin += task.share) {
      // Behind the last output lies what the slot held before: summed, never written.
      const int num_rows = task.streams == 1 ? end - begin : task.slot_rows();
      const u8* weights = ring.wait();
      float seen = 0.0f;
      for (int row = 0; row < min(num_rows, task.slot_rows()); row += GROUP) {
        float group[SUMS];
        multiply(task, weights + row * task.row_bytes(), part, begins, group);
        seen = reduce(group);
        if (lane % LANES == 0) target[(row * ROWS + lane / LANES) * WARPS] = seen;
      }
      ring.release(seen);
      ring.advance();
      target += task.slot_rows() * ROWS * WARPS;
    }
    barrier_of_readers();
#if ADAPTS
    if (first == task.begin) take_t(task);
    output.add_terms(task);
#endif
    output.write(task, sums, squares);
    if (end < task.end) barrier_of_readers();
  }
}

DEVICE void run(const Task& task, CopyRing& ring, float* sums, float* squares) {
  if (threadIdx.x == THREADS)
    stream_weights(task, ring);
  else if (threadIdx.x < THREADS)
    multiply_rows(task, ring, sums, squares);
#if ADAPTS
  if (threadIdx.x < THREADS || task.is_long()) return;
  __syncwarp();
  wait_for_previous();
  fetch_t(task.adapters, *task.terms);
  barrier_of_all();
#endif
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
#if ADAPTS
         ,
         const i64* groups, i64 num_groups, const int* list, i64 place, int* scratch, i64 t_width, i64 size0, i64 size1
#endif
    ) {
  extern __shared__ __align__(128) u8 slots[];
  __shared__ u64 barriers[2 * MAX_SLOTS];
  __shared__ float sums[THREADS * WARPS], squares[ROWS * WARPS];
#if ADAPTS
  __shared__ SharedTerms terms;
  terms.clear();
#endif
  const int cta = blockIdx.x, begin = cta * int(quotient) + min(cta, int(remainder));
  const Task task{x,
                  x_stride,
                  weight,
                  norm,
                  bias,
                  scales,
                  out,
                  out_stride,
                  int(num_rows), int(num_outputs), int(width),
                  int(streams), int(share), int(batch),
                  adds != 0,
                  eps,
                  inverse_width,
                  begin,
                  begin + int(quotient) + (cta < remainder)
#if CENTRES
                      ,
                  shift
#endif
#if ADAPTS
                      ,
                  {groups, int(num_groups), list, place, scratch, reinterpret_cast<float*>(scratch + 4),
                   int(t_width), {int(size0), int(size1)}},
                  &terms
#endif
  };
  CopyRing ring(slots, barriers, task.slot_rows() * task.row_bytes(), int(num_slots));
  if (threadIdx.x == THREADS) {
    start_next();
    ring.init(WARPS);
  }
  __syncthreads();
  run(task, ring, sums, squares);
}
