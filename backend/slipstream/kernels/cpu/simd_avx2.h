// Vectors of 16 numbers as two registers of AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

struct F16 {
    __m256 a, b;
};

struct I16 {
    __m256i a, b;
};

inline F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float *p, F16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline F16 load_halves(const uint16_t *p) {
    const __m128i *q = reinterpret_cast<const __m128i *>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline F16 load_bfloats(const uint16_t *p) {
    const __m128i *q = reinterpret_cast<const __m128i *>(p);
    const __m256i a = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), 16);
    const __m256i b = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1)), 16);
    return {_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)};
}
inline F16 operator+(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F16 operator-(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F16 operator*(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F16 operator/(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F16 fma(F16 x, F16 y, F16 z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline F16 larger(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F16 smaller(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F16 absolute(F16 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F16 rounded(F16 x) {
    constexpr int how = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, how), _mm256_round_ps(x.b, how)};
}
// x * 2 ** n, of whole n for which that is a normal number.
inline F16 scaled(F16 x, F16 n) {
    const __m256i a = _mm256_slli_epi32(_mm256_cvtps_epi32(n.a), 23);
    const __m256i b = _mm256_slli_epi32(_mm256_cvtps_epi32(n.b), 23);
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x.a), a)),
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x.b), b))};
}
// The sum of each of 8 vectors of 16: of halves, of halves of these, and so on.
inline __m256 eight_sums(const float (*p)[16]) {
    __m256 pairs[4];
    for (int q = 0; q < 4; ++q) {
        const auto halved = [&](int i) {
            return _mm256_add_ps(_mm256_loadu_ps(p[i]), _mm256_loadu_ps(p[i] + 8));
        };
        const __m256 a = halved(q), b = halved(4 + q);
        pairs[q] =
            _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    const auto halved = [](__m256 a, __m256 b) {
        return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
    };
    const __m256 a = halved(pairs[0], pairs[1]), b = halved(pairs[2], pairs[3]);
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
}
// The same of 16 vectors, as `sum_of` has it.
inline F16 sums_of(const float (&p)[16][16]) { return {eight_sums(p), eight_sums(p + 8)}; }
inline F16 to_floats(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

// Two vectors of whole numbers as 32 of 8 bits, or 16 bits; the sum of all of them.
inline int32_t sum_of(__m256i x) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    return _mm_cvtsi128_si32(half);
}
inline int32_t store_codes(int8_t *p, F16 x, F16 y) {
    const __m256i a = _mm256_cvtps_epi32(x.a), b = _mm256_cvtps_epi32(x.b);
    const __m256i c = _mm256_cvtps_epi32(y.a), d = _mm256_cvtps_epi32(y.b);
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm256_permutevar8x32_epi32(packed, order));
    return sum_of(_mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d)));
}
inline int32_t store_codes(int16_t *p, F16 x, F16 y) {
    const __m256i a = _mm256_cvtps_epi32(x.a), b = _mm256_cvtps_epi32(x.b);
    const __m256i c = _mm256_cvtps_epi32(y.a), d = _mm256_cvtps_epi32(y.b);
    __m256i *q = reinterpret_cast<__m256i *>(p);
    _mm256_storeu_si256(q, _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8));
    _mm256_storeu_si256(q + 1, _mm256_permute4x64_epi64(_mm256_packs_epi32(c, d), 0xd8));
    return sum_of(_mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d)));
}
inline __m256i four_codes(const int8_t *p) {
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    return _mm256_set1_epi32(word);
}
inline __m256i four_codes(const int16_t *p) {
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    return _mm256_set1_epi32(word);
}

constexpr int ROWS_OF_CODES = 4;    // rows of x that share the unpacking of weights
constexpr int ROWS_OF_NUMBERS = 6;  // whose sums of fp32 fit the registers
constexpr int SUMS = 6;             // that fit them, of 16 numbers each

}  // namespace
