/* What attention statistics need of a tile of scores, in one pass over each row while it is in the cache
   (`triptych.attention.statistics`).  Products and sums are fused where the processor can: these are measurements, which
   agree to rounding and not to the bit. */

#pragma GCC optimize("fp-contract=fast")

#include <math.h>

#include "vector.h"

#define MOST_TOP 32  /* weights that are kept of a row, at most */
#define COLUMNS 512  /* of which one thread sums the weights */

/* Scores [heads][queries][keys] as they enter the softmax, hidden ones -inf; they are overwritten.  The results of head
   h and query i stand at [h * stride + i], those of `top` weights at `top` times that; `received` [heads][row] is added
   to.  Distances are between q_pos [queries] and k_pos [keys]; a key whose position is `position of the query - 1`
   stands in the column of that number minus `base`, and the first token in column -base.  NULL: no sinks [heads],
   delimiters [keys] of 0 and 1, or documents.  `scale` [heads][queries] is memory of the caller. */
struct score_tile {
    int32_t heads, queries, keys, top, base;
    int64_t stride, row;
    float *scores, *scale;
    const float *sinks, *q_pos, *k_pos, *delimiters;
    const int32_t *q_doc, *k_doc;
    float *entropy, *distance, *first, *previous, *on_delimiters, *on_document, *top_weights, *received;
    int32_t *top_keys;
};

/* The largest of n numbers that are 0 or more, in falling order, and their columns; of equal ones the first.  Where
   fewer than `top` are above 0 the others are 0, in column -1. */
INLINE void largest(const float *x, int32_t n, int32_t top, float *weights, int32_t *columns)
{
    for (int32_t k = 0; k < top; k++) weights[k] = 0.0f, columns[k] = -1;
    for (int32_t j = 0; j < n; j += 64) {
        int32_t end = j + 64 < n ? j + 64 : n;
        if (end == j + 64) {
            v16 most = larger(larger(load16(x + j), load16(x + j + 16)), larger(load16(x + j + 32), load16(x + j + 48)));
            i16 above = most > weights[top - 1];
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

struct sums {
    v16 weights, dot, distance, delimiters, own;
};

/* Sixteen keys: e^(score - m) in the place of the scores, added to the sums.  `delimiters` and `documents` may be NULL. */
INLINE void add_keys(struct sums *to, float *x, float m, const float *k_pos, float q_pos, const float *delimiters,
                     const int32_t *documents, int32_t document)
{
    v16 d = load16(x) - m, e = exp16(d), away = load16(k_pos) - q_pos;
    store16(x, e);
    to->weights += e;
    to->dot += e * larger(d, (v16){0} - 100.0f); /* e is 0 below that, where d may be -inf */
    to->distance += e * (v16)((i16)away & 0x7fffffff);
    if (delimiters) to->delimiters += e * load16(delimiters);
    if (documents) {
        i16 labels;
        memcpy(&labels, documents, sizeof labels);
        to->own += (v16)((labels == document) & (i16)e);
    }
}

/* e^(score - maximum) of one row in the place of its scores, and all sums over it but `received`. */
CLONES static void row_statistics(const struct score_tile *t, int32_t head, int32_t query)
{
    int32_t n = t->keys, whole = n / 16 * 16, rest = n - whole, document = t->q_doc ? t->q_doc[query] : 0;
    float *x = t->scores + ((int64_t)head * t->queries + query) * n;
    int64_t to = head * t->stride + query;
    /* The last keys, with others behind them that nothing is given to. */
    float last[16], last_pos[16] = {0}, last_delimiters[16] = {0};
    int32_t last_documents[16] = {0};
    for (int32_t j = 0; j < 16; j++) last[j] = j < rest ? x[whole + j] : -INFINITY;
    memcpy(last_pos, t->k_pos + whole, (size_t)rest * sizeof *last_pos);
    if (t->delimiters) memcpy(last_delimiters, t->delimiters + whole, (size_t)rest * sizeof *last_delimiters);
    if (t->k_doc) memcpy(last_documents, t->k_doc + whole, (size_t)rest * sizeof *last_documents);

    v16 most[4] = {load16(last), load16(last), load16(last), load16(last)};
    int32_t quarters = whole / 64 * 64;
    for (int32_t j = 0; j < quarters; j += 64)
        for (int i = 0; i < 4; i++) most[i] = larger(load16(x + j + 16 * i), most[i]);
    for (int32_t j = quarters; j < whole; j += 16) most[0] = larger(load16(x + j), most[0]);
    float m = max16(larger(larger(most[0], most[1]), larger(most[2], most[3])));
    if (t->sinks && t->sinks[head] > m) m = t->sinks[head];
    if (m == -INFINITY) m = 0.0f;

    struct sums sums = {0};
    for (int32_t j = 0; j < whole; j += 16)
        add_keys(&sums, x + j, m, t->k_pos + j, t->q_pos[query], t->delimiters ? t->delimiters + j : NULL,
                 t->k_doc ? t->k_doc + j : NULL, document);
    add_keys(&sums, last, m, last_pos, t->q_pos[query], t->delimiters ? last_delimiters : NULL,
             t->k_doc ? last_documents : NULL, document);
    memcpy(x + whole, last, (size_t)rest * sizeof *x);

    float all = sum16(sums.weights), z = all + (t->sinks ? expf(t->sinks[head] - m) : 0.0f), scale = z > 0.0f ? 1.0f / z : 0.0f;
    t->scale[(int64_t)head * t->queries + query] = scale;
    t->entropy[to] = z > 0.0f ? (logf(z) * all - sum16(sums.dot)) * scale : 0.0f;
    t->distance[to] = sum16(sums.distance) * scale;
    int64_t first = -(int64_t)t->base, previous = (int64_t)t->q_pos[query] - 1 - t->base;
    t->first[to] = first >= 0 && first < n ? x[first] * scale : 0.0f;
    t->previous[to] = t->q_pos[query] > 0 && previous >= 0 && previous < n ? x[previous] * scale : 0.0f;
    if (t->delimiters) t->on_delimiters[to] = sum16(sums.delimiters) * scale;
    if (t->k_doc) t->on_document[to] = sum16(sums.own) * scale;
    if (t->top < 1) return;
    float weights[MOST_TOP];
    int32_t columns[MOST_TOP];
    largest(x, n, t->top, weights, columns);
    for (int32_t k = 0; k < t->top; k++) {
        t->top_weights[to * t->top + k] = weights[k] * scale;
        t->top_keys[to * t->top + k] = columns[k] < 0 ? -1 : (int32_t)t->k_pos[columns[k]];
    }
}

/* What the keys of one block of columns received from all queries. */
CLONES static void received(const struct score_tile *t, int32_t head, int32_t from)
{
    int32_t count = t->keys - from < COLUMNS ? t->keys - from : COLUMNS;
    float *to = t->received + head * t->row + from;
    for (int32_t i = 0; i < t->queries; i++) {
        const float *x = t->scores + ((int64_t)head * t->queries + i) * t->keys + from;
        float scale = t->scale[(int64_t)head * t->queries + i];
        int32_t j = 0;
        for (; j + 16 <= count; j += 16) store16(to + j, load16(to + j) + load16(x + j) * scale);
        for (; j < count; j++) to[j] += x[j] * scale;
    }
}

/* Fill the results of a tile.  0: done; 1: more than MOST_TOP weights were asked for, and nothing was done. */
int score_statistics(const struct score_tile *t, int32_t threads)
{
    if (t->top > MOST_TOP) return 1;
    int32_t blocks = (t->keys + COLUMNS - 1) / COLUMNS;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for collapse(2)
        for (int32_t h = 0; h < t->heads; h++)
            for (int32_t i = 0; i < t->queries; i++) row_statistics(t, h, i);
#pragma omp for collapse(2)
        for (int32_t h = 0; h < t->heads; h++)
            for (int32_t b = 0; b < blocks; b++) received(t, h, b * COLUMNS);
    }
    return 0;
}
