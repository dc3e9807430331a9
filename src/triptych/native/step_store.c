/* What a cache keeps of a step's keys and values, and how it is read back (enum stored_type).

   A vector of int8 codes is followed by the scales of its groups, in bf16: the largest magnitude of a group, divided by
   127.  A number that is read back is its code times the scale, which is exact, so every kernel reads the same bits.  A
   group with a number that is not finite gives NaN.  triptych/attention/cache_types.py does the same.  */

#include "step.h"

#include <math.h>

#include "vector.h"

int64_t stored_bytes(int32_t type, int32_t width)
{
    if (type == STORED_INT8) return width + (width + GROUP - 1) / GROUP * (int64_t)sizeof(uint16_t);
    return (int64_t)width * (type == STORED_F32 ? 4 : 2);
}

/* Numbers below the smallest normal one of fp16 are given the exponent of 1/2, whose last place is worth as much as
   theirs.  Beyond the largest they become infinite; a NaN stays one. */
INLINE uint16_t f16_of_float(float x)
{
    uint32_t bits, sum;
    memcpy(&bits, &x, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;
    if (bits < 0x38800000) {
        float shifted = fabsf(x) + 0.5f;
        memcpy(&sum, &shifted, sizeof sum);
        return (uint16_t)(sign | (sum - 0x3f000000));
    }
    return (uint16_t)(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

/* The bits of an fp16 number, as those of an fp32 one, are worth 2^-112 of it, but for those of what is not finite. */
INLINE float float_of_f16(uint16_t x)
{
    uint32_t bits = (uint32_t)(x & 0x7fff) << 13, special = (x & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
    float y;
    memcpy(&y, &bits, sizeof y);
    y *= 0x1p112f;
    memcpy(&bits, &y, sizeof bits);
    bits |= special | (uint32_t)(x & 0x8000) << 16;
    memcpy(&y, &bits, sizeof y);
    return y;
}

INLINE void codes_of(int8_t *codes, uint8_t *scale, const float *x, int32_t n)
{
    uint32_t most = 0; /* bits of magnitudes are ordered as these are, those of a NaN come last */
    float top;
    for (int32_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        most = (bits & 0x7fffffff) > most ? bits & 0x7fffffff : most;
    }
    memcpy(&top, &most, sizeof top);
    uint16_t rounded = bf16_of_float(top / 127.0f);
    memcpy(scale, &rounded, sizeof rounded);
    float divisor = float_of_bf16(rounded);
    for (int32_t i = 0; i < n; i++) {
        float code = rintf(x[i] / divisor);
        code = code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code;
        codes[i] = code == code ? (int8_t)code : 0;
    }
}

CLONES void keep_row(int32_t type, void *row, const float *x, int32_t n)
{
    uint16_t *out = row;
    if (type == STORED_F32) memcpy(row, x, (size_t)n * sizeof *x);
    for (int32_t i = 0; i < n && type == STORED_BF16; i++) out[i] = bf16_of_float(x[i]);
    for (int32_t i = 0; i < n && type == STORED_F16; i++) out[i] = f16_of_float(x[i]);
    for (int32_t i = 0; i < n && type == STORED_INT8; i += GROUP)
        codes_of((int8_t *)row + i, (uint8_t *)row + n + i / GROUP * 2, x + i, n - i < GROUP ? n - i : GROUP);
}

INLINE void scaled(float *out, const int8_t *codes, const uint8_t *scale, int32_t n)
{
    uint16_t bits;
    memcpy(&bits, scale, sizeof bits);
    float factor = float_of_bf16(bits);
    for (int32_t i = 0; i < n; i++) out[i] = (float)codes[i] * factor;
}

CLONES void read_rows(int32_t type, float *out, const void *rows, int32_t count, int32_t n)
{
    const uint16_t *in = rows;
    const int64_t bytes = stored_bytes(type, n);
    if (type == STORED_F32) memcpy(out, rows, (size_t)count * n * sizeof *out);
    for (int32_t i = 0; i < count * n && type == STORED_BF16; i++) out[i] = float_of_bf16(in[i]);
    for (int32_t i = 0; i < count * n && type == STORED_F16; i++) out[i] = float_of_f16(in[i]);
    for (int32_t r = 0; r < count && type == STORED_INT8; r++, out += n) {
        const int8_t *codes = (const int8_t *)rows + r * bytes;
        const uint8_t *scales = (const uint8_t *)codes + n;
        int32_t i = 0;
        for (; i + GROUP <= n; i += GROUP, scales += 2) scaled(out + i, codes + i, scales, GROUP);
        if (i < n) scaled(out + i, codes + i, scales, n - i);
    }
}

/* Numbers as a store of type `kind` gives them back: new keys and values are read like those of earlier steps. */
void step_stored(struct worker *me, const struct instruction *it)
{
    const float *x = buffer(me, it->input);
    float *out = buffer(me, it->output);
    int64_t first, last;
    share(me, (int64_t)row_count(me, it) * it->heads, &first, &last);
    for (int64_t i = first * it->width; i < last * it->width;) {
        float kept[GROUP + 1]; /* as bytes of any type */
        int32_t left = it->width - (int32_t)(i % it->width), n = left < GROUP ? left : GROUP;
        keep_row(it->kind, kept, x + i, n);
        read_rows(it->kind, out + i, kept, 1, n);
        i += n;
    }
}

/* A ring keeps the last `window` tokens of a row: an earlier one would take the place of one of these. */
void step_extend(struct worker *me, const struct instruction *it)
{
    const struct batch *batch = me->batch;
    const struct store *store = me->plan->stores + it->store;
    const float *keys = buffer(me, it->second), *values = buffer(me, it->third);
    int64_t first, last, key_bytes = stored_bytes(store->type, it->width);
    int64_t value_bytes = stored_bytes(store->type, it->value_width);
    share(me, batch->tokens, &first, &last);
    for (int64_t n = first; n < last; n++) {
        int32_t position = batch->position[n];
        if (it->window && position < batch->end[n] - it->window) continue;
        int32_t place = it->window ? position % it->window : position;
        for (int32_t group = 0; group < it->groups; group++) {
            int64_t at = ((int64_t)batch->slot[n] * it->groups + group) * store->capacity + place;
            const float *key = keys + (n * it->groups + group) * it->width;
            const float *value = values + (n * it->groups + group) * it->value_width;
            keep_row(store->type, (char *)store->keys + at * key_bytes, key, it->width);
            keep_row(store->type, (char *)store->values + at * value_bytes, value, it->value_width);
        }
    }
}
