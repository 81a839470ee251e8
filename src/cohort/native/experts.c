/* Mixtures of experts: what an update computes beside the products of its experts.
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
