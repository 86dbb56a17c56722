// The table of kernels of one instruction set: the last line of its source.
#pragma once

#include "attention.h"
#include "experts.h"
#include "product.h"
#include "sample.h"
#include "terms.h"

#define JOIN(a, b) a##b
#define TABLE(form) JOIN(kernels_, form)

namespace slipstream {
extern const Kernels TABLE(FORM);
const Kernels TABLE(FORM) = {product, rotate, attend, sample, shrink, expand, experts, combine};
}  // namespace slipstream
