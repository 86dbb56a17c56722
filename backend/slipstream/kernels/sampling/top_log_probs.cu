// The likeliest tokens of a row of logits, and value and rank of one token: a CTA for each ask, two reads of the row.
#include "sampling/sample_row.cuh"

struct Ask {  // ASK in top_log_probs.py
  int row, num_top, mode, token;
};
constexpr int PROCESSED = 1, LOGITS = 2;  // `TopMode` of core/batch.py
constexpr int SUBSETS = 128;              // of the row's tokens, no fewer than an ask can want
constexpr int LANES = THREADS / SUBSETS;  // threads of a subset
constexpr int CAPACITY = 4096;
constexpr int AHEAD = 8;  // groups

struct Shared {
  u32 marks[MARKS / 4];
  u64 bests[SUBSETS];  // of each subset the best token, as `ranked`
  u64 found[CAPACITY];
  float sums[WARPS];
  u64 threshold, best;
  int num_found, num_better;
};

struct Results {
  int* ids;
  float* values;
};

// A row as an ask sees it: edited or not, the given token as it was before it was counted.
struct Seen {
  Row row;
  u32 token;
  float own;       // its logit
  bool is_scaled;  // by the temperature
  bool has_logits;
  float highest, log_sum;  // of the scaled logits

  // f(id, logit) of this thread's tokens.
  template <class Visit>
  DEVICE void visit_slowly(const Visit& f) const {
    row.visit(-INFINITE, [&](int id, const float(&logits)[GROUP]) { visit_group(id, logits, f); });
  }
  // The same, with several loads under way where nothing is edited.
  template <class Visit>
  DEVICE void visit(const Visit& f) const {
    if (row.is_edited() || !row.is_aligned) return visit_slowly(f);
#pragma unroll 1
    for (int first = GROUP * threadIdx.x; first < row.end; first += AHEAD * THREADS * GROUP) {
      Pack<T, GROUP> packs[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i)
        packs[i] = load<GROUP>(row.logits + min(first + i * THREADS * GROUP, row.size - GROUP));
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int id = first + i * THREADS * GROUP;
        if (id >= row.end) break;
        float logits[GROUP];
        Row::to_floats(logits, packs[i]);
        visit_group(id, logits, f);
      }
    }
  }
  template <class Visit>
  DEVICE void visit_group(int id, const float (&logits)[GROUP], const Visit& f) const {
#pragma unroll
    for (int i = 0; i < GROUP; ++i)
      if (id + i < row.size) f(u32(id + i), u32(id + i) == token ? own : logits[i]);
  }
  DEVICE float scaled(float logit) const { return !is_scaled || logit == -INFINITE ? logit : row.scaled(logit); }
  DEVICE float value(float logit) const { return has_logits ? scaled(logit) : scaled(logit) - highest - log_sum; }
  DEVICE void put(const Results& out, int place, u64 key) const {
    out.ids[place] = int(~u32(key));
    out.values[place] = value(from_key(u32(key >> 32)));
  }
};

// What the last of the `num_top` best of SUBSETS tokens is: so many tokens of the row are no worse.
DEVICE void find_threshold(Shared& shared, int num_top) {
  if (threadIdx.x < SUBSETS) {
    const u64 own = shared.bests[threadIdx.x];
    int rank = 0;
#pragma unroll 8
    for (int i = 0; i < SUBSETS; ++i) rank += shared.bests[i] > own || (shared.bests[i] == own && i < threadIdx.x);
    if (rank == 0) shared.best = own;
    if (rank == num_top - 1) shared.threshold = own;
  }
}

// The best tokens one after another, each by a read of the row: where so many are alike that they fill no list.
DEVICE void select_slowly(const Seen& seen, Shared& shared, int num_top, const Results& out) {
  u64 last = ~0ull;
#pragma unroll 1
  for (int place = 0; place < num_top; ++place) {
    u64 best = 0;
    seen.visit_slowly([&](u32 id, float logit) {
      const u64 key = ranked(logit, id);
      if (key < last) best = max(best, key);
    });
    best = warp_reduce(best, higher);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared.bests[threadIdx.x / 32] = best;
    __syncthreads();
    for (int i = 0; i < WARPS; ++i) best = max(best, shared.bests[i]);
    last = best;
    if (threadIdx.x == 0) seen.put(out, place, best);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    top_log_probs(const T* logits, i64 stride, i64 num_tokens, i64 is_aligned, const Ask* asks, const Parameters* rows,
                  const Edit* edits, const u16* counts, const i64* sampled, int* top_ids, float* top_values,
                  i64 row_size, int* ranks, float* values) {
  __shared__ Shared shared;
  const Ask ask = asks[blockIdx.x];
  const bool is_processed = ask.mode & PROCESSED;
  // Of a row that is read as it is nothing else is: its parameters need not be there.
  Seen seen = {{rows[is_processed ? ask.row : 0], logits + ask.row * stride, int(num_tokens), 0, int(num_tokens)}};
  Row& row = seen.row;
  const Parameters& how = row.how;
  row.is_aligned = is_aligned;
  seen.has_logits = ask.mode & LOGITS;
  seen.token = ask.token >= 0 ? ask.token : u32(sampled[rows[ask.row].result]);
  row.edits = edits;
  row.marks = shared.marks;
  if (is_processed) {
    const bool has_penalties = how.repetition != 1.0f || how.presence != 0.0f || how.frequency != 0.0f;
    row.counts = has_penalties ? counts + how.slot * num_tokens : nullptr;
    row.has_edits = how.first_edit < how.end_edit;
    row.temperature = how.temperature;
    row.inverse = __frcp_rn(row.temperature);
  }
  if (row.has_edits) row.mark();
  if (threadIdx.x == 0) shared.threshold = 0, shared.num_found = shared.num_better = 0;
  seen.own = row.logit(seen.token);
  if (row.counts) {  // its own count came after it was sampled
    const u32 state = row.counts[seen.token];
    const int edit = row.find_edit(seen.token);
    const bool has_edit = edit < how.end_edit && edits[edit].token_id == seen.token;
    seen.own = row.edited(to_float(row.logits[seen.token]), state & MAX_COUNT ? state - 1 : state,
                          has_edit ? edits[edit].addend : 0.0f);
  }

  u64 best = 0;
  seen.visit([&](u32 id, float logit) { best = max(best, ranked(logit, id)); });
  best = warp_reduce<LANES>(best, higher);
  if (threadIdx.x % LANES == 0) shared.bests[threadIdx.x / LANES] = best;
  __syncthreads();
  find_threshold(shared, ask.num_top);
  __syncthreads();
  const float highest = from_key(u32(shared.best >> 32));
  seen.is_scaled = is_processed && row.inverse < INFINITE && fabsf(__fdiv_rn(highest, row.temperature)) < INFINITE;
  seen.highest = seen.scaled(highest);

  const u64 own = ranked(seen.own, seen.token), threshold = ask.num_top > 0 ? shared.threshold : ~0ull;
  float sum = 0.0f;
  int num_better = 0;
  seen.visit([&](u32 id, float logit) {
    const u64 key = ranked(logit, id);
    if (logit != -INFINITE) sum += exp_fast(seen.scaled(logit) - seen.highest);
    num_better += key > own;
    if (key < threshold) return;
    const int place = atomicAdd(&shared.num_found, 1);
    if (place < CAPACITY) shared.found[place] = key;
  });
  sum = warp_reduce(sum, plus);
  num_better = warp_reduce(num_better, [](int a, int b) { return a + b; });
  if (threadIdx.x % 32 == 0) {
    shared.sums[threadIdx.x / 32] = sum;
    atomicAdd(&shared.num_better, num_better);
  }
  __syncthreads();
  sum = 0.0f;
  for (int i = 0; i < WARPS; ++i) sum += shared.sums[i];
  seen.log_sum = logf(sum);

  const Results out = {top_ids + blockIdx.x * row_size, top_values + blockIdx.x * row_size};
  const int num_found = shared.num_found, num_top = min(ask.num_top, row.size);
  if (num_found > CAPACITY) {
    select_slowly(seen, shared, num_top, out);
  } else {
#pragma unroll 1
    for (int mine = threadIdx.x; mine < num_found; mine += THREADS) {
      const u64 key = shared.found[mine];
      int place = 0;
      for (int i = 0; i < num_found && place < num_top; ++i) place += shared.found[i] > key;
      if (place < num_top) seen.put(out, place, key);
    }
  }
  if (threadIdx.x == 0) {
    ranks[blockIdx.x] = 1 + shared.num_better;
    values[blockIdx.x] = seen.value(seen.own);
  }
}
