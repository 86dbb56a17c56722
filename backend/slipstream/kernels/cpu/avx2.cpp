// The kernels for AVX2 and FMA: products of 8 by 8 bits in pairs, by `maddubs`.
#include "simd_avx2.h"

namespace {

// Sums of 32 products of codes of 4 bits, of 16 outputs: 8 of these in 16 bits are 30,480 at most.
template <int R>
inline void dot4(const uint8_t *w, const int8_t *x, int64_t pitch, I16 (&sum)[R]) {
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    I16 pairs[R];
    for (int r = 0; r < R; ++r) pairs[r] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 8
    for (int q = 0; q < 8; ++q) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(w) + q);
        const __m256i a = _mm256_and_si256(both, low);
        const __m256i b = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const __m256i four = four_codes(x + r * pitch + 4 * q);
            pairs[r].a = _mm256_add_epi16(pairs[r].a, _mm256_maddubs_epi16(a, four));
            pairs[r].b = _mm256_add_epi16(pairs[r].b, _mm256_maddubs_epi16(b, four));
        }
    }
    for (int r = 0; r < R; ++r)
        sum[r] = {_mm256_madd_epi16(pairs[r].a, ones), _mm256_madd_epi16(pairs[r].b, ones)};
}

// What codes of e2m1 stand for.
inline __m256i looked_up(__m256i codes) {
    const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
}

// Puts the codes of each four inputs in the order 0, 2, 1, 3, of a block.
inline void arrange(int16_t *codes) {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    for (int i = 0; i < 32; i += 16) {
        __m256i *half = reinterpret_cast<__m256i *>(codes + i);
        const __m256i all = _mm256_loadu_si256(half);
        _mm256_storeu_si256(half, _mm256_shuffle_epi8(all, _mm256_broadcastsi128_si256(order)));
    }
}

// The same of rows of 16 bits, which come as inputs 0, 2, 1, 3 of each four: a lane of 16 bits has a
// code of an even or an odd input in each of its four parts.
template <int R, bool FLOATS>
inline void dot4(const uint8_t *w, const int16_t *x, int64_t pitch, I16 (&sum)[R]) {
    const __m256i low = _mm256_set1_epi8(15), even = _mm256_set1_epi16(255);
    for (int r = 0; r < R; ++r) sum[r] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 8
    for (int q = 0; q < 8; ++q) {
        const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(w) + q);
        __m256i a_codes = _mm256_and_si256(all, low);
        __m256i b_codes = _mm256_and_si256(_mm256_srli_epi16(all, 4), low);
        if constexpr (FLOATS) a_codes = looked_up(a_codes), b_codes = looked_up(b_codes);
        const __m256i even_a = _mm256_and_si256(a_codes, even);
        const __m256i even_b = _mm256_and_si256(b_codes, even);
        const __m256i odd_a = _mm256_srli_epi16(a_codes, 8);
        const __m256i odd_b = _mm256_srli_epi16(b_codes, 8);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const __m256i evens = four_codes(x + r * pitch + 4 * q);
            const __m256i odds = four_codes(x + r * pitch + 4 * q + 2);
            const __m256i a = _mm256_add_epi32(_mm256_madd_epi16(even_a, evens),
                                               _mm256_madd_epi16(odd_a, odds));
            const __m256i b = _mm256_add_epi32(_mm256_madd_epi16(even_b, evens),
                                               _mm256_madd_epi16(odd_b, odds));
            sum[r].a = _mm256_add_epi32(sum[r].a, a);
            sum[r].b = _mm256_add_epi32(sum[r].b, b);
        }
    }
}

template <int R, int INPUTS>
inline void dot8(const uint8_t *w, const int16_t *x, int64_t pitch, I16 (&sum)[R]) {
    for (int r = 0; r < R; ++r) sum[r] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 4
    for (int p = 0; p < INPUTS / 2; ++p) {
        const __m128i *pair = reinterpret_cast<const __m128i *>(w) + 2 * p;
        const __m256i a = _mm256_cvtepi8_epi16(_mm_loadu_si128(pair));
        const __m256i b = _mm256_cvtepi8_epi16(_mm_loadu_si128(pair + 1));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const __m256i two = four_codes(x + r * pitch + 2 * p);
            sum[r].a = _mm256_add_epi32(sum[r].a, _mm256_madd_epi16(a, two));
            sum[r].b = _mm256_add_epi32(sum[r].b, _mm256_madd_epi16(b, two));
        }
    }
}

}  // namespace

#define FORM avx2
#include "kernels.h"
