/* Attention of an update in bfloat16 on processors that multiply pairs of such numbers: tiles of attention.c in words of
 * two numbers. The weights p and the slopes of scores are rounded to bfloat16, as in torch's kernels; sums are float32.
 *
 * Keys lie in blocks of KEYS tokens: [blocks, padded / 2, KEYS] words of two dimensions. Values (backward: keys, for the
 * queries' gradients) are words of two tokens, [tokens / 2, padded]. Of a tile of queries there are words of two
 * dimensions, [padded / 2, QUERIES], and of two queries, [QUERIES / 2, padded].
 */
#if HAS_PAIRS

enum { STRIP = 2 * KEYS }; /* tokens whose scores the forward pass holds at a time, in the nearest cache */
#define LOG2E 1.44269504088896341f
#define SLACK 40.0f /* exponentials up to 2^SLACK are added up before they are scaled down: float32 holds them */

/* 2^x, off by at most a unit in the last place or two, and exactly 1 for 0; 0 for -inf. */
INLINE vec power_of_two(vec x) {
    const float terms[] = {9.01703071e-3f, 5.57999127e-2f, 2.40164444e-1f, 6.93151295e-1f, 1.0f};
    const vec rest = (vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* x - floor(x) */
    vec p = all(1.86713005e-3f);
    UNROLL for (int i = 0; i < 5; i++) p = multiply_add(p, rest, all(terms[i]));
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)x); /* p 2^floor(x) */
}

/* A row of `width` numbers as bfloat16, with zeros up to `padded`. */
static void narrow(const void *from, int64_t at, const shape *of, const int half, uint16_t *to) {
    int64_t d = 0;
    if (half) memcpy(to, (const uint16_t *)from + at, (size_t)of->width * sizeof *to), d = of->width;
    for (; d + LANES <= of->width; d += LANES) store(to, d, load(from, at + d, 0), 1);
    for (; d < of->width; d++) store1(to, d, load1(from, at + d, 0), 1);
    memset(to + of->width, 0, (size_t)(of->padded - of->width) * sizeof *to);
}

/* Put a token's row beside that of its neighbour; beside one without a neighbour are zeros. */
static void lay_row(const uint16_t *row, int64_t token, int64_t padded, float *rows) {
    uint32_t *words = (uint32_t *)rows + token / 2 * padded;
    if (token % 2 == 0)
        for (int64_t d = 0; d < padded; d++) words[d] = row[d];
    else
        for (int64_t d = 0; d < padded; d++) words[d] = (words[d] & 0xffff) | (uint32_t)row[d] << 16;
}

static void lay_block(const uint16_t *row, int64_t token, int64_t padded, float *blocks) {
    float *to = blocks + token / KEYS * KEYS * (padded / 2) + token % KEYS;
    for (int64_t w = 0; w < padded / 2; w++) memcpy(to + w * KEYS, row + 2 * w, sizeof *to);
}

/* As lay_numbers. Float32 numbers are rounded: those of a prefix, which an update widens from bfloat16 to add up its
 * gradients. */
static void lay_words(const packed *p, table *t, const void *keys, const void *values, int64_t first, int64_t count,
                      int64_t head, int64_t position, const int half) {
    uint16_t *k = (uint16_t *)t->q, *v = k + p->padded;
    for (int64_t i = 0; i < count; i++) {
        const int64_t from = ((first + i) * p->kv_heads + head) * p->width, to = position + i;
        narrow(keys, from, &t->of, half, k), narrow(values, from, &t->of, half, v);
        lay_row(t->value_blocks ? k : v, to, p->padded, t->rows);
        lay_block(k, to, p->padded, t->key_blocks);
        if (t->value_blocks) lay_block(v, to, p->padded, t->value_blocks);
    }
}

/* Words of two dimensions and, unless NULL, of two queries, of QUERIES rows of [T, A, D]; zeros beyond the last query. */
static void load_words(const packed *p, const table *t, const void *from, const int64_t *sequence, int64_t head, int64_t j,
                       float *words, float *pairs) {
    uint16_t *rows = (uint16_t *)t->q;
    const int64_t padded = p->padded;
    for (int64_t i = 0; i < QUERIES; i++) {
        uint16_t *row = rows + i * padded;
        if (j + i < sequence[1] * p->group)
            narrow(from, index_of(p, sequence, head, j + i) * p->width, &t->of, 1, row);
        else memset(row, 0, (size_t)padded * sizeof *row);
        for (int64_t w = 0; w < padded / 2; w++) memcpy(words + w * QUERIES + i, row + 2 * w, sizeof *words);
        if (pairs) lay_row(row, i, padded, pairs);
    }
}

/* Scores of 8 queries and `deep` vectors of keys of a block. */
INLINE void score_words(const int deep, const float *q, const float *keys, int64_t words, float *scores,
                        const int64_t stride) {
    vec total[24] = {0};
    for (int64_t w = 0; w < words; w++) {
        vec k[3];
        UNROLL for (int b = 0; b < deep; b++) k[b] = load(keys, w * KEYS + b * LANES, 0);
        UNROLL for (int i = 0; i < 8; i++) {
            const vec one = all_bits(q + w * QUERIES + i);
            UNROLL for (int b = 0; b < deep; b++)
                total[i * deep + b] = add_product(one, k[b], total[i * deep + b], PAIRS);
        }
    }
    _Pragma("GCC unroll 24") for (int i = 0; i < 8 * deep; i++)
        store(scores, i / deep * stride + i % deep * LANES, total[i], 0);
}

/* Scores of all queries and `count` keys of the blocks. */
INLINE void score_strip(const table *t, const float *q, const float *blocks, int64_t count, float *scores,
                        const int64_t stride) {
    const int64_t words = (t->of.width + 1) / 2;
    for (int64_t from = 0; from < count; from += KEYS) {
        const float *keys = blocks + from * (t->of.padded / 2);
        const int64_t vectors = up(count - from);
        for (int64_t i = 0; i < QUERIES; i += 8) {
            float *found = scores + i * stride + from;
            if (vectors >= 3) score_words(3, q + i, keys, words, found, stride);
            else if (vectors == 2) score_words(2, q + i, keys, words, found, stride);
            else score_words(1, q + i, keys, words, found, stride);
        }
    }
}

/* out += weights rows of all queries, for the words of tokens from `from` to `end`. */
INLINE void mix_words(const table *t, const float *weights, const int64_t stride, const float *rows, int64_t from,
                      int64_t end, float *out) {
    const int64_t padded = t->of.padded;
    for (int64_t i = 0; i < QUERIES; i += 8)
        if (padded / LANES % 2 == 0)
            mix_tile(8, 2, weights + i * stride, stride, rows, &t->of, from, end, out + i * padded, PAIRS);
        else mix_tile(8, 1, weights + i * stride, stride, rows, &t->of, from, end, out + i * padded, PAIRS);
}

/* From a query's scores for `count` tokens from `from` on to words of its weights, whose sums are added to `total`. What
 * was found with a smaller `top` is scaled down. */
INLINE void weigh_forward(const packed *p, float *row, int64_t from, int64_t count, query *q, vec *total, float *out) {
    const int masked = q->seen.first > from || q->seen.end < from + up(count) * LANES;
    vec x[STRIP / LANES], highest_yet = all(q->top + SLACK);
    ivec above = {0};
    for (int64_t b = 0; b < up(count); b++) {
        x[b] = load(row, b * LANES, 0) * (p->scaling * LOG2E);
        if (masked) x[b] = pick(within(q->seen, from + b * LANES), x[b], all(-INFINITY));
        above |= x[b] > highest_yet;
    }
    if (_mm512_test_epi32_mask((__m512i)above, (__m512i)above)) {
        vec top = x[0];
        for (int64_t b = 1; b < up(count); b++) top = pick(x[b] > top, x[b], top);
        const float new = fmaxf(q->top, highest(top));
        const vec keep = power_of_two(all(q->top - new));
        *total *= keep, q->top = new;
        for (int64_t d = 0; d < p->padded; d += LANES) store(out, d, load(out, d, 0) * keep, 0);
    }
    for (int64_t b = 0; b < up(count); b++) {
        const vec e = power_of_two(x[b] - q->top);
        store(row, b * LANES, e, 1);
        *total += e;
    }
}

static void forward_pairs(const packed *p, table *t, const int64_t *sequence, int64_t head, int64_t j) {
    const int64_t last = sooner(j + QUERIES, sequence[1] * p->group) - 1;
    const int64_t first = seen(p, t, sequence, j).first, end = seen(p, t, sequence, last).end;
    query queries[QUERIES];
    vec totals[QUERIES];
    for (int64_t i = 0; i < QUERIES; i++)
        queries[i] = (query){seen(p, t, sequence, j + i), -INFINITY, 0}, totals[i] = (vec){0};
    load_words(p, t, p->q, sequence, head, j, t->q_words, NULL);
    memset(t->out, 0, (size_t)(QUERIES * p->padded) * sizeof *t->out);
    for (int64_t from = first / STRIP * STRIP; from < end; from += STRIP) {
        const int64_t count = sooner(STRIP, end - from), at = from * (p->padded / 2);
        score_strip(t, t->q_words, t->key_blocks + at, count, t->weights, STRIP);
        for (int64_t i = 0; i < QUERIES; i++) {
            float *row = t->weights + i * STRIP;
            if (sooner(queries[i].seen.end, from + count) <= later(queries[i].seen.first, from))
                memset(row, 0, STRIP / 2 * sizeof *row);
            else weigh_forward(p, row, from, count, queries + i, totals + i, t->out + i * p->padded);
        }
        mix_words(t, t->weights, STRIP, t->rows + at, later(0, first - from) / 2, (count + 1) / 2, t->out);
    }
    float tops[QUERIES], sums[QUERIES];
    for (int64_t i = 0; i < QUERIES; i++) tops[i] = queries[i].top / LOG2E, sums[i] = sum(totals[i]);
    put_forward(p, t, sequence, head, j, tops, sums);
}

/* From the scores of two queries for `count` tokens from `from` on, and the products of values with their gradients, to
 * words: of weights and slopes of both, and of each one's slopes, which replace the products. */
INLINE void weigh_backward(const packed *p, table *t, int64_t i, int64_t from, int64_t count, const query *q) {
    for (int64_t k = 0; k < up(count) * LANES; k += LANES) {
        vec e[2], slope[2];
        UNROLL for (int n = 0; n < 2; n++) {
            const float *weights = t->weights + (i + n) * KEYS, *slopes = t->slopes + (i + n) * KEYS;
            e[n] = power_of_two(load(weights, k, 0) * (p->scaling * LOG2E) - q[n].top);
            slope[n] = e[n] * (load(slopes, k, 0) - q[n].delta) * p->scaling;
            if (q[n].seen.first > from + k || q[n].seen.end < from + k + LANES) {
                const ivec inside = within(q[n].seen, from + k);
                e[n] = pick(inside, e[n], (vec){0}), slope[n] = pick(inside, slope[n], (vec){0});
            }
        }
        store(t->weight_pairs, i / 2 * KEYS + k, pair(e[0], e[1]), 0);
        store(t->slope_pairs, i / 2 * KEYS + k, pair(slope[0], slope[1]), 0);
        store(t->slopes + i * KEYS, k, slope[0], 1), store(t->slopes + (i + 1) * KEYS, k, slope[1], 1);
    }
}

static void backward_pairs(const packed *p, table *t, const int64_t *sequence, int64_t head, int64_t j) {
    const int64_t last = sooner(j + QUERIES, sequence[1] * p->group) - 1, padded = p->padded;
    const int64_t first = seen(p, t, sequence, j).first, end = seen(p, t, sequence, last).end;
    load_words(p, t, p->q, sequence, head, j, t->q_words, t->q_pairs);
    load_words(p, t, p->grad_out, sequence, head, j, t->grad_words, t->grad_pairs);
    load_tile(p, p->out, (int)p->out_half, sequence, head, j, t->out);
    query queries[QUERIES];
    for (int64_t i = 0; i < QUERIES; i++) {
        vec products = {0};
        for (int64_t d = 0; d < padded; d += LANES) /* of the rows that load_words has left */
            products = multiply_add(load(t->q, i * padded + d, 1), load(t->out, i * padded + d, 0), products);
        const float lse = j + i <= last ? p->lse[index_of(p, sequence, head, j + i)] : 0;
        queries[i] = (query){seen(p, t, sequence, j + i), lse * LOG2E, sum(products)};
    }
    if (t->joins) load_tile(p, p->grad_q, (int)p->out_half, sequence, head, j, t->out);
    else memset(t->out, 0, (size_t)(QUERIES * padded) * sizeof *t->out);
    for (int64_t from = first / KEYS * KEYS; from < end; from += KEYS) {
        const int64_t count = sooner(KEYS, end - from), begin = later(0, first - from), at = from * (padded / 2);
        score_strip(t, t->q_words, t->key_blocks + at, count, t->weights, KEYS);
        score_strip(t, t->grad_words, t->value_blocks + at, count, t->slopes, KEYS);
        for (int64_t i = 0; i < QUERIES; i += 2) weigh_backward(p, t, i, from, count, queries + i);
        mix_words(t, t->slopes, KEYS, t->rows + at, begin / 2, (count + 1) / 2, t->out);
        fold(t->weight_pairs, KEYS, t->grad_pairs, padded, QUERIES / 2, begin, count, t->grad_values + from * padded, PAIRS);
        fold(t->slope_pairs, KEYS, t->q_pairs, padded, QUERIES / 2, begin, count, t->grad_keys + from * padded, PAIRS);
    }
    put_tile(p, t->out, sequence, head, j, p->grad_q);
}

#else

static void lay_words(const packed *p, table *t, const void *keys, const void *values, int64_t first, int64_t count,
                      int64_t head, int64_t position, const int half) {}
static void forward_pairs(const packed *p, table *t, const int64_t *sequence, int64_t head, int64_t j) {}
static void backward_pairs(const packed *p, table *t, const int64_t *sequence, int64_t head, int64_t j) {}

#endif
