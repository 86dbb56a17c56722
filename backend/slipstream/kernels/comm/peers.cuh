// Memory of all ranks' GPUs as one kernel sees it, and how CTAs of different GPUs wait for each other.
// -D RANKS: the most ranks, 2, 4 or 8.
//
// Every rank has one allocation of the same layout, which all others have mapped: flags, then packs, then rooms. All
// ranks make the same calls in the same order. A call has GRID CTAs whatever its size; CTA b of a rank meets CTA b of
// the others. Each counts its calls, its epochs, in its own GPU's memory, so CUDA graphs can repeat a call, and all CTAs
// have the same count. Odd and even epochs have buffers of their own. A call ends on a rank only after it has heard from
// every rank in it, and each is in it only after it has ended the call before. So a writer to a buffer in epoch e
// knows that all have ended epoch e - 2, which read the buffer last: no second meeting is needed.
#pragma once
#include "runtime/common.cuh"

constexpr int GRID = 128, THREADS = 512, MAX_RANKS = 8;
constexpr i64 PACKS = 1 << 20;                        // of 16 bytes, of a turn: all ranks have as many
constexpr i64 ROOM = 8 << 20;                         // bytes of a rank and turn
constexpr i64 PACKS_AT = 2 * GRID * MAX_RANKS * 4;    // behind the flags
constexpr i64 ROOMS_AT = PACKS_AT + 2 * PACKS * 16;

struct Peers {
  u64 bases[RANKS];  // of the allocations, by rank
  int rank, size;
  u32* epochs;       // [GRID], this GPU's
  const i64* limit;  // ns that a wait may take
  volatile u32* late;  // the host's memory: 1 + the rank that did not come, in which epoch
};
#define PEERS \
  u64 base0, u64 base1, u64 base2, u64 base3, u64 base4, u64 base5, u64 base6, u64 base7, i64 rank, i64 size, \
      u32 *epochs, const i64 *limit, u32 *late
#define EVERY_BASE {base0, base1, base2, base3, base4, base5, base6, base7}

// Indices are constants in unrolled loops alone: an array in registers.
DEVICE Peers peers_of(const u64 (&bases)[MAX_RANKS], i64 rank, i64 size, u32* epochs, const i64* limit, u32* late) {
  Peers made;
#pragma unroll
  for (int r = 0; r < RANKS; ++r) made.bases[r] = bases[r];
  made.rank = int(rank);
  made.size = int(size);
  made.epochs = epochs;
  made.limit = limit;
  made.late = late;
  return made;
}
DEVICE u64 base_of(const Peers& peers, int rank) {
  u64 found = 0;
#pragma unroll
  for (int r = 0; r < RANKS; ++r) found = r == rank ? peers.bases[r] : found;
  return found;
}

// 0 is what memory has at start, so it is left out; with it 1, so that turns go on by turns.
DEVICE u32 epoch_behind(u32 epoch) { return epoch + 1 == 0 ? 2 : epoch + 1; }
// The epoch of this call, for all threads of a CTA, which all call it first.
DEVICE u32 next_epoch(const Peers& peers) {
  const u32 epoch = epoch_behind(load_fresh<1>(peers.epochs + blockIdx.x).at[0]);
  __syncthreads();
  if (threadIdx.x == 0) peers.epochs[blockIdx.x] = epoch;
  return epoch;
}

DEVICE u64 nanoseconds() {
  u64 result;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(result));
  return result;
}
// A wait with an end: the host reads which rank is late, behind the error of the kernel.
struct Patience {
  u64 begin = 0;
  u32 spins = 0;
  DEVICE void spin(const Peers& peers, int rank, u32 epoch) {
    if (++spins % 1024 != 0) return;
    const u64 now = nanoseconds();
    begin = begin == 0 ? now : begin;
    if (i64(now - begin) <= *reinterpret_cast<const volatile i64*>(peers.limit)) return;
    peers.late[1] = epoch;
    peers.late[0] = 1 + u32(rank);
    __threadfence_system();
    asm volatile("trap;");
  }
};

// ---- packs: 16 bytes, whose halves arrive whole; a half of all ones has not come yet, so data needs no flag ----

constexpr u64 EMPTY = ~0ull;

DEVICE ulonglong2* packs_of(u64 base, u32 epoch, int from, int size) {
  return reinterpret_cast<ulonglong2*>(base + PACKS_AT) + (i64(epoch % 2) * size + from) * (PACKS / size);
}
DEVICE void write_pack(ulonglong2* pack, u64 low, u64 high) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(pack), "l"(low), "l"(high) : "memory");
}
// All ones are NaNs in every type; without their signs they are NaNs, too.
DEVICE u64 as_data(u64 half) { return half == EMPTY ? 0x7fff7fff7fff7fffull : half; }
// Taking a pack empties it: the next in this buffer comes when this call has ended on this rank.
DEVICE ulonglong2 receive_pack(const Peers& peers, ulonglong2* pack, int from, u32 epoch) {
  Patience patience;
  ulonglong2 found;
  while (true) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(found.x), "=l"(found.y) : "l"(pack) : "memory");
    if (found.x != EMPTY && found.y != EMPTY) break;
    patience.spin(peers, from, epoch);
  }
  write_pack(pack, EMPTY, EMPTY);
  return found;
}
DEVICE void send_to_all(const Peers& peers, i64 at, const ulonglong2& data, u32 epoch) {
#pragma unroll
  for (int r = 0; r < RANKS; ++r)
    if (r < peers.size && r != peers.rank)
      write_pack(packs_of(peers.bases[r], epoch, peers.rank, peers.size) + at, as_data(data.x), as_data(data.y));
}

// ---- rooms: large parts, which a flag follows ----

DEVICE u64 room_of(u64 base, u32 epoch, int which) { return base + ROOMS_AT + (i64(epoch % 2) * 2 + which) * ROOM; }
DEVICE u32* flag_of(u64 base, int phase, int from) {
  return reinterpret_cast<u32*>(base) + (phase * GRID + int(blockIdx.x)) * MAX_RANKS + from;
}
// What the CTA's threads wrote before is visible behind it to CTA b of every rank. A peer is in this call or in the next,
// as that one ends only after it has heard from all. A flag may be as old as the last call that met, by any number of
// calls without a meeting: so a flag counts if it is of one of these two calls, not if it is the larger number.
DEVICE void meet(const Peers& peers, int phase, u32 epoch) {
  __syncthreads();
  const int other = int(threadIdx.x);
  if (other < peers.size && other != peers.rank) {
    u32* to = flag_of(base_of(peers, other), phase, peers.rank);
    const u32* own = flag_of(base_of(peers, peers.rank), phase, other);
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(epoch) : "memory");
    Patience patience;
    u32 found;
    while (true) {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(own) : "memory");
      if (found == epoch || found == epoch_behind(epoch)) break;
      patience.spin(peers, other, epoch);
    }
  }
  __syncthreads();
}
// 16 bytes of a room of any rank, which this call's meeting made visible.
template <class Value>
DEVICE Value load_room(u64 address) {
  static_assert(sizeof(Value) == 16, "one access");
  Value result;
  u64* to = reinterpret_cast<u64*>(&result);
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(to[0]), "=l"(to[1]) : "l"(address) : "memory");
  return result;
}
DEVICE u64 load_room_word(u64 address) {
  u64 result;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(result) : "l"(address) : "memory");
  return result;
}
