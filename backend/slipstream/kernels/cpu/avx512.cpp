// The kernels for AVX-512 without VNNI: as for AVX2, twice as wide.
#include "simd_avx512.h"

namespace {

template <int R>
inline void dot4(const uint8_t *w, const int8_t *x, int64_t pitch, I16 (&sum)[R]) {
    __m512i pairs[R];
    for (int r = 0; r < R; ++r) pairs[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int q = 0; q < 8; ++q) {
        const __m512i codes = wide_codes(w + 32 * q);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512i four = four_codes(x + r * pitch + 4 * q);
            pairs[r] = _mm512_add_epi16(pairs[r], _mm512_maddubs_epi16(codes, four));
        }
    }
    for (int r = 0; r < R; ++r) sum[r].v = _mm512_madd_epi16(pairs[r], _mm512_set1_epi16(1));
}

inline __m512i add_pairs(__m512i sum, __m512i a, __m512i b) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
}

// Puts the codes of each four inputs in the order 0, 2, 1, 3, of a block.
inline void arrange(int16_t *codes) {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    const __m512i all = _mm512_loadu_si512(codes);
    _mm512_storeu_si512(codes, _mm512_shuffle_epi8(all, _mm512_broadcast_i32x4(order)));
}

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

}  // namespace

#include "rows16_avx512.h"

#define FORM avx512
#include "kernels.h"
