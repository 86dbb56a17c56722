// Sums of 32 products by AVX-512's VNNI.
#pragma once

#include "simd_avx512.h"

namespace {

template <int R>
inline void dot4(const uint8_t *w, const int8_t *x, int64_t pitch, I16 (&sum)[R]) {
    for (int r = 0; r < R; ++r) sum[r].v = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int q = 0; q < 8; ++q) {
        const __m512i codes = wide_codes(w + 32 * q);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            sum[r].v = _mm512_dpbusd_epi32(sum[r].v, codes, four_codes(x + r * pitch + 4 * q));
    }
}

// Puts the low bytes of the codes of each four inputs before the high ones, of a block.
inline void arrange(int16_t *codes) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m512i all = _mm512_loadu_si512(codes);
    _mm512_storeu_si512(codes, _mm512_shuffle_epi8(all, _mm512_broadcast_i32x4(order)));
}

// Rows of 16 bits are `256 * high + low`, high with a sign and low without: four products in each
// lane at a time, with no need to widen weights.
template <int R, bool FLOATS>
inline void dot4(const uint8_t *w, const int16_t *x, int64_t pitch, I16 (&sum)[R]) {
    __m512i high[R];
    for (int r = 0; r < R; ++r) sum[r].v = high[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int q = 0; q < 8; ++q) {
        __m512i codes = wide_codes(w + 32 * q);
        if constexpr (FLOATS) codes = looked_up(codes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const int16_t *four = x + r * pitch + 4 * q;
            sum[r].v = _mm512_dpbusd_epi32(sum[r].v, four_codes(four), codes);
            high[r] = _mm512_dpbusd_epi32(high[r], codes, four_codes(four + 2));
        }
    }
    for (int r = 0; r < R; ++r)
        sum[r].v = _mm512_add_epi32(sum[r].v, _mm512_slli_epi32(high[r], 8));
}

inline __m512i add_pairs(__m512i sum, __m512i a, __m512i b) { return _mm512_dpwssd_epi32(sum, a, b); }

}  // namespace

#include "rows16_avx512.h"
