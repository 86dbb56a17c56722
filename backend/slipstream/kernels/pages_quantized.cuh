// Tiles of a quantised cache (pages.cuh): a thread copies bytes to shared memory, and later makes of them numbers of T,
// rounded from what they mean exactly.
// -D ELEMENT (T), HEAD_SIZE, WARPS, WINDOWED, FORMAT (not 0; kv_format.cuh)

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
  struct Scales {
    u8 codes[2][STEPS];
    u8 zeros[2][STEPS];
  };

  const u8* head;     // K of this kv head in block 0
  const int* blocks;  // the sequence's block table
  i64 block_stride;   // bytes
  int block_shift;

  // Starts the copy of tokens [first, first + TILE) to `memory`; zeros outside of [begin, end), where no table's entry
  // is read that may be anything.
  DEVICE void start_copy(u8* memory, Scales& scales, int first, int begin, int end) const {
    const int mask = (1 << block_shift) - 1;
    const i64 from_k_to_v = i64(ROW_CELLS + SCALE_BYTES) << block_shift;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int i = threadIdx.x + step * THREADS;
      if (ITEMS % THREADS != 0 && i >= ITEMS) continue;
      const int token = first + i / ACCESSES, at = i % ACCESSES * WIDTH;
      const bool inside = token < end && !(WINDOWED && token < begin);
      const u8* block = head;
      if (inside) block += blocks[token >> block_shift] * block_stride;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const u8* rows = block + (inside ? part * from_k_to_v : 0);
        const u8* own = rows + (i64(ROW_CELLS) << block_shift) + (token & mask) * SCALE_BYTES +
                        (FORMAT == INT4 ? at / GROUP_BYTES * 2 : 0);
        copy_async_bytes<WIDTH>(shared_address(memory + part * PART_BYTES + i * WIDTH),
                                rows + (inside ? (token & mask) * ROW_CELLS + at : 0), inside ? WIDTH : 0);
        scales.codes[part][step] = inside ? own[0] : 0;
        if (FORMAT == INT4) scales.zeros[part][step] = inside ? own[1] : 0;
      }
    }
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
        const float scale = scale_of(scales.codes[part][step]) * UNIT;
        const u32 zeros = FORMAT == INT4 ? zero_of(scales.zeros[part][step]) * 0x10001u : 0;
#pragma unroll
        for (int word = 0; word < WIDTH / 4; ++word)
          store_word(target + part * TILE_ELEMENTS + word * NUMBERS, words.at[word], scale, zeros);
      }
    }
  }

 private:
  static DEVICE void store_word(T* target, u32 word, float scale, u32 zeros) {
    u32 pairs[PAIRS];
    unpack(pairs, word, zeros);
    constexpr int EACH = NUMBERS < VECTOR ? NUMBERS : VECTOR;  // in a store
    Pack<T, EACH> numbers[NUMBERS / EACH];
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) {
      const u32 pair = pairs[i % PAIRS];
      numbers[i / EACH].at[i % EACH] = from_float<T>(to_float(Half{u16(i < PAIRS ? pair : pair >> 16)}) * scale);
    }
#pragma unroll
    for (int i = 0; i < NUMBERS / EACH; ++i) ::store<EACH>(target + i * EACH, numbers[i]);
  }
};
