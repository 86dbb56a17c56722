// What adapters add to a few rows of a GEMM with packed weights: `t B^T` of `t = x A^T`, by two warps beside those that
// multiply weights. These find the terms and load A and B from before the previous kernel's end on. A part of a row of A
// is one warp's, of all CTAs; the sum is published as it is, with no count: 0 is what has not come yet. Each CTA takes all
// of t and makes the terms of its own outputs, which are added where a bias is. So a place takes no launch of its own, and
// its latencies pass while weights are multiplied. All CTAs run at once, or this would wait forever.
// -D ELEMENT (T)
#pragma once
#include "lora/table.cuh"
#include "runtime/tma.cuh"

constexpr int TERM_THREADS = 64;
constexpr int TERM_ROWS = 8;       // of x, at most
constexpr int TERM_INPUTS = 1024;  // of a part of a row of A
constexpr int TERM_LOADS = TERM_INPUTS / 256;
constexpr int T_COLUMNS = 192;  // of t of a row, that lie in shared memory at once
constexpr int AT_ONCE = 3;      // outputs of a thread whose first ranks of B are on their way while t is

struct Adapters {
  const i64* groups;
  int num_groups;
  const int* list;
  i64 place;
  const T* x;  // rows as adapters take them
  i64 x_stride;
  int num_rows, num_inputs;
  int* num_readers;  // CTAs that have all of t; 0 before and after a launch
  float* t;          // [rows, splits, width], likewise
  int width;
  int sizes[2];  // outputs of the first two parts

  DEVICE int num_splits() const { return (num_inputs + TERM_INPUTS - 1) / TERM_INPUTS; }
  DEVICE float* partial(int row, int split, int column) const {
    return t + (i64(row) * num_splits() + split) * width + column;
  }
};

// The outputs of a CTA: of each row of x `count` from `first` on, and of a gate as many ups behind `half` outputs.
struct OwnOutputs {
  int first, count, half, num_outputs;
  bool gated;

  DEVICE int of_row() const { return gated ? 2 * count : count; }
  DEVICE int place(int row, int stream, int output) const { return row * of_row() + stream * count + output - first; }
};

struct alignas(16) SharedTerms {
  float t[TERM_ROWS][T_COLUMNS];
  u64 barrier;  // at which the terms are there
  Term of_row[TERM_ROWS][PLACE_PARTS];
  const T* first_a[TERM_ROWS][PLACE_PARTS];

  DEVICE u32 ready() const { return shared_address(&barrier); }
  // By the threads of a CTA, of which one makes the barrier; then all meet.
  DEVICE void clear() {
    if (threadIdx.x < TERM_ROWS * PLACE_PARTS) of_row[threadIdx.x / PLACE_PARTS][threadIdx.x % PLACE_PARTS] = Term::none();
  }
  DEVICE int num_columns(int row) const {
    int count = 0;
#pragma unroll
    for (int part = 0; part < PLACE_PARTS; ++part) count += of_row[row][part].rank;
    return count;
  }
};

__shared__ SharedTerms shared_terms;

DEVICE void publish(float* address, float value) {
  const u32 bits = __float_as_uint(value);
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(bits == 0 ? 0x80000000u : bits) : "memory");
}
DEVICE Pack<u32, 4> load_published(const float* address) {
  Pack<u32, 4> found;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.at[0]), "=r"(found.at[1]), "=r"(found.at[2]), "=r"(found.at[3])
               : "l"(address)
               : "memory");
  return found;
}

// A part of a row of A, of which a lane has eights of inputs, and the row of x that it is multiplied with.
struct PartOfA {
  int row = -1, split, column;  // no row: there is none
  Pack<T, 8> values[TERM_LOADS];

  DEVICE int input(int i) const { return split * TERM_INPUTS + i * 256 + threadIdx.x % 32 * 8; }
  DEVICE void load(const Adapters& adapters, const T* a) {
#pragma unroll
    for (int i = 0; i < TERM_LOADS; ++i)
      values[i] = input(i) < adapters.num_inputs ? load_fresh<8>(a + input(i)) : Pack<T, 8>{};
  }
  DEVICE void multiply(const Adapters& adapters) const {
    const T* x = adapters.x + row * adapters.x_stride;
    Pack<T, 8> of_x[TERM_LOADS];
#pragma unroll
    for (int i = 0; i < TERM_LOADS; ++i)
      of_x[i] = input(i) < adapters.num_inputs ? load_fresh<8>(x + input(i)) : Pack<T, 8>{};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < TERM_LOADS; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) sum = fmaf(to_float(values[i].at[j]), to_float(of_x[i].at[j]), sum);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) publish(adapters.partial(row, split, column), sum);
  }
};

// An output of a row of x, and the ranks of B that are on their way.
struct OutputTerm {
  int row = -1, part, output;  // of the part; no row: there is no term
  Pack<T, 8> b[2];

  DEVICE const T* address(const T* tile) const { return tile + i64(output) * RANKS; }
  DEVICE void read(const T* tile) {
    b[0] = load_fresh<8>(address(tile));
    b[1] = load_fresh<8>(address(tile) + 8);
  }
  // What columns of t from `first` on add to `value`.
  DEVICE float add(const SharedTerms& shared, float value, int first) {
    const Term& term = shared.of_row[row][part];
    const int begin = max(first - term.column, 0), end = min(first + T_COLUMNS - term.column, term.rank);
#pragma unroll 1
    for (int rank = begin; rank < end; rank += RANKS) {
      if (rank > 0) read(term.tile(rank, 1));
      const float* t = &shared.t[row][term.column + rank - first];
#pragma unroll
      for (int i = 0; i < RANKS; i += 4) {
        const auto four = load<4>(t + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) value = fmaf(four.at[j], to_float(b[i / 8].at[i % 8 + j]), value);
      }
    }
    return value;
  }
};

// What the two warps do; `values` gets the terms, [row][own output].
struct TermWarps {
  const Adapters adapters;
  const OwnOutputs own;
  float* values;
  SharedTerms& shared;
  const int thread = threadIdx.x % TERM_THREADS;

  DEVICE void sync() const { asm volatile("bar.sync 2, %0;" ::"n"(TERM_THREADS) : "memory"); }
  DEVICE void find() const {
    const int group = thread / PLACE_PARTS, part = thread % PLACE_PARTS;
    if (group >= min(adapters.num_groups, adapters.num_rows)) return;
    const Group found = Group::of(adapters.groups, group);
    const Term of_a = Term::of(found, adapters.place, part, 0), of_b = Term::of(found, adapters.place, part, 1);
#pragma unroll 1
    for (int i = 0; i < found.count; ++i) {
      const int row = load_fresh<1>(adapters.list + found.begin + i).at[0];
      shared.of_row[row][part] = of_b;
      shared.first_a[row][part] = of_a.first;
    }
  }
  // Of all that there are, and none behind them.
  DEVICE PartOfA part_of_a(int number) const {
    PartOfA found;
    const int num_splits = adapters.num_splits();
#pragma unroll 1
    for (int i = 0; i < adapters.num_rows * PLACE_PARTS; ++i) {
      const int row = i / PLACE_PARTS, part = i % PLACE_PARTS;
      const Term& term = shared.of_row[row][part];
      if (number < term.rank * num_splits) {
        const int rank = number / num_splits;
        found.row = row, found.split = number % num_splits, found.column = term.column + rank;
        const T* tile = rank < RANKS ? shared.first_a[row][part] : term.tile(rank, 0);
        found.load(adapters, tile + i64(rank % RANKS) * adapters.num_inputs);
        break;
      }
      number -= term.rank * num_splits;
    }
    return found;
  }
  DEVICE OutputTerm output(int place) const {
    OutputTerm found;
    const int row = place / own.of_row(), number = place % own.of_row();
    found.output = own.first + (number < own.count ? number : own.half + number - own.count);
    if (row >= adapters.num_rows || found.output >= own.num_outputs) return found;
    found.part = 0;
#pragma unroll
    for (int j = 0; j < PLACE_PARTS - 1; ++j)
      if (found.part == j && found.output >= adapters.sizes[j]) found.output -= adapters.sizes[j], found.part = j + 1;
    if (shared.of_row[row][found.part].rank > 0) found.row = row;
    return found;
  }
  DEVICE void prefetch_b() const {
#pragma unroll 1
    for (int place = thread; place < adapters.num_rows * own.of_row(); place += TERM_THREADS) {
      const OutputTerm term = output(place);
      if (term.row >= 0) prefetch(term.address(shared.of_row[term.row][term.part].first));
    }
  }
  DEVICE void load_b(Pack<T, 8> (&b)[AT_ONCE][2], int first) const {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      OutputTerm term = output(first + i * TERM_THREADS + thread);
      if (term.row < 0) continue;
      term.read(shared.of_row[term.row][term.part].first);
      b[i][0] = term.b[0], b[i][1] = term.b[1];
    }
  }
  // Waits for columns of t from `first` on, of `num_columns` at most. Four threads have four columns of a row; each adds up
  // every fourth split.
  DEVICE void fetch_t(int first, int num_columns) const {
    const int sub = thread % 4, num_splits = adapters.num_splits();
    const int of_row = min(num_columns - first, T_COLUMNS) / 4;
#pragma unroll 1
    for (int begin = 0; begin < adapters.num_rows * of_row; begin += TERM_THREADS / 4) {
      const int place = begin + thread / 4, row = place / of_row, column = first + place % of_row * 4;
      const bool is_there = row < adapters.num_rows && column < shared.num_columns(row);
      float sums[4] = {};
#pragma unroll 1
      for (int split = sub; split < num_splits && is_there; split += 16) add_splits(sums, row, column, split);
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int mask = 1; mask < 4; mask *= 2) sums[j] += __shfl_xor_sync(ALL_LANES, sums[j], mask);
      if (sub == 0 && is_there)
        store<4>(&shared.t[row][column - first], Pack<float, 4>{{sums[0], sums[1], sums[2], sums[3]}});
    }
  }
  // Every fourth of 16 splits.
  DEVICE void add_splits(float (&sums)[4], int row, int column, int split) const {
    Pack<u32, 4> found[4];
#pragma unroll 1
    while (true) {
      bool are_there = true;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (split + 4 * i < adapters.num_splits()) found[i] = load_published(adapters.partial(row, split + 4 * i, column));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (split + 4 * i < adapters.num_splits())
#pragma unroll
          for (int j = 0; j < 4; ++j) are_there &= found[i].at[j] != 0;
      if (are_there) break;
      __nanosleep(20);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (split + 4 * i < adapters.num_splits())
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[j] += __uint_as_float(found[i].at[j]);
  }
  // Outputs without a term get -0, which changes no number.
  DEVICE void expand(Pack<T, 8> (&b)[AT_ONCE][2], int first) const {
    const int count = adapters.num_rows * own.of_row();
#pragma unroll 1
    for (int begin = 0; begin < count; begin += AT_ONCE * TERM_THREADS) {
      if (begin > 0 || first > 0) load_b(b, begin);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int place = begin + i * TERM_THREADS + thread;
        if (place >= count) continue;
        OutputTerm term = output(place);
        term.b[0] = b[i][0], term.b[1] = b[i][1];
        if (first == 0) values[place] = term.row < 0 ? -0.0f : term.add(shared, 0.0f, 0);
        if (first > 0 && term.row >= 0) values[place] = term.add(shared, values[place], first);
      }
    }
  }
  // The last CTA that has all of t makes it 0 again.
  DEVICE void leave() const {
    if (thread >= 32) return;
    float is_last = 0.0f;
    if (thread == 0) {
      __threadfence();
      is_last = atomicAdd(adapters.num_readers, 1) == int(gridDim.x) - 1 ? 1.0f : 0.0f;
    }
    if (warp_sum(is_last) == 0.0f) return;
#pragma unroll 1
    for (int row = 0; row < adapters.num_rows; ++row)
#pragma unroll 1
      for (int split = 0; split < adapters.num_splits(); ++split)
#pragma unroll 1
        for (int column = thread * 4; column < shared.num_columns(row); column += 128)
          store<4>(adapters.partial(row, split, column), Pack<float, 4>{});
    if (thread == 0) *adapters.num_readers = 0;
  }
  DEVICE void run() const {
    find();
    sync();
    int number = int(gridDim.x - 1 - blockIdx.x) * (TERM_THREADS / 32) + thread / 32;
    PartOfA part = part_of_a(number);
    prefetch_b();
    wait_for_previous();
#pragma unroll 1
    while (part.row >= 0) {
      part.multiply(adapters);
      part = part_of_a(number += gridDim.x * (TERM_THREADS / 32));
    }
    Pack<T, 8> b[AT_ONCE][2];
    load_b(b, 0);
    int num_columns = 0;
#pragma unroll 1
    for (int row = 0; row < adapters.num_rows; ++row) num_columns = max(num_columns, shared.num_columns(row));
#pragma unroll 1
    for (int first = 0; first == 0 || first < num_columns; first += T_COLUMNS) {
      if (first > 0) sync();  // what is there has been read
      fetch_t(first, num_columns);
      sync();
      expand(b, first);
    }
    barrier_arrive(shared.ready());
    if (num_columns > 0) leave();
  }
};

// A call, with its arguments in registers: inlined, it would take registers from the warps that multiply.
DEVICE_CALL void make_terms(const i64* groups, int num_groups, const int* list, i64 place, const T* x, i64 x_stride,
                            int num_rows, int num_inputs, int* num_readers, float* t, int width, int size0, int size1,
                            OwnOutputs own, float* values) {
  TermWarps{{groups, num_groups, list, place, x, x_stride, num_rows, num_inputs, num_readers, t, width, {size0, size1}},
            own, values, shared_terms}
      .run();
}
