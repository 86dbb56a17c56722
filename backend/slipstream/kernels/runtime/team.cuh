// A team: the TEAM CTAs that work on one row of logits, a cluster from sm_90 on, else a single CTA. A row has the
// same team whatever else is in the batch, and every sum below has a fixed order: so has every result.
#pragma once
#include "runtime/common.cuh"

constexpr int THREADS = 512;  // of a CTA
constexpr int WARPS = THREADS / 32;
#if __CUDA_ARCH__ >= 900
constexpr int TEAM = 8;
#define TEAM_DIMS __cluster_dims__(8, 1, 1)
#else
constexpr int TEAM = 1;
#define TEAM_DIMS
#endif

// Everything of the team that comes before is done and seen by the whole team after. In two halves, for work between.
DEVICE void team_arrive() {
  __syncwarp();
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
// The first half where nothing comes before that others see: without a wait for memory.
DEVICE void team_arrive_early() {
  __syncwarp();
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
DEVICE void team_wait() {
  __syncwarp();
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}
DEVICE void team_sync() {
  team_arrive();
  team_wait();
}

// What member `rank` has at this place of its shared memory.
DEVICE u32 address_at(const void* place, int rank) {
  u32 result = shared_address(place);
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(result) : "r"(rank));
#endif
  return result;
}
DEVICE u64 load_at(const u64* place, int rank) {
  u64 value;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(address_at(place, rank)) : "memory");
#else
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(value) : "r"(address_at(place, rank)) : "memory");
#endif
  return value;
}
DEVICE float load_at(const float* place, int rank) {
  float value;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address_at(place, rank)) : "memory");
#else
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address_at(place, rank)) : "memory");
#endif
  return value;
}
DEVICE void store_at(u64* place, int rank, u64 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address_at(place, rank)), "l"(value) : "memory");
#else
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(address_at(place, rank)), "l"(value) : "memory");
#endif
}

DEVICE void store_at(float* place, int rank, float value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address_at(place, rank)), "f"(value) : "memory");
#else
  *place = value;
#endif
}

// Reduce over a warp, or over each LANES lanes of it; every lane gets the result.
template <int LANES = 32, class Value, class Combine>
DEVICE Value warp_reduce(Value value, const Combine& f) {
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) value = f(value, __shfl_xor_sync(ALL_LANES, value, mask));
  return value;
}
DEVICE u64 higher(u64 a, u64 b) { return a > b ? a : b; }
DEVICE float plus(float a, float b) { return a + b; }

// Letters between the warps of a team. Two boxes take turns: a CTA a barrier ahead writes to the other one, and
// none is two ahead.
struct Mail {
  static constexpr int SIZE = TEAM * WARPS;
  static constexpr int LANES = SIZE < 32 ? SIZE : 32;  // that read different letters
  u64 boxes[2][SIZE];
};

struct Team {
  Mail& mail;
  int turn = 0;

  DEVICE static int rank() { return blockIdx.x % TEAM; }
  DEVICE u64* next_box() { return mail.boxes[turn++ & 1]; }

  // The highest value of all threads, in every thread. A barrier of the team.
  DEVICE u64 highest(u64 value) {
    u64* box = next_box();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    value = warp_reduce(value, higher);
    if (lane < TEAM) store_at(&box[rank() * WARPS + warp], lane, value);
    team_sync();
    return highest_of(box);
  }
  DEVICE static u64 highest_of(const u64* box) {
    u64 value = 0;
#pragma unroll
    for (int i = 0; i < Mail::SIZE; i += Mail::LANES) value = higher(value, box[i + threadIdx.x % Mail::LANES]);
    return warp_reduce<Mail::LANES>(value, higher);
  }

  // One value of every CTA, given by its first TEAM threads, in order of rank. A barrier of the team.
  DEVICE const u64* share(u64 value) {
    u64* box = next_box();
    if (threadIdx.x < TEAM) store_at(&box[rank()], threadIdx.x, value);
    team_sync();
    return box;
  }
};
