/* Products in bf16 with AMX.  See matmul_bf16.h.

   A block of the result is 32 vectors by 32 rows of weights, whose sums take four of the eight tiles of AMX.  The columns
   are cut into ranges whose weights stay in the cache nearest to the processor while several blocks use them; between
   two ranges the sums of a block wait in memory.  The processor is asked in time for the weights that come next.  */

#include "matmul_bf16.h"

#if HAS_TILES

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels.h"
#include "vector.h"

#define AMX __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma,amx-tile,amx-bf16")))
#define TILE_RANGE 9                    /* tiles of columns in a range of packed weights at most; twice as many of others */
#define BLOCKS 8                   /* blocks that use a range one after another */
#define PAIRS 4                    /* pairs that use a range of the vectors one after another */
#define XCOMP_REQUEST 0x1023       /* ARCH_REQ_XCOMP_PERM */
#define XCOMP_TILES 18             /* XFEATURE_XTILEDATA */

/* Vectors [0, 16) and the last 16 of them, with more than 16: both then write some rows of sums, the same numbers.  The
   tiles have 16 rows, or as many as there are vectors.  */
__attribute__((noinline)) AMX void multiply_part(const struct part *it, float *sums)
{
    __asm__ volatile("" : : : "memory"); /* the compiler does not know that tiles are loaded from memory */
    const int second = it->count > BAND;
    const size_t stride = (size_t)it->stride * sizeof *it->x, line = (size_t)it->line * sizeof *sums;
    const uint16_t *x = it->x + (ptrdiff_t)it->from * PAIR, *last = x + (second ? it->count - BAND : 0) * it->stride;
    const uint16_t *tile = it->tiles;
    float *low = sums, *high = second ? sums + (it->count - BAND) * it->line : low;
    if (it->from) {
        _tile_loadd(0, low, line);
        _tile_loadd(1, low + BAND, line);
        _tile_loadd(2, high, line);
        _tile_loadd(3, high + BAND, line);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const ptrdiff_t next = (ptrdiff_t)(it->to - it->from) * 2 * TILE_NUMBERS;
    for (int32_t t = it->from; t < it->to; t++, tile += 2 * TILE_NUMBERS, x += PAIR, last += PAIR) {
        for (int32_t i = it->ask; i < it->until; i++) __builtin_prefetch(tile + next + PAIR * i, 0, 2);
        _tile_loadd(6, tile, 64);
        _tile_loadd(7, tile + TILE_NUMBERS, 64);
        _tile_loadd(4, x, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (second) {
            _tile_loadd(5, last, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, low, line);
    _tile_stored(1, low + BAND, line);
    if (second) {
        _tile_stored(2, high, line);
        _tile_stored(3, high + BAND, line);
    }
}

/* Blocks of 32 vectors, at most BLOCKS, of the vectors [first, last). */
struct blocks {
    int32_t first, last;
    float (*sums)[PAIR][PAIR], (*gate)[PAIR][PAIR]; /* of each block; gate: of the gate, if there is one */
};

/* The vectors [*first, *end) of a block; -> how many vectors before them are computed with them.  A block of fewer than 16
   takes in earlier ones, where there are such. */
static int32_t block_of(const struct blocks *blocks, int32_t i, int32_t *first, int32_t *end)
{
    *first = blocks->first + i * PAIR;
    *end = *first + PAIR < blocks->last ? *first + PAIR : blocks->last;
    if (*end - *first >= BAND) return 0;
    return *end < BAND ? *first : BAND - (*end - *first);
}

/* Block i of y at the rows of a pair, from its sums.  What it writes for the next block is asked for. */
INLINE_BF16 void finish(const struct bf16_product *it, int32_t pair, const struct blocks *blocks, int32_t i,
                        const int32_t function)
{
    const int32_t rows = it->weight->rows, width = it->rounded ? pairs_in(rows) * PAIR : rows;
    const size_t size = it->rounded ? 2 : 4;
    int32_t first, end, before = block_of(blocks, i, &first, &end);
    for (int32_t m = first; m < end; m++)
        for (int b = 0; b < 2; b++) {
            const int32_t row = pair * PAIR + BAND * b, at = before + m - first;
            const __mmask16 mask = first_of(rows - row);
            char *out = (char *)it->y + ((size_t)m * (size_t)width + (size_t)row) * size;
            __builtin_prefetch((const void *)((uintptr_t)out + PAIR * (size_t)width * size), 1);
            __m512 y = _mm512_loadu_ps(blocks->sums[i][at] + BAND * b);
            y = _mm512_add_ps(y, it->bias ? _mm512_maskz_loadu_ps(mask, it->bias + row) : _mm512_setzero_ps());
            v16 x = it->gate ? load16(blocks->gate[i][at] + BAND * b) : (v16)y;
            x = function16(x, function, it->factor);
            y = it->gate ? _mm512_mul_ps((__m512)x, y) : (__m512)x;
            if (it->more) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, it->more + (size_t)m * (size_t)rows + row));
            if (it->rounded)
                _mm256_storeu_si256((__m256i *)out, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_mov_ps(mask, y)));
            else
                _mm512_mask_storeu_ps((float *)out, mask, y);
        }
}

BF16 static void finish_block(const struct bf16_product *it, int32_t pair, const struct blocks *blocks, int32_t i)
{
    switch (it->function) {
    case FUNCTION_NONE: finish(it, pair, blocks, i, FUNCTION_NONE); break;
    case FUNCTION_SILU: finish(it, pair, blocks, i, FUNCTION_SILU); break;
    case FUNCTION_GELU: finish(it, pair, blocks, i, FUNCTION_GELU); break;
    default: finish(it, pair, blocks, i, it->function); break;
    }
}

/* Column 4 * c + i of a group in 16 rows.  A permutation looks at four bits of each index, so it makes numbers of codes
   of 4 bits without a mask. */
INLINE_BF16 __m512 column_of(const uint8_t *group, const int32_t layout, int c, unsigned i)
{
    const __m512 numbers = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    if (layout >= LAYOUT_S8) {
        __m512i codes = _mm512_slli_epi32(_mm512_loadu_si512(group + LINE * c), 24 - 8 * i);
        return _mm512_cvtepi32_ps(_mm512_srai_epi32(codes, 24));
    }
    __m512i codes = _mm512_srli_epi32(_mm512_loadu_si512(group + LINE * (c / 2)), 8 * i + (unsigned)c % 2 * 4);
    __m512 low = _mm512_permutexvar_ps(codes, numbers);
    if (layout == LAYOUT_U4) return low;
    __m512i fifth = _mm512_srli_epi32(_mm512_loadu_si512(group + 4 * LINE), (unsigned)c + 8 * i);
    __mmask16 set = _mm512_test_epi32_mask(fifth, _mm512_set1_epi32(1));
    return _mm512_mask_add_ps(low, set, low, _mm512_set1_ps(16));
}

/* One tile of a band: 32 columns that begin at `group`.  scales: for columns 0 to 15 and for 16 to 31.  A product of a
   scale and a code is exact, so fma gives the same number as a product and a sum. */
INLINE_BF16 void unpack_tile(uint16_t *lines, const uint8_t *group, const int32_t layout, const __m512 *scales,
                             __m512 minimum)
{
    for (int c = 0; c < GROUP / 4; c++) {
        __m512 w[4];
        for (unsigned i = 0; i < 4; i++) {
            w[i] = column_of(group, layout, c, i);
            w[i] = layout >= LAYOUT_S8 ? _mm512_mul_ps(w[i], scales[c / 4]) : _mm512_fmadd_ps(w[i], scales[0], minimum);
        }
        _mm512_storeu_si512(lines + 2 * c * PAIR, line_of(w[0], w[1]));
        _mm512_storeu_si512(lines + (2 * c + 1) * PAIR, line_of(w[2], w[3]));
    }
}

INLINE_BF16 void unpack_band(const struct matrix *w, int32_t band, int32_t from, int32_t to, uint16_t *tiles,
                             const int32_t layout)
{
    const int32_t groups = block_columns(layout) / GROUP;
    const size_t next = matrix_bytes(layout, 2 * BAND, w->columns); /* bytes to the next pair, which is asked for */
    for (int32_t t = from; t < to; t++, tiles += 2 * TILE_NUMBERS) {
        const uint8_t *first = band_of(w, band, layout) + (size_t)(t / groups) * block_bytes(layout);
        for (size_t i = 0; i < block_bytes(layout) / (size_t)groups; i += LINE)
            __builtin_prefetch((const void *)((uintptr_t)first + next + (size_t)(t % groups) * 8 * LINE + i), 0, 2);
        const __m256i *halves = (const __m256i *)scales_of(first, layout); /* scales, and behind them minimums */
        __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(halves)), scales[2] = {scale, scale};
        for (int i = 0; layout == LAYOUT_S8X16 && i < 2; i++) {
            const uint8_t *factors = first + 64 * LINE + BAND * (2 * (t % groups) + i);
            scales[i] *= _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)factors)));
        }
        __m512 minimum = layout >= LAYOUT_S8 ? _mm512_setzero_ps() : _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1));
        unpack_tile(tiles, first + t % groups * 8 * LINE, layout, scales, minimum);
    }
}

BF16 void unpack_tiles(const struct matrix *w, int32_t pair, int32_t from, int32_t to, uint16_t *tiles)
{
    for (int32_t band = 2 * pair; band < 2 * pair + 2; band++, tiles += TILE_NUMBERS)
        switch (band * BAND < w->rows ? w->layout : -1) {
        case LAYOUT_U4: unpack_band(w, band, from, to, tiles, LAYOUT_U4); break;
        case LAYOUT_U5: unpack_band(w, band, from, to, tiles, LAYOUT_U5); break;
        case LAYOUT_S8: unpack_band(w, band, from, to, tiles, LAYOUT_S8); break;
        case LAYOUT_S8X16: unpack_band(w, band, from, to, tiles, LAYOUT_S8X16); break;
        default: /* rows that the matrix lacks */
            for (int32_t t = 0; t < to - from; t++) memset(tiles + t * 2 * TILE_NUMBERS, 0, TILE_NUMBERS * 2);
        }
}

AMX void begin_parts(int32_t count)
{
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } tiles __attribute__((aligned(64))) = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        tiles.bytes[i] = 64;
        tiles.rows[i] = (uint8_t)(i < 6 && count < BAND ? count : BAND);
    }
    __asm__ volatile("" : : "r"(&tiles) : "memory"); /* GCC's loadconfig names eight bytes of what it reads */
    _tile_loadconfig(&tiles);
}

AMX void end_parts(void) { _tile_release(); }

/* A range of the columns of a pair of w; `finishes`: it is the last one of y.  A block is finished while the next one is
   multiplied: the processor then need not wait for the sums. */
static void multiply_range(const struct bf16_product *it, const struct matrix *w, int32_t pair, struct part part,
                           const struct blocks *blocks, float (*sums)[PAIR][PAIR], int finishes)
{
    uint16_t unpacked[TILE_RANGE * 2 * TILE_NUMBERS] __attribute__((aligned(64)));
    const int32_t tiles = pairs_in(w->columns), is_packed = w->layout >= 0;
    const int32_t count = pairs_in(blocks->last - blocks->first);
    part.tiles = unpacked;
    if (is_packed)
        unpack_tiles(w, pair, part.from, part.to, unpacked);
    else
        part.tiles = (const uint16_t *)w->data + ((size_t)pair * (size_t)tiles + (size_t)part.from) * 2 * TILE_NUMBERS;
    for (int32_t i = 0; i < count; i++) {
        int32_t first, end, before = block_of(blocks, i, &first, &end);
        part.x = it->x + (first - before) * part.stride;
        part.count = end - first + before;
        part.ask = is_packed ? 0 : i * PAIR / count;
        part.until = is_packed ? 0 : (i + 1) * PAIR / count;
        multiply_part(&part, sums[i][0]);
        if (finishes && i) finish_block(it, pair, blocks, i - 1);
    }
    if (finishes) finish_block(it, pair, blocks, count - 1);
}

/* The pairs [pair, end), at most PAIRS, for the vectors [first, last).  A range of the vectors is used for all of these
   pairs before the next one is: where there are several, all vectors together may not fit into the caches. */
static void multiply_pairs(const struct bf16_product *it, int32_t pair, int32_t end, int32_t first, int32_t last)
{
    float sums[PAIRS][2][BLOCKS][PAIR][PAIR] __attribute__((aligned(64))); /* [1]: of the gate */
    const int32_t tiles = pairs_in(it->weight->columns), most = it->weight->layout >= 0 ? TILE_RANGE : 2 * TILE_RANGE;
    const int32_t ranges = (tiles + most - 1) / most;
    for (int gate = it->gate != NULL; gate >= 0; gate--)
        for (int32_t range = 0; range < ranges; range++)
            for (int32_t p = pair; p < end; p++) {
                const struct part part = {.stride = (ptrdiff_t)tiles * PAIR, .line = PAIR, .from = tiles * range / ranges,
                                          .to = tiles * (range + 1) / ranges};
                const struct blocks blocks = {first, last, sums[p - pair][0], sums[p - pair][1]};
                multiply_range(it, gate ? it->gate : it->weight, p, part, &blocks, sums[p - pair][gate],
                               !gate && range == ranges - 1);
            }
}

void multiply_bf16(const struct bf16_product *it, int32_t first, int32_t last)
{
    const int32_t together = pairs_in(it->weight->columns) > TILE_RANGE && it->weight->layout >= 0 ? PAIRS : 1;
    begin_parts(it->count);
    for (int32_t pair = first; pair < last; pair += together)
        for (int32_t m = 0; m < it->count; m += BLOCKS * PAIR)
            multiply_pairs(it, pair, pair + together < last ? pair + together : last, m,
                           m + BLOCKS * PAIR < it->count ? m + BLOCKS * PAIR : it->count);
    end_parts();
}

BF16 void round_bf16(uint16_t *out, const float *x, int32_t columns)
{
    for (int32_t i = 0; i < pairs_in(columns) * PAIR; i += BAND) {
        __m512 part = _mm512_maskz_loadu_ps(first_of(columns - i), x + i);
        _mm256_storeu_si256((__m256i *)(out + i), (__m256i)_mm512_cvtneps_pbh(part));
    }
}

int has_bf16(void)
{
    unsigned a, b, c, d; /* not every compiler's __builtin_cpu_supports knows these bits of CPUID */
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    /* The system gives the memory for tiles to a process that asks; its threads and children then have it, too. */
    return __builtin_cpu_supports("avx512bf16") && (d >> 22 & 1) && (d >> 24 & 1) &&
           syscall(SYS_arch_prctl, XCOMP_REQUEST, XCOMP_TILES) == 0;
}

#else

int has_bf16(void) { return 0; }
void multiply_bf16(const struct bf16_product *it, int32_t a, int32_t b) { (void)it, (void)a, (void)b; }
void unpack_tiles(const struct matrix *w, int32_t a, int32_t b, int32_t c, uint16_t *out)
{
    (void)w, (void)a, (void)b, (void)c, (void)out;
}
void round_bf16(uint16_t *out, const float *x, int32_t columns) { (void)out, (void)x, (void)columns; }

#endif
