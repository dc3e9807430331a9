/* Writes a step's keys and values to the stores of a cache, in the types of enum stored_type, and reads them back.

   A vector of int8 codes is followed by the scales of its groups, in bf16: the largest magnitude of a group, divided by
   127.  A number that is read back, in attend_loops.h, is its code times the scale, which is exact, so every kernel
   reads the same bits.  A group with a number that is not finite gives NaN.  triptych/attention/cache_types.py does the
   same.  */

#include "attend.h"

int64_t stored_bytes(int32_t type, int32_t width)
{
    if (type == STORED_INT8) return width + (width + GROUP - 1) / GROUP * (int64_t)sizeof(uint16_t);
    return (int64_t)width * (type == STORED_F32 ? 4 : 2);
}

/* Numbers as a store gives them back: new keys and values are read like those of earlier steps. */
void step_stored(struct worker *me, const struct instruction *it)
{
    const float *x = buffer(me, it->input);
    float *out = buffer(me, it->output);
    int32_t pieces = (it->width + GROUP - 1) / GROUP;
    FOR_SHARE(unit, (int64_t)row_count(me, it) * it->heads * pieces) {
        float kept[GROUP + 1]; /* as bytes of any type */
        int32_t from = (int32_t)(unit % pieces) * GROUP, n = it->width - from < GROUP ? it->width - from : GROUP;
        int64_t at = unit / pieces * it->width + from;
        kernels_in_use->keep(it->stored.type, kept, x + at, n);
        kernels_in_use->read(it->stored.type, out + at, kept, 1, n);
    }
}

/* A ring keeps the last `window` tokens of a row: an earlier one would take the place of one of these. */
void step_extend(struct worker *me, const struct instruction *it)
{
    const struct batch *batch = me->batch;
    const struct store *store = me->plan->stores + it->attend.store;
    const float *keys = buffer(me, it->attend.keys), *values = buffer(me, it->attend.values);
    int64_t key_bytes = stored_bytes(store->type, it->width), value_bytes = stored_bytes(store->type, it->attend.value_width);
    FOR_SHARE(n, batch->tokens) {
        int32_t position = batch->position[n];
        if (it->attend.window && position < batch->end[n] - it->attend.window) continue;
        int32_t place = it->attend.window ? position % it->attend.window : position;
        for (int32_t group = 0; group < it->attend.groups; group++) {
            int64_t at = ((int64_t)batch->slot[n] * it->attend.groups + group) * store->capacity + place;
            const float *key = keys + (n * it->attend.groups + group) * it->width;
            const float *value = values + (n * it->attend.groups + group) * it->attend.value_width;
            kernels_in_use->keep(store->type, (char *)store->keys + at * key_bytes, key, it->width);
            kernels_in_use->keep(store->type, (char *)store->values + at * value_bytes, value, it->attend.value_width);
        }
    }
}
