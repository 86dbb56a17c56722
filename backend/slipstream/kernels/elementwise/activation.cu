// act(gate) * up of rows [gate | up], or act(x) of rows [x]; grid: x = row, y = a share of the row.
// -D ELEMENT (T), VECTOR (elements an access)
#include "elementwise/gates.cuh"

constexpr int PACKS = 4;  // accesses of a thread to gates, and as many to ups, that are on their way at once

// Of a gate and what it multiplies.
template <typename Activation>
struct Times {
  DEVICE float operator()(T gate, T up) const { return Activation()(to_float(gate)) * to_float(up); }
};

// The same of both cut off at a limit; NaN stays.
struct Gegelu {
  float limit;

  DEVICE float operator()(T gate, T up) const {
    const float g = below(to_float(gate)), u = -below(-below(to_float(up)));
    return times_logistic(g, 1.702f * g) * (u + 1.0f);
  }
  DEVICE float below(float x) const { return x > limit ? limit : x; }
};

// At most PACKS accesses of a thread cover its row.
template <typename Activation>
DEVICE void gate(const T* gate_up, i64 stride, T* out, i64 width, Activation activation) {
  start_next();
  wait_for_previous();
  const T* gates = gate_up + i64(blockIdx.x) * stride;
  const T* ups = gates + width;
  out += i64(blockIdx.x) * width;
  const int first = int(blockIdx.y * blockDim.x + threadIdx.x) * VECTOR, end = int(width);
  const int step = int(gridDim.y * blockDim.x) * VECTOR;
  Pack<T, VECTOR> gate[PACKS], up[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    if (first + i * step >= end) break;
    gate[i] = load_fresh<VECTOR>(gates + first + i * step);
    up[i] = load_fresh<VECTOR>(ups + first + i * step);
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    if (first + i * step >= end) break;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j)
      gate[i].at[j] = from_float<T>(activation(gate[i].at[j], up[i].at[j]));
    store<VECTOR>(out + first + i * step, gate[i]);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    silu_mul(const T* gate_up, i64 stride, T* out, i64 width) {
  gate(gate_up, stride, out, width, Times<Silu>());
}

extern "C" __global__ void __launch_bounds__(256)
    gelu_mul(const T* gate_up, i64 stride, T* out, i64 width) {
  gate(gate_up, stride, out, width, Times<Gelu>());
}

extern "C" __global__ void __launch_bounds__(256)
    gegelu_mul(const T* gate_up, i64 stride, T* out, i64 width, float limit) {
  gate(gate_up, stride, out, width, Gegelu{limit});
}

// numbers: alpha of both sides, beta, and what the exponent is at most.
extern "C" __global__ void __launch_bounds__(256)
    xielu(const T* x, i64 stride, T* out, i64 width, const float* numbers) {
  start_next();
  const auto number = load<4>(numbers);
  const float above = number.at[0], below = number.at[1], beta = number.at[2], most = number.at[3];
  wait_for_previous();
  x += i64(blockIdx.x) * stride;
  out += i64(blockIdx.x) * width;
  const int first = int(blockIdx.y * blockDim.x + threadIdx.x) * VECTOR, end = int(width);
  const int step = int(gridDim.y * blockDim.x) * VECTOR;
  Pack<T, VECTOR> pack[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i)
    if (first + i * step < end) pack[i] = load_fresh<VECTOR>(x + first + i * step);
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    if (first + i * step >= end) break;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      const float v = to_float(pack[i].at[j]);
      const float curved = v > 0.0f ? above * v * v : (expm1f(fminf(v, most)) - v) * below;
      pack[i].at[j] = from_float<T>(curved + beta * v);
    }
    store<VECTOR>(out + first + i * step, pack[i]);
  }
}
