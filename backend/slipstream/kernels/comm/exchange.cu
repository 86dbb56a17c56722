// Words of ranks side by side on those that want them. -D RANKS (the most)
#include "comm/peers.cuh"

// `out [rows, count, width]` on a rank takes `x [rows, width]` of `count` ranks from `first` on: words of 8 bytes, at
// most ROOM bytes. A count of 0 takes nothing. `x` and `out` may be the same.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    exchange(PEERS, const u64* x, u64* out, i64 num_words, i64 width, i64 first, i64 count) {
  start_next();
  wait_for_previous();
  const Peers peers = peers_of(EVERY_BASE, rank, size, epochs, limit, late);
  const u32 epoch = next_epoch(peers);
  const i64 slice = (num_words + GRID - 1) / GRID, begin = blockIdx.x * slice;
  const i64 end = begin + slice < num_words ? begin + slice : num_words;
  u64* given = reinterpret_cast<u64*>(room_of(base_of(peers, peers.rank), epoch, 0));
  for (i64 at = begin + threadIdx.x; at < end; at += THREADS) given[at] = load_fresh<1>(x + at).at[0];
  meet(peers, 0, epoch);
#pragma unroll
  for (int r = 0; r < RANKS; ++r)
    if (r >= first && r < first + count) {
      const u64 from = room_of(peers.bases[r], epoch, 0);
      for (i64 at = begin + threadIdx.x; at < end; at += THREADS) {
        const i64 row = at / width;
        out[(row * count + r - first) * width + at % width] = load_room_word(from + at * 8);
      }
    }
}
