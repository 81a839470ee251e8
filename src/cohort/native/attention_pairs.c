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

/* 2 LANES numbers of a row of bfloat16, from its number `d` on, as words; zeros beyond its width. Float32 numbers are
 * rounded: those of a prefix, which an update widens from bfloat16 to add up its gradients. */
INLINE uvec row_words(const void *from, int64_t at, int64_t d, int64_t width, const int half) {
    const uint32_t some = width - d >= 2 * LANES ? UINT32_MAX : ((uint32_t)1 << (width - d)) - 1;
    if (half) return (uvec)_mm512_maskz_loadu_epi16(some, (const uint16_t *)from + at + d);
    const float *row = (const float *)from + at + d;
    const __m512 low = _mm512_maskz_loadu_ps((__mmask16)some, row);
    return (uvec)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps((__mmask16)(some >> LANES), row + LANES), low);
}

/* Begin to load the line of a number, which is used soon; it need not exist. Into the second cache: a head's rows are
 * some powers of two apart, of which the nearest has room for few. */
INLINE void expect(const void *from, int64_t index, int64_t half) {
    __builtin_prefetch((const void *)((uintptr_t)from + (uintptr_t)(index * (half ? 2 : 4))), 0, 2);
}

/* The product of two rows. */
INLINE float row_product(const void *a, const int a_half, const void *b, const int b_half, int64_t at, int64_t width) {
    vec total = {0};
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES)
        total = multiply_add(load(a, at + d, a_half), load(b, at + d, b_half), total);
    if (d < width) {
        vec x = {0}, y = {0};
        for (int i = 0; i < width - d; i++) x[i] = load1(a, at + d + i, a_half), y[i] = load1(b, at + d + i, b_half);
        total = multiply_add(x, y, total);
    }
    return _mm512_reduce_add_ps((__m512)total);
}

/* Store the words of LANES rows by column: `count` columns, `stride` words apart, of the rows in `some`. */
INLINE void put_columns(const uvec *rows, int64_t count, int64_t stride, const __mmask16 some, float *to) {
    uvec x[LANES];
    memcpy(x, rows, sizeof x);
    UNROLL for (uint32_t step = 1; step < LANES; step *= 2) { /* exchange bits of a row's and a column's number */
        uvec low, high;
        UNROLL_ALL for (uint32_t i = 0; i < LANES; i++)
            low[i] = i & step ? LANES + i - step : i, high[i] = i & step ? LANES + i : i + step;
        UNROLL_ALL for (uint32_t i = 0; i < LANES; i++) {
            if (i & step) continue;
            const __m512i a = (__m512i)x[i], b = (__m512i)x[i + step];
            x[i] = (uvec)_mm512_permutex2var_epi32(a, (__m512i)low, b);
            x[i + step] = (uvec)_mm512_permutex2var_epi32(a, (__m512i)high, b);
        }
    }
    UNROLL_ALL for (int64_t w = 0; w < LANES; w++)
        if (w < count) _mm512_mask_storeu_epi32(to + w * stride, some, (__m512i)x[w]);
}

/* Store the numbers of the rows from `first` to before `end` beside those of a neighbour: words of two rows, `stride`
 * words apart. Beside a last one without a neighbour are zeros; beside a first one stays what is there. */
INLINE void put_pairs(const uvec *rows, int64_t first, int64_t end, int64_t count, int64_t stride, float *to) {
    uvec order[2] = {{0}};
    for (uint32_t i = 0; i < 2 * LANES; i++) order[i / LANES][i % LANES] = i | (i + 2 * LANES) << 16;
    for (int64_t i = first / 2 * 2; i < end; i += 2)
        for (int n = 0; n < 2 && n * LANES < count; n++) {
            const __m512i x = _mm512_permutex2var_epi16((__m512i)rows[i], (__m512i)order[n], (__m512i)rows[i + 1]);
            _mm512_mask_storeu_epi16(to + i / 2 * stride + n * LANES, i < first ? 0xaaaaaaaa : 0xffffffff, x);
        }
}

/* As lay_numbers. */
INLINE void lay_words_of(const packed *p, table *t, const void *keys, const void *values, int64_t first, int64_t count,
                         int64_t head, int64_t position, const int half) {
    const int64_t padded = p->padded, step = p->kv_heads * p->width, start = position / LANES * LANES;
    for (int64_t at = start; at < position + count; at += LANES) {
        const int64_t begin = later(position - at, 0), end = sooner(position + count - at, LANES);
        const __mmask16 some = (__mmask16)((1u << end) - (1u << begin));
        const int64_t from = (first + at - position) * step + head * p->width;
        const int64_t to = at / KEYS * KEYS * (padded / 2) + at % KEYS;
        for (int64_t d = 0; d < padded; d += 2 * LANES) {
            uvec k[LANES] = {{0}}, v[LANES] = {{0}};
            for (int64_t i = begin; i < end; i++) {
                const int64_t row = from + i * step, next = row + LANES * step;
                k[i] = row_words(keys, row, d, p->width, half), expect(keys, next + d, half);
                v[i] = row_words(values, row, d, p->width, half), expect(values, next + d, half);
            }
            put_columns(k, (padded - d) / 2, KEYS, some, t->key_blocks + to + d / 2 * KEYS);
            if (t->value_blocks) put_columns(v, (padded - d) / 2, KEYS, some, t->value_blocks + to + d / 2 * KEYS);
            put_pairs(t->value_blocks ? k : v, begin, end, padded - d, padded, t->rows + at / 2 * padded + d);
        }
    }
}

static void lay_words(const packed *p, table *t, const void *keys, const void *values, int64_t first, int64_t count,
                      int64_t head, int64_t position, const int half) {
    if (half) lay_words_of(p, t, keys, values, first, count, head, position, 1);
    else lay_words_of(p, t, keys, values, first, count, head, position, 0);
}

/* Words of two dimensions and, unless NULL, of two queries, of a tile's rows of [T, A, D]; zeros beyond the last query. */
static void load_words(const packed *p, const query_tile *queries, const void *from, float *words, float *pairs) {
    const int64_t padded = p->padded;
    for (int64_t i = 0; i < queries->count; i += LANES)
        for (int64_t d = 0; d < padded; d += 2 * LANES) {
            uvec x[LANES] = {{0}};
            for (int64_t n = 0; n < LANES && i + n < queries->count; n++)
                x[n] = row_words(from, queries->at[i + n] * p->width, d, p->width, 1);
            put_columns(x, (padded - d) / 2, QUERIES, 0xffff, words + d / 2 * QUERIES + i);
            if (pairs) put_pairs(x, 0, LANES, padded - d, padded, pairs + i / 2 * padded + d);
        }
}

/* The same of the rows of a tile, or of those `ahead` of them. Most times the next tile's are QUERIES kv_heads ahead. */
INLINE void expect_tile(const packed *p, const query_tile *queries, const void *from, int64_t ahead, int64_t half) {
    for (int64_t i = 0; i < queries->count; i++)
        for (int64_t d = 0; d < p->width; d += half ? 32 : 16)
            expect(from, (queries->at[i] + ahead) * p->width + d, half);
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

/* Scores of 8 queries and `count` keys of the blocks. */
INLINE void score_strip(const table *t, const float *q, const float *blocks, int64_t count, float *scores,
                        const int64_t stride) {
    const int64_t words = (t->of.width + 1) / 2;
    for (int64_t from = 0; from < count; from += KEYS) {
        const float *keys = blocks + from * (t->of.padded / 2);
        const int64_t vectors = up(count - from);
        if (vectors >= 3) score_words(3, q, keys, words, scores + from, stride);
        else if (vectors == 2) score_words(2, q, keys, words, scores + from, stride);
        else score_words(1, q, keys, words, scores + from, stride);
    }
}

/* out += weights rows of 8 queries, for the words of tokens from `from` to `end`. */
INLINE void mix_words(const table *t, const float *weights, const int64_t stride, const float *rows, int64_t from,
                      int64_t end, float *out) {
    if (t->of.padded / LANES % 2 == 0) mix_tile(8, 2, weights, stride, rows, &t->of, from, end, out, PAIRS);
    else mix_tile(8, 1, weights, stride, rows, &t->of, from, end, out, PAIRS);
}

/* What 8 queries of a tile, from its query `i` on, see of the `count` tokens from `from` on: numbers of those. */
INLINE view eight_see(const query *queries, const query_tile *of, int64_t i, int64_t from, int64_t count) {
    const int64_t first = later(queries[i].seen.first - from, 0);
    const int64_t end = sooner(queries[sooner(i + 8, of->count) - 1].seen.end - from, count);
    return (view){first, first < end ? end : 0};
}

/* Which of LANES tokens from `t` on are seen. */
INLINE __mmask16 lanes_of(view v, int64_t t) {
    const int64_t first = sooner(later(v.first - t, 0), LANES), end = sooner(later(v.end - t, 0), LANES);
    return (__mmask16)((1u << end) - (1u << first));
}

/* From a query's scores for vectors of tokens from `from` on to words of its weights, whose sums are added to `total`. What
 * was found with a smaller `top` is scaled down. */
INLINE void weigh_vectors(const packed *p, float *row, int64_t from, const int vectors, query *q, vec *total,
                          float *out) {
    const int masked = q->seen.first > from || q->seen.end < from + vectors * LANES;
    const vec highest_yet = all(q->top + SLACK);
    vec x[STRIP / LANES];
    __mmask16 above = 0;
    UNROLL for (int b = 0; b < vectors; b++) {
        x[b] = load(row, b * LANES, 0) * (p->scaling * LOG2E);
        if (masked)
            x[b] = (vec)_mm512_mask_mov_ps((__m512)all(-INFINITY), lanes_of(q->seen, from + b * LANES), (__m512)x[b]);
        above |= _mm512_cmp_ps_mask((__m512)x[b], (__m512)highest_yet, _CMP_GT_OQ);
    }
    if (above) {
        __m512 top = (__m512)x[0];
        UNROLL for (int b = 1; b < vectors; b++) top = _mm512_max_ps((__m512)x[b], top);
        const float before = q->top;
        q->top = fmaxf(before, _mm512_reduce_max_ps(top));
        if (before != -INFINITY) {
            const vec keep = power_of_two(all(before - q->top));
            *total *= keep;
            for (int64_t d = 0; d < p->padded; d += LANES) store(out, d, load(out, d, 0) * keep, 0);
        }
    }
    UNROLL for (int b = 0; b < vectors; b++) {
        const vec e = power_of_two(x[b] - q->top);
        store(row, b * LANES, e, 1);
        *total += e;
    }
}

static void weigh_forward(const packed *p, float *row, int64_t from, int64_t count, query *q, vec *total, float *out) {
    switch (up(count)) { /* so that they stay in registers */
        case 1: return weigh_vectors(p, row, from, 1, q, total, out);
        case 2: return weigh_vectors(p, row, from, 2, q, total, out);
        case 3: return weigh_vectors(p, row, from, 3, q, total, out);
        case 4: return weigh_vectors(p, row, from, 4, q, total, out);
        case 5: return weigh_vectors(p, row, from, 5, q, total, out);
        default: return weigh_vectors(p, row, from, STRIP / LANES, q, total, out);
    }
}

static void forward_pairs(const packed *p, table *t, const int64_t *sequence, int64_t head, int64_t j) {
    const query_tile of = query_tile_of(p, sequence, head, j);
    const int64_t first = seen(p, t, sequence, of.token[0]).first, end = seen(p, t, sequence, of.token[of.count - 1]).end;
    query queries[QUERIES];
    vec totals[QUERIES];
    for (int64_t i = 0; i < QUERIES; i++)
        queries[i] = (query){seen_by(p, t, sequence, &of, i), -INFINITY, 0}, totals[i] = (vec){0};
    load_words(p, &of, p->q, t->q_words, NULL);
    expect_tile(p, &of, p->q, QUERIES * p->kv_heads, 1);
    expect_tile(p, &of, p->out, 0, p->out_half);
    memset(t->out, 0, (size_t)(QUERIES * p->padded) * sizeof *t->out);
    for (int64_t from = first / STRIP * STRIP; from < end; from += STRIP) {
        const int64_t count = sooner(STRIP, end - from), at = from * (p->padded / 2);
        for (int64_t n = 0; n < of.count; n += 8) {
            const view some = eight_see(queries, &of, n, from, count);
            if (!some.end) continue;
            score_strip(t, t->q_words + n, t->key_blocks + at, some.end, t->weights, STRIP);
            for (int64_t i = n; i < n + 8; i++) {
                float *row = t->weights + (i - n) * STRIP;
                if (sooner(queries[i].seen.end, from + count) <= later(queries[i].seen.first, from))
                    memset(row, 0, STRIP / 2 * sizeof *row);
                else weigh_forward(p, row, from, some.end, queries + i, totals + i, t->out + i * p->padded);
            }
            mix_words(t, t->weights, STRIP, t->rows + at, some.first / 2, (some.end + 1) / 2, t->out + n * p->padded);
        }
    }
    float tops[QUERIES], sums[QUERIES];
    for (int64_t i = 0; i < of.count; i++)
        tops[i] = queries[i].top / LOG2E, sums[i] = _mm512_reduce_add_ps((__m512)totals[i]);
    put_forward(p, t, &of, tops, sums);
}

/* From the scores of two queries for `some` tokens from `from` on, and the products of values with their gradients, to
 * words: of weights and slopes of both, and of each one's slopes, which replace the products. Both weights and slopes of
 * the tokens after them are 0, up to `count`. */
INLINE void weigh_backward(const packed *p, table *t, int64_t i, int64_t from, int64_t some, int64_t count,
                           const query *q) {
    for (int64_t k = up(some) * LANES; k < count; k += LANES)
        store(t->weight_pairs, i / 2 * KEYS + k, (vec){0}, 0), store(t->slope_pairs, i / 2 * KEYS + k, (vec){0}, 0);
    for (int64_t k = 0; k < up(some) * LANES; k += LANES) {
        vec e[2], slope[2];
        UNROLL for (int n = 0; n < 2; n++) {
            const float *weights = t->weights + (i + n) * KEYS, *slopes = t->slopes + (i + n) * KEYS;
            e[n] = power_of_two(load(weights, k, 0) * (p->scaling * LOG2E) - q[n].top);
            slope[n] = e[n] * (load(slopes, k, 0) - q[n].delta) * p->scaling;
            if (q[n].seen.first > from + k || q[n].seen.end < from + k + LANES) {
                const __mmask16 inside = lanes_of(q[n].seen, from + k);
                e[n] = (vec)_mm512_maskz_mov_ps(inside, (__m512)e[n]);
                slope[n] = (vec)_mm512_maskz_mov_ps(inside, (__m512)slope[n]);
            }
        }
        store(t->weight_pairs, i / 2 * KEYS + k, pair(e[0], e[1]), 0);
        store(t->slope_pairs, i / 2 * KEYS + k, pair(slope[0], slope[1]), 0);
        store(t->slopes + i * KEYS, k, slope[0], 1), store(t->slopes + (i + 1) * KEYS, k, slope[1], 1);
    }
}

static void backward_pairs(const packed *p, table *t, const int64_t *sequence, int64_t head, int64_t j) {
    const int64_t padded = p->padded;
    const query_tile of = query_tile_of(p, sequence, head, j);
    const int64_t first = seen(p, t, sequence, of.token[0]).first, end = seen(p, t, sequence, of.token[of.count - 1]).end;
    load_words(p, &of, p->q, t->q_words, t->q_pairs);
    load_words(p, &of, p->grad_out, t->grad_words, t->grad_pairs);
    expect_tile(p, &of, p->q, QUERIES * p->kv_heads, 1), expect_tile(p, &of, p->grad_out, QUERIES * p->kv_heads, 1);
    expect_tile(p, &of, p->out, QUERIES * p->kv_heads, p->out_half), expect_tile(p, &of, p->grad_q, 0, p->out_half);
    query queries[QUERIES] = {{{0, 0}, 0, 0}};
    for (int64_t i = 0; i < of.count; i++) {
        const int64_t at = of.at[i] * p->width;
        const float delta = p->out_half ? row_product(p->grad_out, 1, p->out, 1, at, p->width)
                                        : row_product(p->grad_out, 1, p->out, 0, at, p->width);
        queries[i] = (query){seen_by(p, t, sequence, &of, i), p->lse[of.at[i]] * LOG2E, delta};
    }
    if (t->joins) load_tile(p, &of, p->grad_q, (int)p->out_half, t->out);
    else memset(t->out, 0, (size_t)(QUERIES * padded) * sizeof *t->out);
    for (int64_t from = first / KEYS * KEYS; from < end; from += KEYS) {
        const int64_t count = sooner(KEYS, end - from), begin = later(0, first - from), at = from * (padded / 2);
        for (int64_t n = 0; n < of.count; n += 8) {
            const view some = eight_see(queries, &of, n, from, count);
            float *weights = t->weights + n * KEYS, *slopes = t->slopes + n * KEYS;
            score_strip(t, t->q_words + n, t->key_blocks + at, some.end, weights, KEYS);
            score_strip(t, t->grad_words + n, t->value_blocks + at, some.end, slopes, KEYS);
            for (int64_t i = n; i < n + 8; i += 2) weigh_backward(p, t, i, from, some.end, count, queries + i);
            if (some.end) mix_words(t, slopes, KEYS, t->rows + at, some.first / 2, (some.end + 1) / 2, t->out + n * padded);
        }
        const int64_t pairs = (of.count + 1) / 2;
        fold(t->weight_pairs, KEYS, t->grad_pairs, padded, pairs, begin, count, t->grad_values + from * padded, PAIRS);
        fold(t->slope_pairs, KEYS, t->q_pairs, padded, pairs, begin, count, t->grad_keys + from * padded, PAIRS);
    }
    put_tile(p, &of, t->out, p->grad_q);
}

#else

static void lay_words(const packed *p, table *t, const void *keys, const void *values, int64_t first, int64_t count,
                      int64_t head, int64_t position, const int half) {}
static void forward_pairs(const packed *p, table *t, const int64_t *sequence, int64_t head, int64_t j) {}
static void backward_pairs(const packed *p, table *t, const int64_t *sequence, int64_t head, int64_t j) {}

#endif
