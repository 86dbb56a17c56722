// GEMMs of rows that lie in shared memory: 64 of x with ROWS of the weights, summed in a warpgroup's registers (sm_90a).
// Rows come in chunks of 128 bytes. -D ELEMENT (T), FP8, INT8 (whether rows are e4m3, or int8, rather than T), ROWS (a
// multiple of 16 up to 224), AT_ONCE (a divisor of ROWS, likewise: of the weights' rows in an instruction, if not all)
#pragma once
#ifndef INT8
#define INT8 0
#endif
#include "runtime/tma.cuh"
#include "runtime/wgmma.cuh"

struct E4m3 {};
struct Int8 {};
#if INT8
using Input = Int8;
using Sum = int;
#define SUM_REGISTER "+r"
#elif FP8
using Input = E4m3;
using Sum = float;
#define SUM_REGISTER "+f"
#else
using Input = T;
using Sum = float;
#define SUM_REGISTER "+f"
#endif

constexpr bool IS_SCALED = FP8 || INT8;  // by row and by column
constexpr int ROW_BYTES = 128;
constexpr int CHUNK = ROW_BYTES / (IS_SCALED ? 1 : sizeof(T));
constexpr int SUMS = ROWS / 2;  // of a thread
#ifndef AT_ONCE
#define AT_ONCE ROWS
#endif

// Of a chunk of x in memory: rows from `first` on, which nobody copies. They are multiplied all the same, and zeros take
// less power. By THREADS threads, which a barrier must follow.
template <int THREADS, int X_ROWS>
DEVICE void clear_rows(u8* x, int first) {
  for (int i = first * ROW_BYTES + threadIdx.x * 16; i < X_ROWS * ROW_BYTES; i += THREADS * 16)
    store<4>(reinterpret_cast<u32*>(x + i), Pack<u32, 4>{});
  fence_async();
}

// The box of a map by eights of rows (tensor_map.py).
DEVICE void copy_eights(u32 target, const TensorMap* map, int chunk, int eight, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %2, %3, %4}], [%5], %6;" ::"r"(target),
      "l"(map), "r"(0), "r"(chunk), "r"(eight), "r"(barrier), "l"(policy)
      : "memory");
}

// sums += A B^T, both in shared memory by rows; 64 rows of A, AT_ONCE of B, 32 bytes of k. The operands are the descriptors
// and then, for every 16 rows, eight sums.
#define OPERANDS_16 "%2, %3, %4, %5, %6, %7, %8, %9"
#define OPERANDS_32 OPERANDS_16 ", %10, %11, %12, %13, %14, %15, %16, %17"
#define OPERANDS_48 OPERANDS_32 ", %18, %19, %20, %21, %22, %23, %24, %25"
#define OPERANDS_64 OPERANDS_48 ", %26, %27, %28, %29, %30, %31, %32, %33"
#define OPERANDS_80 OPERANDS_64 ", %34, %35, %36, %37, %38, %39, %40, %41"
#define OPERANDS_96 OPERANDS_80 ", %42, %43, %44, %45, %46, %47, %48, %49"
#define OPERANDS_112 OPERANDS_96 ", %50, %51, %52, %53, %54, %55, %56, %57"
#define OPERANDS_128 OPERANDS_112 ", %58, %59, %60, %61, %62, %63, %64, %65"
#define OPERANDS_144 OPERANDS_128 ", %66, %67, %68, %69, %70, %71, %72, %73"
#define OPERANDS_160 OPERANDS_144 ", %74, %75, %76, %77, %78, %79, %80, %81"
#define OPERANDS_176 OPERANDS_160 ", %82, %83, %84, %85, %86, %87, %88, %89"
#define OPERANDS_192 OPERANDS_176 ", %90, %91, %92, %93, %94, %95, %96, %97"
#define OPERANDS_208 OPERANDS_192 ", %98, %99, %100, %101, %102, %103, %104, %105"
#define OPERANDS_224 OPERANDS_208 ", %106, %107, %108, %109, %110, %111, %112, %113"
#define OWN_8(i)                                                                                              \
  SUM_REGISTER(sums[i]), SUM_REGISTER(sums[i + 1]), SUM_REGISTER(sums[i + 2]), SUM_REGISTER(sums[i + 3]),        \
      SUM_REGISTER(sums[i + 4]), SUM_REGISTER(sums[i + 5]), SUM_REGISTER(sums[i + 6]), SUM_REGISTER(sums[i + 7])
#define OF_16 OWN_8(0)
#define OF_32 OF_16, OWN_8(8)
#define OF_48 OF_32, OWN_8(16)
#define OF_64 OF_48, OWN_8(24)
#define OF_80 OF_64, OWN_8(32)
#define OF_96 OF_80, OWN_8(40)
#define OF_112 OF_96, OWN_8(48)
#define OF_128 OF_112, OWN_8(56)
#define OF_144 OF_128, OWN_8(64)
#define OF_160 OF_144, OWN_8(72)
#define OF_176 OF_160, OWN_8(80)
#define OF_192 OF_176, OWN_8(88)
#define OF_208 OF_192, OWN_8(96)
#define OF_224 OF_208, OWN_8(104)
#define JOIN(a, b) JOINED(a, b)
#define JOINED(a, b) a##b
#define OPERANDS JOIN(OPERANDS_, AT_ONCE)
#define ALL_SUMS JOIN(OF_, AT_ONCE)
#define TEXT(x) TEXT_OF(x)
#define TEXT_OF(x) #x
#define MULTIPLY_ADD(NAME, K_AND_TYPES, MORE)                                                 \
  DEVICE void multiply_rows(Sum* sums, u64 a, u64 b, NAME) {                                  \
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"                                   \
                 "wgmma.mma_async.sync.aligned.m64n" TEXT(AT_ONCE) K_AND_TYPES " {" OPERANDS   \
                 "}, %0, %1, p" MORE ";\n}"                                                   \
                 : "+l"(a), "+l"(b), ALL_SUMS);                                               \
  }
#if INT8
MULTIPLY_ADD(Int8, "k32.s32.s8.s8", "")
#else
MULTIPLY_ADD(Half, "k16.f32.f16.f16", ", 1, 1, 0, 0")
MULTIPLY_ADD(BFloat16, "k16.f32.bf16.bf16", ", 1, 1, 0, 0")
MULTIPLY_ADD(E4m3, "k32.f32.e4m3.e4m3", ", 1, 1")
#endif
#undef MULTIPLY_ADD
