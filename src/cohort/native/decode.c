/* What a decode step of the lean sampler computes between its matrix products, on a CPU.
 *
 * The sums of a row run over its keys in order, in vectors of LANES numbers, whatever the other rows and the threads: a
 * row's results are bit-equal in every batch. Sums are float32. A text is read as rows of one slot, a row for each of
 * its tokens: with the bits of tokens that are read one after the other.
 *
 * The head dimension D is stored as `padded`, the next multiple of LANES. A slot stores the tokens of a row or a prompt:
 * values by token, [tokens, padded]; keys in blocks, see tiles.h.
 */
#include "tiles.h"

/* ---- attention */

/* The arguments of a step that all layers share. */
typedef struct {
    int64_t kv_heads, group, width, padded; /* group: query heads of each key-value head; width: D */
    int64_t own_tokens, prompt_tokens;            /* capacity of a slot */
    int64_t text;                                 /* rows that are tokens of texts; 0: each row has one token to read */
    const int32_t *order;                         /* rows; those of one prompt are neighbours */
    const int32_t *items;                         /* [items, 2]: start and count in `order` of rows of one prompt, and
                                                   * with `text` of successive rows of one slot */
    int64_t item_count;
    const int32_t *row_slots, *row_prompts, *row_lengths; /* tokens count the new one */
    const int32_t *prompt_lengths;                /* of each prompt slot */
    float *scratch;                               /* [threads, scratch_size] */
    int64_t scratch_size;
    int64_t half, threads;
    float scaling, cap; /* cap 0: no cap */
} step;

/* One layer. Rows of q, k, v and out are `*_stride` numbers apart. */
typedef struct {
    const void *q, *k, *v;
    void *out;
    int64_t q_stride, k_stride, v_stride, out_stride;
    int64_t q_step;               /* numbers from one head's query to the next */
    const float *q_norm, *k_norm; /* factors of query-key norms; NULL: no norms */
    const float *cos, *sin;       /* [positions, rotated]; NULL: no rotation */
    const float *sinks;           /* a score of each query head, without a value; NULL: none */
    int64_t rotated, neighbours;  /* the first `rotated` numbers, halves or neighbours together */
    int64_t norm_last;            /* whether the norms follow the rotation */
    void *own_k, *own_v, *prompt_k, *prompt_v;
    int64_t window; /* a row sees this many tokens, the new one included; 0: all */
    float q_eps, k_eps;
} layer;

INLINE void normalise(float *x, int64_t width, const float *norm, float eps) {
    const float scale = inverse_rms(x, width, eps);
    for (int64_t d = 0; d < width; d++) x[d] = x[d] * scale * norm[d];
}

/* A head of a row, normalised and rotated: [x1, x2] -> [x1 cos - x2 sin, x2 cos + x1 sin]. */
INLINE void prepare(const void *from, int64_t at, const step *s, const layer *l, const float *norm, float eps,
                    int64_t position, float *x, const int half) {
    const int64_t width = s->width, middle = l->rotated / 2;
    for (int64_t d = 0; d < width; d++) x[d] = load1(from, at + d, half);
    if (norm && !l->norm_last) normalise(x, width, norm, eps);
    if (l->cos) {
        const float *cos = l->cos + position * l->rotated, *sin = l->sin + position * l->rotated;
        for (int64_t d = 0; d < middle; d++) {
            const int64_t one = l->neighbours ? 2 * d : d, other = l->neighbours ? one + 1 : d + middle;
            const float first = x[one], second = x[other];
            x[one] = first * cos[d] - second * sin[d];
            x[other] = second * cos[d + middle] + first * sin[d + middle];
        }
    }
    if (norm && l->norm_last) normalise(x, width, norm, eps);
}

/* Scale and cap the scores of the tokens from `from` to `end`, and set the others of the blocks from `least` to `most`
 * to -inf. Returns the maximum of `top` and the scores. */
INLINE vec settle(const step *s, float *scores, int64_t least, int64_t from, int64_t end, int64_t most, vec top) {
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int64_t t = least / LANES * LANES; t < most; t += LANES) {
        vec x = load(scores, t, 0) * s->scaling;
        if (s->cap > 0) x = tangent(x / s->cap) * s->cap;
        const ivec position = lane + (int32_t)t;
        x = pick((position >= (int32_t)from) & (position < (int32_t)end), x, all(-INFINITY));
        store(scores, t, x, 0);
        top = pick(x > top, x, top);
    }
    return top;
}

INLINE vec exponentials(float *scores, int64_t least, int64_t end, float top, vec total) {
    for (int64_t t = least / LANES * LANES; t < end; t += LANES) {
        const vec x = exponential(load(scores, t, 0) - top);
        store(scores, t, x, 0);
        total += x;
    }
    return total;
}


/* The address of a head's keys or values in a row's slot and in its prompt's slot. */
INLINE char *own_slot(const step *s, void *memory, int32_t row, int64_t head, const int half) {
    return (char *)memory + (s->row_slots[row] * s->kv_heads + head) * s->own_tokens * s->padded * (half ? 2 : 4);
}

INLINE const char *prompt_slot(const step *s, const void *memory, int32_t row, int64_t head, const int half) {
    return (const char *)memory +
           (s->row_prompts[row] * s->kv_heads + head) * s->prompt_tokens * s->padded * (half ? 2 : 4);
}

/* Prefetch the start of a row: the processor predicts accesses within a row, but not the next row. */
INLINE void fetch(const char *from, int64_t bytes) {
    for (int64_t i = 0; i < sooner(bytes, 8192); i += 64) __builtin_prefetch(from + i);
}

/* Store a row's new key and value in its slot. */
INLINE void append(const step *s, const layer *l, int32_t row, int64_t head, const int half) {
    const int64_t token = s->row_lengths[row] - 1, position = s->prompt_lengths[s->row_prompts[row]] + token;
    float key[s->padded];
    char *keys = own_slot(s, l->own_k, row, head, half), *values = own_slot(s, l->own_v, row, head, half);
    prepare(l->k, row * l->k_stride + head * s->width, s, l, l->k_norm, l->k_eps, position, key, half);
    const int64_t first = token / LANES * s->padded * LANES + token % LANES, size = half ? 2 : 4;
    for (int64_t d = 0; d < s->width; d++) store1(keys, first + d * LANES, key[d], half);
    memcpy(values + token * s->padded * size, (const char *)l->v + (row * l->v_stride + head * s->width) * size,
           (size_t)(s->width * size));
}

/* Attend for one item, for one key-value head; unless they are stored already, store the rows' new keys and values
 * first. In `scores` of a query, the prompt's tokens come before the row's own. */
INLINE void attend_item(const step *s, const layer *l, const int32_t *rows, int64_t count, int64_t head, float *scratch,
                        const int half) {
    const shape of = {s->width, s->padded};
    const int64_t group = s->group, padded = s->padded, queries = count * group;
    const int64_t own_start = up(s->prompt_tokens) * LANES, stride = own_start + up(s->own_tokens) * LANES;
    const int64_t length = s->prompt_lengths[s->row_prompts[rows[0]]], reach = l->window ? l->window : INT32_MAX;
    float *q = scratch, *out = q + queries * padded, *scores = out + queries * padded, sums[queries];
    /* The first token of the prompt that any row sees, and with `text` those of the slot that any row sees. */
    int64_t least = length, own_least = 0, own_most = 0;
    memset(out, 0, (size_t)(queries * padded) * sizeof *out);
    for (int64_t i = 0; i < count; i++) {
        const int64_t own = s->row_lengths[rows[i]], position = length + own - 1;
        for (int64_t g = 0; g < group; g++)
            prepare(l->q, rows[i] * l->q_stride + (head * group + g) * l->q_step, s, l, l->q_norm, l->q_eps, position,
                    q + (i * group + g) * padded, half);
        least = sooner(least, later(0, length + own - reach));
        if (!s->text || !i) fetch(own_slot(s, l->own_k, rows[i], head, half), own * padded * (half ? 2 : 4));
    }
    score(queries, q, prompt_slot(s, l->prompt_k, rows[0], head, half), &of, least / LANES, up(length), scores, stride,
          half);
    if (s->text) {
        own_least = later(0, s->row_lengths[rows[0]] - reach), own_most = s->row_lengths[rows[count - 1]];
        score(queries, q, own_slot(s, l->own_k, rows[0], head, half), &of, own_least / LANES, up(own_most),
              scores + own_start, stride, half);
    }
    for (int64_t i = 0; i < count; i++) {
        const int64_t own = s->row_lengths[rows[i]], first = i * group;
        const int64_t seen = later(0, length + own - reach), own_seen = later(0, own - reach);
        if (!s->text) {
            own_least = own_seen, own_most = own;
            append(s, l, rows[i], head, half);
            fetch(own_slot(s, l->own_v, rows[i], head, half), (own - 1) * padded * (half ? 2 : 4));
            score(group, q + first * padded, own_slot(s, l->own_k, rows[i], head, half), &of, own_seen / LANES, up(own),
                  scores + first * stride + own_start, stride, half);
        }
        for (int64_t query = first; query < first + group; query++) {
            float *of_prompt = scores + query * stride, *of_own = of_prompt + own_start;
            vec top = settle(s, of_prompt, least, seen, length, length, all(-INFINITY));
            const float sink = l->sinks ? l->sinks[head * group + query - first] : -INFINITY;
            const float most = fmaxf(sink, highest(settle(s, of_own, own_least, own_seen, own, own_most, top)));
            const vec total = exponentials(of_prompt, least, length, most, (vec){0});
            sums[query] = sum(exponentials(of_own, own_least, own_most, most, total)) + expf(sink - most);
        }
    }
    mix(queries, scores, stride, prompt_slot(s, l->prompt_v, rows[0], head, half), &of, least, length, out, half);
    if (s->text)
        mix(queries, scores + own_start, stride, own_slot(s, l->own_v, rows[0], head, half), &of, own_least, own_most,
            out, half);
    for (int64_t i = 0; i < count; i++) {
        const int64_t own = s->row_lengths[rows[i]], first = i * group;
        if (!s->text) mix(group, scores + first * stride + own_start, stride, own_slot(s, l->own_v, rows[i], head, half), &of,
            later(0, own - reach), own, out + first * padded, half);
        for (int64_t g = 0; g < group; g++)
            for (int64_t d = 0; d < s->width; d++)
                store1(l->out, rows[i] * l->out_stride + (head * group + g) * s->width + d,
                       out[(first + g) * padded + d] / sums[first + g], half);
    }
}

typedef struct {
    const step *s;
    const layer *l;
} attention;

static void attend_one(void *what, int64_t number, int thread) {
    const attention *a = what;
    const int32_t *item = a->s->items + number % a->s->item_count * 2;
    const int32_t *rows = a->s->order + item[0];
    const int64_t head = number / a->s->item_count;
    float *scratch = a->s->scratch + thread * a->s->scratch_size;
    if (a->s->half) attend_item(a->s, a->l, rows, item[1], head, scratch, 1);
    else attend_item(a->s, a->l, rows, item[1], head, scratch, 0);
}

static void append_one(void *what, int64_t number, int thread) {
    const attention *a = what;
    const int32_t row = (int32_t)(number % a->s->text);
    const int64_t head = number / a->s->text;
    (void)thread;
    if (a->s->half) append(a->s, a->l, row, head, 1);
    else append(a->s, a->l, row, head, 0);
}

void cohort_attend(const step *s, const layer *l) {
    attention a = {s, l};
    if (s->text) run(append_one, &a, s->text * s->kv_heads, (int)s->threads);
    run(attend_one, &a, s->item_count * s->kv_heads, (int)s->threads);
}

/* ---- between the products */

/* x [rows, width] += update * multiplier, normalised first if `after` is given; out = norm(x) * factor. */
typedef struct {
    float *x;
    const void *update;          /* NULL: no update */
    const float *after, *factor; /* factor NULL: out = x */
    void *out;
    int64_t rows, width, half, threads, centred; /* centred: norm(x - mean(x)) */
    float after_eps, eps, multiplier;
} residual;

INLINE void add_norm_row(const residual *r, int64_t row, const int half) {
    const int64_t width = r->width, at = row * width;
    float *x = r->x + at, shifted[r->centred ? width : 1];
    if (r->update && !r->after)
        for (int64_t i = 0; i < width; i++) x[i] += load1(r->update, at + i, half) * r->multiplier;
    if (r->update && r->after) {
        float update[width];
        for (int64_t i = 0; i < width; i++) update[i] = load1(r->update, at + i, half);
        const float scale = inverse_rms(update, width, r->after_eps);
        for (int64_t i = 0; i < width; i++) x[i] += update[i] * scale * r->after[i] * r->multiplier;
    }
    if (!r->factor) {
        for (int64_t i = 0; i < width; i++) store1(r->out, at + i, x[i], half);
        return;
    }
    if (r->centred) {
        double total = 0;
        for (int64_t i = 0; i < width; i++) total += x[i];
        for (int64_t i = 0; i < width; i++) shifted[i] = x[i] - (float)(total / (double)width);
        x = shifted;
    }
    const float scale = inverse_rms(x, width, r->eps);
    for (int64_t i = 0; i < width; i++) store1(r->out, at + i, x[i] * scale * r->factor[i], half);
}

static void add_norm_one(void *what, int64_t row, int thread) {
    const residual *r = what;
    (void)thread;
    if (r->half) add_norm_row(r, row, 1);
    else add_norm_row(r, row, 0);
}

void cohort_add_norm(residual *r) { run(add_norm_one, r, r->rows, (int)r->threads); }

/* out [rows, width] = activation(gate) * up. Rows of gate and up are `*_stride` numbers apart. */
typedef struct {
    const void *gate, *up;
    void *out;
    int64_t rows, width, gate_stride, up_stride, half, gelu, threads;
} gated;

INLINE vec activated(vec x, int gelu) {
    return x / (1.0f + exponential(-gate_slope(x, gelu)));
}

INLINE void activate_row(const gated *g, int64_t row, const int half, const int gelu) {
    const int64_t size = half ? 2 : 4;
    const char *gate = (const char *)g->gate + row * g->gate_stride * size;
    const char *other = (const char *)g->up + row * g->up_stride * size;
    char *out = (char *)g->out + row * g->width * size;
    int64_t i = 0;
    for (; i + LANES <= g->width; i += LANES)
        store(out, i, activated(load(gate, i, half), gelu) * load(other, i, half), half);
    for (; i < g->width; i++)
        store1(out, i, activated(all(load1(gate, i, half)), gelu)[0] * load1(other, i, half), half);
}

static void activate_one(void *what, int64_t row, int thread) {
    const gated *g = what;
    (void)thread;
    if (g->half) g->gelu ? activate_row(g, row, 1, 1) : activate_row(g, row, 1, 0);
    else g->gelu ? activate_row(g, row, 0, 1) : activate_row(g, row, 0, 0);
}

void cohort_activate(gated *g) { run(activate_one, g, g->rows, (int)g->threads); }
