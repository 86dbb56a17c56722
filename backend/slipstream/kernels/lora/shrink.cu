// `shrink` makes `t = x A^T` in fp32, of a step's rows by the A of their adapters. A group is of up to 16 rows that have one
// adapter, so A is read once for them. Which rows and adapters there are is read from the device: one CUDA graph serves
// them all. A row's sums have one order, whatever rows and groups are beside it.
// -D ELEMENT (T, 16 bits)
#include "lora/groups.cuh"
#include "runtime/mma.cuh"

constexpr int BLOCK = 32;    // inputs that a warp multiplies at once
constexpr int TOGETHER = 3;  // tiles of ranks that share the loads of x

DEVICE const u32* words(const Pack<T, 8>& pack) { return reinterpret_cast<const u32*>(&pack); }

// Sums of 16 ranks of each tile (rows of C) and 16 rows (its columns) over a warp's share of the inputs. Of each block of
// 32 inputs a lane has 8 that follow each other, of A and of x alike: so both operands of a product have the same order.
template <int NUM>
DEVICE void multiply(float (&sums)[NUM][2][4], const T* const (&tiles)[TOGETHER], const T* const (&rows)[2], int inputs,
                     int begin, int end, Previous& previous) {
  constexpr int AHEAD = 5 - NUM;  // blocks whose loads are on their way
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int low = lane / 4 * inputs;
  for (int block = begin + warp * BLOCK; block < end; block += WARPS * BLOCK * AHEAD) {
    Pack<T, 8> of_a[NUM][AHEAD][2], of_x[AHEAD][2];
    const int first = block + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
#pragma unroll
      for (int tile = 0; tile < NUM; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int k = first + i * WARPS * BLOCK;  // A of one adapter stays in the L1 cache for other CTAs
          of_a[tile][i][half] = k < end ? load<8>(tiles[tile] + low + half * 8 * inputs + k) : Pack<T, 8>{};
        }
    previous.wait();
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int k = first + i * WARPS * BLOCK;
        of_x[i][n] = k < end && rows[n] != nullptr ? load_fresh<8>(rows[n] + k) : Pack<T, 8>{};
      }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
#pragma unroll
      for (int tile = 0; tile < NUM; ++tile) {
        const u32 *upper = words(of_a[tile][i][0]), *lower = words(of_a[tile][i][1]);
#pragma unroll
        for (int half = 0; half < 4; half += 2) {
          const u32 fragment[4] = {upper[half], lower[half], upper[half + 1], lower[half + 1]};
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const u32* x = words(of_x[i][n]);
            multiply_add(sums[tile][n], fragment, x[half], x[half + 1], T{});
          }
        }
      }
  }
  previous.wait();
}

// The warps' sums of a tile: those of the second half of them are added to those of the first half, then these.
using Totals = float[WARPS / 2][ROWS * RANKS];

// Returns a thread's own: of row `thread / 16` and rank `thread % 16`.
DEVICE float add_warps(Totals& totals, const float (&sums)[2][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float(&own)[ROWS * RANKS] = totals[warp % (WARPS / 2)];
  __syncthreads();
#pragma unroll
  for (int round = 1; round >= 0; --round) {
    if (warp / (WARPS / 2) == round)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float& total = own[row * RANKS + lane / 4 + i % 4 / 2 * 8];
        total = sums[i / 4][i % 4] + (round == 1 ? 0.0f : total);
      }
    __syncthreads();
  }
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < WARPS / 2; ++i) total += totals[i][threadIdx.x];
  return total;
}

// Columns of t of tiles that follow each other, `[ROWS, width]` from `t` on.
template <int NUM>
DEVICE void shrink_tiles(Totals& totals, const T* const (&tiles)[TOGETHER], const T* const (&rows)[2], int count, int inputs,
                         int begin, int end, float* t, i64 width, const float* factors, Previous& previous) {
  float sums[NUM][2][4] = {};
  multiply<NUM>(sums, tiles, rows, inputs, begin, end, previous);
#pragma unroll
  for (int tile = 0; tile < NUM; ++tile) {
    const float total = add_warps(totals, sums[tile]);
    const int row = threadIdx.x / RANKS;
    const float factor = factors != nullptr && row < count ? load_fresh<1>(factors + row).at[0] : 1.0f;
    if (row < count) t[row * width + tile * RANKS + threadIdx.x % RANKS] = total * factor;
  }
}

// The tile of A that has this number among those of a place.
DEVICE const T* tile_of(const Term (&parts)[PLACE_PARTS], int number) {
  for (int part = 0; part < PLACE_PARTS; ++part) {
    const int num_tiles = parts[part].rank / RANKS;
    if (number < num_tiles) return parts[part].known(number * RANKS, 0);
    number -= num_tiles;
  }
  return nullptr;
}

// Partial sums `t [splits, num_rows, width]`, the rows in the order of the list, tiles of a place side by side, times
// `factors` in that order, unless null. Grid: x = groups by turns, y = split of the inputs (`share` of them, a multiple of
// 32), z = tiles of ranks by turns. `are_late`: kernels of the same step made the tables.
extern "C" __global__ void __launch_bounds__(256, 2)
    shrink(const T* x, i64 stride, const i64* groups, i64 num_groups, const int* list, i64 place, float* partial,
           i64 num_rows, i64 width, i64 inputs, i64 share, const float* factors, i64 are_late) {
  start_next();
  __shared__ Totals totals;
  __shared__ Found<PLACE_PARTS> found;
  Previous previous;
  if (are_late) previous.wait();
  const int begin = int(blockIdx.y * share), limit = begin + int(share);
  const int end = limit < int(inputs) ? limit : int(inputs), lane = threadIdx.x % 32;
  for (int first = blockIdx.x; first < num_groups; first += found.MOST * gridDim.x) {
    found.find(groups, first, gridDim.x, int(num_groups), list, place, 0, 0);
    for (int slot = 0; found.has(slot); ++slot) {
      const Term(&parts)[PLACE_PARTS] = found.terms[slot];
      int num_tiles = 0;
      for (int part = 0; part < PLACE_PARTS; ++part) num_tiles += parts[part].rank / RANKS;
      const T* rows[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int row = found.rows[slot][lane / 4 + 8 * n];
        rows[n] = row < 0 ? nullptr : x + row * stride;
      }
      for (int tile = TOGETHER * blockIdx.z; tile < num_tiles; tile += TOGETHER * gridDim.z) {
        const T* tiles[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) tiles[i] = tile_of(parts, tile + i);
        float* t = partial + (i64(blockIdx.y) * num_rows + parts[0].begin) * width + tile * RANKS;
        const int count = parts[0].count;
        const float* own = factors == nullptr ? nullptr : factors + parts[0].begin;
        if (num_tiles - tile == 1)
          shrink_tiles<1>(totals, tiles, rows, count, int(inputs), begin, end, t, width, own, previous);
        else if (num_tiles - tile == 2)
          shrink_tiles<2>(totals, tiles, rows, count, int(inputs), begin, end, t, width, own, previous);
        else
          shrink_tiles<3>(totals, tiles, rows, count, int(inputs), begin, end, t, width, own, previous);
      }
    }
  }
  previous.wait();  // all threads of a kernel do, so that the order of kernels is transitive
}
