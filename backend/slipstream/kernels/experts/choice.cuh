// A router's choice for a row, by a warp; and the places of pairs of a row and an expert in the order of experts.
// -D VALUES (experts of a lane), GROUPED (1: groups of experts are chosen first)
#pragma once
#include "runtime/scan.cuh"
#include "runtime/team.cuh"

constexpr int MAX_PAIRS = 256;  // that one CTA routes
constexpr int MAX_EXPERTS = 512;
constexpr int MAX_GROUPS = 64;
static_assert(MAX_EXPERTS <= THREADS, "a thread an expert");
static_assert(MAX_GROUPS == 2 * 32, "a lane has two groups");

enum Score { SOFTMAX, SIGMOID, SPARSEMIXER };

struct Choice {
  const float* correction;  // [e], or null
  int* experts;             // [n, k]
  float* weights;           // [n, k]
  int num_experts, top_k;
  int score;
  bool normalises;
  float factor, reach;
  int groups, top_groups;
};
struct Plan {
  int *order, *offsets, *tiles;
  int num_tiles;  // that there is room for
  int tile_rows;
};

// A key above zero that sorts as the number does; both zeros have the same, NaN has the largest.
DEVICE u32 ordered(float value) {
  if (value != value) return 0xffffffffu;
  const u32 bits = value == 0.0f ? 0 : __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
// What `ordered` had; zero where that was either.
DEVICE float number_of(u32 key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }
DEVICE u32 highest(u32 value) {
  u32 result;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(value));
  return result;
}
DEVICE u32 lowest(u32 value) {
  u32 result;
  asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(value));
  return result;
}

// A lane has experts lane + 32 * i; `logit_of(expert)` is what the router made.
struct Row {
  float logit[VALUES], score[VALUES];
  u32 key[VALUES];  // 0: no expert, or chosen

  template <class LogitOf>
  DEVICE Row(const Choice& choice, const LogitOf& logit_of) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      const int expert = lane + 32 * i;
      const bool real = expert < choice.num_experts;
      logit[i] = real ? logit_of(expert) : -INFINITE;
      score[i] = logit[i];
      float by = logit[i];
      if (choice.score == SIGMOID && real) {
        score[i] = 1.0f / (1.0f + expf(-logit[i]));
        by = choice.correction == nullptr ? score[i] : score[i] + choice.correction[expert];
      }
      key[i] = real ? ordered(by) : 0;
    }
    if (choice.score == SOFTMAX) {
      soften();
      if (choice.correction != nullptr) correct(choice.correction);
    }
#if GROUPED
    keep_groups(choice);
#endif
  }

  // The expert of the highest key, and its logit and score in every lane; it is taken out.
  DEVICE int take_best(float& its_logit, float& its_score) {
    const int lane = threadIdx.x % 32;
    u32 best = 0;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) best = max(best, key[i]);
    best = highest(best);
    u32 mine = 0xffffffffu;
#pragma unroll
    for (int i = VALUES - 1; i >= 0; --i)
      if (key[i] == best) mine = lane + 32 * i;
    const u32 expert = lowest(mine);
    float own_logit = 0.0f, own_score = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
      if (expert == u32(lane + 32 * i)) {
        own_logit = logit[i];
        own_score = score[i];
        key[i] = 0;
      }
    its_logit = __shfl_sync(ALL_LANES, own_logit, expert % 32);
    its_score = __shfl_sync(ALL_LANES, own_score, expert % 32);
    return expert;
  }

  // The weight that a sparse mixer gives the best of what was left, among all that is near it.
  DEVICE float weight_near(float best, float reach) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      const bool is_far = (best - logit[i]) / fmaxf(fabsf(logit[i]), best) > reach;
      if (key[i] != 0 && !is_far) sum += expf(logit[i] - best);
    }
    return 1.0f / (1.0f + warp_sum(sum));
  }

 private:
  // Experts outside of the best groups go below all numbers; of equal groups the lower are chosen. A group counts by
  // its best expert or, of logistic scores, by the sum of its best two.
  DEVICE void keep_groups(const Choice& choice) {
    const u32 lane = threadIdx.x % 32, size = choice.num_experts / choice.groups;
    u32 low = 0, high = 0;  // of groups `lane` and `lane + 32`; 0: none, or chosen
    for (u32 group = 0; group < u32(choice.groups); ++group) {
      const u32 score = score_of(lane, group * size, size, choice.score == SIGMOID);
      if (lane == group) low = score;
      if (lane + 32 == group) high = score;
    }
    u64 kept = 0;
    for (int rank = 0; rank < choice.top_groups; ++rank) {
      const u32 best = highest(max(low, high));
      const u32 group = lowest(low == best ? lane : high == best ? lane + 32 : 0xffffffffu);
      kept |= u64(1) << group;
      if (lane == group) low = 0;
      if (lane + 32 == group) high = 0;
    }
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
      if (key[i] != 0 && !(kept >> (lane + 32 * i) / size & 1)) key[i] = ordered(-INFINITE);
  }
  // The score of the group of `size` experts that begins at `begin`; the same in every lane.
  DEVICE u32 score_of(u32 lane, u32 begin, u32 size, bool by_two) const {
    u32 first = 0, second = 0;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      if (lane + 32 * i - begin >= size) continue;
      second = max(second, min(first, key[i]));
      first = max(first, key[i]);
    }
    const u32 best = highest(first);
    if (!by_two) return best;
    const u32 owner = lowest(first == best ? lane : 32u);
    return ordered(number_of(best) + number_of(highest(lane == owner ? second : first)));
  }
  // Order experts by the softmax plus a correction.
  DEVICE void correct(const float* correction) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
      if (key[i] != 0) key[i] = ordered(score[i] + correction[lane + 32 * i]);
  }
  DEVICE void soften() {
    float most = -INFINITE;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) most = fmaxf(most, logit[i]);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, mask));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      score[i] = expf(logit[i] - most);
      sum += score[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < VALUES; ++i) score[i] /= sum;
  }
};

// By a warp. `experts` gets the choice too, unless null.
template <class LogitOf>
DEVICE void choose_for(const Choice& choice, int row, int* experts, const LogitOf& logit_of) {
  const int lane = threadIdx.x % 32;
  Row values(choice, logit_of);
  int expert = 0;
  float weight = 0.0f;
  for (int rank = 0; rank < choice.top_k; ++rank) {
    float logit, score;
    const int best = values.take_best(logit, score);
    if (choice.score == SPARSEMIXER) score = values.weight_near(logit, choice.reach);
    if (lane == rank) {
      expert = best;
      weight = score;
    }
  }
  const float sum = warp_sum(weight);
  if (choice.normalises) weight /= sum;
  if (lane >= choice.top_k) return;
  const int pair = row * choice.top_k + lane;
  choice.experts[pair] = expert;
  choice.weights[pair] = weight * choice.factor;
  if (experts != nullptr) experts[pair] = expert;
}

DEVICE void put_tile(const Plan& plan, int tile, int expert, int first, int count) {
  *reinterpret_cast<int4*>(plan.tiles + 4 * tile) = make_int4(expert, first, count, 0);
}

// The tiles of an expert from number `tile` on.
DEVICE void put_tiles(const Plan& plan, int tile, int expert, int first, int count) {
  for (int done = 0; done < count; done += plan.tile_rows)
    put_tile(plan, tile++, expert, first + done, min(plan.tile_rows, count - done));
}

// Thread e has expert e's places: the first of them, the number of its first tile, and all tiles.
struct Places {
  int first, first_tile, num_tiles;

  DEVICE Places(const Plan& plan, int count, u64* sums) {
    const u64 own_tiles = (count + plan.tile_rows - 1) / plan.tile_rows;
    u64 up_to_here, all;
    scan(own_tiles << 32 | u64(count), sums, WARPS, up_to_here, all);
    first = int(u32(up_to_here)) - count;
    first_tile = int((up_to_here >> 32) - own_tiles);
    num_tiles = int(all >> 32);
  }
};

// By a CTA of THREADS: the places of pairs whose experts are `chosen`, shared; `sums` as of `scan`.
DEVICE void place_pairs(const Plan& plan, const int* chosen, int num_pairs, int num_experts, u64* sums) {
  const int thread = threadIdx.x;
  int before = 0, count = 0;
  const int own = thread < num_pairs ? chosen[thread] : 0;
  for (int pair = 0; pair < num_pairs; ++pair) {
    const int expert = chosen[pair];
    before += expert < own || (expert == own && pair < thread);
    count += expert == thread;
  }
  const Places places(plan, count, sums);
  if (thread < num_pairs) plan.order[before] = thread;
  if (thread < num_experts) plan.offsets[thread] = places.first;
  if (thread == 0) plan.offsets[num_experts] = num_pairs;
  put_tiles(plan, places.first_tile, thread, places.first, count);
  for (int tile = places.num_tiles + thread; tile < plan.num_tiles; tile += THREADS) put_tile(plan, tile, 0, 0, 0);
}

#define HOW_TO_CHOOSE                                                                                                \
  const float *correction, int *experts, float *weights, i64 num_rows, i64 num_experts, i64 top_k, i64 score,        \
      i64 normalises, float factor, float reach, i64 groups, i64 top_groups
#define CHOICE                                                                                                       \
  const Choice choice{correction,      experts, weights, int(num_experts), int(top_k),     int(score),               \
                      normalises != 0, factor,  reach,   int(groups),      int(top_groups)}
#define WHERE_TO_PLACE int *order, int *offsets, int *tiles, i64 room, i64 tile_rows
#define PLAN const Plan plan{order, offsets, tiles, int(room), int(tile_rows)}
