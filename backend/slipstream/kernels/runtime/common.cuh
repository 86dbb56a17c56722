// What every kernel shares: 16-bit floats and 16-byte accesses, without any CUDA header, so that NVRTC alone
// is enough to compile. `T` is the tensors' element type: float, Half or BFloat16 (-D ELEMENT).
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define DEVICE __device__ __forceinline__
#define DEVICE_CALL __device__ __noinline__

constexpr u32 ALL_LANES = 0xffffffffu;
#define INFINITE __int_as_float(0x7f800000)

struct Half {
  u16 bits;
};
struct BFloat16 {
  u16 bits;
};

#ifdef ELEMENT
using T = ELEMENT;
#endif

DEVICE float to_float(float value) { return value; }
DEVICE float to_float(Half value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}
DEVICE float to_float(BFloat16 value) { return __uint_as_float(u32(value.bits) << 16); }

template <class To>
DEVICE To from_float(float value);
template <>
DEVICE float from_float<float>(float value) { return value; }
template <>
DEVICE Half from_float<Half>(float value) {
  Half result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}
template <>
DEVICE BFloat16 from_float<BFloat16>(float value) {
  BFloat16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}

// Two numbers in a word, each rounded.
DEVICE u32 round_pair(float low, float high, Half) {
  u32 result;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(result) : "f"(low), "f"(high));
  return result;
}
DEVICE u32 round_pair(float low, float high, BFloat16) {
  u32 result;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(result) : "f"(low), "f"(high));
  return result;
}

// N elements that move in one access.
template <class Element, int N>
struct alignas(N * sizeof(Element)) Pack {
  Element at[N];
};
template <int N, class Element>
DEVICE Pack<Element, N> load(const Element* address) {
  return *reinterpret_cast<const Pack<Element, N>*>(address);
}
template <int N, class Element>
DEVICE void store(Element* address, const Pack<Element, N>& pack) {
  *reinterpret_cast<Pack<Element, N>*>(address) = pack;
}

DEVICE u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

constexpr float LOG2_E = 1.44269504f;

DEVICE float exp2_fast(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
DEVICE float reciprocal_fast(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
// x times the logistic function of y; off by less than the rounding to 16 bits, in half the instructions of __expf and
// __fdividef.
DEVICE float times_logistic_fast(float x, float y) { return x * reciprocal_fast(1.0f + exp2_fast(-LOG2_E * y)); }
DEVICE float silu_fast(float x) { return times_logistic_fast(x, x); }

DEVICE float warp_sum(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(ALL_LANES, value, mask);
  return value;
}

// Programmatic dependent launch (sm_90 on). A kernel launched with `overlaps` reads and writes what others write or
// read only after this: when it returns, the kernels before have ended and their writes are visible. Every such
// kernel calls it in every thread that goes on, so that order is transitive.
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// `load` of what a kernel before wrote: past the L1 cache, which the wait does not invalidate.
template <int N, class Element>
DEVICE Pack<Element, N> load_fresh(const Element* address) {
  Pack<Element, N> result;
  if constexpr (sizeof(result) == 16) {
    u32* to = reinterpret_cast<u32*>(&result);
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "l"(address)
                 : "memory");
  } else if constexpr (sizeof(result) == 8) {
    asm volatile("ld.global.cg.u64 %0, [%1];"
                 : "=l"(*reinterpret_cast<u64*>(&result))
                 : "l"(address)
                 : "memory");
  } else if constexpr (sizeof(result) == 4) {
    asm volatile("ld.global.cg.u32 %0, [%1];"
                 : "=r"(*reinterpret_cast<u32*>(&result))
                 : "l"(address)
                 : "memory");
  } else {
    static_assert(sizeof(result) == 2, "16, 8, 4 or 2 bytes an access");
    asm volatile("ld.global.cg.u16 %0, [%1];"
                 : "=h"(*reinterpret_cast<u16*>(&result))
                 : "l"(address)
                 : "memory");
  }
  return result;
}
// What a CTA wrote before a fence and an atomic add is there when the sum is.
DEVICE int load_acquire(const int* address) {
  int result;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(result) : "l"(address) : "memory");
  return result;
}
// The next kernel may be started from here on: it gets no result of this one before its own wait.
DEVICE void start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Orders a thread's own writes to shared memory before later reads and writes by copies and wgmma (sm_90 on).
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
