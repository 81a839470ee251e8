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
 * In bfloat16, processors that multiply pairs of such numbers at once do so (`pairs` below): the weights p and the slopes
 * of scores are rounded to bfloat16 then, as in torch's kernels. All sums are float32.
 *
 * Axis letters: T tokens, X prefix tokens, A query heads, G key-value heads, D head dimension, stored as `padded`.
 */

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

INLINE void forward_tile(const packed *p, table *t, const int64_t *sequence, int64_t head, int64_t j, const int pairs) {
    const int64_t last = sooner(j + QUERIES, sequence[1] * p->group) - 1;
    const int64_t first = seen(p, t, sequence, j).first, end = seen(p, t, sequence, last).end, start = first / LANES * LANES;
    load_tile(p, p->q, (int)p->half, sequence, head, j, t->q);
    memset(t->out, 0, (size_t)(QUERIES * p->padded) * sizeof *t->out);
    if (pairs) pair_tile(t->q, p->padded, t->q_words, t->q_pairs);
    score_queries(t, pairs ? t->q_words : t->q, t->key_blocks, first, end, t->weights, pairs);
    float tops[QUERIES], sums[QUERIES];
    for (int64_t i = 0; i < QUERIES; i++) {
        const view v = seen(p, t, sequence, j + i);
        const blocks inside = whole(v, start);
        float *row = t->weights + i * t->stride;
        if (v.end <= v.first) { /* padding, or nothing of this block */
            sums[i] = 0;
            memset(row + (pairs ? start / 2 : start), 0, (size_t)(up(end) * LANES - start) * sizeof *row);
            continue;
        }
        vec top_v = scale_scores(row, start, inside.begin, v, p->scaling, all(-INFINITY), 1), total = {0};
        top_v = scale_scores(row, inside.begin, inside.end, v, p->scaling, top_v, 0);
        top_v = scale_scores(row, inside.end, end, v, p->scaling, top_v, 1);
        const float top = tops[i] = highest(top_v);
        for (int64_t k = start; k < end; k += LANES) {
            const vec e = exponential(load(row, k, 0) - top);
            if (pairs) store_words(row, k, e);
            else store(row, k, e, 0);
            total += e;
        }
        sums[i] = sum(total);
    }
    mix_queries(t, t->weights, t->rows, first, end, t->out, pairs);
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

/* The gradients of STRIP tokens, from `from` on, by the queries of a tile, which see those from `first` to `end`: adds to
 * `out` those of the queries. */
INLINE void backward_strip(const packed *p, table *t, const query *queries, int64_t from, int64_t first, int64_t end,
                          const int pairs) {
    const int64_t padded = p->padded, stride = t->stride, count = sooner(STRIP, end - from), all_of = up(count) * LANES;
    const int64_t begin = later(0, first - from);
    const int64_t block = from * (pairs ? padded / 2 : padded), row = (pairs ? from / 2 : from) * padded;
    score_queries(t, pairs ? t->q_words : t->q, t->key_blocks + block, 0, count, t->weights, pairs);
    score_queries(t, pairs ? t->grad_words : t->grad, t->value_blocks + block, 0, count, t->slopes, pairs);
    for (int64_t i = 0; i < QUERIES; i++) {
        float *weights = t->weights + i * stride, *slopes = t->slopes + i * stride;
        const blocks inside = whole(queries[i].seen, 0);
        const int64_t wholly = later(0, sooner(all_of, inside.begin - from));
        const int64_t rest = later(wholly, sooner(all_of, inside.end - from));
        weigh(weights, slopes, 0, wholly, from, queries[i], p->scaling, 1);
        weigh(weights, slopes, wholly, rest, from, queries[i], p->scaling, 0);
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
    mix_queries(t, t->slopes, t->rows + row, begin, count, t->out, pairs);
    fold(pairs ? t->weight_pairs : t->weights, stride, pairs ? t->grad_pairs : t->grad, padded, rows, begin, count,
         t->grad_values + from * padded, half);
    fold(pairs ? t->slope_pairs : t->slopes, stride, pairs ? t->q_pairs : t->q, padded, rows, begin, count,
         t->grad_keys + from * padded, half);
}

INLINE void backward_tile(const packed *p, table *t, const int64_t *sequence, int64_t head, int64_t j, const int pairs) {
    const int64_t last = sooner(j + QUERIES, sequence[1] * p->group) - 1;
    const int64_t first = seen(p, t, sequence, j).first, end = seen(p, t, sequence, last).end;
    load_tile(p, p->q, (int)p->half, sequence, head, j, t->q);
    load_tile(p, p->out, (int)p->out_half, sequence, head, j, t->out);
    load_tile(p, p->grad_out, (int)p->half, sequence, head, j, t->grad);
    if (pairs) pair_tile(t->q, p->padded, t->q_words, t->q_pairs);
    if (pairs) pair_tile(t->grad, p->padded, t->grad_words, t->grad_pairs);
    query queries[QUERIES];
    for (int64_t i = 0; i < QUERIES; i++) {
        vec products = {0};
        for (int64_t d = 0; d < p->padded; d += LANES)
            products = multiply_add(load(t->grad, i * p->padded + d, 0), load(t->out, i * p->padded + d, 0), products);
        const float lse = j + i <= last ? p->lse[index_of(p, sequence, head, j + i)] : 0;
        queries[i] = (query){seen(p, t, sequence, j + i), lse, sum(products)};
    }
    if (t->joins) load_tile(p, p->grad_q, (int)p->out_half, sequence, head, j, t->out);
    else memset(t->out, 0, (size_t)(QUERIES * p->padded) * sizeof *t->out);
    for (int64_t from = first / LANES * LANES; from < end; from += STRIP)
        backward_strip(p, t, queries, from, first, end, pairs);
    put_tile(p, t->out, sequence, head, j, p->grad_q);
}

/* Attend to what the table holds. */
INLINE void attend_sequence(const packed *p, table *t, const int64_t *sequence, int64_t head, const int pairs) {
    const int64_t queries = sequence[1] * p->group;
    for (int64_t j = 0; j < queries; j += QUERIES) {
        const int64_t last = sooner(j + QUERIES, queries) - 1;
        if (!needed(p, sequence, j) || seen(p, t, sequence, last).end <= seen(p, t, sequence, j).first) continue;
        if (p->grad_out) backward_tile(p, t, sequence, head, j, pairs);
        else forward_tile(p, t, sequence, head, j, pairs);
    }
}

/* Sequences of one prefix which do not fit a table together with it. */
INLINE void attend_blocks(const packed *p, table *t, const int64_t *first, const int64_t *end, int64_t head,
                          int64_t slot, const int pairs) {
    const int64_t seen_from = p->window ? later(0, first[3] + 1 - p->window) : 0;
    t->joins = 1;
    for (const int64_t *s = first; s < end; s += 4) clear(p, s, head);
    for (int64_t at = seen_from; at < first[3]; at += p->capacity) {
        const int64_t count = sooner(p->capacity, first[3] - at);
        t->first = at, t->end = at + count;
        lay(p, t, p->prefix_k, p->prefix_v, first[2] + at, count, head, 0, (int)p->prefix_half, pairs);
        for (const int64_t *s = first; s < end; s += 4) attend_sequence(p, t, s, head, pairs);
        if (p->grad_out) put_prefix(p, t, first[2] + at, count, head, slot);
    }
    for (const int64_t *s = first; s < end; s += 4)
        for (int64_t at = 0; at < s[1]; at += p->capacity) {
            const int64_t count = sooner(p->capacity, s[1] - at);
            t->first = s[3] + at, t->end = t->first + count;
            lay(p, t, p->k, p->v, s[0] + at, count, head, 0, (int)p->half, pairs);
            attend_sequence(p, t, s, head, pairs);
            if (p->grad_out) put_own(p, t, s[0] + at, count, head, 0);
        }
}

INLINE void attend_packed(const packed *p, int64_t number, int thread, const int pairs) {
    /* Items of one head are neighbours: heads need equal time. */
    const int64_t *item = p->items + number % p->item_count * 3, head = number / p->item_count;
    const int64_t *first = p->sequences + item[0] * 4, *end = p->sequences + item[1] * 4;
    table t = laid_out(p, thread);
    int64_t longest = 0;
    for (const int64_t *s = first; s < end; s += 4) longest = later(longest, s[3] + s[1]);
    const size_t size = (size_t)(sooner(longest, p->capacity) * p->padded) * sizeof *t.grad_keys;
    if (p->grad_out) memset(t.grad_keys, 0, size), memset(t.grad_values, 0, size);
    if (longest > p->capacity) {
        attend_blocks(p, &t, first, end, head, item[2], pairs);
        return;
    }
    lay(p, &t, p->prefix_k, p->prefix_v, first[2], first[3], head, 0, (int)p->prefix_half, pairs);
    for (const int64_t *s = first; s < end; s += 4) {
        lay(p, &t, p->k, p->v, s[0], s[1], head, s[3], (int)p->half, pairs);
        attend_sequence(p, &t, s, head, pairs);
        if (p->grad_out) put_own(p, &t, s[0], s[1], head, s[3]);
    }
    if (p->grad_out) put_prefix(p, &t, first[2], first[3], head, item[2]);
}

static void attend_numbers(void *what, int64_t number, int thread) { attend_packed(what, number, thread, 0); }
static void attend_pairs(void *what, int64_t number, int thread) { attend_packed(what, number, thread, 1); }

void cohort_packed_attention(packed *p) {
    run(HAS_PAIRS && p->half ? attend_pairs : attend_numbers, p, p->item_count * p->kv_heads, (int)p->threads);
}
