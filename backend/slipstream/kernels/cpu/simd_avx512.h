// Vectors of 16 numbers as registers of AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

struct F16 {
    __m512 v;
};

struct I16 {
    __m512i v;
};

inline F16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float *p) { return {_mm512_loadu_ps(p)}; }
inline void store(float *p, F16 x) { _mm512_storeu_ps(p, x.v); }
inline F16 load_halves(const uint16_t *p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))};
}
inline F16 load_bfloats(const uint16_t *p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline F16 operator+(F16 x, F16 y) { return {_mm512_add_ps(x.v, y.v)}; }
inline F16 operator-(F16 x, F16 y) { return {_mm512_sub_ps(x.v, y.v)}; }
inline F16 operator*(F16 x, F16 y) { return {_mm512_mul_ps(x.v, y.v)}; }
inline F16 operator/(F16 x, F16 y) { return {_mm512_div_ps(x.v, y.v)}; }
inline F16 fma(F16 x, F16 y, F16 z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
inline F16 larger(F16 x, F16 y) { return {_mm512_max_ps(x.v, y.v)}; }
inline F16 smaller(F16 x, F16 y) { return {_mm512_min_ps(x.v, y.v)}; }
inline F16 absolute(F16 x) { return {_mm512_abs_ps(x.v)}; }
inline F16 rounded(F16 x) {
    return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// x * 2 ** n, of whole n for which that is a normal number.
inline F16 scaled(F16 x, F16 n) {
    const __m512i by = _mm512_slli_epi32(_mm512_cvtps_epi32(n.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x.v), by))};
}
// The sum of each of 16 vectors: of halves, of halves of these, and so on, as `sum_of` has it.
inline F16 sums_of(const float (&p)[16][16]) {
    __m512 quads[4];
    for (int q = 0; q < 4; ++q) {
        const auto halved = [&](int i, int j) {
            const __m512 a = _mm512_loadu_ps(p[i]), b = _mm512_loadu_ps(p[j]);
            return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        };
        const __m512 a = halved(q, 4 + q), b = halved(8 + q, 12 + q);
        quads[q] =
            _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    const auto halved = [](__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    };
    const __m512 a = halved(quads[0], quads[1]), b = halved(quads[2], quads[3]);
    return {_mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd))};
}
inline F16 to_floats(I16 x) { return {_mm512_cvtepi32_ps(x.v)}; }

// The sum of whole numbers, which wraps around: of those that came of NaN it is of no account.
inline int32_t sum_of(__m512i x) {
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}
// Two vectors of whole numbers as 32 of 8 bits, or 16 bits; the sum of all of them.
inline int32_t store_codes(int8_t *p, F16 x, F16 y) {
    const __m512i a = _mm512_cvtps_epi32(x.v), b = _mm512_cvtps_epi32(y.v);
    __m128i *q = reinterpret_cast<__m128i *>(p);
    _mm_storeu_si128(q, _mm512_cvtsepi32_epi8(a));
    _mm_storeu_si128(q + 1, _mm512_cvtsepi32_epi8(b));
    return sum_of(_mm512_add_epi32(a, b));
}
inline int32_t store_codes(int16_t *p, F16 x, F16 y) {
    const __m512i a = _mm512_cvtps_epi32(x.v), b = _mm512_cvtps_epi32(y.v);
    __m256i *q = reinterpret_cast<__m256i *>(p);
    _mm256_storeu_si256(q, _mm512_cvtsepi32_epi16(a));
    _mm256_storeu_si256(q + 1, _mm512_cvtsepi32_epi16(b));
    return sum_of(_mm512_add_epi32(a, b));
}
template <class Code>
inline __m512i four_codes(const Code *p) {
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
}
// 64 codes of 4 bits: of the first 8 outputs, then of the others.
inline __m512i wide_codes(const uint8_t *w) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(w));
    const __m512i by = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    const __m512i wide = _mm512_srlv_epi16(_mm512_broadcast_i64x4(both), by);
    return _mm512_and_si512(wide, _mm512_set1_epi8(15));
}
// What codes of e2m1 stand for.
inline __m512i looked_up(__m512i codes) {
    const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes);
}
// The same codes in lanes of 16 bits: of even inputs, of odd ones.
inline __m512i even_codes(__m512i codes) {
    return _mm512_and_si512(codes, _mm512_set1_epi16(255));
}
inline __m512i odd_codes(__m512i codes) { return _mm512_srli_epi16(codes, 8); }
// 32 codes of 8 bits in 16.
inline __m512i wide_pairs(const uint8_t *w) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(w)));
}

constexpr int ROWS_OF_CODES = 8;    // rows of x that share the unpacking of weights
constexpr int ROWS_OF_NUMBERS = 8;  // whose sums of fp32 fit the registers
constexpr int SUMS = 16;            // that fit them, of 16 numbers each

}  // namespace
