/* The operations of a step that read one token at a time.  */

#include "functions.h"
#include "matmul_bf16.h"

#include <math.h>

#define PIECE 256 /* numbers of a vector that are one unit of work of an elementwise operation */

static void copy_row(float *out, const struct matrix *table, int64_t row)
{
    int32_t n = table->columns;
    if (table->layout >= LAYOUT_U4) {
        unpack_row(table, row, out);
        return;
    }
    if (table->layout == LAYOUT_F32) {
        memcpy(out, (const float *)table->data + row * n, (size_t)n * sizeof *out);
        return;
    }
    const uint16_t *in = (const uint16_t *)table->data + row * n;
    for (int32_t i = 0; i < n; i++) out[i] = float_of_bf16(in[i]);
}

void step_embed(struct worker *me, const struct instruction *it)
{
    const struct batch *batch = me->batch;
    const struct matrix *table = me->plan->weights + it->weight;
    float *out = buffer(me, it->output);
    int64_t first, last;
    share(me, row_count(me, it), &first, &last);
    for (int64_t n = first; n < last; n++) {
        int64_t row = it->kind == INDEX_IDS         ? batch->ids[n]
                      : it->kind == INDEX_POSITIONS ? batch->position[n]
                      : it->kind == INDEX_TOKENS    ? n
                                                    : 0;
        copy_row(out + n * it->width, table, row + it->number);
    }
}

static struct input input_of(struct worker *me, const struct instruction *it, int32_t rounded)
{
    struct input in = {row_count(me, it), it->width, buffer(me, it->input), it->width, NULL, NULL, NULL};
    if (rounded != -1) place_input(&in, buffer(me, rounded));
    return in;
}

void step_round(struct worker *me, const struct instruction *it)
{
    struct input in = input_of(me, it, it->output);
    int32_t groups = in.columns / GROUP;
    int64_t first, last;
    share(me, (int64_t)in.count * groups, &first, &last);
    while (first < last) {
        int32_t vector = (int32_t)(first / groups), from = (int32_t)(first % groups);
        int32_t to = last - first < groups - from ? from + (int32_t)(last - first) : groups;
        round_groups(&in, vector, from, to);
        first += to - from;
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
    const struct matrix *w = me->plan->weights + it->weight;
    int64_t first, last, bands = (w->rows + BAND - 1) / BAND;
    int64_t products = (int64_t)w->rows * w->columns * row_count(me, it);
    share(me, me->products, &first, &last);
    *first_band = (int32_t)bands_before(me, first, bands, products);
    *last_band = (int32_t)bands_before(me, last, bands, products);
    me->passed += products;
}

void step_linear(struct worker *me, const struct instruction *it)
{
    const struct matrix *weights = me->plan->weights, *w = weights + it->weight;
    struct input in = input_of(me, it, it->second);
    const float *bias = it->bias == -1 ? NULL : (const float *)weights[it->bias].data;
    int32_t first, last;
    step_bands(me, it, &first, &last);
    if (first < last) multiply(w, &in, buffer(me, it->output), w->rows, bias, first, last);
}

CLONES static float sum_of(const float *x, int32_t n)
{
    v16 sum = {0};
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) sum += load16(x + i);
    if (i < n) sum += load_part(x + i, n - i, 0.0f);
    return sum16(sum);
}

/* Sum of (x - mean)^2. */
CLONES static float squares_of(const float *x, int32_t n, float mean)
{
    v16 sum = {0};
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        v16 y = load16(x + i) - mean;
        sum += y * y;
    }
    if (i < n) {
        v16 y = load_part(x + i, n - i, mean) - mean;
        sum += y * y;
    }
    return sum16(sum);
}

CLONES static void normed(float *out, const float *x, int32_t n, float mean, float factor, const float *weight,
                          float more, const float *bias)
{
    for (int32_t i = 0; i < n; i++) out[i] = (x[i] - mean) * factor * (weight[i] + more);
    if (bias)
        for (int32_t i = 0; i < n; i++) out[i] += bias[i];
}

void step_norm(struct worker *me, const struct instruction *it)
{
    const struct matrix *weights = me->plan->weights;
    const float *weight = weights[it->weight].data, *x = buffer(me, it->input);
    const float *bias = it->bias == -1 ? NULL : weights[it->bias].data;
    float *out = buffer(me, it->output);
    int32_t n = it->width;
    int64_t first, last;
    share(me, (int64_t)row_count(me, it) * it->heads, &first, &last);
    for (int64_t unit = first; unit < last; unit++) {
        const float *in = x + unit * n;
        float mean = it->op == OP_LAYER_NORM ? sum_of(in, n) / (float)n : 0.0f;
        float factor = 1.0f / sqrtf(squares_of(in, n, mean) / (float)n + it->first);
        if (!it->number) {
            normed(out + unit * n, in, n, mean, factor, weight, it->other, bias);
            continue;
        }
        uint16_t *rounded = (uint16_t *)out + unit * pairs_in(n) * PAIR;
        for (int32_t i = 0, count; i < n; i += count) {
            float some[PIECE];
            count = n - i < PIECE ? n - i : PIECE;
            normed(some, in + i, count, mean, factor, weight + i, it->other, bias ? bias + i : NULL);
            round_bf16(rounded + i, some, count);
        }
    }
}

CLONES static void turned(float *out, const float *x, const float *cosines, const float *sines, int32_t half,
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

void step_rotate(struct worker *me, const struct instruction *it)
{
    const struct batch *batch = me->batch;
    const float *x = buffer(me, it->input);
    float *out = buffer(me, it->output);
    int32_t n = it->width;
    int64_t first, last;
    share(me, (int64_t)row_count(me, it) * it->heads, &first, &last);
    for (int64_t unit = first; unit < last; unit++) {
        int64_t token = unit / it->heads;
        int far = it->bias != -1 && batch->reach[token] > it->number;
        const struct matrix *table = me->plan->weights + (far ? it->bias : it->weight);
        const float *angles = (const float *)table->data + (int64_t)batch->position[token] * table->columns;
        int32_t half = table->columns / 2;
        const float *in = x + unit * n;
        if (out != x && 2 * half < n) memcpy(out + unit * n + 2 * half, in + 2 * half, (size_t)(n - 2 * half) * 4);
        turned(out + unit * n, in, angles, angles + half, half, it->kind);
    }
}

/* out = f(x), times y where y is not NULL; every number in the same way, wherever it stands. */
CLONES static void mapped(float *out, const float *x, const float *y, int32_t n, int32_t kind, float factor)
{
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        v16 value = function16(load16(x + i), kind, factor);
        store16(out + i, y ? value * load16(y + i) : value);
    }
    if (i < n) {
        v16 value = function16(load_part(x + i, n - i, 0.0f), kind, factor);
        if (y) value = value * load_part(y + i, n - i, 0.0f);
        memcpy(out + i, &value, (size_t)(n - i) * sizeof *out);
    }
}

/* Elementwise work in pieces: piece `unit` of vectors of `width` numbers. */
static int64_t piece(int64_t unit, int32_t width, int32_t *count)
{
    int32_t pieces = (width + PIECE - 1) / PIECE, at = (int32_t)(unit % pieces) * PIECE;
    *count = width - at < PIECE ? width - at : PIECE;
    return unit / pieces * width + at;
}

void step_map(struct worker *me, const struct instruction *it)
{
    const float *x = buffer(me, it->input), *y = it->op == OP_MAP ? NULL : buffer(me, it->second);
    float *out = buffer(me, it->output);
    int64_t first, last;
    share(me, (int64_t)row_count(me, it) * ((it->width + PIECE - 1) / PIECE), &first, &last);
    for (int64_t unit = first; unit < last; unit++) {
        int32_t count;
        int64_t at = piece(unit, it->width, &count);
        mapped(out + at, x + at, y ? y + at : NULL, count, it->kind, it->first);
    }
}

CLONES static void added(float *out, const float *x, const float *y, int32_t n)
{
    for (int32_t i = 0; i < n; i++) out[i] = x[i] + y[i];
}

void step_add(struct worker *me, const struct instruction *it)
{
    const float *x = buffer(me, it->input), *y = buffer(me, it->second);
    float *out = buffer(me, it->output);
    int64_t first, last;
    share(me, (int64_t)row_count(me, it) * ((it->width + PIECE - 1) / PIECE), &first, &last);
    for (int64_t unit = first; unit < last; unit++) {
        int32_t count;
        int64_t at = piece(unit, it->width, &count);
        added(out + at, x + at, y + at, count);
    }
}

CLONES void largest_of(const float *x, int32_t count, int32_t n, int32_t *places, float *tops)
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

void step_choose(struct worker *me, const struct instruction *it)
{
    const float *x = buffer(me, it->input);
    float *out = buffer(me, it->output);
    int64_t first, last;
    share(me, me->batch->chosen_count, &first, &last);
    for (int64_t m = first; m < last; m++)
        memcpy(out + m * it->width, x + (int64_t)me->batch->chosen[m] * it->width, (size_t)it->width * sizeof *out);
}
