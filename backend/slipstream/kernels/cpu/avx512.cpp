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

template <int R>
inline void dot4(const uint8_t *w, const int16_t *x, int64_t pitch, I16 (&sum)[R]) {
    for (int r = 0; r < R; ++r) sum[r].v = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int q = 0; q < 8; ++q) {
        const __m512i codes = wide_codes(w + 32 * q);
        const __m512i even = even_codes(codes), odd = odd_codes(codes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512i products = _mm512_add_epi32(
                _mm512_madd_epi16(even, four_codes(x + r * pitch + 4 * q)),
                _mm512_madd_epi16(odd, four_codes(x + r * pitch + 4 * q + 2)));
            sum[r].v = _mm512_add_epi32(sum[r].v, products);
        }
    }
}

template <int R>
inline void dot8(const uint8_t *w, const int16_t *x, int64_t pitch, I16 (&sum)[R]) {
    for (int r = 0; r < R; ++r) sum[r].v = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int p = 0; p < 16; ++p) {
        const __m512i codes = wide_pairs(w + 32 * p);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512i two = four_codes(x + r * pitch + 2 * p);
            sum[r].v = _mm512_add_epi32(sum[r].v, _mm512_madd_epi16(codes, two));
        }
    }
}

}  // namespace

#define FORM avx512
#include "kernels.h"
