// A ring of slots in shared memory (sm_90 on): one lane fills them by bulk copies, warps that compute empty them.
// Each side keeps a CopyRing of its own, which counts its passes; both walk the slots in the same order.
#pragma once
#include "runtime/copies.cuh"
#include "runtime/tma.cuh"

class CopyRing {
  u8* slots;
  u64* barriers;  // full and empty of each slot
  int slot_bytes;
  int num_slots;
  RingPosition at;

  DEVICE u32 full() const { return shared_address(barriers + 2 * at.slot); }
  DEVICE u32 empty() const { return shared_address(barriers + 2 * at.slot + 1); }

 public:
  DEVICE CopyRing(u8* slots, u64* barriers, int slot_bytes, int num_slots)
      : slots(slots), barriers(barriers), slot_bytes(slot_bytes), num_slots(num_slots) {}

  // By one thread, before a __syncthreads(); `readers` warps release each slot.
  DEVICE void init(int readers) const {
    for (int i = 0; i < num_slots; ++i) {
      barrier_init(shared_address(barriers + 2 * i), 1);
      barrier_init(shared_address(barriers + 2 * i + 1), readers);
    }
    barrier_init_done();
  }
  DEVICE void advance() { at.advance(num_slots); }

  // ---- the lane that fills ----

  // Waits until the slot is free; `bytes` will be copied into it.
  DEVICE void acquire(u32 bytes) const {
    barrier_wait(empty(), at.parity ^ 1);
    barrier_expect(full(), bytes);
  }
  // Addresses and sizes are multiples of 16 bytes.
  DEVICE void copy(int offset, const u8* source, u32 bytes, u64 policy) const {
    copy_bulk(shared_address(slots) + at.slot * slot_bytes + offset, source, bytes, full(), policy);
  }

  // ---- the warps that empty; the lane waits too, for what it asked for ----

  DEVICE const u8* wait() const {
    barrier_wait(full(), at.parity);
    return slots + at.slot * slot_bytes;
  }
  // `seen` must depend on everything that this warp read from the slot. The branch is never taken: without it
  // the arrive is issued right behind the loads, and the next copy can overtake those that still wait in a queue.
  DEVICE void release(float seen) const {
    if (seen == 1.2345e30f) __nanosleep(1);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty());
  }
};
