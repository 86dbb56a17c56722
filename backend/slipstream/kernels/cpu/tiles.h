// Products of 16 rows at a time with a tile of weights, by AMX's tiles of bytes.
//
// A row's whole numbers of 16 bits are `256 * high + low`, high with a sign and low without, so the
// sums of 32 are those of every other form, and so are the bits of a row.
#pragma once

#include "multiply.h"

namespace {

constexpr int WHOLE = BLOCK * TILE;  // weights of a block

// Sums of 32 inputs of 16 rows, as the tiles hold them.
using Group = int32_t[TILE][TILE];

#ifdef SLIPSTREAM_PLAIN_TILES
// The same arithmetic without the instructions, for tests where no processor has them.
struct TileScope {};

inline void sum_group(const uint8_t *weights, const uint8_t *low, const uint8_t *high, int64_t pitch,
                      Group &low_sums, Group &high_sums) {
    for (int r = 0; r < TILE; ++r)
        for (int n = 0; n < TILE; ++n) {
            int32_t of_low = 0, of_high = 0;
            for (int k = 0; k < BLOCK; ++k) {
                const int32_t w = static_cast<int8_t>(weights[k / 4 * 64 + n * 4 + k % 4]);
                of_low += low[r * pitch + k] * w;
                of_high += static_cast<int8_t>(high[r * pitch + k]) * w;
            }
            low_sums[r][n] = of_low, high_sums[r][n] = of_high;
        }
}
#else
// Shapes of the tiles for as long as it lives: 0 and 1 sums, 2 and 3 rows, 4 weights.
struct TileScope {
    TileScope() {
        struct alignas(64) {
            uint8_t palette = 1, first = 0, none[14] = {};
            uint16_t bytes[16] = {64, 64, BLOCK, BLOCK, 64};
            uint8_t rows[16] = {TILE, TILE, TILE, TILE, BLOCK / 4};
        } shapes;
        __asm__ volatile("" : : "r"(&shapes) : "memory");  // the loads do not say what they read
        _tile_loadconfig(&shapes);
    }
    ~TileScope() { _tile_release(); }
    TileScope(const TileScope &) = delete;
    TileScope &operator=(const TileScope &) = delete;
};

inline void sum_group(const uint8_t *weights, const uint8_t *low, const uint8_t *high, int64_t pitch,
                      Group &low_sums, Group &high_sums) {
    __asm__ volatile("" : : "r"(weights), "r"(low), "r"(high) : "memory");
    _tile_loadd(4, weights, 64);
    _tile_loadd(2, low, pitch);
    _tile_loadd(3, high, pitch);
    _tile_zero(0);
    _tile_zero(1);
    _tile_dpbusd(0, 2, 4);
    _tile_dpbssd(1, 3, 4);
    _tile_stored(0, low_sums, 64);
    _tile_stored(1, high_sums, 64);
    __asm__ volatile("" : : : "memory");
}
#endif

// Weights of a block as the tile has them: inputs 4 k .. 4 k + 3 of each output, then the next four.
template <class Kind>
inline void spread(const uint8_t *codes, uint8_t *to) {
    for (int q = 0; q < BLOCK / 4; ++q) {
        __m512i fours;
        if constexpr (Kind::bits == 4) {
            fours = wide_codes(codes + 32 * q);
            if constexpr (std::is_same_v<Kind, Floats4Rows16>) fours = looked_up(fours);
        } else {  // two pairs of inputs of all outputs
            const __m256i *pairs = reinterpret_cast<const __m256i *>(codes) + 2 * q;
            const __m512i first = _mm512_cvtepu16_epi32(_mm256_loadu_si256(pairs));
            const __m512i second = _mm512_cvtepu16_epi32(_mm256_loadu_si256(pairs + 1));
            fours = _mm512_or_si512(first, _mm512_slli_epi32(second, 16));
        }
        _mm512_store_si512(to + 64 * q, fours);
    }
}

// The low and the high bytes of a row, in the order of the inputs.
template <class Kind>
void split(const int16_t *codes, uint8_t *low, uint8_t *high, int64_t blocks) {
    for (int64_t b = 0; b < blocks; ++b) {
        const __m512i all = _mm512_loadu_si512(codes + b * BLOCK);
        __m256i lows, highs;
        if constexpr (Kind::bits == 4) {  // `arrange` has put four low ones before four high
            lows = _mm512_cvtepi64_epi32(all);
            highs = _mm512_cvtepi64_epi32(_mm512_srli_epi64(all, 32));
        } else {
            lows = _mm512_cvtepi16_epi8(all);
            highs = _mm512_cvtepi16_epi8(_mm512_srai_epi16(all, 8));
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(low + b * BLOCK), lows);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(high + b * BLOCK), highs);
    }
}

// Groups of 16 rows that share the spreading of weights, of rows of 16 bits.
template <class Kind>
struct OfGroups {
    static constexpr int rows = TILE;
    static constexpr int64_t most = 4;  // groups
    using Scope = TileScope;
    using Sums = float[most * TILE][TILE];

    // Writes both bytes of a row behind each other.
    static void split_row(const int16_t *codes, uint8_t *to, int64_t blocks) {
        split<Kind>(codes, to, to + blocks * BLOCK, blocks);
    }

    static void multiply(const Weights &w, int64_t tile, const Rows<Kind> &x, int64_t row,
                         int64_t groups, Sums &out) {
        const uint8_t *codes = w.codes + tile * x.blocks * WHOLE * Kind::bits / 8;
        const int64_t per_scale = w.group / BLOCK, scales = (x.blocks + per_scale - 1) / per_scale;
        const bool shifted = w.minimums || w.zero != 0.0f;
        alignas(64) uint8_t weights[WHOLE];
        alignas(64) Group low, high;
        std::fill_n(&out[0][0], groups * TILE * TILE, 0.0f);
        for (int64_t b = 0; b < x.blocks; ++b) {
            const int64_t at = (tile * scales + b / per_scale) * TILE;
            const F16 scale = load_scales(w.scales, at, w.halves);
            F16 minimum = scale * splat(w.zero);
            if (w.minimums) minimum = load_scales(w.minimums, at, w.halves);
            spread<Kind>(codes + b * WHOLE * Kind::bits / 8, weights);
            for (int64_t first = 0; first < groups * TILE; first += TILE) {
                const uint8_t *bytes = x.bytes + (row + first) * 2 * x.pitch + b * BLOCK;
                sum_group(weights, bytes, bytes + x.pitch, 2 * x.pitch, low, high);
                for (int r = 0; r < TILE; ++r) {
                    const int64_t of = (row + first + r) * x.blocks + b;
                    const __m512i highs = _mm512_slli_epi32(_mm512_load_si512(high[r]), 8);
                    const I16 sum{_mm512_add_epi32(highs, _mm512_load_si512(low[r]))};
                    float *to = out[first + r];
                    F16 y = fma(to_floats(sum), scale * splat(x.scales[of]), load(to));
                    if (shifted) y = fma(minimum, splat(x.sums[of]), y);
                    store(to, y);
                }
            }
        }
    }

    // Finishes whole groups from `row` on; returns the first row that is left.
    static int64_t finish(const Product &p, int64_t tile, const Rows<Kind> &x, int64_t row,
                          int64_t end, const Output &out) {
        Sums sums, ups;
        while (end - row >= TILE) {
            const int64_t groups = std::min(most, (end - row) / TILE);
            multiply(p.weights, tile, x, row, groups, sums);
            const int64_t width = p.weights.outputs / 2 / TILE;
            if (p.gate) multiply(p.weights, tile + width, x, row, groups, ups);
            for (int64_t r = 0; r < groups * TILE; ++r)
                ::finish(p, tile, load(sums[r]), load((p.gate ? ups : sums)[r]), row + r, out);
            row += groups * TILE;
        }
        return row;
    }
};

template <>
struct InGroups<Bits4Rows16> : OfGroups<Bits4Rows16> {};
template <>
struct InGroups<Floats4Rows16> : OfGroups<Floats4Rows16> {};
template <>
struct InGroups<Bits8Rows16> : OfGroups<Bits8Rows16> {};

}  // namespace
