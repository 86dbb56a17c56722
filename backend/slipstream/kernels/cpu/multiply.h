// Products of rows with weights in tiles of 16 outputs, for one instruction set.
//
// Rows become whole numbers of 16 bits, or of 8 beside weights of 4 bits, with a scale for each 32 of
// them. Sums of 32 are exact, and come together in the order of the inputs: a row's
// bits depend neither on other rows, nor on threads, nor on the instruction set.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "abi.h"
#include "pool.h"

namespace {

using namespace slipstream;

constexpr int TILE = 16, BLOCK = 32;
constexpr int64_t CACHED = 96 << 10;  // bytes of rows that a pass over the weights reads again
constexpr int64_t FETCHED = 2048;     // bytes from weights of 4 bits to those that are fetched meanwhile

inline int64_t up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

inline float sum_of(F16 x) {
    float parts[16];
    store(parts, x);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) parts[i] += parts[i + width];
    return parts[0];
}

inline float largest_of(F16 x) {
    float parts[16], most = 0.0f;
    store(parts, x);
    for (float part : parts) most = std::max(most, part);
    return most;
}

// e ** x, to 2 units of the last place, of x up to 88; 0 below -87.
inline F16 exponential(F16 x) {
    x = larger(smaller(x, splat(88.0f)), splat(-87.0f));
    const F16 n = rounded(x * splat(1.44269504f));
    F16 r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    F16 y = splat(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f})
        y = fma(y, r, splat(c));
    y = fma(y, r * r, r) + splat(1.0f);
    return scaled(y, n);
}

inline F16 silu(F16 x) { return x / (splat(1.0f) + exponential(splat(0.0f) - x)); }

// Up to 16 numbers; what is behind them is 0.
inline F16 load_some(const float *p, int64_t count) {
    if (count >= TILE) return load(p);
    float parts[TILE] = {};
    std::memcpy(parts, p, sizeof(float) * count);
    return load(parts);
}

inline void store_some(float *p, F16 x, int64_t count) {
    if (count >= TILE) return store(p, x);
    float parts[TILE];
    store(parts, x);
    std::memcpy(p, parts, sizeof(float) * count);
}

inline float norm_factor(const float *x, int64_t count, float eps) {
    F16 sum = splat(0.0f);
    for (int64_t i = 0; i < count; i += TILE) {
        const F16 part = load_some(x + i, count - i);
        sum = fma(part, part, sum);
    }
    return 1.0f / std::sqrt(sum_of(sum) / static_cast<float>(count) + eps);
}

// Writes `count` numbers of a row behind its norm, zeros up to `padded`.
inline void normalise(const Product &p, const float *x, float *y, int64_t padded) {
    const int64_t count = p.weights.inputs;
    const float factor = p.norm ? norm_factor(x, count, p.eps) : 1.0f;
    for (int64_t i = 0; i < padded; i += TILE) {
        F16 part = i < count ? load_some(x + i, count - i) : splat(0.0f);
        if (p.norm && i < count) {
            const F16 weight = load_some(p.norm + i, count - i) + splat(p.norm_offset);
            part = part * splat(factor) * weight;
        }
        store(y + i, part);
    }
}

// The kinds of GEMMs: codes of rows, the largest of them, bits of weights, and inputs of a part, in
// which all weights of an output have one scale.
struct Bits4Rows8 {
    using Code = int8_t;
    static constexpr float most = 127.0f;
    static constexpr int bits = 4, part = BLOCK;
};

struct Bits4Rows16 {
    using Code = int16_t;
    static constexpr float most = 32767.0f;
    static constexpr int bits = 4, part = BLOCK;
};

struct Floats4Rows16 : Bits4Rows16 {};  // e2m1, whose codes are looked up

struct Bits8Rows16 {
    using Code = int16_t;
    static constexpr float most = 32767.0f;
    static constexpr int bits = 8, part = BLOCK;
};

struct Bits8Halves : Bits8Rows16 {
    static constexpr int part = BLOCK / 2;
};

template <class Kind>
constexpr int PARTS = BLOCK / Kind::part;  // of a block

// Rows as whole numbers: codes `[n, padded]`, for each 32 a scale, for each part scale * sum.
template <class Kind>
struct Rows {
    const typename Kind::Code *codes;
    const float *scales, *sums;
    int64_t pitch, blocks;
    const uint8_t *bytes;  // of the codes, `[n, 2, padded]`: all low ones, all high ones; or null
};

// How groups of rows are multiplied by other instructions than single ones, where a form has such
// (tiles.h); as many rows as a group has.
template <class Kind>
struct InGroups {
    static constexpr int rows = 0;
    struct Scope {};
};

template <class Kind>
void quantise(const float *x, typename Kind::Code *codes, float *scales, float *sums,
              int64_t blocks) {
    constexpr float most = Kind::most;
    F16 zeros = splat(0.0f);
    for (int64_t b = 0; b < blocks; ++b) {
        const F16 low = load(x + b * BLOCK), high = load(x + b * BLOCK + TILE);
        zeros = fma(low + high, zeros, zeros);
        const float range = largest_of(larger(absolute(low), absolute(high)));
        const float inverse = range > 0.0f ? most / range : 0.0f;
        const F16 factor = splat(std::isfinite(inverse) ? inverse : 0.0f);
        const int32_t sum = store_codes(codes + b * BLOCK, low * factor, high * factor);
        scales[b] = range / most;
        if constexpr (PARTS<Kind> == 2) {
            int32_t first = 0;
            for (int64_t i = b * BLOCK; i < b * BLOCK + TILE; ++i) first += codes[i];
            sums[2 * b] = scales[b] * static_cast<float>(first);
            sums[2 * b + 1] = scales[b] * static_cast<float>(sum - first);
        } else {
            sums[b] = scales[b] * static_cast<float>(sum);
        }
        if constexpr (Kind::bits == 4 && sizeof(typename Kind::Code) == 2) arrange(codes + b * BLOCK);
    }
    if (sum_of(zeros) != 0.0f) scales[0] = sums[0] = NAN;  // as would be without codes
}

inline F16 load_scales(const void *p, int64_t at, bool halves) {
    return halves ? load_halves(static_cast<const uint16_t *>(p) + at)
                  : load(static_cast<const float *>(p) + at);
}

template <class Kind, int R>
inline void dot(const uint8_t *w, const typename Kind::Code *x, int64_t pitch, I16 (&sum)[R]) {
    if constexpr (std::is_same_v<Kind, Bits4Rows8>)
        dot4<R>(w, x, pitch, sum);
    else if constexpr (Kind::bits == 4)
        dot4<R, std::is_same_v<Kind, Floats4Rows16>>(w, x, pitch, sum);
    else
        dot8<R, Kind::part>(w, x, pitch, sum);
}

// Multiplies R rows with a tile.
template <class Kind, int R, bool HALVES, bool SHIFTED>
inline void multiply(const Weights &w, int64_t tile, const Rows<Kind> &x, int64_t row,
                     F16 (&out)[R]) {
    constexpr int64_t part = Kind::part, bytes = TILE * part * Kind::bits / 8;
    const uint8_t *codes = w.codes + tile * x.blocks * PARTS<Kind> * bytes;
    const int64_t per_group = w.group / part, parts = (w.inputs + part - 1) / part;
    const int64_t groups = (parts + per_group - 1) / per_group;
    const typename Kind::Code *rows = x.codes + row * x.pitch;
    for (int r = 0; r < R; ++r) out[r] = splat(0.0f);
    int64_t left = 0, at = (tile * groups - 1) * TILE;
    F16 scale = splat(0.0f), minimum = splat(0.0f);
    for (int64_t b = 0; b < parts; ++b) {
        if (left-- == 0) {
            left = per_group - 1, at += TILE;
            scale = load_scales(w.scales, at, HALVES);
            if constexpr (SHIFTED)
                minimum = w.minimums ? load_scales(w.minimums, at, HALVES) : scale * splat(w.zero);
        }
        if constexpr (Kind::bits == 4 && R < ROWS_OF_CODES)  // with more, the processor foresees enough
            for (int64_t i = 0; i < bytes; i += 64)
                _mm_prefetch(reinterpret_cast<const char *>(codes + b * bytes + FETCHED + i), _MM_HINT_T0);
        I16 sums[R];
        dot<Kind, R>(codes + b * bytes, rows + b * part, x.pitch, sums);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const float of_row = x.scales[(row + r) * x.blocks + b / PARTS<Kind>];
            out[r] = fma(to_floats(sums[r]), scale * splat(of_row), out[r]);
            if constexpr (SHIFTED)
                out[r] = fma(minimum, splat(x.sums[(row + r) * x.blocks * PARTS<Kind> + b]), out[r]);
        }
    }
}

template <int R, class Kind>
inline void multiply_rows(const Weights &w, int64_t tile, const Rows<Kind> &x, int64_t row,
                          F16 (&out)[R]) {
    const bool shifted = w.minimums || w.zero != 0.0f;
    if (w.halves && shifted) return multiply<Kind, R, true, true>(w, tile, x, row, out);
    if (w.halves) return multiply<Kind, R, true, false>(w, tile, x, row, out);
    if (shifted) return multiply<Kind, R, false, true>(w, tile, x, row, out);
    multiply<Kind, R, false, false>(w, tile, x, row, out);
}

// Rows that are multiplied, `stride` apart, with one product or with those of their experts.
struct Input {
    const Product &product;  // of experts the first one's
    const float *x;
    int64_t stride, n;
    const Experts *experts = nullptr;

    bool gathers() const { return experts && !experts->weights; }
    const float *row(int64_t i) const {
        return x + (gathers() ? experts->order[i] / experts->top_k : i) * stride;
    }
};

// Rows of an input that have the same weights.
struct Span {
    Product product;
    int64_t first, end;
};

inline Product product_of_expert(const Experts &e, int64_t expert) {
    const auto behind = [&](const void *from, int64_t bytes) {
        return from ? static_cast<const uint8_t *>(from) + expert * bytes : nullptr;
    };
    Product p = e.first;
    p.weights.codes += expert * e.codes;
    p.weights.scales = behind(p.weights.scales, e.scales);
    p.weights.minimums = behind(p.weights.minimums, e.minimums);
    if (p.bias) p.bias += expert * p.weights.outputs;
    return p;
}

// Divides rows by their weights, at most so many together.
inline const std::vector<Span> &spans_of(const Input &in, int64_t most) {
    static std::vector<Span> spans;
    spans.clear();
    const auto divide = [&](const Product &p, int64_t first, int64_t end) {
        for (; first < end; first += most) spans.push_back({p, first, std::min(end, first + most)});
    };
    if (!in.experts) divide(in.product, 0, in.n);
    for (int64_t e = 0; in.experts && e < in.experts->count; ++e) {
        const int32_t *at = in.experts->offsets + e;
        if (at[0] < at[1]) divide(product_of_expert(*in.experts, e), at[0], at[1]);
    }
    return spans;
}

struct Output {
    float *y;
    int64_t stride;
    bool adds;
    const int32_t *rows = nullptr;   // where each goes; null: as they come
    const float *factors = nullptr;  // of those of y; null: none
    const float *added = nullptr;    // [rows, outputs of weights]: to sums of rows; null: none
    const int32_t *marks = nullptr;  // of rows that have such

    const float *added_to(const Product &p, int64_t row) const {
        return added && marks[row] ? added + row * p.weights.outputs : nullptr;
    }
};

inline F16 gated(int32_t gate, F16 x, F16 up) {
    if (gate == SILU) return silu(x) * up;
    const F16 limit = splat(7.0f), least = splat(-7.0f);
    x = smaller(limit, x);  // which leaves NaN, as the second of two
    up = larger(least, smaller(limit, up));
    return x / (splat(1.0f) + exponential(x * splat(-1.702f))) * (up + splat(1.0f));
}

inline int64_t width_of(const Product &p) {
    return p.gate ? p.weights.outputs / 2 : p.weights.outputs;
}

// Stores a row's sums with a tile behind what follows the product: bias, gate, sum.
inline void finish(const Product &p, int64_t tile, F16 sum, F16 up, int64_t row, const Output &out) {
    const int64_t width = width_of(p);
    const int64_t first = tile * TILE, count = std::min<int64_t>(TILE, width - first);
    if (p.bias) sum = sum + load_some(p.bias + first, count);
    if (p.gate && p.bias) up = up + load_some(p.bias + width + first, count);
    if (const float *added = out.added_to(p, row)) {
        sum = sum + load_some(added + first, count);
        if (p.gate) up = up + load_some(added + width + first, count);
    }
    if (p.gate) sum = gated(p.gate, sum, up);
    const int64_t to = out.rows ? out.rows[row] : row;
    if (out.factors) sum = sum * splat(out.factors[to]);
    float *y = out.y + to * out.stride + first;
    store_some(y, out.adds ? load_some(y, count) + sum : sum, count);
}

template <int R, class Kind>
inline void finish_tile(const Product &p, int64_t tile, const Rows<Kind> &x, int64_t row,
                        const Output &out) {
    F16 sum[R], up[R];
    multiply_rows<R>(p.weights, tile, x, row, sum);
    if (p.gate) multiply_rows<R>(p.weights, tile + p.weights.outputs / 2 / TILE, x, row, up);
    for (int r = 0; r < R; ++r) finish(p, tile, sum[r], p.gate ? up[r] : sum[r], row + r, out);
}

template <int R, class Kind>
inline void finish_rows(const Product &p, int64_t tile, const Rows<Kind> &x, int64_t row,
                        int64_t end, const Output &out) {
    for (; row + R <= end; row += R) finish_tile<R>(p, tile, x, row, out);
    if constexpr (R > 1) finish_rows<R / 2>(p, tile, x, row, end, out);
}

// All tiles of some rows at a time: so many that the cache holds them.
template <int R, class Kind>
void multiply_all(const Input &in, const Rows<Kind> &x, const Output &out, int threads) {
    const int64_t tiles = (width_of(in.product) + TILE - 1) / TILE;
    using Groups = InGroups<Kind>;
    constexpr int64_t least = std::max(R, Groups::rows);
    const int64_t cached = CACHED / (x.pitch * sizeof(typename Kind::Code));
    const int64_t fit = std::max(least, cached / least * least);
    const std::vector<Span> &spans = spans_of(in, fit);
    const int64_t all = static_cast<int64_t>(spans.size()) * tiles;
    const int64_t grain = std::max<int64_t>(1, all / (8 * threads));
    parallel(threads, all, grain, [&](int64_t first, int64_t last, int) {
        [[maybe_unused]] const typename Groups::Scope scope{};
        for (int64_t i = first; i < last; ++i) {
            const Span &span = spans[i / tiles];
            const Product &p = span.product;
            int64_t row = span.first;
            if constexpr (Groups::rows > 0)
                row = Groups::finish(p, i % tiles, x, row, span.end, out);
            finish_rows<R>(p, i % tiles, x, row, span.end, out);
        }
    });
}

// Memory that grows and stays.
template <class T>
T *room(std::vector<T> &memory, int64_t size) {
    if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
    return memory.data();
}

template <class Kind>
void product_of(const Input &in, const Output &out, int threads) {
    const Product &p = in.product;
    const int64_t n = in.n;
    using Code = typename Kind::Code;
    static std::vector<Code> codes;
    static std::vector<float> factors;
    static std::vector<uint8_t> halves;
    const int64_t padded = up(p.weights.inputs, BLOCK), blocks = padded / BLOCK;
    Code *to = room(codes, n * padded);
    constexpr int64_t parts = PARTS<Kind>;
    float *scales = room(factors, (1 + parts) * n * blocks), *sums = scales + n * blocks;
    const bool in_groups = InGroups<Kind>::rows > 0 && n >= InGroups<Kind>::rows;
    uint8_t *bytes = in_groups ? room(halves, 2 * n * padded) : nullptr;
    const int64_t grain = std::max<int64_t>(1, 4096 / padded);
    parallel(threads, n, grain, [&](int64_t first, int64_t last, int) {
        static thread_local std::vector<float> row;
        for (int64_t i = first; i < last; ++i) {
            float *y = room(row, padded);
            normalise(p, in.row(i), y, padded);
            float *sums_of_row = sums + i * parts * blocks;
            quantise<Kind>(y, to + i * padded, scales + i * blocks, sums_of_row, blocks);
            if constexpr (InGroups<Kind>::rows > 0)
                if (bytes) InGroups<Kind>::split_row(to + i * padded, bytes + 2 * i * padded, blocks);
        }
    });
    const Rows<Kind> rows{to, scales, sums, padded, blocks, bytes};
    multiply_all<ROWS_OF_CODES>(in, rows, out, threads);
}

}  // namespace
