// Rows to e4m3 (largest number 448) or int8 (127) with one fp32 scale each, and GEMMs of such matrices back to the
// model's type. A product comes unscaled: of e4m3 in BFloat16, as its sums reach 448 * 448 * inputs, which Half cannot
// hold; of int8 in int32, exactly. It is product * (scale of the column) * (scale of the row) + bias. Where a row gets a
// scale, a CTA holds all of it.
// -D ELEMENT (T, of 16 bits), PACKS (accesses of a thread along a row), INT8 (whether values are int8 rather than e4m3)
#ifndef INT8
#define INT8 0
#endif
#include "runtime/copies.cuh"

#if INT8
using Product = int;
#else
using Product = BFloat16;
#endif

constexpr int VECTOR = 8;           // elements of an access of T; a row is a whole number of them
constexpr int SHARE = 16 / sizeof(Product);  // of a vector: elements of an access of the product
constexpr float LARGEST = INT8 ? 127.0f : 448.0f;
constexpr float SMALLEST = 1e-30f;  // the least that a row's largest counts as, so that LARGEST / it is finite
constexpr int MIN_CTAS = PACKS == 4 ? 2 : 1;  // of a multiprocessor: one computes while the other waits for memory
constexpr int MAX_THREADS = PACKS == 8 ? 512 : PACKS == 4 ? 448 : 1024;  // with registers for their packs
constexpr int ELEMENTWISE_THREADS = 256;

DEVICE float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
DEVICE float to_float(int value) { return float(value); }  // rounded, where it has more than 24 bits


// Scales of a product's columns; read-only, so that they may be fetched before the wait.
struct Columns {
  const float* scales;
  const T* bias;  // or null

  DEVICE void prefetch(i64 first) const {
    ::prefetch(scales + first);
    if (bias != nullptr) ::prefetch(bias + first);
  }
  // `raw` of columns `first ...`, rounded before anything is added, so that every kernel has the same values.
  DEVICE Pack<float, SHARE> scaled(const Pack<Product, SHARE>& raw, float row_scale, int first) const {
    Pack<float, SHARE> values;
#pragma unroll
    for (int j = 0; j < SHARE; j += 4) {
      const auto column_scales = load<4>(scales + first + j);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        values.at[j + k] = __fmul_rn(to_float(raw.at[j + k]) * column_scales.at[k], row_scale);
    }
    if (bias != nullptr) {
      const auto addends = load<SHARE>(bias + first);
#pragma unroll
      for (int j = 0; j < SHARE; ++j) values.at[j] += to_float(addends.at[j]);
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
  static constexpr int COUNT = 16 / sizeof(Element);  // of an access
  const Element* row;
  Pack<Element, COUNT> packs[AT_ONCE ? PACKS : 1][VECTOR / COUNT];

  DEVICE Loading(const Element* row, int width) : row(row) {
#pragma unroll
    for (int pack = 0; AT_ONCE && pack < PACKS; ++pack)
#pragma unroll
      for (int i = 0; i < VECTOR; i += COUNT)
        if (first_of(pack) < width) packs[pack][i / COUNT] = load_fresh<COUNT>(row + first_of(pack) + i);
  }
  // The access at element `i` of a vector.
  DEVICE Pack<Element, COUNT> at(int pack, int i = 0) const {
    if constexpr (AT_ONCE) return packs[pack][i / COUNT];
    return load_fresh<COUNT>(row + first_of(pack) + i);
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

  // Write the row and its scale, times `factor`; after `reduce`.
  DEVICE void store_quantized(u8* out, float* scale, float factor, int width) const {
    const float limit = max_or_nan(largest, SMALLEST);
    const float inverse = LARGEST / limit;
#pragma unroll
    for (int pack = 0; pack < PACKS; ++pack) {
      if (first_of(pack) >= width) break;
      store_values(out + first_of(pack), at[pack], inverse);
    }
    // int8 has no NaN: the scale shows it, and infinity.
    if (threadIdx.x == 0) *scale = (limit / LARGEST + (INT8 ? limit - limit : 0.0f)) * factor;
  }

 private:
#if INT8
  // Behind the sum with 1.5 * 2^23 a byte of the bits is the nearest integer, of two the even.
  static DEVICE u32 nearest(float value, float inverse) {
    return __float_as_uint(__fadd_rn(__fmul_rn(value, inverse), 12582912.0f));
  }
  static DEVICE void store_values(u8* out, const float (&values)[VECTOR], float inverse) {
    Pack<u32, VECTOR / 4> words;
#pragma unroll
    for (int i = 0; i < VECTOR / 4; ++i) {
      u32 bits[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) bits[j] = nearest(values[4 * i + j], inverse);
      const u32 low = __byte_perm(bits[0], bits[1], 0x0040), high = __byte_perm(bits[2], bits[3], 0x0040);
      words.at[i] = __byte_perm(low, high, 0x5410);
    }
    store<VECTOR / 4>(reinterpret_cast<u32*>(out), words);
  }
#else
  static DEVICE void store_values(u8* out, const float (&values)[VECTOR], float inverse) {
    Pack<u16, VECTOR / 2> pairs;
#pragma unroll
    for (int j = 0; j < VECTOR; j += 2)
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"  // the second source becomes the lower byte
          : "=h"(pairs.at[j / 2])
          : "f"(values[j + 1] * inverse), "f"(values[j] * inverse));
    store<VECTOR / 2>(reinterpret_cast<u16*>(out), pairs);
  }
#endif
};

// A row of `out` from one of x, as it is.
DEVICE void quantize_row(const T* x, i64 row, u8* out, float* scales, i64 width) {
  const Loading<T> loading(x, int(width));
  RowPart part;
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    if (first_of(pack) >= width) break;
    const auto raw = loading.at(pack);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) part.set(pack, j, to_float(raw.at[j]));
  }
  part.reduce();
  part.store_quantized(out + row * width, scales + row, 1.0f, int(width));
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, MIN_CTAS)
    quantize(const T* x, u8* out, float* scales, i64 width) {
  const i64 row = blockIdx.x;
  start_next();
  wait_for_previous();
  quantize_row(x + row * width, row, out, scales, width);
}

// Row i from row order[i] / share of x. What is launched next may read `order`, and what was made with it, before it waits.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, MIN_CTAS)
    gather_quantize(const T* x, i64 stride, const int* order, i64 share, u8* out, float* scales, i64 width) {
  wait_for_previous();
  start_next();
  const int source = load_fresh<1>(order + blockIdx.x).at[0] / int(share);
  quantize_row(x + source * stride, blockIdx.x, out, scales, width);
}

// The norm of `x`, or of `x += product` when ADD. The row's rstd goes into its scale alone: x * weight is quantised.
template <bool ADD>
DEVICE void norm_row(T* x, const T* weight, const Product* product, const float* row_scales, Columns columns, u8* out,
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
  const Loading<Product> addends(product + row * width, ADD ? width : 0);
  RowPart part;
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    const int first = first_of(pack);
    if (first >= width) break;
    const auto factors = load<VECTOR>(weight + first);
    auto sums = values.at(pack);
    if (ADD) {
#pragma unroll
      for (int i = 0; i < VECTOR; i += SHARE) {
        const auto scaled = columns.scaled(addends.at(pack, i), row_scale, first + i);
#pragma unroll
        for (int j = 0; j < SHARE; ++j) sums.at[i + j] = from_float<T>(to_float(sums.at[i + j]) + scaled.at[j]);
      }
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
  part.store_quantized(out + row * width, scales + row, rstd, int(width));
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, MIN_CTAS)
    norm_quantize(T* x, const T* weight, u8* out, float* scales, i64 width, float eps) {
  norm_row<false>(x, weight, nullptr, nullptr, Columns{}, out, scales, width, eps);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, MIN_CTAS)
    add_norm_quantize(T* x, const T* weight, const Product* product, const float* row_scales,
                      const float* column_scales, const T* bias, u8* out, float* scales, i64 width, float eps) {
  norm_row<true>(x, weight, product, row_scales, Columns{column_scales, bias}, out, scales, width, eps);
}

// silu(gate) * up of rows [gate | up] of a product.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, MIN_CTAS)
    silu_mul_quantize(const Product* product, const float* row_scales, const float* column_scales, const T* bias,
                      u8* out, float* scales, i64 of_result) {
  const i64 row = blockIdx.x;
  const int width = int(of_result);  // of 64 bits it would cost registers
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
  product += row * 2 * of_result;
  const Loading<Product> raw_gates(product, width), raw_ups(product + width, width);
  RowPart part;
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    const int first = first_of(pack);
    if (first >= width) break;
#pragma unroll
    for (int i = 0; i < VECTOR; i += SHARE) {
      const auto gates = columns.scaled(raw_gates.at(pack, i), row_scale, first + i);
      const auto ups = columns.scaled(raw_ups.at(pack, i), row_scale, width + first + i);
#pragma unroll
      for (int j = 0; j < SHARE; ++j) {
        // With exact division and exponential, arithmetic would take longer than memory.
        part.set(pack, i + j, silu_fast(gates.at[j]) * ups.at[j]);
      }
    }
  }
  part.reduce();
  part.store_quantized(out + row * of_result, scales + row, 1.0f, width);
}

// The product itself into `out`, or added to it when ADD. Grid: x = row, y = a share of the row.
template <bool ADD>
DEVICE void scale_row(T* out, const Product* product, const float* row_scales, Columns columns, i64 width) {
  const i64 row = blockIdx.x;
  const i64 first = (i64(blockIdx.y) * ELEMENTWISE_THREADS + threadIdx.x) * VECTOR;
  if (first >= width) return;
  columns.prefetch(first);
  start_next();
  wait_for_previous();
  const float row_scale = load_fresh<1>(row_scales + row).at[0];
  Pack<T, VECTOR> results;
  if (ADD) results = load_fresh<VECTOR>(out + row * width + first);
#pragma unroll
  for (int i = 0; i < VECTOR; i += SHARE) {
    const auto raw = load_fresh<SHARE>(product + row * width + first + i);
    const auto values = columns.scaled(raw, row_scale, int(first) + i);
#pragma unroll
    for (int j = 0; j < SHARE; ++j)
      results.at[i + j] = from_float<T>(ADD ? to_float(results.at[i + j]) + values.at[j] : values.at[j]);
  }
  store<VECTOR>(out + row * width + first, results);
}

extern "C" __global__ void __launch_bounds__(ELEMENTWISE_THREADS)
    scale(T* out, const Product* product, const float* row_scales, const float* column_scales, const T* bias,
          i64 width) {
  scale_row<false>(out, product, row_scales, Columns{column_scales, bias}, width);
}

extern "C" __global__ void __launch_bounds__(ELEMENTWISE_THREADS)
    add_scaled(T* out, const Product* product, const float* row_scales, const float* column_scales, const T* bias,
               i64 width) {
  scale_row<true>(out, product, row_scales, Columns{column_scales, bias}, width);
}
