// The residual sum of a row and an output, to which a thread adds the outputs of the row's experts, in the order of ranks,
// and what is shared: in fp32, rounded once.
// OUTPUTS of a row are a CTA's at once.
// -D ELEMENT (T: Half or BFloat16)
#pragma once
#include "runtime/common.cuh"

struct Residual {
  const int row = threadIdx.x / OUTPUTS, within = threadIdx.x % OUTPUTS;
  T* target;
  const T *added, *gate;
  bool real;
  Pack<T, 1> before, term, logit;

  // Outputs `first` to `end` - 1.
  DEVICE Residual(T* out, i64 stride, const T* added_to_all, const T* added_gate, i64 gate_stride, int first, int end,
                  i64 width, int num_rows) {
    const int column = first + within;
    real = row < num_rows && column < end;
    target = out + row * stride + column;
    added = added_to_all == nullptr ? nullptr : added_to_all + row * width + column;
    gate = added_gate == nullptr ? nullptr : added_gate + row * gate_stride;
  }
  DEVICE void load() {
    if (!real) return;
    before = load_fresh<1>(target);
    if (added != nullptr) term = load_fresh<1>(added);
    if (gate != nullptr) logit = load_fresh<1>(gate);
  }
  // `sum_of(pair)`: an expert's output.
  template <class SumOf>
  DEVICE void finish(const float* weights, int top_k, const SumOf& sum_of) const {
    if (!real) return;
    float total = to_float(before.at[0]);
    for (int pair = row * top_k; pair < (row + 1) * top_k; ++pair) total = fmaf(sum_of(pair), weights[pair], total);
    if (added != nullptr) {
      const float factor = gate == nullptr ? 1.0f : 1.0f / (1.0f + expf(-to_float(logit.at[0])));
      total = fmaf(to_float(term.at[0]), factor, total);
    }
    *target = from_float<T>(total);
  }
};
