// The newest token of a sequence: its K, rotated, and its V replace what the ring copied in their place, and go into
// the cache.
// -D ELEMENT (T: 16 bits), HEAD_SIZE
#pragma once
#include "decode_ring.cuh"
#include "rotation.cuh"

struct Newest {
  static constexpr int PAIRS = HEAD_SIZE / 4;  // lanes that have two elements of K, and the two half a head on
  const int lane = threadIdx.x % 32;
  u32 key[2];
  Pack<float, 2> cosines;
  Pack<float, 2> sines;
  Pack<T, 8> value;  // in a lane for each chunk
  T* target;         // K in the cache

  DEVICE void load(const T* k, const T* v, const float* angles, T* cached) {
    target = cached;
    if (lane < PAIRS) {
      cosines = ::load<2>(angles + lane * 2);
      sines = ::load<2>(angles + HEAD_SIZE / 2 + lane * 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const T* pair = k + half * (HEAD_SIZE / 2) + lane * 2;
        key[half] = load_fresh<1>(reinterpret_cast<const u32*>(pair)).at[0];
      }
    }
    if (lane < CHUNKS) value = load_fresh<8>(v + lane * 8);
  }

  // Into row `token` of a slot of K, and into the cache if it `is_first` of the heads that share it.
  DEVICE void put_key(u8* slot, int token, bool is_first) {
    if (lane < PAIRS) {
      rotate_pairs(key[0], key[1], cosines, sines);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int element = half * (HEAD_SIZE / 2) + lane * 2;
        u8* chunk = slot + chunk_offset(token, element / 8);
        *reinterpret_cast<u32*>(chunk + element % 8 * 2) = key[half];
        if (is_first) *reinterpret_cast<u32*>(target + element) = key[half];
      }
    }
    __syncwarp();
  }
  DEVICE void put_value(u8* slot, int token, bool is_first, i64 from_k_to_v) const {
    if (lane < CHUNKS) {
      store<8>(reinterpret_cast<T*>(slot + chunk_offset(token, lane)), value);
      if (is_first) store<8>(target + from_k_to_v + lane * 8, value);
    }
    __syncwarp();
  }
};
