/* Attention with products in bf16, for the tokens of prompts: queries, keys, values and the weights of the softmax are
   rounded to bf16, all sums are fp32.

   Both products are parts in the sense of tiles.h.  For the scores a key is a row of weights; for the sums of values a
   number of the values is one, and the positions are its columns.  What a query does not see has the weight 0 and adds
   exactly 0, so the bits of its sums do not depend on the other queries. */

#include "tiles.h"

#include "attend.h"

#if HAS_TILES

#include <string.h>

#define LINES (TILE_KEYS / PAIR * 2 * TILE_NUMBERS) /* numbers of the tiles of 64 places and 32 numbers of each */

/* The tiles of 32 keys, [width / 32][2][16 lines][16 keys][2]. */
BF16 static void tiles_of_keys(uint16_t *tiles, const void *const *keys, int32_t width)
{
    const __m512i step = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                            _mm512_set1_epi32(BAND));
    for (int32_t r = 0; r < PAIR; r++)
        for (int32_t d = 0; d < width; d += PAIR) {
            uint16_t *line = tiles + d / PAIR * 2 * TILE_NUMBERS + r / BAND * TILE_NUMBERS + r % BAND * 2;
            uint16_t numbers[PAIR] __attribute__((aligned(64)));
            round_bf16(numbers, (const float *)keys[r] + d, width - d < PAIR ? width - d : PAIR);
            _mm512_i32scatter_epi32(line, step, _mm512_load_si512(numbers), 4);
        }
}

void bf16_scores(float (*scores)[SCORES], const struct query *queries, int32_t count, const struct tile *keys,
                 int32_t width)
{
    uint16_t x[QUERIES * WIDEST_BF16] __attribute__((aligned(64)));
    const int32_t padded = pairs_in(width) * PAIR, rows = (count + BAND - 1) / BAND * BAND;
    struct part part = {.stride = padded, .line = SCORES, .tiles = (const uint16_t *)keys->across, .to = padded / PAIR};
    for (int32_t i = 0; i < count; i++) round_bf16(x + i * padded, queries[i].q, width);
    memset(x + count * padded, 0, (size_t)((rows - count) * padded) * sizeof *x);
    begin_parts(PAIR);
    for (int32_t j = 0; j < TILE_KEYS; j += PAIR) {
        int32_t place = keys->place + j;
        if (queries[0].from >= place + PAIR || queries[count - 1].to <= place) continue; /* nobody sees them */
        tiles_of_keys((uint16_t *)keys->across, keys->rows + j, width);
        for (int32_t m = 0; m < rows; m += PAIR) {
            part.x = x + m * padded;
            part.count = rows - m < PAIR ? rows - m : PAIR;
            multiply_part(&part, scores[m] + place);
        }
    }
    end_parts();
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

/* The weights of `count` queries at 64 places, rounded; 0 where a query does not see the place. */
BF16 static void rounded_weights(uint16_t (*x)[TILE_KEYS], const struct query *queries, float (*weights)[SCORES],
                                 int32_t count, int32_t place)
{
    for (int32_t i = 0; i < count; i++)
        for (int32_t j = 0; j < TILE_KEYS; j += BAND) {
            __mmask16 seen = first_of(queries[i].to - place - j) & (__mmask16)~first_of(queries[i].from - place - j);
            __m512 w = _mm512_maskz_loadu_ps(seen, weights[i] + place + j);
            _mm256_storeu_si256((__m256i *)(x[i] + j), (__m256i)_mm512_cvtneps_pbh(w));
        }
}

BF16 void bf16_values(const struct query *queries, float (*weights)[SCORES], int32_t count, const struct tile *tile,
                      int32_t width)
{
    uint16_t x[QUERIES][TILE_KEYS] __attribute__((aligned(64)));
    uint16_t lines[WIDEST_BF16 / PAIR][LINES] __attribute__((aligned(64)));
    float sums[PAIR][PAIR] __attribute__((aligned(64)));
    const int32_t rows = (count + BAND - 1) / BAND * BAND;
    __m512 nothing = _mm512_setzero_ps();
    for (int32_t d = 0; d < width; d += PAIR)
        nothing = _mm512_add_ps(nothing, tiles_of_values(lines[d / PAIR], tile->rows, d, width));
    if (_mm512_cmp_ps_mask(nothing, nothing, _CMP_UNORD_Q)) {
        struct tile clean = *tile;
        without_infinities(queries, count, &clean, width);
        for (int32_t d = 0; d < width; d += PAIR) tiles_of_values(lines[d / PAIR], clean.rows, d, width);
    }
    rounded_weights(x, queries, weights, count, tile->place);
    memset(x + count, 0, (size_t)(rows - count) * sizeof *x);
    begin_parts(PAIR);
    for (int32_t d = 0; d < width; d += PAIR)
        for (int32_t m = 0; m < rows; m += PAIR) {
            struct part part = {.x = x[m], .stride = TILE_KEYS, .line = PAIR, .tiles = lines[d / PAIR],
                                .count = rows - m < PAIR ? rows - m : PAIR, .to = TILE_KEYS / PAIR};
            multiply_part(&part, sums[0]);
            for (int32_t i = 0; i < part.count && m + i < count; i++)
                for (int32_t b = 0; b < PAIR && d + b < width; b += BAND) {
                    float *out = queries[m + i].range.out + d + b;
                    __mmask16 mask = first_of(width - d - b);
                    __m512 y = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), _mm512_load_ps(sums[i] + b));
                    _mm512_mask_storeu_ps(out, mask, y);
                }
        }
    end_parts();
}

#endif
