/* Vectors of LANES fp32 numbers, as many as a register holds, for the files train_*.c.  Before they include this file,
   they define TARGET, LANES and

       multiply_add(x, y, z)    x y + z, rounded once where the processor does that
       larger_or_last(x, y)     the larger one; y where one is a NaN
       smaller_or_last(x, y)    the smaller one; likewise
       if_not_less(x, y, z)     z where x >= y or x is a NaN, else 0
       widened(x)               the LANES bf16 numbers at x
       narrowed(x)              fp32 numbers rounded to bf16, to nearest, ties to even; a NaN stays one  */

#include <math.h>

#include "vector.h"

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef uint8_t vb __attribute__((vector_size(LANES)));

INLINE vf multiply_add(vf x, vf y, vf z);
INLINE vf larger_or_last(vf x, vf y);
INLINE vf smaller_or_last(vf x, vf y);
INLINE vf if_not_less(vf x, vf y, vf z);
INLINE vf widened(const uint16_t *x);
INLINE vh narrowed(vf x);

INLINE vf all_of(float x) { return (vf){0} + x; }
INLINE vf load(const float *x) { vf y; memcpy(&y, x, sizeof y); return y; }
INLINE void store(float *x, vf y) { memcpy(x, &y, sizeof y); }
INLINE vf chosen(vi mask, vf x, vf y) { return (vf)((mask & (vi)x) | (~mask & (vi)y)); }

/* The lanes before lane n. */
INLINE vi lanes_before(int64_t n)
{
    int32_t lanes[LANES];
    vi y;
    for (int i = 0; i < LANES; i++) lanes[i] = -(i < n);
    memcpy(&y, lanes, sizeof y);
    return y;
}

/* The bits of bf16 numbers in fp32 lanes. */
INLINE vu rounded(vf x)
{
    vu bits = (vu)x, nan = (vu)(x != x);
    return (((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & ~nan) | (nan & 0x7fc0);
}

/* Two bf16 numbers in the 32 bits of each lane. */
INLINE vf paired(vh low, vh high)
{
    uint16_t x[LANES], y[LANES];
    memcpy(x, &low, sizeof x);
    memcpy(y, &high, sizeof y);
    return (vf)((vu)widened(x) >> 16 | (vu)widened(y));
}

INLINE float sum_of_lanes(vf x)
{
    float s[LANES];
    store(s, x);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) s[i] += s[i + width];
    return s[0];
}

INLINE float largest_lane(vf x)
{
    float s[LANES], most = -INFINITY;
    store(s, x);
    for (int i = 0; i < LANES; i++) most = s[i] > most ? s[i] : most;
    return most;
}

/* e^x: x = n ln 2 + r with |r| <= ln 2 / 2, then the series of e^r to r^7 / 7!.  Below -87.3 exactly 0, above 88.3 the
   value at 88.3; a NaN stays one. */
INLINE vf exponential(vf x)
{
    const vf low = all_of(-87.3f), magic = all_of(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vf y = smaller_or_last(all_of(88.3f), larger_or_last(low, x));
    vf shifted = multiply_add(y, all_of(1.44269504088896341f), magic), n = shifted - magic;
    vf r = multiply_add(n, all_of(2.12194440e-4f), multiply_add(n, all_of(-0.693359375f), y));
    vf p = multiply_add(all_of(1.0f / 5040), r, all_of(1.0f / 720));
    p = multiply_add(p, r, all_of(1.0f / 120));
    p = multiply_add(p, r, all_of(1.0f / 24));
    p = multiply_add(p, r, all_of(1.0f / 6));
    p = multiply_add(p, r, all_of(0.5f));
    p = multiply_add(p, r, all_of(1.0f));
    p = multiply_add(p, r, all_of(1.0f));
    return if_not_less(x, low, p * (vf)(((vi)shifted << 23) + (127 << 23)));
}

/* Numbers [i, i + LANES) of the n of `x`; those from n on are 0. */
INLINE vf numbers(const void *x, int64_t i, int64_t n, int64_t bf16)
{
    const float *from = (const float *)x + i;
    const uint16_t *halves = (const uint16_t *)x + i;
    vf y = {0};
    uint16_t some[LANES] = {0};
    if (n - i >= LANES) return bf16 ? widened(halves) : load(from);
    if (!bf16) {
        memcpy(&y, from, (size_t)(n - i) * sizeof *from);
        return y;
    }
    memcpy(some, halves, (size_t)(n - i) * sizeof *some);
    return widened(some);
}

/* Write them, as far as they are before n. */
INLINE void keep(void *out, int64_t i, int64_t n, vf x, int64_t bf16)
{
    char *to = (char *)out + i * (bf16 ? 2 : 4);
    if (bf16) {
        vh halves = narrowed(x);
        if (n - i >= LANES)
            memcpy(to, &halves, sizeof halves);
        else
            memcpy(to, &halves, (size_t)(n - i) * sizeof(uint16_t));
    } else {
        if (n - i >= LANES)
            memcpy(to, &x, sizeof x);
        else
            memcpy(to, &x, (size_t)(n - i) * sizeof(float));
    }
}
