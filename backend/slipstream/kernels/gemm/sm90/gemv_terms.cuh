// What adapters add to the rows of a GEMV: `t B^T` of `t = x A^T`. Rows of A count as more rows of the weights, one for a
// CTA, from those with the fewest outputs on; what t they make, all CTAs take while the last weights arrive, and add
// before they round. So a term costs its bytes, and no launch. All CTAs run at once, or this would wait forever.
// -D as gemv.cu
#pragma once
#include "gemm/sm90/gemv_part.cuh"
#include "lora/table.cuh"

constexpr int COLUMNS = CTAS == 2 ? 64 : 256;  // of t of a row, that lie in shared memory

struct Adapters {
  const i64* groups;
  int num_groups;
  const int* list;
  i64 place;
  int* arrivals;  // rows of A that are multiplied, and CTAs that know it: 0 before and after a launch
  float* t;       // [ROWS, width]
  int width;
  int sizes[2];  // outputs of the first two parts

  DEVICE int num_found() const { return num_groups < ROWS ? num_groups : ROWS; }
};

struct SharedTerms {
  Term of_row[ROWS][PLACE_PARTS];
  float t[ROWS][COLUMNS];
  float sums[ROWS][8];  // of a row of A, by warps

  // By the threads of a CTA, before a barrier and after one.
  DEVICE void clear() {
    if (threadIdx.x < ROWS * PLACE_PARTS) of_row[threadIdx.x / PLACE_PARTS][threadIdx.x % PLACE_PARTS] = Term::none();
  }
  DEVICE void find(const Adapters& adapters) {
    const int group = threadIdx.x / PLACE_PARTS, part = threadIdx.x % PLACE_PARTS;
    if (group >= adapters.num_found()) return;
    const Term term = Term::of(Group::of(adapters.groups, group), adapters.place, part, 1);
    for (int i = 0; i < term.count; ++i) {
      const int row = load_fresh<1>(adapters.list + term.begin + i).at[0];
      of_row[row][part] = term;
    }
  }
  // Columns of t of a row, wherever they lie; not from the L1 cache, which other CTAs' writes do not reach.
  DEVICE const volatile float* columns(const Adapters& adapters, int row, const Term& term) const {
    const bool is_here = term.column + term.rank <= COLUMNS;
    return (is_here ? t[row] : adapters.t + row * adapters.width) + term.column;
  }
};

// By a warp that has nothing else to do: waits until all of t is there and takes what fits.
DEVICE void fetch_t(const Adapters& adapters, SharedTerms& shared) {
  const int lane = threadIdx.x % 32, group = lane / PLACE_PARTS;
  float count = 0.0f;
  if (group < adapters.num_found()) {
    const Term term = Term::of(Group::of(adapters.groups, group), adapters.place, lane % PLACE_PARTS, 1);
    count = float(term.rank * term.count);
  }
  const int wanted = int(warp_sum(count));
  if (lane == 0) {
    while (load_acquire(adapters.arrivals) != wanted) __nanosleep(20);
    if (atomicAdd(adapters.arrivals + 1, 1) == int(gridDim.x) - 1) adapters.arrivals[0] = adapters.arrivals[1] = 0;
  }
  __syncwarp();
  const int most = adapters.width < COLUMNS ? adapters.width : COLUMNS;
  for (int i = lane * 4; i < most; i += 128)
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const auto pack = load_fresh<4>(adapters.t + row * adapters.width + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) shared.t[row][i + j] = pack.at[j];
    }
}

// The term of one output of a row of x. The first 16 ranks of B are loaded early.
class OutputTerm {
  const Term* term;
  int row, column;  // of the part
  Pack<u32, 4> b[2];

  DEVICE void read(int rank) {
    const u32* words = reinterpret_cast<const u32*>(term->known(rank, 1) + i64(column) * RANKS);
    b[0] = load_fresh<4>(words);
    b[1] = load_fresh<4>(words + 4);
  }

 public:
  DEVICE OutputTerm() : term(nullptr) {}
  DEVICE OutputTerm(const SharedTerms& shared, int row, int part, int column)
      : term(&shared.of_row[row][part]), row(row), column(column) {
    if (is_there()) read(0);
  }
  DEVICE static OutputTerm of_stacked(const Adapters& adapters, const SharedTerms& shared, int row, int column) {
    int part = 0;
#pragma unroll
    for (int i = 0; i < PLACE_PARTS - 1; ++i)
      if (part == i && column >= adapters.sizes[i]) {
        column -= adapters.sizes[i];
        part = i + 1;
      }
    return OutputTerm(shared, row, part, column);
  }
  DEVICE bool is_there() const { return term != nullptr && term->rank > 0; }
  // When `fetch_t` is done.
  DEVICE float value(const Adapters& adapters, const SharedTerms& shared) {
    const volatile float* t = shared.columns(adapters, row, *term);
    float sum = 0.0f;
    for (int rank = 0; rank < term->rank; rank += RANKS) {
      if (rank > 0) read(rank);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float pair[2];
        unpack(b[i / 4].at[i % 4], pair, T{});
        sum = fmaf(t[rank + 2 * i], pair[0], sum);
        sum = fmaf(t[rank + 2 * i + 1], pair[1], sum);
      }
    }
    return sum;
  }
};
