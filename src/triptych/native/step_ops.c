/* The operations of a step but attention: products, those of one token at a time, experts, and writing to stores.  */

#include <string.h>

#include "kernels.h"
#include "matmul_bf16.h"
#include "step.h"

#define UNIT 256 /* numbers of a vector that are one unit of work of an elementwise operation */

void step_embed(struct worker *me, const struct instruction *it)
{
    const struct batch *batch = me->batch;
    const struct matrix *table = me->plan->weights + it->embed.table;
    const int32_t type = table->layout == LAYOUT_F32 ? STORED_F32 : STORED_BF16;
    FOR_SHARE(n, row_count(me, it)) {
        float *out = buffer(me, it->output) + n * it->width;
        int64_t row = it->embed.row == INDEX_IDS         ? batch->ids[n]
                      : it->embed.row == INDEX_POSITIONS ? batch->position[n]
                      : it->embed.row == INDEX_TOKENS    ? n
                                                         : 0;
        const char *at = (const char *)table->data + (row + it->embed.shift) * stored_bytes(type, table->columns);
        if (table->layout >= LAYOUT_U4)
            unpack_row(table, row + it->embed.shift, out);
        else
            kernels_in_use->read(type, out, at, 1, table->columns);
    }
}

static struct input input_of(struct worker *me, const struct instruction *it, int32_t rounded)
{
    struct input in = {row_count(me, it), it->width, buffer(me, it->input), it->width, NULL, NULL, NULL};
    if (rounded != -1) place_input(&in, buffer(me, rounded));
    return in;
}

/* A unit is some groups of a vector. */
void step_round(struct worker *me, const struct instruction *it)
{
    struct input in = input_of(me, it, it->output);
    int32_t groups = in.columns / GROUP, most = UNIT / GROUP, pieces = (groups + most - 1) / most;
    FOR_SHARE(unit, (int64_t)in.count * pieces) {
        int32_t from = (int32_t)(unit % pieces) * most;
        round_groups(&in, (int32_t)(unit / pieces), from, from + most < groups ? from + most : groups);
    }
}

/* The bands of this instruction before product `at` of its level. */
static int64_t bands_before(const struct worker *me, int64_t at, int64_t bands, int64_t products)
{
    int64_t band = (at - me->passed) * bands / products;
    return at <= me->passed ? 0 : band < bands ? band : bands;
}

void step_bands(struct worker *me, const struct instruction *it, int32_t *first_band, int32_t *last_band)
{
    const struct matrix *w = me->plan->weights + it->linear.weight;
    int64_t first, last, bands = (w->rows + BAND - 1) / BAND;
    int64_t products = (int64_t)w->rows * w->columns * row_count(me, it);
    share(me, me->products, &first, &last);
    *first_band = (int32_t)bands_before(me, first, bands, products);
    *last_band = (int32_t)bands_before(me, last, bands, products);
    me->passed += products;
}

void step_linear(struct worker *me, const struct instruction *it)
{
    const struct matrix *weights = me->plan->weights, *w = weights + it->linear.weight;
    struct input in = input_of(me, it, it->linear.rounded);
    const float *bias = it->linear.bias == -1 ? NULL : (const float *)weights[it->linear.bias].data;
    int32_t first, last;
    step_bands(me, it, &first, &last);
    if (first < last) multiply(w, &in, buffer(me, it->output), w->rows, bias, first, last);
}

void step_norm(struct worker *me, const struct instruction *it)
{
    const struct kernels *use = kernels_in_use;
    const struct matrix *weights = me->plan->weights;
    const float *weight = weights[it->norm.weight].data, *x = buffer(me, it->input);
    const float *bias = it->norm.bias == -1 ? NULL : weights[it->norm.bias].data;
    float *out = buffer(me, it->output), offset = it->norm.offset;
    int32_t n = it->width;
    FOR_SHARE(unit, (int64_t)row_count(me, it) * it->heads) {
        const float *in = x + unit * n;
        float mean = it->op == OP_LAYER_NORM ? use->sum_of(in, n, 0.0f, 0) / (float)n : 0.0f;
        float factor = 1.0f / sqrtf(use->sum_of(in, n, mean, 1) / (float)n + it->norm.eps);
        if (!it->norm.rounds) {
            use->norm(out + unit * n, in, n, mean, factor, weight, offset, bias);
            continue;
        }
        uint16_t *rounded = (uint16_t *)out + unit * pairs_in(n) * PAIR;
        for (int32_t i = 0, count; i < n; i += count) {
            float some[UNIT];
            count = n - i < UNIT ? n - i : UNIT;
            use->norm(some, in + i, count, mean, factor, weight + i, offset, bias ? bias + i : NULL);
            round_bf16(rounded + i, some, count);
        }
    }
}

void step_rotate(struct worker *me, const struct instruction *it)
{
    const struct batch *batch = me->batch;
    const float *x = buffer(me, it->input);
    float *out = buffer(me, it->output);
    int32_t n = it->width;
    FOR_SHARE(unit, (int64_t)row_count(me, it) * it->heads) {
        int64_t token = unit / it->heads;
        int far = it->rotate.far_table != -1 && batch->reach[token] > it->rotate.near_length;
        const struct matrix *table = me->plan->weights + (far ? it->rotate.far_table : it->rotate.table);
        const float *angles = (const float *)table->data + (int64_t)batch->position[token] * table->columns;
        int32_t half = table->columns / 2;
        const float *in = x + unit * n;
        if (out != x && 2 * half < n) memcpy(out + unit * n + 2 * half, in + 2 * half, (size_t)(n - 2 * half) * 4);
        kernels_in_use->rotate(out + unit * n, in, angles, angles + half, half, it->rotate.pairing);
    }
}

/* A unit is a piece of a vector. */
void step_map(struct worker *me, const struct instruction *it)
{
    const float *x = buffer(me, it->input), *y = it->op == OP_MAP ? NULL : buffer(me, it->map.other);
    float *out = buffer(me, it->output);
    int32_t pieces = (it->width + UNIT - 1) / UNIT;
    FOR_SHARE(unit, (int64_t)row_count(me, it) * pieces) {
        int32_t from = (int32_t)(unit % pieces) * UNIT, count = it->width - from < UNIT ? it->width - from : UNIT;
        int64_t at = unit / pieces * it->width + from;
        kernels_in_use->map(out + at, x + at, y ? y + at : NULL, count, it->map.function, it->map.factor, it->op == OP_ADD);
    }
}

/* The rows of the chosen tokens, or of those of the current expert, one after another. */
void step_choose(struct worker *me, const struct instruction *it)
{
    const int32_t *tokens = it->op == OP_TAKE ? me->members : me->batch->chosen;
    const float *x = buffer(me, it->input);
    float *out = buffer(me, it->output);
    FOR_SHARE(m, it->op == OP_TAKE ? me->taken : me->batch->chosen_count)
        memcpy(out + m * it->width, x + (int64_t)tokens[m] * it->width, (size_t)it->width * sizeof *out);
}

void step_round_bf16(struct worker *me, const struct instruction *it)
{
    const float *x = buffer(me, it->input);
    uint16_t *out = (uint16_t *)buffer(me, it->output);
    int64_t padded = (int64_t)pairs_in(it->width) * PAIR;
    FOR_SHARE(n, row_count(me, it)) round_bf16(out + n * padded, x + n * it->width, it->width);
}

void step_linear_bf16(struct worker *me, const struct instruction *it)
{
    const struct matrix *weights = me->plan->weights, *w = weights + it->linear_bf16.weight;
    int32_t gate = it->linear_bf16.gate, bias = it->linear_bf16.bias, more = it->linear_bf16.more;
    struct bf16_product product = {
        .weight = w, .gate = gate == -1 ? NULL : weights + gate, .count = row_count(me, it),
        .function = it->linear_bf16.function, .factor = it->linear_bf16.factor, .rounded = it->linear_bf16.rounds,
        .x = (const uint16_t *)buffer(me, it->input), .bias = bias == -1 ? NULL : weights[bias].data,
        .more = more == -1 ? NULL : buffer(me, more), .y = buffer(me, it->output)};
    int64_t first, last;
    share(me, pairs_in(w->rows), &first, &last);
    if (first < last) multiply_bf16(&product, (int32_t)first, (int32_t)last);
}

/* A mixture of experts.  They run one after another, each on its own tokens; one thread finds these before the others
   begin.  */

/* The weights of one token's experts: the softmax of its scores, kept for the `top` largest; of equal scores the first
   comes first.  */
static void route(float *out, const float *scores, const struct instruction *it)
{
    int32_t n = it->route.experts;
    float most = scores[0], sum = 0.0f, kept = 0.0f;
    for (int32_t e = 1; e < n; e++)
        if (scores[e] > most) most = scores[e];
    for (int32_t e = 0; e < n; e++) sum += expf(scores[e] - most);
    for (int32_t e = 0; e < n; e++) {
        int32_t better = 0;
        for (int32_t other = 0; other < n; other++)
            better += scores[other] > scores[e] || (scores[other] == scores[e] && other < e);
        out[e] = better < it->route.top ? expf(scores[e] - most) / sum : 0.0f;
        kept += out[e];
    }
    if (it->route.normalized)
        for (int32_t e = 0; e < n; e++) out[e] /= kept;
}

void step_route(struct worker *me, const struct instruction *it)
{
    const float *scores = buffer(me, it->input);
    float *out = buffer(me, it->output), *sum = buffer(me, it->route.sum);
    FOR_SHARE(n, row_count(me, it)) {
        route(out + n * it->route.experts, scores + n * it->route.experts, it);
        memset(sum + n * it->width, 0, (size_t)it->width * sizeof *sum);
    }
}

void step_members(struct worker *me, const struct instruction *it)
{
    const float *weights = buffer(me, it->expert.routes);
    me->taken = 0;
    for (int32_t n = 0; n < me->batch->tokens; n++)
        if (weights[(int64_t)n * it->expert.experts + it->expert.number] != 0.0f) me->members[me->taken++] = n;
}

void step_give(struct worker *me, const struct instruction *it)
{
    const float *x = buffer(me, it->input), *weights = buffer(me, it->expert.routes);
    float *out = buffer(me, it->output);
    FOR_SHARE(i, me->taken) {
        int64_t token = me->members[i];
        float weight = weights[token * it->expert.experts + it->expert.number];
        for (int32_t d = 0; d < it->width; d++) out[token * it->width + d] += x[i * it->width + d] * weight;
    }
}

/* What a cache keeps of a step's keys and values (enum stored_type).  A vector of int8 codes is followed by the scales of
   its groups, in bf16: the largest magnitude of a group, divided by 127.  A number that is read back, in attend_loops.h, is
   its code times the scale, which is exact.  A group with a number that is not finite gives NaN.
   triptych/attention/layer_cache.py does the same.  */

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
        struct spot spot = spot_of(batch, store, batch->slot[n], it->attend.window, position);
        for (int32_t group = 0; group < it->attend.groups; group++) {
            const float *key = keys + (n * it->attend.groups + group) * it->width;
            const float *value = values + (n * it->attend.groups + group) * it->attend.value_width;
            kernels_in_use->keep(store->type, spot.chunk->keys + bytes_before(&spot, it->attend.groups, group, key_bytes), key, it->width);
            kernels_in_use->keep(store->type, spot.chunk->values + bytes_before(&spot, it->attend.groups, group, value_bytes),
                                 value, it->attend.value_width);
        }
    }
}
