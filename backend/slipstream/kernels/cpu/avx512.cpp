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

}  // namespace

#include "rows16_avx512.h"

#define FORM avx512
#include "kernels.h"
