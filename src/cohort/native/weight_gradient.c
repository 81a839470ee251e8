/* The gradient of a linear layer's matrix on processors that multiply pairs of bfloat16 numbers:
 *
 *     total[o, i] += sum over tokens t of grad[t, o] x[t, i]
 *
 * from numbers in bfloat16, with float32 sums and float32 totals: one for each layer of those side by side.
 *
 * Numbers are laid out in words of two neighbouring tokens. Words of STEP pairs of tokens at PANEL_OUTPUTS inputs stay in
 * the nearest cache while the outputs of a block pass by. A sum runs over tokens in order: it depends neither on the
 * other inputs and outputs nor on their number.
 */
#include "vectors.h"

enum {
    STEP = 128,          /* pairs of tokens */
    BLOCK_OUTPUTS = 512, /* outputs whose sums are held */
    MOST_OUTPUTS = 4096  /* outputs whose words are held, a multiple of BLOCK_OUTPUTS */
};

typedef struct {
    const void *grad, *x;  /* [tokens, outputs] and [tokens, inputs], in bfloat16 */
    const int64_t *totals; /* for each layer: address of [its outputs, inputs], their number, whether it holds nothing yet */
    float *bias;           /* [outputs], where sums of grad over tokens are written; NULL: nowhere */
    float *words;          /* room for MOST_OUTPUTS * pairs of tokens */
    int64_t tokens, outputs, inputs, threads;
    int64_t start, count, blocks; /* filled in here: outputs whose words are held */
} weight_gradient;

/* Words of PANEL_OUTPUTS numbers of two rows that end after `count`; the second may be missing (NULL). */
INLINE void words_of(const uint16_t *first, const uint16_t *second, int64_t count, float *to) {
    uint16_t rows[2][PANEL_OUTPUTS] = {{0}};
    if (!second || count < PANEL_OUTPUTS) {
        memcpy(rows[0], first, (size_t)(2 * sooner(count, PANEL_OUTPUTS)));
        if (second) memcpy(rows[1], second, (size_t)(2 * sooner(count, PANEL_OUTPUTS)));
        first = rows[0], second = rows[1];
    }
    for (int64_t i = 0; i < PANEL_OUTPUTS; i += LANES) store(to, i, pair(load(first, i, 1), load(second, i, 1)), 0);
}

/* Words of PANEL_OUTPUTS outputs, [outputs / FEW_ROWS, pairs of tokens, FEW_ROWS], and sums of their numbers. */
static void grad_words(void *what, int64_t panel, int thread) {
    const weight_gradient *p = what;
    const int64_t pairs = (p->tokens + 1) / 2, output = panel * PANEL_OUTPUTS;
    float *to = p->words + output * pairs, words[PANEL_OUTPUTS];
    vec sums[2] = {0};
    (void)thread;
    for (int64_t k = 0; k < pairs; k++) {
        const uint16_t *first = (const uint16_t *)p->grad + 2 * k * p->outputs + p->start + output;
        words_of(first, 2 * k + 1 < p->tokens ? first + p->outputs : 0, p->count - output, words);
        for (int i = 0; p->bias && i < 2; i++) {
            const uvec both = (uvec)load(words, i * LANES, 0);
            sums[i] += (vec)(both << 16) + (vec)(both & 0xffff0000);
        }
        for (int64_t tile = 0; tile < PANEL_OUTPUTS / FEW_ROWS; tile++)
            memcpy(to + (tile * pairs + k) * FEW_ROWS, words + tile * FEW_ROWS, FEW_ROWS * sizeof *words);
    }
    if (p->bias) memcpy(p->bias + p->start + output, sums, (size_t)sooner(p->count - output, PANEL_OUTPUTS) * sizeof *words);
}

/* Add the products of `pairs` pairs of tokens to the sums of FEW_ROWS outputs, [FEW_ROWS, PANEL_OUTPUTS]. */
INLINE void gradient_tile(const float *grad, const float *x, int64_t pairs, float *sums, const int first) {
    vec total[2 * FEW_ROWS];
    UNROLL_ALL for (int i = 0; i < 2 * FEW_ROWS; i++) total[i] = first ? (vec){0} : load(sums, i * LANES, 0);
    for (int64_t k = 0; k < pairs; k++) {
        const vec low = load(x, k * PANEL_OUTPUTS, 0), high = load(x, k * PANEL_OUTPUTS + LANES, 0);
        UNROLL for (int r = 0; r < FEW_ROWS; r++) {
            const vec one = all_bits(grad + k * FEW_ROWS + r);
            total[2 * r] = add_product(low, one, total[2 * r], PAIRS);
            total[2 * r + 1] = add_product(high, one, total[2 * r + 1], PAIRS);
        }
    }
    UNROLL_ALL for (int i = 0; i < 2 * FEW_ROWS; i++) store(sums, i * LANES, total[i], 0);
}

/* Add the sums of an output at `count` inputs to the total of its layer. */
INLINE void settle_output(const weight_gradient *p, int64_t output, int64_t input, const float *sums, int64_t count) {
    const int64_t *layer = p->totals;
    for (; output >= layer[1]; layer += 3) output -= layer[1];
    float *total = (float *)layer[0] + output * p->inputs + input;
    const int64_t fresh = layer[2];
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store(total, i, fresh ? load(sums, i, 0) : load(total, i, 0) + load(sums, i, 0), 0);
    for (; i < count; i++) total[i] = fresh ? sums[i] : total[i] + sums[i];
}

/* The gradient of a block of outputs at PANEL_OUTPUTS inputs. */
static void gradient_panel(void *what, int64_t item, int thread) {
    const weight_gradient *p = what;
    const int64_t panels = (p->inputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS, block = item / panels;
    const int64_t tiles = (p->count + FEW_ROWS - 1) / FEW_ROWS, pairs = (p->tokens + 1) / 2;
    const int64_t output = tiles * block / p->blocks * FEW_ROWS, end = tiles * (block + 1) / p->blocks * FEW_ROWS;
    const int64_t input = item % panels * PANEL_OUTPUTS, count = sooner(PANEL_OUTPUTS, p->inputs - input);
    float x[STEP * PANEL_OUTPUTS], sums[BLOCK_OUTPUTS * PANEL_OUTPUTS];
    (void)thread;
    for (int64_t from = 0; from < pairs; from += STEP) {
        const int64_t step = sooner(STEP, pairs - from);
        for (int64_t k = 0; k < step; k++) {
            const int64_t token = 2 * (from + k);
            const uint16_t *first = (const uint16_t *)p->x + token * p->inputs + input;
            words_of(first, token + 1 < p->tokens ? first + p->inputs : 0, count, x + k * PANEL_OUTPUTS);
        }
        for (int64_t o = output; o < end; o += FEW_ROWS) {
            const float *grad = p->words + o * pairs + from * FEW_ROWS;
            float *own = sums + (o - output) * PANEL_OUTPUTS;
            if (from) gradient_tile(grad, x, step, own, 0);
            else gradient_tile(grad, x, step, own, 1);
        }
    }
    for (int64_t o = output; o < sooner(end, p->count); o++)
        settle_output(p, p->start + o, input, sums + (o - output) * PANEL_OUTPUTS, count);
}

void cohort_weight_gradient(weight_gradient *p) {
    const int64_t panels = (p->inputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS;
    for (p->start = 0; p->start < p->outputs; p->start += MOST_OUTPUTS) {
        p->count = sooner(MOST_OUTPUTS, p->outputs - p->start);
        p->blocks = (p->count + BLOCK_OUTPUTS - 1) / BLOCK_OUTPUTS;
        run(grad_words, p, (p->count + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS, (int)p->threads);
        run(gradient_panel, p, p->blocks * panels, (int)p->threads);
    }
}
