// Paged decode attention for 16-bit elements: every warp is a worker that streams the tiles which the plan gives it
// (decode_plan.cuh) through a ring of its own. What several workers of a CTA have of one (sequence, head) they merge
// in shared memory; what several CTAs have, the last to arrive merges. The order of every sum is fixed.
// What sequences share is attended to first, for all of them together (decode_prefixes.cuh); what is left of it is merged
// with the sums of their own tokens, by the worker of the first of these, some tiles before its last.
// -D ELEMENT (T: 16 bits), HEAD_SIZE, TILE (tokens), WARPS, SLOTS (of a worker's ring), ROTATES (1: q and the newest K
// come as projected and are rotated here, the newest K and V are written to the cache here), WINDOWED, SINKS (1: the
// first tokens are seen too, by queries that are turned further: sinks.py), SHARES (1: there may be what sequences
// share), SCORES (scores.cuh), FORMAT (of the cache: kv_format.cuh)
#include "attention/decode_heads.cuh"
#include "attention/decode_newest.cuh"
#if SHARES
#include "attention/decode_prefixes.cuh"
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int AT_ONCE = 18;  // parts whose loads are in flight together: of 8 heads on 132 SMs, all
// Whether the query of the next (sequence, head) is loaded while tiles of this one go by. Wide heads leave no registers
// for that; a full ring waits meanwhile.
constexpr bool LOADS_AHEAD = HEAD_SIZE <= 128;
constexpr bool ANGLES_AHEAD = LOADS_AHEAD && ROTATES && !SINKS;  // nor do angles of sinks
constexpr int SPANS = (HEAD_SIZE + 127) / 128;  // of a column: four dimensions for each lane
enum { PRESENT = 1, BEGINS = 2, ENDS = 4 };
#if SHARES
// So many tiles of its own before a worker's last of a sequence it merges what that shares: what all would do at the end
// costs time, what is waited for while other workers' tiles come does not.
constexpr int MERGED_BEFORE = 6;
#endif

static_assert(FORMAT == 0 || !ROTATES, "a quantised cache is written by rope.cu alone");
static_assert(FORMAT == 0 || !SINKS, "queries over a quantised cache are not turned");
static_assert(HEAD_SIZE <= 128 || !SINKS, "no registers for two queries of a wide head");
static_assert(SCORES == 0 || !SINKS, "sequences that stream have plain scores");
static_assert(!SHARES || !ARE_SCALED, "tiles of several sequences have plain scores");
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
  int is_last[2];

  // Of entry i; a worker's last part takes the place of its ring, which is empty by then.
  DEVICE Part& part(int i) {
    return i % 2 == 0 ? parts[i / 2] : *reinterpret_cast<Part*>(rings[i / 2]);
  }
};

// A worker on its way: one (sequence, head) after the other.
class Worker {
  const Heads& heads;
  const Inputs& inputs;
  const Cache& cache;
  const Output& out;
  const State* const states;  // if SHARES
  const Prefixes* const prefixes;
  int num_items;  // 0: their states are there
  const float scale;          // of scores, times log2(e)
  const ScoreInputs changed;
  Shared& shared;
  const int warp = threadIdx.x / 32;
  Ring ring;
  Cursor cursor;
  int left;  // tiles
  Query next;
  float next_scores[2];  // of its columns 2t, 2t + 1, if SCORES needs some

 public:
  DEVICE Worker(const Heads& heads, const Inputs& inputs, const Cache& cache, const Output& out,
                const State* states, const Prefixes* prefixes, int num_items, float scale, const ScoreInputs& changed,
                Shared& shared, const Cursor& first, int count)
      : heads(heads), inputs(inputs), cache(cache), out(out), states(states), prefixes(prefixes),
        num_items(num_items), scale(scale), changed(changed), shared(shared),
        ring(cache, shared.rings[threadIdx.x / 32], heads.count, first, count), cursor(first),
        left(count) {}

  // Before the kernels in front have ended.
  DEVICE int begin() {
    const int filled = ring.fill_early();
    if (ANGLES_AHEAD && left > 0) next.load_angles(inputs.angles(cursor.now));
    return filled;
  }

  DEVICE void run(int filled) {
    ring.fill_up(filled);
    if (LOADS_AHEAD && left > 0) load_heads();
    for (bool is_first = true; left > 0; is_first = false) {
      if (ROTATES && !ANGLES_AHEAD) next.load_angles(inputs.angles(cursor.now));
      if (!LOADS_AHEAD) load_heads();
      Query query = next;
      const float own_scores[2] = {next_scores[0], next_scores[1]};
      Newest newest;
      const int row = cursor.now.row, head = cursor.head;
      if (ROTATES && cursor.ends_within(left)) load_newest(newest);
      query.prepare();
      Columns columns;
      columns.clear();
      if (SCORES == SINKING && cursor.is_first()) columns.start(own_scores);
      const int flags = attend(query, own_scores, newest, columns);
      columns.sum_totals();
      const int num_queries = heads.num_queries(head);
      if (flags == (PRESENT | BEGINS | ENDS)) {
        columns.write(out.at(heads, row, head), num_queries);
      } else {
        const int entry = warp * 2 + (is_first ? 0 : 1);
        columns.store(shared.part(entry), num_queries);
        if (threadIdx.x % 32 == 0) shared.entries[entry] = {row, head, flags};
      }
    }
  }

 private:
  DEVICE void load_heads() {
    const T* row = inputs.q + cursor.now.row * inputs.q_stride;
    next.load_heads(row + heads.first_query(cursor.head) * HEAD_SIZE,
                    heads.num_queries(cursor.head));
#pragma unroll
    for (int c = 0; c < 2; ++c)
      next_scores[c] = changed.of(heads.first_query(cursor.head) +
                                  min(int(threadIdx.x) % 4 * 2 + c, heads.num_queries(cursor.head) - 1));
  }
  DEVICE void load_newest(Newest& newest) const {
    const int token = cursor.now.length - 1, row = cursor.now.row;
    const i64 offset = cursor.head / heads.parts * HEAD_SIZE;
    newest.load(inputs.k + row * inputs.k_stride + offset, inputs.v + row * inputs.v_stride + offset,
                inputs.angles(cursor.now),
                reinterpret_cast<T*>(cache.memory) +
                    cache.offset(cache.block(row, token), token, cursor.head / heads.parts));
  }

#if SHARES
  // What the sequence shares with others. Waited for once.
  DEVICE void merge_shared(Columns& columns, int head, const RowPrefix& prefix) {
    if (num_items > 0) wait_for_items(*prefixes, num_items);
    num_items = 0;
    const int stride = heads.all_queries();
    const State* own = states + i64(prefix.first_state()) * stride + heads.first_query(head);
    columns.merge(own, prefix.num_states(), stride, heads.num_queries(head));
  }
#endif

#if SINKS
  // `query`, as sinks are seen from it.
  DEVICE Query turned(const Query& query) const {
    Query result = query;
    result.load_angles(inputs.sink_angles + i64(cursor.now.row) * HEAD_SIZE);
    result.rotate();
    return result;
  }
#endif

  // Tiles of one (sequence, head), as many as are the worker's. Returns what it had of it.
  DEVICE int attend(const Query& query, const float (&own_scores)[2], Newest& newest, Columns& columns) {
    int flags = PRESENT | (cursor.is_first() ? BEGINS : 0);
    const bool is_writer = cursor.head % heads.parts == 0;
#if SHARES
    const int head = cursor.head;
    const RowPrefix prefix = cursor.is_first() ? cursor.now.prefix : RowPrefix{0, 0};
    int until_merge = max(1, min(left, (cursor.num_tokens() + TILE - 1) / TILE) - MERGED_BEFORE);
#endif
    for (bool goes_on = true; goes_on;) {
      const int count = cursor.num_tokens(), hidden = cursor.num_hidden();
      if (count <= TILE) flags |= ENDS;
      goes_on = --left > 0 && count > TILE;
#if SINKS
      const int sinks = cursor.num_sinks();
      Query sink_query;
      if (sinks > 0) sink_query = turned(query);
#endif
      cursor.advance(heads.count);
      if (LOADS_AHEAD && !goes_on && left > 0) {
        if (ANGLES_AHEAD) next.load_angles(inputs.angles(cursor.now));
        load_heads();
      }
      u8* slot = ring.front();
      if (ROTATES && count <= TILE) newest.put_key(slot, count - 1, is_writer);
      float scores[BANDS][4];
      columns.score(scores, query, shared_address(slot));
#if SINKS
      if (sinks > 0) columns.score_sinks(scores, sink_query, shared_address(slot), sinks);
#endif
      ring.pop<false>();
      columns.change(scores, own_scores, scale, changed.cap, count);
      Columns::Weights weights;
#if SINKS
      columns.exponentiate(scores, weights, count, hidden, scale, sinks);
#else
      columns.exponentiate(scores, weights, count, hidden, scale);
#endif
      slot = ring.front();
      if (ROTATES && count <= TILE) newest.put_value(slot, count - 1, is_writer, cache.from_k_to_v());
      columns.accumulate(weights, shared_address(slot));
      ring.pop<true>();
#if SHARES
      if (--until_merge == 0 && prefix.num_states() > 0) merge_shared(columns, head, prefix);
#endif
    }
    return flags;
  }
};

DEVICE float warp_max(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2)
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, mask));
  return value;
}

// Merge a span of one column of the parts whose bits are set in `members`, in their order, into a row of `out` or of
// `part`.
DEVICE void merge_column(Shared& shared, u32 members, int column, int span, T* out, Part* part) {
  const int lane = threadIdx.x % 32, own_dimension = span * 128 + lane * 4;
  const int dimension = min(own_dimension, HEAD_SIZE - 4);
  const int first = __ffs(members) - 1;
  const bool is_member = members >> lane & 1;
  const Part& own = shared.part(is_member ? lane : first);
  const float maximum = warp_max(own.maximum[column]);
  const float weight = is_member ? exp2_fast(own.maximum[column] - maximum) : 0.0f;
  const float total = warp_sum(weight * own.total[column]);
  Pack<float, 4> sum = {};
  for (u32 rest = members; rest;) {
    float factors[4];
    Pack<float, 4> values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int one = rest ? __ffs(rest) - 1 : first;
      factors[i] = __shfl_sync(ALL_LANES, weight, one);
      if (rest == 0) factors[i] = 0.0f;
      values[i] = load<4>(&shared.part(one).output[column][dimension]);
      rest &= rest - 1;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) sum.at[j] = fmaf(factors[i], values[i].at[j], sum.at[j]);
  }
  if (own_dimension >= HEAD_SIZE) return;
  if (part == nullptr) {
    Pack<T, 4> result;
#pragma unroll
    for (int j = 0; j < 4; ++j) result.at[j] = from_float<T>(sum.at[j] / total);
    store<4>(out + column * HEAD_SIZE + dimension, result);
    return;
  }
  store<4>(&part->output[column][dimension], sum);
  if (own_dimension == 0) {
    part->maximum[column] = maximum;
    part->total[column] = total;
  }
}

// Merge what the CTA's workers have of the same (sequence, head): a warp for each span of each column. What other CTAs
// also have a part of goes to `parts`: [0] where an earlier CTA begins, [1] where this one does. Whether there is such.
DEVICE bool merge_workers(const Heads& heads, const Output& out, Shared& shared, Part* parts) {
  const int lane = threadIdx.x % 32;
  Entry mine = {0, 0, 0};
  if (lane < WARPS * 2) mine = shared.entries[lane];
  const u32 present = __ballot_sync(ALL_LANES, mine.flags != 0);
  const u32 before = present & ((1u << lane) - 1);
  const int previous = before ? 31 - __clz(before) : lane;
  const bool is_same = __shfl_sync(ALL_LANES, mine.row, previous) == mine.row &
                       __shfl_sync(ALL_LANES, mine.head, previous) == mine.head;
  const u32 firsts = __ballot_sync(ALL_LANES, mine.flags != 0 && !(before && is_same));
  const int num_items = __popc(firsts) * heads.width * SPANS;
  for (int item = threadIdx.x / 32; item < num_items; item += WARPS) {
    u32 rest = firsts;
    for (int i = item / SPANS / heads.width; i > 0; --i) rest &= rest - 1;
    const int first = __ffs(rest) - 1;
    const u32 later = rest & (rest - 1);
    const u32 members = present & (ALL_LANES << first) & (later ? (later & -later) - 1 : ALL_LANES);
    const int row = __shfl_sync(ALL_LANES, mine.row, first);
    const int head = __shfl_sync(ALL_LANES, mine.head, first);
    const bool begins = __shfl_sync(ALL_LANES, mine.flags, first) & BEGINS;
    const bool ends = __shfl_sync(ALL_LANES, mine.flags, 31 - __clz(members)) & ENDS;
    const int column = item / SPANS % heads.width;
    if (column < heads.num_queries(head))
      merge_column(shared, members, column, item % SPANS, out.at(heads, row, head),
                   begins && ends ? nullptr : parts + begins);
  }
  if (present == 0) return false;
  const bool begins = __shfl_sync(ALL_LANES, mine.flags, __ffs(present) - 1) & BEGINS;
  return !begins || !(__shfl_sync(ALL_LANES, mine.flags, 31 - __clz(present)) & ENDS);
}

// Merge the parts of all CTAs that share a (sequence, head), in their order.
DEVICE void merge_ctas(const Heads& heads, const Output& out, const Share& share, const Part* partials) {
  T* target = out.at(heads, share.row, share.head);
  const int num_elements = heads.num_queries(share.head) * HEAD_SIZE;
  for (int at = threadIdx.x * 4; at < num_elements; at += THREADS * 4) {
    const int column = at / HEAD_SIZE, dimension = at % HEAD_SIZE;
    float maximum = -INFINITE, total = 0.0f;
    Pack<float, 4> sum = {};
    for (int begin = share.first; begin <= share.last; begin += AT_ONCE) {
      float maxima[AT_ONCE], totals[AT_ONCE];
      Pack<float, 4> values[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int cta = min(begin + i, share.last);
        const Part& part = partials[cta * 2 + (cta == share.first)];
        maxima[i] = load_fresh<1>(&part.maximum[column]).at[0];
        totals[i] = load_fresh<1>(&part.total[column]).at[0];
        values[i] = load_fresh<4>(&part.output[column][dimension]);
      }
      float highest = maximum;
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) highest = fmaxf(highest, maxima[i]);
      const float factor = exp2_fast(maximum - highest);
      maximum = highest;
      total *= factor;
#pragma unroll
      for (int j = 0; j < 4; ++j) sum.at[j] *= factor;
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const float weight = begin + i <= share.last ? exp2_fast(maxima[i] - highest) : 0.0f;
        total = fmaf(weight, totals[i], total);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum.at[j] = fmaf(weight, values[i].at[j], sum.at[j]);
      }
    }
    Pack<T, 4> result;
#pragma unroll
    for (int j = 0; j < 4; ++j) result.at[j] = from_float<T>(sum.at[j] / total);
    store<4>(target + at, result);
  }
}

// The CTA has written its parts: merge what it is the last to have written a part of.
DEVICE void arrive(const Plan& plan, const Heads& heads, const Output& out, Shared& shared,
                   const Part* partials) {
  const Share shares[2] = {read(plan.shares + blockIdx.x * 2), read(plan.shares + blockIdx.x * 2 + 1)};
  __syncthreads();
  if (threadIdx.x < 2) {
    const Share share = threadIdx.x == 0 ? shares[0] : shares[1];
    const int others = share.last - share.first;
    bool is_last = false;
    if (others > 0) {
      __threadfence();
      is_last = atomicAdd(plan.arrivals + share.first, 1) == others;
      __threadfence();
      if (is_last) plan.arrivals[share.first] = 0;
    }
    shared.is_last[threadIdx.x] = is_last;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (shared.is_last[i]) merge_ctas(heads, out, shares[i], partials);
}

extern __shared__ __align__(1024) u8 shared_bytes[];

// The plan, whose place no register has kept meanwhile.
DEVICE Plan find_again(int* memory) {
  int num_ctas;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(num_ctas), "+l"(memory));
  return {memory, num_ctas, WARPS};
}

// Grid: a CTA for each SM, of any lengths. Rows of length 0 become zeros.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode_attention(const T* q, i64 q_stride, const T* k, i64 k_stride, const T* v, i64 v_stride,
                     const float* cos_sin, Cell* memory, const int* block_tables, i64 table_stride,
                     const int* lengths, int* plan_memory, T* rows, Part* partials, float scale,
                     i64 num_rows, i64 num_kv_heads, i64 group_size, i64 block_shift, i64 window,
                     i64 num_sinks, const float* sink_angles, float cap, const float* head_scores) {
  start_next();
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Plan plan{plan_memory, int(gridDim.x), WARPS};
  const Start* starts = plan.starts + blockIdx.x * WARPS;
  const Start start = read(starts + warp);
  const bool has_tiles = read(starts + WARPS - 1).count > 0;  // the last worker has one if any has
  const int first_row = blockIdx.x + gridDim.x * warp, row_step = gridDim.x * WARPS;
  bool has_empty = false;
  for (int row = first_row; row < num_rows; row += row_step)
    has_empty |= load_fresh<1>(lengths + row).at[0] == 0;
#if SHARES
  const Prefixes prefixes = plan.prefixes(int(num_rows));
  const Prefixes* const shared_prefixes = &prefixes;
  const int num_items = load_fresh<1>(prefixes.num_items).at[0];
#else
  constexpr const Prefixes* shared_prefixes = nullptr;
  constexpr int num_items = 0;
#endif
  // A CTA without work makes room for the next kernel; CTA 0 keeps the order of kernels.
  if (!has_tiles && !has_empty && blockIdx.x > 0 && num_items == 0) return;
  if (lane == 0) shared.entries[warp * 2] = shared.entries[warp * 2 + 1] = {0, 0, 0};

  const Heads heads{int(num_kv_heads), int(group_size)};
  const Output out = {rows, num_kv_heads * group_size * HEAD_SIZE};
  const Cache cache = {memory,       block_tables,     table_stride,
                       int(num_kv_heads), int(block_shift), heads.parts};
  const Inputs inputs = {q, q_stride, k, k_stride, v, v_stride, cos_sin, sink_angles};
  State* const states = reinterpret_cast<State*>(partials + gridDim.x * 2);
  const Cursor first(plan, start, {int(window), int(num_sinks)});
#if SHARES
  if (int(blockIdx.x) < num_items) {
    const Ahead ahead(cache, first, start.count, heads.count);
    attend_items(prefixes, num_items, heads, inputs, cache, lengths, ahead, shared.rings[0], states, scale);
  }
#endif
  Worker worker(heads, inputs, cache, out, states, shared_prefixes, num_items, scale, {cap, head_scores}, shared, first,
                start.count);
  const int filled = worker.begin();
  wait_for_previous();
  if (has_empty)
    for (int row = first_row; row < num_rows; row += row_step)
      if (load_fresh<1>(lengths + row).at[0] == 0)
        for (int i = lane * 8; i < out.row_elements; i += 32 * 8)
          store<8>(rows + row * out.row_elements + i, Pack<T, 8>{});
  if (has_tiles) worker.run(filled);
  __syncthreads();
#if SHARES
  if (num_items > 0 && threadIdx.x == 0) leave_items(prefixes);
#endif
  if (!has_tiles) return;
  if (!merge_workers(heads, out, shared, partials + blockIdx.x * 2)) return;
  arrive(LOADS_AHEAD ? plan : find_again(plan_memory), heads, out, shared, partials);
}
