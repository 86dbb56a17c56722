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

  // GROUP elements of a row from token `id` on, `beyond` past its end.
  template <class Element>
  DEVICE Pack<Element, GROUP> group(const Element* elements, int id, Element beyond) const {
    if (is_aligned) return load<GROUP>(elements + id);
    Pack<Element, GROUP> pack;
#pragma unroll
    for (int i = 0; i < GROUP; ++i) pack.at[i] = id + i < size ? elements[id + i] : beyond;
    return pack;
  }
  DEVICE Pack<T, GROUP> raw(int id) const { return group(logits, id, from_float<T>(-INFINITE)); }
  DEVICE Pack<u16, GROUP> states(int id) const { return counts ? group(counts, id, u16(0)) : Pack<u16, GROUP>{}; }

  DEVICE void edit(float (&values)[GROUP], const Pack<u16, GROUP>& states, int id) const {
    const int place = id / GROUP % (2 * MARKS);
    const bool is_marked = has_edits && (marks[place / 8] >> place % 8 * 4 & 0xf) != 0;
    if (!is_marked && !(states.at[0] | states.at[1] | states.at[2] | states.at[3])) return;
    int next = is_marked ? find_edit(id) : how.end_edit;
#pragma unroll 1
    for (int i = 0; i < GROUP; ++i) {
      const bool has_edit = next < how.end_edit && edits[next].token_id == id + i;
      const float addend = has_edit ? edits[next++].addend : 0.0f;
      const u32 state = i < 2 ? (i == 0 ? states.at[0] : states.at[1]) : (i == 2 ? states.at[2] : states.at[3]);
      const float value = edited(pick(values, i), state, addend);
#pragma unroll
      for (int j = 0; j < GROUP; ++j) values[j] = i == j ? value : values[j];
    }
  }
  // f(first token id, GROUP logits): this thread's in rising order, -inf past the end of the row. Groups whose logits
  // are all below the floor are left out.
  template <class Visit>
  DEVICE void visit(float floor, const Visit& f) const {
#pragma unroll 1
    for (int id = begin + GROUP * threadIdx.x; id < end; id += THREADS * GROUP) {
      float values[GROUP];
      to_floats(values, raw(id));
      if (is_edited()) edit(values, states(id), id);
      if (!(highest_of(values) < floor)) f(id, values);
    }
  }
  // The same, for the first time that the logits are read: from far away, so several loads are under way. The first
  // of them, into `packs`, may be so before the parameters are known.
  DEVICE void load_ahead(Pack<T, GROUP> (&packs)[BATCH], int first) const {
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (is_aligned && first + i * THREADS * GROUP < end) packs[i] = load<GROUP>(logits + first + i * THREADS * GROUP);
  }
  template <class Visit>
  DEVICE void visit_first(Pack<T, GROUP> (&packs)[BATCH], const Visit& f) const {
    if (is_edited() || !is_aligned) return visit(-INFINITE, f);
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
  DEVICE static void to_floats(float (&values)[GROUP], const Pack<T, GROUP>& pack) {
#pragma unroll
    for (int i = 0; i < GROUP; ++i) values[i] = to_float(pack.at[i]);
  }
};

