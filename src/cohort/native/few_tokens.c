/* Mixtures of experts: whole experts for the few tokens of a decode step, without a gradient.
 *
 * The rows of an expert lie along the lanes, filled up to a multiple of LANES: of its input and of its activation,
 * [numbers, rows of the expert]. Each weight is then read once for two vectors of rows. The sums of a row run over its
 * numbers in order, whatever the other rows: a row's results are bit-equal in every batch.
 *
 * Where the processor multiplies pairs of bfloat16 numbers, two neighbouring numbers of a row or weight take the place
 * of one in float32 (`paired`).
 */
#include "vectors.h"

enum { PART = 12, PANEL = 2 * PART, OUTS = 6, LINE = 16 };

typedef struct {
    const void *x;                                /* [tokens, hidden] */
    const int64_t *index;                         /* [tokens, each]: the experts of each token */
    const float *weights;                         /* [tokens, each] */
    const void *up, *down, *up_bias, *down_bias;  /* [experts, 2 inner, hidden], [experts, hidden, inner]; NULL: no biases */
    float *out;                                   /* [tokens, hidden], zeros at first */
    int64_t *whole;                               /* room: position and token of routes */
    float *room;                                  /* see few_room */
    int64_t tokens, each, experts, hidden, inner, x_half, up_half, threads, interleaved, gelu;
    float alpha, limit, shift;
} few;

typedef struct {
    const few *f;
    int64_t *token, *starts;  /* see routes */
    float *weight;            /* of each row */
    float *columns, *active;  /* [hidden, rows] and [inner, rows] of each expert */
    float *scratch;           /* [threads, PANEL, max(hidden, inner)] */
    int paired;
} work;

/* Numbers of `room`, for so many rows. */
int64_t cohort_few_room(int64_t rows, int64_t hidden, int64_t inner, int64_t threads) {
    return rows * (1 + hidden + inner) + threads * PANEL * later(hidden, inner);
}

/* Weights of one expert: of the outputs from `first[0]` and from `first[1]` on, PART or fewer each. Weights in bfloat16
 * are widened once for all rows, unless they are multiplied in pairs. */
INLINE void read_panel(const work *w, const void *matrix, int64_t expert, int64_t depth, int64_t width,
                       const int64_t *first, const int64_t *count, const float **at, float *scratch) {
    for (int64_t slot = 0; slot < PANEL; slot++) {
        const int64_t part = slot / PART, j = sooner(slot % PART, later(0, count[part] - 1));
        const int64_t row = (expert * width + first[part] + j) * depth;
        const int widened = w->f->up_half && !w->paired;
        at[slot] = widened ? scratch + slot * depth : (const float *)matrix + (w->paired ? row / 2 : row);
        if (widened && slot % PART < count[part])
            for (int64_t k = 0; k < depth; k++) scratch[slot * depth + k] = load1(matrix, row + k, 1);
    }
}

/* Sums over `depth` numbers, or pairs, of OUTS outputs, for `wide` vectors of rows. Prefetches what is `ahead` numbers
 * after. */
INLINE void few_tile(const int wide, const int paired, const float *const *at, int64_t depth, const float *x,
                     int64_t stride, int64_t ahead, vec *total) {
    UNROLL for (int i = 0; i < OUTS * wide; i++) total[i] = (vec){0};
    for (int64_t k = 0; k < depth; k++) {
        vec rows[2];
        if (k % LINE == 0)
            UNROLL for (int i = 0; i < OUTS; i++) __builtin_prefetch(at[i] + k + ahead);
        UNROLL for (int v = 0; v < wide; v++) rows[v] = load(x, k * stride + v * LANES, 0);
        UNROLL for (int i = 0; i < OUTS; i++) {
            const vec weight = all_bits(at[i] + k);
            UNROLL for (int v = 0; v < wide; v++) {
                vec *one = total + i * wide + v;
                *one = add_product(weight, rows[v], *one, paired ? PAIRS : 0);
            }
        }
    }
}

INLINE vec bias_of(const few *f, const void *bias, int64_t index) {
    return bias ? all(load1(bias, index, (int)f->up_half)) : (vec){0};
}

INLINE vec few_active(const few *f, vec gate, vec up) {
    const vec limit = all(f->limit), g = pick(gate > limit, limit, gate);
    const vec u = pick(up > limit, limit, pick(up < -limit, -limit, up)) + f->shift;
    return g * u / (1.0f + exponential(-(f->gelu ? gate_slope(g, 1) : g * f->alpha)));
}

/* The activations of `count` pairs of gate and up from `pair` on, of rows of an expert. */
INLINE void few_up_rows(const work *w, const float *const *panel, int64_t expert, int64_t pair, int64_t count,
                        int64_t row, const int wide, const int paired) {
    const few *f = w->f;
    const int64_t start = w->starts[expert], rows = w->starts[expert + 1] - start, base = expert * 2 * f->inner;
    const int64_t depth = paired ? f->hidden / 2 : f->hidden;
    const float *x = w->columns + start * depth + row;
    for (int64_t i = 0; i < count; i += OUTS / 2) {
        const float *at[OUTS];
        vec total[OUTS * 2];
        for (int j = 0; j < OUTS; j++) {
            const int64_t one = sooner(i + j / 2, count - 1);
            at[j] = panel[f->interleaved ? 2 * one + j % 2 : one + j % 2 * PART];
        }
        few_tile(wide, paired, at, depth, x, rows, depth * OUTS / 2, total);
        for (int j = 0; j < OUTS / 2 && i + j < count; j++) {
            const int64_t one = pair + i + j;
            const vec of_gate = bias_of(f, f->up_bias, base + (f->interleaved ? 2 * one : one));
            const vec of_up = bias_of(f, f->up_bias, base + (f->interleaved ? 2 * one + 1 : f->inner + one));
            float *to = w->active + (paired ? start * f->inner / 2 + one / 2 * rows : start * f->inner + one * rows) + row;
            for (int v = 0; v < wide; v++) {
                vec out = few_active(f, total[2 * j * wide + v] + of_gate, total[(2 * j + 1) * wide + v] + of_up);
                out *= load(w->weight, start + row + v * LANES, 0);
                if (f->x_half) {
                    hvec narrow;
                    store(&narrow, 0, out, 1), out = load(&narrow, 0, 1);
                }
                if (paired) /* the first of a pair has the lower bits */
                    out = (vec)(one % 2 ? (uvec)out | (uvec)load(to, v * LANES, 0) : (uvec)out >> 16);
                store(to, v * LANES, out, 0);
            }
        }
    }
}

static void few_up(const work *w, int64_t expert, int64_t item, float *scratch) {
    const few *f = w->f;
    const int64_t pair = item * PART, pairs = sooner(PART, f->inner - pair), both = f->interleaved;
    const int64_t first[] = {both ? 2 * pair : pair, both ? 2 * pair + PART : f->inner + pair};
    const int64_t count[] = {both ? sooner(PART, 2 * pairs) : pairs, both ? later(0, 2 * pairs - PART) : pairs};
    const int64_t rows = w->starts[expert + 1] - w->starts[expert];
    const float *at[PANEL];
    int64_t row = 0;
    read_panel(w, f->up, expert, f->hidden, 2 * f->inner, first, count, at, scratch);
    for (; row + 2 * LANES <= rows; row += 2 * LANES)
        if (w->paired) few_up_rows(w, at, expert, pair, pairs, row, 2, 1);
        else few_up_rows(w, at, expert, pair, pairs, row, 2, 0);
    if (row < rows && w->paired) few_up_rows(w, at, expert, pair, pairs, row, 1, 1);
    else if (row < rows) few_up_rows(w, at, expert, pair, pairs, row, 1, 0);
}

/* `count` outputs from `from` on, of rows of an expert; added to those of their tokens. */
INLINE void few_down_rows(const work *w, const float *const *panel, int64_t expert, int64_t from, int64_t count,
                          int64_t row, const int wide, const int paired) {
    const few *f = w->f;
    const int64_t start = w->starts[expert], rows = w->starts[expert + 1] - start;
    const int64_t depth = paired ? f->inner / 2 : f->inner;
    const float *x = w->active + start * depth + row;
    for (int64_t i = 0; i < count; i += OUTS) {
        const float *at[OUTS];
        vec total[OUTS * 2];
        float sums[OUTS * 2 * LANES];
        for (int j = 0; j < OUTS; j++) at[j] = panel[sooner(i + j, count - 1)];
        few_tile(wide, paired, at, depth, x, rows, depth * OUTS, total);
        for (int j = 0; j < OUTS; j++) {
            const vec bias = bias_of(f, f->down_bias, expert * f->hidden + from + sooner(i + j, count - 1));
            for (int v = 0; v < wide; v++)
                store(sums, (j * wide + v) * LANES,
                      total[j * wide + v] + bias * load(w->weight, start + row + v * LANES, 0), 0);
        }
        for (int lane = 0; lane < wide * LANES; lane++) {
            const int64_t token = w->token[start + row + lane];
            float *out = f->out + token * f->hidden + from + i;
            for (int j = 0; token >= 0 && j < OUTS && i + j < count; j++) out[j] += sums[j * wide * LANES + lane];
        }
    }
}

static void few_down(const work *w, int64_t expert, int64_t item, float *scratch) {
    const few *f = w->f;
    const int64_t from = item * PANEL, outs = sooner(PANEL, f->hidden - from), first[] = {from, from + PART};
    const int64_t count[] = {sooner(PART, outs), later(0, outs - PART)};
    const int64_t rows = w->starts[expert + 1] - w->starts[expert];
    const float *at[PANEL];
    int64_t row = 0;
    read_panel(w, f->down, expert, f->inner, f->hidden, first, count, at, scratch);
    for (; row + 2 * LANES <= rows; row += 2 * LANES)
        if (w->paired) few_down_rows(w, at, expert, from, outs, row, 2, 1);
        else few_down_rows(w, at, expert, from, outs, row, 2, 0);
    if (row < rows && w->paired) few_down_rows(w, at, expert, from, outs, row, 1, 1);
    else if (row < rows) few_down_rows(w, at, expert, from, outs, row, 1, 0);
}

/* A thread's share of the panels of each expert: neighbours, so that its weights are read in order. */
INLINE void few_share(const work *w, int64_t share, int thread, int64_t panels,
                      void (*part)(const work *, int64_t, int64_t, float *)) {
    const few *f = w->f;
    float *scratch = w->scratch + thread * PANEL * later(f->hidden, f->inner);
    for (int64_t expert = 0; expert < f->experts; expert++)
        if (w->starts[expert + 1] > w->starts[expert])
            for (int64_t item = panels * share / f->threads; item < panels * (share + 1) / f->threads; item++)
                part(w, expert, item, scratch);
}

static void few_up_share(void *what, int64_t share, int thread) {
    const work *w = what;
    few_share(w, share, thread, (w->f->inner + PART - 1) / PART, few_up);
}

static void few_down_share(void *what, int64_t share, int thread) {
    const work *w = what;
    few_share(w, share, thread, (w->f->hidden + PANEL - 1) / PANEL, few_down);
}

static void few_columns(void *what, int64_t item, int thread) {
    const work *w = what;
    const few *f = w->f;
    const int64_t block = item * LANES;
    int64_t expert = 0;
    (void)thread;
    while (w->starts[expert + 1] <= block) expert++;
    const int64_t start = w->starts[expert], rows = w->starts[expert + 1] - start;
    const int64_t depth = w->paired ? f->hidden / 2 : f->hidden;
    float *to = w->columns + start * depth + block - start;
    for (int64_t lane = 0; lane < LANES; lane++) {
        const int64_t token = w->token[block + lane], at = token * f->hidden;
        if (token < 0)
            for (int64_t k = 0; k < depth; k++) to[k * rows + lane] = 0;
        else if (w->paired)
            for (int64_t k = 0; k < depth; k++) memcpy(to + k * rows + lane, (const uint16_t *)f->x + at + 2 * k, sizeof *to);
        else
            for (int64_t k = 0; k < f->hidden; k++) to[k * rows + lane] = load1(f->x, at + k, (int)f->x_half);
    }
}

/* An index outside of the experts makes all numbers NaN. */
void cohort_few_tokens(const few *f) {
    const int64_t pairs = f->tokens * f->each;
    int64_t starts[f->experts + 1];
    routes r = {f->index, f->whole, f->whole + pairs, starts, f->tokens, f->each, f->experts, LANES};
    cohort_sort_experts(&r);
    const int64_t rows = starts[f->experts];
    if (rows < 0) {
        for (int64_t i = 0; i < f->tokens * f->hidden; i++) f->out[i] = NAN;
        return;
    }
    float *columns = f->room + rows, *active = columns + rows * f->hidden;
    const int paired = HAS_PAIRS && f->x_half && f->up_half && f->hidden % 2 == 0 && f->inner % 2 == 0;
    work w = {f, r.token, starts, f->room, columns, active, active + rows * f->inner, paired};
    memset(w.weight, 0, (size_t)rows * sizeof *w.weight);
    for (int64_t pair = 0; pair < pairs; pair++) w.weight[r.position[pair]] = f->weights[pair];
    run(few_columns, &w, rows / LANES, (int)f->threads);
    run(few_up_share, &w, f->threads, (int)f->threads);
    run(few_down_share, &w, f->threads, (int)f->threads);
}
