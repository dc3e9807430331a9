/* Products with many vectors for x86-64 with AVX-512 and VNNI: two bands are unpacked once, some columns at a time, and
   every vector of the call is then multiplied with them.

   A tile of packed weights is 32 rows by up to WIDE vectors, whose sums stay in registers: a line of weights serves
   WIDE vectors, and four bytes of a vector serve two lines.  The unpacked bytes stay in the cache nearest to the
   processor.  Between two ranges of columns the sums wait in y, so every sum is made in the order of
   matmul_portable.c.

   A tile of dense weights is 4 rows by up to WIDE vectors, with the 16 partial sums of a product in a register.  */

#include "kernels.h"

#if X86_KERNELS

#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")))
#define INLINE static inline TARGET __attribute__((always_inline))
#define WIDE 6       /* vectors of a tile: 12 sums of integers and 12 of fp32 numbers leave 8 registers */
#define SUPER_WIDE 4 /* vectors of a tile of LAYOUT_S8X16, whose groups have two sums of integers */
#define GROUPS 20    /* that are unpacked at a time */

/* A sum of integers begins at the bits of BASE, 1.5 * 2^23.  As its absolute value stays below 2^22, its bits are then
   those of the fp32 number BASE + sum: scale * (BASE + sum) - scale * BASE, rounded once, is scale * sum rounded, with
   no conversion.  A scale is a finite fp16 number, so scale * BASE is exact.  */
#define BASE 12582912.0f
#define BASE_BITS 0x4b400000

/* Two bands of up to GROUPS groups: w = scale * byte + minimum, or scale * (byte - 128). */
struct panel {
    uint8_t lines[GROUPS][GROUP / 4][2][LINE];
    float scales[GROUPS][2][BAND];
    float minimums[GROUPS][2][BAND];
    float offsets[GROUPS][2][BAND]; /* -scale * BASE, of unsigned weights */
} __attribute__((aligned(LINE)));

/* The lines of one group of LAYOUT_U4 or LAYOUT_U5, told apart by the bytes of a group. */
INLINE void unpack_unsigned(struct panel *panel, int g, int b, const uint8_t *block, const size_t bytes)
{
    const __m512i low_half = _mm512_set1_epi8(15), fifth = _mm512_set1_epi8(16);
    __m512i bits = bytes == U5_BYTES ? _mm512_loadu_si512(block + 4 * LINE) : _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512i line = _mm512_loadu_si512(block + LINE * j);
        __m512i low = _mm512_and_si512(line, low_half);
        __m512i high = _mm512_and_si512(_mm512_srli_epi16(line, 4), low_half);
        if (bytes == U5_BYTES) { /* bits 2j and 2j + 1 move to bit 4; 0xf8 is a | (b & c) */
            __m512i even = j < 2 ? _mm512_slli_epi16(bits, 4 - 2 * j) : _mm512_srli_epi16(bits, 2 * j - 4);
            __m512i odd = j < 2 ? _mm512_slli_epi16(bits, 3 - 2 * j) : _mm512_srli_epi16(bits, 2 * j - 3);
            low = _mm512_ternarylogic_epi64(low, even, fifth, 0xf8);
            high = _mm512_ternarylogic_epi64(high, odd, fifth, 0xf8);
        }
        _mm512_store_si512(panel->lines[g][2 * j][b], low);
        _mm512_store_si512(panel->lines[g][2 * j + 1][b], high);
    }
}

INLINE void unpack(struct panel *panel, int32_t groups, int b, const uint8_t *block, const size_t bytes)
{
    for (int g = 0; g < groups; g++, block += bytes) {
        const uint8_t *scales = block + bytes - (bytes == S8_BYTES ? 2 : 4) * BAND;
        if (bytes == S8_BYTES)
            for (int j = 0; j < 8; j++)
                _mm512_store_si512(panel->lines[g][j][b],
                                   _mm512_xor_si512(_mm512_loadu_si512(block + LINE * j), _mm512_set1_epi8(-128)));
        else
            unpack_unsigned(panel, g, b, block, bytes);
        __m512 own = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales));
        _mm512_store_ps(panel->scales[g][b], own);
        if (bytes == S8_BYTES)
            continue;
        _mm512_store_ps(panel->minimums[g][b],
                        _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(scales + 2 * BAND))));
        _mm512_store_ps(panel->offsets[g][b], _mm512_mul_ps(own, _mm512_set1_ps(-BASE)));
    }
}

/* A range of columns of one product: which groups, and where the numbers of the first vector begin. */
struct range {
    int32_t groups;
    int first, last; /* whether it is the first or the last of its product */
    size_t columns, all_groups;
    const int8_t *rounded;
    const float *scales, *sums;
    float *y;
    ptrdiff_t y_stride;
    const float *bias;
};

INLINE void tile(const struct panel *panel, const struct range *it, size_t first, const int count, const int is_signed)
{
    const size_t columns = it->columns, all = it->all_groups;
    const int8_t *near = it->rounded + first * columns, *far = near + 3 * columns;
    const float *scales = it->scales + first * all, *sums = it->sums + 2 * first * all;
    float *y = it->y + (ptrdiff_t)first * it->y_stride;
    __m512 total[WIDE][2];
    for (int m = 0; m < count; m++)
        for (int b = 0; b < 2; b++)
            total[m][b] = it->first ? _mm512_setzero_ps() : _mm512_loadu_ps(y + m * it->y_stride + BAND * b);
    for (int32_t g = 0; g < it->groups; g++, near += GROUP, far += GROUP) {
        __m512i dot[WIDE][2];
        for (int m = 0; m < count; m++)
            dot[m][0] = dot[m][1] = _mm512_set1_epi32(BASE_BITS);
#pragma GCC unroll 8
        for (int j = 0; j < GROUP / 4; j++) {
            __m512i one = _mm512_load_si512(panel->lines[g][j][0]), two = _mm512_load_si512(panel->lines[g][j][1]);
            for (int m = 0; m < count; m++) {
                int32_t bytes;
                memcpy(&bytes, (m < 3 ? near + (size_t)m * columns : far + (size_t)(m - 3) * columns) + 4 * j, 4);
                __m512i four = _mm512_set1_epi32(bytes);
                dot[m][0] = _mm512_dpbusd_epi32(dot[m][0], one, four);
                dot[m][1] = _mm512_dpbusd_epi32(dot[m][1], two, four);
            }
        }
        for (int m = 0; m < count; m++) {
            size_t at = (size_t)m * all + (size_t)g;
            __m512 sum = _mm512_set1_ps(sums[2 * at]), scale = _mm512_set1_ps(scales[at]);
            __m512 base = _mm512_fmadd_ps(_mm512_set1_ps(128), sum, _mm512_set1_ps(BASE)); /* whole numbers: exact */
            for (int b = 0; b < 2; b++) {
                __m512 product = _mm512_castsi512_ps(dot[m][b]), own = _mm512_load_ps(panel->scales[g][b]);
                if (is_signed) {
                    product = _mm512_mul_ps(own, _mm512_sub_ps(product, base));
                } else {
                    product = _mm512_fmadd_ps(own, product, _mm512_load_ps(panel->offsets[g][b]));
                    product = _mm512_fmadd_ps(_mm512_load_ps(panel->minimums[g][b]), sum, product);
                }
                total[m][b] = _mm512_fmadd_ps(scale, product, total[m][b]);
            }
        }
    }
    for (int m = 0; m < count; m++)
        for (int b = 0; b < 2; b++) {
            __m512 result = total[m][b];
            if (it->last && it->bias)
                result = _mm512_add_ps(result, _mm512_loadu_ps(it->bias + BAND * b));
            _mm512_storeu_ps(y + m * it->y_stride + BAND * b, result);
        }
}

INLINE void two_bands(const struct matrix *w, int32_t band, const struct input *in, float *y, ptrdiff_t y_stride,
                      const float *bias, const size_t bytes)
{
    struct panel panel;
    const int is_signed = bytes == S8_BYTES;
    int32_t all = w->columns / GROUP, pieces = (all + GROUPS - 1) / GROUPS;
    for (int32_t piece = 0; piece < pieces; piece++) {
        int32_t from = all * piece / pieces, to = all * (piece + 1) / pieces;
        for (int b = 0; b < 2; b++)
            unpack(&panel, to - from, b, band_of(w, band + b, GROUP, bytes) + (size_t)from * bytes, bytes);
        struct range range = {to - from, piece == 0, piece == pieces - 1, (size_t)w->columns, (size_t)all,
                              in->rounded + (size_t)from * GROUP, in->scales + from, in->sums + 2 * from,
                              y + (ptrdiff_t)band * BAND, y_stride, bias ? bias + (ptrdiff_t)band * BAND : NULL};
        size_t m = 0, count = (size_t)in->count;
        for (; m + WIDE <= count; m += WIDE)
            tile(&panel, &range, m, WIDE, is_signed);
        switch (count - m) {
        case 1: tile(&panel, &range, m, 1, is_signed); break;
        case 2: tile(&panel, &range, m, 2, is_signed); break;
        case 3: tile(&panel, &range, m, 3, is_signed); break;
        case 4: tile(&panel, &range, m, 4, is_signed); break;
        case 5: tile(&panel, &range, m, 5, is_signed); break;
        default: break;
        }
    }
}

/* Two bands of a supergroup: w = scale * factor * (byte - 128). */
struct super_panel {
    uint8_t lines[SUPERGROUP / 4][2][LINE];
    float factors[SUPERGROUP / 16][2][BAND];
    float scales[2][BAND];
} __attribute__((aligned(LINE)));

INLINE void unpack_super(struct super_panel *panel, int b, const uint8_t *block)
{
    const uint8_t *factors = block + 64 * LINE;
    for (int j = 0; j < SUPERGROUP / 4; j++)
        _mm512_store_si512(panel->lines[j][b],
                           _mm512_xor_si512(_mm512_loadu_si512(block + LINE * j), _mm512_set1_epi8(-128)));
    for (int i = 0; i < SUPERGROUP / 16; i++) {
        __m512i numbers = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(factors + BAND * i)));
        _mm512_store_ps(panel->factors[i][b], _mm512_cvtepi32_ps(numbers));
    }
    __m256i scales = _mm256_loadu_si256((const __m256i *)(factors + 16 * BAND));
    _mm512_store_ps(panel->scales[b], _mm512_cvtph_ps(scales));
}

/* Add the products of a supergroup with `count` vectors, whose numbers begin at `rounded`, `scales` and `sums`. */
INLINE void super_tile(const struct super_panel *panel, const int8_t *rounded, const float *scales, const float *sums,
                       size_t columns, float *y, ptrdiff_t y_stride, const int is_first, const int count)
{
    const size_t groups = columns / GROUP;
    __m512 partial[SUPER_WIDE][2];
    for (int m = 0; m < count; m++)
        partial[m][0] = partial[m][1] = _mm512_setzero_ps();
    for (size_t i = 0; i < SUPERGROUP / 16; i += 2) {
        __m512 products[SUPER_WIDE][2];
#pragma GCC unroll 2
        for (size_t half = 0; half < 2; half++) {
            __m512i dot[SUPER_WIDE][2];
            for (int m = 0; m < count; m++)
                dot[m][0] = dot[m][1] = _mm512_set1_epi32(BASE_BITS);
#pragma GCC unroll 4
            for (size_t j = 4 * (i + half); j < 4 * (i + half + 1); j++)
                for (int m = 0; m < count; m++) {
                    int32_t bytes;
                    memcpy(&bytes, rounded + (size_t)m * columns + 4 * j, 4);
                    for (int b = 0; b < 2; b++)
                        dot[m][b] = _mm512_dpbusd_epi32(dot[m][b], _mm512_load_si512(panel->lines[j][b]),
                                                        _mm512_set1_epi32(bytes));
                }
            for (int m = 0; m < count; m++) {
                const float *both = sums + 2 * ((size_t)m * groups + i / 2);
                __m512 sum = _mm512_set1_ps(half ? both[0] - both[1] : both[1]);
                __m512 base = _mm512_fmadd_ps(_mm512_set1_ps(128), sum, _mm512_set1_ps(BASE));
                for (int b = 0; b < 2; b++) {
                    __m512 factor = _mm512_load_ps(panel->factors[i + half][b]);
                    __m512 product = _mm512_sub_ps(_mm512_castsi512_ps(dot[m][b]), base);
                    products[m][b] = half ? _mm512_fmadd_ps(factor, product, products[m][b])
                                          : _mm512_mul_ps(factor, product);
                }
            }
        }
        for (int m = 0; m < count; m++)
            for (int b = 0; b < 2; b++)
                partial[m][b] = _mm512_fmadd_ps(_mm512_set1_ps(scales[(size_t)m * groups + i / 2]), products[m][b],
                                                partial[m][b]);
    }
    for (int m = 0; m < count; m++)
        for (int b = 0; b < 2; b++) {
            float *to = y + m * y_stride + BAND * b;
            __m512 before = is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(to);
            _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_load_ps(panel->scales[b]), partial[m][b], before));
        }
}

TARGET static void many_s8x16(const struct matrix *w, int32_t band, const struct input *in, float *y,
                              ptrdiff_t y_stride, const float *bias)
{
    struct super_panel panel;
    const size_t columns = (size_t)w->columns, count = (size_t)in->count;
    y += (ptrdiff_t)band * BAND;
    for (size_t k = 0; k < columns; k += SUPERGROUP) {
        for (int b = 0; b < 2; b++)
            unpack_super(&panel, b, band_of(w, band + b, SUPERGROUP, S8X16_BYTES) + k / SUPERGROUP * S8X16_BYTES);
        for (size_t m = 0; m < count;) {
            const size_t left = count - m, at = (m * columns + k) / GROUP;
            const int8_t *rounded = in->rounded + m * columns + k;
            const float *scales = in->scales + at, *sums = in->sums + 2 * at;
            float *to = y + (ptrdiff_t)m * y_stride;
            if (left >= SUPER_WIDE) {
                super_tile(&panel, rounded, scales, sums, columns, to, y_stride, k == 0, SUPER_WIDE);
                m += SUPER_WIDE;
            } else {
                super_tile(&panel, rounded, scales, sums, columns, to, y_stride, k == 0, 1);
                m++;
            }
        }
    }
    for (size_t m = 0; bias && m < count; m++)
        for (int r = 0; r < 2 * BAND; r++)
            y[(ptrdiff_t)m * y_stride + r] += bias[band * BAND + r];
}

/* Up to 16 weights of a dense row, as fp32. */
INLINE __m512 dense_at(const char *row, size_t k, __mmask16 mask, const int bf16)
{
    if (!bf16)
        return _mm512_maskz_loadu_ps(mask, (const float *)row + k);
    __m256i words = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)row + k);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

/* The sums of the lanes of four registers, each added by halves as sum_of_lanes in matmul_portable.c does. */
INLINE __m128 sums_of_lanes(const __m512 *lanes)
{
    __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(lanes[0], lanes[1], 0x44), /* their lower halves, their upper ones */
                             _mm512_shuffle_f32x4(lanes[0], lanes[1], 0xee));
    __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(lanes[2], lanes[3], 0x44),
                             _mm512_shuffle_f32x4(lanes[2], lanes[3], 0xee));
    __m512 fours = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    __m512 twos = _mm512_add_ps(fours, _mm512_permute_ps(fours, 0x4e));
    __m512 ones = _mm512_add_ps(twos, _mm512_permute_ps(twos, 0xb1));
    return _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, ones));
}

INLINE void add_columns(__m512 (*sums)[4], const char *const *rows, const float *x, ptrdiff_t stride, size_t k,
                        __mmask16 mask, const int count, const int bf16)
{
    __m512 weights[4];
    for (int r = 0; r < 4; r++)
        weights[r] = dense_at(rows[r], k, mask, bf16);
    for (int m = 0; m < count; m++) {
        __m512 part = _mm512_maskz_loadu_ps(mask, x + m * stride + k);
        for (int r = 0; r < 4; r++) /* lanes beyond the last column stay, even a sum of -0 */
            sums[m][r] = mask == 0xffff ? _mm512_fmadd_ps(weights[r], part, sums[m][r])
                                        : _mm512_mask3_fmadd_ps(weights[r], part, sums[m][r], mask);
    }
}

INLINE void dense_rows(const char *const *rows, const float *x, ptrdiff_t stride, size_t columns, float *y,
                       ptrdiff_t y_stride, const float *bias, const int count, const int bf16)
{
    __m512 sums[WIDE][4];
    for (int m = 0; m < count; m++)
        for (int r = 0; r < 4; r++)
            sums[m][r] = _mm512_setzero_ps();
    size_t k = 0;
    for (; k + 16 <= columns; k += 16)
        add_columns(sums, rows, x, stride, k, 0xffff, count, bf16);
    if (k < columns)
        add_columns(sums, rows, x, stride, k, (__mmask16)((1u << (columns - k)) - 1), count, bf16);
    for (int m = 0; m < count; m++) {
        __m128 four = sums_of_lanes(sums[m]);
        _mm_storeu_ps(y + m * y_stride, bias ? _mm_add_ps(four, _mm_loadu_ps(bias)) : four);
    }
}

INLINE void dense_bands(const struct matrix *w, int32_t band, const struct input *in, float *y, ptrdiff_t y_stride,
                        const float *bias, const int bf16)
{
    const size_t columns = (size_t)w->columns, bytes = columns * (bf16 ? 2 : 4);
    for (int32_t first = 0; first < in->count; first += WIDE) {
        const float *x = in->dense + first * in->stride;
        for (int32_t row = band * BAND; row < (band + 2) * BAND; row += 4) {
            const char *start = (const char *)w->data + (size_t)row * bytes;
            const char *rows[4] = {start, start + bytes, start + 2 * bytes, start + 3 * bytes};
            const float *added = bias ? bias + row : NULL;
            float *to = y + first * y_stride + row;
            switch (in->count - first) {
            case 1: dense_rows(rows, x, in->stride, columns, to, y_stride, added, 1, bf16); break;
            case 2: dense_rows(rows, x, in->stride, columns, to, y_stride, added, 2, bf16); break;
            case 3: dense_rows(rows, x, in->stride, columns, to, y_stride, added, 3, bf16); break;
            case 4: dense_rows(rows, x, in->stride, columns, to, y_stride, added, 4, bf16); break;
            case 5: dense_rows(rows, x, in->stride, columns, to, y_stride, added, 5, bf16); break;
            default: dense_rows(rows, x, in->stride, columns, to, y_stride, added, WIDE, bf16); break;
            }
        }
    }
}

#define KERNEL(NAME, CALL, HOW)                                                                                   \
    TARGET static void NAME(const struct matrix *w, int32_t band, const struct input *in, float *y,               \
                            ptrdiff_t y_stride, const float *bias)                                                \
    {                                                                                                             \
        CALL(w, band, in, y, y_stride, bias, HOW);                                                                \
    }

KERNEL(many_f32, dense_bands, 0)
KERNEL(many_bf16, dense_bands, 1)
KERNEL(many_u4, two_bands, U4_BYTES)
KERNEL(many_u5, two_bands, U5_BYTES)
KERNEL(many_s8, two_bands, S8_BYTES)

pair_kernel *const avx512_pairs[LAYOUTS] = {many_f32, many_bf16, many_u4, many_u5, many_s8, many_s8x16};

#endif
