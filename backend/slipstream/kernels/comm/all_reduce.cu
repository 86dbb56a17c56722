// Sums over ranks in the order of ranks, in fp32, rounded once; added to a residual sum before that; with its norm.
// -D ELEMENT (T), RANKS (the most)
#include "comm/peers.cuh"

constexpr int OF_PACK = int(16 / sizeof(T));
constexpr int MAX_PACKS = 4;  // of a row and thread
using Values = Pack<T, OF_PACK>;

template <int N>
struct Sums {
  float at[N];
};
template <int N>
DEVICE Sums<N> widened(const Pack<T, N>& pack) {
  Sums<N> made;
#pragma unroll
  for (int j = 0; j < N; ++j) made.at[j] = to_float(pack.at[j]);
  return made;
}
template <int N>
DEVICE void add(Sums<N>& sums, const Pack<T, N>& pack) {
#pragma unroll
  for (int j = 0; j < N; ++j) sums.at[j] += to_float(pack.at[j]);
}
template <int N>
DEVICE Pack<T, N> rounded(const Sums<N>& sums) {
  Pack<T, N> made;
#pragma unroll
  for (int j = 0; j < N; ++j) made.at[j] = from_float<T>(sums.at[j]);
  return made;
}

DEVICE const ulonglong2& bits_of(const Values& values) { return *reinterpret_cast<const ulonglong2*>(&values); }
DEVICE Values values_of(const ulonglong2& bits) { return *reinterpret_cast<const Values*>(&bits); }

// The sum of a pack of all ranks; `own` is this one's.
DEVICE Sums<OF_PACK> sum_pack(const Peers& peers, i64 at, const Values& own, u32 epoch) {
  Sums<OF_PACK> total;
#pragma unroll
  for (int r = 0; r < RANKS; ++r)
    if (r < peers.size) {
      Values part = own;
      if (r != peers.rank)
        part = values_of(
            receive_pack(peers, packs_of(base_of(peers, peers.rank), epoch, r, peers.size) + at, r, epoch));
      if (r == 0)
        total = widened<OF_PACK>(part);
      else
        add(total, part);
    }
  return total;
}

// residual: 0, or what is added, in place of `out`. At most PACKS / size packs.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    one_shot(PEERS, const T* x, const T* residual, T* out, i64 num_packs) {
  start_next();
  wait_for_previous();
  const Peers peers = peers_of(EVERY_BASE, rank, size, epochs, limit, late);
  const u32 epoch = next_epoch(peers);
  const i64 first = i64(blockIdx.x) * THREADS + threadIdx.x, distance = i64(GRID) * THREADS;
  if (first >= num_packs) return;
  Values own = load_fresh<OF_PACK>(x + first * OF_PACK);
  send_to_all(peers, first, bits_of(own), epoch);
  for (i64 at = first + distance; at < num_packs; at += distance)
    send_to_all(peers, at, bits_of(load_fresh<OF_PACK>(x + at * OF_PACK)), epoch);
  for (i64 at = first; at < num_packs; at += distance) {
    if (at != first) own = load_fresh<OF_PACK>(x + at * OF_PACK);
    Values before;
    if (residual) before = load_fresh<OF_PACK>(residual + at * OF_PACK);
    Sums<OF_PACK> total = sum_pack(peers, at, own, epoch);
    if (residual) add(total, before);
    store<OF_PACK>(out + at * OF_PACK, rounded(total));
  }
}

DEVICE float cta_sum(float value) {
  __shared__ float sums[THREADS / 32];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; ++warp) total += sums[warp];
  return total;
}

// residual += the sum, and out = its RMS norm with weights `shift + weight`; a CTA a row, at most GRID rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    one_shot_norm(PEERS, const T* x, T* residual, const T* weight, T* out, i64 num_rows, i64 width, float eps,
                  float shift) {
  start_next();
  const Peers peers = peers_of(EVERY_BASE, rank, size, epochs, limit, late);
  const int packs = int(width) / OF_PACK;
  wait_for_previous();
  const u32 epoch = next_epoch(peers);
  const i64 first = i64(blockIdx.x) * packs;
  if (blockIdx.x >= num_rows) return;
  Values own[MAX_PACKS];
#pragma unroll
  for (int i = 0; i < MAX_PACKS; ++i) {
    const int at = threadIdx.x + i * THREADS;
    if (at < packs) {
      own[i] = load_fresh<OF_PACK>(x + (first + at) * OF_PACK);
      send_to_all(peers, first + at, bits_of(own[i]), epoch);
    }
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < MAX_PACKS; ++i) {
    const int at = threadIdx.x + i * THREADS;
    if (at < packs) {
      const Values before = load_fresh<OF_PACK>(residual + (first + at) * OF_PACK);
      Sums<OF_PACK> total = sum_pack(peers, first + at, own[i], epoch);
      add(total, before);
      own[i] = rounded(total);  // the norm is that of the rounded sum
      store<OF_PACK>(residual + (first + at) * OF_PACK, own[i]);
#pragma unroll
      for (int j = 0; j < OF_PACK; ++j) squares = fmaf(to_float(own[i].at[j]), to_float(own[i].at[j]), squares);
    }
  }
  const float scale = 1.0f / sqrtf(cta_sum(squares) / float(width) + eps);
#pragma unroll
  for (int i = 0; i < MAX_PACKS; ++i) {
    const int at = threadIdx.x + i * THREADS;
    if (at < packs) {
      const Values factor = load<OF_PACK>(weight + at * OF_PACK);
      Values made;
#pragma unroll
      for (int j = 0; j < OF_PACK; ++j)
        made.at[j] = from_float<T>(to_float(own[i].at[j]) * scale * (shift + to_float(factor.at[j])));
      store<OF_PACK>(out + (first + at) * OF_PACK, made);
    }
  }
}

// Each rank sums a part of every CTA's slice, then takes the others' sums. At most ROOM bytes.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    two_shot(PEERS, const T* x, const T* residual, T* out, i64 num_packs) {
  start_next();
  wait_for_previous();
  const Peers peers = peers_of(EVERY_BASE, rank, size, epochs, limit, late);
  const u32 epoch = next_epoch(peers);
  const i64 part = (num_packs + i64(GRID) * size - 1) / (i64(GRID) * size);
  const i64 begin = blockIdx.x * part * size;
  const i64 end = begin + part * size < num_packs ? begin + part * size : num_packs;
  const i64 own_begin = begin + rank * part;
  const i64 own_end = own_begin + part < num_packs ? own_begin + part : num_packs;
  const u64 mine = base_of(peers, peers.rank), given = room_of(mine, epoch, 0), made = room_of(mine, epoch, 1);
  for (i64 at = begin + threadIdx.x; at < end; at += THREADS)
    if (at < own_begin || at >= own_end)
      store<OF_PACK>(reinterpret_cast<T*>(given + at * 16), load_fresh<OF_PACK>(x + at * OF_PACK));
  meet(peers, 0, epoch);
  for (i64 at = own_begin + threadIdx.x; at < own_end; at += THREADS) {
    Sums<OF_PACK> total;
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      if (r < peers.size) {
        const auto pack = r == peers.rank
                              ? load_fresh<OF_PACK>(x + at * OF_PACK)
                              : load_room<Pack<T, OF_PACK>>(room_of(peers.bases[r], epoch, 0) + at * 16);
        if (r == 0)
          total = widened<OF_PACK>(pack);
        else
          add(total, pack);
      }
    if (residual) add(total, load_fresh<OF_PACK>(residual + at * OF_PACK));
    const Pack<T, OF_PACK> sum = rounded(total);
    store<OF_PACK>(reinterpret_cast<T*>(made + at * 16), sum);
    store<OF_PACK>(out + at * OF_PACK, sum);
  }
  meet(peers, 1, epoch);
#pragma unroll
  for (int r = 0; r < RANKS; ++r)
    if (r < peers.size && r != peers.rank) {
      const u64 from = room_of(peers.bases[r], epoch, 1);
      const i64 first = begin + r * part, last = first + part < num_packs ? first + part : num_packs;
      for (i64 at = first + threadIdx.x; at < last; at += THREADS)
        store<OF_PACK>(out + at * OF_PACK, load_room<Pack<T, OF_PACK>>(from + at * 16));
    }
}
