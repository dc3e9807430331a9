/* Products in bf16 with AMX or with AVX-512 and its BF16 instructions.  See matmul_bf16.h.

   A block of the result is 32 vectors by 32 rows of weights, whose sums take four of the eight tiles of AMX.  The columns
   are cut into ranges whose weights stay in the cache nearest to the processor while several blocks use them; between
   two ranges the sums of a block wait in memory.  Weights are read from the beginning to the end, once; while one range is
   multiplied, the processor is asked for the next one.  */

#include "matmul_bf16.h"

#include "tiles.h"

#if HAS_TILES

/* Unlike the packed products these have no definition to be equal to bit by bit, so products and sums are fused. */
#ifdef __clang__
#pragma clang fp contract(fast)
#else
#pragma GCC optimize("fp-contract=fast")
#endif

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "functions.h"
#include "kernels.h"

#define AMX __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma,amx-tile,amx-bf16")))
#define RANGE 12                   /* tiles of columns in a range: two bands of them have 24 KiB */
#define BLOCKS 8                   /* blocks that use a range one after another */
#define XCOMP_REQUEST 0x1023       /* ARCH_REQ_XCOMP_PERM */
#define XCOMP_TILES 18             /* XFEATURE_XTILEDATA */

/* Vectors [0, 16) and the last 16 of them, with more than 16: both then write some rows of sums, the same numbers.  The
   tiles have 16 rows, or as many as there are vectors.  */
AMX static void amx_part(const struct part *it, float *sums)
{
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

#define WIDE 6 /* vectors whose sums stay in registers */

INLINE_BF16 void some_vectors(const struct part *it, int32_t first, float *sums, const int count)
{
    const uint16_t *x = it->x + first * it->stride, *lines = it->tiles;
    sums += first * it->line;
    __m512 total[WIDE][2];
    for (int m = 0; m < count; m++)
        for (int b = 0; b < 2; b++)
            total[m][b] = it->from ? _mm512_loadu_ps(sums + m * it->line + BAND * b) : _mm512_setzero_ps();
    for (int32_t t = it->from; t < it->to; t++, lines += TILE_NUMBERS)
        for (int j = 0; j < BAND; j++, lines += PAIR) {
            __m512bh one = (__m512bh)_mm512_loadu_si512(lines), two = (__m512bh)_mm512_loadu_si512(lines + TILE_NUMBERS);
            for (int m = 0; m < count; m++) {
                int32_t both;
                memcpy(&both, x + m * it->stride + t * PAIR + 2 * j, sizeof both);
                total[m][0] = _mm512_dpbf16_ps(total[m][0], one, (__m512bh)_mm512_set1_epi32(both));
                total[m][1] = _mm512_dpbf16_ps(total[m][1], two, (__m512bh)_mm512_set1_epi32(both));
            }
        }
    for (int m = 0; m < count; m++)
        for (int b = 0; b < 2; b++) _mm512_storeu_ps(sums + m * it->line + BAND * b, total[m][b]);
}

BF16 static void avx512_part(const struct part *it, float *sums)
{
    int32_t m = 0;
    for (; m + WIDE <= it->count; m += WIDE) some_vectors(it, m, sums, WIDE);
    for (; m < it->count; m++) some_vectors(it, m, sums, 1);
}

/* Vectors [first, first + count) of y at the rows of a pair, from their sums. */
INLINE_BF16 void finish(const struct bf16_product *it, int32_t pair, int32_t first, int32_t count,
                        const float (*sums)[PAIR], const int32_t function)
{
    const int32_t padded = pairs_in(it->rows) * PAIR;
    for (int b = 0; b < 2; b++) {
        int32_t row = pair * PAIR + BAND * b;
        __mmask16 mask = first_of(it->rows - row);
        __m512 bias = it->bias ? _mm512_maskz_loadu_ps(mask, it->bias + row) : _mm512_setzero_ps();
        for (int32_t m = 0; m < count; m++) {
            size_t at = (size_t)(first + m) * (size_t)it->rows + (size_t)row;
            __m512 y = _mm512_add_ps(_mm512_loadu_ps(sums[m] + BAND * b), bias);
            y = (__m512)function16((v16)y, function, it->factor);
            if (it->more) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, it->more + at));
            if (it->rounded)
                _mm256_storeu_si256((__m256i *)((uint16_t *)it->y + (size_t)(first + m) * (size_t)padded + row),
                                    (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_mov_ps(mask, y)));
            else
                _mm512_mask_storeu_ps((float *)it->y + at, mask, y);
        }
    }
}

BF16 static void finish_block(const struct bf16_product *it, int32_t pair, int32_t first, int32_t count,
                              const float (*sums)[PAIR])
{
    switch (it->function) {
    case FUNCTION_NONE: finish(it, pair, first, count, sums, FUNCTION_NONE); break;
    case FUNCTION_GELU: finish(it, pair, first, count, sums, FUNCTION_GELU); break;
    default: finish(it, pair, first, count, sums, it->function); break;
    }
}

/* Four columns of a group, from column 4 * c on, as the bytes of a register: those of row r in its number r. */
INLINE_BF16 __m512i four_columns(const uint8_t *group, const int32_t layout, int c)
{
    if (layout >= LAYOUT_S8) return _mm512_loadu_si512(group + LINE * c);
    __m512i codes = _mm512_srli_epi32(_mm512_loadu_si512(group + LINE * (c / 2)), (unsigned)c % 2 * 4);
    codes = _mm512_and_si512(codes, _mm512_set1_epi8(15));
    if (layout == LAYOUT_U4) return codes;
    __m512i fifth = _mm512_srli_epi32(_mm512_loadu_si512(group + 4 * LINE), (unsigned)c);
    return _mm512_or_si512(codes, _mm512_slli_epi32(_mm512_and_si512(fifth, _mm512_set1_epi8(1)), 4));
}

INLINE_BF16 __m512 halves_at(const uint8_t *sixteen)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)sixteen));
}

/* One tile of a band: 32 columns that begin at `group`.  scales: for columns 0 to 15 and for 16 to 31.  A product of a
   scale and a code is exact, so fma gives the same number as a product and a sum. */
INLINE_BF16 void unpack_tile(uint16_t *lines, const uint8_t *group, const int32_t layout, const __m512 *scales,
                             __m512 minimum)
{
    for (int c = 0; c < GROUP / 4; c++) {
        __m512i codes = four_columns(group, layout, c);
        __m512 w[4];
        for (unsigned i = 0; i < 4; i++) {
            w[i] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(codes, 24 - 8 * i), 24));
            w[i] = layout >= LAYOUT_S8 ? _mm512_mul_ps(w[i], scales[c / 4]) : _mm512_fmadd_ps(w[i], scales[0], minimum);
        }
        _mm512_storeu_si512(lines + 2 * c * PAIR, line_of(w[0], w[1]));
        _mm512_storeu_si512(lines + (2 * c + 1) * PAIR, line_of(w[2], w[3]));
    }
}

INLINE_BF16 void unpack_band(const struct matrix *w, int32_t band, int32_t from, int32_t to, uint16_t *tiles,
                             const int32_t layout, const size_t bytes)
{
    const int32_t block = layout == LAYOUT_S8X16 ? SUPERGROUP : GROUP, groups = block / GROUP;
    for (int32_t t = from; t < to; t++, tiles += 2 * TILE_NUMBERS) {
        const uint8_t *first = band_of(w, band, block, bytes) + (size_t)(t / groups) * bytes;
        __m512 scale = halves_at(first + bytes - (layout >= LAYOUT_S8 ? 2 : 4) * BAND), scales[2] = {scale, scale};
        for (int i = 0; layout == LAYOUT_S8X16 && i < 2; i++) {
            const uint8_t *factors = first + 64 * LINE + BAND * (2 * (t % groups) + i);
            scales[i] *= _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)factors)));
        }
        __m512 minimum = layout >= LAYOUT_S8 ? _mm512_setzero_ps() : halves_at(first + bytes - 2 * BAND);
        unpack_tile(tiles, first + t % groups * 8 * LINE, layout, scales, minimum);
    }
}

BF16 void unpack_tiles(const struct matrix *w, int32_t pair, int32_t from, int32_t to, uint16_t *tiles)
{
    for (int32_t band = 2 * pair; band < 2 * pair + 2; band++, tiles += TILE_NUMBERS)
        switch (band * BAND < w->rows ? w->layout : -1) {
        case LAYOUT_U4: unpack_band(w, band, from, to, tiles, LAYOUT_U4, U4_BYTES); break;
        case LAYOUT_U5: unpack_band(w, band, from, to, tiles, LAYOUT_U5, U5_BYTES); break;
        case LAYOUT_S8: unpack_band(w, band, from, to, tiles, LAYOUT_S8, S8_BYTES); break;
        case LAYOUT_S8X16: unpack_band(w, band, from, to, tiles, LAYOUT_S8X16, S8X16_BYTES); break;
        default: /* rows that the matrix lacks */
            for (int32_t t = 0; t < to - from; t++) memset(tiles + t * 2 * TILE_NUMBERS, 0, TILE_NUMBERS * 2);
        }
}

static part_kernel *kernel;

AMX static void configure(int32_t count)
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

AMX static void release(void) { _tile_release(); }

void begin_parts(int32_t count) { if (kernel == amx_part) configure(count); }
void multiply_part(const struct part *it, float *sums) { kernel(it, sums); }
void end_parts(void) { if (kernel == amx_part) release(); }

/* All of a pair for the vectors [first, last), at most BLOCKS blocks of them.  A block of fewer than 16 vectors begins
   earlier, where there are such, and computes what other blocks have, too.  */
static void multiply_pair(const struct bf16_product *it, int32_t pair, int32_t first, int32_t last)
{
    float sums[BLOCKS][PAIR][PAIR] __attribute__((aligned(64)));
    uint16_t unpacked[RANGE * 2 * TILE_NUMBERS] __attribute__((aligned(64)));
    int32_t tiles = pairs_in(it->columns);
    ptrdiff_t stride = (ptrdiff_t)tiles * PAIR;
    struct part part = {.stride = stride, .line = PAIR};
    int32_t blocks = (last - first + PAIR - 1) / PAIR;
    for (; part.from < tiles; part.from = part.to) {
        part.to = part.from + RANGE < tiles ? part.from + RANGE : tiles;
        part.tiles = unpacked;
        if (it->packed)
            unpack_tiles(it->packed, pair, part.from, part.to, unpacked);
        else
            part.tiles = it->weights + ((size_t)pair * (size_t)tiles + (size_t)part.from) * 2 * TILE_NUMBERS;
        for (int32_t m = first, i = 0; m < last; m += PAIR, i++) {
            int32_t end = m + PAIR < last ? m + PAIR : last, begin = end - m < BAND ? end - BAND : m;
            begin = begin < 0 ? 0 : begin;
            part.x = it->x + begin * stride;
            part.count = end - begin;
            part.ask = it->packed ? 0 : i * PAIR / blocks;
            part.until = it->packed ? 0 : (i + 1) * PAIR / blocks;
            kernel(&part, sums[i][0]);
            if (part.to == tiles) finish_block(it, pair, m, end - m, (const float(*)[PAIR])sums[i] + (m - begin));
        }
    }
}

void multiply_bf16(const struct bf16_product *it, int32_t first, int32_t last)
{
    begin_parts(it->count);
    for (int32_t pair = first; pair < last; pair++)
        for (int32_t m = 0; m < it->count; m += BLOCKS * PAIR)
            multiply_pair(it, pair, m, m + BLOCKS * PAIR < it->count ? m + BLOCKS * PAIR : it->count);
    end_parts();
}

BF16 void round_bf16(uint16_t *out, const float *x, int32_t columns)
{
    for (int32_t i = 0; i < pairs_in(columns) * PAIR; i += BAND) {
        __m512 part = _mm512_maskz_loadu_ps(first_of(columns - i), x + i);
        _mm256_storeu_si256((__m256i *)(out + i), (__m256i)_mm512_cvtneps_pbh(part));
    }
}

/* What __builtin_cpu_supports does not know in every compiler: the bits of CPUID for AMX and BF16. */
static int has_amx(void)
{
    unsigned a, b, c, d;
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    return (d >> 22 & 1) && (d >> 24 & 1);
}

int select_bf16(int at_most)
{
    __builtin_cpu_init();
    int bf16 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
    /* The system gives the memory for tiles to a process that asks; its threads and children then have it, too. */
    int amx = bf16 && at_most >= 2 && has_amx() && syscall(SYS_arch_prctl, XCOMP_REQUEST, XCOMP_TILES) == 0;
    kernel = amx ? amx_part : avx512_part;
    return amx ? 2 : bf16 && at_most >= 1;
}

#else

int select_bf16(int at_most) { return (void)at_most, 0; }
void multiply_bf16(const struct bf16_product *it, int32_t a, int32_t b) { (void)it, (void)a, (void)b; }
void unpack_tiles(const struct matrix *w, int32_t a, int32_t b, int32_t c, uint16_t *out)
{
    (void)w, (void)a, (void)b, (void)c, (void)out;
}
void round_bf16(uint16_t *out, const float *x, int32_t columns) { (void)out, (void)x, (void)columns; }

#endif
