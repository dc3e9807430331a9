/* What attention statistics need of a tile of scores, some queries at a time, while these are in the cache
   (`triptych.attention.statistics`): the structure of a call, and for the files kernels_*.c the loops.  The scores are
   the caller's, or products that are computed here.  */

#ifndef TRIPTYCH_STATISTICS_H
#define TRIPTYCH_STATISTICS_H

#include <stdint.h>

#define STATISTICS_TOP 32     /* weights that are kept of a row, at most */
#define STATISTICS_PANEL 64   /* keys that stand side by side: [width][STATISTICS_PANEL] */
#define STATISTICS_QUERIES 24 /* of which a thread has the scores */

/* A key has a number for each of `panels` * STATISTICS_PANEL columns, those beyond `keys` finite.  Results of head h and
   query i stand at [h * stride + i], those of `top` weights at `top` times that.  */
struct score_tile {
    int32_t heads, queries, keys;
    int32_t top;                    /* largest weights of a query that are kept */
    int32_t base;                   /* the position of a key minus its column */
    int64_t stride, row;            /* of the results, and of `received` */
    float *scratch;                 /* scratch_floats() for each thread */
    const float *scores;            /* [heads][queries][keys] as they enter the softmax, hidden ones -inf; or NULL */
    const float *sinks;             /* [heads] or NULL */
    const float *q_pos, *k_pos;     /* positions, [queries] and of each key */
    const float *delimiters;        /* 0 or 1 of each key, or NULL */
    const int32_t *q_doc, *k_doc;   /* documents, [queries] and of each key; or NULL */
    float *entropy, *distance, *first, *previous, *on_delimiters, *on_document, *top_weights;
    float *received;                /* [heads][row], added to */
    int32_t *top_keys;
    const float *q, *k;             /* without scores: [heads][queries][width], [groups][panels][width][STATISTICS_PANEL] */
    const int32_t *group;           /* [heads]: which keys a head reads */
    const int32_t *from, *to;       /* [queries]: the keys that each sees at most */
    int64_t width, panels;
};

#endif

#ifdef ISA

/* Products and sums are fused where the processor can: these are measurements, which agree to rounding, not in bits. */
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")

#define TOGETHER 6 /* queries whose products with a panel are in registers */

/* The largest of n numbers that are 0 or more, in falling order, and their columns; of equal ones the first.  Where
   fewer than `top` are above 0 the others are 0, in column -1. */
INLINE void largest(const float *x, int32_t n, int32_t top, float *weights, int32_t *columns)
{
    for (int32_t k = 0; k < top; k++) weights[k] = 0.0f, columns[k] = -1;
    for (int32_t j = 0; j < n; j += 64) {
        int32_t end = j + 64 < n ? j + 64 : n;
        if (end == j + 64) {
            v16 most = larger(larger(load16(x + j), load16(x + j + 16)), larger(load16(x + j + 32), load16(x + j + 48)));
            v16i above = most > weights[top - 1];
            int64_t bits[8], any = 0;
            memcpy(bits, &above, sizeof bits);
            for (int b = 0; b < 8; b++) any |= bits[b];
            if (!any) continue;
        }
        for (int32_t i = j; i < end; i++) {
            if (!(x[i] > weights[top - 1])) continue;
            int32_t k = top - 1;
            for (; k > 0 && x[i] > weights[k - 1]; k--) weights[k] = weights[k - 1], columns[k] = columns[k - 1];
            weights[k] = x[i], columns[k] = i;
        }
    }
}

struct row_sums {
    v16 weights, dot, distance, delimiters, own;
};

/* Sixteen keys: e^(score - m) in the place of the scores, added to the sums.  `delimiters` and `documents` may be NULL. */
INLINE void add_keys(struct row_sums *to, float *x, float m, const float *k_pos, float q_pos, const float *delimiters,
                     const int32_t *documents, int32_t document)
{
    v16 d = load16(x) - m, e = exp16(d), away = load16(k_pos) - q_pos;
    store16(x, e);
    to->weights += e;
    to->dot += e * larger(d, (v16){0} - 100.0f); /* e is 0 below that, where d may be -inf */
    to->distance += e * (v16)((v16i)away & 0x7fffffff);
    if (delimiters) to->delimiters += e * load16(delimiters);
    if (documents) {
        v16i labels;
        memcpy(&labels, documents, sizeof labels);
        to->own += (v16)((labels == document) & (v16i)e);
    }
}

/* e^(score - maximum) of one row in the place of its scores, of columns `from` (a multiple of STATISTICS_PANEL) to n - 1 and 0 in
   those up to a multiple of 16, and all sums over them but `received`; -> what the numbers are to be multiplied by. */
TARGET static float ISA(row_statistics)(const struct score_tile *t, int32_t head, int32_t query, float *x,
                                        int32_t from, int32_t n)
{
    int32_t end = (n + 15) / 16 * 16, quarters = from + (end - from) / 64 * 64, document = t->q_doc ? t->q_doc[query] : 0;
    int64_t to = head * t->stride + query;
    for (int32_t j = n; j < end; j++) x[j] = -INFINITY;
    v16 most[4];
    for (int i = 0; i < 4; i++) most[i] = (v16){0} - INFINITY;
    for (int32_t j = from; j < quarters; j += 64)
        for (int i = 0; i < 4; i++) most[i] = larger(load16(x + j + 16 * i), most[i]);
    for (int32_t j = quarters; j < end; j += 16) most[0] = larger(load16(x + j), most[0]);
    float m = max16(larger(larger(most[0], most[1]), larger(most[2], most[3])));
    if (t->sinks && t->sinks[head] > m) m = t->sinks[head];
    if (m == -INFINITY) m = 0.0f;

    struct row_sums sums = {0};
    for (int32_t j = from; j < end; j += 16)
        add_keys(&sums, x + j, m, t->k_pos + j, t->q_pos[query], t->delimiters ? t->delimiters + j : NULL,
                 t->k_doc ? t->k_doc + j : NULL, document);

    float all = sum16(sums.weights), z = all + (t->sinks ? expf(t->sinks[head] - m) : 0.0f);
    float nothing = z * 0.0f, scale = z > 0.0f ? 1.0f / z : nothing; /* of no visible key 0, of a NaN NaN */
    t->entropy[to] = z > 0.0f ? (logf(z) * all - sum16(sums.dot)) * scale : nothing;
    t->distance[to] = sum16(sums.distance) * scale;
    int64_t first = -(int64_t)t->base, previous = (int64_t)t->q_pos[query] - 1 - t->base;
    t->first[to] = first >= from && first < n ? x[first] * scale : 0.0f;
    t->previous[to] = t->q_pos[query] > 0 && previous >= from && previous < n ? x[previous] * scale : 0.0f;
    if (t->delimiters) t->on_delimiters[to] = sum16(sums.delimiters) * scale;
    if (t->k_doc) t->on_document[to] = sum16(sums.own) * scale;
    if (t->top < 1) return scale;
    float weights[STATISTICS_TOP];
    int32_t columns[STATISTICS_TOP];
    largest(x + from, n - from, t->top, weights, columns);
    for (int32_t k = 0; k < t->top; k++) {
        t->top_weights[to * t->top + k] = weights[k] * scale;
        t->top_keys[to * t->top + k] = columns[k] < 0 ? -1 : (int32_t)t->k_pos[from + columns[k]];
    }
    return scale;
}

/* Scores [count][row] of queries from `query` on with the keys of panels first to last - 1. */
TARGET static void ISA(score_products)(const struct score_tile *t, float *scores, int32_t head, int32_t query,
                                       int32_t count, int64_t first, int64_t last)
{
    int64_t width = t->width, row = t->panels * STATISTICS_PANEL;
    const float *q = t->q + ((int64_t)head * t->queries + query) * width;
    for (int64_t p = first; p < last; p++) {
        const float *panel = t->k + (t->group[head] * t->panels + p) * width * STATISTICS_PANEL;
        for (int32_t i = 0; i < count; i += TOGETHER) {
            const float *rows[TOGETHER];
            v16 sums[TOGETHER][4] = {0};
            for (int r = 0; r < TOGETHER; r++) rows[r] = q + (i + r < count ? i + r : count - 1) * width;
            for (int64_t c = 0; c < width; c++) {
                const float *keys = panel + c * STATISTICS_PANEL;
                v16 a = load16(keys), b = load16(keys + 16), d = load16(keys + 32), e = load16(keys + 48);
#pragma GCC unroll 6
                for (int r = 0; r < TOGETHER; r++) {
                    float x = rows[r][c];
                    sums[r][0] += a * x, sums[r][1] += b * x, sums[r][2] += d * x, sums[r][3] += e * x;
                }
            }
            for (int r = 0; r < TOGETHER && i + r < count; r++)
                for (int z = 0; z < 4; z++) store16(scores + (i + r) * row + p * STATISTICS_PANEL + 16 * z, sums[r][z]);
        }
    }
}

TARGET static void ISA(statistics)(const struct score_tile *t, int32_t head, int32_t query, float *scores, float *received)
{
    int32_t count = t->queries - query < STATISTICS_QUERIES ? t->queries - query : STATISTICS_QUERIES, first = t->keys, last = 0;
    int64_t row = t->panels * STATISTICS_PANEL;
    float scale[STATISTICS_QUERIES];
    for (int32_t i = query; i < query + count; i++) {
        if (t->from[i] < first) first = t->from[i];
        if (t->to[i] > last) last = t->to[i];
    }
    if (last < first) last = first;
    first = first / STATISTICS_PANEL * STATISTICS_PANEL;
    last = (last + STATISTICS_PANEL - 1) / STATISTICS_PANEL * STATISTICS_PANEL;
    if (!t->scores) ISA(score_products)(t, scores, head, query, count, first / STATISTICS_PANEL, last / STATISTICS_PANEL);
    for (int32_t i = 0; i < count; i++) {
        int32_t from = t->from[query + i], to = t->to[query + i] < from ? from : t->to[query + i];
        int64_t at = (int64_t)head * t->queries + query + i;
        float *x = scores + i * row;
        if (t->scores) memcpy(x, t->scores + at * t->keys, (size_t)t->keys * sizeof *x);
        for (int32_t j = first; j < from; j++) x[j] = -INFINITY;
        scale[i] = ISA(row_statistics)(t, head, query + i, x, first, to);
        memset(x + to, 0, (size_t)(last - to) * sizeof *x);
    }
    for (int32_t j = first; j < last; j += 16) {
        v16 sum = load16(received + j);
        for (int32_t i = 0; i < count; i++) sum += load16(scores + i * row + j) * scale[i];
        store16(received + j, sum);
    }
}

#pragma GCC pop_options

#endif
