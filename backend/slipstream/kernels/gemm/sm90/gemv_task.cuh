// What a launch of the GEMV computes, and how its threads divide a row of x (gemv.cu, whose -D it has).
#pragma once
#include "gemm/sm90/gemv_part.cuh"
#if ADAPTS
#include "gemm/sm90/gemv_terms.cuh"
#endif

// Weights, and what is unpacked at once.
#if INT8
using Weight = Int8;
using Unit = u32;
#elif FP8
using Weight = E4m3;
using Unit = u16;
#else
using Weight = T;
using Unit = u32;
#endif
constexpr int UNIT = sizeof(Unit) / sizeof(Weight);  // weights

constexpr int THREADS = 32 * WARPS;
constexpr bool PACKED = CHUNKS > 7;  // x stays in 16 bits: fp32 takes too many registers

struct Task {
  const T* x;
  i64 x_stride;
  const u8* weight;  // [streams * num_outputs, width]
  const T* norm;     // x is normalised with it, unless null
  const T* bias;     // of each weight row, or null
  const float* scales;
  T* out;
  i64 out_stride;
  int num_rows, num_outputs, width;
  int streams;  // weight rows of an output: 1, or 2 for silu(gate) * up
  int share;    // outputs of a slot, which holds their rows of one stream behind those of the other
  int batch;    // outputs that are finished together: a multiple of the share, at most one a thread
  bool adds;    // to `out`
  float eps, inverse_width;
  int begin, end;  // this CTA's outputs
#if CENTRES
  const T* shift;  // added by the layer norm, or null
#endif
#if ADAPTS
  Adapters adapters;
  SharedTerms* terms;

  // Whether outputs are finished while weights are still asked for: the warp that asks cannot take t before.
  DEVICE bool is_long() const { return end - begin > batch; }
#endif

  DEVICE int row_bytes() const { return width * int(sizeof(Weight)); }
  DEVICE int slot_rows() const { return share * streams; }
};

// Of the warps that multiply; of all.
DEVICE void barrier_of_readers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
DEVICE void barrier_of_all() { asm volatile("bar.sync 2, %0;" ::"n"(THREADS + 32) : "memory"); }

#if ADAPTS
// By all threads that multiply: t is in shared memory.
DEVICE void take_t(const Task& task) {
  if (!task.is_long()) {
    barrier_of_all();
    return;
  }
  if (threadIdx.x < 32) fetch_t(task.adapters, *task.terms);
  barrier_of_readers();
}
#endif

// Element at which piece i of this thread begins; of a piece behind the end, where x counts as zero, the row's first.
DEVICE int piece_begin(const Task& task, int i) {
  const int element = (threadIdx.x + THREADS * i) * PIECE;
  return element < task.width ? element : 0;
}
DEVICE bool is_inside(const Task& task, int i) {
  return (threadIdx.x + THREADS * i) * PIECE < task.width;
}

using Words = Pack<u32, 4>;  // a piece of x or of the norm

// The factor of an RMS norm, from the sums of squares of a row's warps; 1 if there is none.
DEVICE float inverse_rms(const Task& task, const float* squares) {
  float result = 1.0f;
  if (!CENTRES && task.norm != nullptr) result = rsqrtf(total(squares) * task.inverse_width + task.eps);
  return result;
}
