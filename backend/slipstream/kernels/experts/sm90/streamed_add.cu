// Outputs of all experts of up to eight rows, added to the residual sum with what is shared, by one wave of CTAs (sm_90a).
// A CTA has outputs of its own, in batches of up to 16, and every expert of the step. Weights stream through a ring from
// before the wait for x on, as the choice is known by then, beside a CTA of the kernel before. The parts of a sum are
// added in the order of warps, a row's experts in the order of ranks, in fp32, and all is rounded once.
// -D ELEMENT, FP8, GATED=0 (see pieces.cuh)
#include "experts/sm90/slots.cuh"
#include "experts/residual.cuh"

constexpr int MAX_PAIRS = 64;

struct Shared {
  u64 barriers[2 * MAX_SLOTS];
  Pack<int, 4> tiles[MAX_PAIRS];
  int places[MAX_PAIRS];  // of pairs
  float weights[MAX_PAIRS];
  int num_tiles;  // that have rows
  float sums[MAX_PAIRS][OUTPUTS + 1];  // of places
  Parts parts[GROUPS][2];
};

// A CTA's outputs: in batches that are as large as each other, but for one.
struct Share {
  int begin, end, batch;

  DEVICE explicit Share(u32 outputs)
      : begin(int(outputs * blockIdx.x / gridDim.x)), end(int(outputs * (blockIdx.x + 1) / gridDim.x)) {
    const int all = max(1, end - begin), batches = (all + OUTPUTS - 1) / OUTPUTS;
    batch = (all + batches - 1) / batches;
  }
};

// What was there before the kernel in front went on. By all threads; a barrier of the CTA must follow.
DEVICE void load_choice(Shared& shared, const int* tiles, const int* order, const float* weights, int num_tiles,
                        int num_pairs) {
  for (int i = threadIdx.x; i < num_tiles; i += THREADS) {
    const Pack<int, 4> own = load_fresh<4>(tiles + 4 * i);
    const int next = i + 1 < num_tiles ? load_fresh<1>(tiles + 4 * i + 6).at[0] : 0;
    shared.tiles[i] = own;
    if (own.at[2] != 0 && next == 0) shared.num_tiles = i + 1;
  }
  for (int i = threadIdx.x; i < num_pairs; i += THREADS) {
    shared.places[load_fresh<1>(order + i).at[0]] = i;
    shared.weights[i] = load_fresh<1>(weights + i).at[0];
  }
}

// The sum of a place that a thread of a group finishes; what it takes beside is loaded before the weights come.
struct PlaceSum {
  const int row, within, place;
  bool real;
  float scale, bias;

  DEVICE PlaceSum(const Task& task, int thread, int first, int count)
      : row(thread / OUTPUTS), within(thread % OUTPUTS), place(task.first + row), real(row < task.count && within < count) {
    if (!real) return;
    scale = task.scale(first + within);
    bias = task.bias_of(first + within);
  }
  DEVICE void finish(Shared& shared, const Parts& parts) const {
    if (!real) return;
    float sum = parts[0][within][row];
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) sum += parts[warp][within][row];
    shared.sums[place][within] = sum * scale + bias;
  }
};

// By one lane.
DEVICE void fill(Filler filler, const Share& share, const Shared& shared, const u8* weight, i64 outputs, i64 row_bytes) {
  for (int first = share.begin; first < share.end; first += share.batch)
    for (int tile = 0; tile < shared.num_tiles; ++tile) {
      const u8* upper = weight + (shared.tiles[tile].at[0] * outputs + first) * row_bytes;
      filler.bring(upper, upper + 8 * row_bytes, min(share.batch, share.end - first));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    streamed_add(PARAMETERS, i64 num_rows, i64 stride, const T* added, const T* added_gate, i64 gate_stride,
                 i64 num_tiles, i64 x_pitch, i64 part_bytes, i64 num_slots, i64 most) {
  extern __shared__ __align__(128) u8 slots[];
  __shared__ __align__(16) Shared shared;
  start_next();
  const int thread = threadIdx.x, warp = thread / 32, num_pairs = int(num_rows * top_k);
  const Width bytes{int(width) * WEIGHT_BYTES, int(part_bytes)};
  const Share share{u32(outputs)};
  u8* const rows = slots + num_slots * bytes.slot_bytes();
  CopyRing ring(slots, shared.barriers, bytes.slot_bytes(), int(num_slots));
  if (thread == 0) {
    ring.init(GROUPS * WARPS);
    shared.num_tiles = 0;
  }
  __syncthreads();
  load_choice(shared, tiles, order, weights, int(num_tiles), num_pairs);
  __syncthreads();
  if (thread >= READERS) {
    if (thread == READERS) fill(Filler(ring, bytes, int(most)), share, shared, weight, outputs, bytes.row_bytes);
    wait_for_previous();
    return;
  }
  wait_for_previous();
  start_rows(rows, x, x_stride, num_pairs, int(width), int(x_pitch));
  const int group = warp / WARPS, g = thread % 32 / 4;
  int unit = 0, buffer = 0;
  for (int first = share.begin; first < share.end; first += share.batch) {
    const int end = min(first + share.batch, share.end);
    Residual residual(out, stride, added, added_gate, gate_stride, first, end, outputs, int(num_rows));
    residual.load();
    copy_wait<0>();
    barrier_of_readers();  // rows are there; sums of the batch before are read
    for (int tile = 0; tile < shared.num_tiles; ++tile, ++unit) {
      if (unit % GROUPS != group) {
        skip_rows(ring, bytes);
        continue;
      }
      const Pack<int, 4> found = shared.tiles[tile];
      TASK_OF(found);
      const PlaceSum sum(task, thread % GROUP_THREADS, first, end - first);
      const bool has_x = g < task.count;
      const u8* own = rows + (task.first + (has_x ? g : 0)) * x_pitch;
      float sums[4] = {};
      multiply_rows(sums, ring, bytes, reinterpret_cast<const T*>(own), has_x, warp % WARPS);
      keep(shared.parts[group][buffer], warp % WARPS, sums);
      barrier_of_group(group);
      sum.finish(shared, shared.parts[group][buffer]);
      buffer ^= 1;
    }
    barrier_of_readers();
    residual.finish(shared.weights, int(top_k),
                    [&](int pair) { return shared.sums[shared.places[pair]][residual.within]; });
  }
}
