// The CTAs of a cluster (sm_90 on) tell each other of progress by barriers in shared memory, which count what arrives.
// Nothing here waits until memory is seen by the whole device, as what releases for a cluster does: beside copies that
// are under way that takes 0.8 us.
// -D CLUSTER (CTAs of one; 1: there are none)
#pragma once
#include "runtime/tma.cuh"

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

// In two halves: this CTA's barriers are ready (after `barrier_init_done` and a __syncthreads()); so are those of all.
// By every thread.
DEVICE void cluster_arrive() {
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DEVICE void cluster_wait() {
  if (CLUSTER > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// An address in this CTA's shared memory, in that of another.
DEVICE u32 address_in(int rank, u32 address) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Values go to another CTA's shared memory, their bytes to its barrier. It must not leave before they have arrived.
DEVICE void send(u32 target, float a, float b, float c, float d, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   target),
               "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
               : "memory");
}
