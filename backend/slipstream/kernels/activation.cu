// act(gate) * up of rows [gate | up]; grid: x = row, y = a share of the row.
// -D ELEMENT (T), VECTOR (elements an access)
#include "common.cuh"

struct Silu {
  DEVICE float operator()(float x) const { return x / (1.0f + expf(-x)); }
};

// x * Phi(x), by tanh: 0.5 * (1 + tanh(y)) is the logistic function of 2y.
struct Gelu {
  DEVICE float operator()(float x) const {
    return x / (1.0f + expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
  }
};

template <typename Activation>
DEVICE void gate(const T* gate_up, i64 stride, T* out, i64 width, Activation activation) {
  start_next();
  wait_for_previous();
  const T* gates = gate_up + i64(blockIdx.x) * stride;
  const T* ups = gates + width;
  T* results = out + i64(blockIdx.x) * width;
  const i64 step = i64(gridDim.y) * blockDim.x * VECTOR;
  for (i64 i = (i64(blockIdx.y) * blockDim.x + threadIdx.x) * VECTOR; i < width; i += step) {
    auto pack = load_fresh<VECTOR>(gates + i);
    const auto up = load_fresh<VECTOR>(ups + i);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      pack.at[j] = from_float<T>(activation(to_float(pack.at[j])) * to_float(up.at[j]));
    }
    store<VECTOR>(results + i, pack);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    silu_mul(const T* gate_up, i64 stride, T* out, i64 width) {
  gate(gate_up, stride, out, width, Silu());
}

extern "C" __global__ void __launch_bounds__(256)
    gelu_mul(const T* gate_up, i64 stride, T* out, i64 width) {
  gate(gate_up, stride, out, width, Gelu());
}
