// Random numbers of a row: functions of its seed and of the number of the output.
#pragma once

#include <cmath>
#include <cstdint>

namespace {

// Philox4x32-10 (Salmon et al., 2011) of counter (quad, number, 0, 0): the random words of token ids
// 4 quad .. 4 quad + 3.
inline void philox(uint32_t (&words)[4], uint32_t quad, uint32_t number, uint64_t seed) {
    words[0] = quad, words[1] = number, words[2] = 0, words[3] = 0;
    uint32_t first_key = static_cast<uint32_t>(seed), second_key = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t first = uint64_t{0xD2511F53} * words[0];
        const uint64_t second = uint64_t{0xCD9E8D57} * words[2];
        words[0] = static_cast<uint32_t>(second >> 32) ^ words[1] ^ first_key;
        words[1] = static_cast<uint32_t>(second);
        words[2] = static_cast<uint32_t>(first >> 32) ^ words[3] ^ second_key;
        words[3] = static_cast<uint32_t>(first);
        first_key += 0x9E3779B9;
        second_key += 0xBB67AE85;
    }
}

inline float gumbel(uint32_t bits) {
    const float uniform = (static_cast<float>(bits >> 9) + 0.5f) * 0x1p-23f;
    return -std::log(-std::log(uniform));
}

constexpr float MOST_GUMBEL = 16.7f;  // of the largest uniform number, 1 - 2 ** -24, it is 16.636

}  // namespace
