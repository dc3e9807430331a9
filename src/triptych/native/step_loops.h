/* The functions of a step that are not products, for the files kernels_*.c: norms, rotations, elementwise functions, what
   a cache keeps, and the end of attention.  Each number is computed alike at all levels.  */

#include "attend.h"
#include "sample.h"
#include "statistics.h"
#include "vector.h"

#define PIECE 256 /* numbers among which the largest one is looked for at a time */

/* The sum of x - mean, or of its squares. */
TARGET static float ISA(sum_of)(const float *x, int32_t n, float mean, int squares)
{
    v16 sum = {0};
    for (int32_t i = 0; i < n; i += 16) {
        v16 y = (i + 16 <= n ? load16(x + i) : load_part(x + i, n - i, mean)) - mean;
        sum += squares ? y * y : y;
    }
    return sum16(sum);
}

TARGET static void ISA(norm)(float *out, const float *x, int32_t n, float mean, float factor, const float *weight,
                             float offset, const float *bias)
{
    for (int32_t i = 0; i < n; i++) out[i] = (x[i] - mean) * factor * (weight[i] + offset);
    if (bias)
        for (int32_t i = 0; i < n; i++) out[i] += bias[i];
}

TARGET static void ISA(rotate)(float *out, const float *x, const float *cosines, const float *sines, int32_t half,
                               int32_t pairing)
{
    if (pairing == PAIRING_HALF) {
        for (int32_t i = 0; i < half; i++) {
            float a = x[i], b = x[i + half];
            out[i] = a * cosines[i] - b * sines[i];
            out[i + half] = b * cosines[i] + a * sines[i];
        }
        return;
    }
    for (int32_t i = 0; i < half; i++) {
        float a = x[2 * i], b = x[2 * i + 1];
        out[2 * i] = a * cosines[i] - b * sines[i];
        out[2 * i + 1] = b * cosines[i] + a * sines[i];
    }
}

/* out = f(x), times y, or with `adds` plus y, where y is not NULL; every number in the same way, wherever it stands. */
TARGET static void ISA(map)(float *out, const float *x, const float *y, int32_t n, int32_t function, float factor,
                            int adds)
{
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        v16 value = function16(load16(x + i), function, factor);
        if (y) value = adds ? value + load16(y + i) : value * load16(y + i);
        store16(out + i, value);
    }
    if (i < n) {
        v16 value = function16(load_part(x + i, n - i, 0.0f), function, factor);
        v16 other = load_part(y ? y + i : x, y ? n - i : 0, 0.0f);
        if (y) value = adds ? value + other : value * other;
        memcpy(out + i, &value, (size_t)(n - i) * sizeof *out);
    }
}

TARGET static void ISA(largest_of)(const float *x, int32_t count, int32_t n, int32_t *places, float *tops)
{
    for (int32_t row = 0; row < count; row++, x += n) {
        int32_t best = 0;
        for (int32_t at = 0; at < n; at += PIECE) {
            int32_t end = n - at < PIECE ? n : at + PIECE, larger = 0;
            float top = x[best];
            for (int32_t i = at; i < end; i++) larger |= !(x[i] <= top);
            for (int32_t i = at; larger && i < end && x[best] == x[best]; i++)
                if (!(x[i] <= x[best])) best = i;
        }
        places[row] = best;
        tops[row] = x[best];
    }
}

/* Numbers below the smallest normal one of fp16 are given the exponent of 1/2, whose last place is worth as much as
   theirs.  Beyond the largest they become infinite; a NaN stays one. */
INLINE uint16_t f16_of_float(float x)
{
    uint32_t bits = bits_of_float(x);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;
    if (bits < 0x38800000) return (uint16_t)(sign | (bits_of_float(fabsf(x) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

INLINE void codes_of(int8_t *codes, uint8_t *scale, const float *x, int32_t n)
{
    uint32_t most = 0; /* bits of magnitudes are ordered as these are, those of a NaN come last */
    for (int32_t i = 0; i < n; i++) {
        uint32_t bits = bits_of_float(x[i]) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    uint16_t rounded = bf16_of_float(float_of_bits(most) / 127.0f);
    memcpy(scale, &rounded, sizeof rounded);
    float divisor = float_of_bf16(rounded);
    for (int32_t i = 0; i < n; i++) {
        float code = rintf(x[i] / divisor);
        code = code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code;
        codes[i] = code == code ? (int8_t)code : 0;
    }
}

TARGET static void ISA(keep)(int32_t type, void *row, const float *x, int32_t n)
{
    uint16_t *out = row;
    if (type == STORED_F32) memcpy(row, x, (size_t)n * sizeof *x);
    for (int32_t i = 0; i < n && type == STORED_BF16; i++) out[i] = bf16_of_float(x[i]);
    for (int32_t i = 0; i < n && type == STORED_F16; i++) out[i] = f16_of_float(x[i]);
    for (int32_t i = 0; i < n && type == STORED_INT8; i += GROUP)
        codes_of((int8_t *)row + i, (uint8_t *)row + n + i / GROUP * 2, x + i, n - i < GROUP ? n - i : GROUP);
}

/* Add the sums of the range, which comes after all before.  The first range is computed where the sums of all go. */
TARGET static void ISA(merge)(struct sums *all, const struct sums *range, int32_t width)
{
    if (all->out == range->out) {
        *all = *range;
        return;
    }
    float top = all->most > range->most ? all->most : range->most;
    float kept = expf(all->most - top), added = expf(range->most - top);
    for (int32_t d = 0; d < width; d++) all->out[d] = all->out[d] * kept + range->out[d] * added;
    all->total = all->total * kept + range->total * added;
    all->most = top;
}

/* The end of the softmax, with the head's sink where there is one. */
TARGET static void ISA(finish)(const struct sums *all, int32_t width, const float *sink)
{
    float factor = 1.0f, total = all->total;
    if (sink) {
        float top = *sink > all->most ? *sink : all->most;
        factor = total > 0.0f ? expf(all->most - top) : 0.0f;
        total = total * factor + expf(*sink - top);
    }
    factor = total > 0.0f ? factor / total : 0.0f;
    for (int32_t d = 0; d < width; d++) all->out[d] *= factor;
}

