// GEMMs of experts with up to eight rows each by one wave of CTAs, for steps of few rows (sm_90a). All units, of OUTPUTS
// outputs of a tile, are shared out evenly; weights stream through a ring in shared memory from the moment on that the
// choice is known, always so many bytes on their way. The parts of a sum are added in the order of warps: bits are those
// of `skinny.cu`, whatever the grid.
// -D ELEMENT, FP8, GATED (see pieces.cuh), TERMS (task.cuh)
#include "experts/sm90/slots.cuh"

constexpr int MAX_TILES = 256, MAX_PAIRS = 256;
static_assert(MAX_PAIRS <= READERS, "a thread a pair");

struct Shared {
  u64 barriers[2 * MAX_SLOTS];
  Pack<int, 4> tiles[MAX_TILES];
  int rows[MAX_PAIRS];  // of x, by places
  int num_tiles;        // that have rows
  Parts parts[GROUPS][2];
};

// A CTA's share of all units: tile by tile, its outputs in order.
struct Share {
  int of_tile, begin, end;

  DEVICE Share(int num_tiles, int outputs) : of_tile((outputs + OUTPUTS - 1) / OUTPUTS) {
    const u32 all = num_tiles * of_tile, each = all / gridDim.x, more = all % gridDim.x;
    begin = blockIdx.x * each + min(u32(blockIdx.x), more);
    end = begin + each + (blockIdx.x < more);
  }
  DEVICE int tile(int unit) const { return unit / of_tile; }
  DEVICE int first(int unit) const { return unit % of_tile * OUTPUTS; }
};

// By the warp that fills; a barrier of the CTA must follow.
DEVICE void load_tiles(Shared& shared, const int* tiles, int num_tiles) {
  if (threadIdx.x == READERS) shared.num_tiles = 0;
  __syncwarp();
  for (int i = threadIdx.x - READERS; i < num_tiles; i += 32) {
    const Pack<int, 4> own = load_fresh<4>(tiles + 4 * i);
    const int next = i + 1 < num_tiles ? load_fresh<1>(tiles + 4 * i + 6).at[0] : 0;
    shared.tiles[i] = own;
    if (own.at[2] != 0 && next == 0) shared.num_tiles = i + 1;  // those without rows are behind the others
  }
}
// By the others.
DEVICE void load_places(Shared& shared, const int* order, int num_pairs, int top_k) {
  const int i = threadIdx.x;
  if (i < num_pairs) shared.rows[i] = GATED ? load_fresh<1>(order + i).at[0] / top_k : i;
}

// By one lane.
DEVICE void fill(Filler filler, const Share& share, const Shared& shared, const u8* weight, int outputs, i64 row_bytes) {
  const int streams = 1 + GATED;
  for (int unit = share.begin; unit < share.end; ++unit) {
    const int first = share.first(unit);
    const u8* base = weight + i64(shared.tiles[share.tile(unit)].at[0]) * streams * outputs * row_bytes;
    const int lower = GATED ? outputs + first : min(first + 8, outputs - 8);
    filler.bring(base + first * row_bytes, base + lower * row_bytes, 16);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    streamed(PARAMETERS, i64 num_rows, i64 num_pairs, i64 num_tiles, i64 x_pitch, i64 part_bytes, i64 num_slots,
             i64 most) {
  extern __shared__ __align__(128) u8 slots[];
  __shared__ __align__(16) Shared shared;
  const int thread = threadIdx.x, warp = thread / 32;
  const Width bytes{int(width) * WEIGHT_BYTES, int(part_bytes)};
  u8* const rows = slots + num_slots * bytes.slot_bytes();
  CopyRing ring(slots, shared.barriers, bytes.slot_bytes(), int(num_slots));
  if (thread == 0) ring.init(GROUPS * WARPS);
  __syncthreads();
  wait_for_previous();
  start_next();
  if (thread >= READERS) {
    load_tiles(shared, tiles, int(num_tiles));
  } else {
    start_rows(rows, x, x_stride, int(num_rows), int(width), int(x_pitch));
    load_places(shared, order, int(num_pairs), int(top_k));
  }
  __syncthreads();
  const Share share(shared.num_tiles, int(outputs));
  if (thread >= READERS) {
    if (thread == READERS) fill(Filler(ring, bytes, int(most)), share, shared, weight, int(outputs), bytes.row_bytes);
    return;
  }
  copy_wait<0>();
  barrier_of_readers();
  const int group = warp / WARPS, g = thread % 32 / 4;
  int buffer = 0;
  for (int unit = share.begin; unit < share.end; ++unit) {
    if ((unit - share.begin) % GROUPS != group) {
      skip_rows(ring, bytes);
      continue;
    }
    const Pack<int, 4> found = shared.tiles[share.tile(unit)];
    TASK_OF(found);
    const Output output(task, thread % GROUP_THREADS, share.first(unit));
    const bool has_x = g < task.count;
    const u8* own = rows + (has_x ? shared.rows[task.first + g] : 0) * x_pitch;
    float sums[4] = {};
    multiply_rows(sums, ring, bytes, reinterpret_cast<const T*>(own), has_x, warp % WARPS);
    keep(shared.parts[group][buffer], warp % WARPS, sums);
    barrier_of_group(group);
    output.finish(shared.parts[group][buffer]);
    buffer ^= 1;
  }
}
