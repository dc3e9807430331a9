/* Attention with products in bf16, for the tokens of prompts: queries, keys, values and the weights of the softmax are
   rounded to bf16, all sums are fp32.

   Both products are parts in the sense of matmul_bf16.h, of blocks of 32 queries.  For the scores a key is a row of weights;
   for the sums of values a number of the values is one, and the positions are its columns.  What a query does not see has
   the weight 0 and adds exactly 0, so the bits of its sums do not depend on the other queries, and positions that no query
   of a block sees are left out. */

#include "attend.h"
#include "matmul_bf16.h"

#if HAS_TILES

/* Nothing computes the same in another way, so products and sums may be fused. */
#pragma GCC optimize("fp-contract=fast")

#include "vector.h"

#define STEPS (RANGE / PAIR) /* tiles of positions in a range */

/* Number j of line i becomes number i of line j: in step s, numbers change places whose i and j differ in bit s. */
INLINE_BF16 void transpose(__m512i *lines)
{
    const __m512i place = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int s = 1; s < 16; s *= 2) {
        const __m512i step = _mm512_set1_epi32(s), other = _mm512_or_si512(place, _mm512_set1_epi32(16));
        const __mmask16 odd = _mm512_test_epi32_mask(place, step);
        const __m512i even_line = _mm512_mask_sub_epi32(place, odd, other, step);
        const __m512i odd_line = _mm512_mask_mov_epi32(_mm512_add_epi32(place, step), odd, other);
        for (int i = 0; i < 16; i++) {
            if (i & s) continue;
            __m512i one = lines[i], two = lines[i + s];
            lines[i] = _mm512_permutex2var_epi32(one, even_line, two);
            lines[i + s] = _mm512_permutex2var_epi32(one, odd_line, two);
        }
    }
}

/* The tiles of 32 keys, [width / 32][2][16 lines][16 keys][2]. */
BF16 static void tiles_of_keys(uint16_t *tiles, const void *const *keys, int32_t width)
{
    for (int32_t d = 0; d < width; d += PAIR)
        for (int32_t first = 0; first < PAIR; first += BAND, tiles += TILE_NUMBERS) {
            __m512i lines[BAND];
            for (int r = 0; r < BAND; r++) {
                const float *key = (const float *)keys[first + r] + d;
                __m512 low = _mm512_maskz_loadu_ps(first_of(width - d), key);
                __m512 high = _mm512_maskz_loadu_ps(first_of(width - d - BAND), key + BAND);
                lines[r] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
            }
            transpose(lines);
            for (int r = 0; r < BAND; r++) _mm512_storeu_si512(tiles + r * PAIR, lines[r]);
        }
}

/* Queries [m, m + 32) as a block: how many they are, and which places [from, to) of the range one of them
   sees, both multiples of 32. */
struct block {
    int32_t count, from, to;
};

static struct block block_at(const struct query *queries, int32_t count, int32_t m)
{
    int32_t some = count - m < PAIR ? count - m : PAIR;
    return (struct block){some, queries[m].from / PAIR * PAIR, pairs_in(queries[m + some - 1].to) * PAIR};
}

/* In the place of the scores of a query: the weights of places [from, to), rounded; 0 where it does not see the place. */
BF16 static void weights_of(float *scores, struct query *query, const struct instruction *it, struct block block)
{
    uint16_t *weights = (uint16_t *)scores; /* a weight stands before the scores that are not read yet */
    __m512 most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    for (int32_t j = block.from; j < block.to; j += BAND) {
        __mmask16 seen = first_of(query->to - j) & (__mmask16)~first_of(query->from - j);
        __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(seen, scores + j), _mm512_set1_ps(it->attend.scale));
        if (it->attend.softcap > 0.0f) x = (__m512)(it->attend.softcap * tanh16((v16)x / it->attend.softcap));
        _mm512_storeu_ps(scores + j, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, x));
        for (int32_t i = j; query->bias && i < j + BAND; i++)
            if (query->from <= i && i < query->to) scores[i] += query->bias[-i];
        most = _mm512_max_ps(_mm512_loadu_ps(scores + j), most); /* passes over a NaN */
    }
    query->range.most = _mm512_reduce_max_ps(most);
    for (int32_t j = block.from; j < block.to; j += BAND) {
        __m512 x = (__m512)exp16(load16(scores + j) - query->range.most);
        x = _mm512_maskz_mov_ps(first_of(query->to - j) & (__mmask16)~first_of(query->from - j), x);
        total = _mm512_add_ps(total, x);
        _mm256_storeu_si256((__m256i *)(weights + j), (__m256i)_mm512_cvtneps_pbh(x));
    }
    query->range.total = _mm512_reduce_add_ps(total);
}

/* The tiles of numbers [d, d + 32) of 64 values, [2][2][16 lines][16 numbers][2]; -> 0 in all lanes, or NaN where a
   number is not finite. */
BF16 static __m512 tiles_of_values(uint16_t *lines, const void *const *values, int32_t d, int32_t width)
{
    __m512 nothing = _mm512_setzero_ps();
    for (int32_t j = 0; j < TILE_KEYS; j += 2)
        for (int b = 0; b < 2; b++) {
            int32_t at = d + BAND * b;
            __mmask16 mask = first_of(width - at);
            __m512 even = _mm512_maskz_loadu_ps(mask, (const float *)values[j] + at);
            __m512 odd = _mm512_maskz_loadu_ps(mask, (const float *)values[j + 1] + at);
            nothing = _mm512_add_ps(nothing, _mm512_add_ps(_mm512_sub_ps(even, even), _mm512_sub_ps(odd, odd)));
            int32_t tile = j / PAIR * 2 + b, line = j % PAIR / 2;
            _mm512_storeu_si512(lines + tile * TILE_NUMBERS + line * PAIR, line_of(even, odd));
        }
    return nothing;
}

/* Where a value is not finite, it is put out of the tile, as 0 times it is not 0: and those that see it get NaN. */
static void without_infinities(const struct query *queries, int32_t count, struct tile *values, int32_t width)
{
    static const float zeros[WIDEST_BF16];
    for (int32_t j = 0; j < TILE_KEYS; j++) {
        int finite = 1, place = values->place + j;
        for (int32_t d = 0; d < width; d++) finite &= isfinite(((const float *)values->rows[j])[d]) != 0;
        if (finite) continue;
        values->rows[j] = zeros;
        for (int32_t i = 0; i < count; i++)
            for (int32_t d = 0; d < width && queries[i].from <= place && place < queries[i].to; d++)
                queries[i].range.out[d] = NAN;
    }
}

/* Add the values of the range, [width / 32][STEPS] pairs of tiles, times their weights to the sums of a block. */
BF16 static void add_values(const struct query *queries, float (*scores)[SCORES], struct block block,
                            uint16_t (*lines)[STEPS][2 * TILE_NUMBERS], int32_t width)
{
    float sums[PAIR][PAIR] __attribute__((aligned(64)));
    struct part part = {.x = (const uint16_t *)scores[0] + block.from, .stride = 2 * SCORES, .line = PAIR,
                        .count = block.count > BAND ? PAIR : BAND, .to = (block.to - block.from) / PAIR};
    for (int32_t d = 0; d < width; d += PAIR) {
        part.tiles = lines[d / PAIR][block.from / PAIR];
        multiply_part(&part, sums[0]);
        for (int32_t i = 0; i < block.count; i++)
            for (int32_t b = 0; b < PAIR && d + b < width; b += BAND) {
                float *out = queries[i].range.out + d + b;
                __mmask16 mask = first_of(width - d - b);
                __m512 y = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), _mm512_load_ps(sums[i] + b));
                _mm512_mask_storeu_ps(out, mask, y);
            }
    }
}

BF16 void attend_range_bf16(struct worker *me, const struct instruction *it, struct query *queries, int32_t count,
                            int32_t token, int32_t group, int32_t begin, const struct scratch *scratch)
{
    uint16_t x[QUERIES_BF16 * WIDEST_BF16] __attribute__((aligned(64)));
    uint16_t keys[PAIR * WIDEST_BF16] __attribute__((aligned(64)));
    uint16_t lines[WIDEST_BF16 / PAIR][STEPS][2 * TILE_NUMBERS] __attribute__((aligned(64)));
    float(*scores)[SCORES] = (float(*)[SCORES])scratch->scores;
    const int32_t padded = pairs_in(it->width) * PAIR, lowest = queries[0].from, highest = queries[count - 1].to;
    struct part part = {.stride = padded, .line = SCORES, .tiles = keys, .to = padded / PAIR};
    struct tile tile;
    for (int32_t i = 0; i < count; i++) round_bf16(x + i * padded, queries[i].q, it->width);
    begin_parts(PAIR);
    for (tile.place = lowest / TILE_KEYS * TILE_KEYS; tile.place < highest; tile.place += TILE_KEYS) {
        fill_tile(&tile, me, it, token, group, 0, begin, lowest, highest, scratch->wide);
        for (int32_t j = 0; j < TILE_KEYS; j += PAIR) {
            tiles_of_keys(keys, tile.rows + j, it->width);
            for (int32_t m = 0; m < count; m += PAIR) {
                struct block block = block_at(queries, count, m);
                if (tile.place + j < block.from || block.to <= tile.place + j) continue; /* nobody sees them */
                part.x = x + m * padded;
                part.count = block.count > BAND ? PAIR : BAND;
                multiply_part(&part, scores[m] + tile.place + j);
            }
        }
    }
    for (int32_t i = 0; i < count; i++) weights_of(scores[i], queries + i, it, block_at(queries, count, i / PAIR * PAIR));
    for (tile.place = lowest / TILE_KEYS * TILE_KEYS; tile.place < highest; tile.place += TILE_KEYS) {
        __m512 nothing = _mm512_setzero_ps();
        fill_tile(&tile, me, it, token, group, 1, begin, lowest, highest, scratch->wide);
        for (int twice = 0; twice < 2; twice++) {
            for (int32_t d = 0; d < it->attend.value_width; d += PAIR)
                nothing = _mm512_add_ps(nothing, tiles_of_values(lines[d / PAIR][tile.place / PAIR], tile.rows, d,
                                                                 it->attend.value_width));
            if (twice || !_mm512_cmp_ps_mask(nothing, nothing, _CMP_UNORD_Q)) break;
            without_infinities(queries, count, &tile, it->attend.value_width);
        }
    }
    for (int32_t m = 0; m < count; m += PAIR)
        add_values(queries + m, scores + m, block_at(queries, count, m), lines, it->attend.value_width);
    end_parts();
}

#endif
