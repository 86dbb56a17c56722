// What several workers have of one (sequence, head) becomes one result: those of a CTA meet in shared memory; those of
// several CTAs in the last of these, which waits for the parts of the others, word by word. Every sum has one order.
// -D ELEMENT (T: 16 bits), HEAD_SIZE, WARPS, SLOTS
#pragma once
#include "decode_columns.cuh"

constexpr int AT_ONCE = 18;  // parts whose loads are in flight together: of 8 heads on 132 SMs, all
constexpr u32 EMPTY = 0xffffffffu;  // a word of a part that has not arrived; arithmetic gives no such NaN
enum { PRESENT = 1, BEGINS = 2, ENDS = 4 };

static_assert(WARPS <= 16, "a lane for each entry");
static_assert(sizeof(Part) <= RING_BYTES, "the second part of a worker lies in its ring");

// What a worker left for the merge: its first (sequence, head), its last, unless it had them whole.
struct alignas(16) Entry {
  int row;
  int head;
  int flags;  // PRESENT; BEGINS, ENDS: with the first, the last tile
};

struct Shared {
  u8 rings[WARPS][RING_BYTES];
  Part parts[WARPS];
  Entry entries[WARPS * 2];

  // Of entry i; a worker's last part takes the place of its ring, which is empty by then.
  DEVICE Part& part(int i) {
    return i % 2 == 0 ? parts[i / 2] : *reinterpret_cast<Part*>(rings[i / 2]);
  }
};

// The heads of the plan: each kv head `parts` times, with at most `width` of its query heads.
struct Heads {
  int count;
  int parts;
  int width;
  int group;  // query heads of a kv head

  DEVICE Heads(int num_kv_heads, int group)
      : parts((group + COLUMNS - 1) / COLUMNS), width((group + parts - 1) / parts), group(group) {
    count = num_kv_heads * parts;
  }
  DEVICE int first_query(int head) const { return head / parts * group + head % parts * width; }
  DEVICE int num_queries(int head) const { return min(width, group - head % parts * width); }
};

DEVICE float warp_max(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2)
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, mask));
  return value;
}

struct Output {
  T* rows;  // [row, query head, HEAD_SIZE]
  i64 row_elements;

  DEVICE T* at(const Heads& heads, int row, int head) const {
    return rows + row * row_elements + heads.first_query(head) * HEAD_SIZE;
  }
};

// One column of a part, over a warp; four dimensions a lane, the last lanes' again where there are fewer.
struct Column {
  float maximum = -INFINITE;
  float total = 0.0f;
  Pack<float, 4> sum = {};

  static DEVICE int dimension() { return min(int(threadIdx.x % 32) * 4, HEAD_SIZE - 4); }
  static DEVICE bool is_own() { return threadIdx.x % 32 * 4 < HEAD_SIZE; }

  DEVICE void add(float factor, float more, const Pack<float, 4>& values) {
    total = fmaf(factor, more, total);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum.at[j] = fmaf(factor, values.at[j], sum.at[j]);
  }
  DEVICE void scale(float factor) {
    total *= factor;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum.at[j] *= factor;
  }
  DEVICE void write(T* out) const {
    if (!is_own()) return;
    Pack<T, 4> result;
#pragma unroll
    for (int j = 0; j < 4; ++j) result.at[j] = from_float<T>(sum.at[j] / total);
    store<4>(out + dimension(), result);
  }
};

// The parts whose bits are set in `members`, in their order.
DEVICE Column merge_members(Shared& shared, u32 members, int column) {
  const int lane = threadIdx.x % 32;
  const bool is_member = members >> lane & 1;
  const float maximum = is_member ? shared.part(lane).maximum[column] : -INFINITE;
  Column result;
  result.maximum = warp_max(maximum);
  const float factor = exp2_fast(maximum - result.maximum);
  const float total = is_member ? shared.part(lane).total[column] : 0.0f;
  const int first = __ffs(members) - 1;
  for (u32 rest = members; rest;) {
    int one[4];
    Pack<float, 4> values[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      one[j] = rest ? __ffs(rest) - 1 : -1;
      rest &= rest - 1;
      const Part& part = shared.part(one[j] < 0 ? first : one[j]);
      values[j] = load<4>(&part.output[column][Column::dimension()]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float weight = __shfl_sync(ALL_LANES, factor, max(one[j], 0));
      const float more = __shfl_sync(ALL_LANES, total, max(one[j], 0));
      if (one[j] >= 0) result.add(weight, more, values[j]);
    }
  }
  return result;
}

// Leave a column for the CTA that has the last tile.
DEVICE void publish(const Column& mine, Part& part, int column) {
  const auto arrived = [](float value) {
    return __float_as_uint(value) == EMPTY ? __uint_as_float(EMPTY >> 1) : value;
  };
  Pack<float, 4> values;
#pragma unroll
  for (int j = 0; j < 4; ++j) values.at[j] = arrived(mine.sum.at[j]);
  if (Column::is_own()) store<4>(&part.output[column][Column::dimension()], values);
  if (threadIdx.x % 32 == 0) {
    part.maximum[column] = arrived(mine.maximum);
    part.total[column] = arrived(mine.total);
  }
}

// Wait for a column of up to AT_ONCE parts, add them in order, and leave them EMPTY for the next kernel.
DEVICE void collect(Column& mine, Part* parts, int count, int column) {
  const int lane = threadIdx.x % 32;
  u32* own_maximum = reinterpret_cast<u32*>(&parts[min(lane, count - 1)].maximum[column]);
  u32* own_total = reinterpret_cast<u32*>(&parts[min(lane, count - 1)].total[column]);
  u32* own_sums = reinterpret_cast<u32*>(&parts->output[column][Column::dimension()]);
  constexpr int NEXT = sizeof(Part) / 4;
  u32 maximum, total;
  Pack<u32, 4> sums[AT_ONCE];
  bool is_complete;
  do {
    maximum = load_fresh<1>(own_maximum).at[0];
    total = load_fresh<1>(own_total).at[0];
    is_complete = maximum != EMPTY && total != EMPTY;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (i < count) sums[i] = load_fresh<4>(own_sums + i * NEXT);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) is_complete &= i >= count || sums[i].at[j] != EMPTY;
  } while (!__all_sync(ALL_LANES, is_complete));

  const float theirs = __uint_as_float(maximum), before = mine.maximum;
  mine.maximum = warp_max(fmaxf(theirs, before));
  mine.scale(exp2_fast(before - mine.maximum));
  const float factor = exp2_fast(theirs - mine.maximum);
  const Pack<u32, 4> empty = {EMPTY, EMPTY, EMPTY, EMPTY};
#pragma unroll
  for (int i = 0; i < AT_ONCE; ++i) {
    if (i >= count) continue;
    const float weight = __shfl_sync(ALL_LANES, factor, i);
    const u32 more = __shfl_sync(ALL_LANES, total, i);
    Pack<float, 4> values;
#pragma unroll
    for (int j = 0; j < 4; ++j) values.at[j] = __uint_as_float(sums[i].at[j]);
    mine.add(weight, __uint_as_float(more), values);
    if (Column::is_own()) store<4>(own_sums + i * NEXT, empty);
  }
  if (lane < count) *own_maximum = *own_total = EMPTY;
}

// Merge what the workers of the CTA have of the same (sequence, head): a warp for each column of each. The last may go
// on in the next CTA; the first may have begun in CTA `first_cta`: it comes last, so that no CTA waits for one
// that waits. CTAs wait for those in front of them only, which were started before them.
DEVICE void merge(const Heads& heads, const Output& out, Shared& shared, Part* parts, int first_cta) {
  const int lane = threadIdx.x % 32;
  Entry mine = {0, 0, 0};
  if (lane < WARPS * 2) mine = shared.entries[lane];
  const u32 present = __ballot_sync(ALL_LANES, mine.flags != 0);
  const u32 before = present & ((1u << lane) - 1);
  const int previous = before ? 31 - __clz(before) : lane;
  const bool is_same = __shfl_sync(ALL_LANES, mine.row, previous) == mine.row &
                       __shfl_sync(ALL_LANES, mine.head, previous) == mine.head;
  const u32 firsts = __ballot_sync(ALL_LANES, mine.flags != 0 && !(before && is_same));
  const int num_items = __popc(firsts) * heads.width;
  for (int item = num_items - 1 - int(threadIdx.x / 32); item >= 0; item -= WARPS) {
    u32 rest = firsts;
    for (int i = item / heads.width; i > 0; --i) rest &= rest - 1;
    const int first = __ffs(rest) - 1;
    const u32 later = rest & (rest - 1);
    const u32 members = present & (ALL_LANES << first) & (later ? (later & -later) - 1 : ALL_LANES);
    const int head = __shfl_sync(ALL_LANES, mine.head, first);
    const int row = __shfl_sync(ALL_LANES, mine.row, first);
    const bool begins = __shfl_sync(ALL_LANES, mine.flags, first) & BEGINS;
    const bool ends = __shfl_sync(ALL_LANES, mine.flags, 31 - __clz(members)) & ENDS;
    const int column = item % heads.width;
    if (column >= heads.num_queries(head)) continue;
    Column result = merge_members(shared, members, column);
    if (!ends) {
      publish(result, parts[blockIdx.x], column);
      continue;
    }
    if (!begins)
      for (int cta = first_cta; cta < blockIdx.x; cta += AT_ONCE)
        collect(result, parts + cta, min(AT_ONCE, int(blockIdx.x) - cta), column);
    result.write(out.at(heads, row, head) + column * HEAD_SIZE);
  }
}
