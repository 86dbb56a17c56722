// Weights in fewer bits become a matrix of 16 bits again: a warp a block at a time, each number rounded once.
// -D ELEMENT (T), BITS, CODE_TYPE, SCALE, PARTS, ZEROS, RECORD (codes.cuh)
#include "gemm/codes.cuh"

constexpr int WARPS = 4;
constexpr int PITCH = BLOCK_INPUTS + 8;  // of a row in shared memory

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    unpacked(const u8* codes, const u8* scales, const u8* zeros, const float* factors, T* out, i64 num_inputs,
             i64 num_outputs, i64 num_tiles, i64 num_groups, i64 group_factor) {
  __shared__ __align__(16) u8 blocks[WARPS][BLOCK_BYTES];
  __shared__ __align__(16) T rows[WARPS][16 * PITCH];
  start_next();
  wait_for_previous();  // a kernel before may still read what is written here
  const u32 num_blocks = (num_inputs + BLOCK_INPUTS - 1) / BLOCK_INPUTS;
  const Codes weights{codes, scales, zeros, num_blocks, u32(num_groups), u32(group_factor)};
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, index = blockIdx.x * WARPS + warp;
  const u32 tile = index / num_blocks, block = index % num_blocks;
  if (tile >= num_tiles) return;
  weights.copy(shared_address(blocks[warp]), tile, block, evict_first());
  copy_commit();
  copy_wait<0>();
  __syncwarp();
  const Block in_shared(blocks[warp]);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int part = step / STEPS_A_PART;
    const Pack<u32, 4> quad = in_shared.quad(step / STEPS_A_QUAD);
    u32 a[4];
    decode(a, quad.at + step % STEPS_A_QUAD * (BITS / 4), in_shared.operand(part, 0), in_shared.operand(part, 1));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 row = lane / 4 + 8 * (i % 2), output = tile * 16 + row;
      T* to = rows[warp] + row * PITCH + step * 16 + lane % 4 * 2 + 8 * (i / 2);
      const float factor = factors != nullptr && output < num_outputs ? factors[output] : 1.0f;
      const float scale = SCALES_NUMBERS ? 1.0f : in_shared.exact_scale(part, step % SCALES_A_PART, i % 2);
      *reinterpret_cast<u32*>(to) = rounded_pair(a[i], scale * factor, in_shared.minimum(part, i % 2) * factor);
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 row = i * 2 + lane / 16, output = tile * 16 + row, input = block * BLOCK_INPUTS + lane % 16 * 8;
    if (output < num_outputs && input < num_inputs)
      store(out + output * num_inputs + input, load<8>(rows[warp] + row * PITCH + lane % 16 * 8));
  }
}
