// What Python calls: the choice of a form, single kernels, and the blocks of a step.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <vector>

#include "abi.h"
#include "pool.h"

namespace slipstream {

extern const Kernels kernels_avx2, kernels_avx512, kernels_vnni, kernels_amx;

namespace {

enum Form { AVX2 = 1, AVX512 = 2, VNNI = 3, AMX = 4 };

std::mutex one_at_a_time;  // kernels keep their memory
const Kernels *chosen = nullptr;

uint64_t enabled_states() {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
}

// Whether the kernel keeps the state of tiles, and lets this process have it: asked for once.
bool may_use_tiles() {
    constexpr long ask = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
    constexpr uint64_t tiles = 1u << 17 | 1u << 18;
    return (enabled_states() & tiles) == tiles && syscall(SYS_arch_prctl, ask, tile_data) == 0;
}

struct Blocks {
    std::vector<float> qkv, heads, inner, kept, queries, logits, weights, terms;
    std::vector<int32_t> experts, order, offsets;

    template <class T>
    static T *room(std::vector<T> &memory, int64_t size) {
        if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
        return memory.data();
    }
};

void keep(const float *from, int64_t stride, int64_t width, const int64_t *rows, int64_t count,
          float *to) {
    for (int64_t i = 0; i < count; ++i)
        std::memcpy(to + i * width, from + rows[i] * stride, sizeof(float) * width);
}

// Puts pairs in the order of their experts, and lists tiles, as experts/route.py does.
void place(const Places &of) {
    int32_t *offsets = of.offsets;
    std::fill_n(offsets, of.experts + 1, 0);
    for (int64_t i = 0; i < of.pairs; ++i) ++offsets[of.chosen[i] + 1];
    for (int64_t e = 0, tile = 0; e < of.experts; ++e) {
        offsets[e + 1] += offsets[e];
        for (int32_t at = offsets[e]; at < offsets[e + 1]; at += of.tile_rows, ++tile) {
            const int32_t count = std::min(of.tile_rows, offsets[e + 1] - at);
            const int32_t own[4] = {static_cast<int32_t>(e), at, count, 0};
            if (of.tiles) std::memcpy(of.tiles + 4 * tile, own, sizeof own);
        }
    }
    for (int64_t i = 0; i < of.pairs; ++i) of.order[offsets[of.chosen[i]]++] = i;
    for (int64_t e = of.experts; e > 0; --e) offsets[e] = offsets[e - 1];
    offsets[0] = 0;
}

// Chooses the experts of rows, of equal scores those of lower numbers; as experts/route.py has it.
void choose_experts(const Choice &c, const float *logits, int64_t stride, int64_t n,
                    int32_t *experts, float *weights) {
    std::vector<float> scores(c.experts), by(c.experts);
    std::vector<char> taken(c.experts);
    for (int64_t row = 0; row < n; ++row, logits += stride) {
        const float most = *std::max_element(logits, logits + c.experts);
        float sum = 0.0f;
        for (int e = 0; e < c.experts; ++e) {
            const float x = logits[e];
            scores[e] = c.score == SIGMOID ? 1.0f / (1.0f + std::exp(-x)) : std::exp(x - most);
            sum += scores[e];
        }
        if (c.score == SOFTMAX)
            for (float &score : scores) score /= sum;
        for (int e = 0; e < c.experts; ++e) {
            const float plain = c.score == SOFTMAX ? logits[e] : scores[e];
            by[e] = c.correction ? scores[e] + c.correction[e] : plain;
        }
        float chosen = 0.0f;
        std::fill(taken.begin(), taken.end(), 0);
        for (int rank = 0; rank < c.top_k; ++rank) {
            int best = -1;
            for (int e = 0; e < c.experts; ++e)
                if (!taken[e] && (best < 0 || by[e] > by[best])) best = e;
            taken[best] = 1, experts[rank] = best;
            chosen += weights[rank] = scores[best];
        }
        for (int rank = 0; rank < c.top_k; ++rank)
            weights[rank] = (c.normalises ? weights[rank] / chosen : weights[rank]) * c.factor;
        experts += c.top_k, weights += c.top_k;
    }
}

// Adds the experts of the norm of `x [n, hidden]` to it.
void run_experts(const Mixture &m, float *x, int64_t n, int64_t hidden, int threads,
                 Blocks &memory) {
    const int64_t width = m.router.weights.outputs, pairs = n * m.choice.top_k;
    const int64_t inner_width = m.down.first.weights.inputs;
    float *logits = Blocks::room(memory.logits, n * width);
    chosen->product(m.router, x, hidden, n, logits, width, false, threads);
    int32_t *experts = Blocks::room(memory.experts, pairs);
    int32_t *order = Blocks::room(memory.order, pairs);
    int32_t *offsets = Blocks::room(memory.offsets, m.choice.experts + 1);
    float *weights = Blocks::room(memory.weights, pairs);
    choose_experts(m.choice, logits, width, n, experts, weights);
    place({experts, order, offsets, nullptr, pairs, m.choice.experts, 1 << 30, 0});
    Experts up = m.gate_up, down = m.down;
    up.order = down.order = order, up.offsets = down.offsets = offsets;
    down.weights = weights;
    float *inner = Blocks::room(memory.inner, pairs * inner_width);
    chosen->experts(up, x, hidden, inner, inner_width, threads);
    float *terms = Blocks::room(memory.terms, pairs * hidden);
    chosen->experts(down, inner, inner_width, terms, hidden, threads);
    chosen->combine({terms, nullptr, nullptr, x, hidden, 0, n, hidden, m.choice.top_k, 0}, threads);
}

// A block on `x [n, hidden]`; the rows that are left go to `out` if some are wanted.
void run_block(const Layer &l, float *x, int64_t n, float *out, int threads, Blocks &memory) {
    const int64_t hidden = l.qkv.weights.inputs, size = l.cache.head_size;
    const int64_t width = l.qkv.weights.outputs, q_width = l.heads * size;
    const int64_t kv_width = l.cache.kv_heads * size;
    float *qkv = Blocks::room(memory.qkv, n * width);
    chosen->product(l.qkv, x, hidden, n, qkv, width, false, threads);
    const float *keys = qkv + q_width;
    const Step &step = *l.step;
    Rotation rotation = l.rotation;
    rotation.positions = step.positions, rotation.slots = step.slots;
    chosen->rotate(rotation, l.cache, qkv, keys, keys + kv_width, width, n, l.heads, threads);
    const float *q = qkv;
    int64_t q_stride = width;
    if (step.wanted) {
        n = step.num_wanted;
        float *queries = Blocks::room(memory.queries, n * q_width);
        keep(qkv, width, q_width, step.wanted, n, queries);
        keep(x, hidden, hidden, step.wanted, n, out);
        q = queries, q_stride = q_width, x = out;
    }
    float *heads = Blocks::room(memory.heads, n * q_width);
    const Sequences sequences{step.tables, step.table_stride, step.lengths, step.starts, l.sinks,
                              step.count,  step.num_decodes,  step.window,  l.scale};
    chosen->attend(sequences, l.cache, q, q_stride, n, l.heads, heads, threads);
    chosen->product(l.out, heads, q_width, n, x, hidden, true, threads);
    if (l.mixture) return run_experts(*l.mixture, x, n, hidden, threads, memory);
    const int64_t inner_width = l.down.weights.inputs;
    float *inner = Blocks::room(memory.inner, n * inner_width);
    chosen->product(l.gate_up, x, hidden, n, inner, inner_width, false, threads);
    chosen->product(l.down, inner, inner_width, n, x, hidden, true, threads);
}

}  // namespace

extern "C" {

// The best form that this processor has: 0 if it has none.
int slipstream_best_form() {
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    const bool fma = c >> 12 & 1, saves = c >> 27 & 1, halves = c >> 29 & 1;
    if (!fma || !saves || !halves || (enabled_states() & 6) != 6) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b >> 5 & 1)) return 0;
    const uint32_t wide = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
    if ((b & wide) != wide || (enabled_states() & 0xe6) != 0xe6) return AVX2;
    if (!(c >> 11 & 1)) return AVX512;
    return (d >> 24 & 3) == 3 && may_use_tiles() ? AMX : VNNI;  // tiles, and those of bytes
}

int slipstream_choose(int form) {
    const Kernels *forms[] = {nullptr, &kernels_avx2, &kernels_avx512, &kernels_vnni,
                              &kernels_amx};
    if (form < AVX2 || form > AMX || form > slipstream_best_form()) return -1;
    chosen = forms[form];
    return 0;
}

void slipstream_product(const Product *p, const float *x, int64_t x_stride, int64_t n, float *y,
                        int64_t y_stride, int adds, int threads) {
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    chosen->product(*p, x, x_stride, n, y, y_stride, adds != 0, threads);
}

void slipstream_rotate(const Rotation *r, const Cache *cache, float *q, const float *k,
                       const float *v, int64_t stride, int64_t n, int heads, int threads) {
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    chosen->rotate(*r, *cache, q, k, v, stride, n, heads, threads);
}

void slipstream_attend(const Sequences *of, const Cache *cache, const float *q, int64_t q_stride,
                       int64_t n, int heads, float *out, int threads) {
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    chosen->attend(*of, *cache, q, q_stride, n, heads, out, threads);
}

void slipstream_sample(const Sampling *of, int threads) {
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    chosen->sample(*of, threads);
}

void slipstream_shrink(const Terms *of, const Product *norm, const float *x, int64_t x_stride,
                       int threads) {
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    chosen->shrink(*of, *norm, x, x_stride, threads);
}

void slipstream_expand(const Terms *of, const int64_t *sizes, float *y, int64_t y_stride,
                       int threads) {
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    chosen->expand(*of, sizes, y, y_stride, threads);
}

void slipstream_experts(const Experts *of, const float *x, int64_t x_stride, float *y,
                        int64_t y_stride, int threads) {
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    chosen->experts(*of, x, x_stride, y, y_stride, threads);
}

void slipstream_combine(const Sum *of, int threads) {
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    chosen->combine(*of, threads);
}

void slipstream_place(const Places *of) { place(*of); }

void slipstream_choose_experts(const Choice *of, const float *logits, int64_t stride, int64_t n,
                               int32_t *experts, float *weights) {
    choose_experts(*of, logits, stride, n, experts, weights);
}

void slipstream_start(const Start *of) {
    for (int64_t i = 0; i < of->num_tokens; ++i)
        if (of->sources[i] >= 0) of->token_ids[i] = of->sampled[of->sources[i]];
    const int32_t begin = of->header[0], width = of->header[1], count = of->header[2];
    for (int64_t row = 0; row < count; ++row)
        std::memcpy(of->tables + row * of->table_stride, of->staged + begin + row * width,
                    sizeof(int32_t) * width);
}

// All blocks of a step on `x [n, hidden]`, in place; where the last keeps rows, they go to `out`.
void slipstream_blocks(const Layer *layers, int count, float *x, int64_t n, float *out,
                       int threads) {
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    static Blocks memory;
    for (int i = 0; i < count; ++i) run_block(layers[i], x, n, out, threads, memory);
}

}  // extern "C"

}  // namespace slipstream
