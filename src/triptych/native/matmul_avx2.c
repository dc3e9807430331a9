/* The kernels for x86-64 with AVX2, FMA and F16C: a vector register holds one number for each of 8 rows, so a band is
   done in two halves.

   vpmaddubsw multiplies unsigned bytes with signed ones and adds two products in 16 bits, saturating.  Four such sums
   fit with weights below 32: 4 * 2 * 31 * 127 < 2^15.  Of signed weights the magnitude is taken, and the sign is given
   to the vector's number: 2 * 128 * 127 < 2^15.  So every integer is exact.  */

#include "kernels.h"

#if X86_KERNELS

#include <float.h>
#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE static inline TARGET __attribute__((always_inline))
#define WIDTH 4 /* vectors of a tile; 16 registers hold no more */
#define HALF (BAND / 2)

INLINE float largest_of(__m256 x)
{
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

INLINE int32_t sum_of_bytes(__m128i bytes)
{
    __m256i pairs = _mm256_madd_epi16(_mm256_cvtepi8_epi16(bytes), _mm256_set1_epi16(1));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(four) + _mm_extract_epi32(four, 1);
}

TARGET static void avx2_round(struct input *in, int32_t vector, int32_t first, int32_t last)
{
    size_t groups = (size_t)(in->columns / GROUP);
    const __m256 limit = _mm256_set1_ps(FLT_MAX), magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    for (int32_t g = first; g < last; g++) {
        size_t at = (size_t)vector * groups + (size_t)g;
        const float *x = in->dense + vector * in->stride + (ptrdiff_t)g * GROUP;
        int8_t *rounded = in->rounded + (size_t)vector * (size_t)in->columns + (size_t)g * GROUP;
        __m256 numbers[4], largest = _mm256_setzero_ps(), finite = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
        for (int i = 0; i < 4; i++) {
            numbers[i] = _mm256_loadu_ps(x + 8 * i);
            __m256 size = _mm256_and_ps(numbers[i], magnitude);
            finite = _mm256_and_ps(finite, _mm256_cmp_ps(size, limit, _CMP_LE_OQ));
            largest = _mm256_max_ps(largest, size);
        }
        int all_finite = _mm256_movemask_ps(finite) == 0xff;
        float scale = largest_of(largest) / 127;
        __m256 inverse = _mm256_set1_ps(scale >= FLT_MIN ? 1 / scale : 0);
        for (int i = 0; i < 2; i++) {
            __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(numbers[2 * i], inverse));
            __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(numbers[2 * i + 1], inverse));
            __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8); /* packs works in halves */
            __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
            bytes = all_finite ? bytes : _mm_setzero_si128();
            _mm_storeu_si128((__m128i *)(rounded + 16 * i), bytes);
            float sum = (float)sum_of_bytes(bytes);
            in->sums[2 * at] = i ? in->sums[2 * at] + sum : sum;
            if (!i)
                in->sums[2 * at + 1] = sum;
        }
        in->scales[at] = all_finite ? scale : NAN;
    }
}

/* Four numbers of a vector, for every row. */
INLINE __m256i four(const int8_t *rounded)
{
    int32_t bytes;
    memcpy(&bytes, rounded, sizeof bytes);
    return _mm256_set1_epi32(bytes);
}

INLINE __m256 halves_at(const uint8_t *numbers)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)numbers));
}

/* dot + the sums of pairs of 16-bit numbers */
INLINE __m256i widened(__m256i dot, __m256i pairs)
{
    return _mm256_add_epi32(dot, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

/* dot[m] += the products of lines j and j + 1 of a group of LAYOUT_U4 or, where there are fifth bits, LAYOUT_U5. */
INLINE void dot_two_lines(const uint8_t *lines, const uint8_t *fifth_bits, int j, const int8_t *rounded, size_t columns,
                          __m256i *dot, const int count)
{
    const __m256i low_half = _mm256_set1_epi8(15), fifth = _mm256_set1_epi8(16);
    __m256i pairs[WIDTH];
    for (int m = 0; m < count; m++)
        pairs[m] = _mm256_setzero_si256();
    for (int i = j; i < j + 2; i++) {
        __m256i line = _mm256_loadu_si256((const __m256i *)(lines + LINE * i));
        __m256i low = _mm256_and_si256(line, low_half);
        __m256i high = _mm256_and_si256(_mm256_srli_epi16(line, 4), low_half);
        if (fifth_bits) { /* bits 2i and 2i + 1 move to bit 4 */
            __m256i bits = _mm256_loadu_si256((const __m256i *)fifth_bits);
            __m256i even = i < 2 ? _mm256_slli_epi16(bits, 4 - 2 * i) : _mm256_srli_epi16(bits, 2 * i - 4);
            __m256i odd = i < 2 ? _mm256_slli_epi16(bits, 3 - 2 * i) : _mm256_srli_epi16(bits, 2 * i - 3);
            low = _mm256_or_si256(low, _mm256_and_si256(even, fifth));
            high = _mm256_or_si256(high, _mm256_and_si256(odd, fifth));
        }
        for (int m = 0; m < count; m++) {
            const int8_t *a = rounded + (size_t)m * columns + 8 * i;
            pairs[m] = _mm256_add_epi16(pairs[m], _mm256_maddubs_epi16(low, four(a)));
            pairs[m] = _mm256_add_epi16(pairs[m], _mm256_maddubs_epi16(high, four(a + 4)));
        }
    }
    for (int m = 0; m < count; m++)
        dot[m] = widened(dot[m], pairs[m]);
}

INLINE void unsigned_tile(const struct matrix *w, int32_t band, const struct input *in, int32_t first,
                          float (*out)[BAND], const int count, const int half, const size_t bytes)
{
    const size_t columns = (size_t)w->columns, groups = columns / GROUP;
    const int8_t *rounded = in->rounded + (size_t)first * columns;
    const float *scales = in->scales + (size_t)first * groups, *sums = in->sums + 2 * (size_t)first * groups;
    const uint8_t *block = band_of(w, band, GROUP, bytes);
    __m256 total[WIDTH];
    for (int m = 0; m < count; m++)
        total[m] = _mm256_setzero_ps();
    for (size_t g = 0; g < groups; g++, block += bytes, rounded += GROUP) {
        if (!half)
            prefetch(block, bytes);
        const uint8_t *lines = block + LINE / 2 * half, *fifth_bits = bytes == U5_BYTES ? lines + 4 * LINE : NULL;
        __m256i dot[WIDTH];
        for (int m = 0; m < count; m++)
            dot[m] = _mm256_setzero_si256();
        dot_two_lines(lines, fifth_bits, 0, rounded, columns, dot, count);
        dot_two_lines(lines, fifth_bits, 2, rounded, columns, dot, count);
        __m256 scale = halves_at(block + bytes - 4 * BAND + BAND * half);
        __m256 minimum = halves_at(block + bytes - 2 * BAND + BAND * half);
        for (int m = 0; m < count; m++) {
            __m256 sum = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(dot[m]));
            sum = _mm256_fmadd_ps(minimum, _mm256_set1_ps(sums[2 * ((size_t)m * groups + g)]), sum);
            total[m] = _mm256_fmadd_ps(_mm256_set1_ps(scales[(size_t)m * groups + g]), sum, total[m]);
        }
    }
    for (int m = 0; m < count; m++)
        _mm256_storeu_ps(out[m] + HALF * half, total[m]);
}

/* dot[m] += the products of four lines of signed weights. */
INLINE void dot_four_lines(const uint8_t *lines, const int8_t *rounded, size_t columns, __m256i *dot, const int count)
{
    for (int j = 0; j < 4; j++) {
        __m256i line = _mm256_loadu_si256((const __m256i *)(lines + LINE * j)), size = _mm256_abs_epi8(line);
        for (int m = 0; m < count; m++) {
            __m256i a = _mm256_sign_epi8(four(rounded + (size_t)m * columns + 4 * j), line);
            dot[m] = widened(dot[m], _mm256_maddubs_epi16(size, a));
        }
    }
}

INLINE void s8_tile(const struct matrix *w, int32_t band, const struct input *in, int32_t first, float (*out)[BAND],
                    const int count, const int half)
{
    const size_t columns = (size_t)w->columns, groups = columns / GROUP;
    const int8_t *rounded = in->rounded + (size_t)first * columns;
    const float *scales = in->scales + (size_t)first * groups;
    const uint8_t *block = band_of(w, band, GROUP, S8_BYTES);
    __m256 total[WIDTH];
    for (int m = 0; m < count; m++)
        total[m] = _mm256_setzero_ps();
    for (size_t g = 0; g < groups; g++, block += S8_BYTES, rounded += GROUP) {
        if (!half)
            prefetch(block, S8_BYTES);
        __m256i dot[WIDTH];
        for (int m = 0; m < count; m++)
            dot[m] = _mm256_setzero_si256();
        dot_four_lines(block + LINE / 2 * half, rounded, columns, dot, count);
        dot_four_lines(block + LINE / 2 * half + 4 * LINE, rounded + 16, columns, dot, count);
        __m256 scale = halves_at(block + 8 * LINE + BAND * half);
        for (int m = 0; m < count; m++) {
            __m256 sum = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(dot[m]));
            total[m] = _mm256_fmadd_ps(_mm256_set1_ps(scales[(size_t)m * groups + g]), sum, total[m]);
        }
    }
    for (int m = 0; m < count; m++)
        _mm256_storeu_ps(out[m] + HALF * half, total[m]);
}

INLINE __m256 bytes_at(const uint8_t *bytes)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)bytes)));
}

/* partial[m] += one group of 32 columns; `lines` and `factors` begin at the rows of this half of the band. */
INLINE void s8x16_group(const uint8_t *lines, const uint8_t *factors, const int8_t *rounded, const float *scales,
                        size_t columns, __m256 *partial, const int count)
{
    __m256 products[WIDTH];
    for (int part = 0; part < 2; part++) {
        __m256i dot[WIDTH];
        __m256 factor = bytes_at(factors + BAND * part);
        for (int m = 0; m < count; m++)
            dot[m] = _mm256_setzero_si256();
        dot_four_lines(lines + 4 * LINE * part, rounded + 16 * part, columns, dot, count);
        for (int m = 0; m < count; m++) {
            __m256 product = _mm256_cvtepi32_ps(dot[m]);
            products[m] = part ? _mm256_fmadd_ps(factor, product, products[m]) : _mm256_mul_ps(factor, product);
        }
    }
    for (int m = 0; m < count; m++)
        partial[m] = _mm256_fmadd_ps(_mm256_set1_ps(scales[(size_t)m * (columns / GROUP)]), products[m], partial[m]);
}

INLINE void s8x16_tile(const struct matrix *w, int32_t band, const struct input *in, int32_t first, float (*out)[BAND],
                       const int count, const int half)
{
    const size_t columns = (size_t)w->columns, groups = columns / GROUP;
    const int8_t *rounded = in->rounded + (size_t)first * columns;
    const float *scales = in->scales + (size_t)first * groups;
    const uint8_t *block = band_of(w, band, SUPERGROUP, S8X16_BYTES);
    __m256 total[WIDTH];
    for (int m = 0; m < count; m++)
        total[m] = _mm256_setzero_ps();
    for (size_t g = 0; g < groups; block += S8X16_BYTES) {
        __m256 partial[WIDTH], scale = halves_at(block + S8X16_BYTES - 2 * BAND + BAND * half);
        for (int m = 0; m < count; m++)
            partial[m] = _mm256_setzero_ps();
        if (!half)
            prefetch(block, S8X16_BYTES);
        for (int i = 0; i < SUPERGROUP / GROUP; i++, g++)
            s8x16_group(block + 8 * LINE * i + LINE / 2 * half, block + 64 * LINE + 2 * BAND * i + HALF * half,
                        rounded + GROUP * g, scales + g, columns, partial, count);
        for (int m = 0; m < count; m++)
            total[m] = _mm256_fmadd_ps(scale, partial[m], total[m]);
    }
    for (int m = 0; m < count; m++)
        _mm256_storeu_ps(out[m] + HALF * half, total[m]);
}

/* Eight weights of a dense row, as fp32. */
INLINE __m256 dense_at(const char *weights, const int bf16)
{
    if (!bf16)
        return _mm256_loadu_ps((const float *)weights);
    __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)weights));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}

/* The 16 numbers, added in the order of sum_of_lanes in matmul_portable.c. */
INLINE float sum_of_lanes(__m256 lower, __m256 upper)
{
    __m256 eight = _mm256_add_ps(lower, upper);
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

/* lanes[0..1] += the last n < 16 columns, and nothing else, not even zeros: -0 + 0 is 0. */
INLINE void add_tail(const char *weights, const float *x, size_t n, __m256 *lanes, const int bf16)
{
    char some[16 * sizeof(float)] = {0};
    float part[16] = {0}, count[16];
    memcpy(some, weights, n * (bf16 ? 2 : 4));
    memcpy(part, x, n * sizeof *x);
    for (int i = 0; i < 16; i++)
        count[i] = (float)i;
    for (int h = 0; h < 2; h++) {
        __m256 eight = dense_at(some + h * (bf16 ? 16 : 32), bf16);
        __m256 sum = _mm256_fmadd_ps(eight, _mm256_loadu_ps(part + 8 * h), lanes[h]);
        __m256 there = _mm256_cmp_ps(_mm256_loadu_ps(count + 8 * h), _mm256_set1_ps((float)n), _CMP_LT_OQ);
        lanes[h] = _mm256_blendv_ps(lanes[h], sum, there);
    }
}

/* `height` rows at a time; a row that the matrix lacks is the last one again. */
INLINE void dense_tile(const struct matrix *w, int32_t band, const struct input *in, int32_t first, float (*out)[BAND],
                       const int count, const int height, const int bf16)
{
    const size_t size = bf16 ? 2 : 4, columns = (size_t)w->columns, whole = columns / 16 * 16;
    const size_t start = (size_t)band * BAND, last = (size_t)w->rows - 1;
    const float *x = in->dense + first * in->stride;
    for (size_t r = 0; r < BAND && start + r <= last; r += (size_t)height) {
        __m256 sums[4][WIDTH][2];
        const char *rows[4];
        for (int i = 0; i < height; i++) {
            size_t row = start + r + (size_t)i;
            rows[i] = (const char *)w->data + (row < last ? row : last) * columns * size;
            for (int m = 0; m < count; m++)
                sums[i][m][0] = sums[i][m][1] = _mm256_setzero_ps();
        }
        for (size_t k = 0; k < whole; k += 16)
            for (int h = 0; h < 2; h++)
                for (int i = 0; i < height; i++) {
                    __m256 weights = dense_at(rows[i] + (k + 8 * (size_t)h) * size, bf16);
                    for (int m = 0; m < count; m++)
                        sums[i][m][h] = _mm256_fmadd_ps(weights, _mm256_loadu_ps(x + m * in->stride + k + 8 * h),
                                                        sums[i][m][h]);
                }
        for (int i = 0; i < height; i++)
            for (int m = 0; m < count; m++) {
                if (whole < columns)
                    add_tail(rows[i] + whole * size, x + m * in->stride + whole, columns - whole, sums[i][m], bf16);
                out[m][r + (size_t)i] = sum_of_lanes(sums[i][m][0], sums[i][m][1]);
            }
    }
}

/* CALL(n) with a constant n, until all `count` vectors are done. */
#define KERNEL(NAME, CALL)                                                                               \
    TARGET static void NAME(const struct matrix *w, int32_t band, const struct input *in, int32_t first, \
                            int32_t count, float (*out)[BAND])                                           \
    {                                                                                                    \
        for (; count >= 4; count -= 4, first += 4, out += 4)                                             \
            CALL(4);                                                                                     \
        if (count == 3)                                                                                  \
            CALL(3);                                                                                     \
        if (count == 2)                                                                                  \
            CALL(2);                                                                                     \
        if (count == 1)                                                                                  \
            CALL(1);                                                                                     \
    }

#define U4_HALF(n, half) unsigned_tile(w, band, in, first, out, n, half, U4_BYTES)
#define U4(n) (U4_HALF(n, 0), U4_HALF(n, 1))
#define U5_HALF(n, half) unsigned_tile(w, band, in, first, out, n, half, U5_BYTES)
#define U5(n) (U5_HALF(n, 0), U5_HALF(n, 1))
#define S8(n) (s8_tile(w, band, in, first, out, n, 0), s8_tile(w, band, in, first, out, n, 1))
#define S8X16(n) (s8x16_tile(w, band, in, first, out, n, 0), s8x16_tile(w, band, in, first, out, n, 1))
#define F32(n) dense_tile(w, band, in, first, out, n, n == 1 ? 4 : n == 2 ? 2 : 1, 0)
#define BF16(n) dense_tile(w, band, in, first, out, n, n == 1 ? 4 : n == 2 ? 2 : 1, 1)

KERNEL(avx2_f32, F32)
KERNEL(avx2_bf16, BF16)
KERNEL(avx2_u4, U4)
KERNEL(avx2_u5, U5)
KERNEL(avx2_s8, S8)
KERNEL(avx2_s8x16, S8X16)

const struct kernels avx2_kernels = {
    avx2_round, {avx2_f32, avx2_bf16, avx2_u4, avx2_u5, avx2_s8, avx2_s8x16}, {NULL}, no_pairs};

#endif
