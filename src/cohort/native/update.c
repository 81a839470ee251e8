/* What an update computes between its matrix products, forward and backward, on a CPU.
 *
 * Each function reads its numbers once, where a chain of tensor operations would write every step to memory. Numbers are
 * float32, or bfloat16 if a `_half` flag is set.
 *
 * Axis letters: T tokens, C tokens of a chunk, V vocabulary, D head dimension.
 */
#include "vectors.h"

#define EACH(i, width) \
    int64_t i = 0;     \
    for (; i + LANES <= (width); i += LANES)
#define REST(i, width) for (; i < (width); i++)

/* ---- norms: sum = x + update; scale = 1 / sqrt(mean(sum^2) + eps); out = sum * scale * factor */

typedef struct {
    const void *x, *update; /* update NULL: no update */
    const float *factor;
    float *sum, *scale; /* sum NULL: not stored */
    void *out;
    int64_t rows, width, x_half, update_half, out_half, threads;
    float eps;
} norm;

static void norm_row(void *what, int64_t row, int thread) {
    const norm *n = what;
    const int64_t width = n->width, at = row * width;
    float buffer[n->sum ? 1 : width], *sum = n->sum ? n->sum + at : buffer;
    (void)thread;
    {
        EACH(i, width) {
            vec x = load(n->x, at + i, (int)n->x_half);
            if (n->update) x += load(n->update, at + i, (int)n->update_half);
            store(sum, i, x, 0);
        }
        REST(i, width) {
            sum[i] = load1(n->x, at + i, (int)n->x_half);
            if (n->update) sum[i] += load1(n->update, at + i, (int)n->update_half);
        }
    }
    const float scale = n->scale[row] = inverse_rms(sum, width, n->eps);
    EACH(i, width) store(n->out, at + i, load(sum, i, 0) * scale * load(n->factor, i, 0), (int)n->out_half);
    REST(i, width) store1(n->out, at + i, sum[i] * scale * n->factor[i], (int)n->out_half);
}

void cohort_norm(norm *n) { run(norm_row, n, n->rows, (int)n->threads); }

/* With u = x scale and g = grad_out factor:
 *     grad_x = scale (g - u mean(g u)) + grad_sum        grad_factor = sum over rows of grad_out u */
typedef struct {
    const void *x, *grad_out;
    const float *factor, *scale, *grad_sum; /* grad_sum NULL: 0 */
    void *grad_x, *grad_update;             /* grad_update NULL: not stored; grad_x in bfloat16 */
    float *grad_factor;                     /* [threads, width], summed over each thread's rows; NULL: none */
    int64_t rows, width, x_half, grad_half, threads;
} norm_grad;

static void norm_grad_row(void *what, int64_t row, int thread) {
    const norm_grad *n = what;
    const int64_t width = n->width, at = row * width;
    const int x_half = (int)n->x_half, grad_half = (int)n->grad_half;
    const float scale = n->scale[row];
    float *grad_factor = n->grad_factor ? n->grad_factor + thread * width : 0;
    vec products = {0};
    float mean = 0;
    {
        EACH(i, width) {
            const vec u = load(n->x, at + i, x_half) * scale, grad = load(n->grad_out, at + i, grad_half), gu = grad * u;
            products = multiply_add(gu, load(n->factor, i, 0), products);
            if (grad_factor) store(grad_factor, i, load(grad_factor, i, 0) + gu, 0);
        }
        REST(i, width) {
            const float gu = load1(n->grad_out, at + i, grad_half) * load1(n->x, at + i, x_half) * scale;
            mean += gu * n->factor[i];
            if (grad_factor) grad_factor[i] += gu;
        }
    }
    mean = (mean + sum(products)) / (float)width;
    EACH(i, width) {
        const vec u = load(n->x, at + i, x_half) * scale;
        vec grad = (load(n->grad_out, at + i, grad_half) * load(n->factor, i, 0) - u * mean) * scale;
        if (n->grad_sum) grad += load(n->grad_sum, at + i, 0);
        store(n->grad_x, at + i, grad, x_half);
        if (n->grad_update) store(n->grad_update, at + i, grad, 1);
    }
    REST(i, width) {
        const float u = load1(n->x, at + i, x_half) * scale;
        float grad = (load1(n->grad_out, at + i, grad_half) * n->factor[i] - u * mean) * scale;
        if (n->grad_sum) grad += n->grad_sum[at + i];
        store1(n->grad_x, at + i, grad, x_half);
        if (n->grad_update) store1(n->grad_update, at + i, grad, 1);
    }
}

void cohort_norm_grad(norm_grad *n) { run(norm_grad_row, n, n->rows, (int)n->threads); }

/* ---- rotation of the first `rotated` numbers of each head: [x1, x2] -> [x1 cos - x2 sin, x2 cos + x1 sin] with their
 * halves, or with neighbours; or its transpose */

typedef struct {
    const void *x;
    const float *cos, *sin; /* [T, rotated]; the second half is for the second numbers */
    void *out;
    int64_t rows, heads, width, stride, rotated, neighbours, x_half, out_half, transposed, threads; /* stride: of rows of x */
} rotation;

static void rotate_row(void *what, int64_t row, int thread) {
    const rotation *r = what;
    const int64_t width = r->width, middle = r->rotated / 2;
    const int x_half = (int)r->x_half, out_half = (int)r->out_half;
    const float *cos = r->cos + row * r->rotated, *sin = r->sin + row * r->rotated;
    /* The sines of the first and of the second half. */
    const float *in_first = r->transposed ? sin + middle : sin, *in_second = r->transposed ? sin : sin + middle;
    const float sign = r->transposed ? -1.0f : 1.0f;
    (void)thread;
    for (int64_t head = 0; head < r->heads; head++) {
        const int64_t at = (row * r->heads + head) * width, from = row * r->stride + head * width;
        int64_t i = 0;
        if (!r->neighbours)
            for (; i + LANES <= middle; i += LANES) {
                const vec first = load(r->x, from + i, x_half), second = load(r->x, from + middle + i, x_half);
                store(r->out, at + i, first * load(cos, i, 0) - second * load(in_first, i, 0) * sign, out_half);
                store(r->out, at + middle + i,
                      second * load(cos, middle + i, 0) + first * load(in_second, i, 0) * sign, out_half);
            }
        const int64_t step = r->neighbours ? 2 : 1, apart = r->neighbours ? 1 : middle;
        for (; i < middle; i++) {
            const int64_t one = i * step, other = one + apart;
            const float first = load1(r->x, from + one, x_half), second = load1(r->x, from + other, x_half);
            store1(r->out, at + one, first * cos[i] - second * in_first[i] * sign, out_half);
            store1(r->out, at + other, second * cos[middle + i] + first * in_second[i] * sign, out_half);
        }
        for (i = r->rotated; i < width; i++) store1(r->out, at + i, load1(r->x, from + i, x_half), out_half);
    }
}

void cohort_rotate(rotation *r) { run(rotate_row, r, r->rows, (int)r->threads); }

/* ---- the MLP's activation: out = act(gate) up, with act(x) = x sigmoid(t(x)); SiLU: t = x; GELU's tanh form: a cubic */

typedef struct {
    const void *gate, *up, *grad_out; /* [rows, width]; grad_out NULL: forward */
    void *out, *grad_gate, *grad_up;
    int64_t rows, width, stride, half, gelu, threads; /* stride: of rows of gate and up, and of their gradients */
} activation;

/* `count` numbers from `i` on, at most LANES. */
INLINE vec some(const void *from, int64_t i, int64_t count, const int half) {
    if (count == LANES) return load(from, i, half);
    vec x = {0};
    for (int64_t lane = 0; lane < count; lane++) x[lane] = load1(from, i + lane, half);
    return x;
}

INLINE void put_some(void *to, int64_t i, int64_t count, vec x, const int half) {
    if (count == LANES) store(to, i, x, half);
    else
        for (int64_t lane = 0; lane < count; lane++) store1(to, i + lane, x[lane], half);
}

/* `count` numbers from `i` on, which are those from `at` on in rows that lie `stride` apart. */
INLINE void activation_at(const activation *a, int64_t i, int64_t at, int64_t count, const int half, const int gelu) {
    const vec x = some(a->gate, at, count, half), up = some(a->up, at, count, half);
    const vec s = 1.0f / (1.0f + exponential(-gate_slope(x, gelu)));
    if (!a->grad_out) {
        put_some(a->out, i, count, x * s * up, half);
        return;
    }
    const vec grad = some(a->grad_out, i, count, half);
    const vec steep = gelu ? GELU_SLOPE * (1.0f + 3.0f * GELU_CUBIC * x * x) : all(1.0f);
    /* Where s is 1 or 0, x may be infinite. */
    const vec rest = s * (1.0f - s), bend = pick(rest == 0.0f, (vec){0}, x * steep * rest);
    put_some(a->grad_up, at, count, grad * x * s, half);
    put_some(a->grad_gate, at, count, grad * up * (s + bend), half);
}

INLINE void gate_numbers(const activation *a, int64_t row, const int half, const int gelu) {
    const int64_t width = a->width, first = row * width, from = row * a->stride;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) activation_at(a, first + i, from + i, LANES, half, gelu);
    if (i < width) activation_at(a, first + i, from + i, width - i, half, gelu);
}

static void gate_row(void *what, int64_t row, int thread) {
    const activation *a = what;
    (void)thread;
    if (a->half) a->gelu ? gate_numbers(a, row, 1, 1) : gate_numbers(a, row, 1, 0);
    else a->gelu ? gate_numbers(a, row, 0, 1) : gate_numbers(a, row, 0, 0);
}

void cohort_gate(activation *a) { run(gate_row, a, a->rows, (int)a->threads); }

/* ---- gradients of passes: total += part */

typedef struct {
    float *total;
    const void *part;
    int64_t count, part_half, threads;
} addition;

#define STRETCH 4096 /* numbers that a thread adds at a time */

static void add_stretch(void *what, int64_t number, int thread) {
    const addition *a = what;
    const int64_t from = number * STRETCH, to = sooner(from + STRETCH, a->count);
    (void)thread;
    int64_t i = from;
    for (; i + LANES <= to; i += LANES) store(a->total, i, load(a->total, i, 0) + load(a->part, i, (int)a->part_half), 0);
    for (; i < to; i++) a->total[i] += load1(a->part, i, (int)a->part_half);
}

void cohort_add(addition *a) { run(add_stretch, a, (a->count + STRETCH - 1) / STRETCH, (int)a->threads); }

/* ---- the head: z = factor logits; p = softmax(z)
 *
 *     logp = log p_target    entropy = -sum_v p_v log p_v    collision = sum_v p_v^2 */

typedef struct {
    void *logits; /* [C, V]; overwritten with their gradient */
    const int64_t *targets;
    float *logps, *entropies, *collisions; /* NULL for the gradient */
    float *tops, *sums;                    /* max z and sum_v exp(z_v - max z) of each row */
    const float *grads;                    /* of the log-probs */
    int64_t rows, vocabulary, half, threads;
    float factor;
} head;

#define BLOCK 4096 /* numbers summed in float32 before the sum is added in float64: bounds the number of roundings */

INLINE void statistics_of(const head *h, int64_t row, const int half) {
    const int64_t size = h->vocabulary, at = row * size;
    vec best = all(-INFINITY);
    float top = -INFINITY;
    {
        EACH(i, size) {
            const vec z = load(h->logits, at + i, half) * h->factor;
            best = pick(z > best, z, best);
        }
        REST(i, size) {
            const float z = load1(h->logits, at + i, half) * h->factor;
            top = z > top ? z : top;
        }
    }
    const float inside = highest(best);
    top = inside > top ? inside : top;
    double total = 0, weighted = 0, squared = 0;
    for (int64_t from = 0; from < size; from += BLOCK) {
        const int64_t to = sooner(from + BLOCK, size);
        vec total_v = {0}, weighted_v = {0}, squared_v = {0};
        int64_t i = from;
        for (; i < to; i += LANES) {
            vec z;
            if (i + LANES <= to) z = load(h->logits, at + i, half) * h->factor;
            else
                for (int lane = 0; lane < LANES; lane++)
                    z[lane] = i + lane < to ? load1(h->logits, at + i + lane, half) * h->factor : -INFINITY;
            const vec below = z - top, e = exponential(below);
            total_v += e;
            squared_v = multiply_add(e, e, squared_v);
            weighted_v += pick(e == 0.0f, (vec){0}, e * below); /* impossible tokens add 0 */
        }
        total += sum(total_v), weighted += sum(weighted_v), squared += sum(squared_v);
    }
    const double log_total = log(total);
    const float chosen = load1(h->logits, at + h->targets[row], half) * h->factor;
    h->tops[row] = top, h->sums[row] = (float)total;
    h->logps[row] = (float)((double)(chosen - top) - log_total);
    h->entropies[row] = (float)(log_total - weighted / total);
    h->collisions[row] = (float)(squared / (total * total));
}

INLINE void gradient_of(const head *h, int64_t row, const int half) {
    const int64_t size = h->vocabulary, at = row * size;
    const float top = h->tops[row], grad = h->grads[row] * h->factor, each = -grad / h->sums[row];
    const float chosen = load1(h->logits, at + h->targets[row], half) * h->factor;
    EACH(i, size) {
        const vec z = load(h->logits, at + i, half) * h->factor;
        store(h->logits, at + i, exponential(z - top) * each, half);
    }
    REST(i, size) {
        const float z = load1(h->logits, at + i, half) * h->factor;
        store1(h->logits, at + i, exponential(all(z - top))[0] * each, half);
    }
    store1(h->logits, at + h->targets[row], grad + exponential(all(chosen - top))[0] * each, half);
}

static void head_row(void *what, int64_t row, int thread) {
    const head *h = what;
    (void)thread;
    if (h->grads) h->half ? gradient_of(h, row, 1) : gradient_of(h, row, 0);
    else h->half ? statistics_of(h, row, 1) : statistics_of(h, row, 0);
}

void cohort_head(head *h) { run(head_row, h, h->rows, (int)h->threads); }
