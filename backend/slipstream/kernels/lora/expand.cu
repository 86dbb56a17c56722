// `expand` adds `t B^T` to the rows of a GEMM's result that have adapters and rounds once; before a gate it applies that,
// too, to all rows. A group is of up to 16 rows that have one adapter. What is read from the device, and the order of
// sums, are as `shrink.cu` says.
// -D ELEMENT (T, 16 bits)
#include "elementwise/gates.cuh"
#include "lora/groups.cuh"
#include "runtime/copies.cuh"
#include "runtime/mma.cuh"

constexpr int COLUMNS = 32, TILES = COLUMNS / 8;  // outputs of a warp
constexpr int SPLITS = 8;                         // at most
constexpr int FAR = 3;                            // groups from which on B is prefetched

DEVICE float as_tf32(float value) { return __uint_as_float(__float_as_uint(value) & 0xffffe000u); }

// Two elements in a register.
DEVICE float element(u32 pair, int index) { return to_float(T{u16(index == 0 ? pair & 0xffff : pair >> 16)}); }

// The outputs that a warp adds to: `column` and on of a part that has `size` of them and begins at `first`.
struct Outputs {
  int part = 0, first = 0, size, column;

  DEVICE Outputs(int tile, int size0, int size1, int size2) {
    const int sizes[PLACE_PARTS] = {size0, size1, size2};
    size = size0;
#pragma unroll
    for (int i = 0; i < PLACE_PARTS - 1; ++i) {
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

// Eight outputs of a row that follow each other, or the first `room` of them: of a quad's lanes 64 bytes. So tile `i` of a
// product has outputs 2 i and 2 i + 1 of each lane.
using Pairs = u32[TILES];
using Ranks = Pack<u32, 2>[TILES];  // four ranks of the lane's output, in each tile of 8

DEVICE void read_pairs(Pairs& pairs, const T* from, int room, bool is_wide) {
  if (is_wide && room > 0) {
    const auto pack = load_fresh<4>(reinterpret_cast<const u32*>(from));
#pragma unroll
    for (int i = 0; i < TILES; ++i) pairs[i] = pack.at[i];
    return;
  }
#pragma unroll
  for (int i = 0; i < TILES; ++i)
    pairs[i] = 2 * i < room ? load_fresh<1>(reinterpret_cast<const u32*>(from) + i).at[0] : 0;
}
DEVICE void write_pairs(T* to, const Pairs& pairs, int room, bool is_wide) {
  u32* words = reinterpret_cast<u32*>(to);
  if (is_wide && room > 0) {
    store<4>(words, {pairs[0], pairs[1], pairs[2], pairs[3]});
    return;
  }
#pragma unroll
  for (int i = 0; i < TILES; ++i)
    if (2 * i < room) words[i] = pairs[i];
}

DEVICE void read_ranks(Ranks& b, const Term& term, const Outputs& outputs, int rank) {
  const int lane = threadIdx.x % 32;
  const T* tile = term.known(rank, 1);
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int output = outputs.column + lane / 8 * 8 + 2 * i + lane / 4 % 2;
    const T* from = tile + i64(output) * RANKS + lane % 4 * 4;
    b[i] = output < outputs.size ? load<2>(reinterpret_cast<const u32*>(from)) : Pack<u32, 2>{};
  }
}

// Sums over 16 ranks, of which the lane has four, of t in two rows: lane 4 g + t has ranks 4 t to 4 t + 3.
DEVICE void add_ranks(float (&sums)[TILES][4], const float (&t)[ROWS * RANKS], const Ranks& b) {
  const float* own = t + threadIdx.x % 32 * 4;
  const Pack<float, 4> values[2] = {load<4>(own), load<4>(own + 8 * RANKS)};
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

// t, of which each thread sums one number of a group's over splits, in their order.
struct Shrunk {
  const float* partial;
  i64 distance;  // from a split to the next
  int width, splits;

  DEVICE void read(float (&parts)[SPLITS], const Term& term, int rank) const {
    const int row = threadIdx.x / RANKS;
    const bool is_there = rank < term.rank && row < term.count;
    const float* at = partial + i64(term.begin + row) * width + term.column + rank + threadIdx.x % RANKS;
#pragma unroll
    for (int split = 0; split < SPLITS; ++split) {
      parts[split] = is_there && split < splits ? load_fresh<1>(at).at[0] : 0.0f;
      at += distance;
    }
  }
  DEVICE static float sum(const float (&parts)[SPLITS]) {
    float sum = 0.0f;
#pragma unroll
    for (int split = 0; split < SPLITS; ++split) sum += parts[split];
    return sum;
  }
};

// What a thread has of a group before it multiplies; two halves: of gates, and of what they multiply.
template <int HALVES>
struct Loaded {
  Pairs y[HALVES][2];
  Ranks b[HALVES];
};

template <int HALVES>
struct alignas(16) Shared {
  float t[2][HALVES][ROWS * RANKS];  // of the first ranks of a group, and of the group before
  float more[ROWS * RANKS];
  Found<HALVES, HALVES == 2> found;
};

struct NoGate {
  static constexpr int HALVES = 1;
  static constexpr bool IS_NEW = false;
};
struct NewRows : NoGate {
  static constexpr bool IS_NEW = true;
};
template <class Activation>
struct Gate : Activation {
  static constexpr int HALVES = 2;
  static constexpr bool IS_NEW = false;
};

// What is done to rows of groups: `y [_, outputs]`, changed in place, or its gated `out [_, outputs of a half]`. New rows
// are the terms alone, of those without one zeros.
template <class Gate>
struct Expansion {
  static constexpr int HALVES = Gate::HALVES;
  static constexpr bool IS_NEW = Gate::IS_NEW;
  T *y, *out;
  i64 stride;
  bool is_wide;
  Outputs outputs;
  Shrunk t;

  DEVICE int column() const { return outputs.column + int(threadIdx.x) % 4 * 8; }
  DEVICE int room() const { return outputs.size - column(); }

  DEVICE void read_b(Loaded<HALVES>& to, const Term (&terms)[HALVES]) const {
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
      if (terms[half].rank > 0) read_ranks(to.b[half], terms[half], outputs, 0);
  }
  // 128 bytes by each thread, which need no registers on their way to the L2 cache.
  DEVICE void prefetch_b(const Term (&terms)[HALVES]) const {
    constexpr int OF_LINE = 64 / RANKS, LINES = WARPS * COLUMNS / OF_LINE;
    const int half = threadIdx.x / LINES, first = outputs.column - int(threadIdx.x) / 32 * COLUMNS;
    const int output = first + int(threadIdx.x) % LINES * OF_LINE;
    if (half < HALVES && terms[half].rank > 0 && output < outputs.size) prefetch(terms[half].first + output * RANKS);
  }
  DEVICE void read_t(float (&parts)[HALVES][SPLITS], const Term (&terms)[HALVES]) const {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) t.read(parts[half], terms[half], 0);
  }
  // Rows that change: those with a term, before a gate and of new ones all.
  DEVICE i64 row_of(const int (&rows)[ROWS], const Term (&terms)[HALVES], int n) const {
    return HALVES == 2 || IS_NEW || terms[0].rank > 0 ? rows[threadIdx.x % 32 / 4 + 8 * n] : -1;
  }
  DEVICE void read_y(Loaded<HALVES>& to, const int (&rows)[ROWS], const Term (&terms)[HALVES]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const i64 row = IS_NEW ? -1 : row_of(rows, terms, n);
      const T* from = y + row * stride + outputs.first + column();
#pragma unroll
      for (int half = 0; half < HALVES; ++half)
        read_pairs(to.y[half][n], from + half * outputs.size, row < 0 ? 0 : room(), is_wide);
    }
  }
  // `more` is for t of ranks behind the first.
  DEVICE void add(Loaded<HALVES>& own, const Term (&terms)[HALVES], const float (&first)[HALVES][ROWS * RANKS],
                  float (&more)[ROWS * RANKS]) const {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      const Term& term = terms[half];
      if (term.rank == 0) continue;
      float sums[TILES][4] = {};
      add_ranks(sums, first[half], own.b[half]);
#pragma unroll 1
      for (int rank = RANKS; rank < term.rank; rank += RANKS) {
        read_ranks(own.b[half], term, outputs, rank);
        float parts[SPLITS];
        t.read(parts, term, rank);
        __syncthreads();
        more[threadIdx.x] = Shrunk::sum(parts);
        __syncthreads();
        add_ranks(sums, more, own.b[half]);
      }
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          u32& pair = own.y[half][n][i];
          pair = pack_pair(element(pair, 0) + sums[i][2 * n], element(pair, 1) + sums[i][2 * n + 1]);
        }
    }
  }
  DEVICE void write(Loaded<HALVES>& own, const int (&rows)[ROWS], const Term (&terms)[HALVES]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const i64 row = row_of(rows, terms, n);
      if (row < 0) continue;
      Pairs& pairs = own.y[0][n];
      if constexpr (HALVES == 1) {
        write_pairs(y + row * stride + outputs.first + column(), pairs, room(), is_wide);
      } else {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
          const u32 up = own.y[1][n][i];
          pairs[i] = pack_pair(Gate()(element(pairs[i], 0)) * element(up, 0), Gate()(element(pairs[i], 1)) * element(up, 1));
        }
        write_pairs(out + row * outputs.size + column(), pairs, room(), is_wide);
      }
    }
  }
  DEVICE void run(const i64* groups, int num_groups, const int* list, i64 place, bool are_late) const {
    __shared__ Shared<HALVES> shared;
    auto& found = shared.found;
    Previous previous;
    if (are_late) previous.wait();
    for (int first = blockIdx.y; first < num_groups; first += found.MOST * gridDim.y) {
      found.find(groups, first, gridDim.y, num_groups, list, place, outputs.part, 1);
      Loaded<HALVES> own;
      float parts[HALVES][SPLITS];
      read_b(own, found.terms[0]);
      previous.wait();
      read_t(parts, found.terms[0]);
      read_y(own, found.rows[0], found.terms[0]);
#pragma unroll 1
      for (int slot = 0; found.has(slot); ++slot) {
        const int behind = slot + 1 < found.MOST ? slot + 1 : slot;
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
          shared.t[slot % 2][half][threadIdx.x] = Shrunk::sum(parts[half]);
        __syncthreads();
        add(own, found.terms[slot], shared.t[slot % 2], shared.more);
        if (slot + FAR < found.MOST) prefetch_b(found.terms[slot + FAR]);
        read_b(own, found.terms[behind]);
        read_t(parts, found.terms[behind]);
        write(own, found.rows[slot], found.terms[slot]);
        read_y(own, found.rows[behind], found.terms[behind]);
      }
    }
    previous.wait();
  }
};

// `y[row, outputs of the part] += t B^T`. B is exact in tf32, t is the sum of two such. Grid: x = 256 outputs of a part,
// y = groups by turns. `size0` to `size2`: outputs of the parts, even numbers. Wide: rows of y, out and parts begin at 16
// bytes. Gated: `out = act(gate) * up` of all rows; two parts, and x = 256 outputs of both. `are_late`: kernels of the same
// step made the tables.
template <class Gate>
DEVICE void expand_rows(T* y, i64 stride, T* out, i64 is_wide, const i64* groups, i64 num_groups, const int* list, i64 place,
                        const float* partial, i64 num_rows, i64 width, i64 splits, i64 size0, i64 size1, i64 size2,
                        i64 are_late) {
  start_next();
  const Outputs outputs(blockIdx.x, int(size0), int(size1), int(size2));
  const Expansion<Gate> expansion{y, out, stride, is_wide != 0, outputs, {partial, num_rows * width, int(width), int(splits)}};
  expansion.run(groups, int(num_groups), list, place, are_late != 0);
}

extern "C" __global__ void __launch_bounds__(256, __CUDA_ARCH__ >= 900 ? 3 : 2)
    expand(T* y, i64 stride, T* out, i64 is_wide, const i64* groups, i64 num_groups, const int* list, i64 place,
           const float* partial, i64 num_rows, i64 width, i64 splits, i64 size0, i64 size1, i64 size2, i64 are_late) {
  expand_rows<NoGate>(y, stride, out, is_wide, groups, num_groups, list, place, partial, num_rows, width, splits, size0,
                      size1, size2, are_late);
}

extern "C" __global__ void __launch_bounds__(256, __CUDA_ARCH__ >= 900 ? 3 : 2)
    expand_new(T* y, i64 stride, T* out, i64 is_wide, const i64* groups, i64 num_groups, const int* list, i64 place,
               const float* partial, i64 num_rows, i64 width, i64 splits, i64 size0, i64 size1, i64 size2, i64 are_late) {
  expand_rows<NewRows>(y, stride, out, is_wide, groups, num_groups, list, place, partial, num_rows, width, splits, size0,
                       size1, size2, are_late);
}

extern "C" __global__ void __launch_bounds__(256, 2)
    expand_silu(T* y, i64 stride, T* out, i64 is_wide, const i64* groups, i64 num_groups, const int* list, i64 place,
                const float* partial, i64 num_rows, i64 width, i64 splits, i64 size0, i64 size1, i64 size2, i64 are_late) {
  expand_rows<Gate<Silu>>(y, stride, out, is_wide, groups, num_groups, list, place, partial, num_rows, width, splits, size0,
                          size1, size2, are_late);
}

extern "C" __global__ void __launch_bounds__(256, 2)
    expand_gelu(T* y, i64 stride, T* out, i64 is_wide, const i64* groups, i64 num_groups, const int* list, i64 place,
                const float* partial, i64 num_rows, i64 width, i64 splits, i64 size0, i64 size1, i64 size2, i64 are_late) {
  expand_rows<Gate<Gelu>>(y, stride, out, is_wide, groups, num_groups, list, place, partial, num_rows, width, splits, size0,
                          size1, size2, are_late);
}
