/* The loops of attention of a training step (train.h), included by train_loops.h.

   A thread has a row and head, or the heads of a group, to itself: it lays out the keys and values as right sides of
   products, then computes QUERY_BLOCK queries at a time over all keys that one of them sees.  The backward pass computes
   the scores again.  */

/* The numbers of one query: its bias and its mask, NULL without, and the end of the keys that it sees. */
struct seen {
    const float *bias;
    const uint8_t *visible;
    int64_t end;
};

INLINE struct seen seen_by(const struct train_attention *a, int64_t row, int64_t head, int64_t query)
{
    struct seen seen = {NULL, NULL, a->keys};
    if (a->bias.data) seen.bias = vector_of(&a->bias, row, head, query, 0);
    if (a->visible.data)
        seen.visible = (const uint8_t *)a->visible.data + row * a->visible.row + head * a->visible.head +
                       query * a->visible.token;
    if (a->causal) seen.end = least(a->keys, a->keys - a->queries + query + 1);
    return seen;
}

/* The end of the keys that some of `count` queries from `first` on see; where they have one mask, the hidden keys at its
   end are left out. */
INLINE int64_t end_of(const struct train_attention *a, int64_t row, int64_t head, int64_t first, int64_t count)
{
    struct seen seen = seen_by(a, row, head, first + count - 1);
    while (seen.visible && a->visible.token == 0 && seen.end > 0 && !seen.visible[seen.end - 1]) seen.end--;
    return seen.end > 0 ? seen.end : 0;
}

/* Scores from key j on, scaled, with their bias; -infinity where hidden. */
INLINE vf adjusted(const float *x, int64_t j, const struct seen *seen, float scale)
{
    const vf none = all_of(-INFINITY);
    const int64_t left = seen->end - j;
    vf y = load(x + j) * scale;
    if (left <= 0) return none;
    if (seen->bias) y += numbers(seen->bias, j, seen->end, 0);
    if (left < LANES) y = chosen(lanes_before(left), y, none);
    if (seen->visible) {
        vb bytes = {0};
        if (left < LANES)
            memcpy(&bytes, seen->visible + j, (size_t)left);
        else
            memcpy(&bytes, seen->visible + j, sizeof bytes);
        y = chosen(__builtin_convertvector(bytes, vi) != 0, y, none);
    }
    return y;
}

/* Scores become weights e^(score - the largest), in units; the inverse of their sum, and the logarithm of the sum of
   e^score. */
INLINE float weigh(float *x, uint16_t *weights, int64_t n, const struct seen *seen, float scale, float *lse)
{
    vf most = all_of(-INFINITY), sum = {0};
    for (int64_t j = 0; j < n; j += LANES) {
        vf y = adjusted(x, j, seen, scale);
        store(x + j, y);
        most = larger_or_last(y, most);
    }
    float top = largest_lane(most), shift = top == -INFINITY ? 0.0f : top;
    for (int64_t j = 0; j < n; j += LANES) {
        vf y = exponential(load(x + j) - shift);
        sum += y;
        if (PAIRS)
            keep(weights, j, j + LANES, y, 1);
        else
            store(x + j, y);
    }
    float total = sum_of_lanes(sum);
    *lse = total == 0.0f ? INFINITY : shift + logf(total);
    return total == 0.0f ? 0.0f : 1.0f / total;
}

/* Scores become weights, and the gradients d of the weights become those of the scores; these are added to `d_bias` where
   it is not NULL. */
INLINE void weigh_back(float *x, float *d, int64_t n, const struct seen *seen, float scale, float lse, float delta,
                       float *d_bias)
{
    for (int64_t j = 0; j < n; j += LANES) {
        vf weight = exponential(adjusted(x, j, seen, scale) - lse), gradient = weight * (load(d + j) - delta);
        store(x + j, weight);
        store(d + j, gradient);
        if (d_bias && j < seen->end) keep(d_bias, j, seen->end, gradient + numbers(d_bias, j, seen->end, 0), 0);
    }
}

/* Parts of the scratch memory of a thread.  As right sides: of keys and values their columns, in the forward pass of
   values the rows, and the rows of keys; of queries and gradients of the output the rows. */
struct places {
    float *keys, *values, *key_rows, *query_rows, *d_rows; /* right sides */
    float *query, *d_out;                                  /* left sides, [QUERY_BLOCK] */
    float *scores, *d_scores;                              /* [QUERY_BLOCK][stride] */
    float *weights, *d_weights, *d_lines;                  /* the same in bf16, two queries or two keys in a unit */
    float *d_k, *d_v, *tile, *lines, *end;
    int64_t stride;
};

INLINE struct places places_of(const struct train_attention *a, float *at)
{
    const int64_t keys = whole16(a->keys), k = whole16(a->width), v = whole16(a->value_width), most = k > v ? k : v;
    struct places p = {.stride = keys + 16};
#define TAKE(NAME, COUNT) p.NAME = at, at += (COUNT)
    TAKE(keys, keys * k), TAKE(values, keys * v), TAKE(key_rows, keys * k);
    TAKE(query_rows, QUERY_BLOCK * k), TAKE(d_rows, QUERY_BLOCK * v);
    TAKE(query, QUERY_BLOCK * k), TAKE(d_out, QUERY_BLOCK * v);
    TAKE(scores, QUERY_BLOCK * p.stride), TAKE(d_scores, QUERY_BLOCK * p.stride);
    TAKE(weights, QUERY_BLOCK * p.stride / 2), TAKE(d_weights, QUERY_BLOCK * p.stride / 2);
    TAKE(d_lines, QUERY_BLOCK * p.stride / 2);
    TAKE(d_k, keys * k), TAKE(d_v, keys * v), TAKE(tile, QUERY_BLOCK * most), TAKE(lines, 16 * most);
    p.end = at;
    return p;
}

/* Scores of `count` queries over n keys, n a multiple of 16. */
INLINE void block_scores(const struct train_attention *a, const struct places *p, int64_t row, int64_t head, int64_t first,
                         int64_t count, int64_t n)
{
    const int64_t units = units_of(a->width);
    for (int64_t i = 0; i < count; i++)
        vector_units(p->query + i * units, vector_of(&a->q, row, head, first + i, a->bf16), a->width, a->bf16);
    ISA(product)(p->scores, p->stride, count, n, p->query, units, 1, p->keys, whole16(a->keys), units, units, 0);
}

TARGET static void ISA(attend)(const struct train_attention *a, int64_t row, int64_t head, float *scratch)
{
    const struct places p = places_of(a, scratch);
    const int64_t group = head / (a->heads / a->groups), bf16 = a->bf16, values = whole16(a->value_width);
    const float scale = (float)a->scale;
    float inverse[QUERY_BLOCK];
    ISA(columns)(p.keys, vector_of(&a->k, row, group, 0, bf16), a->k.token, a->keys, a->width, bf16, p.lines);
    ISA(rows)(p.values, vector_of(&a->v, row, group, 0, bf16), a->v.token, a->keys, a->value_width, bf16);
    for (int64_t first = 0; first < a->queries; first += QUERY_BLOCK) {
        int64_t count = least(a->queries - first, QUERY_BLOCK), end = end_of(a, row, head, first, count);
        int64_t n = whole16(end);
        float *lse = a->lse + (row * a->heads + head) * a->queries + first;
        block_scores(a, &p, row, head, first, count, n);
        for (int64_t i = 0; i < count; i++) {
            struct seen seen = seen_by(a, row, head, first + i);
            inverse[i] = weigh(p.scores + i * p.stride, (uint16_t *)(p.weights + i * p.stride / 2), n, &seen, scale, lse + i);
        }
        ISA(product)(p.tile, values, count, values, PAIRS ? p.weights : p.scores, PAIRS ? p.stride / 2 : p.stride, 1,
                     p.values, values, units_of(a->keys), units_of(end), 0);
        for (int64_t i = 0; i < count; i++)
            keep_scaled((void *)vector_of(&a->out, row, head, first + i, bf16), p.tile + i * values, a->value_width,
                        inverse[i], bf16);
    }
}

/* The sum of the products of the gradient of the output of a query with that output. */
INLINE float delta_of(const struct train_attention *a, int64_t row, int64_t head, int64_t query)
{
    const void *x = vector_of(&a->out, row, head, query, a->bf16), *y = vector_of(&a->d_out, row, head, query, a->bf16);
    vf sum = {0};
    for (int64_t i = 0; i < a->value_width; i += LANES)
        sum += numbers(x, i, a->value_width, a->bf16) * numbers(y, i, a->value_width, a->bf16);
    return sum_of_lanes(sum);
}

/* Weights and gradients of scores of `count` queries as units: two queries in one, as left sides whose rows are keys, and
   of the gradients two keys in one, whose rows are queries. */
INLINE void pair_up(const struct places *p, int64_t count, int64_t n)
{
    for (int64_t i = 0; i < count; i += 2)
        for (int64_t j = 0; j < n; j += LANES) {
            const float *x = p->scores + i * p->stride + j, *d = p->d_scores + i * p->stride + j;
            vf second = {0}, d_second = {0};
            if (i + 1 < count) second = load(x + p->stride), d_second = load(d + p->stride);
            vh low = narrowed(load(x)), high = narrowed(second), d_low = narrowed(load(d)), d_high = narrowed(d_second);
            store(p->weights + i / 2 * p->stride + j, paired(low, high));
            store(p->d_weights + i / 2 * p->stride + j, paired(d_low, d_high));
            memcpy((uint16_t *)(p->d_lines + i * p->stride / 2) + j, &d_low, sizeof d_low);
            memcpy((uint16_t *)(p->d_lines + (i + 1) * p->stride / 2) + j, &d_high, sizeof d_high);
        }
}

INLINE void block_back(const struct train_attention *a, const struct places *p, int64_t row, int64_t head, int64_t first,
                       int64_t count)
{
    const int64_t bf16 = a->bf16, end = end_of(a, row, head, first, count), n = whole16(end), all = whole16(a->keys);
    const int64_t k = whole16(a->width), v = whole16(a->value_width), units = units_of(a->value_width);
    const int64_t queries = units_of(count);
    const float *lse = a->lse + (row * a->heads + head) * a->queries + first;
    block_scores(a, p, row, head, first, count, n);
    for (int64_t i = 0; i < count; i++)
        vector_units(p->d_out + i * units, vector_of(&a->d_out, row, head, first + i, bf16), a->value_width, bf16);
    ISA(product)(p->d_scores, p->stride, count, n, p->d_out, units, 1, p->values, all, units, units, 0);
    for (int64_t i = 0; i < count; i++) {
        struct seen seen = seen_by(a, row, head, first + i);
        float *d_bias = a->d_bias.data ? (float *)vector_of(&a->d_bias, row, head, first + i, 0) : NULL;
        weigh_back(p->scores + i * p->stride, p->d_scores + i * p->stride, n, &seen, (float)a->scale, lse[i],
                   delta_of(a, row, head, first + i), d_bias);
    }
    if (PAIRS) pair_up(p, count, n);
    ISA(rows)(p->query_rows, vector_of(&a->q, row, head, first, bf16), a->q.token, count, a->width, bf16);
    ISA(rows)(p->d_rows, vector_of(&a->d_out, row, head, first, bf16), a->d_out.token, count, a->value_width, bf16);
    ISA(product)(p->d_v, v, end, v, PAIRS ? p->weights : p->scores, 1, p->stride, p->d_rows, v, queries, queries, 1);
    ISA(product)(p->d_k, k, end, k, PAIRS ? p->d_weights : p->d_scores, 1, p->stride, p->query_rows, k, queries, queries,
                 1);
    ISA(product)(p->tile, k, count, k, PAIRS ? p->d_lines : p->d_scores, PAIRS ? p->stride / 2 : p->stride, 1,
                 p->key_rows, k, units_of(a->keys), units_of(end), 0);
    for (int64_t i = 0; i < count; i++)
        keep_scaled((void *)vector_of(&a->d_q, row, head, first + i, bf16), p->tile + i * k, a->width, (float)a->scale,
                    bf16);
}

TARGET static void ISA(attend_back)(const struct train_attention *a, int64_t row, int64_t group, float *scratch)
{
    const struct places p = places_of(a, scratch);
    const int64_t heads = a->heads / a->groups, bf16 = a->bf16, k = whole16(a->width), v = whole16(a->value_width);
    const void *keys = vector_of(&a->k, row, group, 0, bf16), *values = vector_of(&a->v, row, group, 0, bf16);
    ISA(columns)(p.keys, keys, a->k.token, a->keys, a->width, bf16, p.lines);
    ISA(columns)(p.values, values, a->v.token, a->keys, a->value_width, bf16, p.lines);
    ISA(rows)(p.key_rows, keys, a->k.token, a->keys, a->width, bf16);
    memset(p.d_k, 0, (size_t)(whole16(a->keys) * k) * sizeof *p.d_k);
    memset(p.d_v, 0, (size_t)(whole16(a->keys) * v) * sizeof *p.d_v);
    for (int64_t head = group * heads; head < (group + 1) * heads; head++)
        for (int64_t first = 0; first < a->queries; first += QUERY_BLOCK)
            block_back(a, &p, row, head, first, least(a->queries - first, QUERY_BLOCK));
    for (int64_t j = 0; j < a->keys; j++) {
        keep_scaled((void *)vector_of(&a->d_k, row, group, j, bf16), p.d_k + j * k, a->width, (float)a->scale, bf16);
        keep_scaled((void *)vector_of(&a->d_v, row, group, j, bf16), p.d_v + j * v, a->value_width, 1.0f, bf16);
    }
}
