// A team of CTAs turns one row of logits into a token.
#include "sampling/sample_random.cuh"
#include "sampling/sample_threshold.cuh"

constexpr u8 NOT_FINITE = 0, SAMPLED = 1;  // `Outcome` of core/batch.py
constexpr float MAX_GUMBEL = 16.7f;  // more than any of 23 bits, by more than rounding

DEVICE float gumbel(u32 bits) { return -logf(-logf(uniform(bits))); }

// The lowest scaled logit that top-k, and then top-p of what it keeps, leave; or that `narrow` found.
DEVICE float filter(const Row& row, Shared& shared, Team& team) {
  if (row.how.likeliest) return row.how.low;
  const int top_k = row.how.top_k;
  float low = -INFINITE;
  if (top_k > 0 && top_k <= Mail::SIZE)
    low = __fdiv_rn(find_floor(shared, shared.mail.boxes[0], top_k), row.temperature);
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
    const bool is_count = turn == 0, is_on = is_count ? top_k > 0 && top_k < row.size : row.how.top_p < 1.0f;
    const bool is_short = top_k > 0 && top_k <= (is_count ? Mail::SIZE : MAX_CANDIDATES);
    if (is_on) low = threshold(row, shared, team, {row.how, is_count}, low, is_short);
  }
  return low;
}

// Whether a token is left out that is not below the lowest.
DEVICE bool is_cut(const Row& row, float scaled) {
  if (row.how.likeliest) return scaled > row.how.high;
  return row.how.min_p > 0.0f && row.likelihood(scaled) < row.how.min_p;
}

// The team's best token by score + Gumbel noise, of those that are kept; the likeliest of all is one of them, or else
// that which `narrow` found.
DEVICE u32 draw(const Row& row, Team& team, float low, u32 likeliest) {
  float bound = row.maximum;
  if (const int kept = row.how.likeliest) likeliest = kept - 1, bound = row.scaled(row.logit(likeliest));
  u32 words[4];
  philox(words, likeliest / 4, row.how.number, row.how.seed);
  const u32 word = likeliest % 4 < 2 ? (likeliest % 2 ? words[1] : words[0]) : (likeliest % 2 ? words[3] : words[2]);
  bound += gumbel(word);
  u64 best = ranked(bound, likeliest);
  // A bound on chances, larger than all rounding of scores; where scores are too coarse for it, there is none.
  const float slack = fabsf(row.maximum) < 0x1p14f ? 0.02f : INFINITE;
  const float floor = fmaxf(row.floor_of(low), row.floor_of(bound - MAX_GUMBEL));
  row.visit(floor, [&](int id, const float(&logits)[GROUP]) {
    philox(words, u32(id) / GROUP, row.how.number, row.how.seed);
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      const float scaled = row.scaled(logits[i]);
      // gumbel(u) < -log(1 - u): a token without a chance by this bound is spared two logarithms.
      const float one_to_two = __uint_as_float(0x3f800000u | words[i] >> 9);
      const float chance = exp2_fast(scaled * LOG2_E + (slack - bound * LOG2_E));
      if (!(2.0f - one_to_two - 0x1p-24f <= chance) || !(scaled >= low)) continue;
      if (is_cut(row, scaled)) continue;
      best = max(best, ranked(scaled + gumbel(words[i]), id + i));
      bound = from_key(u32(best >> 32));
    }
  });
  return ~u32(team.highest(best));
}

// What a thread sees of the row at first: the highest logit, and the sum of exp(logit - highest), which is NaN if a
// logit is NaN or +inf.
struct Peak {
  float highest = -INFINITE, sum = 0.0f;
  int id = 0;

  DEVICE void see(int first, const float (&logits)[GROUP]) {
    const float top = highest_of(logits);
    if (top > highest) {
      sum *= exp_fast(highest - top);
      highest = top;
      id = first + (logits[0] == top ? 0 : logits[1] == top ? 1 : logits[2] == top ? 2 : 3);
    }
    const float base = fmaxf(highest, -3e38f);  // -inf - -inf would be NaN
#pragma unroll
    for (int i = 0; i < GROUP; ++i) sum += exp_fast(logits[i] - base);
  }

  // The team's: the best token as `ranked`, above all others if a sum is NaN, and the sum for it. The best tokens of
  // the warps stay in the first box.
  DEVICE u64 meet(Shared& shared, Team& team) {
    u64* box = team.next_box();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 best = warp_reduce(sum != sum ? ~0ull : ranked(highest, id), higher);
    sum = warp_reduce(sum * weight(highest, best), plus);
    if (lane < TEAM) {
      store_at(&box[team.rank() * WARPS + warp], lane, best);
      store_at(&shared.sums[team.rank() * WARPS + warp], lane, sum);
    }
    team_sync();
    best = Team::highest_of(box);
    sum = 0.0f;
#pragma unroll
    for (int i = lane % Mail::LANES; i < Mail::SIZE; i += Mail::LANES)
      sum += shared.sums[i] * weight(from_key(u32(box[i] >> 32)), best);
    sum = warp_reduce<Mail::LANES>(sum, plus);
    return best;
  }
  // What a sum of exp(logit - highest) counts beside the best.
  DEVICE static float weight(float highest, u64 best) {
    return highest == -INFINITE ? 0.0f : exp_fast(highest - from_key(u32(best >> 32)));
  }
};

struct Results {
  i64* token_ids;
  float* log_probs;
  u8* outcomes;
  DEVICE void put(int place, u32 token_id, float log_prob, u8 outcome) const {
    if (!token_ids) return;
    token_ids[place] = token_id;
    log_probs[place] = log_prob;
    outcomes[place] = outcome;
  }
};

extern "C" __global__ void TEAM_DIMS __launch_bounds__(THREADS, TEAM > 1 ? 2 : 1)
    sample(const T* logits, i64 stride, i64 num_tokens, i64 is_aligned, const Parameters* rows, const Edit* edits,
           u16* counts, i64* token_ids, float* log_probs, u8* outcomes, i64* token_ids_mirror,
           float* log_probs_mirror, u8* outcomes_mirror) {
  __shared__ Shared shared;
  wait_for_previous();
  start_next();
  const int n = blockIdx.x / TEAM;
  Team team = {shared.mail};
  Row row = {rows[n], logits + n * stride, int(num_tokens)};
  const int part = (row.size + TEAM * GROUP - 1) / (TEAM * GROUP) * GROUP;
  row.begin = team.rank() * part;
  row.end = min(row.size, row.begin + part);
  row.is_aligned = is_aligned;
  Words packs[BATCH];
  row.load_ahead(packs, row.begin + GROUP * threadIdx.x);
  if (row.how.result < 0) return;
  team_arrive();
  row.temperature = row.how.likeliest ? row.how.heat : row.how.temperature;
  row.inverse = __frcp_rn(row.temperature);
  const bool has_penalties = row.how.repetition != 1.0f || row.how.presence != 0.0f || row.how.frequency != 0.0f;
  row.counts = has_penalties ? counts + row.how.slot * num_tokens : nullptr;
  row.edits = edits;
  row.has_edits = row.how.first_edit < row.how.end_edit;
  row.marks = shared.marks;
  if (row.has_edits) row.mark();
  if (threadIdx.x == 0) shared.floor = -INFINITE, shared.listed = 0;

  Peak peak;
  row.visit_first(packs, [&](int id, const float(&values)[GROUP]) { peak.see(id, values); });
  team_wait();  // all members have started: their mail may come
  const u64 best = peak.meet(shared, team);
  const Results results = {token_ids, log_probs, outcomes};
  const Results mirrors = {token_ids_mirror, log_probs_mirror, outcomes_mirror};
  const bool is_first = team.rank() == 0 && threadIdx.x == 0;
  const u32 key = u32(best >> 32);
  if (key >= to_key(INFINITE) || key == to_key(-INFINITE)) {
    if (is_first) {
      results.put(row.how.result, 0, __uint_as_float(0x7fffffffu), NOT_FINITE);
      mirrors.put(row.how.result, 0, __uint_as_float(0x7fffffffu), NOT_FINITE);
    }
    return;
  }
  u32 token = ~u32(best);
  if (threadIdx.x == 0) shared.highest = from_key(key), shared.log_sum = logf(peak.sum);
  row.maximum = __fdiv_rn(from_key(key), row.temperature);
  if (row.inverse < INFINITE && fabsf(row.maximum) < INFINITE) {  // else greedy: the limit of 1 / 0
    token = draw(row, team, filter(row, shared, team), token);
  }
  if (!is_first) return;
  const float log_prob = row.logit(token) - shared.highest - shared.log_sum;
  results.put(row.how.result, token, log_prob, SAMPLED);
  mirrors.put(row.how.result, token, log_prob, SAMPLED);
  if (row.counts) {
    u16& state = counts[row.how.slot * num_tokens + token];
    if ((state & MAX_COUNT) < MAX_COUNT) ++state;
  }
}
