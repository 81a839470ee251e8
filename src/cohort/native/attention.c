/* Attention of an update, forward and backward. Sequences lie end to end; each attends to itself and to the whole of a
 * prefix that it may share with its neighbours.
 *
 *     out_t = sum_j p_tj v_j        p_tj = exp(q_t . k_j scaling - lse_t)        lse_t = log sum_j exp(q_t . k_j scaling)
 *
 * An item of work is one key-value head of neighbouring sequences of one prefix: the prefix's keys are copied once for
 * them, and its gradients add up in one slot. QUERIES of them are processed together.
 *
 * Axis letters: T tokens, X prefix tokens, A query heads, G key-value heads, D head dimension, stored as `padded`.
 */
#include "tiles.h"

#define QUERIES 16 /* a multiple of TILE */

typedef struct {
    const void *q, *k, *v, *prefix_k, *prefix_v; /* [T, A, D], twice [T, G, D], twice [X, G, D] */
    void *out;                                   /* [T, A, D]; read by the backward pass */
    float *lse;                                  /* [T, A] */
    const void *grad_out;                        /* NULL: forward */
    void *grad_q, *grad_k, *grad_v;
    float *grad_prefix_k, *grad_prefix_v; /* [slots, X, G, D] */
    const int64_t *sequences;             /* [S, 4]: first token, tokens, first token and tokens of its prefix */
    const int64_t *items;                 /* [items, 3]: first sequence, sequence after the last, slot */
    const int64_t *drawn_before;          /* [T + 1]: tokens before each that need an output; NULL: all need one */
    float *scratch;                       /* [threads, scratch_size] */
    int64_t item_count, kv_heads, group, width, padded, longest, prefix_tokens, window, half, prefix_half, scratch_size,
        threads;
    float scaling;
} packed;

/* A thread's scratch memory. Keys and values are stored by token, [longest, padded], and in the blocks of `score`. */
typedef struct {
    shape of;
    float *keys, *values, *key_blocks, *value_blocks, *grad_keys, *grad_values; /* the last three: backward only */
    float *q, *out, *grad, *weights, *slopes;
    int64_t stride; /* of weights and slopes, [QUERIES, stride] */
} table;

/* Nothing is initialised. Numbers beyond a head's width or a sequence's tokens stay arbitrary: they are multiplied but
 * never read. */
static table laid_out(const packed *p, int thread) {
    const int64_t stride = up(p->longest) * LANES, size = stride * p->padded, tile = QUERIES * p->padded;
    float *at = p->scratch + thread * p->scratch_size;
    table t = {.of = {p->width, p->padded}, .stride = stride};
    float **parts[] = {&t.keys, &t.values, &t.key_blocks, &t.value_blocks, &t.grad_keys, &t.grad_values};
    for (int i = 0; i < (p->grad_out ? 6 : 3); i++) *parts[i] = at, at += size;
    t.q = at, t.out = t.q + tile, t.grad = t.out + tile, t.weights = t.grad + tile;
    t.slopes = t.weights + QUERIES * stride;
    return t;
}

int64_t cohort_attention_scratch(int64_t longest, int64_t padded, int64_t backward) {
    const int64_t stride = up(longest) * LANES;
    return (backward ? 6 : 3) * stride * padded + 3 * QUERIES * padded + 2 * QUERIES * stride;
}

/* Copy `count` tokens of one head, from `first` on, to the table's tokens from `position` on. */
static void lay(const packed *p, table *t, const void *keys, const void *values, int64_t first, int64_t count,
                int64_t head, int64_t position, const int half) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t from = ((first + i) * p->kv_heads + head) * p->width, to = position + i;
        const int64_t block = to / LANES * p->padded * LANES + to % LANES;
        for (int64_t d = 0; d < p->width; d++) {
            const float k = load1(keys, from + d, half), v = load1(values, from + d, half);
            t->keys[to * p->padded + d] = k, t->values[to * p->padded + d] = v;
            t->key_blocks[block + d * LANES] = k;
            if (t->value_blocks) t->value_blocks[block + d * LANES] = v;
        }
    }
}

/* The table's tokens that query `j` of a sequence sees: from .first to before .end; none if the query is padding. */
typedef struct {
    int64_t first, end;
} view;

static view seen(const packed *p, const int64_t *sequence, int64_t j) {
    if (j >= sequence[1] * p->group) return (view){0, 0};
    const int64_t end = sequence[3] + j / p->group + 1;
    return (view){p->window ? later(0, end - p->window) : 0, end};
}

/* The index of query `j` of a sequence in [T, A]. */
static int64_t index_of(const packed *p, const int64_t *sequence, int64_t head, int64_t j) {
    return ((sequence[0] + j / p->group) * p->kv_heads + head) * p->group + j % p->group;
}

INLINE ivec within(view v, int64_t t) {
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    const ivec position = lane + (int32_t)t;
    return (position >= (int32_t)v.first) & (position < (int32_t)v.end);
}

/* Load QUERIES rows of [T, A, D], zeros beyond the last query. */
static void load_tile(const packed *p, const void *from, const int64_t *sequence, int64_t head, int64_t j, float *to) {
    for (int64_t i = 0; i < QUERIES; i++) {
        float *row = to + i * p->padded;
        if (j + i >= sequence[1] * p->group) {
            memset(row, 0, (size_t)p->padded * sizeof *row);
            continue;
        }
        for (int64_t d = p->width; d < p->padded; d++) row[d] = 0;
        const int64_t at = index_of(p, sequence, head, j + i) * p->width;
        if (!p->half) memcpy(row, (const float *)from + at, (size_t)p->width * sizeof *row);
        else
            for (int64_t d = 0; d < p->width; d++) row[d] = load1(from, at + d, 1);
    }
}

static void put_tile(const packed *p, const float *from, const int64_t *sequence, int64_t head, int64_t j, void *to) {
    for (int64_t i = 0; i < QUERIES && j + i < sequence[1] * p->group; i++) {
        const int64_t at = index_of(p, sequence, head, j + i) * p->width;
        const float *row = from + i * p->padded;
        if (!p->half) memcpy((float *)to + at, row, (size_t)p->width * sizeof *row);
        else
            for (int64_t d = 0; d < p->width; d++) store1(to, at + d, row[d], 1);
    }
}

/* Whether a tile has a query whose output is needed. */
static int needed(const packed *p, const int64_t *sequence, int64_t j) {
    const int64_t last = sooner(j + QUERIES, sequence[1] * p->group) - 1, *drawn = p->drawn_before;
    return !drawn || drawn[sequence[0] + last / p->group + 1] > drawn[sequence[0] + j / p->group];
}

/* rows blocks^T of all queries, for the tokens from `first` to `end`. Keys stay in the nearest cache while the queries
 * pass by, and so do values below. */
static void score_queries(const table *t, const float *rows, const float *blocks, int64_t first, int64_t end,
                          float *scores) {
    const int64_t padded = t->of.padded, stride = t->stride;
    for (int64_t from = first / LANES; from < up(end); from += 6) {
        const int64_t to = sooner(from + 6, up(end));
        for (int64_t i = 0; i < QUERIES; i += 4) {
            const float *q = rows + i * padded;
            float *found = scores + i * stride;
            const int64_t rest = score_tile(4, 3, q, blocks, &t->of, from, to, found, stride, 0);
            score_tile(4, 1, q, blocks, &t->of, rest, to, found, stride, 0);
        }
    }
}

/* out += weights rows of all queries, for the tokens from `first` to `end`. */
static void mix_queries(const table *t, const float *weights, const float *rows, int64_t first, int64_t end, float *out) {
    const int64_t padded = t->of.padded, stride = t->stride;
    for (int64_t from = first; from < end; from += 48) {
        const int64_t to = sooner(from + 48, end);
        int64_t i = 0;
        for (; i + 6 <= QUERIES && padded / LANES % 2 == 0; i += 6)
            mix_tile(6, 2, weights + i * stride, stride, rows, &t->of, from, to, out + i * padded, 0);
        mix(QUERIES - i, weights + i * stride, stride, rows, &t->of, from, to, out + i * padded, 0);
    }
}

/* Where blocks of tokens begin and end that a query sees wholly. Scores are masked outside. */
typedef struct {
    int64_t begin, end;
} blocks;

static blocks whole(view v, int64_t first) {
    const int64_t begin = later(first, up(v.first) * LANES);
    return (blocks){begin, later(begin, v.end / LANES * LANES)};
}

/* Scale scores, -inf for tokens that are not seen. Returns the maximum of `top` and the scores. */
INLINE vec scale_scores(float *row, int64_t from, int64_t to, view v, float scaling, vec top, const int masked) {
    for (int64_t k = from; k < to; k += LANES) {
        vec x = load(row, k, 0) * scaling;
        if (masked) x = pick(within(v, k), x, all(-INFINITY));
        store(row, k, x, 0);
        top = pick(x > top, x, top);
    }
    return top;
}

static void forward_tile(const packed *p, table *t, const int64_t *sequence, int64_t head, int64_t j) {
    const int64_t last = sooner(j + QUERIES, sequence[1] * p->group) - 1;
    const int64_t first = seen(p, sequence, j).first, end = seen(p, sequence, last).end, start = first / LANES * LANES;
    load_tile(p, p->q, sequence, head, j, t->q);
    memset(t->out, 0, (size_t)(QUERIES * p->padded) * sizeof *t->out);
    score_queries(t, t->q, t->key_blocks, first, end, t->weights);
    float sums[QUERIES];
    for (int64_t i = 0; i < QUERIES; i++) {
        const view v = seen(p, sequence, j + i);
        const blocks inside = whole(v, start);
        float *row = t->weights + i * t->stride;
        if (i > last - j) { /* padding, whose sums nobody reads */
            memset(row + start, 0, (size_t)(up(end) * LANES - start) * sizeof *row);
            continue;
        }
        vec top_v = scale_scores(row, start, inside.begin, v, p->scaling, all(-INFINITY), 1), total = {0};
        top_v = scale_scores(row, inside.begin, inside.end, v, p->scaling, top_v, 0);
        top_v = scale_scores(row, inside.end, end, v, p->scaling, top_v, 1);
        const float top = highest(top_v);
        for (int64_t k = start; k < end; k += LANES) {
            const vec e = exponential(load(row, k, 0) - top);
            store(row, k, e, 0);
            total += e;
        }
        sums[i] = sum(total);
        p->lse[index_of(p, sequence, head, j + i)] = top + logf(sums[i]);
    }
    mix_queries(t, t->weights, t->values, first, end, t->out);
    for (int64_t i = 0; i <= last - j; i++)
        for (int64_t d = 0; d < p->width; d++) t->out[i * p->padded + d] /= sums[i];
    put_tile(p, t->out, sequence, head, j, p->out);
}

/* target[t] += sum over the queries of weights[i][t] rows[i], for `count` tokens from `t` on, `wide` vectors of D at a
 * time. */
INLINE void fold_tile(const int count, const int wide, const float *weights, int64_t stride, const float *rows,
                      int64_t padded, int64_t t, float *target) {
    for (int64_t d = 0; d + wide * LANES <= padded; d += wide * LANES) {
        float *to = target + t * padded + d;
        vec total[12];
        UNROLL_ALL for (int i = 0; i < count * wide; i++) total[i] = load(to, i / wide * padded + i % wide * LANES, 0);
        for (int i = 0; i < QUERIES; i++) {
            vec row[2];
            UNROLL_ALL for (int w = 0; w < wide; w++) row[w] = load(rows, i * padded + d + w * LANES, 0);
            UNROLL_ALL for (int n = 0; n < count; n++)
                UNROLL_ALL for (int w = 0; w < wide; w++)
                    total[n * wide + w] = multiply_add(all(weights[i * stride + t + n]), row[w], total[n * wide + w]);
        }
        UNROLL_ALL for (int i = 0; i < count * wide; i++) store(to, i / wide * padded + i % wide * LANES, total[i], 0);
    }
}

static void fold(const float *weights, int64_t stride, const float *rows, int64_t padded, int64_t from, int64_t end,
                 float *target) {
    const int odd = padded / LANES % 2;
    int64_t t = from;
    for (; t + 6 <= end; t += 6)
        if (odd) fold_tile(6, 1, weights, stride, rows, padded, t, target);
        else fold_tile(6, 2, weights, stride, rows, padded, t, target);
    for (; t < end; t++)
        if (odd) fold_tile(1, 1, weights, stride, rows, padded, t, target);
        else fold_tile(1, 2, weights, stride, rows, padded, t, target);
}

/* From scores and products of gradients with values to the weights and the gradients of scores. */
INLINE void weigh(float *weights, float *slopes, int64_t from, int64_t to, view v, float scaling, float lse,
                  float delta, const int masked) {
    for (int64_t k = from; k < to; k += LANES) {
        const ivec inside = masked ? within(v, k) : (ivec){0};
        vec e = exponential(load(weights, k, 0) * scaling - lse);
        if (masked) e = pick(inside, e, (vec){0});
        vec slope = e * (load(slopes, k, 0) - delta) * scaling;
        if (masked) slope = pick(inside, slope, (vec){0});
        store(weights, k, e, 0);
        store(slopes, k, slope, 0);
    }
}

static void backward_tile(const packed *p, table *t, const int64_t *sequence, int64_t head, int64_t j) {
    const int64_t last = sooner(j + QUERIES, sequence[1] * p->group) - 1;
    const int64_t first = seen(p, sequence, j).first, end = seen(p, sequence, last).end, start = first / LANES * LANES;
    load_tile(p, p->q, sequence, head, j, t->q);
    load_tile(p, p->out, sequence, head, j, t->out);
    load_tile(p, p->grad_out, sequence, head, j, t->grad);
    score_queries(t, t->q, t->key_blocks, first, end, t->weights);
    score_queries(t, t->grad, t->value_blocks, first, end, t->slopes);
    for (int64_t i = 0; i < QUERIES; i++) {
        const view v = seen(p, sequence, j + i);
        const blocks inside = whole(v, start);
        const float lse = j + i <= last ? p->lse[index_of(p, sequence, head, j + i)] : 0;
        float *weights = t->weights + i * t->stride, *slopes = t->slopes + i * t->stride;
        vec products = {0};
        for (int64_t d = 0; d < p->padded; d += LANES)
            products = multiply_add(load(t->grad, i * p->padded + d, 0), load(t->out, i * p->padded + d, 0), products);
        const float delta = sum(products);
        weigh(weights, slopes, start, inside.begin, v, p->scaling, lse, delta, 1);
        weigh(weights, slopes, inside.begin, inside.end, v, p->scaling, lse, delta, 0);
        weigh(weights, slopes, inside.end, end, v, p->scaling, lse, delta, 1);
    }
    memset(t->out, 0, (size_t)(QUERIES * p->padded) * sizeof *t->out);
    mix_queries(t, t->slopes, t->keys, first, end, t->out);
    put_tile(p, t->out, sequence, head, j, p->grad_q);
    fold(t->weights, t->stride, t->grad, p->padded, first, end, t->grad_values);
    fold(t->slopes, t->stride, t->q, p->padded, first, end, t->grad_keys);
}

/* Store a sequence's gradients; the table is free for the next sequence. */
static void put_own(const packed *p, table *t, const int64_t *sequence, int64_t head) {
    for (int64_t i = 0; i < sequence[1]; i++) {
        const int64_t to = ((sequence[0] + i) * p->kv_heads + head) * p->width, from = (sequence[3] + i) * p->padded;
        for (int64_t d = 0; d < p->width; d++) {
            store1(p->grad_k, to + d, t->grad_keys[from + d], (int)p->half);
            store1(p->grad_v, to + d, t->grad_values[from + d], (int)p->half);
            t->grad_keys[from + d] = t->grad_values[from + d] = 0;
        }
    }
}

static void put_prefix(const packed *p, const table *t, const int64_t *sequence, int64_t head, int64_t slot) {
    for (int64_t i = 0; i < sequence[3]; i++) {
        const int64_t to = ((slot * p->prefix_tokens + sequence[2] + i) * p->kv_heads + head) * p->width;
        memcpy(p->grad_prefix_k + to, t->grad_keys + i * p->padded, (size_t)p->width * sizeof(float));
        memcpy(p->grad_prefix_v + to, t->grad_values + i * p->padded, (size_t)p->width * sizeof(float));
    }
}

static void attend_packed(void *what, int64_t number, int thread) {
    const packed *p = what;
    /* Items of one head are neighbours: heads need equal time. */
    const int64_t *item = p->items + number % p->item_count * 3, head = number / p->item_count;
    const int64_t *first = p->sequences + item[0] * 4;
    table t = laid_out(p, thread);
    int64_t longest = 0;
    for (int64_t s = item[0]; s < item[1]; s++) longest = later(longest, first[3] + p->sequences[s * 4 + 1]);
    if (p->grad_out) {
        memset(t.grad_keys, 0, (size_t)(longest * p->padded) * sizeof *t.grad_keys);
        memset(t.grad_values, 0, (size_t)(longest * p->padded) * sizeof *t.grad_values);
    }
    lay(p, &t, p->prefix_k, p->prefix_v, first[2], first[3], head, 0, (int)p->prefix_half);
    for (int64_t s = item[0]; s < item[1]; s++) {
        const int64_t *sequence = p->sequences + s * 4;
        lay(p, &t, p->k, p->v, sequence[0], sequence[1], head, sequence[3], (int)p->half);
        for (int64_t j = 0; j < sequence[1] * p->group; j += QUERIES) {
            if (!needed(p, sequence, j)) continue;
            if (p->grad_out) backward_tile(p, &t, sequence, head, j);
            else forward_tile(p, &t, sequence, head, j);
        }
        if (p->grad_out) put_own(p, &t, sequence, head);
    }
    if (p->grad_out) put_prefix(p, &t, first, head, item[2]);
}

void cohort_packed_attention(packed *p) { run(attend_packed, p, p->item_count * p->kv_heads, (int)p->threads); }
