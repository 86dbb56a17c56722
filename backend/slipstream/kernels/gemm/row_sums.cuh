// The end of a product by wgmma (sm_90a): sums, of which each thread has some of two rows, pass through shared memory
// and come back as pieces, eight neighbouring columns of a row. Nothing streams meanwhile, so what counts is how few
// instructions that takes.
// -D ELEMENT (T), ROWS (of a tile), INT8 (whether sums are integers)
#pragma once
#ifndef INT8
#define INT8 0
#endif
#include "runtime/common.cuh"

// A thread's part of a piece, for lane = 4 g + t of a warp: of rows g and g + 8, two columns each. Integers lie in the
// place of their bits until `add_sums` is done with them.
struct alignas(16) Four {
  float at[4];

  DEVICE static Four of(const float* sums) { return {{sums[0], sums[1], sums[2], sums[3]}}; }
  DEVICE static Four of(const int* sums) {
    return {{__int_as_float(sums[0]), __int_as_float(sums[1]), __int_as_float(sums[2]), __int_as_float(sums[3])}};
  }
};
using Eight = Pack<float, 8>;

constexpr u32 PART_BYTES = sizeof(Four);

// Where among those of all threads this one leaves its part of a piece. Turned, so that lanes which take rows meet in
// no bank.
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

// Before `to_floats`.
DEVICE void add_sums(Eight& sums, const Eight& others) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float& sum = sums.at[j];
    sum = INT8 ? __int_as_float(__float_as_int(sum) + __float_as_int(others.at[j])) : sum + others.at[j];
  }
}
// Make numbers of sums: integers are rounded, where they have more than 24 bits.
DEVICE void to_floats(Eight& sums) {
#pragma unroll
  for (int j = 0; j < 8; ++j)
    if (INT8) sums.at[j] = float(__float_as_int(sums.at[j]));
}
// Integers as they are.
DEVICE void store_sums(int* out, const Eight& sums) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    Pack<int, 4> half;
#pragma unroll
    for (int j = 0; j < 4; ++j) half.at[j] = __float_as_int(sums.at[i + j]);
    store<4>(out + i, half);
  }
}

// Scales and biases of a tile's columns, which were rows of the weights; of gates and then of ups. They are put into
// shared memory early: at the end, loads would wait behind what the next kernel streams.
constexpr u32 COLUMN_BYTES = ROWS * 2 * sizeof(float);

DEVICE void put(u32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
// By THREADS threads, which a barrier must follow. `scales` or `bias` may be null.
template <int THREADS>
DEVICE void put_columns(u32 address, const float* scales, const T* bias, int first, int num_outputs, bool gated) {
  if (scales == nullptr && bias == nullptr) return;
  for (int i = threadIdx.x; i < ROWS; i += THREADS) {
    const bool is_up = gated && i >= ROWS / 2;
    const int column = first + (is_up ? i - ROWS / 2 : i), at = column + (is_up ? num_outputs : 0);
    const bool exists = column < num_outputs;
    put(address + i * sizeof(float), exists && scales != nullptr ? scales[at] : 1.0f);
    put(address + (ROWS + i) * sizeof(float), exists && bias != nullptr ? to_float(bias[at]) : 0.0f);
  }
}

// Eight of them.
struct Columns {
  const u32 address;

  DEVICE Columns(u32 base, u32 first) : address(base + first * sizeof(float)) {}
  DEVICE Eight scales() const { return take(address); }
  DEVICE Eight biases() const { return take(address + ROWS * sizeof(float)); }

 private:
  static DEVICE Eight take(u32 from) {
    Eight values;
#pragma unroll
    for (int j = 0; j < 8; j += 4)
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(values.at[j]), "=f"(values.at[j + 1]), "=f"(values.at[j + 2]), "=f"(values.at[j + 3])
                   : "r"(from + j * u32(sizeof(float)))
                   : "memory");
    return values;
  }
};

// A product of 8 bits in its place; of e4m3 rounded before anything is added, as what comes unscaled is (eight_bits.cu).
DEVICE void scale(Eight& sums, float row_scale, const Eight& column_scales) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float rounded = INT8 ? sums.at[j] : to_float(from_float<BFloat16>(sums.at[j]));
    sums.at[j] = __fmul_rn(rounded * column_scales.at[j], row_scale);
  }
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
