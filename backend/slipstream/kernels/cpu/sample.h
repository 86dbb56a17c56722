// Sampling of a token a row of logits, as sampling/sample.py defines it.
//
// No sort: what top-p and min-p keep is found among the tokens of a few bins, and random numbers are
// made for tokens alone that may still win. Sums are in one order, whatever the instruction set.
#pragma once

#include <functional>

#include "logits.h"
#include "philox.h"

namespace {

// How to sample a row: a record, of which `where` says the offsets.
struct Choice {
    const char *record;
    const int32_t *where;

    template <class T>
    T get(Field field) const {
        T value;
        std::memcpy(&value, record + where[field], sizeof value);
        return value;
    }
    float number(Field field) const { return get<float>(field); }
    int32_t whole(Field field) const { return get<int32_t>(field); }
    bool has_penalties() const {
        return number(REPETITION) != 1.0f || number(PRESENCE) != 0.0f || number(FREQUENCY) != 0.0f;
    }
    bool is_narrow() const { return whole(LIKELIEST) > 0; }
    float temperature() const { return number(is_narrow() ? HEAT : TEMPERATURE); }
};

constexpr int32_t MOST_COUNT = 0x7fff;

struct Edit {
    int32_t token_id;
    float addend;
};

// A row's logits behind edits and penalties, in `memory` if it has such.
inline const float *edited(const Sampling &s, const Choice &how, const float *logits,
                           std::vector<float> &memory) {
    const int32_t first = how.whole(FIRST_EDIT), end = how.whole(END_EDIT);
    const bool has_penalties = how.has_penalties();
    if (first >= end && !has_penalties) return logits;
    float *y = room(memory, s.vocab);
    std::memcpy(y, logits, sizeof(float) * s.vocab);
    const Edit *edits = static_cast<const Edit *>(s.edits);
    for (int32_t i = first; i < end; ++i) y[edits[i].token_id] += edits[i].addend;
    if (!has_penalties) return y;
    const int16_t *states = s.counts + static_cast<int64_t>(how.whole(SLOT)) * s.vocab;
    const float factor = how.number(REPETITION);
    const float presence = how.number(PRESENCE), frequency = how.number(FREQUENCY);
    for (int64_t i = 0; i < s.vocab; ++i) {
        if (states[i] == 0) continue;
        const float count = static_cast<float>(states[i] & MOST_COUNT);
        y[i] = y[i] > 0.0f ? y[i] / factor : y[i] * factor;
        if (count > 0.0f) y[i] -= presence + frequency * count;
    }
    return y;
}

// The least scaled logit that the filters of a row keep, of `scaled [v]` with this maximum.
inline float least_kept(const Choice &how, const float *scaled, int64_t v, float highest,
                        std::vector<float> &memory) {
    const int64_t top_k = how.whole(TOP_K);
    const float top_p = how.number(TOP_P), min_p = how.number(MIN_P);
    const bool counts = top_k > 0 && top_k < v;
    double total = 0.0;
    float least = -std::numeric_limits<float>::infinity();
    if (counts) {
        float *copy = room(memory, v);
        std::memcpy(copy, scaled, sizeof(float) * v);
        std::nth_element(copy, copy + top_k - 1, copy + v, std::greater<float>());
        least = copy[top_k - 1];
    } else if (top_p < 1.0f) {
        least = least_of_mass(scaled, v, highest, top_p, total);
    }
    // A little less than the border, which is drawn exactly below; top-p is a share of all top-k.
    if (min_p > 0.0f && !counts) least = std::max(least, highest + std::log(min_p) - 1e-3f);
    if (!counts && top_p >= 1.0f && !(min_p > 0.0f)) return least;
    static thread_local std::vector<float> some;
    some.clear();
    for (int64_t i = 0; i < v; ++i)
        if (scaled[i] >= least) some.push_back(scaled[i]);
    std::sort(some.begin(), some.end(), std::greater<float>());
    const auto mass = [&](float x) {
        return std::exp(static_cast<double>(x) - static_cast<double>(highest));
    };
    if (counts) {
        total = 0.0;
        for (float x : some) total += mass(x);
    }
    double before = 0.0;
    float bound = some.front();
    for (float x : some) {
        const double own = mass(x);
        const bool is_in = top_p >= 1.0f || before < static_cast<double>(top_p) * total;
        if (!is_in || own < static_cast<double>(min_p)) break;
        bound = x, before += own;
    }
    return bound;
}

// The token with the highest sum of scaled logit and noise, of those from `low` to `high`.
inline int64_t drawn(const Choice &how, const float *scaled, int64_t v, int64_t likeliest,
                     float low, float high) {
    const uint64_t seed = how.get<uint64_t>(SEED);
    const uint32_t number = static_cast<uint32_t>(how.whole(NUMBER));
    int64_t best = -1;
    float most = -std::numeric_limits<float>::infinity();
    uint32_t words[4];
    const auto offer = [&](int64_t i) {
        const float sum = scaled[i] + gumbel(words[i % 4]);
        if (best < 0 || sum > most || (sum == most && i < best)) best = i, most = sum;
    };
    if (scaled[likeliest] <= high) {  // first, as few can win behind it
        philox(words, static_cast<uint32_t>(likeliest / 4), number, seed);
        offer(likeliest);
    }
    for (int64_t i = 0; i < v; i += 4) {
        const int64_t end = std::min<int64_t>(v, i + 4);
        bool has_words = false;
        for (int64_t k = i; k < end; ++k) {
            const float x = scaled[k];
            if (!(x >= low && x <= high) || !(x + MOST_GUMBEL >= most)) continue;
            if (!has_words) philox(words, static_cast<uint32_t>(i / 4), number, seed);
            has_words = true;
            offer(k);
        }
    }
    return best;
}

void sample_row(const Sampling &s, int64_t row) {
    static thread_local std::vector<float> behind, heated, memory;
    const Choice how{static_cast<const char *>(s.rows) + row * s.record, s.where};
    const int32_t result = how.whole(RESULT);
    if (result < 0) return;  // padding
    const float *logits = edited(s, how, s.logits + row * s.stride, behind);
    const Highest highest = highest_of(logits, s.vocab);
    s.token_ids[result] = 0, s.log_probs[result] = NAN, s.outcomes[result] = 0;
    if (!highest.is_finite) return;
    const float temperature = how.temperature();
    int64_t chosen = highest.place;
    if (std::isfinite(1.0f / temperature) && std::isfinite(highest.value / temperature)) {
        float *scaled = room(heated, s.vocab);
        divide(logits, temperature, scaled, s.vocab);
        float low = how.number(LOW), high = how.number(HIGH);
        if (!how.is_narrow()) {
            high = std::numeric_limits<float>::infinity();
            low = least_kept(how, scaled, s.vocab, scaled[chosen], memory);
        }
        chosen = std::max<int64_t>(0, drawn(how, scaled, s.vocab, chosen, low, high));
    }
    s.token_ids[result] = chosen;
    s.log_probs[result] = logits[chosen] - highest.value - log_sum(logits, s.vocab, highest.value);
    s.outcomes[result] = 1;
    if (!how.has_penalties()) return;
    int16_t &state = s.counts[static_cast<int64_t>(how.whole(SLOT)) * s.vocab + chosen];
    if ((state & MOST_COUNT) < MOST_COUNT) ++state;
}

void sample(const Sampling &s, int threads) {
    parallel(threads, s.count, 1, [&](int64_t first, int64_t last, int) {
        for (int64_t row = first; row < last; ++row) sample_row(s, row);
    });
}

}  // namespace
