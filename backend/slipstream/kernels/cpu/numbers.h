// Products of rows of fp32 with weights of 16 or 32 bits, which are fp32 as soon as they are loaded.
//
// A sum has its terms in the order of the inputs, whatever rows and tiles share the loads: its bits
// depend neither on other rows, nor on threads, nor on the instruction set.
#pragma once

#include "multiply.h"

namespace {

constexpr int TOGETHER = 8;     // tiles of which a thread keeps the sums
constexpr int DEPTH = 256;      // inputs of which two tiles fit the first cache
constexpr int64_t AT_ONCE = 128;  // rows, likewise for the second

struct BFloat {
    uint16_t bits;
};

struct Half {
    uint16_t bits;
};

inline F16 load_numbers(const float *p) { return load(p); }
inline F16 load_numbers(const BFloat *p) { return load_bfloats(&p->bits); }
inline F16 load_numbers(const Half *p) { return load_halves(&p->bits); }

// Rows of fp32, `pitch` apart, and their sums with up to TOGETHER tiles.
struct Part {
    const float *x;
    int64_t pitch;
    float *sums;  // [row, TOGETHER, 16]
};

// Adds products of R rows with T tiles, `apart` from each other, of `count` inputs.
template <int R, int T, class W>
inline void add_numbers(const W *w, int64_t apart, int64_t count, const Part &of) {
    F16 sum[R][T];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) sum[r][t] = load(of.sums + (r * TOGETHER + t) * TILE);
    for (int64_t k = 0; k < count; ++k) {
        F16 each[T];
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) each[t] = load_numbers(w + t * apart + k * TILE);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F16 one = splat(of.x[r * of.pitch + k]);
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) sum[r][t] = fma(each[t], one, sum[r][t]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) store(of.sums + (r * TOGETHER + t) * TILE, sum[r][t]);
}

// The same of all rows and tiles: as many at a time as fit the registers.
template <int R, class W>
void add_all(const W *w, int64_t apart, int64_t count, const Part &of, int64_t n, int tiles) {
    constexpr int T = SUMS / R >= 4 ? 4 : SUMS / R >= 2 ? 2 : 1;
    const int64_t whole = n / R * R;
    const auto at = [&](int64_t row, int t) {
        return Part{of.x + row * of.pitch, of.pitch, of.sums + (row * TOGETHER + t) * TILE};
    };
    int t = 0;
    for (; t + T <= tiles; t += T)
        for (int64_t row = 0; row < whole; row += R)
            add_numbers<R, T>(w + t * apart, apart, count, at(row, t));
    for (; t < tiles; ++t)
        for (int64_t row = 0; row < whole; row += R)
            add_numbers<R, 1>(w + t * apart, apart, count, at(row, t));
    if constexpr (R > 1) add_all<R / 2>(w, apart, count, at(whole, 0), n - whole, tiles);
}

// Sums of rows with `tiles` from one on.
template <class W>
void sum_tiles(const Weights &w, int64_t tile, int tiles, const Part &of, int64_t n) {
    const int64_t apart = static_cast<int64_t>(w.inputs) * TILE;
    const W *weights = reinterpret_cast<const W *>(w.codes) + tile * apart;
    const int64_t depth = n > ROWS_OF_NUMBERS ? DEPTH : w.inputs;
    std::fill_n(of.sums, n * TOGETHER * TILE, 0.0f);
    for (int64_t k = 0; k < w.inputs; k += depth) {
        const int64_t count = std::min(depth, w.inputs - k);
        const Part part{of.x + k, of.pitch, of.sums};
        add_all<ROWS_OF_NUMBERS>(weights + k * TILE, apart, count, part, n, tiles);
    }
}

// Rows as the product takes them: behind the norm, if there is one, and in the order of experts.
inline Part rows_of(const Input &in, int threads) {
    static std::vector<float> normed;
    const Product &p = in.product;
    if (!p.norm && !in.gathers()) return {in.x, in.stride, nullptr};
    const int64_t padded = up(p.weights.inputs, TILE), grain = std::max<int64_t>(1, 4096 / padded);
    float *to = room(normed, in.n * padded);
    parallel(threads, in.n, grain, [&](int64_t first, int64_t last, int) {
        for (int64_t i = first; i < last; ++i) normalise(p, in.row(i), to + i * padded, padded);
    });
    return {to, padded, nullptr};
}

template <class W>
void product_of_numbers(const Input &in, const Output &out, int threads) {
    const Part rows = rows_of(in, threads);
    const int64_t width = width_of(in.product), tiles = (width + TILE - 1) / TILE;
    const std::vector<Span> &spans = spans_of(in, AT_ONCE);
    const int64_t count = static_cast<int64_t>(spans.size());
    const int64_t some = std::clamp<int64_t>(count * tiles / (8 * threads), 1, TOGETHER);
    const int64_t parts = (tiles + some - 1) / some;  // of a span
    parallel(threads, count * parts, 1, [&](int64_t part, int64_t, int) {
        static thread_local std::vector<float> memory;
        const Span &span = spans[part / parts];
        const Product &p = span.product;
        const int64_t first = part % parts * some, n = span.end - span.first;
        const int together = static_cast<int>(std::min(some, tiles - first));
        const int64_t size = n * TOGETHER * TILE;
        float *sums = room(memory, 2 * size), *ups = p.gate ? sums + size : sums;
        const float *from = rows.x + span.first * rows.pitch;
        sum_tiles<W>(p.weights, first, together, {from, rows.pitch, sums}, n);
        if (p.gate)
            sum_tiles<W>(p.weights, width / TILE + first, together, {from, rows.pitch, ups}, n);
        for (int64_t i = 0; i < n * together; ++i) {
            const int64_t at = (i / together * TOGETHER + i % together) * TILE;
            const int64_t row = span.first + i / together;
            finish(p, first + i % together, load(sums + at), load(ups + at), row, out);
        }
    });
}

}  // namespace
