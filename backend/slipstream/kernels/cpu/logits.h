// Passes over the logits of a row, in one order of additions whatever the instruction set.
#pragma once

#include <limits>

#include "multiply.h"

namespace {

constexpr int64_t STRETCH = 1024;     // of logits, whose sum is fp32
constexpr int BINS = 1024;            // of a histogram of likelihoods
constexpr float BINS_PER_UNIT = 32.0f;

struct Highest {
    float value;
    int64_t place;   // the first of it
    bool is_finite;  // of the value, and that none is NaN
};

inline Highest highest_of(const float *x, int64_t count) {
    constexpr float least = -std::numeric_limits<float>::infinity();
    float value = least;
    int64_t stretch = 0;
    uint32_t is_broken = 0;
    for (int64_t begin = 0; begin < count; begin += STRETCH) {
        const int64_t end = std::min(count, begin + STRETCH);
        F16 most = splat(least);
        int64_t i = begin;
        for (; i + TILE <= end; i += TILE) most = larger(load(x + i), most);
        float parts[TILE];
        store(parts, most);
        for (; i < end; ++i) parts[0] = std::max(parts[0], x[i]);
        const float own = *std::max_element(parts, parts + TILE);
        if (own > value) value = own, stretch = begin;
        for (int64_t k = begin; k < end; ++k) {  // NaN, or infinite and positive
            uint32_t bits;
            std::memcpy(&bits, x + k, 4);
            is_broken |= (bits & 0x7fffffffu) > 0x7f800000u;
            is_broken |= bits == 0x7f800000u;
        }
    }
    const bool is_finite = !is_broken && value > least;
    int64_t place = stretch;
    while (is_finite && x[place] != value) ++place;
    return {value, place, is_finite};
}

inline void divide(const float *x, float by, float *y, int64_t count) {
    const F16 all = splat(by);
    for (int64_t i = 0; i < count; i += TILE)
        store_some(y + i, load_some(x + i, count - i) / all, count - i);
}

// The logarithm of the sum of e ** (x - highest).
inline float log_sum(const float *x, int64_t count, float highest) {
    double total = 0.0;
    for (int64_t begin = 0; begin < count; begin += STRETCH) {
        const int64_t end = std::min(count, begin + STRETCH);
        F16 sum = splat(0.0f);
        int64_t i = begin;
        for (; i + TILE <= end; i += TILE)
            sum = sum + exponential(load(x + i) - splat(highest));
        total += static_cast<double>(sum_of(sum));
        for (; i < end; ++i) total += std::exp(static_cast<double>(x[i]) - static_cast<double>(highest));
    }
    return static_cast<float>(std::log(total));
}

// A logit below which nothing belongs to the likeliest tokens of a share of the mass; sets the mass
// of all, with 1 for the likeliest.
inline float least_of_mass(const float *x, int64_t count, float highest, float share,
                           double &total) {
    double bins[BINS] = {};
    for (int64_t i = 0; i < count; i += TILE) {
        float masses[TILE];
        store(masses, exponential(load_some(x + i, count - i) - splat(highest)));
        for (int64_t k = i; k < std::min(count, i + TILE); ++k) {
            const float bin = std::min((highest - x[k]) * BINS_PER_UNIT, BINS - 1.0f);
            bins[static_cast<int>(bin)] += static_cast<double>(masses[k - i]);
        }
    }
    total = 0.0;
    for (double bin : bins) total += bin;
    const double wanted = static_cast<double>(share) * total * (1.0 + 1e-6);
    double before = 0.0;
    for (int i = 0; i + 2 < BINS; ++i) {
        before += bins[i];
        if (before >= wanted) return highest - static_cast<float>(i + 2) / BINS_PER_UNIT;
    }
    return -std::numeric_limits<float>::infinity();
}

}  // namespace
