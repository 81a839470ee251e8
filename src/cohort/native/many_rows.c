/* Products of an update in bfloat16 with float32 sums, y = x W^T + b, on processors that multiply pairs of bfloat16
 * numbers.
 *
 * The matrix is packed as for the sampler (packed_product.c); for the gradient of x it is packed transposed. A tile's
 * sums stay in registers over all inputs, and the memory of its outputs, which is rarely in the cache, is fetched
 * meanwhile. A sum runs over pairs in order: it depends neither on the other rows nor on their number.
 */
#include "vectors.h"

enum {
    TILE_ROWS = 6,    /* with two panels of outputs as many sums as there are registers for */
    CACHED_ROWS = 192 /* rows that stay in the cache while all weights pass by, a multiple of TILE_ROWS */
};

/* Words of a pair of outputs, in panels of inputs: [panels, pairs of outputs, PANEL_OUTPUTS]. */
static void pack_outputs(void *what, int64_t number, int thread) {
    const packing *p = what;
    const int64_t pairs = (p->out + 1) / 2, panels = (p->in + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS;
    const char *first = row_of(p, 2 * number), *second = 2 * number + 1 < p->out ? row_of(p, 2 * number + 1) : 0;
    const int half = (int)p->narrow;
    (void)thread;
    for (int64_t i = 0; i < panels * PANEL_OUTPUTS; i += LANES) {
        const int64_t count = later(sooner(p->in - i, LANES), 0);
        const vec low = some(first, i, count, half), high = second ? some(second, i, count, half) : (vec){0};
        const int64_t panel = i / PANEL_OUTPUTS;
        store(p->packed, (panel * pairs + number) * PANEL_OUTPUTS + i % PANEL_OUTPUTS, pair(low, high), 0);
    }
}

void cohort_pack_transposed(packing *p) {
    const int64_t pairs = (p->out + 1) / 2, panels = (p->in + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS;
    ask_for_large_pages(p->packed, panels * PANEL_OUTPUTS * pairs * 4);
    run(pack_outputs, p, pairs, (int)p->threads);
}

/* Outputs of `n` rows, from the weights of one panel or of two. */
INLINE void many_tile(const packed_product *p, const int n, const int panels, int64_t row, int64_t output) {
    const int64_t pairs = p->in / 2, count = sooner(p->out - output, panels * PANEL_OUTPUTS);
    const float *weights = (const float *)p->packed + output * pairs, *x = (const float *)p->x + row * pairs;
    uint16_t *y = (uint16_t *)p->y + row * p->out + output;
    const int wide = 2 * panels;
    vec total[4 * TILE_ROWS];
    UNROLL_ALL for (int r = 0; r < n; r++)
        for (int64_t i = 0; i < count; i += CACHE_LINE / 2) __builtin_prefetch(y + r * p->out + i, 1);
    UNROLL_MANY for (int i = 0; i < n * wide; i++) total[i] = (vec){0};
    for (int64_t k = 0; k < pairs; k++, weights += PANEL_OUTPUTS) {
        vec words[4];
        UNROLL_ALL for (int w = 0; w < wide; w++)
            words[w] = load(weights, w / 2 * pairs * PANEL_OUTPUTS + w % 2 * LANES, 0);
        UNROLL_ALL for (int r = 0; r < n; r++) {
            const vec one = all_bits(x + r * pairs + k);
            UNROLL_ALL for (int w = 0; w < wide; w++)
                total[r * wide + w] = add_product(words[w], one, total[r * wide + w], PAIRS);
        }
    }
    if (p->bias) UNROLL_MANY for (int i = 0; i < n * wide; i++) total[i] += load(p->bias, output + i % wide * LANES, 0);
    if (count == wide * LANES) {
        UNROLL_MANY for (int i = 0; i < n * wide; i++) store(y + i / wide * p->out, i % wide * LANES, total[i], 1);
        return;
    }
    for (int r = 0; r < n; r++) {
        uint16_t narrow[4 * LANES];
        for (int w = 0; w < wide; w++) store(narrow, w * LANES, total[r * wide + w], 1);
        memcpy(y + r * p->out, narrow, (size_t)(2 * count));
    }
}

/* Outputs of the rows from `row` to `end`, from the weights of one panel or of two. */
INLINE void many_panels(const packed_product *p, const int panels, int64_t row, int64_t end, int64_t output) {
    for (; row + TILE_ROWS <= end; row += TILE_ROWS) many_tile(p, TILE_ROWS, panels, row, output);
    for (; row + 2 <= end; row += 2) many_tile(p, 2, panels, row, output);
    if (row < end) many_tile(p, 1, panels, row, output);
}

/* One of as many parts of the rows as there are threads. */
static void many_part(void *what, int64_t part, int thread) {
    const packed_product *p = what;
    const int64_t tiles = (p->rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t first = tiles * part / p->threads * TILE_ROWS;
    const int64_t last = sooner(tiles * (part + 1) / p->threads * TILE_ROWS, p->rows);
    (void)thread;
    for (int64_t row = first; row < last; row += CACHED_ROWS) {
        const int64_t end = sooner(row + CACHED_ROWS, last);
        int64_t output = 0;
        for (; output + PANEL_OUTPUTS < p->out; output += 2 * PANEL_OUTPUTS) many_panels(p, 2, row, end, output);
        if (output < p->out) many_panels(p, 1, row, end, output);
    }
}

void cohort_many_rows(packed_product *p) { run(many_part, p, p->threads, (int)p->threads); }
