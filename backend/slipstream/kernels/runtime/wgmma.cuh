// GEMMs of a warpgroup (128 threads) on Hopper's tensor cores: 64 rows of fp32 sums in registers (sm_90a alone).
//
// Sums and A in registers, for lane = 4 g + t of warp w: sum [4 i + 2 h + j] is of row 16 w + g + 8 h and column
// 8 i + 2 t + j; a k-step of A is what mma.m16n8k16 takes, so packed sums are an A.
//
// In shared memory an operand lies as the copy engine leaves it with SWIZZLE_128B: rows of 128 bytes, in groups of
// eight that start at multiples of 1,024, the 16-byte chunk c of row r at chunk c ^ (r % 8). Wider operands are
// several such columns of 64 elements, one after the other.
#pragma once
#include "runtime/common.cuh"

// Rows are m or n, their elements follow k: a k-step of 16 is 32 bytes further. Between two groups of eight lie those of
// `columns` columns.
DEVICE u64 rows_descriptor(u32 address, int columns = 1) {
  return u64(address >> 4) | u64(1) << 16 | u64(columns * 1024 >> 4) << 32 | u64(1) << 62;
}
// Rows are k, their elements follow n, `column_bytes` between columns of 64: a k-step of 16 is 2,048 bytes further.
DEVICE u64 columns_descriptor(u32 address, u32 column_bytes) {
  return u64(address >> 4) | u64(column_bytes >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}
// Of the operand that lies `bytes` further.
DEVICE u64 advance(u64 descriptor, u32 bytes) {
  return (descriptor >> 32 << 32) | (u32(descriptor) + (bytes >> 4));  // the address never carries
}

// Before GEMMs that read registers which other instructions wrote.
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the last PENDING committed groups are done.
template <int PENDING>
DEVICE void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// No access to the sums moves across this.
template <int N>
DEVICE void pin(float (&sums)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
template <int N>
DEVICE void pin(int (&sums)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(sums[i])::"memory");
}

#define SUMS_8(i)                                                                                 \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]),      \
      "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define SUMS_32 SUMS_8(0), SUMS_8(8), SUMS_8(16), SUMS_8(24)
#define SUMS_64 SUMS_32, SUMS_8(32), SUMS_8(40), SUMS_8(48), SUMS_8(56)
#define SUMS_128                                                                                  \
  SUMS_64, SUMS_8(64), SUMS_8(72), SUMS_8(80), SUMS_8(88), SUMS_8(96), SUMS_8(104), SUMS_8(112),   \
      SUMS_8(120)
#define NAMES_32                                                                                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                                  \
  NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
  "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_128                                                                                 \
  NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, " \
  "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, "  \
  "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, " \
  "%116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// Overloads by element type (the last argument) and by the number of sums.
#define PRODUCTS(ELEMENT_TYPE, TYPE)                                                              \
  /* sums (+)= A B^T, A in registers, B by rows */                                                \
  DEVICE void multiply(float (&sums)[64], const u32 (&a)[4], u64 b, bool add, ELEMENT_TYPE) {     \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                     \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" NAMES_64       \
                 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"                                   \
                 : SUMS_64                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));            \
  }                                                                                               \
  /* the same, A by rows */                                                                       \
  DEVICE void multiply(float (&sums)[32], u64 a, u64 b, bool add, ELEMENT_TYPE) {                 \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                     \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" NAMES_32        \
                 "}, %32, %33, p, 1, 1, 0, 0;\n}"                                                 \
                 : SUMS_32                                                                        \
                 : "l"(a), "l"(b), "r"(int(add)));                                                \
  }                                                                                               \
  /* sums += A B, A in registers, B by columns */                                                 \
  DEVICE void multiply_add(float (&sums)[64], const u32 (&a)[4], u64 b, ELEMENT_TYPE) {           \
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"                                       \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" NAMES_64       \
                 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"                                   \
                 : SUMS_64                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                           \
  }                                                                                               \
  DEVICE void multiply_add(float (&sums)[32], const u32 (&a)[4], u64 b, ELEMENT_TYPE) {           \
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"                                       \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" NAMES_32        \
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"                                   \
                 : SUMS_32                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                           \
  }                                                                                               \
  DEVICE void multiply_add(float (&sums)[128], const u32 (&a)[4], u64 b, ELEMENT_TYPE) {          \
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"                                       \
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" NAMES_128      \
                 "}, {%128, %129, %130, %131}, %132, p, 1, 1, 1;\n}"                              \
                 : SUMS_128                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                           \
  }
PRODUCTS(Half, "f16")
PRODUCTS(BFloat16, "bf16")
#undef PRODUCTS

// Sums of K columns become an A.
template <int K, int N, int STEPS, class Element>
DEVICE void pack_operand(u32 (&a)[STEPS][4], const float (&sums)[N], Element) {
#pragma unroll
  for (int i = 0; i < K / 4; ++i) a[i / 4][i % 4] = round_pair(sums[2 * i], sums[2 * i + 1], Element{});
}
// sums += A B over the first K rows of B, which lies by columns.
template <int K, int N, int STEPS, class Element>
DEVICE void multiply_columns(float (&sums)[N], const u32 (&a)[STEPS][4], u64 b, Element) {
#pragma unroll
  for (int step = 0; step < K / 16; ++step) multiply_add(sums, a[step], advance(b, step * 2048), Element{});
}
