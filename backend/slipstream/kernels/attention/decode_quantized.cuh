// What decode_bytes.cuh (e4m3, int8) and decode_int4.cuh have in common: a fragment's rows and columns take the
// dimensions in the order in which a lane finds them in 32 bits of the cache.
// -D ELEMENT (T: 16 bits), HEAD_SIZE, WINDOWED, FORMAT (not 0)
#pragma once
#include "attention/decode_sums.cuh"

constexpr int CHUNK_NUMBERS = 4 * NUMBERS;      // of 16 bytes
constexpr int GROUP_CHUNKS = CHUNKS / GROUPS;   // that share their scales

DEVICE u32 pack_halves(float low, float high) {
  return u32(from_float<Half>(low).bits) | u32(from_float<Half>(high).bits) << 16;
}
DEVICE float low_half(u32 pair) { return to_float(Half{u16(pair)}); }
DEVICE float high_half(u32 pair) { return to_float(Half{u16(pair >> 16)}); }

// From the address of a chunk 0 to that of another chunk of the same token.
DEVICE u32 at_chunk(u32 address, int chunk) {
  return SWIZZLED ? address ^ u32(chunk * 16) : address + chunk * 16;
}

// Query heads as they come: a lane 4 g + t has of every chunk the numbers of head g that its 32 bits of K meet.
struct Numbers {
  Pack<u32, PAIRS> chunks[CHUNKS];  // two numbers each

  DEVICE void load_angles(const float*) {}
  DEVICE void load_heads(const T* heads, int count) {
    const int lane = threadIdx.x % 32;
    const T* own = heads + lane / 4 * HEAD_SIZE + lane % 4 * NUMBERS;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
      chunks[i] = lane / 4 < count
                      ? load_fresh<PAIRS>(reinterpret_cast<const u32*>(own + i * CHUNK_NUMBERS))
                      : Pack<u32, PAIRS>{};
  }
  DEVICE float number(int chunk, int i) const {
    return to_float(T{u16(chunks[chunk].at[i / 2] >> i % 2 * 16)});
  }
};

// The first of the two dimensions next to each other that a lane has of a step, in its rows g and g + 8.
DEVICE int dimension(int step) {
  constexpr int STEPS_OF_CHUNK = PAIRS / 2;
  const int lane = threadIdx.x % 32;
  return step / STEPS_OF_CHUNK * CHUNK_NUMBERS + lane / 4 * PAIRS + step % STEPS_OF_CHUNK * 2;
}
