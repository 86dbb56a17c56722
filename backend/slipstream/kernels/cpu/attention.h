// Rotation, and attention over the paged cache, for one instruction set.
//
// A query's tokens come in tiles of 32, counted from the start of its sequence, and its sums in the
// order of tokens, behind its head's sink, if it has one: its bits depend on its position and the
// tokens before it alone.
#pragma once

#include "cached.h"
#include "multiply.h"

namespace {

constexpr int TOKENS = 32;    // of a tile
constexpr int MOST_ROWS = 48;  // queries times heads that share the reading of a tile
constexpr int MOST_GROUP = 128;  // heads that share a kv head
constexpr int ROWS = 4;        // of these whose sums fit the registers

// C [R, 16] of A [R, k] (rows `pitch` apart) times B [k, 16] (rows `wide` apart), on top of C.
template <int R>
inline void add_product(const float *a, int64_t pitch, const float *b, int64_t wide, int64_t k,
                        F16 (&c)[R]) {
    for (int64_t i = 0; i < k; ++i) {
        const F16 each = load(b + i * wide);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) c[r] = fma(each, splat(a[r * pitch + i]), c[r]);
    }
}

// `last`: what multiplies the result.
inline void rotate_head(const float *x, const float *norm, const Rotation &r, const float *cos_sin,
                        int size, float last, float *y) {
    const float factor = norm ? norm_factor(x, size, r.eps) : 1.0f;
    const int half = size / 2;
    const float *sin = cos_sin + half;
    for (int i = 0; i < half; i += TILE) {
        const int64_t left = half - i;
        F16 a = load_some(x + i, left), b = load_some(x + half + i, left);
        F16 low = splat(1.0f), high = low;
        if (norm) {
            low = load_some(norm + i, left), high = load_some(norm + half + i, left);
            a = a * splat(factor), b = b * splat(factor);
        }
        if (!r.are_late) a = a * low, b = b * high;
        const F16 c = load_some(cos_sin + i, left), s = load_some(sin + i, left);
        F16 first = a * c - b * s, second = b * c + a * s;
        if (r.are_late) first = first * low, second = second * high;
        store_some(y + i, first * splat(last), left);
        store_some(y + half + i, second * splat(last), left);
    }
}

void rotate(const Rotation &r, const Cache &cache, float *q, const float *k, const float *v,
            int64_t stride, int64_t n, int heads, int threads) {
    const int size = cache.head_size;
    parallel(threads, n, 4, [&](int64_t first, int64_t last, int) {
        static thread_local std::vector<float> memory;
        float *row = room(memory, size);
        for (int64_t i = first; i < last; ++i) {
            const float *angle = r.cos_sin + r.positions[i] * size;
            const float last = r.factors ? r.factors[r.positions[i]] : 1.0f;
            for (int h = 0; h < heads; ++h) {
                float *each = q + i * stride + h * size;
                rotate_head(each, r.q_norm, r, angle, size, last, row);
                std::memcpy(each, row, sizeof(float) * size);
            }
            const int64_t slot = r.slots[i];
            if (slot < 0) continue;
            const int64_t block = slot / cache.block_size;
            const int token = static_cast<int>(slot % cache.block_size);
            for (int h = 0; h < cache.kv_heads; ++h) {
                rotate_head(k + i * stride + h * size, r.k_norm, r, angle, size, 1.0f, row);
                write_row(cache, row, place_of(cache, block, h, 0, token));
                write_row(cache, v + i * stride + h * size, place_of(cache, block, h, 1, token));
            }
        }
    });
}

// A thread's memory: keys of a tile by dimension, its values, scores, and the rows' sums.
struct Scratch {
    std::vector<float> keys, values, queries, scores, sums, most, total, row;
};

// Queries of one sequence that one kv head serves: `count` of them from `first` on, of its
// `length` tokens the one at `position` and those that follow it.
struct Item {
    int sequence;
    int64_t first, position;
    int count;
};

// Reads tokens `begin .. begin + count - 1`: keys [d, TOKENS], values [TOKENS, padded d].
void read_tile(const Cache &c, const int32_t *table, int head, int64_t begin, int count, int wide,
               Scratch &s) {
    const int size = c.head_size;
    float *row = room(s.row, size);
    for (int t = 0; t < count; ++t) {
        const int64_t at = begin + t, block = table[at / c.block_size];
        const int token = static_cast<int>(at % c.block_size);
        const float *key = read_row(c, place_of(c, block, head, 0, token), row);
        for (int i = 0; i < size; ++i) s.keys[i * TOKENS + t] = key[i];
        const float *value = read_row(c, place_of(c, block, head, 1, token), row);
        std::memcpy(s.values.data() + t * wide, value, sizeof(float) * size);
    }
}

// Scores of R rows with a tile, `begin` and `end` of it visible to row r; then their exponentials.
template <int R>
inline void score_rows(Scratch &s, int row, int size, int wide, const int *begin, const int *end) {
    F16 low[R], high[R];
    for (int r = 0; r < R; ++r) low[r] = high[r] = splat(0.0f);
    const float *q = s.queries.data() + row * wide;
    add_product<R>(q, wide, s.keys.data(), TOKENS, size, low);
    add_product<R>(q, wide, s.keys.data() + TILE, TOKENS, size, high);
    for (int r = 0; r < R; ++r) {
        float *p = s.scores.data() + (row + r) * TOKENS;
        store(p, low[r]);
        store(p + TILE, high[r]);
        for (int t = 0; t < TOKENS; ++t)
            if (t < begin[r] || t >= end[r]) p[t] = -INFINITY;
        float most = s.most[row + r];
        for (int t = begin[r]; t < end[r]; ++t) most = p[t] > most || p[t] != p[t] ? p[t] : most;
        const bool is_seen = end[r] > begin[r] && most != -INFINITY;
        const F16 least = splat(is_seen ? most : 0.0f);
        const F16 a = exponential(load(p) - least), b = exponential(load(p + TILE) - least);
        store(p, a);
        store(p + TILE, b);
        for (int t = 0; t < TOKENS; ++t)
            if (t < begin[r] || t >= end[r]) p[t] = 0.0f;
        if (!is_seen) continue;
        const float factor = std::exp(s.most[row + r] - most);
        s.most[row + r] = most;
        s.total[row + r] = s.total[row + r] * factor + sum_of(load(p) + load(p + TILE));
        float *sum = s.sums.data() + (row + r) * wide;
        if (factor != 1.0f)
            for (int i = 0; i < wide; i += TILE) store(sum + i, load(sum + i) * splat(factor));
    }
}

template <int R>
inline void add_values(Scratch &s, int row, int wide) {
    for (int i = 0; i < wide; i += TILE) {
        F16 sum[R];
        float *to = s.sums.data() + row * wide + i;
        for (int r = 0; r < R; ++r) sum[r] = load(to + r * wide);
        add_product<R>(s.scores.data() + row * TOKENS, TOKENS, s.values.data() + i, wide, TOKENS,
                       sum);
        for (int r = 0; r < R; ++r) store(to + r * wide, sum[r]);
    }
}

template <int R>
inline void attend_rows(Scratch &s, int row, int end_row, int size, int wide, const int *begin,
                        const int *end) {
    for (; row + R <= end_row; row += R) {
        score_rows<R>(s, row, size, wide, begin + row, end + row);
        add_values<R>(s, row, wide);
    }
    if constexpr (R > 1) attend_rows<R / 2>(s, row, end_row, size, wide, begin, end);
}

void attend_item(const Sequences &q_of, const Cache &c, const Item &item, int head, int group,
                 const float *q, int64_t q_stride, int heads, float *out, Scratch &s) {
    const int size = c.head_size, wide = static_cast<int>(up(size, TILE));
    const int rows = item.count * group;
    room(s.keys, size * TOKENS), room(s.values, TOKENS * wide), room(s.queries, rows * wide);
    room(s.scores, rows * TOKENS), room(s.sums, rows * wide), room(s.most, rows);
    room(s.total, rows);
    std::fill(s.keys.begin(), s.keys.end(), 0.0f);
    std::fill(s.values.begin(), s.values.end(), 0.0f);
    for (int r = 0; r < rows; ++r) {
        const float *from = q + (item.first + r / group) * q_stride + (head * group + r % group) * size;
        for (int i = 0; i < wide; ++i) {
            s.queries[r * wide + i] = i < size ? from[i] * q_of.scale : 0.0f;
            s.sums[r * wide + i] = 0.0f;
        }
        s.most[r] = q_of.sinks ? q_of.sinks[head * group + r % group] : -INFINITY;
        s.total[r] = 1.0f;  // e ** (sink - most); without a sink the first token seen forgets it
    }
    const int32_t *table = q_of.tables + item.sequence * q_of.table_stride;
    const int64_t window = q_of.window, last = item.position + item.count;
    const int64_t seen = window ? std::max<int64_t>(0, item.position - window + 1) : 0;
    int begin[MOST_GROUP], end[MOST_GROUP];
    for (int64_t tile = seen / TOKENS * TOKENS; tile < last; tile += TOKENS) {
        const int64_t from = std::max(tile, seen), to = std::min<int64_t>(tile + TOKENS, last);
        for (int r = 0; r < rows; ++r) {
            const int64_t position = item.position + r / group;
            const int64_t low = window ? std::max<int64_t>(0, position - window + 1) : 0;
            begin[r] = static_cast<int>(std::clamp<int64_t>(low - tile, 0, TOKENS));
            end[r] = static_cast<int>(std::clamp<int64_t>(position + 1 - tile, 0, TOKENS));
        }
        read_tile(c, table, head, from, static_cast<int>(to - from), wide, s);
        if (from > tile) {  // blocks in front of the window are not read: move to their place
            const int by = static_cast<int>(from - tile), count = static_cast<int>(to - from);
            for (int i = 0; i < size; ++i)
                std::memmove(&s.keys[i * TOKENS + by], &s.keys[i * TOKENS], sizeof(float) * count);
            std::memmove(&s.values[by * wide], s.values.data(), sizeof(float) * count * wide);
        }
        attend_rows<ROWS>(s, 0, rows, size, wide, begin, end);
    }
    for (int r = 0; r < rows; ++r) {
        float *to = out + ((item.first + r / group) * heads + head * group + r % group) * size;
        const float inverse = s.total[r] != 0.0f ? 1.0f / s.total[r] : 0.0f;
        for (int i = 0; i < size; ++i) to[i] = s.sums[r * wide + i] * inverse;
    }
}

void attend(const Sequences &of, const Cache &cache, const float *q, int64_t q_stride,
            int64_t /* rows: of `out`, too */, int heads, float *out, int threads) {
    const int group = heads / cache.kv_heads, most = std::max(1, MOST_ROWS / group);
    static std::vector<Item> items;
    items.clear();
    for (int i = 0; i < of.count; ++i) {
        const int chunk = i - of.num_decodes;
        const int64_t first = chunk < 0 ? i : of.num_decodes + of.starts[chunk];
        const int64_t count = chunk < 0 ? 1 : of.starts[chunk + 1] - of.starts[chunk];
        for (int64_t at = 0; at < count; at += most) {
            const int part = static_cast<int>(std::min<int64_t>(most, count - at));
            items.push_back({i, first + at, of.lengths[i] - count + at, part});
        }
    }
    const int64_t size = static_cast<int64_t>(heads) * cache.head_size;
    parallel(threads, static_cast<int64_t>(items.size()) * cache.kv_heads, 1,
             [&](int64_t begin, int64_t end, int) {
                 static thread_local Scratch scratch;
                 for (int64_t i = begin; i < end; ++i) {
                     const Item &item = items[i / cache.kv_heads];
                     const int head = static_cast<int>(i % cache.kv_heads);
                     if (item.position + item.count > 0) {
                         attend_item(of, cache, item, head, group, q, q_stride, heads, out, scratch);
                         continue;
                     }
                     for (int r = 0; r < item.count; ++r)  // no tokens: zeros
                         std::fill_n(out + (item.first + r) * size + head * group * cache.head_size,
                                     group * cache.head_size, 0.0f);
                 }
             });
}

}  // namespace
