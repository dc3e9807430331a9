/* Attention of a step: each query over what the store holds of its row and over the new tokens of the row.

   Keys are read in tiles of TILE positions that begin at multiples of TILE, in the order of positions, with the softmax
   kept up to date from tile to tile (Milakov and Gimelshein 2018).  So the sums of a query do not depend on the other
   queries of the batch, nor on how many of its keys are new.  */

#include "attend.h"
#include "vector.h"

#include <math.h>

#define BLOCK 16   /* neighbouring tokens that are one unit of work, with some heads */
#define TOGETHER 4 /* heads that read the same keys and are one unit at most */

static void widen(float *out, const uint16_t *in, int32_t n)
{
    for (int32_t i = 0; i < n; i++) out[i] = float_of_bf16(in[i]);
}

/* Point at the keys and values of positions [from, to) of the row whose first new token is `token`; what the store
   holds in 16 bits is widened into `wide` first. */
static void fill_tile(struct tile *tile, struct worker *me, const struct instruction *it, int32_t token, int32_t group,
                      float *wide)
{
    const struct batch *batch = me->batch;
    const struct store *store = me->plan->stores + it->store;
    int32_t width = it->width, value_width = it->value_width, first = tile->from - tile->begin;
    int32_t start = batch->start[token], held = INT32_MAX;
    const float *new_keys = NULL, *new_values = NULL;
    if (it->kind != ATTEND_CROSS) {
        held = batch->position[start];
        new_keys = buffer(me, it->second);
        new_values = buffer(me, it->third);
    }
    int64_t slot = it->kind == ATTEND_CROSS ? batch->source_slot[token] : batch->slot[token];
    int64_t plane = held ? (slot * it->groups + group) * store->capacity : 0;
    for (int32_t p = tile->from; p < tile->to; p++) {
        int32_t j = p - tile->begin;
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
    for (int32_t j = 0; j < TILE_KEYS; j++)
        if (j < first || j >= tile->to - tile->begin) tile->keys[j] = tile->keys[first];
}

/* Add places [from, to) of a tile to the sums of a query. */
CLONES static void take_in(struct query *query, const struct tile *tile, const struct instruction *it, int32_t from,
                           int32_t to)
{
    float scores[TILE_KEYS];
    v16 most = (v16){0} - INFINITY;
    for (int32_t j = 0; j < TILE_KEYS; j++) scores[j] = -INFINITY;
    for (int32_t j = from; j < to; j++) scores[j] = it->first * dot(query->q, tile->keys[j], it->width);
    if (it->other > 0.0f)
        for (int32_t j = from / 16 * 16; j < to; j += 16) {
            v16 capped = it->other * tanh16(load16(scores + j) / it->other);
            store16(scores + j, pick(load16(scores + j) == (v16){0} - INFINITY, (v16){0} - INFINITY, capped));
        }
    if (query->bias)
        for (int32_t j = from; j < to; j++) scores[j] += query->bias[query->position - (tile->begin + j)];
    for (int32_t j = 0; j < TILE_KEYS; j += 16) most = larger(load16(scores + j), most);

    float top = max16(most), before = query->most;
    if (before > top) top = before;
    v16 sum = {0};
    for (int32_t j = 0; j < TILE_KEYS; j += 16) {
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

static void portable_tile(struct query *queries, int32_t count, const struct tile *tile, const struct instruction *it)
{
    for (struct query *query = queries; query < queries + count; query++) {
        int32_t from = tile->from > query->lowest ? tile->from : query->lowest;
        int32_t to = tile->to < query->end ? tile->to : query->end;
        if (from < to) take_in(query, tile, it, from - tile->begin, to - tile->begin);
    }
}

static tile_kernel *kernel_in_use(void)
{
#if X86_KERNELS
    if (kernels_in_use() == 2) return avx512_tile;
#endif
    return portable_tile;
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

/* What one token's query with one head is made of. */
static struct query query_of(struct worker *me, const struct instruction *it, int32_t n, int32_t head)
{
    const struct batch *batch = me->batch;
    const struct matrix *bias = it->bias == -1 ? NULL : me->plan->weights + it->bias;
    int64_t vector = (int64_t)n * it->heads + head;
    struct query query = {buffer(me, it->input) + vector * it->width, buffer(me, it->output) + vector * it->value_width,
                          bias ? (const float *)bias->data + (int64_t)head * bias->columns : NULL, -INFINITY, 0.0f, 0,
                          0, batch->position[n]};
    query.end = it->kind == ATTEND_CROSS ? batch->source[n]
                : it->kind == ATTEND_ROW ? batch->end[n]
                                         : query.position + 1;
    if (it->kind == ATTEND_SELF && it->window && query.end > it->window) query.lowest = query.end - it->window;
    memset(query.out, 0, (size_t)it->value_width * sizeof *query.out);
    return query;
}

/* Tokens [first, last), all of one row, with the heads [head, head + heads), all of one group. */
static void attend_row(struct worker *me, const struct instruction *it, int32_t first, int32_t last, int32_t head,
                       int32_t heads)
{
    const float *sinks = it->weight == -1 ? NULL : me->plan->weights[it->weight].data;
    tile_kernel *kernel = kernel_in_use();
    struct query queries[BLOCK * TOGETHER];
    struct tile tile;
    int32_t lowest = INT32_MAX, highest = 0, count = 0;
    for (int32_t n = first; n < last; n++)
        for (int32_t h = head; h < head + heads; h++) {
            struct query *query = queries + count++;
            *query = query_of(me, it, n, h);
            lowest = query->lowest < lowest ? query->lowest : lowest;
            highest = query->end > highest ? query->end : highest;
        }
    tile.across = (float *)(((uintptr_t)me->scratch + 63) / 64 * 64);
    for (tile.begin = lowest / TILE_KEYS * TILE_KEYS; tile.begin < highest; tile.begin += TILE_KEYS) {
        tile.from = tile.begin > lowest ? tile.begin : lowest;
        tile.to = tile.begin + TILE_KEYS < highest ? tile.begin + TILE_KEYS : highest;
        fill_tile(&tile, me, it, first, head / (it->heads / it->groups), tile.across + TILE_KEYS * it->width);
        kernel(queries, count, &tile, it);
    }
    for (int32_t i = 0; i < count; i++)
        finish(queries + i, it->value_width, sinks ? sinks + head + i % heads : NULL);
}

/* A unit is BLOCK tokens with heads of one group, which share the work on the keys; with one head alone where that
   makes too few units for all threads.  */
void step_attend(struct worker *me, const struct instruction *it)
{
    const struct batch *batch = me->batch;
    int32_t blocks = (batch->tokens + BLOCK - 1) / BLOCK, per_group = it->heads / it->groups;
    int32_t together = per_group < TOGETHER ? per_group : TOGETHER;
    if ((int64_t)blocks * it->groups < 4 * me->threads) together = 1;
    int32_t parts = (per_group + together - 1) / together;
    int64_t first, last;
    share(me, (int64_t)blocks * it->groups * parts, &first, &last);
    for (int64_t unit = first; unit < last; unit++) {
        int32_t n = (int32_t)(unit / (it->groups * parts)) * BLOCK, part = (int32_t)(unit % (it->groups * parts));
        int32_t head = part / parts * per_group + part % parts * together, left = per_group - part % parts * together;
        int32_t end = n + BLOCK < batch->tokens ? n + BLOCK : batch->tokens;
        while (n < end) {
            int32_t next = n + 1;
            while (next < end && batch->start[next] == batch->start[n]) next++;
            attend_row(me, it, n, next, head, left < together ? left : together);
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
