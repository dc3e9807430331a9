/* Vectors of 16 fp32 numbers in the compiler's own notation: the same code for every processor, in the same order of
   operations.  */

#ifndef TRIPTYCH_VECTOR_H
#define TRIPTYCH_VECTOR_H

#include <stdint.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wpsabi" /* every function with a vector argument is inlined */

#ifndef TARGET /* what the functions of a file may need of the processor */
#define TARGET
#endif
#define INLINE static inline TARGET __attribute__((always_inline))

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));

INLINE v16 load16(const float *x) { v16 y; memcpy(&y, x, sizeof y); return y; }
INLINE void store16(float *x, v16 y) { memcpy(x, &y, sizeof y); }

/* The first n < 16 numbers, the others `rest`. */
INLINE v16 load_part(const float *x, int32_t n, float rest)
{
    v16 y = (v16){0} + rest;
    memcpy(&y, x, (size_t)n * sizeof *x);
    return y;
}

INLINE v16 pick(v16i mask, v16 a, v16 b) { return (v16)((mask & (v16i)a) | (~mask & (v16i)b)); }
INLINE v16 larger(v16 a, v16 b) { return pick(a > b, a, b); }

/* The maximum or the sum over the 16 numbers, by halves. */
INLINE float folded16(v16 x, const int maximum)
{
    float s[16];
    store16(s, x);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            s[i] = !maximum ? s[i] + s[i + width] : s[i] > s[i + width] ? s[i] : s[i + width];
    return s[0];
}

INLINE float sum16(v16 x) { return folded16(x, 0); }
INLINE float max16(v16 x) { return folded16(x, 1); }

/* e^x: x = n ln 2 + r with |r| <= ln 2 / 2, then the series of e^r to r^7 / 7!.  Below -87.3 exactly 0, above 88.3 the
   value at 88.3; a NaN stays one. */
INLINE v16 exp16(v16 x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, in the low bits */
    v16i small = x < -87.3f;
    v16 y = pick(small, (v16){0} - 87.3f, x);
    y = pick(y > 88.3f, (v16){0} + 88.3f, y);
    v16 shifted = y * 1.44269504088896341f + magic;
    v16 n = shifted - magic;
    v16 r = y - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    v16 p = ((((v16){0} + 1.0f / 5040) * r + 1.0f / 720) * r + 1.0f / 120) * r + 1.0f / 24;
    p = (((p * r + 1.0f / 6) * r + 0.5f) * r + 1.0f) * r + 1.0f;
    v16 power = (v16)(((v16i)shifted << 23) + (127 << 23));
    return pick(small, (v16){0}, p * power);
}

INLINE v16 abs16(v16 x) { return (v16)((v16i)x & 0x7fffffff); }
INLINE v16 tanh16(v16 x) { return 1.0f - 2.0f / (exp16(2.0f * x) + 1.0f); }

/* Abramowitz and Stegun 7.1.26, within 1.5e-7. */
INLINE v16 erf16(v16 x)
{
    v16i sign = (v16i)x & (int32_t)0x80000000;
    v16 a = abs16(x);
    v16 t = 1.0f / (1.0f + 0.3275911f * a);
    v16 p = (v16){0} + 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    v16 y = 1.0f - p * t * exp16(-a * a);
    return (v16)((v16i)y | sign);
}

/* The functions of one number that a step applies. */
enum function {
    FUNCTION_NONE = 0, FUNCTION_SILU = 1, FUNCTION_GELU = 2, FUNCTION_GELU_TANH = 3, FUNCTION_RELU = 4,
    FUNCTION_TANH = 5, FUNCTION_SCALE = 6, FUNCTION_SHIFT = 7, FUNCTION_SOFTCAP = 8, FUNCTION_SIGMOID = 9,
    FUNCTION_ABS = 10, FUNCTION_RECIPROCAL = 11, FUNCTION_EXP = 12
};

INLINE v16 function16(v16 x, int32_t kind, float factor)
{
    switch (kind) {
    case FUNCTION_SILU: return x / (1.0f + exp16(-x));
    case FUNCTION_GELU: return 0.5f * x * (1.0f + erf16(x * 0.70710678118654752f));
    case FUNCTION_GELU_TANH: return 0.5f * x * (1.0f + tanh16(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case FUNCTION_RELU: return pick(x < 0.0f, (v16){0}, x);
    case FUNCTION_TANH: return tanh16(x);
    case FUNCTION_SCALE: return x * factor;
    case FUNCTION_SHIFT: return x + factor;
    case FUNCTION_SOFTCAP: return factor * tanh16(x / factor);
    case FUNCTION_SIGMOID: return 1.0f / (1.0f + exp16(-x));
    case FUNCTION_ABS: return abs16(x);
    case FUNCTION_RECIPROCAL: return 1.0f / x;
    case FUNCTION_EXP: return exp16(x);
    default: return x;
    }
}

/* CALL(n) for the n that is COUNT, a constant in each call, or for MOST <= 8 where COUNT is no smaller number. */
#define CASE(N, MOST, CALL) case N: if ((MOST) > N) { CALL(N); break; } __attribute__((fallthrough));
#define FOR_COUNT(COUNT, MOST, CALL)                                                    \
    switch (COUNT) {                                                                    \
        CASE(1, MOST, CALL) CASE(2, MOST, CALL) CASE(3, MOST, CALL) CASE(4, MOST, CALL) \
        CASE(5, MOST, CALL) CASE(6, MOST, CALL) CASE(7, MOST, CALL) default: CALL(MOST); \
    }

INLINE float float_of_bits(uint32_t bits) { float x; memcpy(&x, &bits, sizeof x); return x; }
INLINE uint32_t bits_of_float(float x) { uint32_t bits; memcpy(&bits, &x, sizeof bits); return bits; }
INLINE float float_of_bf16(uint16_t x) { return float_of_bits((uint32_t)x << 16); }

/* Round to nearest, ties to even; a NaN stays one. */
INLINE uint16_t bf16_of_float(float x)
{
    uint32_t bits = bits_of_float(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#endif
