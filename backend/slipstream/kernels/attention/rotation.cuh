// Rotary embedding (Su et al., 2021; Llama's halves) of pairs of 16-bit elements.
// -D ELEMENT (T: 16 bits), SINKS (1: angles are the step's own, not a table's)
#pragma once
#include "runtime/mma.cuh"

// Cosines, or sines, of two pairs.
DEVICE Pack<float, 2> load_angle(const float* address) {
#if SINKS
  return load_fresh<2>(address);
#else
  return load<2>(address);
#endif
}

// Two elements of the first half of a head, and the two half a head on.
DEVICE void rotate_pairs(u32& first, u32& second, const Pack<float, 2>& cosines,
                         const Pack<float, 2>& sines) {
  float a[2], b[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float x = to_float(T{u16(first >> j * 16)}), y = to_float(T{u16(second >> j * 16)});
    a[j] = x * cosines.at[j] - y * sines.at[j];
    b[j] = y * cosines.at[j] + x * sines.at[j];
  }
  first = pack_pair(a[0], a[1]);
  second = pack_pair(b[0], b[1]);
}
