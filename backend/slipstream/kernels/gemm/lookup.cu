// Rows of weights in fewer bits, by their numbers, in 16 bits, each number rounded once: an embedding's rows of tokens.
// A warp has a block of eight of them, four lanes a row, and reads of a tile's codes those that hold its rows.
// -D ELEMENT (T), BITS, CODE_TYPE, SCALE, PARTS, ZEROS, RECORD (codes.cuh)
#include "gemm/codes.cuh"

constexpr int WARPS = 4;
constexpr int ROWS = 8;  // of a warp

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    lookup(const u8* codes, const u8* scales, const u8* zeros, const float* factors, const i64* ids, T* out, i64 num_ids,
           i64 num_inputs, i64 num_groups, i64 group_factor) {
  start_next();
  wait_for_previous();  // which may write the ids
  const u32 num_blocks = (num_inputs + BLOCK_INPUTS - 1) / BLOCK_INPUTS;
  const Codes weights{codes, scales, zeros, num_blocks, u32(num_groups), u32(group_factor)};
  const u32 lane = threadIdx.x % 32, index = blockIdx.x * WARPS + threadIdx.x / 32;
  const u32 block = index % num_blocks, number = index / num_blocks * ROWS + lane / 4;
  if (number >= num_ids) return;
  const u32 row = ids[number], tile = row / 16, high = row % 16 / 8;
  const u64 first_group = u64(tile) * num_groups;
  const Block own(weights, codes + (u64(tile) * num_blocks + block) * CODE_BYTES, scales + first_group * SCALE_BYTES,
                  zeros + first_group * ZERO_BYTES, block, 0, row % 8 * 4 + lane % 4);
  const float factor = factors != nullptr ? factors[row] : 1.0f;
  T* to = out + u64(number) * num_inputs;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int part = step / STEPS_A_PART;
    const Pack<u32, 4> quad = own.quad(step / STEPS_A_QUAD);
    u32 a[4];
    decode(a, quad.at + step % STEPS_A_QUAD * (BITS / 4), own.operand(part, 0), own.operand(part, 1));
    const float scale = SCALES_NUMBERS ? 1.0f : own.exact_scale(part, step % SCALES_A_PART, high);
    const float minimum = own.minimum(part, high) * factor;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 input = block * BLOCK_INPUTS + step * 16 + lane % 4 * 2 + half * 8;
      const u32 pair = high != 0 ? a[half * 2 + 1] : a[half * 2];
      if (input < num_inputs) *reinterpret_cast<u32*>(to + input) = rounded_pair(pair, scale * factor, minimum);
    }
  }
}
