/* What a thread of attention.c works on: the table of keys and values, the tile of queries, and where their numbers come
 * from and go to.
 */
#include "tiles.h"

enum {
    QUERIES = HAS_PAIRS ? 32 : 16, /* a multiple of TILE */
    KEYS = 48,                     /* tokens, a multiple of LANES, whose scores the backward pass holds at a time: in the
                                      nearest cache */
};

typedef struct {
    const void *q, *k, *v, *prefix_k, *prefix_v; /* [T, A, D], twice [T, G, D], twice [X, G, D] */
    void *out;                                   /* [T, A, D]; read by the backward pass; float32 if there are blocks */
    float *lse;                                  /* [T, A] */
    const void *grad_out;                        /* NULL: forward */
    void *grad_q, *grad_k, *grad_v;
    float *grad_prefix_k, *grad_prefix_v; /* [slots, X, G, D], added to */
    const int64_t *sequences;             /* [S, 4]: first token, tokens, first token and tokens of its prefix */
    const int64_t *items;                 /* [items, 3]: first sequence, sequence after the last, slot */
    const int64_t *drawn_before;          /* [T + 1]: tokens before each that need an output; NULL: all need one */
    float *scratch;                       /* [threads, scratch_size] */
    int64_t item_count, kv_heads, group, width, padded, capacity, prefix_tokens, window, half, prefix_half,
        out_half, scratch_size, threads;
    float scaling;
} packed;

/* A thread's scratch memory. Keys and values are stored by token, [capacity, padded], and in the blocks of `score`; see
 * attention_pairs.c for words. */
typedef struct {
    shape of;
    float *rows;                                                /* values; backward: keys */
    float *key_blocks, *value_blocks, *grad_keys, *grad_values; /* the last three: backward only */
    float *q, *out, *grad, *q_words, *grad_words, *q_pairs, *grad_pairs;
    float *weights, *slopes, *weight_pairs, *slope_pairs;
    int64_t stride;     /* of weights and slopes, [QUERIES, stride] */
    int64_t first, end; /* the table holds these tokens of a prefix and a sequence after it */
    int joins;          /* whether there are other blocks */
    int pairs;          /* whether it holds words */
} table;

/* Numbers of a query's scores. */
static int64_t held(int64_t capacity, int64_t backward) { return backward ? KEYS : (capacity / KEYS + 2) * KEYS; }

/* Numbers of a table of tokens: whole blocks. */
static int64_t table_size(int64_t capacity, int64_t padded) { return (capacity / KEYS + 1) * KEYS * padded; }

/* Nothing is initialised. Numbers beyond a head's width or a sequence's tokens stay arbitrary, except beside a last one
 * in a word: they are multiplied but never read. */
static table laid_out(const packed *p, int thread) {
    const int64_t size = table_size(p->capacity, p->padded), tile = QUERIES * p->padded;
    float *at = p->scratch + thread * p->scratch_size;
    table t = {.of = {p->width, p->padded}, .stride = held(p->capacity, p->grad_out != 0), .end = INT64_MAX,
               .pairs = HAS_PAIRS && p->half};
    float **parts[] = {&t.rows, &t.key_blocks, &t.value_blocks, &t.grad_keys, &t.grad_values};
    for (int i = 0; i < (p->grad_out ? 5 : 2); i++) *parts[i] = at, at += size;
    t.q = at, t.out = t.q + tile, t.grad = t.out + tile, t.q_words = t.grad + tile;
    t.grad_words = t.q_words + tile / 2, t.q_pairs = t.grad_words + tile / 2, t.grad_pairs = t.q_pairs + tile / 2;
    t.weights = t.grad_pairs + tile / 2, t.slopes = t.weights + QUERIES * t.stride;
    t.weight_pairs = t.slopes + QUERIES * t.stride, t.slope_pairs = t.weight_pairs + QUERIES / 2 * t.stride;
    return t;
}

int64_t cohort_attention_scratch(int64_t capacity, int64_t padded, int64_t backward) {
    const int64_t tables = (backward ? 5 : 2) * table_size(capacity, padded);
    return tables + 5 * QUERIES * padded + 3 * QUERIES * held(capacity, backward);
}

/* Copy `count` tokens of one head, from `first` on, to the table's tokens from `position` on. */
static void lay_numbers(const packed *p, table *t, const void *keys, const void *values, int64_t first, int64_t count,
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

/* The table's tokens that a query sees: from .first to before .end; none if the query is padding. */
typedef struct {
    int64_t first, end;
} view;

/* Of the token `token` of a sequence. */
static view seen(const packed *p, const table *t, const int64_t *sequence, int64_t token) {
    const int64_t end = sequence[3] + token + 1, first = p->window ? later(0, end - p->window) : 0;
    return (view){later(0, sooner(first, t->end) - t->first), later(0, sooner(end, t->end) - t->first)};
}

/* Queries that are processed together: how many, and for each its token in the sequence and its index in [T, A]. */
typedef struct {
    int64_t count, token[QUERIES], at[QUERIES];
} query_tile;

/* From query `j` of a sequence on. */
static query_tile query_tile_of(const packed *p, const int64_t *sequence, int64_t head, int64_t j) {
    query_tile of = {.count = sooner(QUERIES, sequence[1] * p->group - j)};
    int64_t token = j / p->group, part = j % p->group;
    for (int64_t i = 0; i < of.count; i++) {
        of.token[i] = token, of.at[i] = ((sequence[0] + token) * p->kv_heads + head) * p->group + part;
        if (++part == p->group) part = 0, token++;
    }
    return of;
}

INLINE ivec within(view v, int64_t t) {
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    const ivec position = lane + (int32_t)t;
    return (position >= (int32_t)v.first) & (position < (int32_t)v.end);
}

static view seen_by(const packed *p, const table *t, const int64_t *sequence, const query_tile *of, int64_t i) {
    return i < of->count ? seen(p, t, sequence, of->token[i]) : (view){0, 0};
}

INLINE void copy_row(const void *from, int64_t at, const int half, int64_t width, void *to, int64_t to_at,
                     const int to_half) {
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES) store(to, to_at + d, load(from, at + d, half), to_half);
    for (; d < width; d++) store1(to, to_at + d, load1(from, at + d, half), to_half);
}

/* Load a tile's rows of [T, A, D], zeros beyond the last query. */
static void load_tile(const packed *p, const query_tile *of, const void *from, const int half, float *to) {
    memset(to, 0, (size_t)(QUERIES * p->padded) * sizeof *to);
    for (int64_t i = 0; i < of->count; i++)
        if (half) copy_row(from, of->at[i] * p->width, 1, p->width, to, i * p->padded, 0);
        else copy_row(from, of->at[i] * p->width, 0, p->width, to, i * p->padded, 0);
}

/* To an output or its like. */
static void put_tile(const packed *p, const query_tile *of, const float *from, void *to) {
    for (int64_t i = 0; i < of->count; i++)
        if (p->out_half) copy_row(from, i * p->padded, 0, p->width, to, of->at[i] * p->width, 1);
        else copy_row(from, i * p->padded, 0, p->width, to, of->at[i] * p->width, 0);
}

/* Whether a tile has a query whose output is needed. */
static int needed(const packed *p, const int64_t *sequence, int64_t j) {
    const int64_t last = sooner(j + QUERIES, sequence[1] * p->group) - 1, *drawn = p->drawn_before;
    return !drawn || drawn[sequence[0] + last / p->group + 1] > drawn[sequence[0] + j / p->group];
}

/* Store the gradients of `count` tokens from `first` on, which are the table's from `position` on; they are free then. */
static void put_own(const packed *p, table *t, int64_t first, int64_t count, int64_t head, int64_t position) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t to = ((first + i) * p->kv_heads + head) * p->width, from = (position + i) * p->padded;
        if (p->half) {
            copy_row(t->grad_keys, from, 0, p->width, p->grad_k, to, 1);
            copy_row(t->grad_values, from, 0, p->width, p->grad_v, to, 1);
        } else {
            copy_row(t->grad_keys, from, 0, p->width, p->grad_k, to, 0);
            copy_row(t->grad_values, from, 0, p->width, p->grad_v, to, 0);
        }
    }
    const size_t size = (size_t)(count * p->padded) * sizeof *t->grad_keys;
    memset(t->grad_keys + position * p->padded, 0, size), memset(t->grad_values + position * p->padded, 0, size);
}

/* Add the gradients of the table's first `count` tokens to those of a prefix from its token `first` on; they are free
 * then. */
static void put_prefix(const packed *p, table *t, int64_t first, int64_t count, int64_t head, int64_t slot) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t to = ((slot * p->prefix_tokens + first + i) * p->kv_heads + head) * p->width, from = i * p->padded;
        for (int64_t d = 0; d < p->width; d++)
            p->grad_prefix_k[to + d] += t->grad_keys[from + d], p->grad_prefix_v[to + d] += t->grad_values[from + d];
    }
    const size_t size = (size_t)(count * p->padded) * sizeof *t->grad_keys;
    memset(t->grad_keys, 0, size), memset(t->grad_values, 0, size);
}

/* What blocks are joined with first. */
static void clear(const packed *p, const int64_t *sequence, int64_t head) {
    for (int64_t token = 0; token < sequence[1]; token++) {
        const int64_t at = ((sequence[0] + token) * p->kv_heads + head) * p->group;
        float *to = (float *)(p->grad_out ? p->grad_q : p->out) + at * p->width;
        memset(to, 0, (size_t)(p->group * p->width) * sizeof *to);
        for (int64_t i = 0; i < p->group && !p->grad_out; i++) p->lse[at + i] = -INFINITY;
    }
}

/* What a query's weights and slopes are computed from. */
typedef struct {
    view seen;
    float top, delta; /* top: what its scores are less than; backward: their lse, and the output's product with its gradient */
} query;

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

/* Store the outputs of a tile's queries, whose weights have the sums `sums` beside `tops`. */
static void put_forward(const packed *p, table *t, const query_tile *of, const float *tops, const float *sums) {
    for (int64_t i = 0; i < of->count; i++) {
        float *out = t->out + i * p->padded;
        if (t->joins) {
            join(p, of->at[i], tops[i], sums[i], out);
            continue;
        }
        p->lse[of->at[i]] = tops[i] + logf(sums[i]);
        for (int64_t d = 0; d < p->padded; d += LANES) store(out, d, load(out, d, 0) / sums[i], 0);
    }
    put_tile(p, of, t->out, p->out);
}
