// GEMMs of a warp on tensor cores, for 16-bit elements.
//
// Fragments of m16n8k16, for lane = 4 * g + t: A holds rows g and g + 8, columns 2t, 2t + 1, 2t + 8, 2t + 9; B
// holds the same of its k dimension at column g; C holds rows g and g + 8, columns 2t, 2t + 1.
// -D ELEMENT (T)
#pragma once
#include "runtime/common.cuh"

DEVICE u32 pack_pair(float low, float high) {
  return u32(from_float<T>(low).bits) | u32(from_float<T>(high).bits) << 16;
}
// An 8 x 8 matrix, row g columns 2t, 2t + 1 in each lane, to its transpose.
DEVICE u32 transpose(u32 pair) {
  u32 result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// Four 8 x 8 matrices; lane 8 m + r gives the address of row r of matrix m.
DEVICE void load_matrices(u32 (&result)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
               : "r"(address)
               : "memory");
}
DEVICE void load_transposed(u32 (&result)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
               : "r"(address)
               : "memory");
}

#define M16N8K16(TYPE)                                                                       \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                 \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                 \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, Half) { M16N8K16("f16"); }
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, BFloat16) {
  M16N8K16("bf16");
}
#undef M16N8K16

// m16n8k8 of tf32: A holds rows g and g + 8 of column t, then of t + 4; B rows t and t + 4 of column g.
DEVICE void multiply_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
