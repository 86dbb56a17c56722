// Sums of products of 8 by 16 bits, by 512-bit vectors. `add_pairs(sum, a, b)`, which adds the products of pairs of
// 16 bits, comes from the form that includes this.
#pragma once

#include "simd_avx512.h"

namespace {

template <int R, int INPUTS>
inline void dot8(const uint8_t *w, const int16_t *x, int64_t pitch, I16 (&sum)[R]) {
    for (int r = 0; r < R; ++r) sum[r].v = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int p = 0; p < INPUTS / 2; ++p) {
        const __m512i codes = wide_pairs(w + 32 * p);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            sum[r].v = add_pairs(sum[r].v, codes, four_codes(x + r * pitch + 2 * p));
    }
}

}  // namespace
