// Codes of e4m3, or of 4 bits for rows of e4m3 (packing.py), become a matrix of e4m3, row by row, and the scales of their
// groups f32, of each 128 inputs those of all outputs side by side: a warp a block at a time, every number exactly.
// -D ELEMENT (T, of no account), BITS, CODE_TYPE, SCALE, PARTS, ZEROS (codes.cuh)
#include "gemm/codes.cuh"

static_assert(CODE_TYPE == E4M3 || (BITS == 4 && CODE_TYPE == INTEGERS && !ZEROS), "integers up to 16 are e4m3");
static_assert(PARTS == 1, "a block has one scale a row");
constexpr int WARPS = 4;
constexpr int PITCH = BLOCK_INPUTS / 4 + 4;  // words of a row in shared memory: 8 rows are in banks of their own

// A lane's codes to their places: `rows` are those of its row g, in words.
DEVICE void place(u32* rows, const Pack<u32, 4> (&quads)[QUADS]) {
  const u32 t = threadIdx.x % 4;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const u32* words = quads[step / STEPS_A_QUAD].at + step % STEPS_A_QUAD * (BITS / 4);
    if constexpr (CODE_TYPE == E4M3) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // of row g the first byte of each half, of row g + 8 the second
        const u32 pairs = permute(words[i], 0, 0x3120);
        u16* to = reinterpret_cast<u16*>(rows) + step * 8 + i * 4 + t;
        to[0] = u16(pairs);
        to[16 * PITCH] = u16(pairs >> 16);
      }
    } else {
      u32 fours[2];
      decode_e4m3(fours, words[0]);
      rows[step * 4 + t] = fours[0];
      rows[8 * PITCH + step * 4 + t] = fours[1];
    }
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    unpacked_e4m3(const u32* codes, const Scale* scales, u8* out, float* out_scales, i64 num_inputs, i64 num_outputs,
                  i64 num_tiles, i64 num_groups, i64 group_factor) {
  __shared__ __align__(16) u32 rows[WARPS][16 * PITCH];
  start_next();
  const u32 num_blocks = (num_inputs + BLOCK_INPUTS - 1) / BLOCK_INPUTS;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, index = blockIdx.x * WARPS + warp;
  const u32 tile = index / num_blocks, block = index % num_blocks;
  if (tile >= num_tiles) return;
  const u32* of_block = codes + u64(index) * (CODE_BYTES / 4) + lane * 4;
  Pack<u32, 4> quads[QUADS];
#pragma unroll
  for (int i = 0; i < QUADS; ++i) quads[i] = load<4>(of_block + i * 128);
  const u32 group = u32(u64(block) * u64(group_factor) >> 31), of_lane = tile * 16 + lane % 16;
  const float scale = to_float(scales[(u64(tile) * num_groups + group) * 16 + lane % 16]);
  place(rows[warp] + lane / 4 * PITCH, quads);
  __syncwarp();
  wait_for_previous();  // a kernel before may still read what is written here
  if (lane < 16 && of_lane < num_outputs) out_scales[u64(block) * num_outputs + of_lane] = scale;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 row = i * 4 + lane / 8, output = tile * 16 + row, input = block * BLOCK_INPUTS + lane % 8 * 16;
    if (output < num_outputs && input < num_inputs)
      store(reinterpret_cast<u32*>(out + u64(output) * num_inputs + input), load<4>(rows[warp] + row * PITCH + lane % 8 * 4));
  }
}
