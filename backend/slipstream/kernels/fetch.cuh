// How a product's weights and rows pass through a ring of slots in shared memory (sm_90a), step by step.
#pragma once
#include "copies.cuh"
#include "tma.cuh"

// By one lane: weights from before the previous kernel's end on, x behind it. `Task` has the CTA's steps, `begin` to
// `end`, and `num_slots`; `Shared` the barrier `empty` of a slot; `copy_weights` and `copy_x` are the kernel's.
template <class Task, class Shared>
DEVICE void fetch(const Task& task, const Shared& shared, const TensorMap* weights,
                  const TensorMap* x) {
  const u64 policy = evict_first();
  const int ahead = min(task.end - task.begin, task.num_slots);
  for (int i = 0; i < ahead; ++i) copy_weights(task, shared, weights, task.begin + i, i, policy);
  wait_for_previous();
  for (int i = 0; i < ahead; ++i) copy_x(shared, x, task.begin + i, i);
  int slot = 0;
  u32 parity = 0;
  for (int step = task.begin + ahead; step < task.end; ++step) {
    barrier_wait(shared.empty(slot), parity);
    copy_weights(task, shared, weights, step, slot, policy);
    copy_x(shared, x, step, slot);
    if (++slot == task.num_slots) {
      slot = 0;
      parity ^= 1;
    }
  }
}
