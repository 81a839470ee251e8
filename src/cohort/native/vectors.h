/* Shared by the kernels: vectors, threads, loads and stores, and functions of vectors.
 *
 * All sums are float32 unless noted.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Fused multiply-adds are explicit, by multiply_add: chosen by the compiler (-ffp-contract) they would depend on the
 * surrounding loop, and results on how many queries are computed together. */
#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#define FUSED(a, b, c) _mm512_fmadd_ps(a, b, c)
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define LANES 8
#define FUSED(a, b, c) _mm256_fmadd_ps(a, b, c)
#elif defined(__aarch64__)
#include <arm_neon.h>
#define LANES 4
#define FUSED(a, b, c) vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b))
#else
#define LANES 4
#define FUSED(a, b, c) ((a) * (b) + (c))
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define UNROLL_ALL _Pragma("GCC unroll 16")
#define UNROLL_MANY _Pragma("GCC unroll 32")

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));

/* The kernels run on torch's threads: Python looks up the functions of its OpenMP runtime in the process, so that no
 * second runtime with a second pool of spinning threads is loaded. */
typedef void parallel_fn(void (*)(void *), void *, unsigned, unsigned);
typedef int thread_fn(void);
static parallel_fn *run_parallel;
static thread_fn *thread_number, *thread_count;

void cohort_set_threads(parallel_fn *parallel, thread_fn *number, thread_fn *count) {
    run_parallel = parallel, thread_number = number, thread_count = count;
}

int cohort_lanes(void) { return LANES; }

/* Whether products in bfloat16 are those of the processor's units for it. */
#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif
int cohort_has_pairs(void) { return HAS_PAIRS; }

typedef struct {
    void (*work)(void *what, int64_t item, int thread);
    void *what;
    int64_t items;
    int threads;
} share;

/* A thread's share is a range of neighbouring items, which read the same memory. The runtime may provide fewer threads
 * than requested. */
static void run_share(void *pointer) {
    const share *s = pointer;
    const int thread = s->threads > 1 ? thread_number() : 0, count = s->threads > 1 ? thread_count() : 1;
    const int64_t end = s->items * (thread + 1) / count;
    for (int64_t item = s->items * thread / count; item < end; item++) s->work(s->what, item, thread);
}

static void run(void (*work)(void *, int64_t, int), void *what, int64_t items, int threads) {
    share s = {work, what, items, threads < 1 ? 1 : threads};
    if (s.threads > 1) run_parallel(run_share, &s, (unsigned)s.threads, 0);
    else run_share(&s);
}

/* ---- loads and stores: float32, or bfloat16 if `half` (a constant wherever these are inlined) */

INLINE vec load(const void *from, int64_t index, const int half) {
    if (half == 1) {
        hvec bits;
        memcpy(&bits, (const uint16_t *)from + index, sizeof bits);
#if defined(__AVX512F__) /* gcc would widen two halves */
        return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
#else
        return (vec)(__builtin_convertvector(bits, uvec) << 16);
#endif
    }
    vec x;
    memcpy(&x, (const float *)from + index, sizeof x);
    return x;
}

INLINE float load1(const void *from, int64_t index, const int half) {
    if (half != 1) return ((const float *)from)[index];
    const uint32_t bits = (uint32_t)((const uint16_t *)from)[index] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Rounds to nearest, ties to even, as torch does; NaN stays NaN. Denormal numbers may become 0 in bfloat16. */
INLINE void store(void *to, int64_t index, vec x, const int half) {
    if (half) {
#if HAS_PAIRS
        const __m256i narrow = (__m256i)_mm512_cvtneps_pbh((__m512)x);
#else
        const uvec bits = (uvec)x, whole = (uvec)(x == x);
        const uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        const hvec narrow = __builtin_convertvector((rounded & whole) | (~whole & 0x7fc0), hvec);
#endif
        memcpy((uint16_t *)to + index, &narrow, sizeof narrow);
    } else memcpy((float *)to + index, &x, sizeof x);
}

INLINE void store1(void *to, int64_t index, float x, const int half) {
    if (!half) {
        ((float *)to)[index] = x;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    ((uint16_t *)to)[index] = x == x ? (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : 0x7fc0;
}

/* ---- functions of vectors */

INLINE int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t sooner(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec multiply_add(vec a, vec b, vec c) { return (vec)FUSED(a, b, c); }
INLINE vec pick(ivec where, vec a, vec b) { return (vec)((where & (ivec)a) | (~where & (ivec)b)); }

INLINE float sum(vec x) {
    float total[LANES];
    memcpy(total, &x, sizeof total);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) total[i] += total[i + width];
    return total[0];
}

INLINE float highest(vec x) {
    float top = x[0];
    for (int i = 1; i < LANES; i++) top = x[i] > top ? x[i] : top;
    return top;
}

/* ---- words of two bfloat16 numbers, which the processor may multiply and add at once: the first is the lower half */

#define PAIRS 2 /* as `half` */

/* One number of 32 bits, whatever it is, in all lanes. */
INLINE vec all_bits(const float *from) {
    int32_t bits;
    memcpy(&bits, from, sizeof bits);
    return (vec)(bits - (ivec){0});
}

/* total + the products of both numbers of words if `half` is PAIRS, else total + a b. */
INLINE vec add_product(vec a, vec b, vec total, const int half) {
#if HAS_PAIRS
    if (half == PAIRS) return (vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#endif
    (void)half;
    return multiply_add(a, b, total);
}

/* Words of the numbers of two vectors, rounded likewise. */
INLINE vec pair(vec first, vec second) {
#if HAS_PAIRS
    uvec order = {0};
    for (uint32_t i = 0; i < LANES; i++) order[i] = i | (i + LANES) << 16;
    return (vec)_mm512_permutexvar_epi16((__m512i)order, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
    hvec halves[2];
    store(halves, 0, first, 1), store(halves, LANES, second, 1);
    return (vec)(__builtin_convertvector(halves[0], uvec) | __builtin_convertvector(halves[1], uvec) << 16);
#endif
}

/* ---- functions */

/* exp (Cephes' expf), accurate to 2 units in the last place. 0 and infinity beyond float32's range; NaN for NaN. */
INLINE vec exponential(vec x) {
    const vec magic = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to whole numbers */
#if !defined(__AVX512F__)
    const ivec none = x < -87.3f, too_much = x > 88.3f;
    x = pick(too_much | none, (vec){0}, x);
#endif
    const vec shifted = multiply_add(x, all(1.44269504088896341f), magic), n = shifted - magic;
    const vec r = multiply_add(n, all(2.12194440e-4f), multiply_add(n, all(-0.693359375f), x));
    const float terms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    vec p = all(1.9875691500e-4f);
    UNROLL for (int i = 0; i < 5; i++) p = multiply_add(p, r, all(terms[i]));
    p = multiply_add(p * r, r, r) + 1.0f;
    const vec power = (vec)(((ivec)shifted - (ivec)magic + 127) << 23);
#if defined(__AVX512F__)
    const __mmask16 some = _mm512_cmp_ps_mask((__m512)x, (__m512)all(-87.3f), _CMP_NLT_UQ);
    const __mmask16 too_much = _mm512_cmp_ps_mask((__m512)x, (__m512)all(88.3f), _CMP_GT_OQ);
    return (vec)_mm512_mask_mov_ps(_mm512_maskz_mul_ps(some, (__m512)p, (__m512)power), too_much, (__m512)all(INFINITY));
#else
    return pick(too_much, all(INFINITY), (vec)(~none & (ivec)(p * power)));
#endif
}

/* tanh as a ratio of polynomials (Eigen's coefficients), accurate to a few units in the last place. */
INLINE vec tangent(vec x) {
    const float limit = 7.90531110763549805f;
    x = pick(x > limit, all(limit), pick(x < -limit, all(-limit), x));
    const vec s = x * x;
    const float above[] = {2.00018790482477e-13f, -8.60467152213735e-11f, 5.12229709037114e-08f,
                           1.48572235717979e-05f, 6.37261928875436e-04f,  4.89352455891786e-03f};
    const float below[] = {1.18534705686654e-04f, 2.26843463243900e-03f, 4.89352518554385e-03f};
    vec p = all(-2.76076847742355e-16f), q = all(1.19825839466702e-06f);
    UNROLL for (int i = 0; i < 6; i++) p = multiply_add(p, s, all(above[i]));
    UNROLL for (int i = 0; i < 3; i++) q = multiply_add(q, s, all(below[i]));
    return x * p / q;
}

/* SiLU is x sigmoid(t) with t = x, and GELU's tanh form with this t: (1 + tanh y) / 2 = 1 / (1 + exp(-2 y)), where
 * y = sqrt(2 / pi) (x + 0.044715 x^3). */
#define GELU_SLOPE 1.5957691216057308f
#define GELU_CUBIC 0.044715f
INLINE vec gate_slope(vec x, int gelu) { return gelu ? GELU_SLOPE * (x + GELU_CUBIC * x * x * x) : x; }

/* 1 / sqrt(mean(x^2) + eps). */
INLINE float inverse_rms(const float *x, int64_t width, float eps) {
    vec squares = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const vec v = load(x, i, 0);
        squares = multiply_add(v, v, squares);
    }
    for (; i < width; i++) rest += x[i] * x[i];
    return 1.0f / sqrtf((sum(squares) + rest) / (float)width + eps);
}

