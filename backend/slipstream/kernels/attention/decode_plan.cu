// Makes the plan of decode attention (decode_plan.cuh) from the lengths. Every CTA cuts all tiles, and writes a share
// of the plan.
// -D TILE, WINDOWED, SINKS, SHARES
#include "attention/decode_plan.cuh"
#include "runtime/scan.cuh"

constexpr int THREADS = 512;

extern __shared__ int shared_ints[];

// All tiles of a step, by sequence.
struct Tiles {
  int* ends;  // tiles of one head of the sequences up to and with this one
  int* rows;
  int count;  // of sequences
  int num_heads;
  Window window;

  struct Place {
    int index, head;
    int tile;   // among those that are not left out
    int tiles;  // of the sequence
  };

  DEVICE int begin(int index) const { return index == 0 ? 0 : ends[index - 1]; }
  DEVICE int total() const { return begin(count) * num_heads; }

  DEVICE Place find(int at) const {
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (ends[middle] * num_heads <= at) low = middle + 1;
      else high = middle;
    }
    const int tiles = ends[low] - begin(low), offset = at - begin(low) * num_heads;
    return {low, offset / tiles, offset % tiles, tiles};
  }
  // Between two (sequence, head)s, the closest.
  DEVICE int nearest_border(int at) const {
    if (at >= total()) return total();
    const Place place = find(at);
    const int first = at - place.tile;
    return place.tile * 2 < place.tiles ? first : first + place.tiles;
  }
};

// Tiles of a head that are left out, and the number of tile `index` of the others.
DEVICE int num_left_out(const RowPrefix* prefixes, int row, int length, const Window& window) {
#if SHARES
  return length > 0 ? prefixes[row].first_tile : 0;
#else
  return window.num_left_out(length);
#endif
}
DEVICE int tile_at(const RowPrefix* prefixes, int row, int length, const Window& window, int index) {
#if SHARES
  return index + prefixes[row].first_tile;
#else
  return window.tile(index, length);
#endif
}

// Fills `tiles` with the sequences that have tokens.
DEVICE void collect(const int* lengths, const RowPrefix* prefixes, int num_rows, Tiles& tiles) {
  __shared__ u64 sums[THREADS / 32];
  u64 done = 0;  // sequences in the high half, tiles in the low
  for (int base = 0; base < num_rows; base += THREADS) {
    const int row = base + threadIdx.x;
    const int length = row < num_rows ? lengths[row] : 0;
    u64 here, all;
    const int own = (length + TILE - 1) / TILE - num_left_out(prefixes, row, length, tiles.window);
    scan((u64(length > 0) << 32) + own, sums, THREADS / 32, here, all);
    if (length > 0) {
      const int index = int((done + here) >> 32) - 1;
      tiles.ends[index] = int(u32(done + here));
      tiles.rows[index] = row;
    }
    done += all;
  }
  tiles.count = int(done >> 32);
  __syncthreads();
}

// What the plan may do.
struct Limits {
  int min_run;      // tiles that a CTA gets at least, if it gets any
  int whole_run;    // a CTA may get whole (sequence, head)s up to so many tiles ...
  int whole_more;   // ... or up to so many more than with equal runs ...
  int whole_share;  // ... or such a part of those more: what is left of memory's rate shortens a run that is alone
};

// Borders of the CTAs' runs: equal runs, or whole (sequence, head)s, which need no merging, where that hardly makes
// the longest run longer.
DEVICE void cut(const Tiles& tiles, int* cuts, int num_ctas, const Limits& limits) {
  __shared__ int longest;
  const int total = tiles.total();
  const int num_whole = max(1, min(num_ctas, tiles.count * tiles.num_heads));
  const int num_equal = max(1, min(num_ctas, (total + limits.min_run - 1) / limits.min_run));
  if (threadIdx.x == 0) longest = 0;
  for (int c = threadIdx.x; c <= num_ctas; c += THREADS)
    cuts[c] = tiles.nearest_border(int(i64(total) * min(c, num_whole) / num_whole));
  __syncthreads();
  for (int c = threadIdx.x; c < num_ctas; c += THREADS) atomicMax(&longest, cuts[c + 1] - cuts[c]);
  __syncthreads();
  const int equal = (total + num_equal - 1) / num_equal;
  const int more = max(limits.whole_more, equal / limits.whole_share);
  if (longest > max(limits.whole_run, equal + more))
    for (int c = threadIdx.x; c <= num_ctas; c += THREADS)
      cuts[c] = int(i64(total) * min(c, num_equal) / num_equal);
  __syncthreads();
}

// The CTA of a tile.
DEVICE int owner(const int* cuts, int num_ctas, int at) {
  int low = 0, high = num_ctas - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (cuts[middle] <= at) low = middle;
    else high = middle - 1;
  }
  return low;
}

DEVICE Sequence sequence_at(const Tiles& tiles, const int* lengths, const RowPrefix* prefixes, int index) {
  if (index >= tiles.count) return {0, 0};
  const int row = tiles.rows[index];
#if SHARES
  return {row, lengths[row], prefixes[row]};
#else
  return {row, lengths[row]};
#endif
}

DEVICE Start start_of(const Tiles& tiles, const int* lengths, const RowPrefix* prefixes, const int* cuts,
                      int cta, int worker, int num_workers) {
  const i64 run = cuts[cta + 1] - cuts[cta];
  const int begin = cuts[cta] + int(run * worker / num_workers);
  const int end = cuts[cta] + int(run * (worker + 1) / num_workers);
  if (begin == end) return {0, 0, 0, 0, {0, 0}, {0, 0}};
  const auto place = tiles.find(begin);
  return {place.index,
          place.head,
          tile_at(prefixes, tiles.rows[place.index], lengths[tiles.rows[place.index]], tiles.window,
                  place.tile),
          end - begin,
          sequence_at(tiles, lengths, prefixes, place.index),
          sequence_at(tiles, lengths, prefixes, place.index + 1)};
}

// Of the (sequence, head) of a tile.
DEVICE Share share_of(const Tiles& tiles, const int* cuts, int num_ctas, int at) {
  const auto place = tiles.find(at);
  const int first = at - place.tile;
  return {owner(cuts, num_ctas, first), owner(cuts, num_ctas, first + place.tiles - 1),
          tiles.rows[place.index], place.head};
}

DEVICE void write_shares(const Plan& plan, const Tiles& tiles, const int* cuts, int num_ctas, int cta) {
  Share before = {cta, cta, 0, 0}, after = before;
  if (cuts[cta] < cuts[cta + 1]) {
    const Share first = share_of(tiles, cuts, num_ctas, cuts[cta]);
    const Share last = share_of(tiles, cuts, num_ctas, cuts[cta + 1] - 1);
    if (first.first < cta) before = first;
    if (last.first == cta) after = last;
  }
  plan.shares[cta * 2] = before;
  plan.shares[cta * 2 + 1] = after;
  plan.arrivals[cta] = 0;
}

// Starts no kernel before it has ended: those that follow read the plan without waiting for it.
extern "C" __global__ void __launch_bounds__(THREADS)
    plan_decode(const int* lengths, int* memory, i64 num_rows, i64 num_heads, i64 num_ctas,
                i64 num_workers, i64 min_run, i64 whole_run, i64 whole_more, i64 whole_share, i64 window,
                i64 num_sinks) {
  const Plan plan(memory, int(num_ctas), int(num_workers));
  Tiles tiles = {shared_ints, shared_ints + num_rows, 0, int(num_heads), {int(window), int(num_sinks)}};
  int* cuts = shared_ints + 2 * num_rows;
  const RowPrefix* prefixes = plan.prefixes(int(num_rows)).rows;
  collect(lengths, prefixes, int(num_rows), tiles);
  cut(tiles, cuts, int(num_ctas), {int(min_run), int(whole_run), int(whole_more), int(whole_share)});

  const int first = threadIdx.x * gridDim.x + blockIdx.x, step = THREADS * gridDim.x;
  for (int i = first; i < num_ctas * num_workers; i += step)
    plan.starts[i] = start_of(tiles, lengths, prefixes, cuts, i / int(num_workers), i % int(num_workers),
                              int(num_workers));
  for (int i = first; i < num_ctas; i += step) write_shares(plan, tiles, cuts, int(num_ctas), i);
  for (int i = first; i < tiles.count + 2; i += step)
    plan.sequences[i] = sequence_at(tiles, lengths, prefixes, i);
  __threadfence();
}
