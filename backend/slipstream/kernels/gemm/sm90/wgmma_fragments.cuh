// GEMMs of a warpgroup with A in registers and B by rows in shared memory, of 16 to 256 rows of B (sm_90a). wgmma.cuh says
// how both lie.
#pragma once
#include "runtime/wgmma.cuh"

#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_24 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define SUMS_16 SUMS_8(0), SUMS_8(8)
#define SUMS_24 SUMS_16, SUMS_8(16)
// sums (+)= A B^T, of 16 inputs of 16 bits, or of 32 of e4m3
#define PRODUCT(COUNT, N, K_AND_TYPES, ORDER, NAME, NAMES, OPERANDS, A0, A1, A2, A3, B, ADD)                         \
  DEVICE void multiply(float (&sums)[COUNT], const u32 (&a)[4], u64 b, bool add, NAME) {                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" ADD ", 0;\n"                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" N K_AND_TYPES " {" NAMES "}, {%" A0 ", %" A1 ", %" A2 ", %" A3  \
                 "}, %" B ", p, 1, 1" ORDER ";\n}"                                                                   \
                 : OPERANDS                                                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));                               \
  }
#define PRODUCTS(K_AND_TYPES, ORDER, NAME)                                                                     \
  PRODUCT(8, "16", K_AND_TYPES, ORDER, NAME, NAMES_8, SUMS_8(0), "8", "9", "10", "11", "12", "13")             \
  PRODUCT(16, "32", K_AND_TYPES, ORDER, NAME, NAMES_16, SUMS_16, "16", "17", "18", "19", "20", "21")           \
  PRODUCT(24, "48", K_AND_TYPES, ORDER, NAME, NAMES_24, SUMS_24, "24", "25", "26", "27", "28", "29")           \
  PRODUCT(32, "64", K_AND_TYPES, ORDER, NAME, NAMES_32, SUMS_32, "32", "33", "34", "35", "36", "37")           \
  PRODUCT(128, "256", K_AND_TYPES, ORDER, NAME, NAMES_128, SUMS_128, "128", "129", "130", "131", "132", "133")
PRODUCTS("k16.f32.f16.f16", ", 0", Half)
PRODUCTS("k16.f32.bf16.bf16", ", 0", BFloat16)

struct E4m3 {};
PRODUCTS("k32.f32.e4m3.e4m3", "", E4m3)
PRODUCT(64, "128", "k32.f32.e4m3.e4m3", "", E4m3, NAMES_64, SUMS_64, "64", "65", "66", "67", "68", "69")
#undef PRODUCTS
#undef PRODUCT
