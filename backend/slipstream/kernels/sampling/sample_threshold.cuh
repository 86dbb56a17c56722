// The least likely token that top-k or top-p keeps, without a sort: histograms narrow the range of logits in which it
// lies, until the few tokens that are left are compared each with each. Weights are integers, so no order of addition
// changes a result.
#pragma once
#include "sampling/sample_row.cuh"

constexpr int NUM_BINS = 1024;          // of a histogram
constexpr float BINS_PER_UNIT = 32.0f;  // of scaled logit, in the first one
constexpr int MAX_CANDIDATES = 256;     // so few tokens are compared each with each
constexpr float MASS_ONE = 0x1p42f;     // fixed point of exp(scaled - maximum), at most 1 each

struct Shared {
  Mail mail;
  float sums[Mail::SIZE];               // of the team's warps: exp(logit - the warp's highest)
  u64 bins[NUM_BINS];                   // this CTA's
  u64 totals[NUM_BINS];                 // the team's
  u64 warp_totals[WARPS];
  u64 weights[MAX_CANDIDATES];          // of the team's candidates
  u32 keys[MAX_CANDIDATES];
  float candidates[2][MAX_CANDIDATES];  // this CTA's, scaled; taking turns as the boxes do
  u32 marks[MARKS / 4];
  u64 before, limit;                    // of the search: what weighs more than its range, and what is looked for
  u32 found, num_candidates, listed;
  float floor;
  float highest, log_sum;  // logit; of exp(logit - highest)
};

// What a token weighs: 1, or its probability. The best tokens are kept until they weigh `top_k`, or the share `top_p`
// of all.
struct Weight {
  const Parameters& how;
  bool is_count;

  DEVICE u64 operator()(const Row& row, float scaled) const {
    return is_count ? 1 : u64(row.likelihood(scaled) * MASS_ONE);
  }
  DEVICE u64 limit(u64 total) const {  // the likeliest stays
    const u64 limit = is_count ? how.top_k : u64(ceil(double(how.top_p) * double(total)));
    return limit > 0 ? limit : 1;
  }
  // All tokens less likely than (1 - top_p) / size together weigh less than 1 - top_p: they need no bins.
  DEVICE int reach(const Row& row) const {
    const float bins = BINS_PER_UNIT * logf(row.size / fmaxf(1.0f - how.top_p, 1e-9f)) + 2.0f;
    return is_count ? NUM_BINS - 1 : min(NUM_BINS - 1, int(bins));
  }
};

// Tokens with scaled logits low .. high, of one bin of the first histogram if `bin` is set.
struct Range {
  float low, high;
  int bin = -1;
  int reach;  // the last bin of the first histogram, for all that is less likely than the others

  DEVICE int coarse(const Row& row, float scaled) const {
    return min(reach, int(fminf((row.maximum - scaled) * BINS_PER_UNIT, 1e6f)));
  }
  DEVICE bool has(const Row& row, float scaled) const {
    return scaled >= low && scaled <= high && (bin < 0 || coarse(row, scaled) == bin);
  }
  DEVICE int shift() const { return max(0, 22 - __clz(to_key(high) - to_key(low))); }  // so that key bins are enough

  // Go on in one bin. A coarse one is bounded with half a bin to spare for rounding.
  DEVICE void narrow(const Row& row, u32 found) {
    if (bin < 0) {
      bin = found;
      high = fminf(high, row.maximum - (bin - 0.5f) / BINS_PER_UNIT);
      if (bin < reach) low = fmaxf(low, row.maximum - (bin + 1.5f) / BINS_PER_UNIT);
    } else {
      const u32 width = 1u << shift(), top = to_key(high) - found * width;
      if (top - to_key(low) >= width) low = from_key(top - (width - 1));
      high = from_key(top);
    }
  }
};

// Add to 64 bits in shared memory, which has atomics of 32: the thread that makes a carry adds it.
DEVICE void add(u64* sum, u64 value) {
  u32* words = reinterpret_cast<u32*>(sum);
  u32 high = u32(value >> 32);
  if (const u32 low = u32(value)) high += atomicAdd(words, low) > ~low;
  if (high) atomicAdd(words + 1, high);
}

// The team's weights by bin, in `totals` of each member.
DEVICE void histogram(const Row& row, Shared& shared, const Weight& weight, const Range& range) {
  for (int i = threadIdx.x; i < NUM_BINS; i += THREADS) shared.bins[i] = 0;
  __syncthreads();
  const bool is_coarse = range.bin < 0;
  const int last = is_coarse ? range.reach : NUM_BINS - 1, shift = range.shift();
  const u32 top = to_key(range.high);
  // Most tokens are far below all bins but the last: their mass, less than 1 - top_p of all, may be summed in fp32.
  const bool has_far = is_coarse && !weight.is_count && range.low == -INFINITE && fabsf(row.maximum) < 0x1p16f;
  const float far = row.floor_of(row.maximum - (last + 1) / BINS_PER_UNIT);
  const float highest = shared.highest, rate = LOG2_E / row.temperature;
  float far_mass = 0.0f;
  u64 rest = 0;  // in the last bin
  row.visit(has_far ? -INFINITE : row.floor_of(range.low), [&](int, const float(&logits)[GROUP]) {
    if (has_far && highest_of(logits) < far) {
#pragma unroll
      for (int i = 0; i < GROUP; ++i) far_mass += exp2_fast((logits[i] - highest) * rate);
      return;
    }
#pragma unroll 1
    for (int i = 0; i < GROUP; ++i) {
      const float scaled = row.scaled(pick(logits, i));
      if (!range.has(row, scaled)) continue;
      const int bin = is_coarse ? range.coarse(row, scaled) : int((top - to_key(scaled)) >> shift);
      const u64 w = weight(row, scaled);
      if (bin < last)
        add(&shared.bins[bin], w);
      else
        rest += w;
    }
  });
  rest += u64(far_mass * MASS_ONE);
  rest = warp_reduce(rest, [](u64 a, u64 b) { return a + b; });
  if (threadIdx.x % 32 == 0) add(&shared.bins[last], rest);
  team_sync();
  for (int i = threadIdx.x; i < NUM_BINS / TEAM; i += THREADS) {
    const int bin = Team::rank() * (NUM_BINS / TEAM) + i;
    u64 total = 0;
#pragma unroll 4
    for (int r = 0; r < TEAM; ++r) total += load_at(&shared.bins[bin], r);
#pragma unroll 2
    for (int r = 0; r < TEAM; ++r) store_at(&shared.totals[bin], r, total);
  }
  team_sync();
}

// The bin in which the weight from above reaches the limit; `shared.before` becomes what is above it. A limit of 0 is
// made of the total.
DEVICE u32 find(Shared& shared, const Weight& weight) {
  constexpr int SHARE = NUM_BINS / THREADS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u64* bins = &shared.totals[SHARE * threadIdx.x];
  const u64 before = shared.before;
  u64 limit = shared.limit, above = before, sum = 0;
#pragma unroll
  for (int i = 0; i < SHARE; ++i) sum += bins[i];
  u64 upto = sum;  // by this lane, of this warp's
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u64 other = __shfl_up_sync(ALL_LANES, upto, distance);
    if (lane >= distance) upto += other;
  }
  if (lane == 31) shared.warp_totals[warp] = upto;
  __syncthreads();
  u64 total = 0;
  above += upto - sum;
  for (int i = 0; i < WARPS; ++i) {
    if (i < warp) above += shared.warp_totals[i];
    total += shared.warp_totals[i];
  }
  if (limit == 0) limit = weight.limit(total);
  limit = min(limit, before + total);  // where fewer are finite than top-k wants
#pragma unroll
  for (int i = 0; i < SHARE; ++i) {
    if (above < limit && limit <= above + bins[i]) {  // one thread's, once
      shared.found = SHARE * threadIdx.x + i;
      shared.before = above;
      shared.limit = limit;
    }
    above += bins[i];
  }
  __syncthreads();
  return shared.found;
}

// The scaled logits in a range, of the whole team, as keys and weights in every member. Their number; 0 if they are too
// many.
DEVICE u32 gather(const Row& row, Shared& shared, Team& team, const Weight& weight, const Range& range) {
  float* candidates = shared.candidates[team.turn & 1];
  if (threadIdx.x == 0) shared.num_candidates = 0;
  __syncthreads();
  row.visit(row.floor_of(range.low), [&](int, const float(&logits)[GROUP]) {
#pragma unroll 1
    for (int i = 0; i < GROUP; ++i) {
      const float scaled = row.scaled(pick(logits, i));
      if (!range.has(row, scaled)) continue;
      // The order of arrival varies; what is made of the candidates does not depend on it.
      const u32 place = atomicAdd(&shared.num_candidates, 1);
      if (place < MAX_CANDIDATES) candidates[place] = scaled;
    }
  });
  __syncthreads();
  const u64* numbers = team.share(shared.num_candidates);
  u32 number = 0;
#pragma unroll
  for (int r = 0; r < TEAM; ++r) number += u32(numbers[r]);
  if (number > MAX_CANDIDATES) return 0;
  if (threadIdx.x < number) {
    int owner = 0, place = threadIdx.x;
    for (; place >= int(numbers[owner]); ++owner) place -= int(numbers[owner]);
    const float scaled = load_at(&candidates[place], owner);
    shared.keys[threadIdx.x] = to_key(scaled);
    shared.weights[threadIdx.x] = weight(row, scaled);
  }
  __syncthreads();
  return number;
}

// The lowest of the candidates above which less than the limit weighs.
DEVICE float choose(Shared& shared, const Weight& weight, u32 number) {
  if (threadIdx.x == 0) shared.found = ~0u;
  __syncthreads();
  if (threadIdx.x < number) {
    const u32 key = shared.keys[threadIdx.x];
    u64 above = shared.before, total = above;
#pragma unroll 4
    for (int i = 0; i < number; ++i) {
      const u64 w = shared.weights[i];
      total += w;
      if (shared.keys[i] > key) above += w;
    }
    if (above < (shared.limit ? shared.limit : weight.limit(total))) atomicMin(&shared.found, key);
  }
  __syncthreads();
  return from_key(shared.found);
}

// The lowest scaled logit, `low` at least, such that the tokens above it, up to `high`, weigh less than the limit.
// `is_short` if not many tokens are expected from `low` on. Candidates that hold all of these are left in `listed`, to
// be used again.
DEVICE float threshold(const Row& row, Shared& shared, Team& team, const Weight& weight, float low, bool is_short,
                       float high = INFINITE) {
  __syncthreads();
  const u32 listed = shared.listed;
  if (threadIdx.x < listed) {
    const float scaled = from_key(shared.keys[threadIdx.x]);
    shared.weights[threadIdx.x] = scaled >= low ? weight(row, scaled) : 0;
  }
  if (threadIdx.x == 0) shared.before = shared.limit = 0;
  __syncthreads();
  if (listed) return choose(shared, weight, listed);
  Range range = {low, fminf(high, row.maximum), -1, weight.reach(row)};
  for (;; is_short = true) {
    if (is_short) {
      const u32 number = gather(row, shared, team, weight, range);
      if (number && threadIdx.x == 0) shared.listed = range.bin < 0 ? number : 0;
      if (number) return choose(shared, weight, number);
    }
    if (range.low == range.high) return range.low;
    histogram(row, shared, weight, range);
    range.narrow(row, find(shared, weight));
  }
}

// A logit that at least `number` tokens have or exceed: that of the number-th best of the warps' best tokens. They
// differ from each other, but for warps that have no token at all.
DEVICE float find_floor(Shared& shared, const u64* bests, u32 number) {
  if (threadIdx.x < Mail::SIZE) {
    const u64 best = bests[threadIdx.x];
    u32 above = 0;
#pragma unroll 8
    for (int i = 0; i < Mail::SIZE; ++i) above += bests[i] > best;
    if (above == number - 1) shared.floor = from_key(u32(best >> 32));
  }
  __syncthreads();
  return shared.floor;
}
