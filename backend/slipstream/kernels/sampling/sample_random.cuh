// Random numbers of a row: functions of its seed and of the number of the output.
#pragma once
#include "runtime/common.cuh"

// Philox4x32-10 of counter (quad, output number, 0, 0): the random words of token ids 4 quad .. 4 quad + 3.
DEVICE void philox(u32 (&words)[4], u32 quad, u32 number, u64 seed) {
  words[0] = quad, words[1] = number, words[2] = 0, words[3] = 0;
  u32 key0 = u32(seed), key1 = u32(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 first = u64(0xD2511F53u) * words[0], second = u64(0xCD9E8D57u) * words[2];
    words[0] = u32(second >> 32) ^ words[1] ^ key0;
    words[1] = u32(second);
    words[2] = u32(first >> 32) ^ words[3] ^ key1;
    words[3] = u32(first);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}
DEVICE float uniform(u32 bits) { return (float(bits >> 9) + 0.5f) * 0x1p-23f; }
