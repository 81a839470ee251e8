/* Products of attention: of a few queries with many keys, of their weights with many values, and of both backward.
 *
 * Keys are stored in blocks of LANES tokens, [tokens / LANES, padded, LANES], so that a vector has the same dimension of
 * LANES keys and scores need no sums across lanes. Values are stored by token, [tokens, padded]. Queries and outputs are
 * rows of `padded` numbers.
 *
 * If `half` is PAIRS, "numbers" are words of two: of queries and keys two dimensions, of weights and values two tokens.
 * Scores and outputs stay float32.
 */
#pragma once
#include "vectors.h"

#define TILE 8   /* maximum number of queries for which keys are read once */
#define NEAR 256 /* tokens that stay in the nearest caches while further queries read them; a multiple of 4 LANES */

typedef struct {
    int64_t width, padded; /* head dimension, and the next multiple of LANES, as which it is stored */
} shape;

INLINE int64_t up(int64_t number) { return (number + LANES - 1) / LANES; }

/* q k^T of `n` queries, `deep` blocks of keys at a time, from `block` to `end`. Returns the first remaining block. */
INLINE int64_t score_tile(const int n, const int deep, const float *q, const void *keys, const shape *s, int64_t block,
                          int64_t end, float *scores, int64_t stride, const int half) {
    const int64_t size = s->padded * LANES;
    for (; block + deep <= end; block += deep) {
        vec total[12] = {0};
        for (int64_t d = 0; d < s->width; d++) {
            vec k[4]; /* one factor of all sums, and one of the other at a time: more would not fit the registers */
            UNROLL for (int b = 0; b < deep; b++) k[b] = load(keys, (block + b) * size + d * LANES, half);
            UNROLL for (int i = 0; i < n; i++) {
                const vec one = all_bits(q + i * s->padded + d);
                UNROLL for (int b = 0; b < deep; b++)
                    total[i * deep + b] = add_product(one, k[b], total[i * deep + b], half);
            }
        }
        UNROLL_ALL for (int i = 0; i < n * deep; i++)
            store(scores, i / deep * stride + (block + i % deep) * LANES, total[i], 0);
    }
    return block;
}

/* Computes enough sums at a time to keep the multipliers busy. */
INLINE void score_near(int64_t n, const float *q, const void *keys, const shape *s, int64_t block, int64_t end,
                       float *scores, int64_t stride, const int half) {
    int64_t rest;
    for (; n >= 8; n -= 8, q += 8 * s->padded, scores += 8 * stride)
        score_tile(8, 1, q, keys, s, block, end, scores, stride, half);
    for (; n >= 4; n -= 4, q += 4 * s->padded, scores += 4 * stride) {
        rest = score_tile(4, 2, q, keys, s, block, end, scores, stride, half);
        score_tile(4, 1, q, keys, s, rest, end, scores, stride, half);
    }
    for (; n >= 2; n -= 2, q += 2 * s->padded, scores += 2 * stride) {
        rest = score_tile(2, 4, q, keys, s, block, end, scores, stride, half);
        score_tile(2, 1, q, keys, s, rest, end, scores, stride, half);
    }
    if (n) {
        rest = score_tile(1, 4, q, keys, s, block, end, scores, stride, half);
        score_tile(1, 1, q, keys, s, rest, end, scores, stride, half);
    }
}

/* q k^T of `n` queries for the blocks of keys from `block` to `end`. */
INLINE void score(int64_t n, const float *q, const void *keys, const shape *s, int64_t block, int64_t end, float *scores,
                  int64_t stride, const int half) {
    for (; block < end; block += NEAR / LANES)
        score_near(n, q, keys, s, block, sooner(block + NEAR / LANES, end), scores, stride, half);
}

/* out += weights values, for `n` queries, `wide` vectors of D at a time, over the tokens from `from` to `end`. */
INLINE void mix_tile(const int n, const int wide, const float *weights, int64_t stride, const void *values,
                     const shape *s, int64_t from, int64_t end, float *out, const int half) {
    for (int64_t d = 0; d + wide * LANES <= s->padded; d += wide * LANES) {
        vec total[16];
        UNROLL_ALL for (int i = 0; i < n * wide; i++) total[i] = load(out, i / wide * s->padded + d + i % wide * LANES, 0);
        for (int64_t t = from; t < end; t++) {
            vec v[4];
            UNROLL for (int w = 0; w < wide; w++) v[w] = load(values, t * s->padded + d + w * LANES, half);
            UNROLL for (int i = 0; i < n; i++) {
                const vec one = all_bits(weights + i * stride + t);
                UNROLL for (int w = 0; w < wide; w++)
                    total[i * wide + w] = add_product(one, v[w], total[i * wide + w], half);
            }
        }
        UNROLL_ALL for (int i = 0; i < n * wide; i++) store(out, i / wide * s->padded + d + i % wide * LANES, total[i], 0);
    }
}

/* Computes enough vectors at a time to keep the multipliers busy. */
INLINE void mix_near(int64_t n, const float *weights, int64_t stride, const void *values, const shape *s, int64_t from,
                     int64_t end, float *out, const int half) {
    const int64_t vectors = s->padded / LANES;
    for (; n >= 4; n -= 4, weights += 4 * stride, out += 4 * s->padded)
        if (vectors % 2 == 0) mix_tile(4, 2, weights, stride, values, s, from, end, out, half);
        else mix_tile(4, 1, weights, stride, values, s, from, end, out, half);
    for (; n >= 2; n -= 2, weights += 2 * stride, out += 2 * s->padded)
        if (vectors % 2 == 0) mix_tile(2, 2, weights, stride, values, s, from, end, out, half);
        else mix_tile(2, 1, weights, stride, values, s, from, end, out, half);
    for (; n; n--, weights += stride, out += s->padded)
        if (vectors % 4 == 0) mix_tile(1, 4, weights, stride, values, s, from, end, out, half);
        else if (vectors % 2 == 0) mix_tile(1, 2, weights, stride, values, s, from, end, out, half);
        else mix_tile(1, 1, weights, stride, values, s, from, end, out, half);
}

/* out += weights values, for `n` queries and the tokens from `from` to `end`. */
INLINE void mix(int64_t n, const float *weights, int64_t stride, const void *values, const shape *s, int64_t from,
                int64_t end, float *out, const int half) {
    for (; from < end; from += NEAR)
        mix_near(n, weights, stride, values, s, from, sooner(from + NEAR, end), out, half);
}

/* target[t] += sum over `queries` queries of weights[i][t] rows[i], for `count` tokens from `t` on, `wide` vectors of D at a
 * time. If `half` is PAIRS, rows and weights are words of two queries. */
INLINE void fold_tile(const int count, const int wide, const float *weights, int64_t stride, const float *rows,
                      int64_t padded, int64_t queries, int64_t t, float *target, const int half) {
    for (int64_t d = 0; d + wide * LANES <= padded; d += wide * LANES) {
        float *to = target + t * padded + d;
        vec total[12];
        UNROLL_ALL for (int i = 0; i < count * wide; i++) total[i] = load(to, i / wide * padded + i % wide * LANES, 0);
        for (int64_t i = 0; i < queries; i++) {
            vec row[2];
            UNROLL_ALL for (int w = 0; w < wide; w++) row[w] = load(rows, i * padded + d + w * LANES, 0);
            UNROLL_ALL for (int n = 0; n < count; n++) {
                const vec one = all_bits(weights + i * stride + t + n);
                UNROLL_ALL for (int w = 0; w < wide; w++)
                    total[n * wide + w] = add_product(one, row[w], total[n * wide + w], half);
            }
        }
        UNROLL_ALL for (int i = 0; i < count * wide; i++) store(to, i / wide * padded + i % wide * LANES, total[i], 0);
    }
}

/* The same for the tokens from `from` to `end`. */
INLINE void fold(const float *weights, int64_t stride, const float *rows, int64_t padded, int64_t queries, int64_t from,
                 int64_t end, float *target, const int half) {
    const int odd = padded / LANES % 2;
    int64_t t = from;
    for (; t + 6 <= end; t += 6)
        if (odd) fold_tile(6, 1, weights, stride, rows, padded, queries, t, target, half);
        else fold_tile(6, 2, weights, stride, rows, padded, queries, t, target, half);
    for (; t < end; t++)
        if (odd) fold_tile(1, 1, weights, stride, rows, padded, queries, t, target, half);
        else fold_tile(1, 2, weights, stride, rows, padded, queries, t, target, half);
}
