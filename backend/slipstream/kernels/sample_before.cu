// One CTA turns one row of logits into a token, without a sort: the top-k and top-p thresholds are searched on the
// ordered bits of the scaled logits. Counts and masses are integers, so no order of addition changes a result.
#include "common.cuh"

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / 32;
constexpr int CANDIDATES = 4096;   // from this few on, the search goes on in shared memory
constexpr float MASS_ONE = 0x1p42f;  // fixed point of exp(scaled - maximum), at most 1 each

// Order-preserving bits of a float; -0 and +0 have the same.
DEVICE u32 to_key(float value) {
  const u32 bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE float from_key(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Reduce one value of every thread by f; every thread gets the result. Ends with a barrier.
template <class Value, class Combine>
DEVICE Value reduce(Value value, const Combine& f) {
  __shared__ Value parts[WARPS];
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = f(value, __shfl_xor_sync(ALL_LANES, value, mask));
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  value = parts[threadIdx.x % WARPS];
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = f(value, __shfl_xor_sync(ALL_LANES, value, mask));
  __syncthreads();
  return value;
}
template <class Value>
DEVICE Value reduce_sum(Value value) {
  return reduce(value, [](Value a, Value b) { return a + b; });
}
template <class Value>
DEVICE Value reduce_max(Value value) {
  return reduce(value, [](Value a, Value b) { return a > b ? a : b; });
}

struct Row {
  const float* logits;
  int size;
  float temperature;
  float maximum;  // of the scaled logits

  // f(token id, logit), this thread's tokens in rising order.
  template <class Visit>
  DEVICE void visit(const Visit& f) const {
#pragma unroll 4
    for (int id = threadIdx.x; id < size; id += THREADS) f(id, logits[id]);
  }
  DEVICE float scaled(float logit) const { return __fdiv_rn(logit, temperature); }
  DEVICE float likelihood(float scaled) const { return expf(scaled - maximum); }  // over the likeliest's
};

struct Count {  // a token weighs 1
  DEVICE u64 operator()(const Row&, float) const { return 1; }
};
struct Mass {  // a token weighs its probability
  DEVICE u64 operator()(const Row& row, float scaled) const {
    return u64(row.likelihood(scaled) * MASS_ONE);
  }
};

// Between `low` and `high`: by value where that halves the range of values, else by bits (which always ends).
DEVICE u32 pivot(u32 low, u32 high, bool by_value) {
  const u32 middle = low + (high - low) / 2;
  if (!by_value) return middle;
  const u32 key = to_key(0.5f * from_key(low) + 0.5f * from_key(high));
  return key >= low && key < high ? key : middle;
}

// The smallest key in [low, high] such that the tokens above it weigh less than `limit` (those above `high` do).
template <class Weight>
DEVICE u32 threshold(const Row& row, const Weight& weight, u64 limit, u32 low, u32 high) {
  __shared__ float candidates[CANDIDATES];
  __shared__ int num_candidates;
  u64 above_high = 0;  // weight of the tokens above `high`
  u64 inside = ~0ull;  // number of tokens in [low, high]
  bool by_value = true;
  for (; low < high && inside > CANDIDATES; by_value = !by_value) {
    const u32 middle = pivot(low, high, by_value);
    u64 heavier = 0;           // weight of the tokens in (middle, high]
    u32 upper = 0, lower = 0;  // number of tokens in (middle, high] and in [low, middle]
    row.visit([&](int, float logit) {
      const float scaled = row.scaled(logit);
      const u32 key = to_key(scaled);
      if (key > high || key < low) return;
      if (key > middle) {
        heavier += weight(row, scaled);
        ++upper;
      } else {
        ++lower;
      }
    });
    heavier = reduce_sum(heavier);
    const u64 counts = reduce_sum(u64(upper) << 32 | lower);
    if (above_high + heavier < limit) {
      high = middle;
      above_high += heavier;
      inside = counts & 0xffffffffu;
    } else {
      low = middle + 1;
      inside = counts >> 32;
    }
  }
  if (low >= high) return low;

  if (threadIdx.x == 0) num_candidates = 0;
  __syncthreads();
  row.visit([&](int, float logit) {
    const float scaled = row.scaled(logit);
    const u32 key = to_key(scaled);
    // The order of arrival varies; only integer sums are taken over it.
    if (key >= low && key <= high) candidates[atomicAdd(&num_candidates, 1)] = scaled;
  });
  __syncthreads();
  while (low < high) {
    const u32 middle = low + (high - low) / 2;
    u64 heavier = 0;
    for (int i = threadIdx.x; i < num_candidates; i += THREADS) {
      const u32 key = to_key(candidates[i]);
      if (key > middle && key <= high) heavier += weight(row, candidates[i]);
    }
    heavier = reduce_sum(heavier);
    if (above_high + heavier < limit) {
      high = middle;
      above_high += heavier;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Philox4x32-10 of counter (quad, output number, 0, 0): the random words of token ids 4 quad .. 4 quad + 3.
DEVICE void philox(u32 (&words)[4], u32 quad, u32 number, u64 seed) {
  words[0] = quad, words[1] = number, words[2] = 0, words[3] = 0;
  u32 key0 = u32(seed), key1 = u32(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 first = u64(0xD2511F53u) * words[0], second = u64(0xCD9E8D57u) * words[2];
    words[0] = u32(second >> 32) ^ words[1] ^ key0;
    words[1] = u32(second);
    words[2] = u32(first >> 32) ^ words[3] ^ key1;
    words[3] = u32(first);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}
DEVICE float gumbel(u32 bits) {
  const float uniform = (float(bits >> 9) + 0.5f) * 0x1p-23f;
  return -logf(-logf(uniform));
}

// What argmax compares: the higher score, then the lower token id.
DEVICE u64 ranked(float score, u32 id) { return u64(to_key(score)) << 32 | ~id; }

// The drawn token: the highest score + Gumbel noise of those that top-k, top-p and min-p keep.
DEVICE u32 draw(const Row& row, u32 low, int top_k, float top_p, float min_p, u64 seed, u32 number) {
  const u32 high = to_key(row.maximum);
  if (top_k > 0 && top_k < row.size) low = threshold(row, Count{}, u64(top_k), low, high);
  if (top_p < 1.0f) {
    u64 total = 0;
    row.visit([&](int, float logit) {
      const float scaled = row.scaled(logit);
      if (to_key(scaled) >= low) total += Mass{}(row, scaled);
    });
    total = reduce_sum(total);
    const u64 limit = u64(ceil(double(top_p) * double(total)));
    low = threshold(row, Mass{}, limit > 0 ? limit : 1, low, high);  // the likeliest stays
  }
  u64 best = 0;
  for (int quad = threadIdx.x; quad * 4 < row.size; quad += THREADS) {
    float scaled[4];
    bool keep[4], any = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int id = quad * 4 + i;
      scaled[i] = id < row.size ? row.scaled(row.logits[id]) : -INFINITE;
      keep[i] = id < row.size && to_key(scaled[i]) >= low && row.likelihood(scaled[i]) >= min_p;
      any |= keep[i];
    }
    if (!any) continue;
    u32 words[4];
    philox(words, quad, number, seed);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (keep[i]) best = max(best, ranked(scaled[i] + gumbel(words[i]), quad * 4 + i));
  }
  return ~u32(reduce_max(best));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample(const float* logits, i64 stride, i64 num_tokens, const float* temperature, const int* top_k,
           const float* top_p, const float* min_p, const i64* seeds, const i64* counters,
           i64* token_ids, float* log_probs, u8* is_finite) {
  const int n = blockIdx.x;
  Row row = {logits + n * stride, int(num_tokens), temperature[n], 0.0f};

  u64 best = 0;
  u32 lowest = ~0u;  // of the finite logits
  int broken = 0;
  row.visit([&](int id, float logit) {
    best = max(best, ranked(logit, id));
    if (logit > -INFINITE) lowest = min(lowest, to_key(logit));
    broken |= logit != logit || logit == INFINITE;
  });
  best = reduce_max(best);
  lowest = ~reduce_max(~lowest);
  u32 token = ~u32(best);
  const float maximum = from_key(u32(best >> 32));
  if (__syncthreads_or(broken) || maximum == -INFINITE) {
    if (threadIdx.x == 0) {
      token_ids[n] = 0;
      log_probs[n] = __uint_as_float(0x7fffffffu);
      is_finite[n] = 0;
    }
    return;
  }
  float sum = 0.0f;
  row.visit([&](int, float logit) { sum += expf(logit - maximum); });
  sum = reduce_sum(sum);

  row.maximum = row.scaled(maximum);
  if (row.temperature != 0.0f && fabsf(row.maximum) < INFINITE) {  // else greedy: the limit of 1 / 0
    const u32 low = to_key(row.scaled(from_key(lowest)));
    token = draw(row, low, top_k[n], top_p[n], min_p[n], u64(seeds[n]), u32(counters[n]));
  }
  if (threadIdx.x == 0) {
    token_ids[n] = token;
    log_probs[n] = row.logits[token] - maximum - logf(sum);
    is_finite[n] = 1;
  }
}

// One thread an edit; every rounding is the reference's.
extern "C" __global__ void __launch_bounds__(256)
    edit_logits(float* logits, i64 stride, const i64* rows, const i64* token_ids, const float* factors,
                const float* addends, i64 num_edits) {
  const i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= num_edits) return;
  float& logit = logits[rows[i] * stride + token_ids[i]];
  const float factor = factors[i];
  const float scaled = logit > 0.0f ? __fdiv_rn(logit, factor) : __fmul_rn(logit, factor);
  logit = __fadd_rn(scaled, addends[i]);
}
