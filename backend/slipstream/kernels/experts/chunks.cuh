// Weights that go from memory straight to registers, where they are the left operand of tensor cores, each of their
// bytes once: 16 weight rows by chunks of the width, and up to eight rows of x.
// -D ELEMENT, FP8, GATED (see pieces.cuh)
#pragma once
#include "experts/pieces.cuh"

constexpr int ROWS = 8;   // of x
constexpr int CHUNK = 8;  // pieces of a row: 128 bytes of weights

// For what is read once: past the L1 cache.
DEVICE Bytes load_once(const u8* address) {
  Bytes result;
  u32(&to)[4] = result.at;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(address));
  return result;
}

// A lane 4 * g + t has pieces t and t + 4 of a chunk: of weight rows g and g + 8, and of row g of x. Zeros are behind
// the width, and in the place of rows that are not.
DEVICE int piece_of(int chunk, int half) { return chunk * CHUNK + half * 4 + threadIdx.x % 4; }

struct WeightChunk {
  Bytes at[2][2];

  DEVICE void load(const u8* upper, const u8* lower, int chunk, int num_pieces) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int piece = piece_of(chunk, half);
      at[half][0] = piece < num_pieces ? load_once(upper + piece * 16) : Bytes{};
      at[half][1] = piece < num_pieces ? load_once(lower + piece * 16) : Bytes{};
    }
  }
};

struct RowChunk {
  Bytes at[2][X_PIECES];

  // `row`: null if there is none.
  DEVICE void load(const T* row, int chunk, int num_pieces) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < X_PIECES; ++i) {
        const int piece = piece_of(chunk, half);
        at[half][i] = Bytes{};
        if (piece < num_pieces && row != nullptr)
          at[half][i] = load_fresh<4>(reinterpret_cast<const u32*>(row + piece * PIECE + i * 8));
      }
  }
};

DEVICE void multiply(float (&sums)[4], const WeightChunk& weights, const RowChunk& x) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    multiply(sums, operand(weights.at[half][0]), operand(weights.at[half][1]), operand(x.at[half]));
}
