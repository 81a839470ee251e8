/* Mixtures of experts: what an update computes beside the products of its experts, and whole experts for the few tokens
 * of a decode step.
 *
 * Tokens are sorted by expert: a pair of a token and one of its `each` experts is a row, and the rows of an expert are
 * neighbours, whose number is filled up to a multiple.
 */
#include "vectors.h"

/* ---- sorting */

typedef struct {
    const int64_t *index;    /* [tokens, each]: the experts of each token */
    int64_t *position;       /* [tokens, each]: the row of each pair */
    int64_t *token;          /* the token of each row; -1: none */
    int64_t *starts;         /* [experts + 1]: the first row of each expert; the last is -1 if there is no such expert */
    int64_t tokens, each, experts, multiple;
} routes;

void cohort_sort_experts(routes *r) {
    const int64_t pairs = r->tokens * r->each;
    int64_t next[r->experts + 1], row = 0;
    memset(next, 0, sizeof next);
    for (int64_t pair = 0; pair < pairs; pair++) {
        if (r->index[pair] < 0 || r->index[pair] >= r->experts) {
            r->starts[r->experts] = -1;
            return;
        }
        next[r->index[pair]]++;
    }
    for (int64_t expert = 0; expert < r->experts; expert++) {
        const int64_t count = next[expert], end = row + (count + r->multiple - 1) / r->multiple * r->multiple;
        r->starts[expert] = next[expert] = row;
        for (row += count; row < end; row++) r->token[row] = -1;
    }
    r->starts[r->experts] = row;
    for (int64_t pair = 0; pair < pairs; pair++) {
        row = r->position[pair] = next[r->index[pair]]++;
        r->token[row] = pair / r->each;
    }
}

/* ---- rows to tokens and back */

typedef struct {
    const void *x;           /* [tokens, width] */
    const int64_t *token;    /* of each row; -1: zeros */
    void *out;               /* [rows, width] */
    int64_t rows, width, half, threads;
} gathered;

static void gather_row(void *what, int64_t row, int thread) {
    const gathered *g = what;
    const int64_t bytes = g->width * (g->half ? 2 : 4), token = g->token[row];
    (void)thread;
    if (token < 0) memset((char *)g->out + row * bytes, 0, (size_t)bytes);
    else memcpy((char *)g->out + row * bytes, (const char *)g->x + token * bytes, (size_t)bytes);
}

void cohort_gather_rows(gathered *g) { run(gather_row, g, g->rows, (int)g->threads); }

/* The sum of each token's rows, in the order of its experts. */
typedef struct {
    const void *x;           /* [rows, width] */
    const int64_t *position; /* [tokens, each] */
    void *out;               /* [tokens, width] */
    int64_t tokens, each, width, half, threads;
} summed;

static void sum_token(void *what, int64_t token, int thread) {
    const summed *s = what;
    const int64_t *position = s->position + token * s->each, width = s->width, at = token * width;
    const int half = (int)s->half;
    int64_t i = 0;
    (void)thread;
    for (; i + LANES <= width; i += LANES) {
        vec total = load(s->x, position[0] * width + i, half);
        for (int64_t e = 1; e < s->each; e++) total += load(s->x, position[e] * width + i, half);
        store(s->out, at + i, total, half);
    }
    for (; i < width; i++) {
        float total = load1(s->x, position[0] * width + i, half);
        for (int64_t e = 1; e < s->each; e++) total += load1(s->x, position[e] * width + i, half);
        store1(s->out, at + i, total, half);
    }
}

void cohort_sum_rows(summed *s) { run(sum_token, s, s->tokens, (int)s->threads); }

/* ---- the activation of gate and up: out = weight act(g) (u + shift), where g = min(gate, limit), u is up between -limit
 * and limit, and act(g) = g sigmoid(alpha g), or GELU's tanh form */

typedef struct {
    const void *both;        /* [rows, 2 width]: gate, then up, or interleaved */
    const float *weight;     /* [rows] */
    const void *grad_out;    /* [rows, width], of out / weight; NULL: forward */
    void *out;               /* [rows, width] */
    void *grad_both;
    float *grad_weight;
    int64_t rows, width, interleaved, gelu, half, threads;
    float alpha, limit, shift;
} mixture;

INLINE vec steepness(const mixture *m, vec g) {
    return m->gelu ? gate_slope(g, 1) : g * m->alpha;
}

/* Read `count` numbers of gate and up, at most LANES, from `i` on. */
INLINE void both_at(const mixture *m, int64_t row, int64_t i, int64_t count, const int half, vec *gate, vec *up) {
    const int64_t at = row * 2 * m->width;
    if (!m->interleaved && count == LANES) {
        *gate = load(m->both, at + i, half), *up = load(m->both, at + m->width + i, half);
        return;
    }
    const int64_t step = m->interleaved ? 2 : 1, apart = m->interleaved ? 1 : m->width;
    float first[LANES] = {0}, second[LANES] = {0};
    for (int64_t lane = 0; lane < count; lane++) {
        first[lane] = load1(m->both, at + (i + lane) * step, half);
        second[lane] = load1(m->both, at + (i + lane) * step + apart, half);
    }
    *gate = load(first, 0, 0), *up = load(second, 0, 0);
}

INLINE void put_both(const mixture *m, int64_t row, int64_t i, int64_t count, const int half, vec gate, vec up) {
    const int64_t at = row * 2 * m->width;
    if (!m->interleaved && count == LANES) {
        store(m->grad_both, at + i, gate, half), store(m->grad_both, at + m->width + i, up, half);
        return;
    }
    const int64_t step = m->interleaved ? 2 : 1, apart = m->interleaved ? 1 : m->width;
    for (int64_t lane = 0; lane < count; lane++) {
        store1(m->grad_both, at + (i + lane) * step, gate[lane], half);
        store1(m->grad_both, at + (i + lane) * step + apart, up[lane], half);
    }
}

INLINE vec mixture_at(const mixture *m, int64_t row, int64_t i, int64_t count, const int half, vec products) {
    const vec none = {0}, limit = all(m->limit);
    vec gate, up;
    both_at(m, row, i, count, half, &gate, &up);
    const ivec held = gate > limit, beyond = (up > limit) | (up < -limit);
    const vec g = pick(held, limit, gate), u = pick(up > limit, limit, pick(up < -limit, -limit, up)) + m->shift;
    const vec s = 1.0f / (1.0f + exponential(-steepness(m, g))), out = g * s * u;
    vec grad = none;
    if (count == LANES) {
        store(m->out, row * m->width + i, out * m->weight[row], half);
        if (m->grad_out) grad = load(m->grad_out, row * m->width + i, half);
    } else
        for (int64_t lane = 0; lane < count; lane++) {
            store1(m->out, row * m->width + i + lane, out[lane] * m->weight[row], half);
            if (m->grad_out) grad[lane] = load1(m->grad_out, row * m->width + i + lane, half);
        }
    if (!m->grad_out) return none;
    const vec steep = m->gelu ? GELU_SLOPE * (1.0f + 3.0f * GELU_CUBIC * g * g) : all(m->alpha), rest = s * (1.0f - s);
    const vec bend = pick(rest == 0.0f, none, g * steep * rest), given = grad * m->weight[row];
    put_both(m, row, i, count, half, pick(held, none, given * u * (s + bend)), pick(beyond, none, given * g * s));
    return multiply_add(grad, out, products);
}

INLINE void mix_row(const mixture *m, int64_t row, const int half) {
    int64_t i = 0;
    vec products = {0};
    for (; i + LANES <= m->width; i += LANES) products = mixture_at(m, row, i, LANES, half, products);
    if (i < m->width) products = mixture_at(m, row, i, m->width - i, half, products);
    if (m->grad_weight) m->grad_weight[row] = sum(products);
}

static void mix_one(void *what, int64_t row, int thread) {
    const mixture *m = what;
    (void)thread;
    if (m->half) mix_row(m, row, 1);
    else mix_row(m, row, 0);
}

void cohort_mix_gates(mixture *m) { run(mix_one, m, m->rows, (int)m->threads); }

/* ---- experts of a few tokens each, without a gradient
 *
 * The rows of an expert lie along the lanes, filled up to a multiple of LANES: of its input and of its activation,
 * [numbers, rows of the expert]. Each weight is then read once for two vectors of rows. The sums of a row run over its
 * numbers in order, whatever the other rows: a row's results are bit-equal in every batch.
 */
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
} work;

/* Numbers of `room`, for so many rows. */
int64_t cohort_few_room(int64_t rows, int64_t hidden, int64_t inner, int64_t threads) {
    return rows * (1 + hidden + inner) + threads * PANEL * later(hidden, inner);
}

/* Weights of one expert: of the outputs from `first[0]` and from `first[1]` on, PART or fewer each. Weights in bfloat16
 * are widened once for all rows. */
INLINE void read_panel(const work *w, const void *matrix, int64_t expert, int64_t depth, int64_t width,
                       const int64_t *first, const int64_t *count, const float **at, float *scratch) {
    for (int64_t slot = 0; slot < PANEL; slot++) {
        const int64_t part = slot / PART, j = sooner(slot % PART, later(0, count[part] - 1));
        const int64_t row = (expert * width + first[part] + j) * depth;
        at[slot] = w->f->up_half ? scratch + slot * depth : (const float *)matrix + row;
        if (w->f->up_half && slot % PART < count[part])
            for (int64_t k = 0; k < depth; k++) scratch[slot * depth + k] = load1(matrix, row + k, 1);
    }
}

/* Sums over `depth` numbers of OUTS outputs, for `wide` vectors of rows. Prefetches what is `ahead` numbers after. */
INLINE void few_tile(const int wide, const float *const *at, int64_t depth, const float *x, int64_t stride,
                     int64_t ahead, vec *total) {
    UNROLL for (int i = 0; i < OUTS * wide; i++) total[i] = (vec){0};
    for (int64_t k = 0; k < depth; k++) {
        vec rows[2];
        if (k % LINE == 0)
            UNROLL for (int i = 0; i < OUTS; i++) __builtin_prefetch(at[i] + k + ahead);
        UNROLL for (int v = 0; v < wide; v++) rows[v] = load(x, k * stride + v * LANES, 0);
        UNROLL for (int i = 0; i < OUTS; i++) {
            const vec weight = all(at[i][k]);
            UNROLL for (int v = 0; v < wide; v++)
                total[i * wide + v] = multiply_add(weight, rows[v], total[i * wide + v]);
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
                        int64_t row, const int wide) {
    const few *f = w->f;
    const int64_t start = w->starts[expert], rows = w->starts[expert + 1] - start, base = expert * 2 * f->inner;
    const float *x = w->columns + start * f->hidden + row;
    for (int64_t i = 0; i < count; i += OUTS / 2) {
        const float *at[OUTS];
        vec total[OUTS * 2];
        for (int j = 0; j < OUTS; j++) {
            const int64_t one = sooner(i + j / 2, count - 1);
            at[j] = panel[f->interleaved ? 2 * one + j % 2 : one + j % 2 * PART];
        }
        few_tile(wide, at, f->hidden, x, rows, f->hidden * OUTS / 2, total);
        for (int j = 0; j < OUTS / 2 && i + j < count; j++) {
            const int64_t one = pair + i + j;
            const vec of_gate = bias_of(f, f->up_bias, base + (f->interleaved ? 2 * one : one));
            const vec of_up = bias_of(f, f->up_bias, base + (f->interleaved ? 2 * one + 1 : f->inner + one));
            float *to = w->active + start * f->inner + one * rows + row;
            for (int v = 0; v < wide; v++) {
                vec out = few_active(f, total[2 * j * wide + v] + of_gate, total[(2 * j + 1) * wide + v] + of_up);
                out *= load(w->weight, start + row + v * LANES, 0);
                if (f->x_half) {
                    hvec narrow;
                    store(&narrow, 0, out, 1), out = load(&narrow, 0, 1);
                }
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
    for (; row + 2 * LANES <= rows; row += 2 * LANES) few_up_rows(w, at, expert, pair, pairs, row, 2);
    if (row < rows) few_up_rows(w, at, expert, pair, pairs, row, 1);
}

/* `count` outputs from `from` on, of rows of an expert; added to those of their tokens. */
INLINE void few_down_rows(const work *w, const float *const *panel, int64_t expert, int64_t from, int64_t count,
                          int64_t row, const int wide) {
    const few *f = w->f;
    const int64_t start = w->starts[expert], rows = w->starts[expert + 1] - start;
    const float *x = w->active + start * f->inner + row;
    for (int64_t i = 0; i < count; i += OUTS) {
        const float *at[OUTS];
        vec total[OUTS * 2];
        float sums[OUTS * 2 * LANES];
        for (int j = 0; j < OUTS; j++) at[j] = panel[sooner(i + j, count - 1)];
        few_tile(wide, at, f->inner, x, rows, f->inner * OUTS, total);
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
    for (; row + 2 * LANES <= rows; row += 2 * LANES) few_down_rows(w, at, expert, from, outs, row, 2);
    if (row < rows) few_down_rows(w, at, expert, from, outs, row, 1);
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
    float *to = w->columns + start * f->hidden + block - start;
    for (int64_t lane = 0; lane < LANES; lane++) {
        const int64_t token = w->token[block + lane], at = token * f->hidden;
        if (token < 0)
            for (int64_t k = 0; k < f->hidden; k++) to[k * rows + lane] = 0;
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
    work w = {f, r.token, starts, f->room, columns, active, active + rows * f->inner};
    memset(w.weight, 0, (size_t)rows * sizeof *w.weight);
    for (int64_t pair = 0; pair < pairs; pair++) w.weight[r.position[pair]] = f->weights[pair];
    run(few_columns, &w, rows / LANES, (int)f->threads);
    run(few_up_share, &w, f->threads, (int)f->threads);
    run(few_down_share, &w, f->threads, (int)f->threads);
}
