// A thread's part of x, as floats or in 16 bits, and the unpacking of words (gemv.cu).
// -D ELEMENT (T), ROWS (of x), CHUNKS (pieces of 8 elements for each thread)
#pragma once
#include "runtime/common.cuh"

constexpr int PIECE = 8;

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
