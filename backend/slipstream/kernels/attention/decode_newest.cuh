// The newest token of a sequence: its K, rotated, and its V replace what the ring copied in their place, and go into
// the cache.
// -D ELEMENT (T: 16 bits), HEAD_SIZE
#pragma once
#include "attention/decode_ring.cuh"
#include "attention/rotation.cuh"

struct Newest {
  static constexpr int PAIRS = HEAD_SIZE / 4;  // two elements of K, and the two half a head on
  static constexpr int EACH = (PAIRS + 31) / 32;  // of a lane: every 32nd
  const int lane = threadIdx.x % 32;
  u32 key[EACH][2];
  Pack<float, 2> cosines[EACH];
  Pack<float, 2> sines[EACH];
  Pack<T, 8> value;  // in a lane for each chunk
  T* target;         // K in the cache

  DEVICE void load(const T* k, const T* v, const float* angles, T* cached) {
    target = cached;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = (lane + i * 32) * 2;
      if (at >= PAIRS * 2) continue;
      cosines[i] = load_angle(angles + at);
      sines[i] = load_angle(angles + HEAD_SIZE / 2 + at);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const T* pair = k + half * (HEAD_SIZE / 2) + at;
        key[i][half] = load_fresh<1>(reinterpret_cast<const u32*>(pair)).at[0];
      }
    }
    if (lane < CHUNKS) value = load_fresh<8>(v + lane * 8);
  }

  // Into row `token` of a slot of K, and into the cache if it `is_first` of the heads that share it.
  DEVICE void put_key(u8* slot, int token, bool is_first) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = (lane + i * 32) * 2;
      if (at >= PAIRS * 2) continue;
      rotate_pairs(key[i][0], key[i][1], cosines[i], sines[i]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int element = half * (HEAD_SIZE / 2) + at;
        u8* chunk = slot + chunk_offset(token, element / 8);
        *reinterpret_cast<u32*>(chunk + element % 8 * 2) = key[i][half];
        if (is_first) *reinterpret_cast<u32*>(target + element) = key[i][half];
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
