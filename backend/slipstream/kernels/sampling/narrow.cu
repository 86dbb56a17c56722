// The range of scaled logits that a row's filters keep, for `sample` behind it: rows that have none leave at once.
#include "sampling/sample_random.cuh"
#include "sampling/sample_threshold.cuh"

constexpr u32 XTC_QUAD = 0xffffffffu;  // of random words that no token has
constexpr float MAX_XTC = 0.5f;        // no two tokens are likelier

DEVICE bool is_asked(const Parameters& how) {
  if (how.result < 0) return false;
  return how.typical_p < 1.0f || how.top_n_sigma > 0.0f || how.epsilon_cutoff > 0.0f || how.eta_cutoff > 0.0f ||
         how.xtc_probability > 0.0f || how.dynatemp_range > 0.0f || how.top_p_decay < 1.0f;
}

// Top-p of this output: it decays with each, down to a least one.
DEVICE float decayed(const Parameters& how) {
  if (!(how.top_p_decay < 1.0f)) return how.top_p;
  const double top_p = double(how.top_p) * pow(double(how.top_p_decay), double(how.number));
  return float(fmax(top_p, double(how.top_p_min)));
}

// The sum of all threads of the team, added in one order. A barrier of the team.
DEVICE double sum_of(Team& team, double value) {
  const auto add = [](double a, double b) { return a + b; };
  u64* box = team.next_box();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  value = warp_reduce(value, add);
  if (lane < TEAM) store_at(&box[team.rank() * WARPS + warp], lane, u64(__double_as_longlong(value)));
  team_sync();
  value = 0.0;
#pragma unroll
  for (int i = lane % Mail::LANES; i < Mail::SIZE; i += Mail::LANES) value += __longlong_as_double(i64(box[i]));
  return warp_reduce<Mail::LANES>(value, add);
}

// What is kept so far.
struct Kept {
  const Row& row;
  Shared& shared;
  Team& team;
  float low = -INFINITE, high = INFINITE;  // scaled
  float top;                               // the highest scaled logit of them
  double mass, entropy;                    // of exp(scaled - top); of their probabilities

  // f(token id, scaled logit) of each token of this thread.
  template <class Visit>
  DEVICE void visit(const Visit& f) const {
    row.visit(row.floor_of(low), [&](int id, const float(&logits)[GROUP]) {
#pragma unroll 1
      for (int i = 0; i < GROUP; ++i) {
        const float scaled = row.scaled(pick(logits, i));
        if (scaled >= low && scaled <= high) f(id + i, scaled);
      }
    });
  }
  DEVICE void measure() {
    double sum = 0.0, spread = 0.0;
    visit([&](int, float scaled) {
      const double weight = expf(scaled - top);
      sum += weight;
      spread += weight * double(top - scaled);
    });
    mass = sum_of(team, sum);
    entropy = log(mass) + sum_of(team, spread) / mass;
  }
  // Leave out what is below a bound, but the likeliest.
  DEVICE void cut_below(double bound) { low = fmaxf(low, fminf(top, __double2float_ru(bound))); }
  DEVICE void cut_unlikely(double probability) { cut_below(double(top) + log(probability * mass)); }

  DEVICE void keep_top_k() {
    if (row.how.top_k <= 0 || row.how.top_k >= row.size) return;
    low = fmaxf(low, threshold(row, shared, team, {row.how, true}, low, false));
    reset();
  }
  DEVICE void keep_top_p() {
    if (!(row.how.top_p < 1.0f)) return;
    low = fmaxf(low, threshold(row, shared, team, {row.how, false}, low, false, high));
    reset();
  }
  // Candidates of one search are not those of the next.
  DEVICE void reset() const {
    __syncthreads();
    if (threadIdx.x == 0) shared.listed = 0;
  }

  // The least distance from `center` within which tokens weigh a share of all. Of its bits, three at a time are found
  // from the top, by what is nearer than each of seven distances. Weights are integers: any order has their sum.
  DEVICE float distance(float center, float share) const {
    constexpr int STEPS = 7;
    __syncthreads();
    for (int i = threadIdx.x; i < NUM_BINS; i += THREADS) shared.bins[i] = 0;
    __syncthreads();
    u64 sum = 0;
    visit([&](int, float scaled) { sum += u64(row.likelihood(scaled) * MASS_ONE); });
    u64* sums = shared.bins;  // each round has places of its own
    u64 limit = u64(ceil(double(share) * double(total_of(sums, sum))));
    limit = limit > 0 ? limit : 1;
    u32 found = 0;
#pragma unroll 1
    for (int shift = 28; shift >= 0; shift = shift == 1 ? 0 : shift - 3) {
      u64 nearer[STEPS] = {};
      visit([&](int, float scaled) {
        const u32 bits = __float_as_uint(fabsf(scaled - center));
        const u64 weight = u64(row.likelihood(scaled) * MASS_ONE);
#pragma unroll
        for (int i = 0; i < STEPS; ++i) nearer[i] += bits < found + (u32(i + 1) << shift) ? weight : 0;
      });
      u32 next = found;
#pragma unroll
      for (int i = 0; i < STEPS; ++i) put(sums + 1 + i, nearer[i]);
      team_sync();
#pragma unroll
      for (int i = 0; i < STEPS; ++i)
        if (total_at(sums + 1 + i) < limit) next = found + (u32(i + 1) << shift);
      found = next;
      sums += STEPS;
    }
    return __uint_as_float(found);
  }
  DEVICE static void put(u64* sum, u64 value) {
    value = warp_reduce(value, [](u64 a, u64 b) { return a + b; });
    if (threadIdx.x % 32 == 0) add(sum, value);
  }
  DEVICE static u64 total_at(const u64* sum) {
    u64 total = 0;
#pragma unroll 1
    for (int r = 0; r < TEAM; ++r) total += load_at(sum, r);
    return total;
  }
  DEVICE static u64 total_of(u64* place, u64 value) {
    put(place, value);
    team_sync();
    return total_at(place);
  }

  DEVICE void keep_typical() {
    if (!(row.how.typical_p < 1.0f)) return;
    measure();
    const float center = float(double(top) + log(mass) - entropy);
    const float farthest = distance(center, row.how.typical_p);
    u64 first = 0, last = 0;  // of what is kept
    visit([&](int, float scaled) {
      if (!(fabsf(scaled - center) <= farthest)) return;
      first = max(first, u64(~to_key(scaled)));
      last = max(last, u64(to_key(scaled)));
    });
    low = from_key(~u32(team.highest(first)));
    high = from_key(u32(team.highest(last)));
    top = high;
  }

  DEVICE void keep_likely() {
    const Parameters& how = row.how;
    if (how.min_p > 0.0f) cut_below(double(top) + log(double(how.min_p)));
    if (how.epsilon_cutoff > 0.0f) {
      measure();
      cut_unlikely(how.epsilon_cutoff);
    }
    if (how.eta_cutoff > 0.0f) {
      measure();
      cut_unlikely(fmin(double(how.eta_cutoff), sqrt(double(how.eta_cutoff)) * exp(-entropy)));
    }
  }

  // Leave out the tokens above the threshold but the least likely of them.
  DEVICE void leave_top_out() {
    const Parameters& how = row.how;
    if (!(how.xtc_probability > 0.0f) || how.xtc_threshold > MAX_XTC) return;
    u32 words[4];
    philox(words, XTC_QUAD, how.number, how.seed);
    if (!(uniform(words[0]) < how.xtc_probability)) return;
    measure();
    const double bound = double(top) + log(double(how.xtc_threshold) * mass);
    u64 least = 0;
    visit([&](int, float scaled) {
      if (double(scaled) >= bound) least = max(least, u64(~to_key(scaled)));
    });
    least = team.highest(least);
    if (least) high = from_key(~u32(least));
  }

  // The likeliest of them.
  DEVICE int likeliest() const {
    u64 best = 0;
    visit([&](int id, float scaled) { best = max(best, ranked(scaled, id)); });
    return int(~u32(team.highest(best)));
  }
};

// Sums over all finite logits of a row, by their distance from the highest.
struct Moments {
  double count = 0.0, sum = 0.0, squares = 0.0, mass = 0.0, spread = 0.0;

  DEVICE void see(const Row& row, Team& team, float highest) {
    row.visit(-INFINITE, [&](int, const float(&logits)[GROUP]) {
#pragma unroll 1
      for (int i = 0; i < GROUP; ++i) {
        const float logit = pick(logits, i);
        if (!(logit > -INFINITE)) continue;
        const double distance = double(highest) - double(logit), weight = expf(float(-distance));
        count += 1.0;
        sum += distance;
        squares += distance * distance;
        mass += weight;
        if (weight > 0.0) spread += weight * distance;
      }
    });
    count = sum_of(team, count);
    sum = sum_of(team, sum);
    squares = sum_of(team, squares);
    mass = sum_of(team, mass);
    spread = sum_of(team, spread);
  }
  DEVICE double deviation() const { return sqrt(fmax(0.0, squares / count - sum / count * (sum / count))); }
  DEVICE float heat(const Parameters& how) const {
    if (!(how.dynatemp_range > 0.0f) || count < 2.0) return how.temperature;
    const double share = (log(mass) + spread / mass) / log(count);
    const double base = how.temperature, reach = how.dynatemp_range, low = fmax(0.0, base - reach);
    return float(low + (base + reach - low) * pow(fmax(0.0, share), double(how.dynatemp_exponent)));
  }
};

// One row, as a member of its team.
DEVICE void narrow_row(Row row, Parameters& record, Shared& shared, Team& team) {
  const Parameters& how = row.how;
  row.begin = team.rank() * ((row.size + TEAM * GROUP - 1) / (TEAM * GROUP) * GROUP);
  row.end = min(row.size, row.begin + (row.size + TEAM * GROUP - 1) / (TEAM * GROUP) * GROUP);
  row.has_edits = how.first_edit < how.end_edit;
  row.marks = shared.marks;
  __syncthreads();  // what the row before had in shared memory has been read
  if (row.has_edits) row.mark();
  if (threadIdx.x == 0) shared.listed = 0;
  team_sync();  // all members are here: their mail may come

  u64 best = 0;
  row.visit(-INFINITE, [&](int id, const float(&values)[GROUP]) {
#pragma unroll
    for (int i = 0; i < GROUP; ++i) best = max(best, ranked(values[i], id + i));
  });
  best = team.highest(best);
  const u32 key = u32(best >> 32);
  if (key >= to_key(INFINITE) || key <= to_key(-INFINITE)) return;  // `sample` refuses it
  const float highest = from_key(key);
  if (threadIdx.x == 0) shared.highest = highest;
  Moments moments;
  if (how.dynatemp_range > 0.0f || how.top_n_sigma > 0.0f) moments.see(row, team, highest);
  row.temperature = moments.heat(how);
  row.inverse = __frcp_rn(row.temperature);
  row.maximum = __fdiv_rn(highest, row.temperature);
  Kept kept = {row, shared, team};
  kept.top = row.maximum;
  int likeliest = int(~u32(best));
  if (row.inverse < INFINITE && fabsf(row.maximum) < INFINITE) {  // else `sample` is greedy
    if (how.top_n_sigma > 0.0f)
      kept.low = fmaxf(-INFINITE, row.scaled(__double2float_ru(highest - how.top_n_sigma * moments.deviation())));
    kept.keep_top_k();
    kept.keep_typical();
    kept.keep_top_p();
    kept.keep_likely();
    kept.leave_top_out();
    likeliest = kept.likeliest();
  }
  if (team.rank() == 0 && threadIdx.x == 0) {
    record.likeliest = 1 + likeliest;
    record.heat = row.temperature;
    record.low = kept.low;
    record.high = kept.high;
  }
}

// Few teams look at the records of all rows, and share those that have filters: others cost no more than a look.
extern "C" __global__ void TEAM_DIMS __launch_bounds__(THREADS, 1)
    narrow(const T* logits, i64 stride, i64 num_tokens, i64 is_aligned, Parameters* rows, i64 num_rows,
           const Edit* edits, const u16* counts) {
  __shared__ Shared shared;
  __shared__ u32 asked[WARPS];  // a bit for each of THREADS rows
  __shared__ Parameters how;    // of a row
  wait_for_previous();
  start_next();
  Team team = {shared.mail};
  const int num_teams = gridDim.x / TEAM;
  int turn = blockIdx.x / TEAM;  // rows of other teams before this one's next
#pragma unroll 1
  for (int first = 0; first < num_rows; first += THREADS) {
    const int mine = first + threadIdx.x;
    const u32 bits = __ballot_sync(ALL_LANES, mine < num_rows && is_asked(rows[mine]));
    __syncthreads();
    if (threadIdx.x % 32 == 0) asked[threadIdx.x / 32] = bits;
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < THREADS; ++i) {
      if (asked[i / 32] == 0) i |= 31;
      if (!(asked[i / 32] >> i % 32 & 1) || turn-- > 0) continue;
      turn = num_teams - 1;
      __syncthreads();
      if (threadIdx.x == 0) how = rows[first + i], how.top_p = decayed(how);
      __syncthreads();
      const bool has_penalties = how.repetition != 1.0f || how.presence != 0.0f || how.frequency != 0.0f;
      Row row = {how, logits + (first + i) * stride, int(num_tokens)};
      row.is_aligned = is_aligned;
      row.counts = has_penalties ? counts + how.slot * num_tokens : nullptr;
      row.edits = edits;
      narrow_row(row, rows[first + i], shared, team);
    }
  }
}
