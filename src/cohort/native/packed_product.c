/* Products of the sampler in bfloat16 with float32 sums, y = x W^T + b, on processors that multiply pairs of bfloat16
 * numbers.
 *
 * The matrix is packed once: [panels, pairs of inputs, PANEL outputs, 2], so that a vector holds a pair of inputs of
 * LANES outputs, and a product reads its memory in order. Outputs without a weight are 0. Each weight is read from
 * memory once for all rows of a block; the next part is fetched meanwhile. A sum runs over pairs in order: it depends
 * neither on the other rows nor on their number.
 */
#include "vectors.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

enum {
    PANEL_OUTPUTS = 2 * LANES, /* words of 32 bits of a pair of inputs */
    DEEP = 64,        /* pairs of inputs of a part: its weights stay in the nearest cache while all rows pass by */
    FEW_ROWS = 8,     /* rows of a tile: twice as many sums as the multipliers need in flight */
    NEAR_ROWS = 64,   /* rows whose sums stay in the nearest cache, a multiple of FEW_ROWS */
    BLOCK_ROWS = 256, /* rows that stay in the cache while all weights pass by, a multiple of NEAR_ROWS */
    CACHE_LINE = 64
};

typedef struct {
    const int64_t *parts; /* [count, 2] for matrices side by side: addresses of [outputs, in], number of outputs */
    void *packed;
    int64_t count, in, out, narrow, threads; /* narrow: the matrices are in bfloat16, not in float32 */
} packing;

/* The weights of an output. */
INLINE const char *row_of(const packing *p, int64_t output) {
    const int64_t *part = p->parts;
    for (; output >= part[1]; part += 2) output -= part[1];
    return (const char *)part[0] + output * p->in * (p->narrow ? 2 : 4);
}

static void pack_panel(void *what, int64_t panel, int thread) {
    const packing *p = what;
    const int64_t pairs = (p->in + 1) / 2, size = p->narrow ? 2 : 4;
    const char *rows[PANEL_OUTPUTS];
    (void)thread;
    for (int64_t i = 0; i < PANEL_OUTPUTS; i++) {
        const int64_t output = panel * PANEL_OUTPUTS + i;
        rows[i] = output < p->out ? row_of(p, output) : 0;
    }
    for (int64_t k = 0; k < pairs; k += LANES) {
        const int64_t found = sooner(2 * LANES, p->in - 2 * k);
        uint16_t numbers[PANEL_OUTPUTS][2 * LANES] = {0};
        uint32_t words[PANEL_OUTPUTS][LANES], *to = (uint32_t *)p->packed + (panel * pairs + k) * PANEL_OUTPUTS;
        for (int64_t i = 0; i < PANEL_OUTPUTS; i++) {
            if (!rows[i]) continue;
            const char *from = rows[i] + 2 * k * size;
            if (p->narrow) memcpy(numbers[i], from, (size_t)(2 * found));
            else if (found < 2 * LANES)
                for (int64_t n = 0; n < found; n++) store1(numbers[i], n, load1(from, n, 0), 1);
            else
                for (int64_t n = 0; n < found; n += LANES) store(numbers[i], n, load(from, n, 0), 1);
        }
        memcpy(words, numbers, sizeof words);
        for (int64_t pair = 0; pair < sooner(LANES, pairs - k); pair++)
            for (int64_t i = 0; i < PANEL_OUTPUTS; i++) to[pair * PANEL_OUTPUTS + i] = words[i][pair];
    }
}

/* Ask for large pages: with small ones, reading a matrix for one row takes up to 1.4 times as long. */
static void ask_for_large_pages(void *memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    const int64_t page = 4096, start = (int64_t)(intptr_t)memory, first = (start + page - 1) / page * page;
    const int64_t whole = (start + bytes - first) / page * page;
    if (whole > 0) madvise((void *)(intptr_t)first, (size_t)whole, MADV_HUGEPAGE);
#endif
}

void cohort_pack(packing *p) {
    const int64_t panels = (p->out + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS;
    ask_for_large_pages(p->packed, panels * PANEL_OUTPUTS * ((p->in + 1) / 2) * 4);
    run(pack_panel, p, panels, (int)p->threads);
}

typedef struct {
    const void *x;     /* [rows, in], in bfloat16 */
    const void *packed;
    const float *bias; /* of all outputs of all panels; NULL: none */
    void *y;           /* [rows, out], in bfloat16 */
    int64_t rows, in, out, threads; /* `in` is even */
} packed_product;

/* Add the products of the pairs from `from` to `end` to the sums of `n` rows, [n, PANEL_OUTPUTS], and fetch `lines` cache
 * lines for each pair meanwhile. */
INLINE void packed_tile(const int n, const uint16_t *x, int64_t in, const float *weights, int64_t from, int64_t end,
                        float *sums, const char *next, int64_t lines) {
    vec total[2 * FEW_ROWS];
    UNROLL_ALL for (int i = 0; i < 2 * n; i++) total[i] = from ? load(sums, i * LANES, 0) : (vec){0};
    for (int64_t k = from; k < end; k++) {
        const vec first = load(weights, k * PANEL_OUTPUTS, 0), second = load(weights, k * PANEL_OUTPUTS + LANES, 0);
        for (int64_t i = 0; i < lines; i++, next += CACHE_LINE) __builtin_prefetch(next);
        UNROLL for (int r = 0; r < n; r++) {
            const vec one = all_bits((const float *)(x + r * in + 2 * k));
            total[2 * r] = add_product(first, one, total[2 * r], PAIRS);
            total[2 * r + 1] = add_product(second, one, total[2 * r + 1], PAIRS);
        }
    }
    UNROLL_ALL for (int i = 0; i < 2 * n; i++) store(sums, i * LANES, total[i], 0);
}

/* A part of the sums of a panel for up to NEAR_ROWS rows. `ahead`: fetch the following part of the matrix meanwhile. */
INLINE void packed_part(const packed_product *p, const uint16_t *x, int64_t rows, const float *weights, int64_t from,
                        int64_t end, float *sums, int ahead) {
    const char *next = (const char *)(weights + end * PANEL_OUTPUTS);
    for (int64_t row = 0, n; row < rows; row += n) {
        const int64_t left = rows - row, both = rows <= FEW_ROWS; /* a pair of inputs has two lines */
        const int64_t lines = !ahead || row > FEW_ROWS || (row && both) ? 0 : both ? 2 : 1;
        const uint16_t *first = x + row * p->in;
        float *own = sums + row * PANEL_OUTPUTS;
        n = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        if (n == 8) packed_tile(8, first, p->in, weights, from, end, own, next, lines);
        else if (n == 4) packed_tile(4, first, p->in, weights, from, end, own, next, lines);
        else if (n == 2) packed_tile(2, first, p->in, weights, from, end, own, next, lines);
        else packed_tile(1, first, p->in, weights, from, end, own, next, lines);
        next += lines * (end - from) * CACHE_LINE;
    }
}

/* The outputs of a row: sums and bias, rounded to bfloat16; denormal ones may become 0. */
INLINE void finish(const float *sums, const float *bias, uint16_t *y, int64_t count) {
    uint16_t narrow[PANEL_OUTPUTS];
    for (int i = 0; i < PANEL_OUTPUTS; i += LANES)
        store(narrow, i, bias ? load(sums, i, 0) + load(bias, i, 0) : load(sums, i, 0), 1);
    if (count == PANEL_OUTPUTS) memcpy(y, narrow, sizeof narrow);
    else memcpy(y, narrow, (size_t)(2 * count));
}

static void packed_panel(void *what, int64_t panel, int thread) {
    const packed_product *p = what;
    const int64_t pairs = p->in / 2, output = panel * PANEL_OUTPUTS, count = sooner(PANEL_OUTPUTS, p->out - output);
    const float *weights = (const float *)p->packed + panel * pairs * PANEL_OUTPUTS;
    float sums[NEAR_ROWS * PANEL_OUTPUTS];
    (void)thread;
    for (int64_t row = 0; row < p->rows; row += NEAR_ROWS) {
        const int64_t rows = sooner(NEAR_ROWS, p->rows - row);
        const uint16_t *x = (const uint16_t *)p->x + row * p->in;
        for (int64_t from = 0; from < pairs; from += DEEP)
            packed_part(p, x, rows, weights, from, sooner(from + DEEP, pairs), sums, !row);
        for (int64_t r = 0; r < rows; r++)
            finish(sums + r * PANEL_OUTPUTS, p->bias ? p->bias + output : 0,
                   (uint16_t *)p->y + (row + r) * p->out + output, count);
    }
}

void cohort_packed_product(packed_product *whole) {
    const int64_t panels = (whole->out + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS;
    for (int64_t row = 0; row < whole->rows; row += BLOCK_ROWS) {
        packed_product p = *whole;
        p.x = (const uint16_t *)p.x + row * p.in, p.y = (uint16_t *)p.y + row * p.out;
        p.rows = sooner(BLOCK_ROWS, p.rows - row);
        run(packed_panel, &p, panels, (int)p.threads);
    }
}
