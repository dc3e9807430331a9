/* Attention for x86-64 with AVX-512: up to WIDE queries share what is loaded of keys and values.  */

#include "attend.h"

#if X86_KERNELS

#include <immintrin.h>

#include "vector.h"

#undef INLINE
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma")))
#define INLINE static inline TARGET __attribute__((always_inline))
#define WIDE 6  /* queries: 24 sums leave 8 registers */
#define FEW 2  /* queries: 16 sums of scores from keys in the order of `across`; of 24 some leave the registers */
#define MANY_QUERIES 9 /* from which on it is faster to write the keys in that order first */

INLINE __mmask16 first_lanes(int32_t count)
{
    return count >= 16 ? 0xffff : count > 0 ? (__mmask16)((1u << count) - 1) : 0;
}

/* Lanes 0 to 15 of four keys -> for each key 4 lanes, the sums of those that are 4 apart: key r in quarter r. */
INLINE __m512 quarters(const __m512 *lanes)
{
    __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(lanes[0], lanes[1], 0x44),
                             _mm512_shuffle_f32x4(lanes[0], lanes[1], 0xee));
    __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(lanes[2], lanes[3], 0x44),
                             _mm512_shuffle_f32x4(lanes[2], lanes[3], 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* fours[u] has the 4 lanes of keys u, u + 4, u + 8 and u + 12 -> the sums of the lanes of keys 0 to 15. */
INLINE __m512 sums_of_keys(const __m512 *fours)
{
    __m512 a = _mm512_add_ps(_mm512_shuffle_ps(fours[0], fours[1], 0x44), _mm512_shuffle_ps(fours[0], fours[1], 0xee));
    __m512 b = _mm512_add_ps(_mm512_shuffle_ps(fours[2], fours[3], 0x44), _mm512_shuffle_ps(fours[2], fours[3], 0xee));
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

/* Scores of 16 keys as they lie. */
INLINE void direct(float (*scores)[SCORES], int32_t place, const struct query *queries, const float *const *keys,
                   const int32_t width, const int count)
{
    __m512 fours[WIDE][4];
    for (int u = 0; u < 4; u++) {
        __m512 sums[WIDE][4];
        for (int i = 0; i < count; i++)
            for (int r = 0; r < 4; r++) sums[i][r] = _mm512_setzero_ps();
        for (int32_t d = 0; d < width; d += 16) {
            __mmask16 mask = first_lanes(width - d);
            __m512 key[4];
            for (int r = 0; r < 4; r++) {
                key[r] = _mm512_maskz_loadu_ps(mask, keys[u + 4 * r] + d);
                prefetch((const uint8_t *)(keys[u + 4 * r] + d), LINE);
            }
            for (int i = 0; i < count; i++) {
                __m512 q = _mm512_maskz_loadu_ps(mask, queries[i].q + d);
                for (int r = 0; r < 4; r++) sums[i][r] = _mm512_fmadd_ps(q, key[r], sums[i][r]);
            }
        }
        for (int i = 0; i < count; i++) fours[i][u] = quarters(sums[i]);
    }
    for (int i = 0; i < count; i++) _mm512_storeu_ps(scores[i] + place, sums_of_keys(fours[i]));
}

/* Write 16 keys to `across`: for u = 0 to 3 and every 4 numbers, those of keys u, u + 4, u + 8 and u + 12. */
TARGET static void regroup(float *across, const float *const *keys, int32_t width)
{
    int32_t steps = (width + 15) / 16;
    for (int u = 0; u < 4; u++)
        for (int32_t step = 0; step < steps; step++, across += 64) {
            __mmask16 mask = first_lanes(width - 16 * step);
            __m512 key[4];
            for (int r = 0; r < 4; r++) key[r] = _mm512_maskz_loadu_ps(mask, keys[u + 4 * r] + 16 * step);
            __m512 a = _mm512_shuffle_f32x4(key[0], key[1], 0x44), b = _mm512_shuffle_f32x4(key[2], key[3], 0x44);
            __m512 c = _mm512_shuffle_f32x4(key[0], key[1], 0xee), d = _mm512_shuffle_f32x4(key[2], key[3], 0xee);
            _mm512_store_ps(across, _mm512_shuffle_f32x4(a, b, 0x88));
            _mm512_store_ps(across + 16, _mm512_shuffle_f32x4(a, b, 0xdd));
            _mm512_store_ps(across + 32, _mm512_shuffle_f32x4(c, d, 0x88));
            _mm512_store_ps(across + 48, _mm512_shuffle_f32x4(c, d, 0xdd));
        }
}

/* Scores of 16 keys in the order of `across`: a register has 4 lanes of 4 keys. */
INLINE void regrouped(float (*scores)[SCORES], int32_t place, const struct query *queries, const float *across,
                      const int32_t width, const int count)
{
    int32_t steps = (width + 15) / 16;
    __m512 fours[FEW][4];
    for (int u = 0; u < 4; u += 2) {
        __m512 sums[FEW][2][4];
        const float *keys = across + 64 * u * steps;
        for (int i = 0; i < count; i++)
            for (int r = 0; r < 4; r++) sums[i][0][r] = sums[i][1][r] = _mm512_setzero_ps();
        for (int32_t d = 0; d < width; d += 16)
            for (int r = 0; r < 4; r++) {
                __m512 one = _mm512_load_ps(keys + 4 * d + 16 * r);
                __m512 two = _mm512_load_ps(keys + 64 * steps + 4 * d + 16 * r);
                for (int i = 0; i < count; i++) {
                    const float *from = queries[i].q + d + 4 * r;
                    __m512 q = d + 4 * r + 4 <= width
                                   ? _mm512_broadcast_f32x4(_mm_loadu_ps(from))
                                   : _mm512_broadcast_f32x4(
                                         _mm_maskz_loadu_ps((__mmask8)first_lanes(width - d - 4 * r), from));
                    sums[i][0][r] = _mm512_fmadd_ps(q, one, sums[i][0][r]);
                    sums[i][1][r] = _mm512_fmadd_ps(q, two, sums[i][1][r]);
                }
            }
        for (int i = 0; i < count; i++)
            for (int v = 0; v < 2; v++)
                fours[i][u + v] = _mm512_add_ps(_mm512_add_ps(sums[i][v][0], sums[i][v][2]),
                                                _mm512_add_ps(sums[i][v][1], sums[i][v][3]));
    }
    for (int i = 0; i < count; i++) _mm512_storeu_ps(scores[i] + place, sums_of_keys(fours[i]));
}

/* The places of a tile that some of these queries see, from a multiple of 16 on; whether there are any. */
INLINE int seen(const struct query *queries, int32_t count, int32_t place, int32_t *from, int32_t *to)
{
    int32_t low = RANGE, high = 0;
    for (int i = 0; i < count; i++) {
        low = queries[i].from < low ? queries[i].from : low;
        high = queries[i].to > high ? queries[i].to : high;
    }
    *from = (low > place ? low / 16 * 16 : place) - place;
    *to = (high < place + TILE_KEYS ? high : place + TILE_KEYS) - place;
    return *from < *to;
}

INLINE void some_scores(float (*scores)[SCORES], const struct query *queries, const struct tile *keys,
                        const int32_t width, const int count, const int across)
{
    int32_t from, to;
    if (!seen(queries, count, keys->place, &from, &to)) return;
    for (int32_t j = from; j < to; j += 16)
        if (across)
            regrouped(scores, keys->place + j, queries, keys->across + j * ((width + 15) / 16 * 16), width, count);
        else
            direct(scores, keys->place + j, queries, keys->rows + j, width, count);
}

INLINE void all_scores(float (*scores)[SCORES], const struct query *queries, int32_t count, const struct tile *keys,
                       const int32_t width)
{
    int32_t from, to;
    if (count >= MANY_QUERIES) {
        if (!seen(queries, count, keys->place, &from, &to)) return;
        for (int32_t j = from; j < to; j += 16)
            regroup(keys->across + j * ((width + 15) / 16 * 16), keys->rows + j, width);
        for (; count >= FEW; count -= FEW, queries += FEW, scores += FEW)
            some_scores(scores, queries, keys, width, FEW, 1);
        if (count) some_scores(scores, queries, keys, width, 1, 1);
        return;
    }
    for (; count >= WIDE; count -= WIDE, queries += WIDE, scores += WIDE)
        some_scores(scores, queries, keys, width, WIDE, 0);
    switch (count) {
    case 1: some_scores(scores, queries, keys, width, 1, 0); break;
    case 2: some_scores(scores, queries, keys, width, 2, 0); break;
    case 3: some_scores(scores, queries, keys, width, 3, 0); break;
    case 4: some_scores(scores, queries, keys, width, 4, 0); break;
    case 5: some_scores(scores, queries, keys, width, 5, 0); break;
    default: break;
    }
}

/* The usual widths have loops of a known length. */
TARGET static void avx512_scores(float (*scores)[SCORES], const struct query *queries, int32_t count,
                                 const struct tile *keys, int32_t width)
{
    switch (width) {
    case 32: all_scores(scores, queries, count, keys, 32); break;
    case 64: all_scores(scores, queries, count, keys, 64); break;
    case 128: all_scores(scores, queries, count, keys, 128); break;
    default: all_scores(scores, queries, count, keys, width); break;
    }
}

/* e^x for x <= 0, as `exponentials` of step_attend_portable.c has it. */
INLINE __m512 exponential(__m512 x)
{
    __mmask16 small = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_LT_OQ);
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

TARGET static void avx512_softmax(float *scores, struct query *query, const struct instruction *it)
{
    const __m512i backwards = _mm512_set_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    int32_t begin = query->from / 16 * 16;
    for (int32_t j = begin; j < query->to; j += 16) {
        __mmask16 mask = first_lanes(query->to - j) & (__mmask16)~first_lanes(query->from - j);
        __m512 x = _mm512_mul_ps(_mm512_set1_ps(it->first), _mm512_maskz_loadu_ps(mask, scores + j));
        if (it->other > 0.0f) x = (__m512)(it->other * tanh16((v16)x / it->other));
        if (query->bias) { /* that of lane i stands i numbers before that of lane 0 */
            __mmask16 reversed = first_lanes(16 + j - query->from) & (__mmask16)~first_lanes(16 + j - query->to);
            __m512 bias = _mm512_maskz_loadu_ps(reversed, query->bias - j - 15);
            x = _mm512_add_ps(x, _mm512_permutexvar_ps(backwards, bias));
        }
        x = _mm512_mask_blend_ps(mask, _mm512_set1_ps(-INFINITY), x);
        _mm512_storeu_ps(scores + j, x);
        most = _mm512_max_ps(x, most); /* passes over a NaN */
    }
    query->range.most = _mm512_reduce_max_ps(most);
    for (int32_t j = begin; j < query->to; j += 16) {
        __m512 x = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + j), _mm512_set1_ps(query->range.most)));
        _mm512_storeu_ps(scores + j, x);
        sum = _mm512_add_ps(sum, x);
    }
    query->range.total = _mm512_reduce_add_ps(sum); /* by halves, as sum_of_lanes */
}

/* Numbers [d, d + 16 * parts) of the values at places [from, to) of a tile, times their weights, to the sums. */
INLINE void add_part(const struct query *queries, float (*weights)[SCORES], const struct tile *tile, int32_t from,
                     int32_t to, int32_t d, int32_t width, const int count, const int parts)
{
    __m512 sums[WIDE][4];
    __mmask16 masks[4];
    for (int p = 0; p < parts; p++) masks[p] = first_lanes(width - d - 16 * p);
    for (int i = 0; i < count; i++)
        for (int p = 0; p < parts; p++) sums[i][p] = _mm512_maskz_loadu_ps(masks[p], queries[i].range.out + d + 16 * p);
    for (int32_t j = from; j < to; j++) {
        __m512 values[4];
        for (int p = 0; p < parts; p++) {
            values[p] = _mm512_maskz_loadu_ps(masks[p], tile->rows[j] + d + 16 * p);
            if (count < WIDE) prefetch((const uint8_t *)(tile->rows[j] + d + 16 * p), LINE);
        }
        for (int i = 0; i < count; i++) {
            __m512 weight = _mm512_set1_ps(weights[i][tile->place + j]);
            for (int p = 0; p < parts; p++) sums[i][p] = _mm512_fmadd_ps(weight, values[p], sums[i][p]);
        }
    }
    for (int i = 0; i < count; i++)
        for (int p = 0; p < parts; p++) _mm512_mask_storeu_ps(queries[i].range.out + d + 16 * p, masks[p], sums[i][p]);
}

INLINE void add_values(const struct query *queries, float (*weights)[SCORES], const struct tile *tile, int32_t from,
                       int32_t to, int32_t width, const int count)
{
    int32_t d = 0;
    if (from >= to) return;
    for (; width - d > 32; d += 64) add_part(queries, weights, tile, from, to, d, width, count, 4);
    if (d < width) add_part(queries, weights, tile, from, to, d, width, count, 2);
}

/* Places that all of the queries see are added together, those before and after for each query alone. */
INLINE void some_values(const struct query *queries, float (*weights)[SCORES], const struct tile *tile, int32_t width,
                        const int count)
{
    int32_t from = 0, to = TILE_KEYS, first[WIDE], end[WIDE];
    for (int i = 0; i < count; i++) {
        first[i] = queries[i].from > tile->place ? queries[i].from - tile->place : 0;
        end[i] = queries[i].to - tile->place < TILE_KEYS ? queries[i].to - tile->place : TILE_KEYS;
        from = first[i] > from ? first[i] : from;
        to = end[i] < to ? end[i] : to;
    }
    if (from > to) from = to = TILE_KEYS; /* nothing in common */
    for (int i = 0; count > 1 && i < count; i++)
        add_values(queries + i, weights + i, tile, first[i], end[i] < from ? end[i] : from, width, 1);
    add_values(queries, weights, tile, from, to, width, count);
    for (int i = 0; count > 1 && i < count; i++) add_values(queries + i, weights + i, tile, to, end[i], width, 1);
}

TARGET static void avx512_values(const struct query *queries, float (*weights)[SCORES], int32_t count,
                                 const struct tile *values, int32_t width)
{
    for (; count >= WIDE; count -= WIDE, queries += WIDE, weights += WIDE)
        some_values(queries, weights, values, width, WIDE);
    switch (count) {
    case 1: some_values(queries, weights, values, width, 1); break;
    case 2: some_values(queries, weights, values, width, 2); break;
    case 3: some_values(queries, weights, values, width, 3); break;
    case 4: some_values(queries, weights, values, width, 4); break;
    case 5: some_values(queries, weights, values, width, 5); break;
    default: break;
    }
}

const struct attend_kernels avx512_attend = {avx512_scores, avx512_softmax, avx512_values};

#endif
