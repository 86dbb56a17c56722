// How a row of the paged cache is kept (kv_format.py), and its numbers as pairs of float16.
// -D ELEMENT (T), HEAD_SIZE, FORMAT (0: T; 1: e4m3, 2: int8, 3: int4)
#pragma once
#include "runtime/common.cuh"

#ifndef FORMAT
#define FORMAT 0
#endif
#define E4M3 1
#define INT8 2
#define INT4 3

#if FORMAT == 0
using Cell = T;
#else
using Cell = u8;
#endif
enum : int {
  GROUPS = FORMAT == INT4 ? (HEAD_SIZE + 63) / 64 : 1,          // that have scales of their own
  ROW_CELLS = FORMAT == INT4 ? HEAD_SIZE / 2 : HEAD_SIZE,       // that hold numbers
  SCALE_BYTES = FORMAT == 0 ? 0 : FORMAT == INT4 ? 2 * GROUPS : 1,  // of a token
};

// Where cells lie in a block: the numbers of all heads, of each K, then V, token by token; scales behind them, in the
// same order. So numbers begin where a line of memory does: 32 bytes off, reading them takes a tenth longer.
struct BlockLayout {
  i64 num_kv_heads;
  int block_shift;

  DEVICE i64 size() const { return i64(2 * (ROW_CELLS + SCALE_BYTES)) * num_kv_heads << block_shift; }
  // Those of K of token 0; from there V's.
  DEVICE i64 numbers(i64 kv_head) const { return 2 * kv_head * from_k_to_v(); }
  DEVICE i64 scales(i64 kv_head) const { return numbers(num_kv_heads) + 2 * kv_head * from_k_to_v_scales(); }
  DEVICE i64 from_k_to_v() const { return i64(ROW_CELLS) << block_shift; }
  DEVICE i64 from_k_to_v_scales() const { return i64(SCALE_BYTES) << block_shift; }
};

#if FORMAT != 0
constexpr int NUMBERS = FORMAT == INT4 ? 8 : 4;  // in 32 bits
constexpr int PAIRS = NUMBERS / 2;
#if __CUDA_ARCH__ >= 890
#define CONVERTS_E4M3 1
#else
#define CONVERTS_E4M3 0
#endif
// What a number of `unpack` counts, in scales.
constexpr float UNIT = FORMAT == E4M3 && !CONVERTS_E4M3 ? 256.0f : 1.0f;

DEVICE float scale_of(u8 code) {
  return code == 255 ? __uint_as_float(0x7fffffff) : __uint_as_float((u32(code) + 840) << 20);
}

DEVICE u32 permute(u32 low, u32 high, u32 selector) {
  u32 result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
}
#if CONVERTS_E4M3
DEVICE u32 convert_e4m3(u16 pair) {
  u32 result;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(pair));
  return result;
}
#endif
DEVICE u32 subtract_halves(u32 a, u32 b) {
  u32 result;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// 1,024 and a zero, as a float16; below 1,024 these are twice as close.
DEVICE u32 zero_of(u8 byte) {
  const int zero = static_cast<signed char>(byte);
  return u32(0x6400 + (zero < 0 ? 2 * zero : zero));
}

// Numbers of 32 bits as pairs of float16, exactly: pair j is numbers j and j + PAIRS. `zeros`: of int4, 1,024 and the
// zero of either.
DEVICE void unpack(u32 (&pairs)[PAIRS], u32 word, u32 zeros) {
#if FORMAT == E4M3 && CONVERTS_E4M3
  word = permute(word, 0, 0x3120);
  pairs[0] = convert_e4m3(u16(word));
  pairs[1] = convert_e4m3(u16(word >> 16));
#elif FORMAT == E4M3
  // In a float16's place, sign, exponent and mantissa mean 1 / 256 of the number.
  const u32 upper[2] = {word << 8, word};
#pragma unroll
  for (int j = 0; j < 2; ++j) pairs[j] = (upper[j] & 0x80008000u) | (upper[j] >> 1 & 0x3f803f80u);
#elif FORMAT == INT8
  // 0x64xx is 1,024 + xx.
  word ^= 0x80808080u;
  pairs[0] = subtract_halves(permute(word, 0x64646464u, 0x4240), 0x64806480u);
  pairs[1] = subtract_halves(permute(word, 0x64646464u, 0x4341), 0x64806480u);
#else
#pragma unroll
  for (int j = 0; j < 4; ++j)
    pairs[j] = subtract_halves((word >> j * 4 & 0x000f000fu) | 0x64006400u, zeros);
#endif
}

// Numbers of 32 bits of the cache, rounded once from what they mean exactly. `scale` is of a `UNIT`.
DEVICE void store_numbers(T* target, u32 word, float scale, u32 zeros) {
  u32 pairs[PAIRS];
  unpack(pairs, word, zeros);
  constexpr int WIDEST = 16 / sizeof(T), EACH = NUMBERS < WIDEST ? NUMBERS : WIDEST;  // in a store
  Pack<T, EACH> numbers[NUMBERS / EACH];
#pragma unroll
  for (int i = 0; i < NUMBERS; ++i) {
    const u32 pair = pairs[i % PAIRS];
    numbers[i / EACH].at[i % EACH] = from_float<T>(to_float(Half{u16(i < PAIRS ? pair : pair >> 16)}) * scale);
  }
#pragma unroll
  for (int i = 0; i < NUMBERS / EACH; ++i) ::store<EACH>(target + i * EACH, numbers[i]);
}
#endif
