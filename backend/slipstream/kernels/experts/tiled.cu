// GEMMs of experts in tiles: ROWS places of an expert by 128 of its weight rows, both through a ring of slots in
// shared memory. A sum's terms are added in the order of the width whatever ROWS is, so a row's result does not depend
// on its neighbours.
// -D ELEMENT, FP8, GATED (see pieces.cuh), ROWS (16, 32, 64, 128: of a tile), SLOTS
#include "experts/pieces.cuh"

constexpr int COLUMNS = 128;               // weight rows of a tile
constexpr int ROW_WARPS = ROWS > 32 ? 2 : 1;
constexpr int COLUMN_WARPS = 4;
constexpr int THREADS = 32 * ROW_WARPS * COLUMN_WARPS;
constexpr int ROW_PARTS = ROWS / (16 * ROW_WARPS);           // of 16 rows, of a warp
constexpr int COLUMN_PARTS = COLUMNS / (8 * COLUMN_WARPS);   // of 8 weight rows
constexpr int OUTPUTS = GATED ? COLUMNS / 2 : COLUMNS;
constexpr int WEIGHT_PIECES = 8;                     // of 16 bytes, of a weight row in a slot
constexpr int ROW_PIECES = WEIGHT_PIECES * X_PIECES;  // of a row of x
constexpr int ROW_BYTES = 16 * ROW_PIECES;
constexpr int X_BYTES = ROWS * ROW_BYTES;
constexpr int SLOT_BYTES = X_BYTES + COLUMNS * 128;
constexpr int WEIGHT_STEP = THREADS / WEIGHT_PIECES;  // rows that all threads copy at once
constexpr int X_STEP = THREADS / ROW_PIECES;
constexpr int WEIGHT_COPIES = COLUMNS / WEIGHT_STEP;
constexpr int X_COPIES = ROWS / X_STEP;
static_assert(WEIGHT_STEP % 16 == 0 && ROWS % X_STEP == 0, "the copies of a thread are rows apart");

extern __shared__ __align__(128) u8 shared_bytes[];

// Pieces of neighbouring rows that are read together come from different banks.
DEVICE u32 weight_offset(int row, int piece) { return row * 128 + (piece ^ (row & 1) << 2) * 16; }
DEVICE u32 x_offset(int row, int piece) {
  return row * ROW_BYTES + (piece ^ (FP8 ? row & 1 : (row & 1) << 2)) * 16;
}

// What a thread copies: a piece of every WEIGHT_STEP-th weight row and of every X_STEP-th row of x. Eight weight rows of
// gates lie before the eight of their ups.
struct Copies {
  const int num_pieces;  // of a weight row
  const int weight_piece = threadIdx.x % WEIGHT_PIECES, weight_row = threadIdx.x / WEIGHT_PIECES;
  const int x_piece = threadIdx.x % ROW_PIECES, x_row = threadIdx.x / ROW_PIECES;
  const u8* weight;
  i64 weight_step;  // bytes
  int num_weights;  // that are real
  const T* x[X_COPIES];
  const T* task_x;

  DEVICE Copies(const Task& task, int first) : num_pieces(task.width / PIECE), task_x(task.x) {
    const int row_bytes = task.width * WEIGHT_BYTES;
    const int eight = weight_row / 8, within = weight_row % 8;
    const int output = first + (GATED ? eight / 2 * 8 : eight * 8) + within;
    const int step = GATED ? WEIGHT_STEP / 2 : WEIGHT_STEP;
    weight = weights_of(task, GATED && eight % 2 ? task.outputs + output : output);
    weight_step = i64(step) * row_bytes;
    num_weights = output < task.outputs ? (task.outputs - output + step - 1) / step : 0;
#pragma unroll
    for (int i = 0; i < X_COPIES; ++i) {
      const int row = x_row + i * X_STEP;
      x[i] = row < task.count ? task.x_row(row) : nullptr;
    }
  }

  DEVICE void load(int step, u8* slot) const {
    const int piece = step * WEIGHT_PIECES + weight_piece;
#pragma unroll
    for (int i = 0; i < WEIGHT_COPIES; ++i) {
      const bool real = i < num_weights && piece < num_pieces;
      const u8* source = weight + (real ? i * weight_step + i64(piece) * 16 : 0);
      copy_async(slot + X_BYTES + weight_offset(weight_row + i * WEIGHT_STEP, weight_piece), source, real);
    }
    const int part = step * ROW_PIECES + x_piece;
#pragma unroll
    for (int i = 0; i < X_COPIES; ++i) {
      const bool real = x[i] != nullptr && part < num_pieces * X_PIECES;
      const T* source = real ? x[i] + i64(part) * 8 : task_x;
      copy_async(reinterpret_cast<T*>(slot + x_offset(x_row + i * X_STEP, x_piece)), source, real);
    }
  }
};

struct Sums {
  float at[ROW_PARTS][COLUMN_PARTS][4] = {};

  DEVICE void add(const u8* slot) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int row = warp / COLUMN_WARPS * ROW_PARTS * 16 + g, column = warp % COLUMN_WARPS * COLUMN_PARTS * 8 + g;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Operand right[COLUMN_PARTS];
#pragma unroll
      for (int j = 0; j < COLUMN_PARTS; ++j)
        right[j] = operand(load<1>(reinterpret_cast<const Bytes*>(
                                       slot + X_BYTES + weight_offset(column + 8 * j, half * 4 + t))).at[0]);
#pragma unroll
      for (int i = 0; i < ROW_PARTS; ++i) {
        const Operand upper = rows(slot, row + 16 * i, half * 4 + t);
        const Operand lower = rows(slot, row + 16 * i + 8, half * 4 + t);
#pragma unroll
        for (int j = 0; j < COLUMN_PARTS; ++j) multiply(at[i][j], upper, lower, right[j]);
      }
    }
  }

 private:
  DEVICE static Operand rows(const u8* slot, int row, int piece) {
    Bytes pieces[X_PIECES];
#pragma unroll
    for (int i = 0; i < X_PIECES; ++i)
      pieces[i] = load<1>(reinterpret_cast<const Bytes*>(slot + x_offset(row, piece * X_PIECES + i))).at[0];
    return operand(pieces);
  }
};

DEVICE void put_pair(T* target, float first, float second) {
  *reinterpret_cast<u32*>(target) = pack_pair(first, second);
}

// Two neighbouring outputs of a row are a lane's.
DEVICE void finish(const Task& task, const Sums& sums, int first) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int first_row = warp / COLUMN_WARPS * ROW_PARTS * 16 + g;
  const int first_output = first + warp % COLUMN_WARPS * COLUMN_PARTS * 8 / (1 + GATED) + 2 * t;
#pragma unroll
  for (int j = 0; j < COLUMN_PARTS; j += 1 + GATED) {
    const int output = first_output + 8 * (j / (1 + GATED));
    if (output >= task.outputs) continue;
    float scale[1 + GATED][2], bias[1 + GATED][2];
#pragma unroll
    for (int stream = 0; stream < 1 + GATED; ++stream)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        scale[stream][k] = task.scale(output + k + stream * task.outputs);
        bias[stream][k] = task.bias_of(output + k + stream * task.outputs);
      }
#pragma unroll
    for (int i = 0; i < 2 * ROW_PARTS; ++i) {
      const int row = first_row + 8 * i;
      if (row >= task.count) continue;
      float value[2];
      i64 place = task.first + row;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int at = i % 2 * 2 + k;
        value[k] = sums.at[i / 2][j][at] * scale[0][k] + bias[0][k];
        if (GATED) {
          const float up = sums.at[i / 2][j + GATED][at] * scale[GATED][k] + bias[GATED][k];
          value[k] = gated(task.adapted(value[k], place, output + k),
                           task.adapted(up, place, task.outputs + output + k), task.gate);
        }
      }
      if (!GATED) {
        place = task.pair(row);
        const float weight = load_fresh<1>(task.weights + place).at[0];
        value[0] *= weight;
        value[1] *= weight;
      }
      put_pair(task.out + place * task.outputs + output, value[0], value[1]);
    }
  }
}

// Grid: x = outputs, y = tiles.
extern "C" __global__ void __launch_bounds__(THREADS, ROWS == 128 ? 1 : 2) tiled(PARAMETERS) {
  start_next();
  wait_for_previous();
  TASK(blockIdx.y);
  if (task.count == 0) return;
  const int first = blockIdx.x * OUTPUTS;
  const Copies copies(task, first);
  const int num_steps = (copies.num_pieces + WEIGHT_PIECES - 1) / WEIGHT_PIECES;
#pragma unroll
  for (int step = 0; step < SLOTS - 1; ++step) {
    if (step < num_steps) copies.load(step, shared_bytes + step * SLOT_BYTES);
    copy_commit();
  }
  Sums sums;
  int slot = 0;
  for (int step = 0; step < num_steps; ++step) {
    copy_wait<SLOTS - 2>();
    __syncthreads();  // what all threads copied is there, and nobody reads the slot before
    const int ahead = step + SLOTS - 1, into = slot == 0 ? SLOTS - 1 : slot - 1;
    if (ahead < num_steps) copies.load(ahead, shared_bytes + into * SLOT_BYTES);
    copy_commit();
    sums.add(shared_bytes + slot * SLOT_BYTES);
    slot = slot == SLOTS - 1 ? 0 : slot + 1;
  }
  finish(task, sums, first);
}
