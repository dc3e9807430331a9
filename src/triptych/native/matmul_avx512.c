/* The kernels for x86-64 with AVX-512 and VNNI: a vector register holds one number for each of the 16 rows of a band.

   vpdpbusd multiplies unsigned bytes with signed ones, adds four products to each 32-bit number, and takes four bytes
   of a vector for all rows from memory.  Signed weights are read as unsigned ones, 128 larger, and 128 times the sum of
   the vector's numbers is taken off again: whole numbers below 2^24, exact in fp32.

   A function for `count` vectors at a time is compiled for every count up to TILE, so that all sums of a tile stay in
   registers and the weights are read and unpacked once for the tile.  bf16 weights are widened to fp32, not multiplied
   by vdpbf16ps, which would round the vectors to bf16 and give other bits than the other kernels.  */

#include "kernels.h"

#if X86_KERNELS

#include <float.h>
#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")))
#define INLINE static inline TARGET __attribute__((always_inline))
#define NEAR (1 << 15) /* bytes */

/* CALL(n) for the n that is `count`, a constant in each call. */
#define FOR_COUNT(CALL) \
    switch (count) {    \
    case 1:             \
        CALL(1);        \
        break;          \
    case 2:             \
        CALL(2);        \
        break;          \
    case 3:             \
        CALL(3);        \
        break;          \
    case 4:             \
        CALL(4);        \
        break;          \
    case 5:             \
        CALL(5);        \
        break;          \
    case 6:             \
        CALL(6);        \
        break;          \
    case 7:             \
        CALL(7);        \
        break;          \
    default:            \
        CALL(8);        \
    }

/* The largest magnitude is found among the bits as whole numbers, where infinity and NaN are larger than all others. */
TARGET static void avx512_round(struct input *in, int32_t vector, int32_t first, int32_t last)
{
    size_t groups = (size_t)(in->columns / GROUP);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    for (int32_t g = first; g < last; g++) {
        size_t at = (size_t)vector * groups + (size_t)g;
        const float *x = in->dense + vector * in->stride + (ptrdiff_t)g * GROUP;
        int8_t *rounded = in->rounded + (size_t)vector * (size_t)in->columns + (size_t)g * GROUP;
        __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
        uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a), magnitude),
                                                                 _mm512_and_si512(_mm512_castps_si512(b), magnitude)));
        int finite = bits < 0x7f800000;
        float largest;
        memcpy(&largest, &bits, sizeof largest);
        float scale = largest / 127;
        __m512 inverse = _mm512_set1_ps(scale >= FLT_MIN ? 1 / scale : 0);
        __mmask16 keep = finite ? 0xffff : 0;
        __m512i p = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(a, inverse));
        __m512i q = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(b, inverse));
        __m256i bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8(q), _mm512_cvtepi32_epi8(p));
        _mm256_storeu_si256((__m256i *)rounded, bytes);
        /* Sums of eight numbers, each 128 larger. */
        __m256i eights = _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
        int first_half = (int)(_mm256_extract_epi64(eights, 0) + _mm256_extract_epi64(eights, 1)) - 16 * 128;
        int second_half = (int)(_mm256_extract_epi64(eights, 2) + _mm256_extract_epi64(eights, 3)) - 16 * 128;
        in->scales[at] = finite ? scale : NAN;
        in->sums[2 * at] = (float)(first_half + second_half);
        in->sums[2 * at + 1] = (float)first_half;
    }
}

/* Four numbers of a vector, for every row. */
INLINE __m512i four(const int8_t *rounded)
{
    int32_t bytes;
    memcpy(&bytes, rounded, sizeof bytes);
    return _mm512_set1_epi32(bytes);
}

INLINE __m512 halves_at(const uint8_t *numbers)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)numbers));
}

/* Rounded vectors, from one of an input on. */
struct vectors {
    const int8_t *rounded;
    const float *scales, *sums;
    size_t columns, groups;
};

INLINE struct vectors vectors_from(const struct input *in, int32_t first)
{
    size_t columns = (size_t)in->columns, groups = columns / GROUP, skipped = (size_t)first * groups;
    return (struct vectors){in->rounded + GROUP * skipped, in->scales + skipped, in->sums + 2 * skipped, columns, groups};
}

/* Adds group g of LAYOUT_U4 or LAYOUT_U5, told apart by the bytes of a group, times `count` vectors to their sums. */
INLINE void add_unsigned(__m512 *total, const uint8_t *block, const struct vectors *x, size_t g, const int count,
                         const size_t bytes)
{
    const __m512i low_half = _mm512_set1_epi8(15), fifth = _mm512_set1_epi8(16);
    const size_t fifths = bytes == U5_BYTES;
    __m512i dot[TILE], bits = fifths ? _mm512_loadu_si512(block + 4 * LINE) : _mm512_setzero_si512();
    prefetch(block, bytes);
    for (int m = 0; m < count; m++)
        dot[m] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512i line = _mm512_loadu_si512(block + LINE * j);
        __m512i low = _mm512_and_si512(line, low_half);
        __m512i high = _mm512_and_si512(_mm512_srli_epi16(line, 4), low_half);
        if (fifths) { /* bits 2j and 2j + 1 move to bit 4; 0xf8 is a | (b & c) */
            __m512i even = j < 2 ? _mm512_slli_epi16(bits, 4 - 2 * j) : _mm512_srli_epi16(bits, 2 * j - 4);
            __m512i odd = j < 2 ? _mm512_slli_epi16(bits, 3 - 2 * j) : _mm512_srli_epi16(bits, 2 * j - 3);
            low = _mm512_ternarylogic_epi64(low, even, fifth, 0xf8);
            high = _mm512_ternarylogic_epi64(high, odd, fifth, 0xf8);
        }
        for (int m = 0; m < count; m++) {
            const int8_t *a = x->rounded + (size_t)m * x->columns + GROUP * g + 8 * (size_t)j;
            dot[m] = _mm512_dpbusd_epi32(dot[m], low, four(a));
            dot[m] = _mm512_dpbusd_epi32(dot[m], high, four(a + 4));
        }
    }
    __m512 scale = halves_at(block + bytes - 4 * BAND), minimum = halves_at(block + bytes - 2 * BAND);
    for (int m = 0; m < count; m++) {
        size_t at = (size_t)m * x->groups + g;
        __m512 sum = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(dot[m]));
        sum = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x->sums[2 * at]), sum);
        total[m] = _mm512_fmadd_ps(_mm512_set1_ps(x->scales[at]), sum, total[m]);
    }
}

/* dot[m] = the products of four lines of signed weights, plus 128 * (the sum of 16 numbers of the vector). */
INLINE void dot_four_lines(const uint8_t *lines, const int8_t *rounded, size_t columns, __m512i *dot, const int count)
{
    const __m512i flip = _mm512_set1_epi8(-128);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512i line = _mm512_xor_si512(_mm512_loadu_si512(lines + LINE * j), flip);
        for (int m = 0; m < count; m++)
            dot[m] = _mm512_dpbusd_epi32(dot[m], line, four(rounded + (size_t)m * columns + 4 * j));
    }
}

/* The products of signed weights as whole numbers in fp32; `sum` is that of the vector's numbers. */
INLINE __m512 corrected(__m512i dot, float sum)
{
    return _mm512_fnmadd_ps(_mm512_set1_ps(128), _mm512_set1_ps(sum), _mm512_cvtepi32_ps(dot));
}

INLINE void add_s8(__m512 *total, const uint8_t *block, const struct vectors *x, size_t g, const int count)
{
    __m512i dot[TILE];
    __m512 scale = halves_at(block + 8 * LINE);
    prefetch(block, S8_BYTES);
    for (int m = 0; m < count; m++)
        dot[m] = _mm512_setzero_si512();
    dot_four_lines(block, x->rounded + GROUP * g, x->columns, dot, count);
    dot_four_lines(block + 4 * LINE, x->rounded + GROUP * g + 16, x->columns, dot, count);
    for (int m = 0; m < count; m++) {
        size_t at = (size_t)m * x->groups + g;
        __m512 sum = _mm512_mul_ps(scale, corrected(dot[m], x->sums[2 * at]));
        total[m] = _mm512_fmadd_ps(_mm512_set1_ps(x->scales[at]), sum, total[m]);
    }
}

/* 16 bytes as fp32. */
INLINE __m512 bytes_at(const uint8_t *bytes)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bytes)));
}

/* Adds the supergroup that begins at group g. */
INLINE void add_s8x16(__m512 *total, const uint8_t *block, const struct vectors *x, size_t g, const int count)
{
    const uint8_t *factors = block + 64 * LINE;
    __m512 partial[TILE], scale = halves_at(block + S8X16_BYTES - 2 * BAND);
    for (int m = 0; m < count; m++)
        partial[m] = _mm512_setzero_ps();
    for (size_t i = 0; i < SUPERGROUP / GROUP; i++, g++) {
        __m512 products[TILE];
        prefetch(block + 8 * LINE * i, 8 * LINE);
        for (int half = 0; half < 2; half++, factors += BAND) {
            __m512i dot[TILE];
            for (int m = 0; m < count; m++)
                dot[m] = _mm512_setzero_si512();
            dot_four_lines(block + LINE * (8 * i + 4 * (size_t)half), x->rounded + GROUP * g + 16 * half, x->columns,
                           dot, count);
            for (int m = 0; m < count; m++) {
                const float *sum = x->sums + 2 * ((size_t)m * x->groups + g);
                __m512 product = corrected(dot[m], half ? sum[0] - sum[1] : sum[1]), factor = bytes_at(factors);
                products[m] = half ? _mm512_fmadd_ps(factor, product, products[m]) : _mm512_mul_ps(factor, product);
            }
        }
        for (int m = 0; m < count; m++)
            partial[m] = _mm512_fmadd_ps(_mm512_set1_ps(x->scales[(size_t)m * x->groups + g]), products[m], partial[m]);
    }
    for (int m = 0; m < count; m++)
        total[m] = _mm512_fmadd_ps(scale, partial[m], total[m]);
}

/* `streams` bands, `apart` bands from one another, times `count` vectors: out[z * count + m] is of band z, vector m. */
INLINE void packed_tile(const struct matrix *w, int32_t band, int32_t apart, const struct input *in, int32_t first,
                        float (*out)[BAND], const int streams, const int count, const enum layout layout)
{
    const struct vectors x = vectors_from(in, first);
    const int32_t width = layout == LAYOUT_S8X16 ? SUPERGROUP : GROUP;
    const size_t bytes = layout == LAYOUT_U4   ? U4_BYTES
                         : layout == LAYOUT_U5 ? U5_BYTES
                         : layout == LAYOUT_S8 ? S8_BYTES
                                               : S8X16_BYTES;
    const uint8_t *blocks[STREAMS];
    __m512 total[TILE];
    for (int z = 0; z < streams; z++)
        blocks[z] = band_of(w, band + z * apart, width, bytes);
    for (int i = 0; i < streams * count; i++)
        total[i] = _mm512_setzero_ps();
    for (size_t g = 0; g < x.groups; g += (size_t)width / GROUP)
#pragma GCC unroll 4
        for (int z = 0; z < streams; z++, blocks[z - 1] += bytes) {
            if (layout == LAYOUT_S8X16)
                add_s8x16(total + z * count, blocks[z], &x, g, count);
            else if (layout == LAYOUT_S8)
                add_s8(total + z * count, blocks[z], &x, g, count);
            else
                add_unsigned(total + z * count, blocks[z], &x, g, count, bytes);
        }
    for (int i = 0; i < streams * count; i++)
        _mm512_storeu_ps(out[i], total[i]);
}

/* Up to 16 weights of a dense row as fp32. */
INLINE __m512 dense_at(const void *numbers, __mmask16 mask, const int bf16)
{
    if (!bf16)
        return _mm512_maskz_loadu_ps(mask, numbers);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, numbers)), 16));
}

/* The 16 numbers, added in the order of sum_of_lanes in matmul_portable.c. */
INLINE float sum_of_lanes(__m512 lanes)
{
    __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(lanes), 1));
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), upper);
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

/* `height` rows at a time; a row that the matrix lacks is the last one again.  The rows after them are asked for
   meanwhile where they are near enough to stay in the cache: rows are short streams, which the processor itself does
   not foresee.  */
INLINE void dense_tile(const struct matrix *w, int32_t band, const struct input *in, int32_t first, float (*out)[BAND],
                       const int count, const int height, const int bf16)
{
    const size_t columns = (size_t)w->columns, start = (size_t)band * BAND, last = (size_t)w->rows - 1;
    const float *x = in->dense + first * in->stride;
    const size_t bytes = bf16 ? 2 : 4, whole = columns / 16 * 16;
    const size_t ahead = (size_t)height * columns * bytes <= NEAR ? (size_t)height * columns * bytes : AHEAD;
    for (size_t r = 0; r < BAND && start + r <= last; r += (size_t)height) {
        __m512 sums[4][TILE];
        const char *rows[4];
        for (int i = 0; i < height; i++) {
            size_t row = start + r + (size_t)i;
            rows[i] = (const char *)w->data + (row < last ? row : last) * columns * bytes;
        }
        for (int i = 0; i < height; i++)
            for (int m = 0; m < count; m++)
                sums[i][m] = _mm512_setzero_ps();
        for (size_t k = 0; k < whole; k += 16) {
            __m512 weights[4];
            for (int i = 0; i < height; i++) {
                if (!bf16 || k % 32 == 0) __builtin_prefetch((const void *)((uintptr_t)rows[i] + bytes * k + ahead));
                weights[i] = dense_at(rows[i] + bytes * k, 0xffff, bf16);
            }
            for (int m = 0; m < count; m++) {
                __m512 part = _mm512_loadu_ps(x + m * in->stride + k);
                for (int i = 0; i < height; i++)
                    sums[i][m] = _mm512_fmadd_ps(weights[i], part, sums[i][m]);
            }
        }
        if (whole < columns) {
            __mmask16 mask = (__mmask16)((1u << (columns - whole)) - 1);
            __m512 weights[4];
            for (int i = 0; i < height; i++)
                weights[i] = dense_at(rows[i] + bytes * whole, mask, bf16);
            for (int m = 0; m < count; m++) {
                __m512 part = _mm512_maskz_loadu_ps(mask, x + m * in->stride + whole);
                for (int i = 0; i < height; i++)
                    sums[i][m] = _mm512_mask3_fmadd_ps(weights[i], part, sums[i][m], mask);
            }
        }
        for (int i = 0; i < height; i++)
            for (int m = 0; m < count; m++)
                out[m][r + (size_t)i] = sum_of_lanes(sums[i][m]);
    }
}

#define KERNEL(NAME, CALL)                                                                                    \
    TARGET static void NAME(const struct matrix *w, int32_t band, const struct input *in, int32_t first,      \
                            int32_t count, float (*out)[BAND])                                                \
    {                                                                                                         \
        FOR_COUNT(CALL)                                                                                       \
    }

#define STREAM_KERNEL(NAME, LAYOUT)                                                                           \
    TARGET static void NAME(const struct matrix *w, int32_t band, int32_t apart, const struct input *in,      \
                            float (*out)[BAND])                                                               \
    {                                                                                                         \
        packed_tile(w, band, apart, in, 0, out, STREAMS, 1, LAYOUT);                                          \
    }

#define F32(n) dense_tile(w, band, in, first, out, n, n <= 4 ? 4 : 2, 0)
#define BF16(n) dense_tile(w, band, in, first, out, n, n <= 4 ? 4 : 2, 1)
#define U4(n) packed_tile(w, band, 0, in, first, out, 1, n, LAYOUT_U4)
#define U5(n) packed_tile(w, band, 0, in, first, out, 1, n, LAYOUT_U5)
#define S8(n) packed_tile(w, band, 0, in, first, out, 1, n, LAYOUT_S8)
#define S8X16(n) packed_tile(w, band, 0, in, first, out, 1, n, LAYOUT_S8X16)

KERNEL(avx512_f32, F32)
KERNEL(avx512_bf16, BF16)
KERNEL(avx512_u4, U4)
KERNEL(avx512_u5, U5)
KERNEL(avx512_s8, S8)
KERNEL(avx512_s8x16, S8X16)
STREAM_KERNEL(streams_u4, LAYOUT_U4)
STREAM_KERNEL(streams_u5, LAYOUT_U5)
STREAM_KERNEL(streams_s8, LAYOUT_S8)
STREAM_KERNEL(streams_s8x16, LAYOUT_S8X16)

const struct kernels avx512_kernels = {avx512_round,
                                       {avx512_f32, avx512_bf16, avx512_u4, avx512_u5, avx512_s8, avx512_s8x16},
                                       {NULL, NULL, streams_u4, streams_u5, streams_s8, streams_s8x16},
                                       avx512_pairs};

#endif
