// Rows to e4m3 (largest number 448) with one fp32 scale each, and GEMMs of such matrices back to the model's type.
// A product comes in BFloat16 and unscaled: its sums reach 448 * 448 * inputs, which Half cannot hold. It is
// product * (scale of the column) * (scale of the row) + bias. Where a row gets a scale, a CTA holds all of it.
// -D ELEMENT (T, of 16 bits), PACKS (accesses of a thread along a row)
#include "runtime/common.cuh"

constexpr int VECTOR = 8;           // elements an access; a row is a whole number of them
constexpr float LARGEST = 448.0f;   // of e4m3
constexpr float SMALLEST = 1e-30f;  // the least that a row's largest counts as, so that LARGEST / it is finite
constexpr int MIN_CTAS = PACKS == 4 ? 2 : 1;  // of a multiprocessor: one computes while the other waits for memory
constexpr int MAX_THREADS = PACKS == 8 ? 512 : PACKS == 4 ? 448 : 1024;  // with registers for their packs
constexpr int ELEMENTWISE_THREADS = 256;

DEVICE float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
DEVICE void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Scales of a product's columns; read-only, so that they may be fetched before the wait.
struct Columns {
  const float* scales;
  const T* bias;  // or null

  DEVICE void prefetch(i64 first) const {
    ::prefetch(scales + first);
    if (bias != nullptr) ::prefetch(bias + first);
  }
  // `raw` of columns `first ...`, rounded before anything is added, so that every kernel has the same numbers.
  DEVICE Pack<float, VECTOR> scaled(const Pack<BFloat16, VECTOR>& raw, float row_scale, i64 first) const {
    const Pack<float, 4> column_scales[] = {load<4>(scales + first), load<4>(scales + first + 4)};
    Pack<float, VECTOR> values;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j)
      values.at[j] = __fmul_rn(to_float(raw.at[j]) * column_scales[j / 4].at[j % 4], row_scale);
    if (bias != nullptr) {
      const auto addends = load<VECTOR>(bias + first);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) values.at[j] += to_float(addends.at[j]);
    }
    return values;
  }
};

// What a thread holds of its CTA's row: PACKS accesses, the CTA's threads side by side in each.
DEVICE int first_of(int pack) { return (pack * int(blockDim.x) + int(threadIdx.x)) * VECTOR; }

// A thread's elements of a row: on their way all at once where there are registers for that.
template <class Element>
struct Loading {
  static constexpr bool AT_ONCE = PACKS <= 2;
  const Element* row;
  Pack<Element, VECTOR> packs[AT_ONCE ? PACKS : 1];

  DEVICE Loading(const Element* row, i64 width) : row(row) {
#pragma unroll
    for (int pack = 0; AT_ONCE && pack < PACKS; ++pack)
      if (first_of(pack) < width) packs[pack] = load_fresh<VECTOR>(row + first_of(pack));
  }
  DEVICE Pack<Element, VECTOR> at(int pack) const {
    if constexpr (AT_ONCE) return packs[pack];
    return load_fresh<VECTOR>(row + first_of(pack));
  }
};

// A thread's part of the row to be quantised, in fp32.
struct RowPart {
  float at[PACKS][VECTOR];
  float largest = 0.0f;  // absolute value, or NaN
  float squares = 0.0f;

  DEVICE void set(int pack, int j, float value) {
    at[pack][j] = value;
    largest = max_or_nan(largest, fabsf(value));
  }

  // Make `largest` and `squares` the whole row's; the sum has a fixed order. The bits of numbers that are not negative
  // are ordered as the numbers, NaN above all.
  DEVICE void reduce() {
    __shared__ u32 maxima[32];
    __shared__ float sums[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 bits = __reduce_max_sync(ALL_LANES, __float_as_uint(largest));
    squares = warp_sum(squares);
    if (lane == 0) {
      maxima[warp] = bits;
      sums[warp] = squares;
    }
    __syncthreads();
    const bool is_warp = lane < blockDim.x / 32;
    bits = __reduce_max_sync(ALL_LANES, is_warp ? maxima[lane] : 0);
    largest = __uint_as_float(bits);
    squares = warp_sum(is_warp ? sums[lane] : 0.0f);
  }

  // Write the row as e4m3 and its scale, times `factor`; after `reduce`.
  DEVICE void store_quantized(u8* out, float* scale, float factor, i64 width) const {
    const float limit = max_or_nan(largest, SMALLEST);
    const float inverse = LARGEST / limit;
#pragma unroll
    for (int pack = 0; pack < PACKS; ++pack) {
      if (first_of(pack) >= width) break;
      Pack<u16, VECTOR / 2> pairs;
#pragma unroll
      for (int j = 0; j < VECTOR; j += 2)
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"  // the second source becomes the lower byte
            : "=h"(pairs.at[j / 2])
            : "f"(at[pack][j + 1] * inverse), "f"(at[pack][j] * inverse));
      store<VECTOR / 2>(reinterpret_cast<u16*>(out + first_of(pack)), pairs);
    }
    if (threadIdx.x == 0) *scale = limit / LARGEST * factor;
  }
};

extern "C" __global__ void __launch_bounds__(MAX_THREADS, MIN_CTAS)
    quantize(const T* x, u8* out, float* scales, i64 width) {
  const i64 row = blockIdx.x;
  start_next();
  wait_for_previous();
  const Loading<T> loading(x + row * width, width);
  RowPart part;
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    if (first_of(pack) >= width) break;
    const auto raw = loading.at(pack);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) part.set(pack, j, to_float(raw.at[j]));
  }
  part.reduce();
  part.store_quantized(out + row * width, scales + row, 1.0f, width);
}

// The norm of `x`, or of `x += product` when ADD. The row's rstd goes into its scale alone: x * weight is quantised.
template <bool ADD>
DEVICE void norm_row(T* x, const T* weight, const BFloat16* product, const float* row_scales, Columns columns, u8* out,
                     float* scales, i64 width, float eps) {
  const i64 row = blockIdx.x;
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    if (first_of(pack) >= width) break;
    prefetch(weight + first_of(pack));
    if (ADD) columns.prefetch(first_of(pack));
  }
  start_next();
  wait_for_previous();
  const float row_scale = ADD ? load_fresh<1>(row_scales + row).at[0] : 0.0f;
  x += row * width;
  const Loading<T> values(x, width);
  const Loading<BFloat16> addends(product + row * width, ADD ? width : 0);
  RowPart part;
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    const int first = first_of(pack);
    if (first >= width) break;
    const auto factors = load<VECTOR>(weight + first);
    auto sums = values.at(pack);
    if (ADD) {
      const auto scaled = columns.scaled(addends.at(pack), row_scale, first);
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) sums.at[j] = from_float<T>(to_float(sums.at[j]) + scaled.at[j]);
      store<VECTOR>(x + first, sums);
    }
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      const float value = to_float(sums.at[j]);
      part.squares = fmaf(value, value, part.squares);
      part.set(pack, j, value * to_float(factors.at[j]));
    }
  }
  part.reduce();
  const float rstd = 1.0f / sqrtf(part.squares / float(width) + eps);
  part.store_quantized(out + row * width, scales + row, rstd, width);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, MIN_CTAS)
    norm_quantize(T* x, const T* weight, u8* out, float* scales, i64 width, float eps) {
  norm_row<false>(x, weight, nullptr, nullptr, Columns{}, out, scales, width, eps);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, MIN_CTAS)
    add_norm_quantize(T* x, const T* weight, const BFloat16* product, const float* row_scales,
                      const float* column_scales, const T* bias, u8* out, float* scales, i64 width, float eps) {
  norm_row<true>(x, weight, product, row_scales, Columns{column_scales, bias}, out, scales, width, eps);
}

// silu(gate) * up of rows [gate | up] of a product; `width` is of the result.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, MIN_CTAS)
    silu_mul_quantize(const BFloat16* product, const float* row_scales, const float* column_scales, const T* bias,
                      u8* out, float* scales, i64 width) {
  const i64 row = blockIdx.x;
  const Columns columns{column_scales, bias};
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    if (first_of(pack) >= width) break;
    columns.prefetch(first_of(pack));
    columns.prefetch(width + first_of(pack));
  }
  start_next();
  wait_for_previous();
  const float row_scale = load_fresh<1>(row_scales + row).at[0];
  product += row * 2 * width;
  const Loading<BFloat16> raw_gates(product, width), raw_ups(product + width, width);
  RowPart part;
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    const int first = first_of(pack);
    if (first >= width) break;
    const auto gates = columns.scaled(raw_gates.at(pack), row_scale, first);
    const auto ups = columns.scaled(raw_ups.at(pack), row_scale, width + first);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
      // With exact division and exponential, arithmetic would take longer than memory.
      part.set(pack, j, silu_fast(gates.at[j]) * ups.at[j]);
    }
  }
  part.reduce();
  part.store_quantized(out + row * width, scales + row, 1.0f, width);
}

// The product itself into `out`, or added to it when ADD. Grid: x = row, y = a share of the row.
template <bool ADD>
DEVICE void scale_row(T* out, const BFloat16* product, const float* row_scales, Columns columns, i64 width) {
  const i64 row = blockIdx.x;
  const i64 first = (i64(blockIdx.y) * ELEMENTWISE_THREADS + threadIdx.x) * VECTOR;
  if (first >= width) return;
  columns.prefetch(first);
  start_next();
  wait_for_previous();
  const float row_scale = load_fresh<1>(row_scales + row).at[0];
  const auto raw = load_fresh<VECTOR>(product + row * width + first);
  Pack<T, VECTOR> results;
  if (ADD) results = load_fresh<VECTOR>(out + row * width + first);
  const auto values = columns.scaled(raw, row_scale, first);
#pragma unroll
  for (int j = 0; j < VECTOR; ++j)
    results.at[j] = from_float<T>(ADD ? to_float(results.at[j]) + values.at[j] : values.at[j]);
  store<VECTOR>(out + row * width + first, results);
}

extern "C" __global__ void __launch_bounds__(ELEMENTWISE_THREADS)
    scale(T* out, const BFloat16* product, const float* row_scales, const float* column_scales, const T* bias,
          i64 width) {
  scale_row<false>(out, product, row_scales, Columns{column_scales, bias}, width);
}

extern "C" __global__ void __launch_bounds__(ELEMENTWISE_THREADS)
    add_scaled(T* out, const BFloat16* product, const float* row_scales, const float* column_scales, const T* bias,
               i64 width) {
  scale_row<true>(out, product, row_scales, Columns{column_scales, bias}, width);
}
