// What comes behind the sums of a GEMM with packed weights, by eights of outputs: scales, bias, terms of adapters, gate,
// residual (packed_pipe.cu).
// -D ELEMENT (T: of `out`), ADAPTS (whether rows may have terms of adapters)
#pragma once
#include "runtime/common.cuh"

struct Eight {
  float at[8];

  DEVICE void load(const float* from) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const auto four = ::load<4>(from + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) at[i + j] = four.at[j];
    }
  }
  DEVICE void store(float* to) const {
#pragma unroll
    for (int i = 0; i < 8; i += 4) ::store<4>(to + i, Pack<float, 4>{{at[i], at[i + 1], at[i + 2], at[i + 3]}});
  }
  DEVICE void add(const float* from) {
    Eight more;
    more.load(from);
#pragma unroll
    for (int i = 0; i < 8; ++i) at[i] += more.at[i];
  }
};

// What a row of x has of eight outputs, or of gates and their ups.
struct Finish {
  const float *row_scales, *factors;
  const T* bias;
  T* out;
  i64 out_stride;
  u32 num_outputs;  // of `out`
  bool gated, adds, wide;

  DEVICE void scale(Eight& values, float row_scale, u32 output) const {
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
      if (output % num_outputs + i >= num_outputs) break;
      values.at[i] *= row_scale;
      if (factors != nullptr) values.at[i] *= factors[output + i];
      if (bias != nullptr) values.at[i] += to_float(bias[output + i]);
    }
  }
  // `terms` of adapters, or null; those of ups are so many numbers behind.
  DEVICE void store(u32 row, u32 output, Eight& values, Eight& ups, const float* terms = nullptr, int ups_behind = 0) const {
    const bool scales = row_scales != nullptr || factors != nullptr || bias != nullptr;
    const float row_scale = row_scales != nullptr ? load_fresh<1>(row_scales + row).at[0] : 1.0f;
    if (scales) scale(values, row_scale, output);
    if (ADAPTS && terms != nullptr) values.add(terms);
    if (gated) {
      if (scales) scale(ups, row_scale, num_outputs + output);
      if (ADAPTS && terms != nullptr) ups.add(terms + ups_behind);
#pragma unroll
      for (int i = 0; i < 8; ++i) values.at[i] = silu_fast(values.at[i]) * ups.at[i];
    }
    T* target = out + row * out_stride + output;
    if (wide) {
      Pack<T, 8> rounded;
      if (adds) rounded = load_fresh<8>(target);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        rounded.at[i] = from_float<T>(adds ? values.at[i] + to_float(rounded.at[i]) : values.at[i]);
      ::store<8>(target, rounded);
      return;
    }
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
      if (output + i >= num_outputs) break;
      const float before = adds ? to_float(load_fresh<1>(target + i).at[0]) : 0.0f;
      target[i] = from_float<T>(adds ? values.at[i] + before : values.at[i]);
    }
  }
};
