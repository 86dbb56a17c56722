// Low-rank terms of adapters, `x A^T B^T`, of all groups of rows of a step at a place.
//
// Tables and tiles are those of lora/terms.py: of each 16 ranks A `[16, inputs]` and B
// `[outputs, 16]`, or turned: of each 16 outputs `[16 ranks, 16]`, so that a sum's lanes are outputs
// and none has to be added up. A sum has 16 parts as in by_row.h: its bits do not depend on other rows.
#pragma once

#include "by_row.h"

namespace {

constexpr int STACKED = 3;         // matrices that a place may have
constexpr int MEMBERS = 16;          // rows of a group at most
constexpr int CHAINS = 4;            // sums of a lane that do not wait for each other
constexpr int64_t OF_PART = 256;   // outputs that a thread expands at a time
constexpr int64_t AHEAD = 4;       // tiles of 16 outputs of B that are fetched before they are read
constexpr int64_t GRAIN = 4;       // groups, or parts of them, that a thread takes at a time

// A term of a part of a place.
struct Words {
    int64_t tiles;   // words from the first of all to the addresses of its tiles
    int64_t is_turned;  // whether its tiles of B are
    int64_t rank;    // a multiple of 16; 0: there is none
    int64_t column;  // of t
    int64_t first[2];   // tiles, of A and B
};

// Rows that have one adapter.
struct Members {
    const int64_t *words;  // of the adapter; null: nobody is here
    int64_t begin, count;  // of the table's rows

    Members(const Terms &of, int64_t group)
        : words(reinterpret_cast<const int64_t *>(of.groups[2 * group])),
          begin(of.groups[2 * group + 1] & 0xffffffff),
          count(of.groups[2 * group + 1] >> 32) {}

    const Words *terms(int64_t place) const {
        return reinterpret_cast<const Words *>(words) + place * STACKED;
    }
    // A tile of A (0) or of B (1).
    const float *tile(const Words &term, int64_t number, int which) const {
        return reinterpret_cast<const float *>(words[term.tiles + 2 * number + which]);
    }
};

// A tile of A with all rows of a group, as many at a time as share its loads. Tiles of many
// adapters are short streams, which the processor does not foresee: `next` is fetched meanwhile.
template <int R>
void shrink_tile(const float *a, const float *next, const float *x, int64_t pitch, int64_t inputs,
                 float *t, int64_t width, int64_t row, int64_t count) {
    constexpr int T = SUMS / R >= 8 ? 8 : SUMS / R >= 4 ? 4 : SUMS / R >= 2 ? 2 : 1;
    for (; row + R <= count; row += R) {
        Sums sums[R];
        for (int rank = 0; rank < TILE; rank += T) {
            const float *later = rank + T < TILE ? a + (rank + T) * inputs : next;
            add_rows<R, T, true>(a + rank * inputs, later, x + row * pitch, pitch, inputs, sums,
                                 rank);
        }
        for (int r = 0; r < R; ++r) store(t + (row + r) * width, sums_of(sums[r]));
    }
    if constexpr (R > 1) shrink_tile<R / 2>(a, next, x, pitch, inputs, t, width, row, count);
}

// The tile of A that is read behind one of a group of those before `last`; itself if there is none.
const float *following(const Terms &of, int64_t group, int64_t last, int part, int64_t tile) {
    const Members here(of, group);
    const float *own = here.tile(here.terms(of.place)[part], tile, 0);
    for (++tile; group < last; ++group, part = 0) {
        const Members each(of, group);
        if (!each.words) continue;
        for (const Words *terms = each.terms(of.place); part < STACKED; ++part, tile = 0)
            if (tile < terms[part].rank / TILE) return each.tile(terms[part], tile, 0);
    }
    return own;
}

void shrink(const Terms &of, const Product &norm, const float *x, int64_t x_stride, int threads) {
    const int64_t inputs = norm.weights.inputs, pitch = up(inputs, TILE);
    const int64_t grain = threads > 1 ? GRAIN : of.num_groups;
    parallel(threads, of.num_groups, grain, [&](int64_t first, int64_t last, int) {
        static thread_local std::vector<float> memory;
        float *rows = room(memory, MEMBERS * pitch);
        for (int64_t group = first; group < last; ++group) {
            const Members own(of, group);
            if (!own.words) continue;
            const Words *terms = own.terms(of.place);
            if (!terms[0].rank && !terms[1].rank && !terms[2].rank) continue;
            for (int64_t i = 0; i < own.count; ++i)
                normalise(norm, x + of.rows[own.begin + i] * x_stride, rows + i * pitch, pitch);
            for (int part = 0; part < STACKED; ++part)
                for (int64_t tile = 0; tile < terms[part].rank / TILE; ++tile) {
                    const int64_t column = terms[part].column + tile * TILE;
                    shrink_tile<ROWS_TOGETHER>(own.tile(terms[part], tile, 0),
                                               following(of, group, last, part, tile), rows, pitch,
                                               inputs, of.partial + own.begin * of.width + column,
                                               of.width, 0, own.count);
                }
        }
    });
}

// Adds t B^T to outputs `begin` .. `end - 1` of a part, which is `y`'s from `to` on.
void expand_rows(const Terms &of, const Members &own, const Words &term, int64_t begin,
                 int64_t end, float *y, int64_t y_stride) {
    for (int64_t output = begin; output < end; output += TILE) {
        const int64_t some = std::min<int64_t>(TILE, end - output);
        for (int64_t i = 0; i < own.count; ++i) {
            const float *t = of.partial + (own.begin + i) * of.width + term.column;
            Sums sums = {};
            for (int64_t tile = 0; tile < term.rank / TILE; ++tile) {
                const float *b = own.tile(term, tile, 1) + output * TILE;
                const F16 own_t = load(t + tile * TILE);
                for (int64_t o = 0; o < some; ++o)
                    store(sums[o], fma(load(b + o * TILE), own_t, load(sums[o])));
            }
            float *to = y + of.rows[own.begin + i] * y_stride + output;
            store_some(to, load_some(to, some) + sums_of(sums), some);
        }
    }
}

// Fetches 16 outputs of B.
inline void fetch(const float *from) {
    for (int rank = 0; rank < TILE; ++rank)
        _mm_prefetch(reinterpret_cast<const char *>(from + rank * TILE), _MM_HINT_T0);
}

// The same, of turned tiles: rows of a group share the loads of B. `next`: what is read behind.
void expand_turned(const Terms &of, const Members &own, const Words &term, int64_t begin,
                   int64_t end, const float *next, float *y, int64_t y_stride) {
    for (int64_t output = begin; output < end; output += TILE) {
        const int64_t some = std::min<int64_t>(TILE, end - output);
        const int64_t ahead = output + AHEAD * TILE;
        F16 sums[MEMBERS];
        for (int64_t i = 0; i < own.count; ++i) sums[i] = splat(0);
        for (int64_t tile = 0; tile < term.rank / TILE; ++tile) {
            const float *b = own.tile(term, tile, 1) + output * TILE;
            if (ahead < end) fetch(b + AHEAD * TILE * TILE);
            F16 lanes[TILE];
            for (int rank = 0; rank < TILE; ++rank) lanes[rank] = load(b + rank * TILE);
            for (int64_t i = 0; i < own.count; ++i) {
                const float *t =
                    of.partial + (own.begin + i) * of.width + term.column + tile * TILE;
                F16 part[CHAINS];
                for (int c = 0; c < CHAINS; ++c) part[c] = splat(0);
                for (int rank = 0; rank < TILE; ++rank)
                    part[rank % CHAINS] = fma(splat(t[rank]), lanes[rank], part[rank % CHAINS]);
                sums[i] = sums[i] + ((part[0] + part[1]) + (part[2] + part[3]));
            }
        }
        if (next && ahead >= end) fetch(next + (ahead - end) / TILE * TILE * TILE);
        for (int64_t i = 0; i < own.count; ++i) {
            float *to = y + of.rows[own.begin + i] * y_stride + output;
            store_some(to, load_some(to, some) + sums[i], some);
        }
    }
}

// Outputs of a part of a group.
struct Stretch {
    int64_t group;
    int part;
    int64_t begin, end, to;  // `to`: the part's first output in `y`
};

// Lists the stretches of groups `first` .. `last - 1`, of which each has `parts`; returns how many.
int64_t stretches(const Terms &of, const int64_t *sizes, int64_t first, int64_t last, int64_t parts,
                  std::vector<Stretch> &found) {
    found.clear();
    for (int64_t each = first; each < last; ++each) {
        const Members own(of, each / parts);
        if (!own.words) continue;
        const Words *terms = own.terms(of.place);
        const int64_t begin = each % parts * OF_PART;
        int64_t to = 0;
        for (int part = 0; part < STACKED; to += sizes[part++])
            if (terms[part].rank && begin < sizes[part])
                found.push_back({each / parts, part, begin,
                                 std::min(sizes[part], begin + OF_PART), to});
    }
    return static_cast<int64_t>(found.size());
}

void expand(const Terms &of, const int64_t *sizes, float *y, int64_t y_stride, int threads) {
    const int64_t parts = std::max<int64_t>(
        1, (std::max({sizes[0], sizes[1], sizes[2]}) + OF_PART - 1) / OF_PART);
    const int64_t all = of.num_groups * parts, grain = threads > 1 ? GRAIN : all;
    parallel(threads, all, grain, [&](int64_t first, int64_t last, int) {
        static thread_local std::vector<Stretch> found;
        const int64_t count = stretches(of, sizes, first, last, parts, found);
        for (int64_t i = 0; i < count; ++i) {
            const Stretch &each = found[i];
            const Members own(of, each.group);
            const Words &term = own.terms(of.place)[each.part];
            if (!term.is_turned) {
                expand_rows(of, own, term, each.begin, each.end, y + each.to, y_stride);
                continue;
            }
            const float *next = nullptr;
            if (i + 1 < count) {
                const Members other(of, found[i + 1].group);
                const Words &behind = other.terms(of.place)[found[i + 1].part];
                next = other.tile(behind, 0, 1) + found[i + 1].begin * TILE;
            }
            expand_turned(of, own, term, each.begin, each.end, next, y + each.to, y_stride);
        }
    });
}

}  // namespace
