/* The matrix products of a decode step: y = x W^T + b in float32, for few rows and weights as they lie in the model.
 *
 * Libraries rearrange a matrix before they multiply, which for few rows takes longer than the products. Here the rows
 * are rearranged, so that a vector holds one input of LANES rows, and weights are read once, in order. The sum of each
 * output runs over its inputs in order, DEPTH at a time: it depends neither on the other rows nor on their number.
 */
#include "vectors.h"

#define DEPTH 128   /* inputs of a partial sum: bounds the number of roundings */
#define OUTPUTS 12  /* sums that a thread computes at a time: enough to keep the multipliers busy */
#define PAIR (2 * LANES)
#define CHUNK 64    /* rows at a time, a multiple of PAIR: they stay in the cache while the weights pass by */
#define STRIDE 16   /* weights of a cache line */

typedef struct {
    const float *x;       /* [rows, in] */
    const int64_t *parts; /* [count, 3] for matrices side by side: addresses of weights and bias, number of outputs */
    float *turned;        /* [in, rows], in blocks of PAIR rows; room for CHUNK rows */
    float *y;             /* [rows, all outputs] */
    int64_t rows, in, out, count, threads;
} product;

static void turn_block(void *what, int64_t block, int thread) {
    const product *p = what;
    const int64_t first = block * PAIR;
    float *to = p->turned + first * p->in;
    (void)thread;
    for (int64_t from = 0; from < p->in; from += LANES)
        for (int64_t r = 0; r < PAIR; r++)
            for (int64_t k = from; k < sooner(from + LANES, p->in); k++)
                to[k * PAIR + r] = first + r < p->rows ? p->x[(first + r) * p->in + k] : 0;
}

/* Sums of `n` outputs for `wide` vectors of rows. `next`: weights to fetch meanwhile; NULL: none. */
INLINE void tile(const int n, const int wide, const float *x, const float *const *weights, const float *next,
                 int64_t in, vec *total) {
    UNROLL_ALL for (int i = 0; i < OUTPUTS; i++) total[i] = (vec){0};
    for (int64_t from = 0; from < in; from += DEPTH) {
        const int64_t end = sooner(from + DEPTH, in);
        vec part[OUTPUTS] = {0};
        for (int64_t k = from; k < end; k++) {
            /* Not an array: gcc would keep that in memory. */
            const vec first = load(x, k * PAIR, 0), second = wide > 1 ? load(x, k * PAIR + LANES, 0) : first;
            if (next && k % STRIDE == 0)
                for (int i = 0; i < n; i++) __builtin_prefetch(next + i * in + k);
            UNROLL_ALL for (int i = 0; i < n; i++) {
                const vec weight = all(weights[i][k]);
                part[i * wide] = multiply_add(weight, first, part[i * wide]);
                if (wide > 1) part[i * wide + 1] = multiply_add(weight, second, part[i * wide + 1]);
            }
        }
        UNROLL_ALL for (int i = 0; i < OUTPUTS; i++) total[i] += part[i];
    }
}

/* Sums of LANES rows to `n` outputs of each row. */
INLINE void turn_back(const int n, const vec *total, int64_t step, int64_t rows, float *y, int64_t stride) {
    for (int64_t r = 0; r < rows; r++)
        UNROLL_ALL for (int i = 0; i < n; i++) y[r * stride + i] = ((const float *)(total + i * step))[r];
}

static void panel(void *what, int64_t number, int thread) {
    const product *p = what;
    const int64_t *part = p->parts;
    int64_t before = 0;
    for (int64_t size; number >= (size = (part[2] + OUTPUTS - 1) / OUTPUTS); number -= size, part += 3) before += part[2];
    const float *matrix = (const float *)part[0], *bias = (const float *)part[1], *weights[OUTPUTS];
    const int64_t first = number * OUTPUTS, count = sooner(OUTPUTS, part[2] - first), half = OUTPUTS / 2;
    (void)thread;
    for (int64_t i = 0; i < OUTPUTS; i++) weights[i] = matrix + (first + sooner(i, count - 1)) * p->in;
    for (int64_t row = 0; row < p->rows; row += PAIR) {
        const float *next = row || first + 2 * OUTPUTS > part[2] ? 0 : matrix + (first + OUTPUTS) * p->in;
        const float *x = p->turned + row * p->in;
        const int wide = row + LANES < p->rows ? 2 : 1;
        for (int64_t from = 0; from < count; from += wide > 1 ? half : OUTPUTS) {
            vec total[OUTPUTS];
            if (wide > 1) tile(OUTPUTS / 2, 2, x, weights + from, next ? next + from * p->in : 0, p->in, total);
            else tile(OUTPUTS, 1, x, weights, next, p->in, total);
            const int64_t found = sooner(count - from, OUTPUTS / wide);
            if (bias)
                for (int64_t i = 0; i < found * wide; i++) total[i] += bias[first + from + i / wide];
            for (int w = 0; w < wide; w++) {
                const int64_t top = row + w * LANES, rows = sooner(LANES, p->rows - top);
                float *y = p->y + top * p->out + before + first + from;
                if (found == OUTPUTS / 2) turn_back(OUTPUTS / 2, total + w, wide, rows, y, p->out);
                else
                    for (int64_t i = 0; i < found; i++) turn_back(1, total + i * wide + w, 1, rows, y + i, p->out);
            }
        }
    }
}

void cohort_product(product *whole) {
    int64_t panels = 0;
    for (int64_t i = 0; i < whole->count; i++) panels += (whole->parts[i * 3 + 2] + OUTPUTS - 1) / OUTPUTS;
    for (int64_t row = 0; row < whole->rows; row += CHUNK) {
        product p = *whole;
        p.x += row * p.in, p.y += row * p.out, p.rows = sooner(CHUNK, p.rows - row);
        run(turn_block, &p, (p.rows + PAIR - 1) / PAIR, (int)p.threads);
        run(panel, &p, panels, (int)p.threads);
    }
}
