// How a product's weights and rows pass through a ring of slots in shared memory (sm_90a), step by step: each by one
// lane, of a warp of its own. `Task` has the CTA's steps, `begin` to `end`, and `num_slots`; `Shared` the barriers
// `full` and `empty` of a slot; `copy_weights` and `copy_x` are the kernel's.
#pragma once
#include "runtime/copies.cuh"
#include "runtime/tma.cuh"

// A ring is first filled so fast at most: 1.7 times a multiprocessor's share of an H200's memory. What is requested
// earlier queues before memory, and what small kernels in front still read queues behind it.
constexpr int BYTES_A_NS = 61;

// By one thread, before `barrier_init_done`: a slot is full of what two lanes copy, and empty once `readers` warps have
// released it.
template <class Shared>
DEVICE void init_slots(const Shared& shared, i64 num_slots, int readers) {
  for (int i = 0; i < num_slots; ++i) {
    barrier_init(shared.full(i), 2);
    barrier_init(shared.empty(i), readers);
  }
}

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
  RingPosition next;
  for (int step = task.begin; step < task.end; ++step) {
    const int ahead = step - task.begin;
    while (ahead < task.num_slots && now_ns() - begin_ns < ahead * slot_bytes / BYTES_A_NS) {}
    barrier_wait(shared.empty(next.slot), next.parity ^ 1);
    copy_weights(task, shared, weights, step, next.slot, policy);
    next.advance(task.num_slots);
  }
}

template <class Task, class Shared>
DEVICE void fetch_x(const Task& task, const Shared& shared, const TensorMap* x) {
  wait_for_previous();
  RingPosition next;
  for (int step = task.begin; step < task.end; ++step) {
    barrier_wait(shared.empty(next.slot), next.parity ^ 1);
    copy_x(task, shared, x, step, next.slot);
    next.advance(task.num_slots);
  }
}
