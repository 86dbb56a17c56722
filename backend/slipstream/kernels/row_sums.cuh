// The end of a product by wgmma (sm_90a): sums, of which each thread has some of two rows, pass through shared memory and
// come back as pieces, eight neighbouring columns of a row. Nothing streams meanwhile, so what counts is how few
// instructions that takes.
// -D ELEMENT (T)
#pragma once
#include "common.cuh"

// A thread's part of a piece, for lane = 4 g + t of a warp: of rows g and g + 8, two columns each.
struct alignas(16) Four {
  float at[4];
};
using Eight = Pack<float, 8>;

constexpr u32 PART_BYTES = sizeof(Four);

// Where among those of all threads this one leaves its part of a piece. Turned, so that lanes which take rows meet in no
// bank.
DEVICE u32 part_offset() { return (threadIdx.x ^ threadIdx.x / 8 % 4) * PART_BYTES; }
DEVICE void put_part(u32 address, const Four& part) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(part.at[0]), "f"(part.at[1]),
               "f"(part.at[2]), "f"(part.at[3])
               : "memory");
}

// What a lane takes: one of the 16 rows of a warp, in one of two pieces.
struct Lane {
  const u32 g = threadIdx.x % 16 / 2, half = threadIdx.x % 2;
  const u32 row = g + 8 * half, piece = threadIdx.x % 32 / 16;

  // `parts`: all threads' of a piece.
  DEVICE Eight take(u32 parts, u32 warp) const {
    Eight sums;
#pragma unroll
    for (u32 t = 0; t < 4; ++t)
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(sums.at[2 * t]), "=f"(sums.at[2 * t + 1])
                   : "r"(parts + (warp * 32 + g * 4 + (t ^ g / 2)) * PART_BYTES + half * 8)
                   : "memory");
    return sums;
  }
};

// What is the same for every row.
DEVICE void put(u32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
DEVICE Eight take_columns(u32 address) {
  Eight values;
#pragma unroll
  for (int j = 0; j < 8; j += 4)
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(values.at[j]), "=f"(values.at[j + 1]), "=f"(values.at[j + 2]), "=f"(values.at[j + 3])
                 : "r"(address + j * 4)
                 : "memory");
  return values;
}

template <class Element>
DEVICE void add(Eight& sums, const Pack<Element, 8>& addends) {
#pragma unroll
  for (int j = 0; j < 8; ++j) sums.at[j] += to_float(addends.at[j]);
}
// silu(gate) * up
DEVICE void gate(Eight& gates, const Eight& ups) {
#pragma unroll
  for (int j = 0; j < 8; ++j) gates.at[j] = silu_fast(gates.at[j]) * ups.at[j];
}
DEVICE void store_rounded(T* out, const Eight& values) {
  Pack<T, 8> rounded;
#pragma unroll
  for (int j = 0; j < 8; ++j) rounded.at[j] = from_float<T>(values.at[j]);
  store<8>(out, rounded);
}
