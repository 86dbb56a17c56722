// What Python passes, by pointer: `native.py` has the same structures field by field.
#pragma once

#include <cstdint>

namespace slipstream {

// Weights of a linear layer, in tiles of 16 outputs and blocks of 32 inputs (cpu_packing.py). They
// are `code * scale + minimum`; of 16 and 32 bits the codes are the weights, one input of 16 outputs
// at a time, or, of 32, one output after the other (`by_row`).
struct Weights {
    const uint8_t *codes;
    const void *scales;    // [tile, group, 16]
    const void *minimums;  // the same; null: `zero * scale`
    int32_t bits;          // 4, 8, 16 or 32
    int32_t group;         // inputs that share a scale, a multiple of 32; of 8 bits, of 16
    int32_t outputs, inputs;
    int32_t halves;  // whether scales and minimums are fp16, not fp32; weights, not bf16
    float zero;      // what stands for all minimums
    int32_t row_bits;  // of rows as whole numbers: 8 or 16
    int32_t by_row;    // whether these are rows, not tiles
    int32_t floats;    // whether codes of 4 bits are e2m1: they stand for twice that and 12
    int32_t unused;
};

enum Gate { NONE = 0, SILU = 1, CLAMPED = 2 };

// A product with what is around it.
struct Product {
    Weights weights;
    const float *norm;  // [inputs]: of the RMS norm of x; null: none
    const float *bias;  // [outputs]; null: none
    float eps;
    float norm_offset;  // added to the norm's weight
    int32_t gate;       // of outputs `[gate | up]`, of which act(gate) * up is left
    int32_t unused;
};

// A product of each expert of a mixture, whose weights lie behind one another. A row of x and one of
// its experts are a pair; places are pairs in the order of experts (experts/route.py).
struct Experts {
    Product first;                     // of expert 0
    int64_t codes, scales, minimums;   // bytes from one expert's to the next one's
    const int32_t *order;              // [places]: the pair at each
    const int32_t *offsets;            // [count + 1]: the first place of each expert, and the end
    const float *weights;              // [pairs]; null: x has rows of pairs, y has places
    int32_t count;                     // with weights x has places, y pairs times their weights
    int32_t top_k;
    const float *added;                // [places, outputs]: to sums, before a gate, or null
    const int32_t *marks;              // [places]: 1: there is such
};

// Terms of rows, `[n, top_k, width]`, that are added to `y` in this order, and then `shared`.
struct Sum {
    const float *terms;
    const float *shared;  // [n, width]; null: none
    const float *gates;   // [n], `gate_stride` apart: logits of what multiplies `shared`; or null
    float *y;
    int64_t y_stride, gate_stride, n, width;
    int32_t top_k, unused;
};

// Pairs of rows and experts, and where their order goes; `tiles` are zeros.
struct Places {
    const int32_t *chosen;  // [pairs]: the expert of each
    int32_t *order, *offsets, *tiles;  // tiles may be null
    int64_t pairs, experts;
    int32_t tile_rows, unused;
};

enum Score { SOFTMAX = 0, SIGMOID = 1 };

// How a router's logits choose experts (experts/spec.py), of one group.
struct Choice {
    const float *correction;  // [experts]: of what they are chosen by; null: none
    int32_t experts, top_k, score, normalises;
    float factor;
    int32_t unused;
};

// A mixture of experts behind the norm of its router and experts; places are those of a step.
struct Mixture {
    Product router;
    Experts gate_up, down;
    Choice choice;
};

// Layout of the paged cache (cache/kv_format.py).
struct Cache {
    void *data;  // [block, kv head, K or V, token in block, row]
    int32_t format;
    int32_t kv_heads, block_size, head_size;
};

enum Format { F32 = 0, FP8 = 1, INT8 = 2, INT4 = 3 };

// Rotation of queries and keys, and their place in the cache.
struct Rotation {
    const float *cos_sin;  // [positions, head_size]
    const float *q_norm, *k_norm;  // [head_size]: of each head, before it; null: none
    const float *factors;              // [positions]: of rotated queries; null: none
    const int64_t *positions, *slots;  // [n]
    float eps;
    int32_t are_late;  // norms' weights come behind the rotation
};

// Sequences whose tokens attend: decodes, of a query each, then chunks.
struct Sequences {
    const int32_t *tables;  // [s, blocks]
    int64_t table_stride;
    const int32_t *lengths;  // [s]
    const int32_t *starts;   // [s - num_decodes + 1], of chunks, from their first query on
    const float *sinks;      // [heads]: scores beside those of tokens, which give nothing; or null
    int32_t count, num_decodes;
    int32_t window;  // tokens that a query sees; 0: all
    float scale;     // of scores
};

// The tokens of a step as a layer sees them; layers of one window and table share one.
struct Step {
    const int64_t *positions, *slots;  // [n]
    const int32_t *tables;             // [s, blocks]
    int64_t table_stride;
    const int32_t *lengths, *starts;
    const int64_t *wanted;  // [num_wanted]: rows that are kept behind attention; null: all
    int64_t num_wanted;
    int32_t count, num_decodes, window, unused;
};

// A pre-norm block of attention and a gated MLP.
struct Layer {
    Product qkv, out, gate_up, down;
    Rotation rotation;  // without positions and slots
    Cache cache;
    const Step *step;
    const Mixture *mixture;  // in the place of gate_up and down; or null
    const float *sinks;      // [heads], as `Sequences` has them; or null
    int32_t heads;
    float scale;  // of scores
};

// Fields of a record that says how to sample a row (sampling/sample.py), in the order of `where`.
enum Field {
    TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, SLOT, SEED, NUMBER, RESULT,
    FIRST_EDIT, END_EDIT, LIKELIEST, HEAT, LOW, HIGH
};

// Rows of logits to sample from.
struct Sampling {
    const float *logits;  // [n, vocab], `stride` apart
    int64_t stride, vocab, count;
    const void *rows;  // [n, record] bytes
    const int32_t *where;  // [fields]: offsets in a record
    const void *edits;
    int16_t *counts;  // [slots, vocab]
    int64_t *token_ids;
    float *log_probs;
    uint8_t *outcomes;
    int64_t record;
};

// What completes the inputs of a step (staging/stage.py).
struct Start {
    const int32_t *header, *staged, *sources;
    int64_t *token_ids;
    const int64_t *sampled;
    int32_t *tables;
    int64_t num_tokens, table_stride;
};

// The groups of a step's rows that have an adapter each, at a place (lora/terms.py).
struct Terms {
    const int64_t *groups;  // [num_groups, 2]: where the adapter's terms are; first row | count << 32
    const int32_t *rows;    // [n], in the order of groups
    float *partial;         // t `[n, width]`, in that order
    int64_t num_groups, place, width;
};

// The forms of the kernels, for an instruction set each.
struct Kernels {
    // `y [n, outputs or half]`, rows `y_stride` apart; adds to `y` if `adds`.
    void (*product)(const Product &, const float *x, int64_t x_stride, int64_t n, float *y,
                    int64_t y_stride, bool adds, int threads);
    // Rotates q in place, writes k and v; rows are `stride` apart.
    void (*rotate)(const Rotation &, const Cache &, float *q, const float *k, const float *v,
                   int64_t stride, int64_t n, int heads, int threads);
    void (*attend)(const Sequences &, const Cache &, const float *q, int64_t q_stride, int64_t n,
                   int heads, float *out, int threads);
    void (*sample)(const Sampling &, int threads);
    // t of `x`, behind the norm of a product without weights, if it has one.
    void (*shrink)(const Terms &, const Product &norm, const float *x, int64_t x_stride,
                   int threads);
    // Adds t B^T to `y`; `sizes` are the outputs of the place's three parts, or 0.
    void (*expand)(const Terms &, const int64_t *sizes, float *y, int64_t y_stride, int threads);
    // Products of rows with the weights of their experts.
    void (*experts)(const Experts &, const float *x, int64_t x_stride, float *y, int64_t y_stride,
                    int threads);
    void (*combine)(const Sum &, int threads);
};

}  // namespace slipstream
