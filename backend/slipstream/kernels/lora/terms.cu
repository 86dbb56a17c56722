// Low-rank terms of the adapters of a step's rows: `shrink` makes `t = x A^T` in fp32, `expand` adds `t B^T` to a GEMM's
// result and rounds once. A group is of up to 16 rows that have one adapter, so A and B are read once for them.
// Which rows and adapters there are is read from the device: one CUDA graph serves them all. A row's sums have one
// order, whatever rows and groups are beside it.
// -D ELEMENT (T, 16 bits)
#include "lora/table.cuh"
#include "runtime/mma.cuh"

constexpr int ROWS = 16;                     // of a group
constexpr int WARPS = 8, BLOCK = 32;         // inputs that a warp multiplies at once
constexpr int AHEAD = 3;                     // blocks whose loads are on their way
constexpr int COLUMNS = 32;                  // outputs of a warp
constexpr float UNUSED = 0.0f;

// The terms of the groups that a CTA comes to, every `distance`th, found by all threads at once: one after another they
// would cost three answers of memory each.
template <int NUM_PARTS>
struct FoundTerms {
  static constexpr int MOST = WARPS * 32 / NUM_PARTS;
  Term found[MOST + 1][NUM_PARTS];

  DEVICE void find(const i64* groups, i64 first, i64 distance, i64 num_groups, i64 place, int part, int which) {
    const int own = int(threadIdx.x) / NUM_PARTS, of_own = int(threadIdx.x) % NUM_PARTS;
    __syncthreads();
    if (own < MOST) {
      const i64 number = first + own * distance;
      found[own][of_own] = number < num_groups ? Term::of(groups, number, place, part + of_own, which) : Term::none();
    }
    if (int(threadIdx.x) < NUM_PARTS) found[MOST][threadIdx.x] = Term::none();
    __syncthreads();
  }
};

// Rows that are multiplied, behind an RMS norm if there is a weight.
struct Rows {
  const T* at[2];  // the lane's, null behind the last of the group
  const T* weight;
  float scale[2];
  bool plus_one;

  DEVICE Pack<T, 8> read(int number, i64 column) const {
    return at[number] == nullptr ? Pack<T, 8>{} : load_fresh<8>(at[number] + column);
  }
  DEVICE void normalise(int number, Pack<T, 8>& x, const Pack<T, 8>& factor) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float value = to_float(factor.at[i]);
      x.at[i] = from_float<T>(to_float(x.at[i]) * scale[number] * (plus_one ? 1.0f + value : value));
    }
  }
};

// The warp's share of a row's sum of squares: all warps together read the row, as the latency of one would be in the way.
DEVICE float squares(const T* row, int inputs) {
  float sum = 0.0f;
#pragma unroll 2
  for (int k = int(threadIdx.x) * 8; k < inputs; k += WARPS * 256) {
    const Pack<T, 8> pack = load_fresh<8>(row + k);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(to_float(pack.at[i]), to_float(pack.at[i]), sum);
  }
  return warp_sum(sum);
}

// `1 / rms` of a row, from the sums of its warps.
DEVICE float row_scale(const float (&of_warps)[WARPS], int inputs, float eps) {
  float sum = of_warps[0];
#pragma unroll
  for (int i = 1; i < WARPS; ++i) sum += of_warps[i];
  return 1.0f / sqrtf(sum / float(inputs) + eps);
}

DEVICE const u32* words(const Pack<T, 8>& pack) { return reinterpret_cast<const u32*>(&pack); }

// Sums of 16 ranks (rows of C) and 16 rows (its columns) over a warp's share of the inputs. Of each block of 32 inputs
// a lane has 8 that follow each other, of A and of x alike: so both operands of a product have the same order.
DEVICE void multiply(float (&sums)[2][4], const T* a, const Rows& rows, i64 inputs, int begin, int end) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T* low = a + lane / 4 * inputs;
  const T* high = low + 8 * inputs;
  for (int block = begin + warp * BLOCK; block < end; block += WARPS * BLOCK * AHEAD) {
    Pack<T, 8> of_a[AHEAD][2], of_x[AHEAD][2];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int k = block + i * WARPS * BLOCK + lane % 4 * 8;
      const bool is_there = k < end;
      of_a[i][0] = is_there ? load_fresh<8>(low + k) : Pack<T, 8>{};
      of_a[i][1] = is_there ? load_fresh<8>(high + k) : Pack<T, 8>{};
#pragma unroll
      for (int n = 0; n < 2; ++n) of_x[i][n] = is_there ? rows.read(n, k) : Pack<T, 8>{};
      if (rows.weight != nullptr && is_there) {
        const Pack<T, 8> factor = load<8>(rows.weight + k);
#pragma unroll
        for (int n = 0; n < 2; ++n) rows.normalise(n, of_x[i][n], factor);
      }
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const u32 *first = words(of_a[i][0]), *second = words(of_a[i][1]);
#pragma unroll
      for (int half = 0; half < 4; half += 2) {
        const u32 fragment[4] = {first[half], second[half], first[half + 1], second[half + 1]};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const u32* x = words(of_x[i][n]);
          multiply_add(sums[n], fragment, x[half], x[half + 1], T{});
        }
      }
    }
  }
}

// The warps' sums of a tile, added in the order of warps: thread `row * 16 + rank` returns its own.
DEVICE float add_warps(float (&totals)[WARPS][ROWS * RANKS], const float (&sums)[2][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 8 * n + lane % 4 * 2 + i % 2;
      totals[warp][row * RANKS + lane / 4 + i / 2 * 8] = sums[n][i];
    }
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) total += totals[i][threadIdx.x];
  return total;
}

// The rows of a group, behind their norm if there is one; what a lane multiplies of them.
DEVICE Rows rows_of(const Term& group, const T* x, i64 stride, const T* weight, float eps, bool plus_one,
                    const int* list, i64 inputs, float (&of_warps)[ROWS][WARPS]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (weight != nullptr) {
    __syncthreads();
#pragma unroll 4
    for (int row = 0; row < group.count; ++row) {
      const float sum = squares(x + load_fresh<1>(list + group.begin + row).at[0] * stride, int(inputs));
      if (lane == 0) of_warps[row][warp] = sum;
    }
    __syncthreads();
  }
  Rows rows;
  rows.weight = weight;
  rows.plus_one = plus_one;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int row = lane / 4 + 8 * n;
    const bool is_there = row < group.count;
    rows.at[n] = is_there ? x + load_fresh<1>(list + group.begin + row).at[0] * stride : nullptr;
    rows.scale[n] = is_there && weight != nullptr ? row_scale(of_warps[row], int(inputs), eps) : UNUSED;
  }
  return rows;
}

// Partial sums `t [splits, num_rows, width]`, the rows in the order of the list. Grid: x = groups by turns, y = split of
// the inputs (`share` of them, a multiple of 32), z = tiles of ranks by turns.
extern "C" __global__ void __launch_bounds__(256, 2)
    shrink(const T* x, i64 stride, const T* weight, float eps, i64 plus_one, const i64* groups, i64 num_groups,
           const int* list, i64 place, float* partial, i64 num_rows, i64 width, i64 inputs, i64 share) {
  wait_for_previous();
  start_next();  // after the wait: what starts now may read groups and terms before its own
  __shared__ float totals[WARPS][ROWS * RANKS];
  __shared__ float of_warps[ROWS][WARPS];  // sums of squares
  __shared__ FoundTerms<PARTS> terms;
  const int begin = int(blockIdx.y * share), limit = begin + int(share);
  const int end = limit < int(inputs) ? limit : int(inputs);
  for (i64 first = blockIdx.x; first < num_groups; first += terms.MOST * gridDim.x) {
    terms.find(groups, first, gridDim.x, num_groups, place, 0, 0);
    for (int i = 0; terms.found[i][0].count > 0; ++i) {
      const Term(&of_parts)[PARTS] = terms.found[i];
      int num_tiles = 0;
      for (int part = 0; part < PARTS; ++part) num_tiles += of_parts[part].rank / RANKS;
      if (int(blockIdx.z) >= num_tiles) continue;
      const Rows rows = rows_of(of_parts[0], x, stride, weight, eps, plus_one != 0, list, inputs, of_warps);
      int number = 0;
#pragma unroll 1
      for (int part = 0; part < PARTS; ++part) {
        const Term& term = of_parts[part];
#pragma unroll 1
        for (int rank = 0; rank < term.rank; rank += RANKS, ++number) {
          if (number % gridDim.z != blockIdx.z) continue;
          float sums[2][4] = {};
          multiply(sums, term.known(rank, 0), rows, inputs, begin, end);
          const float total = add_warps(totals, sums);
          const int row = threadIdx.x / RANKS;
          if (row < term.count) {
            const i64 at = i64(blockIdx.y) * num_rows + term.begin + row;
            partial[at * width + term.column + rank + threadIdx.x % RANKS] = total;
          }
        }
      }
    }
  }
}

DEVICE float as_tf32(float value) { return __uint_as_float(__float_as_uint(value) & 0xffffe000u); }

// Two elements in a register.
DEVICE float element(u32 pair, int index) { return to_float(T{u16(index == 0 ? pair & 0xffff : pair >> 16)}); }

// The lane's four ranks of a row of t, summed over splits in their order.
DEVICE Pack<float, 4> read_sum(const float* row, bool is_there, i64 splits, i64 distance) {
  Pack<float, 4> sum = {};
  if (!is_there) return sum;
#pragma unroll 4
  for (int split = 0; split < int(splits); ++split) {
    const Pack<float, 4> pack = load_fresh<4>(row + split * distance);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum.at[i] += pack.at[i];
  }
  return sum;
}

// The outputs that a warp adds to: `column` and on of a part that has `size` of them and begins at `first`.
struct Outputs {
  int part = 0, first = 0, size, column;

  DEVICE Outputs(int tile, int size0, int size1, int size2) {
    const int sizes[PARTS] = {size0, size1, size2};
    size = size0;
#pragma unroll
    for (int i = 0; i < PARTS - 1; ++i) {
      const int tiles = (sizes[i] + WARPS * COLUMNS - 1) / (WARPS * COLUMNS);
      if (part == i && tile >= tiles) {
        tile -= tiles;
        first += sizes[i];
        part = i + 1;
        size = sizes[i + 1];
      }
    }
    column = (tile * WARPS + int(threadIdx.x) / 32) * COLUMNS;
  }
};

constexpr int TILES = COLUMNS / 8;
using Ranks = Pack<u32, 2>[TILES];  // four ranks of the lane's output, in each tile of 8

DEVICE void read_ranks(Ranks& b, const Term& term, const Outputs& outputs, int rank) {
  const int lane = threadIdx.x % 32;
  const T* tile = term.known(rank, 1);
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int output = outputs.column + 8 * i + lane / 4;
    const T* from = tile + i64(output) * RANKS + lane % 4 * 4;
    b[i] = output < outputs.size ? load_fresh<2>(reinterpret_cast<const u32*>(from)) : Pack<u32, 2>{};
  }
}

// Sums over 16 ranks, of which the lane has four, of t in two rows: lane 4 g + t has ranks 4 t to 4 t + 3.
DEVICE void add_ranks(float (&sums)[TILES][4], const Pack<float, 4> (&values)[2], const Ranks& b) {
#pragma unroll
  for (int half = 0; half < 4; half += 2) {
    const float whole[4] = {values[0].at[half], values[1].at[half], values[0].at[half + 1], values[1].at[half + 1]};
    float high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      high[i] = as_tf32(whole[i]);
      low[i] = as_tf32(whole[i] - high[i]);
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const u32 pair = b[i].at[half / 2];
      multiply_tf32(sums[i], low, element(pair, 0), element(pair, 1));
      multiply_tf32(sums[i], high, element(pair, 0), element(pair, 1));
    }
  }
}

// What a term is added to, in the lane's two rows of a group: from its first output on; null behind the last.
struct Target {
  T* at[2];

  DEVICE Target(const Term& term, T* y, i64 stride, const int* list, const Outputs& outputs) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const bool is_there = lane / 4 + 8 * n < term.count;
      const i64 row = is_there ? load_fresh<1>(list + term.begin + lane / 4 + 8 * n).at[0] : 0;
      at[n] = is_there ? y + row * stride + outputs.first + outputs.column + 2 * (lane % 4) : nullptr;
    }
  }
  DEVICE bool has(int n, int i, const Outputs& outputs) const {
    return at[n] != nullptr && outputs.column + 8 * i + 2 * int(threadIdx.x % 4) < outputs.size;
  }
};

// Adds a term to its rows; `b` is of its first ranks.
DEVICE void add_term(const Term& term, const Target& target, const Outputs& outputs, Ranks& b, const float* partial,
                     i64 num_rows, i64 width, i64 splits) {
  const int lane = threadIdx.x % 32;
  u32 before[TILES][2];
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int n = 0; n < 2; ++n)
      before[i][n] = target.has(n, i, outputs)
                         ? load_fresh<1>(reinterpret_cast<const u32*>(target.at[n] + 8 * i)).at[0]
                         : 0;
  const float* from = partial + i64(term.begin + lane / 4) * width + term.column + 4 * (lane % 4);
  float sums[TILES][4] = {};
  for (int rank = 0; rank < term.rank; rank += RANKS) {
    Pack<float, 4> values[2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
      values[n] = read_sum(from + 8 * n * width + rank, target.at[n] != nullptr, splits, num_rows * width);
    add_ranks(sums, values, b);
    if (rank + RANKS < term.rank) read_ranks(b, term, outputs, rank + RANKS);
  }
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (!target.has(n, i, outputs)) continue;
      const u32 pair = before[i][n];
      *reinterpret_cast<u32*>(target.at[n] + 8 * i) =
          pack_pair(element(pair, 0) + sums[i][2 * n], element(pair, 1) + sums[i][2 * n + 1]);
    }
}

// `y[row, outputs of the part] += t B^T`. B is exact in tf32, t is the sum of two such. Grid: x = 256 outputs of a part,
// y = groups by turns. `size0` to `size2`: outputs of the parts, even numbers.
extern "C" __global__ void __launch_bounds__(256, 2)
    expand(T* y, i64 stride, const i64* groups, i64 num_groups, const int* list, i64 place, const float* partial,
           i64 num_rows, i64 width, i64 splits, i64 size0, i64 size1, i64 size2) {
  start_next();
  __shared__ FoundTerms<1> terms;
  const Outputs outputs(blockIdx.x, int(size0), int(size1), int(size2));
  bool has_waited = false;
  for (i64 first = blockIdx.y; first < num_groups; first += terms.MOST * gridDim.y) {
    terms.find(groups, first, gridDim.y, num_groups, place, outputs.part, 1);
    Ranks next = {};
    if (terms.found[0][0].rank > 0) read_ranks(next, terms.found[0][0], outputs, 0);
    if (!has_waited) wait_for_previous();
    has_waited = true;
    for (int i = 0; terms.found[i][0].count > 0; ++i) {
      const Term& term = terms.found[i][0];
      Ranks b;
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) b[tile] = next[tile];
      const Term& behind = terms.found[i + 1][0];
      if (behind.rank > 0) read_ranks(next, behind, outputs, 0);
      if (term.rank == 0) continue;
      add_term(term, Target(term, y, stride, list, outputs), outputs, b, partial, num_rows, width, splits);
    }
  }
  if (!has_waited) wait_for_previous();  // all threads of a kernel do, so that the order of kernels is transitive
}
