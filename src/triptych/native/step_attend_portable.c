/* Attention in plain C, which says what every kernel computes (attend.h); the same code for x86-64 with AVX2 and FMA.

   fmaf rounds once, as the FMA instructions do.  A processor without them computes it in software, slowly.  */

#include "attend.h"

#include <math.h>

#include "vector.h"

#define KEYS 4 /* that a query is multiplied with at a time */

typedef float v8 __attribute__((vector_size(32)));
typedef float v4 __attribute__((vector_size(16)));

INLINE v8 first_numbers(const float *x, int32_t count)
{
    v8 y = {0};
    if (count >= 8)
        memcpy(&y, x, sizeof y);
    else if (count > 0)
        memcpy(&y, x, (size_t)count * sizeof *x);
    return y;
}

/* x * y + z, rounded once. */
INLINE v8 fused(v8 x, v8 y, v8 z)
{
    float a[8], b[8], c[8];
    memcpy(a, &x, sizeof a);
    memcpy(b, &y, sizeof b);
    memcpy(c, &z, sizeof c);
    for (int i = 0; i < 8; i++) c[i] = fmaf(a[i], b[i], c[i]);
    memcpy(&z, c, sizeof z);
    return z;
}

/* The sums of 16 lanes, given as lanes 0 to 7 and 8 to 15, of KEYS keys. */
INLINE v4 sums_of_lanes(const v8 *low, const v8 *high)
{
    v4 fours[KEYS];
    for (int r = 0; r < KEYS; r++) {
        v8 eight = low[r] + high[r];
        v4 halves[2];
        memcpy(halves, &eight, sizeof halves);
        fours[r] = halves[0] + halves[1];
    }
    v4 lanes[4];
    for (int i = 0; i < 4; i++) lanes[i] = (v4){fours[0][i], fours[1][i], fours[2][i], fours[3][i]};
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

INLINE void scores_of(float (*scores)[SCORES], const struct query *queries, int32_t count, const struct tile *keys,
                      int32_t width)
{
    for (int32_t i = 0; i < count; i++) {
        const struct query *query = queries + i;
        int32_t from = (query->from > keys->place ? query->from - keys->place : 0) / KEYS * KEYS;
        int32_t to = query->to - keys->place < TILE_KEYS ? query->to - keys->place : TILE_KEYS;
        for (int32_t j = from; j < to; j += KEYS) {
            v8 low[KEYS] = {{0}}, high[KEYS] = {{0}};
            for (int32_t d = 0; d < width; d += 16) {
                v8 q[2] = {first_numbers(query->q + d, width - d), first_numbers(query->q + d + 8, width - d - 8)};
                for (int r = 0; r < KEYS; r++) {
                    const float *key = keys->rows[j + r] + d;
                    low[r] = fused(q[0], first_numbers(key, width - d), low[r]);
                    high[r] = fused(q[1], first_numbers(key + 8, width - d - 8), high[r]);
                }
            }
            v4 sums = sums_of_lanes(low, high);
            memcpy(scores[i] + keys->place + j, &sums, sizeof sums);
        }
    }
}

/* e^(x - top) in place of each x, none larger than top: x - top = n ln 2 + r with |r| <= ln 2 / 2, then the series of
   e^r to r^7 / 7!.  Exactly 0 below -87.3; a NaN stays one.  */
INLINE void exponentials(float *x, int32_t count, float top)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, in the low bits */
    for (int32_t i = 0; i < count; i++) {
        float own = x[i] - top, y = own < -87.3f ? -87.3f : own;
        float shifted = y * 1.44269504088896341f + magic, n = shifted - magic, power;
        float r = fmaf(n, 2.12194440e-4f, fmaf(-n, 0.693359375f, y));
        float p = fmaf(1.0f / 5040, r, 1.0f / 720);
        p = fmaf(p, r, 1.0f / 120);
        p = fmaf(p, r, 1.0f / 24);
        p = fmaf(p, r, 1.0f / 6);
        p = fmaf(p, r, 0.5f);
        p = fmaf(p, r, 1.0f);
        p = fmaf(p, r, 1.0f);
        uint32_t bits;
        memcpy(&bits, &shifted, sizeof bits);
        bits = (bits + 127) << 23;
        memcpy(&power, &bits, sizeof power);
        x[i] = own < -87.3f ? 0.0f : p * power;
    }
}

CLONES static void capped(float *x, int32_t count, float cap)
{
    for (int32_t i = 0; i < count; i += 16) store16(x + i, cap * tanh16(load16(x + i) / cap));
}

INLINE void softmax_of(float *scores, struct query *query, const struct instruction *it)
{
    int32_t begin = query->from / 16 * 16, end = (query->to + 15) / 16 * 16;
    float top = -INFINITY, lanes[16] = {0};
    for (int32_t j = begin; j < end; j++) scores[j] *= it->first;
    if (it->other > 0.0f) capped(scores + begin, end - begin, it->other);
    for (int32_t j = begin; j < query->from; j++) scores[j] = -INFINITY;
    for (int32_t j = query->to; j < end; j++) scores[j] = -INFINITY;
    for (int32_t j = query->from; query->bias && j < query->to; j++) scores[j] += query->bias[-j];
    for (int32_t j = begin; j < end; j++) top = scores[j] > top ? scores[j] : top; /* passes over a NaN */
    exponentials(scores + begin, end - begin, top);
    for (int32_t j = begin; j < end; j += 16)
        for (int i = 0; i < 16; i++) lanes[i] += scores[j + i];
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    query->range.most = top;
    query->range.total = lanes[0];
}

INLINE void values_of(const struct query *queries, float (*weights)[SCORES], int32_t count, const struct tile *values,
                      int32_t width)
{
    for (int32_t i = 0; i < count; i++) {
        float *restrict out = queries[i].range.out;
        const float *weight = weights[i] + values->place;
        int32_t j = queries[i].from > values->place ? queries[i].from - values->place : 0;
        int32_t to = queries[i].to - values->place < TILE_KEYS ? queries[i].to - values->place : TILE_KEYS;
        for (; j + 4 <= to; j += 4) {
            const float *const *rows = values->rows + j, *a = rows[0], *b = rows[1], *c = rows[2], *e = rows[3];
            for (int32_t d = 0; d < width; d++) {
                float sum = fmaf(weight[j + 1], b[d], fmaf(weight[j], a[d], out[d]));
                out[d] = fmaf(weight[j + 3], e[d], fmaf(weight[j + 2], c[d], sum));
            }
        }
        for (; j < to; j++)
            for (int32_t d = 0; d < width; d++) out[d] = fmaf(weight[j], values->rows[j][d], out[d]);
    }
}

#define KERNELS(NAME, TARGET)                                                                                       \
    TARGET static void NAME##_scores(float (*scores)[SCORES], const struct query *queries, int32_t count,            \
                                     const struct tile *keys, int32_t width)                                        \
    {                                                                                                               \
        scores_of(scores, queries, count, keys, width);                                                             \
    }                                                                                                               \
    TARGET static void NAME##_softmax(float *scores, struct query *query, const struct instruction *it)             \
    {                                                                                                               \
        softmax_of(scores, query, it);                                                                              \
    }                                                                                                               \
    TARGET static void NAME##_values(const struct query *queries, float (*weights)[SCORES], int32_t count,           \
                                     const struct tile *values, int32_t width)                                      \
    {                                                                                                               \
        values_of(queries, weights, count, values, width);                                                          \
    }                                                                                                               \
    const struct attend_kernels NAME##_attend = {NAME##_scores, NAME##_softmax, NAME##_values};

KERNELS(portable, )
#if X86_KERNELS
KERNELS(avx2, __attribute__((target("avx2,fma"))))
#endif
