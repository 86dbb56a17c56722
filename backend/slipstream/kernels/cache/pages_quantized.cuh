// Tiles of a quantised cache (pages.cuh): a thread copies bytes to shared memory, and later makes of them numbers of T,
// rounded from what they mean exactly.
// -D ELEMENT (T), HEAD_SIZE, WARPS, TILE, WINDOWED, FORMAT (not 0; kv_format.cuh)

// K and V of one kv head of one sequence.
struct Pages {
  static constexpr int GROUP_BYTES = ROW_CELLS / GROUPS;
  static constexpr int WIDTH = GROUP_BYTES % 16 == 0 ? 16 : GROUP_BYTES % 8 == 0 ? 8 : 4;  // of an access
  static constexpr int ACCESSES = ROW_CELLS / WIDTH;  // of a row
  static constexpr int ITEMS = TILE * ACCESSES;
  static constexpr int STEPS = (ITEMS + THREADS - 1) / THREADS;
  static constexpr int PART_BYTES = TILE * ROW_CELLS;  // of K, or V, in shared memory
  static_assert(GROUP_BYTES % WIDTH == 0, "an access has one scale");

  // Of a tile's K, and of its V, for what this thread copies.
#if HEAD_SIZE <= 128
  struct Scales {
    u8 codes[2][STEPS];
    u8 zeros[2][STEPS];

    DEVICE float scale(int part, int step) const { return scale_of(codes[part][step]); }
    DEVICE u32 zero(int part, int step) const { return zero_of(zeros[part][step]); }
  };
#else
  // Rows of wide heads leave few registers: each lane of a row loads some of its scales, for all of them.
  struct Scales {
    static constexpr int COUNT = STEPS * 2 * GROUPS;  // of a lane's rows: by step, K or V, group
    static constexpr int EACH = (COUNT + ACCESSES - 1) / ACCESSES;
    static_assert(32 % ACCESSES == 0 && ITEMS % THREADS == 0, "whole rows in a warp");
    static_assert(ACCESSES % GROUPS == 0, "a row's groups are loaded together");
    u16 loaded[EACH];  // codes, in the upper byte zeros

    DEVICE float scale(int part, int step) const { return scale_of(u8(get(part, step))); }
    DEVICE u32 zero(int part, int step) const { return zero_of(u8(get(part, step) >> 8)); }

   private:
    DEVICE u32 get(int part, int step) const {
      const int first = (step * 2 + part) * GROUPS, lane = threadIdx.x % 32, column = lane % ACCESSES;
      const int from = lane - column + first % ACCESSES + column * WIDTH / GROUP_BYTES;
      return __shfl_sync(ALL_LANES, u32(loaded[first / ACCESSES]), from);
    }
  };
#endif

  const u8* head;      // numbers of K of this kv head in block 0
  const u8* scales_at;  // their scales
  const int* blocks;  // the sequence's block table
  i64 block_stride;   // bytes
  int block_shift;

  DEVICE static Pages of(const u8* cache, const BlockLayout& layout, i64 kv_head, const int* blocks) {
    return {cache + layout.numbers(kv_head), cache + layout.scales(kv_head), blocks, layout.size(), layout.block_shift};
  }

  // Starts the copy of tokens [first, first + TILE) to `memory`; zeros outside of [begin, end), where no table's entry
  // is read that may be anything.
  DEVICE void start_copy(u8* memory, Scales& scales, int first, int begin, int end) const {
    const int mask = (1 << block_shift) - 1;
    const i64 from_k_to_v = i64(ROW_CELLS) << block_shift, from_scales_to_v = i64(SCALE_BYTES) << block_shift;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int i = threadIdx.x + step * THREADS;
      if (ITEMS % THREADS != 0 && i >= ITEMS) continue;
      const int token = first + i / ACCESSES, at = i % ACCESSES * WIDTH;
      const bool inside = token < end && !(WINDOWED && token < begin);
      const i64 block = inside ? blocks[token >> block_shift] * block_stride : 0;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const u8* row = head + (inside ? block + part * from_k_to_v + (token & mask) * ROW_CELLS + at : 0);
        copy_async_bytes<WIDTH>(shared_address(memory + part * PART_BYTES + i * WIDTH), row, inside ? WIDTH : 0);
#if HEAD_SIZE <= 128
        const u8* own = scales_at + block + part * from_scales_to_v + (token & mask) * SCALE_BYTES +
                        (FORMAT == INT4 ? at / GROUP_BYTES * 2 : 0);
        scales.codes[part][step] = inside ? own[0] : 0;
        if (FORMAT == INT4) scales.zeros[part][step] = inside ? own[1] : 0;
#endif
      }
    }
#if HEAD_SIZE > 128
#pragma unroll
    for (int i = 0; i < Scales::EACH; ++i) {
      const int number = i * ACCESSES + threadIdx.x % ACCESSES, step = number / (2 * GROUPS);
      const int token = first + (threadIdx.x + step * THREADS) / ACCESSES;
      const bool inside = number < Scales::COUNT && token < end && !(WINDOWED && token < begin);
      scales.loaded[i] = 0;
      if (!inside) continue;
      const u8* own = scales_at + blocks[token >> block_shift] * block_stride +
                      number / GROUPS % 2 * from_scales_to_v + (token & mask) * SCALE_BYTES;
      scales.loaded[i] = FORMAT == INT4 ? reinterpret_cast<const u16*>(own)[number % GROUPS] : own[0];
    }
#endif
  }

  // K to `tile`, V behind it, once this thread's copies are there.
  DEVICE void store(T* tile, const u8* memory, const Scales& scales) const {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int i = threadIdx.x + step * THREADS;
      if (ITEMS % THREADS != 0 && i >= ITEMS) continue;
      T* target = tile + i / ACCESSES * PITCH + i % ACCESSES * WIDTH * NUMBERS / 4;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const u8* source = memory + part * PART_BYTES + i * WIDTH;
        const auto words = ::load<WIDTH / 4>(reinterpret_cast<const u32*>(source));
        const float scale = scales.scale(part, step) * UNIT;
        const u32 zeros = FORMAT == INT4 ? scales.zero(part, step) * 0x10001u : 0;
#pragma unroll
        for (int word = 0; word < WIDTH / 4; ++word)
          store_numbers(target + part * TILE_ELEMENTS + word * NUMBERS, words.at[word], scale, zeros);
      }
    }
  }
};
