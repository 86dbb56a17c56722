// A thread's part of x, as floats or in 16 bits, the unpacking of words, and sums over warps (gemv.cu).
// -D ELEMENT (T), ROWS (of x), CHUNKS (pieces of 8 elements for each thread)
#pragma once
#include "runtime/common.cuh"

constexpr int PIECE = 8;
constexpr int WARPS = 8;  // that multiply; one more copies

struct E4m3 {
  u8 bits;
};

DEVICE void unpack(u32 word, float* values, BFloat16) {
  values[0] = __uint_as_float(word << 16);
  values[1] = __uint_as_float(word & 0xffff0000u);
}
DEVICE void unpack(u32 word, float* values, Half) {
  values[0] = to_float(Half{u16(word)});
  values[1] = to_float(Half{u16(word >> 16)});
}
DEVICE void unpack(u16 pair, float* values, E4m3) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  unpack(halves, values, Half{});
}

struct Int8 {
  u8 bits;
};
// Four bytes, each with EXCESS added: 128 by its highest bit, and 1024 as it becomes the low byte of a Half. To take that
// away from each would be a quarter of all instructions: sums begin with what it comes to (gemv.cu), 10 bits above them.
constexpr float EXCESS = 1152.0f;
DEVICE void unpack(u32 word, float* values, Int8) {
  const u32 flipped = word ^ 0x80808080u;
  unpack(__byte_perm(flipped, 0x64646464u, 0x4140u), values, Half{});
  unpack(__byte_perm(flipped, 0x64646464u, 0x4342u), values + 2, Half{});
}

// The part of x that belongs to this thread: pieces threadIdx.x + THREADS * i of every row; zeros behind the end.
template <bool PACKED>
struct Part {
  float values[ROWS][CHUNKS][PIECE];

  DEVICE void set(int row, int i, int j, u32, const float (&pair)[2]) {
    values[row][i][j] = pair[0];
    values[row][i][j + 1] = pair[1];
  }
  DEVICE void get(int row, int i, int j, float (&pair)[2]) const {
    pair[0] = values[row][i][j];
    pair[1] = values[row][i][j + 1];
  }
};
template <>
struct Part<true> {
  u32 words[ROWS][CHUNKS][PIECE / 2];

  DEVICE void set(int row, int i, int j, u32 word, const float (&)[2]) { words[row][i][j / 2] = word; }
  DEVICE void get(int row, int i, int j, float (&pair)[2]) const {
    u32 word = words[row][i][j / 2];
    asm volatile("" : "+r"(word));  // or it is unpacked once, before the loop, and spilled
    unpack(word, pair, T{});
  }
};

// Sums over the warp: lane l is left with number l / LANES, added in the same order however many there are.
template <int MASK = 16, int COUNT>
DEVICE float reduce(const float (&sums)[COUNT]) {
  constexpr int HALF = COUNT / 2;
  const bool upper = threadIdx.x & MASK;
  float folded[HALF > 0 ? HALF : 1];
  if constexpr (HALF == 0) folded[0] = sums[0] + __shfl_xor_sync(ALL_LANES, sums[0], MASK);
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    const float kept = upper ? sums[HALF + i] : sums[i];
    folded[i] = kept + __shfl_xor_sync(ALL_LANES, upper ? sums[i] : sums[HALF + i], MASK);
  }
  if constexpr (MASK == 1)
    return folded[0];
  else
    return reduce<MASK / 2>(folded);
}

// The sum over warps, in their order.
DEVICE float total(const float* of_warps) {
  float result = of_warps[0];
#pragma unroll
  for (int warp = 1; warp < WARPS; ++warp) result += of_warps[warp];
  return result;
}
