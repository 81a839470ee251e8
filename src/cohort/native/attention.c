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
 * In bfloat16, processors that multiply pairs of such numbers at once do so: see attention_pairs.c.
 *
 * Axis letters: T tokens, X prefix tokens, A query heads, G key-value heads, D head dimension, stored as `padded`.
 */

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
        for (; QUERIES - i > 8 && padded / LANES % 2 == 0; i += 6)
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
    const query_tile of = query_tile_of(p, sequence, head, j);
    const int64_t first = seen(p, t, sequence, of.token[0]).first, start = first / LANES * LANES;
    const int64_t end = seen(p, t, sequence, of.token[of.count - 1]).end;
    load_tile(p, &of, p->q, (int)p->half, t->q);
    memset(t->out, 0, (size_t)(QUERIES * p->padded) * sizeof *t->out);
    score_queries(t, t->q, t->key_blocks, first, end, t->weights);
    float tops[QUERIES], sums[QUERIES];
    for (int64_t i = 0; i < QUERIES; i++) {
        const view v = seen_by(p, t, sequence, &of, i);
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
    mix_queries(t, t->weights, t->rows, first, end, t->out);
    put_forward(p, t, &of, tops, sums);
}

/* From scores and products of gradients with values to the weights and the gradients of scores; of the tokens from
 * `from` to `to`, which begin `origin` tokens after the table's first. */
INLINE void weigh(float *weights, float *slopes, int64_t from, int64_t to, int64_t origin, query q, float scaling,
                  const int masked) {
    for (int64_t k = from; k < to; k += LANES) {
        const ivec inside = masked ? within(q.seen, origin + k) : (ivec){0};
        vec e = exponential(load(weights, k, 0) * scaling - q.top);
        if (masked) e = pick(inside, e, (vec){0});
        vec slope = e * (load(slopes, k, 0) - q.delta) * scaling;
        if (masked) slope = pick(inside, slope, (vec){0});
        store(weights, k, e, 0);
        store(slopes, k, slope, 0);
    }
}

/* The gradients of KEYS tokens, from `from` on, by the queries of a tile, which see those from `first` to `end`: adds to
 * `out` those of the queries. */
static void backward_part(const packed *p, table *t, const query *queries, int64_t from, int64_t first, int64_t end) {
    const int64_t padded = p->padded, stride = t->stride, count = sooner(KEYS, end - from), all_of = up(count) * LANES;
    const int64_t begin = later(0, first - from), at = from * padded;
    score_queries(t, t->q, t->key_blocks + at, 0, count, t->weights);
    score_queries(t, t->grad, t->value_blocks + at, 0, count, t->slopes);
    for (int64_t i = 0; i < QUERIES; i++) {
        float *weights = t->weights + i * stride, *slopes = t->slopes + i * stride;
        const blocks inside = whole(queries[i].seen, 0);
        const int64_t wholly = later(0, sooner(all_of, inside.begin - from));
        const int64_t rest = later(wholly, sooner(all_of, inside.end - from));
        weigh(weights, slopes, 0, wholly, from, queries[i], p->scaling, 1);
        weigh(weights, slopes, wholly, rest, from, queries[i], p->scaling, 0);
        weigh(weights, slopes, rest, all_of, from, queries[i], p->scaling, 1);
    }
    mix_queries(t, t->slopes, t->rows + at, begin, count, t->out);
    fold(t->weights, stride, t->grad, padded, QUERIES, begin, count, t->grad_values + at, 0);
    fold(t->slopes, stride, t->q, padded, QUERIES, begin, count, t->grad_keys + at, 0);
}

static void backward_tile(const packed *p, table *t, const int64_t *sequence, int64_t head, int64_t j) {
    const query_tile of = query_tile_of(p, sequence, head, j);
    const int64_t first = seen(p, t, sequence, of.token[0]).first, end = seen(p, t, sequence, of.token[of.count - 1]).end;
    load_tile(p, &of, p->q, (int)p->half, t->q);
    load_tile(p, &of, p->out, (int)p->out_half, t->out);
    load_tile(p, &of, p->grad_out, (int)p->half, t->grad);
    query queries[QUERIES];
    for (int64_t i = 0; i < QUERIES; i++) {
        vec products = {0};
        for (int64_t d = 0; d < p->padded; d += LANES)
            products = multiply_add(load(t->grad, i * p->padded + d, 0), load(t->out, i * p->padded + d, 0), products);
        const float lse = i < of.count ? p->lse[of.at[i]] : 0;
        queries[i] = (query){seen_by(p, t, sequence, &of, i), lse, sum(products)};
    }
    if (t->joins) load_tile(p, &of, p->grad_q, (int)p->out_half, t->out);
    else memset(t->out, 0, (size_t)(QUERIES * p->padded) * sizeof *t->out);
    for (int64_t from = first / LANES * LANES; from < end; from += KEYS) backward_part(p, t, queries, from, first, end);
    put_tile(p, &of, t->out, p->grad_q);
}

/* Copy keys and values, see lay_numbers. */
static void lay(const packed *p, table *t, const void *keys, const void *values, int64_t first, int64_t count,
                int64_t head, int64_t position, const int half) {
    if (t->pairs) lay_words(p, t, keys, values, first, count, head, position, half);
    else lay_numbers(p, t, keys, values, first, count, head, position, half);
}

/* Attend to what the table holds. */
static void attend_sequence(const packed *p, table *t, const int64_t *sequence, int64_t head) {
    const int64_t queries = sequence[1] * p->group;
    for (int64_t j = 0; j < queries; j += QUERIES) {
        const int64_t from = j / p->group, last = (sooner(j + QUERIES, queries) - 1) / p->group;
        if (!needed(p, sequence, j) || seen(p, t, sequence, last).end <= seen(p, t, sequence, from).first) continue;
        if (t->pairs && p->grad_out) backward_pairs(p, t, sequence, head, j);
        else if (t->pairs) forward_pairs(p, t, sequence, head, j);
        else if (p->grad_out) backward_tile(p, t, sequence, head, j);
        else forward_tile(p, t, sequence, head, j);
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
    /* The heads of an item are neighbours: so are their rows in memory. */
    const int64_t *item = p->items + number / p->kv_heads * 3, head = number % p->kv_heads;
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
