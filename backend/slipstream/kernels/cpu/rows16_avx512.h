// Sums of 32 products with rows of 16 bits, by 512-bit vectors. `add_pairs(sum, a, b)`, which adds the products of pairs of
// 16 bits, comes from the form that includes this.
#pragma once

#include "simd_avx512.h"

namespace {

template <int R, bool FLOATS>
inline void dot4(const uint8_t *w, const int16_t *x, int64_t pitch, I16 (&sum)[R]) {
    __m512i odds[R];  // apart: of few rows, a sum would wait for the one before
    for (int r = 0; r < R; ++r) sum[r].v = odds[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int q = 0; q < 8; ++q) {
        __m512i codes = wide_codes(w + 32 * q);
        if constexpr (FLOATS) codes = looked_up(codes);
        const __m512i even = even_codes(codes), odd = odd_codes(codes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            sum[r].v = add_pairs(sum[r].v, even, four_codes(x + r * pitch + 4 * q));
            odds[r] = add_pairs(odds[r], odd, four_codes(x + r * pitch + 4 * q + 2));
        }
    }
    for (int r = 0; r < R; ++r) sum[r].v = _mm512_add_epi32(sum[r].v, odds[r]);
}

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
