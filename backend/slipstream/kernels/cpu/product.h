// The product of a kind of weights.
#pragma once

#include "by_row.h"
#include "numbers.h"

namespace {

void run_product(const Input &in, const Output &out, int threads) {
    const Weights &w = in.product.weights;
    if (w.bits == 4 && w.floats)
        product_of<Floats4Rows16>(in, out, threads);
    else if (w.bits == 4 && w.row_bits == 8)
        product_of<Bits4Rows8>(in, out, threads);
    else if (w.bits == 4)
        product_of<Bits4Rows16>(in, out, threads);
    else if (w.bits == 8 && w.group % BLOCK)
        product_of<Bits8Halves>(in, out, threads);
    else if (w.bits == 8)
        product_of<Bits8Rows16>(in, out, threads);
    else if (w.by_row)
        product_by_row(in, out, threads);
    else if (w.bits == 32)
        product_of_numbers<float>(in, out, threads);
    else if (w.halves)
        product_of_numbers<Half>(in, out, threads);
    else
        product_of_numbers<BFloat>(in, out, threads);
}

void product(const Product &p, const float *x, int64_t x_stride, int64_t n, float *y,
             int64_t y_stride, bool adds, int threads) {
    run_product({p, x, x_stride, n}, {y, y_stride, adds}, threads);
}

}  // namespace
