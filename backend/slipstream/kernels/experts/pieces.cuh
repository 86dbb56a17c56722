// What GEMMs of experts with weights of 8 and 16 bits by rows share: 16 bytes of these as operands of tensor cores.
//
// A lane's 16 bytes of a row are PIECE neighbours of the width. Which of a product's terms meet in which step of the
// tensor cores does not matter as long as both operands agree: here lane 4 * g + t holds words 2s and 2s + 1 of piece t
// where step s of m16n8k16 wants columns 2t, 2t + 1 and 2t + 8, 2t + 9. So no operand has to be shuffled.
// -D ELEMENT (T: Half or BFloat16), FP8 (whether weights are e4m3 rather than T), GATED (see task.cuh)
#pragma once
#include "experts/task.cuh"
#include "runtime/copies.cuh"
#include "runtime/mma.cuh"

constexpr int PIECE = FP8 ? 16 : 8;
constexpr int WEIGHT_BYTES = FP8 ? 1 : 2;
constexpr int WORDS = PIECE / 2;      // of a piece, in T
constexpr int STEPS = WORDS / 2;      // of tensor cores
constexpr int X_PIECES = PIECE / 8;   // of 16 bytes of x beside a piece of weights

using Bytes = Pack<u32, 4>;

struct Operand {
  u32 words[WORDS];
};

// Two e4m3 in the upper halves of 16 bits each, to T: exact, zeros and subnormals too.
DEVICE u32 widened(u32 spread, BFloat16) {
  u32 result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;"
      : "=r"(result)
      : "r"((spread & 0x7f007f00u) >> 4 | (spread & 0x80008000u)), "r"(0x7b807b80u), "r"(0x80008000u));
  return result;
}
DEVICE u32 widened(u32 spread, Half) {
  u32 result;
  asm("mul.rn.f16x2 %0, %1, %2;"
      : "=r"(result)
      : "r"((spread & 0x7f007f00u) >> 1 | (spread & 0x80008000u)), "r"(0x5c005c00u));
  return result;
}
DEVICE Operand operand(const Bytes& piece) {
  Operand result;
#if FP8
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    result.words[2 * i] = widened(__byte_perm(piece.at[i], 0, 0x1404), T{});
    result.words[2 * i + 1] = widened(__byte_perm(piece.at[i], 0, 0x3424), T{});
  }
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) result.words[i] = piece.at[i];
#endif
  return result;
}
DEVICE Operand operand(const Bytes (&pieces)[X_PIECES]) {
  Operand result;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) result.words[i] = pieces[i / 4].at[i % 4];
  return result;
}
// `upper` and `lower` are rows g and g + 8 of the left operand, `right` column g of the other.
DEVICE void multiply(float (&sums)[4], const Operand& upper, const Operand& lower, const Operand& right) {
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    const u32 left[4] = {upper.words[2 * s], lower.words[2 * s], upper.words[2 * s + 1], lower.words[2 * s + 1]};
    multiply_add(sums, left, right.words[2 * s], right.words[2 * s + 1], T{});
  }
}

DEVICE const u8* weights_of(const Task& task, int row) {
  return task.weight + task.row_of_all(row) * task.width * WEIGHT_BYTES;
}
