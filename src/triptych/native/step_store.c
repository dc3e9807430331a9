/* What a cache keeps of a step's keys and values, and how it is read back (enum stored_type).

   A vector of int8 codes is followed by the scales of its groups, in bf16: the largest magnitude of a group, divided by
   127.  A number that is read back, in attend_loops.h, is its code times the scale, which is exact, so every kernel
   reads the same bits.  A group with a number that is not finite gives NaN.  triptych/attention/cache_types.py does the
   same.  */

#include "attend.h"

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

CLONES void keep_row(int32_t type, void *row, const float *x, int32_t n)
{
    uint16_t *out = row;
    if (type == STORED_F32) memcpy(row, x, (size_t)n * sizeof *x);
    for (int32_t i = 0; i < n && type == STORED_BF16; i++) out[i] = bf16_of_float(x[i]);
    for (int32_t i = 0; i < n && type == STORED_F16; i++) out[i] = f16_of_float(x[i]);
    for (int32_t i = 0; i < n && type == STORED_INT8; i += GROUP)
        codes_of((int8_t *)row + i, (uint8_t *)row + n + i / GROUP * 2, x + i, n - i < GROUP ? n - i : GROUP);
}

void read_rows(int32_t type, float *out, const void *rows, int32_t count, int32_t n)
{
    kernels_in_use->attend->read(type, out, rows, count, n);
}

/* Numbers as a store of type `kind` gives them back: new keys and values are read like those of earlier steps. */
void step_stored(struct worker *me, const struct instruction *it)
{
    const float *x = buffer(me, it->input);
    float *out = buffer(me, it->output);
    int32_t pieces = (it->width + GROUP - 1) / GROUP;
    FOR_SHARE(unit, (int64_t)row_count(me, it) * it->heads * pieces) {
        float kept[GROUP + 1]; /* as bytes of any type */
        int32_t from = (int32_t)(unit % pieces) * GROUP, n = it->width - from < GROUP ? it->width - from : GROUP;
        int64_t at = unit / pieces * it->width + from;
        keep_row(it->kind, kept, x + at, n);
        read_rows(it->kind, out + at, kept, 1, n);
    }
}

/* A ring keeps the last `window` tokens of a row: an earlier one would take the place of one of these. */
void step_extend(struct worker *me, const struct instruction *it)
{
    const struct batch *batch = me->batch;
    const struct store *store = me->plan->stores + it->store;
    const float *keys = buffer(me, it->second), *values = buffer(me, it->third);
    int64_t key_bytes = stored_bytes(store->type, it->width), value_bytes = stored_bytes(store->type, it->value_width);
    FOR_SHARE(n, batch->tokens) {
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
