// Products of rows of fp32 with weights of fp32 that lie output by output, as a checkpoint has them.
//
// A sum has 16 parts, of every sixteenth input each, which come together in one order: its bits
// depend neither on other rows, nor on threads, nor on the instruction set.
#pragma once

#include "numbers.h"

namespace {

constexpr int ROWS_TOGETHER = 4;  // of x, that share the loads of weights

// Parts of the sums of a row of x with 16 rows of weights.
using Sums = float[TILE][TILE];

// Sums of R rows of x, `pitch` apart, with T rows of weights, to those from `to` on. Weights `later`
// are fetched meanwhile: several streams at once are more than the processor foresees.
template <int R, int T, bool FETCHES = (R > 1)>
inline void add_rows(const float *w, const float *later, const float *x, int64_t pitch,
                     int64_t inputs, Sums *sums, int64_t to) {
    F16 sum[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) sum[r][t] = splat(0.0f);
    const auto add = [&](int64_t k, const auto &part) {
        F16 each[T];
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
            each[t] = part(w + t * inputs + k);
            const char *next = reinterpret_cast<const char *>(later + t * inputs + k);
            if constexpr (FETCHES) _mm_prefetch(next, _MM_HINT_T0);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const F16 one = part(x + r * pitch + k);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) sum[r][t] = fma(each[t], one, sum[r][t]);
        }
    };
    const int64_t whole = inputs / TILE * TILE;
    for (int64_t k = 0; k < whole; k += TILE) add(k, [](const float *p) { return load(p); });
    if (whole < inputs)
        add(whole, [&](const float *p) { return load_some(p, inputs - whole); });
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) store(sums[r][to + t], sum[r][t]);
}

// The same of up to 16 rows of weights.
template <int R>
void add_tile(const float *w, int64_t outputs, const float *x, int64_t pitch, int64_t inputs,
              Sums *sums) {
    constexpr int T = SUMS / R >= 8 ? 8 : SUMS / R >= 4 ? 4 : SUMS / R >= 2 ? 2 : 1;
    int64_t t = 0;
    const auto at = [&](int64_t row) { return w + row * inputs; };
    for (; t + T <= outputs; t += T) add_rows<R, T>(at(t), at(t + T), x, pitch, inputs, sums, t);
    for (; t < outputs; ++t) add_rows<R, 1>(at(t), at(t + 1), x, pitch, inputs, sums, t);
}

// All of some rows, as many at a time as share the loads.
template <int R>
void finish_by_row(const Product &p, int64_t tile, const Part &rows, int64_t row, int64_t end,
                   const Output &out) {
    const Weights &w = p.weights;
    const int64_t outputs = std::min<int64_t>(TILE, w.outputs - tile * TILE);
    const float *weights = reinterpret_cast<const float *>(w.codes) + tile * TILE * w.inputs;
    for (; row + R <= end; row += R) {
        Sums sums[R];
        if (outputs < TILE) std::memset(sums, 0, sizeof sums);
        add_tile<R>(weights, outputs, rows.x + row * rows.pitch, rows.pitch, w.inputs, sums);
        for (int r = 0; r < R; ++r) {
            const F16 sum = sums_of(sums[r]);
            finish(p, tile, sum, sum, row + r, out);
        }
    }
    if constexpr (R > 1) finish_by_row<R / 2>(p, tile, rows, row, end, out);
}

void product_by_row(const Input &in, const Output &out, int threads) {
    const Product &p = in.product;
    const int64_t n = in.n;
    const Part rows = rows_of(in, threads);
    const int64_t tiles = (p.weights.outputs + TILE - 1) / TILE;
    for (int64_t row = 0; row < n; row += AT_ONCE) {
        const int64_t end = std::min(n, row + AT_ONCE);
        parallel(threads, tiles, std::max<int64_t>(1, tiles / (8 * threads)),
                 [&](int64_t first, int64_t last, int) {
                     for (int64_t tile = first; tile < last; ++tile)
                         finish_by_row<ROWS_TOGETHER>(p, tile, rows, row, end, out);
                 });
    }
}

}  // namespace
