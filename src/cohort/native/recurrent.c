/* Recurrent layers: one token of each row, for sampling, and short convolutions. States are float32. */
#include "vectors.h"

enum { COLUMNS = 64 };

/* The gated delta rule: new = beta (v - exp(decay) S^T k), S = exp(decay) S + k new^T, out = S^T q. */
typedef struct {
    const float *q, *k;         /* [rows, groups, keys] */
    const float *v;             /* [rows, heads, width] */
    const float *decay, *beta;  /* [rows, heads] */
    float *state, *out;         /* [rows, heads, keys, width], [rows, heads, width] */
    int64_t rows, groups, heads, keys, width, threads;
} delta;

INLINE void delta_columns(const delta *d, int64_t item, int64_t start, const int64_t count) {
    const int64_t group = item / d->heads * d->groups + item % d->heads / (d->heads / d->groups);
    const float *q = d->q + group * d->keys, *k = d->k + group * d->keys, *v = d->v + item * d->width + start;
    const float decay = expf(d->decay[item]), beta = d->beta[item];
    float *state = d->state + item * d->keys * d->width + start, new[COLUMNS] = {0}, out[COLUMNS] = {0};
    for (int64_t row = 0; row < d->keys; row++)
        for (int64_t i = 0; i < count; i++) new[i] += k[row] * state[row * d->width + i];
    for (int64_t i = 0; i < count; i++) new[i] = beta * (v[i] - decay * new[i]);
    for (int64_t row = 0; row < d->keys; row++)
        for (int64_t i = 0; i < count; i++) {
            const float changed = decay * state[row * d->width + i] + k[row] * new[i];
            state[row * d->width + i] = changed;
            out[i] += q[row] * changed;
        }
    memcpy(d->out + item * d->width + start, out, (size_t)count * sizeof *out);
}

static void delta_head(void *what, int64_t item, int thread) {
    const delta *d = what;
    int64_t start = 0;
    (void)thread;
    for (; start + COLUMNS <= d->width; start += COLUMNS) delta_columns(d, item, start, COLUMNS);
    if (start < d->width) delta_columns(d, item, start, d->width - start);
}

void cohort_delta_step(delta *d) { run(delta_head, d, d->rows * d->heads, (int)d->threads); }

/* The state space of Mamba 2: S = exp(step decay) S + step x b^T, out = S c. */
typedef struct {
    const float *x;          /* [rows, heads, width] */
    const float *step;       /* [rows, heads] */
    const float *decay;      /* [heads] */
    const float *b, *c;      /* [rows, groups, keys] */
    float *state, *out;      /* [rows, heads, width, keys], [rows, heads, width] */
    int64_t rows, groups, heads, keys, width, threads;
} space;

static void space_head(void *what, int64_t item, int thread) {
    const space *s = what;
    const int64_t head = item % s->heads, keys = s->keys, whole = keys / LANES * LANES;
    const int64_t group = item / s->heads * s->groups + head / (s->heads / s->groups);
    const float *b = s->b + group * keys, *c = s->c + group * keys, decay = expf(s->step[item] * s->decay[head]);
    (void)thread;
    for (int64_t row = item * s->width; row < (item + 1) * s->width; row++) {
        float *state = s->state + row * keys;
        const float x = s->step[item] * s->x[row];
        vec total = {0};
        for (int64_t k = 0; k < whole; k += LANES) {
            const vec changed = multiply_add(all(decay), load(state, k, 0), all(x) * load(b, k, 0));
            store(state, k, changed, 0);
            total = multiply_add(changed, load(c, k, 0), total);
        }
        float out = sum(total);
        for (int64_t k = whole; k < keys; k++) {
            state[k] = decay * state[k] + x * b[k];
            out += state[k] * c[k];
        }
        s->out[row] = out;
    }
}

void cohort_space_step(space *s) { run(space_head, s, s->rows * s->heads, (int)s->threads); }

/* ---- short convolutions */

enum { SPAN = 4 * LANES };

/* A causal convolution by channel over sequences end to end, each of which begins with a tail:
 *     u = before x        p_t = bias + sum_j weight_j u_{t + j - count}        out = after p, or after silu(p) */
typedef struct {
    const void *x, *before, *after; /* [tokens, stride] each; before and after NULL: 1 */
    const float *weight, *bias;     /* [count + 1, channels], [channels]; bias NULL: 0 */
    const float *tails;             /* u before each sequence, [sequences, count, channels] */
    float *new_tails;               /* and after it; may be `tails` */
    const int64_t *starts;          /* [sequences + 1]: the first token of each sequence, and the end of the last one */
    void *out;                      /* [tokens, channels] */
    int64_t sequences, stride, channels, count, silu, half, threads;
} convolution;

/* `n` numbers of a block, the others 0. */
INLINE void get(float *to, const void *from, int64_t at, int64_t n, const int half) {
    if (n == SPAN)
        for (int64_t i = 0; i < SPAN; i += LANES) store(to, i, load(from, at + i, half), 0);
    else
        for (int64_t i = 0; i < SPAN; i++) to[i] = i < n ? load1(from, at + i, half) : 0;
}

INLINE void put(void *to, int64_t at, const float *from, int64_t n, const int half) {
    if (n == SPAN)
        for (int64_t i = 0; i < SPAN; i += LANES) store(to, at + i, load(from, i, 0), half);
    else
        for (int64_t i = 0; i < n; i++) store1(to, at + i, from[i], half);
}

INLINE void times(float *x, const float *y) {
    for (int64_t i = 0; i < SPAN; i++) x[i] *= y[i];
}

/* The first row goes to the end. */
INLINE void rotate_rows(float **rows, int64_t count) {
    float *first = rows[0];
    for (int64_t j = 0; j < count; j++) rows[j] = rows[j + 1];
    rows[count] = first;
}

/* A block of channels: weights and bias, and the tail of a sequence in the first rows. */
INLINE void begin_block(const convolution *c, int64_t sequence, int64_t first, int64_t n, float *weight, float *bias,
                        float *memory, float **rows) {
    for (int64_t j = 0; j <= c->count; j++) {
        rows[j] = memory + j * SPAN;
        get(weight + j * SPAN, c->weight, j * c->channels + first, n, 0);
        if (j < c->count) get(rows[j], c->tails, (sequence * c->count + j) * c->channels + first, n, 0);
    }
    memset(bias, 0, SPAN * sizeof *bias);
    if (c->bias) get(bias, c->bias, first, n, 0);
}

/* u of a token into the last row, and p. */
INLINE void convolve_token(const convolution *c, int64_t token, int64_t first, int64_t n, const float *weight,
                           const float *bias, float **rows, float *p, const int half) {
    float gate[SPAN];
    get(rows[c->count], c->x, token * c->stride + first, n, half);
    if (c->before) {
        get(gate, c->before, token * c->stride + first, n, half);
        times(rows[c->count], gate);
    }
    memcpy(p, bias, SPAN * sizeof *p);
    for (int64_t j = 0; j <= c->count; j++)
        for (int64_t i = 0; i < SPAN; i += LANES)
            store(p, i, multiply_add(load(weight, j * SPAN + i, 0), load(rows[j], i, 0), load(p, i, 0)), 0);
}

INLINE void convolve_item(const convolution *c, int64_t item, const int half) {
    const int64_t blocks = (c->channels + SPAN - 1) / SPAN, sequence = item / blocks, first = item % blocks * SPAN;
    const int64_t n = sooner(SPAN, c->channels - first), count = c->count;
    float weight[(count + 1) * SPAN], memory[(count + 1) * SPAN], bias[SPAN], p[SPAN], gate[SPAN], *rows[count + 1];
    begin_block(c, sequence, first, n, weight, bias, memory, rows);
    for (int64_t token = c->starts[sequence]; token < c->starts[sequence + 1]; token++) {
        convolve_token(c, token, first, n, weight, bias, rows, p, half);
        if (c->silu)
            for (int64_t i = 0; i < SPAN; i += LANES) store(p, i, activated(load(p, i, 0), 0), 0);
        if (c->after) {
            get(gate, c->after, token * c->stride + first, n, half);
            times(p, gate);
        }
        put(c->out, token * c->channels + first, p, n, half);
        rotate_rows(rows, count);
    }
    for (int64_t j = 0; j < count; j++) put(c->new_tails, (sequence * count + j) * c->channels + first, rows[j], n, 0);
}

static void convolve_one(void *what, int64_t item, int thread) {
    const convolution *c = what;
    (void)thread;
    if (c->half) convolve_item(c, item, 1);
    else convolve_item(c, item, 0);
}

void cohort_convolve(convolution *c) {
    run(convolve_one, c, c->sequences * ((c->channels + SPAN - 1) / SPAN), (int)c->threads);
}

typedef struct {
    const void *x, *before, *after, *grad_out;
    const float *weight, *bias, *tails, *grad_new_tails; /* grad_new_tails NULL: 0 */
    const int64_t *starts;
    void *grad_x, *grad_before, *grad_after; /* [tokens, grad_stride] each; the latter two NULL with before and after */
    float *grad_tails;
    float *grad_weight; /* [threads, count + 2, channels], sums of each thread; the last row of the bias */
    int64_t sequences, stride, grad_stride, channels, count, silu, half, threads;
} convolution_grad;

/* The gradient of u at a token of a sequence, counted from its first one: to the token or, before it, to the tail. */
INLINE void send_back(const convolution_grad *g, int64_t sequence, int64_t token, int64_t first, int64_t n, float *grad,
                      const int half) {
    if (token < 0) {
        put(g->grad_tails, (sequence * g->count + g->count + token) * g->channels + first, grad, n, 0);
        return;
    }
    const int64_t at = (g->starts[sequence] + token) * g->stride + first;
    const int64_t to = (g->starts[sequence] + token) * g->grad_stride + first;
    if (g->before) {
        float x[SPAN], gate[SPAN];
        get(x, g->x, at, n, half), get(gate, g->before, at, n, half);
        times(x, grad), times(grad, gate);
        put(g->grad_before, to, x, n, half);
    }
    put(g->grad_x, to, grad, n, half);
}

INLINE void convolve_grad_item(const convolution_grad *g, int64_t item, int thread, const int half) {
    const convolution c = {.x = g->x, .before = g->before, .after = g->after, .weight = g->weight, .bias = g->bias,
                           .tails = g->tails, .stride = g->stride, .channels = g->channels, .count = g->count};
    const int64_t blocks = (c.channels + SPAN - 1) / SPAN, sequence = item / blocks, first = item % blocks * SPAN;
    const int64_t n = sooner(SPAN, c.channels - first), count = c.count, length = g->starts[sequence + 1] - g->starts[sequence];
    float weight[(count + 1) * SPAN], memory[(count + 1) * SPAN], bias[SPAN], p[SPAN], grad[SPAN], *rows[count + 1];
    float of_u[(count + 1) * SPAN], of_weight[(count + 2) * SPAN], *grads[count + 1];
    begin_block(&c, sequence, first, n, weight, bias, memory, rows);
    memset(of_u, 0, sizeof of_u);
    memset(of_weight, 0, sizeof of_weight);
    for (int64_t j = 0; j <= count; j++) grads[j] = of_u + j * SPAN;
    for (int64_t token = 0; token < length; token++) {
        const int64_t at = g->starts[sequence] + token;
        convolve_token(&c, at, first, n, weight, bias, rows, p, half);
        get(grad, g->grad_out, at * c.channels + first, n, half);
        float gate[SPAN];
        if (g->after) get(gate, g->after, at * c.stride + first, n, half);
        for (int64_t i = 0; i < SPAN; i += LANES) {
            const vec x = load(p, i, 0), share = 1.0f / (1.0f + exponential(-x)), given = load(grad, i, 0);
            const vec value = g->silu ? x * share : x, slope = g->silu ? share * (1.0f + x * (1.0f - share)) : all(1.0f);
            store(p, i, given * value, 0);
            store(grad, i, given * slope * (g->after ? load(gate, i, 0) : all(1.0f)), 0);
        }
        if (g->after) put(g->grad_after, at * g->grad_stride + first, p, n, half);
        memset(grads[count], 0, SPAN * sizeof *of_u);
        for (int64_t j = 0; j <= count; j++)
            for (int64_t i = 0; i < SPAN; i += LANES) {
                const vec given = load(grad, i, 0), sums = load(of_weight, j * SPAN + i, 0);
                store(grads[j], i, multiply_add(load(weight, j * SPAN + i, 0), given, load(grads[j], i, 0)), 0);
                store(of_weight, j * SPAN + i, multiply_add(given, load(rows[j], i, 0), sums), 0);
            }
        for (int64_t i = 0; i < SPAN; i++) of_weight[(count + 1) * SPAN + i] += grad[i];
        send_back(g, sequence, token - count, first, n, grads[0], half);
        rotate_rows(rows, count), rotate_rows(grads, count);
    }
    for (int64_t j = 0; j < count; j++) {
        if (g->grad_new_tails) {
            get(grad, g->grad_new_tails, (sequence * count + j) * c.channels + first, n, 0);
            for (int64_t i = 0; i < SPAN; i++) grads[j][i] += grad[i];
        }
        send_back(g, sequence, length - count + j, first, n, grads[j], half);
    }
    float *sums = g->grad_weight + thread * (count + 2) * c.channels + first;
    for (int64_t j = 0; j < count + 2; j++)
        for (int64_t i = 0; i < n; i++) sums[j * c.channels + i] += of_weight[j * SPAN + i];
}

static void convolve_grad_one(void *what, int64_t item, int thread) {
    const convolution_grad *g = what;
    if (g->half) convolve_grad_item(g, item, thread, 1);
    else convolve_grad_item(g, item, thread, 0);
}

void cohort_convolve_grad(convolution_grad *g) {
    run(convolve_grad_one, g, g->sequences * ((g->channels + SPAN - 1) / SPAN), (int)g->threads);
}

/* ---- inside the chunks of recurrences over texts */

/* out_ij = scores_ij exp(passed_i - passed_j) for i >= j, else 0, of `repeats` heads that share scores. With the
 * gradient of out, those of scores and of passed. Differences of sums are taken in float64. */
typedef struct {
    const float *scores;   /* [groups, size, size] */
    const void *passed;    /* [groups, repeats, size], float64 */
    float *out;            /* [groups, repeats, size, size] */
    const float *grad_out; /* NULL: forward */
    float *grad_scores, *grad_passed;
    int64_t groups, repeats, size, threads;
} decayed;

/* Decays of token i, for the vectors up to it. */
INLINE void decays(const double *passed, int64_t i, int64_t size, float *out) {
    for (int64_t j = 0; j <= i; j++) out[j] = (float)(passed[i] - passed[j]);
    for (int64_t j = i + 1; j < up(size) * LANES; j++) out[j] = -INFINITY;
    for (int64_t j = 0; j <= i; j += LANES) store(out, j, exponential(load(out, j, 0)), 0);
}

static void decay_head(void *what, int64_t item, int thread) {
    const decayed *d = what;
    const int64_t size = d->size;
    const double *passed = (const double *)d->passed + item * size;
    float decay[up(size) * LANES];
    (void)thread;
    for (int64_t i = 0; i < size; i++) {
        const float *scores = d->scores + (item / d->repeats * size + i) * size;
        float *out = d->out + (item * size + i) * size;
        decays(passed, i, size, decay);
        for (int64_t j = 0; j <= i; j++) out[j] = scores[j] * decay[j];
        memset(out + i + 1, 0, (size_t)(size - i - 1) * sizeof *out);
    }
}

static void decay_grad_group(void *what, int64_t group, int thread) {
    const decayed *d = what;
    const int64_t size = d->size;
    float decay[up(size) * LANES], *of_scores = d->grad_scores + group * size * size;
    (void)thread;
    memset(of_scores, 0, (size_t)(size * size) * sizeof *of_scores);
    memset(d->grad_passed + group * d->repeats * size, 0, (size_t)(d->repeats * size) * sizeof *of_scores);
    for (int64_t head = group * d->repeats; head < (group + 1) * d->repeats; head++) {
        const double *passed = (const double *)d->passed + head * size;
        float *of_passed = d->grad_passed + head * size;
        for (int64_t i = 0; i < size; i++) {
            const float *scores = d->scores + (group * size + i) * size, *grad = d->grad_out + (head * size + i) * size;
            vec total = {0};
            int64_t j = 0;
            decays(passed, i, size, decay);
            for (; j + LANES <= i + 1; j += LANES) {
                const vec given = load(grad, j, 0) * load(decay, j, 0), whole = given * load(scores, j, 0);
                store(of_scores, i * size + j, load(of_scores, i * size + j, 0) + given, 0);
                store(of_passed, j, load(of_passed, j, 0) - whole, 0);
                total += whole;
            }
            float rest = 0;
            for (; j <= i; j++) {
                const float given = grad[j] * decay[j];
                of_scores[i * size + j] += given;
                of_passed[j] -= given * scores[j];
                rest += given * scores[j];
            }
            of_passed[i] += sum(total) + rest;
        }
    }
}

void cohort_decayed(decayed *d) {
    if (d->grad_out) run(decay_grad_group, d, d->groups, (int)d->threads);
    else run(decay_head, d, d->groups * d->repeats, (int)d->threads);
}

/* x with (1 + lower) x = b, of the strictly lower triangles. With the gradient of x, those of b and of lower, which
 * keeps 0 elsewhere. */
typedef struct {
    const float *lower, *b; /* [systems, size, size], [systems, size, width]; b: of x, with a gradient */
    float *x;               /* its gradient becomes that of b */
    float *grad_lower;      /* NULL: forward */
    int64_t systems, size, width, threads;
} triangular;

/* to -= factor from */
INLINE void subtract(float *to, const float *from, float factor, int64_t width) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(to, i, multiply_add(all(-factor), load(from, i, 0), load(to, i, 0)), 0);
    for (; i < width; i++) to[i] -= factor * from[i];
}

INLINE float product_of(const float *a, const float *b, int64_t width) {
    vec total = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) total = multiply_add(load(a, i, 0), load(b, i, 0), total);
    for (; i < width; i++) rest += a[i] * b[i];
    return sum(total) + rest;
}

static void solve_one(void *what, int64_t system, int thread) {
    const triangular *t = what;
    const int64_t size = t->size, width = t->width;
    const float *lower = t->lower + system * size * size, *b = t->b + system * size * width;
    float *x = t->x + system * size * width;
    (void)thread;
    if (!t->grad_lower) {
        memcpy(x, b, (size_t)(size * width) * sizeof *x);
        for (int64_t i = 1; i < size; i++)
            for (int64_t j = 0; j < i; j++) subtract(x + i * width, x + j * width, lower[i * size + j], width);
        return;
    }
    float *of_lower = t->grad_lower + system * size * size;
    memset(of_lower, 0, (size_t)(size * size) * sizeof *of_lower);
    for (int64_t i = size - 1; i > 0; i--)
        for (int64_t j = 0; j < i; j++) {
            subtract(x + j * width, x + i * width, lower[i * size + j], width);
            of_lower[i * size + j] = -product_of(x + i * width, b + j * width, width);
        }
}

void cohort_triangular(triangular *t) { run(solve_one, t, t->systems, (int)t->threads); }
