/* One token of each row in recurrent layers, for sampling: states are read and written once. All numbers are float32. */
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

/* A causal convolution by channel, which moves its tails on: out = sum_j weight_j tail_j + weight_last x. */
typedef struct {
    const float *x, *weight; /* [rows, channels], [count + 1, channels] */
    float *tails, *out;      /* [rows, count, channels], [rows, channels] */
    int64_t rows, channels, count, threads;
} convolution;

static void convolve_row(void *what, int64_t row, int thread) {
    const convolution *c = what;
    const int64_t channels = c->channels, last = c->count * channels;
    const float *x = c->x + row * channels;
    float *tails = c->tails + row * last, *out = c->out + row * channels;
    (void)thread;
    for (int64_t h = 0; h < channels; h++) out[h] = c->weight[last + h] * x[h];
    for (int64_t j = 0; j < c->count; j++)
        for (int64_t h = 0; h < channels; h++) out[h] += c->weight[j * channels + h] * tails[j * channels + h];
    if (!c->count) return;
    memmove(tails, tails + channels, (size_t)(last - channels) * sizeof *tails);
    memcpy(tails + last - channels, x, (size_t)channels * sizeof *x);
}

void cohort_convolve_step(convolution *c) { run(convolve_row, c, c->rows, (int)c->threads); }
