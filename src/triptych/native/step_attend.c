/* Attention of a step: each query over what the store holds of its row and over the new tokens of the row.

   Keys are read in tiles of TILE positions that begin at multiples of TILE, in the order of positions, with the softmax
   kept up to date from tile to tile (Milakov and Gimelshein 2018).  So the sums of a query do not depend on the other
   queries of the batch, nor on how many of its keys are new.  */

#include "step.h"
#include "vector.h"

#include <math.h>

#define TILE 64
#define BLOCK 8 /* neighbouring tokens that are one unit of work, with one head */

/* The keys and values of one tile: of position `first` + j at place j. */
struct tile {
    const float *keys[TILE];
    const float *values[TILE];
};

/* A query and its sums so far. */
struct query {
    const float *q;
    float *out;
    float most, total;
    int32_t lowest, end, position; /* positions [lowest, end) are visible */
};

static void widen(float *out, const uint16_t *in, int32_t n)
{
    for (int32_t i = 0; i < n; i++) out[i] = float_of_bf16(in[i]);
}

/* Point at the keys and values of positions [from, to) of the row whose first new token is `token`; what the store
   holds in 16 bits is widened into `scratch` first. */
static void fill_tile(struct tile *tile, struct worker *me, const struct instruction *it, int32_t token, int32_t group,
                      int32_t from, int32_t to)
{
    const struct batch *batch = me->batch;
    const struct store *store = me->plan->stores + it->store;
    int32_t width = it->width, value_width = it->value_width, begin = from / TILE * TILE;
    int32_t start = batch->start[token], held = INT32_MAX;
    const float *new_keys = NULL, *new_values = NULL;
    if (it->kind == ATTEND_SELF) {
        held = batch->position[start];
        new_keys = buffer(me, it->second);
        new_values = buffer(me, it->third);
    }
    float *wide = me->scratch;
    int64_t plane = ((int64_t)batch->slot[token] * it->groups + group) * store->capacity;
    for (int32_t p = from; p < to; p++) {
        int32_t j = p - begin;
        if (p >= held) {
            int64_t row = (int64_t)(start + p - held) * it->groups + group;
            tile->keys[j] = new_keys + row * width;
            tile->values[j] = new_values + row * value_width;
            continue;
        }
        int64_t place = plane + (it->window ? p % it->window : p);
        if (store->type == TYPE_F32) {
            tile->keys[j] = (const float *)store->keys + place * width;
            tile->values[j] = (const float *)store->values + place * value_width;
            continue;
        }
        widen(wide, (const uint16_t *)store->keys + place * width, width);
        widen(wide + width, (const uint16_t *)store->values + place * value_width, value_width);
        tile->keys[j] = wide;
        tile->values[j] = wide + width;
        wide += width + value_width;
    }
}

/* Add places [from, to) of a tile, whose first position is `begin`, to the sums of a query.  bias: of this head by
   distance, or NULL. */
CLONES static void take_in(struct query *query, const struct tile *tile, const struct instruction *it, int32_t begin,
                           int32_t from, int32_t to, const float *bias)
{
    float scores[TILE];
    v16 most = (v16){0} - INFINITY;
    for (int32_t j = 0; j < TILE; j++) scores[j] = -INFINITY;
    for (int32_t j = from; j < to; j++) scores[j] = it->first * dot(query->q, tile->keys[j], it->width);
    if (it->other > 0.0f)
        for (int32_t j = from / 16 * 16; j < to; j += 16) {
            v16 capped = it->other * tanh16(load16(scores + j) / it->other);
            store16(scores + j, pick(load16(scores + j) == (v16){0} - INFINITY, (v16){0} - INFINITY, capped));
        }
    if (bias)
        for (int32_t j = from; j < to; j++) scores[j] += bias[query->position - (begin + j)];
    for (int32_t j = 0; j < TILE; j += 16) most = larger(load16(scores + j), most);

    float top = max16(most), before = query->most;
    if (before > top) top = before;
    v16 sum = {0};
    for (int32_t j = 0; j < TILE; j += 16) {
        v16 weights = exp16(load16(scores + j) - top);
        store16(scores + j, weights);
        sum += weights;
    }
    float kept = sum16(exp16((v16){0} + (before - top)));
    kept = before == top ? 1.0f : kept / 16.0f;
    query->total = query->total * kept + sum16(sum);
    query->most = top;

    int32_t width = it->value_width, d = 0;
    for (; d + 16 <= width; d += 16) {
        v16 out = load16(query->out + d) * kept;
        for (int32_t j = from; j < to; j++) out += scores[j] * load16(tile->values[j] + d);
        store16(query->out + d, out);
    }
    for (; d < width; d++) {
        float out = query->out[d] * kept;
        for (int32_t j = from; j < to; j++) out += scores[j] * tile->values[j][d];
        query->out[d] = out;
    }
}

/* The end of the softmax, with the head's sink where there is one. */
static void finish(struct query *query, int32_t width, const float *sink)
{
    float factor = 1.0f, total = query->total;
    if (sink) {
        float top = *sink > query->most ? *sink : query->most;
        factor = total > 0.0f ? expf(query->most - top) : 0.0f;
        total = total * factor + expf(*sink - top);
    }
    factor = total > 0.0f ? factor / total : 0.0f;
    for (int32_t d = 0; d < width; d++) query->out[d] *= factor;
}

/* Tokens [first, last), all of one row, with one head. */
static void attend_row(struct worker *me, const struct instruction *it, int32_t first, int32_t last, int32_t head)
{
    const struct batch *batch = me->batch;
    const struct matrix *weights = me->plan->weights;
    const float *bias = NULL;
    if (it->bias != -1) bias = (const float *)weights[it->bias].data + (int64_t)head * weights[it->bias].columns;
    struct query queries[BLOCK];
    struct tile tile;
    int32_t lowest = INT32_MAX, highest = 0;
    for (int32_t n = first; n < last; n++) {
        struct query *query = queries + (n - first);
        int64_t vector = (int64_t)n * it->heads + head;
        *query = (struct query){buffer(me, it->input) + vector * it->width,
                                buffer(me, it->output) + vector * it->value_width, -INFINITY, 0.0f, 0, 0,
                                batch->position[n]};
        query->end = it->kind == ATTEND_CROSS ? batch->source[n] : query->position + 1;
        if (it->kind == ATTEND_SELF && it->window && query->end > it->window) query->lowest = query->end - it->window;
        lowest = query->lowest < lowest ? query->lowest : lowest;
        highest = query->end > highest ? query->end : highest;
        memset(query->out, 0, (size_t)it->value_width * sizeof *query->out);
    }
    for (int32_t begin = lowest / TILE * TILE; begin < highest; begin += TILE) {
        int32_t from = begin > lowest ? begin : lowest, to = begin + TILE < highest ? begin + TILE : highest;
        fill_tile(&tile, me, it, first, head / (it->heads / it->groups), from, to);
        for (int32_t i = 0; i < last - first; i++) {
            struct query *query = queries + i;
            int32_t own = from > query->lowest ? from : query->lowest, end = to < query->end ? to : query->end;
            if (own < end) take_in(query, &tile, it, begin, own - begin, end - begin, bias);
        }
    }
    const float *sinks = it->weight == -1 ? NULL : weights[it->weight].data;
    for (int32_t i = 0; i < last - first; i++) finish(queries + i, it->value_width, sinks ? sinks + head : NULL);
}

void step_attend(struct worker *me, const struct instruction *it)
{
    const struct batch *batch = me->batch;
    int32_t blocks = (batch->tokens + BLOCK - 1) / BLOCK;
    int64_t first, last;
    share(me, (int64_t)blocks * it->heads, &first, &last);
    for (int64_t unit = first; unit < last; unit++) {
        int32_t head = (int32_t)(unit % it->heads), n = (int32_t)(unit / it->heads) * BLOCK;
        int32_t end = n + BLOCK < batch->tokens ? n + BLOCK : batch->tokens;
        while (n < end) {
            int32_t next = n + 1;
            while (next < end && batch->start[next] == batch->start[n]) next++;
            attend_row(me, it, n, next, head);
            n = next;
        }
    }
}

static void keep(const struct store *store, void *target, int64_t place, const float *x, int32_t n)
{
    if (store->type == TYPE_F32) {
        memcpy((float *)target + place * n, x, (size_t)n * sizeof *x);
        return;
    }
    uint16_t *out = (uint16_t *)target + place * n;
    for (int32_t i = 0; i < n; i++) out[i] = bf16_of_float(x[i]);
}

/* A ring keeps the last `window` tokens of a row: an earlier one would take the place of one of these. */
void step_extend(struct worker *me, const struct instruction *it)
{
    const struct batch *batch = me->batch;
    const struct store *store = me->plan->stores + it->store;
    const float *keys = buffer(me, it->second), *values = buffer(me, it->third);
    int64_t first, last;
    share(me, batch->tokens, &first, &last);
    for (int64_t n = first; n < last; n++) {
        int32_t position = batch->position[n];
        if (it->window && position < batch->end[n] - it->window) continue;
        int32_t place = it->window ? position % it->window : position;
        for (int32_t group = 0; group < it->groups; group++) {
            int64_t at = ((int64_t)batch->slot[n] * it->groups + group) * store->capacity + place;
            keep(store, store->keys, at, keys + (n * it->groups + group) * it->width, it->width);
            keep(store, store->values, at, values + (n * it->groups + group) * it->value_width, it->value_width);
        }
    }
}
