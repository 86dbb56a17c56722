// One row of logits as a member of its team reads it: edited on the way, scaled, ranked.
#pragma once
#include "runtime/team.cuh"

constexpr int GROUP = 4;  // consecutive tokens that a thread takes at once: those of one Philox
constexpr int BATCH = 64 / sizeof(T) / GROUP;  // groups that are loaded ahead
constexpr int MARKS = 2048;                    // bytes that tell which tokens of a CTA have edits
constexpr u32 MAX_COUNT = 0x7fff;

struct alignas(16) Parameters {  // ROW in sample.py
  CHOSEN                         // by the table of sampling parameters: float temperature; int top_k; ...
  int slot;
  u64 seed;
  u32 number;
  int result;
  int first_edit, end_edit;
  int mask_tag;
  int likeliest;  // of `narrow`: a token id + 1, or 0
  float heat, low, high;
};
struct alignas(8) Edit {
  int token_id;
  float addend;
};

// Order-preserving bits of a float; -0 and +0 have the same.
DEVICE u32 to_key(float value) {
  const u32 bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE float from_key(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
// What argmax compares: the higher score, then the lower token id.
DEVICE u64 ranked(float score, u32 id) { return u64(to_key(score)) << 32 | u32(~id); }

DEVICE float highest_of(const float (&values)[GROUP]) {
  float highest = values[0];
#pragma unroll
  for (int i = 1; i < GROUP; ++i) highest = fmaxf(highest, values[i]);
  return highest;
}

// values[i] without memory, for loops that are better left rolled.
DEVICE float pick(const float (&values)[GROUP], int i) {
  return i < 2 ? (i == 0 ? values[0] : values[1]) : (i == 2 ? values[2] : values[3]);
}
// A group of logits as words: as 16-bit numbers each would take a register of its own.
constexpr int WORDS = GROUP * sizeof(T) / 4;
using Words = Pack<u32, WORDS>;
template <class Element>
DEVICE float number_in(const Words& words, int i) {
  if constexpr (sizeof(Element) == 4)
    return __uint_as_float(words.at[i]);
  else
    return to_float(Element{u16(words.at[i / 2] >> i % 2 * 16)});
}

DEVICE float exp_fast(float value) { return exp2_fast(value * LOG2_E); }

// The logits of one row, edited as they are read; this CTA's are those of tokens begin .. end - 1.
struct Row {
  const Parameters& how;
  const T* logits;
  int size, begin, end;
  bool is_aligned;    // a group is one access
  const u16* counts;  // null without penalties
  const Edit* edits;  // of all rows
  bool has_edits;
  u32* marks;  // in shared memory
  float temperature;
  float inverse;  // of the temperature, rounded once
  float maximum;  // of the scaled logits

  // Logit / temperature, rounded as a division: the remainder of the quotient is exact, and corrects it (Markstein,
  // 1990; but for a temperature whose bits are all ones). NaN for -inf, so that it is in no range.
  DEVICE float scaled(float logit) const {
    const float quotient = __fmul_rn(logit, inverse);
    return __fmaf_rn(__fmaf_rn(-quotient, temperature, logit), inverse, quotient);
  }
  // No logit below this becomes so much or more.
  DEVICE float floor_of(float scaled) const {
    const float logit = scaled * temperature;
    return logit - 1e-6f * fabsf(logit) - 1e-36f;
  }
  DEVICE bool is_edited() const { return counts || has_edits; }
  DEVICE float likelihood(float scaled) const { return expf(scaled - maximum); }  // over the likeliest's

  // Every rounding is the reference's.
  DEVICE float edited(float logit, u32 state, float addend) const {
    logit = __fadd_rn(logit, addend);
    if (state != 0) {
      logit = logit > 0.0f ? __fdiv_rn(logit, how.repetition) : __fmul_rn(logit, how.repetition);
      if (state & MAX_COUNT)
        logit = __fsub_rn(logit, __fadd_rn(how.presence, __fmul_rn(how.frequency, float(state & MAX_COUNT))));
    }
    return logit;
  }
  // The first edit of a token id of at least this.
  DEVICE int find_edit(int id) const {
    int low = how.first_edit, high = how.end_edit;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (edits[middle].token_id < id)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
  DEVICE float logit(int id) const {
    const float raw = to_float(logits[id]);
    if (!is_edited()) return raw;
    const int edit = find_edit(id);
    const bool has_edit = edit < how.end_edit && edits[edit].token_id == id;
    return edited(raw, counts ? counts[id] : 0, has_edit ? edits[edit].addend : 0.0f);
  }

  // Set a bit for each edit of this CTA's tokens. Tokens far apart share one, which costs a search.
  DEVICE void mark() const {
    for (int i = threadIdx.x; i < MARKS / 4; i += THREADS) marks[i] = 0;
    __syncthreads();
    for (int i = how.first_edit + threadIdx.x; i < how.end_edit; i += THREADS) {
      const int id = edits[i].token_id;
      if (id >= begin && id < end) atomicOr(&marks[id / 32 % (MARKS / 4)], 1u << id % 32);
    }
    __syncthreads();
  }

  // The logits of a group, -inf past the end of the row.
  DEVICE Pack<T, GROUP> raw(int id) const {
    if (is_aligned) return load<GROUP>(logits + id);
    Pack<T, GROUP> pack;
#pragma unroll
    for (int i = 0; i < GROUP; ++i) pack.at[i] = id + i < size ? logits[id + i] : from_float<T>(-INFINITE);
    return pack;
  }
  // Its counts in one word, the first token's lowest: as four they would take twice the registers.
  DEVICE u64 states(int id) const {
    if (!counts) return 0;
    if (is_aligned) return load<1>(reinterpret_cast<const u64*>(counts + id)).at[0];
    u64 result = 0;
#pragma unroll
    for (int i = 0; i < GROUP; ++i)
      if (id + i < size) result |= u64(counts[id + i]) << 16 * i;
    return result;
  }

  // Whether one of a group's tokens may have an edit.
  DEVICE bool is_marked(int id) const {
    const int place = id / GROUP % (2 * MARKS);
    return has_edits && (marks[place / 8] >> place % 8 * 4 & 0xf) != 0;
  }
  DEVICE void edit(float (&values)[GROUP], u64 states, int id) const {
    const bool has_mark = is_marked(id);
    if (!has_mark && states == 0) return;
    int next = has_mark ? find_edit(id) : how.end_edit;
#pragma unroll 1
    for (int i = 0; i < GROUP; ++i, states >>= 16) {
      const bool has_edit = next < how.end_edit && edits[next].token_id == id + i;
      const float addend = has_edit ? edits[next++].addend : 0.0f;
      const float value = edited(pick(values, i), u32(states) & 0xffff, addend);
#pragma unroll
      for (int j = 0; j < GROUP; ++j) values[j] = i == j ? value : values[j];
    }
  }
  // A group without a mark whose raw logits are all below this is below `floor` when edited, too, if penalties only
  // lower: x + 0, x / r or x * r towards -inf where r >= 1, and minus p >= 0 are at most x, and rounding is monotone, so
  // they stay so; -inf stays, -0 is 0. NaN, which no comparison counts, stays NaN; a row that gets one (0 * r of an
  // infinite r) has been refused before there is a floor.
  DEVICE float raw_floor(float floor) const {
    const bool only_lowers = !counts || (how.repetition >= 1.0f && how.presence >= 0.0f && how.frequency >= 0.0f);
    return only_lowers ? floor : -INFINITE;
  }
  // f(first token id, GROUP logits): this thread's in rising order, -inf past the end of the row. Groups whose logits
  // are all below the floor are left out, most of them without a look at their counts.
  template <class Visit>
  DEVICE void visit(float floor, const Visit& f) const {
    const float low = raw_floor(floor);
#pragma unroll 1
    for (int id = begin + GROUP * threadIdx.x; id < end; id += THREADS * GROUP) {
      float values[GROUP];
      to_floats(values, raw(id));
      if (highest_of(values) < low && !is_marked(id)) continue;
      if (is_edited()) edit(values, states(id), id);
      if (!(highest_of(values) < floor)) f(id, values);
    }
  }
  // The same, for the first time that the logits are read: from far away, so several loads are under way. The first
  // of them, into `packs`, may be so before the parameters are known.
  DEVICE void load_ahead(Words (&packs)[BATCH], int first) const {
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (is_aligned && first + i * THREADS * GROUP < end)
        packs[i] = load<WORDS>(reinterpret_cast<const u32*>(logits + first + i * THREADS * GROUP));
  }
  template <class Visit>
  DEVICE void visit_first(Words (&packs)[BATCH], const Visit& f) const {
    if (!is_aligned) return visit(-INFINITE, f);
    if (is_edited()) return visit_edited(packs, f);
    for (int first = begin + GROUP * threadIdx.x; first < end; first += BATCH * THREADS * GROUP) {
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (first + i * THREADS * GROUP >= end) break;
        float values[GROUP];
        to_floats(values, packs[i]);
        f(first + i * THREADS * GROUP, values);
      }
      load_ahead(packs, first + BATCH * THREADS * GROUP);
    }
  }
  // The same with counts, of which a batch is under way beside its logits. Two groups at a time, and what is left moves
  // up: unrolled, the code is a quarter longer, and spills where ptxas is CUDA 12's.
  template <class Visit>
  DEVICE void visit_edited(Words (&packs)[BATCH], const Visit& f) const {
    constexpr int STEP = THREADS * GROUP;
#pragma unroll 1
    for (int first = begin + GROUP * threadIdx.x; first < end; first += BATCH * STEP) {
      u64 loaded[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) loaded[i] = first + i * STEP < end ? states(first + i * STEP) : 0;
      const int stop = min(end, first + BATCH * STEP);
#pragma unroll 1
      for (int id = first; id < stop; id += 2 * STEP) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (id + i * STEP >= stop) break;
          float values[GROUP];
          to_floats(values, packs[i]);
          edit(values, loaded[i], id + i * STEP);
          f(id + i * STEP, values);
        }
#pragma unroll
        for (int i = 2; i < BATCH; ++i) packs[i - 2] = packs[i], loaded[i - 2] = loaded[i];
      }
      load_ahead(packs, first + BATCH * STEP);
    }
  }
  DEVICE static void to_floats(float (&values)[GROUP], const Words& words) {
#pragma unroll
    for (int i = 0; i < GROUP; ++i) values[i] = number_in<T>(words, i);
  }
  DEVICE static void to_floats(float (&values)[GROUP], const Pack<T, GROUP>& pack) {
#pragma unroll
    for (int i = 0; i < GROUP; ++i) values[i] = to_float(pack.at[i]);
  }
};

