/* Attention to one tile of keys for x86-64 with AVX-512: the scores of up to WIDE queries with 64 keys at a time.

   The keys of a tile are transposed once for all queries of a unit of work, so that a register holds one number of 16
   keys: a score is then a sum over the numbers of a key, one after another, and needs no sum across a register.  A value
   is added to the sums of its query in the order of positions.  */

#include "attend.h"

#if X86_KERNELS

#include <immintrin.h>

#include "vector.h"

#undef INLINE
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma")))
#define INLINE static inline TARGET __attribute__((always_inline))
#define WIDE 6              /* queries: 24 sums leave 8 registers */
#define PARTS (TILE_KEYS / 16)

/* Numbers 4 * c to 4 * c + 3 of 16 keys -> four rows of `out`. */
INLINE void transpose_four(float *out, const float *const *keys, int32_t column)
{
    __m512 some[4];
    for (int i = 0; i < 4; i++) { /* keys i, i + 4, i + 8 and i + 12, in the four quarters */
        __m512 x = _mm512_castps128_ps512(_mm_loadu_ps(keys[i] + column));
        x = _mm512_insertf32x4(x, _mm_loadu_ps(keys[i + 4] + column), 1);
        x = _mm512_insertf32x4(x, _mm_loadu_ps(keys[i + 8] + column), 2);
        some[i] = _mm512_insertf32x4(x, _mm_loadu_ps(keys[i + 12] + column), 3);
    }
    __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(some[0], some[1]));
    __m512d b = _mm512_castps_pd(_mm512_unpacklo_ps(some[2], some[3]));
    __m512d c = _mm512_castps_pd(_mm512_unpackhi_ps(some[0], some[1]));
    __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(some[2], some[3]));
    _mm512_store_ps(out, _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)));
    _mm512_store_ps(out + TILE_KEYS, _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    _mm512_store_ps(out + 2 * TILE_KEYS, _mm512_castpd_ps(_mm512_unpacklo_pd(c, d)));
    _mm512_store_ps(out + 3 * TILE_KEYS, _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
}

TARGET static void transpose(const struct tile *tile, int32_t width)
{
    for (int32_t j = 0; j < tile->to - tile->begin; j += 16) {
        int32_t column = 0;
        for (; column + 4 <= width; column += 4)
            transpose_four(tile->across + column * TILE_KEYS + j, tile->keys + j, column);
        for (; column < width; column++)
            for (int i = 0; i < 16; i++) tile->across[column * TILE_KEYS + j + i] = tile->keys[j + i][column];
    }
}

/* scores[i] = the products of query i with the keys of the first `parts` sixteenths of a tile. */
INLINE void products(float (*scores)[TILE_KEYS], const struct query *queries, const struct tile *tile, int32_t width,
                     const int count, const int parts)
{
    __m512 sums[WIDE][PARTS];
    for (int i = 0; i < count; i++)
        for (int p = 0; p < parts; p++) sums[i][p] = _mm512_setzero_ps();
    for (int32_t d = 0; d < width; d++) {
        __m512 keys[PARTS];
        for (int p = 0; p < parts; p++) keys[p] = _mm512_load_ps(tile->across + d * TILE_KEYS + 16 * p);
        for (int i = 0; i < count; i++) {
            __m512 q = _mm512_set1_ps(queries[i].q[d]);
            for (int p = 0; p < parts; p++) sums[i][p] = _mm512_fmadd_ps(q, keys[p], sums[i][p]);
        }
    }
    for (int i = 0; i < count; i++)
        for (int p = 0; p < parts; p++) _mm512_storeu_ps(scores[i] + 16 * p, sums[i][p]);
}

/* e^x as exp16 of vector.h has it, with fused products and sums. */
INLINE __m512 exponential(__m512 x)
{
    __mmask16 small = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_LT_OQ);
    x = _mm512_min_ps(_mm512_set1_ps(88.3f), x); /* a NaN stays one */
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(1.0f / 5040), r, _mm512_set1_ps(1.0f / 720));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_mask_blend_ps(small, _mm512_scalef_ps(p, n), _mm512_setzero_ps());
}

/* The places of a tile that a query sees. */
INLINE int32_t first_place(const struct query *query, const struct tile *tile)
{
    return (query->lowest > tile->from ? query->lowest : tile->from) - tile->begin;
}

INLINE int32_t end_place(const struct query *query, const struct tile *tile)
{
    return (query->end < tile->to ? query->end : tile->to) - tile->begin;
}

/* Scores become weights; the query's sums so far are scaled to the new maximum. */
INLINE void softmax(struct query *query, float *scores, const struct tile *tile, const struct instruction *it)
{
    int32_t from = first_place(query, tile), to = end_place(query, tile);
    __m512 parts[PARTS], most = _mm512_set1_ps(-INFINITY);
    for (int p = 0; p < PARTS; p++) {
        uint64_t seen = (to == TILE_KEYS ? ~UINT64_C(0) : (UINT64_C(1) << to) - 1) & ~UINT64_C(0) << from;
        __mmask16 mask = (__mmask16)(seen >> 16 * p);
        __m512 x = _mm512_mul_ps(_mm512_set1_ps(it->first), _mm512_maskz_loadu_ps(mask, scores + 16 * p));
        if (it->other > 0.0f) x = (__m512)(it->other * tanh16((v16)x / it->other));
        if (query->bias)
            for (int j = 16 * p > from ? 16 * p : from; j < to && j < 16 * p + 16; j++)
                x = _mm512_mask_add_ps(x, (__mmask16)(1 << (j - 16 * p)), x,
                                       _mm512_set1_ps(query->bias[query->position - (tile->begin + j)]));
        parts[p] = _mm512_mask_blend_ps(mask, _mm512_set1_ps(-INFINITY), x);
        most = _mm512_max_ps(parts[p], most);
    }
    float top = _mm512_reduce_max_ps(most);
    if (query->most > top) top = query->most;
    for (int p = 0; p < PARTS; p++) {
        parts[p] = exponential(_mm512_sub_ps(parts[p], _mm512_set1_ps(top)));
        _mm512_storeu_ps(scores + 16 * p, parts[p]);
    }
    if (query->most != top) {
        __m512 kept = exponential(_mm512_set1_ps(query->most - top));
        query->total *= _mm512_cvtss_f32(kept);
        for (int32_t d = 0; d < it->value_width; d += 16) {
            __mmask16 mask = it->value_width - d >= 16 ? 0xffff : (__mmask16)((1u << (it->value_width - d)) - 1);
            _mm512_mask_storeu_ps(query->out + d, mask,
                                  _mm512_mul_ps(kept, _mm512_maskz_loadu_ps(mask, query->out + d)));
        }
        query->most = top;
    }
    query->total += _mm512_reduce_add_ps(
        _mm512_add_ps(_mm512_add_ps(parts[0], parts[1]), _mm512_add_ps(parts[2], parts[3])));
}

/* Numbers [d, d + 16 * parts) of the values of places [from, to), times their weights, to the sums of queries. */
INLINE void add_part(struct query *queries, float (*weights)[TILE_KEYS], const struct tile *tile, int32_t from,
                     int32_t to, int32_t d, int32_t width, const int count, const int parts)
{
    __m512 sums[WIDE][PARTS];
    __mmask16 masks[PARTS];
    for (int p = 0; p < parts; p++) {
        int32_t left = width - d - 16 * p;
        masks[p] = left >= 16 ? 0xffff : left > 0 ? (__mmask16)((1u << left) - 1) : 0;
    }
    for (int i = 0; i < count; i++)
        for (int p = 0; p < parts; p++) sums[i][p] = _mm512_maskz_loadu_ps(masks[p], queries[i].out + d + 16 * p);
    for (int32_t j = from; j < to; j++) {
        __m512 values[PARTS];
        for (int p = 0; p < parts; p++) values[p] = _mm512_maskz_loadu_ps(masks[p], tile->values[j] + d + 16 * p);
        for (int i = 0; i < count; i++) {
            __m512 weight = _mm512_set1_ps(weights[i][j]);
            for (int p = 0; p < parts; p++) sums[i][p] = _mm512_fmadd_ps(weight, values[p], sums[i][p]);
        }
    }
    for (int i = 0; i < count; i++)
        for (int p = 0; p < parts; p++) _mm512_mask_storeu_ps(queries[i].out + d + 16 * p, masks[p], sums[i][p]);
}

INLINE void add_values(struct query *queries, float (*weights)[TILE_KEYS], const struct tile *tile, int32_t from,
                       int32_t to, int32_t width, const int count)
{
    int32_t d = 0;
    if (from >= to) return;
    for (; width - d > 32; d += 64) add_part(queries, weights, tile, from, to, d, width, count, 4);
    if (d < width) add_part(queries, weights, tile, from, to, d, width, count, 2);
}

/* `count` queries that see something of the tile.  Places that all of them see are added together, those before and
   after for each query alone: a number of a place that a query does not see never reaches its sums.  */
INLINE void take(struct query *queries, const struct tile *tile, const struct instruction *it, const int count)
{
    float scores[WIDE][TILE_KEYS];
    int32_t from = 0, to = TILE_KEYS, width = it->value_width;
    if (tile->to - tile->begin <= 32)
        products(scores, queries, tile, it->width, count, 2);
    else
        products(scores, queries, tile, it->width, count, 4);
    for (int i = 0; i < count; i++) {
        int32_t first = first_place(queries + i, tile), end = end_place(queries + i, tile);
        softmax(queries + i, scores[i], tile, it);
        from = first > from ? first : from;
        to = end < to ? end : to;
    }
    if (from > to) from = to = TILE_KEYS; /* nothing in common */
    for (int i = 0; i < count; i++) {
        int32_t end = end_place(queries + i, tile);
        add_values(queries + i, scores + i, tile, first_place(queries + i, tile), end < from ? end : from, width, 1);
    }
    add_values(queries, scores, tile, from, to, width, count);
    for (int i = 0; i < count; i++)
        add_values(queries + i, scores + i, tile, to, end_place(queries + i, tile), width, 1);
}

TARGET void avx512_tile(struct query *queries, int32_t count, const struct tile *tile, const struct instruction *it)
{
    while (count && first_place(queries, tile) >= end_place(queries, tile)) queries++, count--;
    while (count && first_place(queries + count - 1, tile) >= end_place(queries + count - 1, tile)) count--;
    if (!count) return;
    transpose(tile, it->width);
    for (; count >= WIDE; count -= WIDE, queries += WIDE) take(queries, tile, it, WIDE);
    switch (count) {
    case 1: take(queries, tile, it, 1); break;
    case 2: take(queries, tile, it, 2); break;
    case 3: take(queries, tile, it, 3); break;
    case 4: take(queries, tile, it, 4); break;
    case 5: take(queries, tile, it, 5); break;
    default: break;
    }
}

#endif
