/* Attention of an update, forward and backward. Sequences lie end to end; each attends to itself and to the whole of a
 * prefix that it may share with its neighbours.
 *
 *     out_t = sum_j p_tj v_j        p_tj = exp(q_t . k_j scaling - lse_t)        lse_t = log sum_j exp(q_t . k_j scaling)
 *
 * An item of work is one key-value head of neighbouring sequences of one prefix: the prefix's keys are copied once for
 * them, and its gradients add up in one slot. QUERIES of them are processed together. Tables of keys and values hold
 * `capacity` tokens; where a sequence has more with its prefix, they are filled block by block, and the outputs of blocks
 * are joined by their lse.
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
    float *grad_prefix_k, *grad_prefix_v; /* [slots, X, G, D], added to */
    const int64_t *sequences;             /* [S, 4]: first token, tokens, first token and tokens of its prefix */
    const int64_t *items;                 /* [items, 3]: first sequence, sequence after the last, slot */
    const int64_t *drawn_before;          /* [T + 1]: tokens before each that need an output; NULL: all need one */
    float *scratch;                       /* [threads, scratch_size] */
    int64_t item_count, kv_heads, group, width, padded, capacity, prefix_tokens, window, half, prefix_half,
        scratch_size, threads;
    float scaling;
} packed;

/* A thread's scratch memory. Keys and values are stored by token, [capacity, padded], and in the blocks of `score`. */
typedef struct {
    shape of;
    float *keys, *values, *key_blocks, *value_blocks, *grad_keys, *grad_values; /* the last three: backward only */
    float *q, *out, *grad, *weights, *slopes;
    int64_t stride;     /* of weights and slopes, [QUERIES, stride] */
    int64_t first, end; /* the table holds these tokens of a prefix and a sequence after it */
    int joins;          /* whether there are other blocks */
} table;

/* Nothing is initialised. Numbers beyond a head's width or a sequence's tokens stay arbitrary: they are multiplied but
 * never read. */
static table laid_out(const packed *p, int thread) {
    const int64_t stride = up(p->capacity) * LANES, size = stride * p->padded, tile = QUERIES * p->padded;
    float *at = p->scratch + thread * p->scratch_size;
    table t = {.of = {p->width, p->padded}, .stride = stride, .end = INT64_MAX};
    float **parts[] = {&t.keys, &t.values, &t.key_blocks, &t.value_blocks, &t.grad_keys, &t.grad_values};
    for (int i = 0; i < (p->grad_out ? 6 : 3); i++) *parts[i] = at, at += size;
    t.q = at, t.out = t.q + tile, t.grad = t.out + tile, t.weights = t.grad + tile;
    t.slopes = t.weights + QUERIES * stride;
    return t;
}

int64_t cohort_attention_scratch(int64_t capacity, int64_t padded, int64_t backward) {
    const int64_t stride = up(capacity) * LANES;
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

static view seen(const packed *p, const table *t, const int64_t *sequence, int64_t j) {
    if (j >= sequence[1] * p->group) return (view){0, 0};
    const int64_t end = sequence[3] + j / p->group + 1, first = p->window ? later(0, end - p->window) : 0;
    return (view){later(0, sooner(first, t->end) - t->first), later(0, sooner(end, t->end) - t->first)};
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

/* Add a block's part of a query's output, whose weights have the sum `total` beside `top`, to that of the blocks before. */
static void join(const packed *p, int64_t at, float top, float total, float *out) {
    const float *before = (const float *)p->out + at * p->width;
    float keep = 1, add = 0;
    if (total != 0) { /* it is 0 for queries that see nothing of the block */
        const float old = p->lse[at], new = top + logf(total), most = fmaxf(old, new);
        p->lse[at] = most + logf(expf(old - most) + expf(new - most));
        keep = expf(old - p->lse[at]), add = expf(new - p->lse[at]) / total;
    }
    for (int64_t d = 0; d < p->width; d++) out[d] = keep * before[d] + add * out[d];
}

static void forward_tile(const packed *p, table *t, const int64_t *sequence, int64_t head, int64_t j) {
    const int64_t last = sooner(j + QUERIES, sequence[1] * p->group) - 1;
    const int64_t first = seen(p, t, sequence, j).first, end = seen(p, t, sequence, last).end, start = first / LANES * LANES;
    load_tile(p, p->q, sequence, head, j, t->q);
    memset(t->out, 0, (size_t)(QUERIES * p->padded) * sizeof *t->out);
    score_queries(t, t->q, t->key_blocks, first, end, t->weights);
    float tops[QUERIES], sums[QUERIES];
    for (int64_t i = 0; i < QUERIES; i++) {
        const view v = seen(p, t, sequence, j + i);
        const blocks inside = whole(v, start);
        float *row = t->weights + i * t->stride;
        if (v.end <= v.first) { /* padding, or nothing of this block */
            sums[i] = 0;
            memset(row + start, 0, (size_t)(up(end) * LANES - start) * sizeof *row);
            continue;
        }
        vec top_v = scale_scores(row, start, inside.begin, v, p->scaling, all(-INFINITY), 1), total = {0};
        top_v = scale_scores(row, inside.begin, inside.end, v, p->scaling, top_v, 0);
        top_v = scale_scores(row, inside.end, end, v, p->scaling, top_v, 1);
        const float top = tops[i] = highest(top_v);
        for (int64_t k = start; k < end; k += LANES) {
            const vec e = exponential(load(row, k, 0) - top);
            store(row, k, e, 0);
            total += e;
        }
        sums[i] = sum(total);
    }
    mix_queries(t, t->weights, t->values, first, end, t->out);
    for (int64_t i = 0; i <= last - j; i++) {
        const int64_t at = index_of(p, sequence, head, j + i);
        float *out = t->out + i * p->padded;
        if (t->joins) {
            join(p, at, tops[i], sums[i], out);
            continue;
        }
        p->lse[at] = tops[i] + logf(sums[i]);
        for (int64_t d = 0; d < p->width; d++) out[d] /= sums[i];
    }
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
    const int64_t first = seen(p, t, sequence, j).first, end = seen(p, t, sequence, last).end, start = first / LANES * LANES;
    load_tile(p, p->q, sequence, head, j, t->q);
    load_tile(p, p->out, sequence, head, j, t->out);
    load_tile(p, p->grad_out, sequence, head, j, t->grad);
    score_queries(t, t->q, t->key_blocks, first, end, t->weights);
    score_queries(t, t->grad, t->value_blocks, first, end, t->slopes);
    for (int64_t i = 0; i < QUERIES; i++) {
        const view v = seen(p, t, sequence, j + i);
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
    if (t->joins) load_tile(p, p->grad_q, sequence, head, j, t->out);
    else memset(t->out, 0, (size_t)(QUERIES * p->padded) * sizeof *t->out);
    mix_queries(t, t->slopes, t->keys, first, end, t->out);
    put_tile(p, t->out, sequence, head, j, p->grad_q);
    fold(t->weights, t->stride, t->grad, p->padded, first, end, t->grad_values);
    fold(t->slopes, t->stride, t->q, p->padded, first, end, t->grad_keys);
}

/* Store the gradients of `count` tokens from `first` on, which are the table's from `position` on; they are free then. */
static void put_own(const packed *p, table *t, int64_t first, int64_t count, int64_t head, int64_t position) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t to = ((first + i) * p->kv_heads + head) * p->width, from = (position + i) * p->padded;
        for (int64_t d = 0; d < p->width; d++) {
            store1(p->grad_k, to + d, t->grad_keys[from + d], (int)p->half);
            store1(p->grad_v, to + d, t->grad_values[from + d], (int)p->half);
            t->grad_keys[from + d] = t->grad_values[from + d] = 0;
        }
    }
}

/* Add the gradients of the table's first `count` tokens to those of a prefix from its token `first` on; they are free
 * then. */
static void put_prefix(const packed *p, table *t, int64_t first, int64_t count, int64_t head, int64_t slot) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t to = ((slot * p->prefix_tokens + first + i) * p->kv_heads + head) * p->width, from = i * p->padded;
        for (int64_t d = 0; d < p->width; d++) {
            p->grad_prefix_k[to + d] += t->grad_keys[from + d], p->grad_prefix_v[to + d] += t->grad_values[from + d];
            t->grad_keys[from + d] = t->grad_values[from + d] = 0;
        }
    }
}

/* Attend to what the table holds. */
static void attend_sequence(const packed *p, table *t, const int64_t *sequence, int64_t head) {
    const int64_t queries = sequence[1] * p->group;
    for (int64_t j = 0; j < queries; j += QUERIES) {
        const int64_t last = sooner(j + QUERIES, queries) - 1;
        if (!needed(p, sequence, j) || seen(p, t, sequence, last).end <= seen(p, t, sequence, j).first) continue;
        if (p->grad_out) backward_tile(p, t, sequence, head, j);
        else forward_tile(p, t, sequence, head, j);
    }
}

/* What blocks are joined with first. */
static void clear(const packed *p, const int64_t *sequence, int64_t head) {
    for (int64_t j = 0; j < sequence[1] * p->group; j++) {
        const int64_t at = index_of(p, sequence, head, j);
        float *to = (float *)(p->grad_out ? p->grad_q : p->out) + at * p->width;
        memset(to, 0, (size_t)p->width * sizeof *to);
        if (!p->grad_out) p->lse[at] = -INFINITY;
    }
}

/* Sequences of one prefix which do not fit a table together with it. */
static void attend_blocks(const packed *p, table *t, const int64_t *first, const int64_t *end, int64_t head,
                          int64_t slot) {
    const int64_t seen_from = p->window ? later(0, first[3] + 1 - p->window) : 0;
    t->joins = 1;
    for (const int64_t *s = first; s < end; s += 4) clear(p, s, head);
    for (int64_t at = seen_from; at < first[3]; at += p->capacity) {
        const int64_t count = sooner(p->capacity, first[3] - at);
        t->first = at, t->end = at + count;
        lay(p, t, p->prefix_k, p->prefix_v, first[2] + at, count, head, 0, (int)p->prefix_half);
        for (const int64_t *s = first; s < end; s += 4) attend_sequence(p, t, s, head);
        if (p->grad_out) put_prefix(p, t, first[2] + at, count, head, slot);
    }
    for (const int64_t *s = first; s < end; s += 4)
        for (int64_t at = 0; at < s[1]; at += p->capacity) {
            const int64_t count = sooner(p->capacity, s[1] - at);
            t->first = s[3] + at, t->end = t->first + count;
            lay(p, t, p->k, p->v, s[0] + at, count, head, 0, (int)p->half);
            attend_sequence(p, t, s, head);
            if (p->grad_out) put_own(p, t, s[0] + at, count, head, 0);
        }
}

static void attend_packed(void *what, int64_t number, int thread) {
    const packed *p = what;
    /* Items of one head are neighbours: heads need equal time. */
    const int64_t *item = p->items + number % p->item_count * 3, head = number / p->item_count;
    const int64_t *first = p->sequences + item[0] * 4, *end = p->sequences + item[1] * 4;
    table t = laid_out(p, thread);
    int64_t longest = 0;
    for (const int64_t *s = first; s < end; s += 4) longest = later(longest, s[3] + s[1]);
    const size_t size = (size_t)(sooner(longest, p->capacity) * p->padded) * sizeof *t.grad_keys;
    if (p->grad_out) memset(t.grad_keys, 0, size), memset(t.grad_values, 0, size);
    if (longest > p->capacity) {
        attend_blocks(p, &t, first, end, head, item[2]);
        return;
    }
    lay(p, &t, p->prefix_k, p->prefix_v, first[2], first[3], head, 0, (int)p->prefix_half);
    for (const int64_t *s = first; s < end; s += 4) {
        lay(p, &t, p->k, p->v, s[0], s[1], head, s[3], (int)p->half);
        attend_sequence(p, &t, s, head);
        if (p->grad_out) put_own(p, &t, s[0], s[1], head, s[3]);
    }
    if (p->grad_out) put_prefix(p, &t, first[2], first[3], head, item[2]);
}

void cohort_packed_attention(packed *p) { run(attend_packed, p, p->item_count * p->kv_heads, (int)p->threads); }
