// The product of a kind of weights.
#pragma once

#include "by_row.h"
#include "numbers.h"

namespace {

void product(const Product &p, const float *x, int64_t x_stride, int64_t n, float *y,
             int64_t y_stride, bool adds, int threads) {
    const Output out{y, y_stride, adds};
    const Weights &w = p.weights;
    if (w.bits == 4 && w.row_bits == 8)
        product_of<Bits4Rows8>(p, x, x_stride, n, out, threads);
    else if (w.bits == 4)
        product_of<Bits4Rows16>(p, x, x_stride, n, out, threads);
    else if (w.bits == 8 && w.group % BLOCK)
        product_of<Bits8Halves>(p, x, x_stride, n, out, threads);
    else if (w.bits == 8)
        product_of<Bits8Rows16>(p, x, x_stride, n, out, threads);
    else if (w.by_row)
        product_by_row(p, x, x_stride, n, out, threads);
    else if (w.bits == 32)
        product_of_numbers<float>(p, x, x_stride, n, out, threads);
    else if (w.halves)
        product_of_numbers<Half>(p, x, x_stride, n, out, threads);
    else
        product_of_numbers<BFloat>(p, x, x_stride, n, out, threads);
}

}  // namespace
