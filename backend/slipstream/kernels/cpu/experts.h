// Products of a mixture of experts: all tiles of all experts that have rows are one loop, so that
// threads share them out however few rows there are. A row's bits do not depend on the others.
#pragma once

#include "product.h"

namespace {

void experts(const Experts &e, const float *x, int64_t x_stride, float *y, int64_t y_stride,
             int threads) {
    const Input in{e.first, x, x_stride, e.offsets[e.count], &e};
    const int32_t *rows = e.weights ? e.order : nullptr;
    run_product(in, {y, y_stride, false, rows, e.weights, e.added, e.marks}, threads);
}

void combine(const Sum &s, int threads) {
    const int64_t grain = std::max<int64_t>(1, 4096 / s.width);
    parallel(threads, s.n, grain, [&](int64_t first, int64_t last, int) {
        for (int64_t row = first; row < last; ++row) {
            const float *terms = s.terms + row * s.top_k * s.width;
            const float *shared = s.shared ? s.shared + row * s.width : nullptr;
            const float gate = s.gates ? s.gates[row * s.gate_stride] : 0.0f;
            const F16 factor = splat(s.gates ? 1.0f / (1.0f + std::exp(-gate)) : 1.0f);
            for (int64_t i = 0; i < s.width; i += TILE) {
                const int64_t some = std::min<int64_t>(TILE, s.width - i);
                float *y = s.y + row * s.y_stride + i;
                F16 sum = load_some(y, some);
                for (int rank = 0; rank < s.top_k; ++rank)
                    sum = sum + load_some(terms + rank * s.width + i, some);
                if (shared) sum = sum + load_some(shared + i, some) * factor;
                store_some(y, sum, some);
            }
        }
    });
}

}  // namespace
