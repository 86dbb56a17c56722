// Asynchronous copies of 16 bytes from global to shared memory.
#pragma once
#include "common.cuh"

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
