/* The kernels for x86-64 with AVX2, FMA and F16C: two registers hold 16 numbers.

   vpmaddubsw multiplies unsigned bytes with signed ones and adds two products in 16 bits, saturating.  Four such sums
   fit with weights below 32: 4 * 2 * 31 * 127 < 2^15.  Of signed weights the magnitude is taken, and the sign is given
   to the vector's number: 2 * 128 * 127 < 2^15.  So every integer is exact.  */

#include "kernels.h"

#if X86_KERNELS

#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#include "vector.h"

#define ISA(NAME) avx2_##NAME
#define LEVEL LEVEL_AVX2
#define VECTORS 4
#define DENSE 4
#define DENSE_SUMS 4 /* 8 registers */
#define QUERIES_OF_VALUES 1

typedef struct { __m256 low, high; } vf;
typedef struct { __m256i low, high; } vi;
typedef vi vb;

INLINE vf vall(float x) { return (vf){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }

INLINE vf vload_some(const float *x, int32_t n)
{
    float some[16] = {0};
    if (n < 16) x = memcpy(some, x, (size_t)(n < 0 ? 0 : n) * sizeof *x);
    return (vf){_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)};
}

INLINE void vstore_some(float *x, vf y, int32_t n)
{
    float some[16], *to = n < 16 ? some : x;
    _mm256_storeu_ps(to, y.low);
    _mm256_storeu_ps(to + 8, y.high);
    if (n < 16) memcpy(x, some, (size_t)(n < 0 ? 0 : n) * sizeof *x);
}

INLINE vf vadd(vf x, vf y) { return (vf){_mm256_add_ps(x.low, y.low), _mm256_add_ps(x.high, y.high)}; }
INLINE vf vmul(vf x, vf y) { return (vf){_mm256_mul_ps(x.low, y.low), _mm256_mul_ps(x.high, y.high)}; }

INLINE vf vfma(vf x, vf y, vf z)
{
    return (vf){_mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high)};
}

INLINE vf vmax(vf x, vf y) { return (vf){_mm256_max_ps(x.low, y.low), _mm256_max_ps(x.high, y.high)}; }

INLINE vf vhalves(const uint8_t *numbers)
{
    const __m128i *at = (const __m128i *)numbers;
    return (vf){_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}

INLINE vf vint8(const uint8_t *numbers)
{
    __m128i bytes = _mm_loadu_si128((const __m128i *)numbers);
    return (vf){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}

INLINE __m256 widened(const uint16_t *numbers)
{
    __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)numbers));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}

INLINE vf vbf16_some(const uint16_t *numbers, int32_t n)
{
    uint16_t some[16] = {0};
    if (n < 16) numbers = memcpy(some, numbers, (size_t)n * sizeof *numbers);
    return (vf){widened(numbers), widened(numbers + 8)};
}

INLINE vb unsigned_line(const uint8_t *bytes)
{
    return (vb){_mm256_loadu_si256((const __m256i *)bytes), _mm256_loadu_si256((const __m256i *)(bytes + LINE / 2))};
}

INLINE vb signed_line(const uint8_t *bytes) { return unsigned_line(bytes); }

INLINE vb half_bytes(vb line, const int high)
{
    const __m256i mask = _mm256_set1_epi8(15);
    if (high) line = (vb){_mm256_srli_epi16(line.low, 4), _mm256_srli_epi16(line.high, 4)};
    return (vb){_mm256_and_si256(line.low, mask), _mm256_and_si256(line.high, mask)};
}

INLINE __m256i with_fifth(__m256i line, __m256i bits, const int place)
{
    bits = place < 4 ? _mm256_slli_epi16(bits, 4 - place) : _mm256_srli_epi16(bits, place - 4);
    return _mm256_or_si256(line, _mm256_and_si256(bits, _mm256_set1_epi8(16)));
}

INLINE vb with_fifth_bits(vb line, vb bits, const int place)
{
    return (vb){with_fifth(line.low, bits.low, place), with_fifth(line.high, bits.high, place)};
}

INLINE vi no_products(void) { return (vi){_mm256_setzero_si256(), _mm256_setzero_si256()}; }

/* sum + the sums of two numbers of 16 bits each */
INLINE __m256i add_pairs(__m256i sum, __m256i pairs)
{
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

/* The products of 16 columns of eight rows with one vector, added to `sum`. */
INLINE __m256i eight_rows(__m256i sum, const __m256i *lines, const __m256i *a, const int is_signed)
{
    __m256i pairs = _mm256_setzero_si256();
    for (int j = 0; j < 4; j++) {
        if (is_signed)
            sum = add_pairs(sum, _mm256_maddubs_epi16(_mm256_abs_epi8(lines[j]), _mm256_sign_epi8(a[j], lines[j])));
        else
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(lines[j], a[j]));
    }
    return is_signed ? sum : add_pairs(sum, pairs);
}

INLINE void add_products(vi *dot, const vb *lines, const int8_t *a, size_t stride, const int count, const int bands,
                         const int is_signed)
{
    (void)bands; /* one */
    const __m256i low[4] = {lines[0].low, lines[1].low, lines[2].low, lines[3].low};
    const __m256i high[4] = {lines[0].high, lines[1].high, lines[2].high, lines[3].high};
    for (int m = 0; m < count; m++) {
        __m256i fours[4];
        for (int j = 0; j < 4; j++) {
            int32_t bytes;
            memcpy(&bytes, a + (size_t)m * stride + 4 * j, sizeof bytes);
            fours[j] = _mm256_set1_epi32(bytes);
        }
        dot[m] = (vi){eight_rows(dot[m].low, low, fours, is_signed), eight_rows(dot[m].high, high, fours, is_signed)};
    }
}

INLINE vf whole(vi dot, float sum, const int is_signed)
{
    (void)sum, (void)is_signed;
    return (vf){_mm256_cvtepi32_ps(dot.low), _mm256_cvtepi32_ps(dot.high)};
}

INLINE vf offset_of(vf scale) { return scale; }
INLINE vf scaled(vi dot, vf scale, vf offset) { (void)offset; return vmul(scale, whole(dot, 0, 0)); }

/* The numbers of a, and those of b, added so that four of each are left. */
INLINE __m256 two_quarters(vf a, vf b)
{
    __m256 x = _mm256_add_ps(a.low, a.high), y = _mm256_add_ps(b.low, b.high);
    return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
}

INLINE vf quarters(const vf *lanes) { return (vf){two_quarters(lanes[0], lanes[1]), two_quarters(lanes[2], lanes[3])}; }

INLINE __m256 sums_of_two(__m256 a, __m256 b, __m256 c, __m256 d)
{
    __m256 x = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
    __m256 y = _mm256_add_ps(_mm256_shuffle_ps(c, d, 0x44), _mm256_shuffle_ps(c, d, 0xee));
    return _mm256_add_ps(_mm256_shuffle_ps(x, y, 0x88), _mm256_shuffle_ps(x, y, 0xdd));
}

INLINE vf sums_of_quarters(const vf *fours)
{
    return (vf){sums_of_two(fours[0].low, fours[1].low, fours[2].low, fours[3].low),
                sums_of_two(fours[0].high, fours[1].high, fours[2].high, fours[3].high)};
}

#include "attend_loops.h"

#endif
