// Rows of the paged cache, as kv_format.py defines them, to and from fp32.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "abi.h"

namespace {

using namespace slipstream;

constexpr int GROUP = 64;                           // of INT4, at most
constexpr int FIRST = 840, SHIFT = 20, NAN_CODE = 255;  // of the codes of scales

inline float meaning(uint8_t code) {
    if (code == NAN_CODE) return NAN;
    const int32_t bits = (code + FIRST) << SHIFT;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// The least code that means at least so much.
inline uint8_t code_of(float scale) {
    if (!std::isfinite(scale)) return NAN_CODE;
    scale = std::min(std::max(scale, 0x1p-22f), 832.0f);
    int32_t bits;
    std::memcpy(&bits, &scale, 4);
    return static_cast<uint8_t>(((bits + (1 << SHIFT) - 1) >> SHIFT) - FIRST);
}

inline float e4m3_value(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    if (exponent == 15 && mantissa == 7) return NAN;
    const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10)
                                : std::ldexp(static_cast<float>(mantissa), -9);
    return code & 128 ? -size : size;
}

// The nearest e4m3, of two the even one, of numbers up to 448.
inline uint8_t e4m3_of(float x) {
    const uint8_t sign = std::signbit(x) ? 128 : 0;
    const float size = std::fabs(x);
    if (size == 0.0f) return sign;
    int exponent;
    std::frexp(size, &exponent);  // size = f * 2 ** exponent, f in 1/2 .. 1
    const int step = std::max(exponent - 4, -9);
    const int count = static_cast<int>(std::nearbyint(std::ldexp(size, -step)));  // 0 .. 16
    const int biased = step + 9;  // 0 of the smallest: there a count is the code
    return sign | static_cast<uint8_t>(count + (biased << 3));
}

inline int int4_groups(int head_size) { return (head_size + GROUP - 1) / GROUP; }

inline int64_t number_bytes(const Cache &c) {
    return c.format == F32 ? 4 * c.head_size : c.format == INT4 ? c.head_size / 2 : c.head_size;
}

inline int64_t scale_bytes(const Cache &c) {
    return c.format == F32 ? 0 : c.format == INT4 ? 2 * int4_groups(c.head_size) : 1;
}

// Where the numbers of a token are, and its scales.
struct Place {
    uint8_t *numbers, *scales;
};

inline Place place_of(const Cache &c, int64_t block, int head, int part, int token) {
    const int64_t numbers = number_bytes(c), scales = scale_bytes(c);
    const int64_t rows = 2 * c.kv_heads * c.block_size;  // of a block
    const int64_t row = (head * 2 + part) * static_cast<int64_t>(c.block_size) + token;
    uint8_t *base = static_cast<uint8_t *>(c.data) + block * rows * (numbers + scales);
    return {base + row * numbers, base + rows * numbers + row * scales};
}

inline void write_int4(const float *x, int size, Place to) {
    const int groups = int4_groups(size), width = size / groups;
    for (int g = 0; g < groups; ++g, x += width) {
        float low = x[0], high = x[0];
        bool is_nan = false;
        for (int i = 0; i < width; ++i) {
            low = std::min(low, x[i]), high = std::max(high, x[i]);
            is_nan = is_nan || std::isnan(x[i]);
        }
        const float wanted = std::max((high - low) / 15.0f, std::max(-low, high) / 127.0f);
        const uint8_t code = is_nan ? NAN_CODE : code_of(wanted);
        const float scale = meaning(code);
        const auto over = [&](float v) {
            const float y = v / scale;
            return std::isnan(y) ? 0.0f : std::nearbyint(std::min(std::max(y, -3e38f), 3e38f));
        };
        const float zero = std::min(std::max(over(-low), -127.0f), 127.0f);
        to.scales[2 * g] = code;
        to.scales[2 * g + 1] = static_cast<uint8_t>(static_cast<int8_t>(zero));
        for (int i = 0; i < width; ++i) {
            const int n = static_cast<int>(std::min(std::max(over(x[i]) + zero, 0.0f), 15.0f));
            uint8_t &byte = to.numbers[(g * width + i) / 2];
            byte = (g * width + i) % 2 ? (byte & 15) | n << 4 : n;
        }
    }
}

inline void write_row(const Cache &c, const float *x, Place to) {
    const int size = c.head_size;
    if (c.format == F32) {
        std::memcpy(to.numbers, x, 4 * size);
        return;
    }
    if (c.format == INT4) return write_int4(x, size, to);
    const float limit = c.format == FP8 ? 448.0f : 127.0f;
    float most = 0.0f;
    bool is_nan = false;
    for (int i = 0; i < size; ++i) {
        most = std::max(most, std::fabs(x[i]));
        is_nan = is_nan || std::isnan(x[i]);
    }
    const uint8_t code = is_nan ? NAN_CODE : code_of(most / limit);
    const float scale = meaning(code);
    *to.scales = code;
    for (int i = 0; i < size; ++i) {
        float y = x[i] / scale;
        y = std::isnan(y) ? 0.0f : std::min(std::max(y, -limit), limit);
        to.numbers[i] = c.format == FP8 ? e4m3_of(y)
                                        : static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(y)));
    }
}

inline const std::array<float, 256> &e4m3_values() {
    static const std::array<float, 256> values = [] {
        std::array<float, 256> made;
        for (int i = 0; i < 256; ++i) made[i] = e4m3_value(static_cast<uint8_t>(i));
        return made;
    }();
    return values;
}

// The numbers of a row: where they lie, or in `room`.
inline const float *read_row(const Cache &c, Place at, float *room) {
    const int size = c.head_size;
    if (c.format == F32) return reinterpret_cast<const float *>(at.numbers);
    if (c.format == INT4) {
        const int width = size / int4_groups(size);
        for (int i = 0; i < size; ++i) {
            const int n = at.numbers[i / 2] >> (i % 2 * 4) & 15, g = i / width;
            const float zero = static_cast<int8_t>(at.scales[2 * g + 1]);
            room[i] = (static_cast<float>(n) - zero) * meaning(at.scales[2 * g]);
        }
        return room;
    }
    const float scale = meaning(*at.scales);
    if (c.format == INT8) {
        for (int i = 0; i < size; ++i) room[i] = static_cast<int8_t>(at.numbers[i]) * scale;
    } else {
        const std::array<float, 256> &values = e4m3_values();
        for (int i = 0; i < size; ++i) room[i] = values[at.numbers[i]] * scale;
    }
    return room;
}

}  // namespace
