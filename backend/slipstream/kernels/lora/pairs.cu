// Groups of pairs of rows and experts that have one adapter and one expert, for `shrink` and `expand`: pairs follow each
// other in the order of experts, so a group is up to 16 of them that lie side by side, within an aligned 16. A group's
// place depends on what lies before it alone, which each CTA counts anew.
#include "lora/groups.cuh"
#include "runtime/scan.cuh"

constexpr int THREADS = 512;  // places of a CTA
constexpr int AT_ONCE = 4;     // that a thread looks up together
constexpr i64 EXPERT_WORDS = PLACE_PARTS * WORDS;

struct Pairs {
  const int *experts, *order;  // of pairs; the pair at each place
  const i64* addresses;        // of rows: where the terms of experts of a row's adapter are; 0: it has none
  int top_k;

  // Where the terms are that places have, `distance` apart; 0: none, or at `end` or behind.
  template <int N>
  DEVICE void find(i64 (&terms)[N], int first, int distance, int end) const {
    int pair[N], expert[N];
    i64 adapter[N];
#pragma unroll
    for (int i = 0; i < N; ++i)
      pair[i] = first + i * distance < end ? load_fresh<1>(order + first + i * distance).at[0] : -1;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      adapter[i] = pair[i] < 0 ? 0 : load_fresh<1>(addresses + pair[i] / top_k).at[0];
      expert[i] = pair[i] < 0 ? 0 : load_fresh<1>(experts + pair[i]).at[0];
    }
#pragma unroll
    for (int i = 0; i < N; ++i)
      terms[i] = adapter[i] == 0 ? 0 : adapter[i] + expert[i] * EXPERT_WORDS * i64(sizeof(i64));
  }
};

// Whether a group begins at a place; by whole warps.
DEVICE bool is_first(i64 own, int place) {
  const i64 before = i64(__shfl_up_sync(ALL_LANES, u64(own), 1));
  return own != 0 && (place % ROWS == 0 || own != before);
}

// Grid: x = THREADS places. Of each place: the row, itself, whether it has an adapter, the weight of its pair.
extern "C" __global__ void __launch_bounds__(THREADS)
    group_pairs(const int* experts, const int* order, const float* weights, const i64* addresses, i64 num_pairs, i64 top_k,
                i64* groups, int* rows, int* places, int* marks, float* factors) {
  __shared__ i64 terms[THREADS];
  __shared__ u64 sums[THREADS / 32];
  start_next();
  wait_for_previous();
  const Pairs pairs{experts, order, addresses, int(top_k)};
  const int thread = threadIdx.x, begin = blockIdx.x * THREADS, place = begin + thread;
  u64 before = 0, up_to_here, all;
  for (int first = thread; first < begin; first += AT_ONCE * THREADS) {
    i64 found[AT_ONCE];
    pairs.find(found, first, THREADS, begin);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) before += is_first(found[i], first + i * THREADS);
  }
  scan(before, sums, THREADS / 32, up_to_here, before);
  i64 found[1];
  pairs.find(found, place, THREADS, int(num_pairs));
  const i64 own = found[0];
  const bool begins = is_first(own, place);
  terms[thread] = own;
  scan(begins, sums, THREADS / 32, up_to_here, all);  // all threads have written their terms then
  if (begins) {
    int size = 1;
    while ((place + size) % ROWS != 0 && terms[thread + size] == own) ++size;
    store<2>(groups + 2 * (before + up_to_here - 1), {own, place | i64(size) << 32});
  }
  if (place < num_pairs) {
    const int pair = load_fresh<1>(order + place).at[0];
    rows[place] = pair / int(top_k);
    places[place] = place;
    marks[place] = own != 0;
    factors[place] = load_fresh<1>(weights + pair).at[0];
  }
  if (blockIdx.x + 1 < gridDim.x) return;
  for (i64 behind = i64(before + all) + thread; behind < num_pairs; behind += THREADS) store<2>(groups + 2 * behind, {0, 0});
}
