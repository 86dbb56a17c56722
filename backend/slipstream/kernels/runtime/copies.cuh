// Asynchronous copies of 16 bytes from global to shared memory.
#pragma once
#include "runtime/common.cuh"

// Copies 16 bytes, or writes 16 zero bytes when not `inside` (the source is not read then).
template <class Element>
DEVICE void copy_async(Element* target, const Element* source, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)),
               "l"(source), "r"(inside ? 16 : 0)
               : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// For what is read once: it leaves the L2 cache before anything else.
DEVICE u64 evict_first() {
  u64 policy;
#if __CUDA_ARCH__ >= 900
  policy = 0x12f0000000000000;  // what the instruction gives; a constant costs no registers
#else
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}
// A shared address in a register of the thread. ptxas 13.0 gives a copy with a policy whose address is the sum of a register
// and a uniform one the wrong uniform registers, which is an illegal instruction; it cannot look through this.
DEVICE u32 in_register(u32 address) {
  u32 result;
  asm("and.b32 %0, %1, 0x3ffff;" : "=r"(result) : "r"(address));  // shared memory is smaller
  return result;
}
// `copy_async` to a shared address, with a policy of the L2 cache.
DEVICE void copy_async(u32 target, const void* source, bool inside, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(target),
               "l"(source), "r"(inside ? 16 : 0), "l"(policy)
               : "memory");
}
// Copies the first `count` of WIDTH bytes (4, 8 or 16), zeros behind them; those of 4 and 8 through the L1 cache.
template <int WIDTH>
DEVICE void copy_async_bytes(u32 target, const void* source, int count) {
  if constexpr (WIDTH == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(count) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source), "n"(WIDTH), "r"(count)
                 : "memory");
}
// The 128 bytes around an address into the L2 cache.
DEVICE void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}
