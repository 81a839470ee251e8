/* Attention of an update, forward and backward. Sequences lie end to end; each attends to itself and to the whole of a
 * prefix that it may share with its neighbours.
 *
 *     out_t = sum_j p_tj v_j        p_tj = exp(q_t . k_j scaling - lse_t)        lse_t = log sum_j exp(q_t . k_j scaling)
 *
 * An item of work is one key-value head of neighbouring sequences of one prefix: the prefix's keys are copied once for
 * them, and its gradients add up in one slot. QUERIES of them are processed together.
 *
 * In bfloat16, processors that multiply pairs of such numbers at once do so (`pairs` below): the weights p and the slopes
 * of scores are rounded to bfloat16 then, as in torch's kernels. All sums are float32.
 *
 * Axis letters: T tokens, X prefix tokens, A query heads, G key-value heads, D head dimension, stored as `padded`.
 */
#include "tiles.h"

#define QUERIES 32 /* a multiple of TILE */
#define NEAR 48    /* tokens, a multiple of LANES, whose scores the backward pass holds at a time: in the nearest cache */

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

/* A thread's scratch memory. Keys and values are stored by token, [longest, padded], and in the blocks of `score`. If
 * pairs: `rows` has words of two tokens, blocks of two dimensions; the words of q and grad are of two dimensions, and
 * their pairs, those of weights and those of slopes of two queries. */
typedef struct {
    shape of;
    float *rows; /* values; backward: keys */
    float *key_blocks, *value_blocks, *grad_keys, *grad_values; /* the last three: backward only */
    float *q, *out, *grad, *q_words, *grad_words, *q_pairs, *grad_pairs;
    float *weights, *slopes, *weight_pairs, *slope_pairs;
    int64_t stride; /* of the last four */
} table;

/* Numbers of a query's scores. */
static int64_t held(int64_t longest, int64_t backward) { return backward ? NEAR : up(longest) * LANES; }

/* Nothing is initialised. Numbers beyond a head's width or a sequence's tokens stay arbitrary, except beside a last one
 * in a word: they are multiplied but never read. */
static table laid_out(const packed *p, int thread) {
    const int64_t size = up(p->longest) * LANES * p->padded, tile = QUERIES * p->padded;
    float *at = p->scratch + thread * p->scratch_size;
    table t = {.of = {p->width, p->padded}, .stride = held(p->longest, p->grad_out != 0)};
    float **parts[] = {&t.rows, &t.key_blocks, &t.value_blocks, &t.grad_keys, &t.grad_values};
    for (int i = 0; i < (p->grad_out ? 5 : 2); i++) *parts[i] = at, at += size;
    t.q = at, t.out = t.q + tile, t.grad = t.out + tile, t.q_words = t.grad + tile;
    t.grad_words = t.q_words + tile / 2, t.q_pairs = t.grad_words + tile / 2, t.grad_pairs = t.q_pairs + tile / 2;
    t.weights = t.grad_pairs + tile / 2, t.slopes = t.weights + QUERIES * t.stride;
    t.weight_pairs = t.slopes + QUERIES * t.stride, t.slope_pairs = t.weight_pairs + QUERIES / 2 * t.stride;
    return t;
}

int64_t cohort_attention_scratch(int64_t longest, int64_t padded, int64_t backward) {
    const int64_t size = up(longest) * LANES * padded;
    return (backward ? 5 : 2) * size + 5 * QUERIES * padded + 3 * QUERIES * held(longest, backward);
}

/* Copy `count` tokens of one head, from `first` on, to the table's tokens from `position` on. */
static void lay(const packed *p, table *t, const void *keys, const void *values, int64_t first, int64_t count,
                int64_t head, int64_t position, const int half) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t from = ((first + i) * p->kv_heads + head) * p->width, to = position + i;
        const int64_t block = to / LANES * p->padded * LANES + to % LANES;
        for (int64_t d = 0; d < p->width; d++) {
            const float k = load1(keys, from + d, half), v = load1(values, from + d, half);
            t->rows[to * p->padded + d] = t->value_blocks ? k : v;
            t->key_blocks[block + d * LANES] = k;
            if (t->value_blocks) t->value_blocks[block + d * LANES] = v;
        }
    }
}

/* The same as words, with zeros beside a last token that has no neighbour. Float32 numbers are rounded: those of a
 * prefix, which an update widens from bfloat16 to add up its gradients. */
static void lay_words(const packed *p, table *t, const void *keys, const void *values, int64_t first, int64_t count,
                      int64_t head, int64_t position, const int half) {
    uint32_t *blocks[] = {(uint32_t *)t->key_blocks, (uint32_t *)t->value_blocks};
    for (int64_t i = 0; i < count + (position + count) % 2; i++) {
        const int64_t from = ((first + i) * p->kv_heads + head) * p->width, to = position + i;
        const int64_t block = (to / LANES * (p->padded / 2)) * LANES + to % LANES;
        const uint16_t *of[] = {(const uint16_t *)keys + from, (const uint16_t *)values + from};
        for (int64_t d = 0; !half && i < count && d < p->width; d++) {
            store1(t->q, d, ((const float *)keys)[from + d], 1), store1(t->out, d, ((const float *)values)[from + d], 1);
            of[0] = (uint16_t *)t->q, of[1] = (uint16_t *)t->out;
        }
        const uint16_t *row = of[t->value_blocks ? 0 : 1];
        uint16_t *halves = (uint16_t *)t->rows + to / 2 * 2 * p->padded + to % 2;
        for (int64_t d = 0; d < p->width; d++) halves[d * 2] = i < count ? row[d] : 0;
        for (int kind = 0; kind < (t->value_blocks ? 2 : 1) && i < count; kind++) {
            for (int64_t d = 0; d + 2 <= p->width; d += 2)
                memcpy(blocks[kind] + block + d / 2 * LANES, of[kind] + d, sizeof(uint32_t));
            if (p->width % 2) blocks[kind][block + p->width / 2 * LANES] = of[kind][p->width - 1];
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

/* Words of neighbouring dimensions, and of neighbouring queries. */
static void pair_tile(const float *rows, int64_t padded, float *words, float *pairs) {
    for (int64_t i = 0; i < QUERIES; i += 2)
        for (int64_t d = 0; d < padded; d += LANES) {
            const vec one = load(rows, i * padded + d, 0), other = load(rows, (i + 1) * padded + d, 0);
            store_words(words, i * padded + d, one), store_words(words, (i + 1) * padded + d, other);
            store(pairs, i / 2 * padded + d, pair(one, other), 0);
        }
}

/* rows blocks^T of all queries, for the tokens from `first` to `end`. Keys stay in the nearest cache while the queries
 * pass by, and so do values below. */
INLINE void score_queries(const table *t, const float *rows, const float *blocks, int64_t first, int64_t end,
                          float *scores, const int pairs) {
    const shape of = pairs ? (shape){(t->of.width + 1) / 2, t->of.padded / 2} : t->of;
    const int64_t padded = of.padded, stride = t->stride;
    const int half = pairs ? PAIRS : 0;
    for (int64_t from = first / LANES; from < up(end); from += 6) {
        const int64_t to = sooner(from + 6, up(end));
        for (int64_t i = 0; i < QUERIES; i += 4) {
            const float *q = rows + i * padded;
            float *found = scores + i * stride;
            const int64_t rest = score_tile(4, 3, q, blocks, &of, from, to, found, stride, half);
            score_tile(4, 1, q, blocks, &of, rest, to, found, stride, half);
        }
    }
}

/* out += weights rows of all queries, for the tokens from `first` to `end`. */
INLINE void mix_queries(const table *t, const float *weights, const float *rows, int64_t first, int64_t end, float *out,
                        const int pairs) {
    const int64_t padded = t->of.padded, stride = t->stride;
    const int half = pairs ? PAIRS : 0;
    if (pairs) first /= 2, end = (end + 1) / 2;
    for (int64_t from = first; from < end; from += 48) {
        const int64_t to = sooner(from + 48, end);
        int64_t i = 0;
        for (; QUERIES - i > 8 && padded / LANES % 2 == 0; i += 6)
            mix_tile(6, 2, weights + i * stride, stride, rows, &t->of, from, to, out + i * padded, half);
        mix(QUERIES - i, weights + i * stride, stride, rows, &t->of, from, to, out + i * padded, half);
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

INLINE void forward_tile(const packed *p, table *t, const int64_t *sequence, int64_t head, int64_t j, const int pairs) {
    const int64_t last = sooner(j + QUERIES, sequence[1] * p->group) - 1;
    const int64_t first = seen(p, sequence, j).first, end = seen(p, sequence, last).end, start = first / LANES * LANES;
    load_tile(p, p->q, sequence, head, j, t->q);
    memset(t->out, 0, (size_t)(QUERIES * p->padded) * sizeof *t->out);
    if (pairs) pair_tile(t->q, p->padded, t->q_words, t->q_pairs);
    score_queries(t, pairs ? t->q_words : t->q, t->key_blocks, first, end, t->weights, pairs);
    float sums[QUERIES];
    for (int64_t i = 0; i < QUERIES; i++) {
        const view v = seen(p, sequence, j + i);
        const blocks inside = whole(v, start);
        float *row = t->weights + i * t->stride;
        if (i > last - j) { /* padding, whose sums nobody reads */
            memset(row + (pairs ? start / 2 : start), 0, (size_t)(up(end) * LANES - start) * sizeof *row);
            continue;
        }
        vec top_v = scale_scores(row, start, inside.begin, v, p->scaling, all(-INFINITY), 1), total = {0};
        top_v = scale_scores(row, inside.begin, inside.end, v, p->scaling, top_v, 0);
        top_v = scale_scores(row, inside.end, end, v, p->scaling, top_v, 1);
        const float top = highest(top_v);
        for (int64_t k = start; k < end; k += LANES) {
            const vec e = exponential(load(row, k, 0) - top);
            if (pairs) store_words(row, k, e);
            else store(row, k, e, 0);
            total += e;
        }
        sums[i] = sum(total);
        p->lse[index_of(p, sequence, head, j + i)] = top + logf(sums[i]);
    }
    mix_queries(t, t->weights, t->rows, first, end, t->out, pairs);
    for (int64_t i = 0; i <= last - j; i++)
        for (int64_t d = 0; d < p->width; d++) t->out[i * p->padded + d] /= sums[i];
    put_tile(p, t->out, sequence, head, j, p->out);
}

/* What the scores' gradients of a query are computed from. */
typedef struct {
    view seen;
    float lse, delta; /* delta: its output's product with its gradient */
} query;

/* From scores and products of gradients with values to the weights and the gradients of scores; of the tokens from
 * `from` to `to`, which begin `origin` tokens after the table's first. */
INLINE void weigh(float *weights, float *slopes, int64_t from, int64_t to, int64_t origin, query q, float scaling,
                  const int masked) {
    for (int64_t k = from; k < to; k += LANES) {
        const ivec inside = masked ? within(q.seen, origin + k) : (ivec){0};
        vec e = exponential(load(weights, k, 0) * scaling - q.lse);
        if (masked) e = pick(inside, e, (vec){0});
        vec slope = e * (load(slopes, k, 0) - q.delta) * scaling;
        if (masked) slope = pick(inside, slope, (vec){0});
        store(weights, k, e, 0);
        store(slopes, k, slope, 0);
    }
}

/* The gradients of NEAR tokens, from `from` on, by the queries of a tile: adds to `out` those of the queries. */
INLINE void backward_part(const packed *p, table *t, const query *queries, int64_t from, int64_t end, const int pairs) {
    const int64_t padded = p->padded, stride = t->stride, count = sooner(NEAR, end - from), all_of = up(count) * LANES;
    const int64_t block = from * (pairs ? padded / 2 : padded), row = (pairs ? from / 2 : from) * padded;
    score_queries(t, pairs ? t->q_words : t->q, t->key_blocks + block, 0, count, t->weights, pairs);
    score_queries(t, pairs ? t->grad_words : t->grad, t->value_blocks + block, 0, count, t->slopes, pairs);
    for (int64_t i = 0; i < QUERIES; i++) {
        float *weights = t->weights + i * stride, *slopes = t->slopes + i * stride;
        const blocks inside = whole(queries[i].seen, 0);
        const int64_t begin = later(0, sooner(all_of, inside.begin - from));
        const int64_t rest = later(begin, sooner(all_of, inside.end - from));
        weigh(weights, slopes, 0, begin, from, queries[i], p->scaling, 1);
        weigh(weights, slopes, begin, rest, from, queries[i], p->scaling, 0);
        weigh(weights, slopes, rest, all_of, from, queries[i], p->scaling, 1);
    }
    for (int64_t i = 0; pairs && i < QUERIES; i += 2)
        for (int64_t k = 0; k < all_of; k += LANES) {
            float *one = t->slopes + i * stride, *other = one + stride;
            const vec a = load(one, k, 0), b = load(other, k, 0);
            const float *weights = t->weights + i * stride;
            store(t->weight_pairs, i / 2 * stride + k, pair(load(weights, k, 0), load(weights, stride + k, 0)), 0);
            store(t->slope_pairs, i / 2 * stride + k, pair(a, b), 0);
            store_words(one, k, a), store_words(other, k, b);
        }
    const int half = pairs ? PAIRS : 0, rows = pairs ? QUERIES / 2 : QUERIES;
    mix_queries(t, t->slopes, t->rows + row, 0, count, t->out, pairs);
    fold(pairs ? t->weight_pairs : t->weights, stride, pairs ? t->grad_pairs : t->grad, padded, rows, count,
         t->grad_values + from * padded, half);
    fold(pairs ? t->slope_pairs : t->slopes, stride, pairs ? t->q_pairs : t->q, padded, rows, count,
         t->grad_keys + from * padded, half);
}

INLINE void backward_tile(const packed *p, table *t, const int64_t *sequence, int64_t head, int64_t j, const int pairs) {
    const int64_t last = sooner(j + QUERIES, sequence[1] * p->group) - 1;
    const int64_t first = seen(p, sequence, j).first, end = seen(p, sequence, last).end;
    load_tile(p, p->q, sequence, head, j, t->q);
    load_tile(p, p->out, sequence, head, j, t->out);
    load_tile(p, p->grad_out, sequence, head, j, t->grad);
    if (pairs) pair_tile(t->q, p->padded, t->q_words, t->q_pairs);
    if (pairs) pair_tile(t->grad, p->padded, t->grad_words, t->grad_pairs);
    query queries[QUERIES];
    for (int64_t i = 0; i < QUERIES; i++) {
        vec products = {0};
        for (int64_t d = 0; d < p->padded; d += LANES)
            products = multiply_add(load(t->grad, i * p->padded + d, 0), load(t->out, i * p->padded + d, 0), products);
        const float lse = j + i <= last ? p->lse[index_of(p, sequence, head, j + i)] : 0;
        queries[i] = (query){seen(p, sequence, j + i), lse, sum(products)};
    }
    memset(t->out, 0, (size_t)(QUERIES * p->padded) * sizeof *t->out);
    for (int64_t from = first / LANES * LANES; from < end; from += NEAR) backward_part(p, t, queries, from, end, pairs);
    put_tile(p, t->out, sequence, head, j, p->grad_q);
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

INLINE void attend_number(const packed *p, int64_t number, int thread, const int pairs) {
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
    if (pairs) lay_words(p, &t, p->prefix_k, p->prefix_v, first[2], first[3], head, 0, (int)p->prefix_half);
    else lay(p, &t, p->prefix_k, p->prefix_v, first[2], first[3], head, 0, (int)p->prefix_half);
    for (int64_t s = item[0]; s < item[1]; s++) {
        const int64_t *sequence = p->sequences + s * 4;
        if (pairs) lay_words(p, &t, p->k, p->v, sequence[0], sequence[1], head, sequence[3], 1);
        else lay(p, &t, p->k, p->v, sequence[0], sequence[1], head, sequence[3], (int)p->half);
        for (int64_t j = 0; j < sequence[1] * p->group; j += QUERIES) {
            if (!needed(p, sequence, j)) continue;
            if (p->grad_out) backward_tile(p, &t, sequence, head, j, pairs);
            else forward_tile(p, &t, sequence, head, j, pairs);
        }
        if (p->grad_out) put_own(p, &t, sequence, head);
    }
    if (p->grad_out) put_prefix(p, &t, first, head, item[2]);
}

static void attend_packed(void *what, int64_t number, int thread) { attend_number(what, number, thread, 0); }
static void attend_pairs(void *what, int64_t number, int thread) { attend_number(what, number, thread, 1); }

void cohort_packed_attention(packed *p) {
    const int pairs = HAS_PAIRS && p->half;
    run(pairs ? attend_pairs : attend_packed, p, p->item_count * p->kv_heads, (int)p->threads);
}
