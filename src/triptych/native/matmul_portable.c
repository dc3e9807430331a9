/* The kernels in portable C, which define the layouts and the order of every sum.

   fmaf rounds once, as the FMA instructions of the other kernels do, so all kernels give the same bits.  A processor
   without such an instruction computes fmaf in software, slowly; the packed layouts need it twice for 32 numbers, the
   dense ones for every number.  fp16 and bf16 numbers are read as little-endian hosts store them.  */

#include <float.h>
#include <string.h>

#include "kernels.h"

#define LANES 16 /* partial sums of a dense product */

static float float_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static float float_of_bf16(uint16_t bits)
{
    return float_of_bits((uint32_t)bits << 16);
}

/* The fp16 number `i` of an array at any address. */
static float half_at(const uint8_t *array, int i)
{
    uint16_t h;
    memcpy(&h, array + 2 * i, sizeof h);
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
    if (exponent == 0) /* zero or subnormal */
        return sign ? -(float)fraction * 0x1p-24f : (float)fraction * 0x1p-24f;
    if (exponent == 31)
        return float_of_bits(sign | 0x7f800000 | fraction << 13);
    return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

void unpack_row(const struct matrix *w, int64_t row, float *out)
{
    const int is_signed = w->layout >= LAYOUT_S8, block = w->layout == LAYOUT_S8X16 ? SUPERGROUP : GROUP;
    const size_t bytes = matrix_bytes(w->layout, 1, block);
    const uint8_t *in = band_of(w, (int32_t)(row / BAND), block, bytes);
    const int32_t r = (int32_t)(row % BAND);
    for (int32_t k = 0; k < w->columns; k += block, in += bytes, out += block) {
        const uint8_t *scales = in + bytes - (is_signed ? 2 : 4) * BAND;
        float scale = half_at(scales, r), minimum = is_signed ? 0 : half_at(scales + 2 * BAND, r);
        for (int c = 0; c < block; c++) {
            const uint8_t *four = in + 4 * r + c % 4;
            if (is_signed) {
                float factor = block == SUPERGROUP ? scale * (float)(int8_t)in[64 * LINE + BAND * (c / 16) + r] : scale;
                out[c] = factor * (float)(int8_t)four[LINE * (c / 4)];
            } else {
                int code = four[LINE * (c / 8)] >> (c % 8 < 4 ? 0 : 4) & 15;
                if (w->layout == LAYOUT_U5) code |= (four[4 * LINE] >> (c / 4) & 1) << 4;
                out[c] = scale * (float)code + minimum;
            }
        }
    }
}

/* The scale is the largest magnitude over 127; numbers are rounded to the nearest, halves to even. */
static void portable_round(struct input *in, int32_t vector, int32_t first, int32_t last)
{
    size_t groups = (size_t)(in->columns / GROUP);
    for (int32_t g = first; g < last; g++) {
        size_t at = (size_t)vector * groups + (size_t)g;
        const float *x = in->dense + vector * in->stride + (ptrdiff_t)g * GROUP;
        int8_t *rounded = in->rounded + (size_t)vector * (size_t)in->columns + (size_t)g * GROUP;
        float largest = 0;
        int finite = 1, sums[2] = {0, 0};
        for (int i = 0; i < GROUP; i++) {
            finite &= fabsf(x[i]) <= FLT_MAX;
            largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
        }
        float scale = largest / 127, inverse = scale >= FLT_MIN ? 1 / scale : 0; /* 1 / scale must not overflow */
        for (int i = 0; i < GROUP; i++) {
            rounded[i] = (int8_t)(finite ? rintf(x[i] * inverse) : 0);
            sums[i / 16] += rounded[i];
        }
        in->scales[at] = finite ? scale : NAN;
        in->sums[2 * at] = (float)(sums[0] + sums[1]);
        in->sums[2 * at + 1] = (float)sums[0];
    }
}

/* The parts of `in` for one vector. */
struct vector {
    const int8_t *rounded;
    const float *scales, *sums;
};

static struct vector vector_of(const struct input *in, int32_t m)
{
    size_t groups = (size_t)(in->columns / GROUP), at = (size_t)m;
    return (struct vector){in->rounded + at * (size_t)in->columns, in->scales + at * groups,
                           in->sums + 2 * at * groups};
}

/* dot[r] += the products of a group's halves of bytes, and of its fifth bits where there are any, with `a`. */
static void dot_unsigned(const uint8_t *lines, const uint8_t *fifth, const int8_t *a, int32_t *dot)
{
    for (int j = 0; j < 4; j++)
        for (int r = 0; r < BAND; r++)
            for (int i = 0; i < 4; i++) {
                int byte = lines[LINE * j + 4 * r + i], low = byte & 15, high = byte >> 4;
                if (fifth) {
                    int bits = fifth[4 * r + i] >> 2 * j;
                    low += (bits & 1) << 4;
                    high += (bits >> 1 & 1) << 4;
                }
                dot[r] += low * a[8 * j + i] + high * a[8 * j + 4 + i];
            }
}

/* dot[r] += the products of lines of signed bytes with `a`. */
static void dot_signed(const uint8_t *lines, int count, const int8_t *a, int32_t *dot)
{
    for (int j = 0; j < count; j++)
        for (int r = 0; r < BAND; r++)
            for (int i = 0; i < 4; i++)
                dot[r] += (int8_t)lines[LINE * j + 4 * r + i] * a[4 * j + i];
}

static void multiply_unsigned(const struct matrix *w, int32_t band, const struct input *in, int32_t first,
                              int32_t count, float (*out)[BAND], size_t bytes)
{
    for (int32_t m = 0; m < count; m++) {
        struct vector v = vector_of(in, first + m);
        const uint8_t *block = band_of(w, band, GROUP, bytes);
        memset(out[m], 0, sizeof out[m]);
        for (int32_t g = 0; g < w->columns / GROUP; g++, block += bytes) {
            const uint8_t *scales = block + bytes - 4 * BAND, *minimums = block + bytes - 2 * BAND;
            int32_t dot[BAND] = {0};
            dot_unsigned(block, bytes == U5_BYTES ? block + 4 * LINE : NULL, v.rounded + g * GROUP, dot);
            for (int r = 0; r < BAND; r++) {
                float sum = fmaf(half_at(minimums, r), v.sums[2 * g], half_at(scales, r) * (float)dot[r]);
                out[m][r] = fmaf(v.scales[g], sum, out[m][r]);
            }
        }
    }
}

static void portable_u4(const struct matrix *w, int32_t band, const struct input *in, int32_t first, int32_t count,
                        float (*out)[BAND])
{
    multiply_unsigned(w, band, in, first, count, out, U4_BYTES);
}

static void portable_u5(const struct matrix *w, int32_t band, const struct input *in, int32_t first, int32_t count,
                        float (*out)[BAND])
{
    multiply_unsigned(w, band, in, first, count, out, U5_BYTES);
}

static void portable_s8(const struct matrix *w, int32_t band, const struct input *in, int32_t first, int32_t count,
                        float (*out)[BAND])
{
    for (int32_t m = 0; m < count; m++) {
        struct vector v = vector_of(in, first + m);
        const uint8_t *block = band_of(w, band, GROUP, S8_BYTES);
        memset(out[m], 0, sizeof out[m]);
        for (int32_t g = 0; g < w->columns / GROUP; g++, block += S8_BYTES) {
            int32_t dot[BAND] = {0};
            dot_signed(block, 8, v.rounded + g * GROUP, dot);
            for (int r = 0; r < BAND; r++)
                out[m][r] = fmaf(v.scales[g], half_at(block + 8 * LINE, r) * (float)dot[r], out[m][r]);
        }
    }
}

/* The scale of a supergroup is applied once, to the sum of its eight groups. */
static void portable_s8x16(const struct matrix *w, int32_t band, const struct input *in, int32_t first, int32_t count,
                           float (*out)[BAND])
{
    for (int32_t m = 0; m < count; m++) {
        struct vector v = vector_of(in, first + m);
        const uint8_t *block = band_of(w, band, SUPERGROUP, S8X16_BYTES);
        memset(out[m], 0, sizeof out[m]);
        for (int32_t g = 0; g < w->columns / GROUP; block += S8X16_BYTES) {
            const int8_t *factors = (const int8_t *)block + 64 * LINE;
            float sums[BAND] = {0};
            for (int i = 0; i < SUPERGROUP / GROUP; i++, g++, factors += 2 * BAND) {
                int32_t half[2][BAND] = {{0}};
                dot_signed(block + 8 * LINE * i, 4, v.rounded + g * GROUP, half[0]);
                dot_signed(block + 8 * LINE * i + 4 * LINE, 4, v.rounded + g * GROUP + 16, half[1]);
                for (int r = 0; r < BAND; r++) {
                    float sum = fmaf(factors[BAND + r], (float)half[1][r], (float)factors[r] * (float)half[0][r]);
                    sums[r] = fmaf(v.scales[g], sum, sums[r]);
                }
            }
            for (int r = 0; r < BAND; r++)
                out[m][r] = fmaf(half_at(block + S8X16_BYTES - 2 * BAND, r), sums[r], out[m][r]);
        }
    }
}

/* Column k is added to partial sum k % 16; then the upper half of the partial sums is added to the lower half until one
   is left.  */
static float sum_of_lanes(float *lanes)
{
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            lanes[i] += lanes[i + half];
    return lanes[0];
}

static void portable_f32(const struct matrix *w, int32_t band, const struct input *in, int32_t first, int32_t count,
                         float (*out)[BAND])
{
    for (int32_t m = 0; m < count; m++)
        for (int32_t r = 0; r < BAND && band * BAND + r < w->rows; r++) {
            const float *row = (const float *)w->data + (size_t)(band * BAND + r) * (size_t)w->columns;
            const float *x = in->dense + (first + m) * in->stride;
            float lanes[LANES] = {0};
            for (int32_t k = 0; k < w->columns; k++)
                lanes[k % LANES] = fmaf(row[k], x[k], lanes[k % LANES]);
            out[m][r] = sum_of_lanes(lanes);
        }
}

static void portable_bf16(const struct matrix *w, int32_t band, const struct input *in, int32_t first, int32_t count,
                          float (*out)[BAND])
{
    for (int32_t m = 0; m < count; m++)
        for (int32_t r = 0; r < BAND && band * BAND + r < w->rows; r++) {
            const uint16_t *row = (const uint16_t *)w->data + (size_t)(band * BAND + r) * (size_t)w->columns;
            const float *x = in->dense + (first + m) * in->stride;
            float lanes[LANES] = {0};
            for (int32_t k = 0; k < w->columns; k++)
                lanes[k % LANES] = fmaf(float_of_bf16(row[k]), x[k], lanes[k % LANES]);
            out[m][r] = sum_of_lanes(lanes);
        }
}

const struct kernels portable_kernels = {
    portable_round,
    {portable_f32, portable_bf16, portable_u4, portable_u5, portable_s8, portable_s8x16},
    {NULL},
    no_pairs};
