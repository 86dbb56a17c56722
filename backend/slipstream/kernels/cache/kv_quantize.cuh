// Numbers of a head to those of the cache in fewer bits, as kv_format.py has them, bit for bit.
// -D FORMAT (not 0; kv_format.cuh)
#pragma once
#include "cache/kv_format.cuh"

// What a scale must cover.
struct Range {
  float low = INFINITE, high = -INFINITE;  // NaN left out
  u32 largest = 0;                         // magnitude, as bits: infinity, then NaN, are above all others

  DEVICE void add(float value) {
    low = fminf(low, value);
    high = fmaxf(high, value);
    largest = max(largest, __float_as_uint(value) & 0x7fffffffu);
  }
  DEVICE void add(const Range& other) {
    low = fminf(low, other.low);
    high = fmaxf(high, other.high);
    largest = max(largest, other.largest);
  }
  // With those of each LANES lanes of a warp.
  template <int LANES>
  DEVICE void join() {
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) {
      Range other;
      other.low = __shfl_xor_sync(ALL_LANES, low, mask);
      other.high = __shfl_xor_sync(ALL_LANES, high, mask);
      other.largest = __shfl_xor_sync(ALL_LANES, largest, mask);
      add(other);
    }
  }
};

// The least code that means at least so much.
DEVICE u8 code_of(float scale) {
  const u32 bits = __float_as_uint(fminf(fmaxf(scale, 0x1p-22f), 832.0f));
  return u8(((bits + 0xfffffu) >> 20) - 840);
}
// Of at most 448, to the nearest e4m3, ties to even.
DEVICE u32 to_e4m3(float value) {
  const u32 bits = __float_as_uint(value), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  const float size = __uint_as_float(magnitude);
  if (size < 0x1p-6f) return sign | u32(rintf(size * 512.0f));
  return sign | (((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120u << 3));
}

// Numbers that share a scale.
class Quantizer {
  float scale, inverse;
  float zero = 0.0f;  // of int4

  // value / scale, rounded once: what the first product leaves is exact (Markstein, 1990), unless it is so small that
  // the number is zero anyway.
  DEVICE float divide(float value) const {
    const float quotient = value * inverse;
    const float rest = fmaf(-quotient, scale, value);
    return rest == 0.0f || fabsf(quotient) == INFINITE ? quotient : fmaf(rest, inverse, quotient);
  }

 public:
  u8 code;

  // With a `layers` scale, of e4m3, numbers are over that and their own is 1; 0: there is none.
  DEVICE Quantizer(const Range& range, float layers) {
    const bool is_static = FORMAT == E4M3 && layers > 0.0f;
    float wanted = __uint_as_float(range.largest) / (FORMAT == E4M3 ? 448.0f : 127.0f);
    if (FORMAT == INT4) wanted = fmaxf((range.high - range.low) / 15.0f, fmaxf(-range.low, range.high) / 127.0f);
    if (is_static) wanted = 1.0f;
    const bool is_finite = range.largest < 0x7f800000u && wanted < INFINITE;
    code = is_finite ? code_of(wanted) : 255;
    scale = is_static && is_finite ? layers : scale_of(code);
    inverse = 1.0f / scale;
    if (FORMAT == INT4 && is_finite) zero = fminf(fmaxf(rintf(divide(-range.low)), -127.0f), 127.0f);
  }
  DEVICE u8 zero_byte() const { return u8(int(zero)); }

  // A byte's worth of bits, of int4 the lower half.
  DEVICE u32 operator()(float value) const {
    float scaled = divide(value);
    if (scaled != scaled) scaled = 0.0f;
    if (FORMAT == E4M3) return to_e4m3(fminf(fmaxf(scaled, -448.0f), 448.0f));
    if (FORMAT == INT8) return u32(int(fminf(fmaxf(rintf(scaled), -127.0f), 127.0f))) & 0xffu;
    return u32(int(fminf(fmaxf(rintf(scaled) + zero, 0.0f), 15.0f)));
  }
};
