// How a product's weights and rows pass through a ring of slots in shared memory (sm_90a), step by step: each by one
// lane, of a warp of its own. `Task` has the CTA's steps, `begin` to `end`, and `num_slots`; `Shared` the barriers
// `full` and `empty` of a slot; `copy_weights` and `copy_x` are the kernel's.
#pragma once
#include "copies.cuh"
#include "tma.cuh"

// A ring is first filled so fast at most: 1.7 times a multiprocessor's share of an H200's memory. What is asked for
// earlier queues before memory, and what small kernels in front still read queues behind it.
constexpr int BYTES_A_NS = 61;

// A slot, and the parity of the pass over the ring.
struct Place {
  int slot = 0;
  u32 parity = 0;

  DEVICE void advance(int num_slots) {
    if (++slot < num_slots) return;
    slot = 0;
    parity ^= 1;
  }
};

DEVICE i64 now_ns() {
  i64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// From before the previous kernel's end on.
template <class Task, class Shared>
DEVICE void fetch_weights(const Task& task, const Shared& shared, const TensorMap* weights, int slot_bytes) {
  const u64 policy = evict_first();
  const i64 begin_ns = now_ns();
  Place place;
  for (int step = task.begin; step < task.end; ++step) {
    const int ahead = step - task.begin;
    while (ahead < task.num_slots && now_ns() - begin_ns < ahead * slot_bytes / BYTES_A_NS) {}
    barrier_wait(shared.empty(place.slot), place.parity ^ 1);
    copy_weights(task, shared, weights, step, place.slot, policy);
    place.advance(task.num_slots);
  }
}

template <class Task, class Shared>
DEVICE void fetch_x(const Task& task, const Shared& shared, const TensorMap* x) {
  wait_for_previous();
  Place place;
  for (int step = task.begin; step < task.end; ++step) {
    barrier_wait(shared.empty(place.slot), place.parity ^ 1);
    copy_x(task, shared, x, step, place.slot);
    place.advance(task.num_slots);
  }
}
