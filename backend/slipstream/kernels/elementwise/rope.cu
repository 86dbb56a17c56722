// Rotary embedding of q in place; rotated k, and v, written into the paged cache, in its format; before it, if asked
// for, the scales of an e4m3 product (eight_bits.cu), and the RMS norm of each head of q and k. LANES neighbouring threads for
// a head; grid: x = token, y = a share of its heads.
// -D ELEMENT (T), HEAD_SIZE, VECTOR (elements an access), FORMAT (of the cache: kv_format.cuh), LATE (weights of norms
// come behind the rotation, and then factors of queries by position)
#include "cache/kv_format.cuh"
#if FORMAT != 0
#include "cache/kv_quantize.cuh"
#endif

#ifndef LATE
#define LATE 0
#endif
#if LATE
#define QUERY_FACTORS , const float* query_factors
#define QUERY_FACTOR (query_factors == nullptr ? 1.0f : query_factors[position])
#else
#define QUERY_FACTORS
#define QUERY_FACTOR 1.0f
#endif

#if FORMAT == 0
#define BLOCK_HEADS
#else
#define BLOCK_HEADS , i64 block_heads  // all kv heads, or one
#endif

constexpr int HALF = HEAD_SIZE / 2;
constexpr int CHUNKS = HALF / VECTOR;  // of half a head: a thread takes a chunk of the first half and its partner
constexpr int LANES = CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : 4;
constexpr int ITEMS = (CHUNKS + LANES - 1) / LANES;  // pairs of chunks a thread
static_assert(HALF % VECTOR == 0 && CHUNKS <= 4 * LANES, "a few lanes hold a head");

using Chunk = Pack<T, VECTOR>;

// What a thread holds of a head: elements [at(i), at(i) + VECTOR) and those HALF further.
struct Part {
  Chunk first[ITEMS], second[ITEMS];

  static DEVICE int at(int i) { return (threadIdx.x % LANES + i * LANES) * VECTOR; }
  static DEVICE bool has(int i) { return at(i) < HALF; }

  DEVICE void load_from(const T* head) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if (has(i)) {
        first[i] = load_fresh<VECTOR>(head + at(i));
        second[i] = load_fresh<VECTOR>(head + HALF + at(i));
      }
  }
  DEVICE void store_to(T* head) const {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if (has(i)) {
        store<VECTOR>(head + at(i), first[i]);
        store<VECTOR>(head + HALF + at(i), second[i]);
      }
  }
  // `columns` and `bias` (or null) are those of the head's first element.
  DEVICE void scale(float row_scale, const float* columns, const T* bias) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (!has(i)) continue;
      scale_chunk(first[i], row_scale, columns + at(i), bias == nullptr ? nullptr : bias + at(i));
      scale_chunk(second[i], row_scale, columns + HALF + at(i), bias == nullptr ? nullptr : bias + HALF + at(i));
    }
  }
  static DEVICE void scale_chunk(Chunk& chunk, float row_scale, const float* columns, const T* bias) {
    const auto factors = load<VECTOR>(columns);
    Chunk addends = {};
    if (bias != nullptr) addends = load<VECTOR>(bias);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j)
      chunk.at[j] = from_float<T>(__fmul_rn(to_float(chunk.at[j]) * factors.at[j], row_scale) + to_float(addends.at[j]));
  }
  // 1 / rms of the head; by all threads of a warp.
  DEVICE float rstd(float eps) const {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        const float a = to_float(first[i].at[j]), b = to_float(second[i].at[j]);
        if (has(i)) squares = fmaf(b, b, fmaf(a, a, squares));
      }
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2)
      squares += __shfl_xor_sync(ALL_LANES, squares, mask);
    return 1.0f / sqrtf(squares / HEAD_SIZE + eps);
  }
  // Normalised if `factors` is given, then turned by the angles; if LATE, turned, then normalised, times `last`.
  DEVICE void rotate(const float* angles, float scale, const Part* factors, float last) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (!has(i)) continue;
      const auto cosines = load<VECTOR>(angles + at(i));
      const auto sines = load<VECTOR>(angles + HALF + at(i));
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        float a = to_float(first[i].at[j]), b = to_float(second[i].at[j]);
#if LATE
        float c = a * cosines.at[j] - b * sines.at[j], d = b * cosines.at[j] + a * sines.at[j];
        if (factors != nullptr) {
          c *= scale * to_float(factors->first[i].at[j]);
          d *= scale * to_float(factors->second[i].at[j]);
        }
        first[i].at[j] = from_float<T>(c * last);
        second[i].at[j] = from_float<T>(d * last);
#else
        if (factors != nullptr) {
          a *= scale * to_float(factors->first[i].at[j]);
          b *= scale * to_float(factors->second[i].at[j]);
        }
        first[i].at[j] = from_float<T>(a * cosines.at[j] - b * sines.at[j]);
        second[i].at[j] = from_float<T>(b * cosines.at[j] + a * sines.at[j]);
#endif
      }
    }
  }

#if FORMAT != 0
  static_assert(VECTOR > 1 && HALF * 2 == HEAD_SIZE, "pairs of numbers in one thread");
  static_assert(GROUPS <= 2 || (GROUPS == 4 && CHUNKS == LANES), "groups are the whole, halves or quarters");
  static constexpr int SHARERS = GROUPS == 4 ? LANES / 2 : LANES;  // lanes that have numbers of one group
  // As a row of numbers, and their scales. By all threads of a warp; only what is `real` is written. `scale`: of the
  // layer, of e4m3, or 0.
  DEVICE void quantize_to(u8* row, u8* scales, bool real, float scale) const {
    Range ranges[2];  // of both halves
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
#pragma unroll
      for (int j = 0; j < VECTOR; ++j)
        if (has(i)) {
          ranges[0].add(to_float(first[i].at[j]));
          ranges[1].add(to_float(second[i].at[j]));
        }
    if (GROUPS == 1) ranges[0].add(ranges[1]);
    ranges[0].join<SHARERS>();
    if (GROUPS > 1) ranges[1].join<SHARERS>();
    if (!real) return;
    const Quantizer low(ranges[0], scale), high(ranges[GROUPS > 1], scale);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if (has(i)) {
        store_quantized(row, at(i), first[i], low);
        store_quantized(row, HALF + at(i), second[i], high);
      }
    if (threadIdx.x % SHARERS != 0) return;
    scales += threadIdx.x % LANES / SHARERS * 2;
    scales[0] = low.code;
    if (FORMAT == INT4) scales[1] = low.zero_byte();
    if (GROUPS > 1) {
      scales[GROUPS] = high.code;
      scales[GROUPS + 1] = high.zero_byte();
    }
  }
  static DEVICE void store_quantized(u8* row, int element, const Chunk& chunk, const Quantizer& quantizer) {
    constexpr int EACH = FORMAT == INT4 ? 2 : 1;  // in a byte
    Pack<u8, VECTOR / EACH> bytes;
#pragma unroll
    for (int j = 0; j < VECTOR / EACH; ++j) {
      u32 byte = quantizer(to_float(chunk.at[j * EACH]));
      if (EACH == 2) byte |= quantizer(to_float(chunk.at[j * EACH + EACH - 1])) << 4;
      bytes.at[j] = u8(byte);
    }
    store<VECTOR / EACH>(row + element / EACH, bytes);
  }
#endif
};

#if FORMAT == 0 && !LATE
#define BOUNDS __launch_bounds__(128)
#else
#define BOUNDS __launch_bounds__(128, 4)  // told, ptxas spills no register
#endif

extern "C" __global__ void BOUNDS
    rope_and_cache(T* q, i64 q_stride, const T* k, i64 k_stride, const T* v, i64 v_stride,
                   const float* cos_sin, const i64* positions, const i64* slots, Cell* cache,
                   i64 num_q_heads, i64 num_kv_heads, i64 block_shift, const T* q_norm,
                   const T* k_norm, float eps, const float* row_scales, const float* column_scales,
                   const T* bias, float cache_k_scale, float cache_v_scale BLOCK_HEADS QUERY_FACTORS) {
  start_next();
  int head = (blockIdx.y * blockDim.x + threadIdx.x) / LANES;
  const i64 column = i64(head) * HEAD_SIZE;
  const bool is_query = head < num_q_heads;
  if (!is_query) head -= int(num_q_heads);
  const bool is_key = !is_query && head < num_kv_heads;
  if (!is_query && !is_key) head -= int(num_kv_heads);
  const bool norms = q_norm != nullptr;  // both or none
  Part factors;
  if (norms) factors.load_from(is_query ? q_norm : k_norm);

  wait_for_previous();
  const i64 token = blockIdx.x;
  const i64 slot = load_fresh<1>(slots + token).at[0];
  const i64 position = load_fresh<1>(positions + token).at[0];
  const float* angles = cos_sin + position * HEAD_SIZE;
  const bool real = is_query || (head < num_kv_heads && slot >= 0);
  T* query = q + token * q_stride + head * HEAD_SIZE;
  const T* source = (is_key ? k + token * k_stride : v + token * v_stride) + head * HEAD_SIZE;
  // K of kv head 0 at this slot; V lies one block further, the next head two.
  const i64 block_size = i64(1) << block_shift;
#if FORMAT == 0
  T* cached = cache + (slot >> block_shift) * num_kv_heads * 2 * block_size * HEAD_SIZE +
              (slot & (block_size - 1)) * HEAD_SIZE;
  T* target = cached + (head * 2 + !is_key) * block_size * HEAD_SIZE;
#endif

  Part part = {};
  if (real) part.load_from(is_query ? query : source);
  if (real && row_scales != nullptr)
    part.scale(load_fresh<1>(row_scales + token).at[0], column_scales + column,
               bias == nullptr ? nullptr : bias + column);
  const float scale = norms ? part.rstd(eps) : 1.0f;  // of V too, unused: shuffles take whole warps
  const float last = is_query ? QUERY_FACTOR : 1.0f;
#if FORMAT == 0
  if (!real) return;
  if (is_query || is_key) part.rotate(angles, scale, norms ? &factors : nullptr, last);
  part.store_to(is_query ? query : target);
#else
  if (real && (is_query || is_key)) part.rotate(angles, scale, norms ? &factors : nullptr, last);
  if (real && is_query) part.store_to(query);
  // A block holds all kv heads, or each head has one of its own.
  const BlockLayout layout = {block_heads, int(block_shift)};
  const bool holds_all = block_heads == num_kv_heads;
  const i64 number = holds_all ? slot >> block_shift : (slot >> block_shift) * num_kv_heads + head;
  const i64 kv_head = holds_all ? head : 0;
  u8* block = cache + number * layout.size();
  const i64 own = (slot & (block_size - 1)) + (is_key ? 0 : block_size);  // tokens from the head's first on
  part.quantize_to(block + layout.numbers(kv_head) + own * ROW_CELLS,
                   block + layout.scales(kv_head) + own * SCALE_BYTES, real && !is_query,
                   is_key ? cache_k_scale : cache_v_scale);
#endif
}
