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

inline __m512i add_pairs(__m512i sum, __m512i a, __m512i b) { return _mm512_dpwssd_epi32(sum, a, b); }

}  // namespace

#include "rows16_avx512.h"
